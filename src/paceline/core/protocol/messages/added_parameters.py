"""Messages with which parameters are added to the model of a run."""

from __future__ import annotations

from ..layout import ShardSlice
from ..model_spec import ModelSpec
from .protocol_table import Message, sent

__all__ = [
    "ExtendShards",
    "ExtensionReady",
    "InitialWeightsRequested",
    "ModelExtended",
]


@sent("coordinator", to="server", during="serving")
class ExtendShards(Message, frozen=True, tag=True):
    """A server must prepare to extend its shards: the script has added parameters. See `core.changes.extension`.

    With shared memory, the file descriptor of the memory for all weights of the extended model is attached to this
    message and to the `ModelExtended` messages to the workers. The message is repeated if the initializer is lost.

    Attributes:
        model: the extended model.
        shards: the slices that this server will hold.
        initializer: the worker that sends the initial weights of the new parameters.
        number: number of the extension. The extensions of a run are numbered from 1.
        resumed: number of the cut that contains the new parameters, because an earlier run had added them. The server
            then has their weights, and the initializer does not send any. 0 if they are new.
        lacking: True if the cut contains only some of them. The initializer then sends initial weights nevertheless,
            and those of the cut replace them.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    initializer: int
    number: int
    resumed: int = 0
    lacking: bool = False


@sent("server", to="worker")
class InitialWeightsRequested(Message, frozen=True, tag=True):
    """The initializer must send the initial weights of the new parameters to a shard."""

    shard: int


@sent("server", to="coordinator", during="serving")
class ExtensionReady(Message, frozen=True, tag=True):
    """A server has received the initial weights of the new parameters from the initializer, for all of its shards.

    Attributes:
        initializer: the worker that has sent the initial weights.
        number: number of the extension.
    """

    initializer: int
    number: int


@sent("coordinator", to="worker", during="training")
@sent("coordinator", to="server", during="serving")
class ModelExtended(Message, frozen=True, tag=True):
    """All servers are ready, so the extension takes effect, and the workers connect to the servers again.

    A server may receive the greeting of a worker before this message.

    Attributes:
        shards: the slices of all shards, in order.
        number: number of the extension.
        digests: the digests of the run's values of the frozen parameters, in the order of the extended model.
    """

    shards: tuple[ShardSlice, ...]
    number: int
    digests: tuple[str, ...] = ()
