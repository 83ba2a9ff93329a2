"""The progress of training: the number of updates of the weights, and the number of samples that were used.

In a run, the answers of shard 0 contain the progress of all workers together. Outside a run, a script counts its own
steps here.
"""

from __future__ import annotations

from typing import NamedTuple

from .session import Session

__all__ = ["Progress", "count_step", "progress_of", "set_batch"]


class Progress(NamedTuple):
    """How far training has come.

    Attributes:
        steps: number of iterations of this worker.
        updates: number of updates of the weights by all workers together.
        samples: number of samples that all workers together have used, as far as it is known.
    """

    steps: int = 0
    updates: int = 0
    samples: int = 0


def progress_of(session: Session | None) -> Progress:
    """Return the progress of a run, or, if there is no session, that of a script outside a run."""
    return _alone if session is None else Progress(session.iteration, session.updates, session.samples)


def set_batch(samples: int | None) -> None:
    """Set the batch size of a script outside a run; None if it is unknown."""
    global _batch
    _batch = samples


def count_step(samples: int | None) -> None:
    """Count a step of a script outside a run. If `samples` is None, the step counts as one batch."""
    global _alone
    known = samples if samples is not None else _batch or 0
    _alone = Progress(_alone.steps + 1, _alone.updates + 1, _alone.samples + known)


_alone = Progress()
_batch: int | None = None
