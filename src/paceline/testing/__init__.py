"""Tools for testing sync models, including your own.

There are four kinds of tests. `check` runs the first three, which you can also use separately:

- `PROMISES` and `CheckedShard` send random events to a model, and check the promises that every model must keep;
- an `Oracle` specifies in plain functions what a model should do, and the model is compared with these functions;
- `explore`, `SmallJob` and `Admission` search all interleavings of small jobs for failures;
- `play` runs a script of events and shows how a model responds.

Read first: `checking`, then `promises` and `small_job`.

Imports from `errors`, `state`, `sync` and `core`.
"""

from __future__ import annotations

from .admission import Admission, ShardView, WorkerView
from .checking import CheckResult, check, explore
from .promises import PROMISES, CheckedShard, LegalEvents, Oracle
from .scripts import play
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
