"""The state of a run as a table of plain values, for displays."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..sync.ticks import TICKS_PER_S
from .coordinator import Coordinator
from .liveness import Direction, LinkTraffic
from .messages import LoopLimits, Waits
from .requests import worker_peer

# -- How far a job has come, how fast it goes on, and for whom it waits, without I/O -------------------------
#
# The *progress* is the part of the present training loop that is done. The progress is known if the loop has a limit
# (`paceline.epochs`), and is the used part of this limit. If there are several limits, the progress is the largest of
# the used parts. The workers do not reach an epoch at the same time, so the number of finished epochs is the mean over
# the workers' reports. A worker that has joined late does not count before its first push, and the progress never goes
# back. If a script loops over `range`, the length of the loop is unknown; then only the progress within the present
# epoch is known.
#
# The remaining time is extrapolated from the second half of the time since the loop began. The first iterations are not
# used, because they are slow. The last few seconds alone would not suffice, because the script may have evaluated its
# model in this time.

POINTS = 32  # number of values that a `Rate` keeps from the time over which it averages
SPEED_SPAN_S = 10.0  # time over which the speed of the job is averaged
LOSS_SPAN_S = 2.0  # time constant of the moving mean of the loss
LEAST_S = 1.0  # time after which a rate is known


class JobProgress(msgspec.Struct, frozen=True):
    """The progress and the speed of a job. A value is None if it is not known.

    Attributes:
        progress: how much of the current training loop is done, from 0 to 1.
        left_s: the time in seconds that the loop will take from now on.
        samples_per_s: number of samples per second that all workers together use.
        loss: the mean of the workers' last reported losses, as a moving mean over about `LOSS_SPAN_S` seconds.
        epoch: number of the epoch in progress, counted from 1.
        epochs: number of epochs of the loop.
        epoch_progress: how much of the current epoch is done, from 0 to 1.
    """

    progress: float | None = None
    left_s: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    epoch_progress: float | None = None


class Rate:
    """Measures how fast a number grows.

    Example:
        >>> rate = Rate(ticks_per_s=1)
        >>> for second, value in enumerate((0, 10, 20, 60)):
        ...     rate.note(value, second, span_ticks=2)
        >>> rate.per_s(60, now_ticks=3)
        25.0
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._points: deque[tuple[int, float]] = deque()

    def note(self, value: float, now_ticks: int, span_ticks: int) -> None:
        """Record the number. The rate is averaged over about `span_ticks` before the last call."""
        points = self._points
        if points and now_ticks - points[-1][0] < span_ticks / POINTS:
            return
        points.append((now_ticks, value))
        while len(points) > 1 and points[1][0] <= now_ticks - span_ticks:
            points.popleft()

    def per_s(self, value: float, now_ticks: int) -> float | None:
        """Return the rate per second if the number is `value` now; None if it is not known yet."""
        if not self._points:
            return None
        ticks, before = self._points[0]
        elapsed_s = (now_ticks - ticks) / self._ticks_per_s
        return (value - before) / elapsed_s if elapsed_s >= LEAST_S else None


