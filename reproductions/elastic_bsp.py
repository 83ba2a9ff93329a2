"""A figure from the ElasticBSP paper (Zhao et al., Machine Learning 2021, section 6.2): accuracy during training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from paceline.cli.progress import TellShare
from paceline.sim import Cluster, simulate
from paceline.sync.actions import PublishPlan
from paceline.zipline import solve_periodic

from .curves import draw_curves
from .exhibit import Exhibit, Made, Options, beside, ratio, seconds
from .papers import ELASTIC_BSP
from .training import Target, TrainingOutcome, TrainingRun, common_and_tuned, medians

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

PAPER = str(ELASTIC_BSP)
TARGET = Target("accuracy", 0.93, in_a_row=2)
RATES = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1)
COMMON_RATE = ELASTIC_BSP.numbers["fig14-rate"].value
MOMENTUM = 0.9
EPOCHS = int(ELASTIC_BSP.numbers["fig14-epochs"].value)
LOOKAHEADS = (15, 30, 60, 120, 240, 480, 960)
SCHEMES = {
    "BSP": "bsp",
    "ASP": "asp",
    "SSP(3)": "ssp:staleness=3",
    "DSSP(3, 15)": "dssp:lower=3,upper=15",
    **{f"ElasticBSP({r})": f"elastic-bsp:lookahead={r}" for r in LOOKAHEADS},
}
BATCH = 32
STEPS_PER_EPOCH = 1437 // 4 // BATCH  # if each of the 4 workers uses a quarter of the images


def cluster() -> Cluster:
    """Return the paper's cluster: 4 machines that exchange messages as large as VGG-16."""
    return Cluster.preset("elastic-bsp")


def _runs(options: Options) -> list[TrainingRun]:
    machines = cluster()
    schemes = dict(list(SCHEMES.items())[:5]) if options.quick else SCHEMES
    return [
        TrainingRun(
            label=label,
            cluster=machines,
            sync=sync,
            target=TARGET,
            until_target=False,
            learning_rate=COMMON_RATE,
            momentum=MOMENTUM,
            batch_size=BATCH,
            iterations=STEPS_PER_EPOCH * (2 if options.quick else EPOCHS),
            seed=seed,
            every_s=5.0,
        )
        for label, sync in schemes.items()
        for seed in range(1 if options.quick else options.seeds)
    ]


def figure_14(options: Options, tell: TellShare) -> Made:
    """Compare the models' accuracy over time, at the paper's learning rate and at the best rate for each model."""
    runs = _runs(options)
    grid = [(rate, MOMENTUM) for rate in (RATES[1:3] if options.quick else RATES)]
    common, tuned, rates = common_and_tuned(runs, grid, tell)
    rows = {}
    bests = [medians(found, lambda o: o.reached_s) for found in (common, tuned)]
    ends = medians(tuned, lambda o: o.time_s)
    accuracies = [medians(found, lambda o: o.values[-1]) for found in (common, tuned)]
    planning_ms = {
        label: _planning_ms(lookahead)
        for lookahead in LOOKAHEADS
        if (label := f"ElasticBSP({lookahead})") in bests[0]
    }
    supersteps = {label: _supersteps(sync) for label, sync in SCHEMES.items() if label in bests[0]}
    for label in bests[0]:
        cells = [
            seconds(bests[0][label]),
            f"{accuracies[0][label]:.1%}",
            f"{rates[label][0]:g}",
            seconds(bests[1][label]),
            f"{accuracies[1][label]:.1%}",
            f"{ends[label]:.0f}",
            supersteps[label],
            f"{planning_ms[label]:.3f}" if label in planning_ms else "-",
        ]
        rows[label] = [(None, cell) for cell in cells]
    columns = [
        f"s to {TARGET.value:.0%},\nrate {COMMON_RATE:g}",
        "final",
        "own\nrate",
        f"s to\n{TARGET.value:.0%}",
        "final",
        "s, all\nepochs",
        "steps per\nsuperstep",
        "ms to\nplan",
    ]
    return Made(
        tables=[beside(f"{PAPER}, Fig. 14: {EPOCHS} epochs, medians over the seeds", rows, columns)],
        figure=lambda: _draw(common, tuned),
        data={"common": [_plain(o) for o in common], "tuned": [_plain(o) for o in tuned]},
        notes=_notes(bests, accuracies, planning_ms),
    )


