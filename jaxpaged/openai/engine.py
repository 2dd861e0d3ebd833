"""What the server needs of an engine: `AsyncLLM` in a thread or `RemoteLLM` in a process."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from jaxpaged.config.settings import ModelSettings
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Request
from jaxpaged.engine.inbox import EventSink
from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.metrics import EngineLoad
from jaxpaged.text.tokenizer import Tokenizer


class ServedEngine(Protocol):
    """An engine as the handlers see it. All of it is used in one event loop."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def load(self) -> EngineLoad: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def model_settings(self) -> ModelSettings: ...
    @property
    def served_model_names(self) -> tuple[str, ...]: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def num_open_requests(self) -> int: ...
    @property
    def seconds_without_progress(self) -> float: ...
    async def metrics_text(self) -> bytes: ...
    async def explanation(self, request_id: str) -> dict[str, Any] | None: ...
    def default_sampling(self) -> dict[str, Any]: ...
    async def encode(self, prompt: Any) -> tuple[str | None, list[int]]: ...
    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> dict[str, Any]: ...
    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str = "",
        *,
        priority: int = 0,
        cache_salt: str = "",
        key_name: str = "",
    ) -> AsyncGenerator[RequestOutput]: ...
    async def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        sink: EventSink,
        *,
        priority: int = 0,
        cache_salt: str = "",
        key_name: str = "",
    ) -> tuple[Request, str | None]: ...
    def release(self, request_id: str, *, is_finished: bool) -> None: ...
    async def abort(self, request_id: str) -> None: ...
    def dump_stacks(self) -> None: ...
    def close(self) -> None: ...
