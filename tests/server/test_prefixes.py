"""Warm prefixes over HTTP: who may warm, see, use and drop them."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.remote import RemoteLLM
from server.app import create_app
from server.auth import parse_key_line
from server.listener import Listener
from tests.server.conftest import CHAT, COMPLETIONS, Reply
from tests.server.test_operator import until
from tests.support.models import byte_ids, write_model

PREFIXES = "/v1/cache/prefixes"
PAGE = 16
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "".join(chr(65 + i % 26) for i in range(50))  # three pages and two tokens
KEYS = [parse_key_line(f"{name}:sk-{name}:{role}", "") for name, role in (
    ("root", "admin"), ("one", "user"), ("two", "user"), ("watch", "monitor"))]  # fmt: skip


def config(folder: Path) -> EngineConfig:
    """Of 100 pages a sequence may need 32, so 67 may be pinned and 16 by one key."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    return config_from_keywords(
        model=str(write_model("S", folder)),
        chat_template=str(template),
        num_gpu_blocks_override=100,
        block_size=PAGE,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        compile_cache_dir="",
        warmup="lazy",
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    llm = AsyncLLM(build_engine(config(tmp_path_factory.mktemp("model"))))
    yield llm
    llm.close()


class Client:
    """Asks as one of the keys."""

    def __init__(self, session: aiohttp.ClientSession, url: str):
        self._session, self._url = session, url

    async def __call__(self, method: str, path: str, body=None, *, key: str = "one") -> Reply:
        headers = {"Authorization": f"Bearer sk-{key}"}
        async with self._session.request(
            method, self._url + path, json=body, headers=headers
        ) as reply:
            return Reply(reply.status, {}, await reply.read())

    async def warm(self, body, *, key: str = "one") -> Reply:
        return await self("POST", PREFIXES, body, key=key)

    async def cached(self, prompt, *, key: str, path: str = COMPLETIONS, **more) -> int:
        """How many tokens of a prompt need not be computed."""
        name = "messages" if path == CHAT else "prompt"
        body = {name: prompt, "max_tokens": 1, "temperature": 0} | more
        usage = (await self("POST", path, body, key=key)).body["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    async def ids(self, *, key: str) -> set[str]:
        return {prefix["id"] for prefix in (await self("GET", PREFIXES, key=key)).body["data"]}


async def client_of(engine) -> AsyncIterator[Client]:
    listening = socket.create_server(("127.0.0.1", 0))
    listener = await Listener.start(create_app(engine, KEYS), listening)
    async with aiohttp.ClientSession() as session:
        yield Client(session, f"http://127.0.0.1:{listening.getsockname()[1]}")
    await listener.close()


@pytest.fixture
async def ask(llm) -> AsyncIterator[Client]:
    await llm.control("reset_prefix_cache")
    async for client in client_of(llm):
        yield client


async def test_a_prefix_is_computed_once_and_found_by_its_key_alone(ask):
    reply = await ask.warm({"prompt": TEXT})
    assert (reply.status, reply.body["tokens"], reply.body["pages"]) == (200, 48, 3)
    assert reply.body["usage"]["prompt_tokens"] == 50
    again = await ask.warm({"prompt_token_ids": byte_ids(TEXT)})
    assert again.body["id"] == reply.body["id"]
    assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert [await ask.cached(TEXT + "!", key=key) for key in ("one", "two", "root")] == [48, 0, 0]


async def test_a_salt_of_the_client_separates_within_its_key(ask):
    await ask.warm({"prompt": TEXT, "cache_salt": "a"})
    salts = {"a": 48, "b": 0}
    for salt, found in salts.items():
        assert await ask.cached(TEXT + "!", key="one", cache_salt=salt) == found
    assert await ask.cached(TEXT + "!", key="two", cache_salt="a") == 0


async def test_an_admin_warms_for_all_and_nobody_else_does(ask):
    refused = await ask.warm({"prompt": TEXT, "shared": True})
    assert (refused.status, refused.error["param"]) == (403, "shared")
    reply = await ask.warm({"prompt": TEXT, "shared": True}, key="root")
    assert reply.body["shared"] is True
    for key in ("one", "two", "root"):
        assert await ask.cached(TEXT + "!", key=key, cache_salt="any") == 48
    assert await ask.ids(key="one") == set()


async def test_a_key_sees_and_drops_its_own_and_an_admin_all(ask, llm):
    mine = (await ask.warm({"prompt": TEXT})).body["id"]
    other = (await ask.warm({"prompt": TEXT}, key="two")).body["id"]
    assert mine != other
    assert [await ask.ids(key=key) for key in ("one", "two", "root")] == [
        {mine}, {other}, {mine, other}]  # fmt: skip
    for prefix_id in (other, "none"):
        reply = await ask("DELETE", f"{PREFIXES}/{prefix_id}")
        assert (reply.status, reply.error["param"]) == (404, "prefix_id")
    usage = llm.load.kv_cache_usage
    assert (await ask("DELETE", f"{PREFIXES}/{mine}")).body["deleted"] is True
    assert llm.load.kv_cache_usage == usage / 2  # with no step since
    assert (await ask("DELETE", f"{PREFIXES}/{other}", key="root")).status == 200
    assert await ask.ids(key="root") == set()
    assert llm.parts.engine.scheduler.pool.num_held == 0
    for method in ("GET", "POST"):
        assert (await ask(method, PREFIXES, key="watch")).status == 403


async def test_a_conversation_goes_on_after_what_was_warmed_of_it(ask):
    begun = [{"role": "system", "content": TEXT}]
    tokens = (await ask.warm({"messages": begun})).body["tokens"]
    assert tokens == 48  # with an opening of the answer it would be a page more
    messages = [*begun, {"role": "user", "content": "hello"}]
    assert await ask.cached(messages, key="one", path=CHAT) == tokens


async def test_one_key_cannot_pin_what_others_need(ask):
    for number in range(5):
        reply = await ask.warm({"prompt_token_ids": [number + 1] * 3 * PAGE})
        assert reply.status == 200
    reply = await ask.warm({"prompt_token_ids": [9] * 2 * PAGE})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert "allowed are 1 to 1" in reply.error["message"]
    assert "one API key may pin 25%" in reply.error["message"]
    assert (await ask.warm({"prompt_token_ids": [1] * 3 * PAGE})).status == 200
    assert (await ask.warm({"prompt_token_ids": [9] * 2 * PAGE}, key="two")).status == 200
    whole = [await ask.warm({"prompt_token_ids": [n] * 30 * PAGE}, key="root") for n in (1, 2)]
    assert [reply.status for reply in whole] == [200, 400]


async def test_warmings_at_once_pin_no_more_than_a_key_may(ask):
    bodies = [{"prompt_token_ids": [number + 1] * 6 * PAGE} for number in range(6)]
    replies = await asyncio.gather(*map(ask.warm, bodies))
    assert sorted(reply.status for reply in replies) == [200, 200, 400, 400, 400, 400]
    assert len(await ask.ids(key="one")) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "short"}, "prompt"),
        ({"prompt": TEXT, "prompt_token_ids": [1]}, "prompt"),
        ({"prompt": [TEXT, TEXT]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt_token_ids": [512] * 20}, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * 600}, "prompt"),
        ({"prompt": TEXT, "cache_salt": ""}, "cache_salt"),
        ({"prompt": TEXT, "cache_salt": "a", "shared": True}, "cache_salt"),
        ({"messages": [{"content": TEXT}]}, "messages[0].role"),
    ],
)
async def test_what_cannot_be_warmed_is_refused_by_its_field(ask, body, param):
    reply = await ask.warm(body, key="root")
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_client_that_leaves_and_a_reset_leave_nothing_pinned(ask, llm, monkeypatch):
    engine = llm.parts.engine
    monkeypatch.setattr(engine.steps, "on_step", lambda plan: time.sleep(0.05))
    task = asyncio.create_task(ask.warm({"prompt_token_ids": [3] * 400}, key="root"))
    await until(lambda: engine.scheduler.num_running)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not engine.has_work)
    assert await ask.ids(key="root") == set()
    await ask.warm({"prompt": TEXT})
    await llm.control("reset_prefix_cache")
    assert await ask.ids(key="root") == set()


@pytest.mark.slow
async def test_it_works_on_an_engine_in_another_process(tmp_path):
    engine = await RemoteLLM.start(config(tmp_path))
    try:
        async for ask in client_of(engine):
            prefix = (await ask.warm({"prompt": TEXT})).body
            assert (prefix["tokens"], prefix["shared"]) == (48, False)
            assert await ask.cached(TEXT + "!", key="one") == 48
            assert await ask.cached(TEXT + "!", key="two") == 0
            assert await ask.ids(key="one") == {prefix["id"]}
            reply = await ask.warm({"prompt_token_ids": [1] * 17 * PAGE})
            assert "one API key may pin 25%" in reply.error["message"]
            assert (await ask("DELETE", f"{PREFIXES}/{prefix['id']}")).status == 200
            assert await ask.ids(key="root") == set()
    finally:
        await asyncio.to_thread(engine.close)
