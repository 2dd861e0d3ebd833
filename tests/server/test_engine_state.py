"""What the engine's picture tells whom, and how often it is taken."""

import asyncio
import base64

import pytest

from jaxpaged.engine.picture import BLANK, CACHED, FIRST_OWNER, NULL
from server.auth import parse_key_line
from server.engine_state import FRESH_S, MAX_CELLS
from tests.server.test_auth import bearer

STATE = "/v1/engine/state"
LONG = {"prompt": "ABC", "max_tokens": 2000, "ignore_eos": True, "stream": True}
KEYS = tuple(
    parse_key_line(f"{name}:sk-{name}:{role}", "x")
    for name, role in (("root", "admin"), ("a", "user"), ("b", "user"), ("watch", "monitor"))
)


@pytest.fixture
async def busy(start):
    """A server that answers one request of each user, slowly."""
    server = await start(api_keys=KEYS)
    server.engine.before_step = lambda step: asyncio.run(asyncio.sleep(0.01))
    asked = [
        asyncio.create_task(server.post(LONG, headers=bearer(f"sk-{name}"))) for name in ("a", "b")
    ]
    while server.engine.load_size < 2:
        await asyncio.sleep(0.01)
    yield server
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def requests_seen_by(server, name: str) -> list[dict]:
    return (await server.get(STATE, headers=bearer(f"sk-{name}"))).body["requests"]


async def test_a_user_sees_others_only_as_pages_on_the_map(busy):
    seen = await requests_seen_by(busy, "a")
    own, other = sorted(seen, key=lambda request: request["id"] is None)
    assert own["id"].startswith("cmpl-")
    assert (own["prompt_tokens"], own["max_tokens"]) == (3, 2000)
    assert other.keys() == {"id", "owner", "state", "num_pages"}
    assert own["id"] not in [request["id"] for request in await requests_seen_by(busy, "b")]


async def test_an_admin_sees_all_ids_and_a_monitor_none(busy):
    ids = [request["id"] for request in await requests_seen_by(busy, "root")]
    assert len(set(ids)) == 2
    assert all(ids)
    assert [request["id"] for request in await requests_seen_by(busy, "watch")] == [None, None]


async def test_names_of_keys_are_told_to_nobody(busy):
    answer = await busy.get(STATE, headers=bearer("sk-root"))
    names = [key.key_id for key in KEYS] + [f'"{key.name}"' for key in KEYS]
    assert not [name for name in names if name.encode() in answer.raw]


async def test_the_map_says_what_every_page_holds(busy):
    state = (await busy.get(STATE, headers=bearer("sk-a"))).body
    owners = [FIRST_OWNER, FIRST_OWNER + 1]
    cells = [NULL, *owners, CACHED, CACHED, CACHED, *[BLANK] * 14]
    assert list(base64.b64decode(state["cells"])) == cells
    assert state["pages"] == {"blank": 14, "cached": 3, "pinned": 0, "shared": 0, "held": 2}
    assert state["load"]["num_running"] == 2


async def test_however_many_look_a_picture_is_taken_a_few_times_a_second(server):
    for _ in range(3):
        await asyncio.gather(*[server.get(STATE) for _ in range(10)])
    assert server.engine.num_pictures == 1
    await asyncio.sleep(FRESH_S + 0.05)
    await server.get(STATE)
    assert server.engine.num_pictures == 2


async def test_no_picture_is_taken_when_nobody_looks(server):
    await server.post({"prompt": "ABC", "max_tokens": 20})
    assert server.engine.num_pictures == 0


async def test_a_cell_stands_for_several_pages_of_a_large_pool(server):
    server.engine.num_pages = 5 * MAX_CELLS - 2
    state = (await server.get(STATE)).body
    cells = base64.b64decode(state["cells"])
    assert (state["pages_per_cell"], len(cells)) == (5, MAX_CELLS)
    assert (cells[0], cells[1], cells[-1]) == (CACHED, BLANK, BLANK), "what most of them hold"
    assert state["pages"]["blank"] == server.engine.num_pages - 4
