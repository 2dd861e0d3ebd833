"""One row's way from attention to the next layer's queries in one launch, at memory's speed.

Four products follow each other: the attention's output, gate and up, down, and the next layer's
qkv. Alone, each begins and ends with some microseconds in which memory waits. Here a loading
warpgroup of each program goes through its share of all four weights without a pause, as far ahead
as there is room in shared memory; weights wait for nobody. The other warpgroup multiplies, and
between two products all programs wait for each other, while the next weights come in.

Rows of weights are the 64 rows of the tensor cores' products, which have at least eight columns. So
eight blocks of the row of values lie side by side as columns, and each of eight sums takes the
products with its own block of weights: of the i-th only the i-th column means anything.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import tuning
from pallas_kernels.mosaic import tiled
from pallas_kernels.one_row import meeting, vectors
from pallas_kernels.one_row.plan import QKV, ROWS, Product, for_each_unit, part_of, share_out
from pallas_kernels.one_row.reference import BlockWeights
from pallas_kernels.one_row.vectors import row_sums
from pallas_kernels.products.kernel import activate
from pallas_kernels.products.ring import Ring

BLOCK = tuning.PRODUCT_BLOCK
SUM_BYTES = 2048  # of shared memory, which a sum over a warpgroup takes
COLUMNS = 8  # of a product: the fewest that there are


@dataclass(frozen=True)
class _Static:
    products: tuple[Product, ...]  # out, gate and up, down, and qkv unless it is the last layer
    dtype: Any
    activation: str
    eps: float
    stages: int

    @property
    def embed(self) -> int:
        return self.products[0].columns

    @property
    def has_qkv(self) -> bool:
        return len(self.products) > QKV


@dataclass(frozen=True)
class _Refs:
    seen: Any
    residual: Any
    scales: list[Any]
    weights: list[Any]
    total: Any  # the new residual
    last: Any  # qkv, or the parts of down
    sums: list[Any]  # of each product but the last: [parts, columns]
    counters: Any  # see `meeting.py`


@dataclass(frozen=True)
class _Scratch:
    x: Any  # [groups, COLUMNS, BLOCK]
    weight: Any  # [stages, ROWS, BLOCK]
    ring: Ring


def _load(static: _Static, refs: _Refs, smem: _Scratch) -> None:
    loads = jnp.int32(0)
    for product, weight in zip(static.products, refs.weights, strict=True):
        first = part_of(product) * product.steps

        def visit(row, before, product=product, weight=weight, first=first):
            def step(k, _):
                load = before + k
                late = load - tuning.ONE_ROW_IN_FLIGHT
                behind = smem.ring.full.at[smem.ring.slot(jnp.maximum(late, 0))]
                pl.when(late >= 0)(lambda: plgpu.barrier_wait(behind))
                slot = smem.ring.begin(load)
                source = weight.at[pl.ds(row, ROWS), pl.ds((first + k) * BLOCK, BLOCK)]
                plgpu.copy_gmem_to_smem(source, smem.weight.at[slot], smem.ring.full.at[slot])

            lax.fori_loop(0, product.steps, step, None)

        loads = for_each_unit(product, visit, loads)
    smem.ring.drain(loads)


def _multiply(product: Product, smem: _Scratch, out: Any, loads: jax.Array) -> jax.Array:
    """This program's share of the product with the row in shared memory; all loads until now."""
    steps = product.steps

    def sum_of_unit(before):
        def products(*accs):
            def take(group, i, is_first):
                load = before + group * COLUMNS + i
                slot = smem.ring.slot(load)
                plgpu.barrier_wait(smem.ring.full.at[slot])
                plgpu.wgmma(accs[i], smem.weight.at[slot], smem.x.at[group].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                pl.when(~is_first)(lambda: smem.ring.release(load - 1))

            def take_group(group, _):
                for i in range(COLUMNS):
                    take(group, i, (group == 0) if i == 0 else jnp.bool_(False))

            groups, rest = divmod(steps, COLUMNS)
            if groups:
                lax.fori_loop(0, groups, take_group, None)
            for i in range(rest):
                take(jnp.int32(groups), i, jnp.bool_(groups == i == 0))
            plgpu.wgmma_wait(0)
            return tuple(acc[...] for acc in accs)

        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32)
        return pl.run_scoped(products, *[accumulator] * min(COLUMNS, steps))

    def visit(row, before):
        sums = sum_of_unit(before)
        smem.ring.release(before + steps - 1)
        total = row_sums(sums)
        out.at[part_of(product), pl.ds(row, ROWS)][...] = total.astype(out.dtype)

    return for_each_unit(product, visit, loads)


def _norm(
    static: _Static, smem: _Scratch, total: jax.Array, scale: jax.Array, product: Product
) -> None:
    """Leave what this program's part of the product contracts of the normed row."""
    wide = total.astype(jnp.float32)
    inverse = lax.rsqrt((wide * wide).sum() * (1.0 / static.embed) + static.eps)
    normed = (wide * inverse * scale).astype(static.dtype)
    first = part_of(product) * product.steps
    vectors.store_operand(normed, smem.x, static.embed, first, product.steps)


def _add(static: _Static, residual: jax.Array, sums: Any, parts: int) -> jax.Array:
    """The residual and the parts, which are added up and rounded first."""
    zero = jnp.int32(0)
    added = vectors.load(sums, 0, zero, static.embed)
    for part in range(1, parts):
        added = added + vectors.load(sums, part, zero, static.embed)
    return residual + added.astype(static.dtype)


