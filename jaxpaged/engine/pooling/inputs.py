"""From what a caller gives to token ids that an embedding model can take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.config.pooling import PoolingModel
from jaxpaged.core.params import check_ids
from jaxpaged.errors import RequestError
from jaxpaged.text.tokenizer import Tokenizer

type PoolingInput = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class EncodedText:
    """Token ids of a text, or of a pair of texts, the second of which begins at `second_from`."""

    token_ids: list[int]
    second_from: int


class PoolingInputs:
    """Makes token ids that the engine can trust: every id and length is checked here."""

    def __init__(self, tokenizer: Tokenizer, model: PoolingModel):
        self.tokenizer, self.model = tokenizer, model

    def encode(
        self,
        text: PoolingInput,
        *,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        param: str = "input",
    ) -> EncodedText:
        """Token ids of one text.

        Args:
            truncate: keep at most so many tokens, -1 as many as fit; None refuses what is too long.
            prompt_name: one of the model's own prefixes, put before a text.

        Raises:
            RequestError: `param` and the text say what cannot be served.
        """
        if isinstance(text, Mapping):
            text = text.get("prompt_token_ids") or text.get("prompt") or ""
        if isinstance(text, str):
            text = self._short_enough(self._prefix(prompt_name) + text, truncate, param)
            ids = self.tokenizer.encode(text, add_special_tokens)
            ids = self._cut_text(ids, truncate, add_special_tokens)
        else:
            if prompt_name is not None:
                raise RequestError("prompt_name needs text, not token ids", param="prompt_name")
            given: list[Any] = list(text)
            check_ids(param, given, self.model.vocab)
            ids = given[: self._limit(truncate)]
        return EncodedText(self._checked(ids, param), len(ids))

    def encode_pair(
        self, first: str, second: str, *, truncate: int | None = None, param: str = "text_2"
    ) -> EncodedText:
        """Token ids of a pair for a classifier, as its tokenizer joins them; the second is cut."""
        ids, second_from = self.tokenizer.encode_pair(first, second)
        limit = self._limit(truncate)
        if limit is not None and len(ids) > limit:
            end = ids[-1:]
            ids = ids[: limit - 1] + end
        return EncodedText(self._checked(ids, param), min(second_from, len(ids)))

    def _short_enough(self, text: str, truncate: int | None, param: str) -> str:
        """What cannot fit is refused, or cut, before the work of encoding it."""
        most = self.model.max_len * self.tokenizer.max_token_chars
        if len(text) > most and truncate is None:
            raise RequestError(
                f"{param} has a text of {len(text)} characters, over the {most} that the model's "
                f"maximum context length of {self.model.max_len} tokens can hold: shorten it, or "
                "set truncate_prompt_tokens to -1",
                param=param,
            )
        return text[:most]

    def _prefix(self, name: str | None) -> str:
        if name is None:
            return ""
        if name not in self.model.prompts:
            known = ", ".join(sorted(self.model.prompts)) or "none"
            raise RequestError(
                f"prompt_name is {name!r}, this model knows {known}", param="prompt_name"
            )
        return self.model.prompts[name]

    def _limit(self, truncate: int | None) -> int | None:
        most = self.model.max_len
        if truncate is None:
            return None
        if truncate == -1:
            return most
        if not 1 <= truncate <= most:
            raise RequestError(
                f"truncate_prompt_tokens is {truncate}, allowed are -1 and 1 to {most}",
                param="truncate_prompt_tokens",
            )
        return truncate

    def _cut_text(self, ids: list[int], truncate: int | None, has_specials: bool) -> list[int]:
        """Cut from the end, but leave the special tokens that the tokenizer put there."""
        limit = self._limit(truncate)
        if limit is None or len(ids) <= limit:
            return ids
        tail = 0
        if has_specials:
            while tail < len(ids) and ids[-1 - tail] in self.tokenizer.special_ids:
                tail += 1
        tail = min(tail, limit)
        return ids[: limit - tail] + ids[len(ids) - tail :]

    def _checked(self, ids: list[int], param: str) -> list[int]:
        most = self.model.max_len
        if not ids:
            raise RequestError(f"{param} has a text without a token: leave it out", param=param)
        if len(ids) > most:
            raise RequestError(
                f"{param} has a text of {len(ids)} tokens, over the model's maximum context length "
                f"of {most} tokens: shorten it, or set truncate_prompt_tokens to -1",
                param=param,
            )
        return ids
