"""Prefixes computed ahead of their use."""

from contextlib import aclosing

from jaxpaged.core.cached_page import SHARED_SALT
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.pinned import PinnedPrefixes, WarmPrefix, prefix_id_of
from jaxpaged.core.request import Pin, Request
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import GenerationFailed, RequestError

# samples nothing: what is wanted are the pages
_WARMING = SamplingParams(
    max_tokens=0, temperature=0.0, detokenize=False, output_kind=OutputKind.FINAL_ONLY
)
ROOM_IS_GONE = "the prefix was computed, but others took the room to pin it: drop some"


def warming_request(
    inputs: InputProcessor, prompt: Prompt, *, cache_salt: str, shared: bool
) -> Request:
    """A request that samples nothing and leaves its prompt's full pages pinned.

    Raises:
        RequestError: the prompt cannot be served.
    """
    _, token_ids = inputs.encode(prompt)
    salt = SHARED_SALT if shared else cache_salt
    pin = Pin(prefix_id_of(token_ids, salt))
    return inputs.request(token_ids, _WARMING, cache_salt=salt, pin=pin)


def warmed(pinned: PinnedPrefixes, request: Request) -> WarmPrefix:
    """What a warming request that has ended left.

    Raises:
        RequestError: others took the room meanwhile.
    """
    prefix = pinned.get(request.pin.prefix_id) if request.pin else None
    if prefix is None:
        raise RequestError(ROOM_IS_GONE)
    return prefix


async def compute_prefix(
    engine: ServedEngine,
    token_ids: list[int],
    request_id: str,
    pin: Pin,
    *,
    salt: str,
    key_name: str,
) -> RequestOutput:
    """Compute a prompt and pin it as asked, in any engine; being cancelled aborts it.

    Whether it found room is told by the engine's `control("warm_prefixes")`.

    Raises:
        RequestError: it cannot be served, or there is no room to pin it.
        GenerationFailed: the model failed on it.
    """
    prompt = {"prompt_token_ids": token_ids}
    answers = engine.generate(
        prompt, _WARMING, request_id, cache_salt=salt, key_name=key_name, pin=pin
    )
    async with aclosing(answers):
        output = await anext(answers)
    if output.outputs[0].finish_reason == "error":
        raise GenerationFailed(output.error or "the model failed on this request")
    return output
