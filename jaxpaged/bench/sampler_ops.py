"""The sampler: filters, best tokens and ranks checked row by row with NumPy, and times.

Logits are `flat`, a standard normal, where top-p 0.9 keeps tens of thousands of tokens; `peaked`,
five times that, nearer to a trained model's; or full of `ties`.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.arrays import SamplingBatch
from jaxpaged.bench.roofline import Ceilings
from jaxpaged.bench.targets import SAMPLER_MS
from jaxpaged.layers.sampling import pick, pick_greedy, score
from pallas_kernels.sampling import filter_logits, rank_of, top_n_logprobs

VOCAB = 128_256
CHECKED = ((16, VOCAB), (1, 151_936), (8, 50_257))  # rows, vocabulary
TIMED_ROWS = (256, 64, 1)
CHECKED_KINDS = ("mixed", "top_k", "top_p", "min_p", "off")
REPEATS = 20  # in one jitted loop
ROUNDING = 1e-5


def check(rows: int, vocab: int) -> list[dict[str, Any]]:
    """Rows whose kept tokens, best 20 or rank are wrong; every row is a case."""
    results, shape = [], f"{rows} x {vocab}"
    for logits_kind in ("flat", "peaked", "ties"):
        logits = _logits_of(logits_kind, rows, vocab)
        host = np.asarray(logits)
        for kind in CHECKED_KINDS:
            args = _parameters(kind, rows)
            kept = np.asarray(jax.jit(filter_logits)(logits, jnp.ones(rows), *args)) > -np.inf
            values = [np.asarray(a) for a in args]
            wrong = sum(
                not _row_is_right(host[row], kept[row], *(v[row].item() for v in values))
                for row in range(rows)
            )
            results.append(_verdict(f"filter {shape} {logits_kind} {kind}", rows, wrong))
        ids, _ = jax.jit(top_n_logprobs)(logits)
        want = np.argsort(-host, axis=1, kind="stable")[:, :20]
        ranks = np.asarray(jax.jit(rank_of)(logits, ids[:, 19]))
        bad = (np.asarray(ids) != want).any(axis=1) | (ranks != 20)
        results.append(_verdict(f"best 20 {shape} {logits_kind}", rows, int(bad.sum())))
    return results


def time_ops(ceilings: Ceilings | None) -> list[dict[str, Any]]:
    """Milliseconds of one call inside a jitted loop, beside reading the logits once."""
    lines = []
    for logits_kind in ("flat", "peaked"):
        most = _logits_of(logits_kind, TIMED_ROWS[0], VOCAB)
        for rows, name, body in _bodies():
            logits = most[:rows]
            ms = _milliseconds(body, logits, REPEATS)
            line: dict[str, Any] = {"op": name, "rows": rows, "logits": logits_kind}
            line["ms"] = round(ms, 4)
            if ceilings is not None:
                floor = 1e3 * logits.nbytes / ceilings.bytes_per_s
                line |= {"TB/s": round(logits.nbytes / ms / 1e9, 3), "roofline_ms": round(floor, 4)}
                line["of_roofline"] = round(floor / ms, 3)
            if (name, rows) == ("sample mixed", 256):
                line |= SAMPLER_MS.columns()
            lines.append(line)
    return lines


def _verdict(shape: str, cases: int, wrong: int) -> dict[str, Any]:
    return {"op": "sampler", "cases": cases, "wrong": wrong, "passed": not wrong, "shape": shape}


def _bodies() -> Iterator[tuple[int, str, Callable[[jax.Array], jax.Array]]]:
    """Rows, a name, and what takes logits and gives a float32 a row."""
    most, *fewer = TIMED_ROWS
    ids = jnp.arange(most, dtype=jnp.int32)
    yield most, "read once (max)", lambda x: jnp.max(x, axis=1)
    yield most, "sample greedy", lambda x: pick_greedy(x).astype(jnp.float32)
    for kind in CHECKED_KINDS:
        yield most, f"sample {kind}", functools.partial(_pick, kind=kind)
    yield most, "logprobs, best 20, rank", lambda x: score(x, ids).top_logprobs[:, 0]
    for rows in fewer:
        yield rows, "sample mixed", functools.partial(_pick, kind="mixed")


def _pick(logits: jax.Array, kind: str) -> jax.Array:
    rows = logits.shape[0]
    top_k, top_p, min_p = _parameters(kind, rows)
    numbers = jnp.arange(rows, dtype=jnp.int32)
    sampling = SamplingBatch(
        temperature=jnp.linspace(0.5, 1.2, rows, dtype=jnp.float32),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=jnp.zeros((rows, 2), jnp.uint32),
        choice=numbers,
        position=numbers,
    )
    return pick(logits, sampling).astype(jnp.float32)


def _parameters(kind: str, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    top_k = {"top_k": [50], "top_p": [0], "min_p": [0], "off": [0]}
    top_p = {"top_k": [1.0], "top_p": [0.9], "min_p": [1.0], "off": [1.0]}
    min_p = {"top_k": [0.0], "top_p": [0.0], "min_p": [0.05], "off": [0.0]}
    if kind == "mixed":
        lists = ([0, 50, 0, 20, 40, 0, 0, 1000], [1.0, 1.0, 0.9, 0.95, 0.9, 0.5, 1.0, 1.0])
        k, p, m = (*lists, [0.0] * 6 + [0.05, 0.0])
    else:
        k, p, m = top_k[kind], top_p[kind], min_p[kind]
    return (
        jnp.asarray(np.resize(k, rows), jnp.int32),
        jnp.asarray(np.resize(p, rows), jnp.float32),
        jnp.asarray(np.resize(m, rows), jnp.float32),
    )


def _logits_of(kind: str, rows: int, vocab: int) -> jax.Array:
    scale = {"flat": 1.0, "peaked": 5.0, "ties": 5.0}[kind]
    x = jax.random.normal(jax.random.key(0), (rows, vocab), jnp.float32) * scale
    return jnp.round(x * 8) / 8 if kind == "ties" else x


def _row_is_right(x: np.ndarray, kept: np.ndarray, top_k: int, top_p: float, min_p: float) -> bool:
    """Between what every right answer keeps and what none may exceed, by sorting in float64."""
    x = x.astype(np.float64)
    mass = np.exp(x - x.max())
    must, may = mass >= min_p * (1 + ROUNDING), mass >= min_p * (1 - ROUNDING)
    if 0 < top_k < may.sum():
        is_best = x >= np.sort(x[may])[-top_k]
        must, may = must & is_best, may & is_best
    if top_p < 1:
        order = np.sort(np.unique(x[may]))[::-1]
        by_value = np.argsort(-x[may], kind="stable")
        sums = np.cumsum(mass[may][by_value])
        sums = sums[np.searchsorted(-x[may][by_value], -order, side="right") - 1]
        must &= x >= order[np.argmax(sums >= sums[-1] * top_p * (1 - ROUNDING))]
        may &= x >= order[np.argmax(sums >= sums[-1] * min(top_p * (1 + ROUNDING), 1.0))]
    return not (must & ~kept).any() and not (kept & ~may).any()


def _milliseconds(body, logits: jax.Array, repeats: int) -> float:
    """Of `body(logits) -> f32[rows]`, called in a loop whose turns depend on each other."""

    @jax.jit
    def loop(logits):
        def turn(_, total):
            # behind a barrier, so that no turn can be moved out of the loop
            same, total = lax.optimization_barrier((logits, total))
            return total + body(same)

        return lax.fori_loop(0, repeats, turn, jnp.zeros(logits.shape[0]))

    jax.block_until_ready(loop(logits))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(loop(logits))
        times.append(time.perf_counter() - begin)
    return min(times) / repeats * 1e3
