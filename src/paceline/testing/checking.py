"""Checks a sync model: tests its promises with random events, and searches all interleavings of small jobs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..sync import Conditions, SyncModel, parse
from .admission import UNKNOWN, Admission
from .oracle import Oracle
from .promises import PROMISES, random_events_are_handled
from .search import explore
from .small_job import SmallJob

__all__ = ["CheckResult", "check"]


class CheckResult(NamedTuple):
    """What `check` has tested.

    Attributes:
        sync: notation of the model.
        promises: number of promises that were tested with random events.
        states: number of states of the small jobs that were searched.
    """

    sync: str
    promises: int
    states: int

    def __str__(self) -> str:
        return (
            f"{self.sync} keeps {self.promises} promises on random events, and has no deadlock in {self.states:,} "
            "states of small jobs"
        )


def check(
    sync: SyncModel,
    rule: Admission | None = None,
    oracle: Oracle | None = None,
    *,
    agree: bool = False,
    workers: int = 2,
    shards: int = 2,
    iterations: int = 3,
) -> CheckResult:
    """Check that a sync model keeps the promises that every model must keep, and return what was tested.

    First, the state machines of the model receive random legal and illegal events. Then all interleavings of small
    jobs are searched for deadlocks: one job in which a worker may be lost at any time, one that another worker joins
    at any time, one that changes to BSP, and one that changes from BSP. The jobs run the same code as a live run.

    Args:
        sync: the model. It must be registered (see `paceline.sync.register`).
        rule: the rule that determines which workers must wait and which may; checked in every state. By default, any
            worker may wait as long as there is no deadlock. The models of this package have their own rules
            (see `admission`).
        oracle: if given, a shard is also compared with this oracle, on random events.
        agree: True to check also that all shards have averaged the same pushes together. Do not use this for models
            that drop pushes by their order of arrival, because the order differs between shards.
        workers: number of workers of the small jobs.
        shards: number of shards of the small jobs.
        iterations: number of iterations of each worker of the small jobs. Each additional iteration makes the check
            take about ten times as long.

    Raises:
        AssertionError: a promise is broken. The message names the promise and the events that lead to the failure.

    >>> from paceline.sync import ASP
    >>> print(check(ASP(), iterations=1))
    asp keeps 10 promises on random events, and has no deadlock in 1,309 states of small jobs
    """
    for promise in PROMISES:
        with _named(sync, promise.__name__.replace("_", " ")):
            promise(sync)
    if oracle is not None:
        with _named(sync, "the oracle agrees"):
            random_events_are_handled(sync, oracle)
    states = 0
    for name, job in _small_jobs(sync, rule, agree, workers, shards, iterations):
        with _named(sync, f"no interleaving of {name} fails"):
            states += explore(job)
    _show("")
    return CheckResult(str(sync), len(PROMISES) + (oracle is not None), states)


def _small_jobs(
    sync: SyncModel, rule: Admission | None, agree: bool, workers: int, shards: int, iterations: int
) -> Iterator[tuple[str, SmallJob]]:
    ours = type(sync).__module__.startswith("paceline.")
    if rule is None and isinstance(sync, Conditions):
        rule = UNKNOWN
    plans = sync.at_coordinator() is not None

    def job(
        first: SyncModel | str,
        *,
        workers: int = workers,
        iterations: int = iterations,
        late: int = 0,
        losses: int = 0,
        changes: tuple[str, ...] = (),
    ) -> SmallJob:
        return SmallJob(
            parse(first) if isinstance(first, str) else first,
            rule,
            workers=workers,
            shards=shards,
            iterations=iterations,
            late=late,
            losses=losses,
            changes=changes,
            commits=True,
            any_plan=ours,
            agree=agree and not late,
            symmetric=ours,
        )

    fewer = max(1, iterations - 1)
    yield "a job in which a worker may be lost", job(sync, losses=1)
    # If the coordinator runs a state machine, there are many more interleavings, so start with one worker only.
    yield (
        "a job that a worker joins late",
        job(sync, late=1, workers=1 if plans else workers, iterations=fewer),
    )
    yield "a job that changes to BSP", job(sync, changes=("bsp",), iterations=fewer)
    yield "a job that changes from BSP", job("bsp", changes=(str(sync),), iterations=fewer)


@contextmanager
def _named(sync: SyncModel, promise: str) -> Iterator[None]:
    """Name the promise that is being tested on the terminal and in the message of a failure."""
    _show(f"{sync}: {promise}")
    try:
        yield
    except Exception as error:
        _show("")
        raise AssertionError(f"{sync} breaks a promise: {promise}\n{str(error) or repr(error)}") from error


def _show(line: str) -> None:
    """Replace the last line of the terminal, if standard error is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
