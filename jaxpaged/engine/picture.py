"""The engine between two steps, for who wants to look: what every page holds, and who is there.

Taken by the engine's thread when it is asked for, in under a millisecond for 100,000 pages.
"""

import itertools
import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import SeqState
from jaxpaged.core.sequence import Sequence as TokenSequence
from jaxpaged.metrics import EngineLoad

# what a page's byte says; from FIRST_OWNER on it names the one sequence that holds it, by its slot
NULL, BLANK, CACHED, PINNED, SHARED = range(5)
FIRST_OWNER, NUM_OWNERS = 16, 240
_SHIFT = 31  # colours between the first slots of two engines
MAX_WAITING = 64  # waiting sequences that are told of
_STATES = {state: state.value for state in SeqState}


class SequencePicture(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One answer being made. `owner` is the byte of its pages, 0 while it has none."""

    request_id: str
    key_name: str
    choice: int
    state: str
    owner: int
    num_pages: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    preemptions: int
    age_s: float


class EnginePicture(msgspec.Struct, frozen=True):
    """All of it is of the same moment, `time_s` on the engine's clock."""

    cells: bytes  # one a page
    page_size: int
    sequences: list[SequencePicture]  # oldest first
    load: EngineLoad
    wait_cause: str  # why the last plan admitted nobody further
    num_steps: int  # since start, like the next two
    prompt_tokens: int
    output_tokens: int
    time_s: float


def take_picture(
    seqs: Iterable[TokenSequence],
    scheduler: Scheduler,
    builder: BatchBuilder,
    load: EngineLoad,
    num_tokens: tuple[int, int],
) -> EnginePicture:
    """The picture; `seqs` are all that have not finished, `num_tokens` of prompts and sampled."""
    running, waiting, runs = list[TokenSequence](), list[TokenSequence](), SeqState.RUNNING
    for seq in seqs:
        (running if seq.state is runs else waiting).append(seq)
    now = time.monotonic()
    return EnginePicture(
        cells=_cells(running, scheduler, builder),
        page_size=scheduler.pool.page_size,
        sequences=[
            _sequence(seq, now)
            for seq in itertools.chain(running, itertools.islice(waiting, MAX_WAITING))
        ],
        load=load,
        wait_cause=scheduler.wait_cause,
        num_steps=scheduler.cache.step,
        prompt_tokens=num_tokens[0],
        output_tokens=num_tokens[1],
        time_s=now,
    )


def join_pictures(pictures: Sequence[EnginePicture], load: EngineLoad) -> EnginePicture:
    """One picture of several engines behind one endpoint: their pools end to end.

    `load` is that of all together. Colours are shifted, so that neighbours' differ.
    """
    cells, sequences = list[bytes](), list[SequencePicture]()
    for index, picture in enumerate(pictures):
        shift = index * _SHIFT % NUM_OWNERS
        table = [*range(FIRST_OWNER), *(_shifted(byte, shift) for byte in range(FIRST_OWNER, 256))]
        cells.append(picture.cells.translate(bytes(table)))
        sequences += [
            msgspec.structs.replace(seq, owner=table[seq.owner]) for seq in picture.sequences
        ]
    waits = [picture.wait_cause for picture in pictures if picture.load.num_waiting]
    return msgspec.structs.replace(
        pictures[0],
        cells=b"".join(cells),
        sequences=sequences,
        load=load,
        wait_cause=waits[0] if waits else pictures[0].wait_cause,
        num_steps=sum(picture.num_steps for picture in pictures),
        prompt_tokens=sum(picture.prompt_tokens for picture in pictures),
        output_tokens=sum(picture.output_tokens for picture in pictures),
    )


def _shifted(owner: int, shift: int) -> int:
    return FIRST_OWNER + (owner - FIRST_OWNER + shift) % NUM_OWNERS


def _cells(running: Sequence[TokenSequence], scheduler: Scheduler, builder: BatchBuilder) -> bytes:
    """A byte a page."""
    pool = scheduler.pool
    cells = pool.kept_pages() + np.uint8(BLANK)  # CACHED where it is kept
    page_ids, counts = builder.pages_of(running)
    pinned = [prefix.page_array for prefix in scheduler.pinned]
    for of_prefix in pinned:
        cells[of_prefix] = PINNED
    owners = np.array([_owner(seq) for seq in running], np.uint8)
    cells[page_ids] = np.repeat(owners, counts)
    if len(page_ids) + sum(map(len, pinned)) > pool.num_held:  # more holds than pages: some shared
        held = np.concatenate([page_ids, *pinned]) if pinned else page_ids
        cells[np.bincount(held, minlength=len(cells)) > 1] = SHARED
    cells[0] = NULL
    return cells.tobytes()


def _owner(seq: TokenSequence) -> int:
    return 0 if seq.slot is None else FIRST_OWNER + seq.slot % NUM_OWNERS


def _sequence(seq: TokenSequence, now: float) -> SequencePicture:
    request = seq.request
    return SequencePicture(
        request.request_id,
        request.key_name,
        seq.choice,
        _STATES[seq.state],
        _owner(seq),
        len(seq.page_ids),
        seq.num_prompt_tokens,
        seq.num_cached_tokens,
        seq.num_computed_tokens,
        len(seq.token_ids) - seq.num_prompt_tokens,
        request.max_tokens,
        seq.num_preemptions,
        now - request.arrival_time,
    )
