"""A server with a folder for files and batches, and OpenAI's client for it."""

import json

import openai
import pytest

from server.auth import ApiKey
from server.batching.store import BatchStore
from tests.server.conftest import COMPLETIONS, Running

ONE, TWO = (ApiKey.of(key) for key in ("one", "two"))
KEYS = (*(ApiKey(key.name, key.digest, "user") for key in (ONE, TWO)), ApiKey.of("root"))


def line(name: str, url: str = COMPLETIONS, **body) -> dict:
    body = {"prompt": "ABC", "max_tokens": 3, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(*lines: dict) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture
def serve(start, tmp_path):
    """Start a server over the same folder; its file limit and that of a key may be given."""

    async def serve_one(max_file=10**6, max_key=10**7, **options) -> Running:
        return await start(store=BatchStore(tmp_path / "batches", max_file, max_key), **options)

    return serve_one


@pytest.fixture
async def client_of():
    made: list[openai.AsyncOpenAI] = []

    def make(server: Running, key: str = "none") -> openai.AsyncOpenAI:
        made.append(openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0))
        return made[-1]

    yield make
    for client in made:
        await client.close()