def _gate(static: _Static, sums: Any, smem: _Scratch) -> None:
    """Activate what the down product's part contracts."""
    _, gate_up, down, *_ = static.products
    width = down.steps * BLOCK
    start = part_of(down) * width

    def half(offset):
        total = vectors.load(sums, 0, start + offset, width)
        for part in range(1, gate_up.parts):
            total = total + vectors.load(sums, part, start + offset, width)
        return total

    active = activate(half(0), half(down.inner), static.activation)
    vectors.store_operand(active.astype(static.dtype), smem.x, width, jnp.int32(0), down.steps)


def _compute(static: _Static, refs: _Refs, smem: _Scratch) -> None:
    s, zero = static, jnp.int32(0)
    out, gate_up, down, *rest = s.products
    writes = lax.axis_index("program") == 0

    width = out.steps * BLOCK
    seen = vectors.load(refs.seen, 0, part_of(out) * width, width)
    vectors.store_operand(seen, smem.x, width, zero, out.steps)
    plgpu.commit_smem()
    loads = _multiply(out, smem, refs.sums[0], zero)
    meeting.arrive(refs.counters, 0)

    residual = vectors.load(refs.residual, 0, zero, s.embed)
    scale = vectors.load(refs.scales[0], 0, zero, s.embed)
    meeting.wait_for_all(refs.counters, 0)
    total = _add(s, residual, refs.sums[0], out.parts)
    _norm(s, smem, total, scale, gate_up)
    plgpu.commit_smem()
    loads = _multiply(gate_up, smem, refs.sums[1], loads)
    meeting.arrive(refs.counters, 1)

    meeting.wait_for_all(refs.counters, 1)
    _gate(s, refs.sums[1], smem)
    plgpu.commit_smem()
    if not s.has_qkv:
        meeting.leave(refs.counters)
        pl.when(writes)(lambda: vectors.store(total, refs.total, s.embed))
        _multiply(down, smem, refs.last, loads)
        return
    loads = _multiply(down, smem, refs.sums[2], loads)
    meeting.arrive(refs.counters, 2)

    scale = vectors.load(refs.scales[1], 0, zero, s.embed)
    meeting.wait_for_all(refs.counters, 2)
    meeting.leave(refs.counters)
    (qkv,) = rest
    total = _add(s, total, refs.sums[2], down.parts)
    pl.when(writes)(lambda: vectors.store(total, refs.total, s.embed))
    _norm(s, smem, total, scale, qkv)
    plgpu.commit_smem()
    _multiply(qkv, smem, refs.last, loads)


def _run_warpgroup(static: _Static, refs: _Refs, *scratch: Any) -> None:
    warpgroup = lax.axis_index("warpgroup")
    x, weight, full, free = scratch
    smem = _Scratch(x, weight, Ring(static.stages, full, free))
    pl.when(warpgroup == 0)(lambda: _compute(static, refs, smem))
    pl.when(warpgroup == 1)(lambda: _load(static, refs, smem))


def _x_groups(products: tuple[Product, ...]) -> int:
    return max(-(-product.steps // COLUMNS) for product in products)


def _scratch_types(static: _Static) -> list[Any]:
    s, operands = static, tiled(BLOCK)
    return [
        plgpu.SMEM((_x_groups(s.products), COLUMNS, BLOCK), s.dtype, transforms=operands),
        plgpu.SMEM((s.stages, ROWS, BLOCK), s.dtype, transforms=operands),
        plgpu.Barrier(num_arrivals=1, num_barriers=s.stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=s.stages),
    ]


def one_row_kernel(
    seen: Float[Array, "1 heads"],
    residual: Float[Array, "1 embed"],
    weights: BlockWeights,
    counters: Int32[Array, " counters"],
    *,
    activation: str,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The op's contract for what `goes_alone` allows."""
    products = share_out(weights)
    scales = [weights.feed_forward_scale, weights.attention_scale][: len(products) // 2]
    room = tuning.SHARED_BYTES - SUM_BYTES - _x_groups(products) * COLUMNS * BLOCK * 2
    stages = room // (ROWS * BLOCK * 2 + 16)
    static = _Static(products, seen.dtype, activation, eps, stages)

    def one_row(*refs):
        n = len(products)
        seen, residual, *rest = refs
        scales, rest = rest[: n // 2], rest[n // 2 :]
        weights, (counters, total, last, *sums) = rest[:n], rest[n:]
        arrays = _Refs(seen, residual, scales, weights, total, last, sums, counters)
        pl.run_scoped(
            lambda *scratch: _run_warpgroup(static, arrays, *scratch),
            *_scratch_types(static),
            collective_axes="warpgroup",
        )

    *sums, last = [
        jax.ShapeDtypeStruct((product.parts, product.columns), jnp.float32) for product in products
    ]
    if static.has_qkv:
        last = jax.ShapeDtypeStruct(last.shape, seen.dtype)
    counters_ref = jax.new_ref(counters)
    total, last, *_ = plgpu.kernel(
        one_row,
        out_type=(jax.ShapeDtypeStruct(residual.shape, residual.dtype), last, *sums),
        grid=(tuning.MULTIPROCESSORS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(seen, residual, *(scale[None] for scale in scales), *weights.products, counters_ref)
    return total, last if static.has_qkv else last[:, None], counters_ref[...]
