"""The gated activation as one Mosaic GPU kernel: 16 bytes an access, whatever the width."""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.mosaic import inline

VECTOR = 8  # values of an access: 16 bytes
THREADS = 128  # a program
MANY_VECTORS = 4096 * THREADS  # with more than these, a thread takes two


def supports(ffn: int, activation: str, dtype: DTypeLike) -> bool:
    """Whether the kernel takes rows of this width, activation and type."""
    return tuning.is_16_bit(dtype) and ffn % VECTOR == 0 and activation in ("silu", "gelu_tanh")


def _places(program: Any, vectors: int, row_vectors: int, total: int) -> list[tuple[Any, Any]]:
    """(row, first column) of each vector of this thread; past the end the last one, again."""
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    first = arith.addi(arith.muli(program, mgpu.c(vectors * THREADS, i32)), mgpu.thread_idx())
    places = []
    for i in range(vectors):
        item = arith.addi(first, mgpu.c(i * THREADS, i32))
        item = arith.minui(item, mgpu.c(total - 1, i32))
        row = arith.divui(item, mgpu.c(row_vectors, i32))
        column = arith.muli(arith.remui(item, mgpu.c(row_vectors, i32)), mgpu.c(VECTOR, i32))
        places.append((arith.index_cast(index, row), arith.index_cast(index, column)))
    return places


def _gated(both: Any, out: Any, *, vectors: int, activation: str) -> None:
    rows, ffn = out.shape
    row_vectors, total = ffn // VECTOR, rows * ffn // VECTOR
    width = vectors * THREADS * VECTOR
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=VECTOR)
    scalar = plgpu.Layout.WG_SPLAT(())
    loaded = plgpu.ShapeDtypeStruct((width,), both.dtype, layout=layout)

    @inline(arg_types=(plgpu.RefType(), scalar), return_type=(loaded, loaded))
    def load(_, both, program):
        kind = ir.VectorType.get((VECTOR,), both.type.element_type)
        places = _places(program.registers.item(), vectors, row_vectors, total)

        def half(offset):
            registers = np.empty(layout.to_mgpu().registers_shape((width,)), dtype=object)
            for i, (row, column) in enumerate(places):
                column = arith.addi(column, mgpu.c(offset, ir.IndexType.get()))
                registers[i] = vector.load(kind, both, [row, column])
            return mgpu.FragmentedArray(
                _registers=registers, _layout=layout.to_mgpu(), _is_signed=None
            )

        return half(0), half(ffn)

    @inline(arg_types=(plgpu.RefType(), layout, scalar))
    def store(_, out, values, program):
        places = _places(program.registers.item(), vectors, row_vectors, total)
        for register, place in zip(values.registers.flat, places, strict=True):
            vector.store(register, out, list(place))

    program = lax.axis_index("program")
    gate, up = (x.astype(jnp.float32) for x in load(both, program))
    if activation == "silu":
        doubled = gate
    else:  # gelu's (1 + tanh(z)) / 2 is the logistic function of 2 z
        doubled = (2 * math.sqrt(2 / math.pi)) * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + jnp.exp(-doubled))
    store(out, (active * up).astype(out.dtype), program)


def gated_kernel(both: Float[Array, "rows both"], *, activation: str) -> Float[Array, "rows ffn"]:
    """The op's contract for what `supports` allows."""
    rows, width = both.shape
    ffn = width // 2
    total = rows * ffn // VECTOR
    vectors = 2 if total > MANY_VECTORS else 1

    @functools.wraps(_gated)
    def body(*refs):
        _gated(*refs, vectors=vectors, activation=activation)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, ffn), both.dtype),
        grid=(-(-total // (vectors * THREADS)),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(both)
