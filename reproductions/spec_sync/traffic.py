"""Figures 12 and 13 of SpecSync: bytes sent, over time and by kind of message."""

from __future__ import annotations

from paceline.cli.console import TellShare
from paceline.look.timelines import COLOURS, DASHES, new_figure
from paceline.studies.statistics import Time, compare_samples, mean_interval

from ..exhibit import Exhibit, Figure, Made, Options, beside
from ..papers import SPEC_SYNC
from ..training import TrainingOutcome, run_all, speed_up
from ..verdicts import Measured
from .convergence import runs_of
from .workloads import PAPER, WITH_DATA, WORKLOADS

KINDS = {
    "push and pull": ("push", "pull"),
    "pulls after restarts": ("pull again",),
    "notifications": ("control",),
}


def figures_12_and_13(options: Options, tell: TellShare) -> Made:
    """Compare the bytes that the workloads send until convergence, under Original (ASP) and SpecSync-Adaptive."""
    found: dict[str, dict[str, list[TrainingOutcome]]] = {}
    for number, workload in enumerate(WORKLOADS.values()):
        runs = runs_of(workload, {"Original": "asp", "Adaptive": "spec-sync"}, options)
        outcomes = run_all(runs, lambda what, share, n=number: tell(what, (n + share) / 3))  # type: ignore[misc]
        found[workload.name] = {}
        for outcome in outcomes:
            found[workload.name].setdefault(outcome.run.label, []).append(outcome)
    rows, rates, totals = {}, {}, {}
    for name, by_label in found.items():
        per_s = {label: [_total(o) / o.time_s for o in outcomes] for label, outcomes in by_label.items()}
        rates[name] = compare_samples(per_s["Adaptive"], per_s["Original"])
        for label, outcomes in by_label.items():
            one = outcomes[0]
            totals[name, label] = Measured.of(mean_interval([_total(o) / 1e12 for o in outcomes]))
            converged = sum(o.time.reached for o in outcomes)
            rows[f"{name}, {label}"] = [
                *((None, f"{_share(one, kinds):.2%}") for kinds in list(KINDS.values())[1:]),
                ((SPEC_SYNC.numbers["fig12-rate"], str(rates[name])) if label == "Adaptive" else (None, "1")),
                (
                    SPEC_SYNC.numbers[f"bytes-{label.lower()}"] if name == "CIFAR-10" else None,
                    str(totals[name, label]),
                ),
                (None, f"{converged} of {len(outcomes)}"),
            ]
    of_cifar = [outcome for outcomes in found["CIFAR-10"].values() for outcome in outcomes]
    saved = Measured.saved(speed_up(of_cifar, "Original", "Adaptive", _until_convergence))
    columns = [*list(KINDS)[1:], "bytes per s,\nOriginal = 1", "TB until\nconvergence", "converged"]
    return Made(
        tables=[beside(f"{PAPER}, Figs. 12 and 13: bytes sent until convergence", rows, columns)],
        figure=lambda: _draw(
            {name: {label: o[0] for label, o in each.items()} for name, each in found.items()}
        ),
        data={
            name: {label: [o.bytes_by_kind for o in outcomes] for label, outcomes in each.items()}
            for name, each in found.items()
        },
        notes=[
            "Matrix factorization pushes only the rows of the users and items in the batch, each with its index; "
            "pulls contain all rows. The curves give each iteration its mean number of bytes. The paper prints totals "
            "for CIFAR-10 only.",
            "A run ends when it has converged, or after its last iteration. All runs use the common learning rate.",
            f"On CIFAR-10, Adaptive saves {saved} % of the bytes until convergence; in the paper, "
            f"{SPEC_SYNC.numbers['bytes-saved']}.",
        ],
        measured={
            "fig12-rate": [Measured.of(rates[name], name) for name in ("CIFAR-10", "MF", "ImageNet")],
            "bytes-saved": saved,
            **{f"bytes-{label.lower()}": totals["CIFAR-10", label] for label in ("Original", "Adaptive")},
        },
    )


def _share(outcome: TrainingOutcome, kinds: tuple[str, ...]) -> float:
    """Return the share of some kinds of messages in all bytes."""
    return sum(outcome.bytes_by_kind[kind] for kind in kinds) / _total(outcome)


def _until_convergence(outcome: TrainingOutcome) -> Time:
    """Return the bytes until convergence, which are censored if the run has not converged."""
    return Time(float(_total(outcome)), float(_total(outcome)), outcome.time.reached)


def _total(outcome: TrainingOutcome) -> int:
    return sum(outcome.bytes_by_kind.values())


def _draw(found: dict[str, dict[str, TrainingOutcome]]) -> Figure:
    figure = new_figure(16.0, 4.0)
    *curves, right = figure.subplots(1, 4)
    width = 0.25
    for number, (name, by_label) in enumerate(found.items()):
        left = curves[number]
        left.set(title=f"Fig. 12: {name}, until convergence", xlabel="virtual seconds", ylabel="GB so far")
        for variant, (label, outcome) in enumerate(by_label.items()):
            each = _total(outcome) / max(1, len(outcome.pushes_s)) / 1e9
            left.plot(
                outcome.pushes_s,
                [each * (index + 1) for index in range(len(outcome.pushes_s))],
                color=COLOURS[number],
                linestyle=DASHES[variant],
                label=label,
            )
        left.legend(frameon=False, fontsize=8)
        kinds = by_label["Adaptive"].bytes_by_kind
        right.bar(
            [place + (number - 1) * width for place in range(len(KINDS))],
            [sum(kinds[kind] for kind in parts) / 1e9 for parts in KINDS.values()],
            width * 0.92,
            color=COLOURS[number],
            label=name,
        )
    right.set_xticks(range(len(KINDS)), [kind.replace(" after", "\nafter") for kind in KINDS], fontsize=8)
    right.set(yscale="log", ylabel="GB", title="Fig. 13: SpecSync-Adaptive")
    right.legend(frameon=False)
    return figure


EXHIBITS = (
    Exhibit(
        name="specsync-fig12",
        title="bytes sent until convergence, over time and by kind of message",
        differs=" ".join(workload.stand_in for workload in WORKLOADS.values()),
        minutes=6,
        make=figures_12_and_13,
        numbers=tuple(f"Fig. {n}, {part}" for n in (12, 13) for part in ("CIFAR-10", "others")),
        with_data=WITH_DATA,
        trains_on=tuple(workload.published for workload in WORKLOADS.values()),
    ),
)
