"""Figure 9 and Table IV of FluentPS: delayed pulls (DPRs) and times, with the soft barrier and lazy execution."""

from __future__ import annotations

import math

from paceline.cli.console import TellShare
from paceline.lab.ranking import Task, run_tasks
from paceline.look.timelines import COLOURS, new_figure
from paceline.sim import Cluster, LogNormal, Occasional, Times, Uniform

from ..clusters import UNKNOWN_SPEEDS
from ..exhibit import Exhibit, Figure, Made, Options, beside
from ..papers import FLUENT_PS, Quote
from ..verdicts import Measured

PAPER = str(FLUENT_PS)
TIMES, DELAYED = (FLUENT_PS.tables[f"table4-{name}"] for name in ("time", "delayed"))

PAIRS = tuple(
    (letters.split(", "), int(inverse), int(s))
    for letters, (inverse, s) in FLUENT_PS.tables["fig9-models"].rows.items()
)
"""The pairs that Fig. 9 compares: a PSSP model and an SSP model that have the same regret bound.

Each entry is (letters of the two models, 1/c of the PSSP model, s of the SSP model).
"""


def _uniform(mean_s: float) -> Uniform:
    return Uniform(low=0.95 * mean_s, high=1.05 * mean_s)


def kinds_of_inequality(workers: int) -> dict[str, Cluster]:
    """Return clusters whose workers are unequal in different ways."""
    slow = workers // 8
    pausing: Times = Occasional(base=_uniform(1.0), factor=5.0, lasting=10.0, every=200.0)
    return {
        "an eighth of the workers are always half as fast": Cluster(
            compute_s=[_uniform(1.0)] * (workers - slow) + [_uniform(2.0)] * slow
        ),
        "all workers jitter (log-normal, sigma 0.3)": Cluster(
            compute_s=[LogNormal(median=1.0, sigma=0.3)] * workers
        ),
        "all workers pause now and then (5x slower in 10 of 200 s)": Cluster(compute_s=[pausing] * workers),
    }


def _percent_less(ours: float, others: float, how: str) -> Measured:
    """Return by how many percent a number is below another one; unknown if the other one is 0."""
    if not others:
        return Measured(value=None, low=None, high=None, how=how)
    return Measured.exactly(100 * (1 - ours / others), how)


