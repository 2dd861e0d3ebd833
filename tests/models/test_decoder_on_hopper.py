import re
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jaxpaged.core.buckets import Bucket
from jaxpaged.engine.program_source import ProgramSource
from jaxpaged.layers.attention import paged_attention
from jaxpaged.models.decoder import Decoder, init_device_state
from jaxpaged.sharding import TENSOR, Placement, laid_out
from jaxpaged.weights.loader import abstract_model
from tests.layers.shapes import TINY
from tests.support.cuda_target import H200, KERNEL, hopper_target, lower_for_hopper
from tests.support.decoding import one_row_batch


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("with_norms", [False, True])
def test_between_its_products_a_layer_is_four_kernels_and_attention(with_norms, has_bias):
    config = replace(TINY, embed=256, heads=4, kv_heads=2, head_dim=64, ffn=512)
    config = replace(config, qk_norm=with_norms, post_norms=with_norms, qkv_bias=has_bias)

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
    assert not re.search(r"stablehlo.add.*bf16", text)  # of a bias


def test_eight_gpus_run_the_same_kernels_each_on_its_heads():
    model = replace(TINY, vocab=512, embed=256, ffn=512, heads=16, kv_heads=4, head_dim=64)
    model = laid_out(replace(model, max_len=64), 8)
    mesh = AbstractMesh((8,), (TENSOR,), abstract_device=H200)
    weights = abstract_model(model, paged_attention, jnp.bfloat16, Placement((mesh,)))
    sizes = {"num_pages": 8, "page_size": 16, "max_num_seqs": 4, "dtype": jnp.bfloat16}
    source = ProgramSource(*weights, model, **sizes, mesh=mesh)
    program = source.forward(Bucket("decode", "full", 4, 4))
    with hopper_target():
        traced = program.jitted().trace(*program.arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # attention, add and norm twice, rotate and write, gate; and the last norm
    assert text.count(KERNEL) == 5 + 1
    summed = "}) : (tensor<4x256xbf16>) -> tensor<4x256xbf16>"  # how an all-reduce ends
    assert text.count(summed) == 2 + 1  # of a layer, whose text all share, and of the embedding
