"""Log-probabilities as the two endpoints show them, with the true bytes of every token."""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxpaged.engine.outputs import Logprob, PlaceLogprobs, RequestOutput
from jaxpaged.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class TokenLabels:
    """A token as text: what it decodes to, or its bytes where it is a part of a character."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool):
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def label(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


class CompletionLogprobs:
    """The four parallel lists of /v1/completions, for one answer as it grows.

    A place whose logprobs are None is a first token, which nothing comes before. Offsets count the
    characters of the answer's text, an echoed prompt included, before each token.
    """

    def __init__(self, tokenizer: Tokenizer, labels: TokenLabels, *, skip_special_tokens: bool):
        self._labels = labels
        self._table = tokenizer.bytes_table(skip_special_tokens=skip_special_tokens)
        self._offset, self._partial = 0, b""

    def lists(
        self, token_ids: Sequence[int], places: Sequence[PlaceLogprobs | None]
    ) -> dict[str, Any]:
        """The lists for the next tokens."""
        label = self._labels.label
        tops = [
            None if place is None else {label(t): finite(p.logprob) for t, p in place.items()}
            for place in places
        ]
        chosen = [
            None if place is None else finite(place[token].logprob)
            for token, place in zip(token_ids, places, strict=True)
        ]
        return {
            "text_offset": [self._advance(token) for token in token_ids],
            "token_logprobs": chosen,
            "tokens": [label(token) for token in token_ids],
            "top_logprobs": tops,
        }

    def _advance(self, token_id: int) -> int:
        """Where this token's text begins; step over it."""
        offset = self._offset
        data = self._partial + self._table[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._partial = data[used:]
        self._offset += len(text)
        return offset


def chat_logprobs(
    labels: TokenLabels,
    token_ids: Sequence[int],
    places: Sequence[PlaceLogprobs],
    told: int | Sequence[int],
) -> dict[str, Any]:
    """The `logprobs` of a chat choice: each token with `told` likeliest ones, or those named."""
    return {
        "content": [
            _entry(labels, token, place[token])
            | {"top_logprobs": [_entry(labels, t, p) for t, p in _top(place, told)]}
            for token, place in zip(token_ids, places, strict=True)
        ],
        "refusal": None,
    }


class PromptScores:
    """vLLM's `prompt_logprobs`: by token id, the first place null. Every answer tells them, so they
    are written once for all answers that come together, each place by itself.
    """

    def __init__(self, labels: TokenLabels):
        self._labels = labels
        self._places: object = None
        self._written = msgspec.Raw(b"[]")

    def of(self, output: RequestOutput) -> msgspec.Raw:
        places = output.prompt_logprobs
        if places is not self._places:
            self._places = places
            self._written = msgspec.Raw(b"[" + b",".join(map(self._place, places or ())) + b"]")
        return self._written

    def _place(self, place: PlaceLogprobs | None) -> bytes:
        if place is None:
            return b"null"
        return msgspec.json.encode(
            {
                str(token): {
                    "logprob": finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": self._labels.label(token),
                }
                for token, entry in place.items()
            }
        )


def _top(place: PlaceLogprobs, told: int | Sequence[int]) -> list[tuple[int, Logprob]]:
    """The likeliest tokens; the chosen one is among them only if it is likely enough, or named."""
    if not isinstance(told, int):
        return [(token, place[token]) for token in told]
    return sorted(place.items(), key=lambda item: -item[1].logprob)[:told]


def _entry(labels: TokenLabels, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token": labels.label(token_id),
        "logprob": finite(entry.logprob),
        "bytes": labels.bytes_of(token_id),
    }


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST
