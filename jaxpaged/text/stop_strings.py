"""Finding the first of several strings in text that arrives in pieces (Aho and Corasick, 1975)."""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class FoundStop:
    """A stop string was completed, `num_after` characters before the end of the text given."""

    stop: str
    num_after: int


@dataclass(frozen=True)
class _Automaton:
    """State s stands for the longest beginning of any string that the text ends with."""

    moves: tuple[dict[str, int], ...]  # from each state, by character; what is missing falls back
    fallbacks: tuple[int, ...]  # the next shorter beginning
    completes: tuple[str | None, ...]  # the longest string that is complete here
    pending: tuple[int, ...]  # characters that may still grow into a string


@lru_cache(maxsize=256)
def _build(stops: tuple[str, ...]) -> _Automaton:
    moves: list[dict[str, int]] = [{}]
    depth = [0]
    completes: list[str | None] = [None]
    for stop in stops:
        state = 0
        for character in stop:
            if character not in moves[state]:
                moves[state][character] = len(moves)
                moves.append({})
                depth.append(depth[state] + 1)
                completes.append(None)
            state = moves[state][character]
        completes[state] = stop
    fallbacks = _fall_back(moves, completes)
    pending = [d if moves[s] else 0 for s, d in enumerate(depth)]
    for state in sorted(range(len(moves)), key=depth.__getitem__):
        if not moves[state]:  # a whole string that begins nothing longer
            pending[state] = pending[fallbacks[state]]
    return _Automaton(tuple(moves), tuple(fallbacks), tuple(completes), tuple(pending))


def _fall_back(moves: list[dict[str, int]], completes: list[str | None]) -> list[int]:
    """Link each state to its longest proper ending that is a state; its strings end here too."""
    fallbacks = [0] * len(moves)
    queue = list(moves[0].values())
    for state in queue:  # breadth first: shorter ones are linked already
        for character, child in moves[state].items():
            queue.append(child)
            link = fallbacks[state]
            while link and character not in moves[link]:
                link = fallbacks[link]
            fallbacks[child] = moves[link].get(character, 0)
            completes[child] = completes[child] or completes[fallbacks[child]]
    return fallbacks


class StopStrings:
    """Watches one text. The string that is complete first wins; of several at once, the longest."""

    __slots__ = ("_automaton", "_state")

    def __init__(self, stops: tuple[str, ...]):
        self._automaton = _build(stops)
        self._state = 0

    @property
    def num_pending(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._automaton.pending[self._state]

    def advance(self, text: str, *, may_stop: bool) -> FoundStop | None:
        """Read on. Where `may_stop` is false a string that is completed here is passed over."""
        automaton, state = self._automaton, self._state
        moves = automaton.moves
        for place, character in enumerate(text):
            after = moves[state].get(character)
            while after is None and state:
                state = automaton.fallbacks[state]
                after = moves[state].get(character)
            state = after or 0
            if may_stop and automaton.completes[state] is not None:
                self._state = state
                return FoundStop(automaton.completes[state] or "", len(text) - place - 1)
        self._state = state
        return None
