"""The messages that open a connection, wake a peer, or report progress, failures and lost workers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...sync.events import Number, Ticks
from ..lease import PackedPushed
from .table import Message, sent

MOST_LABEL = 200
"""Maximum length of the name of a device."""

MOST_WORDS = 65_536
"""Maximum length of the description of a barrier or a reduction."""


@sent("worker", to="server", during="training left", forwarded=False)
@sent("server", to="worker", forwarded=False)
@sent("server", to="coordinator", forwarded=False)
class Bell(Message):
    """Wakes a peer that is sleeping while its ring buffer contains data, or shows that the sender is at work.

    The message has no other effect.
    """


class MemoryPlace(msgspec.Struct, frozen=True):
    """The place at which a process on the same machine finds the shared memory of a worker.

    Attributes:
        process: id of the worker's process.
        descriptor: file descriptor of the memory in this process.
        name: name of the memory. Its 128 random bits make it unique and a secret. Names of any other form are refused:
            a member of the run could guess such a name, and make a server map the memory of another program.
    """

    process: Number
    descriptor: Number
    name: Annotated[str, msgspec.Meta(pattern=r"\Apaceline-[0-9a-f]{32}\Z")]


@sent("worker", to="coordinator", during="greeting", then="joining", forwarded=False)
@sent("server", to="coordinator", during="greeting", then="starting", forwarded=False)
@sent("agent", to="coordinator", during="greeting", then="offering", forwarded=False)
@sent("observer", to="coordinator", during="greeting", then="observing", forwarded=False)
@sent("worker", to="server", during="greeting", then="training", forwarded=False)
@sent("reader", to="server", during="greeting", then="reading", forwarded=False)
class Hello(Message):
    """The first message of every connection. If the token is wrong, the receiver does not read any further messages.

    Attributes:
        token: the secret token of the run.
        role: role of the caller.
        index: index of the worker or server; 0 for other roles.
        address: address on which a server listens; "" for other roles.
        memory_bytes: size of the shared memory whose file descriptor is attached to this message; 0 if there is none.
        channels: number of ring-buffer pairs in the shared memory.
        channel: index of the ring-buffer pair for this connection; -1 if the connection uses no ring buffers.
        follows: True if the caller is a worker that can read the weights directly from the servers' memory.
        extension: number of the extension for which a worker has memory; 0 if the model has not been extended.
        incarnation: how often the index of the worker has been used before.
        place: where the server finds the shared memory of a worker that connects over TCP from the same machine; else
            None.
        device: the device that is assigned to a worker, and the model of this device, for the user; "" if the worker
            uses the CPU, because no device is assigned to it.
    """

    token: str
    role: Literal["worker", "server", "reader", "agent", "observer"]
    index: Number
    address: str = ""
    memory_bytes: Number = 0
    channels: Number = 0
    channel: int = -1
    follows: bool = False
    extension: Number = 0
    incarnation: Number = 0
    place: MemoryPlace | None = None
    device: Annotated[str, msgspec.Meta(max_length=MOST_LABEL)] = ""

    def __repr__(self) -> str:
        """Return a description without the token, which must not appear in a log."""
        return f"Hello(role={self.role!r}, index={self.index})"


@sent("server", to="worker", forwarded=False)
class MemoryAttached(Message):
    """The server has found the worker's shared memory, and uses it instead of payloads for all pushes and pulls.

    The server sends this message before the first answer. If the server has not found the memory, it sends no such
    message.

    Attributes:
        shards: the shards of the server.
    """

    shards: tuple[int, ...]


# -- Messages about the progress, the failures, the lost workers and the end of a run ------------------------

Activity = Literal["computing", "exchanging", "restarting", "paused", "outside", "loading", "between"]
"""The activities of a worker, as `core.metrics` defines them.

    computing     the script computes a gradient
    exchanging    the worker pushes, pulls or requests data, and waits for the answers
    restarting    the worker pulls, because it has aborted a computation
    paused        the run has too few workers
    outside       the script evaluates the model, or waits in a barrier, in a reduction, or for other workers that add
                  parameters
    loading       the script asks a distributed loader for a batch
    between       the script has made a step, and has not asked a distributed loader for a batch since then
