"""Figures 7, 8, 10 and 11 of FluentPS: accuracy over time, and over the number of workers."""

from __future__ import annotations

from functools import partial

from paceline.cli.console import TellShare
from paceline.look.timelines import COLOURS, new_figure
from paceline.sim import Cluster
from paceline.studies.statistics import compare_samples, mean_interval

from ..clusters import UNKNOWN_SPEEDS, part_of
from ..comparing import Comparison, compare
from ..exhibit import Exhibit, Figure, Made, Options, beside
from ..papers import FLUENT_PS
from ..problems import WORKLOADS, Protocol
from ..training import Target, TrainingRun, medians, on_data, run_all, under_each
from ..verdicts import Measured

PAPER = str(FLUENT_PS)
ACCURACIES = FLUENT_PS.tables["table4-accuracy"]
TARGET = Target("accuracy", 0.9, in_a_row=2)
COMMON_RATE = 0.2  # with the push scale 1/n
RATES = (0.1, 0.2, 0.4, 0.8)
LARS_RATE = 3.2  # on the published data; the paper states none
SCHEMES = {
    "BSP": "bsp",
    "ASP": "asp:push_scale=1/n",
    "SSP(3)": "ssp:staleness=3,push_scale=1/n",
    "PSSP(3, 0.1)": "pssp:staleness=3,probability=0.1,push_scale=1/n",
    "PSSP(3, 0.3)": "pssp:staleness=3,probability=0.3,push_scale=1/n",
    "PSSP(3, 0.5)": "pssp:staleness=3,probability=0.5,push_scale=1/n",
}
TABLE_4 = {
    "ASP": "soft P=0",
    "SSP(3)": "soft P=1",
    "PSSP(3, 0.1)": "soft P=0.1",
    "PSSP(3, 0.3)": "soft P=0.3",
    "PSSP(3, 0.5)": "soft P=0.5",
}
"""Model -> its column of Table IV."""


def protocol_of(workload: str, workers: int) -> Protocol:
    """Return how the paper trains a network: with a joint batch for all workers, and with LARS."""
    joint, iterations = (6400, 4000) if workload.startswith("AlexNet") else (4096, 64_000)
    return Protocol(
        batch_size=joint // workers,
        rate=LARS_RATE,
        epochs=iterations * joint / WORKLOADS[workload].train_size,
        optimizer="LARS",
    )


def accuracies(
    workload: str, preset: str, schemes: dict[str, str], iterations: int, options: Options, tell: TellShare
) -> Comparison:
    """Compare the accuracy over time on a cluster, with the paper's push scale, 1/n."""
    cluster = Cluster.preset(preset)
    run = TrainingRun(
        cluster=cluster,
        target=TARGET,
        until_target=False,
        learning_rate=COMMON_RATE,
        batch_size=8,
        iterations=3 if options.quick else iterations,
    )
    if options.data is not None:
        run = on_data(run, workload, protocol_of(workload, cluster.workers), options.data)
    return compare(under_each(run, schemes, options), RATES, options, tell)


def _made(
    figure: str,
    found: Comparison,
    reference: str,
    row: str,
    columns: dict[str, str],
    measured: dict[str, list[Measured]],
    notes: list[str],
) -> Made:
    """Return the exhibit. `row` and `columns` are the places of the models' accuracies in Table IV."""
    ends = medians(found.common, lambda o: o.time_s)
    finals = {
        label: mean_interval([o.values[-1] for o in found.common if o.run.label == label])
        for label in found.labels
    }
    best = medians(found.at_best, lambda o: o.values[-1])
    staleness = medians(found.common, lambda o: o.mean_staleness)
    table = found.table(
        f"{PAPER}, {figure}",
        reference,
        None,
        {
            f"final,\nrate {found.rate:g}": lambda label: (
                ACCURACIES.cell(row, columns[label]) if label in columns else None,
                f"{finals[label].value:.3f}",
            ),
            "final,\nown rate": lambda label: (None, f"{best[label]:.3f}"),
            "s, all": lambda label: (None, f"{ends[label]:.0f}"),
            "staleness\n(updates)": lambda label: (None, f"{staleness[label]:.1f}"),
        },
    )
    spread = max(each.value for each in finals.values()) - min(each.value for each in finals.values())
    return Made(
        tables=[table],
        figure=partial(found.picture, f"FluentPS, {figure}"),
        data=found.plain(),
        notes=[
            *found.notes(),
            f"At the common rate, the final accuracies of the models differ by {100 * spread:.1f} percentage points.",
            *notes,
        ],
        measured={
            **measured,
            **{
                f"table4-accuracy: {row}, {column}": Measured.of(finals[label])
                for label, column in columns.items()
            },
        },
    )


