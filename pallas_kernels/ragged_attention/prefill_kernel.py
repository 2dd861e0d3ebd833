"""Attention of mixed batches on Hopper: prompt chunks and decodes in one launch.

A work item is a run of a row's query tokens with one KV head: the heads of the group are packed
into the rows of a tile, token after token, so that a tile is full even where chunks are short. Two
warpgroups compute 64 such rows each and share the tiles of K and V that a third one loads. While
one multiplies, the other takes exponents: they fall into step by themselves, and making them take
turns costs time. Inside a warpgroup the logits of a tile are multiplied together with the values of
the tile before, and the exponents are taken meanwhile.

The plan, made on the device, orders the items by cost and deals them out to persistent programs.
Every other program works from its cheap items to its dear ones, so that decodes, which wait for
memory, run beside chunks, which wait for the tensor cores.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import tuning
from pallas_kernels.mosaic import tiled
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.ragged_attention.mixed_load import MixedRefs, MixedScratch, load_mixed
from pallas_kernels.ragged_attention.mixed_plan import (
    Item,
    MixedStatic,
    for_each_item,
    plan_mixed,
)
from pallas_kernels.spec import AttentionSpec


def _mask(
    static: MixedStatic, item: Item, warpgroup: jax.Array, tile: jax.Array, logits: jax.Array
):
    """Hide what a row's token must not see. Row r holds token r // group of the warpgroup."""
    s = static
    start = tile * s.tiles.block_kv
    token = warpgroup * s.warpgroup_tokens + lax.div(parts.row_iota(), jnp.int32(s.group))
    end = token + (item.position + 1 - start)
    place = parts.iota(logits.shape, 1)

    def across(limit):
        return parts.across_columns(limit, logits.shape[1])

    in_row = jnp.minimum(end, item.kv_len - start)
    logits = jnp.where(place < across(in_row), logits, parts.HIDDEN)
    if s.spec.window is not None:
        logits = jnp.where(place >= across(end - s.spec.window), logits, parts.HIDDEN)
    return logits


def _first_tile(
    static: MixedStatic,
    smem: MixedScratch,
    warpgroup: jax.Array,
    item: Item,
    done: jax.Array,
    softmax,
):
    """The last tile's logits, before there are values to add."""
    s, slot = static, lax.rem(done, jnp.int32(static.tiles.stages))
    acc, peak, mass = softmax
    plgpu.barrier_wait(smem.k_full.at[slot])

    def products(logits_ref):
        query = smem.q_tiled.at[warpgroup]
        plgpu.wgmma(logits_ref, query, smem.k.at[slot].transpose((1, 0)))
        return logits_ref[...]

    shape = (parts.WARPGROUP_ROWS, s.tiles.block_kv)
    found = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    plgpu.barrier_arrive(smem.k_free.at[slot])
    logits, unit = parts.raw_logits(found, s.spec)
    logits = _mask(s, item, warpgroup, item.first_tile + item.tiles - 1, logits)
    peak, shrink, weights = parts.weigh(logits, unit, peak)
    mass = parts.add_mass(mass, shrink, weights)
    _await_key(s, smem, item, done, jnp.int32(1))
    return (acc, peak, mass), weights.astype(s.dtype)


def _await_key(
    static: MixedStatic, smem: MixedScratch, item: Item, done: jax.Array, i: jax.Array
) -> None:
    """Wait for the keys of the item's tile `i` from the end, if it has so many."""
    slot = lax.rem(done + i, jnp.int32(static.tiles.stages))
    pl.when(i < item.tiles)(lambda: plgpu.barrier_wait(smem.k_full.at[slot]))


