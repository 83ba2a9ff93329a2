"""Outcomes of training runs, kept while exhibits are made, so that a command that was stopped can be continued.

Exhibits with equal runs share their outcomes. All parameters and the cluster identify a run, but the code that trains
it does not: remove the file after a change of the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from .result_file import append_results, read_results

UNFINISHED = Path("runs") / "reproductions-unfinished.jsonl"
"""The file in which outcomes are kept."""


class KeptRun(msgspec.Struct, frozen=True):
    """An outcome.

    Attributes:
        key: what identifies the run.
        outcome: the fields of the run's `TrainingOutcome`, without the run itself.
    """

    key: str
    outcome: dict[str, Any]


class KeptRuns:
    """Outcomes, stored under the keys of their runs.

    Args:
        path: file of the outcomes; None to keep them in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        for each in [] if path is None else read_results(path, KeptRun):
            values = [math.inf if value is None else value for value in each.outcome["values"]]  # null is inf
            self._found[each.key] = each.outcome | {"values": values}

    def get(self, parameters: object) -> dict[str, Any] | None:
        """Return the fields of the outcome of a run with these parameters; None if the run is unknown."""
        return self._found.get(key_of(parameters))

    def keep(self, outcomes: Mapping[str, dict[str, Any]]) -> None:
        """Keep outcomes by the key of their run: see `key_of`.

        Pass the outcomes of one task together, because each call reads the file to see where its last line ends.
        """
        self._found |= outcomes
        if self._path is not None:
            append_results(self._path, *(KeptRun(key, outcome) for key, outcome in outcomes.items()))


kept_runs: ContextVar[KeptRuns] = ContextVar("kept_runs")
"""The outcomes of the command that is carried out."""


@contextlib.contextmanager
def kept_until_complete(path: Path = UNFINISHED) -> Iterator[None]:
    """Keep the outcomes of all runs in a file, and remove the file when the block has ended without an exception."""
    token = kept_runs.set(KeptRuns(path))
    try:
        yield
    finally:
        kept_runs.reset(token)
    path.unlink(missing_ok=True)


def key_of(parameters: object) -> str:
    """Return what identifies a run with these parameters."""
    return hashlib.sha256(repr(parameters).encode()).hexdigest()
