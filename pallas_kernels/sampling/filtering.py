"""min-p, top-k and top-p as a search for one threshold per row.

Each of the three keeps the logits from some value on, so all that is wanted is that value. It is
found by a search in which every pass over the vocabulary tries several thresholds at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks, tuning
from pallas_kernels.sampling.search import Search, Tries, find_highest, key_of, mass_of, value_of
from pallas_kernels.sampling.shards import max_over, min_over, num_parts, sum_over

_OP = "filter_logits"
_BLOCK = 32  # neighbouring logits that are kept or set aside together
_NUM_BLOCKS = 256  # of each row are looked through first
_CPU_TRIES = Tries(even=3, in_order=1)
_GPU_TRIES = Tries(even=14, in_order=1)
_GPU_TRIES_IN_CACHE = Tries(even=30, in_order=1)


def filter_logits(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    *,
    axis: str | None = None,
) -> Float[Array, "rows vocab"]:
    """Divide by the temperature and put -inf in place of what min-p, top-k or top-p drops.

    In vLLM's order: first min-p keeps the tokens at least `min_p` times as probable as the best.
    Of these, top-k keeps the `top_k` best and all that equal the last of them. Of these, top-p
    keeps, from the best down, the fewest whose probabilities reach `top_p` of what is left, and all
    that equal the last of them: so the result does not depend on the order of tokens.

    Args:
        logits: float32. -inf is a banned token; it stays out.
        temperature: over 0.
        top_k: 0 keeps all.
        top_p: over 0; 1 keeps all.
        min_p: 0 keeps all.
        axis: inside `jax.shard_map`, the mesh axis over which the vocabulary is split. The devices
            then exchange at most 132 bytes a row and pass.

    Returns:
        The divided logits, -inf where dropped. The best token always stays.

    Raises:
        KernelArgumentError: shapes that do not fit together, or another type; while tracing.

    Exact but for the rounding of float32 sums of probabilities. On a Hopper GPU one kernel finds
    what to keep: it reads the logits of a row that filters once, or twice or rarely more often if
    top-p keeps more than about a sixteenth of them. Elsewhere, and with an axis, if no row filters,
    the last pass over the logits is the only one. If some do, three or four more; and 6 to 8 more
    (11 to 15 on a CPU) if a row keeps tokens of more than 256 blocks of 32 neighbours, as top-p
    does when the logits are flat.
    """
    checks.check_shapes(
        _OP,
        {
            "logits": (logits, ("rows", "vocab")),
            "temperature": (temperature, ("rows",)),
            "top_k": (top_k, ("rows",)),
            "top_p": (top_p, ("rows",)),
            "min_p": (min_p, ("rows",)),
        },
    )
    floats = {"logits": logits, "temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, array in floats.items():
        checks.check_dtype(_OP, name, array, ("float32",))
    checks.check_dtype(_OP, "top_k", top_k, ("int32",))

    if axis is None and tuning.SEARCHES_BY_KERNEL and tuning.is_on_hopper():
        from pallas_kernels.sampling import kernel

        if kernel.supports(logits.shape[1]):
            return _filter_by_kernel(logits, temperature, top_k, top_p, min_p)
    scaled = logits / temperature[:, None]
    filters = (top_k > 0) | (top_p < 1) | (min_p > 0)
    threshold = lax.cond(
        jnp.any(filters),
        functools.partial(_find_thresholds, axis=axis),
        lambda logits, *_: jnp.full(logits.shape[:1], -jnp.inf, jnp.float32),
        *(scaled, top_k, top_p, min_p),
    )
    return jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)


def _filter_by_kernel(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    from pallas_kernels import tuning
    from pallas_kernels.sampling.kernel import find_thresholds_kernel

    # the kernel takes the logits as they are, so that nothing is written but one number a row
    threshold = find_thresholds_kernel(logits, temperature, top_k, top_p, min_p, tuning.SEARCH)
    return jnp.where(logits >= threshold[:, None], logits / temperature[:, None], -jnp.inf)


def _find_thresholds(
    logits: Float[Array, "rows vocab"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    *,
    axis: str | None,
) -> Float[Array, " rows"]:
    """The least logit that each row keeps."""
    rows, vocab = logits.shape
    padding = ((0, 0), (0, -vocab % _BLOCK))
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(rows, -1, _BLOCK)
    # behind a barrier, or XLA makes each row's best of all logits again, in one more pass
    of_blocks = lax.optimization_barrier((jnp.max(blocks, axis=2), _least(blocks)))
    best_of_block, least_of_block = of_blocks
    best = max_over(jnp.max(best_of_block, axis=1), axis)
    least = min_over(jnp.min(least_of_block, axis=1), axis)
    apply = functools.partial(_apply_min_p, axis=axis)
    low = lax.cond(jnp.any(min_p > 0), apply, lambda *_: least, logits, best, min_p)
    counts = (top_k > 0) & (top_k < vocab * num_parts(axis))
    nothing = jnp.zeros_like(best)
    search = Search(
        low=key_of(low),
        high=key_of(best),
        low_amount=nothing,
        over_amount=nothing,
        wanted=top_k.astype(jnp.float32),
        rest=nothing,
        by_mass=~counts,
        is_fresh=~counts,
        is_done=(~counts & (top_p >= 1)) | (low >= best),
    )
    if blocks.shape[1] > _NUM_BLOCKS:
        whole = jnp.sum(jnp.where(logits >= low[:, None], mass_of(logits, best), 0), axis=1)
        whole = sum_over(whole, axis)
        search = _search_best_blocks(search, blocks, best, best_of_block, whole, top_p, axis)
    on_cpu = jax.default_backend() == "cpu"
    tries = _CPU_TRIES if on_cpu else _GPU_TRIES
    if axis is not None or not on_cpu:
        return value_of(find_highest(search, logits, best, top_p, tries, axis, keep_mass=on_cpu))

    def search_row(row: tuple[Search, Array, Array, Array]) -> Array:
        search, logits, best, top_p = row
        return find_highest(search, logits, best, top_p, tries, None, keep_mass=True)

    # row by row, so that a pass stays in the cache, and rows that are done cost none
    rows_of_one = jax.tree.map(lambda x: x[:, None], (search, logits, best, top_p))
    return value_of(lax.map(search_row, rows_of_one)[:, 0])


def _apply_min_p(
    logits: Float[Array, "rows vocab"],
    best: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    *,
    axis: str | None,
) -> Float[Array, " rows"]:
    """The least finite logit that is probable enough."""
    stays = mass_of(logits, best) >= min_p[:, None]
    return min_over(_least(jnp.where(stays, logits, -jnp.inf)), axis)


def _search_best_blocks(
    search: Search,
    blocks: Float[Array, "rows blocks places"],
    best: Float[Array, " rows"],
    best_of_block: Float[Array, "rows blocks"],
    whole: Float[Array, " rows"],
    top_p: Float[Array, " rows"],
    axis: str | None,
) -> Search:
    """Settle the rows for which the blocks with the best first token hold all that is kept."""
    tops, ids = lax.top_k(best_of_block, _NUM_BLOCKS + 1)
    chosen = jnp.take_along_axis(blocks, ids[:, :_NUM_BLOCKS, None], axis=1)
    chosen = chosen.reshape(blocks.shape[0], -1)
    left_out, low = max_over(tops[:, _NUM_BLOCKS], axis), value_of(search.low)
    # all logits over the best of the blocks left out are among the chosen, so these stand for all
    stands = (chosen > left_out[:, None]) & (chosen >= low[:, None])
    chosen = jnp.where(stands, chosen, -jnp.inf)
    count = sum_over(jnp.sum(stands, axis=1, dtype=jnp.float32), axis)
    mass = sum_over(jnp.sum(jnp.where(stands, mass_of(chosen, best), 0), axis=1), axis)
    does = jnp.where(search.by_mass, mass >= top_p * whole, count >= search.wanted)
    does = search.is_done | does | (left_out < low)

    here = search._replace(
        low=jnp.where(search.is_done, search.low, key_of(min_over(_least(chosen), axis))),
        rest=jnp.where(search.by_mass, jnp.maximum(whole - mass, 0), 0),
        is_done=search.is_done | ~does,
    )
    tries = _CPU_TRIES if jax.default_backend() == "cpu" else _GPU_TRIES_IN_CACHE
    found = find_highest(here, chosen, best, top_p, tries, axis, keep_mass=True)
    return search._replace(low=jnp.where(does, found, search.low), is_done=does)


def _least(logits: Float[Array, "... places"]) -> Float[Array, "..."]:
    return jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf), axis=-1)
