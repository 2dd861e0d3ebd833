"""What a request changes in its logits before a token is picked: biases, bans, masks."""

from dataclasses import dataclass

import numpy as np

from jaxpaged.core.params import MAX_BIASES
from jaxpaged.core.request import Request
from jaxpaged.core.sequence import Sequence
from jaxpaged.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class RowEdits:
    """One request's edits, prepared once."""

    ids: np.ndarray  # i32: what is biased or banned at every step
    values: np.ndarray  # f32: added to these logits
    early_ids: tuple[int, ...]  # banned while fewer than `min_tokens` are sampled
    min_tokens: int
    banned_runs: tuple[tuple[int, ...], ...]
    mask: np.ndarray | None  # u32 words; None allows all

    def write(self, ids: np.ndarray, values: np.ndarray, seq: Sequence, position: int) -> None:
        """Fill a row of `bias_ids` and `bias_values` for the token sampled at `position`."""
        num = len(self.ids)
        ids[:num], values[:num] = self.ids, self.values
        banned: list[int] = []
        if position - seq.num_prompt_tokens < self.min_tokens:
            banned += self.early_ids
        for run in self.banned_runs:
            if seq.token_ids[max(position - len(run) + 1, 0) : position] == list(run[:-1]):
                banned.append(run[-1])
        ids[num : num + len(banned)] = banned
        values[num : num + len(banned)] = -np.inf


def row_edits(request: Request, vocab: int) -> RowEdits | None:
    """The edits of a request, or None where it has none."""
    params = request.params
    bias, is_masked = params.logit_bias or {}, params.allowed_token_ids is not None
    if not (bias or is_masked or params.min_tokens or request.banned_ids or request.banned_runs):
        return None
    ids = np.array([*bias, *request.banned_ids], np.int32)
    values = np.array([*bias.values(), *(-np.inf for _ in request.banned_ids)], np.float32)
    allowed = params.allowed_token_ids
    return RowEdits(
        ids=ids,
        values=values,
        early_ids=_early_ids(request),
        min_tokens=params.min_tokens,
        banned_runs=request.banned_runs,
        mask=None if allowed is None else mask_words(allowed, vocab),
    )


def excluding(request: Request) -> list[str]:
    """The parameters that may leave a row no token, first the one that is most likely at fault."""
    names = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
    given = [name for name in names if getattr(request.params, name)]
    return given or ["logits_processors"]


def mask_words(allowed_ids: "np.typing.ArrayLike", vocab: int) -> np.ndarray:
    """Bits, u32[ceil(vocab / 32)]: bit t % 32 of word t // 32 is set where token t is allowed."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.asarray(allowed_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def check_edits(request: Request) -> None:
    """Refuse a request with more biased and banned ids than a row has places.

    Raises:
        RequestError: more than `MAX_BIASES`.
    """
    bias = request.params.logit_bias or {}
    num = len(bias) + len(request.banned_ids) + len(request.banned_runs) + len(_early_ids(request))
    if num > MAX_BIASES:
        raise RequestError(
            f"logit_bias, bad_words and stop_token_ids with min_tokens name {num} ids, "
            f"at most {MAX_BIASES} are allowed: leave some out",
            param="logit_bias",
        )


def _early_ids(request: Request) -> tuple[int, ...]:
    if not request.params.min_tokens or request.grammar is not None:
        return ()  # a grammar's mask says itself where an answer may end
    return tuple(sorted(request.eos_token_ids.union(request.params.stop_token_ids or ())))
