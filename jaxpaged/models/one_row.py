"""A step of one row through the decoder's layers: three launches a layer, not eight.

From attention to the next layer's queries it is one kernel, `pallas_kernels/one_row`, so a layer
here begins with its queries, and ends with those of the next.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.arrays import KVPages, Params, RaggedBatch
from jaxpaged.layers.linear import Addend, linear
from jaxpaged.layers.rope import Angles
from jaxpaged.sharding import num_shards
from pallas_kernels.one_row import BlockWeights, goes_alone, new_counters, one_row_block

type Arguments = tuple[Angles, KVPages, RaggedBatch]


def is_one_row(layers: Sequence[Any], x: Float[Array, "tokens embed"]) -> bool:
    """Whether `run_layers_of_one_row` takes such layers, decoder layers of `models/decoder.py`."""

    def fits(layer: Any) -> bool:
        block, feed_forward = layer.attention, layer.feed_forward
        biases = block.out_bias, feed_forward.gate_up_bias, feed_forward.down_bias
        is_plain = not block.is_normed and all(bias is None for bias in biases)
        return is_plain and goes_alone(_weights(layer), activation=feed_forward.activation)

    return len(x) == 1 and num_shards() == 1 and all(fits(layer) for layer in layers)


def run_layers_of_one_row(
    layers: Sequence[Any], x: Float[Array, "1 embed"], arguments: Sequence[Arguments]
) -> tuple[Float[Array, "1 embed"], Addend, tuple[KVPages, ...]]:
    """The residual, what the last layer adds to it, and the pages with this row's KV.

    `arguments` are each layer's angles, pages and batch.
    """
    qkv = linear(layers[0].attention_norm(x), layers[0].attention.qkv, None)
    counters, written = new_counters(), []
    for layer, following, mine in zip(layers, [*layers[1:], None], arguments, strict=True):
        graphdef, weights = nnx.split(layer)
        params, block = nnx.to_pure_dict(weights), _weights(layer, following)
        x, qkv, pages, counters = _run_layer(graphdef, params, block, x, qkv, mine, counters)
        written.append(pages)
    return x, qkv, tuple(written)


def _weights(layer: Any, following: Any = None) -> BlockWeights:
    attention, feed_forward = layer.attention, layer.feed_forward
    block = BlockWeights(
        attention.out[...],
        layer.feed_forward_norm.scale[...],
        feed_forward.gate_up[...],
        feed_forward.down[...],
    )
    if following is None:
        return block
    qkv = following.attention.qkv[...]
    scale = following.attention_norm.scale[...]
    return block._replace(attention_scale=scale, qkv=qkv.reshape(-1, qkv.shape[-1]))


# layers of one kind share one trace, as in `models/decoder.py`
@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef,
    params: Params,
    block: BlockWeights,
    x: Float[Array, "1 embed"],
    qkv: Float[Array, "1 columns"],
    arguments: Arguments,
    counters: Int32[Array, " counters"],
) -> tuple[Float[Array, "1 embed"], Addend, KVPages, Int32[Array, " counters"]]:
    layer = nnx.merge(graphdef, params)
    seen, pages = layer.attention.attend_to(qkv, *arguments)
    x, last, counters = one_row_block(
        seen.astype(x.dtype),
        x,
        block,
        counters,
        activation=layer.feed_forward.activation,
        eps=layer.feed_forward_norm.eps,
    )
    return x, last, pages, counters
