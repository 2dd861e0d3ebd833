"""How many pages go to host memory, and what moving one costs against computing it again."""

from typing import Any

import jax

from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.capacity import MemoryPlan
from jaxpaged.engine.memory import GIB
from jaxpaged.errors import ConfigError

# estimates, not measured here: bytes/s between device and pinned memory, FLOP/s of a prompt
GPU_TRANSFER, GPU_COMPUTE = 40e9, 500e12
CPU_TRANSFER, CPU_COMPUTE = 4e9, 50e9


def swap_limits(config: EngineConfig, plan: MemoryPlan) -> dict[str, Any]:
    """The scheduler's limits on swapping, by field.

    Raises:
        ConfigError: swapping is asked for and there is no room for a page.
    """
    cache, mode = config.cache, config.scheduler.preemption_mode
    one_page = plan.page
    on_host = one_page * config.parallel.num_devices  # a little more, where stages are uneven
    num_host_pages = int(cache.swap_space * GIB) // on_host
    if mode == "swap" and not num_host_pages:
        raise ConfigError(
            f"--preemption-mode is swap and --swap-space {cache.swap_space} GiB holds no page of "
            f"{on_host} bytes: raise --swap-space, or set --preemption-mode to auto"
        )
    is_cpu = jax.default_backend() == "cpu"
    transfer, compute = (CPU_TRANSFER, CPU_COMPUTE) if is_cpu else (GPU_TRANSFER, GPU_COMPUTE)
    moving_s = 2 * one_page / cache.page_size / transfer
    num_params = plan.weights // (4 if is_cpu else 2)
    computing_s = 2 * num_params / compute
    return {
        "preemption_mode": mode,
        "num_host_pages": num_host_pages,
        "swap_gain": computing_s / moving_s,
    }
