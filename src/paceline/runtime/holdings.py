"""What one server holds of a model: its shards and, beside shard 0, the tensors that nobody trains.

Created when training begins, filled by the publisher's first weights. Reads the clock for its events; knows no
socket. Answers, timers and reports leave through a function that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from ..core.layout import ITEM_BYTES
from ..core.messages import Commit, CreateShards, InitialState, InitialWeights, Message, ShardWaits
from ..core.model_spec import HyperParameters
from ..errors import ConfigurationError, ProtocolError
from ..shard.buffers import bytes_of, pack, packed_bytes, pool, unpack
from ..shard.store import ForHost, Push, Shard, Vectors
from ..shard.vectors import torch_dtype
from ..sync.events import (
    AnyEvent,
    PullRepeated,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..trace.recording import Header, Recorder
from ..wire.memory import Inbox, Region, SharedInbox, StreamedInbox, cut
from .best_effort import BestEffortFile
from .job import Job
from .registration import require_groups

__all__ = ["Holdings", "Perform", "byte_views", "tensors_over"]

STATE_LIMIT_FACTOR = 8  # an optimizer keeps a few vectors per vector of weights; more than this is refused
STATE_SLACK_BYTES = 16 * 1024 * 1024

_groups_decoder = msgspec.msgpack.Decoder(tuple[HyperParameters, ...])

Perform = Callable[[int, ForHost], None]
"""(shard, what it asks of its host). When a pull is to be answered, the shard's weights are what is to be sent."""


