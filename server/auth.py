"""API keys: every route is guarded but the few that are named here."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from aiohttp import web

from jaxpaged.errors import ConfigError
from server.errors import Handler, HttpError
from server.limits import NO_LIMITS, Limits

type Role = Literal["admin", "user", "monitor"]

OPEN_ROUTES = frozenset({
    "health", "health_live", "health_ready", "ping", "version", "page", "page_file",
})  # fmt: skip
# what a role may use: an admin all, a monitor these, a user all but the operator's
MONITOR_ROUTES = frozenset({
    "metrics", "load", "models", "model", "is_sleeping", "engine_state",
})  # fmt: skip
OPERATOR_ROUTES = frozenset({
    "metrics", "load", "sleep", "wake_up", "is_sleeping", "reset_prefix_cache", "start_profile",
    "stop_profile", "abort_requests",
})  # fmt: skip
ROLES = get_args(Role.__value__)


@dataclass(frozen=True)
class ApiKey:
    """A key by its digest; the key itself is kept nowhere."""

    name: str
    digest: bytes
    role: Role = "admin"
    limits: Limits = NO_LIMITS

    @classmethod
    def of(cls, key: str) -> "ApiKey":
        """A key from the command line: it may do everything."""
        digest = _digest(key.encode("utf-8", "surrogateescape"))
        return cls(digest.hex()[:8], digest)

    @property
    def key_id(self) -> str:
        """Names the key's prefix cache and its share of the engine."""
        return self.digest.hex()[:16]

    def may_use(self, route: str) -> bool:
        if self.role == "monitor":
            return route in MONITOR_ROUTES
        return self.role == "admin" or route not in OPERATOR_ROUTES


KEY_ID = web.RequestKey("key_id", str)
KEY = web.RequestKey("api_key", ApiKey)


class KeyGuard:
    """Knows the digests of the keys. Without any key everything is open."""

    def __init__(self, keys: Sequence[str | ApiKey]):
        self._keys = [ApiKey.of(key) if isinstance(key, str) else key for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._keys

    def key_of(self, key_id: str) -> ApiKey | None:
        """The key that has an id now; it may have been taken away."""
        return next((key for key in self._keys if key.key_id == key_id), None)

    def identify(self, authorization: str) -> ApiKey | None:
        """The key in an Authorization header, or None if it is no key of ours."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("utf-8", "surrogateescape"))
        # all are compared, so that the time tells nothing
        matches = [key for key in self._keys if hmac.compare_digest(given, key.digest)]
        return matches[0] if matches and scheme.lower() == "bearer" else None


def parse_key_line(line: str, where: str) -> ApiKey:
    """A line of --api-key-file: the key alone, or `name:key:role:limits`.

    Raises:
        ConfigError: what cannot be read; `where` names the place, the key is not shown.
    """
    parts = line.split(":")
    if len(parts) == 1:
        key, role, limits = ApiKey.of(line), "user", ""
        return ApiKey(key.name, key.digest, role, _limits(limits, where))
    if len(parts) > 4:
        raise ConfigError(f"{where} has {len(parts)} fields: name:key:role:limits is at most 4")
    name, key, role, limits = (*map(str.strip, parts), "", "")[:4]
    if not name or not key:
        raise ConfigError(f"{where} lacks a name or a key: write name:key:role:limits")
    role = role or "user"
    if role not in ROLES:
        raise ConfigError(f"{where} has the role {role[:40]!r}, allowed are {', '.join(ROLES)}")
    return ApiKey(name, _digest(key.encode()), cast("Role", role), _limits(limits, where))


def _limits(text: str, where: str) -> Limits:
    """`requests=60,tokens=100000`: each a minute, either may be left out."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in ("requests", "tokens") or not number.isdigit() or not int(number):
            raise ConfigError(
                f"{where} has the limit {part[:40]!r}: write requests=NUMBER,tokens=NUMBER"
            )
        found[name] = int(number)
    return Limits(found.get("requests"), found.get("tokens"))


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
        name = route_name(request)
        if guard.is_open or (name in OPEN_ROUTES and request.method != "OPTIONS"):
            return await handler(request)
        key = guard.identify(_authorization(request))
        if key is None:
            raise HttpError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        request[KEY_ID], request[KEY] = key.key_id, key
        if not key.may_use(name):
            raise HttpError(403, f"keys of the role {key.role} may not use this endpoint")
        return await handler(request)

    return check_key


def is_admin(request: web.Request) -> bool:
    """Without keys everybody is."""
    return KEY not in request or request[KEY].role == "admin"


def route_name(request: web.Request) -> str:
    """The route's name, the same with and without --root-path; empty for no route."""
    return (request.match_info.route.name or "").removesuffix(".root")
