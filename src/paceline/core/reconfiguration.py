"""The reconfigurations that change a run while it goes on: which are in progress, and which wait for these to end.

There are three kinds of reconfigurations that change something, and each goes through the same phases:

    proposed   the reconfiguration was asked for; its content is not decided yet
    agreed     its content is decided, and the processes that it concerns are told
    in force   all these processes follow the reconfiguration; nothing is left to do

               join                       change of the sync model (`job_sync`)   extension
    proposed   admitted; JoinProposed     SyncRequested                           Contributed, from each live worker
    agreed     WorkerJoined to servers    ChangePublished to the live workers     ExtendShards to servers
    in force   WorkerWelcomed from all    a worker starts its first iteration     ExtensionReady from all servers,
               servers; Started           after the change                        ModelExtended

`WAITS_FOR` says which reconfigurations exclude each other. Workers join one at a time. The sync model in force
determines the label with which a worker joins, and the worker's `Started` names this model and the extensions in force.
So a join waits for all other reconfigurations. The members of a change are the live workers, so a change waits for the
join that is in progress. The requests for changes that have arrived during a join come before the next join.

Two rules need no entry in `WAITS_FOR`. All live workers take part in an extension, and a worker that has been admitted
is live, so no extension begins before the worker has joined. And each change waits for the previous change in the queue
of `JobSync`, which a replay can rebuild from the events of a trace. A change and an extension do not exclude each
other: an extension is not an event of the sync model.

A cut of the job changes nothing, so no reconfiguration waits for a cut. A cut begins only when no reconfiguration is in
progress, and after the coordinator has decided about the pushes of all lost workers. If a reconfiguration begins, or a
worker is lost, during a cut, the cut begins again afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from ..errors import ProtocolError
from ..state import stateful
from ..sync.events import Edit
from .job_cut import LoopCut, leader
from .job_sync import JobSync
from .layout import ModelSpec, Placement, ShardSlice, require_extension
from .lease import PackedPushed
from .members import NOBODY, Members, WorkerLoss
from .messages import (
    CutAgreed,
    CutOffered,
    CutProposed,
    CutTaken,
    ExtendShards,
    ExtensionReady,
    JoinOffered,
    JoinProposed,
    LastPush,
    ModelExtended,
    PushesReported,
    SyncRequested,
    WorkerJoined,
    WorkerWelcomed,
)
from .requests import CompleteCut, Discard, Overwrite, Request, Send, server_peer, worker_peer

Kind = Literal["join", "change", "extension", "cut"]

WAITS_FOR: Mapping[Kind, frozenset[Kind]] = {
    "join": frozenset({"join", "change", "extension"}),
    "change": frozenset({"join"}),
    "extension": frozenset({"extension"}),
    "cut": frozenset({"join", "change", "extension"}),
}
"""Kind of reconfiguration -> the kinds that must not be in progress when a reconfiguration of this kind begins."""


@stateful(fixed="_placement _sync")
class Reconfigurations:
    """The reconfigurations of a run that are in progress, and those that wait.

    Args:
        placement: the servers of the shards.
        sync: runs the coordinator's part of the sync model, and carries out the changes of the model.

    Attributes:
        join: the join that is in progress, of the first worker in `joining`; None if there is none.
        extension: the extension that is in progress; None if there is none.
        extensions: number of extensions that have been in force.
        cut: the cut that is in progress; None if there is none.
        cuts: number of the last cut that has begun.
        wants_cut: True if a cut is to be made, or is in progress.
        giving: the states that the workers give for the last cut that has begun; None if this cut is complete or was
            given up.
        joining: the workers that have been admitted and have not joined yet, in the order in which they will join.
    """

    def __init__(self, placement: Placement, sync: JobSync) -> None:
        self.join: Join | None = None
        self.extension: Extension | None = None
        self.extensions = 0
        self.cut: Cut | None = None
        self.cuts = 0
        self.wants_cut = False
        self.giving: StateCollection | None = None
        self.joining: list[int] = []
        # (worker, message) of each waiting request for a change
        self._postponed: list[tuple[int, SyncRequested]] = []
        self._placement = placement
        self._sync = sync

    @property
    def in_progress(self) -> frozenset[Kind]:
        """The kinds of reconfigurations that are in progress."""
        kinds: dict[Kind, bool] = {
            "join": self.join is not None,
            "change": self._sync.changing,
            "extension": self.extension is not None,
        }
        return frozenset(kind for kind, begun in kinds.items() if begun)

    @property
    def waiting(self) -> bool:
        """True if a worker is to join, or if a cut is to be made."""
        return self.wants_cut or bool(self.joining)

    def may_begin(self, kind: Kind) -> bool:
        """Return True if a reconfiguration of this kind need not wait."""
        return WAITS_FOR[kind].isdisjoint(self.in_progress)

    # -- cuts ---------------------------------------------------------------------------------------------

    def begin_cut(self, members: Members, *, lockstep: bool) -> list[Request]:
        """Begin a cut if one is wanted. If cuts have to wait at present, give up any cut in progress instead."""
        if not self.may_begin("cut"):
            self.give_up_cut()
        elif self.wants_cut and self.cut is None:
            self.cuts += 1
            self.cut = Cut(self.cuts, self._placement, members.gone)
            self.giving = StateCollection(self.cuts)
            return self.cut.begin(lockstep=lockstep)
        return []

    def offered_cut(self, server: int, offer: CutOffered) -> list[Request]:
        """Handle a server's offer, unless the cut has been given up."""
        if self.cut is None:
            return []
        requests = self.cut.offered(server, offer)
        if self.cuts != self.cut.number:
            self.cuts = self.cut.number
            self.giving = StateCollection(self.cuts)
        return requests

    def give_up_cut(self) -> None:
        """Give up the cut that is in progress, unless all shards have been cut. The cut begins again later."""
        self.cut = None
        if self.giving is not None and self.giving.labels is None:
            self.giving = None

    # -- joins --------------------------------------------------------------------------------------------

    def begin_join(self, members: Members) -> list[Request]:
        """Begin the next join, unless it has to wait."""
        if not self.joining or self._postponed or not self.may_begin("join"):
            return []
        worker = self.joining[0]
        self.join = Join(worker, members.incarnation(worker), len(self._placement.servers))
        return self.join.begin(members.gone)

    def offered(self, server: int, offer: JoinOffered) -> list[Request]:
        """Handle a server's offer, unless the join that it concerns has failed."""
        return [] if self.join is None else self.join.offered(server, offer, self._sync.next_superstep)

    def welcomed(self, server: int, message: WorkerWelcomed) -> WorkerJoined | None:
        """Record that a server has accepted the worker that joins.

        When all servers have accepted it, the join is in force, and its `WorkerJoined` is returned; None before.
        """
        if self.join is None:
            return None
        self.join.welcomed(server, message)
        if self.join.phase != "in force":
            return None
        joined, self.join = self.join.joined, None
        del self.joining[0]
        return joined

    def left(self, worker: int) -> bool:
        """Remove a worker that has left before it has joined. Return True if its join was in progress."""
        if worker not in self.joining:
            return False
        self.joining.remove(worker)
        if self.join is None or self.join.worker != worker:
            return False
        self.join = None
        return True

    # -- changes of the sync model ------------------------------------------------------------------------

    def postpones(self, worker: int, message: SyncRequested) -> bool:
        """Return True if a request for a change has to wait. `next_change` returns it later."""
        if self.may_begin("change"):
            return False
        self._postponed.append((worker, message))
        return True

    def next_change(self) -> tuple[int, SyncRequested] | None:
        """Remove the oldest waiting request for a change, and return it with its worker; None if no request waits."""
        return self._postponed.pop(0) if self._postponed else None

    # -- extensions of the model --------------------------------------------------------------------------

    def require_extension(self, before: ModelSpec | None, model: ModelSpec) -> None:
        """Raise `ProtocolError` unless a worker may propose to extend the model of the run to `model`."""
        if before is None or not self.may_begin("extension"):
            raise ProtocolError("the model cannot be extended now")
        require_extension(before, model)

    def extend(
        self,
        slices: Sequence[ShardSlice],
        models: Mapping[int, ModelSpec],
        resumed: int = 0,
        *,
        lacking: bool = False,
    ) -> list[Request]:
        """Begin an extension on which all live workers have agreed. See `Extension`."""
        number = self.extensions + 1
        self.extension = Extension(slices, models, self._placement, number, resumed, lacking=lacking)
        return self.extension.begin()

    def leave_extension(self, worker: int) -> list[Request]:
        """Continue an extension without a worker that has left. If no worker remains, give up the extension."""
        if self.extension is None:
            return []
        requests = self.extension.left(worker)
        if self.extension.is_void:
            self.extension = None
        return requests

    def extended(self, server: int, message: ExtensionReady) -> tuple[list[Request], Extension | None]:
        """Record that a server is ready. Return the requests and, after the last server, the extension in force."""
        extension = self.extension
        if extension is None:
            return [], None  # it has been given up
        requests = extension.ready(server, message)
        if extension.phase != "in force":
            return requests, None
        self.extension = None
        self.extensions += 1
        return requests, extension


