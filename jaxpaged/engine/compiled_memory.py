"""What the largest programs of a plan need, compiled from shapes: no weights, no page pool."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.buckets import Bucket, SamplerKind
from jaxpaged.core.packing import PackedLayout
from jaxpaged.engine.capacity import MemoryPlan
from jaxpaged.engine.step import SamplerState, make_forward, make_sample
from jaxpaged.models.decoder import init_device_state
from jaxpaged.weights.loader import ModelFiles


def compiled_workspace(
    files: ModelFiles, plan: MemoryPlan, dtype: np.dtype, sampler: SamplerKind = "full"
) -> int:
    """Bytes beside weights, pool and slots of the largest step, as XLA lays it out for the device.

    Compiles two programs, which takes some seconds.
    """
    model, size = plan.model, plan.max_num_batched_tokens
    layout = PackedLayout(
        Bucket("mixed", sampler, size, min(size, plan.max_num_seqs)),
        -(-model.max_len // plan.page_size),
        model.vocab,
    )
    state = jax.eval_shape(
        lambda: init_device_state(model, plan.num_pages, plan.page_size, plan.max_num_seqs, dtype)
    )
    forward = jax.jit(make_forward(files.graphdef, layout), donate_argnums=1)
    logits = jax.ShapeDtypeStruct((layout.bucket.num_logits, model.vocab), jnp.float32)
    sample = jax.jit(make_sample(layout, ()), donate_argnums=0)
    sampler_state = SamplerState(state.last_token_ids, state.output_counts)
    programs = (
        forward.lower(files.params, state, _words(layout.forward_size)),
        sample.lower(sampler_state, logits, _words(layout.sample_size)),
    )
    found = [program.compile().memory_analysis() for program in programs]
    temps = [analysis.temp_size_in_bytes for analysis in found if analysis is not None]
    return logits.size * logits.dtype.itemsize + max(temps, default=0)


def _words(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)
