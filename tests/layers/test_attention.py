from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.config.architecture import LayerKind
from jaxpaged.layers.attention import Attention, paged_attention
from jaxpaged.layers.rope import rope_angles
from tests.layers.shapes import TINY
from tests.support.decoding import one_row_batch, poisoned_state


def run(config, attend, count=5, kind=None):
    kind = kind or config.layer_kinds[0]
    layer = Attention(config, kind, attend, dtype=jnp.float32, rngs=nnx.Rngs(0))
    batch = one_row_batch([0] * count, 0)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((count, config.embed)), jnp.float32)
    angles = rope_angles(batch.positions, config.head_dim, kind.rope)
    out, pages = layer(x, angles, poisoned_state(config).kv_pages[0], batch)
    return layer, x, out, pages, batch


def test_a_lone_token_attends_to_its_own_value():
    layer, x, out, *_ = run(TINY, paged_attention, count=1)
    value = np.einsum("D,KHD->KH", x[0], np.asarray(layer.qkv[...])[:, -1])
    heads = np.repeat(value, TINY.heads // TINY.kv_heads, axis=0).reshape(-1)
    np.testing.assert_allclose(out[0], np.asarray(layer.out[...]) @ heads, rtol=1e-4, atol=1e-5)


def test_kv_is_written_before_anyone_attends():
    seen = {}

    def attend(q, pages, batch, *, spec):
        page, offset = batch.slot_mapping // 4, batch.slot_mapping % 4
        seen["keys"] = pages.k[page, :, offset]
        return jnp.zeros_like(q)

    run(TINY, attend)
    assert np.isfinite(seen["keys"]).all()


def test_another_attention_op_takes_the_place_of_paged_attention():
    def attend(q, pages, batch, *, spec):
        return jnp.full_like(q, 2.0)

    layer, _, out, *_ = run(TINY, attend)
    want = 2 * np.asarray(layer.out[...]).sum(-1)
    np.testing.assert_allclose(out, np.broadcast_to(want, out.shape), rtol=1e-5, atol=1e-5)


def test_the_op_is_told_scale_window_and_soft_cap():
    specs = []

    def attend(q, pages, batch, *, spec):
        specs.append(spec)
        return q

    config = replace(TINY, attention_scale=0.3, attention_soft_cap=50.0)
    run(config, attend, kind=LayerKind(3, TINY.layer_kinds[0].rope))
    assert (specs[0].scale, specs[0].window, specs[0].soft_cap) == (0.3, 3, 50.0)


def test_sinks_take_their_share_of_the_softmax():
    config = replace(TINY, attention_sinks=True)
    kind = config.layer_kinds[0]
    layer = Attention(config, kind, paged_attention, dtype=jnp.float32, rngs=nnx.Rngs(0))
    batch = one_row_batch([0], 0)
    x = jnp.ones((1, config.embed))
    angles = rope_angles(batch.positions, config.head_dim, kind.rope)

    def output():
        return np.asarray(layer(x, angles, poisoned_state(config).kv_pages[0], batch)[0])

    layer.sinks[...] = jnp.full(config.heads, -1e9)
    without = output()
    layer.sinks[...] = jnp.full(config.heads, 1e9)
    assert np.abs(without).max() > 1e-3
    np.testing.assert_allclose(output(), np.zeros_like(without), atol=1e-6)
