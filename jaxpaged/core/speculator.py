"""Who guesses how many tokens, and by lookup which: runs of tokens found in the sequence's text.

What a draft model guesses is known to the device alone: a plan has as many zeros.
"""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq

from jaxpaged.config.speculation import MAX_DRAFT_ROWS, MAX_DRAFT_TOKENS
from jaxpaged.core.draft_pace import DraftPace
from jaxpaged.core.hashing import TOKEN_BYTES, as_bytes
from jaxpaged.core.limits import SchedulerLimits, StopCause, stop_cause
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.plan import PlanDraft, PlannedRow, Sampled, StepPlan
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.core.speculation import BEGIN, GO_ON, best_lengths
from jaxpaged.errors import InvariantError

FIRST_RATE = 0.9  # of a draft model's right guesses, before anything is known
FORGET = 1 / 256  # of what is known of a draft model, with each token that it did not guess
TOKENS_A_STEP = 1024  # of all texts that are looked through in one step, so that none takes long
MEMORY = 0.8  # weight of the past in the rate of a draft model's right guesses
LEAST_WEIGHT = 0.1  # of a token in the rate of those that are looked up; of the first ones more
PLACES_LOOKED_AT = 32  # of a run, for the longest one that ends as it does


type _Verified = tuple[int, PlannedRow, int, StopCause | None]


