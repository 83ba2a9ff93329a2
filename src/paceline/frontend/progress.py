"""The progress of training: the number of updates of the weights, and the number of samples that were used.

In a run, the answers of shard 0 contain the progress of all workers together. The script's own share, and everything
outside a run, is counted here.
"""

from __future__ import annotations

from typing import NamedTuple

from .of_session import OfSession
from .session import Session

__all__ = ["Progress", "count_step", "progress_of", "set_batch"]


class Progress(NamedTuple):
    """How far training has come.

    Attributes:
        steps: number of steps that the script of this worker has made with its optimizers.
        updates: number of updates of the weights by all workers together.
        samples: number of samples that all workers together have used, as far as it is known.
        own_samples: number of samples that this worker has used, as far as it is known.
    """

    steps: int = 0
    updates: int = 0
    samples: int = 0
    own_samples: int = 0

    def since(self, earlier: Progress) -> Progress:
        """Return what was done between an earlier progress and this one."""
        return Progress(*(now - then for now, then in zip(self, earlier, strict=True)))


class _Own:
    """The steps of the script of one worker, and the samples in them."""

    def __init__(self) -> None:
        self.steps = self.samples = 0


def progress_of(session: Session | None) -> Progress:
    """Return the progress of a run, or, if there is no session, that of a script outside a run."""
    if session is None:
        return _alone
    own = _own(session)
    return Progress(own.steps, session.core.updates, session.core.samples, own.samples)


def set_batch(samples: int | None) -> None:
    """Set the batch size of a script outside a run; None if it is unknown."""
    global _batch
    _batch = samples


def count_step(session: Session | None, samples: int | None) -> None:
    """Count a step of the script.

    Args:
        session: the session of this worker; None outside a run.
        samples: number of samples in the step; None if it is unknown. Outside a run, the step then counts as one
            batch.
    """
    global _alone
    if session is not None:
        own = _own(session)
        own.steps += 1
        own.samples += samples or 0
        return
    known = samples if samples is not None else _batch or 0
    _alone = Progress(*(a + b for a, b in zip(_alone, (1, 1, known, known), strict=True)))


_alone = Progress()
_batch: int | None = None
_own = OfSession(lambda _: _Own())
