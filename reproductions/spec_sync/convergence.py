"""Figures 5, 8 and 9 and Table II of SpecSync: convergence under naive waiting and SpecSync."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from paceline.cli.console import TellShare
from paceline.look.timelines import COLOURS, new_figure
from paceline.sim import Cluster

from ..comparing import Comparison, compare
from ..exhibit import Exhibit, Figure, Made, Options, beside
from ..papers import SPEC_SYNC, Quote
from ..training import SHARING, TrainingOutcome, TrainingRun, medians, on_data, run_all, under_each
from ..verdicts import Measured
from .workloads import CIFAR_10, IMAGENET, MF, PAPER, WITH_DATA, WORKLOADS, Workload


def runs_of(
    workload: Workload, schemes: dict[str, str], options: Options, cluster: Cluster | None = None
) -> list[TrainingRun]:
    """Return the training runs for each sync model, by default on Cluster 1, all with the same learning rate."""
    if cluster is None or options.quick:
        cluster = workload.cluster(8 if options.quick else 40)
    common = TrainingRun(
        cluster=cluster,
        target=workload.target,
        learning_rate=workload.common_rate,
        batch_size=workload.batch_size,
        iterations=workload.iterations,
        every_s=workload.iteration_s / 2,
        problem=workload.problem,
    )
    if options.data is not None:
        common = on_data(common, workload.published, workload.protocol, options.data)
    if options.quick:
        common = msgspec.structs.replace(common, iterations=6)
    return under_each(common, schemes, options)


def compared(
    workload: Workload,
    schemes: dict[str, str],
    options: Options,
    tell: Callable[[str, float], None],
    cluster: Cluster | None = None,
) -> Comparison:
    """Compare sync models at the workload's common learning rate and at other ones."""
    runs = runs_of(workload, schemes, options, cluster)
    return compare(runs, workload.rates, options, tell)


def figure_5(
    letter: str, workload: Workload, delays: tuple[int, ...], options: Options, tell: TellShare
) -> Made:
    """Compare delays for naive waiting."""
    schemes = {"no delay": "asp"} | {f"{delay} s": f"naive-waiting:delay_s={delay}" for delay in delays}
    name = "fig5" + "b" * (letter == "b")
    keys = {f"{delay} s": f"{name}-delay-{delay}" for delay in delays}
    quoted = {label: SPEC_SYNC.numbers[key] for label, key in keys.items() if key in SPEC_SYNC.numbers}
    found = compared(workload, schemes, options, tell)
    title = f"{PAPER}, Fig. 5{letter}: naive waiting, {workload.name}"
    return Made(
        tables=[found.table(title, "no delay", quoted)],
        figure=partial(found.picture, title),
        data=found.plain(),
        notes=found.notes(),
        measured={keys[label]: found.measured(label, "no delay") for label in quoted},
    )


SCHEMES = {"Original": "asp", "Adaptive": "spec-sync", "Cherrypick": ""}
TRIALS = tuple((time_s, rate) for time_s in (1.0, 2.0, 4.0, 7.0) for rate in (0.05, 0.1, 0.2, 0.4))
"""Pairs (ABORT_TIME in seconds, ABORT_RATE). Abort times are at most half the time of an iteration."""


def trials_of(workload: Workload, options: Options) -> list[tuple[float, float]]:
    """Return the pairs (ABORT_TIME in seconds, ABORT_RATE) to try. The times are those of CIFAR-10, in proportion."""
    scale = workload.iteration_s / CIFAR_10.iteration_s
    return [(round(scale * time_s, 6), rate) for time_s, rate in (TRIALS[:2] if options.quick else TRIALS)]


def cherry_pick(
    workload: Workload, options: Options, tell: Callable[[str, float], None]
) -> tuple[str, list[TrainingOutcome]]:
    """Run SpecSync with each pair of `trials_of`. Return the model that converges fastest, and all outcomes."""
    schemes = {
        f"{time_s:g} s, {rate:g}": f"spec-sync:abort_time_s={time_s},abort_rate={rate}"
        for time_s, rate in trials_of(workload, options)
    }
    runs = runs_of(workload, schemes, msgspec.structs.replace(options, seeds=min(SHARING, options.seeds)))
    outcomes = run_all(runs, lambda what, share: tell(f"trial {what}", share))
    slowness = medians(outcomes, lambda o: o.slowness)
    return schemes[min(slowness, key=slowness.__getitem__)], outcomes