# -- How a worker joins a run in progress: with the same label and the same c_p at every shard ---------------
#
# c_p is the sync model's count of the worker's pushes (see `Counts`). The coordinator decides alone, in two rounds of
# messages with the servers:
#
#     JoinProposed     to each server
#     JoinOffered      from each server: the label and the c_p with which the worker could join at its shards now; the
#                      sync models determine the c_p (`ShardMachine.entry`)
#     WorkerJoined     to each server: the worker joins, with the largest label and the largest c_p of all offers
#     WorkerWelcomed   from each server. After the last one, the worker receives Started, and connects to the servers
#
# The run goes on meanwhile. So a shard may have gone beyond the c_p when `WorkerJoined` arrives. Its server
# then sends another `JoinOffered`, and the coordinator sends another `WorkerJoined`. At servers that have accepted the
# earlier `WorkerJoined`, the worker leaves and joins again. Each time, the coordinator doubles the number of rounds
# that it adds to the offer, so the worker eventually joins, however fast the run is. A c_p that is too large does no
# harm: only the worker itself waits, until the other workers have reached this c_p.
#
# A server makes its offer when it has noticed the departure of all workers that have left according to the coordinator.
# So an incarnation of a worker joins only when the earlier incarnation has left every shard.


@stateful()
class Join:
    """The coordinator's part of a join that is in progress.

    Args:
        worker: the worker that joins.
        incarnation: how often the index of the worker has been used before.
        servers: number of servers.

    Attributes:
        worker: the worker that joins.
        joined: the last `WorkerJoined` that was sent to all servers; None before the first one.
        phase: the phase of the join. See `paceline.core.reconfiguration`.
    """

    def __init__(self, worker: int, incarnation: int, servers: int) -> None:
        self.worker = worker
        self.joined: WorkerJoined | None = None
        self.phase: Literal["proposed", "agreed", "in force"] = "proposed"
        self._incarnation = incarnation
        self._servers = servers
        self._offers: dict[int, JoinOffered] = {}  # server -> its last offer
        self._welcomed: set[int] = set()  # servers that have accepted `joined`
        self._margin = 0  # number of rounds that are added to the offers

    def begin(self, left: Iterable[int]) -> list[Request]:
        """Ask all servers for offers. `left` contains the workers that have left the run."""
        return self._to_servers(JoinProposed(self.worker, self._incarnation, tuple(sorted(left))))

    def offered(self, server: int, offer: JoinOffered, superstep: int) -> list[Request]:
        """Handle an offer. `superstep` is the first superstep that would wait for the worker."""
        if not self._concerns(offer):
            return []
        self._offers[server] = offer
        offers = self._offers.values()
        count = max(each.count for each in offers)
        if len(offers) < self._servers or (self.joined is not None and count <= self.joined.count):
            return []
        if self.joined is not None:
            self._margin = 2 * self._margin + 1
        iteration = max(each.iteration for each in offers)
        self.joined = WorkerJoined(self.worker, self._incarnation, iteration, count + self._margin, superstep)
        self.phase = "agreed"
        self._welcomed.clear()
        return self._to_servers(self.joined)

    def welcomed(self, server: int, message: WorkerWelcomed) -> None:
        """Record that a server has accepted the worker. When all servers have accepted it, the join is in force."""
        if self.joined is not None and self._concerns(message) and message.count == self.joined.count:
            self._welcomed.add(server)
            if len(self._welcomed) == self._servers:
                self.phase = "in force"

    def _concerns(self, message: JoinOffered | WorkerWelcomed) -> bool:
        """Return False if a server has sent the message about an earlier join, which has failed."""
        return (message.worker, message.incarnation) == (self.worker, self._incarnation)

    def _to_servers(self, message: JoinProposed | WorkerJoined) -> list[Request]:
        return [Send(server_peer(server), message) for server in range(self._servers)]


