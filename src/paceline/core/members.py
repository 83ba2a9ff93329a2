"""The members of a run: its workers and servers, how many workers it needs, the main worker, and how a worker is lost.

A worker has an index. When a worker is gone, another worker may join with the same index, unless the worker was the
main worker and has finished its work. The new worker is the next *incarnation* of the worker, and messages that an
earlier incarnation still sends are refused. Every index is in one of three sets:

    live      the worker is expected at the start of the run, or has registered; it is *present* from the moment at
              which it takes part in the run
    invited   the worker is to join the run in progress, and has not registered yet
    gone      the worker has finished its work, has left early, was lost, or has never been invited
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from ..errors import ConfigurationError, InternalError
from ..state import stateful
from .layout import Placement
from .lease import PackedPushed, Pushed
from .messages import LossSettled, Paused, PushesReported, Resumed, WorkingDirectory
from .requests import Request, Send, server_peer, worker_peer

Fate = Literal["finished", "left", "lost"]


class Departure(NamedTuple):
    """An incarnation of a worker that has left the run.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        fate: "finished" if the worker has finished its work, "left" if it has left early because it was asked to, or
            "lost".
    """

    worker: int
    incarnation: int
    fate: Fate


@stateful(fixed="_workers")
class Members:
    """The workers of a run.

    Args:
        workers: maximum number of workers.
        absent: workers that are not expected at the start of the run, and can be invited later.

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
        """The workers that have finished their work or left early, in the order in which they left the run."""
        return self._departed("finished", "left")

    @property
    def left(self) -> list[int]:
        """The workers that were asked to leave, and left before they had finished their work."""
        return self._departed("left")

    @property
    def lost(self) -> list[int]:
        """The lost workers, in the order in which they were lost. A worker that was lost twice appears twice."""
        return self._departed("lost")

    @property
    def some_have_finished(self) -> bool:
        """True if at least one worker has finished its work, so that the run is coming to its end."""
        return bool(self._departed("finished"))

    def _departed(self, *fates: Fate) -> list[int]:
        return [departure.worker for departure in self.departures if departure.fate in fates]

    def fate(self, worker: int) -> Fate | Literal[""]:
        """Return how a worker that is gone has left; "" if it is not gone, or has never taken part in the run."""
        latest = self._latest.get(worker)
        return latest.fate if latest is not None and worker in self.gone else ""

    def has_returned(self, departure: Departure) -> bool:
        """Return True if a later incarnation of the worker takes part in the run, or has taken part."""
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

        The `wanted` indices come first if they are free, and then the indices that have not been used yet.

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
        """Count a worker as live. If the worker is gone, its next incarnation begins."""
        if worker in self.gone:
            self._use(worker)
        self.invited.discard(worker)
        self._live.add(worker)

    def leave(self, worker: int, fate: Fate) -> None:
        """Count a live worker as gone."""
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
        """Return the values on which requests depend.

        These are the ways in which workers have left, but neither their indices nor their order.
        """
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
        """Count the next incarnation of a worker that was gone."""
        if worker in self._used:
            self.incarnations[worker] = self.incarnation(worker) + 1
        self._used.add(worker)
        self.gone.remove(worker)


# -- How many workers a run needs: to begin, and to go on without a pause ------------------------------------


@stateful(fixed="least pause_below _members")
class Quorum:
    """Decides whether a run has enough workers.

    Args:
        members: the workers of the run.
        least: minimum number of workers with which the run begins.
        pause_below: number of workers below which the run pauses until other workers join. Once a worker has finished,
            the run no longer pauses.

    Attributes:
        paused: True while the workers begin no further iterations, because the run has too few workers.
    """

    def __init__(self, members: Members, *, least: int, pause_below: int) -> None:
        self.paused = False
        self.least = least
        self.pause_below = pause_below
        self._members = members

    @property
    def too_small(self) -> bool:
        """True if a run that has not begun yet has too few workers to begin."""
        return self.lacks(self._members.live_count)

    def lacks(self, workers: int) -> bool:
        """Return True if a run that has not begun yet cannot begin with this number of workers."""
        return workers < self.least and not self._members.some_have_finished

    @property
    def short(self) -> bool:
        """True if the run should pause, because it has too few workers."""
        return len(self._members.present) < self.pause_below and not self._members.some_have_finished

    @property
    def everybody_left(self) -> bool:
        """True if every worker has finished, was lost, or has yet to join, and at least one worker has left.

        A run that pauses when it has too few workers also waits for new workers when all of its workers have been lost
        or have left early.
        """
        members = self._members
        if members.live_count:
            return False
        return members.some_have_finished or (bool(members.departures) and not self.pause_below)

    def pause_or_resume(self) -> list[Request]:
        """If the present number of workers makes the run pause or continue, tell the workers."""
        if self.paused == self.short:
            return []
        self.paused = self.short
        message = Paused() if self.paused else Resumed()
        return [Send(worker_peer(worker), message) for worker in sorted(self._members.present)]