def figure_8(letter: str, workload: Workload, options: Options, tell: TellShare) -> Made:
    """Compare the loss over time and the time to convergence under Original, Cherrypick and Adaptive."""
    picked, _ = cherry_pick(workload, options, lambda what, share: tell(what, share / 3))
    schemes = {**SCHEMES, "Cherrypick": picked}
    short = workload.name.lower().replace("-", "")
    quoted = SPEC_SYNC.numbers[f"faster-{short}"]
    found = compared(workload, schemes, options, lambda what, share: tell(what, (1 + 2 * share) / 3))
    restarted, staleness = (
        medians(found.common, measure)
        for measure in (lambda o: o.restarts / max(1, o.gradients), lambda o: o.mean_staleness)
    )
    title = f"{PAPER}, Fig. 8{letter}: {workload.name}"
    others: dict[str, Callable[[str], tuple[Quote | None, str]]] = {
        "restarts": lambda label: (None, f"{restarted[label]:.0%}"),
        "staleness\n(updates)": lambda label: (None, f"{staleness[label]:.1f}"),
    }
    tables = [found.table(title, "Original", dict.fromkeys(("Adaptive", "Cherrypick"), quoted), others)]
    measured = {
        f"faster-{short}": found.measured("Adaptive", "Original"),
        f"adaptive-{short}": found.measured("Adaptive", "Cherrypick"),
    }
    if workload is CIFAR_10:
        saved = {
            label: [
                Measured.saved(ratio, how)
                for how, ratio in found.speed_ups("Original", label, lambda o: o.iterations).items()
            ]
            for label in list(schemes)[1:]
        }
        fewer = SPEC_SYNC.numbers["fewer-iterations"]
        rows = {
            label: [(fewer, f"{common} %"), (None, f"{best} %")] for label, (common, best) in saved.items()
        }
        columns = [f"saved,\nrate {found.rate:g}", "saved,\nown rate"]
        tables.append(beside(f"{PAPER}, Fig. 9: iterations of all workers until convergence", rows, columns))
        measured["fewer-iterations"] = saved["Adaptive"]
    return Made(
        tables=tables,
        figure=partial(found.picture, title, by_iterations=workload is CIFAR_10),
        data=found.plain(),
        notes=[
            *found.notes(),
            f"The paper's speed-up of {quoted} is that of SpecSync over Original. The paper gives no separate "
            "numbers for Adaptive and Cherrypick, and calls their difference very small.",
            f"The cherry-picked setting, found with the first seeds at the common learning rate, is {picked}.",
        ],
        measured=measured,
    )


def table_2(options: Options, tell: TellShare) -> Made:
    """Measure the cost of the exhaustive search for fixed hyper-parameters."""
    rows, costs, picked = {}, {}, {}
    measured: dict[str, Measured] = {}
    for number, (name, workload) in enumerate(WORKLOADS.items()):
        picked[name], outcomes = cherry_pick(
            workload,
            options,
            lambda what, share, n=number: tell(what, (n + share) / len(WORKLOADS)),  # type: ignore[misc]
        )
        hours = medians(outcomes, lambda o: min(o.reached_s, o.time_s) / 3600)
        times, rates = ({label.split(", ")[place] for label in hours} for place in (0, 1))
        costs[name] = hours
        total = sum(hours.values())
        found = {
            "times": len(times),
            "rates": len(rates),
            "hours each": total / len(hours),
            "hours in total": total,
        }
        rows[name] = [
            (table.cell(name, column), f"{found[column]:.3g}")
            for table in (SPEC_SYNC.tables["table2-trials"], SPEC_SYNC.tables["table2"])
            for column in table.columns
        ]
        measured |= {
            f"table2: {name}, {column}": Measured.exactly(found[column])
            for column in SPEC_SYNC.tables["table2"].columns
        }

    def draw() -> Figure:
        figure = new_figure(11.0, 3.8)
        for number, (axes, (name, hours)) in enumerate(
            zip(figure.subplots(1, len(costs)), costs.items(), strict=True)
        ):
            axes.bar(range(len(hours)), [hour * 60 for hour in hours.values()], color=COLOURS[number])
            axes.set_xticks(range(len(hours)), list(hours), rotation=90, fontsize=7)
            axes.set(ylabel="virtual minutes", title=name)
        figure.suptitle("SpecSync, Table II: all trials (ABORT_TIME, ABORT_RATE)", fontsize=10)
        return figure

    columns = ["trials of\nABORT_TIME", "trials of\nABORT_RATE", "hours\neach", "hours\nin total"]
    return Made(
        tables=[beside(f"{PAPER}, Table II: cost of the exhaustive search", rows, columns)],
        figure=draw,
        data=costs,
        notes=[
            "The times are virtual, measured until convergence or the end of the run; medians over the seeds.",
            *(f"Best trial for {name}: {sync}." for name, sync in picked.items()),
        ],
        measured=measured,
    )


def exhibit_on(
    name: str,
    title: str,
    workload: Workload,
    make: Callable[[Options, TellShare], Made],
    minutes: float,
    numbers: tuple[str, ...] = (),
) -> Exhibit:
    """Return an exhibit that trains a workload; that of Table II trains all of them."""
    return Exhibit(
        name=f"specsync-{name}",
        title=title,
        differs=workload.stand_in,
        minutes=minutes,
        make=make,
        numbers=numbers,
        with_data=WITH_DATA,
        trains_on=tuple(w.published for w in WORKLOADS.values())
        if name == "table2"
        else (workload.published,),
    )


LOSS = "loss over time: Original, Cherrypick, Adaptive"
WAITING = "naive waiting with different delays"

EXHIBITS = (
    exhibit_on("fig5", WAITING, CIFAR_10, partial(figure_5, "a", CIFAR_10, (1, 3, 5)), 12, ("Fig. 5a",)),
    exhibit_on("fig5b", f"{WAITING}: matrix factorization", MF, partial(figure_5, "b", MF, (1, 2, 3)), 20),
    exhibit_on("fig8a", f"{LOSS}: matrix factorization", MF, partial(figure_8, "a", MF), 20),
    exhibit_on(
        "fig8",
        f"{LOSS}, and over iterations",
        CIFAR_10,
        partial(figure_8, "b", CIFAR_10),
        20,
        ("Fig. 8b", "Fig. 9"),
    ),
    exhibit_on("fig8c", f"{LOSS}: ImageNet", IMAGENET, partial(figure_8, "c", IMAGENET), 15),
    exhibit_on(
        "table2", "the cost of searching for fixed hyper-parameters", CIFAR_10, table_2, 8, ("Table II",)
    ),
)
