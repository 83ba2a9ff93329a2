"""Cuts of simulated jobs, from which later simulations go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import structs

from ..core.job_cut import JobCut, LoopCut, leader
from ..core.layout import Layout, ShardSlice, joint_counters
from ..shard.optimizers import counters_in, join_state, slice_state, with_counters
from ..shard.vectors import Vectors, segment_views, torch_dtype


class CutShard:
    """A copy of a shard.

    Attributes:
        bounds: the slice of the shard.
        weights: the weights of the shard.
        state: the optimizer state of the shard.
    """

    def __init__(self, bounds: ShardSlice, weights: Vectors, state: Vectors) -> None:
        self.bounds = bounds
        self.weights = {name: value.clone() for name, value in weights.items()}
        self.state = {key: value.clone() for key, value in state.items()}


class SimCut:
    """A cut of a simulated job: what a simulation with a training function needs to go on from this point.

    Args:
        job: the state of the job.
        shards: a copy of each shard, in order.
        tensors: the pooled buffers and the frozen parameters of the model, by name.
        workers: worker -> the state of its script at the cut. A script gives its state when it asks for its next
            batch, so the states arrive after the cut.

    Attributes:
        job: the state of the job.
        tensors: the pooled buffers and the frozen parameters of the model, by name.
        workers: worker -> the state of its script at the cut.
    """

    def __init__(
        self,
        job: JobCut,
        shards: list[CutShard],
        tensors: Mapping[str, torch.Tensor],
        workers: dict[int, bytes],
    ) -> None:
        self.job = job
        self.tensors = tensors
        self.workers = workers
        self._shards = shards

    def complete(self, loop: LoopCut, workers: dict[int, bytes]) -> None:
        """Add the states of the scripts, and the place in the job's loops to which these states belong."""
        self.job = structs.replace(self.job, loop=loop)
        self.workers = workers

    def weights(self, bounds: ShardSlice) -> Vectors:
        """Return the weights of a slice, which need not be the slice of a shard."""
        sizes = self.job.model.layout.sizes
        whole = {name: torch.empty(size, dtype=torch_dtype(name)) for name, size in sizes.items()}
        for shard in self._shards:
            for name, (start, stop) in shard.bounds.bounds.items():
                whole[name][start:stop] = shard.weights[name]
        return {name: whole[name][start:stop].clone() for name, (start, stop) in bounds.bounds.items()}

    def put_into(self, layout: Layout, bounds: ShardSlice, weights: Vectors) -> Vectors:
        """Overwrite the weights of a slice, as far as the cut contains them. Return the slice's optimizer state.

        Args:
            layout: layout of a model that has all parameters of the cut, and perhaps others.
            bounds: the slice.
            weights: the weights of the slice.
        """
        before = self.job.model.layout
        pieces: dict[str, torch.Tensor] = {
            each.names[0]: torch.empty(each.size, dtype=torch_dtype(each.dtype)) for each in before.parameters
        }
        for shard in self._shards:
            views = segment_views(shard.bounds, shard.weights)
            for segment, view in zip(shard.bounds.segments, views, strict=True):
                name = before.parameters[segment.parameter].names[0]
                pieces[name][segment.offset :][: view.numel()] = view
        for segment, view in zip(bounds.segments, segment_views(bounds, weights), strict=True):
            if (piece := pieces.get(layout.parameters[segment.parameter].names[0])) is not None:
                view.copy_(piece[segment.offset :][: view.numel()])
        states = {before.parameters[index].names[0]: state for index, state in self._joined_state().items()}
        return self._state(bounds, layout, states)

    def optimizer_state(self, bounds: ShardSlice) -> Vectors:
        """Return the optimizer state of a slice, which need not be the slice of a shard."""
        layout = self.job.model.layout
        states = {layout.parameters[index].names[0]: state for index, state in self._joined_state().items()}
        return self._state(bounds, layout, states)

    def _state(self, bounds: ShardSlice, layout: Layout, states: Mapping[str, Mapping[str, Any]]) -> Vectors:
        """Return the optimizer state of a slice, given the state of each parameter by name."""
        parameters = [torch.empty(each.shape) for each in layout.parameters]
        known = zip(layout.parameters, parameters, strict=True)
        of_parameter = {tensor: states[each.names[0]] for each, tensor in known if each.names[0] in states}
        counters = joint_counters(counters_in(each.state) for each in self._shards)
        return with_counters(slice_state(bounds, parameters, of_parameter), counters)

    def _joined_state(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer state of each parameter of the cut."""
        return join_state(self.job.model.layout, [(each.bounds, each.state) for each in self._shards])

    def states_for(self, worker: int) -> tuple[bytes | None, bytes | None]:
        """Return the script states for a worker of a later run. See `Servers.fetch_worker_states`."""
        first = leader(self.job.main, self.workers)
        return self.workers.get(worker), None if first is None else self.workers[first]
