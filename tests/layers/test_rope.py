import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config.architecture import RopeConfig
from jaxpaged.layers.rope import frequencies, rope_angles, rotate

HEAD_DIM = 16
ROPES = [
    RopeConfig(100.0),
    RopeConfig(100.0, "linear", 4.0),
    RopeConfig(100.0, "llama3", 4.0, 32),
    RopeConfig(100.0, "yarn", 4.0, 32, attention_factor=1.0),
]


def positions(*places: int):
    return jnp.array(places, jnp.int32)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_scores_depend_on_the_distance_alone(rope):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, HEAD_DIM)), jnp.float32) for _ in range(2))

    def score(q_place, k_place):
        turned_q = rotate(q, rope_angles(positions(q_place), HEAD_DIM, rope))
        turned_k = rotate(k, rope_angles(positions(k_place), HEAD_DIM, rope))
        return float(jnp.sum(turned_q * turned_k))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_linear_scaling_stretches_positions():
    stretched = rope_angles(positions(8, 40), HEAD_DIM, RopeConfig(100.0, "linear", 4.0))
    plain = rope_angles(positions(2, 10), HEAD_DIM, RopeConfig(100.0))
    np.testing.assert_allclose(np.stack(stretched), np.stack(plain), atol=1e-5)


def test_llama3_scaling_keeps_fast_pairs_and_divides_slow_ones():
    plain = frequencies(128, RopeConfig(500_000.0))
    scaled = frequencies(128, RopeConfig(500_000.0, "llama3", 8.0, 8192))
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8, rel=1e-6)
    ratio = plain / scaled
    assert np.all(np.diff(ratio) >= -1e-6)
    assert np.any((ratio > 1.01) & (ratio < 7.99))


def test_yarn_multiplies_cosine_and_sine_by_its_attention_factor():
    rope = RopeConfig(100.0, "yarn", 4.0, 32, attention_factor=1.25)
    cos, sin = rope_angles(positions(0, 7), HEAD_DIM, rope)
    np.testing.assert_allclose(np.hypot(cos, sin), 1.25, rtol=1e-6)


def test_dynamic_scaling_changes_nothing_within_the_original_length():
    places = positions(0, 5, 31)
    dynamic = rope_angles(places, HEAD_DIM, RopeConfig(100.0, "dynamic", 2.0, 32))
    plain = rope_angles(places, HEAD_DIM, RopeConfig(100.0))
    np.testing.assert_allclose(np.stack(dynamic), np.stack(plain), atol=1e-5)


def test_dynamic_scaling_of_a_token_is_the_same_in_every_chunk():
    rope = RopeConfig(100.0, "dynamic", 2.0, 8)
    together = rope_angles(positions(3, 20, 60), HEAD_DIM, rope)
    alone = rope_angles(positions(20), HEAD_DIM, rope)
    np.testing.assert_array_equal(together[0][1], alone[0][0])


def test_angles_are_float32_and_the_rotation_keeps_the_type_of_its_input():
    cos, sin = rope_angles(positions(100_000), HEAD_DIM, RopeConfig(10_000.0))
    assert cos.dtype == sin.dtype == jnp.float32
    x = jnp.ones((1, 2, HEAD_DIM), jnp.bfloat16)
    assert rotate(x, (cos, sin)).dtype == jnp.bfloat16