def figure_9(options: Options, tell: TellShare) -> Made:
    """Compare delayed pulls under PSSP(3, c) and SSP with the same regret bound, for each kind of execution."""
    preset = Cluster.preset("fluent-ps-64")
    clusters = {"": preset, **({} if options.quick else kinds_of_inequality(preset.workers))}
    iterations = 10 if options.quick else 400
    syncs = {
        name: sync
        for (pssp, ssp), inverse, s in PAIRS
        for name, sync in (
            (f"{pssp}: PSSP(3, 1/{inverse})", f"pssp:staleness=3,probability={1 / inverse}"),
            (f"{ssp}: SSP({s})", f"ssp:staleness={s}"),
        )
    }
    places = [
        (kind, name, execution) for kind in clusters for name in syncs for execution in ("soft", "lazy")
    ]
    found = run_tasks(
        [
            Task(clusters[kind], f"{syncs[name]},execution={execution}", iterations, float("inf"), 0)
            for kind, name, execution in places
        ],
        lambda done, of, what: tell(what, done / of),
    )
    every = dict(zip(places, found, strict=True))
    of_preset = {(name, execution): every["", name, execution] for _, name, execution in places}
    delayed = {place: row.delayed_share * preset.workers * 100 for place, row in of_preset.items()}
    times = {place: row.finished_s * 100 / iterations for place, row in of_preset.items()}
    names = list(syncs)
    table_rows = {
        name: [
            (None, f"{numbers[name, execution]:.{digits}f}")
            for numbers, digits in ((delayed, 0), (times, 1))
            for execution in ("soft", "lazy")
        ]
        for name in names
    }
    *_, pssp, ssp = names
    quoted = FLUENT_PS.numbers

    def percent_less(kind: str, measure: str, one: tuple[str, str], other: tuple[str, str]) -> Measured:
        ours, others = (getattr(every[kind, *place], measure) for place in (one, other))
        return _percent_less(ours, others, kind)

    def of_kind(kind: str) -> dict[str, Measured]:
        soft, lazy = (
            sum(every[kind, name, each].delayed_share for name in names[1::2]) for each in ("soft", "lazy")
        )
        faster = max(
            every[kind, n, "soft"].finished_s / every[kind, n, "lazy"].finished_s for n in names[1::2]
        )
        return {
            "fewer-delayed-pulls-soft": percent_less(kind, "delayed_share", (pssp, "soft"), (ssp, "soft")),
            "fewer-delayed-pulls-lazy": percent_less(kind, "delayed_share", (pssp, "lazy"), (ssp, "lazy")),
            "less-time": percent_less(kind, "finished_s", (pssp, "soft"), (ssp, "soft")),
            "lazy-fewer-delayed-pulls": _percent_less(lazy, soft, kind),
            "lazy-faster": Measured.exactly(faster, kind),
        }

    by_kind = {kind: of_kind(kind) for kind in clusters}
    columns = {
        "fewer-delayed-pulls-soft": "DPRs saved\nby PSSP,\nsoft, %",
        "fewer-delayed-pulls-lazy": "DPRs saved\nby PSSP,\nlazy, %",
        "less-time": "time saved\nby PSSP,\nsoft, %",
        "lazy-fewer-delayed-pulls": "DPRs saved\nby lazy,\nSSP, %",
        "lazy-faster": "speed-up\nby lazy,\nSSP",
    }
    kinds = {
        kind or "the preset fluent-ps-64": [(quoted[key], str(numbers[key])) for key in columns]
        for kind, numbers in by_kind.items()
    }

    def draw() -> Figure:
        figure = new_figure(9.5, 4.4)
        axes = figure.subplots()
        for number, execution in enumerate(("soft", "lazy")):
            axes.bar(
                [index + (number - 0.5) * 0.38 for index in range(len(names))],
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
            ),
            beside(f"{pssp} compared with {ssp}; lazy execution of SSP", kinds, list(columns.values())),
        ],
        figure=draw,
        data={f"{name} {execution}": value for (name, execution), value in delayed.items()},
        notes=[
            "The paper gives no numbers for the bars of the figure, and does not say how its machines differ. So the "
            "comparison is repeated for three kinds of differences.",
            "Under lazy execution, all four SSP models are compared with the soft barrier: their delayed pulls "
            "together, and the time of that which gains the most.",
        ],
        measured={key: [numbers[key] for numbers in by_kind.values()] for key in columns},
    )


MODELS = (
    ("P=0", "asp"),
    ("P=0.1", "pssp:staleness={s},probability=0.1,draws=per-shard"),
    ("P=0.3", "pssp:staleness={s},probability=0.3,draws=per-shard"),
    ("P=0.5", "pssp:staleness={s},probability=0.5,draws=per-shard"),
    ("P=1", "ssp:staleness={s}"),
    ("dynamic", "dynamic-pssp:staleness={s},alpha=1,draws=per-shard"),
)

TABLE_4 = {
    "fluent-ps-64": ("AlexNet on CIFAR-10", "AlexNet on CIFAR-100"),
    "fluent-ps-32": ("ResNet-56 on CIFAR-10", "ResNet-56 on CIFAR-100"),
}
"""Cluster -> rows of Table IV that it stands for. Both rows are simulated by the same run."""


def printed(row: str, execution: str, label: str) -> tuple[Quote, Quote] | None:
    """Return seconds and delayed pulls per 100 iterations from Table IV. Return None if the table has no such column.

    Under P=0, no pull is delayed, so both kinds of execution are the same, and the paper prints only one column.
    """
    column = f"{execution} {label}"
    if column not in TIMES.columns:
        return None
    return TIMES.cell(row, column), DELAYED.cell(row, column)


