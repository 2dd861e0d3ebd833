"""Seeded nonsense on every route of a running server: `python -m benchmarks.fuzz --url URL`.

No answer may be a 5xx or break off, every error must have OpenAI's shape, and a canary request must
give the same token ids after each hundred bodies. Exit 1 where something is wrong.
"""

import argparse
import asyncio
import json
import random
from typing import Any
from urllib.parse import quote

import aiohttp

SAY = {"messages": [{"role": "user", "content": "ABC"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, "a"]}}}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "ABC", "max_tokens": 2},
        {
            "prompt": ["A", "B"],
            "n": 2,
            "max_tokens": 2,
            "logprobs": 2,
            "echo": True,
            "stream": True,
        },
        {"prompt": [32, 33], "logit_bias": {"35": -1}, "stop": ["x"], "bad_words": ["y"]},
        {"prompt": "A", "use_beam_search": True, "n": 2, "max_tokens": 2},
    ],
    "/v1/chat/completions": [
        SAY,
        SAY | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
        SAY | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        SAY | {"response_format": SCHEMA, "max_tokens": 9},
        SAY | {"structured_outputs": {"regex": "[ab]{2}"}, "max_tokens": 9},
    ],
    "/v1/messages": [SAY, SAY | {"stream": True, "system": "S", "stop_sequences": ["x"]}],
    "/v1/messages/count_tokens": [{"messages": SAY["messages"]}],
    "/v1/responses": [{"input": "ABC", "max_output_tokens": 2}, {"input": "A", "stream": True}],
    "/inference/v1/generate": [{"token_ids": [32], "sampling_params": {"max_tokens": 2}}],
    "/inference/v1/abort_requests": [{"request_ids": ["a"]}],
    "/tokenize": [{"prompt": "ABC", "return_token_strs": True}, {"messages": SAY["messages"]}],
    "/detokenize": [{"tokens": [32]}],
    "/v1/cache/prefixes": [{"prompt": "ABC"}],
}
# these put the engine to sleep or write to the disk
LEFT_OUT = ("/sleep", "/wake_up", "/start_profile", "/stop_profile")
ATOMS = [
    None, True, False, 0, 1, -1, 2, 3.5, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**40, "",
    "a", "0", "\x00", "\u2028", "\U0001fae0", "\ud800", "x" * 3000, "{{ 7 }}", "</s>", "../../etc",
    "text", "user", "auto", "required", "json_schema", "(a+)+$", "[", "http://127.0.0.1:1/x.png",
]  # fmt: skip
KEYS = [
    "", "0", "512", "type", "text", "role", "content", "include_usage", "function", "x\ny", "name",
    "parameters", "input", "json", "regex", "grammar", "structural_tag", "$ref", "enum", "tools",
    "schema", "image_url",
]  # fmt: skip
CANARY = {"prompt": "ABC", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
CANARY_EVERY = 100
SHAPE = {"message", "type", "param", "code"}


def nonsense(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.random()
    if depth > 3 or kind < 0.7:
        return rng.choice(ATOMS)
    size = rng.randrange(4)
    if kind < 0.85:
        return [nonsense(rng, depth + 1) for _ in range(size)]
    return {rng.choice(KEYS): nonsense(rng, depth + 1) for _ in range(size)}


def spoilt(rng: random.Random, value: Any) -> Any:
    """`value` with nonsense somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return value | {key: spoilt(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], spoilt(rng, value[place]), *value[place + 1 :]]
    return nonsense(rng)


def request(rng: random.Random, routes: list[tuple[str, str, list[str]]]) -> tuple[str, str, bytes]:
    """A method, a path and a body."""
    method, path, names = rng.choice(routes)
    while "{" in path:
        before, _, rest = path.partition("{")
        after = rest.partition("}")[2]
        path = (
            before + quote(str(rng.choice(ATOMS[15:])).encode("utf-8", "replace"), safe="") + after
        )
    if method != "POST":
        return method, path, b""
    body = rng.choice(GOOD.get(path, [{}]))
    for _ in range(rng.randrange(1, 4)):
        if names and rng.random() < 0.6:
            body = body | {rng.choice(names): nonsense(rng)}
        else:
            body = spoilt(rng, body)
            body = body if isinstance(body, dict) else {"prompt": body}
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))] + rng.randbytes(3)
    return method, path, data


def fault(path: str, status: int, kind: str, data: bytes) -> str | None:
    """What is wrong with an answer."""
    if status >= 500:
        return f"status {status}"
    if status >= 400:
        try:
            body = json.loads(data)
        except ValueError:
            return "an error that is no JSON"
        return None if set(body.get("error", ())) == SHAPE else "an error of another shape"
    if kind == "text/event-stream":
        if b'"server_error"' in data:
            return "an error of the server in a stream"
        ends = (b"[DONE]\n\n", b"event: message_stop", b"event: response.", b"event: error")
        last = data.rstrip(b"\n").rpartition(b"\n\n")[2]
        return None if data.endswith(ends[0]) or last.startswith(ends[1:]) else "a stream broke off"
    return None


async def routes_of(session: aiohttp.ClientSession) -> list[tuple[str, str, list[str]]]:
    """(method, path, names of the body's fields) of every route in the server's own document."""
    async with session.get("/openapi.json") as reply:
        document = await reply.json()
    schemas, routes = document["components"]["schemas"], []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path.endswith(LEFT_OUT):
                continue
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            named = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
            weight = 10 if path in GOOD and method == "post" else 1
            routes += [(method.upper(), path, list(named.get("properties", ())))] * weight
    return routes


async def fuzz(url: str, count: int, seed: int, api_key: str = "", at_once: int = 8) -> list[str]:
    """Send `count` requests; what was wrong with the answers."""
    rng, wrong = random.Random(seed), list[str]()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
        routes, canary = await routes_of(session), await _canary(session)

        async def send(method: str, path: str, data: bytes) -> None:
            said = f"{method} {path} {data[:300]!r}"
            try:
                async with session.request(method, path, data=data or None) as reply:
                    answer = await reply.read()
                    found = fault(path, reply.status, reply.content_type, answer)
            except (aiohttp.ClientError, TimeoutError) as error:
                found, answer = f"{type(error).__name__}: {error}", b""
            if found is not None:
                wrong.append(f"{found}: {said} -> {answer[:300]!r}")

        sent = 0
        while sent < count:
            size = min(CANARY_EVERY, count - sent)
            requests = [request(rng, routes) for _ in range(size)]
            for first in range(0, size, at_once):
                await asyncio.gather(*[send(*one) for one in requests[first : first + at_once]])
            sent += size
            if await _canary(session) != canary:
                wrong.append(f"the canary changed before request {sent}")
    return wrong


async def _canary(session: aiohttp.ClientSession) -> list[int]:
    async with session.post("/v1/completions", json=CANARY) as reply:
        return (await reply.json())["choices"][0]["token_ids"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    args = parser.parse_args()
    wrong = asyncio.run(fuzz(args.url, args.count, args.seed, args.api_key))
    for line in wrong[:20]:
        print(line)
    print(f"{args.count} requests with seed {args.seed}, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
