import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpaged.layers.noise import gumbel_noise
from jaxpaged.sharding import TENSOR


def test_the_noise_of_a_token_is_the_same_on_any_mesh():
    keys = jax.random.split(jax.random.key(7), 3)
    alone = gumbel_noise(keys, 24)
    mesh = Mesh(jax.devices()[:4], (TENSOR,))
    split = jax.shard_map(
        lambda keys: gumbel_noise(keys, 6), mesh=mesh, in_specs=P(), out_specs=P(None, TENSOR),
        check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(split)(keys), alone)