class Holdings:
    """The shards of one server.

    Args:
        created: which, of what.
        job: the run.
        master: where the weights lie over shared memory; None for memory of its own.
        before_update: called with a shard's index before its weights change.
        warn: called with what has gone wrong without ending the run, in words.

    Attributes:
        expected: who takes part and has not left.
        publisher: the worker whose weights the shards start with.
        shards: those whose weights have come, by index.
        weights: the bytes of each one's.
    """

    def __init__(
        self,
        created: CreateShards,
        job: Job,
        master: Region | None,
        before_update: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        self.expected = set(created.workers)
        self.publisher = created.publisher
        self.shards: dict[int, Shard] = {}
        self.weights: dict[int, dict[str, memoryview]] = {}
        self._created = created
        self._job = job
        self._master = master
        self._before_update = before_update
        self._warn = warn
        self._slices = {shard.index: shard for shard in created.shards}
        self._groups: tuple[bytes, tuple[HyperParameters, ...]] = b"", ()  # as they came last, and decoded
        self._recorders: list[Recorder] = []
        self._states: dict[int, Vectors] = {}  # optimizer states to start from, until their shard is made
        self._slots: dict[int, dict[str, torch.Tensor]] = {}  # each worker's buffers
        self._first_buffers: dict[str, torch.Tensor] = {}  # the publisher's: what every slot starts with

    def inboxes(self, region: Region | None) -> dict[int, tuple[Inbox, Vectors]]:
        """For each shard, where a worker's pushes lie: in its own region, or in memory of the server's."""
        made = {}
        for index, shard in self._slices.items():
            inbox: Inbox = SharedInbox(region, shard) if region is not None else StreamedInbox(shard)
            made[index] = inbox, tensors_over(inbox.gradient)
        return made

    def attach(self, descriptor: int, channels: int) -> Region:
        """Map a worker's region. Raises `ProtocolError` if it is not what the layout asks for."""
        if not 0 <= channels <= self._job.servers:
            raise ProtocolError(f"a region with {channels} pairs of rings for {self._job.servers} servers")
        return Region.attach(self._created.model.layout, descriptor, channels=channels)

    def payload_sizes(self, message: Message, size_bytes: int) -> list[int]:
        """The sizes of the parts, besides an inbox's, that a message's payload must have.

        Raises:
            ProtocolError: no payload could be right.
        """
        buffers = self._created.model.buffers
        match message:
            case Commit(shard=0) if _are_some_of(message.buffers, len(buffers)):
                return [packed_bytes(buffers[index]) for index in message.buffers]
            case Commit() if message.buffers:
                raise ProtocolError(f"a commit to shard {message.shard} has buffers {message.buffers[:8]}")
            case InitialWeights() if message.shard in self._slices:
                bounds = self._slices[message.shard].bounds
                sizes = [(stop - start) * ITEM_BYTES[dtype] for dtype, (start, stop) in bounds.items()]
                return sizes + [packed_bytes(spec) for spec in buffers if message.shard == 0]
            case InitialState() if message.shard in self._slices:
                limit_bytes = STATE_LIMIT_FACTOR * self._slices[message.shard].size_bytes + STATE_SLACK_BYTES
                if size_bytes <= limit_bytes:
                    return [size_bytes]
                raise ProtocolError(
                    f"an optimizer state of {size_bytes} bytes, expected at most {limit_bytes}"
                )
            case _:
                return []

    def start_state(self, message: InitialState, payload: bytes) -> None:
        """Keep the optimizer state that a shard is to start from."""
        if message.shard not in self._slices or message.shard in self.shards:
            raise ProtocolError(f"an optimizer state for shard {message.shard} is not expected")
        try:
            self._states[message.shard] = safetensors.torch.load(payload)
        except Exception as error:  # the library raises what it likes at bytes that are not its own
            raise ProtocolError(f"an optimizer state that cannot be read: {error}") from error

    def start(self, message: InitialWeights, payload: Sequence[bytearray]) -> None:
        """Make a shard out of its first weights."""
        index = message.shard
        if index not in self._slices or index in self.shards:
            raise ProtocolError(f"first weights for shard {index} are not expected")
        bounds = self._slices[index]
        weights = tensors_over(
            {dtype: memoryview(part) for dtype, part in zip(bounds.bounds, payload, strict=False)}
        )
        if self._master is not None:
            for dtype, place in tensors_over(cut(self._master.weights, bounds)).items():
                weights[dtype] = place.copy_(weights[dtype])
        models = {
            shard.index: sync for shard, sync in zip(self._created.shards, self._created.syncs, strict=True)
        }
        sync, seed = models[index], self._job.seed
        header = Header(sync=str(sync), host="shard", index=index, seed=seed, emulated=self._job.emulated)
        path = Path(self._job.run_dir, f"trace-shard-{index}.jsonl")
        recorder = Recorder(BestEffortFile(path, self._warn), header)
        self._recorders.append(recorder)
        shard = Shard(
            bounds,
            weights,
            self._created.model.optimizer,
            sync,
            seed,
            recorder,
            before_update=lambda: self._before_update(index),
        )
        shard.load_optimizer_state(self._states.pop(index, {}))
        if index == 0:
            specs = self._created.model.buffers
            parts = payload[len(bounds.bounds) :]
            self._first_buffers = {
                spec.name: unpack(spec, part) for spec, part in zip(specs, parts, strict=True)
            }
        self.shards[index] = shard
        self.weights[index] = byte_views(weights)
        for worker in sorted(self.expected):
            shard.handle(WorkerJoined(now_s=self._job.now_s(), worker=worker))

    def commit(
        self,
        worker: int,
        message: Commit,
        gradient: Vectors,
        payload: Sequence[bytearray],
        perform: Perform,
    ) -> None:
        """A worker's push to one shard and, unless it comes later, its pull. Raises `InvalidEventError`."""
        shard = self.shard(message.shard)
        if len(message.present) != len(self._created.model.layout.parameters):
            raise ProtocolError("a commit does not say for each parameter whether it has a gradient")
        if message.change is not None:
            try:  # before a shard is half-way through it
                self._job.read_sync(message.change.sync)
            except ConfigurationError as error:
                raise ProtocolError(f"it changes to a sync model that cannot run here: {error}") from error
        event = PushReceived(
            now_s=self._job.now_s(),
            worker=worker,
            iteration=message.iteration,
            empty=message.empty,
            stop=message.stop,
            change=message.change,
            significance=message.significance,
            progress=message.progress,
        )
        push = None if message.empty else Push(gradient, message.present, self._decode_groups(message.groups))
        shard.handle(event, push, lambda action: perform(message.shard, action))
        if message.buffers:
            slot = self._slots.setdefault(worker, dict(self._first_buffers))
            for index, part in zip(message.buffers, payload, strict=True):
                spec = self._created.model.buffers[index]
                slot[spec.name] = unpack(spec, part)
        if message.pulls:
            self.pull(worker, message.shard, message.iteration, perform)

    def pull(self, worker: int, shard: int, iteration: int, perform: Perform) -> None:
        """A worker's pull after its push. Raises `InvalidEventError`."""
        event = PullRequested(now_s=self._job.now_s(), worker=worker, iteration=iteration)
        self._tell(shard, event, perform)

    def pull_again(self, worker: int, shard: int, iteration: int, perform: Perform) -> None:
        """A worker starts an iteration anew. Raises `InvalidEventError`."""
        event = PullRepeated(now_s=self._job.now_s(), worker=worker, iteration=iteration)
        self._tell(shard, event, perform)

    def fire(self, worker: int, shard: int, iteration: int, perform: Perform) -> None:
        """A timer that a shard had set is due."""
        event = TimerFired(now_s=self._job.now_s(), worker=worker, iteration=iteration)
        self._tell(shard, event, perform)

    def waits(self) -> tuple[ShardWaits, ...]:
        """Who waits for what at each shard."""
        described = []
        for index, shard in sorted(self.shards.items()):
            reasons = dict(sorted(shard.sync.waits().items()))
            pulls = tuple((worker, shard.sync.last_iteration(worker)) for worker in reasons)
            described.append(ShardWaits(index, str(shard.sync.sync), pulls, tuple(reasons.values())))
        return tuple(described)

    def in_place(self, index: int) -> bool:
        """True if workers may read the shard's weights where they are, and need no copy.

        All shards answer alike, for a worker reads all or none in place: what counts is what all were given to run,
        and not what one of them has gone back to where a condition has failed.
        """
        models = self.shards[index].sync.changed_to or self._job.sync.first
        return self._master is not None and all(model.lockstep for model in models)

    def _decode_groups(self, encoded: bytes) -> tuple[HyperParameters, ...]:
        """Hyper-parameters as they came; those of the last push again, if they are the same."""
        if encoded != self._groups[0]:
            try:
                groups = _groups_decoder.decode(encoded)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"hyper-parameters that cannot be read: {error}") from error
            require_groups(self._created.model, groups)
            self._groups = encoded, groups
        return self._groups[1]

    def leave(self, worker: int, *, finished: bool, perform: Perform) -> None:
        """A worker takes no further part. It may be heard of twice: once is enough."""
        if worker not in self.expected:
            return
        self.expected.remove(worker)
        kind = WorkerFinished if finished else WorkerLost
        for index in self.shards:
            self._tell(index, kind(now_s=self._job.now_s(), worker=worker), perform)

    def snapshot(self, index: int) -> list[memoryview]:
        """A shard's weights and, with shard 0, the other tensors, pooled over the workers."""
        self.shard(index)
        parts = list(self.weights[index].values())
        if index == 0:
            pooled = self._first_buffers
            if self._slots:
                pooled = pooled | pool([self._slots[worker] for worker in sorted(self._slots)])
            parts += pack([pooled[spec.name] for spec in self._created.model.buffers])
        return parts

    def optimizer_state(self, index: int) -> bytes:
        """A shard's optimizer state as safetensors."""
        state = self.shard(index).optimizer_state()
        return safetensors.torch.save({key: value.contiguous() for key, value in state.items()})

    def shard(self, index: int) -> Shard:
        """A shard that is ready. Raises `ProtocolError` if it is not."""
        if index not in self.shards:
            raise ProtocolError(f"shard {index} is not here, or has no weights yet")
        return self.shards[index]

    def _tell(self, index: int, event: AnyEvent, perform: Perform) -> None:
        self.shard(index).handle(event, None, lambda action: perform(index, action))

    def close(self) -> None:
        """Write the traces out."""
        for recorder in self._recorders:
            recorder.close()


def _are_some_of(indices: Sequence[int], count: int) -> bool:
    """True if these are indices of `count` things, each once."""
    return len(set(indices)) == len(indices) and all(0 <= index < count for index in indices)


def tensors_over(vectors: dict[str, memoryview]) -> Vectors:
    """Flat tensors over some bytes, without a copy."""
    return {
        dtype: torch.frombuffer(data, dtype=torch_dtype(dtype))
        if data.nbytes
        else torch.empty(0, dtype=torch_dtype(dtype))
        for dtype, data in vectors.items()
    }


def byte_views(vectors: Vectors) -> dict[str, memoryview]:
    """The bytes of some flat tensors, without a copy."""
    return {dtype: bytes_of(vector) for dtype, vector in vectors.items()}
