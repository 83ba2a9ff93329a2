"""All reading from the servers except pulls: readers of snapshots, the other requests of a worker (such as requests for
optimizer states), and the collection of the final weights.

A *reader* pulls snapshots of the weights. It connects directly to the servers and never blocks a worker. All weights
of one shard have the same version, but different shards may have different versions. A snapshot contains the version
of each shard.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import safetensors.torch
import torch

from ..checkpoints.reading import Checkpoint
from ..core.job_cut import JobCut, leader
from ..core.layout import BufferSpec, FrozenSpec, ModelSpec, Placement, ShardSlice, item_bytes
from ..core.messages import (
    MOST_STATES_BYTES,
    FetchBuffers,
    FetchFrozen,
    FetchInitialBuffers,
    FetchOptimizerState,
    FetchSnapshot,
    FetchStates,
    FrozenTensors,
    Hello,
    InitialBuffers,
    KeepStates,
    KeptStates,
    LoopPosition,
    Message,
    OptimizerState,
    PooledBuffers,
    Snapshot,
    first_phase,
)
from ..errors import DeadlineError, PeerLostError, ProtocolError
from ..shard.optimizers import OF_TORCH, require_plausible_state
from ..shard.store import Store, WeightsSnapshot, named_weights, require_complete
from ..shard.vectors import Vectors, checksum, packed_bytes, tensors_over, unpack
from ..train.session import Callbacks, Servers
from ..wire.memory import Region, cut
from ..wire.secure import Contexts
from ..wire.stream import Stream
from ..wire.transports import connect, seen_from
from .job import Assignment
from .worker_links import Links, exclusive

Received = TypeVar("Received", bound=Message)

FROZEN_SILENCE_S = 600.0
"""Permitted silence in seconds while a reader waits for a frozen parameter.

A worker may first have to send the parameter to the server.
"""


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
        # digest -> value of a frozen parameter: the values that the server of shard 0 has sent, and those that are
        # being received
        self._frozen: dict[str, bytearray] = {}
        self._incoming: dict[str, bytearray] = {}

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
        if shard == 0:
            self._incoming = {digest: bytearray(sizes[digest]) for digest in snapshot.digests}
            values = [self._incoming[digest] for digest in snapshot.digests]
            targets += [memoryview(each) for each in [*self._buffers, *values]]
        return targets

    def arrived(self, snapshot: Snapshot) -> None:
        """Record that the payload of a shard's snapshot has been received."""
        self._versions[snapshot.shard] = snapshot.version
        self.missing.discard(snapshot.shard)
        if snapshot.shard == 0:
            self._lacks_buffers = False
            self._frozen |= self._incoming

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
        with contextlib.ExitStack() as opened:
            for shard, address in shards:
                stream: Stream[Message] = Stream(
                    connect(address, known=known), first_phase("server", "reader")
                )
                opened.callback(stream.close)
                stream.send(Hello(token, "reader", shard.index))
                streams.append(stream)
            opened.pop_all()
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
            assembly.arrived(_expected(Snapshot, stream.wait()))
        self._assembly = None
        return assembly.snapshot()

    def read_optimizer_state(self) -> list[tuple[ShardSlice, Vectors]]:
        """Return each shard with its optimizer state, which maps "<segment>/<key>" to a tensor.

        Raises:
            PeerLostError: the connection to a server is lost.
            DeadlineError: a server does not answer in time.
            ProtocolError: a server sent a message that is not an optimizer state, or a state that is too large.
        """
        states = []
        for shard, stream in zip(self._shards, self._streams, strict=True):
            self._fetching = shard
            stream.send(FetchOptimizerState(shard.index))
            _expected(OptimizerState, stream.wait())
            states.append((shard, safetensors.torch.load(bytes(self._state))))
        self._fetching, self._state = None, bytearray()
        return states

    def read_frozen(self, specs: Sequence[FrozenSpec]) -> dict[str, torch.Tensor]:
        """Return the values of these frozen parameters, by name.

        Raises:
            ConfigurationError: a value is no longer available from any worker.
            PeerLostError: the connection to the server is lost.
            DeadlineError: the server does not answer in time.
            ProtocolError: the server sent an unexpected message.
        """
        if not specs:
            return {}
        self._values = {spec.digest: bytearray(packed_bytes(spec)) for spec in specs}
        stream = self._streams[0]
        stream.send(FetchFrozen(0, tuple(self._values)))
        answer = _expected(FrozenTensors, stream.wait(FROZEN_SILENCE_S))
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


