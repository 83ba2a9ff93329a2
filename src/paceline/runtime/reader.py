"""The reader, a client that pulls snapshots of the weights and never pushes.

A reader connects directly to the servers and never blocks a worker. All weights of one shard have the same version,
but different shards may have different versions. A snapshot contains the version of each shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import safetensors.torch
import torch

from ..core.protocol.layout import ShardSlice, item_bytes
from ..core.protocol.messages import (
    MOST_STATES_BYTES,
    FetchFrozen,
    FetchOptimizerState,
    FetchSnapshot,
    FetchStates,
    FrozenTensors,
    Hello,
    KeptStates,
    LoopPosition,
    Message,
    OptimizerState,
    Snapshot,
    first_phase,
)
from ..core.protocol.model_spec import FrozenSpec, ModelSpec
from ..errors import ProtocolError
from ..shard.buffer_bytes import packed_bytes, unpack
from ..shard.frozen_files import require_complete
from ..shard.optimizer_state import require_plausible_state
from ..shard.snapshot import WeightsSnapshot, named_weights
from ..shard.vectors import Vectors, tensors_over
from ..wire.addresses import connect
from ..wire.memory import cut
from ..wire.stream import Stream
from ..wire.tls import Contexts

__all__ = ["Assembly", "Reader", "read_states"]

FROZEN_SILENCE_S = 600.0
"""Time within which a server sends a frozen parameter: a worker sends it to the server only between computations."""


class Assembly:
    """Assembles a snapshot of the model from snapshots of its shards, which may arrive in any order.

    Args:
        model: the model that is trained.
        shards: the slice of the parameters that each shard holds, in order of shard index.

    Attributes:
        missing: indices of the shards that have neither arrived nor been copied by `fill`.
    """

    def __init__(self, model: ModelSpec, shards: Sequence[ShardSlice]) -> None:
        self.missing = {shard.index for shard in shards}
        self._model = model
        self._shards = {shard.index: shard for shard in shards}
        self._versions = dict.fromkeys(self.missing, -1)
        self._vectors = {
            dtype: memoryview(bytearray(size * item_bytes(dtype)))
            for dtype, size in model.layout.sizes.items()
        }
        # The model's buffers, which are sent with the snapshot of shard 0.
        self._buffers = [bytearray(packed_bytes(spec)) for spec in model.buffers]
        self._lacks_buffers = bool(self._buffers)
        self._frozen: dict[str, bytearray] = {}  # digest -> value, for the values that the server has

    def targets(self, snapshot: Snapshot) -> list[memoryview]:
        """Return the memory into which the payload of a shard's snapshot is received.

        Raises:
            ProtocolError: the snapshot contains values of unknown frozen parameters.
        """
        shard = snapshot.shard
        targets = list(cut(self._vectors, self._shards[shard]).values())
        sizes = {spec.digest: packed_bytes(spec) for spec in self._model.frozen} if shard == 0 else {}
        if not sizes.keys() >= set(snapshot.digests):
            raise ProtocolError(f"the snapshot of shard {shard} contains unknown frozen parameters")
        self._frozen |= {digest: bytearray(sizes[digest]) for digest in snapshot.digests}
        others = [*self._buffers, *(self._frozen[each] for each in snapshot.digests)] if shard == 0 else []
        return targets + [memoryview(each) for each in others]

    def arrived(self, snapshot: Snapshot) -> None:
        """Record that the payload of a shard's snapshot has been received."""
        self._versions[snapshot.shard] = snapshot.version
        self.missing.discard(snapshot.shard)
        self._lacks_buffers &= snapshot.shard != 0

    def fill(self, shard: int, weights: Mapping[str, memoryview]) -> None:
        """Copy a shard's weights from `weights`, a mapping from dtype to the bytes of the shard's slice.

        The model's buffers are not copied.
        """
        for dtype, target in cut(self._vectors, self._shards[shard]).items():
            target[:] = weights[dtype]
        self.missing.discard(shard)

    def snapshot(self) -> WeightsSnapshot:
        """Return the snapshot. Incomplete tensors are omitted, and their names are listed in `absent`."""
        state = named_weights(self._model.layout, tensors_over(self._vectors))
        absent = {
            name
            for shard in self.missing
            for segment in self._shards[shard].segments
            for name in self._model.layout.parameters[segment.parameter].names
        }
        for spec, buffer in zip(self._model.buffers, self._buffers, strict=True):
            state[spec.name] = unpack(spec, buffer)
        if self._lacks_buffers:
            absent.update(spec.name for spec in self._model.buffers)
        for each in self._model.frozen:
            if each.digest in self._frozen:
                state[each.name] = unpack(each, self._frozen[each.digest])
        frozen = tuple(each for each in self._model.frozen if each.digest not in self._frozen)
        versions = tuple(self._versions[shard] for shard in sorted(self._versions))
        complete = {name: tensor for name, tensor in state.items() if name not in absent}
        return WeightsSnapshot(complete, versions, tuple(name for name in state if name in absent), frozen)