def _faster(found: Comparison, label: str, reference: str) -> Measured:
    """Return how many times as fast as a reference a model completes all iterations at the common rate."""
    ours, others = ([o.time_s for o in found.common if o.run.label == name] for name in (label, reference))
    return Measured.of(compare_samples(others, ours))


def figure_8(options: Options, tell: TellShare) -> Made:
    """Compare the accuracy over time under SSP(2) with the soft barrier and with lazy execution, 32 workers."""
    schemes = {each: f"ssp:staleness=2,push_scale=1/n,execution={each}" for each in ("soft", "lazy")}
    found = accuracies("ResNet-56 on CIFAR-10", "fluent-ps-32", schemes, 150, options, tell)
    faster, quoted = _faster(found, "lazy", "soft"), FLUENT_PS.numbers["lazy-faster-resnet"]
    return _made(
        "Fig. 8",
        found,
        "soft",
        "ResNet-56 on CIFAR-10",
        {each: f"{each} P=1" for each in schemes},
        {"lazy-faster-resnet": [faster]},
        [
            f"A run, which ends with its slowest worker, is {faster} times as fast with lazy execution as with the "
            f"soft barrier; in the paper, {quoted}."
        ],
    )


def figure_10(options: Options, tell: TellShare) -> Made:
    """Compare the models with 64 workers and one server."""
    found = accuracies("AlexNet on CIFAR-10", "fluent-ps-64", SCHEMES, 200, options, tell)
    faster, quoted = _faster(found, "PSSP(3, 0.5)", "SSP(3)"), FLUENT_PS.numbers
    gains = found.gains("PSSP(3, 0.5)", "ASP")
    return _made(
        "Fig. 10",
        found,
        "SSP(3)",
        "AlexNet on CIFAR-10",
        TABLE_4,
        {"fig10-more-accurate": gains},
        [
            f"A run, which ends with its slowest worker, is {faster} times as fast under PSSP(3, 0.5) as under SSP(3). "
            f"The paper's {quoted['pssp-faster']} is the ratio of the mean times of all workers in Table IV, which "
            "fluentps-table4 measures.",
            f"The final accuracy of PSSP(3, 0.5) differs from that of ASP by {gains[0]} percentage points at the "
            f"common rate, and by {gains[1]} at each model's own rate. The paper reports "
            f"{quoted['fig10-more-accurate']} more.",
            f"The paper's accuracies are those of Table IV, after {quoted['fig10-iterations']} iterations.",
        ],
    )


def figure_11(options: Options, tell: TellShare) -> Made:
    """Compare the models with 128 workers and 8 servers."""
    found = accuracies("AlexNet on CIFAR-10", "fluent-ps-128", SCHEMES, 60, options, tell)
    gains = {label: found.gains(label, "ASP") for label in ("PSSP(3, 0.3)", "PSSP(3, 0.5)")}
    best = max(gains.values(), key=lambda each: each[0].value or 0.0)
    return _made(
        "Fig. 11",
        found,
        "ASP",
        "",
        {},
        {"pssp-more-accurate": best},
        [
            f"The final accuracy of {label} differs from that of ASP by {common} percentage points at the common rate, "
            f"and by {own} at each model's own rate. The paper reports {FLUENT_PS.numbers['pssp-more-accurate']} more."
            for label, (common, own) in gains.items()
        ],
    )


COUNTS = (2, 4, 8, 16, 32, 64)
SHARED = 128  # images in one iteration of all workers, as the paper shares a batch of 6,400
SHARING_ITERATIONS = 200


