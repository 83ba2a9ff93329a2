"""Sends a worker's gradient over streams in pieces, some of them while the backward pass is still running.

FluentPS overlaps communication with computation (section III): while the gradients of the first layers are still
being computed, the gradients of the last layers are already being sent. Until the iteration is committed, the servers
do not use pieces that were sent early. So a script may clip, scale, accumulate or drop its gradients until the
commit. At the commit, each piece that was sent early is sent again if the checksum of its bits has changed. If a
script changes its gradients after the backward pass, early sending saves no time and is suspended for a while.

Gradients may be rounded on their way (see `core.protocol.wire_format`). A piece is rounded when it is sent, so
checksums are those of the bits before.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ..core.protocol.layout import ShardSlice, of_set, ranges_of
from ..core.protocol.messages import Message, Stage
from ..core.sync.early_pause import EarlyPause
from ..shard.rounding import Rounded
from ..wire.memory import PIECE_BYTES, cut, cut_pieces

__all__ = ["Outbox"]

Send = Callable[[int, Message, Sequence[memoryview]], None]
"""A function of (shard, message, payload) that sends the message to the server that holds the shard."""


class Outbox:
    """Sends the gradients of one worker, and records which pieces have already been sent.

    Args:
        shards: the slice of the parameters that each shard holds.
        gradients: mapping from dtype to the bytes of the whole vector of gradients.
        send: function that sends a message to the server of a shard. Any payload that is still queued when the
            function returns must be copied, because the gradient may change.
        rounded: for each shard, its slice of the gradients and memory for rounded values, if gradients are rounded on
            their way; else None.
        busy: function that returns True if data for a shard is still queued on the connection. Further pieces then
            wait in this object, so that they do not delay the commit, for which other workers may be waiting.
        early: True to send pieces before the commit.
    """

    def __init__(
        self,
        shards: Sequence[ShardSlice],
        gradients: Mapping[str, memoryview],
        send: Send,
        busy: Callable[[int], bool] = lambda shard: False,
        *,
        early: bool,
        rounded: Mapping[int, Rounded] | None = None,
    ) -> None:
        self._send = send
        self._busy = busy
        self._early = early
        self._rounded = rounded
        self._gradients = {shard.index: cut(gradients, shard) for shard in shards}
        self._pieces = {shard.index: shard.pieces(PIECE_BYTES) for shard in shards}
        # A piece is identified by (shard, number of the piece in the shard).
        # The number of parameters in each piece.
        self._parameter_counts: dict[tuple[int, int], int] = {}
        # For each parameter, the pieces that contain a part of it.
        self._pieces_of: dict[int, list[tuple[int, int]]] = {}
        # Go through the shards in the order in which they are committed, from the highest index to the lowest.
        for shard, pieces in reversed(self._pieces.items()):
            for number, piece in enumerate(pieces):
                key = shard, number
                self._parameter_counts[key] = len(piece.parameters)
                for parameter in piece.parameters:
                    self._pieces_of.setdefault(parameter, []).append(key)
        # For each piece, the number of parameters whose gradients are not ready yet.
        self._missing_counts: dict[tuple[int, int], int] = {}
        # The checksums of the pieces that have been sent early.
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}
        # The complete pieces that are still waiting to be sent early.
        self._due: list[tuple[int, int]] = []
        # True if a piece of this iteration was changed after it had been sent.
        self._changed = False
        self._pause = EarlyPause()
        self.begin()

    def leave_out(self, shards: Collection[int]) -> None:
        """Send nothing more to these shards, which read the gradients from memory. Call it before the first piece."""
        for shard in shards:
            del self._gradients[shard], self._pieces[shard]
        self._parameter_counts = {
            key: count for key, count in self._parameter_counts.items() if key[0] not in shards
        }
        self._pieces_of = {
            parameter: [key for key in keys if key[0] not in shards]
            for parameter, keys in self._pieces_of.items()
        }
        self.begin()

    @property
    def early(self) -> bool:
        """True if pieces are sent early in the current iteration."""
        return self._early and not self._pause.is_on

    def begin(self) -> None:
        """Prepare for a new iteration, or for the restart of the current one."""
        self._missing_counts = dict(self._parameter_counts) if self._early else {}
        self._sent.clear()
        self._due.clear()

    def ready(self, parameter: int) -> None:
        """Record that the gradient of a parameter has been computed, and send the pieces that are complete.

        The gradient may still change before the commit.
        """
        for key in self._pieces_of.get(parameter, ()) if self.early else ():
            self._missing_counts[key] -= 1
            if self._missing_counts[key] == 0:
                self._due.append(key)
        waiting = []
        for shard, number in self._due:
            if self._busy(shard):
                waiting.append((shard, number))
                continue
            self._sent[shard, number] = _checksum(*self._bytes(shard, [number]))
            self._send(shard, Stage(shard, (number,)), self._payload(shard, [number]))
        self._due = waiting

    def rest(
        self, shard: int, set_index: int | None = None, *, exact: bool = False
    ) -> tuple[tuple[int, ...], list[memoryview]]:
        """Return the numbers and the bytes of those pieces of a shard that must be sent with the commit.

        If `set_index` is not None, only the pieces of this parameter set are sent. If `exact` is True, they are not
        rounded; no piece may then have been sent early.
        """
        if shard not in self._pieces:
            return (), []
        pieces = []
        vectors = of_set(self._gradients[shard], set_index)
        for number, piece in enumerate(self._pieces[shard]):
            if piece.dtype not in vectors:
                continue
            sent = self._sent.get((shard, number))
            if sent is not None and sent == _checksum(*self._bytes(shard, [number])):
                continue
            self._changed |= sent is not None
            pieces.append(number)
        return tuple(pieces), self._bytes(shard, pieces) if exact else self._payload(shard, pieces)

    def committed(self) -> None:
        """Record that the iteration was committed, and prepare for the next one."""
        self._pause.ended(changed=self._changed)
        self._changed = False
        self.begin()

    def _payload(self, shard: int, numbers: Sequence[int]) -> list[memoryview]:
        """Return the bytes of some pieces in the format in which they travel."""
        if self._rounded is None:
            return self._bytes(shard, numbers)
        pieces = self._pieces[shard]
        return self._rounded[shard].round(ranges_of([pieces[number] for number in numbers]))

    def _bytes(self, shard: int, numbers: Sequence[int]) -> list[memoryview]:
        pieces = self._pieces[shard]
        return cut_pieces(self._gradients[shard], [pieces[number] for number in numbers])


def _checksum(piece: memoryview) -> tuple[int, int]:
    """Return two checksums of a piece. Each checksum detects changes that the other may miss.

    This function processes 5 GB/s. The size of a piece is always a multiple of 64 bytes, so the piece can be read as
    64-bit integers.
    """
    return zlib.crc32(piece), int(np.add.reduce(np.frombuffer(piece, dtype=np.uint64)))
