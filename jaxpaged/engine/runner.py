"""The runner owns the device: weights, page pool, compiled steps. It alone knows both sides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.arrays import DeviceState, Params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.core.buckets import Bucket
from jaxpaged.core.packing import HostBatch
from jaxpaged.core.plan import PageMove, StepPlan
from jaxpaged.engine.holes import wall_in
from jaxpaged.engine.page_moves import PageMover
from jaxpaged.engine.programs import Programs
from jaxpaged.engine.stages import EarlierStages
from jaxpaged.engine.step import STEP_WORDS, TOP_WORDS, SamplerState
from jaxpaged.errors import InvariantError
from jaxpaged.layers.sampling import BANNED, FINITE, TOP_LOGPROBS
from jaxpaged.weights.loader import DRAFT


@dataclass(frozen=True)
class StepResult:
    """A step as NumPy. `target_logprobs` and on are empty for samplers without logprobs."""

    token_ids: np.ndarray  # i32[seqs]
    logprobs: np.ndarray  # f32[seqs]
    is_finite: np.ndarray  # bool[seqs]
    target_logprobs: np.ndarray  # f32[logits]
    ranks: np.ndarray  # i32[logits]
    top_ids: np.ndarray  # i32[logits, 20]
    top_logprobs: np.ndarray  # f32[logits, 20]
    guessed: np.ndarray | None = None  # i32[tokens] of a step whose drafts the device made
    is_banned: np.ndarray | None = None  # bool[seqs]: the row's own parameters exclude every token

    @property
    def is_good(self) -> bool:
        """Every row gave a token that it may."""
        return bool(self.is_finite.all()) and (self.is_banned is None or not self.is_banned.any())

    @cached_property
    def logprob_list(self) -> list[float]:
        """`logprobs` as Python numbers, made once: an element of an array costs more."""
        return self.logprobs.tolist()


@dataclass(frozen=True)
class PendingLogits:
    """The first half of a step: logits that the device is computing."""

    bucket: Bucket
    logits: jax.Array
    words: jax.Array  # of a greedy step, and the tokens of one whose drafts the device made


@dataclass(frozen=True)
class PendingStep:
    """A step that the device is computing, or has computed; `place` among several in `words`."""

    bucket: Bucket
    words: jax.Array
    place: int | None = None
    forward_words: jax.Array | None = None  # of a step with drafts that has a sampling program


class Runner:
    """Runs built batches on one device or mesh, in the order given. Used by one thread at a time.

    Where the model is cut into stages these are the last stage's devices; see `EarlierStages`.

    Args:
        params: the decoder's weights on their devices, and those of a draft model.
        programs: of each stage, in order; mostly there is one.
        split: cuts the weights into those of each stage.
        largest_words: bytes of the largest buffer of words that a step takes; see `wall_in`.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        programs: Sequence[Programs],
        split: Callable[[Params], Sequence[Params]] = lambda params: [params],
        largest_words: int = 0,
    ):
        self.model, self.all_params, self._split = model, params, split
        *_, self._programs = self._all_programs = programs
        self._state = self._programs.source.make_state()
        self._mover = PageMover(self._programs.page, self._programs.source.page_kinds)
        mesh = self._programs.source.mesh
        self._everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        *earlier, self._own_params = split(params)
        self._earlier = None
        if earlier:
            assert self._everywhere is not None
            self._earlier = EarlierStages(programs[:-1], earlier, self._everywhere)
        devices = {device for leaf in jax.tree.leaves(params) for device in leaf.devices()}
        self._walls = wall_in(devices, largest_words)

    @property
    def num_stages(self) -> int:
        return len(self._all_programs)

    @property
    def params(self) -> Params:
        """The decoder's weights without those of a draft model."""
        return {name: x for name, x in self.all_params.items() if name != DRAFT}

    @property
    def compilations(self) -> list[tuple[str, float]]:
        """Names of the programs that were compiled, and seconds of each."""
        return [one for programs in self._all_programs for one in programs.compilations]

    @property
    def num_compilations(self) -> int:
        return sum([len(programs.compilations) for programs in self._all_programs])

    @property
    def last_compile_time(self) -> float:
        """Now while a program that was missing is compiled, else when the last was finished."""
        return max([programs.clock.last_progress_time for programs in self._all_programs])

    @property
    def num_loaded(self) -> int:
        """Programs that were found on disk."""
        return sum([programs.num_loaded for programs in self._all_programs])

    @property
    def state(self) -> DeviceState:
        """With the pages of all layers."""
        if self._earlier is None:
            return self._state
        pages = self._earlier.kv_pages + self._state.kv_pages
        return replace(self._state, kv_pages=pages)

    def dispatch(self, batch: HostBatch) -> PendingStep:
        """Start a step; returns at once where the device computes asynchronously."""
        if batch.bucket.needs_sampling:
            forward, sample = jax.device_put((batch.forward, batch.sample), self._everywhere)
            return self._start_sampling(self._start_forward(batch, forward), batch, sample)
        pending = self.dispatch_forward(batch)
        pending.words.copy_to_host_async()
        return PendingStep(batch.bucket, pending.words)

    def dispatch_chain(self, batches: Sequence[HostBatch]) -> list[PendingStep]:
        """Start several steps, all of one bucket, in one program."""
        bucket = batches[0].bucket
        packed = self._programs.source.layout(bucket).chained(batches)
        packed = jax.device_put(packed, self._everywhere)
        self._state, words = self._programs.chain(bucket, len(batches))(
            self._own_params, self._state, packed
        )
        words.copy_to_host_async()
        return [PendingStep(bucket, words, place) for place in range(len(batches))]

    def dispatch_forward(self, batch: HostBatch) -> PendingLogits:
        """Start the first half of a step. `dispatch_sample` must come before the next forward."""
        return self._start_forward(batch, jax.device_put(batch.forward, self._everywhere))

    def dispatch_sample(self, pending: PendingLogits, batch: HostBatch) -> PendingStep:
        """Start the second half, with `batch.sample` as it is by now."""
        return self._start_sampling(pending, batch, jax.device_put(batch.sample, self._everywhere))

    def read(self, pending: PendingStep) -> StepResult:
        """Wait for a step and take its result apart."""
        words, seqs = np.asarray(pending.words), pending.bucket.num_samples
        if pending.place is not None:
            words = words[pending.place]
        words, guessed = _without_guessed(pending, words)
        head = words[: seqs * STEP_WORDS].reshape(seqs, STEP_WORDS)
        top = words[seqs * STEP_WORDS :].reshape(-1, TOP_WORDS)
        first, last = slice(2, 2 + TOP_LOGPROBS), slice(2 + TOP_LOGPROBS, None)
        return StepResult(
            head[:, 0],
            head[:, 1].copy().view(np.float32),
            head[:, 2] & FINITE != 0,
            top[:, 0].copy().view(np.float32),
            top[:, 1],
            top[:, first],
            np.ascontiguousarray(top[:, last]).view(np.float32),
            guessed,
            head[:, 2] & BANNED != 0,
        )

    def set_history(self, slot: int, token_ids: tuple[int, ...], num_prompt_tokens: int) -> None:
        """Tell the penalties what the sequence in `slot` holds so far."""
        program, length = self._programs.reset(len(token_ids))
        padded = np.zeros(length, np.int32)
        padded[: len(token_ids)] = token_ids
        scalars = [np.int32(n) for n in (num_prompt_tokens, len(token_ids))]
        counts = program(self._state.output_counts, np.int32(slot), padded, *scalars)
        self._state = replace(self._state, output_counts=counts)

    def copy_pages(self, plan: StepPlan) -> None:
        """Copy pages within the pool, before what is dispatched next."""
        if self._earlier is not None:
            self._earlier.copy_pages(plan)
        kv_pages = self._mover.copy(self._state.kv_pages, plan.page_copies, plan.local_copies)
        self._state = replace(self._state, kv_pages=kv_pages)

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Swap pages out and in, before what is dispatched next."""
        if self._earlier is not None:
            self._earlier.move_pages(moves)
        kv_pages = self._mover.move(self._state.kv_pages, moves)
        self._state = replace(self._state, kv_pages=kv_pages)

    def update_params(self, params: Params) -> None:
        """Put other weights of the same shapes and types in place of the present ones.

        Those of a draft model stay as they are, unless they are there as in `all_params`.

        Raises:
            InvariantError: the trees differ; the first difference is named.
        """
        present = self.all_params if DRAFT in params else self.params
        names = [
            {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
            for tree in (present, params)
        ]
        if names[0] != names[1]:
            name = min(names[0] ^ names[1])
            what = "missing" if name in names[0] else "none of this model's"
            raise InvariantError(f"update_params: {name} is {what}")
        wanted = jax.tree.map(lambda x: (x.shape, x.dtype), present)
        given = jax.tree.map(lambda x: (x.shape, x.dtype), params)
        for (path, want), (_, got) in zip(
            jax.tree.leaves_with_path(wanted, is_leaf=_is_shape),
            jax.tree.leaves_with_path(given, is_leaf=_is_shape),
            strict=True,
        ):
            if want != got:
                raise InvariantError(
                    f"update_params: {jax.tree_util.keystr(path)} is {got}, must be {want}"
                )
        new = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, present)
        self.all_params = self.all_params | new
        *earlier, self._own_params = self._split(self.all_params)
        if self._earlier is not None:
            self._earlier.replace_params(earlier)

    def replace_state(self, state: DeviceState) -> None:
        """Take another page pool of the same shapes; nothing may be running."""
        if self._earlier is not None:
            state = replace(state, kv_pages=self._earlier.replace_pages(state.kv_pages))
        self._state = state

    def temp_bytes(self) -> dict[str, int]:
        """What each program at hand needs while it runs, beside its arguments and results."""
        found: dict[str, int] = {}
        for programs in self._all_programs:
            for name, size in programs.temp_bytes().items():
                found[name] = max(size, found.get(name, 0))
        return found

    def free(self) -> None:
        """Give the memory of weights and pages back to XLA's allocator; their shapes stay."""
        for leaf in jax.tree.leaves((self.all_params, self._own_params, self.state)):
            leaf.delete()

    def close(self) -> None:
        """Free the device's memory, which XLA keeps for this process."""
        self.free()
        for programs in self._all_programs:
            programs.clear()

    def _start_forward(self, batch: HostBatch, packed: jax.Array) -> PendingLogits:
        bucket, given = batch.bucket, ()
        if self._earlier is not None:
            given = (self._earlier.start(batch),)
        forward = self._programs.forward(bucket)
        self._state, logits, words = forward(self._own_params, self._state, packed, *given)
        if self._earlier is not None and not bucket.needs_sampling:
            self._earlier.feed_back(batch, self._state.last_token_ids)
        return PendingLogits(bucket, logits, words)

    def _start_sampling(
        self, pending: PendingLogits, batch: HostBatch, packed: jax.Array
    ) -> PendingStep:
        state = SamplerState(self._state.last_token_ids, self._state.output_counts)
        state, words = self._programs.sample(pending.bucket)(state, pending.logits, packed)
        self._state = state.put_into(self._state)
        if self._earlier is not None:
            self._earlier.feed_back(batch, self._state.last_token_ids)
        words.copy_to_host_async()
        bucket = pending.bucket
        if bucket.kind != "draft" or pending.words.size == bucket.num_samples * STEP_WORDS:
            return PendingStep(bucket, words)
        pending.words.copy_to_host_async()
        return PendingStep(bucket, words, forward_words=pending.words)


def _without_guessed(
    pending: PendingStep, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """A step's own words, and the tokens of one whose drafts the device made."""
    bucket = pending.bucket
    if bucket.kind != "draft":
        return words, None
    end = bucket.num_samples * STEP_WORDS
    if pending.forward_words is not None:
        return words, np.asarray(pending.forward_words)[end:]
    if bucket.needs_sampling or len(words) == end:
        return words, None
    return words[:end], words[end:]


def _is_shape(x: object) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)
