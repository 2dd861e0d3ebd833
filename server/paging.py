"""Lists that come in pages, as OpenAI's clients ask for them."""

import re
from typing import Any, Literal

from aiohttp import web

from jaxpaged.errors import RequestError

MAX_PAGE, PAGE = 100, 20
ID = re.compile(r"[a-z]{1,8}[-_][0-9a-f]{32}")  # of what may be listed

type Order = Literal["asc", "desc"]


def page_asked(request: web.Request) -> tuple[str | None, int]:
    """`after` and `limit` of a list."""
    after, limit = request.query.get("after"), request.query.get("limit", str(PAGE))
    if after is not None and not ID.fullmatch(after):
        raise not_after(after)
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and int(limit)):
        raise RequestError(f"limit must be 1 to {MAX_PAGE}", param="limit")
    return after, min(int(limit), MAX_PAGE)


def order_asked(request: web.Request) -> Order:
    order = request.query.get("order", "desc")
    if order != "asc" and order != "desc":
        raise RequestError("order must be asc or desc", param="order")
    return order


def not_after(given: str) -> RequestError:
    return RequestError(f"after: there is no {given[:100]!r}", param="after")


def page_of(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of `limit` items; one more than these tells that there are more."""
    data = items[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > limit,
    }
