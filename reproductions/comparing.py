"""Comparisons of sync models by the time to a target: at one learning rate, as the papers do, and at all rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median, quantiles

import msgspec
from rich.table import Table

from paceline.lab.pool import Tell
from paceline.look.timelines import COLOURS, DASHES, new_figure
from paceline.studies.statistics import Ratio, Time, difference

from .exhibit import Axes, Figure, Options, beside, seconds
from .papers import Quote
from .result_file import rounded
from .training import TrainingOutcome, TrainingRun, medians, run_all, speed_up
from .verdicts import Measured

AXIS = {"accuracy": "accuracy on the test images", "loss": "loss over the first {} training samples"}
WORST_LOSS = 2.6  # upper end of the loss axis; a network that guesses digits at random has a loss of 2.3

EVALUATION = 1000
"""Added to the seeds of the runs at the best rate, so that these runs do not profit from the choice of the rate."""

WIDENED = 6
"""Largest number of rates that are added for a label whose best rate is the smallest or the largest that was tried."""

AT_COMMON, AT_BEST = "all models at the same rate", "each model at its own best rate"
"""The two ways of comparison: that of the papers, and that of a user who tunes each model."""


class Comparison(msgspec.Struct, frozen=True):
    """The runs of several models. The label of a run names its model."""

    rate: float  # the common learning rate
    # label -> learning rate, ascending -> the outcomes with this rate, one for each seed
    by_rate: dict[str, dict[float, list[TrainingOutcome]]]
    best: dict[str, float]  # label -> the rate with the shortest median time to the target
    # the outcomes with the best rate and with other seeds, in the order of the runs
    at_best: list[TrainingOutcome]
    at_an_end: list[str]  # labels whose best rate is the smallest or the largest that was tried

    @property
    def labels(self) -> list[str]:
        """The labels, in the order of the runs."""
        return list(self.by_rate)

    @property
    def common(self) -> list[TrainingOutcome]:
        """The outcomes at the common rate."""
        return [outcome for found in self.by_rate.values() for outcome in found[self.rate]]

    @property
    def panels(self) -> dict[str, list[TrainingOutcome]]:
        """Way of comparison -> the outcomes. The first way is that of the papers."""
        return {AT_COMMON: self.common, AT_BEST: self.at_best}

    def speed_ups(
        self,
        label: str,
        reference: str,
        measure: Callable[[TrainingOutcome], Time] = lambda outcome: outcome.time,
    ) -> dict[str, Ratio]:
        """Return a model's speed-up over a reference, for each way of comparison. See `speed_up`."""
        return {how: speed_up(outcomes, label, reference, measure) for how, outcomes in self.panels.items()}

    def gains(self, label: str, reference: str) -> list[Measured]:
        """Return by how many percentage points a model's final accuracies are above a reference's, for each way."""
        found = []
        for how, outcomes in self.panels.items():
            ours, others = (
                [o.values[-1] for o in outcomes if o.run.label == name] for name in (label, reference)
            )
            found.append(Measured.of(difference(ours, others), how, 100.0))
        return found

    def measured(self, label: str, reference: str) -> list[Measured]:
        """Return the speed-up as measurements of a number of a paper."""
        return [Measured.of(ratio, how) for how, ratio in self.speed_ups(label, reference).items()]

    def table(
        self,
        title: str,
        reference: str,
        papers: Mapping[str, Quote] | None = None,
        others: Mapping[str, Callable[[str], tuple[Quote | None, str]]] | None = None,
    ) -> Table:
        """Return a table of the times to the target, with a row for each model.

        Args:
            title: title of the table.
            reference: the model with which the other models are compared.
            papers: model -> the paper's number for its speed-up.
            others: heading of a further column -> function that returns a model's two numbers, first the paper's.
        """
        others = others or {}
        reached = [medians(outcomes, lambda o: o.reached_s) for outcomes in self.panels.values()]
        rows = {}
        for label in self.labels:
            common, best = self.speed_ups(label, reference).values()
            itself = label == reference
            rows[label] = [
                (None, seconds(reached[0][label])),
                ((papers or {}).get(label), "-" if itself else str(Measured.of(common))),
                (None, f"{self.best[label]:g}" + "*" * (label in self.at_an_end)),
                (None, seconds(reached[1][label])),
                (None, "-" if itself else str(Measured.of(best))),
                *(cell(label) for cell in others.values()),
            ]
        columns = [
            f"s, rate\n{self.rate:g}",
            f"speed-up\nover {reference}",
            "own\nrate",
            "s",
            "speed-up",
            *others,
        ]
        return beside(title, rows, columns)

    def notes(self) -> list[str]:
        """Return sentences that explain the tables and the plot."""
        seeds = len(self.common) // len(self.labels)
        rates = [rate for found in self.by_rate.values() for rate in found]
        notes = [
            f'Times are medians over {seeds} seeds, speed-ups have 95 % intervals, and "never" means that half of the '
            f"runs or more missed the target. Rates from {min(rates):g} to {max(rates):g} were tried; the runs at a "
            "model's own rate have other seeds than those by which it was chosen."
        ]
        if self.at_an_end:
            notes.append(
                f"* The best rate is at the end of those that were tried: {', '.join(self.at_an_end)}."
            )
        return notes

    def plain(self) -> dict[str, object]:
        """Return the times of all runs, and the curves that are drawn on top, those of the first seed."""
        first = min(outcome.run.seed for outcome in self.common)
        return {
            "rate": self.rate,
            "seconds_by_rate": {
                label: {
                    f"{rate:g}": [rounded(o.reached_s, 6) for o in outcomes]
                    for rate, outcomes in found.items()
                }
                for label, found in self.by_rate.items()
            },
            "seconds_at_best": {
                label: [rounded(o.reached_s, 6) for o in self.at_best if o.run.label == label]
                for label in self.labels
            },
            "curves": {
                o.run.label: {
                    "times_s": [rounded(time_s, 6) for time_s in o.times_s],
                    "values": [rounded(value, 6) for value in o.values],
                }
                for o in self.common
                if o.run.seed == first
            },
        }

    def picture(self, title: str, *, by_iterations: bool = False) -> Figure:
        """Draw the curves at the common rate, and the time to the target over the learning rate.

        Args:
            title: title of the curves.
            by_iterations: True to draw the curves over the number of iterations of all workers, too.
        """
        figure = new_figure(17.0 if by_iterations else 12.0, 4.4)
        first, *others, last = figure.subplots(1, 3 if by_iterations else 2)
        self.draw(title, first, last)
        for axes in others:
            draw_curves(
                axes,
                self.common,
                "",
                along=lambda outcome: [outcome.pushed_until(time_s) for time_s in outcome.times_s],
                along_name="iterations of all workers",
            )
        return figure

    def draw(self, title: str, left: Axes, right: Axes) -> None:
        """Draw the curves at the common rate on the left, and the time to the target over the rate on the right."""
        draw_curves(left, self.common, f"{title}, rate {self.rate:g}")
        self._draw_rates(right)

    def _draw_rates(self, axes: Axes) -> None:
        """Draw the median time over the learning rate, with the quartiles. Rates that miss the target are left out."""
        drawn = []
        rates = sorted({rate for found in self.by_rate.values() for rate in found})
        axes.set(xscale="log", xlim=(rates[0] / 1.2, rates[-1] * 1.2))
        for number, (label, found) in enumerate(self.by_rate.items()):
            quartiles = {
                rate: _quartiles([o.reached_s for o in outcomes]) for rate, outcomes in found.items()
            }
            shown = {rate: each for rate, each in quartiles.items() if math.isfinite(each[1])}
            colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS)]
            drawn.append(medians := [each[1] for each in shown.values()])
            axes.plot(list(shown), medians, marker="o", color=colour, linestyle=dashes, label=label)
            worst = max((o.time_s for outcomes in found.values() for o in outcomes), default=0.0)
            low, _, high = zip(*shown.values(), strict=True) if shown else ((), (), ())
            axes.fill_between(
                list(shown), low, [min(each, worst) for each in high], color=colour, alpha=0.15, linewidth=0
            )
        axes.axvline(self.rate, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=8)
        axes.set_xticks([], minor=True)
        axes.set(xlabel="learning rate", ylabel="virtual seconds to the target", ylim=(0, None))
        reached = "medians and quartiles; where a line ends, the target is missed"
        axes.set_title(reached if any(drawn) else "the target is missed at every rate", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=True, fontsize=7.5)


