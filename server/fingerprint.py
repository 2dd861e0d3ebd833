"""A short name of how a server is set up: clients see by it that answers may have changed."""

import hashlib
from typing import Literal

import msgspec

from jaxpaged import __version__
from jaxpaged.config.settings import EngineConfig

type FingerprintMode = Literal["full", "hash", "custom", "none"]


def system_fingerprint(config: EngineConfig, mode: FingerprintMode, value: str) -> str | None:
    """The version, how the model is spread, and a hash of all settings that answers depend on.

    `config` is as the operator gave it: what the planner finds out differs from start to start.

    Args:
        mode: `hash` leaves the spread out, `custom` is `value` and nothing else, `none` is None.
    """
    if mode in ("none", "custom"):
        return value or None
    parallel = config.parallel
    parts = ["jaxpaged", __version__]
    if mode == "full":
        sizes = {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "dp": parallel.data_parallel_size,
        }
        parts += [f"{name}{size}" for name, size in sizes.items() if size > 1]
    settings = msgspec.json.encode([config.model, config.cache, config.scheduler, parallel])
    return "-".join([*parts, hashlib.sha256(settings).hexdigest()[:8]])
