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


def worst_costs(network: Network, cost: list[int]) -> list[int]:
    """Of each state the most tokens that any place on the way from it to its end is from the end.

    ENDLESS where recursion leaves no bound.
    """
    before: dict[int, list[int]] = defaultdict(list)
    for state, after in enumerate(_next_states(network)):
        for one in after:
            before[one].append(state)
    pieces: dict[int, int] = {}
    worst = list(map(int, cost))

    def most(piece: int) -> int:
        """The worst cost within a piece; what is still being looked at calls itself."""
        if piece not in pieces:
            pieces[piece] = ENDLESS
            states = _reached(network, network.starts[piece])
            own = {state: cost[state] if cost[state] < ENDLESS else 0 for state in states}
            for state in states:
                for called, back in network.calls[state]:
                    if cost[back] < ENDLESS:
                        own[state] = max(own[state], min(most(called) + cost[back], ENDLESS))
            _spread(own, before, worst)
            pieces[piece] = worst[network.starts[piece]]
        return pieces[piece]

    for piece in range(len(network.starts)):
        most(piece)
    return worst


def _spread(own: dict[int, int], before: dict[int, list[int]], worst: list[int]) -> None:
    """Each state gets the largest value of those that it leads to, itself included."""
    done: set[int] = set()
    for state in sorted(own, key=own.__getitem__, reverse=True):
        waiting = [state] if state not in done else []
        done.update(waiting)
        while waiting:
            one = waiting.pop()
            worst[one] = own[state]
            earlier = [s for s in before[one] if s not in done and s in own]
            done.update(earlier)
            waiting += earlier


def _next_states(network: Network) -> list[list[int]]:
    """Where each state leads within its piece, through called ones too."""
    return [
        [*empty, *(to for *_, to in arrows), *(back for _, back in calls)]
        for empty, arrows, calls in zip(network.empty, network.arrows, network.calls, strict=True)
    ]


def _reached(network: Network, start: int) -> set[int]:
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        after = [*network.empty[state], *(to for *_, to in network.arrows[state])]
        after += [back for _, back in network.calls[state]]
        new = [s for s in after if s not in seen]
        seen.update(new)
        waiting += new
    return seen
