"""Code of the operator's own round every request: `--middleware module.name`."""

import importlib
import inspect

from aiohttp import web
from aiohttp.typedefs import Middleware

from jaxpaged.errors import ConfigError


def own_middleware(name: str) -> Middleware:
    """The coroutine function `async def name(request, handler)` of a module that Python finds.

    It comes before the key is checked and may answer, refuse by raising `server.errors.HttpError`,
    or return what `await handler(request)` gives.

    Raises:
        ConfigError: there is none of that name.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--middleware {name} cannot be imported: {error}") from None
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"--middleware {name} must be a coroutine function of two: request and handler"
        )
    return web.middleware(found)
