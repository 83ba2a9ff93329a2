"""An oracle: a specification of what a sync model should do, as plain functions of all events so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..sync.actions import ApplyMean, ApplyPush
from ..sync.events import AnyEvent

__all__ = ["Events", "Oracle"]

Events = Sequence[AnyEvent]
"""All events that a shard has received, in order."""


class Oracle(NamedTuple):
    """Specifies what a sync model should do at a shard.

    Write the functions as directly as possible from the description of the model: they keep no state and may be slow.
    A `CheckedShard` compares the state machine with these functions after every event.

    Attributes:
        must_wait: returns the workers whose pull must be unanswered after these events.
        updates_due: returns the updates that the last of these events must cause.
    """

    must_wait: Callable[[Events], set[int]]
    updates_due: Callable[[Events], list[ApplyPush | ApplyMean]]