# -- The extension of the model: a script adds an optimizer or a parameter group after training has begun ----
#
# All live workers make a call with the extended model, and wait in it as in a barrier (see `core.joint_batch`).
# Then:
#
#     Contributed     from each live worker to the coordinator, with the extended model
#     ExtendShards    to each server, which allocates memory
#     InitialWeightsRequested, InitialWeights
#                     each server fetches the initial weights of the new parameters from the initializer
#     ExtensionReady  from each server to the coordinator
#     ModelExtended   to all servers and workers; each worker connects to the servers again, with memory for the
#                     extended model, and receives all weights, as at the start
#
# Each extension has a number, which these messages and the workers' greetings contain. A worker whose
# greeting contains the number of an extension has been told that all servers are ready for this extension. So a server
# may extend its shards when it receives the first such greeting, even if it has not received `ModelExtended` yet. If a
# worker is lost just after it has connected, a server may read the worker's greeting much later, perhaps during the
# next extension. The server then serves the worker with the extension in force, or refuses the worker.
#
# The initializer is the worker with the lowest index. If the initializer is lost before all servers are ready, the next
# worker takes its place, and sends its own weights to all servers. So the initial weights of all shards come from one
# worker. Until all servers are ready, the shards keep their earlier parameters only. The digests of frozen parameters
# are also those of the initializer. If all workers that wait for the extension are lost, the coordinator gives up the
# extension, and its number is used again. The coordinator proposes the next join only when the extension is in force or
# was given up, so a server that receives `JoinProposed` no longer waits for the initial weights of an extension.
#
# An extension is not an event of the sync model: no worker computes during an extension, and an extension is neither an
# iteration nor an update.
#
# The new parameters form a new *part* of the layout, with vectors of their own, which is sliced separately. So earlier
# parameters keep their indices, and slices keep their bounds. A server carries out the extension when it receives
# `ModelExtended`, or when the first worker connects again, whichever happens first. A larger store takes over the
# weights, the optimizer state, and the pushes that are held back, which have no gradients for the new parameters. A
# worker closes its former connections only after it has connected again, because a server considers a worker without a
# connection to be lost.
#
# A worker keeps the weights of the earlier parameters that it has pulled before the extension: if a script calls
# `encoder(x)` and then `new_head(...)`, the graph already holds the weights of the encoder. The worker takes newer
# weights only if it has made empty pushes while it waited, and if its script had called no module with trained
# parameters yet in this iteration, so that no graph holds the earlier weights.
#
# In a run that resumes a cut, the scripts again add the parameters that the earlier run had added. The servers then
# take the values of these parameters from the cut. A cut may also have been made before an extension, while some
# workers already waited for the extension or were about to propose it. Such cuts are allowed, because a worker may wait
# for an extension for a long time. If a run resumes such a cut, its scripts may already have added the new parameters
# when training begins. The cut then *lacks* parameters with which the run begins. The initializer sends all initial
# weights as in a new run, and the servers replace those for which the cut has values. Conversely, a resumed run is not
# cut before its scripts have added all parameters that the earlier run had trained.


