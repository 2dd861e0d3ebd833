"""Compares a real model with stored greedy outputs of transformers, teacher-forced, in float32.

    python benchmarks/golden/check_references.py MODEL.gguf tests/reference/smollm2_greedy.json

Every token of every item must be our most likely one too, and the stored logprobs must agree.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.arrays import RaggedBatch
from jaxpaged.models.decoder import init_device_state
from jaxpaged.weights.loader import load_model

PAGE_SIZE, PAGES_PER_SEQ = 16, 32
LOGPROB_TOLERANCE = 2e-4
LEAST_MARGIN = 1e-3  # closer calls may fall either way


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("reference", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    model = load_model(args.model, dtype=jnp.float32)
    jax.block_until_ready(model.params)
    print(f"loaded in {time.perf_counter() - start:.1f} s")
    state = init_device_state(model.config, PAGES_PER_SEQ + 1, PAGE_SIZE, 1, jnp.float32)
    worst, wrong, count = 0.0, 0, 0
    for item in json.loads(args.reference.read_text())["items"]:
        prompt, output = item["prompt_ids"], item["output_ids"]
        state, logits = forward(model.graphdef, model.params, state, whole(prompt + output[:-1]))
        first = len(prompt) - 1
        logprobs = np.asarray(jax.nn.log_softmax(logits))[first : first + len(output)]
        for step, (token, margin) in enumerate(zip(output, item["margins"], strict=True)):
            count += 1
            wrong += int(logprobs[step].argmax()) != token and margin > LEAST_MARGIN
        for step, top in enumerate(item["top5_logprobs_first8"]):
            worst = max(worst, *(abs(float(logprobs[step][token]) - value) for token, value in top))
    print(f"{count - wrong} of {count} tokens equal, largest logprob difference {worst:.1e}")
    if wrong or worst > LOGPROB_TOLERANCE:
        raise SystemExit("the model does not reproduce its reference")


def whole(token_ids: list[int]) -> RaggedBatch:
    """One row with all its tokens, padded to a multiple of 64; logits of every token."""
    length = len(token_ids)
    padded = -(-length // 64) * 64
    places = np.arange(padded, dtype=np.int32)
    return RaggedBatch(
        token_ids=np.pad(np.array(token_ids, np.int32), (0, padded - length)),
        positions=places,
        slot_mapping=np.where(places < length, places + PAGE_SIZE, 0).astype(np.int32),
        page_table=np.arange(1, PAGES_PER_SEQ + 1, dtype=np.int32)[None],
        kv_lens=np.array([length], np.int32),
        cu_q_lens=np.array([0, length], np.int32),
        seq_slots=np.array([0], np.int32),
        from_last=np.zeros(padded, bool),
        logit_rows=places,
        is_decode_only=False,
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def forward(graphdef, params, state, batch):
    decoder = nnx.merge(graphdef, params)
    hidden, state = decoder(batch, state)
    return state, decoder.unembed(hidden[batch.logit_rows])


if __name__ == "__main__":
    main()