# -- The main worker, whose script writes files and messages for the whole job -------------------------------
#
#     beginning   worker 0 or, if it does not take part, the worker with the lowest index among those with which
#                 training begins
#     afterwards  the main worker stays the same until it is lost, or leaves before its script has ended. Then its
#                 place is taken by the worker with the lowest index among those that take part. If no worker takes
#                 part, its place is taken by the next worker that joins or, before training begins, by worker 0
#
# A worker that was lost and joins again is another process. This process knows nothing of what its predecessor has
# written, for example which result was the best. So it does not become the main worker as long as another worker is the
# main worker. If the main worker has finished its script, it has written everything, and no worker takes its place.
# Its index is not used again.
#
# The workers may have different working directories. If a file is written once for the job, its relative path refers to
# the working directory of the first main worker, even after this worker is lost. So the path of the file stays the
# same.

NOBODY = -1


@stateful(about={"directory": "scripts"})
class MainWorker:
    """The main worker of a job.

    Attributes:
        worker: index of the main worker; `NOBODY` if the main worker has left and no other worker takes part.
        directory: the working directory of the main worker with which training has begun; None if it is unknown.

    Example:
        >>> main = MainWorker()
        >>> main.left(0, finished=False, others={2, 1}), main.worker
        (True, 1)
        >>> main.joined(0), main.worker
        (False, 1)
        >>> main.left(1, finished=True, others={0, 2}), main.worker
        (False, 1)
    """

    def __init__(self) -> None:
        self.worker = 0
        self.directory: WorkingDirectory | None = None
        self._vacant = 0  # the next main worker if no other worker can take the place of the main worker

    def begin(self, workers: Mapping[int, WorkingDirectory | None]) -> None:
        """Begin training with these workers, which have these working directories."""
        self._vacant = NOBODY
        if self.worker not in workers:
            self.worker = min(workers)
        self.directory = workers[self.worker]

    def joined(self, worker: int) -> bool:
        """Record that a worker takes part from now on. Return True if it has become the main worker."""
        if self.worker != NOBODY:
            return False
        self.worker = worker
        return True

    def left(self, worker: int, *, finished: bool, others: Collection[int]) -> bool:
        """Record that a worker has left. Return True if the run now has another main worker, or none.

        Args:
            worker: the worker.
            finished: True if the script of the worker has ended.
            others: the workers that can take the place of the worker.
        """
        if worker != self.worker or finished:
            return False
        self.worker = min(others, default=self._vacant)
        return True


# -- What scripts request for the whole job: changes of the sync model, and checkpoints ----------------------
#
# Either the scripts of all workers make the same requests, or the script of a single worker makes them, for example
# that of the main worker. A worker counts only its own requests. So if the single worker is lost, the first request of
# the worker that takes its place is new. It must not be taken for the first request of the lost worker.


