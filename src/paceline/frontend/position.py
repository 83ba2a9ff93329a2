"""How far a script has come with the data of a distributed loader.

With a dynamic split, a worker's own iteration count says little about the progress of the job, because a fast
worker performs more iterations than a slow one. The position of a batch in the order of its epoch shows the progress
exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakMethod, ref

from ..core.protocol.lease import Batch
from .session import Session

__all__ = ["Position", "current_position", "latest_position"]


class Position:
    """How far a script has come with the data of a distributed loader.

    Args:
        joint: number of positions in a joint batch, which consists of one batch of each worker.
        name: name of the loader's stream of epochs, which is the same in all workers.

    Attributes:
        drawn: number of batches that the script of this worker has drawn.
        epoch: the epoch whose batches the job is handing out, as far as the drawn batches show.
        joint_batches: number of joint batches of this epoch that the job has begun, as far as the drawn batches show.
        passes: for each pass over the loader that has begun, the number of its epoch. A worker that has joined late
            does not count the passes that it has missed, so its first pass has the same number as in other workers.
        in_pass: True while the script is making a pass.
        dynamic: True if the data of the current pass is handed out dynamically.
    """

    def __init__(self, joint: int, name: str) -> None:
        self.name = name
        self.drawn = self.epoch = self.joint_batches = 0
        self.passes: list[int] = []
        self.in_pass = False
        self.dynamic = False
        self._joint = joint
        self._followers: list[WeakMethod[Callable[[], None]]] = []

    def follow(self, catch_up: Callable[[], None]) -> None:
        """Call a method at the end of each pass. The object of the method is not kept alive."""
        self._followers.append(WeakMethod(catch_up))

    @contextmanager
    def making_a_pass(self, session: Session, epoch: int, *, dynamic: bool) -> Iterator[None]:
        """Return a context in which the script makes a pass over the loader.

        Args:
            session: this worker's session.
            epoch: number of the epoch. See `passes`.
            dynamic: True if the data of the pass is handed out dynamically.
        """
        self.passes.append(epoch)
        number = len(self.passes)
        self.in_pass, self.dynamic = True, dynamic
        _positions[session] = ref(self)
        try:
            yield
        finally:
            # The iterator of an earlier pass may outlive that of a later one. Only the end of the latest pass clears
            # `in_pass`.
            self.in_pass = self.in_pass and len(self.passes) != number

    def draw(self, batch: Batch) -> None:
        """Record that the script has drawn a batch."""
        self.drawn += 1
        # A batch that was returned by a lost worker may precede the others, and may even belong to an earlier epoch.
        begun = batch.epoch, batch.start // self._joint + 1
        self.epoch, self.joint_batches = max(begun, (self.epoch, self.joint_batches))

    def complete(self, epoch: int) -> None:
        """Record that all batches of an epoch have been handed out."""
        self.epoch, self.joint_batches = max((epoch, sys.maxsize), (self.epoch, self.joint_batches))
        for follower in self._followers:
            if (catch_up := follower()) is not None:
                catch_up()


def current_position(session: Session) -> Position | None:
    """Return the position in the loader over which a worker is making a pass; None if it is not making a pass."""
    position = latest_position(session)
    return position if position is not None and position.in_pass else None


def latest_position(session: Session) -> Position | None:
    """Return the position in the loader over which a worker has made its latest pass, if any."""
    found = _positions.get(session)
    return found() if found is not None else None


_positions: WeakKeyDictionary[Session, ref[Position]] = WeakKeyDictionary()
