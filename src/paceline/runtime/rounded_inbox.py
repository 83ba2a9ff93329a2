"""An inbox for gradients whose float32 values arrive as bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.protocol.layout import ShardSlice, ranges_of
from ..shard.rounding import Rounded
from ..shard.vectors import tensors_over
from ..wire.memory import StreamedInbox

__all__ = ["RoundedInbox"]


class RoundedInbox(StreamedInbox):
    """A `StreamedInbox` with memory for rounded values, which are widened as soon as a message is complete.

    Values that are not rounded, such as those of an edit, are received directly into `gradient`.
    """

    def __init__(self, shard: ShardSlice) -> None:
        super().__init__(shard)
        self._rounded = Rounded(tensors_over(self.gradient))

    def places(self, pieces: Sequence[int], *, rounded: bool = False) -> list[memoryview]:
        if rounded:
            return self._rounded.memory(ranges_of(self.numbered(pieces)))
        return super().places(pieces)

    def take(self, pieces: Sequence[int], *, rounded: bool = False) -> None:
        if rounded:
            self._rounded.widen(ranges_of(self.numbered(pieces)))
        super().take(pieces)
