"""Time and memory of converting a model and of loading it, from both formats, cold and warm.

    python -m benchmarks.weight_loading [--layers 14] [--tensor-parallel-sizes 1,8] [--folder DIR]

Makes a Llama-shaped model of random bfloat16 safetensors (14 layers are 2 GB), converts it, and
loads both, each in a process of its own on fake CPU devices. Excess is peak resident memory, less
what was resident before and less the arrays; allowed are one device's share and 256 MiB. The
converter keeps no arrays, so its excess is all that it takes. Cold means that the files were put
out of the page cache. Exit code 1 where an excess is over what is allowed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

ALLOWED_BYTES = 256 * 2**20
LAYERS_PER_FILE = 4


def write_model(folder: Path, *, num_layers: int, embed: int = 2048, vocab: int = 32_000) -> int:
    """A folder with random weights, and their bytes."""
    ffn, heads = 4 * embed, embed // 64
    kv = embed // 2
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> NDArray[Any]:
        bits = np.frombuffer(rng.bytes(2 * math.prod(shape)), np.uint16) & np.uint16(0xBFFF)
        return bits.view(ml_dtypes.bfloat16).reshape(shape)  # below 2, so finite

    def layer(index: int) -> dict[str, NDArray[Any]]:
        shapes = {
            "self_attn.q_proj": (embed, embed), "self_attn.k_proj": (kv, embed),
            "self_attn.v_proj": (kv, embed), "self_attn.o_proj": (embed, embed),
            "mlp.gate_proj": (ffn, embed), "mlp.up_proj": (ffn, embed),
            "mlp.down_proj": (embed, ffn), "input_layernorm": (embed,),
            "post_attention_layernorm": (embed,),
        }  # fmt: skip
        return {f"model.layers.{index}.{n}.weight": weight(*s) for n, s in shapes.items()}

    folder.mkdir(parents=True)
    names = ("model.embed_tokens", "lm_head")
    tensors = {f"{name}.weight": weight(vocab, embed) for name in names}
    tensors["model.norm.weight"] = weight(embed)
    places, total = {}, 0
    for first in range(0, num_layers, LAYERS_PER_FILE):
        for index in range(first, min(first + LAYERS_PER_FILE, num_layers)):
            tensors |= layer(index)
        name = f"model-{first:03d}.safetensors"
        save_file(tensors, folder / name)
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        tensors = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": embed,
        "intermediate_size": ffn, "num_hidden_layers": num_layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return total


class Cost:
    """What the process takes from here on: seconds, seconds of cores, memory over what it has."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._memory = _status("VmRSS")
        self._start, self._cpu = time.perf_counter(), time.process_time()

    def of(self, num_bytes: int, held: int, allowed: int) -> dict[str, float]:
        """For so many bytes of weights, of which so many are held now and may be."""
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "mb_per_s": num_bytes / seconds / 1e6,
            "excess_bytes": _status("VmHWM") - self._memory - held,
            "allowed_bytes": allowed + ALLOWED_BYTES,
        }


def measure_load(folder: Path, num_shards: int) -> dict[str, float]:
    """Load onto as many devices, in this process."""
    import jax
    import jax.numpy as jnp

    from jaxpaged.config.settings import ParallelSettings
    from jaxpaged.sharding import make_placement
    from jaxpaged.weights.loader import open_model

    placement = make_placement(ParallelSettings(tensor_parallel_size=num_shards))
    files = open_model(folder, dtype=jnp.bfloat16, placement=placement)
    jax.block_until_ready(jnp.zeros(1))
    cost = Cost()
    params = files.load().params
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return cost.of(held, held, held // num_shards)


def measure_conversion(folder: Path, out: Path) -> dict[str, float]:
    """Convert in this process, which must not have begun with JAX."""
    import jax
    import orbax.checkpoint.experimental.v1  # noqa: F401

    from jaxpaged.convert import main as convert

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.devices()
    cost = Cost()
    assert convert([str(folder), str(out)]) == 0
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return cost.of(size, 0, size // 8)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _forget(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _warm(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(2**24):
                    pass


def _in_child(*words: str) -> dict[str, float]:
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "benchmarks.weight_loading", "--child", *words]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _report(name: str, found: dict[str, float]) -> bool:
    mib = 2**20
    excess, allowed = found["excess_bytes"] / mib, found["allowed_bytes"] / mib
    print(
        f"{name:32}{found['seconds']:7.2f} s {found['mb_per_s']:6.0f} MB/s "
        f"{found['cpu_seconds']:6.2f} s of cores   "
        f"excess {excess:6.0f} MiB, allowed {allowed:5.0f}",
        flush=True,
    )
    return excess <= allowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--tensor-parallel-sizes", default="1,8")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary one)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, folder, last = args.child
        is_load = kind == "load"
        found = measure_load(Path(folder), int(last)) if is_load else None
        print(json.dumps(found or measure_conversion(Path(folder), Path(last))))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as parent:
        model, out = Path(parent) / "model", Path(parent) / "converted"
        total = write_model(model, num_layers=args.layers)
        print(f"{total / 1e9:.2f} GB of bfloat16, {os.cpu_count()} cores")
        fits = [_report("convert", _in_child("convert", str(model), str(out)))]
        for folder, name in ((model, "safetensors"), (out, "orbax")):
            for size in args.tensor_parallel_sizes.split(","):
                for state, prepare in (("cold", _forget), ("warm", _warm)):
                    prepare(folder)
                    found = _in_child("load", str(folder), size)
                    fits.append(_report(f"{name}, {size} devices, {state}", found))
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
