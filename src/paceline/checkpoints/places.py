"""Lays out those files of a checkpoint that contain tensors: in full size, but without the values of the tensors.

A checkpoint is never assembled in memory. The files are laid out first. Then the segments of each shard are written to
their places, in any order and by any process. See `writing`.
"""

from __future__ import annotations

import functools
import itertools
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import safetensors.torch
import torch
from torch.serialization import skip_data

from ..core.layout import HyperParameters, Layout, ModelSpec, ShardSlice, StateEntries, joint_counters
from ..errors import CheckpointError
from ..shard.optimizers import OF_TORCH, make_optimizer, specimen
from ..shard.vectors import NESTED, NUMBER, bytes_of, entries_of, tensors_of, torch_dtype

MODEL = "model.safetensors"
PLACES = "places.json"  # exists while the checkpoint is being written

LENGTH = struct.Struct("<Q")  # length of the header at the beginning of a file in safetensors format
# header of a file in a ZIP archive: lengths of its name and of further fields
ZIP_HEADER = struct.Struct("<26xHH")

Settings = Sequence[Mapping[str, Any]]
"""The hyper-parameters in each group of an optimizer."""


class Places(msgspec.Struct, frozen=True):
    """Where the values of each tensor begin in the files of a checkpoint, in bytes.

    Attributes:
        weights: for each parameter of the layout, where its values begin in `MODEL`, once for each of its names.
        state: for each parameter of the layout, where each vector of its optimizer state begins, by key.
        optimizer: for each parameter of the layout, the index of its optimizer.
        members: for each optimizer, the names of its parameters, in the order in which the optimizer has them.
        tensors: where each tensor that is not a parameter begins in `MODEL`, by name.
    """

    weights: tuple[tuple[int, ...], ...]
    state: tuple[dict[str, int], ...]
    optimizer: tuple[int, ...]
    members: tuple[tuple[str, ...], ...]
    tensors: dict[str, int]


class _Entry(NamedTuple):
    """An entry of the optimizer state of a parameter, as `shard.vectors.tensors_of` returns it.

    The value of a vector is a tensor of the right shape and dtype whose values have no meaning.
    """

    value: torch.Tensor
    is_vector: bool


def optimizer_file(index: int) -> str:
    """Return the name of the file with the state of an optimizer."""
    return f"optimizer-{index}.pt"


def lay_out(
    folder: Path,
    model: ModelSpec,
    slices: Sequence[ShardSlice],
    entries: Sequence[StateEntries],
    tensors: Mapping[str, torch.Tensor],
    settings: Sequence[Settings],
) -> Places:
    """Create `MODEL` and the file of each optimizer. All values of vectors, weights and other tensors are zero.

    Args:
        folder: where to create the files.
        model: the model.
        slices: the slices of all shards.
        entries: the entries of each shard's optimizer state.
        tensors: the tensors of the model that are not parameters, by name. Only their dtypes and shapes are used.
        settings: for each optimizer, the settings of its groups in the script; [] if unknown. They are added to the
            settings in the entries of the first shard.

    Raises:
        OSError: a file cannot be written.
        CheckpointError: a tensor has a dtype that the safetensors format does not support.
    """
    layout = model.layout
    described = {name: (torch_dtype(p.dtype), p.shape) for p in layout.parameters for name in p.names}
    described |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    begins = _lay_out_model(folder / MODEL, described)
    state = _joined(layout, slices, entries)
    vectors: dict[int, dict[str, int]] = {}
    members = []
    counters = joint_counters(each.counters for each in entries)
    for index in range(len(model.optimizers)):
        groups = _groups_of(
            model,
            index,
            entries[0].groups[index],
            counters[index] if counters else (),
            settings[index] if index < len(settings) else (),
        )
        names = tuple(itertools.chain.from_iterable(group["params"] for group in groups))
        members.append(names)
        vectors |= _lay_out_optimizer(folder / optimizer_file(index), layout, names, groups, state)
    return Places(
        weights=tuple(tuple(begins[name] for name in p.names) for p in layout.parameters),
        state=tuple(vectors.get(index, {}) for index in range(len(layout.parameters))),
        optimizer=tuple(p.set_index for p in layout.parameters),
        members=tuple(members),
        tensors={name: begins[name] for name in tensors},
    )


# -- the model ----------------------------------------------------------------------------------------------


def _lay_out_model(path: Path, described: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, int]:
    """Create a file in safetensors format. Return where each tensor begins.

    The format is described at https://huggingface.co/docs/safetensors. Tensors with larger elements come first, so
    that all tensors are aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in sorted(described.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": name_in_file(dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % LENGTH.size)
    start = LENGTH.size + len(encoded)
    with path.open("wb") as file:
        file.write(LENGTH.pack(len(encoded)) + encoded)
        file.truncate(start + end)
    return {name: start + header[name]["data_offsets"][0] for name in described}


@functools.cache
def name_in_file(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a file in safetensors format."""
    try:
        example = safetensors.torch.save({"tensor": torch.empty(0, dtype=dtype)})
    except Exception as error:  # the library does not document its exceptions
        raise CheckpointError(
            f"The model has a tensor of {dtype}, which a file in safetensors format cannot contain. Register it as a "
            "buffer with persistent=False, or switch checkpoints off."
        ) from error
    (length,) = LENGTH.unpack_from(example)
    named: str = json.loads(example[LENGTH.size : LENGTH.size + length])["tensor"]["dtype"]
    return named


