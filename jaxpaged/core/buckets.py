"""Padded sizes: one compiled program each."""

from dataclasses import dataclass
from typing import Literal

type StepKind = Literal["decode", "mixed"]
type SamplerKind = Literal["greedy", "sampled", "full", "scored"]


@dataclass(frozen=True, order=True)
class Bucket:
    """One padded size of a ragged batch.

    `scored` is `full` with the logits of every token (prompt logprobs); its `num_tokens` stays small.
    """

    kind: StepKind
    sampler: SamplerKind
    num_tokens: int
    num_seqs: int

    @property
    def num_logits(self) -> int:
        return self.num_tokens if self.sampler == "scored" else self.num_seqs
