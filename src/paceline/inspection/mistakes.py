"""From observations to mistakes: what would go wrong if a script ran with several workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from .observations import Kind, Observation
from .source import UnguardedWrite

__all__ = ["Evidence", "Mistake", "Severity", "find_mistakes"]

Severity = Literal["error", "wrong", "note"]
"""error: the run fails; wrong: the run ends with a wrong result or a damaged file; note: worth knowing."""

SEVERITIES: tuple[Severity, ...] = ("error", "wrong", "note")

DISTRIBUTE = "Distribute the loader with paceline.prepare or paceline.distribute"
ONE_WRITER = "Use paceline.save(obj, path), or write only: if paceline.is_main()."
WRAP = (
    "Wrap the optimizer: model, optimizer, loader = paceline.prepare(model, optimizer, loader). Call only the step() "
    "of the optimizer that prepare returns."
)
SEE = "Correct what the message names. With paceline run, the whole traceback is shown."

CATALOG: dict[str, tuple[Severity, str, str]] = {
    "fails alone": (
        "error",
        "The script fails in a single process, too: {detail}",
        "Make the script run with plain python first.",
    ),
    "no steps": ("error", "The script made no step of an optimizer{late}.", "{advice}"),
    "fails in a run": ("error", "The script fails in a run: {detail}", SEE),
    "optimizer not distributed": (
        "wrong",
        "The {detail} optimizer is not distributed, so every worker trains its own weights.",
        WRAP,
    ),
    "identical workers": (
        "wrong",
        "All {workers} workers compute the same gradients in each of the first {steps} steps: they use the same "
        "data, so further workers add nothing.",
        DISTRIBUTE
        + "; or give each worker its own part of the data, or its own seed, by paceline.worker_index().",
    ),
    "file written by several workers": (
        "wrong",
        "{workers} workers write the file {path}. They overwrite each other, and a reader may find half a file.",
        ONE_WRITER,
    ),
    "file written by every worker": (
        "wrong",
        "Every worker that reaches this line calls {call}, which writes a file.",
        ONE_WRITER,
    ),
    "length of the whole loader": (
        "wrong",
        "len() is taken of a loader that is not distributed, which has {workers} times as many batches as the part "
        "of each worker.",
        "Take the length of the loader that prepare or distribute returns. For a learning-rate schedule, pass the "
        "scheduler to prepare.",
    ),
    "clipping by the worker's norm": (
        "wrong",
        "{detail} clips the gradient of each worker by its own norm, not the gradient of the joint batch.",
        "Call optimizer.clip_grad_norm(max_norm) of the distributed optimizer.",
    ),
    "same seed in all workers": (
        "wrong",
        "{detail} gives all workers the same random numbers, although Paceline has given each of them its own: "
        "dropout, augmentation and noise are the same in all workers.",
        "Seed before prepare or distribute, or add paceline.worker_index() to the seed.",
    ),
    "data not distributed": (
        "note",
        "No loader is distributed: each worker draws from all of the data in its own order, so an epoch uses every "
        "sample once per worker.",
        DISTRIBUTE + ", unless this is intended.",
    ),
    "not seeded": (
        "note",
        "The initial weights differ from one start of the script to the next, so its results cannot be repeated.",
        "Call torch.manual_seed(...) before the model is created.",
    ),
    "warning": ("note", "{detail}", "Nothing, if this is intended."),
}
"""Name of each mistake -> its severity, what happens, and what to do about it."""

NOWHERE = Observation("stepped")


class Mistake(msgspec.Struct, frozen=True):
    """Something that would go wrong with several workers.

    Attributes:
        severity: see `Severity`.
        name: a short name for this kind of mistake: a key of `CATALOG`.
        text: what happens, in a sentence.
        fix: what to do about it, in a sentence.
        file: the user's file in which it happens; "" if it is unknown.
        line: the line in this file; 0 if it is unknown.
    """

    severity: Severity
    name: str
    text: str
    fix: str
    file: str = ""
    line: int = 0


class Evidence(msgspec.Struct, frozen=True):
    """What was observed.

    Attributes:
        alone: the observations of the script in one process, without a run.
        workers: the observations of each worker of a run; empty if the script fails alone.
        failure: the error with which the run failed; "" if it did not fail.
        writes: calls in the source that write a file in every worker.
    """

    alone: Sequence[Observation]
    workers: Sequence[Sequence[Observation]] = ()
    failure: str = ""
    writes: Sequence[UnguardedWrite] = ()

    def of_workers(self, kind: Kind) -> list[Observation]:
        """Return the observations of one kind that any worker has made, one for each line and detail."""
        places: dict[tuple[str, int, str], Observation] = {}
        for each in (each for worker in self.workers for each in _of(worker, kind)):
            places.setdefault((each.file, each.line, each.detail), each)
        return list(places.values())

    @property
    def step(self) -> Observation:
        """The first step of an optimizer in a worker."""
        return next(iter(self.of_workers("stepped")), NOWHERE)

    @property
    def identical_steps(self) -> int:
        """The number of steps in which the workers have computed gradients; 0 unless these are always the same."""
        gradients = [[each.detail for each in _of(worker, "gradient")] for worker in self.workers]
        steps = list(zip(*gradients, strict=False))
        same = len(gradients) > 1 and all(step[0] and len(set(step)) == 1 for step in steps)
        return len(steps) if same else 0


def find_mistakes(evidence: Evidence) -> list[Mistake]:
    """Return the mistakes, the most severe ones first, each only once."""
    found = dict.fromkeys(mistake for rule in RULES for mistake in rule(evidence))
    return sorted(found, key=lambda mistake: SEVERITIES.index(mistake.severity))


def _mistake(name: str, place: Observation | UnguardedWrite = NOWHERE, **values: object) -> Mistake:
    severity, text, fix = CATALOG[name]
    return Mistake(severity, name, text.format(**values), fix.format(**values), place.file, place.line)


def _of(observations: Iterable[Observation], kind: Kind) -> list[Observation]:
    return [each for each in observations if each.kind == kind]


# -- rules ------------------------------------------------------------------------------------------------


def _fails_alone(evidence: Evidence) -> Iterator[Mistake]:
    for each in _of(evidence.alone, "raised"):
        yield _mistake("fails alone", each, detail=each.detail)


def _no_steps(evidence: Evidence) -> Iterator[Mistake]:
    if _of(evidence.alone, "stepped") or _of(evidence.alone, "raised"):
        return
    late = bool(_of(evidence.alone, "timed out"))
    advice = (
        "Allow more time with --timeout SECONDS."
        if late
        else "Give the path of the script that trains the model."
    )
    yield _mistake("no steps", late=" in the given time" if late else "", advice=advice)


def _fails(evidence: Evidence) -> Iterator[Mistake]:
    raised = evidence.of_workers("raised")
    for each in raised:
        yield _mistake("fails in a run", each, detail=each.detail)
    # If no worker trains, the run fails as a consequence.
    trains = any(each.detail == "distributed" for each in evidence.of_workers("stepped"))
    if evidence.failure and not raised and (trains or not evidence.of_workers("stepped")):
        yield _mistake("fails in a run", detail=evidence.failure)


def _optimizer_not_distributed(evidence: Evidence) -> Iterator[Mistake]:
    for each in evidence.of_workers("stepped"):
        if each.detail != "distributed":
            yield _mistake("optimizer not distributed", each, detail=each.detail)


def _identical(evidence: Evidence) -> Iterator[Mistake]:
    if steps := evidence.identical_steps:
        yield _mistake("identical workers", evidence.step, workers=len(evidence.workers), steps=steps)


def _written_by_several(evidence: Evidence) -> Iterator[Mistake]:
    writers: dict[str, list[Observation]] = defaultdict(list)
    for worker in evidence.workers:
        first = {each.detail: each for each in reversed(_of(worker, "wrote")) if each.detail and each.file}
        for path, each in first.items():
            writers[path].append(each)
    for path, writes in writers.items():
        if len(writes) > 1:
            yield _mistake("file written by several workers", writes[0], workers=len(writes), path=path)


def _would_be_written(evidence: Evidence) -> Iterator[Mistake]:
    known = {(each.file, each.line) for each in _written_by_several(evidence)}
    for write in evidence.writes:
        if (write.file, write.line) not in known:
            yield _mistake("file written by every worker", write, call=write.call)


def _length(evidence: Evidence) -> Iterator[Mistake]:
    for worker in evidence.workers:
        if _of(worker, "prepared schedule"):
            continue  # its schedule was written for the whole loader, as `prepare` expects
        distributed = {each.detail for each in _of(worker, "distributed")}
        for each in _of(worker, "measured"):
            if each.detail in distributed:
                yield _mistake("length of the whole loader", each, workers=len(evidence.workers))


def _clipping(evidence: Evidence) -> Iterator[Mistake]:
    for each in evidence.of_workers("clipped"):
        yield _mistake("clipping by the worker's norm", each, detail=each.detail)


def _same_seed(evidence: Evidence) -> Iterator[Mistake]:
    for worker in evidence.workers[:1]:
        kinds = [each.kind for each in worker]
        begun = kinds.index("distributed") if "distributed" in kinds else len(kinds)
        for each in _of(worker[begun:], "seeded"):
            if all(each in other for other in evidence.workers):
                yield _mistake("same seed in all workers", each, detail=each.detail)


def _not_distributed(evidence: Evidence) -> Iterator[Mistake]:
    shared = evidence.of_workers("distributed") or evidence.of_workers("asked")
    if evidence.step.detail == "distributed" and not shared and not evidence.identical_steps:
        yield _mistake("data not distributed", evidence.step)


def _unseeded(evidence: Evidence) -> Iterator[Mistake]:
    alone = [each.detail for each in _of(evidence.alone, "initialized")]
    for worker in evidence.workers[:1]:
        in_run = [each.detail for each in _of(worker, "initialized")]
        if in_run and in_run != alone:
            yield _mistake("not seeded")


def _warned(evidence: Evidence) -> Iterator[Mistake]:
    for each in evidence.of_workers("warned"):
        yield _mistake("warning", each, detail=each.detail)


RULES: tuple[Callable[[Evidence], Iterable[Mistake]], ...] = (
    _fails_alone,
    _no_steps,
    _fails,
    _optimizer_not_distributed,
    _identical,
    _written_by_several,
    _would_be_written,
    _length,
    _clipping,
    _same_seed,
    _not_distributed,
    _unseeded,
    _warned,
)
