"""Tests for sync models, also for models of your own.

`check` tests a model thoroughly. Its parts can be used separately:

- `PROMISES` and `CheckedShard`: what every model must keep, on random events;
- `Oracle`: a comparison with plain functions that say what the model should do;
- `explore`, `SmallJob` and `Admission`: the exhaustive search of small jobs;
- `play`: scripted interactions.
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
