"""The members of a run: which workers are expected, which take part, and which are gone.

A worker has an index. When it is gone and has not finished its work, another worker may join with this index. It is
the next *incarnation* of the worker, and what an earlier one still sends is refused. Every index is in one of three
sets:

    live      the worker is expected at the start of the run, or has registered; it is *present* from the moment at
              which it takes part in the run
    invited   the worker is to join the run in progress, and has not registered yet
    gone      the worker has finished its work, has left early, was lost, or has never been invited
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from ...errors import ConfigurationError, InternalError
from ...state import stateful

__all__ = ["Departure", "Fate", "Members"]

Fate = Literal["finished", "left", "lost"]


class Departure(NamedTuple):
    """An incarnation of a worker that has left the run.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        fate: "finished" if it has finished its work, "left" if it was asked to leave before, or "lost".
    """

    worker: int
    incarnation: int
    fate: Fate


@stateful(decides="present invited gone incarnations departures _live _used _latest", fixed="_workers")
class Members:
    """The workers of a run.

    Args:
        workers: maximum number of workers.
        absent: workers that are not expected at the start of the run. They can be invited later.

    Attributes:
        present: the live workers that take part in the run.
        invited: the workers that are to join the run in progress, and have not registered yet.
        gone: the workers that have finished, were lost, or have yet to be invited.
        incarnations: worker -> how often its index has been used before; 0 for workers that are not in this mapping.
        departures: the incarnations of workers that have left the run, in the order in which they have left.

    Example:
        >>> members = Members(3, absent=[2])
        >>> members.leave(1, "lost")
        >>> members.invite(2, wanted=[1])
        {1: 1, 2: 0}
        >>> members.admit(1)
        >>> members.live, members.invited, members.fate(1)
        ({0, 1}, {2}, '')
        >>> members.departures
        [Departure(worker=1, incarnation=0, fate='lost')]
    """

    def __init__(self, workers: int, absent: Collection[int] = ()) -> None:
        self.present: set[int] = set()
        self.invited: set[int] = set()
        self.gone = set(absent)
        self.incarnations: dict[int, int] = {}
        self.departures: list[Departure] = []
        self._workers = workers
        self._live = set(range(workers)) - self.gone
        self._used = self._live.copy()  # indices that an incarnation of a worker has or had
        self._latest: dict[int, Departure] = {}  # worker -> its last entry in `departures`

    @property
    def live(self) -> set[int]:
        """The workers that are expected or have registered, and are not gone. The set is a copy."""
        return self._live.copy()

    @property
    def live_count(self) -> int:
        """The number of live workers."""
        return len(self._live)

    @property
    def finished(self) -> list[int]:
        """The workers that have finished their work or left early, in the order in which they did so."""
        return [departure.worker for departure in self.departures if departure.fate != "lost"]

    @property
    def left(self) -> list[int]:
        """Those that were asked to leave, and left before they had finished their work."""
        return [departure.worker for departure in self.departures if departure.fate == "left"]

    @property
    def lost(self) -> list[int]:
        """The lost workers, in the order in which they were lost. A worker that was lost twice is in it twice."""
        return [departure.worker for departure in self.departures if departure.fate == "lost"]

    @property
    def some_have_finished(self) -> bool:
        """True if at least one worker has finished its work, so that the run is coming to its end."""
        return any(departure.fate == "finished" for departure in self.departures)

    def fate(self, worker: int) -> Fate | Literal[""]:
        """Return how a worker that is gone has left; "" for any other worker, and if there has been none."""
        latest = self._latest.get(worker)
        return latest.fate if latest is not None and worker in self.gone else ""

    def has_returned(self, departure: Departure) -> bool:
        """Return True if a later incarnation of the worker takes part in the run, or has done so."""
        worker = departure.worker
        return worker in self._live or self._latest[worker].incarnation > departure.incarnation

    def incarnation(self, worker: int) -> int:
        """Return how often the index of a worker has been used before."""
        return self.incarnations.get(worker, 0)

    def expects(self, worker: int, incarnation: int) -> bool:
        """Return True if this is the current incarnation of a worker that is live or invited."""
        known = 0 <= worker < self._workers and worker not in self.gone
        return known and incarnation == self.incarnation(worker)

    def invite(
        self, count: int, wanted: Collection[int] = (), reserved: Collection[int] = ()
    ) -> dict[int, int]:
        """Invite `count` workers to a run in progress. Return their indices and incarnations.

        The `wanted` indices come first if they are free, and then those that have not been used yet.

        Args:
            count: number of workers.
            wanted: preferred indices.
            reserved: workers that are gone, but whose indices cannot be used again yet.

        Raises:
            ConfigurationError: there are not enough free indices.
        """
        free = sorted(
            self.gone.difference(reserved),
            key=lambda worker: (worker not in wanted, worker in self._used, worker),
        )
        if count > len(free):
            raise ConfigurationError(
                f"{count} workers cannot join, because the run has at most {self._workers} workers and "
                f"{self._workers - len(free)} of them have joined. Join with at most {len(free)}, or start the "
                "run with a larger maximum (--workers MIN:MAX)."
            )
        invited = free[:count]
        for worker in invited:
            self._use(worker)
        self.invited.update(invited)
        return {worker: self.incarnation(worker) for worker in invited}

    def admit(self, worker: int) -> None:
        """Count a worker among the live ones. If it is gone, it is the next incarnation."""
        if worker in self.gone:
            self._use(worker)
        self.invited.discard(worker)
        self._live.add(worker)

    def leave(self, worker: int, fate: Fate) -> None:
        """Count a live worker among those that are gone."""
        self._live.remove(worker)
        self.present.discard(worker)
        self.gone.add(worker)
        self._latest[worker] = Departure(worker, self.incarnation(worker), fate)
        self.departures.append(self._latest[worker])

    def withdraw(self, worker: int) -> None:
        """Withdraw the invitation of a worker, which is gone without having taken part in the run."""
        self.invited.remove(worker)
        self.gone.add(worker)

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return what decides: only how workers have left, not which of them or in which order."""
        return {"departures": {departure.fate for departure in self.departures}, "_latest": None}

    def validate(self) -> None:
        """Check that every index is in one set; raise `InternalError` if this is not the case."""
        sets = (self._live, self.invited, self.gone)
        if sorted(worker for each in sets for worker in each) != list(range(self._workers)):
            raise InternalError(
                f"the sets of workers are inconsistent: {self._live} are live, {self.invited} are invited, and "
                f"{self.gone} are gone, of {self._workers} workers"
            )
        if not self.present <= self._live:
            raise InternalError(f"{self.present - self._live} are present, but not live")

    def _use(self, worker: int) -> None:
        """Count the next incarnation of a worker that has been gone."""
        if worker in self._used:
            self.incarnations[worker] = self.incarnation(worker) + 1
        self._used.add(worker)
        self.gone.remove(worker)
