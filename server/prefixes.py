"""/v1/cache/prefixes: prompts that are computed once, whose pages stay in the cache."""

import uuid
from typing import Any

import msgspec
from aiohttp import web

from jaxpaged.core.cached_page import SHARED_SALT
from jaxpaged.core.params import check_ids
from jaxpaged.core.pinned import prefix_id_of
from jaxpaged.core.request import Pin
from jaxpaged.engine.prefixes import ROOM_IS_GONE, compute_prefix
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import RequestError
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.params import salt_of
from jaxpaged.openai.prompts import completion_prompts, encode_chat
from jaxpaged.openai.schema import PrefixRequest, decode_body
from server.auth import KEY_ID, is_admin
from server.bodies import read_body
from server.errors import HttpError
from server.state import SERVER

_PREFIX = msgspec.json.Decoder(PrefixRequest)
_KIND = "cache.prefix"


async def warm(request: web.Request) -> web.Response:
    """Compute a prompt and pin its full pages. A client that leaves ends it."""
    server, key_id = request.app[SERVER], request[KEY_ID]
    with server.work(request) as usage:
        body = decode_body(await read_body(request), _PREFIX)
        server.check_model(body.model)
        salt = _salt(body, key_id, may_share=is_admin(request))
        token_ids = await _token_ids(body, server.engine)
        share = 1.0 if is_admin(request) else server.limits.warm_prefix_share
        pin = Pin(prefix_id_of(token_ids, salt), share)
        with server.open_id(f"prefix-{uuid.uuid4().hex}") as request_id:
            output = await compute_prefix(
                server.engine, token_ids, request_id, pin, salt=salt, key_name=key_id
            )
        usage.add_prompt(len(token_ids), output.num_cached_tokens)
        found = next((p for p in await _seen(request) if p["id"] == pin.prefix_id), None)
        if found is None:
            raise RequestError(ROOM_IS_GONE)
        return _json(_shown(found) | {"usage": usage.fields()})


async def listed(request: web.Request) -> web.Response:
    return _json({"object": "list", "data": [_shown(prefix) for prefix in await _seen(request)]})


async def drop(request: web.Request) -> web.Response:
    prefix_id, engine = request.match_info["prefix_id"], request.app[SERVER].engine
    is_seen = any(prefix["id"] == prefix_id for prefix in await _seen(request))
    if not is_seen or not await engine.control("drop_prefix", prefix_id):
        raise HttpError(
            404,
            f"no warm prefix {prefix_id[:200]!r} of this key; GET /v1/cache/prefixes lists them",
            param="prefix_id",
        )
    return _json({"id": prefix_id, "object": _KIND, "deleted": True})


async def _seen(request: web.Request) -> list[dict[str, Any]]:
    """The prefixes that this key may know of: its own, or all."""
    prefixes = await request.app[SERVER].engine.control("warm_prefixes")
    return [p for p in prefixes if is_admin(request) or p["key_name"] == request[KEY_ID]]


def _shown(prefix: dict[str, Any]) -> dict[str, Any]:
    return {"id": prefix["id"], "object": _KIND} | prefix


def _salt(body: PrefixRequest, key_id: str, *, may_share: bool) -> str:
    """Whose requests will find it."""
    salt = salt_of(body, key_id)
    if not body.shared:
        return salt
    if not may_share:
        raise HttpError(
            403,
            "shared is true: only keys of the role admin may warm a prefix for all",
            param="shared",
        )
    if body.cache_salt is not None:
        raise RequestError(
            "shared is true, so all find it whatever their salt: leave cache_salt out",
            param="cache_salt",
        )
    return SHARED_SALT


async def _token_ids(body: PrefixRequest, engine: ServedEngine) -> list[int]:
    given = {name for name in ("prompt", "messages", "prompt_token_ids") if getattr(body, name)}
    if len(given) != 1:
        raise RequestError(
            f"{' and '.join(sorted(given)) or 'nothing'} given: give one of prompt, messages and "
            "prompt_token_ids",
            param="prompt",
        )
    if body.messages is not None and "messages" in given:
        if body.add_generation_prompt is None:
            body.add_generation_prompt = False  # the conversation goes on otherwise
        return (await encode_chat(body, engine, body.tools))["prompt_token_ids"]
    if body.prompt_token_ids:
        check_ids("prompt_token_ids", body.prompt_token_ids, engine.vocab)
        return body.prompt_token_ids
    prompts = completion_prompts(body.prompt, 1, engine, 0)
    if len(prompts) > 1:
        raise RequestError("prompt is a list: warm one prefix at a time", param="prompt")
    return (await engine.encode(prompts[0]))[1]


def _json(fields: dict[str, Any]) -> web.Response:
    return web.Response(body=encode(fields), content_type="application/json")
