import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.hashing import as_bytes, page_hashes
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.errors import InvariantError
from tests.core.fake_device import make_sequence

PAGE_SIZE = 4


def make_cache(num_pages=20, hash_bits=256):
    pool = PagePool(num_pages, PAGE_SIZE)
    return pool, PrefixCache(pool, hash_bits)


def computed(cache, prompt, salt="", num_tokens=None, seq_id=0):
    """A sequence that computed all of its prompt on pages of its own, and registered them."""
    seq = make_sequence(seq_id, prompt, cache_salt=salt)
    seq.page_ids = cache.pool.take(cache.pool.pages_for(len(prompt)))
    cache.register(seq, len(prompt) if num_tokens is None else num_tokens)
    return seq


def find(cache, prompt, salt=""):
    return cache.find(make_sequence(99, prompt, cache_salt=salt))


def test_hashes_chain_over_salt_parent_and_int32_tokens():
    root = hashlib.sha256(b"salt").digest()
    first = hashlib.sha256(root + b"\1\0\0\0\2\0\0\0").digest()
    second = hashlib.sha256(first + b"\3\0\0\0\0\1\0\0").digest()
    assert page_hashes([1, 2, 3, 256, 5], 2, "salt") == [first, second]


@given(ids=st.lists(st.integers(0, 200_000), max_size=40), known=st.integers(0, 10))
def test_hashes_may_be_computed_in_pieces(ids, known):
    whole = page_hashes(ids, PAGE_SIZE, "s")
    assert page_hashes(ids, PAGE_SIZE, "s", whole[:known]) == whole


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 7, 8, 9, 12])
def test_a_hit_leaves_a_token_to_compute(prompt_len):
    _, cache = make_cache()
    seq = computed(cache, range(20))
    assert find(cache, range(prompt_len)) == seq.page_ids[: (prompt_len - 1) // PAGE_SIZE]


def test_only_registered_tokens_are_found():
    _, cache = make_cache()
    seq = computed(cache, range(20), num_tokens=11)
    assert find(cache, range(20)) == seq.page_ids[:2]
    cache.register(seq, 20)
    assert find(cache, range(21)) == seq.page_ids


def test_another_salt_is_another_prefix():
    _, cache = make_cache()
    computed(cache, range(12), salt="a")
    assert find(cache, range(12), salt="b") == []
    assert len(find(cache, range(12), salt="a")) == 2


def test_a_different_first_page_hides_equal_later_ones():
    _, cache = make_cache()
    computed(cache, [0, 1, 2, 3, 9, 9, 9, 9, 5])
    assert find(cache, [3, 2, 1, 0, 9, 9, 9, 9, 5]) == []


def test_the_second_copy_of_a_page_stays_private_and_its_followers_are_found():
    pool, cache = make_cache()
    first = computed(cache, range(5))
    second = computed(cache, range(9))
    assert find(cache, range(9)) == [first.page_ids[0], second.page_ids[1]]
    pool.give_back(second.page_ids)
    assert pool.num_cached == 1  # its own copy of the first page is blank again
    cache.check()


def test_a_page_whose_parent_was_evicted_is_registered_anew():
    pool, cache = make_cache(num_pages=6)
    parent = computed(cache, range(4))
    child = computed(cache, range(8))
    pool.give_back(parent.page_ids)
    pool.take(pool.num_free)  # evicts the parent; the child's page is still held
    assert find(cache, range(9)) == []
    pool.give_back(child.page_ids)
    again = computed(cache, range(8))
    assert find(cache, range(9)) == again.page_ids
    cache.check()


def test_an_evicted_page_is_not_found():
    pool, cache = make_cache(num_pages=4)
    seq = computed(cache, range(12))
    pool.give_back(seq.page_ids)
    pool.take(1)
    assert find(cache, range(13)) == seq.page_ids[:2]
    cache.check()


def test_sharing_counts_the_first_admission_only():
    pool, cache = make_cache()
    holder = computed(cache, range(12))
    seq = make_sequence(1, range(10))
    cache.share(seq, found := cache.find(seq), len(found) * PAGE_SIZE)
    assert seq.page_ids == holder.page_ids[:2]
    assert (seq.num_computed_tokens, seq.num_cached_tokens) == (8, 8)
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (10, 8)
    pool.give_back(seq.page_ids)
    seq.num_preemptions, seq.num_cached_tokens = 1, 3
    cache.share(seq, found := cache.find(seq), len(found) * PAGE_SIZE)
    assert (cache.num_query_tokens, cache.num_hit_tokens, seq.num_cached_tokens) == (10, 8, 3)


def test_reset_forgets_all_and_leaves_pages_with_their_holders():
    pool, cache = make_cache()
    held = computed(cache, range(8))
    free = computed(cache, range(50, 58))
    pool.give_back(free.page_ids)
    cache.reset()
    assert (len(cache), pool.num_cached, pool.num_held) == (0, 0, 2)
    assert find(cache, range(9)) == find(cache, range(50, 59)) == []
    pool.give_back(held.page_ids)
    pool.check()
    cache.check()


def test_check_finds_a_page_that_the_pool_does_not_keep():
    pool, cache = make_cache()
    computed(cache, range(8))
    pool.forget(1)
    with pytest.raises(InvariantError, match="the pool keeps other pages"):
        cache.check()


def first_bit(tokens):
    return page_hashes(tokens, PAGE_SIZE, "")[-1][0] >> 7


def test_after_a_collision_nothing_is_found_behind_the_wrong_parent():
    pages = [[i] * PAGE_SIZE for i in range(50)]
    here = [page for page in pages if first_bit(page) == 0]
    tail = next(t for t in pages if first_bit(here[0] + t) == first_bit(here[1] + t) == 1)
    _, cache = make_cache(hash_bits=1)
    computed(cache, here[0])
    seq = computed(cache, here[1] + tail)
    assert find(cache, [*here[0], *tail, 0]) == []
    assert find(cache, [*here[1], *tail, 0]) == seq.page_ids


@st.composite
def repetitive_prompts(draw):
    """Few different pages in many orders, so that only parents tell most of them apart."""
    pages = draw(st.lists(st.integers(0, 1), max_size=4))
    tail = draw(st.lists(st.integers(0, 1), min_size=1, max_size=PAGE_SIZE))
    return [token for token in pages for _ in range(PAGE_SIZE)] + tail


@settings(deadline=None, max_examples=100)
@given(
    prompts=st.lists(
        st.tuples(repetitive_prompts(), st.sampled_from("ab")), min_size=1, max_size=25
    ),
    hash_bits=st.sampled_from([1, 2, 4, 256]),
)
def test_whatever_collides_a_hit_has_the_same_tokens_parents_and_salt(prompts, hash_bits):
    pool, cache = make_cache(num_pages=12, hash_bits=hash_bits)
    content = {}  # page id: salt, and all tokens up to the page's end
    for prompt, salt in prompts:
        seq = make_sequence(0, prompt, cache_salt=salt)
        found = cache.find(seq)
        tokens = [salt, *prompt]
        for index, page_id in enumerate(found):
            assert content[page_id] == tokens[: 1 + (index + 1) * PAGE_SIZE]
        cache.share(seq, found, len(found) * PAGE_SIZE)
        own = pool.take(pool.pages_for(len(prompt)) - len(found))
        for index, page_id in enumerate(own, len(found)):
            content[page_id] = tokens[: 1 + (index + 1) * PAGE_SIZE]
        seq.page_ids += own
        cache.register(seq, len(prompt))
        pool.give_back(seq.page_ids)
        pool.check()
        cache.check()
        if hash_bits == 256:
            assert len(find(cache, prompt, salt)) == (len(prompt) - 1) // PAGE_SIZE


def test_hashes_that_name_other_tokens_find_only_what_is_equal():
    """As if SHA-256 collided: the third page's hash is right, its tokens are not."""
    _, cache = make_cache()
    seq = computed(cache, range(17))
    other = make_sequence(1, [*range(8), *range(60, 69)])
    other.page_hashes = list(seq.page_hashes)
    assert cache.find(other) == seq.page_ids[:2]


def test_a_prompt_that_brings_its_tokens_as_bytes_is_compared_by_them():
    _, cache = make_cache()
    seq = computed(cache, range(17))
    for tokens, num_found in ((range(17), 4), ([*range(8), *range(60, 69)], 2)):
        same = make_sequence(1, range(17), prompt_bytes=as_bytes(tokens))
        assert cache.find(same) == seq.page_ids[:num_found]
