"""API keys: every route but a written few, whatever its spelling."""

import pytest

from jaxpaged.errors import ConfigError
from server.app import add_routes
from server.auth import OPEN_ROUTES, OPERATOR_ROUTES, KeyGuard, parse_key_line
from server.limits import Limits
from server.state import ServerLimits
from tests.server.conftest import COMPLETIONS

KEY = "sk-one"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def all_routes(server):
    for route in server.app.router.routes():
        resource = route.resource
        path = resource.canonical.replace("{model}", "S").replace("{name}", "app.js")
        yield route.method, path, resource.name


async def test_every_route_needs_a_key_but_the_written_few(start):
    server = await start(api_keys=(KEY, "sk-two"))
    seen = set()
    async for method, path, name in all_routes(server):
        reply = await server.send(method, path)
        open_to_all = name in OPEN_ROUTES
        assert (reply.status == 401) != open_to_all, (method, path, reply.status)
        seen.add(name)
    assert seen >= OPEN_ROUTES
    assert {"completions", "metrics", "tokenize", "load", "models"} <= seen - OPEN_ROUTES


async def test_both_keys_open_what_is_guarded(start):
    server = await start(api_keys=(KEY, "sk-two"))
    for key in (KEY, "sk-two"):
        reply = await server.post({"prompt": "ABC", "max_tokens": 1}, headers=bearer(key))
        assert reply.text == "D"
        assert (await server.get("/metrics", headers=bearer(key))).status == 200


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer ", "Bearer sk-on", "Bearer sk-one ,", "Basic sk-one", "sk-one",
        "Bearer s\u00e9-\u6570", "Bearer " + "x" * 8000, "Bearer sk-one sk-one",
    ],
)  # fmt: skip
async def test_what_is_no_key_is_a_401(start, header):
    server = await start(api_keys=(KEY,))
    headers = {} if header is None else {"Authorization": header}
    reply = await server.post({"prompt": "ABC"}, headers=headers)
    assert (reply.status, reply.error["type"]) == (401, "authentication_error")
    assert reply.headers["www-authenticate"] == "Bearer"


async def test_the_scheme_is_read_in_any_case(start):
    server = await start(api_keys=(KEY,))
    headers = {"Authorization": f"bearer  {KEY}"}
    assert (await server.get("/v1/models", headers=headers)).status == 200


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/models/", "/health/../v1/models", "/./v1/models", "/v1%2fmodels",
     "/v1/%6dodels", "/HEALTH", "/health/", "/metrics/", "/ping/../metrics", "/version;/metrics"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
async def test_odd_spellings_open_nothing(start, path, method):
    from yarl import URL

    server = await start(api_keys=(KEY,))
    url = URL(server.url + path, encoded=True)
    async with server.session.request(method, url) as response:
        assert response.status == 401


async def test_a_head_request_is_guarded_like_a_get(start):
    server = await start(api_keys=(KEY,))
    assert (await server.send("HEAD", "/metrics")).status == 401
    assert (await server.send("HEAD", "/health")).status == 200
    assert (await server.send("OPTIONS", COMPLETIONS)).status == 401


async def test_without_keys_everything_is_open(server):
    assert (await server.get("/metrics")).status == 200


def test_a_key_is_named_by_its_digest_and_never_by_itself():
    guard = KeyGuard([KEY])
    key = guard.identify(f"Bearer {KEY}")
    assert key == guard.identify(f"BEARER {KEY}")
    assert key is not None
    assert KEY not in str(vars(guard))
    assert KEY.encode().hex() not in str(vars(guard))
    assert guard.identify("Bearer other") is None


async def test_prefix_caches_of_keys_are_apart(start):
    server = await start(api_keys=(KEY, "sk-two"))
    salts, names = [], []
    for key, more in ((KEY, {}), ("sk-two", {}), (KEY, {"cache_salt": "x"}), (KEY, {})):
        body = {"prompt": "ABC", "max_tokens": 1} | more
        assert (await server.post(body, headers=bearer(key))).status == 200
        salts.append(server.engine.last_request.cache_salt)
        names.append(server.engine.last_request.key_name)
    assert len(set(salts)) == 3
    assert salts[0] == salts[3]
    assert all(salts)
    assert names[0] == names[2] == names[3] != names[1]
    assert all(names)


ROLES = {"root": "admin", "app": "user", "watch": "monitor"}


async def test_roles_open_what_they_are_for(start):
    keys = [parse_key_line(f"{name}:sk-{name}:{role}", "x") for name, role in ROLES.items()]
    server = await start(api_keys=tuple(keys), limits=ServerLimits(profile_dir=None))
    seen = {}
    async for method, path, name in all_routes(server):
        if name in OPEN_ROUTES or name in ("sleep", "start_profile"):
            continue
        for who in ROLES:
            reply = await server.send(method, path, headers=bearer(f"sk-{who}"))
            seen[who, name] = reply.status
            if reply.status == 403:
                assert method == "HEAD" or reply.error["type"] == "permission_error"
    refused = {who: {name for (w, name), status in seen.items() if status == 403 and w == who}
               for who in ROLES}  # fmt: skip
    assert refused["root"] == set()
    assert refused["app"] == OPERATOR_ROUTES - {"sleep", "start_profile"}
    assert {"completions", "generate", "wake_up", "tokenize"} <= refused["watch"]
    assert not {"metrics", "load", "models"} & refused["watch"]


def test_a_key_line_says_name_role_and_limits():
    key = parse_key_line("team a : sk-1 : monitor : requests=5, tokens=700", "x")
    assert (key.name, key.role, key.limits) == ("team a", "monitor", Limits(5, 700))
    assert parse_key_line("a:sk-1", "x").role == "user"
    assert parse_key_line("a:sk-1::tokens=7", "x").limits == Limits(None, 7)
    alone = parse_key_line("sk-1", "x")
    assert (alone.digest, alone.role) == (parse_key_line("a:sk-1", "x").digest, "user")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a:sk-1:root", "role 'root'"),
        ("a:sk-1:user:requests=x", "limit 'requests=x'"),
        ("a:sk-1:user:words=1", "limit 'words=1'"),
        (":sk-1", "lacks a name"),
        ("a:", "lacks a name or a key"),
        ("a:b:c:d:e", "5 fields"),
    ],
)
def test_a_key_line_that_cannot_be_read_is_named_and_not_shown(line, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_key_line(line, "--api-key-file line 3")
    assert "line 3" in str(caught.value)
    assert "sk-1" not in str(caught.value)


def test_every_route_has_a_name():
    from aiohttp import web

    router = web.UrlDispatcher()
    add_routes(router)
    assert all(route.resource.name for route in router.routes())
