"""Tables and figures of FluentPS (Yao, Wu and Wang, CLUSTER 2019): conditions, lazy execution and slicing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from paceline.cli.progress import TellShare
from paceline.core.layout import Layout, Parameter, ShardSlice
from paceline.rehearsal.ranking import Task, run_tasks
from paceline.sim import Cluster, Uniform
from paceline.sim.simulate import simulate

from .curves import draw_curves
from .exhibit import Exhibit, Made, Options, beside, less, seconds
from .papers import FLUENT_PS, Quote
from .training import Target, TrainingRun, common_and_tuned, medians

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

PAPER = str(FLUENT_PS)
TIMES, DELAYED, ACCURACIES = (FLUENT_PS.tables[f"table4-{name}"] for name in ("time", "delayed", "accuracy"))

# -- Figure 6: overlap synchronization and Elastic Parameter Slicing --------------------------------------------

SERVERS = 8
COMPUTE_S_OF_32 = TIMES.cell("ResNet-56 on CIFAR-10", "soft P=0").value / 100  # under ASP with 32 workers
RATE_BPS = (
    FLUENT_PS.numbers["bandwidth"].value * 1e9 / 32
)  # the aggregate bandwidth, divided among 32 workers


def resnet_56() -> Layout:
    """Return the parameters of ResNet-56 for CIFAR-10 (He et al., 2016): 0.85 million in 3 stages of 9 blocks."""
    parameters = [Parameter(("conv1",), (16, 3, 3, 3), "float32")]
    before = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range(9):
            for number, entering in enumerate((before, width)):
                name = f"stage{stage}.{block}.conv{number}"
                parameters.append(Parameter((name,), (width, entering, 3, 3), "float32"))
                parameters += [
                    Parameter((f"{name}.{part}",), (width,), "float32") for part in ("gamma", "beta")
                ]
            before = width
    parameters += [Parameter(("fc",), (10, 64), "float32"), Parameter(("fc.bias",), (10,), "float32")]
    return Layout.of(parameters)


class FluentSetting(msgspec.Struct, frozen=True):
    """The settings for one bar in Fig. 6 of the paper.

    Attributes:
        label: label of the bar.
        overlap: "off" as in PS-Lite, or "shards".
        even: True for even slicing (EPS), False for slicing by key as in PS-Lite.
    """

    label: str
    overlap: str
    even: bool


SETTINGS = (
    FluentSetting("PS-Lite: one barrier, by key", "off", False),
    FluentSetting("overlap, by key", "shards", False),
    FluentSetting("overlap, EPS", "shards", True),
)
SAVED = (None, FLUENT_PS.numbers["overlap-saves"], FLUENT_PS.numbers["eps-saves"])
"""In the paper, each setting saves at most this share of the previous setting's communication time."""


def communication(setting: FluentSetting, workers: int, iterations: int) -> tuple[float, float]:
    """Return mean computation and communication times in seconds per BSP iteration, with workers of similar speed."""
    layout = resnet_56()
    slices: Sequence[ShardSlice] = (
        layout.slice_evenly(SERVERS) if setting.even else layout.slice_by_parameter(SERVERS)
    )
    compute_s = COMPUTE_S_OF_32 * 32 / workers
    cluster = Cluster(
        compute_s=[Uniform(low=0.98 * compute_s, high=1.02 * compute_s)] * workers,
        servers=SERVERS,
        latency_s=200e-6,
        bandwidth_bps=RATE_BPS,
    )
    result = simulate(
        cluster,
        "bsp",
        iterations,
        shard_bytes=[part.size_bytes for part in slices],
        overlap=setting.overlap,
    )
    computed_s = result.computed_s / workers / iterations
    return computed_s, result.time_s / iterations - computed_s