class ProgressMeter:
    """Follows the progress of one job.

    Args:
        ticks_per_s: number of ticks per second.
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._loop = -1  # the training loop to which the next three attributes refer
        self._passed = 0.0  # largest number of finished epochs so far
        self._by_data = False  # True if `_passed` includes a part of the present epoch
        self._done = Rate(ticks_per_s)
        self._samples = Rate(ticks_per_s)
        self._loss: float | None = None
        self._noted_ticks = 0
        self._looks = WaitSamples(ticks_per_s)

    def note(self, core: Coordinator, now_ticks: int) -> None:
        """Record what the workers have reported by now. Call this several times per second."""
        if core.loops.loop != self._loop:
            self._loop, self._passed, self._by_data = core.loops.loop, 0.0, False
            self._done = Rate(self._ticks_per_s)
        passed, by_data = self._epochs(core)
        self._passed = max(passed or 0.0, self._passed)
        if by_data and not self._by_data:
            # The part of the epoch that becomes known now was done earlier, so the speed is measured anew.
            self._by_data, self._done = True, Rate(self._ticks_per_s)
        progress = _progress(core, now_ticks, self._ticks_per_s, passed, by_data=by_data).progress
        if progress is not None:
            since_ticks = now_ticks - core.loops.begun_ticks
            self._done.note(progress, now_ticks, max(since_ticks // 2, 1))
        if (samples := _samples(core)) > 0:
            self._samples.note(samples, now_ticks, round(SPEED_SPAN_S * self._ticks_per_s))
        self._note_loss(core, (now_ticks - self._noted_ticks) / self._ticks_per_s)
        self._noted_ticks = now_ticks

    def look(self, core: Coordinator, now_ticks: int) -> None:
        """Record which workers keep others waiting. Call this when all servers have answered a `FetchWaits`."""
        self._looks.look(core, now_ticks)

    def awaited(self, core: Coordinator, now_ticks: int) -> Awaited:
        """Return the workers for which other workers have waited most often in the last `OLDEST_S` seconds."""
        return self._looks.awaited(core, now_ticks)

    def read(self, core: Coordinator, now_ticks: int) -> JobProgress:
        """Return the progress of the job."""
        passed, by_data = self._epochs(core)
        found = _progress(core, now_ticks, self._ticks_per_s, passed, by_data=by_data)
        samples = _samples(core)
        speed = self._samples.per_s(samples, now_ticks) if samples else None
        left_s = self._left_s(core, found.progress, now_ticks)
        return msgspec.structs.replace(found, left_s=left_s, samples_per_s=speed, loss=self._loss)

    def _epochs(self, core: Coordinator) -> tuple[float | None, bool]:
        """Return what `_epochs` finds, but within a loop never fewer finished epochs than before."""
        passed, by_data = _epochs(core)
        if passed is not None and core.loops.loop == self._loop:
            passed = max(passed, self._passed)
        return passed, by_data

    def _note_loss(self, core: Coordinator, elapsed_s: float) -> None:
        live = core.members.live  # a copy, so it is made once for all workers
        losses = [status.loss for worker, status in core.board.items() if worker in live]
        known = [loss for loss in losses if loss is not None]
        if not known:
            return
        mean, before = sum(known) / len(known), self._loss
        if before is None or not math.isfinite(before) or not math.isfinite(mean):
            self._loss = mean
        else:
            self._loss = before + (mean - before) * -math.expm1(-elapsed_s / LOSS_SPAN_S)

    def _left_s(self, core: Coordinator, progress: float | None, now_ticks: int) -> float | None:
        """Return how long the loop will go on; None if this is unknown."""
        if progress is None:
            return None
        found = []
        if progress >= 1.0:
            found.append(0.0)
        elif (speed := self._done.per_s(progress, now_ticks)) is not None and speed > 0:
            found.append((1.0 - progress) / speed)
        limits = core.loops.limits
        if limits is not None and limits.time_s is not None:
            since_s = (now_ticks - core.loops.begun_ticks) / self._ticks_per_s
            found.append(max(limits.time_s - since_s, 0.0))
        return min(found, default=None)


def _progress(
    core: Coordinator, now_ticks: int, ticks_per_s: int, passed: float | None, *, by_data: bool
) -> JobProgress:
    """Return the progress at one moment, without the remaining time, the speed and the loss.

    Args:
        core: the coordinator.
        now_ticks: current time.
        ticks_per_s: number of ticks per second.
        passed: number of finished epochs; None if unknown.
        by_data: True if `passed` includes a part of the present epoch.
    """
    loops, limits = core.loops, core.loops.limits or LoopLimits()
    updates = max((status.updates for status in core.board.values()), default=0)
    since_s = (now_ticks - loops.begun_ticks) / ticks_per_s
    epoch = epoch_progress = None
    if passed is not None:
        before = int(passed) if limits.epochs is None else min(int(passed), limits.epochs - 1)
        epoch, epoch_progress = before + 1, min(passed - before, 1.0) if by_data else None
    used = (
        (passed, limits.epochs),
        (since_s if loops.loop >= 0 else None, limits.time_s),
        (updates - loops.start[0], limits.updates),
        (_samples(core) - loops.start[1], limits.samples),
    )
    parts = [done / limit for done, limit in used if done is not None and limit is not None]
    progress = min(max(*parts, 0.0), 1.0) if parts else None
    return JobProgress(progress, epoch=epoch, epochs=limits.epochs, epoch_progress=epoch_progress)


def _epochs(core: Coordinator) -> tuple[float | None, bool]:
    """Return the number of finished epochs (None if unknown), and True if it includes a part of the present epoch.

    The number is the mean over the workers that take part or have finished. A finished worker has finished all epochs.
    Once some workers have pushed data of a loader, workers that have not done so do not count: it is unknown where in
    the epoch they will begin.
    """
    limit = (core.loops.limits or LoopLimits()).epochs
    counted = [
        (status, fate)
        for worker, status in core.board.items()
        if status.epoch is not None and (fate := core.members.fate(worker)) in ("", "finished")
    ]
    by_data = any(status.part is not None for status, _ in counted)
    done = [
        float(limit)
        if fate == "finished" and limit is not None
        else (status.epoch or 0) + (status.part or 0.0)
        for status, fate in counted
        if fate == "finished" or not by_data or status.part is not None
    ]
    return sum(done) / len(done) if done else None, by_data


def _samples(core: Coordinator) -> int:
    """Return the number of samples that all workers together have used, as far as any worker knows; 0 if unknown."""
    return max((status.samples for status in core.board.values()), default=0)


# -- The state of a job as a table of plain values, for the progress display and for `paceline status` -------
#
# The table contains what the coordinator knows: the workers' reports, the servers' answers to `FetchWaits`,
# and what its host has observed. Computing the table changes nothing, and sends no message.

LOCAL = "this machine"
"""The name of the coordinator's machine, on which the servers run unless other machines bring them."""

