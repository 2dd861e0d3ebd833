"""The stages of a model before its last one, each with its layers, its pages and its devices.

Nothing here waits: a step's hidden states go from stage to stage when they are there, so that each
stage works on another step where the steps on their way have no rows in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.arrays import KVPages, Params
from jaxpaged.core.buckets import Bucket
from jaxpaged.core.packing import HostBatch, PackedLayout
from jaxpaged.core.plan import PageMove, StepPlan
from jaxpaged.engine.page_moves import PageMover
from jaxpaged.engine.programs import Programs


@dataclass
class _Stage:
    """Owned by `EarlierStages`."""

    params: Params
    programs: Programs
    kv_pages: tuple[KVPages, ...]
    mover: PageMover
    everywhere: NamedSharding


class EarlierStages:
    """Runs what comes before the last stage. Owned by the runner.

    What the last stage samples is needed by the first one, which must not wait for steps that have
    nothing to do with its own: of `last_token_ids`, as they were after each step, it takes those
    after the latest step that sampled for a row of its batch.

    Args:
        programs: of these stages, in order.
        params: likewise.
        last: where the last stage has what all its devices hold.
    """

    def __init__(self, programs: Sequence[Programs], params: Sequence[Params], last: NamedSharding):
        self._stages: list[_Stage] = []
        for each, mine in zip(programs, params, strict=True):
            source = each.source
            assert source.mesh is not None
            everywhere = NamedSharding(source.mesh, PartitionSpec())
            mover = PageMover(each.page, source.page_kinds)
            self._stages.append(_Stage(mine, each, source.make_pages(), mover, everywhere))
        self._last = last
        none_yet = programs[0].source.make_token_ids()
        self._ids = {0: none_yet}  # on the first stage, by the number of the step that gave them
        self._given_by = np.zeros(len(none_yet), np.int64)  # by slot: the latest step with its row
        self._num_steps = 0
        self._layouts: dict[Bucket, PackedLayout] = {}

    @property
    def kv_pages(self) -> tuple[KVPages, ...]:
        """The pages of all their layers."""
        return tuple(pages for stage in self._stages for pages in stage.kv_pages)

    def replace_pages(self, kv_pages: tuple[KVPages, ...]) -> tuple[KVPages, ...]:
        """Take the pages of these layers from those of all, and give back the rest."""
        for stage in self._stages:
            count = len(stage.kv_pages)
            stage.kv_pages, kv_pages = kv_pages[:count], kv_pages[count:]
        return kv_pages

    def replace_params(self, params: Sequence[Params]) -> None:
        for stage, mine in zip(self._stages, params, strict=True):
            stage.params = mine

    def start(self, batch: HostBatch) -> jax.Array:
        """Start a step; its hidden states, on the last stage's devices. `feed_back` must follow."""
        places = [stage.everywhere for stage in self._stages]
        packed = jax.device_put([batch.forward] * len(places), places)
        given = self._ids[self._needed_step(batch)]
        for stage, words, after in zip(
            self._stages, packed, [*places[1:], self._last], strict=True
        ):
            forward = stage.programs.forward(batch.bucket)
            hidden, stage.kv_pages = forward(stage.params, stage.kv_pages, words, given)
            given = jax.device_put(hidden, after)
        return given

    def feed_back(self, batch: HostBatch, last_token_ids: jax.Array) -> None:
        """Let the next steps have what this one sampled."""
        self._num_steps += 1
        self._given_by[self._views(batch)["seq_slots"]] = self._num_steps
        self._ids[self._num_steps] = jax.device_put(last_token_ids, self._stages[0].everywhere)
        needed = {0, *np.unique(self._given_by).tolist()}
        self._ids = {number: ids for number, ids in self._ids.items() if number in needed}

    def copy_pages(self, plan: StepPlan) -> None:
        for stage in self._stages:
            stage.kv_pages = stage.mover.copy(stage.kv_pages, plan.page_copies, plan.local_copies)

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        for stage in self._stages:
            stage.kv_pages = stage.mover.move(stage.kv_pages, moves)

    def _needed_step(self, batch: HostBatch) -> int:
        """The latest step that sampled a token of the batch; 0 where the host has read them all."""
        views = self._views(batch)
        tokens = np.flatnonzero(views["from_last"])
        rows = np.searchsorted(views["cu_q_lens"], tokens, side="right") - 1
        return int(self._given_by[views["seq_slots"][rows]].max(initial=0))

    def _views(self, batch: HostBatch) -> dict[str, np.ndarray]:
        bucket = batch.bucket
        if bucket not in self._layouts:
            self._layouts[bucket] = self._stages[0].programs.source.layout(bucket)
        return self._layouts[bucket].views(batch)