def figure_6(options: Options, tell: TellShare) -> Made:
    """Compare the computation and communication times of the settings, for 8, 16 and 32 workers."""
    counts = (8, 16, 32)
    iterations = 5 if options.quick else 100
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for number, setting in enumerate(SETTINGS):
        tell(setting.label, number / len(SETTINGS))
        found[setting.label] = {n: communication(setting, n, iterations) for n in counts}
    rows = {}
    before: dict[int, tuple[float, float]] | None = None
    for setting, saved in zip(SETTINGS, SAVED, strict=True):
        here = found[setting.label]
        ours = "-" if before is None else f"{max(1 - here[n][1] / before[n][1] for n in counts):.0%}"
        times = [(None, f"{here[n][1] * 1000:.1f}") for n in counts]
        rows[setting.label] = [*times, (saved, ours)]
        before = here
    first, last = found[SETTINGS[0].label], found[SETTINGS[-1].label]
    whole = max(1 - last[n][1] / first[n][1] for n in counts)
    faster = max(sum(first[n]) / sum(last[n]) for n in counts)
    columns = [*(f"{n} workers, ms" for n in counts), "saved, at most"]

    def draw() -> Figure:
        from paceline.report.canvas import COLOURS, new_figure

        figure = new_figure(9.0, 4.4)
        axes = figure.subplots()
        width = 0.25
        for number, setting in enumerate(SETTINGS):
            places = [group + (number - 1) * width for group in range(len(counts))]
            computing = [found[setting.label][n][0] for n in counts]
            moving = [found[setting.label][n][1] for n in counts]
            axes.bar(
                places, computing, width * 0.92, color="#BBBBBB", label="computing" if not number else None
            )
            axes.bar(
                places, moving, width * 0.92, bottom=computing, color=COLOURS[number], label=setting.label
            )
        axes.set_xticks(range(len(counts)), [f"{n} workers" for n in counts])
        axes.set_ylabel("seconds per iteration")
        axes.set_title("FluentPS, Fig. 6: ResNet-56 under BSP, 8 servers")
        axes.legend(frameon=False, fontsize=9)
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Fig. 6: communication per iteration under BSP", rows, columns)],
        figure=draw,
        data=found,
        notes=[
            f"Overlap and even slicing together save up to {whole:.0%} of the communication time, and are up to "
            f"{faster:.2f} times as fast as PS-Lite. The paper reports "
            f"{FLUENT_PS.numbers['overlap-and-eps-save']} and {FLUENT_PS.numbers['faster-than-ps-lite']} times.",
            "The simulation models the transfer of the bytes and the wait for the last byte, but not the costs of "
            "PS-Lite's scheduler and of the work that PS-Lite does for each message. Therefore, it does not show "
            "how much of the paper's saving comes from avoiding these costs.",
        ],
    )


# -- Figure 9 and Table IV: delayed pulls ----------------------------------------------------------------------

PAIRS = tuple(
    (letters.split(", "), int(inverse), int(s))
    for letters, (inverse, s) in FLUENT_PS.tables["fig9-models"].rows.items()
)
"""The pairs that Fig. 9 compares: the letters of a PSSP model and an SSP model with the same regret bound, 1/c, s."""


