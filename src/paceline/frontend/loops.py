"""The training loop over `paceline.epochs` that a worker is in: its limits, and how far the job has come in it."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from ..core.protocol.messages import LoopLimits
from .progress import Progress
from .session import Session

__all__ = ["Limits", "Loop", "active_loop", "enter_loop", "leave_loop"]


class Limits(NamedTuple):
    """The limits of a training loop, counted from its beginning.

    Attributes:
        epochs: number of epochs; None for no limit.
        time_s: time in seconds.
        updates: number of updates of the weights.
        samples: number of samples that all workers together use.
    """

    epochs: int | None = None
    time_s: float = math.inf
    updates: float = math.inf
    samples: float = math.inf

    @property
    def told(self) -> LoopLimits:
        """The limits as the coordinator is told, which shows how long the loop will take."""
        return LoopLimits(
            _most(self.epochs),
            self.time_s if self.time_s < math.inf else None,
            _most(self.updates),
            _most(self.samples),
        )


def _most(limit: float | None) -> int | None:
    """Return a limit that may be sent; None for no limit."""
    return None if limit is None or math.isinf(limit) else min(int(limit), 2**53)


class Loop(Protocol):
    """A training loop over epochs."""

    @property
    def limits(self) -> Limits: ...

    @property
    def over(self) -> bool:
        """True if the loop must end, because it was stopped or has reached a limit."""
        ...

    def done(self) -> Progress | None:
        """Return what has been done since the loop began; None if its beginning is not known yet."""
        ...


_active: WeakKeyDictionary[Session, Loop] = WeakKeyDictionary()


def enter_loop(session: Session, loop: Loop) -> None:
    """Record that the script of a worker begins a loop."""
    _active[session] = loop


def leave_loop(session: Session) -> None:
    """Record that the script of a worker has left its loop."""
    _active.pop(session, None)


def active_loop(session: Session) -> Loop | None:
    """Return the loop over epochs that a worker is in, if any."""
    return _active.get(session)
