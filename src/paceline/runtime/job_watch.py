"""What the host of the coordinator sees of a run: when it heard each process, how fast workers are, what travels.

From this and the core, it computes the state of the job for the display and for other programs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Any, Literal, get_args

from ..core.coordinator import Coordinator
from ..core.machines.traffic_rates import Link, TrafficMeter
from ..core.machines.waiting_clocks import Clocks
from ..core.protocol.messages import Status, Waits
from ..core.status.job_progress import ProgressMeter
from ..core.status.job_status import (
    LOCAL,
    JobStatus,
    Observed,
    StateTimes,
    held_state,
    job_status,
    worker_state,
)
from ..sync.ticks import TICKS_PER_S
from ..wire.stream import Stream
from ..wire.traffic import Traffic, traffic_of
from .compute_devices import CPU
from .job import Job
from .machines import Machines

__all__ = ["JobWatch"]

NOTE_INTERVAL_TICKS = TICKS_PER_S // 5  # minimum time between two records of the workers' states
CLOCK_GAP_S = 1.0  # a launcher that looks less often than this was suspended
PACE_SPAN = 8  # approximate number of recent iterations over which a worker's iteration time is averaged


Stage = Literal["starting", "preparing", "silent", "asked"]
"""What a process has a clock for. See `JobWatch.clocks`."""


class JobWatch:
    """Watches the processes of one run. Other threads may read the attributes.

    Args:
        job: the configuration of the run.
        core: the state machine of the coordinator.
        machines: the machines that have joined the run.

    Attributes:
        clocks: (stage, role, index) -> for how long the run has waited for this process. A process is "starting" from
            the moment at which it is expected until its first message. A worker is then "preparing" until it has
            registered its model. A process is "silent" since its last message, or since the last time at which a part
            of a message to or from a server moved, as servers report. A server is "asked" until it says who waits.
        took_s: (stage, role, index) -> how long a process has taken to start or to prepare, with all pauses.
        connected: (role, index) of the processes that have sent a message.
        usual_s: worker -> moving average of the worker's iteration time in seconds, including waiting.
        devices: worker -> its device and the model of this device, for workers that have connected.
        traffic: the number of bytes of each link between machines.
        progress: how far the run has come.
    """

    def __init__(self, job: Job, core: Coordinator, machines: Machines) -> None:
        self.clocks: Clocks[tuple[Stage, str, int]] = Clocks(time.monotonic(), gap_s=CLOCK_GAP_S)
        self.took_s: dict[tuple[Stage, str, int], float] = {}
        self.connected: set[tuple[str, int]] = set()
        self.usual_s: dict[int, float] = {}
        self.devices: dict[int, str] = {}
        self.traffic = TrafficMeter()
        self.progress = ProgressMeter()
        self._begun_s: dict[
            tuple[Stage, str, int], float
        ] = {}  # (stage, role, index) -> time at which it began
        self._job = job
        self._core = core
        self._machines = machines
        self._state_times = StateTimes()
        self._noted_ticks = 0
        # worker -> (its latest iteration, time that had counted when it was first reported)
        self._paced: dict[int, tuple[int, float]] = {}

    def named_devices(self) -> dict[int, str]:
        """Return the device of each worker, for the user; {} if all workers are on the CPU."""
        found = dict(sorted(self.devices.copy().items()))
        return found if set(found.values()) - {CPU.label} else {}

    # -- processes ----------------------------------------------------------------------------------------

    def expect(self, role: str, index: int) -> None:
        """Wait for a process from now on. Nothing is left of what was observed of another one in its place."""
        self.left(role, index)
        self.connected.discard((role, index))
        self.took_s.pop(("starting", role, index), None)
        if role == "worker":
            self.took_s.pop(("preparing", role, index), None)
            for known in (self.usual_s, self._paced, self.devices):
                known.pop(index, None)
        now_s = time.monotonic()
        self._enter("starting", role, index, now_s)
        self.clocks.begin(("silent", role, index), now_s)

    def heard(self, role: str, index: int) -> None:
        """Note a message from a process."""
        now_s = time.monotonic()
        self.clocks.begin(("silent", role, index), now_s)
        if (role, index) in self.connected:
            return
        self.connected.add((role, index))
        self._pass("starting", role, index, now_s)
        if role == "worker":
            self._enter("preparing", role, index, now_s)

    def prepared(self, worker: int) -> None:
        """Note that a worker has registered its model."""
        self._pass("preparing", "worker", worker, time.monotonic())

    def left(self, role: str, index: int) -> None:
        """Wait for a process no longer, because it has left."""
        for stage in get_args(Stage):
            self.clocks.end((stage, role, index))

    def _pass(self, stage: Stage, role: str, index: int, now_s: float) -> None:
        """Note that a process has passed a stage."""
        if (begun_s := self._begun_s.pop((stage, role, index), None)) is not None:
            self.took_s[stage, role, index] = now_s - begun_s
        self.clocks.end((stage, role, index))

    def _enter(self, stage: Stage, role: str, index: int, now_s: float) -> None:
        self._begun_s[stage, role, index] = now_s
        self.clocks.begin((stage, role, index), now_s)

    # -- the state of the job -----------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """Return the state of the job, for observers."""
        now_ticks = self._job.now_ticks()
        core, machines = self._core, self._machines
        self.progress.note(core, now_ticks)
        observed = Observed(
            servers=self._job.servers,
            elapsed_s=now_ticks / TICKS_PER_S,
            connected={index for role, index in self.connected.copy() if role == "worker"},
            machine_of=machines.machine_of,
            devices=self.named_devices(),
            state_s=self._state_times.state_s(now_ticks),
            usual_s=self.usual_s,
            processes=machines.liveness.states(),
            machines=machines.statuses(now_ticks),
            traffic=self.traffic.links(now_ticks),
            progress=self.progress.read(core, now_ticks),
            awaited=self.progress.awaited(now_ticks),
        )
        return job_status(core, observed)

    # -- states and paces ---------------------------------------------------------------------------------

    def note_states(self) -> None:
        """Record the states of all workers, so that the status can tell for how long they have been in them."""
        now_ticks = self._job.now_ticks()
        if now_ticks < self._noted_ticks + NOTE_INTERVAL_TICKS:
            return
        self._noted_ticks = now_ticks
        core, processes = self._core, self._machines.liveness.states()
        states = {}
        for worker in {*core.members.live, *core.members.finished, *core.members.lost}:
            reported = core.board.get(worker)
            states[worker] = (
                held_state(core, worker, processes)
                or worker_state(core, worker, ("worker", worker) in self.connected),
                None if reported is None else reported.iteration,
            )
        self._state_times.note(states, now_ticks)
        self.progress.note(core, now_ticks)

    def note_pace(self, worker: int, now: Status) -> None:
        """Update the moving average of a worker's iteration time."""
        now_s = self.clocks.counted_s(time.monotonic())  # without pauses, which are no part of an iteration
        before = self._paced.get(worker)
        if before is not None and now.iteration > before[0]:
            each_s = (now_s - before[1]) / (now.iteration - before[0])
            self._machines.liveness.iterated(worker, round(each_s * TICKS_PER_S))
            usual_s = self.usual_s.get(worker, each_s)
            self.usual_s[worker] = usual_s + (each_s - usual_s) / PACE_SPAN
        if before is None or now.iteration > before[0]:
            self._paced[worker] = now.iteration, now_s

    # -- traffic ------------------------------------------------------------------------------------------

    def note_own_traffic(self, streams: Mapping[tuple[str, int], Stream[Any]]) -> None:
        """Record the traffic of this process's connections to other machines. They are given by (role, index)."""
        machines = {
            "worker": self._machines.machine_of,
            "server": self._machines.machine_of_server,
            "agent": self._machines.names,
        }
        for (role, index), stream in streams.items():
            machine = machines[role].get(index)
            if machine is not None and (traffic := traffic_of(stream.sock)) is not None:
                self._note_traffic((role, index), LOCAL, machine, traffic)

    def note_traffic_of(self, server: int, message: Waits) -> None:
        """Record the traffic of a server's connections to workers."""
        machines = self._machines.machine_of
        here = self._machines.machine_of_server.get(server, LOCAL)
        for each in message.traffic:
            there = machines.get(each.worker, LOCAL)
            if there != here:
                traffic = Traffic(each.sent_bytes, each.received_bytes)
                self._note_traffic(("server", server, each.worker), here, there, traffic)
        for worker, moved_ticks in message.moved_ticks:
            self.clocks.renew(("silent", "worker", worker), self._job.monotonic_s_of(moved_ticks))

    def _note_traffic(self, connection: Hashable, here: str, there: str, traffic: Traffic) -> None:
        """Record the traffic of a connection between two machines, as the first one has counted it."""
        now_ticks = self._job.now_ticks()
        self.traffic.note(connection, Link(here, there), traffic.sent, now_ticks)
        self.traffic.note(connection, Link(there, here), traffic.received, now_ticks)
