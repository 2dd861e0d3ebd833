"""Seeded nonsense on every route: never a 5xx, never an odd error, never a changed answer."""

import json
import random
from typing import Any

import pytest

from jaxpaged.anthropic.schema import MessagesRequest
from jaxpaged.openai.responses.schema import ResponsesRequest
from jaxpaged.openai.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from tests.server.conftest import CHAT, COMPLETIONS

BODIES = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/inference/v1/generate": GenerateRequest,
    "/inference/v1/abort_requests": AbortRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "ABC", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "ABC"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "ABC"}], "max_tokens": 2},
    "/v1/responses": {"input": "ABC", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [32], "sampling_params": {"max_tokens": 2}},
    "/inference/v1/abort_requests": {"request_ids": ["a"]},
    "/tokenize": {"prompt": "ABC"},
    "/detokenize": {"tokens": [32]},
}
ATOMS = [
    None, True, False, 0, 1, -1, 2, 3.5, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), "", "a", "0",
    "\x00", "\u2028", "\U0001fae0", "x" * 3000, "{{ 7 }}", "</s>", "../../etc", "text", "user",
]  # fmt: skip
KEYS = [
    "", "0", "512", "type", "text", "role", "content", "include_usage", "function", "x\ny", "name",
    "parameters", "input", "auto", "required",
]  # fmt: skip


def nonsense(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.7:
        return rng.choice(ATOMS)
    size = rng.randrange(4)
    if kind < 0.85:
        return [nonsense(rng, depth + 1) for _ in range(size)]
    return {rng.choice(KEYS): nonsense(rng, depth + 1) for _ in range(size)}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "count", [150, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_nonsense_is_refused_or_answered(start, path, count):
    server = await start(max_len=64)
    rng = random.Random(f"{path} {count}")
    names = BODIES[path].__struct_fields__
    for i in range(count):
        body = GOOD[path] | {
            name: nonsense(rng) for name in rng.choices(names, k=rng.randrange(1, 4))
        }
        data = json.dumps(body).encode()
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))] + rng.randbytes(3)
        reply = await server.send("POST", path, data=data)
        assert reply.status in (200, 400, 404), (data, reply.raw)
        if reply.status != 200:
            assert set(reply.error) == {"message", "type", "param", "code"}, data
            assert "\n" not in reply.error["message"] or "\\n" in data.decode("latin-1")
        if i % 50 == 49:
            assert (await server.post({"prompt": "ABC", "max_tokens": 3})).text == "DEF"
    assert not server.engine.has_work
