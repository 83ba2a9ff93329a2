"""The session of a worker in a live run.

The session runs on the script's thread. `paceline.core.worker` determines which messages are sent and awaited. The
parts of the session do the rest:

    links       the connections, and the waiting for messages
    memory      the memory for the weights and gradients, and their transfer to and from the servers
    servers     what the worker requests from the servers besides the weights
    iterations  the times of the iterations, and their records
    status      the reports to the coordinator for display
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from ..core.data_feed import Work
from ..core.layout import ModelSpec, ShardSlice, advise_wire
from ..core.messages import (
    MOST_LABEL,
    Activity,
    Combined,
    Commit,
    Failed,
    Hello,
    InitialWeights,
    Message,
    Observation,
    Status,
    first_phase,
)
from ..core.metrics import Lap, Noted, Settled, Stopwatch
from ..core.requests import Request
from ..core.worker import Worker
from ..errors import DeadlineError, PeerLostError
from ..shard.vectors import Vectors
from ..sync import SyncModel
from ..sync.schedule import read_schedule
from ..sync.ticks import TICKS_PER_S
from ..trace.recording import IterationRecord
from ..train.collectives import working_directory
from ..train.metrics import metrics_of
from ..train.session import Session, TrainingStep
from ..wire.preface import sending_of
from ..wire.stream import Stream
from ..wire.transports import connect, is_here, seen_from
from .job import Assignment, Job
from .readers import Fetches
from .traces import TEND_S, SegmentedFile, segmenting
from .worker_links import WAITING_S, InitialModel, Links, SlowLink, WorkerMemory, exclusive

log = logging.getLogger("paceline.worker")

# Minimum time between two checks for messages from the coordinator. Most very short iterations pass without a check.
HEARING_INTERVAL_S = 200e-6
# After waiting this long in a call that all workers make, a worker pushes without a gradient, and gives the state of
# its script if the job is being cut.
COMBINING_S = 0.5
# Maximum time between two checks for messages from the coordinator while the script is not training.
LOOKING_S = 0.1
LEAST_IDLE_S = 1e-3  # minimum time between two pushes while the script is not training
# Minimum times between two pushes that are observed for the guard, and between two reports of observations. These times
# bound the cost of the guard: observing a push takes about 15 us, and judging a push also takes about 15 us (see
# `python -m benchmarks guard`).
OBSERVING_INTERVAL_S, REPORTING_INTERVAL_S = 2e-3, 10e-3
# Minimum time between two reports of the metrics that the script has logged.
LOGGING_INTERVAL_S = 0.1


class WorkerSession(Session):
    """The session of a worker in a live run. See `paceline.train.session.Session`.

    Attributes:
        links, memory, servers, iterations, status: see the docstring of this module. `memory` is None before `begin`.
    """

    servers: Fetches

    def __init__(self, place: Assignment, coordinator: Stream[Message]) -> None:
        job = place.job
        super().__init__(
            Worker(
                job.schedule,
                workers=job.workers,
                shards=job.shards,
                servers=job.servers,
                overlap=job.overlap == "shards",
            ),
            worker=place.index,
            workers=job.workers,
            split=job.split,
            batch=job.batch,
            joint_batch=job.joint_batch,
            seed=job.seed,
            device="cpu" if place.device is None else place.device.own_name,
            skips_nan=job.on_nan == "skip",
            resumed=0 if job.resumed is None or place.incarnation else job.resumed.number,
        )
        self._job = job
        self._place = place
        self.links = Links(self.core, coordinator, self.callbacks)
        self.memory: WorkerMemory | None = None
        self.servers = Fetches(place, self.links, self.callbacks)
        self.iterations = Iterations(place, self.links.report_problem)
        self.status = StatusReporter(job, self.links)
        emulated = job.pace or job.slowdown
        self._emulation = Emulation(job, place.index) if emulated else None
        self._thread = 0  # the thread that trains; 0 before the training
        self._queued_ticks = 0  # what `queued_ticks` returned when the training began
        # None if all servers are on this machine, or once the link has been measured
        self._slow_link: SlowLink | None = None
        self._held = b""  # the state of the script at the beginning of an evaluation
        self._stand_in_s = math.inf  # when to push next during an evaluation
        # the times of the last check for messages from the coordinator, of the last observed push, of the last report
        # to the guard, and of the last report of logged metrics
        self._heard_s = self._observed_s = self._reported_s = self._logged_s = -math.inf

    @classmethod
    def connect(cls, place: Assignment) -> WorkerSession:
        """Return a session that has connected to the coordinator.

        Raises:
            PeerLostError: the coordinator cannot be reached.
        """
        stream: Stream[Message] = Stream(
            connect(place.coordinator, known=place.job.contexts),
            first_phase("coordinator", "worker"),
            takes_descriptor=place.job.carrier.shares_memory,
        )
        label = "" if place.device is None else place.device.label[:MOST_LABEL]
        stream.send(
            Hello(place.job.token, "worker", place.index, incarnation=place.incarnation, device=label)
        )
        session = cls(place, stream)
        if place.index == 0 and place.job.joined:
            session.is_main_now()  # another worker is the main worker if the run has begun without worker 0
        return session

    # -- joining and the model ----------------------------------------------------------------------------

    @exclusive
    def is_main_now(self) -> bool:
        self.links.carry_out(self.core.request_main())
        self.links.wait_while(lambda: self.core.asks_for_main)
        return self.core.main_worker == self.worker

    @exclusive
    def begin(self, model: ModelSpec) -> bool:
        self.links.carry_out(self.core.register(model, working_directory()))
        while self.core.started is None:
            self.links.hear(timeout_s=None)
        # the worker takes part in the run from now on
        self._thread = threading.get_ident()
        self._queued_ticks = queued_ticks()
        loads = self.status.stopwatch.loads
        self.status.stopwatch = Stopwatch(self._job.now_ticks())
        self.status.stopwatch.loads = loads
        self._connect(model, self.core.started.shards)
        return self.core.started.initializer == self.worker

    def _connect(self, model: ModelSpec, shards: tuple[ShardSlice, ...]) -> None:
        """Connect to the servers, with memory for the model. Earlier connections stay open."""
        assert self.core.started is not None
        if self.memory is not None:
            self.memory.close()
        # the addresses of the servers, in order
        addresses = [
            seen_from(address, self._place.coordinator)
            for address in dict.fromkeys(self.core.started.addresses)
        ]
        local = [is_here(address) for address in addresses]
        names, common = [each.name for each in model.optimizers], self._job.schedule.lockstep
        advice = advise_wire(names, str(self._job.wire), common=common, vectors=model.layout.sizes)
        self._slow_link = None if all(local) else SlowLink(advice)
        links = self.links
        self.memory = WorkerMemory(
            self._job,
            model,
            shards,
            local,
            links.coordinator.descriptors,
            links.stage,
            links.is_busy,
            self.core.awaits,
            accelerated=self.core.data.accelerated,
        )
        self.servers.model, self.servers.shards = model, shards
        self.weights, self.gradients = self.memory.weights(in_place=False), self.memory.gradients
        links.connect(self._place, addresses, local, self.memory)

    @exclusive
    def initialize(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        assert self.memory is not None
        model, shards = self.memory.model, self.memory.shards
        self.links.initial = self._initial(model, shards, self.weights, buffers, state_of)
        self.links.carry_out(self.core.initialize())
        self.await_first_weights()
        self.links.initial = None

    def _initial(
        self,
        model: ModelSpec,
        shards: Sequence[ShardSlice],
        weights: Vectors,
        buffers: Sequence[torch.Tensor],
        state_of: Callable[[ShardSlice], Vectors],
    ) -> Callable[[InitialWeights], None]:
        """Return the function that sends a shard its part of the initial model, or its part of an extension."""
        values_of = self.callbacks.frozen
        initial = InitialModel(
            self._job, self.links, shards, weights, buffers, state_of, model.frozen, values_of
        )
        return initial.send

    @exclusive
    def extend(
        self,
        model: ModelSpec,
        weights: Vectors,
        buffers: Sequence[torch.Tensor],
        state_of: Callable[[ShardSlice], Vectors],
    ) -> str:
        links, core = self.links, self.core
        shards = model.sliced(self._job.shards, self._job.slicing, self._job.wire.block)
        links.initial = self._initial(model, shards, weights, buffers, state_of)
        links.coordinator.takes_descriptor = self._job.carrier.shares_memory
        links.carry_out(core.propose(model))
        with self.status.doing("outside"):
            self._wait_in_call(lambda: core.combined is not None or core.extended is not None, servers=True)
        links.initial = None
        if core.extended is None:
            assert core.combined is not None
            return core.combined.refused
        before = links.servers
        with self.status.doing("exchanging"):
            self._connect(model, core.extended.shards)
            core.await_extended_weights()
            self._await_answers()
        # Disconnect only now that the new connections exist: to a server, a worker without a connection is lost.
        links.disconnect(before)
        return ""

    @exclusive
    def await_first_weights(self) -> None:
        self._await_answers()
        now_s = self._job.now_s()
        self.status.stopwatch.begin_iteration("computing", round(now_s * TICKS_PER_S))
        self.iterations.begin(now_s)
        self.status.show("computing", now_s)

    # -- the memory ---------------------------------------------------------------------------------------

    @property
    def sends_early(self) -> bool:
        return self.memory is not None and self.memory.outbox is not None and self.memory.outbox.early

    @property
    def encodes_weights(self) -> bool:
        return self.memory is not None and self.memory.encodes_weights

    def weights_edited(self) -> bool | None:
        return None if self.memory is None else self.memory.edited()

    def restore_weights(self) -> bool:
        return self.memory is not None and self.memory.restore()

    def gradient_ready(self, parameter: int) -> None:
        if self.memory is None or self.memory.outbox is None:
            return
        lock = self.links.lock
        free = lock.acquire(blocking=False)  # a loader on a thread of its own may use the connections
        try:
            self.memory.outbox.ready(parameter, sends=free)
        finally:
            if free:
                lock.release()

    # -- iterations ---------------------------------------------------------------------------------------

    @property
    def observes(self) -> bool:
        return self._job.guard != "off" and self._job.now_s() - self._observed_s >= OBSERVING_INTERVAL_S

    @exclusive
    def restart_ordered(self) -> bool:
        self.links.hear_coordinator()
        return self.core.restart_ordered

    def hold_back(self, *, droppable: bool) -> bool:
        """Sleep until the emulated machine would have finished its computation.

        Return False if the computation must be aborted.
        """
        job, iterations = self._job, self.iterations
        droppable = droppable and self.core.may_restart
        iterations.computed_s = now_s = job.now_s()
        if self._emulation is not None:
            busy_s = self._busy_s(self.status.stopwatch.lap(self._job.now_ticks()))
            until_s = self._emulation.until_s(now_s - busy_s, now_s, self.core.data.work)
            while now_s < until_s:
                if not droppable:
                    time.sleep(until_s - now_s)
                elif self.restart_ordered():
                    return False
                else:
                    self.links.orders.poll((until_s - now_s) * 1000)
                now_s = job.now_s()
        return not (droppable and self.restart_ordered())

    def _busy_s(self, lap: Lap) -> float:
        """Return how long the worker has loaded data and computed for its current gradient."""
        return (lap.busy if self.iterations.restarted is None else lap.computing) / TICKS_PER_S

    @exclusive
    def pull_again(self) -> None:
        job, stopwatch = self._job, self.status.stopwatch
        dropped_s = job.now_s()
        stopwatch.drop(job.now_ticks())
        self._forget_staged()
        self.links.carry_out(self.core.pull_again())
        self._await_answers()
        stopwatch.enter("computing", job.now_ticks())
        self.iterations.restart(dropped_s, job.now_s())

    @exclusive
    def refresh(self) -> None:
        self._forget_staged()
        with self.status.doing("exchanging"):
            self.links.carry_out(self.core.pull_again(restart=False))
            self._await_answers()

    def _forget_staged(self) -> None:
        """Forget which parts of the gradient have been sent early. These parts will be sent again."""
        if self.memory is not None and self.memory.outbox is not None:
            self.memory.outbox.restart()

    @exclusive
    def commit(self, step: TrainingStep) -> None:
        links, memory, core, logged = self.links, self.memory, self.core, step.logged
        assert memory is not None
        now_s = self._job.now_s()
        if now_s - self._heard_s > HEARING_INTERVAL_S:
            self._heard_s = now_s
            if links.orders.poll(0):  # polling costs less than an attempt to receive
                links.hear_coordinator()
        self.iterations.write_unwritten(logged.earlier_loss)
        self.status.note_loss(logged)
        pushed_ticks = self._job.now_ticks()
        pushed_s = pushed_ticks / TICKS_PER_S
        lap = self.status.stopwatch.push(pushed_ticks)
        busy_s = self._busy_s(lap)
        self.iterations.push(lap, busy_s)
        if self._slow_link is not None:
            self._watch_link(self._slow_link, busy_s)
        flags = step.flags
        contents, links.payloads = memory.contents(
            step.present, step.groups, step.buffers, empty=flags.empty, set_index=flags.set_index
        )
        if self._job.marks_outside:
            flags = msgspec.structs.replace(flags, outside_ticks=lap.outside)
        # The time of the first gradient is unknown: the script computed it before the session began to measure.
        requests = core.push(flags, contents, busy_s=None if core.last_commit is None else busy_s)
        self.iterations.begins_pass = core.data.begins_pass
        memory.pulls = flags.set_index
        links.carry_out(requests)
        if step.observed is not None:
            self._observed_s = pushed_s
            due = pushed_s - self._reported_s >= REPORTING_INTERVAL_S or bool(step.observed.parameter)
            self._reported_s = pushed_s if due else self._reported_s
            links.carry_out(core.observe(step.observed, report=due))
        due = pushed_s - self._logged_s >= LOGGING_INTERVAL_S
        self._logged_s = pushed_s if due else self._logged_s
        if due or logged.noted:
            links.carry_out(core.log(logged.noted, pushed_s, report=due))
        links.leave_if_asked()
        links.tells_arrivals = not memory.shared and self.callbacks.on_arrived is not None
        self._await_answers()
        links.tells_arrivals = False
        if core.paused:
            self._wait_while_paused()
        answered_ticks = self._job.now_ticks()
        self.status.stopwatch.begin_iteration(self.status.stopwatch.after_step, answered_ticks)
        memory.pulls = None
        if memory.outbox is not None:
            memory.outbox.committed()
        begun_s = self.iterations.end(
            core.last_commit, pushed_s, answered_ticks, logged.loss, follows=logged.follows
        )
        self.status.show("computing", begun_s)

    def _await_answers(self) -> None:
        """Wait until every shard has answered."""
        links, core = self.links, self.core
        while core.waiting_for:
            links.leave_if_asked()
            if not links.hear(timeout_s=WAITING_S) and self.iterations.begun_s is not None:
                self.status.show("pulling" if core.partly_served else "waiting", self._job.now_s())
        if self.memory is not None and core.in_place != self.memory.in_place:
            self._move(self.memory, in_place=core.in_place)

    def _move(self, memory: WorkerMemory, *, in_place: bool) -> None:
        """Make `weights` refer to the servers' memory if `in_place` is True, else to the memory of this worker."""
        self.weights = memory.weights(in_place=in_place)
        self.callbacks.on_moved()

    def _wait_while_paused(self) -> None:
        """Wait while the run has too few workers."""
        log.warning("the run is paused, because it has too few workers; it continues when more have joined")
        with self.status.doing("paused"):
            while self.core.paused:
                self.links.leave_if_asked()
                self.links.hear(timeout_s=WAITING_S)
                self.status.show("paused", self._job.now_s())
        log.warning("the run continues")

    def _watch_link(self, watch: SlowLink, computing_s: float) -> None:
        """If the link to the servers is too slow for the model, report this."""
        servers = self.links.servers
        sendings = [sending for server in servers if (sending := sending_of(server.sock)) is not None]
        if warning := watch.iterated(sendings, computing_s):
            self.links.report_problem(warning)
        if watch.over:
            self._slow_link = None

    @exclusive
    def observe(self, observed: Observation, noted: Sequence[Noted] = ()) -> None:
        self.links.carry_out(self.core.observe(observed))
        self.links.carry_out(self.core.log(noted, self._job.now_s(), ended=True))

    # -- edits --------------------------------------------------------------------------------------------

    @exclusive
    def begin_edit(self) -> bool:
        self.links.hear_coordinator()
        with self.status.doing("exchanging"):
            self.links.carry_out(self.core.begin_edit())
            self._await_answers()
        return self.core.edits

    @exclusive
    def push_edit(self, present: bytes, *, buffers: Mapping[int, torch.Tensor]) -> None:
        links, memory, core = self.links, self.memory, self.core
        assert memory is not None
        links.hear_coordinator()
        self._forget_staged()  # a part of a gradient may have been sent early; that part will be sent again
        contents, links.payloads = memory.contents(present, b"", buffers, empty=not core.edits, exact=True)
        self.iterations.computed_s = pushed_s = self._job.now_s()
        self.iterations.lap = self.status.stopwatch.push(round(pushed_s * TICKS_PER_S))
        links.carry_out(core.push_edit(contents))
        self._await_answers()
        answered_ticks = self._job.now_ticks()
        self.status.stopwatch.begin_iteration(self.status.stopwatch.after_step, answered_ticks)
        self._forget_staged()
        begun_s = self.iterations.end(core.last_commit, pushed_s, answered_ticks)
        self.status.show("computing", begun_s)

    # -- outside of training ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        # This is a copy, because the script may change its state during the evaluation.
        self._held = (
            b"".join(self.callbacks.state(False)) if self._may_be_cut and self.callbacks.state else b""
        )
        self._stand_in_s = self._job.now_s() + self._idle_interval_s
        turns = Repeating(
            self._idle_turn, min(self._idle_interval_s, LOOKING_S), f"paceline worker {self.worker}"
        )
        try:
            with self.status.doing("outside"), turns:
                yield
        finally:
            self._held = b""

    @property
    def _may_be_cut(self) -> bool:
        """True if the job may be cut during an evaluation."""
        return self._job.checkpoint_every_s > 0 or self.core.asks_for_checkpoints or self.core.owes_state

    @exclusive
    def _idle_turn(self) -> None:
        """Do the work that is due while the script evaluates.

        If a cut wants the state of the script, give the state from before the evaluation. If a push is due, push.
        """
        self.links.hear_coordinator()
        if self.core.owes_state and self._held:
            self.servers.keep_worker_state([memoryview(self._held)])
        if (now_s := self._job.now_s()) >= self._stand_in_s:
            self._stand_in()
            self._stand_in_s = now_s + self._idle_interval_s

    def _give_state(self, *, ended: bool = False) -> None:
        """If a cut wants the state of the script, give this state. The script must be waiting, or must have ended."""
        if self.core.owes_state and self.callbacks.state is not None:
            self.servers.keep_worker_state(self.callbacks.state(ended))

    @property
    def _idle_interval_s(self) -> float:
        """Time between two pushes while the script is not training."""
        return max(self.iterations.usual_s(WAITING_S), LEAST_IDLE_S)

    @exclusive
    def combine(
        self, call: str, op: Literal["mean", "sum"] = "sum", numbers: bytes = b"", weight: float = 1.0
    ) -> Combined:
        self.links.carry_out(self.core.contribute(call, op, numbers, weight))
        with self.status.doing("outside"):
            self._wait_in_call(lambda: self.core.combined is not None)
        assert self.core.combined is not None
        return self.core.combined

    def _wait_in_call(self, ended: Callable[[], bool], *, servers: bool = False) -> None:
        """Wait until a call that all workers make has ended.

        Meanwhile, push without a gradient if other workers may be waiting for a push.

        Args:
            ended: function that returns True once the call has ended.
            servers: True if servers take part in the call.
        """
        links, job = self.links, self._job
        interval_s = self._idle_interval_s
        began_s = job.now_s()
        due_s = began_s + max(interval_s, COMBINING_S)
        while not ended():
            links.leave_if_asked()
            # If the wait is short, the script will soon ask for its next batch, a better moment to give the state.
            if job.now_s() - began_s >= COMBINING_S:
                self._give_state()
            wait_s = min(max(due_s - job.now_s(), LEAST_IDLE_S), WAITING_S)
            if servers:
                links.hear(timeout_s=wait_s)
            else:
                links.hear_coordinator_first(wait_s)
            if not ended() and self.core.may_stand_in and job.now_s() >= due_s:
                self._stand_in()
                due_s = job.now_s() + interval_s

    @exclusive
    def _stand_in(self) -> None:
        """While the script is not training, push without a gradient if other workers may be waiting for a push."""
        links, core = self.links, self.core
        links.hear_coordinator()
        if not core.is_awaited:
            links.hear(timeout_s=0.0)  # a server may request a frozen parameter
            return
        self._push_nothing(core.stand_in)

    @exclusive
    def sit_out(self) -> None:
        self.links.hear_coordinator()
        self._push_nothing(self.core.sit_out)
        if self.core.paused:
            self._wait_while_paused()

    def _push_nothing(self, ask: Callable[[Sequence[Any]], Sequence[Request]]) -> None:
        """Push without a gradient, and pull.

        `ask` takes the contents of the push, and returns the requests of the core.
        """
        links, core = self.links, self.core
        assert self.memory is not None
        self._forget_staged()
        contents, links.payloads = self.memory.contents(
            bytes(len(self.memory.model.layout.parameters)), b"", {}, empty=True
        )
        self.iterations.computed_s = pushed_s = self._job.now_s()
        with self.status.doing("exchanging"):
            self.iterations.lap = self.status.stopwatch.lap(round(pushed_s * TICKS_PER_S))
            links.carry_out(ask(contents))
            self._await_answers()
            self.status.stopwatch.begin_iteration("exchanging", self._job.now_ticks())
        begun_s = self.iterations.end(core.last_commit, pushed_s, self._job.now_ticks())
        self.status.show("computing", begun_s)

    # -- data and changes of the sync model ---------------------------------------------------------------

    def watched(self) -> tuple[Stopwatch, int] | None:
        if self.status.away or self._thread not in (0, threading.get_ident()):
            return None
        return self.status.stopwatch, self._job.now_ticks()

    @property
    def now_s(self) -> float:
        return self._job.now_s()

    @exclusive
    def exchange(self, ask: Callable[[], Sequence[Request]]) -> None:
        # a loader on a thread of its own may request data while the script computes
        trains = self._thread in (0, threading.get_ident())
        with self.status.doing("exchanging") if trains else contextlib.nullcontext():
            self.links.carry_out(ask())
            while self.core.data.waiting:
                self.links.leave_if_asked()
                self.links.hear_coordinator_first(WAITING_S)

    @exclusive
    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        models = read_schedule(sync).first
        self._job.require_runnable(models)
        self.links.carry_out(self.core.request_sync(models, shard))

    @exclusive
    def request_checkpoint(self) -> None:
        self.links.carry_out(self.core.request_checkpoint())

    # -- the end ------------------------------------------------------------------------------------------

    @exclusive
    def finish(self) -> None:
        links, memory = self.links, self.memory
        if links.finished:
            return
        links.finished = True
        # If this worker leaves, or if a server was lost, an unfinished pull may have changed weights. Such a change is
        # not an edit by the script.
        unfinished = links.asked_to_leave or bool(self.core.waiting_for)
        if not unfinished:
            self._give_state(ended=True)
            if warning := self.callbacks.on_finish():
                links.report_problem(warning)
        if memory is not None and memory.in_place:
            memory.take_over()  # the servers may change the weights while the script still reads them
            self._move(memory, in_place=False)
        with contextlib.suppress(PeerLostError, DeadlineError):  # a lost coordinator receives no metrics
            self._send_rest()
        self.iterations.flush()
        spent = self.status.stopwatch.read(self._job.now_ticks())
        spent = msgspec.structs.replace(spent, queued=max(0, queued_ticks() - self._queued_ticks))
        links.say_goodbye(self.core.finish(early=links.asked_to_leave, spent=spent))

    def _send_rest(self) -> None:
        """Send what the script has logged since the last push, because no other push follows."""
        logged = metrics_of(self).settle_rest()
        self.iterations.write_unwritten(logged.earlier_loss)
        self.status.note_loss(logged)
        self.links.carry_out(self.core.log(logged.noted, self._job.now_s(), ended=True))

    def fail(self, reason: str, traceback: str, *, consequence: bool = False) -> None:
        """Report that the script raised an exception.

        This ends the run, unless the exception is only a `consequence` of the loss of another process.
        """
        coordinator = self.links.coordinator
        with contextlib.suppress(PeerLostError, DeadlineError):  # a lost coordinator cannot be notified
            with contextlib.suppress(RuntimeError):  # values cannot be read from a device that has failed
                self._send_rest()
            coordinator.send(Failed(reason, traceback, consequence))
            coordinator.drain()

    def close(self) -> None:
        """Close the connections."""
        self.iterations.close()
        self.links.close()
        if self.memory is not None:
            self.memory.close()


