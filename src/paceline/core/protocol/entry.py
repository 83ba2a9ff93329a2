"""An entry of a trace: one event, and the actions that the sync model returned for it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ...sync.actions import AnyAction
from ...sync.events import RecordedEvent
from ...sync.translation import Standing

__all__ = ["Entry", "EntryRecorder"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a trace: an event, and what the sync model did in response.

    Attributes:
        event: the event.
        actions: the actions that the sync model returned for it, in order.
        refused: the reason why the event was refused; None if the event was accepted.
        version: number of updates that the shard has applied so far, up to and including this event; None at the
            coordinator.
        staleness: (worker, iteration, staleness) of each push that was applied because of this event, in order. The
            staleness is the number of updates between the worker's last pull and the application of its push.
        gap: largest c_p - min c among the workers whose pulls were answered because of this event, as counted by the
            model in force; 0 at the coordinator.
        standings: the standing of each update that was made because of this event, in order. [] if all of them used
            the hyper-parameters as they are.
    """

    event: RecordedEvent
    actions: list[AnyAction] = []
    refused: str | None = None
    version: int | None = None
    staleness: list[tuple[int, int, int]] = []
    gap: int = 0
    standings: list[Standing | None] = []


class EntryRecorder(Protocol):
    """An object that receives the entries of one trace, in order."""

    def record(self, entry: Entry) -> None: ...
