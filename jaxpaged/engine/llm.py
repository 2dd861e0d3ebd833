"""`LLM`: vLLM's offline interface over one engine, driven by the calling thread."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
from tqdm import tqdm

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.flags import config_from_keywords
from jaxpaged.core.beams import BeamSearchParams
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.pinned import WarmPrefix
from jaxpaged.engine import beam_search
from jaxpaged.engine.advice import ran_out
from jaxpaged.engine.assembler import Assembler
from jaxpaged.engine.beam_search import BeamSearchOutput
from jaxpaged.engine.factory import EngineParts, build_engine
from jaxpaged.engine.inputs import Prompt, as_list, params_for
from jaxpaged.engine.order import Job, in_time
from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.engine.pooling.inputs import PoolingInput
from jaxpaged.engine.pooling.model_files import resolved_runner
from jaxpaged.engine.pooling.offline import OfflinePooling, PoolingParams
from jaxpaged.engine.pooling.outputs import EmbeddingRequestOutput, ScoringRequestOutput
from jaxpaged.engine.prefixes import warmed, warming_request
from jaxpaged.engine.texts import chat_template, render_chat
from jaxpaged.errors import EngineStopped, RequestError
from jaxpaged.layers.attention import AttentionOp
from jaxpaged.layers.sampling import LogitsProcessor
from jaxpaged.text.tokenizer import Tokenizer

type Message = Mapping[str, Any]


class LLM:
    """A model that continues prompts, many at once.

    Args:
        model: directory, GGUF file or hub id.
        attention: `attend(q, pages, batch, *, spec)` in place of paged attention.
        logits_processors: named traceable functions `(logits, state) -> logits`, which a request
            switches on by name in `SamplingParams.logits_processors`.
        settings: any setting by its name (`max_model_len=2048`, `block_size=16`, ...).

    Raises:
        ConfigError, WeightsError: nothing was started.

    Use it as a context manager, or call `close()`, to give the device's memory back.
    """

    def __init__(
        self,
        model: str,
        *,
        attention: AttentionOp | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        **settings: Any,
    ):
        config = config_from_keywords(model=str(model), **settings)
        self._parts: EngineParts | None = None
        self._pooling: OfflinePooling | None = None
        if resolved_runner(config.model) == "pooling":
            self._pooling = OfflinePooling.from_config(config)
            return
        self._parts = build_engine(config, attention=attention, logits_processors=logits_processors)

    @classmethod
    def from_parts(cls, parts: EngineParts) -> Self:
        """An LLM over an engine that exists already."""
        llm = cls.__new__(cls)
        llm._parts, llm._pooling = parts, None
        return llm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def parts(self) -> EngineParts:
        """The engine and what belongs to it, for inspection."""
        if self._pooling is not None:
            raise RequestError("the model does not generate: it was loaded with runner pooling")
        if self._parts is None:
            raise EngineStopped("this LLM is closed")
        return self._parts

    @property
    def pooling(self) -> OfflinePooling:
        """The embedding engine, of an LLM made with `runner="pooling"`."""
        if self._parts is not None:
            raise RequestError(
                "the model does not support embeddings: make the LLM with runner='pooling'"
            )
        if self._pooling is None:
            raise EngineStopped("this LLM is closed")
        return self._pooling

    @property
    def model_config(self) -> ModelConfig:
        return self.parts.model

    def get_tokenizer(self) -> Tokenizer:
        inputs = self.parts.inputs if self._pooling is None else self._pooling.parts.inputs
        return inputs.tokenizer

    def embed(
        self,
        prompts: PoolingInput | Sequence[PoolingInput],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt that cannot be served; none is started then.
        """
        params = pooling_params or PoolingParams()
        return self.pooling.embed(as_list(prompts), params, use_tqdm=use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` goes with `data_1`, or with the one at its place there.

        Raises:
            RequestError: a text that cannot be served; none is started then.
        """
        params = pooling_params or PoolingParams()
        return self.pooling.score(data_1, data_2, params, use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults with the model's generation_config.json over them."""
        return SamplingParams(**self.parts.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt, longest answers first; results stand in the order of the prompts.

        Args:
            prompts: text, a list of token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, or a
                list of these.
            sampling_params: for all, or one a prompt.

        Raises:
            RequestError: a prompt that cannot be served; none is started then.
        """
        many = as_list(prompts)
        params = params_for(many, sampling_params, self.get_default_sampling_params)
        inputs, jobs = self.parts.inputs, list[Job]()
        for prompt, one in zip(many, params, strict=True):
            text, ids = inputs.encode(prompt)
            jobs.append((text, inputs.request(ids, one)))
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(jobs), desc="prompts", unit="", disable=not use_tqdm) as bar:
            num_tokens = 0
            ordered, most = in_time(jobs, self.parts.engine.scheduler)
            for output in self.run(ordered, max_inflight=most):
                done[output.request_id] = output
                num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
                bar.update()
                bar.set_postfix(tokens=num_tokens)
        return [done[request.request_id] for _, request in jobs]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to every prompt; results stand in the order of the prompts.

        Raises:
            RequestError: a prompt that cannot be served; none is started then.
        """
        inputs, one_more = self.parts.inputs, beam_search.step_params(params)
        searches = [beam_search.begin(inputs, prompt, params) for prompt in as_list(prompts)]
        while going := [search for search in searches if not search.is_finished]:
            beams = [beam.token_ids for search in going for beam in search.live]
            outputs = self.generate(beams, one_more, use_tqdm=False)
            told = iter([beam_search.candidates(output) for output in outputs])
            for search in going:
                search.extend([next(told) for _ in search.live])
        return [beam_search.found(search, inputs.tokenizer) for search in searches]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Any, /, **options: Any) -> dict[str, Any]:
        """A conversation as `{"prompt": text, "prompt_token_ids": ids}`."""
        parts = self.parts
        options = parts.config.model.default_chat_template_kwargs | options
        return render_chat(chat_template(parts.template), parts.tokenizer, messages, **options)

    def run(
        self, jobs: Iterable[Job], *, max_inflight: int | Callable[[], int]
    ) -> Iterator[RequestOutput]:
        """Run requests as they come, at most `max_inflight` at once; yields each when it is done.

        Leaving the iterator early aborts what still runs.
        """
        engine, waiting = self.parts.engine, iter(jobs)
        open_requests: dict[str, Assembler] = {}
        more = True
        try:
            while more or open_requests:
                most = max_inflight() if callable(max_inflight) else max_inflight
                while more and len(open_requests) < most:
                    job = next(waiting, None)
                    more = job is not None
                    if job is not None:
                        text, request = job
                        engine.add(request)
                        open_requests[request.request_id] = Assembler(
                            request, text, self.parts.tokenizer
                        )
                for event in engine.step():
                    assembler = open_requests[event.request_id]
                    assembler.take(event)
                    if assembler.is_finished:
                        del open_requests[event.request_id]
                        yield assembler.whole()
        except jax.errors.JaxRuntimeError as error:
            said = ran_out(self.parts.plan, error)
            if said is None:
                raise
            raise said from error
        finally:
            for request_id in open_requests:
                engine.abort(request_id)

    def explanation(self, request_id: str) -> dict[str, Any] | None:
        """What became of a request with `SamplingParams(explain=True)`, one of the last ones."""
        return self.parts.engine.explanation(request_id)

    def warm_prefix(
        self, prompt: Prompt, *, cache_salt: str = "", shared: bool = False
    ) -> WarmPrefix:
        """Compute a prompt's KV now and keep its full pages until `drop_prefix`.

        Prompts that begin with it start after it. `shared` makes it found whatever the cache salt.

        Raises:
            RequestError: it cannot be served, or the pins would leave no room for the longest
                sequence.
        """
        parts = self.parts
        request = warming_request(parts.inputs, prompt, cache_salt=cache_salt, shared=shared)
        for _ in self.run([(None, request)], max_inflight=1):
            pass
        return warmed(parts.engine.scheduler.pinned, request)

    def warm_prefixes(self) -> list[WarmPrefix]:
        """All prefixes that were warmed and not dropped."""
        return list(self.parts.engine.scheduler.pinned)

    def drop_prefix(self, prefix_id: str) -> bool:
        """Let a warm prefix be evicted like any other; False if there is none of this id."""
        return self.parts.engine.scheduler.drop_prefix(prefix_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages that no sequence holds."""
        self.parts.engine.scheduler.reset_prefix_cache()

    def update_params(self, params: Params) -> None:
        """Serve other weights from now on; cached pages are forgotten.

        Raises:
            RequestError: requests are running, whose pages hold the present weights' KV.
            InvariantError: a shape or type differs.
        """
        if self.parts.engine.has_work:
            raise RequestError("update_params: requests are running; finish or abort them first")
        self.parts.engine.runner.update_params(params)
        self.reset_prefix_cache()

    def close(self) -> None:
        """Free the page pool and the weights. XLA keeps the memory for later JAX work here."""
        if self._parts is not None:
            self._parts.engine.runner.close()
        if self._pooling is not None:
            self._pooling.close()
        self._parts = self._pooling = None