# -- The times of a worker's iterations. The worker also writes them to `worker-<index>.jsonl` in the run directory

LEAST_NOTED_S = 1e-6  # shorter times are left out of the records
USUAL_ITERATIONS = 15  # number of iterations whose median is the usual computing time


class Iterations:
    """The times of one worker's iterations. All times are in seconds on the clock of the run.

    Args:
        place: the worker's place in the run.
        failed: called with an error message when the file of the records cannot be written.

    Attributes:
        begun_s: when the weights for the current iteration arrived; None before the first iteration.
        computed_s: when the current gradient was complete.
        lap: how the worker has spent its time in the current iteration until its push.
        begins_pass: True if the current push is the first one of a pass over the worker's loader.
        restarted: when the current iteration was aborted and restarted; None if it was not aborted.
    """

    def __init__(self, place: Assignment, failed: Callable[[str], None]) -> None:
        self.begun_s: float | None = None
        self.computed_s = 0.0
        self.lap = Lap()
        self.begins_pass = False
        self.restarted: tuple[float, float] | None = None
        # the computing times of the latest iterations
        self._computing_s: deque[float] = deque(maxlen=USUAL_ITERATIONS)
        # the record of the last iteration, if the script may still log the loss of that iteration
        self._unwritten: IterationRecord | None = None
        self._machine = place.machine or msgspec.UNSET
        self._file: SegmentedFile | None = None  # the records; None if there are none
        if place.job.traces.kept != "off":
            path = Path(place.job.run_dir, f"worker-{place.index}.jsonl")
            segments = segmenting(place.job, "worker", place.machine)
            self._file = SegmentedFile(path, failed, segments, append=place.incarnation > 0)
        self._encode = msgspec.json.Encoder().encode
        self._tend_s = 0.0  # when the file is tended next

    def begin(self, now_s: float) -> None:
        """Record that the weights for an iteration have arrived."""
        self.begun_s = now_s
        self.restarted = None
        self.begins_pass = False

    def restart(self, dropped_s: float, now_s: float) -> None:
        """Record that the current iteration was aborted, and is restarted now."""
        self.restarted = dropped_s, now_s

    def usual_s(self, otherwise_s: float) -> float:
        """Return the usual computing time; `otherwise_s` before the first push."""
        return statistics.median(self._computing_s) if self._computing_s else otherwise_s

    def push(self, lap: Lap, busy_s: float) -> None:
        """Record that a push begins.

        Args:
            lap: how the worker has spent its time in the iteration.
            busy_s: how long the worker has loaded data and computed for the push.
        """
        self.lap = lap
        self._computing_s.append(busy_s)

    def end(
        self,
        commit: Commit | None,
        pushed_s: float,
        answered_ticks: int,
        loss: float | None = None,
        *,
        follows: bool = False,
    ) -> float:
        """Record the iteration that has ended, and begin the next one.

        Args:
            commit: the commit of the iteration.
            pushed_s: when the push of the iteration began.
            answered_ticks: when the iteration ended.
            loss: the loss of the iteration, if known.
            follows: True if the loss may become known before the next push. If so, the record is written later.

        Returns:
            The time at which the next iteration has begun.
        """
        answered_s = answered_ticks / TICKS_PER_S
        if self._file is not None:
            self.write_unwritten()
            record = self._record(commit, pushed_s, answered_s, loss)
            if follows:
                self._unwritten = record
            else:
                self._write(self._file, record)
        self.begin(answered_s)
        return answered_s

    def _record(
        self, commit: Commit | None, pushed_s: float, answered_s: float, loss: float | None
    ) -> IterationRecord:
        """Return the record of the iteration that has ended."""
        assert self.begun_s is not None
        assert commit is not None
        dropped_s, restarted_s = self.restarted or (None, None)
        outside_s, loading_s = self.lap.outside / TICKS_PER_S, self.lap.loading / TICKS_PER_S
        known_s = outside_s + loading_s + self.lap.computing / TICKS_PER_S
        lasted_s = (dropped_s or pushed_s) - self.begun_s
        # An aborted computation is not part of the lap, so the time of exchanges before the abort is unknown.
        exchanged_s = lasted_s - known_s if dropped_s is None else 0.0
        return IterationRecord(
            iteration=commit.iteration,
            begun_s=self.begun_s,
            computed_s=self.computed_s,
            pushed_s=pushed_s,
            answered_s=answered_s,
            loss=loss,
            superstep=commit.stop.superstep if commit.stop is not None else None,
            change=commit.change.number if commit.change is not None else None,
            dropped_s=dropped_s,
            restarted_s=restarted_s,
            machine=self._machine,
            outside_s=_noted(outside_s),
            loading_s=_noted(loading_s),
            exchanged_s=_noted(exchanged_s),
            begins_pass=self.begins_pass or msgspec.UNSET,
        )

    def write_unwritten(self, loss: float | None = None) -> None:
        """If a record has waited for its loss, write this record."""
        record, self._unwritten = self._unwritten, None
        if record is not None and self._file is not None:
            if loss is not None:
                record = msgspec.structs.replace(record, loss=loss)
            self._write(self._file, record)

    def _write(self, file: SegmentedFile, record: IterationRecord) -> None:
        """Write a record."""
        file.write(self._encode(record) + b"\n")
        if record.answered_s >= self._tend_s:
            self._tend_s = record.answered_s + TEND_S
            file.tend()

    def flush(self) -> None:
        """Write the buffered records."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write all records, and close the file."""
        self.write_unwritten()
        if self._file is not None:
            self._file.close()