def figure_9(options: Options, tell: TellShare) -> Made:
    """Compare delayed pulls under PSSP(3, c) and SSP with the same regret bound, for each kind of execution."""
    cluster = Cluster.preset("fluent-ps-64")
    iterations = 20 if options.quick else 400
    tasks = []
    labels = []
    for (pssp, ssp), inverse, s in PAIRS:
        for execution in ("soft", "lazy"):
            tasks.append(f"pssp:staleness=3,probability={1 / inverse},execution={execution}")
            tasks.append(f"ssp:staleness={s},execution={execution}")
            labels += [
                (f"{pssp}: PSSP(3, 1/{inverse})", execution),
                (f"{ssp}: SSP({s})", execution),
            ]
    rows = run_tasks(
        [Task(cluster, sync, iterations, float("inf"), 0) for sync in tasks],
        lambda done, of, what: tell(what, done / of),
    )
    delayed = {
        label: row.delayed_share * cluster.workers * 100 for label, row in zip(labels, rows, strict=True)
    }
    times = {label: row.finished_s * 100 / iterations for label, row in zip(labels, rows, strict=True)}
    names = list(dict.fromkeys(name for name, _ in labels))
    table_rows = {
        name: [
            (None, f"{found[name, execution]:.{digits}f}")
            for found, digits in ((delayed, 0), (times, 1))
            for execution in ("soft", "lazy")
        ]
        for name in names
    }
    *_, pssp, ssp = names
    soft, lazy = (less(delayed[pssp, execution], delayed[ssp, execution]) for execution in ("soft", "lazy"))
    faster = less(times[pssp, "soft"], times[ssp, "soft"]).replace("fewer", "less")
    lazy_fewer = less(
        sum(delayed[name, "lazy"] for name in names[1::2]), sum(delayed[name, "soft"] for name in names[1::2])
    )
    lazy_faster = max(times[name, "soft"] / times[name, "lazy"] for name in names[1::2])
    quoted = FLUENT_PS.numbers

    def draw() -> Figure:
        from paceline.report.canvas import COLOURS, new_figure

        figure = new_figure(9.5, 4.4)
        axes = figure.subplots()
        for number, execution in enumerate(("soft", "lazy")):
            places = [index + (number - 0.5) * 0.38 for index in range(len(names))]
            axes.bar(
                places,
                [delayed[name, execution] for name in names],
                0.36,
                color=COLOURS[number],
                label=execution,
            )
        axes.set_xticks(range(len(names)), [name.replace(": ", "\n") for name in names], fontsize=8.5)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylabel("delayed pulls per 100 iterations, all workers")
        axes.set_title("FluentPS, Fig. 9: 64 workers, 1 server")
        axes.legend(frameon=False, title="execution")
        return figure

    return Made(
        tables=[
            beside(
                f"{PAPER}, Fig. 9: delayed pulls (DPRs) and seconds per 100 iterations",
                table_rows,
                ["DPRs, soft", "DPRs, lazy", "s, soft", "s, lazy"],
            )
        ],
        figure=draw,
        data={f"{name} {execution}": value for (name, execution), value in delayed.items()},
        notes=[
            f"Delayed pulls under {pssp} compared with {ssp}: {soft} (soft barrier), {lazy} (lazy execution). In "
            f"the paper: {quoted['fewer-delayed-pulls-soft']} and {quoted['fewer-delayed-pulls-lazy']} fewer.",
            f"Time under {pssp} compared with {ssp}, soft barrier: {faster}. In the paper: {quoted['less-time']} "
            "less.",
            f"Lazy execution compared with the soft barrier, all four SSP models: {lazy_fewer} delayed pulls, at "
            f"best {lazy_faster:.2f} times as fast. In the paper: {quoted['lazy-fewer-delayed-pulls']} fewer, "
            f"{quoted['lazy-faster']} times as fast.",
            "The paper gives no numbers for the bars of the figure.",
        ],
    )


MODELS = (
    ("P=0", "asp"),
    ("P=0.1", "pssp:staleness={s},probability=0.1,draws=per-shard"),
    ("P=0.3", "pssp:staleness={s},probability=0.3,draws=per-shard"),
    ("P=0.5", "pssp:staleness={s},probability=0.5,draws=per-shard"),
    ("P=1", "ssp:staleness={s}"),
    ("dynamic", "dynamic-pssp:staleness={s},alpha=1,draws=per-shard"),
)

TABLE_4 = {"fluent-ps-64": "AlexNet on CIFAR-10", "fluent-ps-32": "ResNet-56 on CIFAR-10"}
"""Cluster -> rows of Table IV that it stands for."""


def printed(cluster: str, execution: str, label: str) -> tuple[Quote, Quote] | None:
    """Return seconds and delayed pulls per 100 iterations from Table IV. Return None if the table has no such column.

    Under P=0, no pull is delayed, so that both kinds of execution are the same; the paper prints it once.
    """
    column = f"{execution} {label}"
    if column not in TIMES.columns:
        return None
    return TIMES.cell(TABLE_4[cluster], column), DELAYED.cell(TABLE_4[cluster], column)


