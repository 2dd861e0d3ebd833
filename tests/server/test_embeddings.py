"""Embeddings, scores and ranks over HTTP, beside a model that generates and alone."""

import asyncio
import base64
import re

import httpx
import numpy as np
import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer
from langchain_openai import OpenAIEmbeddings

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.engine.pooling.alone import NoGeneration
from jaxpaged.engine.pooling.threaded import AsyncPooling
from jaxpaged.openai import pooling as openai_pooling
from server.app import create_app
from server.batching.store import BatchStore
from tests.server.batching.conftest import line
from tests.server.batching.test_batches import ended, made, records
from tests.support.embedding import write_tiny

EMBED = "/v1/embeddings"
TEXTS = ["a b c", "b a", "x y z x y z x y z", ""]


@pytest.fixture(scope="module")
def pooling(tmp_path_factory):
    """A tiny encoder under the name `tiny-bert`; one program."""
    folder = write_tiny("bert", tmp_path_factory.mktemp("bert"), pooling="mean_tokens")
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q q "}}')
    config = config_from_keywords(
        model=str(folder),
        served_model_name="tiny-bert",
        max_model_len=32,
        max_num_batched_tokens=32,
        compile_cache_dir="",
        hf_overrides={"is_matryoshka": True},
    )
    engine = AsyncPooling.from_config(config)
    yield engine
    engine.close()


@pytest.fixture
async def server(start, pooling):
    return await start(pooling=pooling)


async def test_a_batch_embeds_its_lines_in_the_background(start, pooling, tmp_path, monkeypatch):
    add, places = pooling.parts.engine.add, list[bool]()

    def noted(*call, is_background: bool) -> None:
        places.append(is_background)
        add(*call, is_background=is_background)

    monkeypatch.setattr(pooling.parts.engine, "add", noted)
    server = await start(pooling=pooling, store=BatchStore(tmp_path, 10**6, 10**7))
    (wanted,) = await pooling.run([pooling.inputs.encode("a b c")])
    lines = [line("good", EMBED, input="a b c"), line("bad", EMBED, input=7)]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        found = await ended(client, await made(client, *lines, endpoint=EMBED))
        (good,) = await records(client, found.output_file_id)
        (bad,) = await records(client, found.error_file_id)
    assert places == [False, True]
    vector = good["response"]["body"]["data"][0]["embedding"]
    np.testing.assert_allclose(vector, wanted, atol=1e-6)
    assert (bad["custom_id"], bad["error"]["param"]) == ("bad", "input")


async def test_many_numbers_are_written_off_the_loop(server, monkeypatch):
    asked = {"input": ["a b", "c"]}
    usual, ways = (await server.post(asked, EMBED)).body["data"], []
    to_thread = asyncio.to_thread

    def noting(function, *given):
        ways.append(function)
        return to_thread(function, *given)

    monkeypatch.setattr(asyncio, "to_thread", noting)
    monkeypatch.setattr(openai_pooling, "MANY_NUMBERS", 1)
    assert (await server.post(asked, EMBED)).body["data"] == usual
    assert ways


async def test_a_live_text_does_not_wait_for_a_batch(pooling):
    engine = pooling.parts.engine
    batch = [pooling.inputs.encode("a b c d e f g h i j")] * 2000
    task = asyncio.create_task(pooling.run(batch, is_background=True))
    while not engine.num_waiting:
        await asyncio.sleep(0.001)
    (one,) = await pooling.run(batch[:1])
    assert engine.num_waiting > 500
    np.testing.assert_allclose(one, (await task)[-1], atol=1e-6)


async def test_the_openai_client_and_langchain_get_the_engine_s_vectors(server, pooling):
    wanted = await pooling.run([pooling.inputs.encode(text) for text in TEXTS])
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        # the client asks for base64 unless told otherwise, and decodes it
        answer = await client.embeddings.create(model="tiny-bert", input=TEXTS)
        plain = await client.embeddings.create(
            model="tiny-bert", input=[[2, 4, 5, 6, 3]], encoding_format="float"
        )
        short = await client.embeddings.create(model="tiny-bert", input="a b c", dimensions=8)
    got = np.array([item.embedding for item in answer.data], np.float32)
    np.testing.assert_array_equal(got, wanted)
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == (
        "tiny-bert", 5 + 4 + 11 + 2, 22,
    )  # fmt: skip
    np.testing.assert_allclose(plain.data[0].embedding, wanted[0], atol=1e-6)
    cut = wanted[0, :8] / np.linalg.norm(wanted[0, :8])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-6)
    async with httpx.AsyncClient() as http:
        chain = OpenAIEmbeddings(
            model="tiny-bert",
            base_url=server.url + "/v1",
            api_key="none",
            http_async_client=http,
            check_embedding_ctx_length=False,  # or it fetches a tokenizer of OpenAI's
        )
        documents = await chain.aembed_documents(TEXTS)
        np.testing.assert_allclose(documents, wanted, atol=1e-6)
        np.testing.assert_allclose(await chain.aembed_query(TEXTS[1]), wanted[1], atol=1e-6)


