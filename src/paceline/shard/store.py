"""The tensors of one shard: its slice of the weights, the user's optimizer on that slice, and the stored pushes.

A store carries out requests from a server's core (see `paceline.core.requests`): it applies, discards or
copies pushes, each identified by (worker, iteration). A store does not depend on sync models, processes or time. A
simulation without gradients uses a `NullStore` instead.

The end of this file deals with tensors that belong to no shard: buffers, snapshots of the model, and files with frozen
parameters.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import safetensors.torch
import torch

from ..core.layout import (
    BufferSpec,
    FrozenSpec,
    HyperParameters,
    Layout,
    OptimizerSpec,
    ShardSlice,
    StateEntries,
    of_set,
)
from ..errors import ConfigurationError
from ..files import Unfinished
from ..sync.translation import WHOLE, Standing, translate
from .optimizers import COUNTERS, counters_in, segments_of_state, vectors_in, with_counters
from .slice_optimizers import HOST, SliceOptimizer, optimizer_of_slice
from .vectors import (
    Vectors,
    bytes_of,
    checksum,
    dtype_name,
    packed_bytes,
    parameter_views,
    pool,
    segment_views,
    squared_norm,
    torch_dtype,
)

Key = tuple[int, int]
"""Identifies a push: (worker, iteration)."""


class Push(msgspec.Struct, frozen=True):
    """The part of a push that is for one shard.

    Attributes:
        gradient: the shard's slice of the gradient or, if the push is an edit, of the new weights. The store does not
            modify the slice. The memory of the slice must not change until the push is applied, discarded or
            preserved.
        present: one byte per parameter of the layout: 1 if the parameter has a gradient, 0 if not.
        groups: the hyper-parameters of the parameter groups at the time of the push; () if the push is an edit.
        set_index: the parameter set to which the gradient and the groups belong. `gradient` contains the vectors of
            this set only. This attribute has no meaning if the push is an edit.
    """

    gradient: Vectors
    present: bytes
    groups: tuple[HyperParameters, ...]
    set_index: int = 0


class Store:
    """Holds the weights, the optimizer and the stored pushes of one shard, and applies pushes to the weights.

    Args:
        bounds: the shard's slice of the layout.
        weights: the shard's slice of the weights, per dtype. The store takes ownership of these vectors.
        optimizers: a description of the optimizer of each parameter set. `group_of` of each description lists all
            parameters of the layout.
        before_update: function to call before each change to the weights.
        device: the device on which optimizers that need whole tensors make their steps.
    """

    def __init__(
        self,
        bounds: ShardSlice,
        weights: Vectors,
        optimizers: Sequence[OptimizerSpec],
        before_update: Callable[[], None] = lambda: None,
        device: torch.device = HOST,
    ) -> None:
        self.bounds = bounds
        self.weights = weights
        self._before_update = before_update
        self._pushes: dict[Key, Push] = {}  # pushes that have been neither applied nor discarded
        self._edited: dict[int, int] = {}  # parameter -> highest number of the edits that have set it
        self._sets = _sets_of(bounds, weights, optimizers, device)

    def take_over(self, before: Store, state: Vectors, parameters: int) -> None:
        """Take the place of a store with fewer parameters, whose segments and parameters come first in this store.

        Args:
            before: the other store, which is no longer used.
            state: the initial optimizer state of the new segments, and of sets whose optimizer has been replaced:
                "<segment>/<key>" -> tensor.
            parameters: number of parameters of the layout.
        """
        kept = [
            (part, earlier)
            for part, earlier in zip(self._sets, before._sets, strict=False)
            if part.spec.replaced == earlier.spec.replaced
        ]
        earlier_state = {name: value for _, earlier in kept for name, value in earlier.state().items()}
        self.load_optimizer_state(earlier_state | state)
        for part, earlier in kept:
            part.optimizer.load_counters(earlier.optimizer.counters())
            part.optimizer.take_over(earlier.optimizer)
        self._edited = before._edited
        self._pushes = {key: self._extended(push, parameters) for key, push in before._pushes.items()}

    def put(self, worker: int, iteration: int, push: Push) -> None:
        """Store a push until it is applied or discarded."""
        self._pushes[worker, iteration] = push

    def apply(self, pushes: Sequence[Key], scales: Sequence[float], standing: Standing | None = None) -> None:
        """Take one optimizer step with the sum of these pushes' gradients, each multiplied by its scale.

        The gradients are added in the order given. The step uses the hyper-parameters from the push with the highest
        iteration, and skips each parameter for which none of the pushes contains a gradient. If the pushes belong to
        several parameter sets, each set takes a step with its own pushes. In this case, the scales of each set's
        pushes are multiplied by a factor, so that their sum is the sum of all `scales`.

        `standing` is what the shard knows about the update. It decides which fraction of the step is taken; None to
        take the whole step (see `paceline.sync.translation`).
        """
        fraction = WHOLE if standing is None else translate(standing)
        taken = {key: self._pushes.pop(key) for key in pushes}
        self._before_update()
        for set_index, keys, shares in _by_set(taken, scales):
            held = [taken[key] for key in keys]
            newest = max(range(len(keys)), key=lambda i: (keys[i][1], -keys[i][0]))
            flags = {push.present for push in held}  # nearly always a single value, the same for all pushes
            self._sets[set_index].optimizer.step(
                [push.gradient for push in held],
                shares,
                flags.pop() if len(flags) == 1 else bytes(map(max, *flags)),
                held[newest].groups,
                fraction,
            )

    def sets_of(self, pushes: Sequence[Key]) -> set[int]:
        """Return the parameter sets to which these stored pushes belong."""
        return {self._pushes[key].set_index for key in pushes}

    def squared_norm(self, pushes: Sequence[Key], scales: Sequence[float]) -> float:
        """Return the squared L2 norm of the gradient with which `apply` would take a step, in double precision."""
        square = 0.0
        for _, keys, shares in _by_set({key: self._pushes[key] for key in pushes}, scales):
            gradients = [self._pushes[key].gradient for key in keys]
            square += sum(squared_norm([each[dtype] for each in gradients], shares) for dtype in gradients[0])
        return square

    def overwrite(self, worker: int, iteration: int, number: int) -> None:
        """Set each parameter that is present in a push to the push's values. The optimizer's state is unchanged.

        Parameters that an edit with a higher number has set remain unchanged.
        """
        push = self._pushes.pop((worker, iteration))
        self._before_update()
        parts = zip(
            self.bounds.segments,
            segment_views(self.bounds, self.weights),
            segment_views(self.bounds, push.gradient),
            strict=True,
        )
        for segment, weights, values in parts:
            parameter = segment.parameter
            if push.present[parameter] and self._edited.get(parameter, 0) <= number:
                weights.copy_(values)
                self._edited[parameter] = number
        for part in self._sets:
            part.optimizer.weights_changed()

    def discard(self, worker: int, iteration: int) -> None:
        """Discard a push if it is stored."""
        self._pushes.pop((worker, iteration), None)

    def preserve(self, worker: int, iteration: int) -> None:
        """Copy the gradient of a push into the store's own memory."""
        push = self._pushes[worker, iteration]
        copied = {dtype: vector.clone() for dtype, vector in push.gradient.items()}
        self._pushes[worker, iteration] = msgspec.structs.replace(push, gradient=copied)

    def evaluated(self) -> Vectors:
        """Return the weights for evaluation: the weights that readers receive, and that snapshots and results contain.

        The vectors of an optimizer with modes (see `foreign`) are new; all other vectors are those of `weights`.
        """
        return self.weights | {
            name: vector for part in self._sets for name, vector in (part.optimizer.evaluated() or {}).items()
        }

    def optimizer_state(self) -> Vectors:
        """Return the optimizer's state: "<segment>/<key>" -> tensor."""
        state = {name: value for part in self._sets for name, value in part.state().items()}
        return with_counters(state, [part.optimizer.counters() for part in self._sets])

    def state_entries(self, state: Vectors) -> StateEntries:
        """Return the entries of a result of `optimizer_state()`, and the hyper-parameters of all groups."""
        vectors = vectors_in(state)
        others = {name: state[name] for name in state.keys() - vectors.keys() - {COUNTERS}}
        return StateEntries(
            vectors={name: dtype_name(value.dtype) for name, value in vectors.items()},
            numbers={
                name: (dtype_name(value.dtype), value.item())
                for name, value in sorted(others.items())
                if not value.dim()
            },
            shapes={
                name: tuple(value.shape)
                for name, value in vectors.items()
                if self.bounds.segments[int(name.partition("/")[0])].shape is not None
            },
            groups=tuple(part.optimizer.groups() for part in self._sets),
            counters=counters_in(state),
            nested={name: bytes(bytes_of(value)) for name, value in sorted(others.items()) if value.dim()},
        )

    def load_optimizer_state(self, state: Vectors) -> None:
        """Restore a state returned by `optimizer_state()`. Raise `ProtocolError` if the state does not fit."""
        for part, counted in zip(self._sets, counters_in(state), strict=False):
            part.optimizer.load_counters(counted)
        if len(self._sets) == 1:
            self._sets[0].optimizer.load_state(state)
            return
        places = segments_of_state(self.bounds, state, scalars=True)
        for part in self._sets:
            inside = {position: index for index, position in enumerate(part.positions)}
            part.optimizer.load_state(
                {
                    f"{inside[position]}/{key}": state[name]
                    for name, (position, key) in places.items()
                    if position in inside
                }
            )

    def _extended(self, push: Push, parameters: int) -> Push:
        """Extend a push that is older than some parameters. These parameters have no gradients in this push."""
        edits = not push.groups
        vectors = self.weights if edits else of_set(self.weights, push.set_index)
        added = {name: torch.zeros_like(each) for name, each in vectors.items() if name not in push.gradient}
        return msgspec.structs.replace(
            push,
            gradient=push.gradient | added,
            present=push.present.ljust(parameters, b"\0"),
            groups=() if edits else self._sets[push.set_index].spec.groups,
        )


