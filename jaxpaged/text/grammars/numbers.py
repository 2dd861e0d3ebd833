"""JSON numbers between bounds, as expressions over their digits.

Numbers have at most 15 digits before the point, so that every reader takes them exactly.
"""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from jaxpaged.text.grammars.expressions import (
    Expression,
    Repeat,
    Text,
    chars,
    choice,
    one_of,
    optional,
    seq,
)

MAX_DIGITS = 15
LARGEST = 10**MAX_DIGITS - 1
_DIGIT = chars((0x30, 0x39))
_NONZERO = chars((0x31, 0x39))
_MINUS = Text("-")
_NATURAL = choice([Text("0"), seq(_NONZERO, Repeat(_DIGIT, 0, MAX_DIGITS - 1))])
_FRACTION = seq(Text("."), Repeat(_DIGIT, 1, MAX_DIGITS))
_EXPONENT = seq(one_of("eE"), optional(one_of("+-")), Repeat(_DIGIT, 1, 2))

INTEGER = seq(optional(_MINUS), _NATURAL)
NUMBER = seq(INTEGER, optional(_FRACTION), optional(_EXPONENT))


def integers(low: int | None, high: int | None) -> Expression | None:
    """Whole numbers from `low` to `high`, both included; None where there is none."""
    low = -LARGEST if low is None else max(low, -LARGEST)
    high = LARGEST if high is None else min(high, LARGEST)
    if low > high:
        return None
    options: list[Expression] = []
    if high >= 0:
        options += _naturals(max(low, 0), high)
    if low < 0:
        options += [seq(_MINUS, one) for one in _naturals(max(-high, 1), -low)]
    return choice(options)


def decimals(
    low: Decimal | None, high: Decimal | None, *, opens: bool, closes: bool, places: int | None
) -> Expression | None:
    """Numbers from `low` to `high` without exponent; None where none can be written so.

    Args:
        opens: `low` itself is excluded. closes: `high` itself is excluded.
        places: most digits behind the point; None leaves `MAX_DIGITS`.
    """
    most = MAX_DIGITS if places is None else places
    exact = max([0, *(-int(b.as_tuple().exponent) for b in (low, high) if b is not None)])
    options: list[Expression] = []
    zero = Decimal(0)
    has_zero = high is None or high > 0 or (high == 0 and not closes)
    if has_zero:
        begin, excludes = (zero, False) if low is None or low < 0 else (low, opens)
        options += _positive(begin, high, excludes, closes, exact, most)
    if low is None or low < 0:
        below = None if low is None else -low
        begin, excludes = (zero, False) if has_zero or high is None else (-high, closes)
        negative = _positive(begin, below, excludes, opens, exact, most)
        options += [seq(_MINUS, one) for one in negative]
    return choice(options) if options else None


def _positive(
    low: Decimal, high: Decimal | None, opens: bool, closes: bool, exact: int, most: int
) -> list[Expression]:
    """From numbers with few digits behind the point to those that the bounds need.

    A number with `k` digits there may go on as it likes where the next larger one is inside too;
    what it may go on to is not written again with more digits.
    """
    options: list[Expression] = []
    begin = end = 0  # in units of the last digit: from `begin` on all below `end` are written
    for k in range(
        (most if opens else min(exact + 1, most)) + 1
    ):  # just above `low` is always more
        scale, begin, end = Decimal(10) ** k, begin * 10, end * 10
        first = int((low * scale).to_integral_value(ROUND_CEILING))
        first += opens and first == low * scale
        last = top = LARGEST * 10**k
        if high is not None:
            last = int((high * scale).to_integral_value(ROUND_FLOOR))
            top = min(top, last - 1)  # every longer number that begins with n is below n + 1
            last -= closes and last == high * scale
        for a, b in [(first, begin - 1), (end, last)] if begin < end else [(first, last)]:
            inner = min(b, top) if most > k else a - 1
            if a <= inner:
                more = Repeat(_DIGIT, 1, most - k)
                tail = seq(Text("."), more) if k == 0 else more
                options.append(seq(_with_point(a, inner, k), optional(tail)))
            if max(a, inner + 1) <= b:
                options.append(_with_point(max(a, inner + 1), b, k))
        if first <= top:
            begin, end = first, top + 1
    return options


def _with_point(first: int, last: int, k: int) -> Expression:
    """Whole numbers from `first` to `last` with a point before their last `k` digits."""
    if k == 0:
        return choice(_naturals(first, last))
    unit = 10**k
    options: list[Expression] = []
    if first // unit == last // unit:
        fraction = choice(_same_length(_padded(first % unit, k), _padded(last % unit, k)))
        return seq(Text(f"{first // unit}."), fraction)
    whole_from, whole_to = -(-first // unit), last // unit - ((last + 1) % unit != 0)
    if first % unit:
        rest = choice(_same_length(_padded(first % unit, k), "9" * k))
        options.append(seq(Text(f"{first // unit}."), rest))
    if whole_from <= whole_to:
        whole = choice(_naturals(whole_from, whole_to))
        options.append(seq(whole, Text("."), Repeat(_DIGIT, k, k)))
    if (last + 1) % unit:
        rest = choice(_same_length("0" * k, _padded(last % unit, k)))
        options.append(seq(Text(f"{last // unit}."), rest))
    return choice(options)


def _naturals(low: int, high: int) -> list[Expression]:
    """Numbers from `low` to `high`, both 0 or more, without leading zeros."""
    options: list[Expression] = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        options += _same_length(str(first), str(min(high, 10**length - 1)))
    return options


def _same_length(low: str, high: str) -> list[Expression]:
    """Digit strings of one length from `low` to `high`."""
    if low == high:
        return [Text(low)] if low else [Text("")]
    if low[0] == high[0]:
        return [seq(Text(low[0]), choice(_same_length(low[1:], high[1:])))]
    size = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return [Repeat(_DIGIT, len(low), len(low))]
    options: list[Expression] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * size:
        options.append(seq(Text(low[0]), choice(_same_length(low[1:], "9" * size))))
        first += 1
    if high[1:] != "9" * size:
        options.append(seq(Text(high[0]), choice(_same_length("0" * size, high[1:]))))
        last -= 1
    if first <= last:
        digit = chars((0x30 + first, 0x30 + last))
        options.append(seq(digit, Repeat(_DIGIT, size, size)) if size else digit)
    return options


def _padded(value: int, length: int) -> str:
    return f"{value:0{length}}"
