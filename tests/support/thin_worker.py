"""The engine's process with nothing behind it, and without JAX: it is there in a moment.

Answers as the successor model does. `hf_overrides` holds {"fault": name, "step": number, "rank":
replica, "step_s": seconds}: from that step on that replica raises, hangs or exits; `step_s` is how
long every step takes. With {"stuck": path} it hangs while it loads once that file is there.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxpaged.core.request import Request, TokenEvent
from jaxpaged.engine.picture import FIRST_OWNER, NULL, EnginePicture
from jaxpaged.engine.wire import Start
from jaxpaged.engine.worker import main
from jaxpaged.errors import EngineStopped, RequestError
from jaxpaged.metrics import EngineLoad, EngineMetrics
from tests.support.models import BYTE_ORDER, VOCAB

MAX_LEN = 2048


class ThinLLM:
    """As much of `AsyncLLM` as the engine's process uses; its steps are a task of the loop."""

    vocab, max_model_len = VOCAB, MAX_LEN

    def __init__(self, start: Start):
        rank = start.config.parallel.data_parallel_rank
        self.wanted = dict(start.config.model.hf_overrides)
        if Path(self.wanted.pop("stuck", "/none")).exists():
            time.sleep(600)
        if rank != self.wanted.get("rank", rank):
            self.wanted.pop("fault")
        self.parts = SimpleNamespace(config=start.config, engine=self)
        self.metrics = EngineMetrics("S", MAX_LEN, rank)
        self.on_events: Any = None
        self.is_running, self.sleeps, self.prefixes = True, False, dict[str, int]()
        self._open: dict[str, tuple[Request, Any, int]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._num_steps, self._last_step_time = 0, time.monotonic()

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(len(self._open), 0, 0.0, 0, 0, 0, 0)

    @property
    def seconds_without_progress(self) -> float:
        return time.monotonic() - self._last_step_time if self.has_work else 0.0

    def default_sampling(self) -> dict[str, Any]:
        return {}

    async def metrics_text(self) -> bytes:
        return self.metrics.text()

    async def explanation(self, request_id: str):
        return {"request_id": request_id} if request_id in self._open else None

    async def control(self, method: str, *arguments: Any):
        match method:
            case "sleep" | "wake_up":
                self.sleeps = method == "sleep"
            case "is_sleeping":
                return self.sleeps
            case "warm_prefixes":
                return [{"id": name, "tokens": tokens} for name, tokens in self.prefixes.items()]
            case "drop_prefix":
                return self.prefixes.pop(arguments[0], None) is not None
            case "picture":
                cells, totals = bytes([NULL, FIRST_OWNER]), (self._num_steps, 0, 0, 0.0)
                return EnginePicture(cells, 16, [], self.load, "line", *totals)
            case "reset_prefix_cache":
                self.prefixes.clear()
            case _:
                raise RequestError(f"there is no control {method!r}")

    async def submit(self, token_ids, params, request_id, sink, *, pin, **_rest):
        seed, now = params.seed, time.monotonic()
        request = Request(
            request_id, tuple(token_ids), params, params.max_tokens, seed, now, frozenset(), pin=pin
        )
        self._open[request_id] = (request, sink, 0)
        if self._stepping is None:
            self._last_step_time = now
            self._stepping = asyncio.create_task(self._step_on())
        return request, None

    def release(self, request_id: str, *, is_finished: bool) -> None:
        self._open.pop(request_id, None)

    def close(self) -> None:
        pass

    async def _step_on(self) -> None:
        while self._open:
            await asyncio.sleep(self.wanted.get("step_s", 0.0))
            self._num_steps += 1
            if self._num_steps >= self.wanted.get("step", 0) and not self._survives():
                return
            events = [self._advance(*known) for known in list(self._open.values())]
            self.metrics.step_ended(sum(len(event.token_ids) for event in events), self.load)
            self._last_step_time = time.monotonic()
            self.on_events(events)
        self._stepping = None

    def _survives(self) -> bool:
        match self.wanted.get("fault"):
            case "raise":
                for _, sink, _ in self._open.values():
                    sink.fail(EngineStopped("the engine has stopped: broken on purpose"))
                self.is_running = False
                return False
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
        return True

    def _advance(self, request: Request, sink, num_done: int) -> TokenEvent:
        done = min(num_done + 1, request.max_tokens)
        token = request.prompt_token_ids[-1] + done
        tokens, reason = ((token,), None) if done > num_done else ((), None)
        self._open[request.request_id] = (request, sink, done)
        if done == request.max_tokens:
            reason = "length"
            del self._open[request.request_id]
            if request.pin is not None:
                self.prefixes[request.pin.prefix_id] = len(request.prompt_token_ids)
        text = "".join(chr(BYTE_ORDER[token % 256]) for token in tokens)
        return TokenEvent(request.request_id, 0, tokens, text, None, None, reason, None, 0, 0.0)


if __name__ == "__main__":
    sys.exit(main(ThinLLM))