@stateful()
class ScriptRequests:
    """The requests of one kind that scripts have made. The n-th requests of all workers are one request.

    Workers that were lost or were asked to leave no longer count, because other workers may take their places.

    Example:
        >>> requests = ScriptRequests()
        >>> requests.record(0, 1)
        >>> requests.is_new(1), requests.is_new(2)
        (False, True)
        >>> requests.left(0, finished=False)
        >>> requests.is_new(1)
        True
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}  # worker that has not left -> number of its requests
        self._by_finished = 0  # largest number of requests of a worker that has finished its work

    def is_new(self, count: int) -> bool:
        """Return True if no worker has made as many as `count` requests."""
        return count > max([self._by_finished, *self._made.values()])

    def record(self, worker: int, count: int) -> None:
        """Record the number of requests that a worker has made."""
        self._made[worker] = count

    def left(self, worker: int, *, finished: bool) -> None:
        """Record that a worker has left. `finished` is True if it has finished its work."""
        made = self._made.pop(worker, 0)
        if finished:
            self._by_finished = max(self._by_finished, made)


# -- The servers of a run, as the coordinator knows them: who brings them, which are connected, and which are lost


@stateful(history="lost", fixed="_count _late")
class ServerRoster:
    """The servers of a run.

    Args:
        placement: the servers of the shards.
        late: servers that are absent at the start, because machines that join bring them.

    Attributes:
        vacant: the servers that no machine has brought yet.
        addresses: connected server -> its address.
        lost: server whose loss has ended the run -> a clause that says why the server is lost.
    """

    def __init__(self, placement: Placement, late: Collection[int] = ()) -> None:
        self.vacant = set(late)
        self.addresses: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self._ready: set[int] = set()  # servers that have received their shards
        self._count = len(placement.servers)
        self._late = frozenset(late)

    @property
    def complete(self) -> bool:
        """True if all servers are connected."""
        return len(self.addresses) >= self._count

    @property
    def shortage(self) -> str:
        """A text that says how many servers the run has and needs, if machines have yet to bring some; else ""."""
        return f"{self._count - len(self.vacant)} of {self._count} servers" if self.vacant else ""

    def expects(self, server: int) -> bool:
        """Return True if this server may connect now."""
        excluded = server in self.addresses or server in self.vacant
        return 0 <= server < self._count and not excluded

    def ready(self, server: int) -> bool:
        """Record that a server has received its shards. Return True if all servers have received their shards."""
        self._ready.add(server)
        return len(self._ready) >= self._count

    def lose(self, server: int, how: str, *, begun: bool) -> bool:
        """Record that a server is lost.

        Args:
            server: index of the server.
            how: a clause that says why the server is lost.
            begun: True if the run has begun. Otherwise, a server that machines bring becomes vacant.

        Returns:
            True if the run has lost the server for good.
        """
        self.addresses.pop(server, None)
        if not begun and server in self._late:
            self.release(server)
            return False
        self.lost.setdefault(server, how)
        return True

    def invite(self, count: int) -> tuple[int, ...]:
        """Expect `count` of the servers that machines bring, and return their indices.

        Raises:
            ConfigurationError: the run needs fewer servers.
        """
        missing = len(self.vacant)
        if count > missing:
            more = f"{missing or 'no'} more server{'s' * (missing != 1)}"
            late = len(self._late)
            raise ConfigurationError(
                f"this machine offers --servers {count}, but the run needs {more}: of its {self._count} "
                f"servers, the machine that serves the run has {self._count - late}, and machines that have joined "
                f"have {late - missing}. Join with --servers {missing}, or start the run with more servers "
                "(--servers N --remote-servers M)."
            )
        invited = tuple(sorted(self.vacant)[:count])
        self.vacant.difference_update(invited)
        return invited

    def release(self, server: int) -> None:
        """Make a server vacant, so that another machine may bring it: its machine has left before the run began."""
        self.vacant.add(server)


# -- How a worker is lost: first it is fenced at every shard, then the coordinator decides which of its pushes count
#
# A worker that dies while it sends a push leaves a *torn* push, which some shards have received and others
# have not. A shard alone cannot know whether a push that it holds is torn. So a lost worker is handled in two phases:
#
#     WorkerLost       to each server. From then on, the server receives nothing more from this incarnation of the
#                      worker: the worker is *fenced*. The shards of the server apply no update that contains a held
#                      push of the worker
#     PushesReported   from each server: the labels of the last pushes that its shards have received
#     LossSettled      to each server that holds a push: a held push that every shard has received is kept, and any
#                      other held push is dropped
#
# A torn push that a shard has applied already, for example under ASP, remains applied at this shard, and counts as
# torn. If no shard of a server holds a push of the worker, the worker leaves these shards immediately. If a server
# notices the end of a worker's connection before the coordinator does, the server fences the worker without being told.
#
# An incarnation that is lost before it takes part has pushed nothing. A server that has welcomed the
# incarnation may still hold pushes of an earlier incarnation, and reports these pushes. The coordinator has already
# decided about the earlier incarnation, so all of these pushes are kept.


@stateful()
class WorkerLoss:
    """The coordinator's record of a lost worker, until all servers have reported its pushes.

    Args:
        worker: the lost worker.
        incarnation: how often the index of the worker had been used before.
        servers: the servers that have yet to report.

    Attributes:
        complete: True once all servers have reported.
    """

    def __init__(self, worker: int, incarnation: int, servers: set[int]) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._missing = servers
        self._received: dict[int, PushesReported] = {}

    @property
    def complete(self) -> bool:
        return not self._missing

    def reported(self, server: int, report: PushesReported) -> list[Request]:
        """Record a server's report. After the last report, return the requests that tell the servers the decision."""
        if report.incarnation != self._incarnation or server not in self._missing:
            return []
        self._received[server] = report
        return self.stop_awaiting(server)

    def stop_awaiting(self, server: int) -> list[Request]:
        """Wait no longer for a server's report. If no other report is missing, return requests as `reported` does."""
        if server not in self._missing:
            return []
        self._missing.remove(server)
        if self._missing:
            return []
        settled = LossSettled(self._worker, self._incarnation, self.kept)
        return [Send(server_peer(each), settled) for each, sent in self._received.items() if any(sent.held)]

    @property
    def torn(self) -> bool:
        """True if some shards, but not all, have applied or dropped the worker's last push."""
        return any(
            last > self.kept and not held
            for report in self._received.values()
            for last, held in zip(report.last, report.held, strict=True)
        )

    @property
    def drawn(self) -> list[tuple[PackedPushed, PackedPushed]]:
        """For each loader, the batches in pushes that reached all shards, and those in pushes that reached any shard.

        The two values are equal unless a push is torn: a torn push that is only held is dropped.
        """
        reports = [
            list(map(Pushed.unpack, drawn)) for report in self._received.values() for drawn in report.drawn
        ]
        loaders = max(map(len, reports), default=0)
        padded = [(*drawn, *[Pushed(0, 0)] * (loaders - len(drawn))) for drawn in reports]
        torn = self.torn
        return [
            (min(each).packed, (max(each) if torn else min(each)).packed)
            for each in zip(*padded, strict=True)
        ]

    @property
    def kept(self) -> int:
        """The label of the worker's last push that every shard has received; -1 if there is none."""
        return min((last for report in self._received.values() for last in report.last), default=-1)


