"""What the results of a study show: comparisons with the baseline, corrected for their number, ranks, and checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.studies.statistics import Ratio, compare_samples, holm, mean_ranks

from .places import CONTENDERS, PLACES
from .study import Cell

BASELINE = "bsp"


class Key(NamedTuple):
    """What is compared with the baseline, and where."""

    place: str
    contender: str
    batches: str
    measure: str


class Comparison(NamedTuple):
    """A comparison with the baseline."""

    # the contender's results divided by the baseline's, with the interval; below 1 if they are better
    ratio: Ratio
    # True if the difference remains significant after Holm's correction over all comparisons
    significant: bool
    never: int  # number of seeds with which the contender does not reach the target
    baseline_never: int  # number of seeds with which the baseline does not reach the target

    @property
    def verdict(self) -> str:
        """ "better", "worse", "tie", or "neither" if neither the contender nor the baseline reaches the target."""
        if self.never and self.baseline_never and self.ratio.tie:
            return "neither"
        if self.ratio.tie or not self.significant:
            return "tie"
        return "better" if self.ratio.ratio < 1 else "worse"

    @property
    def text(self) -> str:
        """The comparison as the text of a table: the ratio with its interval, or the verdict in a word."""
        if self.verdict == "neither":
            return "never, both"
        if self.ratio.ratio == math.inf:
            return "never"
        if self.ratio.ratio == 0:
            return "only it"
        return str(self.ratio) + (" tie" if self.verdict == "tie" else "")


def values(cells: Iterable[Cell], batches: str, measure: str) -> dict[str, dict[str, list[float]]]:
    """Return the results with each seed, by place and contender."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        found.setdefault(cell.place, {})[cell.contender] = cell.found[batches][measure].values
    return {place: found[place] for place in PLACES if place in found}


def comparisons(
    cells: Sequence[Cell], batches: Sequence[str], measures: Sequence[str], baseline: str = BASELINE
) -> dict[Key, Comparison]:
    """Compare every other contender with the baseline, and correct for the number of these comparisons."""
    ratios: dict[Key, tuple[Ratio, int, int]] = {}
    for size in batches:
        for measure in measures:
            for place, results in values(cells, size, measure).items():
                base = results[baseline]
                for contender in CONTENDERS:
                    if contender != baseline and contender in results:
                        ours = results[contender]
                        key = Key(place, contender, size, measure)
                        ratios[key] = compare_samples(ours, base), _never(ours), _never(base)
    significant = holm({key: ratio.p for key, (ratio, _, _) in ratios.items()})
    return {
        key: Comparison(ratio, key in significant, never, baseline_never)
        for key, (ratio, never, baseline_never) in ratios.items()
    }


def ranks(cells: Sequence[Cell], batches: Sequence[str], measure: str) -> dict[str, float]:
    """Return the mean rank of each contender over places, sizes of the batches and seeds. "Never" is the last."""
    total: dict[str, list[float]] = {}
    for size in batches:
        for results in values(cells, size, measure).values():
            for contender, rank in mean_ranks(results).items():
                total.setdefault(contender, []).append(rank)
    return {contender: sum(found) / len(found) for contender, found in total.items()}


def check_inequality(
    cells: Sequence[Cell], batches: Sequence[str], measures: Sequence[str]
) -> tuple[int, list[tuple[Key, Ratio]]]:
    """Compare "steady 4x" with "steady 2x" under each contender: more inequality must not help.

    Return the number of comparisons, and those in which more inequality helps by more than the noise.
    """
    count = 0
    ratios: dict[Key, Ratio] = {}
    for size in batches:
        for measure in measures:
            found = values(cells, size, measure)
            for workers in (4, 16):
                less, more = (found.get(f"steady {x}x, {workers} workers", {}) for x in (2, 4))
                for contender in less.keys() & more.keys():
                    count += 1
                    key = Key(f"{workers} workers", contender, size, measure)
                    ratios[key] = compare_samples(more[contender], less[contender])
    significant = holm({key: ratio.p for key, ratio in ratios.items()})
    helped = [(key, ratio) for key, ratio in ratios.items() if key in significant and ratio.high < 1]
    return count, sorted(helped, key=lambda item: item[1].ratio)


def _never(results: Sequence[float]) -> int:
    return sum(map(math.isinf, results))
