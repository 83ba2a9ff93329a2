"""The codecs: what rounding to bfloat16 does to each float32 value, and how encoded gradients arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.layout import Layout, Parameter, WireFormat, ranges_of
from paceline.errors import ProtocolError
from paceline.run.server_memory import StreamedInbox
from paceline.shard.codecs import CODECS, Bfloat16
from paceline.shard.vectors import bytes_of

NAN, INF = 0x7FC00000, 0x7F800000
CORNERS = [
    *(0x00000000, 0x80000000),  # zeros
    *(0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x007FFFFF, 0x807FFFFF),  # subnormal numbers
    *(0x00800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000),  # ties, and what is just above
    *(
        0x7F7F0000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x7F7FFFFF,
        0xFF7FFFFF,
    ),  # what is nearest to the largest, and above
    *(INF, INF | 1 << 31, NAN, 0x7F800001, 0xFFFFFFFF, 0x7F80FFFF),
]
BITS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(CORNERS))


def test_every_format_has_a_codec_and_its_size() -> None:
    assert CODECS.keys() == WireFormat.SIZES.keys()
    for name, size_of in WireFormat.SIZES.items():
        vectors = {"float32": torch.rand(70)}
        sender = CODECS[name](vectors)
        sent = sender.encode(sender.ranges(vectors))
        assert sum(data.nbytes for data in sent) == size_of(70)


def nearest(bits: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even, widened; in integers only, for values that are not NaN."""
    wide = bits.astype(np.uint64)
    return (((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16) << 16).astype(np.uint32)


def check(bits: np.ndarray, found: torch.Tensor) -> None:
    arrived = found.numpy().view(np.uint32)
    nan = np.isnan(bits.view(np.float32))
    assert np.isnan(found.numpy())[nan].all()
    np.testing.assert_array_equal(arrived[~nan], nearest(bits)[~nan])


# Long enough for vectorized code, and not a multiple of its width.
@given(st.lists(BITS, min_size=1, max_size=71))
def test_values_arrive_as_the_nearest_bfloat16(values: list[int]) -> None:
    bits = np.array(values, dtype=np.uint32)
    vector = torch.from_numpy(bits.view(np.float32).copy())
    check(bits, Bfloat16({"float32": vector}).round_trip()["float32"])
    target = torch.empty_like(vector)
    sender, receiver = Bfloat16({"float32": vector}), Bfloat16({"float32": target})
    for there, data in zip(
        receiver.memory(receiver.ranges(["float32"])),
        sender.encode(sender.ranges(["float32"])),
        strict=True,
    ):
        assert data.nbytes == 2 * len(values)
        there[:] = data
    receiver.decode(receiver.ranges(["float32"]))
    check(bits, target)
    np.testing.assert_array_equal(vector.numpy().view(np.uint32), bits)  # the sender's own values stay


def test_every_bfloat16_arrives_as_it_is() -> None:
    bits = (np.arange(2**16, dtype=np.uint32) << 16).astype(np.uint32)
    check(bits, Bfloat16({"float32": torch.from_numpy(bits.view(np.float32).copy())}).round_trip()["float32"])
    nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(nearest(bits)[~nan], bits[~nan])


def test_a_value_above_the_largest_bfloat16_becomes_infinite_and_small_ones_zero() -> None:
    vector = torch.tensor([3.3895e38, 3.4e38, -3.4e38, 1e-45, 1e-40])
    assert Bfloat16({"float32": vector}).round_trip()["float32"].tolist() == pytest.approx(
        [3.3895e38, float("inf"), float("-inf"), 0.0, 1e-40], rel=0.01
    )


def test_other_dtypes_are_not_rounded() -> None:
    vectors = {
        "float64": torch.full((3,), 1 / 3, dtype=torch.float64),
        "float16/1": torch.full((3,), 1 / 3, dtype=torch.float16),
        "bfloat16": torch.full((3,), 1 / 3, dtype=torch.bfloat16),
        "float32/1.2": torch.full((3,), 1 / 3),
    }
    rounding = Bfloat16(vectors)
    sent = dict(zip(vectors, rounding.encode(rounding.ranges(vectors)), strict=True))
    assert {name: data.nbytes for name, data in sent.items()} == {
        "float64": 24,
        "float16/1": 6,
        "bfloat16": 6,
        "float32/1.2": 6,
    }
    for name in ("float64", "float16/1", "bfloat16"):
        assert np.frombuffer(sent[name], np.uint8).ctypes.data == vectors[name].data_ptr()
        assert Bfloat16(vectors).round_trip()[name] is vectors[name]


def test_an_inbox_receives_rounded_pieces_and_pieces_as_they_are() -> None:
    layout = Layout.of([Parameter(("a",), (600_000,), "float32"), Parameter(("b",), (40,), "float64")])
    [shard] = layout.slice_evenly(1)
    inbox = StreamedInbox(shard, "bf16")
    count = len(inbox.pieces)
    assert count == 4
    values = {"float32": torch.randn(600_000), "float64": torch.randn(layout.sizes["float64"]).double()}
    sender = Bfloat16(values)
    for there, data in zip(
        inbox.places([0, 2, 3], "bf16"),
        sender.encode(ranges_of([inbox.pieces[number] for number in (0, 2, 3)])),
        strict=True,
    ):
        assert there.nbytes == data.nbytes
        there[:] = data
    inbox.take([0, 2, 3], "bf16")
    [place] = inbox.places([1])
    cut = slice(inbox.pieces[1].start, inbox.pieces[1].stop)
    place[:] = bytes_of(values["float32"][cut])
    inbox.take([1])
    inbox.close(empty=False)
    expected = Bfloat16(values).round_trip()["float32"]
    expected[cut] = values["float32"][cut]
    assert torch.equal(torch.frombuffer(inbox.gradient["float32"], dtype=torch.float32), expected)
    assert torch.equal(torch.frombuffer(inbox.gradient["float64"], dtype=torch.float64), values["float64"])
    with pytest.raises(ProtocolError, match="4 pieces"):
        inbox.places([4], "bf16")
