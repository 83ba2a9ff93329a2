"""The marks at which a worker reports the hyper-parameters of an optimizer. See `paceline.core.oversight.agreement`.

A report costs a small message, so there is one every `MARKED_STEPS` steps, and one in each epoch. In between, a step
costs a few comparisons.
"""

from __future__ import annotations

import msgspec

from ..core.oversight.agreement import MARKED_STEPS
from ..core.protocol.messages import MOST_REPORTED_BYTES, HyperParametersReported
from ..core.protocol.model_spec import HyperParameters
from .newcomer import came_late
from .position import Position, current_position
from .session import Session

__all__ = ["Marks"]

Groups = tuple[HyperParameters, ...]


class Marks:
    """Decides when the hyper-parameters of one optimizer are reported.

    If one prepared schedule follows the job, they are reported at steps of this schedule, where they must be the same
    in all workers. If several do, they are not reported, because the schedules do not advance together.

    Args:
        session: this worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = 0
        self._pass: tuple[Position, int] | None = None  # the pass of the last step, and the number of passes
        self._epoch: tuple[str, int] | None = None  # the loader and the epoch of the last step
        self._groups: Groups = ()  # those of the last step
        self._marked: Groups = ()  # those of the last mark
        self._within = False  # True once hyper-parameters have changed within a pass
        self._followers = 0  # number of schedules that follow the job
        self._passed: tuple[int, Groups] | None = (
            None  # step of such a schedule, and hyper-parameters at this step
        )

    def follow(self) -> None:
        """Record that a schedule begins to follow the job."""
        self._followers += 1

    def passed(self, step: int, groups: Groups) -> None:
        """Record the hyper-parameters at a mark of a schedule that follows the job."""
        self._passed = step, groups

    def look(self, set_index: int, groups: Groups) -> HyperParametersReported | None:
        """Return what must be reported before a step; None if the step is at no mark.

        Args:
            set_index: index of the optimizer's parameter set.
            groups: the hyper-parameters of this step.
        """
        step, self._steps = self._steps, self._steps + 1
        if self._followers:
            passed, self._passed = self._passed, None
            if passed is None or self._followers > 1:
                return None
            return HyperParametersReported(set_index, step, _encoded(passed[1]), schedule=passed[0])
        position = current_position(self._session)
        here = (position, len(position.passes)) if position is not None else None
        epoch = (position.name, position.epoch) if position is not None else None
        self._within |= step > 0 and here == self._pass and groups != self._groups
        begins = epoch is not None and epoch != self._epoch
        self._pass, self._epoch, self._groups = here, epoch, groups
        if not begins and step % MARKED_STEPS:
            return None
        before, self._marked = self._marked, groups
        late = came_late(self._session)
        # Workers are at different steps within an epoch, and the state that a late worker has loaded is that of
        # another worker. There, only what has not changed since the last mark can be compared.
        if groups != before and (late or (epoch is not None and not begins)):
            return None
        loader, number = epoch if epoch is not None else ("", None)
        return HyperParametersReported(
            set_index, step, _encoded(groups), number, loader, within=self._within, late=late
        )


def _encoded(groups: Groups) -> bytes:
    """Encode the hyper-parameters of as many groups as fit into a report."""
    while len(encoded := msgspec.msgpack.encode(groups)) > MOST_REPORTED_BYTES:
        groups = groups[: len(groups) // 2]
    return encoded
