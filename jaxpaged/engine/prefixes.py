"""Prefixes computed ahead of their use."""

from dataclasses import replace

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.pinned import PinnedPrefixes, WarmPrefix, prefix_id_of
from jaxpaged.core.prefix_cache import SHARED_SALT
from jaxpaged.core.request import Request
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.errors import RequestError


def warming_request(
    inputs: InputProcessor, prompt: Prompt, *, cache_salt: str, shared: bool
) -> Request:
    """A request that samples nothing and leaves its prompt's full pages pinned.

    Raises:
        RequestError: the prompt cannot be served.
    """
    _, token_ids = inputs.encode(prompt)
    params = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
    salt = SHARED_SALT if shared else cache_salt
    request = inputs.request(token_ids, params, cache_salt=salt)
    return replace(request, pin_as=prefix_id_of(request))


def warmed(pinned: PinnedPrefixes, request: Request) -> WarmPrefix:
    """What a warming request that has ended left.

    Raises:
        RequestError: others took the room meanwhile.
    """
    prefix = pinned.get(request.pin_as)
    if prefix is None:
        raise RequestError("the prefix was computed, but others took the room to pin it: drop some")
    return prefix