LONG_S = 1.0
"""If a wait is at least this long, its duration is shown. For shorter waits, it is shown how often they occur."""

HELD = {"stopped": "stopped by a signal", "traced": "held by a debugger"}
"""The states of processes that are shown in place of the state that the worker has reported last."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """The state of one worker.

    Attributes:
        worker: index of the worker.
        machine: name of the worker's machine.
        state: what the worker is doing.
        state_s: seconds since the worker entered this state, in its latest iteration; None if unknown.
        iteration: the iteration that the worker has reported last; None before its first report.
        loss: the loss that the worker has reported last; None if it has reported no loss.
        samples_per_s: the worker's speed in samples per second; None if unknown.
        staleness: largest number of updates at any shard since the worker received its weights; None if unknown.
        waits_for: what the worker waits for according to the sync model, or the call in which it waits; "" if it does
            not wait.
        last: the workers that keep this worker waiting. If it waits in a call, these are the workers that have not made
            the call; otherwise, these are the workers in the earliest iteration, among those that do not wait
            themselves. () if this worker does not wait.
        losses: for each lost incarnation of the worker, in order, the reason why it was lost.
        guessed: True if `loss` is a guess: the tensor on which the script has called `backward()`.
        device: the worker's device and the model of this device; unset if no worker is known to be on an accelerator.
    """

    worker: int
    machine: str
    state: str
    state_s: float | None = None
    iteration: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    staleness: int | None = None
    waits_for: str = ""
    last: tuple[int, ...] = ()
    losses: tuple[str, ...] = ()
    guessed: bool = False
    device: str | msgspec.UnsetType = msgspec.UNSET


class MachineStatus(msgspec.Struct, frozen=True):
    """The heartbeats of one machine.

    Attributes:
        machine: name of the machine.
        silent_s: seconds since the machine's last sign of life (see `core.liveness`).
        suspicion: `silent_s` divided by the time after which the machine is taken out.
        servers: the servers that the machine has brought.
    """

    machine: str
    silent_s: float
    suspicion: float
    servers: tuple[int, ...] = ()


class LinkStatus(msgspec.Struct, frozen=True):
    """The traffic from one machine to another.

    Attributes:
        sender: name of the machine that sends.
        receiver: name of the machine that receives.
        bytes_per_s: bytes per second, on average over about the last 3 seconds; None if it is not known yet.
        total_bytes: number of bytes that the open connections have carried.
    """

    sender: str
    receiver: str
    bytes_per_s: float | None
    total_bytes: int


class JobStatus(msgspec.Struct, frozen=True):
    """The state of a job.

    Attributes:
        sync: the sync model in force.
        servers: number of servers.
        elapsed_s: seconds since the run began.
        workers: one entry per worker, in the order of their indices.
        machines: one entry per machine that sends heartbeats, in the order of their names.
        links: one entry per pair of machines with traffic, in the order of the names.
        shortage: how many workers and servers the run has and needs, if it waits for machines to join; else "".
        main_worker: the main worker (see `core.members`); -1 if there is none.
        progress: how much of the current training loop is done, from 0 to 1; None if the length of the loop is unknown.
        left_s: the time in seconds that the loop will take from now on; None if unknown.
        samples_per_s: number of samples per second that all workers together use; None if unknown.
        loss: the mean of the workers' losses, as a moving mean over about `LOSS_SPAN_S` seconds; None if unknown.
        epoch: number of the epoch in progress, counted from 1; None if unknown.
        epochs: number of epochs of the loop; None if unknown.
        epoch_progress: how much of the current epoch is done, from 0 to 1; None if unknown.
        awaited: the workers for which other workers wait; () if there are none.
        awaited_s: for how many seconds other workers have been waiting for those in `awaited`; None if no worker waits
            at this moment.
        awaited_share: the part of the last `OLDEST_S` seconds, or less, in which other workers have waited for those in
            `awaited`; None if unknown.
    """

    sync: str
    servers: int
    elapsed_s: float
    workers: tuple[WorkerStatus, ...]
    machines: tuple[MachineStatus, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    shortage: str = ""
    main_worker: int = 0
    progress: float | None = None
    left_s: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    epoch_progress: float | None = None
    awaited: tuple[int, ...] = ()
    awaited_s: float | None = None
    awaited_share: float | None = None


# -- Who keeps the workers of a job waiting, according to the servers' answers to `FetchWaits`, without I/O
#
# A single answer shows one moment. If the workers wait for 40 ms in each iteration, for example for a worker that is
# three times slower, half of the answers may find no worker waiting. So `WaitSamples` keeps several answers. If other
# workers wait for a worker in a part of the answers, they wait for this worker in about the same part of the time.


class Awaited(NamedTuple):
    """The workers that keep other workers waiting.

    Attributes:
        workers: the indices of these workers, in order; () if no worker is awaited.
        share: the part of the last `OLDEST_S` seconds, or less, in which other workers have waited for these workers.
    """

    workers: tuple[int, ...] = ()
    share: float | None = None


class Observed(msgspec.Struct, frozen=True):
    """The observations of a coordinator's host.

    Attributes:
        servers: number of servers.
        elapsed_s: seconds since the run began.
        connected: the workers that have connected to the coordinator at any time.
        machine_of: worker -> name of its machine. Workers that are not in this mapping run on the coordinator's
            machine.
        devices: worker -> its device and the model of this device; {} if no worker is on an accelerator.
        state_s: worker -> seconds since its state or its iteration last changed.
        usual_s: worker -> usual duration of its iterations in seconds.
        processes: worker -> state of its process according to its agent.
        machines: the heartbeats of the machines.
        traffic: the traffic between the machines.
        progress: how far the job has come.
        awaited: the workers for which other workers have waited most often in the last `OLDEST_S` seconds.
    """

    servers: int
    elapsed_s: float
    connected: Collection[int]
    machine_of: Mapping[int, str] = {}
    devices: Mapping[int, str] = {}
    state_s: Mapping[int, float] = {}
    usual_s: Mapping[int, float] = {}
    processes: Mapping[int, str] = {}
    machines: tuple[MachineStatus, ...] = ()
    traffic: Mapping[Direction, LinkTraffic] = {}
    progress: JobProgress = JobProgress()
    awaited: Awaited = Awaited()


class StateTimes:
    """Measures for how long each worker has been in its state.

    A worker that is never observed while it waits seems to compute all the time, but it computes one iteration after
    another. So the state that is noted for a worker includes its iteration.

    Example:
        >>> times = StateTimes()
        >>> times.note({0: ("computing", 7), 1: ("waiting", 6)}, now_ticks=0)
        >>> times.note({0: ("computing", 7), 1: ("computing", 7)}, now_ticks=2 * TICKS_PER_S)
        >>> times.state_s(now_ticks=3 * TICKS_PER_S)
        {0: 3.0, 1: 1.0}
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._since: dict[int, tuple[Hashable, int]] = {}

    def note(self, states: Mapping[int, Hashable], now_ticks: int) -> None:
        """Record the current states of all workers."""
        before = self._since
        self._since = {
            worker: before[worker] if worker in before and before[worker][0] == state else (state, now_ticks)
            for worker, state in states.items()
        }

    def state_s(self, now_ticks: int) -> dict[int, float]:
        """Return, for each worker, the seconds since its state last changed."""
        return {
            worker: (now_ticks - since_ticks) / self._ticks_per_s
            for worker, (_, since_ticks) in self._since.items()
        }


