"""How many pages fit, and what to say when they do not."""

import os

import jax
import numpy as np

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.settings import EngineConfig
from jaxpaged.errors import ConfigError

GIB = 2**30
CPU_MARGIN = 0.8  # share of the host memory that is free which the pool may take


def page_bytes(model: ModelConfig, page_size: int, dtype: np.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    elements = 2 * model.num_layers * page_size * model.kv_heads * model.head_dim
    return elements * np.dtype(dtype).itemsize


def choose_num_pages(
    config: EngineConfig, model: ModelConfig, dtype: np.dtype, max_num_seqs: int, workspace: int
) -> int:
    """Pages of the pool, the null page included.

    On a GPU: what XLA's allocator may still take (its limit was set to the wanted share when the
    device was opened), less `workspace` bytes for activations and programs. On a CPU:
    `cpu_kvcache_space`. Never more than all running sequences can use at the model's full length.

    Raises:
        ConfigError: not even one sequence of 2 pages fits; names needed, free and what to change.
    """
    cache = config.cache
    one_page = page_bytes(model, cache.page_size, dtype)
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    available = _available_bytes(config, workspace)
    num_pages = available // one_page
    if num_pages < 3:
        raise ConfigError(
            f"the page pool needs at least {3 * one_page / GIB:.3f} GiB and "
            f"{max(available, 0) / GIB:.3f} GiB are free for it: raise --gpu-memory-utilization "
            f"(now {cache.gpu_memory_utilization}), or lower --max-num-batched-tokens"
        )
    most_useful = 1 + max_num_seqs * -(-model.max_len // cache.page_size)
    return int(min(num_pages, most_useful))


def limit_device_memory(share: float) -> None:
    """Tell XLA how much of the GPU it may take. Works only before JAX opens the device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.4f}")


def workspace_bytes(
    model: ModelConfig, dtype: np.dtype, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """What a step needs beside weights and pool: activations, logits, programs, a margin."""
    a_token = (8 * model.embed + 3 * model.ffn + 4 * model.heads * model.head_dim) * dtype.itemsize
    logits = 6 * max_num_seqs * model.vocab * 4
    return max_num_batched_tokens * a_token + logits + GIB


def _available_bytes(config: EngineConfig, workspace: int) -> int:
    cache = config.cache
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if jax.default_backend() == "cpu":
        wanted = int(cache.cpu_kvcache_space * GIB)
        return min(wanted, int(CPU_MARGIN * _free_host_bytes()))
    stats = jax.devices()[0].memory_stats() or {}
    limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    return limit - used - workspace


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**62
