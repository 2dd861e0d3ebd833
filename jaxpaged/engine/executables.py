"""Finished programs on disk: loaded without tracing, lowering or compiling.

JAX's serialised executables hold a pickle. This module reads only files that it wrote itself: the
folder belongs to this user with mode 0700, and a file's SHA-256, kept beside it, is checked before
a byte of it is interpreted. Whatever does not fit is compiled again.
"""

import hashlib
import hmac
import logging
import os
import pickle
import platform
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import pallas_kernels

log = logging.getLogger(__name__)

SOURCES = (
    "arrays.py",
    "core/buckets.py",  # which logits a program makes and whether it samples
    "core/packing.py",
    "core/params.py",  # sizes of packed fields
    "core/pooling.py",
    "engine/drafting.py",
    "engine/program_source.py",
    "engine/page_moves.py",
    "engine/pooling/programs.py",
    "engine/step.py",
    "layers",
    "models",
    "sharding.py",
)


@dataclass(frozen=True)
class ExecutableStore:
    """Executables of one model on one device or mesh in `folder`; None keeps nothing.

    `identity` names everything that the programs depend on besides their own name: model, pool,
    device, versions and source.
    """

    folder: Path | None
    identity: str
    devices: Sequence[Any] = ()  # that the programs run on; none is JAX's first

    def load(self, name: str) -> Any | None:
        """The compiled program called `name`, or None where there is none that can be trusted."""
        if self.folder is None:
            return None
        path = self._path(name)
        try:
            _check_private(self.folder)
            data = path.read_bytes()
            digest, payload = data[:32], data[32:]
            if not hmac.compare_digest(digest, hashlib.sha256(payload).digest()):
                return None
            load_kernel_runtime()
            return serialize_executable.deserialize_and_load(
                *pickle.loads(payload), execution_devices=self.devices or jax.devices()[:1]
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # another machine's, a damaged one: compile instead
            log.info("%s is compiled again: %s: %s", name, type(error).__name__, error)
            return None

    def save(self, name: str, compiled: Any) -> None:
        """Keep a compiled program; a full or read-only disk is no error."""
        if self.folder is None:
            return
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(self.folder)
            path = self._path(name)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(hashlib.sha256(payload).digest() + payload)
            part.replace(path)
        except (OSError, ValueError, pickle.PicklingError) as error:
            log.warning("executable not kept in %s: %s", self.folder, error)

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        key = hashlib.sha256(f"{self.identity}\n{name}".encode()).hexdigest()[:40]
        return self.folder / f"{key}.jaxexe"


def default_cache_dir() -> Path | None:
    """`jaxpaged` in the user's cache folder; None for a user who has no home.

    It is no folder that others may write to: programs are unpickled.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "jaxpaged"
    try:
        return Path.home() / ".cache" / "jaxpaged"
    except RuntimeError:
        log.warning("programs are not kept: this user has no home, set --compile-cache-dir")
        return None


def programs_identity(model: object, *arguments: object) -> str:
    """All that programs depend on: model, machine, and the shapes of their arguments."""
    leaves = jax.tree.leaves(arguments)
    shapes = " ".join(f"{leaf.dtype}{leaf.shape}" for leaf in leaves)
    return f"{model}\n{shapes}\n{machine_identity()}"


def machine_identity() -> str:
    """Versions, device, host processor and XLA settings that a finished program is bound to."""
    device = jax.devices()[0]
    client = device.client
    return "\n".join(
        [
            f"python {sys.version_info[:2]} jax {jax.__version__} jaxlib {version('jaxlib')}",
            f"{device.device_kind} x {len(jax.devices())} {client.platform_version}",
            f"{platform.machine()} {_cpu_model()} {os.environ.get('XLA_FLAGS', '')}",
            f"precision {jax.config.jax_default_matmul_precision}",
            source_digest(),
        ]
    )


def source_digest() -> str:
    """SHA-256 of every source file that a step is traced from."""
    digest = hashlib.sha256()
    roots = [Path(pallas_kernels.__file__).parent]
    ours = Path(__file__).parent.parent  # a folder `jaxpaged` that is no package may hide the name
    roots += [ours / part for part in SOURCES]
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def load_kernel_runtime() -> None:
    """Programs with Mosaic kernels need a library that comes with the module that makes them."""
    if jax.default_backend() == "gpu":
        with suppress(ImportError):  # then no program here has such kernels
            from jax.experimental.pallas import mosaic_gpu  # noqa: F401


def _cpu_model() -> str:
    """Name and features of the host's processor, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return wanted.get("model name", "") + wanted.get("flags", "")


def _check_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{folder} must belong to this user with mode 0700")