def job_status(core: Coordinator, observed: Observed, local: str = LOCAL) -> JobStatus:
    """Return the state of a job.

    Args:
        core: the coordinator, which is not changed.
        observed: what the coordinator's host has observed.
        local: name of the coordinator's machine.
    """
    waits = dict(sorted(core.waits.items()))
    waiting = still_waiting(core)
    reasons = {worker: why for worker, why in waiting_for(waits.values()).items() if worker in waiting}
    staleness: dict[int, int] = {}
    for answer in waits.values():
        for shard in answer.shards:
            for worker, updates in shard.staleness:
                staleness[worker] = max(updates, staleness.get(worker, 0))
    gathered = core.collectives.waiting
    uncalled = tuple(sorted(core.members.live - gathered.keys()))
    last = last_workers(core, core.members.live - reasons.keys() - gathered.keys())
    losses: dict[int, list[str]] = {}
    for departure in core.members.departures:
        if departure.fate == "lost":
            losses.setdefault(departure.worker, []).append(core.cause(departure))
    rows = []
    for worker in sorted({*core.members.live, *core.members.finished, *core.members.lost}):
        gone = bool(core.members.fate(worker))
        state = worker_state(core, worker, worker in observed.connected)
        held = held_state(core, worker, observed.processes)
        reported = core.board.get(worker)
        samples, usual_s = core.first_samples(worker), observed.usual_s.get(worker)
        call = gathered.get(worker)
        waits_for = "" if gone else f"the end of {call.name}" if call is not None else reasons.get(worker, "")
        if state == "paused":
            waits_for = "other workers to join"
        rows.append(
            WorkerStatus(
                worker,
                observed.machine_of.get(worker, local),
                held or state,
                observed.state_s.get(worker),
                reported.iteration if reported is not None else None,
                reported.loss if reported is not None else None,
                None if gone or samples is None or not usual_s else samples / usual_s,
                None if gone else staleness.get(worker),
                waits_for,
                () if not waits_for else uncalled if call is not None else last,
                tuple(losses.get(worker, ())),
                reported is not None and reported.guessed,
                observed.devices.get(worker, msgspec.UNSET),
            )
        )
    links = tuple(
        LinkStatus(link.sender, link.receiver, traffic.bytes_per_s, traffic.total_bytes)
        for link, traffic in sorted(observed.traffic.items())
    )
    machines = tuple(sorted(observed.machines, key=lambda machine: machine.machine))
    awaited, awaited_s = _awaited_now(rows)
    return JobStatus(
        core.sync,
        observed.servers,
        observed.elapsed_s,
        tuple(rows),
        machines,
        links,
        core.shortage,
        core.main.worker,
        **msgspec.structs.asdict(observed.progress),
        awaited=awaited or observed.awaited.workers,
        awaited_s=awaited_s,
        awaited_share=None if awaited else observed.awaited.share,
    )