"""


class TimeSpent(msgspec.Struct, frozen=True, array_like=True):
    """The times that a worker has spent on each activity since it joined.

    Attributes:
        computing: time of the computations that were pushed.
        wasted: time of computations that were aborted, and of the pulls after them.
        paused: time in which the run had too few workers.
        outside: time in which the script did not train.
        loading: time in which the script asked a distributed loader for a batch.
        unfinished: time of the computation that has been neither pushed nor aborted yet.
        activity: what the worker is doing now.
        queued: time in which the worker's main thread was ready to run, but had no CPU core; 0 if unknown. Reported
            only when the worker ends.
    """

    computing: Ticks = 0
    wasted: Ticks = 0
    paused: Ticks = 0
    outside: Ticks = 0
    loading: Ticks = 0
    unfinished: Ticks = 0
    activity: Activity = "exchanging"
    queued: Ticks = 0


@sent("worker", to="coordinator", during="training")
class Status(Message):
    """For the progress display: the state of a worker, and how the worker has spent its time.

    Attributes:
        iteration: label of the worker's latest iteration.
        loss: the last known loss; None if no loss is known.
        state: what the worker is doing.
        spent: what the worker has spent its time on; None if it is unknown.
        updates: number of updates that shard 0 had applied to the latest weights that the worker has received.
        samples: number of samples that all workers together had used when these weights were sent.
        epoch: number of the epoch of the worker's training loop, counted from 0. If the script has no such loop, number
            of the worker's pass over the loader that it trains on; None if there is no such loader.
        part: the part of this epoch whose data has been drawn, as far as the worker knows; None if it is unknown.
        guessed: True if the loss is a guess: the tensor on which the script has called `backward()`.
    """

    iteration: Number
    loss: float | None
    state: Literal["computing", "waiting", "pulling", "paused"]
    spent: TimeSpent | None = None
    updates: Number = 0
    samples: Number = 0
    epoch: Number | None = None
    part: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    guessed: bool = False


@sent("worker", to="coordinator", during="joining training left")
@sent("server", to="coordinator")
class Warned(Message):
    """A problem that does not end the run, such as a log that cannot be written."""

    words: str


@sent("worker", to="coordinator", then="left")
@sent("worker", to="server", then="left")
class WorkerFinished(Message):
    """A worker leaves the run, because it has finished its work or has been asked to leave.

    Attributes:
        drawn: `Commit.drawn` as of the worker's last push, except that batches that no push has used count as skipped
            (see `Pushed`).
        early: True if the worker has been asked to leave before it has finished its work.
        spent: what the worker has spent its time on; None if it is unknown.
        unreached: servers to which the worker could not send this message. Only the coordinator receives this list.
    """

    drawn: tuple[PackedPushed, ...] = ()
    early: bool = False
    spent: TimeSpent | None = None
    unreached: tuple[int, ...] = ()


@sent("coordinator", to="server")
class WorkerLost(Message):
    """A worker was lost. The server stops serving this incarnation of the worker, and answers with a `PushesReported`.

    The worker's connection may still be open if a child process of the worker has inherited it.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        at_once: True if the process of the worker may still run. The server then closes the worker's connection
            immediately, and does not use data that it has not read yet.
    """

    worker: int
    incarnation: int = 0
    at_once: bool = False


@sent("server", to="coordinator")
class PushesReported(Message):
    """A server has stopped serving a lost worker, and reports the pushes that it has received from the worker. See
    `core.members`.

    Attributes:
        worker: the lost worker.
        incarnation: how often the index of the worker had been used before.
        last: for each shard of the server, the label of the last push that the shard has received from the worker.
        held: for each of these shards, True if the shard holds a push of the worker until a `LossSettled` arrives.
        drawn: for each of these shards, `Commit.drawn` of the last push that the shard has received from the worker;
            () if the shard has received none.
    """

    worker: int
    incarnation: int
    last: tuple[int, ...]
    held: tuple[bool, ...]
    drawn: tuple[tuple[PackedPushed, ...], ...]


@sent("coordinator", to="server", during="serving")
class LossSettled(Message):
    """All servers have reported the pushes that they have received from a lost worker. See `core.members`.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        kept: label of the worker's last push that all shards have received. Later pushes that are held are dropped.
    """

    worker: int
    incarnation: int
    kept: int


@sent("worker", to="coordinator", during="joining training left")
@sent("server", to="coordinator")
class Failed(Message):
    """A worker's script or a server has raised an exception.

    Attributes:
        reason: one-line description of the error.
        traceback: traceback of the error.
        consequence: True if the error occurred only because another process had ended.
    """

    reason: str
    traceback: str
    consequence: bool = False


@sent("coordinator", to="server", forwarded=False)
class Shutdown(Message):
    """A server must write its traces and exit."""


@sent("server", to="coordinator", during="serving", forwarded=False)
class TracePart(Message):
    """The next part of a shard's trace, which is the payload. Servers on other machines send it after `Shutdown`.

    Attributes:
        shard: index of the shard.
        last: True for the last part.
    """

    shard: Number
    last: bool
