"""Figures 8, 10 and 11 of FluentPS: accuracy over time on the stand-ins of its three clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from paceline.cli.console import TellShare
from paceline.sim import Cluster

from ..curves import draw_curves
from ..exhibit import Exhibit, Made, Options, beside, seconds
from ..papers import FLUENT_PS
from ..training import Target, TrainingOutcome, TrainingRun, common_and_tuned, medians, run_all
from .machines import MACHINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

PAPER = str(FLUENT_PS)
ACCURACIES = FLUENT_PS.tables["table4-accuracy"]
Notes = Callable[[Mapping[str, float], Mapping[str, float]], list[str]]
TARGET = Target("accuracy", 0.9, in_a_row=2)
COMMON_RATE = 0.2  # with the push scale 1/n
RATES = (0.1, 0.2, 0.4, 0.8)
ITERATIONS = 200
ITERATIONS_OF_128 = 60
ITERATIONS_OF_32 = 150
SCHEMES = {
    "BSP": "bsp",
    "ASP": "asp:push_scale=1/n",
    "SSP(3)": "ssp:staleness=3,push_scale=1/n",
    "PSSP(3, 0.1)": "pssp:staleness=3,probability=0.1,push_scale=1/n",
    "PSSP(3, 0.3)": "pssp:staleness=3,probability=0.3,push_scale=1/n",
    "PSSP(3, 0.5)": "pssp:staleness=3,probability=0.5,push_scale=1/n",
}
PAPER_ACCURACY = {
    label: ACCURACIES.cell("AlexNet on CIFAR-10", f"soft P={p}")
    for label, p in (
        ("ASP", "0"),
        ("SSP(3)", "1"),
        ("PSSP(3, 0.1)", "0.1"),
        ("PSSP(3, 0.3)", "0.3"),
        ("PSSP(3, 0.5)", "0.5"),
    )
}


def compare(
    figure: str, preset: str, notes: Notes, iterations: int, options: Options, tell: TellShare
) -> Made:
    """Compare the accuracy over time on a cluster, with the paper's push scale, 1/n."""
    cluster = Cluster.preset(preset)
    runs = [
        TrainingRun(
            label=label,
            cluster=cluster,
            sync=sync,
            target=TARGET,
            until_target=False,
            learning_rate=COMMON_RATE,
            batch_size=8,
            iterations=3 if options.quick else iterations,
            seed=seed,
            every_s=1.0,
        )
        for label, sync in SCHEMES.items()
        for seed in range(1 if options.quick else options.seeds)
    ]
    grid = [(rate, 0.0) for rate in (RATES[1:2] if options.quick else RATES)]
    common, tuned, best = common_and_tuned(runs, grid, tell)
    measures = [
        (medians(found, lambda o: o.reached_s), medians(found, lambda o: o.values[-1]))
        for found in (common, tuned)
    ]
    ends = medians(common, lambda o: o.time_s)
    rows = {}
    for label in SCHEMES:
        (common_s, own_s), (common_final, own_final) = zip(*measures, strict=True)
        rows[label] = [
            (None, f"{ends[label]:.0f}"),
            (None, seconds(common_s[label])),
            (PAPER_ACCURACY.get(label) if figure == "Fig. 10" else None, f"{common_final[label]:.3f}"),
            (None, f"{best[label][0]:g}"),
            (None, seconds(own_s[label])),
            (None, f"{own_final[label]:.3f}"),
        ]
    columns = [
        "s, all",
        f"s to {TARGET.value:.0%},\nrate {COMMON_RATE:g}",
        "final",
        "own\nrate",
        f"s to\n{TARGET.value:.0%}",
        "final",
    ]

    def draw() -> Figure:
        from paceline.look.timelines import new_figure

        figure = new_figure(11.0, 4.4)
        for axes, found, title in zip(
            figure.subplots(1, 2),
            (common, tuned),
            (f"all models at rate {COMMON_RATE:g}", "each model at its own best rate"),
            strict=True,
        ):
            draw_curves(axes, found, title)
        return figure

    return Made(
        tables=[
            beside(f"{PAPER}, {figure}: {cluster.workers} workers, {iterations} iterations", rows, columns)
        ],
        figure=draw,
        data={
            f"{o.run.label}, rate {o.run.learning_rate:g}, seed {o.run.seed}": o.values
            for o in (*common, *tuned)
        },
        notes=notes(ends, measures[0][1]),
    )


def figure_10(options: Options, tell: TellShare) -> Made:
    """Compare the models with 64 workers and one server."""
    return compare("Fig. 10", "fluent-ps-64", notes_10, ITERATIONS, options, tell)


def notes_10(ends: Mapping[str, float], finals: Mapping[str, float]) -> list[str]:
    """Return the notes of Fig. 10, given the models' times for all iterations and their final accuracies."""
    quoted = FLUENT_PS.numbers
    return [
        f"The paper's accuracies are from Table IV, with AlexNet on CIFAR-10 after {quoted['fig10-iterations']} "
        "iterations.",
        f"PSSP(3, 0.5) takes all its iterations {ends['SSP(3)'] / ends['PSSP(3, 0.5)']:.2f} times as fast as "
        f"SSP(3); in the paper, {quoted['pssp-faster']} times. Its accuracy differs from that of ASP by "
        f"{100 * (finals['PSSP(3, 0.5)'] - finals['ASP']):+.1f} percentage points.",
    ]


