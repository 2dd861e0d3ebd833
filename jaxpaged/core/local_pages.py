"""Pages of layers that see a window of tokens only: they go back while their sequence runs."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.sequence import Sequence
from jaxpaged.errors import InvariantError

MOST_CHUNK = 2048  # tokens of one prompt in a step, or the window if that is longer


class Holder(Protocol):
    """Holds the local pages of its `page_ids` from `first_local_page` on."""

    @property
    def page_ids(self) -> Seq[int]: ...

    @property
    def first_local_page(self) -> int: ...


class LocalPages:
    """Which page has a local page, and who holds that. Owned by the scheduler, like both pools.

    A page stands for the tokens in it; their KV in layers with a window is in a local page, which
    has a pool of its own. Sequences that share a page share its local page as long as their window
    reaches it. One that nobody holds stays findable with its page until it is taken, and a page
    goes on without it.

    Args:
        pool: the pages themselves; is told of this.
        window: tokens that a query sees, itself included.
        num_pages: local pages, the null page included.
    """

    def __init__(self, pool: PagePool, window: int, num_pages: int):
        self.window, self.page_size = window, pool.page_size
        self.pool = PagePool(num_pages, pool.page_size)
        self.pool.on_evict = self._lose
        # what a decode needs: its window, which begins and ends within pages
        self.most_of_decode = most_of_decode(window, pool.page_size)
        spare = max(self.pool.num_usable - self.most_of_decode, 1) * pool.page_size
        self.most_of_one_prompt = min(max(MOST_CHUNK, window), spare)
        self.most_of_one = self.most_of_decode + pool.pages_for(self.most_of_one_prompt)
        self._of = [0] * pool.num_pages  # local page by page, 0 for none
        self._page = [0] * num_pages  # the other way
        pool.local = self

    def ids(self, page_ids: Iterable[int]) -> list[int]:
        """Each page's local page, 0 where it has none."""
        of = self._of
        return [of[page_id] for page_id in page_ids]

    def has(self, page_id: int) -> bool:
        return self._of[page_id] != 0

    def first_needed(self, num_tokens: int) -> int:
        """Index of the first page that the token after `num_tokens` may see.

        Moves at page borders only, so that sequences that end on a page need the same ones.
        """
        page_size = self.page_size
        return max(num_tokens // page_size * page_size - self.window + 1, 0) // page_size

    def most_held(self, num_tokens: int) -> int:
        """Local pages that a sequence of so many tokens holds at most."""
        return min(self.pool.pages_for(num_tokens), self.most_of_one)

    def begin(self, page_ids: Iterable[int]) -> None:
        """Give pages that have just been taken their local pages."""
        pages = list(page_ids)
        for page_id, local_id in zip(pages, self.pool.take(len(pages)), strict=True):
            self._of[page_id], self._page[local_id] = local_id, page_id

    def usable(self, page_ids: list[int], first: int = 0) -> list[int]:
        """As many of a sequence's leading pages as can be followed by its next token.

        The window before their end must be there; pages before the `first` are not looked at.
        """
        of, page_size, begin, num_usable = self._of, self.page_size, first, 0
        for index in range(first, len(page_ids)):
            if not of[page_ids[index]]:
                begin = index + 1
            elif begin <= self.first_needed((index + 1) * page_size):
                num_usable = index + 1
        return page_ids[:num_usable]

    def usable_by_swapped(self, seq: Sequence, page_ids: list[int]) -> list[int]:
        """Likewise for one whose window comes back from host memory."""
        for index in range(self.first_needed(seq.num_computed_tokens), len(page_ids)):
            if not self._of[page_ids[index]]:
                return page_ids[:index]
        return page_ids

    def num_to_take(self, page_ids: list[int], begun: list[int], num_done: int, end: int) -> int:
        """Free local pages that go when a sequence shares these pages and has `end` tokens' pages.

        Its first `num_done` tokens need not be computed.
        """
        first = self.first_needed(num_done)
        new = self.pool.pages_for(end) - max(first, len(page_ids))
        return new + self.pool.num_free_among(self.ids([*page_ids[first:], *begun]))

    def enter(self, seq: Sequence, num_tokens: int) -> int:
        """A sequence has got its shared pages, and its first `num_tokens` tokens are done.

        Returns how many of the pages that it takes next need no local page.
        """
        first = seq.first_local_page = self.first_needed(num_tokens)
        self.hold(seq.page_ids[first:])
        return max(first - len(seq.page_ids), 0)

    def is_behind(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether a sequence whose next token is at `num_tokens` holds what it sees no longer."""
        return self.first_needed(num_tokens) > seq.first_local_page

    def move_on(self, seq: Sequence, num_tokens: int) -> None:
        """Let go of what a sequence whose next token is at `num_tokens` sees no longer."""
        first = self.first_needed(num_tokens)
        if first > seq.first_local_page:
            self.release(seq.page_ids[seq.first_local_page : first])
            seq.first_local_page = first

    def extended(self, seq: Sequence, num_own: int) -> None:
        """A sequence shares pages now after its first `num_own`, and goes on after these."""
        first = self.first_needed(len(seq.page_ids) * self.page_size)
        self.hold(seq.page_ids[max(first, num_own) :])
        if first > seq.first_local_page:
            self.release(seq.page_ids[seq.first_local_page : min(first, num_own)])
            seq.first_local_page = first

    def leave(self, seq: Sequence) -> None:
        """A sequence is about to give its pages back."""
        self.release(seq.page_ids[seq.first_local_page :])
        seq.first_local_page = 0

    def hold(self, page_ids: Iterable[int]) -> None:
        """Add a holder to the local pages of these, which must have them."""
        self.pool.share(self.ids(page_ids))

    def release(self, page_ids: Seq[int]) -> None:
        """Remove a holder from the local pages of these."""
        local_ids = self.ids(page_ids)
        self.pool.give_back(local_ids)
        for local_id in local_ids:
            if self.pool.is_blank(local_id):
                self._lose(local_id)

    def keep(self, page_id: int) -> None:
        """The prefix cache knows this page now."""
        local_id = self._of[page_id]
        if local_id and not self.pool.is_kept(local_id):
            self.pool.keep(local_id)

    def forget(self, page_id: int) -> None:
        """The prefix cache no longer knows this page."""
        local_id = self._of[page_id]
        if local_id and self.pool.is_kept(local_id):
            self.pool.forget(local_id)
            if self.pool.is_blank(local_id):
                self._lose(local_id)

    def check(self, pages: PagePool, holders: Iterable[Holder]) -> None:
        """Compare the whole bookkeeping with itself and with those who hold pages.

        Raises:
            InvariantError: something does not add up.
        """
        self.pool.check()
        self.pool.check_holders([self.ids(h.page_ids[h.first_local_page :]) for h in holders])
        for page_id, local_id in enumerate(self._of):
            if not local_id:
                continue
            if self._page[local_id] != page_id:
                raise InvariantError(f"local pages: {local_id} is not the one of page {page_id}")
            if self.pool.is_blank(local_id) or pages.is_blank(page_id):
                raise InvariantError(f"local pages: page {page_id} has one that is nobody's")
            if self.pool.is_kept(local_id) != pages.is_kept(page_id):
                raise InvariantError(f"local pages: that of page {page_id} is kept and it is not")

    def _lose(self, local_id: int) -> None:
        self._of[self._page[local_id]] = 0
        self._page[local_id] = 0


def most_of_decode(window: int, page_size: int) -> int:
    """Local pages that a sequence holds at most while it decodes."""
    return -(-(window - 1) // page_size) + 1
