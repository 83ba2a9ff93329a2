"""Verdicts: what the kept results say about each number that a paper prints.

An exhibit measures a number as a `Measured` value with its interval. The verdict follows from the measurement and the
paper's number by the rules of `verdict`, so it changes with the results, and is never written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from paceline.studies.statistics import Difference, Estimate, Ratio

from .papers import PAPERS, Quote

SEEDS, RUNS, MACHINES = "more seeds", "runs that reach the target", "the paper's machines and data"
SMALLER = "more seeds, for an effect that is smaller than the paper's"
"""Reasons why there is no verdict: what is missing."""

NEGLIGIBLE = 0.1
"""Share of the paper's effect up to which an effect of the same sign counts as no effect."""

RESULTS = Path(__file__).parent / "results"

Word = Literal["agrees", "agrees in direction", "contradicts", "cannot tell", "not reproduced"]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """An exhibit's measurement of a number that a paper prints, in the unit of that number.

    Attributes:
        value: the measured value; None if it is unknown, for example because no run reached the target.
        low: lower end of its interval; None if the interval is open below.
        high: upper end of its interval; None if the interval is open above.
        how: under which conditions, where an exhibit measures the same number in several ways: "at its own best rate".
            The first measurement of a number follows the paper.
    """

    value: float | None
    low: float | None
    high: float | None
    how: str = ""

    @classmethod
    def exactly(cls, value: float, how: str = "") -> Measured:
        """Return a value without an interval: a count, one simulation without training, or a measured time."""
        return cls(value=value, low=value, high=value, how=how)

    @classmethod
    def of(cls, found: Ratio | Difference | Estimate, how: str = "", factor: float = 1.0) -> Measured:
        """Return an estimate, multiplied by a factor that brings it to the unit of the number."""
        value, low, high = (found.ratio if isinstance(found, Ratio) else found.value), found.low, found.high
        return cls(
            value=_finite(value * factor), low=_finite(low * factor), high=_finite(high * factor), how=how
        )

    def holds(self, again: Measured) -> bool:
        """Return True if the value of another measurement lies in this interval. An open end excludes no value."""
        if again.value is None or self.value is None:
            return again.value is self.value
        low = -math.inf if self.low is None else self.low
        return low <= again.value <= (math.inf if self.high is None else self.high)

    @classmethod
    def saved(cls, ratio: Ratio, how: str = "") -> Measured:
        """Return the saving in percent, given the ratio of the reduced amount to the full amount."""
        value, low, high = (_finite(100 * (1 - end)) for end in (ratio.ratio, ratio.high, ratio.low))
        return cls(value=value, low=low, high=high, how=how)

    def __str__(self) -> str:
        """Return the value with its interval: "1.25 [1.1, 1.4]"."""
        if self.value is None and self.low is None and self.high is None:
            return "unknown"
        value = "?" if self.value is None else _text(self.value)
        if self.value == self.low == self.high:
            return value
        low, high = ("..." if end is None else _text(end) for end in (self.low, self.high))
        return f"{value} [{low}, {high}]"


class Verdict(NamedTuple):
    """The verdict of a measurement on a number of a paper.

    Attributes:
        word: the verdict.
        reason: what is missing if the measurement allows no verdict, or why there is no measurement; "" otherwise.
    """

    word: Word
    reason: str = ""

    def __str__(self) -> str:
        """Return the verdict, with the reason."""
        return f"{self.word}: {self.reason}" if self.reason else self.word


