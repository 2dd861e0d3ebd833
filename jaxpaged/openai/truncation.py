"""truncate_prompt_tokens: a prompt over the limit is cut instead of refused."""

from typing import Any

from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import RequestError
from jaxpaged.openai.schema import SamplingFields

AS_MANY_AS_FIT = -1


async def truncated(
    body: SamplingFields, prompt: Any, max_tokens: int | None, engine: ServedEngine
) -> dict[str, Any]:
    """The prompt as token ids, no more than the body asks to keep; its end is kept by default.

    Raises:
        RequestError: a number of tokens that cannot be kept.
    """
    keep = body.truncate_prompt_tokens
    assert keep is not None
    if keep != AS_MANY_AS_FIT and not 1 <= keep <= engine.max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}, allowed are -1 (as many as fit) and 1 to "
            f"{engine.max_model_len}",
            param="truncate_prompt_tokens",
        )
    if keep == AS_MANY_AS_FIT:
        keep = max(1, engine.max_model_len - (1 if max_tokens is None else max_tokens))
    text, ids = await engine.encode(prompt)
    if len(ids) <= keep:
        return {"prompt": text, "prompt_token_ids": ids}
    return {"prompt_token_ids": ids[:keep] if body.truncation_side == "right" else ids[-keep:]}
