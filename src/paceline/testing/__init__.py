"""Tests for sync models, including your own.

There are four kinds of tests. `check` runs the first three; each can also be used separately:

- `PROMISES` and `CheckedShard` test with random events that a model keeps the promises that every model must keep;
- an `Oracle` specifies in plain functions what a model should do, and the model is compared with these functions;
- `explore`, `SmallJob` and `Admission` search all interleavings of small jobs;
- `play` executes scripted tests.
"""

from __future__ import annotations

from .admission import Admission, ShardView, WorkerView
from .checked_shard import CheckedShard
from .checking import CheckResult, check
from .legal_events import LegalEvents
from .oracle import Oracle
from .promises import PROMISES
from .scripts import play
from .search import explore
from .small_job import SmallJob

__all__ = [
    "PROMISES",
    "Admission",
    "CheckResult",
    "CheckedShard",
    "LegalEvents",
    "Oracle",
    "ShardView",
    "SmallJob",
    "WorkerView",
    "check",
    "explore",
    "play",
]