def _next_tile(
    static: MixedStatic,
    smem: MixedScratch,
    warpgroup: jax.Array,
    item: Item,
    done: jax.Array,
    i: jax.Array,
    carry: Any,
    *,
    masked: bool,
):
    """The logits of tile `i` from the end, beside the values of the tile before it."""
    s, stages = static, jnp.int32(static.tiles.stages)
    (acc, peak, mass), weights = carry
    k_slot, v_slot = lax.rem(done + i, stages), lax.rem(done + i - 1, stages)
    tile = item.first_tile + item.tiles - 1 - i
    if masked:
        plgpu.barrier_wait(smem.v_full.at[v_slot])
        _zero_unseen(s, smem.v.at[v_slot], item, tile + 1)

    def products(logits_ref, acc_ref):
        acc_ref[...] = acc
        query = smem.q_tiled.at[warpgroup]
        plgpu.wgmma(logits_ref, query, smem.k.at[k_slot].transpose((1, 0)))
        if not masked:
            plgpu.barrier_wait(smem.v_full.at[v_slot])
        plgpu.wgmma(acc_ref, weights, smem.v.at[v_slot])
        logits = plgpu.wgmma_accumulator_load(logits_ref, wait_n=1)
        plgpu.barrier_arrive(smem.k_free.at[k_slot])
        logits, unit = parts.raw_logits(logits, s.spec)
        if masked:
            logits = _mask(s, item, warpgroup, tile, logits)
        new_peak, shrink, new_weights = parts.weigh(logits, unit, peak)
        new_mass = parts.add_mass(mass, shrink, new_weights)
        # Take the exponents while the values are multiplied: the wait here, with its branch, keeps
        # the compiler from moving them behind the multiplication's end.
        done_early = lax.optimization_barrier((new_mass, new_weights, shrink))
        new_mass, new_weights, shrink = done_early
        _await_key(s, smem, item, done, i + 1)
        new_acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
        plgpu.barrier_arrive(smem.v_free.at[v_slot])
        new_acc = new_acc * parts.across_columns(shrink, s.head_dim)
        return (new_acc, new_peak, new_mass), new_weights.astype(s.dtype)

    shape = (parts.WARPGROUP_ROWS, s.tiles.block_kv)
    accumulators = (
        plgpu.WGMMAAccumulatorRef(shape, jnp.float32),
        plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32),
    )
    return pl.run_scoped(products, *accumulators)


def _zero_unseen(static: MixedStatic, values: Any, item: Item, tile: jax.Array) -> None:
    """Zero the rows of V that no token of the item sees, if the tile has such."""
    block = static.tiles.block_kv
    start = tile * block
    high, low = item.kv_len - start, jnp.int32(0)
    if static.spec.window is not None:
        low = item.position + 1 - static.spec.window - start
    pl.when((high < block) | (low > 0))(lambda: parts.zero_rows_outside(values, low, high))