def figure_7(options: Options, tell: TellShare) -> Made:
    """Compare the accuracy after the same number of iterations of workers that share the same batch, under SSP(3)."""
    network, whole = "AlexNet on CIFAR-10", Cluster.preset("fluent-ps-64")
    runs = []
    for workers in COUNTS[: 2 if options.quick else None]:
        run = TrainingRun(
            cluster=part_of(whole, workers),
            target=TARGET,
            until_target=False,
            learning_rate=COMMON_RATE,
            batch_size=SHARED // workers,
            iterations=3 if options.quick else SHARING_ITERATIONS,
        )
        if options.data is not None:
            run = on_data(run, network, protocol_of(network, workers), options.data)
        runs += under_each(run, {f"{workers} workers": SCHEMES["SSP(3)"]}, options)
    outcomes = run_all(runs, tell)
    finals = medians(outcomes, lambda o: o.values[-1])
    means = {
        label: mean_interval([100 * o.values[-1] for o in outcomes if o.run.label == label])
        for label in finals
    }
    measured = {label: Measured.of(each) for label, each in means.items()}
    quoted = [FLUENT_PS.numbers[f"fig7-fluentps-64-{end}"] for end in ("low", "high")]

    def draw() -> Figure:
        figure = new_figure(8.0, 4.4)
        axes = figure.subplots()
        counts = [int(label.split()[0]) for label in means]
        low, middle, high = (
            [getattr(each, end) for each in means.values()] for end in ("low", "value", "high")
        )
        axes.plot(counts, middle, marker="o", color=COLOURS[0], label="mean, with its 95 % interval")
        axes.fill_between(counts, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set(ylim=(0, 100), xlabel="workers", ylabel=f"accuracy after {SHARING_ITERATIONS} iterations, %")
        axes.set_title("FluentPS, Fig. 7: SSP(3), the same total batch")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        return figure

    return Made(
        tables=[
            beside(
                f"{PAPER}, Fig. 7: accuracy under SSP(3)",
                {
                    label: [(None, f"{each} %"), (None, f"{100 * finals[label]:.1f} %")]
                    for label, each in measured.items()
                },
                ["mean", "median"],
            )
        ],
        figure=draw,
        data={label: [o.values[-1] for o in outcomes if o.run.label == label] for label in finals},
        notes=[
            f"In the paper, the accuracy of FluentPS is {quoted[0].value:g} to {quoted[1]} with up to 64 workers. "
            "PMLS-Caffe, with which the paper compares it, caches weights at the workers (SSPtable) and is not "
            "reproduced here."
        ],
        measured={
            f"fig7-fluentps-64-{end}": pick(measured.values(), key=lambda each: each.value or 0.0)
            for end, pick in (("low", min), ("high", max))
        },
    )


DIFFERS = (
    "DigitsNet on scikit-learn's digits replaces {}, with fewer iterations. Where the cluster has several servers, one "
    f"with their bandwidth takes their place. {UNKNOWN_SPEEDS}"
)

WITH_DATA = (
    f"The machines are simulated. The paper states no learning rate for LARS; ours is {LARS_RATE:g}. "
    f"{UNKNOWN_SPEEDS}"
)

ALEX_NET, RES_NET = "AlexNet on CIFAR-10", "ResNet-56 on CIFAR-10"
MODELS = "BSP, SSP, ASP, PSSP"

EXHIBITS = tuple(
    Exhibit(
        name=f"fluentps-fig{number}",
        title=title,
        differs=DIFFERS.format(network),
        minutes=minutes,
        make=make,
        with_data=WITH_DATA,
        trains_on=(network,),
    )
    for number, title, network, minutes, make in (
        (7, "accuracy over the number of workers", ALEX_NET, 12, figure_7),
        (8, "accuracy over time with the soft barrier and with lazy execution", RES_NET, 25, figure_8),
        (10, f"accuracy over time with 64 workers: {MODELS}", ALEX_NET, 15, figure_10),
        (11, f"accuracy over time with 128 workers: {MODELS}", ALEX_NET, 30, figure_11),
    )
)
