"""Answers held to a grammar: compiled once, followed token by token, ended in time.

llguidance says which tokens may come next. Where the grammar is a JSON schema, a regular expression
or a choice, a second automaton knows how many tokens the shortest ending takes; once an answer's
tokens run out it says which of them still lead to an end.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from jaxpaged.text.grammars.endings import NEVER, Endings
from jaxpaged.text.grammars.expressions import Grammar, Text, choice
from jaxpaged.text.grammars.failures import MAX_WAYS, is_too_complex, no_next_token
from jaxpaged.text.grammars.json_schema import json_schema_grammar
from jaxpaged.text.grammars.json_text import JsonStyle, bounded_space, white_space
from jaxpaged.text.grammars.lark import to_lark
from jaxpaged.text.grammars.mask_memory import MaskMemory
from jaxpaged.text.grammars.network import Network
from jaxpaged.text.grammars.refusal import not_served, refusal
from jaxpaged.text.grammars.regex import parse_regex
from jaxpaged.text.grammars.tagged import tagged_grammar
from jaxpaged.text.grammars.vocabulary import TokenTree
from jaxpaged.text.tokenizer import Tokenizer

TIME_LIMIT_S = 10.0
NUM_WORKERS = 2
MAX_KEPT, MAX_KEPT_STATES = 256, 300_000  # compiled grammars, and their states together
MAX_GRAMMAR = 100_000  # characters
_GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class GrammarParams(Protocol):
    """The fields of `StructuredOutputsParams`."""

    @property
    def json(self) -> str | Mapping[str, Any] | None: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def choice(self) -> Sequence[str] | None: ...
    @property
    def grammar(self) -> str | None: ...
    @property
    def structural_tag(self) -> str | None: ...
    @property
    def json_object(self) -> bool | None: ...
    @property
    def whitespace_pattern(self) -> str | None: ...
    @property
    def disable_any_whitespace(self) -> bool: ...
    @property
    def disable_additional_properties(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar over one vocabulary. `shortest` are the tokens of its shortest answer, if known."""

    vocabulary: "Grammars"
    matcher: LLMatcher
    endings: Endings | None
    shortest: int | None

    @property
    def size(self) -> int:
        return 1000 + (len(self.endings.network.empty) if self.endings else 0)


