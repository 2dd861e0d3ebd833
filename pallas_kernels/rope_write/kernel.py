"""Rotation and KV write as one Mosaic GPU kernel: a thread turns 8 pairs of a head and stores them.

The places that a thread reads and writes depend on its head and on the token's slot, so loads and
stores are written per thread; the arithmetic between them is plain jax.numpy.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import tuning
from pallas_kernels.mosaic import inline
from pallas_kernels.rope_write.reference import HeadNorms

VECTOR = 8  # values of an access: 16 bytes
THREADS = 128  # a program
WARP = 32
WIDTH = VECTOR * THREADS  # values of a program's array: a vector a thread
LAYOUT = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=VECTOR)
SCALAR = plgpu.Layout.WG_SPLAT(())


def supports(head_dim: int, has_norms: bool, dtype: DTypeLike) -> bool:
    """Whether the kernel takes heads of this width and type."""
    lanes, rest = divmod(head_dim, 2 * VECTOR)
    return (
        tuning.is_16_bit(dtype)
        and rest == 0
        and (not has_norms or (lanes <= WARP and lanes & (lanes - 1) == 0))
    )


@dataclass(frozen=True)
class _Static:
    tokens: int
    kv_heads: int
    group: int  # query heads of a KV head; its key and its value follow them
    head_dim: int
    page_size: int
    num_pages: int
    eps: float
    has_bias: bool

    @property
    def lanes(self) -> int:
        """Threads that share a head."""
        return self.head_dim // 2 // VECTOR

    @property
    def items(self) -> int:
        """Threads that have work."""
        return self.tokens * self.kv_heads * (self.group + 2) * self.lanes


@dataclass(frozen=True)
class _Place:
    """Where a thread works: i32, but for the columns, which are indices."""

    head: Any  # row of qkv
    token: Any
    kv_head: Any
    block: Any  # of the KV head: a query head, then key, then value
    first: Any  # column
    second: Any


def _number(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _place(static: _Static, program: Any) -> _Place:
    s = static
    item = arith.addi(arith.muli(program, _number(THREADS)), mgpu.thread_idx())
    item = arith.minui(item, _number(s.items - 1))  # past the end the last one, again
    head, lane = arith.divui(item, _number(s.lanes)), arith.remui(item, _number(s.lanes))
    owner, block = arith.divui(head, _number(s.group + 2)), arith.remui(head, _number(s.group + 2))
    token = arith.divui(owner, _number(s.kv_heads))
    kv_head = arith.remui(owner, _number(s.kv_heads))
    first = arith.muli(lane, _number(VECTOR))
    second = arith.addi(first, _number(s.head_dim // 2))
    return _Place(head, token, kv_head, block, _index(first), _index(second))


def _array(register: Any) -> mgpu.FragmentedArray:
    registers = np.array([None], dtype=object)
    registers[0] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)


def _values(dtype: Any) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((WIDTH,), dtype, layout=LAYOUT)


def _load(static: _Static, qkv: Any, cos: Any, sin: Any, program: jax.Array) -> list[jax.Array]:
    """First and second half of each pair, in qkv's type, then cosines and sines."""
    ref = plgpu.RefType()

    @inline(
        arg_types=(ref, ref, ref, SCALAR),
        return_type=[_values(qkv.dtype)] * 2 + [_values(jnp.float32)] * 2,
    )
    def load(_, qkv, cos, sin, program):
        place = _place(static, program.registers.item())
        kind = ir.VectorType.get((VECTOR,), qkv.type.element_type)
        wide = ir.VectorType.get((VECTOR,), ir.F32Type.get())
        head, token = _index(place.head), _index(place.token)
        return [
            _array(vector.load(kind, qkv, [head, place.first])),
            _array(vector.load(kind, qkv, [head, place.second])),
            _array(vector.load(wide, cos, [token, place.first])),
            _array(vector.load(wide, sin, [token, place.first])),
        ]

    return load(qkv, cos, sin, program)


def _load_bias(static: _Static, bias: Any, program: jax.Array) -> list[jax.Array]:
    """The bias of first and second half of this thread's pairs, in qkv's type."""

    @inline(arg_types=(plgpu.RefType(), SCALAR), return_type=[_values(bias.dtype)] * 2)
    def load(_, bias, program):
        place = _place(static, program.registers.item())
        kind = ir.VectorType.get((VECTOR,), bias.type.element_type)
        row = arith.addi(arith.muli(place.kv_head, _number(static.group + 2)), place.block)
        columns = place.first, place.second
        return [_array(vector.load(kind, bias, [_index(row), column])) for column in columns]

    return load(bias, program)


def _load_factors(
    static: _Static, q_factor: Any, k_factor: Any, program: jax.Array
) -> list[jax.Array]:
    """The head norm's factors for this thread's pairs."""
    ref = plgpu.RefType()

    @inline(arg_types=(ref, ref, SCALAR), return_type=[_values(jnp.float32), _values(jnp.float32)])
    def load(_, q_factor, k_factor, program):
        place = _place(static, program.registers.item())
        wide = ir.VectorType.get((VECTOR,), ir.F32Type.get())
        is_q = arith.cmpi(arith.CmpIPredicate.ult, place.block, _number(static.group))

        def pick(column):
            of_q, of_k = (vector.load(wide, ref, [column]) for ref in (q_factor, k_factor))
            return _array(arith.select(is_q, of_q, of_k))

        return [pick(place.first), pick(place.second)]

    return load(q_factor, k_factor, program)


