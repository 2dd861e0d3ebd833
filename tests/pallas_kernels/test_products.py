from functools import partial

import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.products import (
    gated_product,
    gates_in_product,
    goes_in_parts,
    product_in_parts,
)
from tests.support.cuda_target import KERNEL, hopper_target, lower_for_hopper, struct


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("tokens", "ffn", "embed", "dtype"),
    [
        (128, 18944, 3584, "bfloat16"),
        (224, 13824, 5120, "bfloat16"),
        (256, 14336, 4096, "bfloat16"),
        (1160, 18944, 3584, "bfloat16"),
        (520, 64, 64, "float16"),
    ],
)
def test_on_hopper_a_gated_product_is_one_kernel(tokens, ffn, embed, dtype, activation):
    x, weight = struct(tokens, embed, dtype=dtype), struct(2, ffn, embed, dtype=dtype)
    text = lower_for_hopper(partial(gated_product, activation=activation), x, weight)
    assert text.count(KERNEL) == 1
    assert "dot_general" not in text


@pytest.mark.parametrize(
    ("tokens", "ffn", "embed", "activation", "dtype"),
    [
        (120, 128, 64, "silu", jnp.bfloat16),  # few tokens
        (192, 128, 64, "silu", jnp.bfloat16),  # a quarter of the tiles' rows would be empty
        (516, 128, 64, "silu", jnp.bfloat16),
        (512, 96, 64, "silu", jnp.bfloat16),
        (512, 128, 96, "silu", jnp.bfloat16),
        (512, 128, 64, "gelu", jnp.bfloat16),
        (512, 128, 64, "silu", jnp.float32),
    ],
)
def test_other_gated_products_are_left_to_the_library(tokens, ffn, embed, activation, dtype):
    x, weight = struct(tokens, embed, dtype=dtype), struct(2, ffn, embed, dtype=dtype)
    with hopper_target():
        assert gates_in_product(struct(512, 64), struct(2, 128, 64), activation="silu")
        assert not gates_in_product(x, weight, activation=activation)
        with pytest.raises(KernelArgumentError, match="ask gates_in_product first"):
            gated_product(x, weight, activation=activation)


def test_nothing_gates_in_a_product_without_a_hopper_gpu():
    assert not gates_in_product(struct(512, 64), struct(2, 128, 64), activation="silu")


@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "dtype"),
    [
        (256, 4096, 14336, "bfloat16"),
        (224, 5120, 13824, "bfloat16"),
        (256, 3584, 18944, "bfloat16"),
        (208, 8192, 28672, "float16"),
        (256, 4096, 8256, "bfloat16"),  # the second part is shorter
    ],
)
def test_on_hopper_a_product_in_parts_is_one_kernel_and_no_sum(tokens, columns, inner, dtype):
    text = lower_for_hopper(
        product_in_parts, struct(tokens, inner, dtype=dtype), struct(columns, inner, dtype=dtype)
    )
    assert text.count(KERNEL) == 1
    assert f"tensor<2x256x{columns}xf32>" in text
    assert "dot_general" not in text
    tiles = tuning.part_tiles(tokens, columns, inner, dtype)
    assert tiles is not None
    assert columns % tiles.columns == 0
    assert tiles.parts * 2 * columns // tiles.columns <= tuning.MULTIPROCESSORS


@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "parts", "dtype"),
    [
        (64, 4096, 4096, 2, "bfloat16"),
        (64, 4096, 14336, 2, "bfloat16"),
        (40, 5120, 13824, 3, "bfloat16"),  # 240 units in two rounds
        (48, 896, 4864, 4, "float16"),
        (64, 8192, 28672, 1, "bfloat16"),
        (64, 4096, 64, 1, "bfloat16"),  # of one block there are no parts
    ],
)
def test_on_hopper_few_tokens_go_in_parts_too(tokens, columns, inner, parts, dtype):
    x, weight = struct(tokens, inner, dtype=dtype), struct(columns, inner, dtype=dtype)
    text = lower_for_hopper(product_in_parts, x, weight)
    assert text.count(KERNEL) == 1
    assert f"tensor<{parts}x{tokens}x{columns}xf32>" in text
    assert "dot_general" not in text


@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "dtype"),
    [
        (32, 4096, 14336, "bfloat16"),  # the library reads weights as fast
        (72, 4096, 14336, "bfloat16"),
        (60, 4096, 14336, "bfloat16"),  # no multiple of the tensor cores' columns
        (64, 4128, 14336, "bfloat16"),  # half a tile of columns over
        (64, 4096, 14368, "bfloat16"),  # half a block over
        (64, 4096, 14336, "float32"),
        (128, 4096, 14336, "bfloat16"),  # one tile of rows
        (384, 4096, 14336, "bfloat16"),  # three
        (192, 4096, 14336, "bfloat16"),  # a quarter of the rows would be empty
        (250, 4096, 14336, "bfloat16"),
        (256, 3072, 18944, "bfloat16"),  # tiles of no width fill the multiprocessors
        (256, 4096, 4096, "bfloat16"),  # short sums
        (256, 4096, 14368, "bfloat16"),  # half a block over
        (256, 16384, 14336, "bfloat16"),  # more tiles than multiprocessors
        (256, 4096, 14336, "float32"),
    ],
)
def test_other_products_are_left_to_the_library(tokens, columns, inner, dtype):
    x, weight = struct(tokens, inner, dtype=dtype), struct(columns, inner, dtype=dtype)
    with hopper_target():
        assert not goes_in_parts(x, weight)
        with pytest.raises(KernelArgumentError, match="ask goes_in_parts first"):
            product_in_parts(x, weight)


def test_nothing_goes_in_parts_without_a_hopper_gpu():
    assert not goes_in_parts(struct(256, 14336), struct(4096, 14336))


def test_weights_of_another_type_are_refused():
    with pytest.raises(KernelArgumentError, match="weight is float16, allowed: bfloat16"):
        product_in_parts(struct(256, 14336), struct(4096, 14336, dtype=jnp.float16))
