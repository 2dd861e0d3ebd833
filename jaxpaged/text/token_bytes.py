"""What each token stands for in bytes, so that text is built once characters are whole.

Three ways of writing tokens are in use. Byte-level vocabularies (GPT-2 and after) show each byte as
one printable character. SentencePiece vocabularies show a space as U+2581 and bytes without a piece
as <0xNN>. Anything else is taken as plain text.
"""

import json
import re
from typing import Any, Literal

from tokenizers import Tokenizer as RawTokenizer

type TokenStyle = Literal["byte_level", "sentencepiece", "plain"]

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte: itself where printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF = _byte_level_alphabet()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def decoder_parts(raw: RawTokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, as its JSON names them."""
    if raw.decoder is None:
        return []
    state = json.loads(raw.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def style_of(parts: list[dict[str, Any]]) -> TokenStyle:
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"} or any(_replaces_mark(part) for part in parts):
        return "sentencepiece"
    return "plain"


def _replaces_mark(part: dict[str, Any]) -> bool:
    return part["type"] == "Replace" and part.get("pattern") == {"String": SPACE_MARK}


def drops_first_space(parts: list[dict[str, Any]]) -> bool:
    """The text begins with a space that the tokenizer itself put there when it encoded."""
    for part in parts:
        if part["type"] == "Strip" and part.get("content") == " " and part.get("start", 0) > 0:
            return True
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    return False


def bytes_of(token: str, style: TokenStyle, *, is_added: bool) -> bytes:
    """The bytes that `token` adds to the text.

    An added token is plain text in a SentencePiece vocabulary. A byte-level decoder makes no
    difference, and takes a token with any character outside its alphabet as plain text.
    """
    if style == "byte_level":
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode("utf-8", "replace")
    if style == "sentencepiece" and not is_added:
        if match := _BYTE_PIECE.fullmatch(token):
            return bytes((int(match[1], 16),))
        return token.replace(SPACE_MARK, " ").encode("utf-8", "replace")
    return token.encode("utf-8", "replace")
