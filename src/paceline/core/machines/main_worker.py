"""The main worker: the one whose script writes files and messages for the whole job, without I/O.

    beginning   worker 0 or, if it does not take part, the worker with the lowest index of those with which training
                begins
    afterwards  the main worker stays the same until it is lost, or leaves before its script has ended. Then the
                worker with the lowest index of those that take part takes its place; if there is none, the next one
                to join or, before training begins, worker 0

A worker that was lost and joins again is another process. It knows nothing of what its predecessor has written, for
example which result was the best. So it does not get the role back as long as another worker has it. If the main
worker has finished its script, it has written everything, and nobody takes its place.

The workers may have different working directories. A relative path of a file that is written once for the job is
meant in that of the first main worker, also after its loss, so that the path of the file stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...state import stateful
from ..protocol.messages import WorkingDirectory

__all__ = ["NOBODY", "MainWorker"]

NOBODY = -1


@stateful(decides="worker directory _vacant", about={"directory": "scripts"})
class MainWorker:
    """The main worker of a job.

    Attributes:
        worker: index of the main worker; `NOBODY` if it has left and no other worker takes part.
        directory: the working directory of the main worker with which training has begun; None if it is unknown.

    Example:
        >>> main = MainWorker()
        >>> main.left(0, finished=False, others={2, 1}), main.worker
        (True, 1)
        >>> main.joined(0), main.worker
        (False, 1)
        >>> main.left(1, finished=True, others={0, 2}), main.worker
        (False, 1)
    """

    def __init__(self) -> None:
        self.worker = 0
        self.directory: WorkingDirectory | None = None
        self._vacant = 0  # whose the role is if no other worker can take it

    def begin(self, workers: Mapping[int, WorkingDirectory | None]) -> None:
        """Begin training with these workers, which have these working directories."""
        self._vacant = NOBODY
        if self.worker not in workers:
            self.worker = min(workers)
        self.directory = workers[self.worker]

    def joined(self, worker: int) -> bool:
        """Handle a worker that takes part from now on. Return True if it has become the main worker."""
        if self.worker != NOBODY:
            return False
        self.worker = worker
        return True

    def left(self, worker: int, *, finished: bool, others: Collection[int]) -> bool:
        """Handle a worker that has left. Return True if another worker, or nobody, has become the main worker.

        Args:
            worker: the worker.
            finished: True if its script has ended.
            others: the workers that can take its place.
        """
        if worker != self.worker or finished:
            return False
        self.worker = min(others, default=self._vacant)
        return True
