"""How many workers a run needs: to begin, and to go on without a pause."""

from __future__ import annotations

from ...state import stateful
from ..protocol.messages import Paused, Resumed
from ..protocol.requests import Request, Send, worker_peer
from .members import Members

__all__ = ["Quorum"]


@stateful(decides="paused", fixed="least pause_below _members")
class Quorum:
    """Decides whether the workers of a run are enough.

    Args:
        members: the workers of the run.
        least: minimum number of workers with which the run begins.
        pause_below: number of workers below which the run pauses until others join. Once a worker has finished, the
            run no longer pauses.

    Attributes:
        paused: True while the workers begin no further iterations, because the run has too few workers.
    """

    def __init__(self, members: Members, *, least: int, pause_below: int) -> None:
        self.paused = False
        self.least = least
        self.pause_below = pause_below
        self._members = members

    @property
    def too_small(self) -> bool:
        """True if a run that has not begun yet has too few workers to begin."""
        return self._members.live_count < self.least and not self._members.finished

    @property
    def short(self) -> bool:
        """True if the run should pause, because it has too few workers."""
        return len(self._members.present) < self.pause_below and not self._members.some_have_finished

    @property
    def everybody_left(self) -> bool:
        """True if every worker has finished, was lost, or has yet to join, and at least one worker has left.

        A run that pauses when it has too few workers also waits for others when all of its workers have been lost or
        have left early.
        """
        members = self._members
        if members.live_count:
            return False
        return members.some_have_finished or (bool(members.finished or members.lost) and not self.pause_below)

    def pause_or_resume(self) -> list[Request]:
        """Tell the workers if the run pauses or continues, after their number has changed."""
        if self.paused == self.short:
            return []
        self.paused = self.short
        message = Paused() if self.paused else Resumed()
        return [Send(worker_peer(worker), message) for worker in sorted(self._members.present)]