@stateful()
class Extension:
    """The coordinator's part of an extension that is in progress.

    Args:
        slices: the slices of the extended model.
        models: the extended model of each worker that waits for the extension.
        placement: the servers of the shards.
        number: number of the extension.
        resumed: number of the cut that contains the new parameters; 0 if no cut contains them.
        lacking: True if this cut contains only some of the new parameters.

    Attributes:
        slices: the slices of the extended model.
        phase: "agreed" until all servers have received the initial weights from the same worker, then "in force". See
            `paceline.core.reconfiguration`.
    """

    def __init__(
        self,
        slices: Sequence[ShardSlice],
        models: Mapping[int, ModelSpec],
        placement: Placement,
        number: int,
        resumed: int = 0,
        *,
        lacking: bool = False,
    ) -> None:
        self.slices = tuple(slices)
        self.phase: Literal["agreed", "in force"] = "agreed"
        self._models = models
        self._workers = sorted(models)
        self._placement = placement
        self._number = number
        self._resumed = resumed
        self._lacking = lacking
        self._ready: set[int] = set()  # servers that have received the initial weights

    @property
    def model(self) -> ModelSpec:
        """The extended model, as the initializer has described it."""
        return self._models[self._workers[0]]

    @property
    def is_void(self) -> bool:
        """True if no worker is left that waits for the extension."""
        return not self._workers

    def begin(self) -> list[Request]:
        """Let the servers fetch the initial weights from the initializer."""
        self._ready.clear()
        return [
            Send(
                server_peer(server),
                ExtendShards(
                    self.model,
                    self._placement.held_by(server, self.slices),
                    self._workers[0],
                    self._number,
                    self._resumed,
                    self._lacking,
                ),
            )
            for server in self._placement.servers
        ]

    def ready(self, server: int, message: ExtensionReady) -> list[Request]:
        """Record that a server is ready. When all servers are ready, the extension takes effect."""
        if message.number != self._number or message.initializer not in self._workers[:1]:
            # The initializer has been lost meanwhile. The server fetches the weights of the next worker, if any.
            return []
        self._ready.add(server)
        if len(self._ready) < len(self._placement.servers):
            return []
        self.phase = "in force"
        extended = ModelExtended(self.slices, self._number, self.model.digests)
        return [
            *(Send(server_peer(each), extended) for each in self._placement.servers),
            *(Send(worker_peer(worker), extended) for worker in self._workers),
        ]

    def left(self, worker: int) -> list[Request]:
        """Record that a worker is lost. If this worker is the initializer, the next worker takes its place."""
        if worker not in self._workers:
            return []
        first = self._workers[0]
        self._workers.remove(worker)
        return self.begin() if worker == first and self._workers else []


