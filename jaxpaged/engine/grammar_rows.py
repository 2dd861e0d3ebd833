"""Rows of a step whose answers follow a grammar: their masks, and what each token does to them.

And rows whose reasoning ends after so many tokens.
"""

import asyncio

import numpy as np

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.errors import CapacityError, RequestError
from jaxpaged.text.grammar import CompiledGrammar, GrammarParams, Grammars
from jaxpaged.text.grammar_matcher import GrammarMatcher, MaskFiller, MaskRow
from jaxpaged.text.reasoning_gate import ReasoningGate, reasoning_tokens
from jaxpaged.text.thinking_budget import ThinkingBudget
from jaxpaged.text.tokenizer import Tokenizer

GRACE_S = 1.0  # beyond the time limit, which the compiler itself looks at now and then


async def compile_grammar(grammars: Grammars, params: SamplingParams) -> CompiledGrammar | None:
    """What a request's structured outputs compile to, in a worker thread; None without any.

    Raises:
        RequestError: it cannot be served, or takes too long.
        CapacityError: all workers were busy with other grammars for that long.
    """
    wanted = params.structured_outputs
    if wanted is None:
        return None
    marks = params.reasoning
    found = grammars.kept(wanted)
    if found is not None and marks is None:
        return found

    marked = None if marks is None else (marks.begin, marks.end)

    def prepare() -> None:
        """Look through the vocabulary: done once, which is not this grammar's time."""
        if not len(grammars.eos_ids):
            return  # nothing can be compiled for it, which `compile` says
        _ = grammars.tree, grammars.ll_tokenizer
        if marks is not None:
            reasoning_tokens(grammars, marks.begin, marks.end)
        grammars.prepared.add(marked)

    if marked not in grammars.prepared:
        await asyncio.get_running_loop().run_in_executor(grammars.workers, prepare)
    return await _compile(grammars, wanted)


async def _compile(grammars: Grammars, wanted: GrammarParams) -> CompiledGrammar:
    """In the time that it has once a worker is free, for which it waits as long at most."""
    loop, limit_s, begun = asyncio.get_running_loop(), grammars.time_limit_s, asyncio.Event()

    def compiled() -> CompiledGrammar:
        loop.call_soon_threadsafe(begun.set)
        return grammars.compile(wanted)

    job = loop.run_in_executor(grammars.workers, compiled)
    try:
        async with asyncio.timeout(limit_s) as timer:
            await begun.wait()
            timer.reschedule(loop.time() + limit_s + GRACE_S)
            return await job
    except TimeoutError:
        if begun.is_set():
            raise RequestError(
                f"the grammar took over {limit_s:g} s to compile: make it smaller",
                param="structured_outputs",
            ) from None
        raise CapacityError(
            f"other grammars have been compiled for {limit_s:g} s, and this one waited: try again"
        ) from None
    finally:
        job.cancel()  # where it waits: nobody wants it any more