async def test_base64_is_float32_and_fields_that_change_the_text_do(server, pooling):
    reply = await server.post({"input": "a b", "encoding_format": "base64"}, EMBED)
    data = base64.b64decode(reply.body["data"][0]["embedding"])
    [wanted] = await pooling.run([pooling.inputs.encode("a b")])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), wanted)
    for body, ids in (
        ({"input": "a b", "prompt_name": "query"}, [2, 20, 20, 4, 5, 3]),
        ({"input": "a b", "add_special_tokens": False}, [4, 5]),
        ({"input": "a " * 50, "truncate_prompt_tokens": 4}, [2, 4, 4, 3]),
        ({"input": "a " * 50, "truncate_prompt_tokens": -1}, [2, *[4] * 30, 3]),
    ):
        reply = await server.post(body, EMBED)
        same = await server.post({"input": ids}, EMBED)
        assert reply.body["data"] == same.body["data"]
        assert reply.body["usage"]["prompt_tokens"] == len(ids)


async def test_scores_are_cosines_and_ranks_follow_them(server, pooling):
    vectors = await pooling.run([pooling.inputs.encode(text) for text in TEXTS])
    body = {"text_1": TEXTS[0], "text_2": TEXTS}
    score = await server.post(body, "/score")
    values = [item["score"] for item in score.body["data"]]
    np.testing.assert_allclose(values, vectors @ vectors[0], atol=1e-5)
    assert score.body["usage"]["prompt_tokens"] == 5 + 22
    assert (await server.post(body, "/v1/score")).body["data"] == score.body["data"]
    pairs = await server.post({"text_1": TEXTS[:2], "text_2": TEXTS[2:]}, "/score")
    assert len(pairs.body["data"]) == 2
    order = sorted(range(4), key=lambda i: -values[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
        body = {"query": TEXTS[0], "documents": documents, "top_n": 3}
        results = (await server.post(body, path)).body["results"]
        assert [item["index"] for item in results] == order[:3]
        assert results[0]["document"] == {"text": TEXTS[0]}
        assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("names", openai_pooling.SCORE_PAIRS)
async def test_the_texts_of_a_score_have_any_of_four_pairs_of_names(server, names):
    texts = (TEXTS[0], TEXTS)
    plain = await server.post(dict(zip(("text_1", "text_2"), texts, strict=True)), "/score")
    named = await server.post(dict(zip(names, texts, strict=True)), "/score")
    assert named.body["data"] == plain.body["data"]
    wrong = dict(zip(names, (["a", "b"], ["a"]), strict=True))
    assert f"{names[0]} has 2 texts" in (await server.post(wrong, "/score")).error["message"]


@pytest.mark.parametrize(
    ("body", "param", "given"),
    [
        ({}, "text_1", "nothing"),
        ({"text_1": "a"}, "text_2", "text_1"),
        ({"queries": "a"}, "documents", "queries"),
        ({"items": ["a"]}, "queries", "items"),
        ({"data_1": "a", "text_2": "b"}, "data_1", "data_1 and text_2"),
        ({"text_1": "a", "text_2": "b", "data_1": "a"}, "data_1", "data_1 and text_1 and text_2"),
    ],
)
async def test_a_score_without_one_pair_of_names_is_refused(server, body, param, given):
    reply = await server.post(body, "/score")
    assert (reply.status, reply.error["param"]) == (400, param)
    assert f"are given as {given}: give one of these pairs" in reply.error["message"]


BODIES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ABC"}]}),
    ("/v1/completions", {"prompt": "ABC", "input": None}),
    ("/v1/completions", {"prompt": "ABC", "stream": True}),
    (EMBED, {"input": "a b"}),
    ("/score", {"text_1": "a b", "text_2": ["a", "b"]}),
    ("/score", {"queries": "a b", "documents": ["a", "b"]}),
    ("/rerank", {"query": "a b", "documents": ["a", "b"]}),
    ("/v1/completions", {"prompt": 7}),
    ("/score", {"data_1": 7}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_invocation_is_answered_as_the_route_of_its_body(server, path, body):
    body = body | {"max_tokens": 3, "temperature": 0}
    invoked, direct = [await server.post(body, to) for to in ("/invocations", path)]
    assert (invoked.status, shown(invoked)) == (direct.status, shown(direct))


def shown(reply) -> bytes:
    """What is the same in equal answers: all but ids and times."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", reply.raw)


async def test_an_invocation_that_asks_for_nothing_is_refused_and_needs_a_key(start, pooling):
    server = await start(pooling=pooling, api_keys=("key",))
    headers = {"Authorization": "Bearer key"}
    for body in ({}, {"documents": ["a"]}, {"messages": None}, [], "x"):
        reply = await server.post(body, "/invocations", headers=headers)
        assert reply.status == 400
    assert (await server.post({"prompt": "A"}, "/invocations")).status == 401
    assert (await server.post({"prompt": "A"}, "/invocations", headers=headers)).status == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (EMBED, {"input": ["a", "b " * 31]}, "33 tokens, over the model's maximum context length"),
        (EMBED, {"input": "b" * 1000}, "length of 32 tokens can hold"),
        (EMBED, {"input": [[1, 64]]}, "input holds 64"),
        (EMBED, {"input": []}, "not empty"),
        (EMBED, {"input": ["a"] * 2049}, "input has 2049 texts, allowed are 2048"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 10_001}, "text_2 has 10001 texts"),
        (EMBED, {"input": ["a", 1.5]}, "input holds a float"),
        (EMBED, {"input": [[]]}, "a text without a token"),
        (EMBED, {"input": "a", "dimensions": 33}, "allowed are 1 to 32"),
        (EMBED, {"input": "a", "truncate_prompt_tokens": 40}, "allowed are -1 and 1 to 32"),
        (EMBED, {"input": "a", "prompt_name": "x"}, "this model knows query"),
        (EMBED, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBED, {"input": "a", "model": "S"}, "'S' does not support embeddings; 'tiny-bert' does"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1 has 2 texts and text_2 1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2 must be a text or a list"),
        ("/rerank", {"query": "a", "documents": [{"image": 1}]}, "documents must be texts"),
        ("/v1/completions", {"prompt": "a", "model": "tiny-bert"}, "'tiny-bert' does not generate"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_in_one_line(start, pooling, path, body, words):
    server = await start(pooling=pooling)
    reply = await server.post(body, path)
    assert (reply.status, words in reply.error["message"]) == (400, True), reply.error


async def test_both_models_are_listed_tokenised_and_counted(server):
    listed = {model["id"]: model for model in (await server.get("/v1/models")).body["data"]}
    assert listed["tiny-bert"]["max_model_len"] == 32
    assert len(listed) == 2
    reply = await server.post({"model": "tiny-bert", "prompt": "a b"}, "/tokenize")
    assert reply.body["tokens"] == [2, 4, 5, 3]
    assert (await server.post({"input": "a", "model": "other"}, EMBED)).status == 404
    text = (await server.get("/metrics")).raw.decode()
    assert text.count("# TYPE vllm:prompt_tokens_total counter") == 1
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny-bert"}' in text
    assert (await server.post({"prompt": "A"})).status == 200


async def test_a_server_without_an_embedding_model_says_so(start):
    server = await start()
    reply = await server.post({"input": "a"}, EMBED)
    assert "does not support embeddings: start with --embedding-model" in reply.error["message"]


async def test_an_embedding_model_alone_serves_and_refuses_to_generate(pooling):
    app = create_app(NoGeneration(pooling), pooling=pooling)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    async with TestClient(TestServer(app)) as client:
        for path, body, status in (
            (EMBED, {"input": "a"}, 200),
            ("/v1/chat/completions", chat, 400),
            ("/v1/completions", {"prompt": "a"}, 400),
        ):
            reply = await client.post(path, json=body)
            assert reply.status == status, await reply.text()
        assert (await client.get("/health")).status == 200
        assert "tiny-bert" in await (await client.get("/v1/models")).text()


async def test_a_client_that_leaves_takes_its_texts_along(pooling):
    engine = pooling.parts.engine
    many = [pooling.inputs.encode("a b c d e f g h i j")] * 3000
    task = asyncio.create_task(pooling.run(many))
    while not engine.num_waiting:
        await asyncio.sleep(0.001)
    task.cancel()
    one = await pooling.run(many[:1])  # behind the drop
    assert engine.num_waiting == 0
    assert one.shape == (1, 32)
    with pytest.raises(asyncio.CancelledError):
        await task
