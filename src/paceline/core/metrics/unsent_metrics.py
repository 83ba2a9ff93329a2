"""What a worker's script has logged and the coordinator has not been told yet.

Scripts may log many times per second. So a worker first merges what belongs to the same progress of the job, and
reports a few times per second at most. A value that was logged between two pushes belongs to one of them: to the
later one if its gradient was being computed, else to the earlier one, whose loss a script may log after `step()`. It
has the weight of this push in a mean over the workers, however often the script has logged.

A report contains ages instead of times, so no two clocks are compared. In virtual time, values reach the coordinator
without a message, so a simulation has the same events and bytes whether its script logs or not. Metrics decide
nothing, so they are neither recorded in traces nor part of the states of the exhaustive search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ...state import stateful
from ..protocol.messages import MOST_LOGGED, LoggedValue, MetricsLogged, Source
from ..protocol.requests import COORDINATOR, Request, Send

__all__ = ["Noted", "Settled", "UnsentMetrics", "merge"]

LEAST_WEIGHT, MOST_WEIGHT = 1, 10**15
"""Bounds of a weight. Numbers of samples outside of them are mistakes."""

MOST_AGE_S = 1e9


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A value that a script has logged, or the mean of several.

    Attributes:
        name: name of the metric.
        value: the value.
        time_s: when it was logged, in seconds on the worker's clock.
        samples: number of samples that all workers together had used by then; 0 if unknown.
        updates: number of updates by then.
        source: where it comes from.
        evaluating: True if it was logged inside `paceline.evaluating()`.
        late: True if it belongs to the push before it, not to the push after it.
        times: number of values of which it is the mean.
    """

    name: str
    value: float
    time_s: float
    samples: int
    updates: int
    source: Source = "script"
    evaluating: bool = False
    late: bool = False
    times: int = 1


class Settled(msgspec.Struct, frozen=True):
    """What a script has logged before a push.

    Attributes:
        noted: all of it.
        loss: the loss of the iteration that is pushed; None if it is unknown.
        follows: True if the loss is unknown because the script logs it after `step()`.
        earlier_loss: the loss of the iteration before it, if the script has logged it since then; else None.
        shown: the last loss that is known, for display; None if there is no new one.
        guessed: True if `shown` is a guess.
    """

    noted: Sequence[Noted] = ()
    loss: float | None = None
    follows: bool = False
    earlier_loss: float | None = None
    shown: float | None = None
    guessed: bool = False


def merge(noted: Iterable[Noted]) -> list[Noted]:
    """Merge the values with the same name, progress and origin into their mean.

    >>> noted = [Noted("loss", 1.0, 0.1, 32, 1), Noted("loss", 3.0, 0.2, 32, 1), Noted("loss", 5.0, 0.3, 64, 2)]
    >>> [(each.value, each.times, each.time_s) for each in merge(noted)]
    [(2.0, 2, 0.2), (5.0, 1, 0.3)]
    """
    merged: dict[tuple[object, ...], Noted] = {}
    for each in noted:
        key = each.name, each.samples, each.updates, each.source, each.evaluating, each.late
        known = merged.get(key)
        if known is not None:
            times = known.times + each.times
            value = known.value * (known.times / times) + each.value * (each.times / times)
            time_s = max(known.time_s, each.time_s)
            each = msgspec.structs.replace(each, value=value, time_s=time_s, times=times)
        merged[key] = each
    return list(merged.values())


@stateful(decides="_values _weight _earlier_weight")
class UnsentMetrics:
    """What a worker has yet to report of its metrics.

    Example:
        >>> unsent = UnsentMetrics()
        >>> unsent.pushed(32)
        >>> unsent.take([Noted("loss", 0.5, 1.0, 64, 2)])
        >>> [report] = unsent.report(now_s=1.25)
        >>> report.message.values[0].weight, report.message.values[0].age_s
        (32.0, 0.25)
    """

    def __init__(self) -> None:
        self._values: list[tuple[Noted, float]] = []  # with their weights
        self._weight = self._earlier_weight = LEAST_WEIGHT  # of the last push, and of the one before

    @property
    def fills_a_message(self) -> bool:
        """True if there is more than what should wait for the next report."""
        return len(self._values) >= MOST_LOGGED

    def pushed(self, samples: int | None) -> None:
        """Record a push, and its number of samples if it is known."""
        self._earlier_weight = self._weight
        self._weight = min(max(samples or LEAST_WEIGHT, LEAST_WEIGHT), MOST_WEIGHT)

    def take(self, noted: Sequence[Noted], *, ended: bool = False) -> None:
        """Take what the script has logged since the last call.

        Args:
            noted: the values.
            ended: True if no push follows them, because the script has ended. Else the last push has followed them.
        """
        for each in merge(noted) if len(noted) > 1 else noted:
            late = each.late and not ended
            weight = each.times if each.evaluating else self._earlier_weight if late else self._weight
            self._values.append((each, float(weight)))

    def report(self, now_s: float) -> list[Request]:
        """Return the reports of everything that is kept. `now_s` is the time on the worker's clock."""
        if not self._values:
            return []
        values = [
            LoggedValue(
                each.name,
                each.value,
                weight,
                each.times,
                min(max(0.0, now_s - each.time_s), MOST_AGE_S),
                each.samples,
                each.updates,
                each.source,
                each.evaluating,
            )
            for each, weight in self._values
        ]
        self._values.clear()
        return [
            Send(COORDINATOR, MetricsLogged(tuple(values[start : start + MOST_LOGGED])))
            for start in range(0, len(values), MOST_LOGGED)
        ]
