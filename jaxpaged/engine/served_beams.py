"""Beam search among a served engine's requests: each step asks for one token of every beam."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jaxpaged.core.beams import Beam, Beams, BeamSearchParams
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import TokenEvent
from jaxpaged.engine.beam_search import answer_token_ids, candidates, step_params
from jaxpaged.engine.inbox import Sinks
from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.errors import RequestError
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.tokenizer import Tokenizer

# (token ids, how, request id) -> the outputs of one request
type Generate = Callable[[list[int], SamplingParams, str], AsyncGenerator[RequestOutput]]


class BeamSearch:
    """One search. It is a sink for what befalls its request: none of its steps bears that id."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, tokenizer: Tokenizer):
        self._beams = Beams(prompt, params, tokenizer.eos_token_ids)
        self._prompt, self._params, self._tokenizer = prompt, params, tokenizer
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_ended = False  # after the present step

    def put(self, event: TokenEvent) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self._error = error
        if self._task is not None:
            self._task.cancel()

    async def run(self, generate: Generate, request_id: str, sinks: Sinks) -> list[Beam]:
        """The best beams, best first. Leaving it aborts the step that runs.

        Raises:
            RequestError: the id is in use.
        """
        if request_id in sinks:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id")
        sinks[request_id] = self
        self._task = asyncio.create_task(self._search(generate, request_id))
        try:
            await asyncio.wait([self._task])
            if self._error is not None:
                raise self._error
            try:
                self._task.result()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        finally:
            del sinks[request_id]
            self._task.cancel()
            await asyncio.wait([self._task])
        return self._beams.best()

    async def _search(self, generate: Generate, request_id: str) -> None:
        one_more, num_steps = step_params(self._params), 0
        while not (self._beams.is_finished or self.is_ended):
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(
                        _last(
                            generate(
                                list(beam.token_ids), one_more, f"{request_id}-{num_steps}-{i}"
                            )
                        )
                    )
                    for i, beam in enumerate(self._beams.live)
                ]
            self._beams.extend([candidates(task.result()) for task in asked])
            num_steps += 1

    def answer(self, index: int, beam: Beam) -> CompletionOutput:
        """A beam as any other answer."""
        detokenizer = Detokenizer(self._tokenizer, self._prompt, SamplingParams())
        text, _ = detokenizer.push(list(answer_token_ids(beam, self._beams)))
        ids, reason = list(beam.token_ids[len(self._prompt) :]), beam.finish_reason
        if self.is_ended and reason == "length":
            reason = "abort"
        text += detokenizer.flush()
        return CompletionOutput(index, text, ids, beam.cum_logprob, None, reason)


async def _last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    async with aclosing(outputs) as one:
        async for output in one:
            if output.finished:
                return output
    raise RequestError("a beam ended without an answer")
