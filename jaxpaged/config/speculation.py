"""How tokens are guessed ahead: vLLM's `speculative_config`."""

from dataclasses import dataclass, fields
from typing import Any

from jaxpaged.errors import ConfigError

MAX_DRAFT_ROWS = 32  # with more, nothing is drafted: a step is no longer bound by the weights
MAX_DRAFT_TOKENS = 256  # of a step with drafts: each has a row of logits; many rows guess fewer
DEFAULT_LOOKUP = 5  # vLLM's


@dataclass(frozen=True)
class Speculation:
    """How drafts are made; names are vLLM's."""

    method: str  # `ngram`: look up how the text went on after the same tokens; or `draft_model`
    num_speculative_tokens: int  # at most
    prompt_lookup_max: int = DEFAULT_LOOKUP  # longest and shortest run of tokens looked up
    prompt_lookup_min: int = DEFAULT_LOOKUP
    model: str = ""  # that drafts: directory, GGUF file or hub id
    revision: str | None = None  # of that on the hub

    def __post_init__(self):
        if self.method not in ("ngram", "draft_model"):
            raise ConfigError(
                f"speculative_config: method is {self.method!r}, served are 'ngram' and "
                "'draft_model'"
            )
        if (self.method == "draft_model") != bool(self.model):
            raise ConfigError(
                f"speculative_config: method is {self.method!r} and model {self.model!r}: "
                "a draft_model has a model, ngram has none"
            )
        for name, most in (("num_speculative_tokens", 31), ("prompt_lookup_max", 32)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"speculative_config: {name} is {value}, allowed are 1 to {most}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min is {self.prompt_lookup_min}, allowed are 1 "
                f"to prompt_lookup_max of {self.prompt_lookup_max}"
            )

    def most_tokens(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Of a step with drafts."""
        rows = min(MAX_DRAFT_ROWS, max_num_seqs)
        most = min(rows * (1 + self.num_speculative_tokens), MAX_DRAFT_TOKENS)
        return min(most, max_num_batched_tokens)


def speculation_from(given: dict[str, Any]) -> Speculation | None:
    """The operator's object with vLLM's defaults; None for an empty one.

    Raises:
        ConfigError: an unknown or missing name, or a value that cannot work.
    """
    if not given:
        return None
    known = [f.name for f in fields(Speculation)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"speculative_config has {', '.join(unknown)}, known are {known}")
    if "model" in given:
        given = {"method": "draft_model"} | given
    for name in ("method", "num_speculative_tokens"):
        if name not in given:
            raise ConfigError(f"speculative_config lacks {name}, as in {_EXAMPLE}")
    longest = given.get("prompt_lookup_max", given.get("prompt_lookup_min", DEFAULT_LOOKUP))
    sizes = {
        "num_speculative_tokens": given["num_speculative_tokens"],
        "prompt_lookup_max": longest,
        "prompt_lookup_min": given.get("prompt_lookup_min", longest),
    }
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"speculative_config: {name} is {value!r}, must be a whole number")
    model, revision = given.get("model", ""), given.get("revision")
    if not isinstance(model, str) or not isinstance(revision, str | None):
        raise ConfigError(
            f"speculative_config: model is {model!r}, revision {revision!r}: must be text"
        )
    return Speculation(given["method"], **sizes, model=model, revision=revision)


_EXAMPLE = (
    '{"method": "ngram", "num_speculative_tokens": 15, "prompt_lookup_max": 4, '
    '"prompt_lookup_min": 2} or {"model": "DIRECTORY", "num_speculative_tokens": 5}'
)
