"""The search of one row, with looks written in jax.numpy: the kernel's looks need a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sampling.row_search import (
    LOWEST,
    MAX_EXPONENT,
    TRIES,
    Asked,
    Seen,
    find_threshold,
)
from tests.pallas_kernels.test_sampling import KINDS, logits_of, must_and_may_keep

VOCAB = 1301


def look_at(row, held, num_looks, look, scale, room):
    x = jnp.where(look.at_held, held[...], row)
    inside = (x >= look.low) & (x <= look.high)
    mass = jnp.exp2(jnp.fmin((x - look.reference) * scale, MAX_EXPONENT))
    weight = jnp.where(inside, jnp.where(look.by_mass, mass, 1), 0)
    hold = inside & (x >= look.hold_from)
    overflows = ~look.at_held & (jnp.sum(hold) > room)
    stays = look.at_held & ~look.narrows
    held[...] = jnp.where(stays, held[...], jnp.where(hold & ~overflows, x, -jnp.inf))
    num_looks[...] += jnp.where(look.at_held, jnp.array([0, 1]), jnp.array([1, 0]))
    return Seen(
        total=jnp.sum(weight),
        amounts=tuple(jnp.sum(jnp.where(x >= one, weight, 0)) for one in look.tries),
        lowest=jnp.min(jnp.where(inside, x, jnp.inf)),
        highest=jnp.max(jnp.where(inside, x, -jnp.inf)),
        overflows=overflows,
    )


@jax.jit
def search(row, temperature, top_k, top_p, min_p, sampled, reference, room):
    """The threshold, then how many looks were at the row and at what was held."""
    scale = 1.4426950408889634 / temperature
    top_k = jnp.where(top_k < row.size, top_k, 0).astype(jnp.float32)
    asked = Asked(scale, top_k, top_p, min_p, temperature * jnp.log(min_p))
    held, num_looks = jax.new_ref(row), jax.new_ref(jnp.zeros(2, jnp.int32))

    def look(this, _):
        return look_at(row, held, num_looks, this, scale, room)

    found = find_threshold(asked, tuple(sampled), reference, look)
    return found, num_looks[...]


def sample(row, rng, ranks):
    some = np.sort(rng.choice(row, 256))[::-1]
    some = np.where(some > LOWEST, some, np.float32(LOWEST))
    return some[list(ranks)], some[0]


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([0, 1, 2, 50, 700, 1300, 1301, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 0.999999, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    first_rank=st.sampled_from([0, 4, 16, 48]),
    room=st.sampled_from([0, 50, 300, VOCAB]),
)
def test_the_search_keeps_what_sorting_would_keep(
    kind, seed, top_k, top_p, min_p, first_rank, room
):
    row = logits_of(kind, VOCAB, seed, rows=1)[0]
    ranks = (first_rank, *range(48, 256, 32))
    sampled, reference = sample(row, np.random.default_rng(seed), ranks)
    assert len(sampled) == TRIES
    found, num_looks = search(
        row, np.float32(1), top_k, np.float32(top_p), np.float32(min_p), sampled, reference, room
    )
    kept = row >= found
    must, may = must_and_may_keep(row, top_k, top_p, min_p)
    assert not (must & ~kept).any()
    assert not (kept & (row > -np.inf) & ~may).any()
    if top_p == 1 and min_p == 0 and top_k in (0, 1301, 2**31 - 1):
        assert num_looks.sum() == 0
    assert num_looks.sum() < 40
