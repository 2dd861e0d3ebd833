"""Text to token ids and back, around the `tokenizers` library.

Encoding is the library's. Decoding is ours: bytes per token joined and read as UTF-8, so that a
stream and a whole give the same text.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from jaxpaged.errors import RequestError
from jaxpaged.text.token_bytes import (
    TokenStyle,
    bytes_of,
    decoder_parts,
    drops_first_space,
    style_of,
)
from jaxpaged.text.tokenizer_files import TokenizerInfo, load

COMPOSED = 4  # most characters that Unicode composes into one, which normalizers do
SHORT_TEXT = 2000  # characters; longer ones are encoded without Python's lock, which costs more


class _BytesTable(dict[int, bytes]):
    """Bytes by token id, worked out when first asked. Ids without a token add nothing."""

    def __init__(self, raw: RawTokenizer, skipped: frozenset[int]):
        super().__init__()
        self._raw, self._skipped = raw, skipped
        self._style: TokenStyle = style_of(decoder_parts(raw))
        self._added = frozenset(raw.get_added_tokens_decoder())

    def __missing__(self, token_id: int) -> bytes:
        known = 0 <= token_id < 2**32 and token_id not in self._skipped
        token = self._raw.id_to_token(token_id) if known else None
        data = b""
        if token is not None:
            data = bytes_of(token, self._style, is_added=token_id in self._added)
        if 0 <= token_id < 2**32:
            self[token_id] = data
        return data


class Tokenizer:
    """A model's vocabulary. Safe to use from several threads."""

    def __init__(self, raw: RawTokenizer, info: TokenizerInfo):
        raw.no_padding()
        raw.no_truncation()
        self.raw, self.info = raw, info
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        parts = decoder_parts(raw)
        self.style = style_of(parts)
        self.drops_first_space = drops_first_space(parts)
        self._all_bytes = _BytesTable(raw, frozenset())
        self._text_bytes = _BytesTable(raw, self.special_ids)
        self._bos_fix = self._plan_bos()

    @cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters of a text than this; worked out when first asked."""
        longest = max(map(len, self.raw.get_vocab()), default=1)
        return longest if self.raw.normalizer is None else longest * COMPOSED

    @cached_property
    def surroundings(self) -> tuple[list[int], list[int]]:
        """The special tokens that `encode` puts before a text and behind it."""
        bare, ids = self.encode("a", add_special_tokens=False), self.encode("a")
        num_before = next(
            (i for i in range(len(ids)) if bare and ids[i : i + len(bare)] == bare), len(ids)
        )
        return ids[:num_before], ids[num_before + len(bare) :]

    @cached_property
    def control_pattern(self) -> re.Pattern[str] | None:
        """Finds the characters of control tokens; None where the model has none."""
        added = self.raw.get_added_tokens_decoder()
        controls = sorted((added[i].content for i in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, controls))) if controls else None

    @cached_property
    def _literal(self) -> RawTokenizer:
        literal = RawTokenizer.from_str(self.raw.to_str())
        literal.encode_special_tokens = True
        return literal

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of `text` in which the characters of a control token are only characters."""
        return self._literal.encode(text, add_special_tokens=False).ids

    @property
    def bos_token_id(self) -> int | None:
        return self.info.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.info.eos_token_ids

    @property
    def pad_token_id(self) -> int | None:
        return self.info.pad_token_id

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self.info.special_tokens

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return self.info.chat_templates

    def _plan_bos(self) -> str:
        """Whether the files ask for a BOS that the post-processor omits, or the other way round."""
        bos, wanted = self.info.bos_token_id, self.info.adds_bos
        if bos is None or wanted is None:
            return "leave"
        has_bos = bos in self.raw.encode("", add_special_tokens=True).ids
        if wanted == has_bos:
            return "leave"
        return "add" if wanted else "drop"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the BOS or EOS that the model's own files ask for.

        Raises:
            RequestError: `text` holds half a surrogate pair, which is no character.
        """
        try:
            if len(text) <= SHORT_TEXT:
                ids = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                batch = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                ids = batch[0].ids
        except TypeError:  # what the library says of it
            raise RequestError(
                "the text holds half of a surrogate pair, which is no character",
                param="prompt",
            ) from None
        if add_special_tokens and self._bos_fix != "leave":
            return self._fix_bos(ids)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts as the vocabulary joins them, and where the second begins."""
        encoding = self.raw.encode(first, second, add_special_tokens=True)
        return encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else len(
            encoding.ids
        )

    def _fix_bos(self, ids: list[int]) -> list[int]:
        bos = self.info.bos_token_id
        assert bos is not None
        if self._bos_fix == "add":
            return ids if ids[:1] == [bos] else [bos, *ids]
        return ids[1:] if ids[:1] == [bos] else ids

    def bytes_table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Bytes by token id for fast loops; special tokens are empty when they are skipped."""
        return self._text_bytes if skip_special_tokens else self._all_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the text, perhaps a part of a character; empty if there is none."""
        return self._all_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The token alone as text, U+FFFD where it is a part of a character."""
        return self._all_bytes[token_id].decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD."""
        if self.style == "plain":
            return self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        table = self.bytes_table(skip_special_tokens=skip_special_tokens)
        text = b"".join([table[i] for i in token_ids]).decode("utf-8", "replace")
        return text[1:] if self.drops_first_space and text[:1] == " " else text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None where the id has none."""
        return self.raw.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        return self.raw.token_to_id(token)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token, empty where an id has none."""
        return [self.id_to_token(i) or "" for i in token_ids]


def load_tokenizer(path: str | Path, *, gguf_fields: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a GGUF file; see `tokenizer_files`."""
    return Tokenizer(*load(path, gguf_fields=gguf_fields))


def ids_only_tokenizer() -> Tokenizer:
    """A tokenizer without a vocabulary: text encodes to nothing, ids decode to nothing."""
    return Tokenizer(RawTokenizer(BPE()), TokenizerInfo())
