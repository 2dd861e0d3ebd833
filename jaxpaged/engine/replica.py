"""One replica through its lives: started, watched, and started again after it died or hung."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from jaxpaged.engine.engine_process import STARTUP_S
from jaxpaged.engine.remote import RemoteLLM
from jaxpaged.errors import JaxPagedError

log = logging.getLogger(__name__)

WATCH_S = 0.25  # between two looks at the process
SUSPECT_S = 2.0  # for a process to end whose engine told a request that it stopped
AVOID_S = 5.0  # without a step while work waits, before new requests go elsewhere
STEADY_S = 600.0  # of life, after which earlier deaths no longer count

type ReplicaState = Literal["ready", "restarting", "out"]


@dataclass(frozen=True)
class ReplicaPolicy:
    """When a replica is given up, and how often it is started again. Times in seconds."""

    watchdog_timeout_s: float = 600.0  # without a step while work waits
    startup_timeout_s: float = STARTUP_S  # for a process to load its model
    restart_delays_s: tuple[float, ...] = (1.0, 5.0, 25.0)  # one a restart; then it stays out


@dataclass(eq=False)
class Replica:
    """Owned by the event loop. `begin` starts a process."""

    index: int
    begin: Callable[[], Awaitable[RemoteLLM]]
    policy: ReplicaPolicy
    llm: RemoteLLM
    state: ReplicaState = "ready"
    num_restarts: int = 0
    _failed: RemoteLLM | None = None  # the process that is known to be lost
    _begun_at: float = field(default_factory=time.monotonic)

    @property
    def is_running(self) -> bool:
        return self.state == "ready" and self._failed is not self.llm and self.llm.is_running

    @property
    def is_stuck(self) -> bool:
        """It may still recover, but requests had better go elsewhere."""
        return self.llm.seconds_without_progress > AVOID_S

    def has_failed(self, llm: RemoteLLM) -> None:
        """Its engine has told a request that it stopped: a moment before its process ends."""
        self._failed = llm

    async def keep(self, refill: Callable[["Replica"], Awaitable[None]]) -> None:
        """Watch it for ever; returns once it was started too often.

        `refill` gives a new process what the others hold, before it serves.
        """
        delays = iter(self.policy.restart_delays_s)
        while True:
            while not await self._is_lost():
                await asyncio.sleep(WATCH_S)
            if time.monotonic() - self._begun_at > STEADY_S:
                delays = iter(self.policy.restart_delays_s)
            self.state = "restarting"
            await asyncio.to_thread(self.llm.close)
            if not await self._came_back(delays, refill):
                self.state = "out"
                log.error("replica %d stays out: it was started too often", self.index)
                return

    async def _is_lost(self) -> bool:
        if self.llm.is_running and self._failed is self.llm:
            await asyncio.sleep(SUSPECT_S)
            self._failed = None  # it goes on, unless its process has ended by now
        seconds = self.llm.seconds_without_progress
        if self.llm.is_running and seconds > self.policy.watchdog_timeout_s:
            self._give_up(seconds)
        return not self.llm.is_running

    def _give_up(self, seconds: float) -> None:
        log.error("replica %d: no step ended for %.1f s; stacks follow", self.index, seconds)
        self.llm.give_up(f"replica {self.index} hung: no step ended for {seconds:.0f} s")

    async def _came_back(
        self, delays: Iterator[float], refill: Callable[["Replica"], Awaitable[None]]
    ) -> bool:
        for delay in delays:
            log.error("replica %d is gone; starting it again in %g s", self.index, delay)
            await asyncio.sleep(delay)
            try:
                self.llm = await self.begin()
                async with asyncio.timeout(self.policy.watchdog_timeout_s):
                    await refill(self)
            except (JaxPagedError, OSError) as error:
                log.error("replica %d cannot be started: %s", self.index, error)
                await asyncio.to_thread(self.llm.close)
                continue
            self.num_restarts += 1
            self._begun_at = time.monotonic()
            self.state = "ready"
            log.info("replica %d is back", self.index)
            return True
        return False
