"""The tensors of one server: the stores of its shards, the memory in which pushes arrive, and the model's buffers.

The memory for pushes is created when the coordinator assigns shards to the server. The store of each shard is created
when the shard's initial weights arrive. If a script adds parameters, the initial weights of the new parameters arrive
in the same way, and each store is replaced by a larger one. This module is independent of sockets, clocks and sync
models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import safetensors.torch
import torch

from ..checkpoints.reading import Checkpoint
from ..core.layout import (
    BufferSpec,
    Layout,
    ModelSpec,
    Range,
    ShardSlice,
    WireFormat,
    item_bytes,
    of_set,
    ranges_of,
)
from ..core.messages import (
    MOST_STATES_BYTES,
    Answer,
    Commit,
    Content,
    InitialState,
    InitialWeights,
    KeepStates,
    LoopPosition,
    MemoryPlace,
    Message,
)
from ..errors import ProtocolError
from ..shard.codecs import BaseSender, Receiver, Sender
from ..shard.optimizers import COUNTERS, require_plausible_state
from ..shard.store import BufferSlots, Push, Store
from ..shard.vectors import GroupsReader, Vectors, bytes_of, pack, packed_bytes, tensors_over, unpack
from ..wire.memory import MASTER, PIECE_BYTES, Region, cut, find_memory
from .registration import require_groups


class _Plan(NamedTuple):
    """A model, with the slices, the memory and the decoders that a server needs to store its part of the model.

    Attributes:
        model: the model.
        slices: shard -> its slice, for each shard of the server.
        master: the shared memory that contains the weights; None if the weights are in the server's own memory.
        groups: for each parameter set, the decoder of its hyper-parameters.
    """

    model: ModelSpec
    slices: dict[int, ShardSlice]
    master: Region | None
    groups: list[GroupsReader]

    @classmethod
    def of(cls, model: ModelSpec, slices: Sequence[ShardSlice], master: Region | None) -> _Plan:
        """Return the plan for a model."""
        readers = [
            GroupsReader(partial(require_groups, model, set_index=set_index))
            for set_index in range(len(model.optimizers))
        ]
        return cls(model, {shard.index: shard for shard in slices}, master, readers)


class ServerMemory:
    """The tensors of one server: its shards' weights, optimizer states and pushes, and the model's buffers.

    Args:
        model: the model to train.
        slices: the slice of each of the server's shards.
        servers: number of servers of the run.
        master: the shared memory that contains the weights; None to keep the weights in the server's own memory.
        before_update: function that is called with the index of a shard before the shard's weights change.
        wire: the format in which gradients and weights travel.
        device: the device on which optimizers that need whole tensors make their steps, in torch's notation.

    Attributes:
        stores: shard -> the store of this shard, for shards whose initial weights have arrived.
        weights: shard -> the bytes of this shard's weights, for shards whose initial weights have arrived.
        states: the latest states of tracked objects, with the position in the training loop at which they were taken.
            Only the server of shard 0 has such states.
    """

    def __init__(
        self,
        model: ModelSpec,
        slices: Sequence[ShardSlice],
        servers: int,
        master: Region | None,
        before_update: Callable[[int], None],
        wire: WireFormat = WireFormat(),
        device: str = "cpu",
    ) -> None:
        self.stores: dict[int, Store] = {}
        self.weights: dict[int, dict[str, memoryview]] = {}
        self.states: tuple[LoopPosition, bytearray] | None = None
        self._servers = servers
        self._before_update = before_update
        self._wire = wire
        self._device = torch.device(device)
        # shard -> codec -> (encoder of the shard's weights, vectors that have not changed since they were encoded)
        self._encoded: dict[int, dict[str, tuple[Sender, set[str]]]] = {}
        self._bases: dict[int, BaseSender] = {}  # shard -> the common base of its weights, if there is one
        self._plan = _Plan.of(model, slices, master)
        self._next: _Plan | None = None  # the plan for the extended model, until the extension takes effect
        # shard -> initial optimizer state, until the shard's store is created or extended
        self._states: dict[int, Vectors] = {}
        # shard -> payload of the initial weights of new parameters, until the extension takes effect
        self._added: dict[int, Sequence[bytearray]] = {}
        self._slots: BufferSlots | None = None  # None unless this server holds shard 0

    @property
    def shards(self) -> tuple[int, ...]:
        """The indices of the server's shards."""
        return tuple(self._plan.slices)

    @property
    def in_shared_memory(self) -> bool:
        """True if the weights are in shared memory."""
        return self._plan.master is not None

    # -- memory in which pushes arrive --------------------------------------------------------------------

    def attach(self, descriptor: int, channels: int) -> Region:
        """Map a worker's shared memory into this process.

        Raises:
            ProtocolError: the size of the memory does not match the layout, or there are too many channels.
        """
        if not 0 <= channels <= self._servers:
            raise ProtocolError(
                f"the shared memory has {channels} pairs of rings, expected at most {self._servers}"
            )
        return Region.attach(self._plan.model.layout, descriptor, channels=channels)

    def find(self, place: MemoryPlace) -> Region | None:
        """Map the memory of a worker on this machine; return None if this process cannot reach the memory.

        Raises:
            ProtocolError: the size of the memory does not match the layout.
        """
        descriptor = find_memory(place.process, place.descriptor, place.name)
        return None if descriptor is None else Region.attach(self._plan.model.layout, descriptor)

    def inboxes(self, region: Region | None) -> dict[int, tuple[Inbox, Vectors]]:
        """Return, for each shard, an inbox in `region` or in new memory, and the inbox's gradient as tensors."""
        inboxes: dict[int, tuple[Inbox, Vectors]] = {}
        for index, shard in self._plan.slices.items():
            shared = None if region is None else SharedInbox(region, shard)
            inbox = shared or StreamedInbox(shard, self._wire.gradients)
            inboxes[index] = inbox, tensors_over(inbox.gradient)
        return inboxes

    def payload_sizes(self, message: Message, size_bytes: int) -> list[int]:
        """Return the sizes of the parts of a message's payload that are not stored in an inbox.

        Raises:
            ProtocolError: the message cannot have a valid payload.
        """
        buffers = self._plan.model.buffers
        slices = (self._next or self._plan).slices
        match message:
            case Commit(shard=0, content=Content(buffers=changed)) if _are_some_of(changed, len(buffers)):
                return [packed_bytes(buffers[index]) for index in changed]
            case Commit(content=Content(buffers=changed)) if changed:
                raise ProtocolError(
                    f"a commit to shard {message.shard} contains unexpected buffers {changed[:8]}"
                )
            case InitialWeights() if message.shard in slices:
                bounds = slices[message.shard].bounds
                sizes = [
                    (bounds[vector][1] - bounds[vector][0]) * item_bytes(vector)
                    for vector in self._new_vectors(message.shard)
                ]
                return sizes + [packed_bytes(spec) for spec in self._new_buffers() if message.shard == 0]
            case InitialState() if message.shard in slices:
                require_plausible_state(slices[message.shard], size_bytes)
                return [size_bytes]
            case KeepStates(shard=0) if self._slots is not None:
                if size_bytes <= MOST_STATES_BYTES:
                    return [size_bytes]
                raise ProtocolError(
                    f"the states of tracked objects have {size_bytes} bytes, expected at most {MOST_STATES_BYTES}"
                )
            case _:
                return []

    # -- start of training --------------------------------------------------------------------------------

    def keep_state(self, message: InitialState, payload: bytes) -> None:
        """Keep the initial optimizer state of a shard until the shard's store is created or extended."""
        try:
            self._states[message.shard] = safetensors.torch.load(payload)
        except Exception as error:  # safetensors may raise any exception for invalid data
            raise ProtocolError(f"an optimizer state cannot be read: {error}") from error

    def begin(self, index: int, payload: Sequence[bytearray]) -> None:
        """Create the store of a shard from its initial weights, or keep the initial weights of its new parameters."""
        if self._next is not None:
            self._added[index] = payload
            # Copy the weights now, so that the new shared memory contains them even if this process is killed.
            self._place_weights(index, payload)
            return
        self._put(index, payload)

    def load(self, index: int, checkpoint: Checkpoint, initial: Sequence[bytearray] | None = None) -> None:
        """Create or extend the store of a shard from a checkpoint. The checkpoint may have another number of shards.

        Args:
            index: index of the shard.
            checkpoint: the checkpoint.
            initial: the payload of `InitialWeights`, with the values of the parameters and buffers that the checkpoint
                lacks; None if the checkpoint lacks nothing. Where the checkpoint has no optimizer state, the initial
                state is used.
        """
        plan = self._next or self._plan
        bounds, vectors, buffers = plan.slices[index], self._new_vectors(index), self._new_buffers()
        first: Vectors | None = None
        if initial is not None:
            first = tensors_over(dict(zip(vectors, (memoryview(part) for part in initial), strict=False)))
        weights = checkpoint.weights(plan.model.layout, bounds, first)
        parts: list[memoryview] = [bytes_of(weights[vector]) for vector in vectors]
        if index == 0:
            own = {} if initial is None else dict(zip(buffers, initial[len(vectors) :], strict=True))
            values = {
                **{spec.name: unpack(spec, part) for spec, part in own.items()},
                **checkpoint.state_dict,
            }
            parts += pack([values[spec.name] for spec in buffers])
        known = len(self._plan.model.layout.parameters) if self._next is not None else 0
        self._states[index] = self._states.get(index, {}) | {
            name: value
            for name, value in checkpoint.optimizer_state(
                plan.model, bounds, lacking=initial is not None
            ).items()
            if name == COUNTERS or bounds.segments[int(name.partition("/")[0])].parameter >= known
        }
        self.begin(index, [bytearray(part) for part in parts])

    def prepare(self, model: ModelSpec, slices: Sequence[ShardSlice], master: Region | None) -> None:
        """Prepare to store an extended model. Forget the initial values for the model of an earlier call."""
        self._next = _Plan.of(model, slices, master)
        self._states.clear()
        self._added.clear()

    def extend(self) -> None:
        """Store the extended model from now on, unless this server already stores it.

        All initial weights must have arrived.
        """
        if self._next is None:
            return
        if self._added.keys() != self._next.slices.keys():
            raise ProtocolError("the initial weights of new parameters have not arrived")
        for index, payload in self._added.items():
            self._put(index, payload)
        self._plan, self._next = self._next, None
        self._added.clear()

    def _put(self, index: int, payload: Sequence[bytearray]) -> None:
        """Create or replace the store of a shard, given the weights and buffers that the shard does not have yet."""
        model, slices, *_ = self._next or self._plan
        bounds, before = slices[index], self.stores.get(index)
        weights = self._place_weights(index, payload)
        optimizers = model.optimizers_over_layout
        store = Store(bounds, weights, optimizers, lambda: self._change(index), self._device)
        state = self._states.pop(index, {})
        if before is None:
            store.load_optimizer_state(state)
        else:
            store.take_over(before, state, len(model.layout.parameters))
        if index == 0:
            specs = self._new_buffers()
            parts = payload[len(self._new_vectors(index)) :]
            first = {s.name: unpack(s, p) for s, p in zip(specs, parts, strict=True)}
            self._slots = self._slots or BufferSlots((), ())
            self._slots.extend(model.buffers, first)
        self.stores[index] = store
        self._encoded.pop(index, None)
        self._bases.pop(index, None)
        self.weights[index] = {vector: bytes_of(weights[vector]) for vector in weights}

    def _change(self, index: int) -> None:
        """Prepare for a change of a shard's weights."""
        self._before_update(index)
        for _, valid in self._encoded.get(index, {}).values():
            valid.clear()

    def _place_weights(self, index: int, payload: Sequence[bytearray]) -> Vectors:
        """Return the weights of a shard: the weights in its store, and the new weights in `payload`.

        If the server keeps its weights in shared memory, all these weights are copied to that memory.
        """
        _, slices, master, _ = self._next or self._plan
        bounds, before = slices[index], self.stores.get(index)
        new = zip(self._new_vectors(index), payload, strict=False)
        weights = tensors_over({vector: memoryview(part) for vector, part in new})
        if before is not None:
            weights = before.weights | weights
        if master is not None:
            for vector, target in tensors_over(cut(master.weights, bounds)).items():
                weights[vector] = target.copy_(weights[vector])
        return {vector: weights[vector] for vector in bounds.bounds}

    def _new_vectors(self, index: int) -> list[str]:
        """Return the names of a shard's vectors whose initial weights have to be sent."""
        bounds = (self._next or self._plan).slices[index].bounds
        return [vector for vector in bounds if vector not in self.weights.get(index, {})]

    def _new_buffers(self) -> list[BufferSpec]:
        """Return the buffers whose initial values have to be sent."""
        if self._next is None:
            return list(self._plan.model.buffers)
        return self._next.model.buffers_beyond(self._plan.model)

    # -- an iteration -------------------------------------------------------------------------------------

    def read(self, commit: Commit, gradient: Vectors) -> Push | None:
        """Return the push that a commit and its gradient describe; None if the commit is empty.

        Raises:
            ProtocolError: the content of the commit does not match the model.
        """
        content = commit.content
        if commit.empty and content is not None:
            return None  # not checked, because the worker may not know yet that the model was extended
        if content is None or len(content.present) != len(self._plan.model.layout.parameters):
            raise ProtocolError("a commit does not state for each parameter whether it has a gradient")
        if commit.edit is not None:
            return Push(gradient, content.present, ())
        set_index = commit.set_index
        readers = self._plan.groups
        if set_index is None and len(readers) == 1:
            return Push(gradient, content.present, readers[0].read(content.groups))
        if set_index is None or set_index >= len(readers):
            raise ProtocolError(
                f"a commit contains parameter set {set_index}, expected one from 0 to {len(readers) - 1}"
            )
        groups = readers[set_index].read(content.groups)
        return Push(of_set(gradient, set_index), content.present, groups, set_index)

    def keep(self, worker: int, commit: Commit, push: Push | None, payload: Sequence[bytearray]) -> None:
        """Store the push of an accepted commit, and the buffers that have changed."""
        if push is not None:
            self.stores[commit.shard].put(worker, commit.iteration, push)
        if commit.content is not None and commit.content.buffers and self._slots is not None:
            buffers = self._plan.model.buffers
            changed = zip(commit.content.buffers, payload, strict=True)
            self._slots.put(worker, {index: unpack(buffers[index], part) for index, part in changed})

    def leave_out(self, worker: int) -> None:
        """Ignore the buffers of a worker that has left before it finished. See `BufferSlots.leave_out`."""
        if self._slots is not None:
            self._slots.leave_out(worker)

    # -- reading ------------------------------------------------------------------------------------------

    def weights_to_send(
        self, answer: Answer, part: int | None, vectors: Collection[str]
    ) -> tuple[list[memoryview], int]:
        """Return the bytes of the given vectors of a shard's weights, and the checksum of their base; 0 without a base.

        As long as weights do not change, they are encoded once for all workers. The returned bytes do not change before
        the next call of `before_update` for the shard.

        Args:
            answer: the answer that says how the weights travel.
            part: the parameter set to which the vectors belong; None for the vectors of all sets.
            vectors: the vectors.
        """
        index, weights = answer.shard, self.stores[answer.shard].weights
        if answer.base:
            if index not in self._bases:
                self._bases[index] = BaseSender(self._wire.weights, weights)
            based = self._bases[index]
            if based.numbers.get(part, 0) != answer.base:
                # `before_update` must also be called here, because a base may change although the weights do not
                # change.
                self._before_update(index)
                based.advance(part, answer.base, vectors)
            return based.payload(vectors, whole=answer.codec == "float32"), based.checksum(vectors)
        encoded = self._encoded.setdefault(index, {})
        if answer.codec not in encoded:
            encoded[answer.codec] = Sender(answer.codec, weights), set()
        sender, valid = encoded[answer.codec]
        sender.encode(sender.ranges(vector for vector in vectors if vector not in valid))
        valid.update(vectors)
        return sender.memory(sender.ranges(vectors)), 0

    def snapshot(self, index: int) -> list[memoryview]:
        """Return the weights with which a shard is evaluated and, for shard 0, the pooled buffers of the model."""
        weights = [bytes_of(vector) for vector in self.stores[index].evaluated().values()]
        return [*weights, *(self.pooled_buffers() if index == 0 else [])]

    def frozen_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each frozen parameter, by its digest."""
        return {spec.digest: packed_bytes(spec) for spec in self._plan.model.frozen}

    def pooled_buffers(self) -> list[memoryview]:
        """Return the model's buffers, pooled over the workers. Only the server of shard 0 has them."""
        if self._slots is None:
            return []
        pooled = self._slots.pooled()
        return pack([pooled[spec.name] for spec in self._plan.model.buffers])

    def initial_buffers(self, *, unless: int) -> list[memoryview] | None:
        """Return the initial values of the most recently added buffers; None if their checksum is `unless`."""
        if self._slots is None or self._slots.checksum == unless:
            return None
        return pack([*self._slots.added.values()])

    def optimizer_state(self, index: int) -> bytes:
        """Return the optimizer state of a shard in safetensors format."""
        state = self.stores[index].optimizer_state()
        return safetensors.torch.save({key: value.contiguous() for key, value in state.items()})


