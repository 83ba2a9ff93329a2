"""What the activity of a run's workers looks like in a report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..trace.activity import SPAN_UNITS_PER_S, Activity, Happening
from ..trace.activity_cells import KINDS
from ..trace.eras import LEAST_CLASS_S, Era, Total
from .run_report import Mark, ModelInForce, Spans, TimelineReport, WaitingFor

__all__ = ["marks_of", "models_of", "timeline_of", "times_of"]

MOST_REASONS = 100  # number of reasons for waiting under one model that are listed separately
MOST_FINISHED = 32  # if more workers have finished, that is not marked

REASONS = {
    "push": "a push of worker {}",
    "change": "worker {} to reach the change of the model",
    "joined": "worker {} to join",
    "finished": "worker {}, which finished",
    "lost": "worker {}, which was lost",
    "timer": "a timer of the sync model",
}
"""Why a pull waited, as what it waited for."""


def timeline_of(activity: Activity) -> TimelineReport | None:
    """Return what each worker did over time; None if no worker has done anything."""
    workers = tuple(sorted(activity.workers))
    if not workers or not activity.cells.buckets:
        return None
    cells = activity.cells
    own: dict[int, list[int]] = {worker: [] for worker in workers}  # the places of its spans
    spans = list(activity.spans)
    for place, span in enumerate(spans):
        own[span.worker].append(place)
    for worker in workers:
        own[worker].sort(key=lambda place: spans[place].begun)
    return TimelineReport(
        width_s=cells.width_s,
        buckets=cells.buckets,
        workers=workers,
        shares=tuple(map(cells.shares, workers)),
        awaited=tuple(map(cells.awaited, workers)),
        spans=tuple(
            Spans(
                worker,
                tuple(spans[place].begun for place in places),
                tuple(spans[place].lengths for place in places),
                tuple(spans[place].awaited for place in places),
            )
            for worker, places in own.items()
        ),
        exact_from_s=activity.exact_from_s,
        barriers_s=tuple(round(at_s * SPAN_UNITS_PER_S) / SPAN_UNITS_PER_S for at_s in activity.barriers_s),
        error_s=activity.converter.bound_s,
    )


def times_of(activity: Activity, worker: int) -> dict[str, float]:
    """Return the seconds that a worker has spent on each kind of activity."""
    return dict(zip(KINDS, activity.workers[worker].times_s, strict=True))


def models_of(activity: Activity, end_s: float) -> tuple[ModelInForce, ...]:
    """Return staleness and waiting under each model that was in force."""
    eras = activity.eras
    ends = [(era.from_s, era.from_updates) for era in eras[1:]] + [(end_s, activity.updates)]
    return tuple(_model(era, *end) for era, end in zip(eras, ends, strict=True))


def _model(era: Era, to_s: float, to_updates: int) -> ModelInForce:
    longest = sorted(era.waits.items(), key=lambda each: -each[1].total_s)
    waiting = [_reason(reason, awaited, total) for (reason, awaited), total in longest[:MOST_REASONS]]
    if rest := longest[MOST_REASONS:]:
        total_s = sum(total.total_s for _, total in rest)
        waiting.append(WaitingFor("other workers", total_s, sum(total.count for _, total in rest)))
    return ModelInForce(
        sync=era.sync,
        from_s=era.from_s,
        to_s=to_s,
        staleness=tuple(sorted(era.staleness.items())),
        waiting=tuple(waiting),
        wait_lengths=tuple(
            (LEAST_CLASS_S * 2**length, count) for length, count in sorted(era.lengths.items())
        ),
        updates=to_updates - era.from_updates,
    )


def _reason(reason: str, awaited: int, total: Total) -> WaitingFor:
    return WaitingFor(REASONS[reason].format(awaited), total.total_s, total.count, awaited)


def marks_of(
    activity: Activity, departures: Sequence[Mapping[str, object]], left: Collection[int]
) -> tuple[Mark, ...]:
    """Return what happened once, in order of time.

    Args:
        activity: what the workers did.
        departures: why workers have left before they had finished, as in `summary.json`.
        left: the workers that left before their scripts had ended.
    """
    causes: dict[int, list[str]] = {}  # worker -> why its incarnations were lost, in order
    for departure in departures:
        if departure.get("fate") == "lost":
            causes.setdefault(int(str(departure["worker"])), []).append(str(departure.get("cause", "")))
    happenings = list(activity.happenings)
    finished = sum(each.kind == "finished" for each in happenings)
    marks = []
    for each in happenings:
        if each.kind == "finished" and finished > MOST_FINISHED and each.worker not in left:
            continue
        marks.append(_mark(each, causes, left))
    return tuple(marks)


def _mark(happening: Happening, causes: dict[int, list[str]], left: Collection[int]) -> Mark:
    worker, at_s = happening.worker, happening.time_s
    match happening.kind:
        case "joined":
            return Mark(at_s, "joined", f"worker {worker} joined the run", worker)
        case "lost":
            own = causes.get(worker, [])
            cause = own.pop(0) if own else ""
            return Mark(at_s, "lost", f"worker {worker} was lost{': ' if cause else ''}{cause}", worker)
        case "model":
            return Mark(at_s, "model", f"the sync model changed to {happening.text}")
        case "rate":
            return Mark(at_s, "guard", f"the guard set the factor of the learning rate to {happening.text}")
        case "finished" if worker in left:
            return Mark(at_s, "left", f"worker {worker} left the run", worker)
        case _:
            return Mark(at_s, "finished", f"worker {worker} finished", worker)
