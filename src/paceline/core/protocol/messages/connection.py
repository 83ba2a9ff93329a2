"""The messages that open a connection, and the bell."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ....sync.events import Number
from .protocol_table import Message, sent

__all__ = ["MOST_LABEL", "MOST_WORDS", "Bell", "Hello", "MemoryAttached", "MemoryPlace"]

MOST_LABEL = 200
"""Maximum length of the name of a device."""

MOST_WORDS = 65_536
"""Maximum length of the description of a barrier or a reduction."""


@sent("worker", to="server", during="training left", forwarded=False)
@sent("server", to="worker", forwarded=False)
@sent("server", to="coordinator", forwarded=False)
class Bell(Message, frozen=True, tag=True):
    """Wakes a peer that is sleeping while its ring buffer contains data, or shows that the sender is at work.

    The message has no other effect.
    """


class MemoryPlace(msgspec.Struct, frozen=True):
    """Where a process on the same machine finds the shared memory of a worker.

    Attributes:
        process: id of the worker's process.
        descriptor: file descriptor of the memory in this process.
        name: name of the memory. It contains 128 random bits, so no other memory has it, and only who was told it
            can name the memory. Names of any other form are refused: a member could guess them, and so let a server
            map the memory of another program.
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
class Hello(Message, frozen=True, tag=True):
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
        place: over TCP, where the server finds the shared memory of a worker if both run on the same machine; None if
            they do not.
        device: the device of a worker and its model, for the user; "" if none is assigned to it, so
            that it uses the CPU.
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
class MemoryAttached(Message, frozen=True, tag=True):
    """The server has found the worker's shared memory, and uses it instead of payloads for all pushes and pulls.

    The server sends this message before the first answer. If it has not found the memory, it sends nothing.

    Attributes:
        shards: the shards of the server.
    """

    shards: tuple[int, ...]