def _are_some_of(indices: Sequence[int], count: int) -> bool:
    """Return True if `indices` are distinct and between 0 and `count` - 1."""
    return len(set(indices)) == len(indices) and all(0 <= index < count for index in indices)


# -- A server's view of one worker's region, limited to one shard: an inbox for each pair of worker and shard
#
# In both kinds of inboxes, `gradient` maps each dtype to the slice of the gradient that the worker pushes, as bytes.
# `weights` maps each dtype to the slice of the weights that the worker reads, or is None if the weights must be sent.


class SharedInbox:
    """An inbox in memory that the server shares with the worker."""

    def __init__(self, region: Region, shard: ShardSlice) -> None:
        self.gradient = cut(region.gradients, shard)
        self.weights: dict[str, memoryview] | None = cut(region.weights, shard)

    def places(self, pieces: Sequence[int], codec: str = "float32") -> list[memoryview]:
        """Return no memory. Raise `ProtocolError` if a message names pieces of a gradient."""
        if pieces:
            raise ProtocolError("pieces of a gradient were sent although the gradient is in shared memory")
        return []

    def take(self, pieces: Sequence[int], codec: str = "float32") -> None:
        """Do nothing, because no piece is received."""

    def close(self, *, empty: bool, set_index: int | None = None) -> None:
        """Do nothing, because the gradient is complete."""


