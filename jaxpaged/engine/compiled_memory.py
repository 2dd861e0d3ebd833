"""What the largest programs of a plan need, compiled from shapes: no weights, no page pool."""

import numpy as np

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.buckets import Bucket, SamplerKind
from jaxpaged.engine.capacity import MemoryPlan
from jaxpaged.engine.drafting import DraftModel
from jaxpaged.engine.program_source import ProgramSource
from jaxpaged.weights.loader import ModelFiles

LOGIT_BYTES = 4


def compiled_workspace(
    files: ModelFiles,
    plan: MemoryPlan,
    dtype: np.dtype,
    speculation: Speculation | None = None,
    sampler: SamplerKind = "full",
) -> int:
    """Bytes beside weights, pool and slots of the largest step, as XLA lays it out for the device.

    Compiles two programs, which takes some seconds.
    """
    size = plan.max_num_batched_tokens
    bucket = Bucket("mixed", sampler, size, min(size, plan.max_num_seqs))
    source = ProgramSource(
        files.graphdef,
        files.all_params,
        plan.model,
        num_pages=plan.pools.num_pages,
        num_local_pages=plan.pools.num_local_pages,
        page_size=plan.page_size,
        max_num_seqs=plan.max_num_seqs,
        dtype=dtype,
        draft=DraftModel.of(files, speculation),
    )
    programs = (source.forward(bucket), source.sample(bucket))
    found = [program.compile().memory_analysis() for program in programs]
    temps = [analysis.temp_size_in_bytes for analysis in found if analysis is not None]
    return bucket.num_logits * plan.model.vocab * LOGIT_BYTES + max(temps, default=0)
