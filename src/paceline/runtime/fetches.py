"""What a worker requests from the servers besides the weights: the optimizer's state, buffers, tracked objects.

A worker that joins a run in progress also reads the model, as a reader: it is not connected to the servers yet.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import safetensors.torch
import torch

from ..checkpoints.reading import Checkpoint
from ..core.protocol.job_cut import JobCut
from ..core.protocol.layout import ShardSlice
from ..core.protocol.messages import (
    FetchBuffers,
    FetchFrozen,
    FetchInitialBuffers,
    FetchOptimizerState,
    FrozenTensors,
    InitialBuffers,
    KeepStates,
    LoopPosition,
    Message,
    OptimizerState,
    PooledBuffers,
)
from ..core.protocol.model_spec import BufferSpec, FrozenSpec, ModelSpec
from ..errors import DeadlineError, PeerLostError, ProtocolError
from ..frontend.session import Callbacks, Servers
from ..shard.buffer_bytes import checksum, packed_bytes, unpack
from ..shard.frozen_files import require_complete
from ..shard.optimizer_state import require_plausible_state
from ..shard.vectors import Vectors
from ..wire.addresses import seen_from
from .job import Assignment
from .reader import Reader, read_states
from .worker_links import Links, exclusive

__all__ = ["Fetches"]

log = logging.getLogger("paceline.worker")

MOST_READ_ATTEMPTS, READ_AGAIN_S = 60, 1.0  # how often and after which pause the job's model is read again

Found = TypeVar("Found")


class Fetches(Servers):
    """What one worker requests from the servers. See `paceline.frontend.session.Servers`.

    Args:
        place: the worker's place in the run.
        links: the worker's connections.
        callbacks: what the session calls in the front end.

    Attributes:
        model: the model of the run; None until the worker takes part in the run.
        shards: the slices of its shards, in order.
    """

    def __init__(self, place: Assignment, links: Links, callbacks: Callbacks) -> None:
        self.links = links
        self.model: ModelSpec | None = None
        self.shards: Sequence[ShardSlice] = ()
        self._place = place
        self._callbacks = callbacks
        self._states: dict[int, bytearray] = {}  # shard -> bytes of the optimizer state that is being fetched
        self._fetching = -1  # the shard whose optimizer state is being received; -1 for none
        # Memory for the buffers that are being fetched; None if they are not, or have arrived.
        self._buffers: list[bytearray] | None = None
        self._frozen: dict[str, bytearray] | None = None  # memory for frozen parameters, like `_buffers`
        links.handlers |= {
            OptimizerState: self._take_state,
            PooledBuffers: self._take_buffers,
            InitialBuffers: self._take_initial_buffers,
            FetchFrozen: self._send_frozen,
            FrozenTensors: self._take_frozen,
        }
        links.targets |= {
            OptimizerState: self._target_of_state,
            PooledBuffers: self._targets_of_buffers,
            InitialBuffers: self._targets_of_buffers,
            FrozenTensors: self._targets_of_frozen,
        }

    # -- as a reader --------------------------------------------------------------------------------------

    def fetch_model(self, digest: Callable[[FrozenSpec], str]) -> Mapping[str, torch.Tensor] | None:
        if (checkpoint := self._checkpoint()) is not None and self.links.core.started is None:
            return checkpoint.state_dict
        return self._read(partial(_read_model, digest))

    def _checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint with which this worker begins; None if it begins anew, or joins a run in progress."""
        resumed = self._place.job.resumed
        if resumed is None or self._place.incarnation:
            return None
        return Checkpoint(Path(resumed.path), checked=False)

    @exclusive
    def _read(self, read: Callable[[Reader], Found]) -> Found | None:
        """Read from the servers of a run in progress as a reader; return None if the run is only beginning.

        The servers serve a limited number of readers at a time, and the model may be extended meanwhile. So this is
        repeated if it fails. If the run is over, the connection to the coordinator has ended as well.
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
            except (PeerLostError, ProtocolError) as error:
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
        try:
            return read_states(seen_from(address, self._place.coordinator), job.token, job.contexts)
        except DeadlineError as error:
            raise PeerLostError(f"the server with the states does not answer: {error}") from error

    # -- over the worker's own connections ----------------------------------------------------------------

    @exclusive
    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        if self.links.core.started is None:
            if (checkpoint := self._checkpoint()) is not None:
                model = msgspec.json.decode(checkpoint.job, type=JobCut).model
                (bounds,) = model.layout.sliced(1, "even")
                return [(bounds, checkpoint.optimizer_state(model, bounds))]
            return self._read(Reader.read_optimizer_state) or []
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
        """Request these buffers. Return them, or {} if the answer says that this worker's own are equal."""
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
        for digest in (self._frozen or {}).keys() - set(message.digests):
            del self._frozen[digest]  # type: ignore[union-attr]
        self._frozen = None

    def _send_frozen(self, message: FetchFrozen) -> None:
        """Send the server of shard 0 the values of frozen parameters, as far as this worker has them."""
        values_of = self._callbacks.frozen
        found = {digest: parts for digest in message.digests if (parts := values_of(digest)) is not None}
        payload = [part for parts in found.values() for part in parts]
        self.links.to_shard(0, FrozenTensors(0, tuple(found)), payload, lent=FrozenTensors)

    @exclusive
    def keep_states(self, position: LoopPosition, states: Sequence[memoryview]) -> None:
        self.links.to_shard(0, KeepStates(0, position), states, lent=KeepStates)
        stream = self.links.servers[0]
        # The memory of the states may change when this method has returned.
        self.links.wait_while(lambda: stream.backlog)

    @exclusive
    def keep_worker_state(self, state: Sequence[memoryview]) -> None:
        links = self.links
        links.post(links.coordinator, links.core.give_state(), state)
        # The memory of the state may change when this method has returned.
        links.wait_while(lambda: links.coordinator.backlog)

    def fetch_worker_states(self) -> tuple[bytes | None, bytes | None]:
        if (checkpoint := self._checkpoint()) is None:
            return None, None
        files = checkpoint.workers
        own = files.get(self._place.index)
        return (
            None if own is None else own.read_bytes(),
            files[min(files)].read_bytes() if files else None,
        )


def _read_model(digest: Callable[[FrozenSpec], str], reader: Reader) -> dict[str, torch.Tensor]:
    """Read the weights and buffers of the run, and those of its frozen parameters that this worker lacks."""
    snapshot = reader.read()
    differing = [spec for spec in snapshot.frozen if digest(spec) not in ("", spec.digest)]
    return snapshot.state_dict | reader.read_frozen(differing)