def _expected(kind: type[Received], answer: Message) -> Received:
    """Return the answer of a server. Raise `ProtocolError` if the answer is a message of another kind."""
    if not isinstance(answer, kind):
        raise ProtocolError(f"a server sent {type(answer).__name__} to a reader, expected {kind.__name__}")
    return answer


def read_states(
    address: str, token: str, known: Contexts | None = None
) -> tuple[LoopPosition, bytearray] | None:
    """Return the latest states of a run's tracked objects, with their position in the loop; None if there are none.

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
        answer = _expected(KeptStates, stream.wait())
    finally:
        stream.close()
    return (answer.position, data) if answer.position is not None else None


# -- What a worker requests from the servers besides the weights: the optimizer's state, buffers, tracked objects
#
# A worker that joins a run in progress is not connected to the servers yet, so this worker reads the model as a reader.

log = logging.getLogger("paceline.worker")

# Number of attempts to read the job's model, and the time between two attempts.
MOST_READ_ATTEMPTS, READ_AGAIN_S = 60, 1.0

Found = TypeVar("Found")


class Fetches(Servers):
    """What one worker requests from the servers. See `paceline.train.session.Servers`.

    Args:
        place: the worker's place in the run.
        links: the worker's connections.
        callbacks: the functions of the front end that the session calls.

    Attributes:
        model: the model of the run; None until the worker takes part in the run.
        shards: the slices of the model's shards, in order.
    """

    def __init__(self, place: Assignment, links: Links, callbacks: Callbacks) -> None:
        self.links = links
        self.model: ModelSpec | None = None
        self.shards: Sequence[ShardSlice] = ()
        self._place = place
        self._callbacks = callbacks
        self._states: dict[int, bytearray] = {}  # shard -> bytes of the optimizer state that is being fetched
        self._fetching = -1  # the shard whose optimizer state is being received; -1 for none
        self._assembly: Assembly | None = None  # the weights that are being fetched
        # Memory for the buffers that are being fetched; None if no buffers are being fetched.
        self._buffers: list[bytearray] | None = None
        # Memory for the frozen parameters that are being fetched; None if no frozen parameters are being fetched.
        self._frozen: dict[str, bytearray] | None = None
        links.handlers |= {
            Snapshot: self._take_weights,
            OptimizerState: self._take_state,
            PooledBuffers: self._take_buffers,
            InitialBuffers: self._take_initial_buffers,
            FetchFrozen: self._send_frozen,
            FrozenTensors: self._take_frozen,
        }
        links.targets |= {
            Snapshot: self._targets_of_weights,
            OptimizerState: self._target_of_state,
            PooledBuffers: self._targets_of_buffers,
            InitialBuffers: self._targets_of_buffers,
            FrozenTensors: self._targets_of_frozen,
        }

    # -- as a reader --------------------------------------------------------------------------------------

    def fetch_model(self, digest: Callable[[FrozenSpec], str]) -> Mapping[str, torch.Tensor] | None:
        found = self._read(partial(_read_model, digest))
        if found is None and (checkpoint := self._checkpoint()) is not None:
            return evaluated_in(checkpoint)
        return found

    def _checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint with which this worker begins unless the job has gone on since.

        None if the run does not begin with a checkpoint, or if the index of this worker has been used in the run
        before.
        """
        resumed = self._place.job.resumed
        if resumed is None or self._place.incarnation:
            return None
        return Checkpoint(Path(resumed.path), checked=False)

    @exclusive
    def _read(self, read: Callable[[Reader], Found]) -> Found | None:
        """Read from the servers of a run in progress as a reader; return None if training has not begun yet.

        The servers serve a limited number of readers at a time, the model may be extended meanwhile, and the servers of
        a resumed run may still be reading the checkpoint. So a read that fails is repeated. Between two reads, this
        worker waits for messages of the coordinator. If the run is over, waiting raises an exception, which ends the
        repetitions.
        """
        links, core, job = self.links, self.links.core, self._place.job
        for attempt in range(MOST_READ_ATTEMPTS):
            links.carry_out(core.request_model())
            links.wait_while(lambda: core.described is None)
            described = core.described
            assert described is not None
            if described.model is None:
                return None
            addresses = [seen_from(address, self._place.coordinator) for address in described.addresses]
            shards = list(zip(described.shards, addresses, strict=True))
            try:
                reader = Reader.connect(described.model, shards, job.token, job.contexts)
                with contextlib.closing(reader):
                    return read(reader)
            except (PeerLostError, DeadlineError, ProtocolError) as error:
                if attempt == MOST_READ_ATTEMPTS - 1:
                    raise
                log.info("the model of the job cannot be read yet: %s", error)
            self._wait_s(READ_AGAIN_S)
        raise AssertionError

    def _wait_s(self, time_s: float) -> None:
        """Handle messages for this time."""
        job = self._place.job
        until_s = job.now_s() + time_s
        self.links.wait_while(lambda: job.now_s() < until_s)

    def fetch_states(self, address: str) -> tuple[LoopPosition, bytes | bytearray] | None:
        job = self._place.job
        if not address:
            return None
        try:
            return read_states(seen_from(address, self._place.coordinator), job.token, job.contexts)
        except DeadlineError as error:
            raise PeerLostError(f"the server with the states does not answer: {error}") from error

    # -- over the worker's own connections ----------------------------------------------------------------

    @exclusive
    def fetch_evaluated(self) -> dict[str, torch.Tensor]:
        assert self.model is not None
        assembly = self._assembly = Assembly(self.model, self.shards)
        # Fetch one shard at a time, because a server sends each peer only one bulk message at a time.
        for shard in self.shards:
            self.links.to_shard(shard.index, FetchSnapshot(shard.index))
            while shard.index in assembly.missing:
                self.links.hear(timeout_s=None)
        self._assembly = None
        return assembly.snapshot().state_dict

    def _targets_of_weights(self, message: Snapshot, size_bytes: int) -> list[memoryview]:
        assembly = self._assembly
        return [] if assembly is None or message.shard not in assembly.missing else assembly.targets(message)

    def _take_weights(self, message: Snapshot) -> None:
        if self._assembly is not None:
            self._assembly.arrived(message)

    @exclusive
    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        if self.links.core.started is None:
            found = self._read(Reader.read_optimizer_state)
            if found is None and (checkpoint := self._checkpoint()) is not None:
                model = msgspec.json.decode(checkpoint.job, type=JobCut).model
                (bounds,) = model.sliced(1, "auto")
                return [(bounds, checkpoint.optimizer_state(model, bounds))]
            return found or []
        # Fetch one state at a time, because a server sends each peer only one bulk message at a time.
        for shard in self.shards:
            self._fetching = shard.index
            self.links.to_shard(shard.index, FetchOptimizerState(shard.index))
            while self._fetching >= 0:
                self.links.hear(timeout_s=None)
        fetched = [(shard, safetensors.torch.load(bytes(self._states[shard.index]))) for shard in self.shards]
        self._states = {}
        return fetched

    def _target_of_state(self, message: OptimizerState, size_bytes: int) -> list[memoryview]:
        if message.shard != self._fetching:
            return []
        require_plausible_state(self.shards[message.shard], size_bytes)
        self._states[message.shard] = bytearray(size_bytes)
        return [memoryview(self._states[message.shard])]

    def _take_state(self, message: OptimizerState) -> None:
        self._fetching = -1

    @exclusive
    def fetch_buffers(self) -> dict[str, torch.Tensor]:
        assert self.model is not None
        return self._fetch_buffers(self.model.buffers, FetchBuffers(0))

    @exclusive
    def fetch_initial_buffers(
        self, specs: Sequence[BufferSpec], own: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        core = self.links.core
        if core.joined_late and core.extended is None:
            return self._fetch_buffers(specs, FetchBuffers(0))
        return self._fetch_buffers(specs, FetchInitialBuffers(0, checksum(own)))

    def _fetch_buffers(self, specs: Sequence[BufferSpec], request: Message) -> dict[str, torch.Tensor]:
        """Request these buffers. Return them, or {} if the server answers that this worker's buffers are equal."""
        received = self._buffers = [bytearray(packed_bytes(spec)) for spec in specs]
        self.links.to_shard(0, request)
        while self._buffers is not None:
            self.links.hear(timeout_s=None)
        return {spec.name: unpack(spec, data) for spec, data in zip(specs, received, strict=False)}

    def _targets_of_buffers(
        self, message: PooledBuffers | InitialBuffers, size_bytes: int
    ) -> list[memoryview]:
        if self._buffers is None or (type(message) is InitialBuffers and message.equal):
            return []
        return [memoryview(buffer) for buffer in self._buffers]

    def _take_buffers(self, message: PooledBuffers) -> None:
        self._buffers = None

    def _take_initial_buffers(self, message: InitialBuffers) -> None:
        if self._buffers is not None and message.equal:
            self._buffers.clear()
        self._buffers = None

    @exclusive
    def fetch_frozen(self, specs: Sequence[FrozenSpec]) -> dict[str, torch.Tensor]:
        core = self.links.core
        assert core.started is not None
        assert self.model is not None
        digests = core.started.digests if core.extended is None else core.extended.digests
        of_run = dict(zip((spec.name for spec in self.model.frozen), digests, strict=True))
        differing = {spec: of_run[spec.name] for spec in specs if of_run[spec.name] != spec.digest}
        if not differing:
            return {}
        received = {digest: bytearray(packed_bytes(spec)) for spec, digest in differing.items()}
        self._frozen = received
        self.links.to_shard(0, FetchFrozen(0, tuple(received)))
        self.links.wait_while(lambda: self._frozen is not None)
        require_complete({digest: spec.name for spec, digest in differing.items()}, received)
        return {spec.name: unpack(spec, received[digest]) for spec, digest in differing.items()}

    def _targets_of_frozen(self, message: FrozenTensors, size_bytes: int) -> list[memoryview]:
        if self._frozen is None or not self._frozen.keys() >= set(message.digests):
            return []
        return [memoryview(self._frozen[digest]) for digest in message.digests]

    def _take_frozen(self, message: FrozenTensors) -> None:
        if self._frozen is not None:
            for digest in self._frozen.keys() - set(message.digests):
                del self._frozen[digest]
        self._frozen = None

    def _send_frozen(self, message: FetchFrozen) -> None:
        """Send values of frozen parameters to the server of shard 0. Values that this worker lacks are left out."""
        values_of = self._callbacks.frozen
        found = {digest: parts for digest in message.digests if (parts := values_of(digest)) is not None}
        payload = [part for parts in found.values() for part in parts]
        self.links.to_shard(0, FrozenTensors(0, tuple(found)), payload, lent=FrozenTensors)

    @exclusive
    def keep_states(self, position: LoopPosition, states: Sequence[memoryview]) -> None:
        self.links.to_shard(0, KeepStates(0, position), states, lent=KeepStates)
        stream = self.links.servers[0]
        # The memory of the states may change after this method has returned, so wait until they have been sent.
        self.links.wait_while(lambda: stream.backlog)

    @exclusive
    def keep_worker_state(self, state: Sequence[memoryview]) -> None:
        links = self.links
        links.post(links.coordinator, links.core.give_state(), state)
        # The memory of the state may change after this method has returned, so wait until it has been sent.
        links.wait_while(lambda: links.coordinator.backlog)

    def fetch_worker_states(self) -> tuple[bytes | None, bytes | None]:
        if (checkpoint := self._checkpoint()) is None:
            return None, None
        files = checkpoint.workers
        own = files.get(self._place.index)
        first = leader(msgspec.json.decode(checkpoint.job, type=JobCut).main, files)
        return (
            None if own is None else own.read_bytes(),
            None if first is None else files[first].read_bytes(),
        )


def evaluated_in(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the buffers in a checkpoint, and the weights with which its model is evaluated."""
    model = msgspec.json.decode(checkpoint.job, type=JobCut).model
    if all(each.name in OF_TORCH for each in model.optimizers):
        return checkpoint.state_dict
    (bounds,) = model.sliced(1, "auto")
    store = Store(bounds, checkpoint.weights(model.layout, bounds), model.optimizers_over_layout)
    store.load_optimizer_state(checkpoint.optimizer_state(model, bounds))
    return checkpoint.state_dict | named_weights(model.layout, store.evaluated())


def _read_model(digest: Callable[[FrozenSpec], str], reader: Reader) -> dict[str, torch.Tensor]:
    """Read the run's weights and buffers, and its frozen parameters whose values differ from those of this worker."""
    snapshot = reader.read()
    differing = [spec for spec in snapshot.frozen if digest(spec) not in ("", spec.digest)]
    return snapshot.state_dict | reader.read_frozen(differing)


# -- Collects the final weights from the servers when training ends or fails ---------------------------------
#
# Normally every server sends its shards over its connection to the coordinator. If a server is lost or hangs,
# its shards are read from shared memory, provided that the transport uses shared memory. With other
# transports, the tensors in these shards are reported as missing.


class Collection:
    """One attempt to collect the final weights from the servers.

    The coordinator's thread adds shards as they arrive. Another thread waits until `finished` is set.

    Args:
        model: the model that is trained.
        shards: the slice of the parameters that each shard holds.
        placement: the servers of the shards.
        master: the shared memory that contains the weights; None if the transport does not use shared memory.

    Attributes:
        finished: event that is set when no further shards will arrive.
    """

    def __init__(
        self,
        model: ModelSpec,
        shards: Sequence[ShardSlice],
        placement: Placement,
        master: Region | None,
    ) -> None:
        self.finished = threading.Event()
        self._assembly = Assembly(model, shards)
        self._shards = shards
        self._placement = placement
        self._master = master
        self._owed = {shard.index for shard in shards}

    def owed_by(self, server: int) -> list[int]:
        """Return the indices of a server's shards that have not arrived yet."""
        return [shard for shard in self._placement.shards_of(server) if shard in self._owed]

    def targets(self, message: Snapshot, server: int) -> list[memoryview]:
        """Return the memory into which a shard's payload is received.

        Raises:
            ProtocolError: the shard is not expected from this server.
        """
        if message.shard not in self.owed_by(server):
            raise ProtocolError(f"shard {message.shard} is not expected from server {server}")
        return self._assembly.targets(message)

    def arrived(self, message: Snapshot) -> None:
        """Record that a shard has arrived."""
        self._assembly.arrived(message)
        self.give_up([message.shard])

    def give_up(self, shards: Sequence[int]) -> None:
        """Stop waiting for the given shards."""
        self._owed.difference_update(shards)
        if not self._owed:
            self.finished.set()

    def result(self) -> WeightsSnapshot:
        """Return the weights that were collected. Missing shards are read from shared memory if possible."""
        if self._master is not None:
            for shard in sorted(self._assembly.missing):
                self._assembly.fill(shard, cut(self._master.weights, self._shards[shard]))
            # Drop the reference, because the mapping keeps a file descriptor open.
            self._master = None
        return self._assembly.snapshot()

    @property
    def missing(self) -> list[int]:
        """Indices of the shards whose weights were neither received from a server nor read from shared memory."""
        return sorted(self._assembly.missing)