# -- the optimizers -----------------------------------------------------------------------------------------


def _joined(
    layout: Layout, slices: Sequence[ShardSlice], entries: Sequence[StateEntries]
) -> dict[int, dict[str, _Entry]]:
    """Return the entries of the optimizer state of each parameter.

    If a number has different values in the shards, the highest value is used.
    """
    joined: dict[int, dict[str, _Entry]] = {}
    for bounds, found in zip(slices, entries, strict=True):
        described = [
            *((name, dtype, None) for name, dtype in found.vectors.items()),
            *((name, dtype, value) for name, (dtype, value) in found.numbers.items()),
            *((name, "uint8", value) for name, value in found.nested.items()),
        ]
        for name, dtype, value in described:
            position, _, key = name.partition("/")
            index = bounds.segments[int(position)].parameter
            of_parameter = joined.setdefault(index, {})
            if value is None:
                shape = found.shapes.get(name, layout.parameters[index].shape)
                of_parameter[key] = _Entry(torch.empty(shape, dtype=torch_dtype(dtype)), is_vector=True)
            elif isinstance(value, bytes):
                structure = torch.frombuffer(bytearray(value), dtype=torch.uint8)
                of_parameter[key] = _Entry(structure, is_vector=False)
            elif key not in of_parameter or of_parameter[key].value.item() < value:
                of_parameter[key] = _Entry(torch.tensor(value, dtype=torch_dtype(dtype)), is_vector=False)
    return joined


def _groups_of(
    model: ModelSpec,
    index: int,
    servers: Sequence[HyperParameters],
    counters: Sequence[HyperParameters],
    settings: Settings,
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with all settings that torch expects, and the names of their parameters."""
    spec = model.optimizers_over_layout[index]
    groups: list[dict[str, Any]] = [dict(group) for group in servers]
    if spec.name in OF_TORCH:  # not for other classes, because this process does not load the code of users
        parameters = [[specimen(whole=spec.whole)] for _ in servers]
        groups = make_optimizer(spec.name, servers, parameters).param_groups
    for group, more in zip(groups, settings, strict=False):
        group.update(more)
    for group, counted in zip(groups, counters, strict=False):
        group.update(counted)
    for number, group in enumerate(groups):
        group["params"] = [
            parameter.names[0]
            for parameter, of in zip(model.layout.parameters, spec.group_of, strict=True)
            if parameter.set_index == index and of == number
        ]
    return groups


def _lay_out_optimizer(
    path: Path,
    layout: Layout,
    members: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, Mapping[str, _Entry]],
) -> dict[int, dict[str, int]]:
    """Write the `state_dict()` of an optimizer. Return where each vector begins: parameter -> key -> offset."""
    index_of = {parameter.names[0]: index for index, parameter in enumerate(layout.parameters)}
    numbers = itertools.count()
    of_member = {
        position: state[index_of[name]] for position, name in enumerate(members) if index_of[name] in state
    }
    state_dict: dict[str, Any] = {
        "state": {
            position: entries_of({name: entry.value for name, entry in entries.items()})
            for position, entries in of_member.items()
        },
        "param_groups": [
            {
                **{key: _plain(value) for key, value in group.items()},
                "params": [next(numbers) for _ in group["params"]],
            }
            for group in groups
        ],
    }
    try:
        with skip_data():
            torch.save(state_dict, path)
    except RuntimeError as error:  # torch's writer does not pass on the error of the system
        raise OSError(0, f"{path.name} cannot be created") from error
    in_file = [
        (members[position], key, of_member[position][key])
        for position, entries in state_dict["state"].items()
        for key in tensors_of(entries)
        if not key.startswith((NUMBER, NESTED))
    ]
    places: dict[int, dict[str, int]] = {}
    with path.open("r+b") as file:
        for (name, key, entry), begin in zip(in_file, _begins_of_tensors(file), strict=True):
            if entry.is_vector:
                places.setdefault(index_of[name], {})[key] = begin
            else:
                file.seek(begin)
                file.write(bytes_of(entry.value.reshape(1)))
    return places


def _plain(value: Any) -> Any:
    """Return a hyper-parameter as a number if it is a tensor with one element."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _begins_of_tensors(file: IO[bytes]) -> list[int]:
    """Return where the values of each tensor begin in a file of `torch.save`, in the order of the tensors.

    The file is an uncompressed ZIP archive. The archive contains the tensors as NAME/data/0, NAME/data/1, ...
    """
    begins = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data"):
                file.seek(info.header_offset)
                header = file.read(ZIP_HEADER.size)
                begins[int(number)] = info.header_offset + ZIP_HEADER.size + sum(ZIP_HEADER.unpack(header))
    return [begins[number] for number in range(len(begins))]
