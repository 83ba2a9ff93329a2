"""The memory of a worker for the weights and gradients of a model, and how both get to and from the servers.

With shared memory, the servers read and write the memory of the worker. Otherwise, an `Outbox` sends the gradients,
and the weights arrive as payload.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence

import torch

from ..core.protocol.layout import Range, ShardSlice, of_set, without_last
from ..core.protocol.messages import Answer, Content, MemoryAttached, MemoryPlace
from ..core.protocol.model_spec import ModelSpec
from ..core.protocol.wire_format import Format
from ..errors import ProtocolError
from ..shard.buffer_bytes import pack
from ..shard.rounding import Rounded
from ..shard.vectors import Vectors, sliced, tensors_over
from ..wire.memory import Master, Region, cut, file_limit, shared_memory_available
from .job import Job
from .outbox import Outbox, Send

__all__ = ["WorkerMemory"]


class WorkerMemory:
    """The memory of a worker for one model.

    Args:
        job: the configuration of the run.
        model: the model.
        shards: the slices of its shards, in order.
        local: for each server, True if it is on this machine.
        descriptors: the descriptors that the coordinator has passed. The last one, that of the shared memory in which
            the servers update the weights, is taken from this list if the run uses shared memory.
        stage: function that sends a piece of a gradient. See `Outbox`.
        busy: function that returns True if data for a shard is still queued.
        awaits: function that returns True if the worker waits for an answer from a shard.
        accelerated: True if the parameters are on an accelerator, so that they are no views of this memory.

    Attributes:
        model, shards: see above.
        region: the memory that belongs to this worker.
        gradients: dtype -> flat vector of the gradients.
        outbox: sends the gradients; None if all servers share this worker's memory.
        in_place: True while the weights are read in the memory that the servers update.
        shared: True if the servers read gradients and write weights in memory that is shared with them.
        pulls: the parameter set that is being pulled; None for all sets.
        place: where servers on this machine find the region; None if they need not look for it.
        passed: the descriptor of the region, if it is passed to the servers.
        passed_bytes: the size of the region if its descriptor is passed; else 0.
        follows: True if the weights may be read in the memory that the servers update.
    """

    def __init__(
        self,
        job: Job,
        model: ModelSpec,
        shards: tuple[ShardSlice, ...],
        local: Sequence[bool],
        descriptors: list[int],
        stage: Send,
        busy: Callable[[int], bool],
        awaits: Callable[[int], bool],
        *,
        accelerated: bool,
    ) -> None:
        self.model = model
        self.shards = shards
        self.in_place = False
        self.pulls: int | None = None
        self.shared = job.carrier.shares_memory
        self._awaits = awaits
        self._attached: set[int] = set()  # shards that use the region although their servers use TCP
        # In a run that machines join, the user has not chosen TCP for connections within a machine.
        limit_bytes = file_limit()
        fits = limit_bytes is None or Region.size_of(model.layout) <= limit_bytes
        offered = job.joined and any(local) and fits and shared_memory_available()
        name = f"paceline-{secrets.token_hex(16)}"
        self.region = region = job.carrier.place(model.layout, servers=len(local), offered=offered, name=name)
        self.gradients = tensors_over(region.gradients)
        self.outbox: Outbox | None = None
        # shard -> its slice of the weights, and memory for rounded weights; None if weights are not rounded
        self._rounded: dict[int, Rounded] | None = None
        self._master: Master | None = None  # shared memory in which the servers update the weights
        if self.shared:
            if not descriptors:
                raise ProtocolError("the coordinator did not pass the shared memory for the weights")
            self._master = Master.follow(model.layout, descriptors.pop(), read_only=accelerated)
        else:
            # Early sending uses the network during the backward pass. If all servers are on this machine, no network
            # is used, and early sending would only take CPU time from the backward pass.
            early = job.overlap == "shards" and not all(local)
            rounded = self._rounding(job.wire.gradients, region.gradients)
            self.outbox = Outbox(shards, region.gradients, stage, busy, early=early, rounded=rounded)
            self._rounded = self._rounding(job.wire.weights, region.weights)
        own = region.descriptor
        self.place = MemoryPlace(os.getpid(), own, name) if offered and own else None
        self.passed = [own] if self.shared and own is not None else []
        self.passed_bytes = region.size_bytes if self.passed else 0
        # With several parameter sets, another worker may push another set in the same round. In the servers' memory,
        # it would then change under a graph that the script still uses.
        self.follows = self._master is not None and not model.further

    def _rounding(self, chosen: Format, vectors: Mapping[str, memoryview]) -> dict[int, Rounded] | None:
        """Return, for each shard, its slice of the vectors with memory for rounded values; None without rounding."""
        if chosen == "float32":
            return None
        tensors = tensors_over(vectors)
        return {shard.index: Rounded(sliced(tensors, shard)) for shard in self.shards}

    @property
    def rounds_weights(self) -> bool:
        """True if the weights of some shards are rounded on their way."""
        return self._rounded is not None and len(self._attached) < len(self.shards)

    def weights(self, *, in_place: bool) -> Vectors:
        """Return the weights in the memory that the servers update if `in_place` is True, else in the region."""
        memory = self._master if in_place else self.region
        assert memory is not None
        self.in_place = in_place
        return tensors_over(memory.weights)

    def take_over(self) -> None:
        """Copy the weights from the memory that the servers update to the region."""
        assert self._master is not None
        for dtype, target in self.region.weights.items():
            target[:] = self._master.weights[dtype]

    def edited(self) -> bool | None:
        """Return True if the script has changed the weights since the last pull, None if this is not known."""
        return self._master.edited() if self.in_place and self._master is not None else None

    def restore(self) -> bool:
        """Undo all changes by the script to the weights since the last pull. Return False if this is not possible."""
        if not self.in_place or self._master is None:
            return False
        self._master.discard()
        return True

    # -- pushes -------------------------------------------------------------------------------------------

    def contents(
        self,
        present: bytes,
        groups: bytes,
        buffers: Mapping[int, torch.Tensor],
        *,
        empty: bool,
        set_index: int | None = None,
        exact: bool = False,
    ) -> tuple[list[Content], dict[int, list[memoryview]]]:
        """Return, for each shard, the content and the payload of a push. See `Outbox.rest` for `exact`."""
        contents: list[Content] = []
        payloads: dict[int, list[memoryview]] = {}
        for shard in self.shards:
            changed = buffers if shard.index == 0 else {}
            pieces: tuple[int, ...] = ()
            payload: list[memoryview] = []
            if self.outbox is not None and not empty:
                pieces, payload = self.outbox.rest(shard.index, set_index, exact=exact)
            contents.append(Content(present, groups, pieces, tuple(changed)))
            payloads[shard.index] = payload + pack(list(changed.values())) if changed else payload
        return contents, payloads

    # -- what the servers send ----------------------------------------------------------------------------

    def attach(self, message: MemoryAttached) -> None:
        """Record that the server of some shards uses the region."""
        self._attached.update(message.shards)
        if self.outbox is not None:
            self.outbox.leave_out(message.shards)

    def target(self, answer: Answer, size_bytes: int) -> list[memoryview]:
        """Return the memory for the weights that come with an answer."""
        shard = answer.shard
        if not self._awaits(shard) or self.shared or shard in self._attached:
            return []
        if answer.rounded:
            if self._rounded is None:
                raise ProtocolError("a server sent rounded weights although weights are not rounded")
            return self._rounded[shard].memory(self._pulled(shard))
        weights = cut(self.region.weights, self.shards[shard])
        return list(of_set(weights, self.pulls).values())

    def widen(self, answer: Answer) -> None:
        """Convert the weights that have come with an answer to their own format, if they are rounded."""
        if answer.rounded and self._rounded is not None:
            self._rounded[answer.shard].widen(self._pulled(answer.shard))

    def arrived(self, shard: int, missing_bytes: int) -> list[Range]:
        """Return the ranges of the region that an answer to the current pull fills, except for its last bytes."""
        bounds = of_set(self.shards[shard].bounds, self.pulls)
        return without_last(
            [(vector, start, stop) for vector, (start, stop) in bounds.items()], missing_bytes
        )

    def _pulled(self, shard: int) -> list[Range]:
        """Return the ranges of the weights that a shard sends as the answer to the current pull."""
        bounds = of_set(self.shards[shard].bounds, self.pulls)
        return [(vector, 0, stop - start) for vector, (start, stop) in bounds.items()]

    def close(self) -> None:
        """Close the descriptors. The memory stays mapped until nothing refers to it."""
        self.region.close()
        if self._master is not None:
            self._master.close()
