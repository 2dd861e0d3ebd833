"""From what a caller gives to a Request: encode, bound, fill in defaults, refuse."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxpaged.core.hashing import as_bytes, page_hashes
from jaxpaged.core.params import MAX_BIASES, OutputKind, SamplingParams, check_ids, check_token_ids
from jaxpaged.core.request import Pin, Request
from jaxpaged.core.structured import ReasoningMarks
from jaxpaged.errors import PromptTooLong, RequestError
from jaxpaged.text.grammar import CompiledGrammar, Grammars
from jaxpaged.text.tokenizer import Tokenizer

type Prompt = str | Sequence[int] | Mapping[str, Any]

WORD_MASK = 2**64 - 1


class InputProcessor:
    """Makes requests that the scheduler can trust: every id, length and name is checked here.

    Args:
        vocab: width of the logits, the bound of every token id.
        max_len: longest sequence in tokens.
        seed: start of the counter for requests without a seed.
        processor_names: logits processors that a request may name.
        page_size: of the prefix cache, whose hashes are made here rather than in the engine's
            thread; 0 where it is off.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        max_len: int,
        seed: int,
        processor_names: Sequence[str],
        page_size: int = 0,
    ):
        self.tokenizer, self.vocab, self.max_len = tokenizer, vocab, max_len
        self._page_size = page_size
        self._processor_names = frozenset(processor_names)
        self._seeds = itertools.count(seed)
        self._ids = itertools.count()

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its token ids.

        Raises:
            RequestError: neither text nor ids; an id that is no token.
        """
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._checked(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self.encode(prompt["prompt"])
            raise RequestError(
                "a prompt object needs 'prompt' (text) or 'prompt_token_ids'", param="prompt"
            )
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, Sequence):
            return None, self._checked(prompt)
        raise RequestError(
            f"prompt is {type(prompt).__name__}: give text or a list of token ids", param="prompt"
        )

    def request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        key_name: str = "",
        grammar: CompiledGrammar | None = None,
        pin: Pin | None = None,
    ) -> Request:
        """Check everything against this model and fix seed, length and banned words.

        Args:
            grammar: what `params.structured_outputs` compiled to; it is compiled now where missing.

        Raises:
            RequestError: what this model can never serve.
        """
        if not token_ids:
            raise RequestError("prompt is empty: it needs at least one token", param="prompt")
        check_token_ids(params, self.vocab)
        unknown = set(params.logits_processors or ()) - self._processor_names
        if unknown:
            raise RequestError(
                f"logits_processors names {sorted(unknown)}, known are "
                f"{sorted(self._processor_names)}",
                param="logits_processors",
            )
        words, runs = self._bad_words(params)
        stops = (*self.tokenizer.eos_token_ids, *(params.stop_token_ids or ()))
        if len(params.logit_bias or ()) + len(words) + len(runs) + len(stops) > MAX_BIASES:
            raise RequestError(
                f"logit_bias, bad_words and stop_token_ids have over {MAX_BIASES} ids together",
                param="logit_bias",
            )
        if grammar is None and params.structured_outputs is not None:
            grammar = self.grammars.compile(params.structured_outputs)
        max_tokens = self._max_tokens(len(token_ids), params)
        if grammar is not None:
            _check_room(grammar, max_tokens, self._closing_tokens(params.reasoning))
        seed = params.seed if params.seed is not None else next(self._seeds)
        return Request(
            request_id=request_id or f"request-{next(self._ids)}",
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_tokens=max_tokens,
            seed=seed & WORD_MASK,
            arrival_time=time.monotonic(),
            eos_token_ids=frozenset(self.tokenizer.eos_token_ids),
            priority=priority,
            cache_salt=cache_salt,
            key_name=key_name,
            page_hashes=self._page_hashes(token_ids, cache_salt),
            prompt_bytes=as_bytes(token_ids) if self._page_size else b"",
            banned_ids=words,
            banned_runs=runs,
            grammar=grammar,
            pin=pin,
        )

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab)

    def _page_hashes(self, token_ids: Sequence[int], salt: str) -> tuple[bytes, ...]:
        return tuple(page_hashes(token_ids, self._page_size, salt)) if self._page_size else ()

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        room = self.max_len - prompt_len
        wanted = max(1, room) if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise PromptTooLong(prompt_len, wanted, self.max_len)
        if params.min_tokens > wanted:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, over the {wanted} that fit: lower it",
                param="min_tokens",
            )
        return wanted

    def _closing_tokens(self, marks: ReasoningMarks | None) -> int:
        """What it takes to end the reasoning that a prompt has opened."""
        if marks is None or not marks.is_open:
            return 0
        return len(self.tokenizer.encode(marks.end, add_special_tokens=False))

    def _checked(self, ids: Any) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise RequestError("prompt is no list of token ids", param="prompt")
        check_ids("prompt", ids, self.vocab)
        return list(ids)

    def _bad_words(
        self, params: SamplingParams
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Banned single ids and banned runs: each word as it stands and after a space."""
        words: set[int] = set()
        runs: set[tuple[int, ...]] = set()
        for word in params.bad_words or ():
            for form in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(form, add_special_tokens=False))
                if len(ids) == 1:
                    words.add(ids[0])
                elif ids:
                    runs.add(ids)
        return tuple(sorted(words)), tuple(sorted(runs))


def _check_room(grammar: CompiledGrammar, max_tokens: int, num_closing: int) -> None:
    if grammar.shortest is None:
        return
    needed = grammar.shortest + num_closing
    if max_tokens < needed:
        raise RequestError(
            f"max_tokens is {max_tokens}, and the shortest answer that structured_outputs, "
            f"response_format or tool_choice allow takes {needed} tokens: raise it",
            param="max_tokens",
        )


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several as several.

    Raises:
        RequestError: what is no prompt.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {type(prompts).__name__}: give text, token ids, or a list of such prompts",
            param="prompt",
        )
    is_numpy = np.ndarray | np.generic
    prompts = [item.tolist() if isinstance(item, is_numpy) else item for item in prompts]
    is_ids = len(prompts) > 0 and all(isinstance(item, int) for item in prompts)
    return [prompts] if is_ids else list(prompts)


def params_for(
    prompts: Sequence[Prompt],
    given: SamplingParams | Sequence[SamplingParams] | None,
    default: Callable[[], SamplingParams],
) -> Sequence[SamplingParams]:
    """One a prompt, of what a caller gave for all or for each who waits for the end."""
    if given is None:
        given = default()
    if isinstance(given, SamplingParams):
        return [replace(given, output_kind=OutputKind.FINAL_ONLY)] * len(prompts)
    if not isinstance(given, Sequence):
        raise RequestError(
            f"sampling_params is {type(given).__name__}: give SamplingParams, or a list of them"
        )
    if len(given) != len(prompts):
        raise RequestError(
            f"{len(given)} sampling_params for {len(prompts)} prompts: give one each"
        )
    return [replace(one, output_kind=OutputKind.FINAL_ONLY) for one in given]
