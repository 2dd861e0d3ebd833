"""Where an answer stands in its grammar, and how many tokens it needs to end.

Sets of places are made as answers come to them and kept by number. Masks are kept by place too, as
long as answers come again to the same ones; else only an answer whose tokens run out is looked at.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpaged.text.grammars.distances import ENDLESS, costs_to_end, worst_costs
from jaxpaged.text.grammars.mask_memory import MaskMemory
from jaxpaged.text.grammars.network import Network
from jaxpaged.text.grammars.refusal import refusal
from jaxpaged.text.grammars.vocabulary import TokenTree

MAX_PLACES = 5_000  # kept at once
MAX_COUNTED = 1 << 16
FEW_ASKED = 2000  # masks by place, after which it is known whether they come again
MAX_ALIKE = 1_000  # states an answer may be in at the same time
WIDE = 100  # bytes that may come next, from which on a place is wide
WIDE_DEPTH = 2  # bytes of a token that are looked at from wide places, if they are many
DEAD = 0  # the number of the empty set
NEVER = 1 << 30  # tokens needed where no ending exists

type _Place = tuple[int, int]  # a state, and the number of the stack to come back to


class _Stack(NamedTuple):
    """Where a piece comes back to: all its callers, each with what lies below it."""

    callers: frozenset[_Place]
    nearest: int  # tokens to the end, of the caller that is nearest to it
    farthest: int
    worst: int  # most tokens that any place on the way there is from the end


class Endings:
    """Sets of places of one grammar, by number. Used by one thread at a time."""

    def __init__(self, network: Network, tree: TokenTree, eos_ids: np.ndarray, memory: MaskMemory):
        self.network, self.tree, self._eos_ids, self._memory = network, tree, eos_ids, memory
        self._cost = costs_to_end(network, tree)
        self._worst_cost = worst_costs(network, self._cost)
        self.epoch = 0
        self._num_asked = self.num_told = 0
        self._forget()

    def _forget(self) -> None:
        """Start again; numbers of an earlier epoch mean nothing."""
        self.epoch += 1
        self._stacks = [_Stack(frozenset(), 0, 0, 0)]
        self._stack_ids: dict[frozenset[_Place], int] = {}
        self._sets: list[frozenset[_Place]] = []
        self._ids: dict[tuple[frozenset[_Place], bool], int] = {}
        self._steps: dict[int, int] = {}  # by place and byte
        self.needs: list[int] = []  # fewest tokens to the end
        self._worst: list[int] = []  # the most that any place on from here is from the end
        self._farthest: list[int] = []  # of the set's own places
        self._rows: list[np.ndarray | None] = []
        self._choices: OrderedDict[int, _Choices] = OrderedDict()  # by place, the latest last
        self.num_mask_words = 0  # kept
        self._told: OrderedDict[int, np.ndarray] = OrderedDict()  # by place, the latest last
        self._number(frozenset(), False)
        self.start = self._closed([(self.network.starts[0], 0)])

    def advance(self, place: int, data: bytes) -> int:
        """The set after `data`; DEAD where the grammar does not allow it."""
        for byte in data:
            after = self._steps.get(place * 256 + byte)
            if after is None:
                after = self._steps[place * 256 + byte] = self._after_byte(place, byte)
            place = after
        return place

    def forget_if_full(self) -> None:
        if len(self._sets) > MAX_PLACES:
            self._forget()

    @property
    def come_again(self) -> bool:
        """Answers come to the same places, so that masks by place are worth keeping."""
        return self._num_asked < FEW_ASKED or 2 * self.num_told > self._num_asked

    def told(self, place: int) -> np.ndarray | None:
        """What was kept by `tell`."""
        found = self._told.get(place)
        self._num_asked += 1
        if found is not None:
            self.num_told += 1
            self._told.move_to_end(place)
        return found

    def tell(self, place: int, mask: np.ndarray) -> None:
        """Keep what the grammar allows at a place, whoever found it out."""
        if place not in self._told:
            self.num_mask_words += len(mask)
        self._told[place] = mask
        self._memory.added(self, len(mask))

    def forget_masks(self, num_left: int) -> None:
        """Drop the oldest masks, until at most so many words are left."""
        while self.num_mask_words > num_left and self._told:
            self.num_mask_words -= len(self._told.popitem(last=False)[1])
        while self.num_mask_words > num_left and len(self._choices) > 1:  # the last is in use
            self.num_mask_words -= self._choices.popitem(last=False)[1].num_words

    def worst(self, place: int) -> int:
        """The most tokens that any place from here on is from the end; NEVER without a bound."""
        return min(self._worst[place], NEVER)

    def is_safe(self, place: int, budget: int) -> bool:
        """Whatever token comes next, the answer can end within `budget` tokens, it included."""
        if self._worst[place] < ENDLESS:
            return budget > self._worst[place]
        return budget > self._farthest[place] + self._most_added

    @cached_property
    def _most_added(self) -> int:
        """A bound on what one token adds: it may go into further pieces at each of its bytes."""
        finite = [cost for cost in self._cost if cost < ENDLESS]
        return (self.tree.longest + 1) * max(self.network.call_depth) * max(finite)

    def mask(self, place: int, budget: int) -> np.ndarray:
        """u32 words: tokens after which `budget - 1` more suffice, and EOS where it may end.

        Where almost any byte may come next, and each leads elsewhere, only short tokens are found.
        """
        choices = self._choices.get(place)
        if choices is None:
            comes_back = bool((self._row(place) == place).any())
            choices = self._keep(place, self._walk(place, is_whole=comes_back))
        if self.needs[place] and not choices.any_fits(budget):
            choices = self._keep(place, self._walk(place, is_whole=True))
        self._choices.move_to_end(place)
        return choices.mask(budget)

    def _keep(self, place: int, needs: np.ndarray) -> "_Choices":
        known = self._choices.pop(place, None)
        found = _Choices(needs, self._eos_ids, may_end=self.needs[place] == 0)
        self._choices[place] = found
        self.num_mask_words += found.num_words - (known.num_words if known else 0)
        self._memory.added(self, found.num_words)
        return found

    def _walk(self, start: int, *, is_whole: bool) -> np.ndarray:
        """i32[tokens]: fewest tokens to the end once each token is taken; NEVER if not allowed.

        Goes down the token tree level by level, all nodes of a level at once.
        """
        tree = self.tree
        place_of = np.zeros(len(tree.parent), np.int32)  # by node; the root, no token, stays DEAD
        nodes, places = np.zeros(1, np.int64), np.full(1, start, np.int32)
        for depth in range(tree.longest):
            is_there = np.zeros(len(self._sets), bool)
            is_there[places] = True
            rows = np.stack([self._row(int(place)) for place in np.flatnonzero(is_there)])
            row_of = (np.cumsum(is_there) - 1)[places]
            if depth >= WIDE_DEPTH and not is_whole:
                goes_on = (np.count_nonzero(rows, axis=1) < WIDE)[row_of]
                nodes, row_of = nodes[goes_on], row_of[goes_on]
            nodes, parents = tree.children(nodes)
            places = rows[row_of[parents], tree.byte[nodes]]
            alive = np.flatnonzero(places)
            if not len(alive):
                break
            nodes, places = nodes[alive], places[alive]
            place_of[nodes] = places
        return np.array(self.needs, np.int32)[place_of[tree.node_of]]

    def _row(self, place: int) -> np.ndarray:
        """i32[256]: the set after each byte."""
        row = self._rows[place]
        if row is None:
            row = self._rows[place] = self._new_row(self._sets[place])
        return row

    def _new_row(self, places: frozenset[_Place]) -> np.ndarray:
        row = np.zeros(256, np.int32)
        arrows = [
            (low, high, to, stack)
            for state, stack in places
            for low, high, to in self.network.arrows[state]
        ]
        borders = sorted({b for low, high, *_ in arrows for b in (low, high + 1)})
        for first, end in pairwise(borders):
            into = [(to, stack) for low, high, to, stack in arrows if low <= first <= high]
            if into:
                row[first:end] = self._closed(into)
        return row

    def _after_byte(self, place: int, byte: int) -> int:
        row = self._rows[place]
        if row is not None:
            return int(row[byte])
        arrows = self.network.arrows
        into = [
            (to, stack)
            for state, stack in self._sets[place]
            for low, high, to in arrows[state]
            if low <= byte <= high
        ]
        return self._closed(into) if into else DEAD

    def _closed(self, places: Sequence[_Place]) -> int:
        """The number of the set of `places` and all that they reach without a byte.

        Callers of one piece share a stack, or ambiguity would double with every call. So a piece
        waits for those that might call it too, which are further from their first byte.
        """
        network, can_end = self.network, False
        seen = {place for place in places if self._cost[place[0]] < ENDLESS}
        waiting = list(seen)
        called: dict[int, set[_Place]] = {}
        while waiting or called:
            if waiting:
                state, stack = waiting.pop()
                new = [(to, stack) for to in network.empty[state]]
                for piece, back in network.calls[state]:
                    if self._cost[back] < ENDLESS:
                        called.setdefault(piece, set()).add((back, stack))
                if state in network.ends:
                    can_end |= stack == 0
                    new += self._stacks[stack].callers
            else:
                piece = max(called, key=network.call_depth.__getitem__)
                new = [(network.starts[piece], self._stack(frozenset(called.pop(piece))))]
            for one in new:
                if one not in seen and self._cost[one[0]] < ENDLESS:
                    seen.add(one)
                    waiting.append(one)
            if len(seen) > MAX_ALIKE:
                raise refusal("the grammar is too ambiguous to follow: make it simpler")
        return self._number(frozenset(p for p in seen if network.arrows[p[0]]), can_end)

    def _stack(self, callers: frozenset[_Place]) -> int:
        number = self._stack_ids.get(callers)
        if number is None:
            number = self._stack_ids[callers] = len(self._stacks)
            self._stacks.append(
                _Stack(
                    callers,
                    min([self._cost[s] + self._stacks[k].nearest for s, k in callers]),
                    max([self._cost[s] + self._stacks[k].farthest for s, k in callers]),
                    max([self._worst_of(place) for place in callers]),
                )
            )
        return number

    def _worst_of(self, place: _Place) -> int:
        state, stack = place
        below = self._stacks[stack]
        return min(max(self._worst_cost[state] + below.nearest, below.worst), ENDLESS)

    def _number(self, places: frozenset[_Place], can_end: bool) -> int:
        number = self._ids.get((places, can_end))
        if number is None:
            costs = [self._cost[s] + self._stacks[k].nearest for s, k in places]
            farthest = [self._cost[s] + self._stacks[k].farthest for s, k in places]
            number = self._ids[places, can_end] = len(self._sets)
            self._sets.append(places)
            self._rows.append(None)
            self.needs.append(0 if can_end else min([NEVER, *costs]))
            self._farthest.append(max([0, *farthest]))
            self._worst.append(max([0, *map(self._worst_of, places)]))
        return number


class _Choices:
    """What may come at a place: a mask for each number of tokens that the end may be away."""

    def __init__(self, needs: np.ndarray, eos_ids: np.ndarray, *, may_end: bool):
        finite = needs[needs < NEVER]
        is_small = finite.max(initial=0) < MAX_COUNTED  # then counting is faster than sorting
        numbers = np.flatnonzero(np.bincount(finite)) if is_small else np.unique(finite)
        self._needs: list[int] = numbers.tolist()
        self._masks: list[np.ndarray] = []
        for most in (-1, *self._needs):
            allowed = np.zeros(-(-len(needs) // 32) * 32, bool)
            allowed[: len(needs)] = needs <= most
            allowed[eos_ids] = may_end
            self._masks.append(np.packbits(allowed, bitorder="little").view("<u4"))
            self._masks[-1].flags.writeable = False

    @property
    def num_words(self) -> int:
        return sum([len(mask) for mask in self._masks])

    def any_fits(self, budget: int) -> bool:
        return bisect_left(self._needs, budget) > 0

    def mask(self, budget: int) -> np.ndarray:
        return self._masks[bisect_left(self._needs, budget)]
