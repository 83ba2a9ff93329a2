"""From observations to mistakes: what would go wrong if a script ran with several workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from .observations import Kind, ScriptObservation, SourceCall

Severity = Literal["error", "wrong", "note"]
"""error: the run fails; wrong: the run ends with a wrong result or a damaged file; note: worth knowing."""

SEVERITIES: tuple[Severity, ...] = ("error", "wrong", "note")

DISTRIBUTE = "Distribute the loader with paceline.prepare or paceline.distribute"
ONE_WRITER = "Use paceline.save(obj, path), or write the file only if paceline.is_main()."
PREPARE_SCHEDULE = (
    "Pass the scheduler to prepare, too, with the length that it has in a single process. The schedule then follows "
    "the progress of the job."
)
REDUCE = "Step the scheduler with the same number in all workers: scheduler.step(paceline.reduce(loss))."
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
        "{advice}",
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
        "{workers} workers write the file {path}. They overwrite each other's data, and a reader may find half a file.",
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
    "schedule by the worker's iterations": (
        "wrong",
        "The schedule {detail} advances with each iteration of one worker, {share}. So training ends before the "
        "schedule does.",
        PREPARE_SCHEDULE,
    ),
    "length of a part for the schedule": (
        "wrong",
        "The schedule has {length} steps, but the job makes {expected}: {length} is the number of {whose}.",
        "Write the schedule for a single process. Then pass the scheduler to prepare, together with the loader that "
        "is not distributed yet.",
    ),
    "metric of one worker": (
        "wrong",
        "The workers step the scheduler with different numbers ({detail}), so their learning rates will differ.",
        REDUCE,
    ),
    "metric not reduced": (
        "note",
        "{call} is given a number that each worker computes by itself. If this number differs between the workers, "
        "their learning rates will differ, too.",
        REDUCE,
    ),
    "different hyper-parameters": (
        "wrong",
        "The workers train with different hyper-parameters at the same steps: {detail}.",
        "Let the hyper-parameters depend only on values that are the same in all workers. Do not use "
        "paceline.worker_index(), and use a loss only after paceline.reduce(loss).",
    ),
    "clipping by the worker's norm": (
        "wrong",
        "{detail} clips the gradient of each worker by its own norm, not the gradient of the joint batch.",
        "Call optimizer.clip_grad_norm(max_norm) of the distributed optimizer; with Accelerate, "
        "accelerator.clip_grad_norm_(...); with Fabric, fabric.clip_gradients(...).",
    ),
    "same seed in all workers": (
        "wrong",
        "{detail} gives all workers the same random numbers, although Paceline has seeded each worker differently: "
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
    "negatives of the worker's batch": (
        "note",
        "The loss compares the {samples} samples of a batch with one another. In a run, these are the samples of one "
        "worker: each sample has {negatives} negatives.",
        "Choose the batch size of the loader by the number of negatives that the loss needs. With --joint-batch, "
        "exempt this loader: paceline.distribute(loader, joint_batch=False).",
    ),
    "warning": ("note", "{detail}", "No change is needed if this is intended."),
}
"""Name of each mistake -> its severity, what happens, and what to do about it."""

NOWHERE = ScriptObservation("stepped")


class Mistake(msgspec.Struct, frozen=True):
    """Something that would go wrong with several workers.

    Attributes:
        severity: see `Severity`.
        name: a short name for this kind of mistake: a key of `CATALOG`.
        text: what happens, in a sentence.
        fix: what to do about it, in a sentence.
        file: the user's file with the mistake; "" if it is unknown.
        line: the line in this file; 0 if it is unknown.
    """

    severity: Severity
    name: str
    text: str
    fix: str
    file: str = ""
    line: int = 0


class ScriptEvidence(msgspec.Struct, frozen=True):
    """What was observed about a script.

    Attributes:
        alone: the observations of the script in one process, without a run.
        workers: the observations of each worker of a run; empty if the script fails alone.
        failure: the error with which the run failed; "" if it did not fail.
        writes: calls in the source that write a file in every worker.
        metrics: calls in the source that step a scheduler with a number that is not reduced.
    """

    alone: Sequence[ScriptObservation]
    workers: Sequence[Sequence[ScriptObservation]] = ()
    failure: str = ""
    writes: Sequence[SourceCall] = ()
    metrics: Sequence[SourceCall] = ()

    def of_workers(self, kind: Kind) -> list[ScriptObservation]:
        """Return the observations of one kind that any worker has made, one for each line and detail."""
        places: dict[tuple[str, int, str], ScriptObservation] = {}
        for each in (each for worker in self.workers for each in _of(worker, kind)):
            places.setdefault((each.file, each.line, each.detail), each)
        return list(places.values())

    @property
    def step(self) -> ScriptObservation:
        """The first step of an optimizer in a worker."""
        return next(iter(self.of_workers("stepped")), NOWHERE)

    @property
    def identical_steps(self) -> int:
        """The number of steps with gradients; 0 unless all workers had the same gradients in each of these steps."""
        gradients = [[each.detail for each in _of(worker, "gradient")] for worker in self.workers]
        steps = list(zip(*gradients, strict=False))
        same = len(gradients) > 1 and all(step[0] and len(set(step)) == 1 for step in steps)
        return len(steps) if same else 0


def find_mistakes(evidence: ScriptEvidence) -> list[Mistake]:
    """Return the mistakes, the most severe ones first, each only once."""
    found = dict.fromkeys(mistake for rule in RULES for mistake in rule(evidence))
    return sorted(found, key=lambda mistake: SEVERITIES.index(mistake.severity))


def _mistake(name: str, place: ScriptObservation | SourceCall = NOWHERE, **values: object) -> Mistake:
    severity, text, fix = CATALOG[name]
    return Mistake(severity, name, text.format(**values), fix.format(**values), place.file, place.line)


def _of(observations: Iterable[ScriptObservation], kind: Kind) -> list[ScriptObservation]:
    return [each for each in observations if each.kind == kind]


# -- rules ------------------------------------------------------------------------------------------------


def _fails_alone(evidence: ScriptEvidence) -> Iterator[Mistake]:
    for each in _of(evidence.alone, "raised"):
        yield _mistake("fails alone", each, detail=each.detail)


def _no_steps(evidence: ScriptEvidence) -> Iterator[Mistake]:
    if _of(evidence.alone, "stepped") or _of(evidence.alone, "raised"):
        return
    late = bool(_of(evidence.alone, "timed out"))
    advice = (
        "Allow more time with --timeout SECONDS."
        if late
        else "Give the path of the script that trains the model."
    )
    yield _mistake("no steps", late=" in the given time" if late else "", advice=advice)


def _fails_in_a_run(evidence: ScriptEvidence) -> Iterator[Mistake]:
    raised = evidence.of_workers("raised")
    for each in raised:
        yield _mistake("fails in a run", each, detail=each.detail)
    # If the scripts make steps, but not with distributed optimizers, the run fails only as a consequence of this.
    trains = any(each.detail == "distributed" for each in evidence.of_workers("stepped"))
    if evidence.failure and not raised and (trains or not evidence.of_workers("stepped")):
        yield _mistake("fails in a run", detail=evidence.failure)


def _optimizer_not_distributed(evidence: ScriptEvidence) -> Iterator[Mistake]:
    advice = "\n".join(each.detail for each in evidence.of_workers("advised"))
    for each in evidence.of_workers("stepped"):
        if each.detail != "distributed":
            yield _mistake("optimizer not distributed", each, detail=each.detail, advice=advice)


def _identical_workers(evidence: ScriptEvidence) -> Iterator[Mistake]:
    if steps := evidence.identical_steps:
        yield _mistake("identical workers", evidence.step, workers=len(evidence.workers), steps=steps)


def _written_by_several(evidence: ScriptEvidence) -> Iterator[Mistake]:
    writers: dict[str, list[ScriptObservation]] = defaultdict(list)
    for worker in evidence.workers:
        first = {each.detail: each for each in reversed(_of(worker, "wrote")) if each.detail and each.file}
        for path, each in first.items():
            writers[path].append(each)
    for path, writes in writers.items():
        if len(writes) > 1:
            yield _mistake("file written by several workers", writes[0], workers=len(writes), path=path)


def _would_be_written(evidence: ScriptEvidence) -> Iterator[Mistake]:
    known = {(each.file, each.line) for each in _written_by_several(evidence)}
    for write in evidence.writes:
        if (write.file, write.line) not in known:
            yield _mistake("file written by every worker", write, call=write.call)


def _length_of_whole_loader(evidence: ScriptEvidence) -> Iterator[Mistake]:
    for worker in evidence.workers:
        if _of(worker, "prepared schedule"):
            continue  # the schedule was written for the whole loader, as `prepare` expects
        distributed = {each.detail for each in _of(worker, "distributed")}
        for each in _of(worker, "measured"):
            if each.detail in distributed:
                yield _mistake("length of the whole loader", each, workers=len(evidence.workers))


def _schedule_of_one_worker(evidence: ScriptEvidence) -> Iterator[Mistake]:
    for worker in evidence.workers:
        for each in _of(worker, "scheduled"):
            # If a scheduler is stepped once per epoch, it is not stepped after two optimizer steps in a row.
            before = msgspec.structs.replace(each, iteration=each.iteration - 1)
            if before in worker and (share := _share_of_iterations(worker, len(evidence.workers))):
                yield _mistake("schedule by the worker's iterations", each, detail=each.detail, share=share)


def _share_of_iterations(worker: Sequence[ScriptObservation], workers: int) -> str:
    """Return why a worker makes only a part of the iterations of a single process; "" if nothing shows this.

    A script that has asked for the length of the worker's part of the data, or for the number of workers, is assumed
    to use the answer.
    """
    if _of(worker, "measured part") or any(each.detail == "worker_count" for each in _of(worker, "asked")):
        return ""
    distributed = {each.detail for each in _of(worker, "distributed")}
    if any(each.detail in distributed for each in _of(worker, "measured")):
        return ""  # `_length_of_whole_loader` reports this call of len()
    if distributed:
        return f"but a worker makes only about 1/{workers} of the iterations of a single process"
    limits = _of(worker, "looped by progress")
    if limits:
        return (
            f"but the loop ends when all workers together have reached its limit ({limits[0].detail}); under sync "
            "models that apply each push on arrival, a worker makes only a part of the updates"
        )
    return ""


def _schedule_length(evidence: ScriptEvidence) -> Iterator[Mistake]:
    count = len(evidence.workers)
    for worker in evidence.workers:
        limits = [tuple(map(int, each.detail.split())) for each in _of(worker, "looped")]
        epochs, updates = limits[0] if len(set(limits)) == 1 else (0, 0)
        for each in _of(worker, "prepared schedule"):
            length, batches = map(int, each.detail.split())
            expected = epochs * batches if epochs else updates
            for whose, wrong in (
                ("steps that one worker makes", length * count - expected),
                (
                    "steps of a single process, although the loader was distributed before the scheduler was prepared",
                    length - expected * count,
                ),
            ):
                # A schedule of as many steps as there are epochs is assumed to be stepped once per epoch.
                if length not in (0, epochs) and expected and abs(wrong) <= max(epochs, count):
                    yield _mistake(
                        "length of a part for the schedule",
                        each,
                        length=length,
                        expected=expected,
                        whose=whose,
                    )


def _metric_of_one_worker(evidence: ScriptEvidence) -> Iterator[Mistake]:
    given = [_of(worker, "metric") for worker in evidence.workers]
    if sum(map(bool, given)) < 2:
        for call in evidence.metrics:
            yield _mistake("metric not reduced", call, call=call.call)
        return
    for metrics in zip(*given, strict=False):
        details = [each.detail for each in metrics]
        if len(set(details)) > 1:
            yield _mistake("metric of one worker", metrics[0], detail=" and ".join(dict.fromkeys(details)))
            return


def _hyper_parameters(evidence: ScriptEvidence) -> Iterator[Mistake]:
    if evidence.of_workers("prepared schedule"):
        # The schedule follows the progress of the job, so workers at different steps may have different learning rates.
        return
    used = [_of(worker, "hyper-parameters") for worker in evidence.workers]
    steps = list(zip(*used, strict=False))
    if len(steps) > 1 and all(len({each.detail for each in step}) > 1 for step in steps):
        details = dict.fromkeys(each.detail for each in steps[0])
        yield _mistake("different hyper-parameters", steps[0][0], detail=" and ".join(details))


def _clipping(evidence: ScriptEvidence) -> Iterator[Mistake]:
    for each in evidence.of_workers("clipped"):
        yield _mistake("clipping by the worker's norm", each, detail=each.detail)


def _same_seed(evidence: ScriptEvidence) -> Iterator[Mistake]:
    for worker in evidence.workers[:1]:
        kinds = [each.kind for each in worker]
        begun = kinds.index("distributed") if "distributed" in kinds else len(kinds)
        for each in _of(worker[begun:], "seeded"):
            if all(each in other for other in evidence.workers):
                yield _mistake("same seed in all workers", each, detail=each.detail)


def _not_distributed(evidence: ScriptEvidence) -> Iterator[Mistake]:
    shared = evidence.of_workers("distributed") or evidence.of_workers("asked")
    if evidence.step.detail == "distributed" and not shared and not evidence.identical_steps:
        yield _mistake("data not distributed", evidence.step)


def _unseeded(evidence: ScriptEvidence) -> Iterator[Mistake]:
    alone = [each.detail for each in _of(evidence.alone, "initialized")]
    for worker in evidence.workers[:1]:
        in_run = [each.detail for each in _of(worker, "initialized")]
        if in_run and in_run != alone:
            yield _mistake("not seeded")


def _compared(evidence: ScriptEvidence) -> Iterator[Mistake]:
    for each in evidence.of_workers("compared"):
        samples = int(each.detail)
        yield _mistake("negatives of the worker's batch", each, samples=samples, negatives=samples - 1)


def _warned(evidence: ScriptEvidence) -> Iterator[Mistake]:
    for each in evidence.of_workers("warned"):
        yield _mistake("warning", each, detail=each.detail)


RULES: tuple[Callable[[ScriptEvidence], Iterable[Mistake]], ...] = (
    _fails_alone,
    _no_steps,
    _fails_in_a_run,
    _optimizer_not_distributed,
    _identical_workers,
    _written_by_several,
    _would_be_written,
    _length_of_whole_loader,
    _schedule_of_one_worker,
    _schedule_length,
    _metric_of_one_worker,
    _hyper_parameters,
    _clipping,
    _same_seed,
    _not_distributed,
    _unseeded,
    _compared,
    _warned,
)
