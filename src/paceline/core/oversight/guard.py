"""The guard of a run: it judges what the workers report of their pushes, and says when training goes wrong.

The guard lives at the coordinator and decides nothing about pushes. It says each thing once, when it happens, with
figures, the sync model, the mean staleness and what to do. What else it does depends on its mode:

    off       it says only what is certain: the weights, or the gradients of all workers, contain NaN or inf
    tell      it says everything that it notices
    temper    if training diverges, it also halves the learning rate at all shards, at most four times. When nothing
              has been wrong for 200 updates, it doubles the rate again; each time, it waits twice as long
    stop      if training diverges, it ends the run, whose host keeps the last weights that were good

`temper` leaves models in lockstep alone: under bsp, training is what one process would compute. In every mode, a
worker that pushes NaN ten times in a row is named, and taken out if the others do not.

With its push, a worker reports the loss, the norm of its gradient, which the check for NaN computes anyway, and the
norm of its weights, from a sample of 8192 elements (`Observation`). A live worker observes a push every 2 ms at most,
and reports every 10 ms at most, which bounds the cost to less than 1 % of a step of 5 ms. In virtual time, all pushes
are observed. With the guard off, only gradients with NaN are reported.

A new factor of the learning rate goes to all servers (`RateTempered`). Each shard handles it as an event that is
recorded, and passes it on in the `Standing` of its updates, so a replay repeats it exactly. No sync model sees it.
Shards may receive it between different updates, which changes by how much these move the weights, but nothing else. A
worker that is taken out because of NaN does not join again.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import msgspec

from ...errors import ConfigurationError, unknown_name
from ...state import stateful
from ..protocol.job_cut import GuardCut
from ..protocol.messages import Observation
from .divergence import Course
from .outliers import Outliers

__all__ = ["CONFIRMED", "DIVERGED", "GUARD_MODES", "ON_NAN", "Guard", "GuardMode", "Verdict", "guard_mode"]

GuardMode = Literal["off", "tell", "temper", "stop"]

GUARD_MODES: tuple[GuardMode, ...] = ("off", "tell", "temper", "stop")

ON_NAN = ("stop", "skip")
"""What happens if a gradient contains NaN or inf: the run ends, or the push is left out."""

DIVERGED = "training"
"""What has failed, in a failure that ends a run because its guard has stopped it."""

NAMED_NAN, MOST_NAN = 5, 10
"""Numbers of pushes with NaN in a row after which a worker is named, and taken out."""

SURE_NAN = 2
"""Number of pushes with NaN in a row of every worker after which nobody is expected to push others."""

LEAST_FACTOR = 1 / 16
"""Smallest factor of the rate: half, four times."""

AGAIN = 40
"""Number of points after which the rate is halved again: three windows, so that the first half has had its effect."""

RESTORED = 200
"""Number of points without a symptom after which the rate is doubled, the first time."""

CONFIRMED = 24
"""Number of sound points after which what precedes them is certainly good: two windows."""

SMOOTHED = 32
"""Number of pushes over which the mean staleness is smoothed."""

LOWER = "Lower the learning rate or the momentum"
LOCKSTEP = f"{LOWER}, or clip the gradients."
LOOK = "Look at its data and its machine."
UNDECIDED = (
    "With two workers, nobody can say which of them is wrong. Look at the data and the machine of both."
)
RELAXED = (
    f"{LOWER}, clip the gradients, or use --sync bsp with --batch balanced, under which no update is stale."
)


def guard_mode(guard: str | None, *, translated: bool) -> GuardMode:
    """Return the mode of a run's guard.

    Args:
        guard: the user's choice; None for the default, which is "temper" if hyper-parameters are translated, else
            "off".
        translated: True if hyper-parameters are translated.

    Raises:
        ConfigurationError: there is no such mode, or it cannot be used in this run.

    >>> guard_mode(None, translated=True), guard_mode(None, translated=False), guard_mode("tell", translated=False)
    ('temper', 'off', 'tell')
    """
    if guard is None:
        return "temper" if translated else "off"
    if guard not in GUARD_MODES:
        raise unknown_name("guard", guard, GUARD_MODES)
    if guard == "temper" and not translated:
        raise ConfigurationError(
            "guard is 'temper' and hyperparameters is 'raw', but raw hyper-parameters are used as they are. Use "
            "guard 'tell' or 'stop', or translated hyper-parameters."
        )
    return guard


class Verdict(msgspec.Struct, frozen=True):
    """What the guard has noticed, and what is to be done.

    Attributes:
        words: what has been noticed, in sentences.
        factor: new factor of the learning rate at all shards; None if it does not change.
        stops: True if the run must end.
        takes_out: worker without which the run continues; None if there is none.
    """

    words: str
    factor: float | None = None
    stops: bool = False
    takes_out: int | None = None


@stateful(
    decides=(
        "factor points sound _said _courses _outliers _nan _last_updates _staleness _changed _wrong _patience"
    ),
    fixed="mode _skips_nan",
)
class Guard:
    """Judges the pushes of all workers of a run.

    Args:
        mode: what the guard does.
        skips_nan: True if gradients with NaN or inf are not pushed, False if the first of them ends the run.

    Attributes:
        mode: what the guard does.
        factor: the factor of the learning rate in force.
        points: number of points that have been judged, of all parameter sets.
        sound: the last of these points at which nothing was wrong. See `CONFIRMED`.
    """

    def __init__(self, mode: GuardMode = "off", *, skips_nan: bool = False) -> None:
        self.mode = mode
        self.factor = 1.0
        self.points = self.sound = 0
        self._skips_nan = skips_nan
        self._said: set[tuple[str, int]] = set()  # (kind, worker or -1)
        self._courses: dict[int, Course] = {}
        self._outliers: dict[int, Outliers] = {}
        self._nan: dict[tuple[int, int], int] = {}  # (worker, set) -> number of its latest pushes with NaN
        self._last_updates: dict[int, int] = {}
        self._staleness = 0.0
        self._changed = -AGAIN  # the point at which the factor was changed
        self._wrong = 0  # the last point at which something was wrong
        self._patience = RESTORED

    def take(
        self, worker: int, seen: Observation, *, present: Collection[int], sync: str, lockstep: bool
    ) -> list[Verdict]:
        """Judge a push.

        Args:
            worker: the worker that has pushed.
            seen: what it has seen.
            present: the workers that take part in the run.
            sync: the sync model in force.
            lockstep: True if the model keeps all workers in lockstep.
        """
        self._note_staleness(worker, seen.updates)
        where = f"update {seen.updates}, {sync}, mean staleness {self._staleness:.1f}"
        advice = LOCKSTEP if lockstep else RELAXED
        if seen.weights is not None and not math.isfinite(seen.weights):
            return self._certain("weights", f"The weights contain NaN or inf ({where}).", advice)
        if seen.gradient is None:
            return []
        key = worker, seen.set_index
        if not math.isfinite(seen.gradient):
            self._nan[key] = self._nan.get(key, 0) + 1
            return self._of_nan(worker, seen, present, where, advice)
        self._nan.pop(key, None)
        if self.mode == "off":
            return []
        verdicts = self._of_worker(worker, seen, where)
        course = self._courses.setdefault(seen.set_index, Course())
        if not course.take(seen):
            return verdicts
        self.points += 1
        symptom = course.symptom(loss_counts=len(self._courses) == 1)
        if symptom is None:
            if course.is_full:
                self.sound = self.points
            return verdicts + self._restore(where, lockstep)
        return verdicts + self._diverges(
            symptom.kind, f"Training diverges ({where}): {symptom.words}.", advice, lockstep
        )

    def cut(self) -> GuardCut:
        """Return what the guard of a run that goes on begins with."""
        courses = (course.cut(set_index) for set_index, course in sorted(self._courses.items()))
        return GuardCut(self.factor, self._patience, tuple(filter(None, courses)))

    def resume(self, cut: GuardCut) -> None:
        """Go on from what the guard of an earlier run kept: its factor of the rate, and how training began."""
        if self.mode == "temper":
            self.factor, self._patience = cut.factor, cut.patience or RESTORED
            self._changed = 0
        self._courses = {each.set_index: Course.resumed(each) for each in cut.courses}

    def left(self, worker: int) -> None:
        """Forget a worker that has left the run."""
        self._last_updates.pop(worker, None)
        self._said -= {("worker", worker), ("pair", -1)}
        for outliers in self._outliers.values():
            outliers.forget(worker)
        for key in [key for key in self._nan if key[0] == worker]:
            del self._nan[key]

    def _note_staleness(self, worker: int, updates: int) -> None:
        """Count the updates by others between the weights of two pushes of a worker: the staleness of the first."""
        before = self._last_updates.get(worker)
        self._last_updates[worker] = updates
        if before is not None and updates > before:
            self._staleness += (updates - before - 1 - self._staleness) / SMOOTHED

    def _certain(self, kind: str, words: str, advice: str) -> list[Verdict]:
        """Say what is said in every mode, once."""
        if not self._is_new(kind):
            return []
        return [Verdict(f"{words} {advice}", stops=self.mode == "stop")]

    def _is_new(self, kind: str, worker: int = -1) -> bool:
        """Return True if this has not been said yet, and record that it has."""
        new = (kind, worker) not in self._said
        self._said.add((kind, worker))
        return new

    def _of_nan(
        self, worker: int, seen: Observation, present: Collection[int], where: str, advice: str
    ) -> list[Verdict]:
        """Judge a push whose gradient contains NaN or inf."""
        key = worker, seen.set_index
        if not self._skips_nan:  # the worker fails, and says why
            words = f"The gradient of {seen.parameter!r} contains NaN or inf at worker {worker} ({where})."
            return [Verdict(f"{words} {advice}", stops=True)] if self.mode == "stop" else []
        streaks = [self._nan.get((other, seen.set_index), 0) for other in present]
        if all(streak >= SURE_NAN for streak in streaks):
            words = (
                f"The gradients of all workers contain NaN or inf, as that of {seen.parameter!r} ({where})."
            )
            return self._certain("gradients", words, f"Nothing is learned any more. {advice}")
        streak = self._nan[key]
        if streak not in (NAMED_NAN, MOST_NAN) or all(streaks):
            return []
        words = (
            f"Worker {worker} has sent NaN or inf {streak} times in a row, the last time in the gradient of "
            f"{seen.parameter!r}, and the others have not ({where})."
        )
        if streak == NAMED_NAN:
            return [Verdict(f"{words} After {MOST_NAN} times, the run continues without it. {LOOK}")]
        return [Verdict(f"{words} The run continues without it. {LOOK}", takes_out=worker)]

    def _of_worker(self, worker: int, seen: Observation, where: str) -> list[Verdict]:
        """Judge whether a worker differs from the others."""
        outliers = self._outliers.setdefault(seen.set_index, Outliers())
        outliers.take(worker, seen)
        difference = outliers.difference(worker)
        if difference is None:
            return []
        if (other := difference.other) is not None:
            if not self._is_new("pair"):
                return []
            words = f"Worker {worker} differs from worker {other} ({where}): {difference.words}. {UNDECIDED}"
        elif self._is_new("worker", worker):
            words = f"Worker {worker} differs from all others ({where}): {difference.words}. {LOOK}"
        else:
            return []
        return [Verdict(words)]

    def _diverges(self, kind: str, words: str, advice: str, lockstep: bool) -> list[Verdict]:
        """Say that training diverges, and lower the rate, if that is to be done."""
        self._wrong = self.points
        new = self._is_new(kind)
        tempers = self.mode == "temper" and not lockstep
        if not tempers or self.points < self._changed + AGAIN:
            return [Verdict(f"{words} {advice}", stops=self.mode == "stop")] if new else []
        if self.factor <= LEAST_FACTOR:
            then = "The learning rate has been halved four times, which has not helped."
            return [Verdict(f"{words} {then} {advice}")] if self._is_new("helpless") else []
        self._change(self.factor / 2)
        words = f"{words} The learning rate is multiplied by {self.factor:g} now."
        return [Verdict(f"{words} {advice}" if new else words, self.factor)]

    def _restore(self, where: str, lockstep: bool) -> list[Verdict]:
        """Double the rate if nothing has been wrong for long enough. Models in lockstep get all of it at once."""
        if self.factor == 1.0:
            return []
        if lockstep:
            self._change(1.0)
            return [Verdict(f"The learning rate is no longer reduced ({where}).", self.factor)]
        good = self.points - max(self._changed, self._wrong)
        if good < self._patience:
            return []
        self._patience *= 2
        self._change(2 * self.factor)
        return [
            Verdict(
                f"Nothing has been wrong for {good} updates ({where}). The learning rate is multiplied by "
                f"{self.factor:g} now, instead of {self.factor / 2:g}.",
                self.factor,
            )
        ]

    def _change(self, factor: float) -> None:
        self.factor = factor
        self._changed = self.points
        for course in self._courses.values():
            course.forget_window()
