"""One int32 buffer for all that a step needs: what lies where.

The host writes it through NumPy views, the device takes it apart with the same table. Floats and
unsigned words travel as their bits.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from jaxpaged.core.buckets import Bucket
from jaxpaged.core.params import MAX_BIASES

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


@dataclass(frozen=True)
class PackedLayout:
    """Where each field of a bucket's batch lies. `pages_per_seq` is the page table's width."""

    bucket: Bucket
    pages_per_seq: int
    vocab: int

    @cached_property
    def fields(self) -> tuple[PackedField, ...]:
        offset, fields = 0, list[PackedField]()
        for name, shape, dtype in self._shapes():
            fields.append(PackedField(name, shape, dtype, offset))
            offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        return tuple(fields)

    @property
    def size(self) -> int:
        """Words of the whole buffer."""
        last = self.fields[-1]
        return last.offset + last.size

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views into `buffer`, i32[size], by field name; a bool shows as int32."""
        views: dict[str, np.ndarray] = {}
        for f in self.fields:
            words = buffer[f.offset : f.offset + f.size].reshape(f.shape)
            views[f.name] = words if f.dtype == "bool" else words.view(f.dtype)
        return views

    def _shapes(self) -> list[_Shape]:
        tokens, seqs = self.bucket.num_tokens, self.bucket.num_seqs
        shapes: list[_Shape] = [
            _shape("token_ids", "int32", tokens),
            _shape("positions", "int32", tokens),
            _shape("slot_mapping", "int32", tokens),
            _shape("from_last", "bool", tokens),
            _shape("page_table", "int32", seqs, self.pages_per_seq),
            _shape("kv_lens", "int32", seqs),
            _shape("cu_q_lens", "int32", seqs + 1),
            _shape("seq_slots", "int32", seqs),
            _shape("logit_rows", "int32", self.bucket.num_logits),
            _shape("sample_rows", "int32", seqs),  # which row of logits each sequence samples from
        ]
        if self.bucket.sampler == "greedy":
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
        if self.bucket.sampler == "sampled":
            return shapes
        shapes += [
            _shape("presence_penalty", "float32", seqs),
            _shape("frequency_penalty", "float32", seqs),
            _shape("repetition_penalty", "float32", seqs),
            _shape("counts_row", "bool", seqs),
            _shape("bias_ids", "int32", seqs, MAX_BIASES),
            _shape("bias_values", "float32", seqs, MAX_BIASES),
            _shape("mask", "uint32", seqs, -(-self.vocab // 32)),
            _shape("processors", "int32", seqs),
        ]
        if self.bucket.sampler == "scored":
            # the next token of the prompt, or -1 for the one sampled
            shapes.append(_shape("targets", "int32", tokens))
        return shapes


def _shape(name: str, dtype: PackedType, *shape: int) -> _Shape:
    return name, shape, dtype


@dataclass(frozen=True)
class HostBatch:
    """A built step: the packed words and the bucket that they were padded to."""

    bucket: Bucket
    packed: np.ndarray  # i32[PackedLayout.size]