SUPERSTEPS_OF = 3000  # iterations of each worker in the simulation that measures the length of supersteps


def _supersteps(sync: str) -> str:
    """Return, as text, the mean number of iterations per superstep in a simulation; "-" if the model has none."""
    if sync == "bsp":
        return "1"
    if not sync.startswith("elastic"):
        return "-"
    result = simulate(cluster(), sync, SUPERSTEPS_OF, record=True)
    plans = sum(
        isinstance(action, PublishPlan) for entry in result.trace[-1].entries for action in entry.actions
    )
    return f"{SUPERSTEPS_OF / plans:.1f}"


def _planning_ms(lookahead: int) -> float:
    """Return the median time in milliseconds that this machine takes to compute one plan."""
    last, interval = np.array([1.0, 1.1, 1.2, 1.3]), np.array([0.5, 0.51, 0.52, 1.5])
    times_s = []
    for _ in range(200):
        begun_s = time.perf_counter()
        solve_periodic(last, interval, lookahead)
        times_s.append(time.perf_counter() - begun_s)
    return median(times_s) * 1000


def _notes(
    bests: Sequence[dict[str, float]], accuracies: Sequence[dict[str, float]], planning_ms: dict[str, float]
) -> list[str]:
    notes = []
    for times_s, final, what in zip(
        bests,
        accuracies,
        (f"All models at rate {COMMON_RATE:g}", "Each model at its own best rate"),
        strict=True,
    ):
        elastic_s, elastic_final = (
            median(found[label] for label in planning_ms) for found in (times_s, final)
        )
        notes.append(
            f"{what}: BSP reaches an accuracy of {TARGET.value:.0%} {_after(times_s['BSP'])}, and ElasticBSP (median "
            f"over R) {_after(elastic_s)}. The ratio is {ratio(times_s['BSP'], elastic_s)}; in the paper, it is "
            f"{ELASTIC_BSP.numbers['faster-than-bsp']}. The final accuracy of ElasticBSP differs from that of BSP by "
            f"{100 * (elastic_final - final['BSP']):+.1f} percentage points; in the paper, it is "
            f"{ELASTIC_BSP.numbers['more-accurate-than-bsp']} higher."
        )
    labels = list(planning_ms)
    first, last = labels[0], labels[-1]
    notes.append(
        f"Computing a plan takes {planning_ms[first]:.3f} ms for {first} and {planning_ms[last]:.3f} ms for {last}. "
        "In Figs. 11 to 13 of the paper, a large R slows down training; here, it does not."
    )
    return notes


def _after(time_s: float) -> str:
    return "never" if math.isinf(time_s) else f"after {seconds(time_s)} s"


def _plain(outcome: TrainingOutcome) -> dict[str, object]:
    run = outcome.run
    return {
        "label": run.label,
        "sync": run.sync,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "times_s": outcome.times_s,
        "accuracies": outcome.values,
        "time_s": outcome.time_s,
    }


def _draw(common: Sequence[TrainingOutcome], tuned: Sequence[TrainingOutcome]) -> Figure:
    from paceline.report.canvas import new_figure

    figure = new_figure(12.0, 4.8)
    for axes, found, title in zip(
        figure.subplots(1, 2),
        (common, tuned),
        (f"all models at rate {COMMON_RATE:g}", "each model at its own best rate"),
        strict=True,
    ):
        draw_curves(axes, found, title)
    return figure


EXHIBITS = (
    Exhibit(
        name="elasticbsp-fig14",
        source=f"{PAPER}, Fig. 14",
        title="accuracy over time under every model, on 4 machines",
        differs=(
            "DigitsNet on scikit-learn's digits replaces VGG-16 on ImageNet; the messages are as large as VGG-16. "
            "The paper says only that the shared switch caused stragglers; we chose which machine is slow and when."
        ),
        minutes=5,
        make=figure_14,
        covers=("ElasticBSP, Fig. 14",),
    ),
)
