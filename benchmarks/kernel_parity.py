"""The whole model on a GPU: the kernels beside the plain XLA attention, teacher-forced.

    python -m benchmarks.kernel_parity CONFIG_FOLDER

Random weights; every prompt token is scored by both, over several chunks and batches, and the
decode steps that follow. Prints the largest and the mean difference of log-probabilities.
"""

import sys

import numpy as np

from jaxpaged import LLM, SamplingParams
from pallas_kernels.ragged_attention.xla import ragged_paged_attention_xla


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


def scores(folder: str, prompts: list[list[int]], attention) -> list[float]:
    llm = LLM(
        folder,
        attention=attention,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        num_gpu_blocks_override=600,
        compile_cache_dir="",
        max_num_seqs=8,
        batch_buckets=[8],
        token_buckets=[256],
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0,
        logprobs=0,
    )
    found: list[float] = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        places = list(zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True))
        found += [place[token].logprob for token, place in places]
    llm.close()
    return found


def main() -> None:
    random = np.random.RandomState(0)
    prompts = [random.randint(100, 30000, n).tolist() for n in (17, 64, 200, 333, 90, 5)]
    ours = np.array(scores(sys.argv[1], prompts, None))
    plain = np.array(scores(sys.argv[1], prompts, attend))
    difference = np.abs(ours - plain)
    print(
        f"parity: {len(ours)} tokens, largest {difference.max():.4f}, mean {difference.mean():.5f}"
    )
    print(f"spread of the log-probabilities: {plain.std():.3f}; finite: {np.isfinite(ours).all()}")


if __name__ == "__main__":
    main()