def compare(
    runs: Sequence[TrainingRun],
    rates: Sequence[float],
    options: Options,
    tell: Tell,
    at_one_rate: Collection[str] = (),
) -> Comparison:
    """Execute runs at their common learning rate, at other rates, and at the best rate of each label.

    If a label's best rate is the smallest or the largest rate, half or twice this rate is tried, too, and so on. The
    runs at the best rate have other seeds than the runs by which it was chosen, so the choice does not favor them.

    Args:
        runs: the runs, with the common learning rate: for each label, one run per seed.
        rates: other learning rates to try.
        options: whether other rates are tried at all.
        tell: progress callback.
        at_one_rate: labels for which no other rate is tried.
    """
    rate = runs[0].learning_rate
    first = sorted({rate, *rates})
    by_rate: dict[str, dict[float, list[TrainingOutcome]]] = {run.label: {} for run in runs}
    swept = [label for label in by_rate if options.sweeps and label not in at_one_rate]
    wanted = {label: tuple(first) if label in swept else (rate,) for label in by_rate}
    done = 0.0
    while wanted:
        tried = [
            msgspec.structs.replace(run, learning_rate=each)
            for run in runs
            for each in wanted.get(run.label, ())
        ]
        share, done = (0.7 - done) / 2, done + (0.7 - done) / 2

        def told(what: str, part: float, begun: float = done - share, share: float = share) -> None:
            tell(f"rates of {what}", begun + share * part)

        for outcome in run_all(tried, told):
            by_rate[outcome.run.label].setdefault(outcome.run.learning_rate, []).append(outcome)
        wanted = {
            label: beyond
            for label, found in by_rate.items()
            if label in swept and len(found) < len(first) + WIDENED and (beyond := _beyond(found))
        }
    best = {label: _best_rate(found) for label, found in by_rate.items()}
    at_best = run_all(
        [
            msgspec.structs.replace(run, learning_rate=best[run.label], seed=run.seed + EVALUATION)
            for run in runs
            if run.label in swept
        ],
        lambda what, part: tell(f"{what} at its best rate", 0.7 + 0.3 * part),
    )
    in_order = {label: dict(sorted(found.items())) for label, found in by_rate.items()}
    at_best += [each for label in by_rate if label not in swept for each in by_rate[label][rate]]
    at_an_end = [label for label, found in by_rate.items() if label in swept and _beyond(found)]
    return Comparison(rate, in_order, best, at_best, at_an_end)


