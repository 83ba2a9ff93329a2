"""What changes a run while it goes on: which reconfigurations are in progress, and which wait for them to end.

There are three kinds of reconfigurations that change something, and each goes through the same phases:

    proposed   somebody has asked for the reconfiguration; its content is not fixed yet
    agreed     its content is fixed, and those whom it concerns are told
    in force   all of them follow it; nothing is left to do

               join (`joining`)           change of the sync model (`job_sync`)   extension (`extension`)
    proposed   admitted; JoinProposed     SyncRequested                           Contributed, from each live worker
    agreed     WorkerJoined to servers    ChangePublished to the live workers     ExtendShards to servers
    in force   WorkerWelcomed from all    a worker starts its first iteration     ExtensionReady from all servers,
               servers; Started           after the change                        ModelExtended

`WAITS_FOR` says which of them exclude each other. A worker joins one at a time, with a label that the sync model in
force determines, and its answer names this model and the extensions in force; so a join waits for everything else.
The members of a change are the live workers, so a change waits for the join that is in progress. The requests for
changes that have arrived during a join come before the next join.

Two rules need no entry. All live workers take part in an extension, and a worker that has been admitted is live, so
no extension begins before the worker has joined. And the next change waits for the current one in the queue of
`JobSync`, because the events of a trace determine this queue. A change and an extension do not exclude each other: an
extension is not an event of the sync model.

A cut of the job (`cut`) changes nothing, so nothing waits for it. It waits for everything else, and also for open
losses; if any of them begins, the cut begins again afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ...errors import ProtocolError
from ...state import stateful
from ..machines.members import Members
from ..protocol.layout import ShardSlice
from ..protocol.messages import (
    CutOffered,
    ExtensionReady,
    JoinOffered,
    SyncRequested,
    WorkerJoined,
    WorkerWelcomed,
)
from ..protocol.model_spec import ModelSpec, require_extension
from ..protocol.placement import Placement
from ..protocol.requests import Request
from ..sync.job_sync import JobSync
from .cut import Cut, Giving
from .extension import Extension
from .joining import Join

__all__ = ["WAITS_FOR", "Kind", "Reconfigurations"]

Kind = Literal["join", "change", "extension", "cut"]

WAITS_FOR: Mapping[Kind, frozenset[Kind]] = {
    "join": frozenset({"join", "change", "extension"}),
    "change": frozenset({"join"}),
    "extension": frozenset({"extension"}),
    "cut": frozenset({"join", "change", "extension"}),
}
"""Kind of reconfiguration -> the kinds of which none may be in progress when it is agreed."""


@stateful(
    decides="join extension extensions cut cuts wants_cut giving joining _postponed", fixed="_placement _sync"
)
class Reconfigurations:
    """The reconfigurations of a run that are in progress, and those that wait.

    Args:
        placement: the servers of the shards.
        sync: runs the coordinator's part of the sync model, and carries out its changes.

    Attributes:
        join: the join that is in progress, of the first worker in `joining`; None if there is none.
        extension: the extension that is in progress; None if there is none.
        extensions: number of extensions that have been in force.
        cut: the cut that is in progress; None if there is none.
        cuts: number of the last cut that has begun.
        wants_cut: True if a cut is to be made, or is in progress.
        giving: what the workers give for the last cut that has begun; None if it is complete or was given up.
        joining: the workers that have been admitted and have not joined yet. They join in this order.
    """

    def __init__(self, placement: Placement, sync: JobSync) -> None:
        self.join: Join | None = None
        self.extension: Extension | None = None
        self.extensions = 0
        self.cut: Cut | None = None
        self.cuts = 0
        self.wants_cut = False
        self.giving: Giving | None = None
        self.joining: list[int] = []
        self._postponed: list[
            tuple[int, SyncRequested]
        ] = []  # requests for changes that wait: (worker, message)
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
        """True if a worker is to join, or a cut to be made."""
        return self.wants_cut or bool(self.joining)

    def may_begin(self, kind: Kind) -> bool:
        """Return True if a reconfiguration of this kind need not wait."""
        return WAITS_FOR[kind].isdisjoint(self.in_progress)

    # -- cuts ---------------------------------------------------------------------------------------------

    def begin_cut(self, members: Members, *, lockstep: bool) -> list[Request]:
        """Begin the cut that is to be made, unless it has to wait. Give it up if it would have to wait now."""
        if not self.may_begin("cut"):
            self.give_up_cut()
        elif self.wants_cut and self.cut is None:
            self.cuts += 1
            self.cut = Cut(self.cuts, self._placement, members.gone)
            self.giving = Giving(self.cuts)
            return self.cut.begin(lockstep=lockstep)
        return []

    def offered_cut(self, server: int, offer: CutOffered) -> list[Request]:
        """Handle a server's offer, unless the cut has been given up."""
        if self.cut is None:
            return []
        requests = self.cut.offered(server, offer)
        if self.cuts != self.cut.number:
            self.cuts = self.cut.number
            self.giving = Giving(self.cuts)
        return requests

    def give_up_cut(self) -> None:
        """Give up the cut that is in progress, unless all shards have been cut. It begins again."""
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
        """Handle a server's acknowledgment. After the last one, the join is in force: return what was agreed."""
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
        """Remove the oldest request for a change that has waited, and return it with its worker."""
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
        """Continue an extension without a worker that has left. Without any worker, it is given up."""
        if self.extension is None:
            return []
        requests = self.extension.left(worker)
        if self.extension.is_void:
            self.extension = None
        return requests

    def extended(self, server: int, message: ExtensionReady) -> tuple[list[Request], Extension | None]:
        """Handle a server's report. Return the requests and, after the last report, the extension in force."""
        extension = self.extension
        if extension is None:
            return [], None  # it has been given up
        requests = extension.ready(server, message)
        if extension.phase != "in force":
            return requests, None
        self.extension = None
        self.extensions += 1
        return requests, extension
