"""Where weights live on several devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpaged.config.settings import ParallelSettings
from jaxpaged.errors import ConfigError
from jaxpaged.layers.attention import paged_attention
from jaxpaged.sharding import TENSOR, laid_out, make_placement, repeat_kv_heads
from jaxpaged.weights.loader import abstract_model
from tests.layers.shapes import TINY

MODEL = replace(
    TINY, vocab=16, ffn=8, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True,
    attention_sinks=True, post_norms=True, layer_kinds=TINY.layer_kinds[:1] * 3,
)  # fmt: skip


def test_every_weight_is_split_by_the_meaning_of_its_axes_on_its_stage():
    placement = make_placement(ParallelSettings(tensor_parallel_size=4, pipeline_parallel_size=2))
    assert placement is not None
    params = abstract_model(laid_out(MODEL, 4), paged_attention, jnp.float32, placement)[1]
    first, last = placement.stages
    split = {
        "['qkv']": P(TENSOR), "['qkv_bias']": P(TENSOR), "['sinks']": P(TENSOR),
        "['out']": P(None, TENSOR), "['down']": P(None, TENSOR), "['table']": P(TENSOR),
        "['gate_up']": P(None, TENSOR), "['gate_up_bias']": P(None, TENSOR),
    }  # fmt: skip
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        assert leaf.sharding.spec == split.get(name[name.rindex("[") :], P()), name
        of_first = ("['embedding']", "['layers'][0]", "['layers'][1]")
        wanted = first if name.startswith(of_first) else last
        assert leaf.sharding.mesh == wanted, name


def test_one_default_device_needs_no_mesh_and_any_other_does():
    assert make_placement(ParallelSettings()) is None
    placement = make_placement(ParallelSettings(), jax.devices()[3:])
    assert placement is not None
    assert placement.devices == jax.devices()[3:4]


def test_few_kv_heads_are_repeated_with_their_query_heads_in_place():
    assert laid_out(MODEL, 4).kv_heads == 4
    fused = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    repeated = repeat_kv_heads(fused, 4)
    assert np.array_equal(repeated[:, 0].reshape(2, 2, 3), fused[:, :2])
    assert np.array_equal(repeated[1, 1:], fused[0, 2:])
    assert np.array_equal(repeated[2, 1:], fused[1, 2:])


@pytest.mark.parametrize(("size", "said"), [(3, "heads of 4"), (8, "heads of 4")])
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(size, said):
    with pytest.raises(ConfigError, match=f"{said}: this model can take 1, 2, 4"):
        laid_out(MODEL, size)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="needs 16 devices, there are 8"):
        make_placement(ParallelSettings(tensor_parallel_size=4, pipeline_parallel_size=4))
