"""Parameters as flat vectors, their slicing, evenly or by parameter, and the pieces of a slice."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.layout import (
    ALIGNMENT_BYTES,
    ITEM_BYTES,
    Layout,
    ModelSpec,
    OptimizerSpec,
    Parameter,
    ShardSlice,
    first_difference,
)
from paceline.errors import ConfigurationError

# A busy machine is no failure.
patiently = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.integers(0, 3000).map(lambda n: (n,))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Some parameters of mixed dtypes and sizes, nothing among them, and often one that outweighs all the others."""
    kinds = draw(st.lists(st.tuples(SHAPES, st.sampled_from(sorted(ITEM_BYTES))), min_size=1, max_size=12))
    parameters = [Parameter((f"p{i}",), shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
    if draw(st.booleans()) or not any(parameter.size for parameter in parameters):
        parameters.append(Parameter(("embedding.weight", "head.weight"), (500, 16), "float32"))
    return Layout.of(parameters)


def block(dtype: str) -> int:
    return ALIGNMENT_BYTES // ITEM_BYTES[dtype]


@patiently
@given(layouts())
def test_parameters_lie_aligned_in_order_and_apart(layout: Layout) -> None:
    end = dict.fromkeys(layout.sizes, 0)
    for parameter, offset in zip(layout.parameters, layout.offsets, strict=True):
        dtype = parameter.dtype
        assert offset % block(dtype) == 0
        assert end[dtype] <= offset < end[dtype] + block(dtype)
        end[dtype] = offset + parameter.size
    assert all(end[dtype] <= size < end[dtype] + block(dtype) for dtype, size in layout.sizes.items())
    assert layout.size_bytes == sum(size * ITEM_BYTES[dtype] for dtype, size in layout.sizes.items())


@patiently
@given(layouts(), st.integers(1, 9))
def test_slices_cover_each_vector_exactly_once(layout: Layout, shards: int) -> None:
    slices = layout.slice_evenly(shards)
    assert [shard.index for shard in slices] == list(range(shards))
    for dtype, size in layout.sizes.items():
        bounds = [shard.bounds[dtype] for shard in slices]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == size
        assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    assert sum(shard.size_bytes for shard in slices) == layout.size_bytes


@patiently
@given(layouts(), st.integers(1, 9))
def test_slices_begin_on_a_block_and_differ_by_at_most_one(layout: Layout, shards: int) -> None:
    slices = layout.slice_evenly(shards)
    for dtype in layout.sizes:
        lengths = [stop - start for start, stop in (shard.bounds[dtype] for shard in slices)]
        assert all(length % block(dtype) == 0 for length in lengths)
        assert max(lengths) - min(lengths) <= block(dtype)
    sizes = [shard.size_bytes for shard in slices]
    assert max(sizes) - min(sizes) <= ALIGNMENT_BYTES * len(layout.sizes)


@patiently
@given(layouts(), st.integers(1, 9))
def test_segments_partition_every_parameter(layout: Layout, shards: int) -> None:
    covered: Counter[int] = Counter()
    for shard in layout.slice_evenly(shards):
        for segment in shard.segments:
            parameter = layout.parameters[segment.parameter]
            low, high = shard.bounds[segment.dtype]
            assert segment.dtype == parameter.dtype
            assert 0 <= segment.start < segment.stop <= high - low
            # Where the segment lies in the vector is where the layout has put that part of the parameter.
            assert low + segment.start == layout.offsets[segment.parameter] + segment.offset
            assert segment.offset == covered[segment.parameter]  # it begins where the shard before has ended
            covered[segment.parameter] += segment.stop - segment.start
    assert all(covered[i] == parameter.size for i, parameter in enumerate(layout.parameters))


@patiently
@given(layouts(), st.integers(1, 5))
def test_segments_of_a_shard_do_not_overlap(layout: Layout, shards: int) -> None:
    for shard in layout.slice_evenly(shards):
        for dtype in layout.sizes:
            parts = sorted((s.start, s.stop) for s in shard.segments if s.dtype == dtype)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(parts))


def test_an_embedding_of_nine_tenths_of_all_parameters_is_spread_evenly() -> None:
    layout = Layout.of(
        [
            Parameter(("embedding.weight",), (9_000, 64), "float32"),
            Parameter(("out.weight",), (64, 999), "float32"),
            Parameter(("out.bias",), (999,), "float32"),
        ]
    )
    assert layout.parameters[0].size / sum(p.size for p in layout.parameters) > 0.89
    sizes = [shard.size_bytes for shard in layout.slice_evenly(4)]
    assert max(sizes) - min(sizes) <= ALIGNMENT_BYTES
    holders = [s.index for s in layout.slice_evenly(4) if any(part.parameter == 0 for part in s.segments)]
    assert holders == [0, 1, 2, 3]


def test_with_more_shards_than_blocks_some_hold_nothing() -> None:
    layout = Layout.of([Parameter(("w",), (20,), "float32")])  # 2 blocks
    slices = layout.slice_evenly(5)
    assert sorted(len(shard.segments) for shard in slices) == [0, 0, 0, 1, 1]
    assert [shard.size_bytes for shard in slices if not shard.segments] == [0, 0, 0]


@patiently
@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(sorted(ITEM_BYTES)))
def test_nine_tenths_in_one_parameter_are_spread_as_evenly_as_any(rest: int, shards: int, dtype: str) -> None:
    """However few blocks there are: with more shards than blocks some hold one and the others none."""
    layout = Layout.of([Parameter(("small",), (rest,), dtype), Parameter(("large",), (9 * rest,), dtype)])
    blocks = layout.size_bytes // ALIGNMENT_BYTES
    slices = layout.slice_evenly(shards)
    assert {shard.size_bytes // ALIGNMENT_BYTES for shard in slices} <= {
        blocks // shards,
        -(-blocks // shards),
    }
    for shard in slices:
        held = sum(segment.stop - segment.start for segment in shard.segments)
        assert (
            held == 0 if not shard.size_bytes else 0 < held <= shard.bounds[dtype][1] - shard.bounds[dtype][0]
        )


# -- by parameter -----------------------------------------------------------------------------------------


@st.composite
def layouts_with_shards(draw: st.DrawFn) -> tuple[Layout, int]:
    layout = draw(layouts())
    return layout, draw(st.integers(1, len(layout.parameters)))


@patiently
@given(layouts_with_shards())
def test_sliced_by_parameter_every_parameter_is_whole_on_one_shard(what: tuple[Layout, int]) -> None:
    layout, shards = what
    slices = layout.slice_by_parameter(shards)
    holders: dict[int, list[int]] = {}
    for shard in slices:
        for segment in shard.segments:
            holders.setdefault(segment.parameter, []).append(shard.index)
            parameter = layout.parameters[segment.parameter]
            assert (segment.offset, segment.stop - segment.start) == (0, parameter.size)
            assert shard.bounds[parameter.dtype][0] + segment.start == layout.offsets[segment.parameter]
    assert sorted(holders) == [i for i, parameter in enumerate(layout.parameters) if parameter.size]
    assert all(len(shards) == 1 for shards in holders.values())
    order = [holders[index][0] for index in sorted(holders)]
    assert order == sorted(order)


@patiently
@given(layouts_with_shards())
def test_slices_by_parameter_cover_each_vector_in_order(what: tuple[Layout, int]) -> None:
    layout, shards = what
    slices = layout.slice_by_parameter(shards)
    assert [shard.index for shard in slices] == list(range(shards))
    for dtype, size in layout.sizes.items():
        bounds = [shard.bounds[dtype] for shard in slices]
        assert (bounds[0][0], bounds[-1][1]) == (0, size)
        assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
        assert all(start <= stop and start % block(dtype) == 0 for start, stop in bounds)
    assert sum(shard.size_bytes for shard in slices) == layout.size_bytes


@patiently
@given(st.lists(SHAPES.filter(lambda shape: math.prod(shape) > 0), min_size=1, max_size=12), st.data())
def test_sliced_by_parameter_the_numbers_of_parameters_differ_by_at_most_one(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    dtypes = sorted(ITEM_BYTES)
    layout = Layout.of(
        [Parameter((f"p{i}",), shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    )
    shards = data.draw(st.integers(1, len(shapes)))
    counts = [len(shard.segments) for shard in layout.slice_by_parameter(shards)]
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1
    assert sum(counts) == len(shapes)


def test_sliced_by_parameter_a_shard_with_the_largest_layer_holds_most() -> None:
    layout = Layout.of([Parameter(("large",), (9000,), "float32"), Parameter(("small",), (16,), "float32")])
    assert [shard.size_bytes for shard in layout.slice_by_parameter(2)] == [9008 * 4, 16 * 4]


@patiently
@given(layouts(), st.integers(1, 5))
def test_more_shards_than_parameters_are_refused(layout: Layout, more: int) -> None:
    count = len(layout.parameters)
    with pytest.raises(
        ConfigurationError,
        match=rf"^shards is {count + more}, but the model has {count} parameters.*slicing 'even'",
    ):
        layout.slice_by_parameter(count + more)


# -- pieces -----------------------------------------------------------------------------------------------


@patiently
@given(layouts_with_shards(), st.booleans(), st.integers(8, 20_000))
def test_pieces_tile_a_slice_and_name_the_parameters_that_lie_in_them(
    what: tuple[Layout, int], evenly: bool, size_bytes: int
) -> None:
    layout, shards = what
    for shard in layout.slice_evenly(shards) if evenly else layout.slice_by_parameter(shards):
        pieces = shard.pieces(size_bytes)
        assert [piece.dtype for piece in pieces] == sorted(piece.dtype for piece in pieces)
        for dtype, (low, high) in shard.bounds.items():
            mine = [piece for piece in pieces if piece.dtype == dtype]
            ends = [0, *(piece.stop for piece in mine)]
            assert [piece.start for piece in mine] == ends[:-1]
            assert ends[-1] == high - low
            for piece in mine:
                assert 0 < (piece.stop - piece.start) * ITEM_BYTES[dtype] <= size_bytes
                inside = range(piece.start, piece.stop)
                overlapping = {
                    segment.parameter
                    for segment in shard.segments
                    if segment.dtype == dtype
                    and range(max(inside.start, segment.start), min(inside.stop, segment.stop))
                }
                assert piece.parameters == overlapping


def test_pieces_are_as_few_as_can_be() -> None:
    layout = Layout.of([Parameter(("a",), (100,), "float64"), Parameter(("b",), (60,), "float64")])
    [shard] = layout.slice_evenly(1)
    assert [(p.start, p.stop, set(p.parameters)) for p in shard.pieces(512)] == [
        (0, 64, {0}),
        (64, 128, {0, 1}),
        (128, 168, {1}),
    ]
    assert [p.stop for p in shard.pieces(168 * 8)] == [168]
    assert [p.stop for p in shard.pieces(168 * 8 - 1)] == [167, 168]


def test_a_shard_without_elements_has_no_pieces() -> None:
    layout = Layout.of([Parameter(("w",), (20,), "float32")])  # 2 blocks
    assert sorted(len(shard.pieces(64)) for shard in layout.slice_evenly(5)) == [0, 0, 0, 1, 1]


def test_a_tied_parameter_is_laid_out_once_and_keeps_its_names() -> None:
    tied = Parameter(("embedding.weight", "head.weight"), (10, 4), "float32")
    layout = Layout.of([tied, Parameter(("bias",), (4,), "float32")])
    assert layout.sizes == {"float32": 48 + 16}
    assert layout.parameters[0].names == ("embedding.weight", "head.weight")


def test_a_scalar_takes_one_block_and_an_empty_parameter_none() -> None:
    layout = Layout.of(
        [
            Parameter(("scale",), (), "float64"),
            Parameter(("nothing",), (0, 5), "float64"),
            Parameter(("shift",), (), "float64"),
        ]
    )
    assert layout.offsets == (0, 8, 8)
    assert layout.sizes == {"float64": 16}
    [shard] = layout.slice_evenly(1)
    assert [segment.parameter for segment in shard.segments] == [0, 2]


def test_each_dtype_has_its_own_vector() -> None:
    parameters = [Parameter((dtype,), (17,), dtype) for dtype in ITEM_BYTES]
    layout = Layout.of(parameters)
    assert layout.offsets == (0, 0, 0, 0)
    assert layout.sizes == {"bfloat16": 32, "float16": 32, "float32": 32, "float64": 24}


def test_one_shard_holds_everything_in_order() -> None:
    layout = Layout.of([Parameter(("a",), (3, 5), "float32"), Parameter(("b",), (2,), "float32")])
    [shard] = layout.slice_evenly(1)
    assert shard.bounds == {"float32": (0, 32)}
    assert [(s.parameter, s.start, s.stop, s.offset) for s in shard.segments] == [
        (0, 0, 15, 0),
        (1, 16, 18, 0),
    ]


def test_a_parameter_is_described_by_its_first_name() -> None:
    assert str(Parameter(("conv.weight", "other"), (8, 3, 3), "float32")) == "conv.weight float32[8, 3, 3]"
    assert Parameter(("x",), (8, 3, 3), "float32").size == math.prod((8, 3, 3))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Parameter(("b",), (8,), "float32"), "b float32[8] instead of b float32[4]"),
        (Parameter(("b", "c"), (4,), "float32"), "b float32[4] is named b and c instead of b"),
        (Parameter(("b",), (4,), "float32", 1), "b float32[4] is trained by optimizer 1 instead of 0"),
        (
            Parameter(("b",), (4,), "float32", 0, 1),
            "b float32[4] belongs to addition 1 of parameters instead of 0 (0: the start)",
        ),
    ],
    ids=["shape", "names", "optimizer", "part"],
)
def test_the_first_difference_between_models_says_what_differs(other: Parameter, message: str) -> None:
    one, another = (
        ModelSpec(Layout.of([parameter]), OptimizerSpec("SGD", ({},), (0,)), ())
        for parameter in (Parameter(("b",), (4,), "float32"), other)
    )
    assert first_difference(one, another) == message


@pytest.mark.parametrize("dtype", ["int64", "complex64", "float8_e4m3fn", "bool"])
def test_a_dtype_that_cannot_be_trained_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"codes {dtype}\[2\].*float32"):
        Layout.of([Parameter(("w",), (2,), "float32"), Parameter(("codes",), (2,), dtype)])


@pytest.mark.parametrize("parameters", [[], [Parameter(("nothing",), (0,), "float32")]])
def test_a_model_without_parameters_is_refused(parameters: list[Parameter]) -> None:
    with pytest.raises(ConfigurationError, match="no parameters to train"):
        Layout.of(parameters)


def test_a_slice_knows_the_bytes_of_its_message() -> None:
    shard = ShardSlice(0, {"float32": (16, 48), "float64": (0, 8)}, ())
    assert shard.size_bytes == 32 * 4 + 8 * 8
