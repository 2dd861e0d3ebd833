"""Two int32 buffers for all that a step needs, one for each of its programs: what lies where.

The host writes them through NumPy views, the device takes them apart with the same table. Floats
and unsigned words travel as their bits.
"""

import math
import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxpaged.core.buckets import Bucket
from jaxpaged.core.params import MAX_BIASES, MAX_LOGPROBS

LARGE = 2**20  # words of a buffer with masks
ALIGNMENT = 64  # words: a field may go to a GPU kernel as it lies, on a border of 256 bytes

type PackedType = Literal["int32", "float32", "uint32", "bool"]
type _Shape = tuple[str, tuple[int, ...], PackedType]


@dataclass(frozen=True)
class PackedField:
    """`shape` values of `dtype` from word `offset` on. A bool takes a word and is 0 or 1."""

    name: str
    shape: tuple[int, ...]
    dtype: PackedType
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class PackedLayout:
    """Where each field of a bucket's batch lies. `pages_per_seq` is the page table's width.

    `forward` goes with the tokens, `sample` with the logits that they gave. With `has_local_table`
    layers with a window have a page table of their own.
    """

    def __init__(
        self, bucket: Bucket, pages_per_seq: int, vocab: int, has_local_table: bool = False
    ):
        self.bucket, self.has_local_table = bucket, has_local_table
        self.forward = _laid_out(_forward_shapes(bucket, pages_per_seq, has_local_table))
        self.sample = _laid_out(_sample_shapes(bucket, vocab))

    @property
    def forward_size(self) -> int:
        """Words of the forward program's buffer."""
        return _end(self.forward)

    @property
    def sample_size(self) -> int:
        """Words of the sampling program's buffer."""
        return _end(self.sample)

    @property
    def sample_start(self) -> int:
        """Where the sampling program's words begin in a buffer that holds both."""
        return -(-self.forward_size // ALIGNMENT) * ALIGNMENT

    @property
    def chained_size(self) -> int:
        """Words of a buffer that holds both."""
        return self.sample_start + -(-self.sample_size // ALIGNMENT) * ALIGNMENT

    def chained(self, batches: Seq["HostBatch"]) -> np.ndarray:
        """Several steps' words, i32[steps, chained_size]."""
        words = np.zeros((len(batches), self.chained_size), np.int32)
        for row, batch in zip(words, batches, strict=True):
            row[: self.forward_size] = batch.forward
            row[self.sample_start : self.sample_start + self.sample_size] = batch.sample
        return words

    def new_batch(self) -> tuple["HostBatch", dict[str, np.ndarray]]:
        """A batch of zeros, and writable views into it by field name; a bool shows as int32."""
        batch = HostBatch(
            self.bucket,
            _zeros(self.forward_size),
            _zeros(self.sample_size),
        )
        return batch, self.views(batch)

    def views(self, batch: "HostBatch") -> dict[str, np.ndarray]:
        """Writable views into a batch by field name; a bool shows as int32."""
        return _views(self.forward, batch.forward) | _views(self.sample, batch.sample)


@dataclass(frozen=True)
class HostBatch:
    """A built step: the bucket that it was padded to, and each program's packed words."""

    bucket: Bucket
    forward: np.ndarray  # i32[PackedLayout.forward_size]
    sample: np.ndarray  # i32[PackedLayout.sample_size]


def _zeros(num_words: int) -> np.ndarray:
    """Like NumPy's, which clears what it has used before: here large ones come from the system,
    and what nobody writes to costs nothing.
    """
    if num_words < LARGE:
        return np.zeros(num_words, np.int32)
    memory = mmap.mmap(-1, num_words * 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.int32)


def _views(fields: tuple[PackedField, ...], buffer: np.ndarray) -> dict[str, np.ndarray]:
    views: dict[str, np.ndarray] = {}
    for f in fields:
        words = buffer[f.offset : f.offset + f.size].reshape(f.shape)
        views[f.name] = words if f.dtype == "bool" else words.view(f.dtype)
    return views


def _laid_out(shapes: list[_Shape]) -> tuple[PackedField, ...]:
    offset, fields = 0, list[PackedField]()
    for name, shape, dtype in shapes:
        fields.append(PackedField(name, shape, dtype, offset))
        offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return tuple(fields)


def _end(fields: tuple[PackedField, ...]) -> int:
    return fields[-1].offset + fields[-1].size


def _forward_shapes(bucket: Bucket, pages_per_seq: int, has_local_table: bool) -> list[_Shape]:
    tokens, seqs = bucket.num_tokens, bucket.num_seqs
    shapes = [
        _shape("token_ids", "int32", tokens),
        _shape("positions", "int32", tokens),
        _shape("slot_mapping", "int32", tokens),
        _shape("from_last", "bool", tokens),
        _shape("page_table", "int32", seqs, pages_per_seq),
        _shape("kv_lens", "int32", seqs),
        _shape("cu_q_lens", "int32", seqs + 1),
        _shape("seq_slots", "int32", seqs),
        _shape("logit_rows", "int32", bucket.num_logits),
    ]
    if has_local_table:
        shapes.append(_shape("local_page_table", "int32", seqs, pages_per_seq))
        shapes.append(_shape("local_slot_mapping", "int32", tokens))
    return shapes


def _sample_shapes(bucket: Bucket, vocab: int) -> list[_Shape]:
    seqs = bucket.num_samples
    shapes: list[_Shape] = [
        _shape("sample_slots", "int32", seqs),  # `seq_slots` once more
    ]
    if bucket.sampler == "greedy":
        return shapes
    shapes += [
        _shape("temperature", "float32", seqs),
        _shape("top_k", "int32", seqs),
        _shape("top_p", "float32", seqs),
        _shape("min_p", "float32", seqs),
        _shape("seed", "uint32", seqs, 2),
        _shape("choice", "int32", seqs),
        _shape("position", "int32", seqs),
    ]
    if bucket.sampler == "sampled":
        return shapes
    shapes += [
        _shape("bias_ids", "int32", seqs, MAX_BIASES),
        _shape("bias_values", "float32", seqs, MAX_BIASES),
        # bans and not permissions: of what is not used all is 0, as in a fresh buffer
        _shape("banned", "uint32", seqs, -(-vocab // 32)),
    ]
    if bucket.sampler == "masked":
        return shapes
    shapes += [
        _shape("presence_penalty", "float32", seqs),
        _shape("frequency_penalty", "float32", seqs),
        _shape("repetition_penalty", "float32", seqs),
        _shape("counts_row", "bool", seqs),
        _shape("processors", "int32", seqs),
        _shape("told_ids", "int32", seqs, MAX_LOGPROBS),  # -1 first: the likeliest are told
    ]
    if bucket.sampler == "scored":
        # which row of logits each sequence samples from: padding rows name one past the last
        shapes.append(_shape("sample_rows", "int32", seqs))
        # the next token of the prompt, or -1 for the one sampled
        shapes.append(_shape("targets", "int32", bucket.num_logits))
    return shapes


def _shape(name: str, dtype: PackedType, *shape: int) -> _Shape:
    return name, shape, dtype