# -- A shard's part of an edit: values that a script sets between two iterations (see `DistributedOptimizer.editing`)
#
# Every worker runs the block of an edit, and the edit of one worker takes effect in all workers. An edit travels as a
# push that contains new values instead of a gradient. Like any push, an edit has a label, and the sync model decides
# when it takes effect: on arrival, or when its round closes. But an edit is never part of a mean, and never dropped: it
# is carried out after the gradients of its round. An edit is not an update: it changes neither the version nor any
# staleness.
#
# All shards must take the same worker's edit. There are two cases:
#
# - In lockstep, every worker pushes its edit, and the shards take the edit of the worker with the lowest
#   index in the round. Rounds are the same at all shards. If a worker is lost inside the block, the next
#   worker's edit is taken.
# - Otherwise, shard 0 names one editor: the first worker that enters the block. Only this worker pushes its
#   edit; the other workers' pushes are empty. If the editor is lost before its push, the next worker that
#   enters the block is named, unless a later edit has already been made.
#
# Each worker counts its edits. A worker that joins late counts from the number of the job's next edit, which it learns
# from the first answer of shard 0. If the worker counted from 0, its edits would have the numbers of earlier edits, and
# would not be carried out, even if all earlier workers had left.
#
# Two edits by different editors may reach two shards in different orders. Therefore an edit does not change parameters
# that an edit with a higher number has set (`Store.overwrite`).
#
# As every worker sends its commits to shard 0 last, an edit that shard 0 has carried out was sent to all shards. If the
# editor is lost before shard 0 has its edit, some shards may have carried out this edit. The edit of the next editor
# then replaces it.
#
# Even if values travel rounded, the weights from which an edit begins must be equal to the weights of the servers, to
# the bit. So in lockstep, a worker pulls before it edits. Under other models, a worker pulls before an edit anyway, and
# shard 0 names the editor in its answer.

