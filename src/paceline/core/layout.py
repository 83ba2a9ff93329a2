"""The layout of parameters in flat vectors, their slicing into shards, and the servers of these shards.

The module also defines the description of a model, which processes send to each other, the format in which values
travel (`--wire`), and the entries of a shard's optimizer state.

This module contains only arithmetic and does not import torch. A *parameter set* consists of the parameters that one
optimizer of the script trains. The parameters of a set are placed one after another in one flat vector per dtype, and
each parameter begins at a 64-byte boundary. The name of a vector is its dtype; for sets after the first one, "/" and
the index of the set follow. So each set is sliced separately, and a push or a pull of one set is a selection of whole
vectors.

A script may add parameters after training has begun: with another optimizer, or as a new parameter group of an existing
optimizer. The parameters that are added together form a *part* of the layout. Each part has vectors of its own, whose
names end with "." and the number of the part, so parameters and slices that exist already keep their places.

Elastic Parameter Slicing (section III of the FluentPS paper) then cuts each vector into slices of almost equal size,
regardless of the sizes of the layers, so a layer may be spread over several shards. A push or a pull transfers slices
of these vectors without conversion.

>>> layout = Layout.of([Parameter(("w",), (4, 5), "float32"), Parameter(("b",), (4,), "float32")])
>>> layout.sizes, layout.offsets  # 20 elements, padded to 32; then 4, padded to 16
({'float32': 48}, (0, 32))
>>> [shard.bounds for shard in layout.slice_evenly(2)]
[{'float32': (0, 16)}, {'float32': (16, 48)}]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec

from ..errors import ConfigurationError, ProtocolError

ALIGNMENT_BYTES = 64

SLICINGS = ("auto", "even", "by-parameter")
"""The ways to slice the parameters. See `ModelSpec.sliced`."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Size in bytes of one element of each dtype that a parameter may have. Each key is the name of a dtype in torch."""

T = TypeVar("T")

Range = tuple[str, int, int]
"""A part of a flat vector: name of the vector, index of the first element, and index of the last element plus one."""


def without_last(ranges: Sequence[Range], missing_bytes: int) -> list[Range]:
    """Cut the last `missing_bytes` bytes off a sequence of ranges, and return the remaining ranges.

    >>> without_last([("float32", 0, 8), ("float64", 0, 4)], 33)
    [('float32', 0, 7)]
    """
    left = []
    for vector, start, stop in reversed(ranges):
        if (end := stop + -missing_bytes // item_bytes(vector)) > start:
            left.append((vector, start, end))
        missing_bytes = max(missing_bytes - (stop - start) * item_bytes(vector), 0)
    return left[::-1]


def dtype_of(vector: str) -> str:
    """Return the dtype of the vector with this name."""
    return vector.partition("/")[0]


def item_bytes(vector: str) -> int:
    """Return the size in bytes of one element of the vector with this name."""
    return ITEM_BYTES[dtype_of(vector)]


def encoded_bytes(vector: str, count: int, codec: str) -> int:
    """Return the encoded size in bytes of `count` elements of a vector."""
    if dtype_of(vector) in CODECS[codec].dtypes:
        return CODECS[codec].encoded_bytes(count)
    return count * item_bytes(vector)


def of_set(vectors: Mapping[str, T], set_index: int | None) -> dict[str, T]:
    """Return the vectors of one parameter set; all vectors if `set_index` is None.

    >>> of_set({"float32": 1, "float64": 2, "float32/1": 3, "float32/1.4": 4}, 1)
    {'float32/1': 3, 'float32/1.4': 4}
    """
    if set_index is None:
        return dict(vectors)
    return {name: vector for name, vector in vectors.items() if _set_of(name) == set_index}


def _set_of(vector: str) -> int:
    """Return the index of the parameter set to which the vector with this name belongs."""
    return int(vector.partition("/")[2].partition(".")[0] or 0)


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of a trainable tensor of the model.

    Attributes:
        names: all names of the tensor in the model's `state_dict`; more than one if the parameter is tied.
        shape: shape of the tensor.
        dtype: name of the dtype in torch, for example "float32".
        set_index: index of the parameter set that the parameter belongs to.
        part: number of the part of the layout with which the parameter was added; 0 if it was there from the start.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    set_index: int = 0
    part: int = 0

    @property
    def vector(self) -> str:
        """Name of the vector that contains the parameter."""
        if self.part:
            return f"{self.dtype}/{self.set_index}.{self.part}"
        return f"{self.dtype}/{self.set_index}" if self.set_index else self.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.names[0]} {self.dtype}{list(self.shape)}"


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of one parameter that lies in one shard.

    Attributes:
        parameter: index of the parameter.
        dtype: name of the vector that contains the segment: the dtype, with the set and the part if they are not 0.
        start: index of the segment's first element within the shard's slice of the vector.
        stop: index of the segment's last element within the shard's slice of the vector, plus one.
        offset: index of the segment's first element within the flattened parameter.
        shape: shape of the parameter if the optimizer needs whole tensors, so that the segment is the whole parameter;
            else None.
    """

    parameter: int
    dtype: str
    start: int
    stop: int
    offset: int
    shape: tuple[int, ...] | None = None


class Piece(NamedTuple):
    """A range [start, stop) within a shard's slice of one vector, and the indices of the parameters in this range."""

    dtype: str
    start: int
    stop: int
    parameters: frozenset[int]


