"""What the coordinator watches in order to warn the user: different hyper-parameters, equal gradients, divergence.

Hyper-parameters travel with each push, so nothing fails if the workers' schedulers disagree: each update is made with
the hyper-parameters of one worker. A correct schedule is a function of the progress of training. So the workers report
their hyper-parameters at a few *marks*, and reports with the same mark are compared. There are three kinds of marks,
for schedules that follow different quantities:

    schedule    a number of steps of a schedule, if the schedule follows the progress of the job
    epoch       an epoch of a loader, if the hyper-parameters change only between passes over it
    step        in all other cases, a number of steps of the worker's optimizer; if there are also epochs, reports that
                are equal at the mark of the epoch or at the mark of the step count as equal

At any moment, workers may be at different marks, so their hyper-parameters may rightly differ. So a warning names
workers only if their hyper-parameters differ at the same marks, and if this difference lasts for at least `LEAST_STEPS`
steps, or from one epoch to a later one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Set
from typing import NamedTuple

import msgspec

from ..errors import ProtocolError
from ..state import stateful
from .guard import DIVERGED, Guard, GuardVerdict
from .layout import HyperParameter, HyperParameters
from .messages import GradientHashed, HyperParametersReported
from .requests import Fail, Request, TakeOut, Warn

MARKED_STEPS = 50
"""Number of steps between two marks."""

LEAST_STEPS = MARKED_STEPS
MOST_MARKS = 512  # maximum number of marks that are remembered; the oldest ones are forgotten
MOST_VALUES = 4  # maximum number of different hyper-parameters that are remembered for one mark
TOLERANCE = 0.01  # relative difference of numbers that are considered equal

Groups = tuple[HyperParameters, ...]


class _Mark(NamedTuple):
    """The reports of the worker that was the first to report at a mark.

    Attributes:
        worker: this worker.
        within: True if the worker's hyper-parameters have changed within a pass over a loader, or if there are no
            passes.
        values: the hyper-parameters that the worker has reported at the mark; more than one entry if they changed
            within the epoch.
    """

    worker: int
    within: bool
    values: list[bytes]


@stateful()
class Agreement:
    """Compares the hyper-parameters that the workers of a run report, and describes the first disagreement once."""

    def __init__(self) -> None:
        self._marks: OrderedDict[tuple[int, str, str, int], _Mark] = OrderedDict()
        # (worker, incarnation, parameter set) -> the report since which the worker has disagreed with others
        self._disagreed: dict[tuple[int, int, int], HyperParametersReported] = {}
        self._said = False

    def take(self, worker: int, incarnation: int, report: HyperParametersReported) -> str:
        """Compare the hyper-parameters of a worker with those of the worker that was the first at the same mark.

        Returns:
            A description of the disagreement if the worker has disagreed for long enough; otherwise "".

        Raises:
            ProtocolError: the hyper-parameters cannot be decoded.
        """
        if self._said:
            return ""
        _decoded(report.groups)
        own, compared = (worker, incarnation, report.set_index), self._compare(worker, report)
        differing = [mark for mark, equal in compared if equal is False]
        if any(equal for _, equal in compared):
            self._disagreed.pop(own, None)
        elif compared and len(differing) == len(compared):
            first = self._disagreed.setdefault(own, report)
            if _is_long(first, report):
                self._said = True
                self._marks.clear()
                self._disagreed.clear()
                return _describe(worker, report, differing[0])
        return ""

    def _compare(self, worker: int, report: HyperParametersReported) -> list[tuple[_Mark, bool | None]]:
        """Return each mark that counts for a report, with True if the report's values are equal to those of the mark.

        If this worker is the first at the mark, the second value is None.
        """
        index = report.set_index
        if report.schedule is not None:
            return [self._at((index, "schedule", report.loader, report.schedule), worker, report)]
        by_epoch = by_step = None
        if report.epoch is not None:
            by_epoch = self._at((index, "epoch", report.loader, report.epoch), worker, report)
        if not report.late:
            by_step = self._at((index, "step", "", report.step), worker, report)
        if by_epoch is not None and not (report.within or by_epoch[0].within):
            by_step = None  # a change between two passes depends on the epoch, not on the step
        return [each for each in (by_epoch, by_step) if each is not None]

    def _at(
        self, key: tuple[int, str, str, int], worker: int, report: HyperParametersReported
    ) -> tuple[_Mark, bool | None]:
        mark = self._marks.get(key)
        if mark is None or mark.worker == worker:
            values = mark.values if mark is not None else []
            if report.groups not in values and len(values) < MOST_VALUES:
                values.append(report.groups)
            mark = self._marks[key] = _Mark(worker, report.within, values)
            if len(self._marks) > MOST_MARKS:
                self._marks.popitem(last=False)
            return mark, None
        return mark, any(_are_equal(report.groups, value) for value in mark.values)


def _is_long(first: HyperParametersReported, last: HyperParametersReported) -> bool:
    """Return True if two reports are at least `LEAST_STEPS` steps or an epoch apart."""
    if first.schedule is not None and last.schedule is not None:
        return last.schedule - first.schedule >= LEAST_STEPS
    later = (
        None not in (first.epoch, last.epoch) and first.loader == last.loader and first.epoch != last.epoch
    )
    return later or last.step - first.step >= LEAST_STEPS


_decoder = msgspec.msgpack.Decoder(Groups)


def _decoded(groups: bytes) -> Groups:
    try:
        return _decoder.decode(groups)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the hyper-parameters of a report cannot be decoded: {error}") from error


def _are_equal(groups: bytes, others: bytes) -> bool:
    return groups == others or _first_difference(_decoded(groups), _decoded(others)) is None


def _first_difference(
    groups: Groups, others: Groups
) -> tuple[str, HyperParameter | None, HyperParameter | None] | None:
    """Return the name and both values of the first hyper-parameter that differs, if any."""
    for group, other in zip(groups, others, strict=False):
        for name in group:
            if not _is_equal(group[name], other.get(name)):
                return name, group[name], other.get(name)
    return None if len(groups) == len(others) else ("number of groups", len(groups), len(others))


def _is_equal(value: object, other: object) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    if isinstance(value, float | int) and isinstance(other, float | int):
        return math.isclose(value, other, rel_tol=TOLERANCE)
    return value == other


def _describe(worker: int, report: HyperParametersReported, mark: _Mark) -> str:
    found = _first_difference(_decoded(report.groups), _decoded(mark.values[-1]))
    name, value, other = found or ("", None, None)
    if report.schedule is not None:
        where = f"after {report.schedule} steps of the same schedule"
    elif report.epoch is not None:
        where = f"in epoch {report.epoch}"
    else:
        where = f"after {report.step} steps of each worker"
    fix = (
        f"Worker {worker} has joined late: name its schedulers with paceline.track, so that it continues with the "
        "states of the job's schedulers."
        if report.late
        else "If a scheduler follows a number that each worker computes from its own data, as ReduceLROnPlateau "
        "follows a loss, give all workers the same number: scheduler.step(paceline.reduce(loss))."
    )
    return (
        f"Worker {worker} trains with {name}={_text(value)} and worker {mark.worker} with {name}={_text(other)}, "
        f"{where}. All workers should use the same hyper-parameters at the same point of training. {fix}"
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


# -- Finds workers that compute the same gradients, because they use the same data ---------------------------
#
# Workers whose script does not distribute its data report a hash of their gradient in each of their first
# iterations. All workers start from the same weights, so gradients that are equal in the first iteration come
# from equal data. If the sync model keeps the workers in lockstep, their weights remain equal, so later gradients are
# also compared.

HASHED_ITERATIONS = 3
"""Number of iterations whose gradients are hashed."""

NAMED = 8  # maximum number of workers that a message names


@stateful()
class Fingerprints:
    """Compares, once, the hashes that the workers of a run report."""

    def __init__(self) -> None:
        self._hashes: dict[int, list[str]] = {}  # worker -> its hashes, by iteration
        self._compared = False

    def take(self, worker: int, message: GradientHashed, live: Collection[int], *, lockstep: bool) -> str:
        """Store a worker's hash. When the last hash has arrived, compare all hashes.

        Args:
            worker: the worker that sent the message.
            message: the message. A message that is out of order is ignored, so no hashes are compared as long as this
                worker is in the run.
            live: the workers that take part and have not left.
            lockstep: True if the sync model keeps all workers in lockstep.

        Returns:
            A description of the workers that compute the same gradients; "" if there are none, or not all hashes
            have arrived.
        """
        hashes = self._hashes.setdefault(worker, [])
        if message.iteration == len(hashes) < HASHED_ITERATIONS:
            hashes.append(message.gradient)
        complete = [each for each in sorted(self._hashes) if len(self._hashes[each]) == HASHED_ITERATIONS]
        if self._compared or not set(live) <= set(complete) or len(complete) < 2:
            return ""
        self._compared = True
        compared = HASHED_ITERATIONS if lockstep else 1
        groups: dict[tuple[str, ...], list[int]] = {}
        for each in complete:  # a worker may have left since it sent its hashes
            groups.setdefault(tuple(self._hashes[each][:compared]), []).append(each)
        same = [workers for hashes, workers in groups.items() if len(workers) > 1 and all(hashes)]
        return _report(same[0], compared) if same else ""


def _report(workers: list[int], iterations: int) -> str:
    names = ", ".join(map(str, workers[:NAMED])) + (", ..." if len(workers) > NAMED else "")
    when = f"in each of their first {iterations} iterations" if iterations > 1 else "in their first iteration"
    return (
        f"workers {names} compute the same gradients {when}: they train on the same data, so the run is no better "
        "than one with fewer workers. Distribute the loader with paceline.prepare or paceline.distribute, or use "
        "paceline.worker_index() to give each worker its own part of the data, or its own seed."
    )


# -- All observers together ----------------------------------------------------------------------------------
#
# No observer changes which worker waits. The guard may end the run or have a worker taken out (see `guard`).


@stateful(history="findings")
class Oversight:
    """The observers of a run's workers.

    Args:
        guard: judges the workers' reports about their pushes.

    Attributes:
        guard: the guard.
        findings: sentences that each describe a reason why the result of the run may be worse than it could be.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.findings: list[str] = []
        self._fingerprints = Fingerprints()
        self._agreement = Agreement()

    def compare(self, worker: int, message: GradientHashed, live: Set[int], *, lockstep: bool) -> str:
        """Return a warning, once, if workers compute the same gradients; else ""."""
        return self._fingerprints.take(worker, message, live, lockstep=lockstep)

    def agree(self, worker: int, incarnation: int, message: HyperParametersReported) -> list[Request]:
        """Handle a worker's report of its hyper-parameters: warn if they differ from those of other workers."""
        finding = self._agreement.take(worker, incarnation, message)
        if not finding:
            return []
        self.findings.append(finding)
        return [Warn(finding)]

    def heed(self, verdict: GuardVerdict) -> list[Request]:
        """Return the requests that carry out a verdict of the guard."""
        self.findings.append(verdict.words)
        requests: list[Request] = [Warn(verdict.words)]
        if verdict.takes_out is not None:
            requests.append(TakeOut(verdict.takes_out, verdict.words))
        if verdict.stops:
            requests.append(Fail(DIVERGED, verdict.words))
        return requests