def _awaited_now(rows: Sequence[WorkerStatus]) -> tuple[tuple[int, ...], float | None]:
    """Return the workers that keep the most other workers waiting, and the duration of the longest of these waits.

    Waits that are shorter than `LONG_S` are left out. The awaited workers are named only if they do not outnumber the
    waiting workers: the first worker that reaches the end of a round waits for all others, but this does not mean that
    the others are slow.
    """
    waiting = [row for row in rows if row.last and row.state_s is not None and row.state_s >= LONG_S]
    if not waiting:
        return (), None
    [(last, count)] = Counter(row.last for row in waiting).most_common(1)
    if count < len(last):
        return (), None
    return last, max(row.state_s or 0.0 for row in waiting if row.last == last)


def worker_state(core: Coordinator, worker: int, connected: bool) -> str:
    """Return what a worker is doing, as far as the coordinator knows.

    Args:
        core: the coordinator.
        worker: index of the worker.
        connected: True if the worker has connected to the coordinator.
    """
    if gone := core.members.fate(worker):
        return gone
    if call := core.collectives.waiting.get(worker):
        return f"waits in {call.name}"
    if worker in core.board:
        return core.board[worker].state
    if core.expects_model(worker_peer(worker)):
        return "before its first forward pass"
    return "waiting for the others to start" if connected else "starting"


def held_state(core: Coordinator, worker: int, processes: Mapping[int, str]) -> str:
    """Return why the process of a worker does not run; "" if the process runs, or if the worker is gone.

    Args:
        core: the coordinator.
        worker: index of the worker.
        processes: worker -> state of its process.
    """
    held = HELD.get(processes.get(worker, ""), "")
    return "" if not held or core.members.fate(worker) else held


