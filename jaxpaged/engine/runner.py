"""The runner owns the device: weights, page pool, compiled steps. It alone knows both sides."""

from collections.abc import Sequence
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
from jaxpaged.engine.page_moves import PageMover
from jaxpaged.engine.programs import Programs
from jaxpaged.engine.step import STEP_WORDS, TOP_WORDS, SamplerState
from jaxpaged.errors import InvariantError
from jaxpaged.layers.sampling import TOP_LOGPROBS


@dataclass(frozen=True)
class StepResult:
    """A step as NumPy. The last five are empty for samplers without logprobs."""

    token_ids: np.ndarray  # i32[seqs]
    logprobs: np.ndarray  # f32[seqs]
    is_finite: np.ndarray  # bool[seqs]
    target_logprobs: np.ndarray  # f32[logits]
    ranks: np.ndarray  # i32[logits]
    top_ids: np.ndarray  # i32[logits, 20]
    top_logprobs: np.ndarray  # f32[logits, 20]

    @cached_property
    def logprob_list(self) -> list[float]:
        """`logprobs` as Python numbers, made once: an element of an array costs more."""
        return self.logprobs.tolist()


@dataclass(frozen=True)
class PendingLogits:
    """The first half of a step: logits that the device is computing."""

    bucket: Bucket
    logits: jax.Array
    words: jax.Array  # of a greedy step


@dataclass(frozen=True)
class PendingStep:
    """A step that the device is computing, or has computed; `place` among several in `words`."""

    bucket: Bucket
    words: jax.Array
    place: int | None = None


class Runner:
    """Runs built batches on one device or mesh, in the order given. Used by one thread at a time.

    Args:
        params: the decoder's weights on the device.
        state: the page pool and what else changes; owned by the runner from here on.
    """

    def __init__(self, model: ModelConfig, params: Params, state: DeviceState, programs: Programs):
        self.model, self.params = model, params
        self._state, self._programs = state, programs
        self._mover = PageMover(programs.page, programs.source.page_kinds)
        mesh = programs.source.mesh
        self._everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    @property
    def num_compilations(self) -> int:
        return self._programs.num_compilations

    @property
    def last_compile_time(self) -> float:
        """Now while a program that was missing is compiled, else when the last was finished."""
        return self._programs.clock.last_progress_time

    @property
    def num_loaded(self) -> int:
        """Programs that were found on disk."""
        return self._programs.num_loaded

    @property
    def state(self) -> DeviceState:
        return self._state

    def dispatch(self, batch: HostBatch) -> PendingStep:
        """Start a step; returns at once where the device computes asynchronously."""
        if batch.bucket.needs_sampling:
            forward, sample = jax.device_put((batch.forward, batch.sample), self._everywhere)
            return self._start_sampling(self._start_forward(batch.bucket, forward), sample)
        pending = self.dispatch_forward(batch)
        pending.words.copy_to_host_async()
        return PendingStep(batch.bucket, pending.words)

    def dispatch_chain(self, batches: Sequence[HostBatch]) -> list[PendingStep]:
        """Start several steps, all of one bucket, in one program."""
        bucket = batches[0].bucket
        packed = jax.device_put(self._programs.source.layout(bucket).chained(batches))
        self._state, words = self._programs.chain(bucket, len(batches))(
            self.params, self._state, packed
        )
        words.copy_to_host_async()
        return [PendingStep(bucket, words, place) for place in range(len(batches))]

    def dispatch_forward(self, batch: HostBatch) -> PendingLogits:
        """Start the first half of a step. `dispatch_sample` must come before the next forward."""
        return self._start_forward(batch.bucket, jax.device_put(batch.forward, self._everywhere))

    def dispatch_sample(self, pending: PendingLogits, batch: HostBatch) -> PendingStep:
        """Start the second half, with `batch.sample` as it is by now."""
        return self._start_sampling(pending, jax.device_put(batch.sample, self._everywhere))

    def read(self, pending: PendingStep) -> StepResult:
        """Wait for a step and take its result apart."""
        words = np.asarray(pending.words)
        if pending.place is not None:
            words = words[pending.place]
        seqs = pending.bucket.num_samples
        head, tail = (
            words[: seqs * STEP_WORDS].reshape(seqs, STEP_WORDS),
            words[seqs * STEP_WORDS :],
        )
        top = tail.reshape(-1, TOP_WORDS)
        first, last = slice(2, 2 + TOP_LOGPROBS), slice(2 + TOP_LOGPROBS, None)
        return StepResult(
            head[:, 0],
            head[:, 1].copy().view(np.float32),
            head[:, 2] != 0,
            top[:, 0].copy().view(np.float32),
            top[:, 1],
            top[:, first],
            np.ascontiguousarray(top[:, last]).view(np.float32),
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
        kv_pages = self._mover.copy(self._state.kv_pages, plan.page_copies, plan.local_copies)
        self._state = replace(self._state, kv_pages=kv_pages)

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Swap pages out and in, before what is dispatched next."""
        kv_pages = self._mover.move(self._state.kv_pages, moves)
        self._state = replace(self._state, kv_pages=kv_pages)

    def update_params(self, params: Params) -> None:
        """Put other weights of the same shapes and types in place of the present ones.

        Raises:
            InvariantError: the trees differ; the first difference is named.
        """
        wanted = jax.tree.map(lambda x: (x.shape, x.dtype), self.params)
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
        self.params = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), params, self.params
        )

    def replace_state(self, state: DeviceState) -> None:
        """Take another page pool of the same shapes; nothing may be running."""
        self._state = state

    def temp_bytes(self) -> dict[str, int]:
        """What each program at hand needs while it runs, beside its arguments and results."""
        return self._programs.temp_bytes()

    def close(self) -> None:
        """Give the device's memory back to XLA's allocator (which keeps it for this process)."""
        for leaf in jax.tree.leaves((self.params, self._state)):
            leaf.delete()
        self._programs.clear()

    def _start_forward(self, bucket: Bucket, packed: jax.Array) -> PendingLogits:
        forward = self._programs.forward(bucket)
        self._state, logits, words = forward(self.params, self._state, packed)
        return PendingLogits(bucket, logits, words)

    def _start_sampling(self, pending: PendingLogits, packed: jax.Array) -> PendingStep:
        state = SamplerState(self._state.last_token_ids, self._state.output_counts)
        state, words = self._programs.sample(pending.bucket)(state, pending.logits, packed)
        self._state = state.put_into(self._state)
        words.copy_to_host_async()
        return PendingStep(pending.bucket, words)


def _is_shape(x: object) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)