class Reader:
    """A client that reads snapshots of the weights from the servers of a run.

    Args:
        model: the model that is trained.
        shards: the slice of the parameters that each shard holds, in order of shard index.
        streams: for each shard, a connection to its server on which the greeting has been sent. The reader takes
            ownership of the connections.
    """

    def __init__(
        self, model: ModelSpec, shards: Sequence[ShardSlice], streams: Sequence[Stream[Message]]
    ) -> None:
        self._model = model
        self._shards = shards
        self._streams = streams
        self._assembly: Assembly | None = None  # the snapshot that is being read
        self._fetching: ShardSlice | None = None  # the shard whose optimizer state is being read
        self._state = bytearray()  # the optimizer state that was received last
        self._values: dict[str, bytearray] = {}  # digest -> memory for the value of a frozen parameter
        for stream in streams:
            stream.sink = self._payload_targets

    @classmethod
    def connect(
        cls,
        model: ModelSpec,
        shards: Sequence[tuple[ShardSlice, str]],
        token: str,
        known: Contexts | None = None,
    ) -> Reader:
        """Connect to the servers of `shards`, given as (slice, address of the server), and return a reader.

        If the addresses use TLS, `known` contains the contexts of the run.

        Raises:
            PeerLostError: a server cannot be reached.
        """
        streams: list[Stream[Message]] = []
        for shard, address in shards:
            stream: Stream[Message] = Stream(connect(address, known=known), first_phase("server", "reader"))
            stream.send(Hello(token, "reader", shard.index))
            streams.append(stream)
        return cls(model, [shard for shard, _ in shards], streams)

    def read(self) -> WeightsSnapshot:
        """Return a snapshot of the weights and buffers of the model.

        Raises:
            PeerLostError: the connection to a server is lost.
            DeadlineError: the connection to a server has carried nothing for a long time.
            ProtocolError: a server sent a message that is not a snapshot.
        """
        assembly = self._assembly = Assembly(self._model, self._shards)
        for shard, stream in zip(self._shards, self._streams, strict=True):
            stream.send(FetchSnapshot(shard.index))
            answer = stream.wait()
            if not isinstance(answer, Snapshot):
                raise ProtocolError(f"a server sent {type(answer).__name__} to a reader, expected Snapshot")
            assembly.arrived(answer)
        self._assembly = None
        return assembly.snapshot()

    def read_optimizer_state(self) -> list[tuple[ShardSlice, Vectors]]:
        """Return each shard with its optimizer state, which maps "<segment>/<key>" to a tensor.

        Raises:
            PeerLostError: the connection to a server is lost.
            DeadlineError: a server does not answer in time.
            ProtocolError: a server sent a message that is not an optimizer state, or one that is too large.
        """
        states = []
        for shard, stream in zip(self._shards, self._streams, strict=True):
            self._fetching = shard
            stream.send(FetchOptimizerState(shard.index))
            answer = stream.wait()
            if not isinstance(answer, OptimizerState):
                raise ProtocolError(
                    f"a server sent {type(answer).__name__} to a reader, expected OptimizerState"
                )
            states.append((shard, safetensors.torch.load(bytes(self._state))))
        self._fetching, self._state = None, bytearray()
        return states

    def read_frozen(self, specs: Sequence[FrozenSpec]) -> dict[str, torch.Tensor]:
        """Return the values of these frozen parameters, by name.

        Raises:
            ConfigurationError: no worker has one of these values any more.
            PeerLostError: the connection to the server is lost.
            DeadlineError: the server does not answer in time.
            ProtocolError: the server sent another message.
        """
        if not specs:
            return {}
        self._values = {spec.digest: bytearray(packed_bytes(spec)) for spec in specs}
        stream = self._streams[0]
        stream.send(FetchFrozen(0, tuple(self._values)))
        answer = stream.wait(FROZEN_SILENCE_S)
        if not isinstance(answer, FrozenTensors):
            raise ProtocolError(f"a server sent {type(answer).__name__} to a reader, expected FrozenTensors")
        require_complete({spec.digest: spec.name for spec in specs}, answer.digests)
        return {spec.name: unpack(spec, self._values[spec.digest]) for spec in specs}

    def close(self) -> None:
        """Close the connections."""
        for stream in self._streams:
            stream.close()

    def _payload_targets(self, message: Message, size_bytes: int) -> list[memoryview]:
        assembly, shard = self._assembly, self._fetching
        if isinstance(message, OptimizerState) and shard is not None and message.shard == shard.index:
            require_plausible_state(shard, size_bytes)
            self._state = bytearray(size_bytes)
            return [memoryview(self._state)]
        if isinstance(message, FrozenTensors) and self._values.keys() >= set(message.digests):
            return [memoryview(self._values[digest]) for digest in message.digests]
        if assembly is None or not isinstance(message, Snapshot) or message.shard not in assembly.missing:
            return []
        return assembly.targets(message)


def read_states(
    address: str, token: str, known: Contexts | None = None
) -> tuple[LoopPosition, bytearray] | None:
    """Return the states of tracked objects that a run has kept last, with their position; None if there are none.

    Args:
        address: the address of the server of shard 0.
        token: the run's token.
        known: the TLS contexts of the run, if the address uses TLS.

    Raises:
        PeerLostError: the server cannot be reached, or the connection is lost.
        DeadlineError: the connection has carried nothing for a long time.
        ProtocolError: the server's answer is not valid.
    """
    data = bytearray()

    def target(message: Message, size_bytes: int) -> list[memoryview]:
        nonlocal data
        if not isinstance(message, KeptStates) or size_bytes > MOST_STATES_BYTES:
            return []
        data = bytearray(size_bytes)
        return [memoryview(data)]

    stream: Stream[Message] = Stream(connect(address, known=known), first_phase("server", "reader"), target)
    try:
        stream.send(Hello(token, "reader", 0))
        stream.send(FetchStates(0))
        answer = stream.wait()
    finally:
        stream.close()
    if not isinstance(answer, KeptStates):
        raise ProtocolError(f"a server sent {type(answer).__name__} to a reader, expected KeptStates")
    return (answer.position, data) if answer.position is not None else None