class _Set(NamedTuple):
    """The part of a shard that belongs to one parameter set.

    Attributes:
        spec: the description of the set's optimizer.
        optimizer: the optimizer of the set, on this part.
        positions: for each segment of this part, its position among all segments of the shard.
    """

    spec: OptimizerSpec
    optimizer: SliceOptimizer
    positions: tuple[int, ...]

    def state(self) -> Vectors:
        """Return the optimizer's state, with the segments' positions among all segments of the shard."""
        places = ((*name.partition("/"), value) for name, value in self.optimizer.state().items())
        return {f"{self.positions[int(position)]}/{key}": value for position, _, key, value in places}


def _sets_of(
    bounds: ShardSlice, weights: Vectors, optimizers: Sequence[OptimizerSpec], device: torch.device
) -> list[_Set]:
    sets = []
    for set_index, optimizer in enumerate(optimizers):
        part = bounds.of_set(set_index)
        positions = tuple(i for i, segment in enumerate(bounds.segments) if segment.dtype in part.bounds)
        sliced = optimizer_of_slice(optimizer, part, of_set(weights, set_index), device)
        sets.append(_Set(optimizer, sliced, positions))
    return sets


def _by_set(
    pushes: Mapping[Key, Push], scales: Sequence[float]
) -> Iterator[tuple[int, list[Key], Sequence[float]]]:
    """For each parameter set to which these pushes belong, yield its index, its pushes, and their scales."""
    keys = list(pushes)
    indices = [push.set_index for push in pushes.values()]
    if indices.count(indices[0]) == len(indices):
        yield indices[0], keys, scales
        return
    for set_index in sorted(set(indices)):
        held = [position for position, index in enumerate(indices) if index == set_index]
        part = sum(scales[position] for position in held)
        factor = sum(scales) / part if part else 0.0
        yield set_index, [keys[position] for position in held], [scales[p] * factor for p in held]


