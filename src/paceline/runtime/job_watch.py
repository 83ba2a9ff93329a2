"""What the host of the coordinator sees of a run: when it heard each process, how fast workers are, what travels.

From this and the core, it computes the state of the job for the display and for other programs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Any

from ..core.coordinator import Coordinator
from ..core.machines.traffic_rates import Link, TrafficMeter
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
PACE_SPAN = 8  # approximate number of recent iterations over which a worker's iteration time is averaged


class JobWatch:
    """Watches the processes of one run. Other threads may read the attributes.

    Args:
        job: the configuration of the run.
        core: the state machine of the coordinator.
        machines: the machines that have joined the run.

    Attributes:
        heard_s: (role, index) -> time of the last message from this peer, on the clock of `time.monotonic`. For a
            worker, also the time at which a part of a message to or from a server last moved, as the servers report.
        usual_s: worker -> moving average of the worker's iteration time in seconds, including waiting.
        registered_s: worker -> time at which the worker registered its model, on the clock of `time.monotonic`.
        devices: worker -> its device and the model of this device, for workers that have connected.
        traffic: the number of bytes of each link between machines.
        progress: how far the run has come.
    """

    def __init__(self, job: Job, core: Coordinator, machines: Machines) -> None:
        self.heard_s: dict[tuple[str, int], float] = {}
        self.usual_s: dict[int, float] = {}
        self.registered_s: dict[int, float] = {}
        self.devices: dict[int, str] = {}
        self.traffic = TrafficMeter()
        self.progress = ProgressMeter()
        self._job = job
        self._core = core
        self._machines = machines
        self._state_times = StateTimes()
        self._noted_ticks = 0
        # worker -> (its latest iteration, time at which this iteration was first reported)
        self._paced: dict[int, tuple[int, float]] = {}

    def named_devices(self) -> dict[int, str]:
        """Return the device of each worker, for the user; {} if all workers are on the CPU."""
        found = dict(sorted(self.devices.copy().items()))
        return found if set(found.values()) - {CPU.label} else {}

    def forget(self, worker: int) -> None:
        """Forget what was observed of the previous incarnation of a worker."""
        for known in (self.usual_s, self.registered_s, self._paced, self.devices):
            known.pop(worker, None)
        self.heard_s.pop(("worker", worker), None)

    def status(self) -> JobStatus:
        """Return the state of the job, for observers."""
        now_ticks = self._job.now_ticks()
        core, machines = self._core, self._machines
        self.progress.note(core, now_ticks)
        observed = Observed(
            servers=self._job.servers,
            elapsed_s=now_ticks / TICKS_PER_S,
            connected={index for role, index in self.heard_s if role == "worker"},
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
                or worker_state(core, worker, ("worker", worker) in self.heard_s),
                None if reported is None else reported.iteration,
            )
        self._state_times.note(states, now_ticks)
        self.progress.note(core, now_ticks)

    def note_pace(self, worker: int, now: Status) -> None:
        """Update the moving average of a worker's iteration time."""
        now_s = time.monotonic()
        if self._core.quorum.paused:
            self._paced.clear()  # the pause is not part of an iteration
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
            if (known_s := self.heard_s.get(("worker", worker))) is not None:
                self.heard_s["worker", worker] = max(known_s, self._job.monotonic_s_of(moved_ticks))

    def _note_traffic(self, connection: Hashable, here: str, there: str, traffic: Traffic) -> None:
        """Record the traffic of a connection between two machines, as the first one has counted it."""
        now_ticks = self._job.now_ticks()
        self.traffic.note(connection, Link(here, there), traffic.sent, now_ticks)
        self.traffic.note(connection, Link(there, here), traffic.received, now_ticks)
