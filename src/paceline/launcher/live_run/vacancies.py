"""Says when a run waits for machines to join it, and gives up after a while if none does."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...core.machines.waiting_clocks import Clocks
from ...errors import RunFailedError
from ...report.words import counted
from ...runtime.coordinator_host import CoordinatorHost
from ...runtime.job_watch import CLOCK_GAP_S

__all__ = ["Vacancies"]

# Time in which machines join a run again that goes on by itself. They call it for that long (`paceline join --wait`).
RETURN_TIMEOUT_S = 60.0
SHORTAGE, LIFE = "shortage", "life"


class Vacancies:
    """Watches whether enough workers take part in a run that machines can join. Call `look` often.

    Args:
        coordinator: the coordinator of the run.
        patience_s: number of seconds for which the run may have too few workers; None for no limit.
        say: a function that prints a line.
        again: True if the run goes on by itself after the loss of a server, so that machines join it again.
    """

    def __init__(
        self,
        coordinator: CoordinatorHost,
        patience_s: float | None,
        say: Callable[[str], None],
        *,
        again: bool = False,
    ) -> None:
        self._coordinator = coordinator
        self._patience_s = patience_s
        self._say = say
        self._again = again
        # Both of these clocks are about the run: one of the present shortage, the other of this life of the run.
        self._clocks: Clocks[str] = Clocks(time.monotonic(), gap_s=CLOCK_GAP_S)
        self._clocks.begin(LIFE, time.monotonic())
        self._paused = False
        self._vacant = 0  # number of servers for which the run was last said to be waiting

    def look(self) -> str:
        """Check the number of workers. Return why the run must end, or "" if it need not."""
        now_s, shortage = time.monotonic(), self._coordinator.core.shortage
        self._clocks.look(now_s)
        short_s = self._clocks.hold(SHORTAGE, now_s, holds=shortage != "")
        begun = self._coordinator.core.model is not None
        self._look_for_servers()
        if self._paused != (begun and shortage != ""):
            self._paused = not self._paused
            if self._paused:
                self._say(f"the run is paused: it has {shortage}; it continues when others have joined")
            else:
                self._say("the run continues")
        if self._patience_s is None or short_s is None or short_s < self._patience_s:
            return ""
        core = self._coordinator.core
        brought = self._coordinator.job.remote_servers - len(core.servers.vacant)
        if not (core.members.live or core.members.finished or core.members.lost or brought):
            return (
                f"no machine has joined it within {self._patience_s:g} s (--wait). Wait longer, and look at what "
                "`paceline join` prints on the other machines"
            )
        return (
            f"it has {shortage}, and has waited for {self._patience_s:g} s (--wait). Let more machines join, or "
            "start the run with a smaller minimum (--workers MIN:MAX)"
        )

    def unreturned_server(self) -> RunFailedError | None:
        """Return the loss of a server whose machine was to join the run again, if it has not done so in time."""
        vacant = tuple(self._coordinator.core.servers.vacant)
        waited_s = self._clocks.waited_s(LIFE, time.monotonic())
        if not (self._again and vacant) or waited_s is None or waited_s < RETURN_TIMEOUT_S:
            return None
        return RunFailedError(
            f"server {min(vacant)}", f"its machine has not joined the run again within {RETURN_TIMEOUT_S:g} s"
        )

    def _look_for_servers(self) -> None:
        """Say how many servers are missing if the run cannot begin for this reason alone."""
        core = self._coordinator.core
        vacant = len(core.servers.vacant) if core.members.live_count >= self._coordinator.job.least else 0
        if vacant and vacant != self._vacant:
            self._say(f"waiting for {counted(vacant, 'server')}: paceline join --servers {vacant} ...")
        self._vacant = vacant