def table_4(options: Options, tell: TellShare) -> Made:
    """Compare times and delayed pulls for each P, with the soft barrier and lazy execution, on both clusters."""
    iterations = 20 if options.quick else 400
    wanted = [
        (name, s, execution, label, sync.format(s=s) + (f",execution={execution}" if ":" in sync else ""))
        for name, s in (("fluent-ps-64", 3), ("fluent-ps-32", 2))
        for execution in ("soft", "lazy")
        for label, sync in MODELS
        if printed(name, execution, label) is not None
    ]
    clusters = {name: Cluster.preset(name) for name in TABLE_4}
    rows = run_tasks(
        [Task(clusters[name], sync, iterations, float("inf"), 0) for name, _, _, _, sync in wanted],
        lambda done, of, what: tell(what, done / of),
    )
    found: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (name, _, execution, label, _), row in zip(wanted, rows, strict=True):
        cluster = clusters[name]
        pulls_per_100 = cluster.workers * cluster.servers * 100
        found[name, execution, label] = row.finished_s * 100 / iterations, row.delayed_share * pulls_per_100
    tables = []
    for name, title in (
        ("fluent-ps-64", f"{TABLE_4['fluent-ps-64']}: 64 workers, 1 server, s=3"),
        ("fluent-ps-32", f"{TABLE_4['fluent-ps-32']}: 32 workers, 8 servers, s=2"),
    ):
        lines = {}
        for label, _ in MODELS:
            cells: list[tuple[Quote | None, str]] = []
            for execution in ("soft", "lazy"):
                paper = printed(name, execution, label)
                if paper is None:
                    cells += [(None, "-")] * 2
                    continue
                time_s, pulls = found[name, execution, label]
                cells += [(paper[0], f"{time_s:.1f}"), (paper[1], f"{pulls:.0f}")]
            lines[label] = cells
        tables.append(
            beside(f"{PAPER}, Table IV, {title}", lines, ["s, soft", "DPRs, soft", "s, lazy", "DPRs, lazy"])
        )

    def draw() -> Figure:
        from paceline.report.canvas import COLOURS, new_figure

        figure = new_figure(11.0, 4.2)
        for axes, name in zip(figure.subplots(1, 2), TABLE_4, strict=True):
            labels = [label for label, _ in MODELS]
            for number, execution in enumerate(("soft", "lazy")):
                papers = [printed(name, execution, label) for label in labels]
                missing = (math.nan, math.nan)
                for style, values in (
                    ("-", [found.get((name, execution, label), missing)[1] for label in labels]),
                    (":", [math.nan if paper is None else paper[1].value for paper in papers]),
                ):
                    axes.plot(
                        labels,
                        values,
                        style,
                        marker="o",
                        color=COLOURS[number],
                        label=f"{execution}, {'ours' if style == '-' else 'paper'}",
                    )
            axes.set_yscale("symlog", linthresh=10)
            axes.set_title(clusters[name].name, fontsize=10)
            axes.set_ylabel("delayed pulls per 100 iterations")
            axes.grid(alpha=0.3)
        figure.axes[0].legend(frameon=False, fontsize=8.5)
        return figure

    return Made(
        tables=tables,
        figure=draw,
        data={f"{name} {execution} {label}": value for (name, execution, label), value in found.items()},
        notes=[
            "This table contains only times and delayed pulls. For accuracies, run fluentps-fig10.",
            f"Delayed pulls per 100 iterations, as a multiple of those with lazy execution, SSP on "
            f"{TABLE_4['fluent-ps-32']}: {_soft_over_lazy(found)}. The abstract of the paper reports "
            f"{FLUENT_PS.numbers['more-delayed-pulls']} times.",
            "Under PSSP, each server draws by itself, as in the paper's Table III. A worker waits if any server "
            "delays its pull, so with 8 servers the probability is 1 - (1 - P)^8: 0.57, 0.94 and 0.996 for P = 0.1, "
            "0.3 and 0.5.",
        ],
    )


def _soft_over_lazy(found: Mapping[tuple[str, str, str], tuple[float, float]]) -> str:
    soft, lazy = (found["fluent-ps-32", execution, "P=1"][1] for execution in ("soft", "lazy"))
    return f"{soft / lazy:.1f}" if lazy else "none are delayed with lazy execution"


# -- Figure 10: accuracy over time -----------------------------------------------------------------------------

