"""A model that is trained by plain PyTorch and, with the same gradients, by shards; and checkpoints of the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from paceline.checkpoints.manifest import is_lineage
from paceline.checkpoints.places import Settings
from paceline.checkpoints.reading import Checkpoint
from paceline.checkpoints.writing import Draft, ShardWriter, shard_content
from paceline.core.job_cut import JobCut
from paceline.core.layout import BufferSpec, Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.messages import ShardState
from paceline.shard.optimizers import read_groups, server_optimizer
from paceline.shard.store import Push, Store
from paceline.shard.vectors import dtype_name, encode_states, parameter_views, sliced, torch_dtype

LINEAGE = "paceline-0123456789abcdef"
"""The identity of the checkpoints."""


class Net(nn.Module):
    """A tied parameter, BatchNorm's buffers, two dtypes, a scalar, and sizes that no alignment divides."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = nn.Linear(37, 21)
            self.norm = nn.BatchNorm1d(21)
            self.decoder = nn.Linear(21, 37)
            self.decoder.weight = nn.Parameter(self.encoder.weight.detach().t().contiguous())
            self.tied = self.decoder
            self.wide = nn.Parameter(torch.randn(70, dtype=torch.float64))
            self.scale = nn.Parameter(torch.tensor(0.5))


def model_of(net: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> ModelSpec:
    """Return the description of a model, each parameter of which one of the optimizers trains."""
    names: dict[int, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters, specs = [], []
    for index, optimizer in enumerate(optimizers):
        group_of = []
        for number, group in enumerate(optimizer.param_groups):
            for each in group["params"]:
                dtype = dtype_name(each.dtype)
                parameters.append(Parameter(tuple(names[id(each)]), tuple(each.shape), dtype, index))
                group_of.append(number)
        name = server_optimizer(optimizer).name
        specs.append(OptimizerSpec(name, read_groups(optimizer), tuple(group_of)))
    buffers = tuple(BufferSpec(n, tuple(b.shape), dtype_name(b.dtype)) for n, b in net.named_buffers())
    return ModelSpec(Layout.of(parameters), specs[0], buffers, tuple(specs[1:]))


class Shards:
    """The shards of a model, in one process.

    Args:
        model: the model.
        count: number of shards.
        weights: the initial weights of a module; None to leave them to `restore`.
    """

    def __init__(self, model: ModelSpec, count: int, net: nn.Module | None = None) -> None:
        self.model = model
        self.slices = model.layout.slice_evenly(count)
        self.net = net
        whole = self._zeros()
        if net is not None:
            self._fill(whole, dict(net.named_parameters(remove_duplicate=False)))
        self.stores = [
            Store(
                bounds,
                {name: vector.clone() for name, vector in sliced(whole, bounds).items()},
                model.optimizers_over_layout,
            )
            for bounds in self.slices
        ]

    def step(self, net: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take a step of each optimizer with the gradients of a module; a parameter may lack one."""
        named = dict(net.named_parameters(remove_duplicate=False))
        of = [named[parameter.names[0]] for parameter in self.model.layout.parameters]
        gradients = self._zeros()
        views = parameter_views(self.model.layout, gradients)
        for parameter, view in zip(of, views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        present = bytes(parameter.grad is not None for parameter in of)
        for bounds, store in zip(self.slices, self.stores, strict=True):
            part = sliced(gradients, bounds)
            for index, optimizer in enumerate(optimizers):
                own = bounds.of_set(index).bounds
                push = Push({n: part[n] for n in own}, present, read_groups(optimizer), index)
                store.put(index, 0, push)
                store.apply([(index, 0)], [1.0])

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        for bounds, store in zip(self.slices, self.stores, strict=True):
            for name, vector in checkpoint.weights(self.model.layout, bounds).items():
                store.weights[name].copy_(vector)
            store.load_optimizer_state(checkpoint.optimizer_state(self.model, bounds))

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by their names."""
        whole = {
            name: torch.cat([store.weights[name] for store in self.stores])
            for name in self.model.layout.sizes
        }
        views = parameter_views(self.model.layout, whole)
        return {p.names[0]: view for p, view in zip(self.model.layout.parameters, views, strict=True)}

    def write(
        self,
        directory: Path,
        number: int = 1,
        *,
        net: nn.Module | None = None,
        piece_bytes: int = 0,
        keep: int = 3,
        spared: int = 0,
        settings: Sequence[Settings] = (),
        job: bytes | None = None,
        further: Mapping[str, bytes] | None = None,
        lineage: str = LINEAGE,
        origin: str = "",
    ) -> Path:
        """Write a checkpoint, the last shard first, in pieces of this size; 0 for one piece for each vector."""
        states = [store.optimizer_state() for store in self.stores]
        entries = [store.state_entries(s) for store, s in zip(self.stores, states, strict=True)]
        tensors = {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in self.model.buffers
        }
        tensors |= dict(net.named_buffers()) if net is not None else {}
        draft = Draft.begin(
            directory if is_lineage(directory.name) else directory / lineage,
            number,
            self.model,
            self.slices,
            entries,
            tensors=tensors,
            settings=settings,
            origin=origin,
        )
        for bounds, store, state, of in reversed(
            list(zip(self.slices, self.stores, states, entries, strict=True))
        ):
            content = shard_content(bounds, store.weights, state)
            if piece_bytes:
                joined = b"".join(content)
                starts = range(0, len(joined), piece_bytes)
                content = [memoryview(joined[start : start + piece_bytes]) for start in starts]
            with ShardWriter(draft.path, draft.token, bounds, of) as writer:
                for part in content:
                    writer.write(part)
        versions = [number] * len(self.slices)
        workers = {worker: b"".join(encode_states({"worker": worker})) for worker in (0, 12)}
        return draft.finish(
            self._cut(number) if job is None else job,
            workers,
            versions=versions,
            further=further,
            keep=keep,
            spared=spared,
        )

    def _cut(self, number: int) -> bytes:
        """Return the state of a job that has taken three steps."""
        cut = JobCut(
            number=number,
            elapsed_s=1.0,
            seed=7,
            sync="bsp",
            model=self.model,
            slices=tuple(self.slices),
            shards=tuple(ShardState() for _ in self.slices),
        )
        return msgspec.json.encode(cut)

    def _zeros(self) -> dict[str, torch.Tensor]:
        sizes = self.model.layout.sizes.items()
        return {name: torch.zeros(size, dtype=getattr(torch, name.partition("/")[0])) for name, size in sizes}

    def _fill(self, whole: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
        for parameter, view in zip(
            self.model.layout.parameters, parameter_views(self.model.layout, whole), strict=True
        ):
            view.copy_(values[parameter.names[0]].detach())