Key = tuple[int, int]
"""A push: (worker, iteration)."""


@stateful(fixed="_shard")
class Edits:
    """The edits of one shard that are yet to be carried out, and the editors that the shard has named.

    Args:
        shard: index of the shard.

    Attributes:
        pending: the pushes that contain edits, and have not been carried out or discarded yet.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self.pending: dict[Key, Edit] = {}
        self._next = 0  # 1 + the highest number of an edit that has been carried out
        self._editors: dict[int, int] = {}  # live worker -> number of the edit for which it was last named

    @property
    def next(self) -> int:
        """1 + the highest number of an edit that has been carried out."""
        return self._next

    def name(self, worker: int, number: int) -> bool:
        """Record that a worker enters the block of an edit. Return True if the edit of this worker counts."""
        if number < self._next or any(edit.number == number for edit in self.pending.values()):
            return False
        if number not in self._editors.values():
            self._editors[worker] = number
        return self._editors.get(worker) == number

    def leave(self, worker: int) -> None:
        """Record that a worker has left. If its edit is unfinished, another worker may become the editor."""
        self._editors.pop(worker, None)

    def receive(self, push: Key, edit: Edit) -> None:
        """Record a push that contains an edit."""
        self.pending[push] = edit

    def discard(self, push: Key) -> list[Request]:
        """Return the request that discards an edit of a lost worker, because some shards lack this edit."""
        del self.pending[push]
        return [Discard(self._shard, *push)]

    def carry_out(self, pushes: Iterable[Key]) -> list[Request]:
        """Return the requests for the edits of one round: one edit of each number is carried out, in ascending order.

        In lockstep, all edits of a round have the same number. Under other models, the editors of different edits may
        stop at the same barrier.
        """
        edits = sorted(
            ((push, self.pending.pop(push)) for push in pushes), key=lambda each: (each[1].number, each[0])
        )
        chosen: dict[int, Key] = {}  # number -> the push with the edit that is carried out
        for push, edit in edits:
            if edit.sole or edit.number >= self._next:
                chosen.setdefault(edit.number, push)
        self._next = max(self._next, *(edit.number + 1 for _, edit in edits))
        return [
            Overwrite(self._shard, *push, edit.number)
            if chosen.get(edit.number) == push
            else Discard(self._shard, *push)
            for push, edit in edits
        ]


# -- How a job is cut while it goes on: with which updates, pushes and data a later run begins ---------------
#
# A cut treats every worker as if it were lost (see `core.members`), but on a copy of the ledger, while
# training goes on. The coordinator asks the shards to cut themselves, and each shard reports which pushes of each
# worker its weights contain:
#
#     CutProposed   to each server, under a lockstep model
#     CutOffered    from each server: the number of rounds that its shards have completed
#     CutAgreed     to each server: cut each shard after a given round or, under other models, immediately
#     CutTaken      for each shard: it has been cut
#
# In lockstep, the updates of a round are the same at all shards, so no push is torn. A shard is cut when the scripts
# ask for their next batches: after the round, just before the first push that has newly drawn data. If a shard has
# already completed the round, its server makes another offer; the coordinator then chooses a later round, with twice
# the distance from the rounds in the offers. Under other models, each shard is cut at a version of its own, so the last
# pushes of some workers may be torn, that is, only in the weights of some shards. The data of torn pushes is not used
# again. Held pushes are not part of the cut, and their data is returned.
#
# Nothing waits for a cut, and a cut waits for everything else: a cut begins when no reconfiguration is in progress, and
# after the coordinator has decided about the pushes of all lost workers. A cut needs the state of at least one script.
# So a cut also waits while no worker takes part, unless a script has ended: its last state is kept. If a
# reconfiguration begins, or a worker is lost, before all shards have been cut, the cut begins again with the next
# number. From the beginning of a cut to its end, the ledger settles no positions, so the ledger still knows what every
# worker has received.
#
# The hosts of the shards copy what has been cut (`TakeCut`), and the host of the coordinator writes the copies
# (`SaveCut`). The cut is whole when every worker that is still present has given the state of its script
# (`CompleteCut`):
#
#     KeepWorkerState   from a worker, which has learned of the cut from an answer
#     StateWanted       to each worker that has not given its state when all shards have been cut
#     KeepWorkerState   from this worker, when its script asks for its next batch or waits in a call
#
# The coordinator waits for the states without a time-out: without a worker's state, the worker's script cannot be
# resumed at the position that it had reached. A worker that leaves is no longer awaited. But only the main worker has
# the objects that the scripts track. If the main worker leaves before it has given its state, the cut is abandoned
# (`AbandonCut`), and the job is cut again.

MOST_LABELS = 4
"""Number of states of a worker that are remembered until all shards have been cut."""


@stateful()
class Cut:
    """The coordinator's part of a cut that is in progress.

    Args:
        number: number of the cut.
        placement: the servers of the shards.
        left: the workers that have left the run.

    Attributes:
        number: number of the cut, which increases while the cut is in progress.
        taken: shard -> the report of the shard, for each shard that has been cut.
    """

    def __init__(self, number: int, placement: Placement, left: Collection[int]) -> None:
        self.number = number
        self.taken: dict[int, CutTaken] = {}
        self._placement = placement
        self._left = tuple(sorted(left))
        self._offers: dict[int, int] = {}  # server -> number of rounds
        self._margin = 1  # number of rounds that are added to the offers
        self._round: int | None = None

    def begin(self, *, lockstep: bool) -> list[Request]:
        """If the model keeps the workers in lockstep, ask the servers for offers; if not, let them cut their shards."""
        if lockstep:
            return self._to_servers(CutProposed(self.number, self._left))
        return self._to_servers(CutAgreed(self.number, None, self._left))

    def offered(self, server: int, offer: CutOffered) -> list[Request]:
        """Handle an offer. When all servers have made offers, agree on a round that no shard has completed."""
        if offer.number != self.number:
            return []
        self._offers[server] = offer.round
        if len(self._offers) < len(self._placement.servers):
            return []
        if self._round is not None:  # a shard has gone beyond this round
            self._margin *= 2
            self.number += 1
            self.taken.clear()
        self._round = max(self._offers.values()) + self._margin
        return self._to_servers(CutAgreed(self.number, self._round, self._left))

    def take(self, message: CutTaken) -> bool:
        """Record that a shard has been cut. Return True if all shards have been cut."""
        if message.number == self.number:
            self.taken[message.shard] = message
        return len(self.taken) == len(self._placement.server_of)

    def last_pushes(self) -> list[dict[int, LastPush]]:
        """Return, for each shard in order, each worker's last push that is part of the cut."""
        return [{push.worker: push for push in self.taken[shard].workers} for shard in sorted(self.taken)]

    def _to_servers(self, message: CutProposed | CutAgreed) -> list[Request]:
        return [Send(server_peer(server), message) for server in self._placement.servers]


