"""Which of the machine's devices this process may use; chosen before JAX opens any."""

import os
from pathlib import Path

import jax

from jaxpaged.config.settings import ParallelSettings
from jaxpaged.engine.links import driver_ids, warn_of_slow_links
from jaxpaged.errors import ConfigError


def use_devices(settings: ParallelSettings) -> None:
    """Let JAX see the configured GPUs only, which it numbers from 0 then.

    Without effect on a CPU, or where no devices are named.

    Raises:
        ConfigError: one that is not there, or JAX was told of others before.
    """
    if settings.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {settings.data_parallel_size}, and this engine lives in its "
            "caller's process, which holds one replica: use jaxpaged serve or jaxpaged generate"
        )
    device_ids, num_gpus = settings.device_ids, count_gpus()
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return
    if num_gpus:
        ids, tp = (
            driver_ids(device_ids or range(settings.num_devices)),
            settings.tensor_parallel_size,
        )
        warn_of_slow_links([ids[start : start + tp] for start in range(0, len(ids), tp)])
    if not device_ids:
        return
    missing = [device_id for device_id in device_ids if device_id >= num_gpus]
    if num_gpus and missing:
        raise ConfigError(
            f"GPU {missing[0]} is wanted and {num_gpus} are here, numbered from 0: lower "
            "--data-parallel-size or --tensor-parallel-size, or name others by --device-ids"
        )
    wanted = ",".join(map(str, device_ids))
    before = jax.config.read("jax_cuda_visible_devices")
    if before not in ("all", wanted):
        raise ConfigError(
            f"device_ids are {wanted}, and this process uses {before} already: "
            "start another process"
        )
    jax.config.update("jax_cuda_visible_devices", wanted)
    if jax.default_backend() != "cpu" and jax.local_device_count() != len(device_ids):
        raise ConfigError(
            f"device_ids are {wanted}, but this process has opened {jax.local_device_count()} GPUs "
            "already: make the engine before other JAX work"
        )


def count_gpus() -> int:
    """NVIDIA GPUs that this process may see; 0 where none is, or nobody says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
