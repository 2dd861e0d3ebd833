"""What an operator may ask of a running engine: done by the engine's thread, between two steps."""

import asyncio
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.arrays import Params
from jaxpaged.engine.factory import EngineParts
from jaxpaged.engine.opening import open_files
from jaxpaged.errors import EngineStopped, JaxPagedError, RequestError
from jaxpaged.models.decoder import empty_like
from jaxpaged.sharding import make_placement


class EngineControl:
    """Owned by the engine's thread."""

    def __init__(self, parts: EngineParts):
        self._parts, self._engine = parts, parts.engine
        self._asleep: Params | str = ""  # weights in host memory, or "dropped"; empty while awake
        self._is_profiling, self._folder = False, ""

    @property
    def sleeps(self) -> bool:
        return self._asleep != ""

    def sleep_states(self) -> dict[str, Callable[[], bool]]:
        """Whether the engine is in each of vLLM's states of sleep, by name; any thread may ask."""
        return {
            "awake": lambda: not self.sleeps,
            "weights_offloaded": lambda: self.sleeps and not isinstance(self._asleep, str),
            "discard_all": lambda: self.sleeps and isinstance(self._asleep, str),
        }

    def answer(
        self,
        method: str,
        arguments: tuple[Any, ...],
        future: asyncio.Future[Any],
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        """Run a method, and have what it gave or raised put into `future` in its event loop."""
        try:
            value = self.call(method, arguments)
        except JaxPagedError as error:
            tell(partial(_settle, future, error, None))
        except BaseException as error:  # ends the engine; its caller must not wait for ever
            stopped = EngineStopped(f"the engine has stopped: {error}")
            tell(partial(_settle, future, stopped, None))
            raise
        else:
            tell(partial(_settle, future, None, value))

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run one of the methods below by its name."""
        methods = {
            "reset_prefix_cache": self.reset_prefix_cache,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "warm_prefixes": self.warm_prefixes,
            "drop_prefix": lambda prefix_id: self._engine.scheduler.drop_prefix(prefix_id),
            "is_sleeping": lambda: self.sleeps,
            "picture": lambda: self._engine.picture(),
            "start_profile": self.start_profile,
            "stop_profile": self.stop_profile,
        }
        if method not in methods:
            raise RequestError(f"there is no control {method!r}")
        try:
            return methods[method](*arguments)
        finally:
            self._engine.publish_load()  # pages may have been given back without a step

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages that no sequence holds."""
        self._engine.scheduler.reset_prefix_cache()

    def warm_prefixes(self) -> list[dict[str, Any]]:
        """All pinned prefixes, in fields that can be sent to another process."""
        return [
            {
                "id": prefix.prefix_id,
                "tokens": prefix.num_tokens,
                "pages": len(prefix.page_ids),
                "shared": prefix.is_shared,
                "key_name": prefix.key_name,
            }
            for prefix in self._engine.scheduler.pinned
        ]

    def sleep(self, level: int) -> None:
        """Free the device: weights go to host memory (1) or are read again later (2).

        The page pool is given up, and with it what was cached.

        Raises:
            RequestError: requests are running.
        """
        if self.sleeps:
            return
        if self._engine.has_work:
            raise RequestError("sleep: requests are running; let them end or abort them first")
        runner = self._engine.runner
        self.reset_prefix_cache()
        self._asleep = "dropped"
        if level == 1:
            self._asleep = jax.tree.map(lambda x: np.array(x, copy=True), runner.all_params)
        runner.free()

    def wake_up(self) -> None:
        """Put weights and an empty page pool back on the device."""
        if not self.sleeps:
            return
        runner, config = self._engine.runner, self._parts.config
        if isinstance(self._asleep, str):
            dtype = jax.tree.leaves(runner.params)[0].dtype
            files = open_files(config, dtype, placement=make_placement(config.parallel))
            runner.update_params(files.load(config.model.seed).all_params)
        else:
            runner.update_params(self._asleep)
        runner.replace_state(empty_like(runner.state))
        self._asleep = ""

    def start_profile(self, folder: str) -> None:
        """Write a trace of host and device to `folder`, until `stop_profile`."""
        if self._is_profiling:
            raise RequestError("start_profile: a profile is being taken already")
        with _writing("start_profile", folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # else it fails once all has been traced
            jax.profiler.start_trace(folder)
        self._is_profiling, self._folder = True, folder

    def stop_profile(self) -> None:
        if not self._is_profiling:
            raise RequestError("stop_profile: no profile is being taken; start one first")
        self._is_profiling = False
        with _writing("stop_profile", self._folder):
            jax.profiler.stop_trace()


@contextmanager
def _writing(what: str, folder: str) -> Generator[None]:
    """A trace that cannot be written is told to who asked for it; the engine goes on."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise RequestError(f"{what}: no trace can be written to {folder}: {error}") from error


def _settle(future: asyncio.Future[Any], error: JaxPagedError | None, value: Any) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