def _noted(seconds: float) -> float | msgspec.UnsetType:
    """Return a time, rounded, as the records contain it. A very short time is left out of the records."""
    return round(seconds, 9) if seconds >= LEAST_NOTED_S else msgspec.UNSET


# -- What a worker tells the coordinator for display: its state, its last loss, and how it spends its time

STATUS_INTERVAL_S = 0.1  # minimum time between two reports


def queued_ticks() -> int:
    """Return how long the main thread of this process was ready to run, but had no CPU, in ticks; 0 if unknown.

    Linux counts this time for each thread.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * TICKS_PER_S // 10**9
    except (OSError, ValueError, IndexError):
        return 0


class StatusReporter:
    """Reports the state of a worker.

    Args:
        job: the configuration of the run.
        links: the worker's connections.

    Attributes:
        stopwatch: measures how the worker spends its time.
        away: True while the script is outside of training, for example inside `evaluating`. During this time,
            the attribute stays True even while the worker exchanges messages.
    """

    def __init__(self, job: Job, links: Links) -> None:
        self.stopwatch = Stopwatch(job.now_ticks())
        self.away = False
        self._job = job
        self._links = links
        self._reported_s = -math.inf
        # The state that was shown last; "" before the first report.
        self._shown: Literal["", "computing", "waiting", "pulling", "paused"] = ""
        self._loss: float | None = None  # the last known loss
        self._guessed = False  # True if this loss is a guess

    def note_loss(self, logged: Settled) -> None:
        """Keep the last known loss."""
        if logged.shown is not None:
            self._loss, self._guessed = logged.shown, logged.guessed

    def show(self, state: Literal["computing", "waiting", "pulling", "paused"], now_s: float) -> None:
        """Report the worker's state to the coordinator for display, at most once per `STATUS_INTERVAL_S`.

        A change to "computing" is always reported, so that the display does not keep showing "waiting".
        """
        due = now_s - self._reported_s >= STATUS_INTERVAL_S
        if (state != self._shown and (due or state == "computing")) or (due and state == "computing"):
            self._reported_s, self._shown = now_s, state
            self._report()

    def _report(self) -> None:
        """Send the state that is shown, and how the worker has spent its time."""
        if not self._shown:
            return
        spent = self.stopwatch.read(self._job.now_ticks())
        core = self._links.core
        epoch, part = core.data.place
        status = Status(
            core.iteration,
            self._loss,
            self._shown,
            spent,
            core.updates,
            core.samples,
            epoch,
            part,
            self._guessed,
        )
        self._links.post(self._links.coordinator, status)

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Return a context in which the worker spends its time on this activity.

        An activity outside of training may take long, so the coordinator is told of such an activity immediately.
        """
        away = self.away
        with self._links.lock:
            self.away = away or activity == "outside"
            before = self.stopwatch.enter(activity, self._job.now_ticks())
            if activity == "outside":
                # If the coordinator is lost, the next exchange notices this, and finds the reason.
                with contextlib.suppress(PeerLostError):
                    self._report()
        try:
            yield
        finally:
            with self._links.lock:
                self.away = away
                self.stopwatch.enter(before, self._job.now_ticks())


