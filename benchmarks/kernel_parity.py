"""The whole model on a GPU: the kernels beside the plain XLA attention, teacher-forced.

    python -m benchmarks.kernel_parity CONFIG_FOLDER

Random weights; every prompt token is scored by both, over several chunks and batches, and the
decode steps that follow. Then a row alone, whose steps are one kernel a layer beside attention:
what it gives the tokens that it picks, and what the same tokens get as a prompt. Prints the largest
and the mean difference of log-probabilities.
"""

import sys

import numpy as np

from jaxpaged import LLM, SamplingParams
from pallas_kernels.ragged_attention.xla import ragged_paged_attention_xla

ALONE = 200  # tokens that the row alone picks


def attend(q, pages, batch, *, spec):
    return ragged_paged_attention_xla(
        q,
        pages.k,
        pages.v,
        batch.page_table,
        batch.kv_lens,
        batch.cu_q_lens,
        None,
        spec=spec,
        decode_only=batch.is_decode_only,
    )


def opened(folder: str, attention=None) -> LLM:
    return LLM(
        folder,
        attention=attention,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        num_gpu_blocks_override=600,
        compile_cache_dir="",
        max_num_seqs=8,
        batch_buckets=[1, 8],
        token_buckets=[256],
    )


def asked(max_tokens: int, **fields) -> SamplingParams:
    params = {"temperature": 0, "ignore_eos": True, "detokenize": False, **fields}
    return SamplingParams(max_tokens=max_tokens, **params)


def scores_of(output) -> list[float]:
    """Of a prompt's tokens, the first left out."""
    places = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [place[token].logprob for token, place in places]


def scores(llm: LLM, prompts: list[list[int]]) -> list[float]:
    params = asked(8, prompt_logprobs=0, logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [score for output in outputs for score in scores_of(output)]


def alone(llm: LLM, prompt: list[int]) -> tuple[list[float], list[float]]:
    """What a row alone gave its tokens, and what they get in a prompt."""
    (output,) = llm.generate([prompt], asked(ALONE, logprobs=0), use_tqdm=False)
    (answer,) = output.outputs
    places = zip(answer.token_ids, answer.logprobs, strict=True)
    ours = [place[token].logprob for token, place in places]
    whole = [*prompt, *answer.token_ids]
    (again,) = llm.generate([whole], asked(1, prompt_logprobs=0), use_tqdm=False)
    return ours, scores_of(again)[len(prompt) - 1 :]


def tell(name: str, ours: list[float], plain: list[float]) -> None:
    difference = np.abs(np.array(ours) - np.array(plain))
    print(
        f"{name}: {len(ours)} tokens, largest {difference.max():.4f}, "
        f"mean {difference.mean():.5f}; spread {np.std(plain):.3f}; "
        f"finite: {np.isfinite(ours).all()}"
    )


def main() -> None:
    random = np.random.RandomState(0)
    prompts = [random.randint(100, 30000, n).tolist() for n in (17, 64, 200, 333, 90, 5)]
    llm = opened(sys.argv[1])
    ours = scores(llm, prompts)
    tell("a row alone", *alone(llm, prompts[1]))
    llm.close()
    llm = opened(sys.argv[1], attend)
    tell("attention", ours, scores(llm, prompts))
    llm.close()


if __name__ == "__main__":
    main()