class _Text:
    """What is known of one sequence's tokens: where the shortest runs of them ended."""

    __slots__ = (
        *("_begin", "_longest", "_places", "_places_before", "_shortest", "_was_right"),
        *("guess", "num_seen", "rate", "seq"),
    )

    def __init__(self, seq: Sequence, shortest: int, longest: int):
        self.seq = seq
        self.num_seen = 0
        self.rate = 0.0  # of tokens that were guessed right, recent ones counting more
        self.guess = -1  # the place whose token is expected next; -1 where nothing was found
        self._was_right = False  # the last guess
        self._begin = len(seq.token_ids)  # tokens before are only looked up, nothing is guessed
        self._shortest, self._longest = shortest, longest
        self._places: dict[bytes, int] = {}  # after a run's last end
        self._places_before: list[int] = []  # of each end of a run the one before it, or -1

    def read(self, most: int) -> bool:
        """Look through the new tokens, at most so many; whether that was all."""
        ids, guess, was_right = self.seq.token_ids, self.guess, self._was_right
        start, end = self.num_seen, min(len(ids), self.num_seen + most)
        for i, last in enumerate(self._note_runs(start, end), start):
            if i < self._begin - 1:
                continue
            is_right = guess >= 0 and ids[guess] == ids[i]
            if i >= self._begin:
                weight = max(LEAST_WEIGHT, 1 / (3 + i - self._begin))
                self.rate += weight * (is_right - self.rate)
            # what goes on from a right guess has more in common than a run that is looked up
            found = guess + 1 if is_right else self._best_place(last, i + 1)
            if found < 0 and was_right:
                found = guess + 1  # one token differs: the rest may be as it was
            guess, was_right = found, is_right
        self.num_seen, self.guess, self._was_right = end, guess, was_right
        return end == len(ids)

    def _note_runs(self, start: int, end: int) -> list[int]:
        """Note where the shortest runs end that end with these tokens; where each ended before."""
        size, places = self._shortest, self._places
        begin = max(start + 1 - size, 0)
        known, num_bytes = as_bytes(self.seq.token_ids[begin:end]), size * TOKEN_BYTES
        before = [-1] * min(max(size - 1 - start, 0), end - start)  # too few tokens for a run
        for place in range(begin + size, end + 1):
            at = (place - begin) * TOKEN_BYTES
            run = known[at - num_bytes : at]
            before.append(places.get(run, -1))
            places[run] = place
        self._places_before += before
        return before

    def _best_place(self, place: int, end: int) -> int:
        """Of the places of the run that ends at `end`, `place` the last one, that where most before
        it is the same; -1 where there is none.
        """
        ids, best, best_length = self.seq.token_ids, place, self._shortest
        for _ in range(PLACES_LOOKED_AT):
            if place < 0 or best_length == self._longest:
                break
            length, most = self._shortest, min(self._longest, place)
            while length < most and ids[place - 1 - length] == ids[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._places_before[place - 1]
        return best

    @property
    def is_up_to_date(self) -> bool:
        return self.num_seen == len(self.seq.token_ids)

    def continuation(self, length: int) -> tuple[int, ...]:
        """The tokens that came after the last run like the present one, repeated at the end."""
        ids, guess = self.seq.token_ids, self.guess
        if guess < 0:
            return ()
        period = len(ids) - guess
        return tuple([ids[guess + i % period] for i in range(length)])


class _Guessed:
    """How well a draft model guesses for one sequence."""

    __slots__ = ("num_seen", "rate", "seq")
    is_up_to_date = True

    def __init__(self, seq: Sequence):
        self.seq, self.rate, self.num_seen = seq, FIRST_RATE, len(seq.token_ids)

    def read(self, most: int) -> bool:
        """Nothing of the text is looked at; who is not guessed for is tried again some day."""
        num_tokens = len(self.seq.token_ids)
        if not self.seq.needs_read_tokens:
            forgotten = min(1.0, FORGET * (num_tokens - self.num_seen))
            self.rate += forgotten * (FIRST_RATE - self.rate)
        self.num_seen = num_tokens
        return True

    def verified(self, num_guessed: int, num_right: int) -> None:
        """Count right guesses and the first wrong one."""
        for _ in range(num_right):
            self.rate = MEMORY * self.rate + (1.0 - MEMORY)
        if num_right < num_guessed:
            self.rate *= MEMORY

    def continuation(self, length: int) -> tuple[int, ...]:
        return (0,) * length


class Speculator:
    """Chooses, for every sequence and step, how many tokens to guess. Owned by the scheduler.

    Without settings it guesses nothing.
    """

    def __init__(self, limits: SchedulerLimits):
        settings = limits.speculation
        self._has_model = settings is not None and settings.method == "draft_model"
        self._guess_cost = limits.draft_cost
        self._most = 0 if settings is None else settings.num_speculative_tokens
        self._max_rows = 0 if settings is None else MAX_DRAFT_ROWS
        self._shortest = 0 if settings is None else settings.prompt_lookup_min
        self._longest = 0 if settings is None else settings.prompt_lookup_max
        self._texts: dict[int, _Text | _Guessed] = {}
        self._lengths: dict[int, int] = {}  # of drafts, by sequence; empty where nobody drafts
        self._pace = DraftPace(limits.single_cost, limits.draft_cost)
        self._num_rows, self._has_news = 0, False

    @property
    def is_drafting(self) -> bool:
        """Whether rows wait for their tokens, to be given drafts. Else steps are as without any."""
        return bool(self._lengths)

    def begin_step(
        self, draft: PlanDraft, running: Collection[Sequence], has_waiting: bool
    ) -> None:
        """Settle who drafts: where rows are few, all of them plain decodes, and it pays."""
        if not self._max_rows:
            return
        self._num_rows = len(running)
        if not self._may_draft(running) or has_waiting:
            self._drafts_for({})
        elif self._has_news:
            self._choose(running)
        draft.speculates = bool(self._lengths)

    def committed(self, plan: StepPlan, seconds: float) -> None:
        """A step was read, `seconds` after the one before it."""
        self._has_news = True
        if plan.num_rows <= self._max_rows:
            self._pace.took(plan, seconds, self._num_rows)

    def _choose(self, running: Collection[Sequence]) -> None:
        texts, rates, limits = self._texts, list[float](), list[float]()
        self._has_news, most = False, TOKENS_A_STEP // len(running)
        for seq in running:
            text = texts.get(seq.seq_id)
            if text is None:
                text = texts[seq.seq_id] = self._begin(seq)
            if not text.read(most):
                self._has_news = True
            rates.append(round(text.rate, 2))
            limits.append(GO_ON if seq.seq_id in self._lengths else BEGIN)
        costs = self._guess_cost, self._pace.single_cost(self._num_rows)
        most = min(self._most, MAX_DRAFT_TOKENS // len(running) - 1)
        lengths = best_lengths(rates, limits, most, *costs)
        ids = [seq.seq_id for seq in running]
        self._drafts_for({i: n for i, n in zip(ids, lengths, strict=True) if n})

    def _drafts_for(self, lengths: dict[int, int]) -> None:
        """From now on those sequences wait for their tokens, and no others."""
        for seq_id in self._lengths.keys() | lengths.keys():
            if text := self._texts.get(seq_id):
                is_banning = bool(text.seq.request.banned_runs)
                text.seq.needs_read_tokens = seq_id in lengths or is_banning
        self._lengths = lengths

    def _may_draft(self, running: Collection[Sequence]) -> bool:
        # of a row with edits or a grammar the logits at a guess depend on the guesses before it
        if not 0 < len(running) <= self._max_rows or any(
            seq.sampler_level > 1 or seq.request.grammar is not None for seq in running
        ):
            if self._texts:
                self._forget(self._texts)
            return False
        if len(self._texts) > len(running):
            ended = SeqState.FINISHED
            self._forget([i for i, text in self._texts.items() if text.seq.state is ended])
        return all(seq.num_pending_tokens <= 1 and seq.request.max_tokens for seq in running)

    def draft(self, seq: Sequence, draft: PlanDraft, pool: PagePool) -> tuple[int, ...]:
        """Tokens that may come after the last one, as many as limits and free pages allow."""
        length = self._lengths.get(seq.seq_id, 0)
        if not length or seq.num_in_flight:
            return ()
        text = self._texts[seq.seq_id]
        if not text.is_up_to_date:
            return ()
        end = min(seq.num_needed_tokens, (len(seq.page_ids) + pool.room) * pool.page_size)
        room = min(end - len(seq.token_ids), draft.plain_cap - draft.num_tokens - 1)
        return text.continuation(min(length, room))

    def take_verified(self, plan: StepPlan, sampled: Seq[Sampled]) -> Iterator[_Verified]:
        """Append what the rows of a step with drafts sampled, up to a token that ends the sequence.

        Yields every row's place, the row, how many leading tokens have KV, and why it ends, as
        `stop_cause` says it. Sequences that have finished meanwhile are left out.
        """
        for i, (row, tokens) in enumerate(zip(plan.rows, sampled, strict=True)):
            if row.seq.state is SeqState.FINISHED:
                continue
            text = self._texts.get(row.seq.seq_id)
            if isinstance(text, _Guessed) and i in plan.drafts and isinstance(tokens, Seq):
                text.verified(len(plan.drafts[i]), len(tokens) - 1)
            yield i, row, *_append(row.seq, row.start, tokens)

    def _begin(self, seq: Sequence) -> _Text | _Guessed:
        if self._has_model:
            return _Guessed(seq)
        return _Text(seq, self._shortest, self._longest)

    def _forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in list(seq_ids):
            seq = self._texts.pop(seq_id).seq
            seq.needs_read_tokens = bool(seq.request.banned_runs)


def _append(seq: Sequence, start: int, tokens: Sampled) -> tuple[int, StopCause | None]:
    new = [tokens] if isinstance(tokens, int) else tokens
    if not new:
        raise InvariantError(f"sequence {seq.seq_id}: its step sampled no token")
    seq.num_in_flight -= 1
    num_done, cause = start, None
    for token in new:
        seq.token_ids.append(token)
        num_done += 1
        if token in seq.stop_ids or len(seq.token_ids) > seq.num_needed_tokens:
            cause = stop_cause(seq)
            if cause:
                break
    if not isinstance(tokens, int):
        # fewer than planned where a guess was wrong; none where its pages went meanwhile
        seq.num_computed_tokens = min(seq.num_computed_tokens, num_done)
    return num_done, cause
