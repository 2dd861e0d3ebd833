"""Why llguidance does not go on, in plain words."""

import re

from llguidance import LLMatcher

MAX_WAYS = 5_000  # in which an answer may go on at a place, as rules tell them apart
_TOO_COMPLEX = re.compile(r"TooComplex|too many|\bitems\b", re.IGNORECASE)


def is_too_complex(matcher: LLMatcher) -> bool:
    """A matcher has failed, and not for what the answer says."""
    return matcher.is_error() and _TOO_COMPLEX.search(matcher.get_error()) is not None


def no_next_token(matcher: LLMatcher) -> str:
    """Why a matcher that has failed lets no token follow."""
    said = matcher.get_error().split("\n", 1)[0]
    if "row has" in said:
        return (
            f"it may go on in too many ways at once (over {MAX_WAYS} alternatives of a rule; as "
            "a terminal, in capitals, they count as one)"
        )
    if is_too_complex(matcher):
        return "what may come takes too long to find (many patterns are open at once)"
    if said.startswith("NoExtension"):
        return "its rules lead only back to themselves or to what nothing matches"
    return said[:200]