class GrammarRows:
    """The open sequences with a grammar, or whose reasoning has a limit. Owned by the engine."""

    def __init__(self, tokenizer: Tokenizer):
        self._filler, self._tokenizer = MaskFiller(), tokenizer
        self.followed: set[int] = set()  # seq_ids
        self._thinking: dict[int, ThinkingBudget] = {}  # of those with a limit and no grammar
        self._matchers: dict[int, GrammarMatcher] = {}  # by seq_id
        self._gates: dict[int, ReasoningGate] = {}  # of those whose reasoning goes on
        self._begins: dict[int, int] = {}  # tokens of reasoning before the answer, where there were

    def add(self, seq: Sequence) -> None:
        grammar, marks = seq.request.grammar, seq.request.params.reasoning
        limits = {} if marks is None else {"is_open": marks.is_open, "max_tokens": marks.max_tokens}
        if grammar is not None:
            assert isinstance(grammar, CompiledGrammar)
            self.followed.add(seq.seq_id)
            self._matchers[seq.seq_id] = GrammarMatcher(grammar)
            if marks is not None:
                tokens = reasoning_tokens(grammar.vocabulary, marks.begin, marks.end)
                self._gates[seq.seq_id] = ReasoningGate(grammar, tokens, **limits)
        elif marks is not None:
            self.followed.add(seq.seq_id)
            thinking = ThinkingBudget(self._tokenizer, marks.begin, marks.end, **limits)
            self._thinking[seq.seq_id] = thinking

    def forget(self, seq: Sequence) -> None:
        self.followed.discard(seq.seq_id)
        for kept in (self._matchers, self._gates, self._begins, self._thinking):
            kept.pop(seq.seq_id, None)

    def is_in(self, plan: StepPlan) -> bool:
        """Some row of the step samples by a grammar, or under a limit of its reasoning."""
        return bool(self.followed) and any(
            samples and seq.seq_id in self.followed
            for seq, samples in zip(plan.columns.seqs, plan.columns.samples, strict=True)
        )

    def wait_for_tokens(self, plan: StepPlan) -> bool:
        """Some row's mask follows from tokens that have not been read."""
        return any(
            samples and seq.num_in_flight > 1 and seq.seq_id in self.followed
            for seq, samples in zip(plan.columns.seqs, plan.columns.samples, strict=True)
        )

    def fill(self, plan: StepPlan, banned: np.ndarray) -> None:
        """Ban in the rows of `banned`, u32[seqs, words], what their grammars do not allow next.

        All tokens before must have been read.
        """
        rows = list[MaskRow]()
        columns = plan.columns
        for i, (seq, samples) in enumerate(zip(columns.seqs, columns.samples, strict=True)):
            matcher = self._matchers.get(seq.seq_id)
            thinking = self._thinking.get(seq.seq_id)
            if thinking is not None and samples and thinking.forced_id is not None:
                _force(banned[i], thinking.forced_id)
            if matcher is None or not samples or seq.state is SeqState.FINISHED:
                continue
            params, output = seq.request.params, seq.output_token_ids
            goes_on = params.ignore_eos or len(output) < params.min_tokens
            budget, also_id = seq.request.max_tokens - len(output), None
            gate = self._gates.get(seq.seq_id)
            if gate is not None and not gate.is_undecided:
                mask = ~banned[i]
                _narrow(mask, gate.mask(budget), matcher)
                banned[i] = ~mask
                continue
            if gate is not None:
                also_id = gate.opening_id(budget)
            begin = self._begins.get(seq.seq_id, 0)
            answer = output[begin:] if begin else output
            has_bans = params.allowed_token_ids is not None
            rows.append(MaskRow(i, matcher, answer, budget, goes_on, also_id, has_bans))
        self._filler.ban(banned, rows)

    def take(self, seq: Sequence, token_ids: tuple[int, ...]) -> "Ending | None":
        """Follow a sequence's new tokens; how it ends with them, where the grammar says so."""
        if seq.seq_id in self._thinking:
            if self._thinking[seq.seq_id].ends_with(token_ids):
                self.forget(seq)
            return None
        matcher = self._matchers[seq.seq_id]
        if matcher.failure is not None:
            return Ending("error", matcher.failure)
        gate = self._gates.get(seq.seq_id)
        if gate is not None:
            num_passed = gate.passes(token_ids)
            if num_passed is None:
                return None
            del self._gates[seq.seq_id]
            self._begins[seq.seq_id] = gate.num_tokens
            token_ids = token_ids[num_passed:]
        for token_id in token_ids:
            if token_id in seq.stop_ids and seq.finish_reason == "stop":
                break
            if not matcher.accept(token_id):
                error = f"token {token_id} is not what the grammar allows"
                return Ending("error", matcher.failure or error)
        if matcher.must_end or (seq.finish_reason == "length" and matcher.can_end):
            return Ending("stop", None)
        return None


def _force(banned: np.ndarray, token_id: int) -> None:
    """Ban all but one token, unless it is banned itself."""
    bit = np.uint32(1 << token_id % 32)
    if not banned[token_id // 32] & bit:
        banned[:] = 0xFFFFFFFF
        banned[token_id // 32] ^= bit


def _narrow(row: np.ndarray, allowed: np.ndarray, matcher: GrammarMatcher) -> None:
    both = row & allowed
    if both.any():
        row[:] = both
    else:
        matcher.failure = "allowed_token_ids leave no token for the reasoning"


class Ending:
    """Why a grammar ends an answer: `stop`, or `error` and what went wrong."""

    __slots__ = ("error", "reason")

    def __init__(self, reason: str, error: str | None):
        self.reason, self.error = reason, error
