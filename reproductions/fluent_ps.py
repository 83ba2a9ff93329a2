"""Tables and figures of FluentPS (Yao, Wu and Wang, CLUSTER 2019): conditions, lazy execution and slicing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from paceline.cli.progress import TellShare
from paceline.core.layout import Layout, Parameter, ShardSlice
from paceline.rehearsal.ranking import Task, run_tasks
from paceline.sim import Cluster, Uniform
from paceline.sim.simulate import simulate

from .curves import draw_curves
from .exhibit import Exhibit, Made, Options, beside, seconds
from .training import Target, TrainingRun, common_and_tuned, medians

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

PAPER = "FluentPS (2019)"

# -- Figure 6: overlap synchronization and Elastic Parameter Slicing --------------------------------------------

SERVERS = 8
COMPUTE_S_OF_32 = 0.37  # Table IV: 37.94 s per 100 iterations under ASP with 32 workers
RATE_BPS = 25e9 / 32  # the paper's aggregate bandwidth of 25 Gbit/s, divided among 32 workers


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
SAVED = ("", "86 %", "55 %")
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
        ours = "" if before is None else f"{max(1 - here[n][1] / before[n][1] for n in counts):.0%}"
        times = [("-", f"{here[n][1] * 1000:.1f}") for n in counts]
        rows[setting.label] = [*times, (saved, ours)]
        before = here
    first, last = found[SETTINGS[0].label], found[SETTINGS[-1].label]
    whole = max(1 - last[n][1] / first[n][1] for n in counts)
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
            f"Overlap and even slicing together save {whole:.0%} of the communication time; the paper reports "
            "93.7 %.",
            "The simulation models the transfer of the bytes and the wait for the last byte, but not the costs of "
            "PS-Lite's scheduler and of the work that PS-Lite does for each message. Therefore, it does not show "
            "how much of the paper's saving comes from avoiding these costs.",
        ],
    )


# -- Figure 9 and Table IV: delayed pulls ----------------------------------------------------------------------

PAIRS = (("A", "1/2", 2, 4), ("C", "1/3", 3, 5), ("E", "1/5", 5, 7), ("G", "1/10", 10, 12))
"""The pairs that Fig. 9 compares: a PSSP model and an SSP model with the same regret bound.

