"""What the prefix cache knows of a page."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxpaged.core.hashing import TOKEN_BYTES, as_bytes
from jaxpaged.core.sequence import Parent, Root, Sequence

SHARED_SALT = "\0shared"  # of prefixes that all may read; no client can name it


@dataclass(eq=False, slots=True)  # frozen, it would take four times as long to make
class CachedPage:
    """A page that can be found. `prefix_id` names its content, all pages before it included."""

    key: bytes
    page_id: int  # 0: it is in host memory
    prefix_id: int
    parent: Parent
    token_bytes: bytes
    is_shared: bool  # sequences of every salt may read it
    step: int  # in whose plan it was registered
    chunk_id: int = 0  # what it is part of in host memory; 0: nothing
    stretch: bytes = b""  # key of the last page of the stretch that it is in; empty: in none


class Begun(NamedTuple):
    """A page whose first `num_tokens` tokens a sequence may copy."""

    page_id: int
    num_tokens: int


def token_bytes_of(seq: Sequence, start: int, end: int) -> bytes:
    """Some of its tokens; of a prompt that came with its bytes they are a slice."""
    known = seq.request.prompt_bytes
    if end * TOKEN_BYTES <= len(known):
        return known[start * TOKEN_BYTES : end * TOKEN_BYTES]
    return as_bytes(seq.token_ids[start:end])


def seed_of(root: Root) -> str:
    """What the hashes of pages that go back to this begin with."""
    cache_salt, adapter_id = root
    return f"{adapter_id}\0{cache_salt}" if adapter_id else cache_salt


def parent_after(entry: CachedPage, seq: Sequence) -> Parent:
    """What the sequence's own page after this one follows."""
    if entry.is_shared and seq.request.cache_root[0] != SHARED_SALT:
        return entry.prefix_id, seq.request.cache_root
    return entry.prefix_id
