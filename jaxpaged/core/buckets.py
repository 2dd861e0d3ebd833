"""Padded sizes: a forward program for each size, a sampling program for each number of rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Literal

from jaxpaged.config.speculation import MAX_DRAFT_ROWS, Speculation
from jaxpaged.core.plan import StepPlan
from jaxpaged.errors import ConfigError, InvariantError

type StepKind = Literal["decode", "mixed", "draft"]
type SamplerKind = Literal["greedy", "sampled", "masked", "full", "scored"]

MAX_SCORED_TOKENS = 256  # of a step that scores a prompt: each has a row of logits

type _Sizes = tuple[int, ...]

# on a GPU each forward program takes 11 s of a core to compile; up to 64 rows a decode step takes
# about the same time, and up to 192 tokens a mixed one
_GPU_SEQS = (
    *(1, 8, 32, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256),
    *(384, 512, 768, 1024),
)
_GPU_TOKENS = (
    *(64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536),
    *(2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384),
)
_CPU_SEQS, _CPU_TOKENS = (1, 2, 4, 8), (16, 64, 256)
# rows of a decode step, tokens of a mixed one, and samplers
_SIZES: dict[str, tuple[_Sizes, _Sizes, tuple[SamplerKind, ...]]] = {
    "cpu": (_CPU_SEQS, _CPU_TOKENS, ("greedy", "full")),
    "gpu": (_GPU_SEQS, _GPU_TOKENS, ("greedy", "sampled", "masked", "full")),
}
_TOKENS_OF_FEW = (128, 256, 512)  # on a GPU: a short prompt alone need not sample for all rows
_FEW_SEQS = 8
_DRAFT_TOKENS = (8, 16, 32, 64, 128)
# rows of several decode steps in one program, of a small model, to which more rows cost little
_CHAINED_SEQS = (1, 8, 32, 64, 128, 256, 512, 1024)
# rows of steps without a sampler of their own, which few need so exactly: another stands in
_BETWEEN = 96, 144, 160, 176, 208, 224, 240
_WITHOUT: dict[SamplerKind, _Sizes] = {"masked": (*_BETWEEN, 192, 384, 768), "full": _BETWEEN}
# tokens of a step that scores a prompt
_SCORED: dict[str, _Sizes] = {"cpu": (64, MAX_SCORED_TOKENS), "gpu": (MAX_SCORED_TOKENS,)}
# what may stand in for a sampler that a size was not compiled with, cheapest first
_STAND_INS: dict[SamplerKind, tuple[SamplerKind, ...]] = {
    "greedy": ("greedy", "sampled", "full"),
    "sampled": ("sampled", "full"),
    "masked": ("masked", "full"),
    "full": ("full",),
    "scored": ("scored",),
}


@dataclass(frozen=True, order=True)
class Bucket:
    """One padded size of a ragged batch.

    `masked` takes bans and biases, `full` all that a request may ask for its next token, and
    `scored` is `full` with the logits of every token (prompt logprobs): `num_tokens` stays small.
    A `draft` step samples at every token of its decodes and drafts.
    """

    kind: StepKind
    sampler: SamplerKind
    num_tokens: int
    num_seqs: int

    @property
    def num_logits(self) -> int:
        is_whole = self.sampler == "scored" or self.kind == "draft"
        return self.num_tokens if is_whole else self.num_seqs

    @property
    def num_samples(self) -> int:
        """Tokens that are sampled, padding included."""
        return self.num_tokens if self.kind == "draft" else self.num_seqs

    @property
    def forward_samples(self) -> bool:
        """Whether the forward program takes the largest logits: greedy needs no more."""
        return self.num_logits == self.num_samples

    @property
    def needs_sampling(self) -> bool:
        """Whether the step has a second program."""
        return self.sampler != "greedy" or not self.forward_samples

    @property
    def forward_name(self) -> str:
        """Names the program that computes the logits: buckets that share it differ in sampler."""
        return f"forward {self.kind} {self.num_tokens} {self.num_seqs} {self.num_logits}"

    def chain_name(self, num_steps: int) -> str:
        """Names the program that takes several whole steps of this size."""
        return f"chain {num_steps} {self.sampler} {self.kind} {self.num_tokens} {self.num_seqs}"

    @property
    def sample_name(self) -> str:
        """Names the program that samples from the logits."""
        return f"sample {self.sampler} {self.num_samples} {self.num_logits}"


# by `Sequence.sampler_level`
_SAMPLERS: tuple[SamplerKind, ...] = ("greedy", "sampled", "masked", "full")


class BucketLadder:
    """The sizes that a step may be padded to."""

    def __init__(self, buckets: Iterable[Bucket]):
        self._buckets = tuple(sorted(set(buckets)))
        decodes = [bucket for bucket in self._buckets if bucket.kind == "decode"]
        rows = {bucket.num_seqs for bucket in decodes}
        chained = rows.intersection(_CHAINED_SEQS) | {max(rows, default=0)}
        chains = [bucket for bucket in decodes if bucket.num_seqs in chained]
        self._chained = tuple([bucket for bucket in chains if bucket.sampler != "masked"])
        self._steps: dict[tuple[StepKind, SamplerKind], list[tuple[int, int, Bucket]]] = {}
        for bucket in self._buckets:
            step = (bucket.num_tokens, bucket.num_seqs, bucket)
            self._steps.setdefault((bucket.kind, bucket.sampler), []).append(step)

    def all_buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that `choose` may name, for compiling them before the first request."""
        return self._buckets

    def step_sizes(self) -> tuple[int, ...]:
        """Tokens of mixed steps, ascending; not of those that score a prompt."""
        mixed = [bucket for bucket in self._buckets if bucket.kind == "mixed"]
        return tuple(sorted({one.num_tokens for one in mixed if one.sampler != "scored"}))

    def chained_buckets(self) -> tuple[Bucket, ...]:
        """Those of which one program may take several steps."""
        return self._chained

    def chained(self, bucket: Bucket) -> Bucket:
        """The smallest of `chained_buckets` that holds the rows of a decode step's bucket."""
        return next(
            one
            for name in _STAND_INS[bucket.sampler]
            for one in self._chained
            if one.sampler == name and one.num_seqs >= bucket.num_seqs
        )

    def choose(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan and samples as its rows ask.

        Raises:
            InvariantError: none does; the scheduler's limits and the ladder must agree.
        """
        num_tokens, num_seqs, sampler = plan.num_tokens, plan.num_rows, sampler_of(plan)
        kinds: tuple[StepKind, ...] = ("decode", "mixed") if num_tokens == num_seqs else ("mixed",)
        if plan.drafts:
            kinds = ("draft",)
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
    rows = plan.columns
    levels = [seq.sampler_level for seq in rows.seqs]
    if max(levels, default=0) < len(_SAMPLERS):
        return _SAMPLERS[max(compress(levels, rows.samples), default=0)]
    if plan.wants_prompt_logprobs:
        return "scored"
    params = [seq.request.params for seq in compress(rows.seqs, rows.samples)]
    if any([p.needs_edits for p in params]):
        return "full" if any([p.needs_full_sampler for p in params]) else "masked"
    return "sampled" if any([p.temperature for p in params]) else "greedy"


def default_ladder(
    platform: Literal["cpu", "gpu"],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    batch_buckets: tuple[int, ...] = (),
    token_buckets: tuple[int, ...] = (),
    speculation: Speculation | None = None,
) -> BucketLadder:
    """Sizes for a platform: on a CPU few, on a GPU padding is 5 to 10 % of a mixed step's tokens.

    At a GPU's default limits there are 37 forward programs and 28 small sampling programs.

    Args:
        batch_buckets: rows of decode steps, instead of the platform's; empty keeps these.
        token_buckets: tokens of mixed steps, likewise.
        speculation: adds sizes for steps with drafts.
    """
    if platform not in _SIZES:
        raise ConfigError(f"platform is {platform!r}, allowed are cpu and gpu")
    seqs, tokens, samplers = _SIZES[platform]
    seqs = _cut(batch_buckets or seqs, max_num_seqs)
    tokens = _cut(token_buckets or tokens, max_num_batched_tokens)
    few = set(tokens).intersection(_TOKENS_OF_FEW) if platform == "gpu" else ()
    buckets: list[Bucket] = []
    for name in samplers:
        sized = [Bucket("decode", name, n, n) for n in seqs]
        sized += [Bucket("mixed", name, n, min(n, max_num_seqs)) for n in tokens]
        sized += [Bucket("mixed", name, n, min(_FEW_SEQS, max_num_seqs)) for n in few]
        without = set(_WITHOUT.get(name, ())) - {max_num_seqs}
        buckets += [bucket for bucket in sized if bucket.num_seqs not in without]
    if speculation is not None:
        rows = min(MAX_DRAFT_ROWS, max_num_seqs)
        most = speculation.most_tokens(max_num_seqs, max_num_batched_tokens)
        drafts = [(n, min(n, rows)) for n in _cut(_DRAFT_TOKENS, most)]
        # rows that need the full sampler draft nothing: on a CPU it stands in for `sampled`
        buckets += [Bucket("draft", name, n, s) for name in samplers[:2] for n, s in drafts]
    scored = _cut(_SCORED[platform], min(max_num_batched_tokens, MAX_SCORED_TOKENS))
    buckets += [Bucket("mixed", "scored", n, min(n, max_num_seqs)) for n in scored]
    return BucketLadder(buckets)


def _cut(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The sizes below `most`, and `most` itself."""
    return (*(size for size in sizes if size < most), most)
