"""What weights on several devices must be."""

import jax
import numpy as np

from jaxpaged.arrays import Params
from jaxpaged.sharding import repeat_kv_heads
from jaxpaged.weights.loader import ModelFiles


def assert_laid_out(files: ModelFiles, whole: Params, params: Params) -> None:
    """`params` are `whole`, bit for bit, on the devices that `files` names, in their layout."""

    def check(path, wanted, full, part):
        full = np.asarray(full)
        if "qkv" in jax.tree_util.keystr(path):
            full = repeat_kv_heads(full, part.shape[0])
        assert wanted.sharding in (None, part.sharding)
        np.testing.assert_array_equal(full, np.asarray(part))

    jax.tree_util.tree_map_with_path(check, files.params, whole, params)
