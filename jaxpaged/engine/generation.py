"""One request through an asynchronous engine, its events put together to outputs."""

from collections.abc import AsyncGenerator
from typing import Protocol

from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.request import Pin, Request
from jaxpaged.engine.assembler import Assembler
from jaxpaged.engine.inbox import EventSink, Inbox
from jaxpaged.engine.inputs import Prompt
from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.text.tokenizer import Tokenizer


class Submits(Protocol):
    """An engine that tells a request's events to a sink."""

    @property
    def tokenizer(self) -> Tokenizer: ...
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
    ) -> tuple[Request, str | None]: ...
    def release(self, request_id: str, *, is_finished: bool) -> None: ...


async def generate(
    engine: Submits,
    prompt: Prompt,
    sampling_params: SamplingParams,
    request_id: str,
    *,
    priority: int,
    cache_salt: str,
    key_name: str,
    pin: Pin | None = None,
) -> AsyncGenerator[RequestOutput]:
    """Outputs as they come, in the form that `sampling_params.output_kind` asks for.

    Leaving the iterator for any reason aborts the request.
    """
    ends_only = sampling_params.output_kind is OutputKind.FINAL_ONLY
    inbox = Inbox(sampling_params.n if ends_only else 0)
    request, text = await engine.submit(
        prompt,
        sampling_params,
        request_id,
        inbox,
        priority=priority,
        cache_salt=cache_salt,
        key_name=key_name,
        pin=pin,
    )
    assembler = Assembler(request, text, engine.tokenizer)
    try:
        while not assembler.is_finished:
            parts = [assembler.add(event) for event in await inbox.take()]
            output = assembler.output(parts)
            if output is not None:
                yield output
    finally:
        engine.release(request.request_id, is_finished=assembler.is_finished)
