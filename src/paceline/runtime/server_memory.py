"""The tensors of one server: the stores of its shards, the memory in which pushes arrive, and the model's buffers.

The memory is created when the coordinator assigns shards to the server. The store of each shard is created when the
shard's initial weights arrive. This module is independent of sockets, clocks and sync models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import safetensors.torch
import torch

from ..core.layout import item_bytes, of_set
from ..core.messages import Commit, Content, CreateShards, InitialState, InitialWeights, Message
from ..errors import ProtocolError
from ..shard.buffers import bytes_of, pack, packed_bytes, unpack
from ..shard.groups import GroupsReader
from ..shard.slots import BufferSlots
from ..shard.store import Push, Store, Vectors
from ..shard.vectors import torch_dtype
from ..wire.memory import Inbox, Region, SharedInbox, StreamedInbox, cut
from .registration import require_groups

__all__ = ["STATE_LIMIT_FACTOR", "STATE_SLACK_BYTES", "ServerMemory", "tensors_over"]

# An optimizer state is rejected if it is larger than STATE_LIMIT_FACTOR times the shard's weights, plus
# STATE_SLACK_BYTES, because optimizers store only a few vectors as large as the weights.
STATE_LIMIT_FACTOR = 8
STATE_SLACK_BYTES = 16 * 1024 * 1024


class ServerMemory:
    """The tensors of one server: its shards' weights, optimizer states and pushes, and the model's buffers.

    Args:
        created: the message that contains the server's shards and the model.
        servers: number of servers of the run.
        master: the shared memory that contains the weights; None to keep them in the server's own memory.
        before_update: function that is called with the index of a shard before the shard's weights change.

    Attributes:
        master: the shared memory that contains the weights, or None.
        stores: shard -> the store of this shard, for shards whose initial weights have arrived.
        weights: shard -> the bytes of this shard's weights, for shards whose initial weights have arrived.
    """

    def __init__(
        self,
        created: CreateShards,
        servers: int,
        master: Region | None,
        before_update: Callable[[int], None],
    ) -> None:
        self.master = master
        self.stores: dict[int, Store] = {}
        self.weights: dict[int, dict[str, memoryview]] = {}
        self._model = created.model
        self._servers = servers
        self._before_update = before_update
        self._slices = {shard.index: shard for shard in created.shards}
        self._groups = [
            GroupsReader(partial(require_groups, created.model, set_index=set_index))
            for set_index in range(len(created.model.optimizers))
        ]
        # shard -> initial optimizer state, until the shard's store is created
        self._states: dict[int, Vectors] = {}
        self._slots: BufferSlots | None = None  # None unless this server holds shard 0

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
        return Region.attach(self._model.layout, descriptor, channels=channels)

    def inboxes(self, region: Region | None) -> dict[int, tuple[Inbox, Vectors]]:
        """Return, for each shard, an inbox in `region` or in new memory, and its gradient as tensors."""
        inboxes = {}
        for index, shard in self._slices.items():
            inbox: Inbox = SharedInbox(region, shard) if region is not None else StreamedInbox(shard)
            inboxes[index] = inbox, tensors_over(inbox.gradient)
        return inboxes

    def payload_sizes(self, message: Message, size_bytes: int) -> list[int]:
        """Return the sizes of the parts of a message's payload that are not stored in an inbox.

        Raises:
            ProtocolError: the message cannot have a valid payload.
        """
        buffers = self._model.buffers
        match message:
            case Commit(shard=0, content=Content(buffers=changed)) if _are_some_of(changed, len(buffers)):
                return [packed_bytes(buffers[index]) for index in changed]
            case Commit(content=Content(buffers=changed)) if changed:
                raise ProtocolError(
                    f"a commit to shard {message.shard} contains unexpected buffers {changed[:8]}"
                )
            case InitialWeights() if message.shard in self._slices:
                bounds = self._slices[message.shard].bounds
                sizes = [(stop - start) * item_bytes(dtype) for dtype, (start, stop) in bounds.items()]
                return sizes + [packed_bytes(spec) for spec in buffers if message.shard == 0]
            case InitialState() if message.shard in self._slices:
                limit_bytes = STATE_LIMIT_FACTOR * self._slices[message.shard].size_bytes + STATE_SLACK_BYTES
                if size_bytes <= limit_bytes:
                    return [size_bytes]
                raise ProtocolError(
                    f"an optimizer state has {size_bytes} bytes, expected at most {limit_bytes}"
                )
            case _:
                return []

    # -- start of training --------------------------------------------------------------------------------

    def keep_state(self, message: InitialState, payload: bytes) -> None:
        """Keep the initial optimizer state of a shard until the shard's store is created."""
        try:
            self._states[message.shard] = safetensors.torch.load(payload)
        except Exception as error:  # safetensors may raise any exception for invalid data
            raise ProtocolError(f"an optimizer state cannot be read: {error}") from error

    def begin(self, index: int, payload: Sequence[bytearray]) -> None:
        """Create the store of a shard from its initial weights."""
        bounds = self._slices[index]
        weights = tensors_over(
            {dtype: memoryview(part) for dtype, part in zip(bounds.bounds, payload, strict=False)}
        )
        if self.master is not None:
            for dtype, target in tensors_over(cut(self.master.weights, bounds)).items():
                weights[dtype] = target.copy_(weights[dtype])
        store = Store(bounds, weights, self._model.optimizers, lambda: self._before_update(index))
        store.load_optimizer_state(self._states.pop(index, {}))
        if index == 0:
            specs = self._model.buffers
            parts = payload[len(bounds.bounds) :]
            self._slots = BufferSlots(specs, [unpack(s, p) for s, p in zip(specs, parts, strict=True)])
        self.stores[index] = store
        self.weights[index] = {dtype: bytes_of(vector) for dtype, vector in weights.items()}

    # -- an iteration -------------------------------------------------------------------------------------

    def read(self, commit: Commit, gradient: Vectors) -> Push | None:
        """Return the push that a commit and its gradient describe; None if the commit is empty.

        Raises:
            ProtocolError: the content of the commit does not match the model.
        """
        content = commit.content
        if content is None or len(content.present) != len(self._model.layout.parameters):
            raise ProtocolError("a commit does not state for each parameter whether it has a gradient")
        if commit.empty:
            return None
        if commit.edit is not None:
            return Push(gradient, content.present, ())
        set_index = commit.set_index
        if set_index is None and len(self._groups) == 1:
            return Push(gradient, content.present, self._groups[0].read(content.groups))
        if set_index is None or set_index >= len(self._groups):
            raise ProtocolError(
                f"a commit contains parameter set {set_index}, expected one from 0 to {len(self._groups) - 1}"
            )
        groups = self._groups[set_index].read(content.groups)
        return Push(of_set(gradient, set_index), content.present, groups, set_index)

    def keep(self, worker: int, commit: Commit, push: Push | None, payload: Sequence[bytearray]) -> None:
        """Store the push of an accepted commit, and the buffers that have changed."""
        if push is not None:
            self.stores[commit.shard].put(worker, commit.iteration, push)
        if commit.content is not None and commit.content.buffers and self._slots is not None:
            buffers = self._model.buffers
            changed = zip(commit.content.buffers, payload, strict=True)
            self._slots.put(worker, {index: unpack(buffers[index], part) for index, part in changed})

    # -- reading ------------------------------------------------------------------------------------------

    def snapshot(self, index: int) -> list[memoryview]:
        """Return the weights of a shard and, for shard 0, the pooled buffers of the model."""
        return [*self.weights[index].values(), *(self.pooled_buffers() if index == 0 else [])]

    def pooled_buffers(self) -> list[memoryview]:
        """Return the model's buffers, pooled over the workers. Only the server of shard 0 has them."""
        if self._slots is None:
            return []
        pooled = self._slots.pooled()
        return pack([pooled[spec.name] for spec in self._model.buffers])

    def optimizer_state(self, index: int) -> bytes:
        """Return the optimizer state of a shard in safetensors format."""
        state = self.stores[index].optimizer_state()
        return safetensors.torch.save({key: value.contiguous() for key, value in state.items()})


def _are_some_of(indices: Sequence[int], count: int) -> bool:
    """Return True if `indices` are distinct and between 0 and `count` - 1."""
    return len(set(indices)) == len(indices) and all(0 <= index < count for index in indices)


def tensors_over(vectors: dict[str, memoryview]) -> Vectors:
    """Return a flat tensor for each dtype. The tensors share the memory of the given bytes."""
    return {
        dtype: torch.frombuffer(data, dtype=torch_dtype(dtype))
        if data.nbytes
        else torch.empty(0, dtype=torch_dtype(dtype))
        for dtype, data in vectors.items()
    }