class StreamedInbox:
    """An inbox in the server's memory, which is filled with pieces of the gradient as they arrive from the worker.

    Args:
        shard: the slice of the shard.
        codec: the codec of gradients. Some pushes, such as those of weights that the script has edited, are not
            encoded.

    Attributes:
        pieces: the pieces of a gradient, in order.
        missing: indices of the pieces of the current iteration that have not been received yet.
    """

    def __init__(self, shard: ShardSlice, codec: str = "float32") -> None:
        self.gradient = {
            dtype: memoryview(bytearray((stop - start) * item_bytes(dtype)))
            for dtype, (start, stop) in shard.bounds.items()
        }
        self.weights: dict[str, memoryview] | None = None
        self.pieces = shard.pieces(PIECE_BYTES)
        self.missing = set(range(len(self.pieces)))
        vectors = tensors_over(self.gradient)
        self._codecs = {name: Receiver(name, vectors) for name in {"float32", codec}}
        # The ranges of a whole gradient are kept here, because most messages contain a whole gradient.
        self._whole = tuple(range(len(self.pieces))), ranges_of(self.pieces)

    def places(self, pieces: Sequence[int], codec: str = "float32") -> list[memoryview]:
        """Return the memory into which these pieces of a gradient are received.

        Raises:
            ProtocolError: a piece does not exist.
        """
        return self._codecs[codec].memory(self._ranges(pieces))

    def take(self, pieces: Sequence[int], codec: str = "float32") -> None:
        """Decode these pieces, which have been received."""
        self._codecs[codec].decode(self._ranges(pieces))
        self.missing.difference_update(pieces)

    def _ranges(self, pieces: Sequence[int]) -> list[Range]:
        if pieces == self._whole[0]:
            return self._whole[1]
        if not all(0 <= piece < len(self.pieces) for piece in pieces):
            raise ProtocolError(
                f"the gradient has {len(self.pieces)} pieces, numbered from 0, but the message names {pieces[:8]}"
            )
        return ranges_of([self.pieces[piece] for piece in pieces])

    def close(self, *, empty: bool, set_index: int | None = None) -> None:
        """Record that the iteration is committed.

        Args:
            empty: True if the worker has committed the iteration without a gradient.
            set_index: the parameter set whose gradient is pushed; None for all sets.

        Raises:
            ProtocolError: a piece of the gradient has not been received, and the iteration is not `empty`.
        """
        if self.missing and not empty:
            vectors = of_set(self.gradient, set_index)
            if missing := sum(self.pieces[number].dtype in vectors for number in self.missing):
                raise ProtocolError(
                    f"an iteration was committed without {missing} of {len(self.pieces)} pieces of the gradient"
                )
        self.missing.update(range(len(self.pieces)))


Inbox = SharedInbox | StreamedInbox


# -- The shared memory in which the servers update the weights, as the host of the coordinator creates it ----


class SharedWeights:
    """The shared memory for the weights of the model in force, and for the weights of a model that is not yet in force.

    Attributes:
        master: the memory for the model in force; None if there is none.
        passed: True if processes have been told that the new model is in force.
    """

    def __init__(self) -> None:
        self.master: Region | None = None
        self.passed = False
        self._new: Region | None = None  # the memory of a new model, until all processes have received it

    def create(self, layout: Layout) -> None:
        """Create the memory for a new model, unless it exists."""
        if self._new is None:
            self._new = Region.create(layout, MASTER, shared=True)

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the new memory; None if there is none."""
        return None if self._new is None else self._new.descriptor

    def settle(self) -> None:
        """If the new model is in force, keep its memory, and close the descriptor, which every process has received."""
        if self.passed and self._new is not None:
            self._new.close()
            self.master, self._new = self._new, None
        self.passed = False

    def release(self) -> None:
        """Release the mappings, which keep file descriptors open."""
        self.master = self._new = None
