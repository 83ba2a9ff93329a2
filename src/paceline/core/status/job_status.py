"""The state of a job as a table of plain values, for the progress display and for `paceline status`.

The table contains what the coordinator knows: the workers' reports, the servers' answers to `FetchWaits`, and what
its host has observed. Computing it changes nothing and asks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

import msgspec

from ...sync.ticks import TICKS_PER_S
from ..coordinator import Coordinator
from ..machines.traffic_rates import Link, LinkTraffic
from ..protocol.requests import worker_peer
from .awaited import Awaited, last_workers, still_waiting, waiting_for
from .job_progress import JobProgress

__all__ = [
    "HELD",
    "LOCAL",
    "JobStatus",
    "LinkStatus",
    "MachineStatus",
    "Observed",
    "StateTimes",
    "WorkerStatus",
    "held_state",
    "job_status",
    "worker_state",
]

LOCAL = "this machine"
"""The name of the coordinator's machine, on which the servers run unless other machines bring them."""

LONG_S = 1.0
"""Time after which a wait is stated by its length. Shorter ones are stated by how often they occur."""

HELD = {"stopped": "stopped by a signal", "traced": "held by a debugger"}
"""The states of processes that are shown in place of the state that the worker has reported last."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """The state of one worker.

    Attributes:
        worker: index of the worker.
        machine: name of its machine.
        state: what the worker is doing.
        state_s: seconds since it began to do this, in its latest iteration; None if unknown.
        iteration: the iteration that it has reported last; None before its first report.
        loss: the loss that it has reported last; None if it has reported none.
        samples_per_s: its speed in samples per second; None if unknown.
        staleness: number of updates, at the shard with the most, since the worker has received the weights; None if
            unknown.
        waits_for: what it waits for according to the sync model, or the call in which it waits; "" if it does not
            wait.
        last: the workers that keep it waiting: in a call, those that have not made it; otherwise, of the workers that
            do not wait themselves, those in the earliest iteration. () if it does not wait.
        losses: why each of its incarnations that were lost was lost, in order; () if none was.
        guessed: True if `loss` is a guess: the tensor on which the script has called `backward()`.
        device: its device and the model of this device; unset if no worker is known to be on an accelerator.
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
        silent_s: seconds since its last sign of life (see `core.machines.liveness`).
        suspicion: `silent_s` divided by the time after which it is taken out.
        servers: the servers that it has brought.
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
        bytes_per_s: bytes per second, on average over the last seconds; None if it is not known yet.
        total_bytes: number of bytes on the connections that are open.
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
        main_worker: the main worker (see `core.machines.main_worker`); -1 for nobody.
        progress: the part of the training loop in progress that is done, from 0 to 1; None if its length is unknown.
        left_s: the time in seconds that the loop will take from now on; None if unknown.
        samples_per_s: number of samples per second that all workers together use; None if unknown.
        loss: the mean of the workers' losses, a moving mean over some seconds; None if unknown.
        epoch: number of the epoch in progress, counted from 1; None if unknown.
        epochs: number of epochs of the loop; None if unknown.
        epoch_progress: the part of the epoch in progress that is done, from 0 to 1; None if unknown.
        awaited: the workers for which others wait; () for none.
        awaited_s: for how many seconds others have been waiting for them; None if nobody waits at this moment.
        awaited_share: the part of the last seconds in which others have waited for them; None if unknown.
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


class Observed(msgspec.Struct, frozen=True):
    """What the host of a coordinator has observed.

    Attributes:
        servers: number of servers.
        elapsed_s: seconds since the run began.
        connected: the workers that have connected to the coordinator at any time.
        machine_of: worker -> name of its machine. Workers that are missing run on the coordinator's machine.
        devices: worker -> its device and the model of this device; {} if no worker is on an accelerator.
        state_s: worker -> seconds since its state or its iteration has changed.
        usual_s: worker -> usual duration of its iterations in seconds.
        processes: worker -> state of its process according to its agent.
        machines: the heartbeats of the machines.
        traffic: the traffic between the machines.
        progress: how far the job has come.
        awaited: for whom others have waited most often in the last seconds.
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
    traffic: Mapping[Link, LinkTraffic] = {}
    progress: JobProgress = JobProgress()
    awaited: Awaited = Awaited()


class StateTimes:
    """Measures for how long each worker has been in its state.

    A worker that is never seen to wait computes all the time, but one iteration after another. So what is noted for a
    worker includes its iteration.

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
        """Return, for each worker, the seconds since its state has changed."""
        return {
            worker: (now_ticks - since_ticks) / self._ticks_per_s
            for worker, (_, since_ticks) in self._since.items()
        }


def job_status(core: Coordinator, observed: Observed, local: str = LOCAL) -> JobStatus:
    """Return the state of a job.

    Args:
        core: the coordinator. It is not changed.
        observed: what its host has observed.
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
    """Return the workers that keep most others waiting, and for how long one of those has waited, at least `LONG_S`.

    They are named only if they are not more than those that wait: the first worker at the end of a round waits for
    all others, and none of these is slow.
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
    """Return what keeps the process of a worker from running; "" if nothing does, or the worker is gone.

    Args:
        core: the coordinator.
        worker: index of the worker.
        processes: worker -> state of its process.
    """
    return "" if core.members.fate(worker) else HELD.get(processes.get(worker, ""), "")