def figure_11(options: Options, tell: TellShare) -> Made:
    """Compare the models with 128 workers and 8 servers."""
    few = msgspec.structs.replace(options, seeds=1)
    return compare("Fig. 11", "fluent-ps-128", notes_11, ITERATIONS_OF_128, few, tell)


def notes_11(ends: Mapping[str, float], finals: Mapping[str, float]) -> list[str]:
    """Return the notes of Fig. 11, as `notes_10`."""
    best = max(finals["PSSP(3, 0.3)"], finals["PSSP(3, 0.5)"])
    return [
        "The results are those of one seed.",
        f"The higher final accuracy of PSSP with P = 0.3 and 0.5 differs from that of ASP by "
        f"{100 * (best - finals['ASP']):+.1f} percentage points. The paper reports "
        f"{FLUENT_PS.numbers['pssp-more-accurate']} more.",
    ]


def figure_8(options: Options, tell: TellShare) -> Made:
    """Compare the accuracy over time under SSP(2) with the soft barrier and with lazy execution, 32 workers."""
    cluster = Cluster.preset("fluent-ps-32")
    runs = [
        TrainingRun(
            label=execution,
            cluster=cluster,
            sync=f"ssp:staleness=2,push_scale=1/n,execution={execution}",
            target=TARGET,
            until_target=False,
            learning_rate=COMMON_RATE,
            batch_size=8,
            iterations=3 if options.quick else ITERATIONS_OF_32,
            seed=seed,
            every_s=1.0,
        )
        for execution in ("soft", "lazy")
        for seed in range(1 if options.quick else options.seeds)
    ]
    outcomes = run_all(runs, lambda done, of, what: tell(what, done / max(1, of)))
    ends = medians(outcomes, lambda o: o.time_s)
    reached = medians(outcomes, lambda o: o.reached_s)
    finals = medians(outcomes, lambda o: o.values[-1])
    staleness = medians(outcomes, lambda o: o.mean_staleness)
    rows = {
        label: [
            (None, f"{ends[label]:.0f}"),
            (None, seconds(reached[label])),
            (
                ACCURACIES.cell("ResNet-56 on CIFAR-10", f"{label} P=1"),
                f"{finals[label]:.3f}",
            ),
            (None, f"{staleness[label]:.1f}"),
        ]
        for label in ends
    }
    columns = ["s, all", f"s to {TARGET.value:.0%}", "final", "staleness\n(updates)\nmean"]

    def draw() -> Figure:
        from paceline.look.timelines import new_figure

        figure = new_figure(8.0, 4.4)
        draw_curves(figure.subplots(), outcomes, "FluentPS, Fig. 8: SSP(2), 32 workers")
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Fig. 8: the soft barrier and lazy execution", rows, columns)],
        figure=draw,
        data=[_plain(outcome) for outcome in outcomes],
        notes=[
            f"Lazy execution takes all iterations {ends['soft'] / ends['lazy']:.2f} times as fast as the soft "
            f"barrier; in the paper, {FLUENT_PS.numbers['lazy-faster-resnet']} times. The paper's accuracies are "
            "those of ResNet-56 on CIFAR-10 in Table IV.",
        ],
    )


def _plain(outcome: TrainingOutcome) -> dict[str, object]:
    run = outcome.run
    return {
        "label": run.label,
        "sync": run.sync,
        "seed": run.seed,
        "times_s": outcome.times_s,
        "accuracies": outcome.values,
        "time_s": outcome.time_s,
        "mean_staleness": outcome.mean_staleness,
    }


DIFFERS = f"DigitsNet on scikit-learn's digits replaces {{}}, with fewer iterations. {MACHINES}"

EXHIBITS = (
    Exhibit(
        name="fluentps-fig8",
        source=f"{PAPER}, Fig. 8",
        title="accuracy over time with the soft barrier and with lazy execution",
        differs=DIFFERS.format("ResNet-56 on CIFAR-10"),
        minutes=2,
        make=figure_8,
        covers=("FluentPS, Fig. 8",),
    ),
    Exhibit(
        name="fluentps-fig10",
        source=f"{PAPER}, Fig. 10",
        title="accuracy over time with 64 workers: BSP, SSP, ASP, PSSP",
        differs=DIFFERS.format("AlexNet on CIFAR-10"),
        minutes=15,
        make=figure_10,
        covers=("FluentPS, Fig. 10",),
    ),
    Exhibit(
        name="fluentps-fig11",
        source=f"{PAPER}, Fig. 11",
        title="accuracy over time with 128 workers: BSP, SSP, ASP, PSSP",
        differs=DIFFERS.format("AlexNet on CIFAR-10"),
        minutes=15,
        make=figure_11,
        covers=("FluentPS, Fig. 11",),
    ),
)