def ranges_of(pieces: Sequence[Piece]) -> list[Range]:
    """Return the ranges of the given pieces, in order. Adjacent pieces are merged.

    >>> empty = frozenset()
    >>> ranges_of([Piece("float32", 0, 8, empty), Piece("float32", 8, 16, empty), Piece("float64", 0, 8, empty)])
    [('float32', 0, 16), ('float64', 0, 8)]
    """
    ranges: list[Range] = []
    for vector, start, stop, _ in pieces:
        if ranges and ranges[-1][0] == vector and ranges[-1][2] == start:
            ranges[-1] = (vector, ranges[-1][1], stop)
        else:
            ranges.append((vector, start, stop))
    return ranges


class ShardSlice(msgspec.Struct, frozen=True):
    """The slice that one shard holds: its bounds (start, stop) in each vector, and its segments."""

    index: int
    bounds: dict[str, tuple[int, int]]
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        """Size in bytes of a push to this shard, or of a pull from this shard."""
        return self.encoded_bytes("float32")

    def encoded_bytes(self, codec: str) -> int:
        """Return the size in bytes of a push or a pull with a codec."""
        return sum(
            encoded_bytes(vector, stop - start, codec) for vector, (start, stop) in self.bounds.items()
        )

    def of_set(self, set_index: int) -> ShardSlice:
        """Return the part of the slice that belongs to one parameter set."""
        bounds = of_set(self.bounds, set_index)
        return ShardSlice(self.index, bounds, tuple(s for s in self.segments if s.dtype in bounds))

    def pieces(self, size_bytes: int) -> tuple[Piece, ...]:
        """Return the slice as pieces of at most `size_bytes`, in order. Each piece can be sent separately."""
        pieces = []
        for dtype, (low, high) in self.bounds.items():
            step = max(1, size_bytes // item_bytes(dtype))
            for start in range(0, high - low, step):
                stop = min(start + step, high - low)
                inside = {
                    s.parameter
                    for s in self.segments
                    if s.dtype == dtype and s.start < stop and start < s.stop
                }
                pieces.append(Piece(dtype, start, stop, frozenset(inside)))
        return tuple(pieces)


def absent_ranges(bounds: ShardSlice, present: bytes) -> list[Range]:
    """Return the ranges of a slice whose parameters have no gradient.

    `present` contains 1 for each parameter of the model that has a gradient, and 0 for each other parameter.

    >>> layout = Layout.of([Parameter(("a",), (4,), "float32"), Parameter(("b",), (4,), "float32")])
    >>> absent_ranges(layout.slice_evenly(1)[0], bytes([1, 0]))
    [('float32', 16, 20)]
    """
    if 0 not in present:
        return []
    return [(s.dtype, s.start, s.stop) for s in bounds.segments if not present[s.parameter]]


class Layout(msgspec.Struct, frozen=True):
    """The position of each parameter in the flat vectors.

    Attributes:
        parameters: the parameters, sorted by part, then by set, then in the order of the optimizer's groups.
        offsets: for each parameter, the index of its first element in its vector.
        sizes: name of each vector -> number of its elements, including padding.
    """

    parameters: tuple[Parameter, ...]
    offsets: tuple[int, ...]
    sizes: dict[str, int]

    @classmethod
    def of(cls, parameters: Sequence[Parameter]) -> Layout:
        """Return the layout of the given parameters, in the given order.

        Raises:
            ConfigurationError: there are no parameters, or a parameter has a dtype that cannot be trained.
        """
        if not any(parameter.size for parameter in parameters):
            raise ConfigurationError("The optimizer has no parameters to train.")
        sizes: dict[str, int] = {}
        offsets = []
        for parameter in parameters:
            if parameter.dtype not in ITEM_BYTES:
                raise ConfigurationError(
                    f"Parameter {parameter} has a dtype that Paceline cannot train; "
                    f"expected one of {', '.join(ITEM_BYTES)}."
                )
            offsets.append(sizes.get(parameter.vector, 0))
            sizes[parameter.vector] = aligned(offsets[-1] + parameter.size, parameter.dtype)
        return cls(tuple(parameters), tuple(offsets), dict(sorted(sizes.items())))

    @property
    def size_bytes(self) -> int:
        """Total size in bytes of a push to all shards, or of a pull from all shards."""
        return sum(size * item_bytes(dtype) for dtype, size in self.sizes.items())

    def slice_evenly(
        self, shards: int, block: int = 1, costs: Mapping[int, Sequence[int]] | None = None
    ) -> tuple[ShardSlice, ...]:
        """Cut every vector into one range per shard, and return the slices of all shards.

        Each vector is cut only where two blocks of 64 bytes meet, so that every range is aligned, and only where two
        blocks of `block` elements meet, because such a block is encoded as a whole. The ranges of one vector differ by
        at most one block, which has 64 bytes if nothing is encoded. These sizes include padding, which is also stored,
        sent and updated. Without padding, the numbers of elements may differ more, because each parameter is padded to
        64 bytes.

        Args:
            shards: number of shards.
            block: number of elements that are encoded together.
            costs: parameter set whose parameters are kept whole -> for each parameter of the layout, the cost of its
                update. The largest cost of a shard is as small as possible with the given order of parameters. Shards
                may be empty.

        >>> scalars = [Parameter((f"scale{i}",), (1,), "float32") for i in range(32)]
        >>> layout = Layout.of([*scalars, Parameter(("weight",), (512,), "float32")])
        >>> slices = layout.slice_evenly(2)
        >>> [shard.size_bytes for shard in slices]
        [2048, 2048]
        >>> [sum(segment.stop - segment.start for segment in shard.segments) for shard in slices]
        [32, 512]
        """
        whole: dict[str, list[int]] = {}  # vector -> where each shard ends
        for set_index, of_parameter in (costs or {}).items():
            for part in sorted({p.part for p in self.parameters if p.set_index == set_index}):
                members = [
                    index
                    for index, p in enumerate(self.parameters)
                    if (p.set_index, p.part) == (set_index, part)
                ]
                groups = _divide([of_parameter[index] for index in members], shards)
                whole |= self._ends([[members[place] for place in group] for group in groups])
        bounds = [
            {
                dtype: (
                    ([0, *whole[dtype]][shard], whole[dtype][shard])
                    if dtype in whole
                    else (
                        _bound(size, dtype, shard, shards, block),
                        _bound(size, dtype, shard + 1, shards, block),
                    )
                )
                for dtype, size in self.sizes.items()
            }
            for shard in range(shards)
        ]
        return tuple(ShardSlice(i, b, self._segments(b, costs or {})) for i, b in enumerate(bounds))

    def _ends(self, groups: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """Return where the ranges of some groups of adjacent parameters end: vector -> for each group, its end."""
        ends: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            for index in group:
                parameter = self.parameters[index]
                found = ends.setdefault(parameter.vector, [0] * len(groups))
                end = self.offsets[index] + aligned(parameter.size, parameter.dtype)
                found[number:] = [end] * (len(groups) - number)
        return ends

    def slice_by_parameter(self, shards: int, whole: Collection[int] = ()) -> tuple[ShardSlice, ...]:
        """Return slices of whole, adjacent parameters. The parameter counts of the slices differ by at most one.

        By default, PS-Lite slices in this way: it divides the range of parameter keys equally. The shard with the
        largest layer then holds most of the model (FluentPS, section III). This slicing is provided for comparison.
        Each part of the layout is sliced separately.

        Args:
            shards: number of shards.
            whole: the parameter sets whose optimizers need whole tensors.

        Raises:
            ConfigurationError: there are fewer parameters than shards at the start of training.
        """
        parts = [
            [index for index, parameter in enumerate(self.parameters) if parameter.part == part]
            for part in range(max(parameter.part for parameter in self.parameters) + 1)
        ]
        count = len(parts[0])
        if shards > count:
            raise ConfigurationError(
                f"shards is {shards}, but the model has {count} parameters, and with slicing 'by-parameter' each "
                f"shard needs at least one. Use at most {count} shards, or slicing 'even'."
            )
        bounds: list[dict[str, tuple[int, int]]] = []
        ends = dict.fromkeys(self.sizes, 0)
        for shard in range(shards):
            starts = dict(ends)
            for part in parts:
                for index in part[len(part) * shard // shards : len(part) * (shard + 1) // shards]:
                    parameter = self.parameters[index]
                    ends[parameter.vector] = self.offsets[index] + aligned(parameter.size, parameter.dtype)
            bounds.append({dtype: (starts[dtype], ends[dtype]) for dtype in self.sizes})
        return tuple(ShardSlice(i, b, self._segments(b, whole)) for i, b in enumerate(bounds))

    def _segments(self, bounds: dict[str, tuple[int, int]], whole: Container[int]) -> tuple[Segment, ...]:
        segments = []
        for index, (parameter, offset) in enumerate(zip(self.parameters, self.offsets, strict=True)):
            low, high = bounds[parameter.vector]
            start, stop = max(offset, low), min(offset + parameter.size, high)
            if start < stop:
                shape = parameter.shape if parameter.set_index in whole else None
                segments.append(
                    Segment(index, parameter.vector, start - low, stop - low, start - offset, shape)
                )
        return tuple(segments)


def _block(dtype: str) -> int:
    return ALIGNMENT_BYTES // item_bytes(dtype)


def aligned(size: int, dtype: str) -> int:
    """Round a number of elements up to the next multiple of the alignment, at which a parameter may begin."""
    block = _block(dtype)
    return -(-size // block) * block


def _divide(costs: Sequence[int], groups: int) -> list[range]:
    """Divide costs into adjacent groups whose largest sum is as small as possible. The last groups may be empty.

    >>> _divide([5, 1, 1, 4, 4], 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """

    def filled(most: int) -> list[range]:
        found, begin, total = [], 0, 0
        for index, cost in enumerate(costs):
            if total + cost > most:
                found.append(range(begin, index))
                begin, total = index, 0
            total += cost
        return [*found, range(begin, len(costs))]

    low, high = max(costs, default=0), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(filled(middle)) <= groups else (middle + 1, high)
    found = filled(low)
    return found + [range(len(costs), len(costs))] * (groups - len(found))


def _bound(size: int, dtype: str, shard: int, shards: int, block: int) -> int:
    block = max(block, _block(dtype))
    return min(-(-size // block) * shard // shards * block, size)


# -- The description of a model, as sent between processes: its parameters, its optimizer, and its other tensors
#
# Each worker registers a description. The coordinator checks that all descriptions are equal, apart from the
# hyper-parameters, and the servers create their shards from the description.

HyperParameter = float | int | bool | str | tuple[float | None, ...] | None

HyperParameters = dict[str, HyperParameter]
"""The settings of one parameter group: `lr`, `momentum`, `betas`, ..."""

Counters = tuple[tuple[HyperParameters, ...], ...]
"""For each parameter set, the entries that its optimizer has itself changed in each group, or added to the group. The
optimizers in `torch.optim` never change groups. So the item of a set is () if its optimizer is one of these, or if the
shard has no parameters of the set."""


def joint_counters(of_shards: Iterable[Counters]) -> Counters:
    """Return the counters of each parameter set, from the first shard that has counters for this set.

    All shards that have counters for a set have equal counters.
    """
    by_set = itertools.zip_longest(*of_shards, fillvalue=())
    return tuple(next(filter(None, of_set), ()) for of_set in by_set)


class OptimizerSpec(msgspec.Struct, frozen=True):
    """The description of the user's optimizer.

    Attributes:
        name: name of the class in `torch.optim` that the servers use, or "module:Class" for any other class.
        groups: hyper-parameters of each group.
        group_of: for each parameter of the optimizer's parameter set, in the order of the layout, the index of its
            group. If the optimizer has replaced another one, parameters that only the replaced optimizer trained have
            group 0.
        replaced: number of times that another optimizer has replaced the set's optimizer. Each time, the state of the
            replaced optimizer is dropped.
        whole: True if the update of an element depends on other elements of its tensor, so servers need whole tensors.
    """

    name: str
    groups: tuple[HyperParameters, ...]
    group_of: tuple[int, ...]
    replaced: int = 0
    whole: bool = False

    def cost_of(self, parameter: Parameter) -> int:
        """Return the cost of an update of a parameter, in an arbitrary unit.

        Muon multiplies matrices. The cost of this for each element is about proportional to the length of the shorter
        side.
        """
        sides = parameter.shape if self.name == "Muon" else ()
        return aligned(parameter.size, parameter.dtype) * min(sides, default=1)


class BufferSpec(msgspec.Struct, frozen=True):
    """A tensor of the model's `state_dict` that is not a parameter, such as a running mean of BatchNorm.

    Attributes:
        name: name of the tensor in the `state_dict`.
        shape: shape of the tensor.
        dtype: name of the dtype in torch.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class FrozenSpec(BufferSpec, frozen=True):
    """A parameter of the model that no optimizer trains. Training does not change it.

    Attributes:
        digest: hash of the dtype, the shape and the values, as 64 hexadecimal digits (see `shard.vectors`).
    """

    digest: str


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of the model that a worker trains. All workers of a job must train the same model.

    A script may train with several optimizers. Each optimizer has a parameter set of its own. A script may also add
    parameters after training has begun. The description is then replaced by an extended description, in which all
    earlier parameters keep their places.

    Attributes:
        layout: layout of the parameters of all sets.
        optimizer: the optimizer of the first parameter set.
        buffers: the tensors that are not parameters, and that each worker changes on its own.
        frozen: the parameters that no optimizer trains, with the digests of this worker's values.
        further: the optimizers of the other parameter sets, in order.
    """

    layout: Layout
    optimizer: OptimizerSpec
    buffers: tuple[BufferSpec, ...]
    further: tuple[OptimizerSpec, ...] = ()
    frozen: tuple[FrozenSpec, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the frozen parameters, in order."""
        return tuple(spec.digest for spec in self.frozen)

    @property
    def optimizers(self) -> tuple[OptimizerSpec, ...]:
        """The optimizer of each parameter set."""
        return (self.optimizer, *self.further)

    def buffers_beyond(self, before: ModelSpec) -> list[BufferSpec]:
        """Return the buffers that this model has, and that the model before its latest extension lacks."""
        known = {buffer.name for buffer in before.buffers}
        return [buffer for buffer in self.buffers if buffer.name not in known]

    def frozen_beyond(self, before: ModelSpec) -> list[FrozenSpec]:
        """Return the frozen parameters that this model has, and that the model before its latest extension lacks."""
        known = {spec.name for spec in before.frozen}
        return [spec for spec in self.frozen if spec.name not in known]

    def sliced(self, shards: int, slicing: str, block: int = 1) -> tuple[ShardSlice, ...]:
        """Return the slice of each shard.

        Args:
            shards: number of shards.
            slicing: "auto" to slice each parameter set evenly or, if its optimizer needs whole tensors, between
                tensors; "even"; or "by-parameter".
            block: number of elements that are encoded together; see `Layout.slice_evenly`.

        Raises:
            ConfigurationError: the model cannot be sliced in this way.
        """
        whole = {index: each for index, each in enumerate(self.optimizers) if each.whole}
        if slicing == "by-parameter":
            return self.layout.slice_by_parameter(shards, whole)
        if whole and slicing == "even":
            names = " and ".join(each.name for each in whole.values())
            raise ConfigurationError(
                f"slicing is 'even', which cuts tensors in parts, but {names} needs whole tensors. Use slicing 'auto', "
                "which cuts only the tensors of other optimizers."
            )
        costs = {
            index: [optimizer.cost_of(parameter) for parameter in self.layout.parameters]
            for index, optimizer in whole.items()
        }
        return self.layout.slice_evenly(shards, block, costs)

    @property
    def optimizers_over_layout(self) -> tuple[OptimizerSpec, ...]:
        """The optimizer of each parameter set, with a `group_of` that covers all parameters of the layout.

        The group of a parameter that belongs to another set is 0.
        """
        parameters = self.layout.parameters
        spread = []
        for set_index, optimizer in enumerate(self.optimizers):
            groups = iter(optimizer.group_of)
            group_of = tuple(next(groups) if p.set_index == set_index else 0 for p in parameters)
            spread.append(msgspec.structs.replace(optimizer, group_of=group_of))
        return tuple(spread)


def first_difference(model: ModelSpec, other: ModelSpec) -> str:
    """Describe the first difference between `model` and `other`; return "" if there is none.

    Hyper-parameters and the values of frozen parameters may differ.
    """
    parameters, others = model.layout.parameters, other.layout.parameters
    for expected, found in zip(parameters, others, strict=False):
        if expected != found:
            return _difference_of_parameters(expected, found)
    counts = ("parameter", parameters, others), ("optimizer", model.optimizers, other.optimizers)
    for counted in counts:
        if difference := _difference_of_counts(*counted):
            return difference
    for expected_optimizer, found_optimizer in zip(model.optimizers, other.optimizers, strict=True):
        if difference := _difference_of_optimizers(expected_optimizer, found_optimizer):
            return difference
    for kind, expected_tensors, found_tensors in (
        ("buffer", model.buffers, other.buffers),
        ("frozen parameter", model.frozen, other.frozen),
    ):
        for expected_tensor, found_tensor in zip(expected_tensors, found_tensors, strict=False):
            if str(expected_tensor) != str(found_tensor):
                return f"{kind} {found_tensor} instead of {expected_tensor}"
        if difference := _difference_of_counts(kind, expected_tensors, found_tensors):
            return difference
    return ""


def _difference_of_parameters(expected: Parameter, found: Parameter) -> str:
    """Describe how two parameters differ, which may have the same first name, dtype and shape."""
    if str(expected) != str(found):
        return f"{found} instead of {expected}"
    if expected.names != found.names:
        names, others = (" and ".join(each.names) for each in (expected, found))
        return f"{found} is named {others} instead of {names}"
    if expected.set_index != found.set_index:
        return f"{found} is trained by optimizer {found.set_index} instead of {expected.set_index}"
    return f"{found} belongs to addition {found.part} of parameters instead of {expected.part} (0: the start)"


def _difference_of_counts(kind: str, expected: Sequence[object], found: Sequence[object]) -> str:
    return "" if len(expected) == len(found) else f"{len(found)} {kind}s instead of {len(expected)}"


def require_extension(model: ModelSpec, extended: ModelSpec) -> None:
    """Check that an extended model keeps all parameters of a model in place, and adds parameters in one new part.

    Raises:
        ProtocolError: the extended model breaks one of these two rules.
    """
    before, after = model.layout.parameters, extended.layout.parameters
    part = max(parameter.part for parameter in before) + 1
    if after[: len(before)] != before or not {parameter.part for parameter in after[len(before) :]} <= {part}:
        raise ProtocolError(
            f"the extended model does not consist of the earlier parameters and those of part {part}"
        )
    for old, new in zip(model.optimizers, extended.optimizers, strict=False):
        groups, members = len(old.groups), len(old.group_of)
        if new.replaced == old.replaced + 1:
            if new.whole != old.whole:  # the places of the parameters would change
                raise ProtocolError(
                    "the extended model keeps tensors whole that were cut, or cuts tensors that were whole"
                )
            continue
        if new.replaced != old.replaced or (
            new.name != old.name
            or len(new.groups) < groups
            or new.group_of[:members] != old.group_of
            or any(group < groups for group in new.group_of[members:])
        ):
            raise ProtocolError("the extended model changes the groups of earlier parameters")
    if len(extended.optimizers) < len(model.optimizers):
        raise ProtocolError("the extended model lacks an optimizer")
    for kind, earlier, later in (
        ("buffer", model.buffers, extended.buffers),
        ("frozen parameter", model.frozen, extended.frozen),
    ):
        named = {spec.name: str(spec) for spec in earlier}
        for spec in later:
            if named.get(spec.name, str(spec)) != str(spec):
                raise ProtocolError(f"the {kind} {named[spec.name]} has become {spec} since training began")


def _difference_of_optimizers(expected: OptimizerSpec, found: OptimizerSpec) -> str:
    if (expected.name, expected.whole) != (found.name, found.whole):
        return f"optimizer {found.name} instead of {expected.name}"
    same = expected.group_of == found.group_of
    assigned = "" if same else "the parameters are assigned to groups differently"
    return _difference_of_counts("parameter group", expected.groups, found.groups) or assigned


# -- The format in which gradients and weights travel between processes: the option `--wire` -----------------
#
# On a slow link, the transfers of a large model take longer than the computation of its gradients. A codec rounds
# values, so that only half (bf16), a quarter (int8) or a seventh (int4) of the bytes travel. Each direction has a codec
# of its own: gradients from the workers to the servers, and weights from the servers to the workers. The shards hold
# the weights without rounding, and apply updates to these weights. So an update that is too small to change a rounded
# weight is not lost. `core.messages.push` says what is encoded.
#
# The outbox of a worker encodes a piece when the piece is sent. The checksums in the outbox are computed before
# encoding. The inbox of a server decodes a piece when its message is complete. In the other direction, a server encodes
# the weights of a shard once for all answers between two updates.
#
# With int8 and int4, weights travel as differences to a *base*: the weights that the workers have decoded last. Each
# new version of the weights is encoded once, as its difference to the base. The base plus the decoded difference is the
# next base. So each difference contains the rounding error of the previous difference. This method requires that all
# workers read the same versions of the weights (see `SyncModel.lockstep`). Under other models, bf16 takes the place of
# int8 and int4. `core.shard.Bases` knows which worker has which base.

DIRECTIONS = ("gradients", "weights")


class Codec(NamedTuple):
    """The properties of a codec that all hosts must know. `shard.codecs` has an encoding class for each codec.

    Attributes:
        block: number of values that are encoded together.
        block_bytes: size of an encoded block.
        dtypes: the dtypes that the codec encodes. Vectors with other dtypes travel as they are.
        based: True if weights travel as differences to a base.
        feedback: True if the rounding error of one gradient is added to the next gradient.
    """

    block: int
    block_bytes: int
    dtypes: tuple[str, ...]
    based: bool = False
    feedback: bool = False

    def encoded_bytes(self, count: int) -> int:
        """Return the size in bytes of `count` encoded values.

        >>> CODECS["int8"].encoded_bytes(257)  # two blocks
        520
        """
        return -(-count // self.block) * self.block_bytes


CODECS = {
    "float32": Codec(1, 4, ()),
    "bf16": Codec(1, 2, ("float32",)),
    "int8": Codec(256, 256 + 4, ("float32", "float16", "bfloat16"), based=True),
    "int4": Codec(256, 128 + 16, ("float32", "float16", "bfloat16"), based=True, feedback=True),
}
"""Name of a codec in the option `--wire` -> codec."""


class WireFormat(msgspec.Struct, frozen=True):
    """The codec of float32 values in each direction. With "float32", the values travel as they are.

    Attributes:
        gradients: codec of the gradients that workers send to servers.
        weights: codec of the weights that servers send to workers.
        fixed: True if the user has named the codec of each direction, so that no other codec may take its place.

    Example:
        >>> str(WireFormat.read("gradients=bf16")), WireFormat.read("int4").codec_of_weights(common=False)
        ('gradients=bf16,weights=float32', 'bf16')
    """

    gradients: str = "float32"
    weights: str = "float32"
    fixed: bool = True

    @classmethod
    def read(cls, text: str) -> WireFormat:
        """Parse the notation of the command line: a codec, or `gradients=CODEC,weights=CODEC`.

        A direction that is not named has the codec "float32".

        Raises:
            ConfigurationError: the notation is not valid.
        """
        pairs = [part.partition("=")[::2] for part in text.split(",")] if "=" in text else []
        named = dict(pairs) if pairs else dict.fromkeys(DIRECTIONS, text)
        known = named.keys() <= set(DIRECTIONS) and CODECS.keys() >= set(named.values())
        if not known or len(named) < len(pairs):
            raise ConfigurationError(
                f"wire is {text!r}, expected one of {', '.join(map(repr, CODECS))}, or a codec for each direction, "
                "such as 'gradients=int8,weights=float32'."
            )
        return cls(**named, fixed=bool(pairs))

    def __str__(self) -> str:
        if not self.fixed or self.gradients == self.weights == "float32":
            return self.gradients
        return f"gradients={self.gradients},weights={self.weights}"

    def codec_of_weights(self, *, common: bool) -> str:
        """Return the codec of weights that workers compute with.

        Args:
            common: True if all workers read the same versions of the weights. Otherwise, differences would need a
                separate base for each worker, so bf16 takes the place of the codec.
        """
        return "bf16" if CODECS[self.weights].based and not common else self.weights

    def require_usable(self, sync: str, *, common: bool) -> None:
        """Raise `ConfigurationError` if the user has named a codec that the sync model rules out for weights.

        Args:
            sync: the sync model.
            common: see `codec_of_weights`.
        """
        if self.fixed and self.weights != (usable := self.codec_of_weights(common=common)):
            raise ConfigurationError(
                f"wire is {str(self)!r}, but with {self.weights}, weights travel as differences to weights that all "
                f"workers have, and under {sync} workers have different weights. Use weights={usable}."
            )

    @property
    def exact(self) -> bool:
        """True if nothing is rounded."""
        return self.codecs == {"float32"}

    @property
    def codecs(self) -> set[str]:
        """The codecs of a run."""
        return {
            "float32",
            self.gradients,
            *(self.codec_of_weights(common=common) for common in (True, False)),
        }

    @property
    def encoded_dtypes(self) -> set[str]:
        """The dtypes that at least one codec of a run encodes."""
        return {dtype for codec in self.codecs for dtype in CODECS[codec].dtypes}

    @property
    def block(self) -> int:
        """Number of values in a block. A block is encoded as a whole, so shards are cut only between blocks."""
        return math.lcm(*(CODECS[codec].block for codec in self.codecs))

    def sizes(self, slices: Sequence[ShardSlice]) -> dict[str, list[int]]:
        """Return, for each codec of a run, the size of each shard in bytes."""
        return {codec: [bounds.encoded_bytes(codec) for bounds in slices] for codec in self.codecs}

    def bytes_of(self, vectors: Mapping[str, int], *, common: bool) -> tuple[int, int]:
        """Return the encoded sizes in bytes of a gradient and of all weights.

        Args:
            vectors: name of each vector -> number of its elements.
            common: see `codec_of_weights`.
        """
        gradients, weights = (
            sum(encoded_bytes(vector, count, codec) for vector, count in vectors.items())
            for codec in (self.gradients, self.codec_of_weights(common=common))
        )
        return gradients, weights


# -- The wire format that is recommended if links are slow: the one with the fewest bytes that costs no accuracy
#
# The optimizer determines how much accuracy rounding costs. With SGD and AdamW, int4 cost no measurable accuracy, on
# images and text. Muon makes all directions of a matrix's gradient equally large, even the directions in which the
# gradient is smaller than the rounding error. With Muon, int4 gradients raised the loss by 1.1 % in a first test, and
# by 0.1 % in the tests of docs/reference/codecs.md. The reason is not known, so int4 is recommended only for weights.
# int8 cost no measurable accuracy with any of the three optimizers.

SIMILAR = {
    **dict.fromkeys(("SGD", "ASGD"), "SGD"),
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad"), "AdamW"),
}
"""Name of an optimizer of torch -> the tested optimizer that makes similar updates.

The steps of Rprop depend only on signs, and the steps of Adadelta depend on its earlier steps, so these two optimizers
resemble none of the tested ones.
"""

HARMLESS = "cost no measurable accuracy in"
FLOAT32 = {"float32": 1 << 20}  # vectors that stand for any number of float32 values


class WireAdvice(NamedTuple):
    """A wire format that is recommended.

    Attributes:
        wire: the format, in the notation of `--wire`.
        reason: why no other format is recommended, as a clause.
        gradients: size of a gradient in this format, as a share of its size in the present format.
        both: size of a gradient and of the weights in this format, as a share of their size in the present format.
    """

    wire: str
    reason: str
    gradients: float
    both: float

    def sentence(self, sending_s: float, other_s: float, share: float, basis: str) -> str:
        """Return the advice, with an estimate of the speed-up of a step; "" if the speed-up is negligible.

        Args:
            sending_s: the part of a step's time in which messages are on their way, in seconds.
            other_s: the rest of a step's time, in seconds.
            share: the share of `sending_s` that remains: `gradients` or `both`.
            basis: what the estimate is based on.
        """
        times = f"{(other_s + sending_s) / (other_s + sending_s * share):.1f}"
        if times == "1.0":
            return ""
        return (
            f"Try --wire {self.wire}, which rounds gradients and weights on their way: a step is then about {times} "
            f"times as fast (estimated from {basis}), and {self.reason}."
        )


def advise_wire(
    optimizers: Sequence[str],
    now: str,
    *,
    common: bool = True,
    vectors: Mapping[str, int] | None = None,
) -> WireAdvice | None:
    """Return the wire format that is recommended for a run; None if it sends no fewer bytes than the present format.

    Args:
        optimizers: name of the optimizer of each parameter set, as in `OptimizerSpec`; () if unknown. The optimizer
            whose format has the most bytes decides.
        now: the format of the run, in the notation of `--wire`.
        common: True if all workers have the same weights. See `WireFormat.codec_of_weights`.
        vectors: name of each vector -> number of its elements. Default: all elements are float32.

    >>> advise_wire(["SGD"], "float32").wire, advise_wire(["Adam", "mine:Optimizer"], "float32").wire
    ('int4', 'int8')
    """
    found = [_harmless(name, common=common) for name in optimizers or [""]]
    wire, reason = max(found, key=lambda each: sum(each[0].bytes_of(FLOAT32, common=common)))
    before, after = (
        each.bytes_of(vectors or FLOAT32, common=common) for each in (WireFormat.read(now), wire)
    )
    if sum(after) >= sum(before):
        return None
    return WireAdvice(str(wire), reason, after[0] / before[0], sum(after) / sum(before))


def doubt_wire(optimizers: Sequence[str], wire: WireFormat, *, common: bool) -> str:
    """Return a sentence if an optimizer is known to need less rounding than the wire format of a run; "" otherwise.

    The arguments are those of `advise_wire`.
    """
    if wire.gradients != "int4" or "Muon" not in [name.rpartition(":")[2] for name in optimizers]:
        return ""
    return (
        f"--wire {wire} rounds gradients to int4, but Muon makes small errors of gradients larger. Try --wire "
        f"{_harmless('Muon', common=common)[0]}."
    )


def _harmless(optimizer: str, *, common: bool) -> tuple[WireFormat, str]:
    """Return the format with the fewest bytes that costs an optimizer no accuracy, and the reason for this choice."""
    name = optimizer.rpartition(":")[2]
    if known := SIMILAR.get(optimizer):
        like = known if name == known else f"{known}, which {name} resembles"
        return WireFormat.read("int4"), f"int4 {HARMLESS} tests with {like}"
    if name == "Muon":
        # If the workers have different weights, bf16 takes the place of int4 and int8 for weights.
        wire = WireFormat.read("gradients=int8,weights=int4" if common else "int8")
        return (
            wire,
            "Muon makes small errors of gradients larger, so int4 is only used for weights",
        )
    unknown = f", and int4 was not tested with {name}" if name else ""
    return WireFormat.read("int8"), f"int8 {HARMLESS} any test{unknown}"


# -- What a shard's optimizer state consists of, without its vectors: enough to lay out the files of a checkpoint


class StateEntries(msgspec.Struct, frozen=True, omit_defaults=True):
    """The entries of a shard's optimizer state. The values of vectors are left out, because they are large.

    Attributes:
        vectors: "<segment>/<key>" -> name of the dtype in torch, for entries with one value per element, and for
            entries with a shape of their own.
        numbers: "<segment>/<key>" -> (name of the dtype in torch, value), for entries with one value.
        groups: for each parameter set, the hyper-parameters of each group in the last push.
        counters: see `Counters`.
        shapes: "<segment>/<key>" -> shape, for entries of optimizers that need whole tensors.
        nested: "<segment>/<key>" -> bytes, for entries that say how other entries are nested. See `shard.vectors`.
    """

    vectors: dict[str, str]
    numbers: dict[str, tuple[str, float | int | bool]]
    groups: tuple[tuple[HyperParameters, ...], ...]
    counters: Counters = ()
    shapes: dict[str, tuple[int, ...]] = {}
    nested: dict[str, bytes] = {}

    def size_of(self, name: str, bounds: ShardSlice) -> int:
        """Return the number of values of an entry in `vectors`."""
        segment = bounds.segments[int(name.partition("/")[0])]
        return math.prod(self.shapes.get(name, (segment.stop - segment.start,)))


# -- Where the shards of a run are: each shard is held by a server -------------------------------------------
#
# All processes of a run compute the same placement from the numbers of shards and servers, so no message contains the
# placement. Only `round_robin` computes the server of a shard.

Item = TypeVar("Item")


class Placement(msgspec.Struct, frozen=True):
    """The server of each shard.

    Attributes:
        server_of: for each shard, the index of its server.
        servers: the indices of all servers.

    >>> placement = round_robin(shards=5, servers=2)
    >>> placement.server_of, placement.shards_of(1)
    ((0, 1, 0, 1, 0), (1, 3))
    >>> placement.held_by(1, ["a", "b", "c", "d", "e"])
    ('b', 'd')
    """

    server_of: tuple[int, ...]
    servers: range

    @property
    def shards(self) -> range:
        """The indices of all shards."""
        return range(len(self.server_of))

    def shards_of(self, server: int) -> tuple[int, ...]:
        """Return the indices of a server's shards, in ascending order."""
        return tuple(shard for shard, holder in enumerate(self.server_of) if holder == server)

    def held_by(self, server: int, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return the items that belong to a server's shards. `items` contains one item for each shard."""
        return tuple(items[shard] for shard in self.shards_of(server))


@cache
def round_robin(shards: int, servers: int) -> Placement:
    """Return the placement of a run: shard k is at server k modulo `servers`."""
    return Placement(tuple(shard % servers for shard in range(shards)), range(servers))
