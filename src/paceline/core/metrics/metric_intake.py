"""Takes what the scripts have logged into the history of the run."""

from __future__ import annotations

from ...state import stateful
from ..protocol.messages import LoggedValue, MetricsLogged
from .history import MOST_METRICS, History, Kind

__all__ = ["MetricIntake"]


@stateful(decides="_crowded", fixed="_history")
class MetricIntake:
    """Adds logged values to a history, and says once that there are too many names.

    Args:
        history: the history of the run.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._crowded = False  # True once the scripts have logged more names than a job may have

    def take(self, worker: int, message: MetricsLogged, now_s: float, *, alone: bool) -> str:
        """Add the values that a worker has logged.

        Args:
            worker: index of the worker.
            message: the values.
            now_s: the current time in seconds.
            alone: True if the worker is the main worker of several, so that its script logs for all of them.

        Returns:
            A warning, once, if the job has too many names; else "".
        """
        warning = ""
        for logged in message.values:
            kept = self._history.note(
                logged.name,
                _kind_of(logged, alone=alone),
                logged.value,
                logged.weight,
                time_s=max(0.0, now_s - logged.age_s),
                samples=logged.samples,
                updates=logged.updates,
                worker=worker,
                count=logged.count,
                source=logged.source,
            )
            if not kept and not self._crowded:
                self._crowded = True
                warning = (
                    f"The scripts have logged more than {MOST_METRICS} metrics. Those whose names came later, the "
                    f"first of them {logged.name!r} of worker {worker}, are not kept."
                )
        return warning


def _kind_of(logged: LoggedValue, *, alone: bool) -> Kind:
    """Return the kind of a value; see `core.metrics.history`. `alone`: the main worker of several has logged it."""
    return "point" if logged.evaluating or (alone and logged.source == "script") else "mean"