def table_4(options: Options, tell: TellShare) -> Made:
    """Compare times and delayed pulls for each P, with the soft barrier and lazy execution, on both clusters."""
    iterations = 20 if options.quick else 400
    wanted = [
        (name, s, execution, label, sync.format(s=s) + (f",execution={execution}" if ":" in sync else ""))
        for name, s in (("fluent-ps-64", 3), ("fluent-ps-32", 2))
        for execution in ("soft", "lazy")
        for label, sync in MODELS
        if printed(TABLE_4[name][0], execution, label) is not None
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
    measured = {}
    claims = FLUENT_PS.claims()  # without the numbers with which a table compares its other numbers
    for name, row_name, machines in (
        (cluster, row, described)
        for cluster, described in (
            ("fluent-ps-64", "64 workers, 1 server, s=3"),
            ("fluent-ps-32", "32 workers, 8 servers, s=2"),
        )
        for row in TABLE_4[cluster]
    ):
        lines = {}
        for label, _ in MODELS:
            cells: list[tuple[Quote | None, str]] = []
            for execution in ("soft", "lazy"):
                paper = printed(row_name, execution, label)
                if paper is None:
                    cells += [(None, "-")] * 2
                    continue
                time_s, pulls = found[name, execution, label]
                base_s, base_pulls = found[name, "soft", "P=0"][0], found[name, "soft", "P=1"][1]
                column = f"{execution} {label}"
                measured[f"table4-time: {row_name}, {column}"] = Measured.exactly(time_s / base_s)
                measured[f"table4-delayed: {row_name}, {column}"] = Measured.exactly(pulls / base_pulls)
                cells += [(paper[0], f"{time_s:.1f}"), (paper[1], f"{pulls:.0f}")]
            lines[label] = cells
        tables.append(
            beside(
                f"{PAPER}, Table IV, {row_name}: {machines}",
                lines,
                ["s, soft", "DPRs, soft", "s, lazy", "DPRs, lazy"],
            )
        )

    def draw() -> Figure:
        figure = new_figure(11.0, 4.2)
        for axes, name in zip(figure.subplots(1, 2), TABLE_4, strict=True):
            labels = [label for label, _ in MODELS]
            for number, execution in enumerate(("soft", "lazy")):
                papers = [printed(TABLE_4[name][0], execution, label) for label in labels]
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
                        label=f"{execution}, {'ours' if style == '-' else 'paper (CIFAR-10)'}",
                    )
            axes.set_yscale("symlog", linthresh=10)
            axes.set_title(clusters[name].name, fontsize=10)
            axes.set_ylabel("delayed pulls per 100 iterations")
            axes.grid(alpha=0.3)
        figure.axes[0].legend(frameon=False, fontsize=8.5)
        return figure

    soft, lazy = (found["fluent-ps-32", execution, "P=1"][1] for execution in ("soft", "lazy"))
    more = soft / lazy
    return Made(
        tables=tables,
        figure=draw,
        data={f"{name} {execution} {label}": value for (name, execution, label), value in found.items()},
        measured={
            **{key: each for key, each in measured.items() if key in claims},
            "more-delayed-pulls": Measured.exactly(more),
            "pssp-faster": Measured.exactly(
                found["fluent-ps-64", "soft", "P=1"][0] / found["fluent-ps-64", "soft", "P=0.5"][0]
            ),
        },
        notes=[
            "This table contains only times, which are means over the workers, and delayed pulls. For accuracies, run "
            "fluentps-fig8 and fluentps-fig10. Without training, the runs for CIFAR-10 and CIFAR-100 are the same; the "
            "paper's networks differ only in the last layer.",
            f"Delayed pulls per 100 iterations, as a multiple of those with lazy execution, SSP on "
            f"{TABLE_4['fluent-ps-32'][0]}: {more:.1f}. The abstract of the paper reports "
            f"{FLUENT_PS.numbers['more-delayed-pulls']} times.",
            "Under PSSP, each server draws by itself, as in the paper's Table III. A worker waits if any server "
            "delays its pull, so with 8 servers the probability is 1 - (1 - P)^8: 0.57, 0.94 and 0.996 for P = 0.1, "
            "0.3 and 0.5.",
        ],
    )


EXHIBITS = (
    Exhibit(
        name="fluentps-fig9",
        title="delayed pulls under PSSP(3, c) and under SSP with the same regret bound",
        differs=f"Only the timing is simulated, without training. {UNKNOWN_SPEEDS}",
        minutes=1,
        make=figure_9,
    ),
    Exhibit(
        name="fluentps-table4",
        title="time and delayed pulls for each P, with the soft barrier and with lazy execution",
        differs=f"Only the timing is simulated, without training. {UNKNOWN_SPEEDS}",
        minutes=9,
        make=table_4,
        numbers=tuple(f"Table IV, {row}" for rows in TABLE_4.values() for row in rows),
    ),
)