def _sum_over_head(static: _Static, x: jax.Array) -> jax.Array:
    """The sum of a head's values, in each element of the result."""

    @inline(arg_types=(LAYOUT,), return_type=_values(jnp.float32))
    def summed(_, x):
        f32 = ir.F32Type.get()
        total = vector.reduction(f32, vector.CombiningKind.ADD, x.registers.item())
        distance = static.lanes // 2
        while distance:
            total = arith.addf(total, utils.shfl_bfly(total, distance))
            distance //= 2
        return _array(vector.broadcast(ir.VectorType.get((VECTOR,), f32), total))

    return summed(x)


def _store(
    static: _Static,
    refs: tuple[Any, ...],
    plain: tuple[jax.Array, jax.Array],
    turned: tuple[jax.Array, jax.Array],
    program: jax.Array,
) -> None:
    """Store turned queries and keys and plain values; `refs` are slots, q, k_pages, v_pages."""
    s, ref = static, plgpu.RefType()

    @inline(arg_types=(*[ref] * 4, *[LAYOUT] * 4, SCALAR))
    def store(_, slots, q, k_pages, v_pages, *values_and_program):
        *values, program = (x.registers.item() for x in values_and_program)
        plain, turned = values[:2], values[2:]
        place = _place(s, program)
        slot = memref.load(slots, [_index(place.token)])  # early: it takes long

        def is_block(i):
            return arith.cmpi(arith.CmpIPredicate.eq, place.block, _number(i))

        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, place.block, _number(s.group))):
            row = arith.addi(arith.muli(place.token, _number(s.kv_heads)), place.kv_head)
            row = _index(arith.addi(arith.muli(row, _number(s.group)), place.block))
            vector.store(turned[0], q, [row, place.first])
            vector.store(turned[1], q, [row, place.second])

        page = arith.divui(slot, _number(s.page_size))
        offset = _index(arith.remui(slot, _number(s.page_size)))
        in_pool = arith.cmpi(arith.CmpIPredicate.ult, page, _number(s.num_pages))
        for block, pages, (first, second) in (
            (s.group, k_pages, turned),
            (s.group + 1, v_pages, plain),
        ):
            with mgpu.when(arith.andi(is_block(block), in_pool)):
                start = [_index(page), _index(place.kv_head), offset]
                vector.store(first, pages, [*start, place.first])
                vector.store(second, pages, [*start, place.second])

    store(*refs, *plain, *turned, program)


def _rotate_and_write(static: _Static, refs: tuple[Any, ...]) -> None:
    qkv, cos, sin, slots, k_pages, v_pages, *factors, q = refs
    bias = factors.pop(0) if static.has_bias else None
    program = lax.axis_index("program")
    first, second, cosine, sine = _load(static, qkv, cos, sin, program)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    if bias is not None:
        first_bias, second_bias = _load_bias(static, bias, program)
        a, b = a + first_bias.astype(jnp.float32), b + second_bias.astype(jnp.float32)
        first, second = a.astype(first.dtype), b.astype(second.dtype)
    if factors:
        q_factor, k_factor = factors
        first_factor, second_factor = _load_factors(static, q_factor, k_factor, program)
        mean_square = _sum_over_head(static, a * a + b * b) * (1.0 / static.head_dim)
        inverse = lax.rsqrt(mean_square + static.eps)
        a, b = a * inverse * first_factor, b * inverse * second_factor
    turned = (a * cosine - b * sine).astype(q.dtype), (b * cosine + a * sine).astype(q.dtype)
    _store(static, (slots, q, k_pages, v_pages), (first, second), turned, program)


def rotate_and_write_kernel(
    qkv: Float[Array, "tokens kv_heads blocks head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    slot_mapping: Int32[Array, " tokens"],
    *,
    norms: HeadNorms | None,
    eps: float,
    bias: Float[Array, "kv_heads blocks head_dim"] | None,
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
]:
    """The op's contract for what `supports` allows; a normed head is not rounded before turning."""
    tokens, kv_heads, blocks, head_dim = qkv.shape
    num_pages, _, page_size, _ = k_pages.shape
    static = _Static(
        tokens, kv_heads, blocks - 2, head_dim, page_size, num_pages, eps, bias is not None
    )
    heads = kv_heads * static.group

    @functools.wraps(_rotate_and_write)
    def body(*refs):
        _rotate_and_write(static, refs)

    # as mutable references the pools are written in place and need no result
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    q = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens * heads, head_dim), qkv.dtype),
        grid=(-(-static.items // THREADS),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(
        qkv.reshape(-1, head_dim),
        cos,
        sin,
        slot_mapping,
        k_ref,
        v_ref,
        *(() if bias is None else (bias.reshape(-1, head_dim),)),
        *(() if norms is None else norms),
    )
    return q.reshape(tokens, heads, head_dim), k_ref[...], v_ref[...]