MOST_LOOKS = 20
OLDEST_S = 30.0  # maximum age of a look (one set of the servers' answers) that is used
LEAST_LOOKS = 2
LEAST_SHARE = 0.25
"""A worker is named only if it is awaited in at least this part of the looks. Equally fast workers are awaited less
often."""

CLOSE = 0.8
"""A worker is named only if the number of looks in which it is awaited is at least this fraction of the number for the
most awaited worker."""


class WaitSamples:
    """The workers that were awaited according to the last answers of the servers.

    Args:
        ticks_per_s: number of ticks per second.
    """

    def __init__(self, ticks_per_s: int) -> None:
        self._oldest_ticks = round(OLDEST_S * ticks_per_s)
        # (time in ticks, the awaited workers with their incarnations)
        self._looks: deque[tuple[int, frozenset[tuple[int, int]]]] = deque(maxlen=MOST_LOOKS)

    def look(self, core: Coordinator, now_ticks: int) -> None:
        """Record which workers are awaited now. Call this when all servers have answered. No effect before training.

        The awaited workers are not noted if they outnumber the waiting workers: the first workers that reach the end of
        a round wait for all others, but this does not mean that the others are slow.
        """
        if not core.started:
            return
        waiting = still_waiting(core)
        last = last_workers(core, core.members.live - waiting)
        named = last if len(last) <= len(waiting) else ()
        self._looks.append((now_ticks, frozenset((each, core.members.incarnation(each)) for each in named)))

    def awaited(self, core: Coordinator, now_ticks: int) -> Awaited:
        """Return the workers for which other workers have waited most often in the last `OLDEST_S` seconds.

        Incarnations that have left are not awaited any more.
        """
        looks = [last for ticks, last in self._looks if now_ticks - ticks <= self._oldest_ticks]
        counts = Counter(each[0] for last in looks for each in last if core.members.expects(*each))
        most = max(counts.values(), default=0)
        if len(looks) < LEAST_LOOKS or most < LEAST_SHARE * len(looks):
            return Awaited()
        workers = tuple(sorted(worker for worker, count in counts.items() if count >= CLOSE * most))
        return Awaited(workers, most / len(looks))


def still_waiting(core: Coordinator) -> set[int]:
    """Return the workers whose pulls are not answered, according to the servers' last answers.

    If a worker has reported since these answers that it computes a later iteration, it waits no longer.
    """
    pulled: dict[int, int] = {}
    for answer in core.waits.values():
        for shard in answer.shards:
            for worker, iteration in shard.pulls:
                pulled[worker] = max(iteration, pulled.get(worker, iteration))
    return {worker for worker, iteration in pulled.items() if not _computes_after(core, worker, iteration)}


def _computes_after(core: Coordinator, worker: int, iteration: int) -> bool:
    """Return True if a worker has reported that it computes an iteration after this one."""
    reported = core.board.get(worker)
    return reported is not None and reported.state == "computing" and reported.iteration > iteration


def waiting_for(answers: Collection[Waits]) -> dict[int, str]:
    """Return, for each worker that waits at a shard, a description of what it waits for.

    The shards are named only if the worker does not wait for the same thing at all shards.
    """
    shards = [shard for answer in answers for shard in answer.shards]
    found: dict[int, dict[str, list[int]]] = {}
    for shard in shards:
        for (worker, _), reason in zip(shard.pulls, shard.reasons, strict=True):
            found.setdefault(worker, {}).setdefault(reason, []).append(shard.shard)
    return {worker: "; ".join(_named(at, len(shards))) for worker, at in sorted(found.items())}


def _named(reasons: Mapping[str, list[int]], shards: int) -> list[str]:
    """Return the reasons. If a reason does not hold for all shards, the shards for which it holds are named."""
    return [
        reason if len(where) == shards else f"{reason} (shard {', '.join(map(str, sorted(where)))})"
        for reason, where in reasons.items()
    ]


def last_workers(core: Coordinator, workers: Collection[int]) -> tuple[int, ...]:
    """Return the members of `workers` that are in the earliest iteration, according to their last reports."""
    iterations = {worker: core.board[worker].iteration for worker in workers if worker in core.board}
    earliest = min(iterations.values(), default=0)
    return tuple(sorted(worker for worker, iteration in iterations.items() if iteration == earliest))