@stateful()
class StateCollection:
    """The states of scripts that the workers give for a cut.

    A state may belong to the cut if it was taken after the worker's last push of the cut. The earliest such state is
    used.

    Args:
        number: number of the cut.

    Attributes:
        number: number of the cut.
        labels: worker -> label of its last push in the cut, for each worker that took part and has not left without
            a state; None until all shards have been cut.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.labels: dict[int, int] | None = None
        self._main = NOBODY
        # worker -> label of a state -> the place of the job in its loops when the state arrived
        self._given: dict[int, dict[int, LoopCut]] = {}
        self._loop = LoopCut()

    def begin(self, labels: Mapping[int, int], main: int, loop: LoopCut) -> None:
        """Record that all shards have been cut.

        Args:
            labels: worker -> label of its last push in the cut.
            main: the main worker.
            loop: the place of the job in its training loops now.
        """
        self.labels, self._main, self._loop = dict(labels), main, loop

    def give(self, worker: int, label: int, loop: LoopCut) -> None:
        """Record that a worker has given a state, while the job was at the place `loop` in its training loops."""
        given = self._given.setdefault(worker, {})
        given[label] = loop
        for earlier in sorted(given)[:-MOST_LABELS]:
            del given[earlier]

    def left(self, worker: int) -> bool:
        """Record that a worker has left. Return True if the cut cannot be completed without the worker's state."""
        if self.labels is None or worker not in self.awaited:
            return False
        del self.labels[worker]
        return worker == self._main

    @property
    def awaited(self) -> list[int]:
        """The workers that have not given a state yet."""
        return [worker for worker in self.labels or () if self._label_of(worker) is None]

    @property
    def completed(self) -> CompleteCut | None:
        """The request that completes the cut; None if a state is awaited."""
        if self.labels is None or self.awaited:
            return None
        states = {
            worker: label for worker in sorted(self.labels) if (label := self._label_of(worker)) is not None
        }
        # The workers reach an epoch at different times. In the resumed run, all of them go on where the leader was.
        # Workers that were elsewhere get the leader's schedule (see `train.worker_state`).
        first = leader(self._main, states)
        loop = self._loop if first is None else self._given[first][states[first]]
        return CompleteCut(self.number, tuple(states.items()), loop)

    def _label_of(self, worker: int) -> int | None:
        """Return the label of a worker's state that belongs to the cut; None if there is none."""
        assert self.labels is not None
        least = self.labels[worker]
        return min((label for label in self._given.get(worker, ()) if label >= least), default=None)


def cut_pushes(
    last: Collection[Mapping[int, LastPush]],
) -> tuple[dict[int, int], dict[int, list[tuple[PackedPushed, PackedPushed]]], int]:
    """Decide which pushes are part of a cut, as if all workers were lost.

    Args:
        last: for each shard, each worker's last push that is part of the cut. All shards have the same workers.

    Returns:
        For each worker, the label of its last push that is in the weights of all shards; for each worker, what it had
        drawn before this push (see `WorkerLoss.drawn`); and the number of torn pushes.
    """
    labels, drawn, torn = {}, {}, 0
    shards = dict(enumerate(last))
    for worker in shards[0]:
        loss = WorkerLoss(worker, 0, set(shards))
        for shard, pushes in shards.items():
            push = pushes[worker]
            loss.reported(shard, PushesReported(worker, 0, (push.iteration,), (False,), (push.drawn,)))
        labels[worker], drawn[worker] = loss.kept, loss.drawn
        torn += loss.torn
    return labels, drawn, torn
