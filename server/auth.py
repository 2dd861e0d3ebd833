"""API keys: every route is guarded but the few that are named here."""

import hashlib
import hmac
from collections.abc import Sequence

from aiohttp import web

from server.errors import Handler, HttpError

OPEN_ROUTES = frozenset({"health", "health_live", "health_ready", "ping", "version"})
KEY_ID = web.RequestKey("key_id", str)


class KeyGuard:
    """Knows the digests of the keys, never the keys. Without any key everything is open."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._digests

    def identify(self, authorization: str) -> str | None:
        """A name for the key in an Authorization header, or None if it is no key of ours."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("utf-8", "surrogateescape"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex()[:16] if any(matches) and scheme.lower() == "bearer" else None


def _authorization(request: web.Request) -> str:
    """The header that carries the key; Anthropic's clients send it without a scheme."""
    key = request.headers.get("X-Api-Key")
    return request.headers.get("Authorization", "" if key is None else f"Bearer {key}")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def guard_middleware(guard: KeyGuard):
    """Refuse a request without a key, whatever its route; a route that does not exist too."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[KEY_ID] = ""
        route = request.match_info.route
        if guard.is_open or (route.name in OPEN_ROUTES and request.method != "OPTIONS"):
            return await handler(request)
        key_id = guard.identify(_authorization(request))
        if key_id is None:
            raise HttpError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        request[KEY_ID] = key_id
        return await handler(request)

    return check_key
