"""Who is live, how far each worker has come, and what each is owed.

Owns c_p, the number of iterations that each live worker p has pushed, and the order push -> pull -> answer
that each worker keeps to. Knows no model: a model asks it and then decides. Every check comes before the first
change, so a refused event leaves no trace. All of it is O(1) per event, whatever the number of workers:
workers are counted per c_p, and the slowest count only ever moves up, past counts that nobody is at any more.
"""

from __future__ import annotations

from typing import Literal

from ..errors import InternalError, InvalidEventError
from .events import (
    Event,
    PullRepeated,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

__all__ = ["Ledger", "Phase"]

Phase = Literal["computing", "pushed", "waiting"]

# A live worker's phases: what must have been, and what comes of it. Anything else is refused.
STEPS: dict[str, tuple[Phase, Phase]] = {
    "push": ("computing", "pushed"),
    "pull": ("pushed", "waiting"),
    "answer": ("waiting", "computing"),
}


class Ledger:
    """The bookkeeping that every sync model shares.

    Attributes:
        count: c_p of each live worker, in order of joining.
        slowest: min c over the live workers; keeps its last value while there are none.
        fastest: max c, likewise.
        furthest: the largest c that there has been.
        joins: how many workers have joined, counting one that joined anew once more.
    """

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.slowest = 0
        self.fastest = 0
        self.furthest = 0
        self.joins = 0
        self._at: dict[int, int] = {}  # how many live workers have pushed exactly this often
        self._label: dict[int, int] = {}  # the iteration that each live worker's next push carries
        self._former: dict[int, int] = {}  # the same of those who have left: a label is never used twice
        self._phase: dict[int, Phase] = {}

    @property
    def live_count(self) -> int:
        """How many workers are live."""
        return len(self.count)

    def label(self, worker: int) -> int:
        """The iteration that a live worker's next push carries."""
        return self._label[worker]

    def phase(self, worker: int) -> Phase:
        """What a live worker is doing."""
        return self._phase[worker]

    def at(self, count: int) -> int:
        """How many live workers have pushed exactly `count` times."""
        return self._at.get(count, 0)

    def count_beyond(self, count: int) -> int:
        """How many live workers have pushed more than `count` times. Scans the counts that there are."""
        return sum(workers for at, workers in self._at.items() if at > count)

    def joined(self, event: WorkerJoined, count: int) -> None:
        """Enter a worker with c_p = `count`."""
        if event.worker in self.count:
            raise InvalidEventError(f"worker {event.worker} joined, but it is live already")
        if event.iteration < self._former.get(event.worker, 0):
            raise InvalidEventError(
                f"worker {event.worker} joined anew with iteration {event.iteration}, expected at least "
                f"{self._former[event.worker]}"
            )
        self.joins += 1
        self._put(event.worker, count)
        self.slowest = min(self.slowest, count) if len(self.count) > 1 else count
        self.fastest = max(self.fastest, count) if len(self.count) > 1 else count
        self._label[event.worker] = event.iteration
        self._phase[event.worker] = "computing"

    def left(self, event: WorkerLost | WorkerFinished) -> int:
        """Strike out a worker that was lost or has finished; returns its c_p."""
        self._require_live(event, event.worker)
        count = self.count.pop(event.worker)
        self._take(count)
        self._former[event.worker] = self._label.pop(event.worker)
        del self._phase[event.worker]
        if self.count:
            self._raise_slowest()
            if count == self.fastest and count not in self._at:
                self.fastest = max(self._at)
        return count

    def pushed(self, event: PushReceived) -> None:
        """Count a push."""
        self._require_live(event, event.worker)
        self._require_step("push", event.worker, event.iteration, expected=self._label[event.worker])
        count = self.count[event.worker]
        self._move(event.worker, (count if event.progress is None else max(count, event.progress)) + 1)
        self._label[event.worker] += 1
        self._phase[event.worker] = STEPS["push"][1]

    def pulled(self, event: PullRequested) -> None:
        """Note that a worker waits for weights."""
        self._require_live(event, event.worker)
        self._require_step("pull", event.worker, event.iteration, expected=self._label[event.worker] - 1)
        self._phase[event.worker] = STEPS["pull"][1]

    def repeated(self, event: PullRepeated) -> None:
        """Check that a worker that pulls again is computing what it says."""
        self._require_live(event, event.worker)
        phase = self._phase[event.worker]
        if phase != "computing":
            raise InvalidEventError(
                f"worker {event.worker} pulled again while it was {phase!r} (expected 'computing')"
            )
        if event.iteration != self._label[event.worker]:
            raise InvalidEventError(
                f"worker {event.worker} pulled again for iteration {event.iteration}, expected "
                f"{self._label[event.worker]}"
            )

    def answered(self, worker: int) -> None:
        """Note that a worker has its weights."""
        needed, then = STEPS["answer"]
        if self._phase.get(worker) != needed:
            raise InternalError(f"a pull of worker {worker} was answered that it had not asked for")
        self._phase[worker] = then

    def validate(self) -> None:
        """Cross-check the derived collections against c_p; raise `InternalError` where they differ."""
        tally: dict[int, int] = {}
        for count in self.count.values():
            tally[count] = tally.get(count, 0) + 1
        if tally != self._at or self._label.keys() != self.count.keys() != self._phase.keys():
            raise InternalError(f"the ledger disagrees with itself: {self.count} against {self._at}")
        if self.count and (self.slowest, self.fastest) != (
            min(self.count.values()),
            max(self.count.values()),
        ):
            raise InternalError(
                f"slowest {self.slowest} and fastest {self.fastest}, but c_p are {self.count}"
            )

    def _move(self, worker: int, count: int) -> None:
        before = self.count[worker]
        self._put(worker, count)
        self._take(before)
        self.fastest = max(self.fastest, count)
        self._raise_slowest()

    def _put(self, worker: int, count: int) -> None:
        self.count[worker] = count
        self.furthest = max(self.furthest, count)
        self._at[count] = self._at.get(count, 0) + 1

    def _take(self, count: int) -> None:
        self._at[count] -= 1
        if not self._at[count]:
            del self._at[count]

    def _raise_slowest(self) -> None:
        """Nearly always a step or none; never more than there are counts, however far the next one is."""
        for _ in self._at:
            if self.slowest in self._at:
                return
            self.slowest += 1
        self.slowest = min(self._at)

    def _require_live(self, event: Event, worker: int) -> None:
        if worker not in self.count:
            raise InvalidEventError(f"{type(event).__name__} of worker {worker}, which is not live")

    def _require_step(self, step: str, worker: int, iteration: int, expected: int) -> None:
        needed, _ = STEPS[step]
        phase = self._phase[worker]
        if phase != needed:
            raise InvalidEventError(
                f"worker {worker} sent a {step} while it was {phase!r} (expected {needed!r})"
            )
        if iteration != expected:
            raise InvalidEventError(
                f"worker {worker} sent a {step} of iteration {iteration}, expected {expected}"
            )
