"""A map that shows, for each kind of cluster, which sync model needs the least virtual time to reach a target.

Each place on the map stands for a cluster. Places differ in the kind and degree of inequality between workers, in
the share of an iteration spent on transfers under BSP, and in the number of workers. At each place, a network is
trained on the digits under every model, with the best learning rate for that model. The speed-up of a model over BSP
is the time to the target under BSP, divided by the time to the target under the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.table import Table

from paceline.cli.progress import TellShare
from paceline.core.lease import BatchSizing
from paceline.sim import Cluster, LogNormal, Occasional, Times, Uniform, simulate

from .exhibit import Exhibit, Made, Options
from .training import Target, TrainingRun, at_own_best, medians

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

__all__ = ["EXHIBITS", "PLACES", "Place"]

TARGET = Target("accuracy", 0.93, in_a_row=2)


class Entrant(msgspec.Struct, frozen=True):
    """One of the alternatives that are compared.

    Attributes:
        sync: sync model.
        batch: sizes of the workers' batches.
        fixed_share: part of the compute time that does not depend on the size of a batch. It matters only if batches
            are balanced.
    """

    sync: str
    batch: BatchSizing = "equal"
    fixed_share: float = 0.0


MODELS = {
    "bsp": Entrant("bsp"),
    "bsp balanced": Entrant("bsp", "balanced"),
    "bsp balanced, half fixed": Entrant("bsp", "balanced", 0.5),
    "ssp": Entrant("ssp:staleness=3"),
    "elastic-bsp": Entrant("elastic-bsp:lookahead=15"),
    "spec-sync": Entrant("spec-sync"),
    "asp": Entrant("asp"),
}
"""The alternatives, by their names in the table. The first one is the baseline."""

HANDICAPPED = "bsp balanced, half fixed"
"""The same alternative as "bsp balanced" on other machines, so only one of the two can be first."""
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
# Learning rate at which the search begins under bsp; under other models, it is divided by the number of workers.
LIKELY_RATE = 0.4
BSP_ITERATIONS = 200  # time limit of every run: the time that BSP takes for this number of iterations
BATCH = 16
BANDWIDTH_BPS = 1e9
NEAR = 1.1  # smaller factors are not significant: they also occur between runs with different seeds


class Place(msgspec.Struct, frozen=True):
    """One place on the map, which stands for a cluster.

    Attributes:
        kind: kind of inequality between workers.
        degree: degree of the inequality, as text.
        communication: share of an iteration spent on transfers if all workers are equally fast, from 0 to 1.
        workers: number of workers.
        times: compute times for each worker.
    """

    kind: str
    degree: str
    communication: float
    workers: int
    times: tuple[Times, ...]

    @property
    def cluster(self) -> Cluster:
        """The simulated cluster. For n workers, its server receives n gradients and sends n answers per iteration."""
        transfer_s = self.communication / (1 - self.communication)
        size_bytes = round(transfer_s * BANDWIDTH_BPS / 8 / (2 * self.workers))
        return Cluster(
            compute_s=self.times,
            bandwidth_bps=BANDWIDTH_BPS if size_bytes else math.inf,
            size_bytes=size_bytes,
            name=f"{self.workers} workers, {self.kind}: {self.degree}",
        )


def near(mean_s: float) -> Uniform:
    """Return compute times that vary slightly around a mean."""
    return Uniform(low=0.97 * mean_s, high=1.03 * mean_s)


def steady(factor: float) -> Callable[[int], tuple[Times, ...]]:
    """Return a function that maps a number of workers to compute times. A quarter of the workers are always slow."""
    return lambda n: tuple(near(factor if worker >= n - n // 4 else 1.0) for worker in range(n))


def jittery(sigma: float) -> Callable[[int], tuple[Times, ...]]:
    """Return a function that maps the number of workers to compute times that vary randomly."""
    return lambda n: (LogNormal(median=1.0, sigma=sigma),) * n


def pausing(factor: float) -> Callable[[int], tuple[Times, ...]]:
    """Return a function that maps the number of workers to compute times with occasional slow phases."""
    return lambda n: (Occasional(base=near(1.0), factor=factor, lasting=10.0, every=100.0),) * n


KINDS: tuple[tuple[str, str, Callable[[int], tuple[Times, ...]]], ...] = (
    ("slow quarter", "1.2 x", steady(1.2)),
    ("slow quarter", "2 x", steady(2.0)),
    ("slow quarter", "4 x", steady(4.0)),
    ("jitter", "sigma 0.1", jittery(0.1)),
    ("jitter", "sigma 0.5", jittery(0.5)),
    ("pauses", "3 x", pausing(3.0)),
    ("pauses", "10 x", pausing(10.0)),
)

PLACES = tuple(
    Place(kind, degree, communication, workers, times(workers))
    for kind, degree, times in KINDS
    for communication in (0.0, 0.5)
    for workers in (4, 16)
)


class Verdict(msgspec.Struct, frozen=True):
    """The results at one place on the map.

    Attributes:
        place: kind, degree, share of communication and number of workers of the place.
        seconds: model -> virtual seconds to the target, or None if the target was not reached.
        rates: model -> best learning rate.
        best: model that reached the target first; bsp if none did.
        speed_up: time under BSP divided by the time under the best model; a lower bound if BSP misses the target.
    """

    place: tuple[str, str, float, int]
    seconds: dict[str, float | None]
    rates: dict[str, float]
    best: str
    speed_up: float

    @property
    def factor(self) -> str:
        """The speed-up as text."""
        return f"{'>' if self.seconds['bsp'] is None else ''}{self.speed_up:.1f} x"

    def lead(self, label: str) -> float:
        """Return a model's time divided by the best model's time; infinity if the model missed the target."""
        own, best = self.seconds[label], self.seconds[self.best]
        return math.inf if own is None or best is None else own / best


def survey(places: Sequence[Place], options: Options, tell: TellShare) -> list[Verdict]:
    """Train under every model at every place. Return the results for each place."""
    rates = RATES[2:5:2] if options.quick else RATES
    patience_s = {}
    runs = []
    for place in places:
        cluster = place.cluster
        iterations = 10 if options.quick else BSP_ITERATIONS
        patience_s[place] = simulate(cluster, "bsp", iterations).time_s
        runs += [
            TrainingRun(
                label=_label(place, model),
                cluster=replace(cluster, fixed_share=entrant.fixed_share),
                sync=entrant.sync,
                batch=entrant.batch,
                target=TARGET,
                likely_rate=LIKELY_RATE if entrant.sync == "bsp" else LIKELY_RATE / place.workers,
                batch_size=BATCH,
                until_s=patience_s[place],
                seed=seed,
                every_s=2.0,
            )
            for model, entrant in MODELS.items()
            for seed in range(1 if options.quick else options.seeds)
        ]
    outcomes, best = at_own_best(runs, [(rate, 0.0) for rate in rates], tell)
    reached_s = medians(outcomes, lambda o: o.reached_s)
    verdicts = []
    for place in places:
        seconds = {model: reached_s[_label(place, model)] for model in MODELS}
        rivals = {model: time_s for model, time_s in seconds.items() if model != HANDICAPPED}
        first = min(rivals.items(), key=itemgetter(1))[0]
        verdicts.append(
            Verdict(
                (place.kind, place.degree, place.communication, place.workers),
                {model: time_s if math.isfinite(time_s) else None for model, time_s in seconds.items()},
                {model: best[_label(place, model)][0] for model in MODELS},
                first,
                min(seconds["bsp"], patience_s[place]) / min(seconds[first], patience_s[place]),
            )
        )
    return verdicts


def _label(place: Place, model: str) -> str:
    return f"{place.cluster.name}, transfers {place.communication:.0%}: {model}"


def make_map(options: Options, tell: TellShare) -> Made:
    """Make the map of the fastest models."""
    places = PLACES[:2] if options.quick else PLACES
    verdicts = survey(places, options, tell)
    table = Table(
        title=f"virtual seconds to {TARGET.value:.0%} accuracy, with each model at its own best learning rate",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("unequal by")
    for heading in ("transfers", "workers"):
        table.add_column(heading, no_wrap=True)
    for label in MODELS:
        table.add_column(label.replace("-", "-\n").replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("first", no_wrap=True)
    for verdict in verdicts:
        kind, degree, communication, workers = verdict.place
        cells = ["never" if s is None else f"{s:.0f}" for s in verdict.seconds.values()]
        first = f"{verdict.best} {verdict.factor}" if verdict.best != "bsp" else "bsp"
        first = first if verdict.seconds[verdict.best] is not None else "-"
        table.add_row(f"{kind}, {degree}", f"{communication:.0%}", str(workers), *cells, first)
    return Made(
        tables=[table],
        figure=lambda: draw_map(verdicts),
        data=verdicts,
        notes=[
            "The last column names the model that reached the target first, and its speed-up over bsp.",
            *findings(verdicts),
        ],
    )


def findings(verdicts: Sequence[Verdict]) -> list[str]:
    """Summarize the map in sentences, for each model and for each kind and degree of inequality."""
    found = []
    for label in MODELS:
        if label == HANDICAPPED:
            near = sum(verdict.lead(label) <= NEAR for verdict in verdicts)
            found.append(
                "If half of the compute time does not depend on the size of a batch, bsp balanced is at most "
                f"{NEAR - 1:.0%} slower than the fastest model in {near} of {len(verdicts)} clusters."
            )
            continue
        there = [verdict for verdict in verdicts if verdict.seconds[label] is not None]
        first = sum(verdict.best == label for verdict in there)
        close = sum(verdict.lead(label) <= NEAR for verdict in there)
        found.append(
            f"{label} is first in {first} of {len(verdicts)} clusters, and at most {NEAR - 1:.0%} slower than the "
            f"first one in {close - first} more."
            + (
                f" It does not reach the target in {len(verdicts) - len(there)} of {len(verdicts)} clusters."
                if there != verdicts
                else ""
            )
        )
    for row in dict.fromkeys(verdict.place[:2] for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.place[:2] == row]
        firsts = Counter(verdict.best for verdict in mine if verdict.seconds[verdict.best] is not None)
        models = ", ".join(
            f"{label} is first in {count} cluster{'s' * (count > 1)}"
            if number == 0
            else f"{label} in {count}"
            for number, (label, count) in enumerate(firsts.most_common())
        )
        factors = sorted(mine, key=lambda verdict: verdict.speed_up)
        found.append(
            f"{', '.join(row)}: {models or 'no model reaches the target'}. The speed-up of the fastest model over "
            f"bsp ranges from {factors[0].factor} to {factors[-1].factor}."
        )
    return found


def draw_map(verdicts: Sequence[Verdict]) -> Figure:
    """Draw the map. Rows are kinds and degrees of inequality; columns are shares of transfers and worker counts."""
    from paceline.report.canvas import COLOURS, new_figure

    rows = list(dict.fromkeys(verdict.place[:2] for verdict in verdicts))
    columns = list(dict.fromkeys(verdict.place[2:] for verdict in verdicts))
    figure = new_figure(10.0, 1.6 + 0.62 * len(rows))
    axes = figure.subplots()
    shown = [label for label in MODELS if label != HANDICAPPED]
    colors = dict(zip(shown, ("#DDDDDD", *COLOURS), strict=False))
    for verdict in verdicts:
        x, y = columns.index(verdict.place[2:]), rows.index(verdict.place[:2])
        strength = min(1.0, 0.25 + 0.4 * math.log2(max(1.0, min(verdict.speed_up, 4.0))))
        axes.add_patch(_square(x, y, colors[verdict.best], 0.6 if verdict.best == "bsp" else strength))
        text = "bsp" if verdict.best == "bsp" else f"{verdict.best}\n{verdict.factor}"
        axes.text(x, y, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [f"transfers {share:.0%}\n{n} workers" for share, n in columns])
    axes.set_yticks(range(len(rows)), [f"{kind}: {degree}" for kind, degree in rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(f"first model to reach {TARGET.value:.0%}, and its speed-up over BSP", pad=14)
    return figure


def _square(x: int, y: int, color: str, alpha: float) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, facecolor=color, alpha=alpha)


EXHIBITS = (
    Exhibit(
        name="map",
        source="no paper",
        title="the fastest model, depending on how the workers' speeds differ and on the time spent on transfers",
        differs="Simulated: DigitsNet on scikit-learn's digits. Transfers take the stated share of an iteration.",
        minutes=50,
        make=make_map,
    ),
)