def verdict(quote: Quote, ours: Measured | None) -> Verdict:
    """Compare a measurement with the number that a paper prints.

    - *agrees*: the interval contains a value that the paper would print as its number. If the paper reports an effect,
      the whole interval shows one; if not, the interval is within the paper's precision. With "up to", "over", "above"
      and "at least", a larger number agrees, too. With "below" and "at most", a smaller number agrees, too.
    - *agrees in direction*: the whole interval shows an effect of the same sign, but of another size.
    - *contradicts*: the whole interval shows no effect, less than a tenth of the paper's effect, or an effect of the
      other sign. A number that is not an effect, such as a count, is contradicted by any other number.
    - *cannot tell*: the interval includes both an effect and no effect, or the number depends on the paper's machines.

    Args:
        quote: the number of the paper.
        ours: the measurement; None if the number was not measured.

    >>> quote = Quote(where="Fig. 1", value=1.75, means="speed", unit="x")
    >>> def word(low: float, high: float) -> str:
    ...     return verdict(quote, Measured(value=low, low=low, high=high)).word
    >>> word(1.5, 1.8), word(1.2, 1.4), word(0.8, 0.9), word(0.9, 1.2)
    ('agrees', 'agrees in direction', 'contradicts', 'cannot tell')
    """
    if ours is None:
        return Verdict("not reproduced", quote.not_made)
    if quote.absolute:
        return Verdict("cannot tell", MACHINES)
    low = -math.inf if ours.low is None else ours.low
    high = math.inf if ours.high is None else ours.high
    seeds = RUNS if (ours.low, ours.high) == (None, None) else SEEDS
    least, most = quote.range
    holds = low <= most and (high > least if quote.bound in ("over", "above") else high >= least)
    none = quote.no_effect
    if none is None:
        return Verdict("agrees" if holds else "contradicts")
    if least < none < most:  # the paper reports that there is no effect
        within = least <= low and high <= most
        return (
            Verdict("agrees")
            if within
            else Verdict("cannot tell", seeds)
            if holds
            else Verdict("contradicts")
        )
    sign = 1 if quote.value > none or quote.bound in ("above", "over", "at least") else -1
    weakest, strongest = sorted(
        (sign * (low - none), sign * (high - none))
    )  # effect, above 0 as in the paper
    if strongest <= NEGLIGIBLE * abs(quote.value - none):
        return Verdict("contradicts")
    if weakest > 0:
        return Verdict("agrees" if holds else "agrees in direction")
    return Verdict("cannot tell", seeds if holds else SMALLER)


class Judged(NamedTuple):
    """A number of a paper with a verdict.

    Attributes:
        key: key of the number: see `Paper.claims`.
        quote: the number.
        exhibit: name of the exhibit that has measured it; "" if none has.
        ours: the measurement that follows the paper, if there is one.
        verdict: the verdict on the number.
        others: other measurements of the same number, for example with each model at its own best learning rate.
    """

    key: str
    quote: Quote
    exhibit: str = ""
    ours: Measured | None = None
    verdict: Verdict = Verdict("not reproduced")
    others: Sequence[Measured] = ()


class Kept(msgspec.Struct):
    """A kept result of an exhibit, as far as it can be compared.

    Attributes:
        exhibit: name of the exhibit.
        measured: key of a number, with the prefix of its paper -> what was measured for it.
        tables: the tables as text.
    """

    exhibit: str
    measured: dict[str, list[Measured]] = {}
    tables: list[dict[str, Any]] = []

    @classmethod
    def read(cls, file: Path) -> Kept:
        """Return a kept result, given its file of numbers."""
        return msgspec.json.decode(file.read_bytes(), type=cls)


def judged(prefix: str) -> list[Judged]:
    """Return all numbers that a paper claims, with the verdicts that follow from the kept results.

    Args:
        prefix: the name of the paper in `PAPERS`.
    """
    found: dict[str, tuple[str, list[Measured]]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        kept = Kept.read(file)
        for key, measured in kept.measured.items():
            exhibit, others = found.get(key, (kept.exhibit, []))
            found[key] = exhibit, [*others, *measured]
    rows = []
    for key, quote in PAPERS[prefix].claims().items():
        exhibit, measured = found.get(f"{prefix}/{key}", ("", []))
        ours = measured[0] if measured else None
        rows.append(Judged(key, quote, exhibit, ours, verdict(quote, ours), measured[1:]))
    return rows


def with_unit(ours: Measured | None, quote: Quote) -> str:
    """Return a measurement of a number, with its percent sign; "-" if there is none."""
    return "-" if ours is None else f"{ours} %" if quote.unit == "%" else str(ours)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: float) -> str:
    """
    >>> _text(12345.0), _text(1.234), _text(98.765)
    ('12,345', '1.23', '98.8')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