# -- Stores the model buffers (such as BatchNorm statistics) that each worker last sent, and pools them ------


class BufferSlots:
    """Stores each worker's latest values of the model's buffers.

    Args:
        specs: the buffers of the model.
        first: the initial values of the buffers, which are the same for every worker.

    Attributes:
        added: the initial values of the buffers that were added last, by name.
    """

    def __init__(self, specs: Sequence[BufferSpec], first: Sequence[torch.Tensor]) -> None:
        self._specs = specs
        self._first = {spec.name: tensor for spec, tensor in zip(specs, first, strict=True)}
        self._slots: dict[int, dict[str, torch.Tensor]] = {}
        self._left: set[int] = set()  # the workers whose slots no longer change
        self.added = dict(self._first)
        self._checksum = -1  # of `added`; -1 if not computed yet

    @property
    def checksum(self) -> int:
        """Checksum of `added`."""
        if self._checksum < 0:
            self._checksum = checksum([*self.added.values()])
        return self._checksum

    def extend(self, specs: Sequence[BufferSpec], added: Mapping[str, torch.Tensor]) -> None:
        """Replace the description of the buffers. `added` maps the name of each new buffer to its initial value.

        A tensor that was a buffer may have become a parameter, and is then no longer described.
        """
        self._specs = specs
        self.added = {spec.name: added[spec.name] for spec in specs if spec.name in added}
        self._checksum = -1
        names = {spec.name for spec in specs}
        first = {**self._first, **added}
        self._first = {name: first[name] for name in first if name in names}
        self._slots = {
            worker: self._first | {name: tensor for name, tensor in slot.items() if name in names}
            for worker, slot in self._slots.items()
        }

    def put(self, worker: int, buffers: Mapping[int, torch.Tensor]) -> None:
        """Replace some of a worker's buffers (index -> tensor), and take ownership of the new tensors."""
        if worker in self._left:  # another process has taken the worker's place
            self._left.remove(worker)
            del self._slots[worker]
        slot = self._slots.setdefault(worker, dict(self._first))
        for index, tensor in buffers.items():
            slot[self._specs[index].name] = tensor

    def leave_out(self, worker: int) -> None:
        """Ignore the buffers of a worker that left before it finished, unless no other worker has sent buffers."""
        if worker in self._slots:
            self._left.add(worker)

    def pooled(self) -> dict[str, torch.Tensor]:
        """Return the buffers, pooled over the workers that have sent any; the initial values if no worker has."""
        workers = self._slots.keys() - self._left or self._slots.keys()
        if not workers:
            return self._first
        return self._first | pool([self._slots[worker] for worker in sorted(workers)])


