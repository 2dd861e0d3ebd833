"""Names of pages: a hash of all tokens up to a page's end."""

import hashlib
from array import array
from collections.abc import Sequence as Seq

HASH_BITS = 256
TOKEN_BYTES = 4


def page_hashes(
    token_ids: Seq[int], page_size: int, salt: str, known: Seq[bytes] = ()
) -> list[bytes]:
    """SHA-256 of every full page, chained: it covers all tokens up to the page's end, and the salt.

    `known` are the hashes of the leading pages, already computed; the result begins with them.
    Touches no shared state, so a tokenizer thread may call it: about 10 ms for 100,000 tokens.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else root_hash(salt)
    data = as_bytes(token_ids[len(hashes) * page_size : len(token_ids) // page_size * page_size])
    page_bytes = page_size * TOKEN_BYTES
    for start in range(0, len(data), page_bytes):
        parent = next_hash(parent, data[start : start + page_bytes])
        hashes.append(parent)
    return hashes


def root_hash(salt: str) -> bytes:
    """What the hash of a first page goes on from."""
    return hashlib.sha256(salt.encode()).digest()


def next_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """The hash of a page after the one with the hash `parent`."""
    return hashlib.sha256(parent + token_bytes).digest()


def shortened(page_hash: bytes, bits: int) -> bytes:
    """The first bits of a hash, for tests: 256 leave it as it is."""
    if bits == HASH_BITS:
        return page_hash
    short = int.from_bytes(page_hash, "big") >> (HASH_BITS - bits)
    return short.to_bytes(HASH_BITS // 8, "big")


def as_bytes(token_ids: Seq[int]) -> bytes:
    """Token ids as the cache compares them, four bytes each."""
    return array("i", token_ids).tobytes()
