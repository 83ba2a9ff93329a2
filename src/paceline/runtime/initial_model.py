"""What a worker sends to the servers if they take the initial model from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import safetensors.torch
import torch

from ..core.protocol.layout import ShardSlice
from ..core.protocol.messages import InitialState, InitialWeights
from ..core.protocol.model_spec import FrozenSpec
from ..shard.buffer_bytes import pack
from ..shard.frozen_files import write_frozen
from ..shard.vectors import Vectors
from .job import Job
from .worker_links import Links

__all__ = ["InitialModel"]


class InitialModel:
    """The initial model, or what an extended model has in addition.

    Args:
        job: the configuration of the run.
        links: the worker's connections.
        shards: the slices of all shards, in order.
        weights: the flat vectors of the initial weights.
        buffers: the initial values of the model's buffers.
        state_of: function that returns a shard's part of the initial optimizer state.
        frozen: the frozen parameters, which are written to files.
        values_of: function that returns the bytes of the frozen parameter with a digest, in parts; None if there is
            none.
    """

    def __init__(
        self,
        job: Job,
        links: Links,
        shards: Sequence[ShardSlice],
        weights: Vectors,
        buffers: Sequence[torch.Tensor],
        state_of: Callable[[ShardSlice], Vectors],
        frozen: Sequence[FrozenSpec],
        values_of: Callable[[str], Iterable[memoryview] | None],
    ) -> None:
        self._job = job
        self._links = links
        self._shards = shards
        self._weights = weights
        self._buffers = buffers
        self._state_of = state_of
        self._frozen = frozen
        self._values_of = values_of

    def send(self, message: InitialWeights) -> None:
        """Send a shard its initial weights, preceded by the initial optimizer state if there is one."""
        shard, links = self._shards[message.shard], self._links
        if shard.index == 0:
            self._write_frozen()
        if state := self._state_of(shard):
            blob = safetensors.torch.save({key: value.contiguous() for key, value in state.items()})
            links.to_shard(shard.index, InitialState(shard.index), [memoryview(blob)])
        vectors = self._weights
        weights = [vectors[name][a:b] for name, (a, b) in shard.bounds.items() if name in vectors]
        links.to_shard(shard.index, message, pack([*weights, *(self._buffers if shard.index == 0 else ())]))

    def _write_frozen(self) -> None:
        """Write the frozen parameters to the run directory, if it is the launcher's."""
        job = self._job
        if job.joined:
            return
        try:
            for spec in self._frozen:
                if (parts := self._values_of(spec.digest)) is not None:
                    write_frozen(Path(job.run_dir), spec, parts)
        except OSError as error:
            self._links.report_problem(
                f"the frozen parameters cannot be written to {job.run_dir}, so the saved weights will lack "
                f"them: {error.strerror or error}"
            )
