"""The codecs: what rounding to bfloat16 does to each float32 value, and how encoded gradients arrive."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.layout import CODECS, Layout, Parameter, ranges_of
from paceline.errors import ProtocolError
from paceline.run.server_memory import StreamedInbox
from paceline.shard.codecs import PACKERS, BaseReceiver, BaseSender, Receiver, Sender
from paceline.shard.vectors import bytes_of, torch_dtype

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
    assert CODECS.keys() == PACKERS.keys()
    for name, codec in CODECS.items():
        vectors = {"float32": torch.rand(70)}
        sender = Sender(name, vectors)
        sent = sender.encode(sender.ranges(vectors))
        assert sum(data.nbytes for data in sent) == codec.encoded_bytes(70)


# -- int8 and int4 ------------------------------------------------------------------------------------------


def multiples(values: np.ndarray, scale: np.float32, most: int) -> list[np.float32]:
    """Serial oracle: the nearest multiples of a scale, each operation rounded to float32."""
    if scale < np.finfo(np.float32).tiny:
        return [np.float32(0.0)] * len(values)
    codes = [np.rint(np.float32(value * np.float32(1.0 / scale))) for value in values]
    assert max(map(abs, codes)) <= most
    return [np.float32(code * scale) for code in codes]


def expected(values: np.ndarray, codec: str) -> np.ndarray:
    found: list[np.float32] = []
    size, most = (256, 127) if codec == "int8" else (32, 7)
    for start in range(0, len(values), size):
        part = values[start : start + size]
        scale = np.float32(np.max(np.abs(part)) / np.float32(most))
        if codec == "int8":
            scale = min(scale, np.float32(np.finfo(np.float32).max / 127.4))
        else:  # the upper half of a float32 is a bfloat16
            scale = (scale.reshape(1).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)[0]
        found += multiples(part, scale, most)
    return np.array(found, dtype=np.float32)


FINITE = BITS.filter(lambda bits: bits & 0x7F800000 != 0x7F800000)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@given(st.lists(FINITE, min_size=1, max_size=40), st.integers(1, 40))
def test_values_arrive_as_a_serial_oracle_says(codec: str, values: list[int], repeats: int) -> None:
    bits = np.array((values * repeats)[:: max(1, len(values) // 7)], dtype=np.uint32)
    vector = torch.from_numpy(bits.view(np.float32).copy())
    sender, receiver = Sender(codec, {"float32": vector}), Receiver(codec, {"float32": vector.clone()})
    for there, data in zip(
        receiver.memory(receiver.ranges(["float32"])), sender.encode(sender.ranges(["float32"])), strict=True
    ):
        there[:] = data
    receiver.decode(receiver.ranges(["float32"]))
    found = receiver.vectors["float32"].numpy()
    np.testing.assert_array_equal(found, expected(bits.view(np.float32), codec))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_do_not_arrive_as_finite_ones(codec: str, value: float) -> None:
    weights = {"float32": torch.ones(600)}
    sender, receiver = BaseSender(codec, weights), BaseReceiver(codec, {"float32": torch.zeros(600)})
    weights["float32"][300] = value  # in the second of three blocks
    sender.advance(None, 1, weights)
    ranges = receiver.ranges(weights)
    for there, data in zip(receiver.memory(ranges), sender.payload(weights, whole=False), strict=True):
        there[:] = data
    receiver.decode(ranges, whole=False)
    arrived = receiver.vectors["float32"]
    assert not arrived[300].isfinite()
    assert arrived[:256].isfinite().all()
    assert arrived[512:].isfinite().all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_are_encoded_and_wide_ones_are_not(codec: str, dtype: str) -> None:
    vectors = {dtype: torch.randn(1000).to(torch_dtype(dtype)), "float64": torch.randn(9).double()}
    arrived = Sender(codec, vectors).arriving()
    values = vectors[dtype].float().numpy()
    assert torch.equal(arrived[dtype], torch.from_numpy(expected(values, codec)).to(torch_dtype(dtype)))
    assert arrived["float64"] is vectors["float64"]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_pieces_of_any_size_arrive_as_the_whole(codec: str) -> None:
    values = torch.randn(3_000)
    whole = Sender(codec, {"float32": values.clone()}).arriving()["float32"]
    for size in (256, 512, 1024):
        sender = Sender(codec, {"float32": values.clone()})
        receiver = Receiver(codec, {"float32": torch.zeros(3_000)})
        for start in range(0, 3_000, size):
            ranges = [("float32", start, min(start + size, 3_000))]
            for there, data in zip(receiver.memory(ranges), sender.encode(ranges), strict=True):
                there[:] = data
            receiver.decode(ranges)
        assert torch.equal(receiver.vectors["float32"], whole)


def test_int4_adds_what_rounding_has_taken_to_the_next_gradient() -> None:
    gradient = torch.randn(700)
    sender = Sender("int4", {"float32": gradient.clone()})
    arrived = [sender.arriving()["float32"].double() for _ in range(50)]
    first = (arrived[0] - gradient).abs().max()
    assert (sum(arrived) / 50 - gradient).abs().max() < first / 20
    sender.drop()
    assert torch.equal(sender.arriving()["float32"].double(), arrived[0])
    assert torch.equal(
        Sender("int8", {"float32": gradient}).arriving()["float32"],
        Sender("int8", {"float32": gradient}).arriving()["float32"],
    )


def test_a_parameter_without_a_gradient_keeps_its_residual_and_does_not_change_the_others() -> None:
    gradient = torch.randn(64)
    sender, other = (Sender("int4", {"float32": gradient.clone()}) for _ in range(2))
    sender.arriving()
    other.arriving()
    other.arriving()
    kept = sender._residual["float32"][32:64].clone()
    sender.vectors["float32"][32:64] = 1e9  # what the memory contains there has no meaning
    arrived = sender.arriving(absent=[("float32", 32, 64)])["float32"]
    assert torch.equal(sender._residual["float32"][32:64], kept)
    assert torch.equal(sender._residual["float32"][:32], other._residual["float32"][:32])
    assert torch.isfinite(arrived).all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bases_of_all_ends_are_equal_and_follow_the_weights(codec: str, dtype: str) -> None:
    weights = {dtype: torch.randn(700).to(torch_dtype(dtype)), "float64": torch.randn(5).double()}
    sender = BaseSender(codec, weights)
    receivers = [
        BaseReceiver(codec, {name: torch.zeros_like(each) for name, each in weights.items()})
        for _ in range(2)
    ]

    def send(number: int, to: BaseReceiver, *, whole: bool) -> None:
        sender.advance(None, number, weights) if sender.numbers.get(None) != number else None
        ranges = sender.ranges(weights)
        places = Receiver("float32", to.vectors) if whole else to
        for there, data in zip(places.memory(ranges), sender.payload(weights, whole=whole), strict=True):
            there[:] = data
        assert to.decode(ranges, whole=whole) == sender.checksum(weights)
        assert torch.equal(to.vectors[dtype], sender.base[dtype])
        assert torch.equal(to.base[dtype], sender.base[dtype])
        assert torch.equal(to.vectors["float64"], weights["float64"])

    send(2, receivers[0], whole=True)
    assert torch.equal(sender.base[dtype], weights[dtype])
    for number in range(3, 40):
        weights[dtype] += (0.1 * torch.randn(700)).to(torch_dtype(dtype))
        weights["float64"] += 1.0
        send(number, receivers[0], whole=False)
        if number > 20:  # the other one has joined
            send(number, receivers[1], whole=number == 21)
    assert 0 < (sender.base[dtype] - weights[dtype]).abs().max() < 0.2
    receivers[1].base[dtype][3] += 1.0  # it has come to another base
    sender.advance(None, 40, weights)
    for there, data in zip(
        receivers[1].memory(sender.ranges(weights)), sender.payload(weights, whole=False), strict=True
    ):
        there[:] = data
    assert receivers[1].decode(sender.ranges(weights), whole=False) != sender.checksum(weights)
    send(40, receivers[1], whole=True)
    sender.advance(None, 42, weights)
    assert torch.equal(sender.base[dtype], weights[dtype])


# -- bf16 ---------------------------------------------------------------------------------------------------


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
    check(bits, Sender("bf16", {"float32": vector}).arriving()["float32"])
    target = torch.empty_like(vector)
    sender, receiver = Sender("bf16", {"float32": vector}), Receiver("bf16", {"float32": target})
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
    check(
        bits,
        Sender("bf16", {"float32": torch.from_numpy(bits.view(np.float32).copy())}).arriving()["float32"],
    )
    nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(nearest(bits)[~nan], bits[~nan])


def test_a_value_above_the_largest_bfloat16_becomes_infinite_and_small_ones_zero() -> None:
    vector = torch.tensor([3.3895e38, 3.4e38, -3.4e38, 1e-45, 1e-40])
    assert Sender("bf16", {"float32": vector}).arriving()["float32"].tolist() == pytest.approx(
        [3.3895e38, float("inf"), float("-inf"), 0.0, 1e-40], rel=0.01
    )


def test_other_dtypes_are_not_rounded() -> None:
    vectors = {
        "float64": torch.full((3,), 1 / 3, dtype=torch.float64),
        "float16/1": torch.full((3,), 1 / 3, dtype=torch.float16),
        "bfloat16": torch.full((3,), 1 / 3, dtype=torch.bfloat16),
        "float32/1.2": torch.full((3,), 1 / 3),
    }
    rounding = Sender("bf16", vectors)
    sent = dict(zip(vectors, rounding.encode(rounding.ranges(vectors)), strict=True))
    assert {name: data.nbytes for name, data in sent.items()} == {
        "float64": 24,
        "float16/1": 6,
        "bfloat16": 6,
        "float32/1.2": 6,
    }
    for name in ("float64", "float16/1", "bfloat16"):
        assert np.frombuffer(sent[name], np.uint8).ctypes.data == vectors[name].data_ptr()
        assert Sender("bf16", vectors).arriving()[name] is vectors[name]


def test_an_inbox_receives_rounded_pieces_and_pieces_as_they_are() -> None:
    layout = Layout.of([Parameter(("a",), (600_000,), "float32"), Parameter(("b",), (40,), "float64")])
    [shard] = layout.slice_evenly(1)
    inbox = StreamedInbox(shard, "bf16")
    count = len(inbox.pieces)
    assert count == 4
    values = {"float32": torch.randn(600_000), "float64": torch.randn(layout.sizes["float64"]).double()}
    sender = Sender("bf16", values)
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
    expected = Sender("bf16", values).arriving()["float32"]
    expected[cut] = values["float32"][cut]
    assert torch.equal(torch.frombuffer(inbox.gradient["float32"], dtype=torch.float32), expected)
    assert torch.equal(torch.frombuffer(inbox.gradient["float64"], dtype=torch.float64), values["float64"])
    with pytest.raises(ProtocolError, match="4 pieces"):
        inbox.places([4], "bf16")
