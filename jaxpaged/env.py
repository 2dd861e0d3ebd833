"""`jaxpaged env`: versions, devices and their links, settings in force, folders of caches.

For a report of a fault, and to see what a server would find here. It opens the devices.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from jaxpaged import __version__

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "orbax-checkpoint"),
    *("numpy", "safetensors", "gguf", "tokenizers", "transformers", "llguidance", "msgspec"),
    *("aiohttp", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
# what steers JAX, XLA, CUDA and NCCL
PREFIXES = ("NCCL_", "XLA_", "JAX_", "CUDA_", "TF_CPP_", "TF_GPU_", "TF_XLA_")
GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is here."""
    parser = argparse.ArgumentParser(
        prog="jaxpaged env", description=(__doc__ or "").partition(":")[2].strip()
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    found = environment()
    text = json.dumps(found, indent=2) + "\n" if args.json else "".join(_lines(found))
    sys.stdout.write(text)
    return 0


def environment() -> dict[str, Any]:
    """Everything that `jaxpaged env` prints."""
    settings = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)
    }
    # without memory taken, in this process
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxpaged.engine import links  # brings JAX, which takes seconds

    matrix = links.parse_topology(links.ask_driver("topo", "-m"))
    return {
        "versions": {"jaxpaged": __version__, "python": platform.python_version()} | _versions(),
        "system": {
            "os": platform.platform(),
            "cpus": os.cpu_count(),
            "driver": _driver_version(links.ask_driver),
        },
        "devices": _devices(),
        "links": [{"gpus": [a, b], "link": word} for (a, b), word in matrix.items() if a < b],
        "settings": settings,
        "caches": _caches(),
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver_version(ask: Any) -> str | None:
    lines = ask("--query-gpu=driver_version", "--format=csv,noheader").split()
    return lines[0] if lines else None


def _devices() -> list[dict[str, Any]]:
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # a plugin that cannot open its devices
        return [{"error": str(error).splitlines()[0]}]
    return [
        {
            "id": device.id,
            "kind": device.device_kind,
            "platform": device.platform,
            "compute_capability": getattr(device, "compute_capability", None),
            "memory_limit_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "memory_in_use_bytes": (device.memory_stats() or {}).get("bytes_in_use"),
        }
        for device in devices
    ]


def _caches() -> dict[str, str]:
    import jax
    from huggingface_hub import constants

    from jaxpaged.engine.executables import default_cache_dir

    return {
        "programs": str(default_cache_dir() or "none"),
        "compilations": str(jax.config.jax_compilation_cache_dir or "none"),
        "hub": str(constants.HF_HUB_CACHE),
    }


def _lines(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for part in ("versions", "system", "settings", "caches"):
        given = found[part] or {"none": ""}
        lines += [f"{part}\n", *[f"  {name:24}{value}\n" for name, value in given.items()]]
    lines.append("devices\n")
    lines += [f"  {_device_line(device)}\n" for device in found["devices"]]
    lines.append("links\n")
    lines += [f"  {a['gpus'][0]} - {a['gpus'][1]}  {a['link']}\n" for a in found["links"]]
    return lines if found["links"] else [*lines, "  none told: no nvidia-smi, or one GPU\n"]


def _device_line(device: dict[str, Any]) -> str:
    if "error" in device:
        return device["error"]
    line = f"{device['id']}  {device['kind']} ({device['platform']})"
    if device["compute_capability"]:
        line += f", compute capability {device['compute_capability']}"
    if device["memory_limit_bytes"]:
        in_use = (device["memory_in_use_bytes"] or 0) / GIB
        line += f", {in_use:.2f} of {device['memory_limit_bytes'] / GIB:.2f} GiB in use"
    return line


if __name__ == "__main__":
    sys.exit(main())
