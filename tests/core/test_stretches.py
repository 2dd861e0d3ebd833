from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.prefix_cache import PrefixCache
from tests.core.fake_device import make_sequence

PAGE_SIZE = 2


def computed(cache, prompt):
    """A sequence on the pages that are found and new ones, all registered."""
    seq = make_sequence(0, prompt)
    cache.share(seq, cache.find(seq), 0)
    seq.page_ids += cache.pool.take(cache.pool.pages_for(len(prompt)) - len(seq.page_ids))
    cache.register(seq, len(prompt))
    return seq


def find(cache, prompt):
    return cache.find(make_sequence(1, [*prompt, 0]))


def found_one_by_one(cache, prompt):
    seq, parent, page_ids = make_sequence(1, prompt), ("", ""), []
    for index in range(len(prompt) // PAGE_SIZE):
        page = cache._entry_at(seq, index, parent)
        if page is None:
            break
        page_ids.append(page.page_id)
        parent = page.prefix_id
    return page_ids


def test_a_long_prompt_is_found_whole_and_up_to_a_page_that_is_gone():
    cache = PrefixCache(PagePool(2000, PAGE_SIZE))
    prompt = range(600)
    seq = computed(cache, prompt)
    assert len(cache._stretches._known) == 300 // 64
    assert find(cache, prompt) == seq.page_ids
    assert find(cache, prompt[:500]) == seq.page_ids[:250]
    cache.forget_pages([seq.page_ids[100]])
    assert find(cache, prompt) == seq.page_ids[:100]
    again = computed(cache, prompt)
    assert again.page_ids[100] != seq.page_ids[100]
    assert find(cache, prompt) == again.page_ids
    cache.check()


def test_other_tokens_in_a_stretch_of_the_same_hashes_are_not_found():
    cache = PrefixCache(PagePool(2000, PAGE_SIZE))
    seq = computed(cache, range(300))
    other = make_sequence(1, [*range(200), 7, *range(201, 300)])
    other.page_hashes = list(seq.page_hashes)
    assert cache.find(other) == seq.page_ids[:100]


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(0, 20), st.booleans()),
        max_size=25,
    )
)
def test_pages_are_found_as_if_each_was_looked_at(jobs):
    """Prompts that begin alike, in a pool that holds few of them; some pages are forgotten."""
    cache = PrefixCache(PagePool(40, PAGE_SIZE))
    cache._stretches.num_pages = 3
    for begins, num_more, forgets in jobs:
        prompt = [token for token in begins for _ in range(4)] + [1] * num_more
        seq = computed(cache, prompt)
        cache.pool.give_back(seq.page_ids)
        if forgets:
            cache.forget_pages(seq.page_ids[num_more:][:1])
        for other in (prompt, [0] * 30, [1] * 30):
            assert find(cache, other) == found_one_by_one(cache, other)
        cache.check()
        cache.pool.check()