@stateful()
class Losses:
    """The lost workers about whose pushes the coordinator has not decided yet.

    Attributes:
        open: lost worker whose pushes some servers have yet to report -> its record.
        torn: number of pushes of lost workers that some shards, but not all, have applied.
    """

    def __init__(self) -> None:
        self.open: dict[int, WorkerLoss] = {}
        self.torn = 0

    def begin(self, worker: int, incarnation: int, servers: set[int]) -> None:
        """Record that a worker is lost. See `WorkerLoss`."""
        self.open[worker] = WorkerLoss(worker, incarnation, servers)

    def reported(
        self, server: int, report: PushesReported
    ) -> tuple[list[Request], list[tuple[PackedPushed, PackedPushed]] | None]:
        """Record a server's report.

        Returns:
            The requests and, after the last report, the batches in the worker's pushes, as in `WorkerLoss.drawn`; else
            None.
        """
        loss = self.open.get(report.worker)
        if loss is None:
            # This incarnation never took part. Held pushes are those of an earlier incarnation, and the coordinator has
            # decided to keep them.
            kept = max(report.last, default=-1)
            settled = LossSettled(report.worker, report.incarnation, kept)
            return [Send(server_peer(server), settled)] if any(report.held) else [], None
        requests = loss.reported(server, report)
        return requests, self._close(report.worker) if loss.complete else None

    def lose_server(
        self, server: int
    ) -> tuple[list[Request], dict[int, list[tuple[PackedPushed, PackedPushed]]]]:
        """Record that a server is lost, and reports nothing more.

        Returns:
            The requests and, for each worker whose pushes no other server has yet to report, the batches in these
            pushes, as in `WorkerLoss.drawn`.
        """
        requests: list[Request] = []
        for loss in self.open.values():
            requests += loss.stop_awaiting(server)
        complete = [worker for worker, loss in self.open.items() if loss.complete]
        return requests, {worker: self._close(worker) for worker in complete}

    def _close(self, worker: int) -> list[tuple[PackedPushed, PackedPushed]]:
        loss = self.open.pop(worker)
        self.torn += loss.torn
        return loss.drawn
