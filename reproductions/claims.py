"""Experiments of our own that test the claims of the papers.

Each experiment tests a claim under several conditions: with different momenta; with workers whose speeds differ
permanently, vary at random, or drop now and then; or with pushes that arrive evenly or in bursts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from paceline.cli.console import TellShare
from paceline.lab.ranking import Task, run_tasks
from paceline.sim import Cluster, LogNormal, Occasional, Times, Uniform

from .curves import draw_curves
from .exhibit import Exhibit, Made, Options, beside, less, ratio, seconds
from .papers import ELASTIC_BSP, FLUENT_PS, SPEC_SYNC
from .training import (
    Setting,
    Target,
    TrainingOutcome,
    TrainingRun,
    at_own_best,
    best_of_each,
    common_and_tuned,
    medians,
    run_all,
    with_setting,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

TARGET = Target("accuracy", 0.95, in_a_row=2)
NEVER = '"never" means that the target was not reached within {:.0f} s.'


def jitter(mean_s: float, share: float) -> Uniform:
    """Return compute times that are distributed uniformly between (1 - share) and (1 + share) times a mean."""
    return Uniform(low=mean_s * (1 - share), high=mean_s * (1 + share))


# -- ElasticBSP against BSP ------------------------------------------------------------------------------------

STRAGGLER = Cluster(
    compute_s=[jitter(1.0, 0.05)] * 3 + [jitter(3.0, 0.05)], name="four workers, one of them 3 times slower"
)
MOMENTA = (0.0, 0.5, 0.9)
RATES = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


def elastic_bsp(options: Options, tell: TellShare) -> Made:
    """Compare how long each model, at its best setting, takes to reach the target if one of four workers is slow."""
    schemes = {"BSP": "bsp", "ElasticBSP, R=15": "elastic-bsp:lookahead=15", "ASP": "asp"}
    momenta = MOMENTA[1:2] if options.quick else MOMENTA
    rates = RATES[5:7] if options.quick else RATES
    seeds = range(1 if options.quick else max(9, options.seeds))
    runs = {
        label: TrainingRun(
            label=label,
            cluster=STRAGGLER,
            sync=sync,
            target=TARGET,
            batch_size=32,
            until_s=60.0 if options.quick else 400.0,
            every_s=2.0,
        )
        for label, sync in schemes.items()
    }
    best: dict[float, dict[str, Setting]] = {}  # momentum -> label -> best setting
    tuning = [_seeded(run, seed) for run in runs.values() for seed in range(1 if options.quick else 3)]
    for number, momentum in enumerate(momenta):

        def told(done: int, of: int, what: str, number: int = number) -> None:
            tell(f"tuning {what}", 0.6 * (number + done / max(1, of)) / len(momenta))

        best[momentum] = best_of_each(tuning, [(rate, momentum) for rate in rates], told)
    outcomes = run_all(
        [
            with_setting(_seeded(run, seed), best[momentum][label])
            for momentum in momenta
            for label, run in runs.items()
            for seed in seeds
        ],
        lambda done, of, what: tell(what, 0.6 + 0.4 * done / max(1, of)),
    )
    times: dict[tuple[str, float], float] = {}
    for label in schemes:
        for momentum in momenta:
            times[label, momentum] = median(
                o.reached_s for o in outcomes if (o.run.label, o.run.momentum) == (label, momentum)
            )
    own_best = {label: min(times[label, momentum] for momentum in momenta) for label in schemes}
    rows = {}
    edge: list[str] = []
    for label in schemes:
        cells = [(None, f"{seconds(times[label, m])} ({best[m][label][0]:g})") for m in momenta]
        rows[label] = [*cells, (None, seconds(own_best[label]))]
        edge += [f"{label}, momentum {m:g}" for m in momenta if best[m][label][0] in (rates[0], rates[-1])]
    factor = ratio(own_best["BSP"], own_best["ElasticBSP, R=15"])

    def draw() -> Figure:
        from paceline.look.timelines import COLOURS, new_figure

        figure = new_figure(8.0, 4.0)
        axes = figure.subplots()
        for number, label in enumerate(schemes):
            axes.plot(
                [f"{m:g}" for m in momenta],
                [times[label, m] for m in momenta],
                marker="o",
                color=COLOURS[number],
                label=label,
            )
        axes.set_xlabel("momentum (each model at its own best learning rate)")
        axes.set_ylabel(f"virtual seconds to {TARGET.value:.0%}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.set_title(STRAGGLER.name)
        return figure

    columns = [*(f"s (rate),\nmomentum {m:g}" for m in momenta), "own best"]
    return Made(
        tables=[
            beside(
                f"seconds to {TARGET.value:.0%}, medians of {len(seeds)} seeds; {STRAGGLER.name}",
                rows,
                columns,
            )
        ],
        figure=draw,
        data={f"{label}, momentum {m}": times[label, m] for label, m in times},
        notes=[
            f"With each model at its own best setting, ElasticBSP is {factor} times as fast as BSP; the paper "
            f"reports a factor of {ELASTIC_BSP.numbers['faster-than-bsp']} for VGG-16 on ImageNet.",
            f"Time to the target with momentum {momenta[-1]:g}, relative to momentum {momenta[0]:g}: "
            + "; ".join(
                f"{label} {ratio(times[label, momenta[-1]], times[label, momenta[0]])} x" for label in schemes
            )
            + ".",
            f"Some best learning rates are on the edge of the grid, so rates outside the grid may be better: "
            f"{'; '.join(edge)}."
            if edge
            else "None of the best learning rates is at the edge of the grid.",
        ],
    )


def _seeded(run: TrainingRun, seed: int) -> TrainingRun:
    return msgspec.structs.replace(run, seed=seed)


# -- PSSP against SSP ------------------------------------------------------------------------------------------


def kinds_of_inequality(workers: int) -> dict[str, Cluster]:
    """Return three clusters whose workers are unequal in different ways."""
    slow = workers // 8
    pausing: Times = Occasional(base=jitter(1.0, 0.05), factor=5.0, lasting=10.0, every=200.0)
    return {
        "an eighth of the workers are always half as fast": Cluster(
            compute_s=[jitter(1.0, 0.05)] * (workers - slow) + [jitter(2.0, 0.05)] * slow
        ),
        "all workers jitter (log-normal, sigma 0.3)": Cluster(
            compute_s=[LogNormal(median=1.0, sigma=0.3)] * workers
        ),
        "all workers pause now and then (5x slower in 10 of 200 s)": Cluster(compute_s=[pausing] * workers),
    }


def pssp(options: Options, tell: TellShare) -> Made:
    """Compare the share of delayed pulls under PSSP(3, 1/10) and SSP(12), which have the same regret bound."""
    workers, iterations = (16, 60) if options.quick else (64, 400)
    syncs = {
        "SSP(12)": "ssp:staleness=12",
        "PSSP(3, 1/10)": "pssp:staleness=3,probability=0.1",
        "SSP(3)": "ssp:staleness=3",
    }
    clusters = kinds_of_inequality(workers)
    tasks = [
        Task(cluster, sync, iterations, math.inf, 0)
        for cluster in clusters.values()
        for sync in syncs.values()
    ]
    found = run_tasks(tasks, lambda done, of, what: tell(what, done / max(1, of)))
    rows = {}
    shares: dict[str, list[float]] = {}
    for number, kind in enumerate(clusters):
        mine = dict(zip(syncs, found[number * len(syncs) : (number + 1) * len(syncs)], strict=True))
        delayed = {name: figures.delayed_share for name, figures in mine.items()}
        shares[kind] = list(delayed.values())
        rows[kind] = [
            *((None, f"{delayed[name]:.2%}") for name in syncs),
            (None, less(delayed["PSSP(3, 1/10)"], delayed["SSP(12)"])),
            (None, f"{mine['SSP(12)'].finished_s / mine['PSSP(3, 1/10)'].finished_s:.2f}"),
        ]

    def draw() -> Figure:
        from paceline.look.timelines import COLOURS, new_figure

        figure = new_figure(10.0, 4.0)
        axes = figure.subplots()
        for index, name in enumerate(syncs):
            places = [group + (index - 1) * 0.27 for group in range(len(clusters))]
            axes.bar(
                places, [shares[kind][index] for kind in clusters], 0.25, color=COLOURS[index], label=name
            )
        axes.set_xticks(range(len(clusters)), [kind.replace(" (", "\n(") for kind in clusters], fontsize=9)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylabel("share of delayed pulls")
        axes.legend(frameon=False)
        return figure

    columns = ["SSP(12)", "PSSP(3, 1/10)", "SSP(3)", "PSSP compared\nwith SSP(12)", "speed-up"]
    quoted = FLUENT_PS.numbers
    return Made(
        tables=[beside(f"delayed pulls, {workers} workers, {iterations} iterations", rows, columns)],
        figure=draw,
        data=shares,
        notes=[
            f"On the paper's 64 machines, PSSP(3, 1/10) delays {quoted['fewer-delayed-pulls-soft']} fewer pulls "
            f"than SSP(12), and takes {quoted['less-time']} less time ({quoted['less-time'].where}). The paper does "
            "not say how its machines differ.",
        ],
    )


# -- lazy execution --------------------------------------------------------------------------------------------


def lazy(options: Options, tell: TellShare) -> Made:
    """Compare lazy execution with the soft barrier: delays, staleness and time to the target accuracy."""
    workers = 8
    clusters = kinds_of_inequality(workers)
    schemes = {"soft": "ssp:staleness=3", "lazy": "ssp:staleness=3,execution=lazy"}
    rates = (0.05, 0.1) if options.quick else (0.02, 0.05, 0.1, 0.2)
    until_s = 40.0 if options.quick else 200.0
    runs = _runs(clusters, schemes, options, until_s=until_s, every_s=1.0)
    outcomes, best = at_own_best(runs, [(rate, 0.0) for rate in rates], tell)
    quoted = FLUENT_PS.numbers
    tasks = [
        Task(cluster, sync, 200, math.inf, 0) for cluster in clusters.values() for sync in schemes.values()
    ]
    timings = run_tasks(tasks)
    rows = {}
    for run, figures in zip([run for run in runs if run.seed == 0], timings, strict=True):
        mine = [outcome for outcome in outcomes if outcome.run.label == run.label]
        rows[run.label] = [
            (None, f"{figures.delayed_share:.1%}"),
            (None, f"{figures.waiting_share:.1%}"),
            (None, f"{figures.mean_staleness:.1f}"),
            (None, f"{figures.gradients_per_s:.2f}"),
            (None, f"{seconds(median(o.reached_s for o in mine))} (rate {best[run.label][0]:g})"),
        ]
    columns = [
        "delayed",
        "waiting",
        "staleness\n(updates)\nmean",
        "gradients\nper s",
        f"s to {TARGET.value:.0%}",
    ]
    return Made(
        tables=[beside(f"SSP(3), {workers} workers: soft barrier and lazy execution", rows, columns)],
        figure=lambda: _accuracies("SSP(3): soft barrier and lazy execution", outcomes),
        data={label: [pair[1] for pair in pairs] for label, pairs in rows.items()},
        notes=[
            f"In the paper, lazy execution delays {quoted['lazy-fewer-delayed-pulls']} fewer pulls than the soft "
            f"barrier under SSP, and trains {quoted['lazy-faster']} times as fast ({quoted['lazy-faster'].where}).",
            NEVER.format(until_s),
        ],
    )


def _runs(
    clusters: Mapping[str, Cluster],
    schemes: Mapping[str, str],
    options: Options,
    *,
    until_s: float,
    every_s: float,
) -> list[TrainingRun]:
    """Return the training runs for each sync model on each cluster. Their labels are "cluster: model"."""
    return [
        TrainingRun(
            label=f"{kind}: {name}",
            cluster=cluster,
            sync=sync,
            target=TARGET,
            until_s=until_s,
            seed=seed,
            every_s=every_s,
        )
        for kind, cluster in clusters.items()
        for name, sync in schemes.items()
        for seed in range(1 if options.quick else options.seeds)
    ]


def _accuracies(title: str, outcomes: Sequence[TrainingOutcome]) -> Figure:
    from paceline.look.timelines import new_figure

    figure = new_figure(10.0, 4.6)
    draw_curves(figure.subplots(), outcomes, title, variants=2)
    return figure


# -- SpecSync against ASP --------------------------------------------------------------------------------------


def arrivals(workers: int) -> dict[str, Cluster]:
    """Return three clusters in which pushes arrive in different ways.

    All workers begin at the same time. If the jitter is small, pushes continue to arrive in bursts.
    """
    quarter = workers // 4
    return {
        "even": Cluster(compute_s=[jitter(14.0, 0.1)] * workers),
        "bursty": Cluster(compute_s=[jitter(14.0, 0.01)] * workers),
        "heterogeneous": Cluster(
            compute_s=[jitter(mean_s, 0.1) for mean_s in (7.0, 8.4, 14.0, 16.8) for _ in range(quarter)]
        ),
    }


ONE_RATE = 0.02  # learning rate common to all models; about the largest that ASP tolerates with 40 workers


def spec_sync(options: Options, tell: TellShare) -> Made:
    """Compare SpecSync-Adaptive with ASP, at a common learning rate and at the best rate for each model."""
    clusters = arrivals(8 if options.quick else 40)
    schemes = {"ASP": "asp", "SpecSync": "spec-sync"}
    rates = (0.02, 0.05) if options.quick else (0.005, 0.01, 0.02, 0.05, 0.1)
    until_s = 200.0 if options.quick else 4000.0
    runs = [
        with_setting(run, (ONE_RATE, 0.0))
        for run in _runs(clusters, schemes, options, until_s=until_s, every_s=5.0)
    ]
    common, outcomes, best = common_and_tuned(runs, [(rate, 0.0) for rate in rates], tell)
    staleness = medians(outcomes, lambda o: o.mean_staleness)
    restarted = medians(outcomes, lambda o: o.restarts / max(1, o.gradients))
    times = [medians(found, lambda o: o.reached_s) for found in (common, outcomes)]
    rows = {}
    for label in best:
        base = f"{label.partition(':')[0]}: ASP"
        rows[label] = [
            (None, f"{staleness[label]:.1f}"),
            (None, f"{restarted[label]:.0%}"),
            (None, seconds(times[0][label])),
            (None, ratio(times[0][base], times[0][label])),
            (None, f"{best[label][0]:g}"),
            (None, seconds(times[1][label])),
            (None, ratio(times[1][base], times[1][label])),
        ]
    quoted = SPEC_SYNC.numbers
    columns = [
        "staleness\n(updates)\nmean",
        "restarted",
        f"s to {TARGET.value:.0%},\nrate {ONE_RATE:g}",
        "speed-up",
        "own\nrate",
        "s",
        "speed-up",
    ]
    return Made(
        tables=[beside("SpecSync-Adaptive compared with ASP, 40 workers", rows, columns)],
        figure=lambda: _accuracies("SpecSync-Adaptive and ASP", outcomes),
        data={label: [pair[1] for pair in pairs] for label, pairs in rows.items()},
        notes=[
            "On 40 identical machines, the paper reports that SpecSync converges faster than ASP by a factor of "
            f"{quoted['faster-mf']} for matrix factorization, {quoted['faster-cifar10']} for CIFAR-10 and "
            f"{quoted['faster-imagenet']} for ImageNet. It has no numbers for pushes that arrive in bursts, and says "
            "that the speed-up is smaller on machines of different speeds.",
            "According to Eq. 7 of the paper, the expected gain is zero if pushes arrive evenly.",
            "The paper compares the two models at a single learning rate, as does the left part of the table. In the "
            "right part, each model uses its own best learning rate.",
            NEVER.format(until_s),
        ],
    )


STAND_IN = "Simulated: DigitsNet on scikit-learn's digits, without network costs."

EXHIBITS = (
    Exhibit(
        name="claim-elastic-bsp",
        source="Claim of ElasticBSP (2021)",
        title="faster than BSP if one worker is slow, with each model at its own best setting",
        differs=STAND_IN,
        minutes=8,
        make=elastic_bsp,
    ),
    Exhibit(
        name="claim-pssp",
        source="Claim of FluentPS (2019) about PSSP",
        title="fewer delayed pulls than under SSP with the same regret bound",
        differs="Simulated without training, in three clusters of unequal workers instead of the paper's one.",
        minutes=1,
        make=pssp,
    ),
    Exhibit(
        name="claim-lazy",
        source="Claim of FluentPS (2019) about lazy execution",
        title="fewer delays, fresher parameters, and the effect of both on the time to the target accuracy",
        differs=STAND_IN,
        minutes=10,
        make=lazy,
    ),
    Exhibit(
        name="claim-spec-sync",
        source="Claim of SpecSync (2018)",
        title="faster than ASP, tested with three arrival patterns of pushes",
        differs=STAND_IN,
        minutes=15,
        make=spec_sync,
    ),
)
