from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.arrays import RaggedBatch
from jaxpaged.config.architecture import LayerKind, RopeConfig
from jaxpaged.layers import linear
from jaxpaged.layers.attention import paged_attention
from jaxpaged.models.decoder import Decoder, init_device_state, input_ids
from tests.layers.shapes import TINY
from tests.support.decoding import forward, one_row_batch, poisoned_state
from tests.support.products import in_two_parts

NEAR, FAR = LayerKind(3, RopeConfig(100.0)), LayerKind(None, RopeConfig(100.0))


def test_layers_of_one_kind_are_traced_once():
    traces = []

    def attend(q, pages, batch, *, spec):
        traces.append(spec.window)
        return q

    config = replace(TINY, layer_kinds=(NEAR, NEAR, FAR, NEAR, FAR, NEAR))
    model = Decoder(config, attend, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, weights = nnx.split(model)

    def step(params, state, batch):
        return nnx.merge(graphdef, params)(batch, state)

    jax.jit(step).trace(nnx.to_pure_dict(weights), poisoned_state(config), one_row_batch([1, 2], 0))
    assert sorted(traces, key=str) == [3, None]


def test_each_layer_writes_its_own_pages():
    model = Decoder(TINY, lambda q, *_, spec: q, dtype=jnp.float32, rngs=nnx.Rngs(0))
    before = poisoned_state(TINY)
    _, after = model(one_row_batch([1, 2, 3], 0), before)
    first, second = (np.asarray(pages.k) for pages in after.kv_pages)
    written = np.isfinite(first).all((1, 3))
    assert written[1:].sum() == 3
    np.testing.assert_array_equal(np.isfinite(second).all((1, 3)), written)
    assert not np.allclose(first[-1, :, :3], second[-1, :, :3])


def mixed_batch(from_last: list[bool]) -> RaggedBatch:
    batch = one_row_batch([5, 6, 7, 8], 0, padding=1)
    return replace(
        batch,
        cu_q_lens=jnp.array([0, 1, 3, 4], jnp.int32),
        seq_slots=jnp.array([2, 0, 1], jnp.int32),
        from_last=jnp.array([*from_last, False]),
    )


def test_tokens_that_the_host_has_not_read_come_from_the_rows_slot():
    last = jnp.array([10, 20, 30, 40], jnp.int32)
    ids = input_ids(mixed_batch([True, False, True, True]), last)
    np.testing.assert_array_equal(ids[:4], [30, 6, 10, 20])
    decode = replace(
        mixed_batch([True, False, True, False]),
        token_ids=jnp.array([5, 6, 7], jnp.int32),
        from_last=jnp.array([True, False, True]),
        is_decode_only=True,
    )
    np.testing.assert_array_equal(input_ids(decode, last), [30, 6, 20])


def test_the_device_state_has_a_spare_slot_and_a_pool_a_layer():
    state = init_device_state(TINY, 5, 4, 3, jnp.bfloat16)
    assert len(state.kv_pages) == TINY.num_layers
    assert state.kv_pages[0].k.shape == (5, TINY.kv_heads, 4, TINY.head_dim)
    assert state.kv_pages[0].v.dtype == jnp.bfloat16
    assert state.last_token_ids.shape == (4,)
    assert (state.output_counts.shape, state.output_counts.dtype) == ((4, TINY.vocab), jnp.int16)


def test_tied_embeddings_have_no_head_of_their_own():
    def paths(config):
        shape = nnx.eval_shape(
            lambda: Decoder(config, lambda q, *_, spec: q, dtype=jnp.float32, rngs=nnx.Rngs(0))
        )
        return set(nnx.to_pure_dict(nnx.state(shape)))

    assert "lm_head" in paths(TINY)
    assert "lm_head" not in paths(replace(TINY, tied_embeddings=True))


def test_logits_are_capped_softly():
    config = replace(TINY, logit_soft_cap=2.0)
    model = Decoder(config, lambda q, *_, spec: q, dtype=jnp.float32, rngs=nnx.Rngs(0))
    hidden = 100 * jnp.ones((1, config.embed))
    capped = model.unembed(hidden)
    np.testing.assert_allclose(capped, 2 * np.tanh(model.lm_head.logits(hidden) / 2), rtol=1e-5)
    assert np.abs(capped).max() <= 2


@pytest.mark.parametrize("post_norms", [False, True])
def test_both_blocks_may_leave_their_sums_in_parts_to_the_norm(post_norms, monkeypatch):
    """In every layer, before the last norm and before another stage; not where it is normed."""
    config, calls = replace(TINY, post_norms=post_norms), []

    def in_parts(x, weight):
        calls.append(x.shape)
        return in_two_parts(x, weight)

    def run():
        model = Decoder(config, lambda q, *_, spec: q, dtype=jnp.float32, rngs=nnx.Rngs(0))
        batch, state = one_row_batch([1, 2, 3], 0), poisoned_state(config)
        passed_on, _ = model.pass_on(state.last_token_ids, batch, state.kv_pages)
        return model(batch, state)[0], passed_on

    wanted = run()
    monkeypatch.setattr(linear, "goes_in_parts", lambda x, weight: True)
    monkeypatch.setattr(linear, "product_in_parts", in_parts)
    jax.clear_caches()  # layers are traced once for all
    for got, whole in zip(run(), wanted, strict=True):
        np.testing.assert_allclose(got, whole, atol=1e-5)
    inner = {TINY.ffn, TINY.heads * TINY.head_dim}
    assert set(calls) == (set() if post_norms else {(3, width) for width in inner})
    # a layer's trace, and what the first one is given, of both runs
    assert len(calls) == (0 if post_norms else 2 + 2)
    jax.clear_caches()


@pytest.mark.parametrize("decode_only", [False, True])
def test_the_page_pool_is_changed_in_place(decode_only):
    """No copy of the pool: it is aliased to the result, and temporaries stay far smaller."""
    config = replace(TINY, layer_kinds=(FAR,))
    model = Decoder(config, paged_attention, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, weights = nnx.split(model)
    state = init_device_state(config, 3000, 4, 2, jnp.float32)
    batch = one_row_batch([1] if decode_only else [1, 2, 3], 0, decode_only=decode_only)
    compiled = forward.lower(graphdef, nnx.to_pure_dict(weights), state, batch).compile()
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.kv_pages))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10
