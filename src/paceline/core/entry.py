"""One line of a trace: what a machine was told, and what it answered."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..sync.actions import AnyAction
from ..sync.events import AnyEvent

__all__ = ["Entry", "EntryRecorder"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event and what followed.

    Attributes:
        event: what the machine was told.
        actions: what it asked for, in order.
        refused: why the event was refused; None if it was not.
        version: how many updates the shard had applied afterwards; None at the coordinator.
        staleness: for each push that this event had applied, in order: (worker, iteration, updates applied
            between that worker's last pull and this application).
        gap: the largest c_p - min c among the workers whose pulls this event had answered, by the ledger of the
            model in force; 0 at the coordinator.
    """

    event: AnyEvent
    actions: list[AnyAction] = []
    refused: str | None = None
    version: int | None = None
    staleness: list[tuple[int, int, int]] = []
    gap: int = 0


class EntryRecorder(Protocol):
    """Takes the entries of one trace as they come."""

    def record(self, entry: Entry) -> None: ...
