"""Who multiplies what of the products of one row."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.one_row.reference import BlockWeights

ROWS = tuning.THIN_COLUMNS  # of weights, a unit
QKV = 3  # the product that comes last, but after the last layer


@dataclass(frozen=True)
class Product:
    """Sizes of a product, and how it is shared out: a program has units of one part only."""

    columns: int  # of the result: rows of weights
    inner: int  # the contracted axis
    parts: int

    @property
    def tiles(self) -> int:
        return self.columns // ROWS

    @property
    def steps(self) -> int:
        """Loads a unit."""
        return self.inner // tuning.PRODUCT_BLOCK // self.parts

    @property
    def sharers(self) -> int:
        """Programs a part."""
        return tuning.MULTIPROCESSORS // self.parts


def for_each_unit(product: Product, visit: Callable[..., None], before: jax.Array) -> jax.Array:
    """`visit(first row of weights, loads before it)` for each unit of this program; all loads."""
    p, program = product, lax.axis_index("program")
    first = lax.div(program, jnp.int32(p.parts))
    rounds = jnp.maximum(lax.div(p.tiles - first + (p.sharers - 1), jnp.int32(p.sharers)), 0)
    rounds = jnp.where(first < p.sharers, rounds, 0)

    def one(round_, _):
        visit((first + round_ * p.sharers) * ROWS, before + round_ * p.steps)

    lax.fori_loop(0, rounds, one, None)
    return before + rounds * p.steps


def part_of(product: Product) -> jax.Array:
    return lax.rem(lax.axis_index("program"), jnp.int32(product.parts))


def share_out(weights: BlockWeights) -> tuple[Product, ...]:
    """In parts, but for qkv, whose sums nobody would add up."""
    products = []
    for i, weight in enumerate(weights.products):
        columns, inner = weight.shape
        parts = 1 if i == QKV else tuning.one_row_parts(columns, inner)
        products.append(Product(columns, inner, parts))
    return tuple(products)
