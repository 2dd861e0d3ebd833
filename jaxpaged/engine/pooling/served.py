"""An embedding engine as the server sees it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxpaged.config.pooling import PoolingModel
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.pooling.inputs import EncodedText, PoolingInputs
from jaxpaged.text.tokenizer import Tokenizer


class ServedPooling(ABC):
    """`AsyncPooling` in a thread or `RemotePooling` in a process. Used in one event loop."""

    named_model = ""  # as the operator named it, before it was looked for
    device_share = 0.0  # of a GPU's memory, that an engine in another process must leave to it

    def __init__(self, inputs: PoolingInputs, config: EngineConfig):
        self.inputs, self.config = inputs, config

    @property
    def model(self) -> PoolingModel:
        return self.inputs.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inputs.tokenizer

    @property
    def vocab(self) -> int:
        return self.model.vocab

    @property
    def max_model_len(self) -> int:
        return self.model.max_len

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return self.config.model.served_model_name or (self.config.model.model,)

    @property
    @abstractmethod
    def is_running(self) -> bool: ...

    @property
    @abstractmethod
    def seconds_without_progress(self) -> float:
        """Since a step was last read while there is work to do; 0 while idle."""

    @abstractmethod
    async def run(
        self, texts: Sequence[EncodedText], *, is_background: bool = False
    ) -> NDArray[np.float32]:
        """What the model gives for each text, in their order. Leaving it drops what waits.

        In the background texts wait until no other text does.

        Raises:
            GenerationFailed: numbers that are not finite.
            QueueFull: too much waits; try again.
            EngineStopped: the engine is gone.
        """

    @abstractmethod
    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Fail all that is open."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and free the device."""
