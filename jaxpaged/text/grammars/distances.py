"""How many tokens each state of a network is from the end."""

import heapq
from collections import defaultdict

from jaxpaged.text.grammars.network import Network
from jaxpaged.text.grammars.vocabulary import TokenTree

MAX_WALK = 400  # nodes of the token tree looked at from one state
ENDLESS = 1 << 40  # the cost of what never ends


def costs_to_end(network: Network, tree: TokenTree) -> list[int]:
    """Fewest tokens from each state to the end of its piece, cheapest first (Knuth 1977)."""
    before = _steps_into(network, tree)
    call_sites: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for state, calls in enumerate(network.calls):
        for piece, back in calls:
            start = network.starts[piece]
            for inner in {start, back}:
                call_sites[inner].append((state, start, back))
    cost = [ENDLESS] * len(network.empty)
    heap = [(0, state) for state in network.ends]
    while heap:
        paid, state = heapq.heappop(heap)
        if cost[state] < ENDLESS:
            continue
        cost[state] = paid
        for earlier, step in before[state]:
            if cost[earlier] == ENDLESS:
                heapq.heappush(heap, (paid + step, earlier))
        for earlier, start, back in call_sites[state]:
            if cost[earlier] == ENDLESS and cost[start] + cost[back] < ENDLESS:
                heapq.heappush(heap, (cost[start] + cost[back], earlier))
    return cost


def _steps_into(network: Network, tree: TokenTree) -> dict[int, list[tuple[int, int]]]:
    """Where each state is come to from, and for how many tokens: one or none."""
    before: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for state, empty in enumerate(network.empty):
        if state % 64 == 0:
            network.check_time()
        for after in empty:
            before[after].append((state, 0))
        for after in _token_ends(network, tree, state):
            before[after].append((state, 1))
    return before


def _token_ends(network: Network, tree: TokenTree, start: int) -> set[int]:
    """States that one token leads to: any single byte, and longer ones along fixed text."""
    ends = {to for low, high, to in network.arrows[start] if tree.has_single(low, high)}
    seen: set[tuple[int, int]] = set()
    waiting = [(0, start)]
    while waiting and len(seen) < MAX_WALK:
        node, state = waiting.pop()
        steps = [(node, to) for to in network.empty[state]] if node else []
        for low, high, to in network.arrows[state]:
            child = tree.child(node, low) if low == high else 0
            if child:
                steps.append((child, to))
                if tree.is_token[child]:
                    ends.add(to)
        new = [step for step in steps if step not in seen]
        seen.update(new)
        waiting += new
    return ends


def most_cost(network: Network, cost: list[int]) -> int | None:
    """The most tokens that any place in the network is from the end; None with recursion."""
    own, calls = _by_piece(network, cost)
    known: dict[int, int | None] = {}

    def most(piece: int) -> int | None:
        if piece not in known:
            known[piece] = None  # what is still open calls itself
            total = own[piece]
            for called, back in calls[piece]:
                inner = most(called)
                if inner is None:
                    return None
                total = max(total, inner + cost[back] if cost[back] < ENDLESS else 0)
            known[piece] = total
        return known[piece]

    return most(0)


def _by_piece(network: Network, cost: list[int]) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Of each piece the largest cost of its states, and its calls."""
    own, calls = [0] * len(network.starts), [list[tuple[int, int]]() for _ in network.starts]
    for piece, start in enumerate(network.starts):
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            if cost[state] < ENDLESS:
                own[piece] = max(own[piece], cost[state])
            calls[piece] += network.calls[state]
            after = [*network.empty[state], *(to for *_, to in network.arrows[state])]
            after += [back for _, back in network.calls[state]]
            new = [s for s in after if s not in seen]
            seen.update(new)
            waiting += new
    return own, calls