class Grammars:
    """Compiles grammars for one tokenizer and keeps the latest. Safe to use from several threads.

    Args:
        vocab: width of the logits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        max_kept: int = MAX_KEPT,
    ):
        self._tokenizer, self._vocab = tokenizer, vocab
        self.time_limit_s, self._max_kept = time_limit_s, max_kept
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock, self._setup_lock, self._mask_memory = Lock(), Lock(), MaskMemory()
        self.reasoning: dict[tuple[str, str], object] = {}  # kept by `reasoning_tokens`
        self.prepared: set[tuple[str, str] | None] = set()  # marks that were looked for, or none

    def kept(self, params: GrammarParams) -> CompiledGrammar | None:
        """What was compiled already."""
        key = _key(params)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def compile(self, params: GrammarParams) -> CompiledGrammar:
        """Compile what `params` ask for, or find it again. Takes milliseconds to seconds.

        Raises:
            RequestError: no grammar, one that is not served, too large or too slow.
        """
        try:
            return self.kept(params) or self._compile(params)
        except RecursionError:  # of whatever walks it
            raise refusal("the schema or grammar is nested too deep") from None
        except UnicodeEncodeError:
            raise refusal("half of a surrogate pair is no character: send whole ones") from None

    def _compile(self, params: GrammarParams) -> CompiledGrammar:
        if not self._tokenizer.eos_token_ids:
            raise not_served("structured outputs need a tokenizer with an end-of-text token")
        tree, _ = self.tree, self.ll_tokenizer  # made once; not this grammar's time
        deadline = time.monotonic() + self.time_limit_s
        param, grammar, lark = _read(params)
        endings, shortest = None, None
        if grammar is not None:
            network = Network(grammar, param=param, deadline=deadline)
            endings = Endings(network, tree, self.eos_ids, self._mask_memory)
            shortest = endings.needs[endings.start]
            if shortest >= NEVER:
                raise refusal(f"{param}: nothing fits it")
        matcher = self._matcher(lark, param)
        if endings is None:
            self._check_beginning(matcher, param)
        compiled = CompiledGrammar(self, matcher, endings, shortest)
        self._keep(_key(params), compiled)
        return compiled

    def _matcher(self, lark: str, param: str) -> LLMatcher:
        limits = LLParserLimits(max_items_in_row=MAX_WAYS, verbose_errors=False)
        matcher = LLMatcher(self.ll_tokenizer, lark, log_level=0, limits=limits)
        if matcher.is_error():
            what = " ".join(matcher.get_error().split())[:300]
            raise refusal(f"{param} cannot be used: {what}")
        return matcher

    def _check_beginning(self, matcher: LLMatcher, param: str) -> None:
        """Refuse a grammar that can be seen to lead nowhere before its second token."""
        trial = matcher.deep_copy()
        row = np.zeros((1, len(self.words_without_eos)), np.int32)
        fill_next_token_bitmask(trial, row)
        if not trial.is_error():
            allowed = row[0].view(np.uint32) & self.words_without_eos
            if allowed.any():
                bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
                trial.consume_token(int(np.argmax(bits)))
            if not is_too_complex(trial):
                return
        raise refusal(
            f"{param}: no answer can begin with it, {no_next_token(trial)}: correct what it starts "
            "with"
        )

    def _keep(self, key: str, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._kept[key] = compiled
            total = sum(kept.size for kept in self._kept.values())
            while len(self._kept) > 1 and (
                len(self._kept) > self._max_kept or total > MAX_KEPT_STATES
            ):
                _, old = self._kept.popitem(last=False)
                total -= old.size

    @cached_property
    def workers(self) -> ThreadPoolExecutor:
        """Threads to compile in; a grammar that takes long holds up others, and nothing else."""
        return ThreadPoolExecutor(NUM_WORKERS, "grammar")

    @property
    def tree(self) -> TokenTree:
        with self._setup_lock:
            return self._tree

    @property
    def ll_tokenizer(self) -> LLTokenizer:
        with self._setup_lock:
            return self._ll_tokenizer

    @cached_property
    def eos_ids(self) -> np.ndarray:
        return np.array(sorted(self._tokenizer.eos_token_ids), np.int64)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Of every id below the logits' width; empty where there is no token."""
        return [self._tokenizer.token_bytes(i) for i in range(self._vocab)]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def words_without_eos(self) -> np.ndarray:
        """u32 words of a mask with all bits but those of end-of-text tokens."""
        words = np.full(-(-self._vocab // 32), 0xFFFFFFFF, np.uint32)
        for token_id in self.eos_ids.tolist():
            words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return words

    @cached_property
    def _tree(self) -> TokenTree:
        special = self._tokenizer.special_ids
        return TokenTree(
            [b"" if i in special else self._tokenizer.token_bytes(i) for i in range(self._vocab)]
        )

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        eos = [int(i) for i in self.eos_ids]
        return LLTokenizer(_Vocabulary(self._tokenizer, self._vocab), eos_token=eos)  # type: ignore


class _Vocabulary:
    """The tokenizer as llguidance reads it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _key(params: GrammarParams) -> str:
    given = [getattr(params, name) for name in _GRAMMAR_KINDS]
    style = (
        params.whitespace_pattern,
        params.disable_any_whitespace,
        params.disable_additional_properties,
    )
    return json.dumps([*given, *style])


def _read(params: GrammarParams) -> tuple[str, Grammar | None, str]:
    """The field that holds it, the grammar where it can be looked into, and llguidance's text."""
    if params.grammar is not None:
        return "grammar", None, _as_lark(params.grammar)
    if params.structural_tag is not None:
        tagged = tagged_grammar(params.structural_tag, _json_style(params), MAX_GRAMMAR)
        return "structural_tag", None, tagged
    if params.regex is not None:
        param, grammar = "regex", Grammar(parse_regex(params.regex, param="regex"))
    elif params.choice is not None:
        param, grammar = "choice", Grammar(choice([Text(one) for one in params.choice]))
    else:
        param, grammar = "json", _json_grammar(params)
    return param, grammar, to_lark(grammar)


def _json_grammar(params: GrammarParams) -> Grammar:
    style = _json_style(params)
    schema: Any = params.json if params.json is not None else {"type": "object"}
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            raise refusal("json is no JSON") from None
    closes = params.disable_additional_properties
    return json_schema_grammar(schema, style, param="json", closes_objects=closes)


def _json_style(params: GrammarParams) -> JsonStyle:
    space = bounded_space()
    if params.whitespace_pattern is not None:
        space = white_space(parse_regex(params.whitespace_pattern, param="whitespace_pattern"))
        if space is None:
            raise refusal("whitespace_pattern matches no spaces, tabs or line ends: write '[ ]?'")
    return JsonStyle(None if params.disable_any_whitespace else space)


def _as_lark(grammar: str) -> str:
    if len(grammar) > MAX_GRAMMAR:
        raise refusal(f"grammar has {len(grammar)} characters, allowed are {MAX_GRAMMAR}")
    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # whatever the converter meets in a client's text
        raise refusal(f"grammar is no EBNF: {error}") from None
