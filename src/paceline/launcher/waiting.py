"""Tells the user which process a run waits for and, if that was asked for, ends it after a time-out."""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.coordinator import Coordinator
from ..runtime.stall import Awaited, StallWatch
from .local import LocalEngine

__all__ = ["Waiting"]

LEAST_ITERATIONS = 3  # of its usual ones that a worker may take, whatever the time-out


class Waiting:
    """Watches one run. Call `look` often.

    Args:
        coordinator: of the run.
        engine: its processes.
        timeout_s: a process that has been awaited for this long is ended; None for never.
        say: prints a line.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        engine: LocalEngine,
        timeout_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._coordinator = coordinator
        self._engine = engine
        self._timeout_s = timeout_s
        self._say = say
        self._watch = StallWatch(coordinator, timeout_s)
        self._said: dict[
            tuple[str, int], tuple[float, float]
        ] = {}  # whom -> (heard of last, quiet when last said)

    def look(self) -> str:
        """Look once. Return why the run cannot go on at all, or ""."""
        for awaited in self._watch.look():
            key = awaited.role, awaited.index
            heard_s = self._coordinator.heard_s.get(key, 0.0)
            before_s, said_s = self._said.get(key, (heard_s, 0.0))
            if awaited.quiet_s > 2 * said_s or before_s != heard_s:  # again at twice the time
                self._said[key] = heard_s, awaited.quiet_s
                self._say(self._describe(awaited))
            if self._timeout_s is not None and awaited.quiet_s > max(
                self._timeout_s, LEAST_ITERATIONS * awaited.usual_s
            ):
                why = f"nothing had been heard of it for {awaited.quiet_s:.0f} s (--stall-timeout)"
                self._engine.process(*key).kill(why)
        for key, (heard_s, quiet_s) in list(self._said.items()):
            if self._coordinator.heard_s.get(key, 0.0) != heard_s:
                del self._said[key]
                self._say(f"{key[0]} {key[1]} is back, after {quiet_s:.0f} s or more.")
        return self._watch.standstill

    def _describe(self, awaited: Awaited) -> str:
        process = self._engine.process(awaited.role, awaited.index)
        usual = f" (its iterations take {awaited.usual_s:.2g} s)" if awaited.usual_s else ""
        lines = [
            f"{process.name} is awaited: nothing has been heard of it for {awaited.quiet_s:.0f} s. It {awaited.doing}"
            f"{usual}."
        ]
        if awaited.waiting:
            names = " and ".join(
                filter(None, [", ".join(map(str, awaited.waiting[:-1])), str(awaited.waiting[-1])])
            )
            many = len(awaited.waiting) > 1
            lines.append(f"Worker{'s' * many} {names} wait{'s' * (not many)} for it.")
        state = process.state
        lines.append(f"Its process {process.id} {state}.")
        if state == "is stopped":
            lines.append(f"'kill -CONT {process.id}' continues it.")
        if self._timeout_s is not None:
            lines.append(f"It is ended after {self._timeout_s:g} s (--stall-timeout).")
        else:
            then = "ends it, and the others go on" if awaited.role == "worker" else "ends it, and the run"
            lines.append(
                f"'kill -KILL {process.id}' {then}; with --stall-timeout SECONDS that happens by itself."
            )
        return " ".join(lines)
