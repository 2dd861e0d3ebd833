"""Padded sizes: one compiled program each."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxpaged.core.plan import StepPlan
from jaxpaged.errors import ConfigError, InvariantError

type StepKind = Literal["decode", "mixed"]
type SamplerKind = Literal["greedy", "sampled", "full", "scored"]

MAX_SCORED_TOKENS = 256  # of a step that scores a prompt: each has a row of logits

_GPU_DECODE_SEQS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_GPU_SMALL_TOKENS = (16, 32, 64, 128, 256, 512)
_GPU_LARGE_TOKENS = (768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_GPU_FEW_SEQS = 16
# what may stand in for a sampler that a size was not compiled with, cheapest first
_STAND_INS: dict[SamplerKind, tuple[SamplerKind, ...]] = {
    "greedy": ("greedy", "sampled", "full"),
    "sampled": ("sampled", "full"),
    "full": ("full",),
    "scored": ("scored",),
}


@dataclass(frozen=True, order=True)
class Bucket:
    """One padded size of a ragged batch.

    `scored` is `full` with the logits of every token (prompt logprobs): `num_tokens` stays small.
    """

    kind: StepKind
    sampler: SamplerKind
    num_tokens: int
    num_seqs: int

    @property
    def num_logits(self) -> int:
        return self.num_tokens if self.sampler == "scored" else self.num_seqs


class BucketLadder:
    """The sizes that a step may be padded to."""

    def __init__(self, buckets: Iterable[Bucket]):
        self._buckets = tuple(sorted(set(buckets)))
        self._steps: dict[tuple[StepKind, SamplerKind], list[tuple[int, int, Bucket]]] = {}
        for bucket in self._buckets:
            step = (bucket.num_tokens, bucket.num_seqs, bucket)
            self._steps.setdefault((bucket.kind, bucket.sampler), []).append(step)

    def all_buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that `choose` may name, for compiling them before the first request."""
        return self._buckets

    def choose(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan and samples as its rows ask.

        Raises:
            InvariantError: none does; the scheduler's limits and the ladder must agree.
        """
        num_tokens, num_seqs, sampler = plan.num_tokens, len(plan.rows), sampler_of(plan)
        kinds: tuple[StepKind, ...] = ("decode", "mixed") if num_tokens == num_seqs else ("mixed",)
        for kind in kinds:
            fitting = [
                step
                for name in _STAND_INS[sampler]
                for step in self._steps.get((kind, name), ())
                if step[0] >= num_tokens and step[1] >= num_seqs
            ]
            if fitting:
                return min(fitting, key=lambda step: step[:2])[2]
        raise InvariantError(
            f"no bucket holds {num_seqs} rows of {num_tokens} tokens with sampler {sampler}"
        )


def sampler_of(plan: StepPlan) -> SamplerKind:
    """The least that a step's sampler must be able to do."""
    if plan.wants_prompt_logprobs:
        return "scored"
    is_greedy = True
    for row in plan.rows:
        if row.samples:
            params = row.seq.request.params
            if params.needs_edits:
                return "full"
            is_greedy = is_greedy and params.temperature == 0
    return "greedy" if is_greedy else "sampled"


def default_ladder(
    platform: Literal["cpu", "gpu"], max_num_seqs: int, max_num_batched_tokens: int
) -> BucketLadder:
    """Sizes for a platform: few on a CPU, and on a GPU few enough to compile before the start.

    A GPU's large steps have no greedy program of their own: there the sampler hardly counts.
    """
    most = (max_num_seqs, max_num_batched_tokens)
    if platform == "cpu":
        seqs, tokens = _cut((1, 2, 4, 8), most[0]), _cut((16, 64, 256), most[1])
        names: tuple[SamplerKind, ...] = ("greedy", "full")
        buckets = [Bucket("decode", name, n, n) for n in seqs for name in names]
        buckets += [Bucket("mixed", name, n, most[0]) for n in tokens for name in names]
    elif platform == "gpu":
        buckets = _gpu_buckets(*most)
    else:
        raise ConfigError(f"platform is {platform!r}, allowed are cpu and gpu")
    scored = _cut((64, MAX_SCORED_TOKENS), min(most[1], MAX_SCORED_TOKENS))
    buckets += [Bucket("mixed", "scored", n, min(n, most[0])) for n in scored]
    return BucketLadder(buckets)


def _gpu_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    names: tuple[SamplerKind, ...] = ("greedy", "sampled", "full")
    buckets: list[Bucket] = []
    beyond = range(384, max_num_seqs, 128)
    for n in _cut((*_GPU_DECODE_SEQS, *beyond), max_num_seqs):
        buckets += [Bucket("decode", name, n, n) for name in names]
    for n in _cut(_GPU_SMALL_TOKENS + _GPU_LARGE_TOKENS, max_num_batched_tokens):
        is_small = n <= _GPU_SMALL_TOKENS[-1]
        for name in names if is_small else names[1:]:
            buckets.append(Bucket("mixed", name, n, min(n, max_num_seqs)))
            if is_small:
                buckets.append(Bucket("mixed", name, n, min(_GPU_FEW_SEQS, max_num_seqs)))
    return buckets


def _cut(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The sizes below `most`, and `most` itself."""
    return (*(size for size in sizes if size < most), most)
