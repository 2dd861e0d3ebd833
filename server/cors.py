"""Pages of other origins: which may call, and the answer to their browsers' preflight requests."""

from collections.abc import Sequence

from aiohttp import web

from server.errors import Handler

MAX_AGE_S = 600
EXPOSED = ", ".join((
    "X-Request-Id", "Retry-After", "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens",
))  # fmt: skip


class Origins:
    """Allowed origins, `*` for any. Without any, no header is set and no preflight answered."""

    def __init__(self, allowed: Sequence[str]):
        self._allowed = frozenset(allowed)

    def headers(self, request: web.Request) -> dict[str, str]:
        """What lets the page read the answer; empty where it may not."""
        origin = request.headers.get("Origin")
        if origin is None or not self._allowed & {"*", origin}:
            return {}
        shown = "*" if "*" in self._allowed else origin
        return {
            "Access-Control-Allow-Origin": shown,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }

    def middleware(self):
        """Answers preflights, which never carry a key, before the guard sees them."""

        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            method = request.headers.get("Access-Control-Request-Method")
            if request.method != "OPTIONS" or method is None or not self.headers(request):
                return await handler(request)
            return web.Response(
                status=204,
                headers={
                    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
                    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-Id",
                    "Access-Control-Max-Age": str(MAX_AGE_S),
                },
            )

        return answer_preflight