Each entry contains the letter of the PSSP model in the figure, c as text, 1/c, and the staleness of the SSP model.
The letter of the SSP model is the next one in the alphabet.
"""


def figure_9(options: Options, tell: TellShare) -> Made:
    """Compare delayed pulls under PSSP(3, c) and SSP with the same regret bound, for each kind of execution."""
    cluster = Cluster.preset("fluent-ps-64")
    iterations = 20 if options.quick else 400
    tasks = []
    labels = []
    for letter, fraction, inverse, s in PAIRS:
        for execution in ("soft", "lazy"):
            tasks.append(f"pssp:staleness=3,probability={1 / inverse},execution={execution}")
            tasks.append(f"ssp:staleness={s},execution={execution}")
            labels += [
                (f"{letter}: PSSP(3, {fraction})", execution),
                (f"{chr(ord(letter) + 1)}: SSP({s})", execution),
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
            ("-", f"{delayed[name, 'soft']:.0f}"),
            ("-", f"{delayed[name, 'lazy']:.0f}"),
            ("-", f"{times[name, 'soft']:.1f}"),
            ("-", f"{times[name, 'lazy']:.1f}"),
        ]
        for name in names
    }
    saved = {
        execution: 1 - delayed[names[-2], execution] / delayed[names[-1], execution]
        for execution in ("soft", "lazy")
        if delayed[names[-1], execution]
    }

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

    savings = ", ".join(f"{share:.1%} ({execution})" for execution, share in saved.items())
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
            f"PSSP(3, 1/10) has {savings} fewer delayed pulls than SSP(12). The paper reports up to 97.1 % (soft) "
            "and 70.7 % (lazy), but gives no numbers for the bars in the figure.",
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

TABLE_4: dict[str, dict[str, dict[str, tuple[float, float]]]] = {
    "fluent-ps-64": {
        "soft": {
            "P=0": (45.85, 0),
            "P=0.1": (52.95, 23.65),
            "P=0.3": (56.67, 126.1),
            "P=0.5": (58.71, 350.3),
            "P=1": (80.77, 4002),
            "dynamic": (72.55, 2670),
        },
        "lazy": {
            "P=0.1": (58.85, 24.80),
            "P=0.3": (60.96, 112.5),
            "P=0.5": (63.89, 254.0),
            "P=1": (64.62, 336.8),
            "dynamic": (62.44, 190.4),
        },
    },
    "fluent-ps-32": {
        "soft": {
            "P=0": (37.94, 0),
            "P=0.1": (41.91, 906.4),
            "P=0.3": (43.51, 3979),
            "P=0.5": (44.61, 7462),
            "P=1": (46.57, 15160),
            "dynamic": (46.76, 4539),
        },
        "lazy": {
            "P=0.1": (38.63, 40.28),
            "P=0.3": (38.40, 32.46),
            "P=0.5": (38.45, 56.77),
            "P=1": (39.16, 115.1),
            "dynamic": (37.94, 49.62),
        },
    },
}
"""The rows of Table IV for CIFAR-10: cluster -> execution -> model -> (seconds, delayed pulls) per 100 iterations."""


def table_4(options: Options, tell: TellShare) -> Made:
    """Compare times and delayed pulls for each P, with the soft barrier and lazy execution, on both clusters."""
    iterations = 20 if options.quick else 400
    wanted = [
        (name, s, execution, label, sync.format(s=s) + (f",execution={execution}" if ":" in sync else ""))
        for name, s in (("fluent-ps-64", 3), ("fluent-ps-32", 2))
        for execution in ("soft", "lazy")
        for label, sync in MODELS
        if label in TABLE_4[name][execution]
    ]
    clusters = {name: Cluster.preset(name) for name in TABLE_4}
    rows = run_tasks(
        [Task(clusters[name], sync, iterations, float("inf"), 0) for name, _, _, _, sync in wanted],
        lambda done, of, what: tell(what, done / of),
    )
    found: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (name, _, execution, label, _), row in zip(wanted, rows, strict=True):
        cluster = clusters[name]
        pulls = cluster.workers * cluster.servers * 100
        found[name, execution, label] = row.finished_s * 100 / iterations, row.delayed_share * pulls
    tables = []
    for name, title in (
        ("fluent-ps-64", "AlexNet on CIFAR-10: 64 workers, 1 server, s=3"),
        ("fluent-ps-32", "ResNet-56 on CIFAR-10: 32 workers, 8 servers, s=2"),
    ):
        lines = {}
        for label, _ in MODELS:
            cells = []
            for execution in ("soft", "lazy"):
                paper = TABLE_4[name][execution].get(label)
                ours = found.get((name, execution, label))
                for part, digits in ((0, 1), (1, 0)):
                    cells.append(
                        (
                            "-" if paper is None else f"{paper[part]:.{digits}f}",
                            "-" if ours is None else f"{ours[part]:.{digits}f}",
                        )
                    )
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
                for style, values in (
                    ("-", [found.get((name, execution, label), (0, None))[1] for label in labels]),
                    (":", [TABLE_4[name][execution].get(label, (0, None))[1] for label in labels]),
                ):
                    axes.plot(
                        labels,
                        [float("nan") if value is None else value for value in values],
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
            "Under PSSP, each server draws by itself, as in the paper's Table III. A worker waits if any server "
            "delays its pull, so with 8 servers the probability is 1 - (1 - P)^8: 0.57, 0.94 and 0.996 for P = 0.1, "
            "0.3 and 0.5.",
        ],
    )


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
    "ASP": "75.9%",
    "SSP(3)": "76.4%",
    "PSSP(3, 0.1)": "76.0%",
    "PSSP(3, 0.3)": "75.9%",
    "PSSP(3, 0.5)": "76.5%",
}
"""Accuracies from Table IV: AlexNet on CIFAR-10, soft barrier."""


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
    rows = {}
    for label in FIGURE_10:
        (common_s, own_s), (common_final, own_final) = zip(*measures, strict=True)
        rows[label] = [
            ("-", f"{ends[label]:.0f}"),
            ("-", seconds(common_s[label])),
            (PAPER_ACCURACY.get(label, "-"), f"{common_final[label]:.1%}"),
            ("-", f"{best[label][0]:g}"),
            ("-", seconds(own_s[label])),
            ("-", f"{own_final[label]:.1%}"),
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
            "The paper's accuracies were measured with AlexNet on CIFAR-10 after 4000 iterations.",
            "Fig. 7 of the paper compares FluentPS with PMLS-Caffe, which is not available here. According to the "
            "paper, the accuracy of PMLS-Caffe under SSP(3) stays below 20 % with more than 8 workers.",
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
    ),
    Exhibit(
        name="fluentps-fig9",
        source=f"{PAPER}, Fig. 9",
        title="delayed pulls under PSSP(3, c) and under SSP with the same regret bound",
        differs=f"Only the timing is simulated, without training. {MACHINES}",
        minutes=0.5,
        make=figure_9,
    ),
    Exhibit(
        name="fluentps-fig10",
        source=f"{PAPER}, Fig. 10",
        title="accuracy over time with 64 workers: BSP, SSP, ASP, PSSP",
        differs=(
            "DigitsNet on scikit-learn's digits replaces AlexNet on CIFAR-10, with 200 iterations instead of 4000. "
            f"{MACHINES}"
        ),
        minutes=15,
        make=figure_10,
    ),
    Exhibit(
        name="fluentps-table4",
        source=f"{PAPER}, Table IV",
        title="time and delayed pulls for each P, with the soft barrier and with lazy execution",
        differs=f"Only the timing is simulated, without training. {MACHINES}",
        minutes=1.0,
        make=table_4,
    ),
)
