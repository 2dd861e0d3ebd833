"""Paged-attention LLM inference in JAX.

Names are looked up when first used, so that importing a part that needs no device stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.arrays import KVPages, RaggedBatch
    from jaxpaged.core.beams import BeamSearchParams
    from jaxpaged.core.params import OutputKind, SamplingParams
    from jaxpaged.core.repetition import RepetitionDetectionParams
    from jaxpaged.core.structured import StructuredOutputsParams
    from jaxpaged.engine.async_engine import AsyncLLM
    from jaxpaged.engine.llm import LLM
    from jaxpaged.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxpaged.engine.pooling.offline import PoolingParams
    from pallas_kernels.spec import AttentionSpec

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "jaxpaged.engine.async_engine",
    "AttentionSpec": "pallas_kernels.spec",
    "BeamSearchParams": "jaxpaged.core.beams",
    "CompletionOutput": "jaxpaged.engine.outputs",
    "KVPages": "jaxpaged.arrays",
    "LLM": "jaxpaged.engine.llm",
    "Logprob": "jaxpaged.engine.outputs",
    "OutputKind": "jaxpaged.core.params",
    "PoolingParams": "jaxpaged.engine.pooling.offline",
    "RaggedBatch": "jaxpaged.arrays",
    "RepetitionDetectionParams": "jaxpaged.core.repetition",
    "RequestOutput": "jaxpaged.engine.outputs",
    "SamplingParams": "jaxpaged.core.params",
    "StructuredOutputsParams": "jaxpaged.core.structured",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionSpec",
    "BeamSearchParams",
    "CompletionOutput",
    "KVPages",
    "Logprob",
    "OutputKind",
    "PoolingParams",
    "RaggedBatch",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
