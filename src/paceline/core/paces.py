"""The speed of the workers, as observed by shard 0, without I/O.

A *cycle* of a worker begins when the shard answers the worker's pull, and ends when the worker's next push arrives. A
cycle includes the transfer of the weights, the computation, and the transfer of the gradient, but neither the time for
which the worker waits for other workers, nor the time that its script spends outside of training. So cycles tell how
long each worker would take for an iteration under any sync model. All cycles are measured on one clock, wherever the
workers are.

A cycle in which the worker pulled again, to evaluate the model or after an abort, is not counted, and neither is the
warm-up of an accelerator.
"""

from __future__ import annotations

from collections.abc import Set

from ..errors import InternalError
from ..state import stateful
from ..sync.actions import AnswerPull, DropPush
from ..sync.events import PullRepeated, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from ..sync.ticks import TICKS_PER_S
from .messages import AllCommitted, PacesObserved, PullAllowed
from .requests import Entry, EntryRecorder, Request, Send, worker_peer

REPORTED_CYCLES = 6  # a report is made after this many cycles of each worker, on average


@stateful(fixed="_recorder _ticks_per_s")
class PaceMeter:
    """A recorder of the entries of shard 0 that measures cycles, and passes the entries on.

    Args:
        recorder: the recorder that also receives the entries; None to pass on nothing.
        ticks_per_s: number of ticks per second.
    """

    def __init__(self, recorder: EntryRecorder | None, ticks_per_s: int = TICKS_PER_S) -> None:
        self._recorder = recorder
        self._ticks_per_s = ticks_per_s
        self._begun: dict[int, int] = {}  # worker -> time in ticks at which its cycle began
        self._live: set[int] = set()
        self._cycles: dict[int, list[tuple[int, float]]] = {}
        self._unreported = 0
        # (worker, iteration) -> number of samples of the pushes that may yet be dropped
        self._samples_of: dict[tuple[int, int], int] = {}
        self._pushes = self._batches = self._samples = 0
        self._now_ticks = 0
        self._clips = False

    def record(self, entry: Entry) -> None:
        """Observe an entry, and pass it on."""
        if entry.refused is None:
            self._observe(entry)
        if self._recorder is not None:
            self._recorder.record(entry)

    def report(self) -> PacesObserved | None:
        """Return what has been observed since the last report; None if this is not enough for a report."""
        if self._unreported < REPORTED_CYCLES * max(1, len(self._live)):
            return None
        cycles = tuple((worker, tuple(found)) for worker, found in sorted(self._cycles.items()))
        self._cycles, self._unreported = {}, 0
        return PacesObserved(
            cycles,
            self._pushes,
            self._batches,
            self._samples,
            self._now_ticks / self._ticks_per_s,
            self._clips,
        )

    def _observe(self, entry: Entry) -> None:
        event = entry.event
        match event:
            case PushReceived():
                self._receive(event)
            case PullRepeated():
                self._begun.pop(event.worker, None)
                return  # its answer does not begin a cycle
            case WorkerJoined():
                self._live.add(event.worker)
            case WorkerLost() | WorkerFinished():
                self._live.discard(event.worker)
                self._begun.pop(event.worker, None)
        for action in entry.actions:
            if type(action) is AnswerPull:
                self._begun[action.worker] = event.now_ticks
            elif type(action) is DropPush:
                self._samples -= self._samples_of.pop((action.worker, action.iteration), 0)

    def _receive(self, push: PushReceived) -> None:
        begun_ticks = self._begun.pop(push.worker, None)
        self._samples_of.pop((push.worker, push.iteration - 2), None)  # applied or dropped by now
        if push.empty or push.edit is not None:
            return
        self._now_ticks = push.now_ticks
        self._pushes += 1
        self._batches += not push.repeated
        self._clips = self._clips or push.clip is not None
        samples = -1 if push.samples is None else push.samples
        if push.counted:
            self._samples += push.counted
            self._samples_of[push.worker, push.iteration] = push.counted
        if begun_ticks is not None and not push.warm_up:
            cycle_s = max(0, push.now_ticks - begun_ticks - push.outside_ticks) / self._ticks_per_s
            self._cycles.setdefault(push.worker, []).append((samples, cycle_s))
            self._unreported += 1


# -- With overlap off: no worker pulls until every shard has received the pushes of all workers for this round
#
# Each worker counts its iterations from its own first iteration, so the labels of iterations do not identify a round. A
# round is identified by the number of updates in the weights from which its gradients are computed. A worker that joins
# is awaited from its first push on, because only this push tells in which round the worker takes part for the first
# time. If all pushes of a round are empty, the next round has the same number, so a worker may be allowed to pull too
# early in the next round. The sync model still delays the answer.


@stateful()
class PullBarrier:
    """The workers that wait for permission to pull.

    Attributes:
        committed: worker that waits -> the iteration that it has just pushed to all shards.
        reached: worker -> `AllCommitted.updates` of its last push, once it has pushed.
        newcomers: workers that have joined the run, and have not pushed yet.
    """

    def __init__(self) -> None:
        self.committed: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        self.newcomers: set[int] = set()

    def joined(self, worker: int) -> None:
        """Add a worker that has joined while other workers train."""
        self.newcomers.add(worker)

    def left(self, worker: int) -> None:
        """Remove a worker that has left."""
        self.committed.pop(worker, None)
        self.reached.pop(worker, None)
        self.newcomers.discard(worker)

    def pushed(self, worker: int, message: AllCommitted, present: Set[int]) -> list[Request]:
        """Record that a worker has pushed to all shards. Return the requests of `allow`."""
        self.newcomers.discard(worker)
        self.committed[worker] = message.iteration
        self.reached[worker] = message.updates
        return self.allow(present)

    def allow(self, present: Set[int]) -> list[Request]:
        """Let each waiting worker pull if all `present` workers have pushed to all shards for its round."""
        awaited = present - self.newcomers
        if not awaited or not self.committed:
            return []
        complete = min(self.reached.get(worker, -1) for worker in awaited)
        allowed = [worker for worker in sorted(self.committed) if self.reached[worker] <= complete]
        return [Send(worker_peer(worker), PullAllowed(self.committed.pop(worker))) for worker in allowed]

    def validate(self, present: Set[int]) -> None:
        """Raise `InternalError` if a worker that is not present waits."""
        if not self.committed.keys() <= present:
            raise InternalError(f"{self.committed} wait to pull, but only {present} are present")
