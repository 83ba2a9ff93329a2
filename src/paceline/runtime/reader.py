"""A reader: pulls snapshots of the weights and never pushes. It disturbs no worker.

A reader calls the servers directly and blocks only itself. Each shard's part is never torn; parts of different
shards may be of different versions, which the snapshot names.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ..buffers import packed_bytes, unpack
from ..errors import ProtocolError
from ..layout import ITEM_BYTES, Layout, ShardSlice
from ..shard import Vectors
from ..wire.addresses import connect
from ..wire.memory import cut
from ..wire.messages import FetchSnapshot, FromServer, Hello, Message, ModelSpec, Snapshot
from ..wire.stream import Stream
from .holdings import tensors_over

__all__ = ["Reader", "WeightsSnapshot", "named_weights"]

TIMEOUT_S = 60.0


class WeightsSnapshot(msgspec.Struct, frozen=True):
    """The model at one moment.

    Attributes:
        state_dict: name -> tensor, as the model's own; tied weights under each of their names.
        versions: for each shard, how many updates its part had seen.
    """

    state_dict: dict[str, torch.Tensor]
    versions: tuple[int, ...]


class Reader:
    """A reader of one run.

    Args:
        model: what is trained.
        shards: the slices, in order.
        streams: for each shard, a connection to its server, greeted; owned by the reader.
    """

    def __init__(
        self, model: ModelSpec, shards: Sequence[ShardSlice], streams: Sequence[Stream[FromServer]]
    ) -> None:
        self._model = model
        self._shards = shards
        self._streams = streams
        self._vectors: dict[str, memoryview] = {}  # where the weights of the snapshot under way go
        self._rest: list[bytearray] = []  # what comes with shard 0's
        for stream in streams:
            stream.sink = self._payload_targets

    @classmethod
    def connect(cls, model: ModelSpec, shards: Sequence[tuple[ShardSlice, str]], token: str) -> Reader:
        """A reader of the shards at these addresses. Raises `PeerLostError`."""
        streams: list[Stream[FromServer]] = []
        for shard, address in shards:
            stream: Stream[FromServer] = Stream(connect(address), FromServer)
            stream.send(Hello(token, "reader", shard.index))
            streams.append(stream)
        return cls(model, [shard for shard, _ in shards], streams)

    def read(self) -> WeightsSnapshot:
        """A snapshot of the weights and the other tensors of the model.

        Raises:
            PeerLostError: a server is gone.
            DeadlineError: a server does not answer.
        """
        self._vectors = {
            dtype: memoryview(bytearray(size * ITEM_BYTES[dtype]))
            for dtype, size in self._model.layout.sizes.items()
        }
        versions = []
        for shard, stream in zip(self._shards, self._streams, strict=True):
            stream.send(FetchSnapshot(shard.index))
            answer = stream.wait(TIMEOUT_S)
            if not isinstance(answer, Snapshot):
                raise ProtocolError(f"a server answered a reader with {type(answer).__name__}")
            versions.append(answer.version)
        state = named_weights(self._model.layout, tensors_over(self._vectors))
        self._vectors = {}
        for spec, part in zip(self._model.buffers, self._rest, strict=True):
            state[spec.name] = unpack(spec, part)
        return WeightsSnapshot(state, tuple(versions))

    def close(self) -> None:
        """Close the connections."""
        for stream in self._streams:
            stream.close()

    def _payload_targets(self, message: Message, size_bytes: int) -> list[memoryview]:
        if not isinstance(message, Snapshot):
            return []
        targets = list(cut(self._vectors, self._shards[message.shard]).values())
        if message.shard == 0:
            self._rest = [bytearray(packed_bytes(spec)) for spec in self._model.buffers]
            targets += map(memoryview, self._rest)
        return targets


def named_weights(layout: Layout, vectors: Vectors) -> dict[str, torch.Tensor]:
    """Copies of the parameters under their names, out of flat vectors; tied ones under each of theirs."""
    return {
        name: vectors[p.dtype][offset : offset + p.size].view(p.shape).clone()
        for p, offset in zip(layout.parameters, layout.offsets, strict=True)
        for name in p.names
    }
