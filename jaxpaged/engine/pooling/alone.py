"""What stands where the server has no model that generates, only one that embeds."""

from typing import Any, NoReturn

from jaxpaged.config.settings import EngineConfig, ModelSettings
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Pin
from jaxpaged.engine.inbox import EventSink, Sinks
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import RequestError
from jaxpaged.metrics import NO_LOAD, EngineLoad


class NoGeneration(ServedEngine):
    """Lives with an embedding engine, serves no model name and refuses all that generates."""

    def __init__(self, pooling: ServedPooling):
        model = pooling.model
        inputs = InputProcessor(pooling.tokenizer, model.vocab, model.max_len, 0, ())
        super().__init__(inputs, None, Sinks())
        self._pooling = pooling

    @property
    def load(self) -> EngineLoad:
        return NO_LOAD

    @property
    def vocab(self) -> int:
        return self._pooling.vocab

    @property
    def max_model_len(self) -> int:
        return self._pooling.max_model_len

    @property
    def model_settings(self) -> ModelSettings:
        return self._pooling.config.model

    @property
    def config(self) -> EngineConfig:
        return self._pooling.config

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return ()

    @property
    def is_running(self) -> bool:
        return self._pooling.is_running

    @property
    def seconds_without_progress(self) -> float:
        return 0.0

    async def metrics_text(self) -> bytes:
        return b""

    async def explanation(self, request_id: str) -> dict[str, Any] | None:
        return None

    def default_sampling(self) -> dict[str, Any]:
        return {}

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        sink: EventSink,
        *,
        priority: int = 0,
        cache_salt: str = "",
        key_name: str = "",
        pin: Pin | None = None,
    ) -> NoReturn:
        raise RequestError("no model that generates is served here", param="model")

    def release(self, request_id: str, *, is_finished: bool) -> None:
        pass

    async def _abort(self, request_id: str) -> None:
        pass

    async def control(self, method: str, *arguments: Any) -> NoReturn:
        raise RequestError(f"{method} needs a model that generates, none is served here")

    def give_up(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass
