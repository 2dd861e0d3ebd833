"""Compile the programs of a model on several GPUs where there is none: does a step compile and fit?

    python -m benchmarks.compile_without_gpu benchmarks/configs/llama3-8b --devices 8

Needs JAX's CUDA plugin and what it compiles with, but no driver: `jax-cuda13-plugin` and
`jax-cuda13-pjrt` of JAX's version, `nvidia-cuda-nvcc`, `nvidia-nvvm` and `nvidia-cuda-crt`,
installed with `--no-deps`. Says of each program how long it took, its collectives by shape, and its
bytes on a device. Nothing is run: this proves neither numbers nor speed.
"""

import argparse
import importlib
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jaxlib import xla_client

from jaxpaged.core.buckets import Bucket
from jaxpaged.engine.program_source import Program, ProgramSource
from jaxpaged.sharding import TENSOR, Placement, laid_out
from jaxpaged.weights.loader import open_model
from pallas_kernels import tuning

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
COLLECTIVE = re.compile(r"= (\S+(?: \S+)*?) (all-reduce|all-gather|collective-permute)[\w-]*\(")
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def devices_elsewhere(count: int) -> list[Any]:
    """Devices that programs can be compiled for and not run on."""
    plugin = next(filter(None, map(_plugin, PLUGINS)), None)
    if plugin is None:
        sys.exit("JAX's CUDA plugin is not installed: see this file's beginning")
    if not xla_client.pjrt_plugin_loaded("cuda"):
        xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    topology = xla_client._xla.get_default_c_api_topology(
        "cuda", "", {"topology": f"1x1x{count}", "target_config": H200}
    )
    return topologies.TopologyDescription(topology._make_compile_only_devices()).devices


def _plugin(name: str) -> Path | None:
    try:
        folder = Path(str(importlib.import_module(name).__file__)).parent
    except ImportError:
        return None
    return next(folder.glob("*.so"), None)


def compiled(program: Program) -> Any:
    """The program as the ops choose it for a Hopper GPU."""
    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(tuning, "hopper_available", return_value=True),
        mock.patch.object(tuning, "runs_together", return_value=True),
    ):
        return program.lower().compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory with a config.json")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="of the mixed step")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    args = parser.parse_args()
    devices = devices_elsewhere(args.devices)
    placement = Placement((Mesh(np.array(devices), (TENSOR,)),))
    files = open_model(
        args.model,
        dtype=jnp.bfloat16,
        load_format="dummy",
        hf_overrides={"num_hidden_layers": args.layers} if args.layers else {},
        placement=placement,
    )
    source = ProgramSource(
        files.graphdef,
        files.params,
        laid_out(files.config, args.devices),
        num_pages=4096,
        page_size=16,
        max_num_seqs=args.rows,
        dtype=jnp.bfloat16,
        mesh=placement.stages[0],
    )
    decode = Bucket("decode", "full", args.rows, args.rows)
    for bucket in (decode, Bucket("mixed", "full", args.tokens, args.rows)):
        for program in (source.forward(bucket), source.sample(bucket)):
            start = time.monotonic()
            done = compiled(program)
            seconds = time.monotonic() - start
            said = Counter(" ".join(found) for found in COLLECTIVE.findall(done.as_text()))
            memory = done.memory_analysis()
            sys.stdout.write(
                f"{program.name}: {seconds:.1f} s; arguments {memory.argument_size_in_bytes} bytes "
                f"a device, workspace {memory.temp_size_in_bytes}\n"
            )
            for what, count in said.most_common():
                sys.stdout.write(f"    {count} x {what}\n")


if __name__ == "__main__":
    main()
