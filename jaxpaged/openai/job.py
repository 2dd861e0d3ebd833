"""A request on its way to the engine, and how its endpoint writes answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpaged.core.beams import BeamSearchParams
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import AnswerTimes
from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.openai.chunks import ChunkWriter, Envelope, Usage
from jaxpaged.openai.schema import SamplingFields


class Form(Protocol):
    """How one endpoint writes its answers."""

    kind: str
    chunk_kind: str
    is_plain: bool  # chunks need no more than text

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice to stream before an answer's first text."""
        ...

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What is told of the prompt beside the answers, once."""
        ...

    def choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        """An answer, whole."""
        ...

    def chunk(
        self, index: int, output: RequestOutput, part: CompletionOutput
    ) -> dict[str, Any] | None:
        """What a step added to an answer; None where there is nothing to tell yet."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """A request that has passed all checks that need no engine."""

    body: SamplingFields
    prompts: Sequence[Any]
    params: SamplingParams
    envelope: Envelope
    form: Form
    cache_salt: str
    key_name: str  # of the API key, for fairness between keys
    usage: Usage  # so far
    beams: BeamSearchParams | None = None  # where the answers are searched for

    @property
    def request_ids(self) -> list[str]:
        """The engine's ids: one a prompt."""
        return [f"{self.envelope.answer_id}-{number}" for number in range(len(self.prompts))]

    @property
    def priority(self) -> int:
        return self.body.priority or 0

    @property
    def each_usage(self) -> bool:
        """Usage is wanted in every chunk."""
        options = self.body.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    def note_times(self, times: AnswerTimes | None) -> None:
        """Keep the times of the answer that has ended, where it is the only one."""
        if len(self.prompts) * self.params.n == 1:
            self.usage.times = times

    def index(self, number: int, choice: int) -> int:
        """An answer's place among those of all prompts."""
        return number * self.params.n + choice

    def chunk_writer(self) -> ChunkWriter:
        options = self.body.stream_options
        return ChunkWriter(
            self.envelope,
            self.form.chunk_kind,
            with_usage=bool(options and options.include_usage),
            each_usage=self.each_usage,
        )