# -- A snapshot of the weights and buffers of the model, by their names in the script's `state_dict()` -------


class WeightsSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of the weights and buffers of the model.

    Attributes:
        state_dict: name -> tensor, as in the model's `state_dict()`. A tied weight appears under each of its names.
        versions: for each shard, the number of updates that its weights include; -1 if the number is unknown.
        absent: names of the tensors that are missing or incomplete because a shard could not be read.
        frozen: the frozen parameters whose values the servers do not have, because all workers have loaded the same
            values.
    """

    state_dict: dict[str, torch.Tensor]
    versions: tuple[int, ...]
    absent: tuple[str, ...] = ()
    frozen: tuple[FrozenSpec, ...] = ()

    def __repr__(self) -> str:
        return f"WeightsSnapshot({len(self.state_dict)} tensors, versions={self.versions})"

    def completed(self, run_dir: Path) -> WeightsSnapshot:
        """Return the snapshot with the frozen parameters that are in files in the run directory."""
        read = {
            spec.name: tensor for spec in self.frozen if (tensor := read_frozen(run_dir, spec)) is not None
        }
        left = tuple(spec for spec in self.frozen if spec.name not in read)
        return msgspec.structs.replace(self, state_dict=self.state_dict | read, frozen=left)

    def save(self, path: Path) -> Path:
        """Write the tensors to a file in safetensors format, and return its path. The file is never incomplete."""
        with Unfinished(path) as place:
            safetensors.torch.save_file(
                {name: tensor.contiguous() for name, tensor in self.state_dict.items()}, place
            )
        return path


def named_weights(layout: Layout, vectors: Vectors) -> dict[str, torch.Tensor]:
    """Return copies of all parameters in the flat vectors, as a dictionary from name to tensor.

    Tied parameters appear under all of their names.
    """
    return {
        name: view.clone()
        for p, view in zip(layout.parameters, parameter_views(layout, vectors), strict=True)
        for name in p.names
    }


# -- Files in the run directory with the values of frozen parameters, from which the whole model is put together
#
# The servers do not have these values if all workers have loaded the same values. Therefore, the initializer
# writes them to the run directory before training begins, one file for each value, named by its digest. The
# launcher reads the files when it needs the whole model, and removes them at the end of the run. A worker on
# a machine that has joined the run writes no files, because its run directory is not on the machine of the
# launcher.


def _frozen_file(run_dir: Path, spec: FrozenSpec) -> Path:
    return run_dir / "frozen" / spec.digest


def write_frozen(run_dir: Path, spec: FrozenSpec, parts: Iterable[memoryview]) -> None:
    """Write the bytes of a frozen parameter, unless they have been written already.

    Raises:
        OSError: the bytes cannot be written.
    """
    path = _frozen_file(run_dir, spec)
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    with Unfinished(path) as place, place.open("wb") as file:
        for part in parts:
            file.write(part)


def read_frozen(run_dir: Path, spec: FrozenSpec) -> torch.Tensor | None:
    """Return a frozen parameter; None if it has no file. The values are read from the file when they are used."""
    path, size_bytes = _frozen_file(run_dir, spec), packed_bytes(spec)
    if not path.exists() or path.stat().st_size != size_bytes:
        return None
    if not size_bytes:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    data = torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8)
    return data.view(torch_dtype(spec.dtype)).reshape(spec.shape)


def remove_frozen(run_dir: Path) -> None:
    """Remove the files of frozen parameters. Tensors that were read from the files remain valid."""
    shutil.rmtree(run_dir / "frozen", ignore_errors=True)


def require_complete(name_of: Mapping[str, str], found: Iterable[str]) -> None:
    """Check that values with all requested digests have been found. `name_of`: digest -> name of a parameter.

    Raises:
        ConfigurationError: one of these values is no longer in any worker of the run.
    """
    if absent := name_of.keys() - set(found):
        name = min(name_of[digest] for digest in absent)
        raise ConfigurationError(
            f"The frozen parameter {name!r} has another value here than in the run, and no worker can send the run's "
            "value. Load the frozen parameters from the same checkpoint in all workers, or seed the random "
            "generators in the same way before the model is built."
        )
