"""An engine as the server and other callers in one event loop see it."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.config.settings import EngineConfig, ModelSettings
from jaxpaged.core.beams import BeamSearchParams
from jaxpaged.core.params import OutputKind, SamplingParams, check_token_ids
from jaxpaged.core.request import Pin, Request, TokenEvent
from jaxpaged.engine.assembler import Assembler
from jaxpaged.engine.beam_search import check_room
from jaxpaged.engine.inbox import EventSink, Inbox, Sinks, spaced
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.engine.served_beams import BeamSearch
from jaxpaged.engine.texts import PromptTexts
from jaxpaged.errors import PromptTooLong, RequestError
from jaxpaged.metrics import EngineLoad
from jaxpaged.text.templates import ChatTemplate

MAX_REPEATED_SCORES = 2**20  # logprobs of a prompt that several answers tell
LONG_PROMPT = 256  # tokens whose logprobs are read elsewhere than in the event loop


@dataclass(frozen=True)
class ReplicaStatus:
    """How one of several replicas fares."""

    engine: int
    state: str  # ready, restarting, out
    seconds_without_progress: float
    num_restarts: int


class ServedEngine(ABC):
    """`AsyncLLM` in a thread, `RemoteLLM` in a process or `ReplicaSet` in several.

    All of it is used in one event loop.
    """

    named_model = ""  # as the operator named it, before it was looked for
    fingerprint: str | None = None  # told in answers, see `server/fingerprint.py`

    def __init__(self, inputs: InputProcessor, template: ChatTemplate | None, sinks: Sinks):
        self.tokenizer = inputs.tokenizer
        self._texts, self._sinks = PromptTexts(inputs, template), sinks
        self._searches: dict[str, BeamSearch] = {}

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of the templates in use, by name."""
        return self._texts.chat_templates

    @property
    @abstractmethod
    def load(self) -> EngineLoad:
        """The engine's state after its last step."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Width of the logits: the bound of token ids."""

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """The settings, with what the planner filled in; of several replicas those of one."""

    @property
    @abstractmethod
    def model_settings(self) -> ModelSettings: ...

    @property
    def served_model_names(self) -> tuple[str, ...]:
        settings = self.model_settings
        return settings.served_model_name or (settings.model,)

    @property
    @abstractmethod
    def is_running(self) -> bool: ...

    @property
    def num_open_requests(self) -> int:
        return len(self._sinks)

    @property
    @abstractmethod
    def seconds_without_progress(self) -> float: ...

    def replicas(self) -> list[ReplicaStatus]:
        """How each replica fares, where there are several."""
        return []

    @abstractmethod
    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""

    @abstractmethod
    async def explanation(self, request_id: str) -> dict[str, Any] | None:
        """What became of a request: an open one, or one of the last that asked to be explained."""

    @abstractmethod
    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields that the model or the operator sets, by name."""

    async def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and ids of a prompt; a long text is tokenised in a worker thread."""
        return await self._texts.encode(prompt)

    async def _encoded(
        self, prompt: Prompt, params: SamplingParams
    ) -> tuple[str | None, list[int]]:
        """Text and ids of a prompt, unless a look at their numbers refuses the request.

        So an engine elsewhere is never told what it could only refuse, however much it is.
        """
        check_token_ids(params, self.vocab)
        text, ids = await self.encode(prompt)
        if len(ids) > self.max_model_len:
            most = 1 if params.max_tokens is None else params.max_tokens
            raise PromptTooLong(len(ids), most, self.max_model_len)
        _check_scores(len(ids), params)
        return text, ids

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None, /, **options: Any
    ) -> dict[str, Any]:
        """A conversation through the chat template, rendered and tokenised in a worker thread.

        A text of over `most` characters is refused before it is tokenised.
        """
        defaults = self.model_settings.default_chat_template_kwargs
        return await self._texts.chat_prompt(messages, most, **(defaults | options))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str = "",
        *,
        priority: int = 0,
        cache_salt: str = "",
        key_name: str = "",
        pin: Pin | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs as they come, in the form that `sampling_params.output_kind` asks for.

        Leaving the iterator for any reason aborts the request.

        Raises:
            RequestError: it can never be served.
            QueueFull: too much waits; try again.
            EngineStopped: the engine is gone.
        """
        ends_only = sampling_params.output_kind is OutputKind.FINAL_ONLY
        inbox = Inbox(sampling_params.n if ends_only else 0)
        request, text = await self.submit(
            prompt,
            sampling_params,
            request_id,
            spaced(inbox, sampling_params),
            priority=priority,
            cache_salt=cache_salt,
            key_name=key_name,
            pin=pin,
        )
        assembler = Assembler(request, text, self.tokenizer)
        try:
            while not assembler.is_finished:
                parts = [await _added(assembler, event) for event in await inbox.take()]
                output = assembler.output(parts)
                if output is not None:
                    yield output
        finally:
            self.release(request.request_id, is_finished=assembler.is_finished)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        key_name: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """The likeliest answers, best first, in one output. Leaving it, `abort` and `fail` end it.

        Raises what `generate` raises.
        """
        text, ids = await self.encode(prompt)
        check_room(len(ids), params, self.max_model_len)
        search = self._searches[request_id] = BeamSearch(ids, params, self.tokenizer)
        step = functools.partial(
            self.generate, priority=priority, cache_salt=cache_salt, key_name=key_name
        )
        try:
            beams = await search.run(step, request_id, self._sinks)
        finally:
            del self._searches[request_id]
        answers = [search.answer(index, beam) for index, beam in enumerate(beams)]
        yield RequestOutput(request_id, text, ids, answers, True)

    @abstractmethod
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
    ) -> tuple[Request, str | None]:
        """Queue a request whose events go straight to `sink`; returns it and the prompt's text.

        The caller must `release` it, whatever happens. Raises what `generate` raises.
        """

    @abstractmethod
    def release(self, request_id: str, *, is_finished: bool) -> None:
        """Forget a request that was submitted; one that has not finished is aborted."""

    async def abort(self, request_id: str) -> None:
        """Stop a request; its answers end where they are, with the finish reason abort."""
        search = self._searches.get(request_id)
        if search is None:
            await self._abort(request_id)
        else:
            search.is_ended = True

    @abstractmethod
    async def _abort(self, request_id: str) -> None: ...

    def fail(self, request_id: str, error: Exception) -> None:
        """Have a request's caller see `error`; one that is not here is no error."""
        self._sinks.fail(request_id, error)

    @abstractmethod
    async def control(self, method: str, *arguments: Any) -> Any:
        """A method of `EngineControl`, done by the engine between two steps.

        Raises:
            RequestError: it cannot be done now.
            EngineStopped: nobody is there to do it.
        """

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Fail all that is open, and write the engine's stacks to stderr."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and free the device."""


def _check_scores(prompt_len: int, params: SamplingParams) -> None:
    """Every answer tells the logprobs of the prompt: refuse to tell many of them many times."""
    if params.prompt_logprobs is None or params.n == 1:
        return
    num_scores = params.n * prompt_len * (params.prompt_logprobs + 1)
    if num_scores > MAX_REPEATED_SCORES:
        raise RequestError(
            f"n is {params.n}: each answer would tell the logprobs of the prompt's {prompt_len} "
            f"tokens, {num_scores} in all, allowed are {MAX_REPEATED_SCORES}: lower n, or score "
            "the prompt in a request of its own",
            param="n",
        )


async def _added(assembler: Assembler, event: TokenEvent) -> CompletionOutput:
    """What an event adds; the logprobs of a long prompt are read in a worker thread."""
    if event.prompt_logprobs is not None and len(event.prompt_logprobs) > LONG_PROMPT:
        return await asyncio.to_thread(assembler.add, event)
    return assembler.add(event)
