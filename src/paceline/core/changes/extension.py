"""The extension of the model: a script adds parameters after training has begun, with an optimizer or as a group.

All live workers make a call with the extended model, and wait in it as in a barrier (see `core.sync.joint_calls`).
Then:

    Contributed     from each live worker to the coordinator, with the extended model
    ExtendShards    to each server, which allocates memory
    InitialWeightsRequested, InitialWeights
                    each server fetches the initial weights of the new parameters from the initializer
    ExtensionReady  from each server to the coordinator
    ModelExtended   to all; each worker connects to the servers again, with memory for the extended model, and
                    receives all weights, as it did at the start

Each extension has a number, which these messages and the workers' greetings contain. A worker whose greeting contains
the number of an extension has been told that all servers are ready for it. So a server may extend its shards when it
receives the first such greeting, even if it has not been told itself. A worker that is lost just after it has
connected may have left a greeting that is read much later, perhaps during the next extension. The server then serves
it with the extension in force, or refuses it.

The initializer is the worker with the lowest index. If it is lost before all servers are ready, the next worker takes
its place, and sends its weights to all servers. So the initial weights of all shards come from one worker. Until all
servers are ready, the shards keep their earlier parameters only. The digests of frozen parameters are the
initializer's, too. If all of these workers are lost, the extension is given up. The coordinator proposes the next
join only then, so a server that receives `JoinProposed` no longer waits for the initial weights of an extension. The
number is used again.

An extension is not an event of the sync model: no worker computes while it lasts, it is not an iteration, and it is
not an update.

The new parameters form a new *part* of the layout, with vectors of their own, which is sliced by itself. So earlier
parameters keep their indices, and slices keep their bounds. A server carries out the extension when it hears of it
from the coordinator, or when the first worker connects again, whichever is first. A larger store takes over the
weights, the optimizer state, and the pushes that are held back, which have no gradients for the new parameters. A
worker closes its former connections only after it has connected again, because a server considers a worker without a
connection as lost.

Of its earlier parameters, a worker keeps the weights that it has pulled: in `encoder(x)` and then `new_head(...)`,
the graph already holds those of the encoder. It takes the new ones only if it has made empty pushes while it waited,
and has called no module with trained parameters before.

In a run that resumes a cut, the scripts add parameters again that the earlier run had added. The servers then take
their values from the cut. A cut may also have been made before an extension, while some workers waited in it already
or were about to propose it. Nothing prevents this, because a worker may wait there for long. When the scripts go on,
they may have the new parameters from the beginning: of what the run begins with, the cut then *lacks* a part. The
initializer sends all initial weights as in a new run, and the servers replace those that the cut has. The other way
round, a run is not cut before its scripts have added again what the earlier run had trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ...state import stateful
from ..protocol.layout import ShardSlice
from ..protocol.messages import ExtendShards, ExtensionReady, ModelExtended
from ..protocol.model_spec import ModelSpec
from ..protocol.placement import Placement
from ..protocol.requests import Request, Send, server_peer, worker_peer

__all__ = ["Extension"]


@stateful(decides="slices phase _models _workers _placement _number _resumed _lacking _ready")
class Extension:
    """The coordinator's part of an extension that is in progress.

    Args:
        slices: the slices of the extended model.
        models: the extended model of each worker that waits for the extension.
        placement: the servers of the shards.
        number: number of the extension.
        resumed: number of the cut that contains the new parameters; 0 if they are new.
        lacking: True if this cut contains only some of them.

    Attributes:
        slices: the slices of the extended model.
        phase: "agreed" until all servers have received the initial weights from the same worker, then "in force". See
            `paceline.core.changes.reconfiguration`.
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
        """Handle a server's report. After the last report, the extension takes effect."""
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
        """Handle a lost worker. If it is the initializer, the next worker takes its place."""
        if worker not in self._workers:
            return []
        first = self._workers[0]
        self._workers.remove(worker)
        return self.begin() if worker == first and self._workers else []
