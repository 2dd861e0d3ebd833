"""The device's memory: how much there is, and how much of it this process may take."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxpaged.config.settings import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.metrics import EngineMetrics

GIB = 2**30
CPU_MARGIN = 0.8  # share of the host memory that is free which the pool may take

# by a name's beginning, longest first: MiB that the driver shows, GB/s of the sheet
GPUS = {
    "B200": (183_359, 8000),
    "H200": (143_771, 4800),
    "H100": (81_559, 3350),
    "H20": (97_871, 4000),
    "A100-40": (40_960, 1555),
    "A100": (81_920, 1935),
    "A10": (23_028, 600),
    "L40S": (46_068, 864),
    "L40": (46_068, 864),
    "L4": (23_034, 300),
    "RTX 4090": (24_564, 1008),
    "RTX 3090": (24_576, 936),
    "T4": (15_360, 300),
}
OTHER_GPU = 1000  # GB/s of one that is not among these
HOPPER = ("H200", "H100", "H20")
REACHED = 0.9  # share of the sheet's bandwidth that reading weights comes to


@dataclass(frozen=True)
class DeviceMemory:
    """A device as the planner sees it.

    On a CPU only the page pool counts, and `total_bytes` is what the pool may take at most.
    """

    name: str
    total_bytes: int
    is_cpu: bool

    @property
    def bytes_per_s(self) -> float:
        """At which a GPU reads weights, about."""
        known = _known(self.name)
        return REACHED * 1e9 * (GPUS[known][1] if known else OTHER_GPU)

    @property
    def is_hopper(self) -> bool:
        return _known(self.name) in HOPPER

    def limit_bytes(self, config: EngineConfig) -> int:
        """What the configuration lets this process take."""
        if self.is_cpu:
            return min(int(config.cache.cpu_kvcache_space * GIB), self.total_bytes)
        return int(config.cache.gpu_memory_utilization * self.total_bytes)


def limit_device_memory(share: float) -> None:
    """Tell XLA how much of the GPU it may take. Works only before JAX opens the device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.4f}")


def present_device(config: EngineConfig) -> DeviceMemory:
    """The device that JAX has opened, its limit having been set from `config`."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return DeviceMemory("CPU", int(CPU_MARGIN * _free_host_bytes()), is_cpu=True)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 1.0))
    return DeviceMemory(device.device_kind, int(limit / share), is_cpu=False)


def named_device(name: str) -> DeviceMemory:
    """A GPU that need not be here: by name, or by its GiB of memory.

    Raises:
        ConfigError: neither a known name nor a number.
    """
    known = _known(name)
    if known:
        return DeviceMemory(known, GPUS[known][0] * 2**20, is_cpu=False)
    try:
        wanted = name.upper().strip(" -_")
        gibibytes = float(wanted.removesuffix("GIB").removesuffix("GB"))
    except ValueError:
        raise ConfigError(
            f"--gpu is {name!r}, known are {', '.join(sorted(GPUS))}, or give its GiB of memory"
        ) from None
    return DeviceMemory(f"GPU of {gibibytes:g} GiB", int(gibibytes * GIB), is_cpu=False)


def _known(name: str) -> str:
    """The entry of `GPUS` that a device's name stands for; empty where there is none."""
    wanted = name.upper().removeprefix("NVIDIA").strip(" -_").removeprefix("GEFORCE ")
    return next((known for known in GPUS if wanted.startswith(known)), "")


def bytes_in_use(devices: Sequence[Any] | None) -> int:
    """What JAX holds now on one of the devices, or its first; 0 where it does not tell (a CPU)."""
    stats = [device.memory_stats() or {} for device in devices or jax.devices()[:1]]
    return max(found.get("bytes_in_use", 0) for found in stats)


def watch_devices(metrics: EngineMetrics, device_ids: Sequence[int]) -> None:
    """Have the memory of every device published, under the operator's numbers; not of a CPU's."""
    for place, device in enumerate(jax.local_devices()):
        stats = device.memory_stats()
        if stats and "bytes_in_use" in stats:
            number = device_ids[place] if place < len(device_ids) else device.id
            metrics.watch_memory(number, partial(_in_use, device), stats.get("bytes_limit", 0))


def _in_use(device: Any) -> int:
    return (device.memory_stats() or {}).get("bytes_in_use", 0)


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**62
