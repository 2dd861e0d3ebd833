"""Tracing and lowering in processes of their own, which take Python's lock from nobody.

A child gets the engine's settings, those that the engine settled on, then names of programs, a
line each; it answers with the program as JAX's portable export, or with `FAILED` and a reason,
after their length in 8 bytes.
"""

import dataclasses
import json
import logging
import os
import queue
import subprocess
import sys
from contextlib import suppress
from typing import Any

import jax
from jax import export

from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.executables import load_kernel_runtime
from jaxpaged.engine.local_capacity import PoolSizes

log = logging.getLogger(__name__)

CHILD = "jaxpaged.engine.lowering_child"
FAILED = b"failed "

# calls that JAX does not promise to keep stable between versions: both ends run the same one
CUSTOM_CALLS = ("mosaic_gpu", "mosaic_gpu_v2", "cu_threefry2x32", "cu_threefry2x32_ffi")


def lowering_setup(config: EngineConfig, pools: PoolSizes, max_len: int) -> dict[str, Any]:
    """What a child needs to know of an engine whose sizes are settled, as JSON values."""
    sizes = {"num_pages": pools.num_pages, "num_local_pages": pools.num_local_pages}
    return {"config": dataclasses.asdict(config), "max_len": max_len} | sizes


class LoweringProcesses:
    """Children that lower programs by name, once they were told of the engine.

    They load their modules before `prepare`, and what it names before `tell`. `lower` may be called
    by several threads.
    """

    def __init__(self, count: int):
        # a child allocates nothing on the device, but opens it to see what it is, at `prepare`
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._children: list[subprocess.Popen[bytes]] = []
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        try:
            self._children += (_start(environment) for _ in range(count))
        except OSError:
            self.close()
            raise

    def prepare(self, config: EngineConfig) -> None:
        """Have them open the device and the model's files, once this process has its memory."""
        self._write(dataclasses.asdict(config))

    def tell(self, setup: dict[str, Any]) -> None:
        """Say what `lowering_setup` made, once, after `prepare`."""
        self._write(setup)
        for child in self._children:
            self._free.put(child)

    def _write(self, data: dict[str, Any]) -> None:
        for child in self._children:
            assert child.stdin is not None
            with suppress(OSError):  # it ended already: `lower` will find that out
                child.stdin.write(json.dumps(data).encode() + b"\n")
                child.stdin.flush()

    def lower(self, name: str) -> bytes | None:
        """The export of a program; None where no child can give it."""
        child = self._free.get()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(name.encode() + b"\n")
            child.stdin.flush()
            data = child.stdout.read(int.from_bytes(child.stdout.read(8)))
        except OSError as error:
            data = FAILED + str(error).encode()
        self._free.put(child)
        if data and not data.startswith(FAILED):
            return data
        log.info("%s is lowered here: its process %s", name, data.decode() or "ended")
        return None

    def close(self) -> None:
        """End them; twice is no error."""
        children, self._children = self._children, []
        for child in children:
            child.kill()
        for child in children:
            child.communicate()


def _start(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def export_program(function: Any, arguments: tuple[Any, ...]) -> bytes:
    """Lower `function` for this device; its leaves are the export's arguments and results."""
    leaves, tree = jax.tree.flatten(arguments)

    def flat(leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    return bytes(export.export(jax.jit(flat), disabled_checks=allowed)(plain).serialize())


def lower_exported(
    data: bytes, arguments: tuple[Any, ...], result: Any, donated: int | tuple[()]
) -> Any:
    """What `jax.jit(function).lower(*arguments)` gives, from its export and its result's tree."""
    load_kernel_runtime()
    exported = export.deserialize(bytearray(data))

    def call(*arguments: Any) -> Any:
        return jax.tree.unflatten(result, exported.call(jax.tree.leaves(arguments)))

    return jax.jit(call, donate_argnums=donated).lower(*arguments)
