"""An oracle: a specification of what a sync model should do, as plain functions of all events so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..sync.actions import ApplyMean, ApplyPush
from ..sync.events import AnyEvent

__all__ = ["Events", "Oracle"]

Events = Sequence[AnyEvent]
"""All events that a shard has received, in the order in which it received them."""


class Oracle(NamedTuple):
    """Specifies what a sync model should do at a shard.

    Write the functions as directly as possible from the description of the model. They must keep no state, and may be
    slow. A `CheckedShard` compares the state machine with these functions after every event.

    Attributes:
        must_wait: function that returns the workers whose pulls must be unanswered after the given events.
        updates_due: function that returns the updates that the last of the given events must cause.
    """

    must_wait: Callable[[Events], set[int]]
    updates_due: Callable[[Events], list[ApplyPush | ApplyMean]]