# -- A function that is called again and again on a background thread ----------------------------------------


class Repeating:
    """A context in which a background thread calls a function repeatedly.

    On exit, the context waits for the end of a call that is in progress. If a call raises an exception, there are no
    further calls. The exception is raised on exit, unless the body of the context has raised an exception itself.

    Args:
        function: the function to call.
        interval_s: time before the first call, and between the end of a call and the beginning of the next one.
        name: name of the thread.
    """

    def __init__(self, function: Callable[[], None], interval_s: float, name: str) -> None:
        self._function = function
        self._interval_s = interval_s
        self._ending = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._interval_s):
                self._function()
        except BaseException as error:
            self._error = error


# -- The emulation of a slower machine: a worker waits after it has computed a gradient ----------------------


class Emulation:
    """Determines when the machine that a worker emulates would have finished computing a gradient.

    Args:
        job: the configuration of the run, with the pace and the slowdown of each worker.
        worker: index of the worker.
    """

    def __init__(self, job: Job, worker: int) -> None:
        self._job = job
        self._worker = worker
        self._jitter = random.Random(f"paceline jitter {job.seed} {worker}")

    def until_s(self, begun_s: float, now_s: float, work: Work) -> float:
        """Return when the emulated machine would have ended a computation, on the clock of the run.

        Args:
            begun_s: when the computation began.
            now_s: the current time, at which the computation has ended on this machine.
            work: the amount of data for which the gradient was computed.
        """
        job, computed_s = self._job, now_s - begun_s
        factor = 1 + job.jitter * self._jitter.uniform(-1, 1)
        pace_s = job.pace_of(self._worker, work)
        slowdown = job.slowdown[self._worker] if job.slowdown else 1.0
        return begun_s + max(computed_s, max(pace_s, computed_s * slowdown) * factor)