def _attend(
    static: MixedStatic, refs: MixedRefs, smem: MixedScratch, warpgroup: jax.Array, item: Item, done
):
    """One warpgroup's rows of an item, from the last tile to the first."""
    s, me = static, warpgroup
    plgpu.barrier_wait(smem.q_full.at[me])
    query = plgpu.load(smem.q.at[me], layout=plgpu.Layout.WGMMA, optimized=False)
    smem.q_tiled.at[me][...] = query
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.q_free.at[me])
    acc = parts.filled(0.0, (parts.WARPGROUP_ROWS, s.head_dim))
    peak = plgpu.layout_cast(jnp.full(acc.shape[0], parts.MASKED, jnp.float32), parts.ROWS)
    first_mass = 0.0
    if s.has_sinks:
        peak = plgpu.load(refs.sinks.at[item.head], layout=parts.ROWS, optimized=False)
        first_mass = 1 / parts.MASS_COLUMNS
    mass = parts.filled(first_mass, (acc.shape[0], parts.MASS_COLUMNS))
    carry = _first_tile(s, smem, warpgroup, item, done, (acc, peak, mass))

    def step(masked):
        return lambda i, carry: _next_tile(s, smem, warpgroup, item, done, i, carry, masked=masked)

    # where the last tile has values of no token, step 1, which adds them, is a masked one too
    ragged = (item.first_tile + item.tiles) * s.tiles.block_kv > item.kv_len
    ragged |= s.spec.window is not None
    masked_end = jnp.minimum(jnp.maximum(item.masked, jnp.where(ragged, 2, 1)), item.tiles)
    carry = lax.fori_loop(1, masked_end, step(True), carry)
    carry = lax.fori_loop(masked_end, item.tiles, step(False), carry)
    (acc, _, mass), weights = carry
    slot = lax.rem(done + item.tiles - 1, jnp.int32(s.tiles.stages))
    plgpu.barrier_wait(smem.v_full.at[slot])
    _zero_unseen(s, smem.v.at[slot], item, item.first_tile)
    acc = parts.add_product(acc, weights, smem.v.at[slot])
    plgpu.barrier_arrive(smem.v_free.at[slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mass = mass.sum(axis=1)
    out_rows = smem.out.at[me].reshape(parts.WARPGROUP_ROWS, s.head_dim)
    out_rows[...] = (acc * parts.across_columns(1.0 / mass, s.head_dim)).astype(s.dtype)
    plgpu.commit_smem()
    _store(s, refs, smem, me, item)


def _store(
    static: MixedStatic, refs: MixedRefs, smem: MixedScratch, me: jax.Array, item: Item
) -> None:
    s, width = static, static.warpgroup_tokens
    token, count = item.token + me * width, jnp.minimum(item.tokens - me * width, width)
    if not s.whole_tokens:

        def store_token(i, _):
            source = smem.out.at[me, pl.ds(i * s.group, s.group)]
            plgpu.copy_smem_to_gmem(source, refs.out.at[token + i, item.head])

        lax.fori_loop(0, count, store_token, None)
        return

    @pl.when(count == width)
    def _():
        plgpu.copy_smem_to_gmem(smem.out.at[me], refs.out.at[pl.ds(token, width), item.head])

    @pl.when(count < width)
    def _():  # the tokens after `count` are another row's: copies of 32, 16 ... as far as they fit
        for size in filter(lambda size: size < width, (32, 16, 8, 4, 2, 1)):

            @pl.when((count & size) != 0)
            def _(size=size):
                first = lax.div(count, jnp.int32(2 * size)) * (2 * size)
                source = smem.out.at[me, pl.ds(pl.multiple_of(first, size), size)]
                target = refs.out.at[pl.ds(token + first, size), item.head]
                plgpu.copy_smem_to_gmem(source, target)


def _pass_tiles(static: MixedStatic, smem: MixedScratch, item: Item, done: jax.Array) -> None:
    """A warpgroup without rows in the item only lets the tiles pass."""

    def pass_tile(i, _):
        slot = lax.rem(done + i, jnp.int32(static.tiles.stages))
        plgpu.barrier_wait(smem.k_full.at[slot])
        plgpu.barrier_arrive(smem.k_free.at[slot])
        plgpu.barrier_wait(smem.v_full.at[slot])
        plgpu.barrier_arrive(smem.v_free.at[slot])

    lax.fori_loop(0, item.tiles, pass_tile, None)


def _compute(
    static: MixedStatic, refs: MixedRefs, smem: MixedScratch, warpgroup: jax.Array
) -> None:
    s = static
    _zero_padding(s, refs, smem, warpgroup)

    def visit(item, done):
        has_rows = item.tokens > warpgroup * s.warpgroup_tokens
        pl.when(has_rows)(lambda: _attend(s, refs, smem, warpgroup, item, done))
        pl.when(~has_rows)(lambda: _pass_tiles(s, smem, item, done))
        return done + item.tiles

    for_each_item(s, refs, visit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _zero_padding(
    static: MixedStatic, refs: MixedRefs, smem: MixedScratch, warpgroup: jax.Array
) -> None:
    """Zero the tokens after the last row's."""
    s = static
    smem.out.at[warpgroup][...] = jnp.zeros(smem.out.shape[1:], s.dtype)
    plgpu.commit_smem()
    first = refs.cu_q_lens[s.seqs]
    copies = (s.tokens - first) * s.kv_heads
    workers = s.programs * s.tiles.warpgroups
    worker = lax.axis_index("program") * s.tiles.warpgroups + warpgroup

    def zero(i, _):
        copy = worker + i * workers
        token, head = lax.div(copy, jnp.int32(s.kv_heads)), lax.rem(copy, jnp.int32(s.kv_heads))
        source = smem.out.at[warpgroup, 0 if s.whole_tokens else pl.ds(0, s.group)]
        plgpu.copy_smem_to_gmem(source, refs.out.at[first + token, head])

    rounds = lax.div(copies - worker + (workers - 1), jnp.int32(workers))
    lax.fori_loop(0, rounds, zero, None)


def _scratch_types(static: MixedStatic) -> list[Any]:
    s, t = static, static.tiles
    transforms = tiled(s.head_dim)
    copies, _ = parts.copies_of_tile(t.block_kv // 2, s.page_size)
    rows, ring = (
        (t.warpgroups, parts.WARPGROUP_ROWS, s.head_dim),
        (t.stages, t.block_kv, s.head_dim),
    )
    full = plgpu.Barrier(num_arrivals=2 * copies, num_barriers=t.stages)
    free = plgpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages)
    query_free = plgpu.Barrier(num_barriers=t.warpgroups)
    query_copies = 1 if s.group == 1 else s.warpgroup_tokens
    query = plgpu.Barrier(num_arrivals=query_copies, num_barriers=t.warpgroups)
    return [
        plgpu.SMEM(rows, s.dtype),
        plgpu.SMEM(rows, s.dtype, transforms=transforms),
        plgpu.SMEM(ring, s.dtype, transforms=transforms),
        plgpu.SMEM(ring, s.dtype, transforms=transforms),
        plgpu.SMEM((t.warpgroups, *s.out_shape), s.dtype),
        *(query, query_free, full, free, full, free),
    ]


def mixed_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    sinks: Float[Array, " heads"] | None,
    *,
    spec: AttentionSpec,
) -> Float[Array, "tokens heads head_dim"]:
    """The op's contract for rows of any query length.

    Shapes and types must pass `tuning.supports`. Weights and values are multiplied in q's type and
    summed in float32. A long row's decode is not split, as `decode_attention` does.
    """
    tokens, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    static = MixedStatic(
        tokens=tokens,
        seqs=kv_lens.shape[0],
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=q.dtype,
        has_sinks=sinks is not None,
        spec=spec,
        tiles=tuning.mixed_tiles(head_dim, tokens=tokens, seqs=kv_lens.shape[0]),
    )
    q = q.reshape(tokens, kv_heads, static.group, head_dim)
    plan = plan_mixed(kv_lens, cu_q_lens, static)

    def mixed(*refs):
        pl.run_scoped(
            lambda *scratch: _run_warpgroup(static, refs, MixedScratch(*scratch)),
            *_scratch_types(static),
            collective_axes="warpgroup",
        )

    out = plgpu.kernel(
        mixed,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(static.programs,),
        grid_names=("program",),
        num_threads=static.tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=parts.compiler_params(auto_barriers=False),
    )(
        q,
        k_pages,
        v_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        plan,
        *parts.sink_rows(sinks, kv_heads, static.group),
    )
    return out.reshape(tokens, heads, head_dim)


def _run_warpgroup(static: MixedStatic, arrays: tuple[Any, ...], smem: MixedScratch) -> None:
    refs = MixedRefs(*arrays[:7], *parts.fill_sinks(static.has_sinks, arrays[7:]))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < static.tiles.warpgroups)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _compute(static, refs, smem, warpgroup)

    @pl.when(warpgroup == static.tiles.warpgroups)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        load_mixed(static, refs, smem)
