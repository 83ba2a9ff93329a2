"""Figures 5, 8 and 9 and Table II of SpecSync: convergence under naive waiting and SpecSync."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from paceline.cli.console import TellShare
from paceline.sim import Cluster

from ..curves import draw_curves
from ..exhibit import Exhibit, Made, Options, beside, less, ratio, seconds
from ..papers import SPEC_SYNC, Quote
from ..training import Setting, TrainingOutcome, TrainingRun, at_own_best, common_and_tuned, medians, run_all
from .workloads import CIFAR_10, IMAGENET, MF, PAPER, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS", "runs_of"]


def runs_of(
    workload: Workload, schemes: dict[str, str], options: Options, cluster: Cluster | None = None
) -> list[TrainingRun]:
    """Return the training runs for each sync model, by default on Cluster 1, all with the same learning rate."""
    if cluster is None or options.quick:
        cluster = workload.cluster(8 if options.quick else 40)
    return [
        TrainingRun(
            label=label,
            cluster=cluster,
            sync=sync,
            target=workload.target,
            learning_rate=workload.common_rate,
            batch_size=workload.batch_size,
            iterations=6 if options.quick else workload.iterations,
            seed=seed,
            every_s=workload.iteration_s / 2,
            problem=workload.problem,
        )
        for label, sync in schemes.items()
        for seed in range(1 if options.quick else options.seeds)
    ]


def grid_of(workload: Workload, options: Options) -> list[Setting]:
    """Return the settings that are tried for each sync model."""
    return [(rate, 0.0) for rate in (workload.rates[2:4] if options.quick else workload.rates)]


def _curves(title: str, outcomes: Sequence[TrainingOutcome]) -> Figure:
    from paceline.look.timelines import new_figure

    figure = new_figure(9.0, 4.4)
    draw_curves(figure.subplots(), outcomes, title)
    return figure


def _converged(
    title: str,
    workload: Workload,
    schemes: dict[str, str],
    paper: dict[str, Quote],
    options: Options,
    tell: TellShare,
) -> Made:
    """Compare the time to convergence, at the common learning rate and at the best rate for each model."""
    common, tuned, best = common_and_tuned(
        runs_of(workload, schemes, options), grid_of(workload, options), tell
    )
    first, *_ = schemes
    rows = {}
    by_rate = [medians(found, lambda o: o.reached_s) for found in (common, tuned)]
    staleness = medians(tuned, lambda o: o.mean_staleness)
    for label in schemes:
        mine = [(found[label], ratio(found[first], found[label])) for found in by_rate]
        rows[label] = [
            (None, seconds(mine[0][0])),
            (paper.get(label), mine[0][1]),
            (None, f"{best[label][0]:g}"),
            (None, seconds(mine[1][0])),
            (None, mine[1][1]),
            (None, f"{staleness[label]:.1f}"),
        ]
    columns = [
        f"s, rate\n{workload.common_rate:g}",
        "speed-up",
        "own\nrate",
        "s",
        "speed-up",
        "staleness\n(updates)\nmean",
    ]
    known = {label: [ratio(found[first], found[label]) for found in by_rate] for label in list(schemes)[1:]}
    notes = [
        f"{label}: the speed-up over {first} is {'unknown' if shared == '-' else shared} at a common learning rate, "
        f"and {'unknown' if own == '-' else own} at the best learning rate for each model."
        for label, (shared, own) in known.items()
    ]
    return Made(
        tables=[beside(title, rows, columns)],
        figure=lambda: _curves(title, tuned),
        data={
            "common": [_plain(outcome) for outcome in common],
            "tuned": [_plain(outcome) for outcome in tuned],
        },
        notes=notes,
    )


def _plain(outcome: TrainingOutcome) -> dict[str, object]:
    """Return the part of an outcome that is written to the JSON file."""
    run = outcome.run
    return {
        "label": run.label,
        "sync": run.sync,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "converges_s": _none(outcome.reached_s),
        "time_s": outcome.time_s,
        "gradients": outcome.gradients,
        "restarts": outcome.restarts,
        "mean_staleness": outcome.mean_staleness,
        "times_s": outcome.times_s,
        "losses": [_none(loss) for loss in outcome.values],
    }


def _none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def figure_5a(options: Options, tell: TellShare) -> Made:
    """Compare the delays 0, 1, 3 and 5 s for naive waiting, on CIFAR-10."""
    schemes = {"no delay": "asp"} | {f"{d} s": f"naive-waiting:delay_s={d}" for d in (1, 3, 5)}
    paper = {f"{d} s": SPEC_SYNC.numbers[f"fig5-delay-{d}"] for d in (1, 3, 5)}
    return _converged(f"{PAPER}, Fig. 5: naive waiting", CIFAR_10, schemes, paper, options, tell)


def figure_5b(options: Options, tell: TellShare) -> Made:
    """Compare delays for naive waiting, on matrix factorization."""
    schemes = {"no delay": "asp"} | {f"{d} s": f"naive-waiting:delay_s={d}" for d in (1, 2, 3)}
    paper = {"1 s": SPEC_SYNC.numbers["fig5b-delay-1"]}
    few = msgspec.structs.replace(options, seeds=1)
    made = _converged(f"{PAPER}, Fig. 5b: naive waiting", MF, schemes, paper, few, tell)
    return msgspec.structs.replace(made, notes=[*made.notes, ONE_SEED])


ONE_SEED = "The results are those of one seed."

SCHEMES = {"Original": "asp", "Adaptive": "spec-sync", "Cherrypick": ""}
TRIALS = tuple((time_s, rate) for time_s in (1.0, 2.0, 4.0, 7.0) for rate in (0.05, 0.1, 0.2, 0.4))
"""Pairs (ABORT_TIME in seconds, ABORT_RATE). Abort times are at most half the time of an iteration."""


def trials_of(workload: Workload, options: Options) -> list[tuple[float, float]]:
    """Return the pairs (ABORT_TIME in seconds, ABORT_RATE) to try. The times are those of CIFAR-10, in proportion."""
    scale = workload.iteration_s / CIFAR_10.iteration_s
    return [(round(scale * time_s, 6), rate) for time_s, rate in (TRIALS[:2] if options.quick else TRIALS)]


def cherry_pick(workload: Workload, options: Options, tell: TellShare) -> tuple[str, list[TrainingOutcome]]:
    """Run SpecSync with each pair of `trials_of`. Return the model that converges fastest, and all outcomes."""
    schemes = {
        f"{time_s:g} s, {rate:g}": f"spec-sync:abort_time_s={time_s},abort_rate={rate}"
        for time_s, rate in trials_of(workload, options)
    }
    runs = runs_of(workload, schemes, msgspec.structs.replace(options, seeds=1))
    outcomes = run_all(runs, lambda done, of, what: tell(f"trial {what}", done / max(1, of)))
    best = min(outcomes, key=lambda outcome: outcome.slowness)
    return best.run.sync, outcomes


def figure_8(letter: str, workload: Workload, seeds: int | None, options: Options, tell: TellShare) -> Made:
    """Compare the loss over time and the time to convergence under Original, Cherrypick and Adaptive."""
    if seeds is not None:
        options = msgspec.structs.replace(options, seeds=seeds)
    picked, _ = cherry_pick(workload, options, lambda what, share, slow=False: tell(what, share / 3))
    schemes = {**SCHEMES, "Cherrypick": picked}
    quoted = SPEC_SYNC.numbers[f"faster-{workload.name.lower().replace('-', '')}"]
    made = _converged(
        f"{PAPER}, Fig. 8{letter}: {workload.name}",
        workload,
        schemes,
        dict.fromkeys(("Adaptive", "Cherrypick"), quoted),
        options,
        lambda what, share, slow=False: tell(what, (1 + 2 * share) / 3),
    )
    return msgspec.structs.replace(
        made,
        notes=[
            *made.notes,
            *([ONE_SEED] if seeds == 1 else []),
            f"The paper's speed-up of {quoted} is that of SpecSync over Original. The paper gives no separate "
            "numbers for Adaptive and Cherrypick, and calls their difference very small.",
            f"The cherry-picked setting, found with the first seed at the common learning rate, is {picked}.",
        ],
    )


def figure_9(options: Options, tell: TellShare) -> Made:
    """Compare how the loss decreases with the total number of iterations of all workers, rather than with time."""
    schemes = {label: sync for label, sync in SCHEMES.items() if sync}
    outcomes, best = at_own_best(runs_of(CIFAR_10, schemes, options), grid_of(CIFAR_10, options), tell)
    needed = medians(outcomes, _gradients_to_target)
    first = needed["Original"]
    fewer = SPEC_SYNC.numbers["fewer-iterations"]
    rows: dict[str, Sequence[tuple[Quote | None, str]]] = {}
    for label, count in needed.items():
        rows[label] = [
            (None, f"{best[label][0]:g}"),
            (None, f"{count:.0f}" if math.isfinite(count) else "never"),
            (None, "-") if label == "Original" else (fewer, less(count, first)),
        ]

    def draw() -> Figure:
        from paceline.look.timelines import new_figure

        figure = new_figure(9.0, 4.4)
        draw_curves(
            figure.subplots(),
            outcomes,
            "SpecSync, Fig. 9",
            along=lambda outcome: [float(_pushed_until(outcome, time_s)) for time_s in outcome.times_s],
            along_name="accumulated iterations of all workers",
        )
        return figure

    return Made(
        tables=[
            beside(
                f"{PAPER}, Fig. 9: iterations of all workers until convergence",
                rows,
                ["own rate", "iterations", "saved"],
            )
        ],
        figure=draw,
        data=[_plain(outcome) for outcome in outcomes],
    )


def _pushed_until(outcome: TrainingOutcome, time_s: float) -> int:
    return sum(at_s <= time_s for at_s in outcome.pushes_s)


def _gradients_to_target(outcome: TrainingOutcome) -> float:
    time_s = outcome.reached_s
    return float(_pushed_until(outcome, time_s)) if math.isfinite(time_s) else math.inf


def table_2(options: Options, tell: TellShare) -> Made:
    """Measure the cost of the exhaustive search for fixed hyper-parameters."""
    picked, outcomes = cherry_pick(CIFAR_10, options, tell)
    hours = [min(outcome.reached_s, outcome.time_s) / 3600 for outcome in outcomes]
    times = len({outcome.run.sync.partition(",")[0] for outcome in outcomes})
    rows = {
        "CIFAR-10": [
            (SPEC_SYNC.tables["table2"].cell("CIFAR-10", column), ours)
            for column, ours in (
                ("times", f"{times}"),
                ("rates", f"{len(outcomes) // times}"),
                ("hours each", f"{sum(hours) / len(hours):.2f}"),
                ("hours in total", f"{sum(hours):.1f}"),
            )
        ]
    }
    columns = ["trials of\nABORT_TIME", "trials of\nABORT_RATE", "hours\neach", "hours\nin total"]

    def draw() -> Figure:
        from paceline.look.timelines import COLOURS, new_figure

        figure = new_figure(8.0, 3.8)
        axes = figure.subplots()
        axes.bar(range(len(outcomes)), [hour * 60 for hour in hours], color=COLOURS[0])
        axes.set_xticks(range(len(outcomes)), [o.run.label for o in outcomes], rotation=60, fontsize=8)
        axes.set_ylabel("virtual minutes")
        axes.set_title("SpecSync, Table II: all trials (ABORT_TIME, ABORT_RATE)")
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Table II: cost of the exhaustive search", rows, columns)],
        figure=draw,
        data={outcome.run.label: hour for outcome, hour in zip(outcomes, hours, strict=True)},
        notes=[
            f"Best trial: {picked}. The times are virtual, measured until convergence or the end of the run."
        ],
    )


def _exhibit(
    name: str,
    number: str,
    title: str,
    workload: Workload,
    make: Callable[[Options, TellShare], Made],
    minutes: float,
    covers: str = "",
) -> Exhibit:
    return Exhibit(
        name=f"specsync-{name}",
        source=f"{PAPER}, {number}",
        title=title,
        differs=workload.stand_in,
        minutes=minutes,
        make=make,
        covers=(f"SpecSync, {covers or number}",),
    )


LOSS = "loss over time: Original, Cherrypick, Adaptive"
WAITING = "naive waiting with different delays"

EXHIBITS = (
    _exhibit("fig5", "Fig. 5", WAITING, CIFAR_10, figure_5a, 6, covers="Fig. 5a"),
    _exhibit("fig5b", "Fig. 5b", f"{WAITING}: matrix factorization", MF, figure_5b, 4),
    _exhibit("fig8a", "Fig. 8a", f"{LOSS}: matrix factorization", MF, partial(figure_8, "a", MF, 1), 4),
    _exhibit("fig8", "Fig. 8b", LOSS, CIFAR_10, partial(figure_8, "b", CIFAR_10, None), 8),
    _exhibit("fig8c", "Fig. 8c", f"{LOSS}: ImageNet", IMAGENET, partial(figure_8, "c", IMAGENET, 1), 4),
    _exhibit(
        "fig9", "Fig. 9", "loss against the total number of iterations of all workers", CIFAR_10, figure_9, 4
    ),
    _exhibit("table2", "Table II", "the cost of searching for fixed hyper-parameters", CIFAR_10, table_2, 4),
)
