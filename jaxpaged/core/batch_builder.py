"""From a step plan to the packed words that the device takes."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from jaxpaged.core.buckets import Bucket
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.logit_edits import RowEdits, row_edits
from jaxpaged.core.packing import HostBatch, PackedLayout
from jaxpaged.core.plan import RowColumns, StepPlan
from jaxpaged.core.sequence import Sequence
from jaxpaged.errors import InvariantError

type Views = dict[str, np.ndarray]

LEAST_TEMPERATURE = 1e-5  # below this the logits would overflow: greedy
_WORD = 2**32 - 1


class BatchBuilder:
    """Writes each step's arrays. Owned by the engine's thread.

    What stays the same from step to step is kept in arrays by slot and gathered; a slot is filled
    again when it meets another list of pages: another sequence's, or a new one of the same. To be
    called after each `schedule` and before the next `schedule` or `commit`.

    Args:
        processors: logits processors by name, each with its bit's place.
        local: local pages of layers with a window; None where these have none.
        has_local_table: other layers see all, so that there are two page tables.
    """

    def __init__(
        self,
        pages_per_seq: int,
        page_size: int,
        max_num_seqs: int,
        vocab: int,
        processors: Mapping[str, int],
        local: LocalPages | None = None,
        has_local_table: bool = False,
    ):
        self.pages_per_seq, self.page_size = pages_per_seq, page_size
        self.max_num_seqs, self.vocab = max_num_seqs, vocab
        self._processors = processors
        self._layouts: dict[Bucket, PackedLayout] = {}
        slots = max_num_seqs + 1
        self._page_table = np.zeros((slots, pages_per_seq), np.int32)
        self._local, self._has_local_table = local, has_local_table
        self._local_table = np.zeros((slots, pages_per_seq if local else 0), np.int32)
        # what `page_table` is filled from
        self._main_table = self._local_table if local and not has_local_table else self._page_table
        self._num_pages = [0] * slots
        self._owners: list[list[int]] = [[]] * slots  # page lists; another one is filled anew
        self._edits: list[RowEdits | None] = [None] * slots
        self._is_edited = np.zeros(slots, bool)  # rows with more than the fields below say
        self._fields: Views = {
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.ones(slots, np.float32),
            "min_p": np.zeros(slots, np.float32),
            "seed": np.zeros((slots, 2), np.uint32),
            "choice": np.zeros(slots, np.int32),
        }
        self._edit_fields: Views = {
            "presence_penalty": np.zeros(slots, np.float32),
            "frequency_penalty": np.zeros(slots, np.float32),
            "repetition_penalty": np.ones(slots, np.float32),
            "counts_row": np.zeros(slots, np.int32),
            "processors": np.zeros(slots, np.int32),
        }

    def build(self, plan: StepPlan, bucket: Bucket) -> HostBatch:
        """Lay the plan's rows end to end and pad them to the bucket.

        Raises:
            InvariantError: the plan does not fit into the bucket.
        """
        rows, num_tokens = plan.columns, plan.num_tokens
        if len(rows) > bucket.num_seqs or num_tokens > bucket.num_tokens:
            raise InvariantError(
                f"{len(rows)} rows of {num_tokens} tokens do not fit into {bucket}"
            )
        batch, views = self._layout(bucket).new_batch()
        self._follow(rows)
        slots = np.array(rows.slots, np.int32)
        starts = np.array(rows.starts, np.int32)
        q_lens = np.array(rows.q_lens, np.int32)
        self._fill_tokens(views, plan, slots, starts, q_lens)
        self._fill_rows(views, bucket, slots, starts + q_lens, q_lens)
        places, samples = starts + q_lens, rows.samples
        if plan.drafts:
            slots, places = np.repeat(slots, q_lens), views["positions"][:num_tokens] + 1
            samples = [True] * num_tokens
            self._sample_everywhere(views, plan, slots)
        if bucket.sampler != "greedy":
            self._fill_sampling(views, slots, places)
        if bucket.sampler in ("full", "scored"):
            self._fill_penalties(views, slots, samples)
        if bucket.sampler in ("masked", "full", "scored"):
            self._fill_edits(views, rows, slots)
        if bucket.sampler == "scored":
            _fill_targets(views["targets"], rows)
        return batch

    def banned_of(self, batch: HostBatch) -> np.ndarray:
        """A batch's bans, u32[seqs, words], to be added to in place."""
        return self._layout(batch.bucket).views(batch)["banned"]

    def pages_of(self, seqs: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Page ids of running sequences end to end as of their last rows, and each one's number.

        Faster than their lists: 100,000 pages take a fraction of a millisecond.
        """
        table, known = self._page_table, list[np.ndarray]()
        for seq in seqs:
            slot, num_pages = seq.slot, 0
            if slot is not None and self._owners[slot] is seq.page_ids:
                num_pages = self._num_pages[slot]
            known.append(table[slot or 0, :num_pages])
        counts = np.array([len(ids) for ids in known], np.intp)
        return np.concatenate([table[0, :0], *known], dtype=np.intp), counts

    def _layout(self, bucket: Bucket) -> PackedLayout:
        if bucket not in self._layouts:
            sizes = self.pages_per_seq, self.vocab, self._has_local_table
            self._layouts[bucket] = PackedLayout(bucket, *sizes)
        return self._layouts[bucket]

    def _follow(self, rows: RowColumns) -> None:
        """Bring the arrays by slot up to date with these rows' sequences."""
        owners, num_pages = self._owners, self._num_pages
        for seq, slot in zip(rows.seqs, rows.slots, strict=True):
            page_ids = seq.page_ids
            if owners[slot] is page_ids and num_pages[slot] == len(page_ids):
                continue
            if owners[slot] is not page_ids:
                self._begin(seq, slot)
            first = num_pages[slot]
            self._page_table[slot, first : len(page_ids)] = page_ids[first:]
            if self._local is not None:
                self._follow_local(seq, slot, first)
            num_pages[slot] = len(page_ids)

    def _follow_local(self, seq: Sequence, slot: int, first: int) -> None:
        """Likewise with local pages; those behind the window are another's by now."""
        first, end = max(first, seq.first_local_page), len(seq.page_ids)
        assert self._local is not None
        self._local_table[slot, : seq.first_local_page] = 0
        self._local_table[slot, first:end] = self._local.ids(seq.page_ids[first:])

    def _begin(self, seq: Sequence, slot: int) -> None:
        params, seed = seq.request.params, seq.request.seed
        self._owners[slot] = seq.page_ids
        self._page_table[slot] = 0
        self._local_table[slot] = 0
        self._num_pages[slot] = 0
        is_greedy = params.temperature < LEAST_TEMPERATURE
        self._fields["temperature"][slot] = 0.0 if is_greedy else params.temperature
        self._fields["top_k"][slot] = params.top_k
        self._fields["top_p"][slot] = params.top_p
        self._fields["min_p"][slot] = params.min_p
        self._fields["seed"][slot] = (seed & _WORD, (seed >> 32) & _WORD)
        self._fields["choice"][slot] = seq.choice
        self._edit_fields["presence_penalty"][slot] = params.presence_penalty
        self._edit_fields["frequency_penalty"][slot] = params.frequency_penalty
        self._edit_fields["repetition_penalty"][slot] = params.repetition_penalty
        self._edit_fields["counts_row"][slot] = params.has_penalties
        names = set(params.logits_processors or ())
        self._edit_fields["processors"][slot] = sum(1 << self._processors[name] for name in names)
        self._edits[slot] = edits = row_edits(seq.request, self.vocab)
        self._is_edited[slot] = edits is not None or params.logprob_token_ids is not None

    def _fill_tokens(
        self,
        views: Views,
        plan: StepPlan,
        slots: np.ndarray,
        starts: np.ndarray,
        q_lens: np.ndarray,
    ) -> None:
        rows = plan.columns
        num_known = np.array([len(seq.token_ids) for seq in rows.seqs], np.int32)
        total = int(q_lens.sum())
        if (starts < num_known).any():
            views["token_ids"][:total] = _known_ids(plan)
        for i, guessed in plan.drafts.items():
            num_known[i] += len(guessed)
        if total == len(rows):
            positions, row_slots = starts, slots
        else:
            firsts = np.cumsum(q_lens, dtype=np.int32) - q_lens
            positions = np.arange(total, dtype=np.int32) - np.repeat(firsts - starts, q_lens)
            row_slots, num_known = np.repeat(slots, q_lens), np.repeat(num_known, q_lens)
        indices, places = positions // self.page_size, positions % self.page_size
        views["positions"][:total] = positions
        pages = self._main_table[row_slots, indices]
        views["slot_mapping"][:total] = pages * self.page_size + places
        if self._has_local_table:
            pages = self._local_table[row_slots, indices]
            views["local_slot_mapping"][:total] = pages * self.page_size + places
        views["from_last"][:total] = positions >= num_known

    def _fill_rows(
        self,
        views: Views,
        bucket: Bucket,
        slots: np.ndarray,
        kv_lens: np.ndarray,
        q_lens: np.ndarray,
    ) -> None:
        num = len(slots)
        width = -(-int(kv_lens.max(initial=0)) // self.page_size)
        views["page_table"][:num, :width] = self._main_table[slots, :width]
        if self._has_local_table:
            views["local_page_table"][:num, :width] = self._local_table[slots, :width]
        views["kv_lens"][:num] = kv_lens
        ends = np.cumsum(q_lens, dtype=np.int32)
        views["cu_q_lens"][1 : num + 1] = ends
        views["cu_q_lens"][num + 1 :] = ends[-1] if num else 0
        for name in ("seq_slots", "sample_slots"):
            views[name][:num] = slots
            views[name][num:] = self.max_num_seqs
        last = views["logit_rows"]
        if bucket.sampler == "scored":
            last[:] = np.arange(len(last), dtype=np.int32)
            last = views["sample_rows"]
            last[num:] = bucket.num_logits
        last[:num] = ends - 1

    def _sample_everywhere(self, views: Views, plan: StepPlan, slots: np.ndarray) -> None:
        """Sample at every token of a step with drafts, whose rows have no edits."""
        views["logit_rows"][:] = np.arange(len(views["logit_rows"]), dtype=np.int32)
        is_drafting = np.zeros(plan.num_rows, bool)
        is_drafting[list(plan.drafts)] = True  # the host gives such a row's next token
        is_drafting = np.repeat(is_drafting, plan.columns.q_lens)
        views["sample_slots"][: len(slots)] = np.where(is_drafting, self.max_num_seqs, slots)

    def _fill_sampling(self, views: Views, slots: np.ndarray, positions: np.ndarray) -> None:
        num = len(slots)
        for name, values in self._fields.items():
            views[name][:num] = values[slots]
        views["top_p"][num:] = 1.0
        views["position"][:num] = positions

    def _fill_penalties(self, views: Views, slots: np.ndarray, samples: Seq[bool]) -> None:
        num = len(slots)
        for name, values in self._edit_fields.items():
            views[name][:num] = values[slots]
        views["repetition_penalty"][num:] = 1.0
        views["counts_row"][:num] &= samples
        views["told_ids"][:, 0] = -1

    def _fill_edits(self, views: Views, rows: RowColumns, slots: np.ndarray) -> None:
        edited: list[int] = np.flatnonzero(self._is_edited[slots]).tolist()
        told_ids = views.get("told_ids")  # what bans and biases alone do not have
        for i in edited:
            told, edits = rows.seqs[i].request.params.logprob_token_ids, self._edits[rows.slots[i]]
            if told is not None and told_ids is not None:
                told_ids[i, : len(told)] = told
            if edits is None or not rows.samples[i]:
                continue
            position = rows.starts[i] + rows.q_lens[i]
            edits.write(views["bias_ids"][i], views["bias_values"][i], rows.seqs[i], position)
            if edits.mask is not None:
                np.invert(edits.mask, out=views["banned"][i])


def _known_ids(plan: StepPlan) -> list[int]:
    """The rows' tokens end to end, guesses included; 0 for one that the host has not read."""
    ids: list[int] = []
    rows, drafts = plan.columns, plan.drafts
    for i, (seq, start, q_len) in enumerate(zip(rows.seqs, rows.starts, rows.q_lens, strict=True)):
        known = seq.token_ids
        if i in drafts:
            ids += (known[start], *drafts[i])
        elif q_len == 1:
            ids.append(known[start] if start < len(known) else 0)
        else:
            ids += known[start : start + q_len]
    return ids


def _fill_targets(targets: np.ndarray, rows: RowColumns) -> None:
    """The prompt's next token where its score is wanted; -1 means the sampled token."""
    targets[:] = -1
    first = 0
    for seq, start, q_len in zip(rows.seqs, rows.starts, rows.q_lens, strict=True):
        if seq.request.params.prompt_logprobs is not None:
            end = min(start + q_len + 1, seq.num_prompt_tokens)
            known = seq.token_ids[start + 1 : end]
            targets[first : first + len(known)] = known
        first += q_len
