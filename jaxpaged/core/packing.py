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
type _Shapes = list[tuple[str, tuple[int, ...], PackedType]]


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

    def _shapes(self) -> _Shapes:
        tokens, seqs = self.bucket.num_tokens, self.bucket.num_seqs
        shapes: _Shapes = [
            ("token_ids", (tokens,), "int32"),
            ("positions", (tokens,), "int32"),
            ("slot_mapping", (tokens,), "int32"),
            ("from_last", (tokens,), "bool"),
            ("page_table", (seqs, self.pages_per_seq), "int32"),
            ("kv_lens", (seqs,), "int32"),
            ("cu_q_lens", (seqs + 1,), "int32"),
            ("seq_slots", (seqs,), "int32"),
            ("logit_rows", (self.bucket.num_logits,), "int32"),
            ("sample_rows", (seqs,), "int32"),  # which row of logits each sequence samples from
        ]
        if self.bucket.sampler == "greedy":
            return shapes
        shapes += [
            ("temperature", (seqs,), "float32"),
            ("top_k", (seqs,), "int32"),
            ("top_p", (seqs,), "float32"),
            ("min_p", (seqs,), "float32"),
            ("seed", (seqs, 2), "uint32"),
            ("choice", (seqs,), "int32"),
            ("position", (seqs,), "int32"),
        ]
        if self.bucket.sampler == "sampled":
            return shapes
        shapes += [
            ("presence_penalty", (seqs,), "float32"),
            ("frequency_penalty", (seqs,), "float32"),
            ("repetition_penalty", (seqs,), "float32"),
            ("counts_row", (seqs,), "bool"),
            ("bias_ids", (seqs, MAX_BIASES), "int32"),
            ("bias_values", (seqs, MAX_BIASES), "float32"),
            ("mask", (seqs, -(-self.vocab // 32)), "uint32"),
            ("processors", (seqs,), "int32"),
        ]
        if self.bucket.sampler == "scored":
            shapes.append(
                ("targets", (tokens,), "int32")
            )  # the next token of the prompt; -1 means sampled
        return shapes


@dataclass(frozen=True)
class HostBatch:
    """A built step: the packed words and the bucket that they were padded to."""

    bucket: Bucket
    packed: np.ndarray  # i32[PackedLayout.size]
