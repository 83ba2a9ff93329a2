"""Runs a scenario with a guard, and compares its reports with the moment at which the divergence can be seen."""

from __future__ import annotations

import logging
import math
import re

import msgspec

from paceline.errors import RunFailedError
from paceline.sim import simulate

from .scenarios import Measured, Scenario

MOST_UPDATES = 20  # number of updates within which a divergence must be reported
GROWN, KEPT = 3.0, 0.25
"""A divergence that begins at the first step can be seen if the loss without noise exceeds `GROWN` times its first
value. A divergence that begins later can be seen if this loss has risen so far that less than the share `KEPT` of its
earlier decrease remains."""

LASTING = 8  # number of pushes in a row for which the loss must meet one of these conditions


class Judged(msgspec.Struct, frozen=True):
    """A run of a scenario, and the first report of the guard."""

    name: str  # of the scenario
    seed: int
    planted: bool  # True if a divergence was planted
    visible_at: (
        int | None
    )  # the first update at which the divergence could be seen; None if it could not be seen, or if none was planted
    said_at: int | None  # the update at which the guard spoke first; None if the guard was silent
    words: str  # what the guard said first; "" if the guard was silent
    named: bool  # True if the guard named the scenario's culprit, or if the scenario has none

    @property
    def told(self) -> str:
        """The part of the guard's message that says what is wrong."""
        return self.words.partition("): ")[2].partition(". ")[0]

    @property
    def late(self) -> int | None:
        """The number of updates from the visible divergence until the guard spoke; 0 if the guard spoke before."""
        if self.said_at is None or self.visible_at is None:
            return None
        return max(0, self.said_at - self.visible_at)

    @property
    def right(self) -> bool:
        """True if the guard has reported a divergence in time, with its culprit, or was silent in a healthy run."""
        if not self.planted:
            return self.said_at is None
        return self.said_at is not None and self.named and (self.late or 0) <= MOST_UPDATES


class _Listener(logging.Handler):
    """Keeps what the guard of a simulation says, even if the run fails afterwards."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def judge(scenario: Scenario, seed: int, hyperparameters: str = "raw") -> Judged:
    """Run a scenario.

    Args:
        scenario: the scenario.
        seed: seed of the run.
        hyperparameters: see `paceline.launch`. Default: "raw", which leaves the rates of the scenario unchanged.
    """
    measured: Measured = []
    listener, log = _Listener(), logging.getLogger("paceline.sim")
    propagates, log.propagate = log.propagate, False
    log.addHandler(listener)
    training = logging.getLogger("paceline.train.training")  # reports each gradient with NaN
    level = training.level
    training.setLevel(logging.ERROR)
    try:
        simulate(
            scenario.cluster,
            scenario.sync,
            seed=seed,
            train_fn=scenario.train,
            args=(seed, measured),
            guard="tell",
            hyperparameters=hyperparameters,
            on_nan=scenario.on_nan,
        )
    except RunFailedError:
        if scenario.planted_at is None:
            raise
    finally:
        log.removeHandler(listener)
        log.propagate = propagates
        training.setLevel(level)
    words = listener.heard[0] if listener.heard else ""
    found = re.search(r"update (\d+)", words)
    return Judged(
        scenario.name,
        seed,
        scenario.planted_at is not None,
        _visible_at(scenario, measured),
        int(found[1]) if found else None,
        words,
        scenario.culprit is None or any(f"orker {scenario.culprit} " in each for each in listener.heard),
    )


def _visible_at(scenario: Scenario, measured: Measured) -> int | None:
    """Return the update at which a planted divergence can be seen."""
    begin = scenario.planted_at
    if begin is None or not measured:
        return None
    if scenario.at_once:
        own = (each for each in measured if scenario.culprit in (None, each[0]))
        return min((update for _, step, update, _ in own if step >= begin), default=None)
    begun = measured[0][3]
    best = min((loss for _, step, _, loss in measured if step < begin), default=begun)
    most = begun - KEPT * (begun - best) if begin else GROWN * begun
    after = [(update, loss) for _, step, update, loss in measured if step >= begin]
    bad = [(update, not math.isfinite(loss) or loss > most) for update, loss in after]
    for number, (update, _) in enumerate(bad):
        if all(each for _, each in bad[number : number + LASTING]):
            return update
    return None
