"""Figures 10 and 11 of SpecSync: other sync models, unequal machines, and other numbers of machines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from paceline.cli.console import TellShare
from paceline.sim import Cluster

from ..curves import draw_curves
from ..exhibit import Exhibit, Made, Options, beside, less, ratio, seconds
from ..training import TrainingOutcome, medians, run_all
from .convergence import runs_of
from .workloads import CIFAR_10, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

FIGURE_10 = {"BSP": "bsp", "SSP(3)": "ssp:staleness=3", "ASP": "asp", "SpecSync": "spec-sync"}
FIGURE_11 = {"ASP": "asp", "SpecSync": "spec-sync"}
SIZES = (20, 30, 40)
NOTE = f"All models use the learning rate {CIFAR_10.common_rate:g}; the results are those of one seed."


def figure_10(options: Options, tell: TellShare) -> Made:
    """Compare the loss over time under BSP, SSP, ASP and SpecSync on both clusters."""
    few = msgspec.structs.replace(options, seeds=1)
    clusters = {"Cluster 1": CIFAR_10.cluster(), "Cluster 2": Cluster.preset("spec-sync-2")}
    found: dict[str, list[TrainingOutcome]] = {}
    for number, (name, cluster) in enumerate(clusters.items()):
        found[name] = run_all(
            runs_of(CIFAR_10, FIGURE_10, few, cluster),
            lambda done, of, what, n=number: tell(what, (n + done / max(1, of)) / 2),  # type: ignore[misc]
        )
    times = {name: medians(outcomes, lambda o: o.reached_s) for name, outcomes in found.items()}
    rows = {
        label: [
            (None, text)
            for name in clusters
            for text in (seconds(times[name][label]), ratio(times[name]["ASP"], times[name][label]))
        ]
        for label in FIGURE_10
    }
    columns = [text for name in clusters for text in (f"s,\n{name}", f"speed-up\nover ASP,\n{name}")]

    def draw() -> Figure:
        from paceline.look.timelines import new_figure

        figure = new_figure(11.0, 4.4)
        for axes, (name, outcomes) in zip(figure.subplots(1, 2), found.items(), strict=True):
            draw_curves(axes, outcomes, f"SpecSync, Fig. 10: {name}")
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Fig. 10: time to convergence", rows, columns)],
        figure=draw,
        data={name: {o.run.label: o.values for o in outcomes} for name, outcomes in found.items()},
        notes=[
            NOTE,
            "The paper prints no numbers for this figure, nor the bound of SSP; ours is 3. It says that the speed-up "
            "of SpecSync over ASP is smaller on Cluster 2 than on Cluster 1.",
        ],
    )


def figure_11(options: Options, tell: TellShare) -> Made:
    """Compare SpecSync with ASP on 20, 30 and 40 machines: time to the target, and loss after the same time."""
    few = msgspec.structs.replace(options, seeds=1)
    found: dict[int, dict[str, TrainingOutcome]] = {}
    for number, size in enumerate(SIZES):
        outcomes = run_all(
            runs_of(CIFAR_10, FIGURE_11, few, CIFAR_10.cluster(size)),
            lambda done, of, what, n=number: tell(what, (n + done / max(1, of)) / len(SIZES)),  # type: ignore[misc]
        )
        found[size] = {outcome.run.label: outcome for outcome in outcomes}
    rows, speed_ups, gains = {}, {}, {}
    for size, by_label in found.items():
        first, second = (by_label[label].reached_s for label in FIGURE_11)
        end = min(len(outcome.values) for outcome in by_label.values()) - 1
        losses = [by_label[label].values[end] for label in FIGURE_11]
        speed_ups[size], gains[size] = first / second, 100 * (1 - losses[1] / losses[0])
        rows[f"{size} machines"] = [
            (None, seconds(first)),
            (None, seconds(second)),
            (None, ratio(first, second)),
            (None, less(losses[1], losses[0]).replace("fewer", "lower").replace("more", "higher")),
        ]
    columns = ["s, ASP", "s, SpecSync", "speed-up", "loss of SpecSync\nat the same time"]

    def draw() -> Figure:
        from paceline.look.timelines import COLOURS, new_figure

        figure = new_figure(9.0, 3.8)
        names = [str(size) for size in SIZES]
        for axes, values, what in zip(
            figure.subplots(1, 2),
            (speed_ups, gains),
            ("speed-up to the same loss", "loss improvement at the same time, %"),
            strict=True,
        ):
            axes.bar(
                names, [value if math.isfinite(value) else 0 for value in values.values()], color=COLOURS[0]
            )
            for place, value in enumerate(values.values()):
                if not math.isfinite(value):
                    axes.text(place, 0, "ASP: never", ha="center", va="bottom")
            axes.set_xlabel("machines")
            axes.set_ylabel(what)
        figure.suptitle("SpecSync, Fig. 11: SpecSync-Adaptive over ASP", fontsize=10)
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Fig. 11: 20, 30 and 40 machines", rows, columns)],
        figure=draw,
        data={size: {label: o.values for label, o in by_label.items()} for size, by_label in found.items()},
        notes=[
            NOTE,
            "The same time is that at which the first of the two runs ends. The paper prints no numbers for this "
            "figure. It says that both improvements grow with the number of machines.",
        ],
    )


EXHIBITS = (
    Exhibit(
        name="specsync-fig10",
        source=f"{PAPER}, Fig. 10",
        title="loss over time under BSP, SSP, ASP and SpecSync, on both clusters",
        differs=CIFAR_10.stand_in,
        minutes=3,
        make=figure_10,
        covers=("SpecSync, Fig. 10",),
    ),
    Exhibit(
        name="specsync-fig11",
        source=f"{PAPER}, Fig. 11",
        title="speed-up and loss on 20, 30 and 40 machines",
        differs=CIFAR_10.stand_in,
        minutes=2,
        make=figure_11,
        covers=("SpecSync, Fig. 11",),
    ),
)
