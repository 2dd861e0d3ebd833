"""`python -m jaxpaged.convert MODEL OUT`: write a model as a sharded Orbax checkpoint.

OUT can be served by itself: it holds weights, configuration, tokenizer and chat template, and a
manifest with versions and digests. It is the same for every number of devices.

Exit codes: 0 written, 2 the model, OUT or a setting cannot work, 130 interrupted.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxpaged.config.flags import ArgumentParser, json_object
from jaxpaged.errors import ConfigError, JaxPagedError
from jaxpaged.sharding import TENSOR, Placement
from jaxpaged.text.tokenizer_files import TokenizerInfo, load
from jaxpaged.weights.loader import ModelFiles, open_model
from jaxpaged.weights.manifest import MANIFEST, WEIGHTS, WeightRecord, write_manifest
from jaxpaged.weights.orbax_writer import write_weights
from jaxpaged.weights.placing import place_params
from jaxpaged.weights.resolve import SMALL_FILES
from jaxpaged.weights.safetensors import INDEX

WRITTEN, CANNOT_CONVERT, INTERRUPTED = 0, 2, 130
MOST_PARTS = 64
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and say in one line what was written."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        num_parts = args.tensor_parallel_size
        if not 1 <= num_parts <= MOST_PARTS:
            allowed = f"allowed are 1 to {MOST_PARTS}"
            raise ConfigError(f"--tensor-parallel-size is {num_parts}, {allowed}")
        jax.config.update("jax_platforms", "cpu")
        with suppress(RuntimeError):  # where JAX runs already, on the devices that it has
            jax.config.update("jax_num_cpu_devices", num_parts)
        options = {"hf_overrides": args.hf_overrides, "revision": args.revision}
        dtype = convert(args.path, Path(args.out), args.dtype, num_parts, options)
    except JaxPagedError as error:
        sys.stderr.write(f"jaxpaged convert: {error}\n")
        return CANNOT_CONVERT
    except KeyboardInterrupt:
        sys.stderr.write("jaxpaged convert: interrupted, nothing was written\n")
        return INTERRUPTED
    size = sum(path.stat().st_size for path in Path(args.out).rglob("*") if path.is_file())
    sys.stdout.write(f"wrote {args.out}: {size / 2**30:.2f} GiB in {dtype}\n")
    return WRITTEN


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="jaxpaged convert",
        description="Write a model as a sharded Orbax checkpoint, which serves by itself.",
        epilog=(__doc__ or "").split("\n\n")[2],
    )
    parser.add_argument("path", metavar="MODEL", help="directory, GGUF file or hub id")
    parser.add_argument("out", metavar="OUT", help="directory to make; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of the weights; auto keeps the model's, float32 where they are quantised",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=8,
        help="devices of which each reads only its own chunks (default: 8); fewer read several",
    )
    parser.add_argument("--revision", default=None, help="commit or tag on the hub")
    parser.add_argument(
        "--hf-overrides", type=json_object, default={}, help="put over the configuration, JSON"
    )
    return parser


def convert(
    model: str | Path, out: Path, dtype: str, num_parts: int, options: dict[str, Any]
) -> str:
    """Write `model` to `out` in `dtype`, which may be auto, and return the type.

    Everything is written beside `out` under a hidden name, which becomes `out` at the end.

    Raises:
        ConfigError: `out` is there already or cannot be made, or the model cannot be served.
        WeightsError: the weights are damaged or do not fit.
    """

    if out.exists():
        raise ConfigError(f"{out} exists: name a directory that does not, or remove it")
    files = open_model(model, dtype="float32", placement=_one_device(), **options)
    if dtype == "auto":
        dtype = files.stored_dtype()
    files = open_model(model, dtype=dtype, placement=_one_device(), **options)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.unfinished-", dir=out.parent))
        try:
            records = _write_weights(unfinished, files, num_parts)
            write_texts(unfinished, files)
            write_manifest(unfinished, files.path.name, records)
            unfinished.chmod(0o755)
            unfinished.rename(out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    return dtype


def _one_device() -> Any:
    mesh = jax.make_mesh((1,), (TENSOR,), devices=jax.local_devices(backend="cpu")[:1])
    return Placement((mesh,))


def _write_weights(folder: Path, files: ModelFiles, num_parts: int) -> dict[str, WeightRecord]:
    with files.reading() as reader:
        return write_weights(
            folder / WEIGHTS, files.params, lambda part: place_params(part, reader, None), num_parts
        )


def write_texts(folder: Path, files: ModelFiles) -> None:
    """Configuration, tokenizer and templates, as a folder from the hub has them."""
    if files.gguf is not None:
        raw, info = load(files.path)
        raw.save(str(folder / "tokenizer.json"))
        for name, fields in _tokenizer_fields(info).items():
            _write_json(folder / name, fields)
    else:
        found = {path for pattern in SMALL_FILES for path in files.path.glob(pattern)}
        for path in found:
            if path.is_file() and path.name not in (MANIFEST, INDEX):
                shutil.copyfile(path, folder / path.name)
    _write_json(folder / "config.json", files.hf_config)


def _tokenizer_fields(info: TokenizerInfo) -> dict[str, dict[str, Any]]:
    """What a GGUF file says of its tokens, in the files of a folder."""
    templates = [{"name": n, "template": text} for n, text in info.chat_templates.items()]
    config: dict[str, Any] = dict(info.special_tokens)
    if templates:
        config["chat_template"] = templates
    if info.adds_bos is not None:
        config["add_bos_token"] = info.adds_bos
    ids = {"bos_token_id": info.bos_token_id, "pad_token_id": info.pad_token_id}
    generation = {name: value for name, value in ids.items() if value is not None}
    return {
        "tokenizer_config.json": config,
        "generation_config.json": generation | {"eos_token_id": sorted(info.eos_token_ids)},
    }


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
