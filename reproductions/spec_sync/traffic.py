"""Figures 12 and 13 of SpecSync: bytes sent, over time and by kind of message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cli.console import TellShare
from paceline.sim import Cluster, simulate
from paceline.sync.actions import AnswerPull
from paceline.sync.events import PushReceived
from paceline.trace.recording import Trace

from ..exhibit import Exhibit, Made, Options, beside
from ..papers import SPEC_SYNC
from ..training import TrainingOutcome, run_all
from .convergence import runs_of
from .workloads import CIFAR_10, IMAGENET, MF, PAPER, TIMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

ITERATION_S = CIFAR_10.iteration_s

KINDS = {
    "push and pull": ("push", "pull"),
    "pulls after restarts": ("pull again",),
    "notifications": ("control",),
}


def bytes_over_time(shard: Trace, size_bytes: int, every_s: float) -> list[tuple[float, float]]:
    """Return points (seconds, bytes so far), one every `every_s` seconds, from the trace of a shard.

    The bytes are those of pushes and of answers to pulls.
    """
    total, points, due_s = 0.0, [], 0.0
    for entry in shard.entries:
        while shard.time_s(entry) >= due_s:
            points.append((due_s, total))
            due_s += every_s
        total += size_bytes * isinstance(entry.event, PushReceived)
        total += size_bytes * sum(isinstance(action, AnswerPull) for action in entry.actions)
    return points


def figures_12_and_13(options: Options, tell: TellShare) -> Made:
    """Compare the bytes sent, over time and by kind of message, under Original (ASP) and SpecSync-Adaptive."""
    cluster = Cluster.preset("spec-sync-1")
    iterations = 10 if options.quick else 100
    found = {}
    for number, (label, sync) in enumerate([("Original", "asp"), ("Adaptive", "spec-sync")]):
        tell(label, number / 2)
        result = simulate(cluster, sync, iterations, record=True)
        curve = bytes_over_time(result.trace[0], cluster.size_bytes, ITERATION_S)
        found[label] = result, curve
    rows = {}
    original = found["Original"][0]
    for label, (result, _) in found.items():
        total = result.bytes_sent
        shares = [
            (None, f"{sum(result.bytes_by_kind[kind] for kind in kinds) / total:.2%}")
            for kinds in KINDS.values()
        ]
        per_s = total / result.time_s / (original.bytes_sent / original.time_s)
        rows[label] = [
            *shares,
            (SPEC_SYNC.numbers["fig12-rate"] if label == "Adaptive" else None, f"{per_s:.2f}"),
            (None, f"{result.restarts / iterations / 40:.1%}"),
        ]
    columns = [*KINDS, "bytes per s,\nOriginal = 1", "iterations\nrestarted"]

    def draw() -> Figure:
        from paceline.look.timelines import COLOURS, new_figure

        figure = new_figure(10.0, 4.0)
        left, right = figure.subplots(1, 2)
        for number, (label, (_, curve)) in enumerate(found.items()):
            left.plot([t for t, _ in curve], [b / 1e9 for _, b in curve], color=COLOURS[number], label=label)
        left.set_xlabel("virtual seconds")
        left.set_ylabel("GB so far")
        left.set_title("Fig. 12")
        left.legend(frameon=False)
        kinds = found["Adaptive"][0].bytes_by_kind
        values = [sum(kinds[kind] for kind in parts) / 1e9 for parts in KINDS.values()]
        right.bar(list(KINDS), values, color=COLOURS[: len(KINDS)])
        right.set_yscale("log")
        right.set_ylabel("GB")
        right.set_title("Fig. 13: SpecSync-Adaptive")
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Figs. 12 and 13: bytes sent", rows, columns)],
        figure=draw,
        data={label: result.bytes_by_kind for label, (result, _) in found.items()},
        notes=[
            f"The paper's totals until convergence on CIFAR-10 are {SPEC_SYNC.numbers['bytes-original']} TB under "
            f"Original and {SPEC_SYNC.numbers['bytes-adaptive']} TB under SpecSync-Adaptive, which converges sooner. "
            "specsync-fig8 compares the times to convergence.",
        ],
    )


def figures_12_and_13_of_others(options: Options, tell: TellShare) -> Made:
    """Compare the bytes that matrix factorization and ImageNet send until convergence, trained on stand-ins."""
    single = Options(quick=options.quick, seeds=1)
    found: dict[str, dict[str, TrainingOutcome]] = {}
    for number, workload in enumerate((MF, IMAGENET)):
        runs = runs_of(workload, {"Original": "asp", "Adaptive": "spec-sync"}, single)
        outcomes = run_all(runs, lambda done, of, what, n=number: tell(what, (n + done / max(1, of)) / 2))  # type: ignore[misc]
        found[workload.name] = {outcome.run.label: outcome for outcome in outcomes}
    rows = {}
    for name, by_label in found.items():
        total = sum(by_label["Original"].bytes_by_kind.values())
        per_s = total / by_label["Original"].time_s
        for label, outcome in by_label.items():
            sent = outcome.bytes_by_kind
            mine = sum(sent.values())
            rows[f"{name}, {label}"] = [
                *((None, f"{sum(sent[kind] for kind in kinds) / mine:.2%}") for kinds in KINDS.values()),
                (None, f"{mine / outcome.time_s / per_s:.2f}"),
                (None, f"{mine / 1e9:.1f}"),
                (None, f"{sent['push'] / sent['pull']:.1%}"),
            ]
    columns = [
        *KINDS,
        "bytes per s,\nOriginal = 1",
        "GB until\nconvergence",
        "pushes\nrelative to\npulls",
    ]

    def draw() -> Figure:
        from paceline.look.timelines import COLOURS, DASHES, new_figure

        figure = new_figure(12.0, 4.0)
        *curves, right = figure.subplots(1, 3)
        width = 0.25
        for number, (name, by_label) in enumerate(found.items()):
            left = curves[number]
            left.set_title(f"Fig. 12: {name}, until convergence")
            left.set_xlabel("virtual seconds")
            left.set_ylabel("GB so far")
            for variant, (label, outcome) in enumerate(by_label.items()):
                each = sum(outcome.bytes_by_kind.values()) / max(1, len(outcome.pushes_s)) / 1e9
                left.plot(
                    outcome.pushes_s,
                    [each * (index + 1) for index in range(len(outcome.pushes_s))],
                    color=COLOURS[number],
                    linestyle=DASHES[variant],
                    label=label,
                )
            kinds = by_label["Adaptive"].bytes_by_kind
            right.bar(
                [place + (number - 0.5) * width for place in range(len(KINDS))],
                [sum(kinds[kind] for kind in parts) / 1e9 for parts in KINDS.values()],
                width * 0.92,
                color=COLOURS[number],
                label=name,
            )
        for axes in curves:
            axes.legend(frameon=False, fontsize=8)
        right.set_xticks(range(len(KINDS)), [kind.replace(" after", "\nafter") for kind in KINDS], fontsize=8)
        right.set_yscale("log")
        right.set_ylabel("GB")
        right.set_title("Fig. 13: SpecSync-Adaptive")
        right.legend(frameon=False)
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Figs. 12 and 13: matrix factorization and ImageNet", rows, columns)],
        figure=draw,
        data={name: {label: o.bytes_by_kind for label, o in each.items()} for name, each in found.items()},
        notes=[
            "Matrix factorization pushes only the rows of the users and items in the batch, each with its index; "
            "pulls contain all rows. The curves give each iteration its mean number of bytes. The paper prints no "
            "numbers for these two workloads.",
            "According to the paper, the bytes per second under both schemes are very close. Here, they are not.",
            "A run ends when it has converged, or after its last iteration.",
        ],
    )


EXHIBITS = (
    Exhibit(
        name="specsync-fig12",
        source=f"{PAPER}, Figs. 12 and 13",
        title="bytes sent, over time and by kind of message",
        differs=TIMES,
        minutes=0.3,
        make=figures_12_and_13,
        covers=("SpecSync, Fig. 12, CIFAR-10", "SpecSync, Fig. 13, CIFAR-10"),
    ),
    Exhibit(
        name="specsync-fig12-others",
        source=f"{PAPER}, Figs. 12 and 13",
        title="bytes sent until convergence: matrix factorization and ImageNet",
        differs=f"{MF.stand_in} {IMAGENET.stand_in}",
        minutes=3,
        make=figures_12_and_13_of_others,
        covers=("SpecSync, Fig. 12, others", "SpecSync, Fig. 13, others"),
    ),
)
