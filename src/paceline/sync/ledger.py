"""Who is live, how far each worker has come, and what each is owed.

Owns c_p, the number of iterations that each live worker p has pushed, and the order push -> pull -> answer
that each worker keeps to. Knows no model: a model asks it and then decides. Every check comes before the first
change, so a refused event leaves no trace. All of it is O(1) per event, whatever the number of workers:
workers are counted per c_p, and the slowest count only ever moves up, past counts that nobody is at any more.
"""

from __future__ import annotations

from typing import Literal

from ..errors import InternalError, InvalidEventError
from .events import Event, PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Ledger"]

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
    """

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.slowest = 0
        self._at: dict[int, int] = {}  # how many live workers have pushed exactly this often
        self._label: dict[int, int] = {}  # the iteration that each live worker's next push carries
        self._former: dict[int, int] = {}  # the same of those who have left: a label is never used twice
        self._phase: dict[int, Phase] = {}

    @property
    def live_count(self) -> int:
        """How many workers are live."""
        return len(self.count)

    def joined(self, event: WorkerJoined) -> None:
        """Enter a worker, level with the slowest."""
        if event.worker in self.count:
            raise InvalidEventError(f"worker {event.worker} joined, but it is live already")
        if event.iteration < self._former.get(event.worker, 0):
            raise InvalidEventError(
                f"worker {event.worker} joined anew with iteration {event.iteration}, expected at least "
                f"{self._former[event.worker]}"
            )
        self.count[event.worker] = self.slowest
        self._at[self.slowest] = self._at.get(self.slowest, 0) + 1
        self._label[event.worker] = event.iteration
        self._phase[event.worker] = "computing"

    def left(self, event: WorkerLost | WorkerFinished) -> None:
        """Strike out a worker that was lost or has finished. `slowest` follows with `settle`."""
        self._require_live(event, event.worker)
        self._leave_count(self.count.pop(event.worker))
        self._former[event.worker] = self._label.pop(event.worker)
        del self._phase[event.worker]

    def pushed(self, event: PushReceived) -> None:
        """Count a push. `slowest` follows with `settle`."""
        self._require_live(event, event.worker)
        self._require_step("push", event.worker, event.iteration, expected=self._label[event.worker])
        count = self.count[event.worker]
        self.count[event.worker] = count + 1
        self._at[count + 1] = self._at.get(count + 1, 0) + 1
        self._leave_count(count)
        self._label[event.worker] += 1
        self._phase[event.worker] = STEPS["push"][1]

    def pulled(self, event: PullRequested) -> None:
        """Note that a worker waits for weights."""
        self._require_live(event, event.worker)
        self._require_step("pull", event.worker, event.iteration, expected=self._label[event.worker] - 1)
        self._phase[event.worker] = STEPS["pull"][1]

    def answered(self, worker: int) -> None:
        """Note that a worker has its weights."""
        needed, then = STEPS["answer"]
        if self._phase.get(worker) != needed:
            raise InternalError(f"a pull of worker {worker} was answered that it had not asked for")
        self._phase[worker] = then

    def advance(self) -> bool:
        """Move `slowest` up by one if nobody is there any more: one round is complete. False if not."""
        if not self.count or self.slowest in self._at:
            return False
        self.slowest += 1
        return True

    def validate(self) -> None:
        """Cross-check the derived collections against c_p; raise `InternalError` where they differ."""
        tally: dict[int, int] = {}
        for count in self.count.values():
            tally[count] = tally.get(count, 0) + 1
        if tally != self._at or self._label.keys() != self.count.keys() != self._phase.keys():
            raise InternalError(f"the ledger disagrees with itself: {self.count} against {self._at}")
        if self.count and self.slowest > min(self.count.values()):
            raise InternalError(f"slowest is {self.slowest}, but c_p are {self.count}")

    def _leave_count(self, count: int) -> None:
        self._at[count] -= 1
        if not self._at[count]:
            del self._at[count]

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
