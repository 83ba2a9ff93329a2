"""Finds the newest whole checkpoint of a run, and reads from it the slices of any sharding."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

from ..core.layout import Layout, ModelSpec, ShardSlice
from ..errors import CheckpointError, first_line
from ..shard.optimizers import slice_state, with_counters
from ..shard.vectors import Vectors, dtype_name, segment_views, torch_dtype
from .manifest import (
    MANIFEST,
    PARTIAL,
    Manifest,
    OptimizerRecord,
    Pace,
    identity_of,
    name_of,
    numbers_in,
    read_draft,
    read_manifest,
    require_intact,
)
from .places import MODEL, PLACES, name_in_file, optimizer_file

WORKER = re.compile(r"workers/([0-9]+)\.bin")
"""The file with the state of a worker."""


class Checkpoint:
    """A complete checkpoint. Tensors are read from the files when they are used.

    Args:
        path: directory of the checkpoint.
        pace: rate at which the files are read to check them; None for no limit.
        checked: False if the files have been checked before.

    Attributes:
        path: directory of the checkpoint.
        manifest: what the checkpoint contains.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or this version cannot read its format.
    """

    def __init__(self, path: Path, pace: Pace | None = None, *, checked: bool = True) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        if checked:
            require_intact(path, self.manifest, pace or Pace())

    def require_number(self, number: int) -> None:
        """Raise `CheckpointError` if the checkpoint has a different number, because it was renamed."""
        if self.manifest.number != number:
            raise CheckpointError(f"its name says {number}, but it is checkpoint {self.manifest.number}")

    @property
    def job(self) -> bytes:
        """The state of the job."""
        return (self.path / "job.json").read_bytes()

    @property
    def workers(self) -> dict[int, Path]:
        """The file with the state of each worker. Files that the manifest does not name are ignored."""
        names = filter(None, map(WORKER.fullmatch, self.manifest.files))
        return {
            index: self.path / name for index, name in sorted((int(found[1]), found[0]) for found in names)
        }

    @cached_property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the model, by their names in its `state_dict()`."""
        with safetensors.safe_open(self.path / MODEL, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping

    @cached_property
    def optimizers(self) -> tuple[dict[str, Any], ...]:
        """The `state_dict()` of each optimizer."""
        return tuple(map(self._optimizer, range(len(self.manifest.optimizers))))

    def _optimizer(self, index: int) -> Any:
        return torch.load(self.path / optimizer_file(index), mmap=True, weights_only=True)

    def require_content(self, model: ModelSpec) -> None:
        """Check that the files contain this model. Values are not read.

        Raises:
            CheckpointError: a file is not valid, or contains a different model.
        """
        try:
            with safetensors.safe_open(self.path / MODEL, framework="pt") as file:
                found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
                described = {
                    name: (each.get_dtype(), tuple(each.get_shape())) for name, each in found.items()
                }
        except Exception as error:  # the library does not document its exceptions
            raise CheckpointError(f"{MODEL} cannot be read: {first_line(error)}") from None
        tensors = [(name, p.dtype, p.shape) for p in model.layout.parameters for name in p.names]
        tensors += [(buffer.name, buffer.dtype, buffer.shape) for buffer in model.buffers]
        for name, dtype, shape in tensors:
            expected = (name_in_file(torch_dtype(dtype)), tuple(shape))
            if (stored := described.get(name, "nothing")) != expected:
                raise CheckpointError(f"{MODEL} has {name!r} as {stored}, expected {expected}")
        records = self.manifest.optimizers
        if [(each.name, each.replaced) for each in records] != [
            (o.name, o.replaced) for o in model.optimizers
        ]:
            raise CheckpointError(f"{MANIFEST} names other optimizers than job.json")
        shapes = {p.names[0]: torch.Size(p.shape) for p in model.layout.parameters}
        for index, record in enumerate(records):
            try:
                _require_state(self._optimizer(index), record, shapes)
            except Exception as error:  # the library does not document its exceptions
                raise CheckpointError(
                    f"{optimizer_file(index)} cannot be read: {first_line(error)}"
                ) from None

    def weights(self, layout: Layout, bounds: ShardSlice, initial: Vectors | None = None) -> Vectors:
        """Return a shard's slice of the weights.

        Args:
            layout: layout of a model.
            bounds: the shard. The run that wrote the checkpoint may have had a different number of shards.
            initial: the values of parameters that the checkpoint lacks, by vector; None if the checkpoint must have all
                parameters.

        Raises:
            CheckpointError: the checkpoint lacks a parameter, or has a parameter with another shape or dtype.
        """
        parameters = self._parameters(layout, lacking=initial is not None)
        vectors = {
            name: torch.zeros(stop - start, dtype=torch_dtype(name))
            for name, (start, stop) in bounds.bounds.items()
        } | (initial or {})
        for segment, view in zip(bounds.segments, segment_views(bounds, vectors), strict=True):
            if (value := parameters[segment.parameter]) is not None:
                view.copy_(value.view(-1)[segment.offset :][: view.numel()])
        return vectors

    def optimizer_state(self, model: ModelSpec, bounds: ShardSlice, *, lacking: bool = False) -> Vectors:
        """Return a shard's slice of the optimizer state: "<segment>/<key>" -> tensor.

        The state of an optimizer is left out if the checkpoint has no such optimizer, or if the script had replaced the
        optimizer a different number of times when the checkpoint was written.

        Args:
            model: a model.
            bounds: the shard. The run that wrote the checkpoint may have had a different number of shards.
            lacking: True if the checkpoint need not have all parameters of the model.

        Raises:
            CheckpointError: the checkpoint lacks a parameter, or has a parameter with another shape or dtype.
        """
        found = self._parameters(model.layout, lacking=lacking)
        parameters = [
            torch.empty(parameter.shape, dtype=torch_dtype(parameter.dtype)) if value is None else value
            for parameter, value in zip(model.layout.parameters, found, strict=True)
        ]
        of_name = {p.names[0]: each for p, each in zip(model.layout.parameters, parameters, strict=True)}
        state = {}
        known = self._records(model)
        for index, record in known.items():
            entries = self.optimizers[index]["state"]
            for position, name in enumerate(record.parameters):
                if name in of_name and position in entries:
                    state[of_name[name]] = entries[position]
        counters = [known[index].counters if index in known else () for index in range(len(model.optimizers))]
        return with_counters(slice_state(bounds, parameters, state), counters)

    def _records(self, model: ModelSpec) -> dict[int, OptimizerRecord]:
        """Return the optimizers that both the checkpoint and the model have, by their indices."""
        return {
            index: record
            for index, (spec, record) in enumerate(
                zip(model.optimizers, self.manifest.optimizers, strict=False)
            )
            if (spec.name, spec.replaced) == (record.name, record.replaced)
        }

    def _parameters(self, layout: Layout, *, lacking: bool = False) -> Sequence[torch.Tensor | None]:
        """Return the values of all parameters, in the order of the layout; None for each missing parameter."""
        found: list[torch.Tensor | None] = []
        for parameter in layout.parameters:
            name = parameter.names[0]
            tensor = self.state_dict.get(name)
            expected = f"{parameter.dtype}{list(parameter.shape)}"
            if tensor is None:
                if not lacking:
                    raise CheckpointError(f"{self.path} has no parameter {name!r}, which the model has")
            elif (has := f"{dtype_name(tensor.dtype)}{list(tensor.shape)}") != expected:
                raise CheckpointError(f"{self.path} has {name!r} as {has}, but the model needs {expected}")
            found.append(tensor)
        return found


def _require_state(state: dict[str, Any], record: OptimizerRecord, shapes: Mapping[str, torch.Size]) -> None:
    """Check the `state_dict()` of an optimizer.

    Raises:
        Exception: this is not a `state_dict()` of the optimizer that the record describes.
    """
    groups = [
        [record.parameters[position] for position in group["params"]] for group in state["param_groups"]
    ]
    if sorted(itertools.chain(*groups)) != sorted(record.parameters):
        raise ValueError("its groups have other parameters than those in the manifest")
    if record.counters and len(record.counters) != len(groups):
        raise ValueError("its groups have other counters than those in the manifest")
    for position, entries in state["state"].items():
        for key, value in entries.items():
            shape = shapes[record.parameters[position]]
            if not isinstance(key, str) or (
                isinstance(value, torch.Tensor)
                and record.whole is not True
                and value.shape not in (shape, torch.Size())
            ):
                raise ValueError(f"it has {key!r} of {record.parameters[position]!r} in another shape")


class NewestCheckpoint(NamedTuple):
    """The result of a search for the newest whole checkpoint of a run.

    Attributes:
        checkpoint: the checkpoint; None if there is none.
        faults: for each checkpoint that is newer than `checkpoint`, a sentence that says why it is not used.
        highest: the highest number of all checkpoints that were found, whole or not; 0 if none was found.
    """

    checkpoint: Checkpoint | None
    faults: tuple[str, ...]
    highest: int = 0


def newest_whole(
    *folders: Path,
    until: int | None = None,
    use: Callable[[Checkpoint], object] = lambda checkpoint: None,
    pace: Pace | None = None,
) -> NewestCheckpoint:
    """Return the newest complete and undamaged checkpoint of a lineage.

    Args:
        folders: directories with checkpoints of the lineage, such as its own directory and a directory with copies from
            a bucket.
        until: number of the newest checkpoint that may be used; None for no limit.
        use: function that checks the content of a checkpoint. It raises `CheckpointError` if the content is not valid,
            although all checksums are right.
        pace: rate at which the files are read to check them; None for no limit.
    """
    folders = tuple(dict.fromkeys(folders))
    complete = {(number, folder) for folder in folders for number in _ours_in(folder, "", MANIFEST)}
    partial = {(number, folder) for folder in folders for number in _ours_in(folder, PARTIAL, PLACES)}
    there = [each for each in sorted(complete | partial, reverse=True) if until is None or each[0] <= until]
    highest = there[0][0] if there else 0
    faults = []
    for number, folder in there:
        try:
            if (number, folder) not in complete:
                raise CheckpointError(_unfinished(folder, number))
            checkpoint = Checkpoint(folder / name_of(number), pace)
            checkpoint.require_number(number)
            use(checkpoint)
        except CheckpointError as error:
            faults.append(f"Checkpoint {number} is not used: {error}.")
        else:
            return NewestCheckpoint(checkpoint, tuple(faults), highest)
    return NewestCheckpoint(None, tuple(faults), highest)


def _ours_in(folder: Path, suffix: str, file: str) -> list[int]:
    """Return the numbers of the checkpoints in a folder.

    In a directory of an earlier version, folders that are not checkpoints may also have numbers as names, such as
    folders of Slurm jobs. In such a directory, a folder is a checkpoint if it contains `file`.
    """
    return [
        number
        for number in numbers_in(folder, suffix)
        if identity_of(folder) or (folder / (name_of(number) + suffix) / file).exists()
    ]


def _unfinished(folder: Path, number: int) -> str:
    """Return why a checkpoint is not complete."""
    draft = read_draft(folder / (name_of(number) + PARTIAL))
    if draft is not None and draft.lineage != identity_of(folder):
        return f"it is of another run: it carries the identity {draft.lineage}"
    return "the run ended while it was being written"
