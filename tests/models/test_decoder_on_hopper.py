from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpaged.models.decoder import Decoder, init_device_state
from tests.layers.shapes import TINY
from tests.support.cuda_target import KERNEL, lower_for_hopper
from tests.support.decoding import one_row_batch


@pytest.mark.parametrize("with_norms", [False, True])
def test_between_its_products_a_layer_is_four_kernels_and_attention(with_norms):
    config = replace(TINY, embed=256, heads=4, kv_heads=2, head_dim=64, ffn=512)
    config = replace(config, qk_norm=with_norms, post_norms=with_norms)

    def attend(q, pages, batch, *, spec):
        return q

    decoder = Decoder(config, attend, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, weights = nnx.split(decoder)
    text = lower_for_hopper(
        lambda params, batch, state: nnx.merge(graphdef, params)(batch, state),
        nnx.to_pure_dict(weights),
        one_row_batch([0, 1, 2], 0),
        init_device_state(config, 8, 16, 4, jnp.bfloat16),
        donate=(2,),
    )
    # add and norm twice, rotate and write, gate; every layer runs the same lowered function
    assert text.count(KERNEL) == 4 + 1  # and the last norm