def _best_rate(found: Mapping[float, Sequence[TrainingOutcome]]) -> float:
    """Return the rate with the shortest median time. If several rates have this time, the middle rate wins."""
    middle = median(map(math.log, found))
    return min(
        found,
        key=lambda rate: (median(each.slowness for each in found[rate]), abs(math.log(rate) - middle)),
    )


def _beyond(found: Mapping[float, Sequence[TrainingOutcome]]) -> tuple[float, ...]:
    """Return the next rate beyond the best rate if the best rate is the smallest or the largest that was tried."""
    best = _best_rate(found)
    return (best / 2,) * (best == min(found)) or (best * 2,) * (best == max(found))


def draw_curves(
    axes: Axes,
    outcomes: Sequence[TrainingOutcome],
    title: str,
    *,
    along: Callable[[TrainingOutcome], Sequence[float]] = lambda outcome: outcome.times_s,
    along_name: str = "virtual seconds",
) -> None:
    """Draw one line per run. A run's label determines its color and line style; the first seed is drawn on top.

    Args:
        axes: axes on which the lines are drawn.
        outcomes: outcomes of runs with the same target.
        title: title of the axes.
        along: function that returns the position of each evaluation on the x axis.
        along_name: label of the x axis.
    """
    labels = list(dict.fromkeys(outcome.run.label for outcome in outcomes))
    target = outcomes[0].run.target
    drawn: set[str] = set()
    for outcome in outcomes:
        label = outcome.run.label
        number, first = labels.index(label), label not in drawn
        drawn.add(label)
        axes.plot(
            along(outcome),
            # If a run diverges, its line leaves the plot at the top.
            [min(value, 2 * WORST_LOSS) for value in outcome.values],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[number // len(COLOURS)],
            alpha=1.0 if first else 0.25,
            linewidth=1.6 if first else 0.8,
            zorder=2 if first else 1,
            label=label if first else None,
        )
    axes.axhline(target.value, color="black", linewidth=0.8, linestyle=":")
    axes.set(ylim=(0, WORST_LOSS if target.measure == "loss" else 1), xlabel=along_name)
    axes.set_ylabel(AXIS[target.measure].format(outcomes[0].run.problem.loss_count))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=True, fontsize=7.5)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = quantiles([min(value, 1e9) for value in values], n=4, method="inclusive")
    return tuple(math.inf if value > 1e8 else value for value in (low, middle, high))  # type: ignore[return-value]
