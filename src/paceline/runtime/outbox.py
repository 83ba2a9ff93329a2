"""What a worker sends of its gradient over streams, piece by piece, as soon as backward has produced it.

FluentPS overlaps communication with computation (section III): while the first layers' gradients are still being
computed, the last layers' are on their way. They wait at the servers until the iteration is committed, so until then
a script may still clip, scale, accumulate or drop what it has computed: whatever has been sent early is compared with
what is there at the commit, by a checksum of its bits, and sent again if it differs. A script that changes its
gradients in every iteration gains nothing from sending them early; it is then left alone for a while.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..core.layout import ShardSlice
from ..core.messages import Message, Stage
from ..wire.memory import PIECE_BYTES, cut, cut_pieces

__all__ = ["Outbox"]

LONGEST_PAUSE = 256  # iterations

Send = Callable[[int, Message, Sequence[memoryview]], None]
"""(shard, message, payload)"""


class Outbox:
    """The gradient of one worker, on its way.

    Args:
        shards: the slices.
        gradients: dtype -> the whole vector's bytes.
        send: sends to a shard's server, and copies what has not left when it returns: the piece may change.
        busy: says whether a shard's link has more to carry already. Then its pieces wait here: a commit can overtake
            them here, and not on the link, and a shard answers when everybody's commit is there.
        early: send before the commit at all.
    """

    def __init__(
        self,
        shards: Sequence[ShardSlice],
        gradients: Mapping[str, memoryview],
        send: Send,
        busy: Callable[[int], bool] = lambda shard: False,
        *,
        early: bool,
    ) -> None:
        self._send = send
        self._busy = busy
        self._early = early
        self._gradients = {shard.index: cut(gradients, shard) for shard in shards}
        self._pieces = {shard.index: shard.pieces(PIECE_BYTES) for shard in shards}
        self._needs: dict[tuple[int, int], int] = {}  # how many parameters lie in it
        self._of_parameter: dict[int, list[tuple[int, int]]] = {}
        for shard, pieces in reversed(self._pieces.items()):  # as they are committed
            for number, piece in enumerate(pieces):
                key = shard, number
                self._needs[key] = len(piece.parameters)
                for parameter in piece.parameters:
                    self._of_parameter.setdefault(parameter, []).append(key)
        self._lacks: dict[tuple[int, int], int] = {}  # of the needs, those that are yet to be met
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}  # what has been sent early, with its checksum
        self._due: list[tuple[int, int]] = []  # what could be sent early, and waits
        self._changed = False  # has any of it been changed afterwards
        self._pause = 0  # iterations for which nothing is sent early
        self._next_pause = 1
        self.begin()

    @property
    def early(self) -> bool:
        """True if pieces of the iteration at hand are sent as they come."""
        return self._early and not self._pause

    def begin(self) -> None:
        """An iteration starts, or starts anew."""
        self._lacks = dict(self._needs) if self._early else {}
        self._sent.clear()
        self._due.clear()

    def ready(self, parameter: int) -> None:
        """The gradient of a parameter lies in its place, at least for now."""
        for key in self._of_parameter.get(parameter, ()) if self.early else ():
            self._lacks[key] -= 1
            if self._lacks[key] == 0:
                self._due.append(key)
        waiting = []
        for shard, number in self._due:
            if self._busy(shard):
                waiting.append((shard, number))
                continue
            [piece] = self._bytes(shard, [number])
            self._sent[shard, number] = _checksum(piece)
            self._send(shard, Stage(shard, (number,)), [piece])
        self._due = waiting

    def rest(self, shard: int) -> tuple[tuple[int, ...], list[memoryview]]:
        """What a commit must bring of a shard's slice: its pieces and their bytes."""
        pieces = []
        for number in range(len(self._pieces[shard])):
            sent = self._sent.get((shard, number))
            if sent is not None and sent == _checksum(*self._bytes(shard, [number])):
                continue
            self._changed |= sent is not None
            pieces.append(number)
        return tuple(pieces), self._bytes(shard, pieces)

    def committed(self) -> None:
        """The iteration is done with."""
        if self._changed:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        else:
            self._next_pause = 1 if self.early else self._next_pause
            self._pause = max(0, self._pause - 1)
        self._changed = False
        self.begin()

    def _bytes(self, shard: int, numbers: Sequence[int]) -> list[memoryview]:
        pieces = self._pieces[shard]
        return cut_pieces(self._gradients[shard], [pieces[number] for number in numbers])


def _checksum(piece: memoryview) -> tuple[int, int]:
    """Two sums of its bits, of which each finds what the other may miss; 5 GB/s. (A piece is of 64-byte blocks.)"""
    return zlib.crc32(piece), int(np.add.reduce(np.frombuffer(piece, dtype=np.uint64)))
