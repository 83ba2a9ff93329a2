"""A reader: pulls snapshots of the weights and never pushes. It disturbs no worker.

A reader calls the servers directly and blocks only itself. Each shard's part is never torn; parts of different
shards may be of different versions, which the snapshot names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from ..core.layout import ITEM_BYTES, Layout, ShardSlice
from ..core.messages import FetchSnapshot, FromServer, Hello, Message, Snapshot
from ..core.model_spec import ModelSpec
from ..errors import ProtocolError
from ..shard.buffers import packed_bytes, unpack
from ..shard.store import Vectors
from ..wire.addresses import connect
from ..wire.memory import cut
from ..wire.stream import Stream
from .server_memory import tensors_over

__all__ = ["Assembly", "Reader", "WeightsSnapshot", "named_weights"]

TIMEOUT_S = 60.0


class WeightsSnapshot(msgspec.Struct, frozen=True):
    """The model at one moment.

    Attributes:
        state_dict: name -> tensor, as the model's own; tied weights under each of their names.
        versions: for each shard, how many updates its part had seen; -1 where that is not known.
        absent: names of the tensors that are not there, whole, since a server could not be read.
    """

    state_dict: dict[str, torch.Tensor]
    versions: tuple[int, ...]
    absent: tuple[str, ...] = ()


class Assembly:
    """The model at one moment, put together from the snapshots of its shards as they come.

    Args:
        model: what is trained.
        shards: the slices, in order.

    Attributes:
        missing: shards whose part has not come.
    """

    def __init__(self, model: ModelSpec, shards: Sequence[ShardSlice]) -> None:
        self.missing = {shard.index for shard in shards}
        self._model = model
        self._shards = {shard.index: shard for shard in shards}
        self._versions = dict.fromkeys(self.missing, -1)
        self._vectors = {
            dtype: memoryview(bytearray(size * ITEM_BYTES[dtype]))
            for dtype, size in model.layout.sizes.items()
        }
        self._rest = [bytearray(packed_bytes(spec)) for spec in model.buffers]  # what comes with shard 0's
        self._lacks_rest = bool(self._rest)

    def targets(self, shard: int) -> list[memoryview]:
        """Where the payload of a shard's snapshot goes."""
        targets = list(cut(self._vectors, self._shards[shard]).values())
        return targets + [memoryview(part) for part in self._rest if shard == 0]

    def arrived(self, snapshot: Snapshot) -> None:
        """A shard's snapshot is in its place."""
        self._versions[snapshot.shard] = snapshot.version
        self.missing.discard(snapshot.shard)
        self._lacks_rest &= snapshot.shard != 0

    def fill(self, shard: int, weights: Mapping[str, memoryview]) -> None:
        """Take a shard's weights from elsewhere: dtype -> the bytes of its slice. The buffers are not among them."""
        for dtype, place in cut(self._vectors, self._shards[shard]).items():
            place[:] = weights[dtype]
        self.missing.discard(shard)

    def snapshot(self) -> WeightsSnapshot:
        """All that is there. A tensor of which a part is missing is left out, and named in `absent`."""
        state = named_weights(self._model.layout, tensors_over(self._vectors))
        absent = {
            name
            for shard in self.missing
            for segment in self._shards[shard].segments
            for name in self._model.layout.parameters[segment.parameter].names
        }
        for spec, part in zip(self._model.buffers, self._rest, strict=True):
            state[spec.name] = unpack(spec, part)
        if self._lacks_rest:
            absent.update(spec.name for spec in self._model.buffers)
        versions = tuple(self._versions[shard] for shard in sorted(self._versions))
        whole = {name: tensor for name, tensor in state.items() if name not in absent}
        return WeightsSnapshot(whole, versions, tuple(name for name in state if name in absent))


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
        self._assembly: Assembly | None = None  # of the snapshot under way
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
        assembly = self._assembly = Assembly(self._model, self._shards)
        for shard, stream in zip(self._shards, self._streams, strict=True):
            stream.send(FetchSnapshot(shard.index))
            answer = stream.wait(TIMEOUT_S)
            if not isinstance(answer, Snapshot):
                raise ProtocolError(f"a server answered a reader with {type(answer).__name__}")
            assembly.arrived(answer)
        self._assembly = None
        return assembly.snapshot()

    def close(self) -> None:
        """Close the connections."""
        for stream in self._streams:
            stream.close()

    def _payload_targets(self, message: Message, size_bytes: int) -> list[memoryview]:
        assembly = self._assembly
        if assembly is None or not isinstance(message, Snapshot) or message.shard not in assembly.missing:
            return []
        return assembly.targets(message.shard)


def named_weights(layout: Layout, vectors: Vectors) -> dict[str, torch.Tensor]:
    """Copies of the parameters under their names, out of flat vectors; tied ones under each of theirs."""
    return {
        name: vectors[p.dtype][offset : offset + p.size].view(p.shape).clone()
        for p, offset in zip(layout.parameters, layout.offsets, strict=True)
        for name in p.names
    }
