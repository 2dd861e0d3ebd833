"""The web page at /: static files that need no key. What it asks the server for needs one."""

from importlib.resources import files

from aiohttp import web

from server.errors import HttpError

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFiles:
    """The files in `server/page`, read once."""

    def __init__(self) -> None:
        self._files = {
            entry.name: entry.read_bytes()
            for entry in files("server").joinpath("page").iterdir()
            if entry.name.rpartition(".")[2] in _KINDS
        }

    async def index(self, request: web.Request) -> web.Response:
        return self._response("index.html")

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise HttpError(404, "the page has no such file")
        return self._response(name)

    def _response(self, name: str) -> web.Response:
        kind = _KINDS[name.rpartition(".")[2]]
        body = self._files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