TARGET = Target("accuracy", 0.9, in_a_row=2)
COMMON_RATE = 0.2  # with the push scale 1/n
RATES = (0.1, 0.2, 0.4, 0.8)
ITERATIONS = 200
FIGURE_10 = {
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


def figure_10(options: Options, tell: TellShare) -> Made:
    """Compare the accuracy over time with 64 workers and the paper's push scale, 1/n."""
    cluster = Cluster.preset("fluent-ps-64")
    runs = [
        TrainingRun(
            label=label,
            cluster=cluster,
            sync=sync,
            target=TARGET,
            until_target=False,
            learning_rate=COMMON_RATE,
            batch_size=8,
            iterations=3 if options.quick else ITERATIONS,
            seed=seed,
            every_s=1.0,
        )
        for label, sync in FIGURE_10.items()
        for seed in range(1 if options.quick else options.seeds)
    ]
    grid = [(rate, 0.0) for rate in (RATES[1:2] if options.quick else RATES)]
    common, tuned, best = common_and_tuned(runs, grid, tell)
    measures = [
        (medians(found, lambda o: o.reached_s), medians(found, lambda o: o.values[-1]))
        for found in (common, tuned)
    ]
    ends = medians(common, lambda o: o.time_s)
    finals = measures[0][1]
    quoted = FLUENT_PS.numbers
    rows = {}
    for label in FIGURE_10:
        (common_s, own_s), (common_final, own_final) = zip(*measures, strict=True)
        rows[label] = [
            (None, f"{ends[label]:.0f}"),
            (None, seconds(common_s[label])),
            (PAPER_ACCURACY.get(label), f"{common_final[label]:.3f}"),
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
        from paceline.report.canvas import new_figure

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
        tables=[beside(f"{PAPER}, Fig. 10: 64 workers, {ITERATIONS} iterations", rows, columns)],
        figure=draw,
        data={
            f"{o.run.label}, rate {o.run.learning_rate:g}, seed {o.run.seed}": o.values
            for o in (*common, *tuned)
        },
        notes=[
            f"The paper's accuracies are from Table IV, with AlexNet on CIFAR-10 after {quoted['fig10-iterations']} "
            "iterations.",
            f"PSSP(3, 0.5) takes all its iterations {ends['SSP(3)'] / ends['PSSP(3, 0.5)']:.2f} times as fast as "
            f"SSP(3); in the paper, {quoted['pssp-faster']} times. Its accuracy differs from that of ASP by "
            f"{100 * (finals['PSSP(3, 0.5)'] - finals['ASP']):+.1f} percentage points. With 128 "
            f"workers (Fig. 11), the paper reports {quoted['pssp-more-accurate']} more for P = 0.3 or 0.5.",
            "Fig. 7 of the paper compares FluentPS with PMLS-Caffe, which is not available here. According to the "
            f"paper, the accuracy of PMLS-Caffe under SSP(3) is {quoted['fig7-pmls-caffe']} with more than 8 "
            "workers.",
        ],
    )


MACHINES = (
    "The paper does not say how much the speeds of its machines differ, although this affects the results most. "
    "The files in paceline/sim/presets describe the simulated machines, and mark numbers that are not in the paper."
)

EXHIBITS = (
    Exhibit(
        name="fluentps-fig6",
        source=f"{PAPER}, Fig. 6",
        title="communication time under BSP: as in PS-Lite, with overlap only, and with overlap and EPS",
        differs="Simulated: messages of the size of ResNet-56 over network interfaces of 780 Mbit/s. "
        "No gradients are computed.",
        minutes=0.5,
        make=figure_6,
        covers=("FluentPS, Fig. 6",),
    ),
    Exhibit(
        name="fluentps-fig9",
        source=f"{PAPER}, Fig. 9",
        title="delayed pulls under PSSP(3, c) and under SSP with the same regret bound",
        differs=f"Only the timing is simulated, without training. {MACHINES}",
        minutes=0.5,
        make=figure_9,
        covers=("FluentPS, Fig. 9",),
    ),
    Exhibit(
        name="fluentps-fig10",
        source=f"{PAPER}, Fig. 10",
        title="accuracy over time with 64 workers: BSP, SSP, ASP, PSSP",
        differs=(
            "DigitsNet on scikit-learn's digits replaces AlexNet on CIFAR-10, with fewer iterations. "
            f"{MACHINES}"
        ),
        minutes=15,
        make=figure_10,
        covers=("FluentPS, Fig. 10",),
    ),
    Exhibit(
        name="fluentps-table4",
        source=f"{PAPER}, Table IV",
        title="time and delayed pulls for each P, with the soft barrier and with lazy execution",
        differs=f"Only the timing is simulated, without training. {MACHINES}",
        minutes=1.0,
        make=table_4,
        covers=("FluentPS, Table IV, AlexNet on CIFAR-10", "FluentPS, Table IV, ResNet-56 on CIFAR-10"),
    ),
)
