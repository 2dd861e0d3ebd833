"""Check the sampler's ops on this device against NumPy, and time them.

    python3 benchmarks/sampler_check.py [--rows 256] [--vocab 128256] [--check-only]
                                        [--variants 14:32:256 14:128:64]

Times are milliseconds of one call inside a jitted loop, so dispatch does not count. `flat` logits
are a standard normal, where top-p 0.9 keeps tens of thousands of tokens; `peaked` ones are five
times that, nearer to a trained model's.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels.sampling import filter_logits, filtering, rank_of, top_n_logprobs

ROUNDING = 1e-5


def parameters(kind: str, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
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


def logits_of(kind: str, rows: int, vocab: int) -> jax.Array:
    scale = {"flat": 1.0, "peaked": 5.0, "ties": 5.0}[kind]
    x = jax.random.normal(jax.random.key(0), (rows, vocab), jnp.float32) * scale
    return jnp.round(x * 8) / 8 if kind == "ties" else x


def row_is_right(x: np.ndarray, kept: np.ndarray, top_k: int, top_p: float, min_p: float) -> bool:
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


def count_wrong(rows: int, vocab: int) -> int:
    wrong = 0
    for logits_kind in ("flat", "peaked", "ties"):
        logits = logits_of(logits_kind, rows, vocab)
        host = np.asarray(logits)
        for kind in ("mixed", "top_k", "top_p", "min_p", "off"):
            args = parameters(kind, rows)
            kept = np.asarray(jax.jit(filter_logits)(logits, *args)) > -np.inf
            bad = sum(
                not row_is_right(host[row], kept[row], *(np.asarray(a)[row].item() for a in args))
                for row in range(rows)
            )
            print(f"filter {logits_kind:7} {kind:6}: {bad} of {rows} rows wrong")
            wrong += bad
        ids, _ = jax.jit(top_n_logprobs)(logits)
        want = np.argsort(-host, axis=1, kind="stable")[:, :20]
        bad = int((np.asarray(ids) != want).any(axis=1).sum())
        ranks = np.asarray(jax.jit(rank_of)(logits, ids[:, 19]))
        print(f"best 20 {logits_kind:7}: {bad} rows wrong; ranks: {(ranks != 20).sum()} wrong")
        wrong += bad + int((ranks != 20).sum())
    return wrong


def milliseconds(body, logits: jax.Array, repeats: int) -> float:
    """Of `body(logits) -> f32[rows]`, called in a loop whose turns depend on each other."""

    @jax.jit
    def loop(logits):
        def turn(_, carry):
            logits, total = carry
            result = body(logits)
            # one element changes, so that no turn can be moved out of the loop
            return logits.at[0, 0].add(result[0] * 0), total + result

        return lax.fori_loop(0, repeats, turn, (logits, jnp.zeros(logits.shape[0])))[1]

    jax.block_until_ready(loop(logits))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(loop(logits))
        times.append(time.perf_counter() - begin)
    return min(times) / repeats * 1e3


def pick(logits: jax.Array) -> jax.Array:
    keys = jax.vmap(jax.random.key)(jnp.arange(logits.shape[0], dtype=jnp.uint32))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    return jnp.argmax(logits + noise, axis=1).astype(jnp.float32)


def bodies(rows: int):
    def with_filter(logits, kind, then):
        return then(filter_logits(logits, *parameters(kind, rows)))

    def kept_sum(logits):
        return jnp.sum(jnp.where(logits > -jnp.inf, logits, 0), axis=1)

    ids = jnp.arange(rows, dtype=jnp.int32)
    yield "read once (max)", lambda x: jnp.max(x, axis=1)
    yield "argmax", lambda x: jnp.argmax(x, axis=1).astype(jnp.float32)
    yield "Gumbel pick, no filter", pick
    for kind in ("off", "top_k", "top_p", "min_p", "mixed"):
        yield f"filter {kind}", functools.partial(with_filter, kind=kind, then=kept_sum)
    yield "filter mixed and Gumbel pick", functools.partial(with_filter, kind="mixed", then=pick)
    yield "best 20 with logprobs", lambda x: top_n_logprobs(x)[1][:, 0]
    yield "rank", lambda x: rank_of(x, ids).astype(jnp.float32)
    yield "lax.top_k of 20", lambda x: lax.top_k(x, 20)[0][:, 0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the sampler's ops.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument(
        "--variants",
        nargs="*",
        default=["14:32:256"],
        help="thresholds a pass : size of a block : blocks looked through first",
    )
    args = parser.parse_args()

    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {args.rows} x {args.vocab}")
    wrong = count_wrong(min(args.rows, 64), args.vocab)
    if args.check_only:
        return int(wrong > 0)
    for variant in args.variants:
        tries, filtering._BLOCK, filtering._NUM_BLOCKS = map(int, variant.split(":"))
        filtering._GPU_TRIES = filtering.Tries(even=tries, in_order=1)
        jax.clear_caches()
        for logits_kind in ("flat", "peaked"):
            logits = logits_of(logits_kind, args.rows, args.vocab)
            for name, body in bodies(args.rows):
                ms = milliseconds(body, logits, args.repeats)
                record = {"logits": logits_kind, "op": name, "variant": variant, "ms": round(ms, 4)}
                print(json.dumps(record), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
