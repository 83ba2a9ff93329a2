"""What of a gradient is sent before its commit, and what is sent again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.job_sync import LONGEST_PAUSE
from paceline.core.layout import Layout, Parameter, WireFormat, ranges_of
from paceline.core.messages import Message, Stage
from paceline.run.server_memory import StreamedInbox
from paceline.run.worker import WorkerSession
from paceline.run.worker_links import Outbox
from paceline.shard.codecs import Sender as Encoder
from paceline.shard.vectors import bytes_of, sliced, tensors_over
from paceline.wire.memory import PIECE_BYTES, Region, cut
from tests.support.marks import thorough

Key = tuple[int, int]  # (shard, piece)

BLOCK = PIECE_BYTES // 8  # elements of a whole piece in double precision
LARGE = Layout.of(
    [
        Parameter(("a",), (2 * BLOCK,), "float64"),
        Parameter(("b",), (7,), "float64"),
        Parameter(("c",), (2 * BLOCK - 3,), "float64"),
        Parameter(("d",), (70_000,), "float32"),
    ]
)
SMALL = Layout.of([Parameter(("a",), (9,), "float64"), Parameter(("b",), (5,), "float32")])


class Sender:
    """An outbox, the gradient that it sends, and the inboxes at its other end. The gradient may be encoded."""

    def __init__(
        self, layout: Layout, shards: int = 1, *, early: bool = True, codec: str = "float32"
    ) -> None:
        self.layout = layout
        self.slices = layout.slice_evenly(shards, WireFormat(codec).block)
        self.region = Region.create(layout, shared=False)
        self.codec = codec
        self.inboxes = [StreamedInbox(shard, codec) for shard in self.slices]
        self.staged: list[Key] = []  # since the last commit
        vectors = tensors_over(self.region.gradients)
        ends = {shard.index: Encoder(codec, sliced(vectors, shard)) for shard in self.slices}
        self.outbox = Outbox(
            self.slices,
            self.region.gradients,
            self._send,
            early=early,
            codecs=ends,
        )
        self.randomize(1)

    def _send(self, shard: int, message: Message, payload: Sequence[memoryview]) -> None:
        assert isinstance(message, Stage)
        assert message.shard == shard
        self._deliver(shard, message.pieces, payload)
        self.staged += [(shard, piece) for piece in message.pieces]

    def _deliver(self, shard: int, pieces: Sequence[int], payload: Sequence[memoryview]) -> None:
        inbox = self.inboxes[shard]
        data = memoryview(b"".join(payload))
        for place in inbox.places(pieces, self.codec):
            place[:], data = data[: place.nbytes], data[place.nbytes :]
        assert not data.nbytes
        inbox.take(pieces, self.codec)

    @property
    def keys(self) -> list[Key]:
        """Every piece that there is."""
        return [(shard.index, i) for shard in self.slices for i in range(len(shard.pieces(PIECE_BYTES)))]

    def gradient(self, parameter: int) -> torch.Tensor:
        what, offset = self.layout.parameters[parameter], self.layout.offsets[parameter]
        vector = torch.frombuffer(self.region.gradients[what.dtype], dtype=getattr(torch, what.dtype))
        return vector[offset : offset + what.size]

    def randomize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in range(len(self.layout.parameters)):
            place = self.gradient(parameter)
            place.copy_(torch.randn(place.shape, generator=generator, dtype=torch.float64))

    def backward(self) -> None:
        """The last layers' gradients are there first."""
        for parameter in reversed(range(len(self.layout.parameters))):
            self.outbox.ready(parameter)

    def commit(self) -> tuple[list[Key], list[Key]]:
        """(what came early, what came with the commit); what the servers have then is the gradient as it is."""
        rest: list[Key] = []
        for shard in self.slices:
            pieces, payload = self.outbox.rest(shard.index)
            self._deliver(shard.index, pieces, payload)
            rest += [(shard.index, piece) for piece in pieces]
        for shard, inbox in zip(self.slices, self.inboxes, strict=True):
            inbox.close(empty=False)
            gradient = tensors_over(cut(self.region.gradients, shard))
            arrived = Encoder(self.codec, gradient).arriving()
            for dtype, expected in ((name, bytes_of(each)) for name, each in arrived.items()):
                assert inbox.gradient[dtype] == expected, f"shard {shard.index} has another gradient"
        self.outbox.committed()
        staged, self.staged = self.staged, []
        return staged, rest


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_what_was_sent_early_is_not_sent_again(shards: int) -> None:
    sender = Sender(LARGE, shards)
    for seed in range(3):
        sender.randomize(seed)
        sender.backward()
        staged, rest = sender.commit()
        assert sorted(staged) == sender.keys
        assert rest == []


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_rounded_gradient_arrives_rounded_and_an_edit_as_it_is(shards: int) -> None:
    sender = Sender(LARGE, shards, codec="bf16")
    for seed in range(2):
        sender.randomize(seed)
        sender.backward()
        staged, rest = sender.commit()
        assert (sorted(staged), rest) == (sender.keys, [])
    sender.outbox.restart()
    for shard in sender.slices:
        pieces, payload = sender.outbox.rest(shard.index, exact=True)
        assert b"".join(payload) == b"".join(cut(sender.region.gradients, shard).values())
        assert len(pieces) == len(shard.pieces(PIECE_BYTES))


def test_a_piece_leaves_as_soon_as_all_that_lies_in_it_is_there() -> None:
    sender = Sender(LARGE)
    left = []
    for parameter in (2, 3, 0, 1):
        before = len(sender.staged)
        sender.outbox.ready(parameter)
        left.append(sorted(sender.staged[before:]))
    # Pieces are numbered by dtype, so d's is first: d; a; a; b and c; c; the end of c.
    assert left == [[(0, 4), (0, 5)], [(0, 0)], [(0, 1), (0, 2)], [(0, 3)]]


def test_while_another_thread_uses_the_connections_complete_pieces_wait() -> None:
    sender, lock = Sender(LARGE), threading.RLock()
    session: Any = SimpleNamespace(
        memory=SimpleNamespace(outbox=sender.outbox), links=SimpleNamespace(lock=lock)
    )
    held, over = threading.Event(), threading.Event()

    def load() -> None:
        with lock:
            held.set()
            over.wait(60.0)

    loader = threading.Thread(target=load)
    loader.start()
    assert held.wait(60.0)
    for parameter in (3, 2, 1):
        WorkerSession.gradient_ready(session, parameter)
    before = list(sender.staged)
    over.set()
    loader.join()
    WorkerSession.gradient_ready(session, 0)
    staged, rest = sender.commit()
    assert (before, sorted(staged), rest) == ([], sender.keys, [])


def test_what_has_no_gradient_comes_with_the_commit() -> None:
    sender = Sender(LARGE, 2)
    for parameter in (3, 2):
        sender.outbox.ready(parameter)
    staged, rest = sender.commit()
    assert staged
    assert sorted(staged + rest) == sender.keys


def test_nothing_leaves_early_if_it_is_not_to() -> None:
    sender = Sender(LARGE, 2, early=False)
    for seed in range(3):
        assert not sender.outbox.early
        sender.randomize(seed)
        sender.backward()
        assert sender.commit() == ([], sender.keys)


# -- changes after it was sent ----------------------------------------------------------------------------


def one_bit(which: int) -> Callable[[torch.Tensor], object]:
    def flip(gradient: torch.Tensor) -> None:
        bits = gradient.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[gradient.itemsize])
        bits[len(bits) // 2] ^= 1 << which

    return flip


def swap(gradient: torch.Tensor) -> None:
    words = gradient.view(torch.int64)
    words[[0, 5]] = words[[5, 0]]


EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "its first element": lambda g: g[:1].add_(1),
    "its last element": lambda g: g[-1:].add_(1),
    "its lowest bit": one_bit(0),
    "a bit in the middle": one_bit(9),
    "all signs": lambda g: g.neg_(),
    "all but one sign": lambda g: g[1:].neg_(),
    "two signs": lambda g: g[:2].neg_(),
    "twice as large": lambda g: g.mul_(2),
    "four times as large": lambda g: g.mul_(4),
    "half as large": lambda g: g.mul_(0.5),
    "unscaled": lambda g: g.div_(2.0**8),
    "clipped a little": lambda g: g.mul_(1 - 2.0**-7),
    "zeroed": lambda g: g.zero_(),
    "backwards": lambda g: g.copy_(g.flip(0)),
    "rolled by a block": lambda g: g.copy_(g.roll(64)),
    "two words exchanged": swap,
}


OF_EACH_SIZE = ["a bit in the middle", "all signs", "two words exchanged"]
"""Edits of a bit, of all elements, and of words: also of gradients whose elements have not 4 bytes."""


@pytest.mark.parametrize(
    ("what", "dtype"),
    [
        *((what, "float32") for what in EDITS),
        *product(OF_EACH_SIZE, ["float64", "bfloat16"]),
        *thorough(*((what, "float16") for what in EDITS)),
        *thorough(*product([what for what in EDITS if what not in OF_EACH_SIZE], ["float64", "bfloat16"])),
    ],
)
def test_what_is_changed_in_any_way_is_sent_again(what: str, dtype: str) -> None:
    size = 2 * PIECE_BYTES // torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    sender = Sender(Layout.of([Parameter(("a",), (size,), dtype), Parameter(("b",), (8,), dtype)]))
    sender.backward()
    before = bytes(sender.region.gradients[dtype])
    EDITS[what](sender.gradient(0))
    assert bytes(sender.region.gradients[dtype]) != before
    staged, rest = sender.commit()
    assert sorted(staged) == sender.keys
    assert set(rest) <= {(0, 0), (0, 1)}  # never b's


def test_what_is_changed_and_changed_back_need_not_be_sent_again() -> None:
    sender = Sender(LARGE)
    sender.backward()
    for parameter in range(4):
        sender.gradient(parameter).neg_().neg_()
    assert sender.commit()[1] == []


def test_a_second_backward_counts_as_it_came_last() -> None:
    """`ready` comes twice for each parameter; some pieces leave before all in them has come twice."""
    sender = Sender(LARGE, 2)
    sender.backward()
    for parameter in (3, 2, 1, 0):
        sender.gradient(parameter).add_(1.5)
        sender.outbox.ready(parameter)
    _, rest = sender.commit()
    assert sorted(rest) == sender.keys
    sender.randomize(9)
    for parameter in (2, 2, 2, 3, 3):  # c, with which b shares a piece, three times
        sender.outbox.ready(parameter)
        sender.gradient(parameter).add_(1.5)
    sender.commit()


def test_a_second_backward_that_gives_the_same_sends_nothing_again() -> None:
    sender = Sender(LARGE, 2)
    sender.backward()
    sender.backward()
    staged, rest = sender.commit()
    assert (sorted(staged), rest) == (sender.keys, [])


def test_a_start_anew_forgets_what_was_sent() -> None:
    sender = Sender(LARGE, 2)
    sender.backward()
    sender.outbox.restart()
    sender.staged.clear()
    assert sender.commit() == ([], sender.keys)

    sender.backward()
    sender.outbox.restart()
    sender.staged.clear()
    sender.randomize(2)
    sender.backward()
    staged, rest = sender.commit()
    assert (sorted(staged), rest) == (sender.keys, [])
    assert sender.outbox.early  # what was dropped has not been changed


def test_half_a_backward_that_is_dropped_leaves_nothing_behind() -> None:
    sender = Sender(LARGE, 2)
    for parameter in (3, 2):
        sender.outbox.ready(parameter)
    sender.outbox.restart()
    sender.staged.clear()
    for parameter in (1, 0):
        sender.outbox.ready(parameter)
    staged, rest = sender.commit()
    assert sorted(staged + rest) == sender.keys
    assert {key for key in sender.keys if key not in staged} >= {(0, 0)}  # no part of d has come


def test_an_iteration_that_is_left_out_takes_nothing_along() -> None:
    """Its commit is empty: nobody asks for the rest."""
    sender = Sender(LARGE, 2)
    sender.backward()
    for inbox in sender.inboxes:
        inbox.close(empty=True)
    sender.outbox.committed()
    sender.staged.clear()
    sender.randomize(5)
    sender.backward()
    staged, rest = sender.commit()
    assert (sorted(staged), rest) == (sender.keys, [])


# -- scripts that change all of their gradients -----------------------------------------------------------


def iterate(sender: Sender, *, changing: bool) -> bool:
    """One iteration. Was anything sent early?"""
    early = sender.outbox.early
    sender.backward()
    if changing:
        sender.gradient(0).add_(1.0)
    staged, _ = sender.commit()
    assert bool(staged) == early
    return early


def test_after_changes_nothing_is_sent_early_for_a_while_that_doubles() -> None:
    sender = Sender(SMALL)
    pauses: list[int] = []
    length = 0
    while len(pauses) < 11:
        if iterate(sender, changing=True):
            pauses.append(length)
            length = 0
        else:
            length += 1
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, LONGEST_PAUSE, LONGEST_PAUSE]


def test_without_changes_the_pause_ends_and_the_next_one_is_short_again() -> None:
    sender = Sender(SMALL)
    for _ in range(8):  # early, 1, early, 2, early, 2 of 4
        iterate(sender, changing=True)
    assert [iterate(sender, changing=False) for _ in range(5)] == [False, False, True, True, True]
    assert [iterate(sender, changing=True) for _ in range(3)] == [True, False, True]


def test_changes_in_a_pause_do_not_make_it_longer() -> None:
    sender = Sender(SMALL)
    assert [iterate(sender, changing=True) for _ in range(5)] == [True, False, True, False, False]
    assert [iterate(sender, changing=False) for _ in range(3)] == [True, True, True]


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_residual_of_a_piece_that_has_changed_is_dropped_and_that_of_others_stays(shards: int) -> None:
    layout = Layout.of([Parameter((str(i),), (n,), "float32") for i, n in enumerate((300_000, 3, 400_000))])
    sender = Sender(layout, shards, codec="int4")
    expected = [
        Encoder(
            "int4",
            {name: each.clone() for name, each in tensors_over(cut(sender.region.gradients, s)).items()},
        )
        for s in sender.slices
    ]

    def commit(changed: Collection[Key] = ()) -> None:
        for shard in sender.slices:
            pieces, payload = sender.outbox.rest(shard.index)
            sender._deliver(shard.index, pieces, payload)
            encoder, gradient = expected[shard.index], tensors_over(cut(sender.region.gradients, shard))
            for name, values in gradient.items():
                encoder.vectors[name].copy_(values)
            for index, number in changed:
                if index == shard.index:
                    encoder.drop(ranges_of([shard.pieces(PIECE_BYTES)[number]]))
            arrived = encoder.arriving()
            inbox = sender.inboxes[shard.index]
            inbox.close(empty=False)
            for name, values in arrived.items():
                assert inbox.gradient[name] == bytes_of(values)
        sender.outbox.committed()

    for seed in range(3):
        sender.randomize(seed)
        sender.backward()
        commit()
    sender.randomize(4)
    sender.backward()
    before = {key: bytes(sender.outbox._bytes(key[0], [key[1]])[0]) for key in sender.keys}
    sender.gradient(0)[:10] += 1.0
    commit([key for key in sender.keys if bytes(sender.outbox._bytes(key[0], [key[1]])[0]) != before[key]])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ready"), st.integers(0, 3)),
        st.tuples(st.just("change"), st.integers(0, 3)),
        st.tuples(st.sampled_from(["begin", "commit", "commit", "backward"]), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=25)
@given(STEPS, st.integers(1, 3), st.booleans(), st.sampled_from(["float32", "bf16", "int8"]))
def test_whatever_a_script_does_the_servers_have_the_gradient_as_it_was_committed(
    steps: list[tuple[str, int]], shards: int, early: bool, codec: str
) -> None:
    layout = Layout.of(
        [Parameter((str(i),), (n,), "float32") for i, n in enumerate((300_000, 3, 64, 270_000))]
    )
    sender = Sender(layout, shards, early=early, codec=codec)
    for number, (what, parameter) in enumerate([*steps, ("commit", 0)]):
        match what:
            case "ready":
                sender.outbox.ready(parameter)
            case "change":
                place = sender.gradient(parameter)
                place[(7 * number) % len(place)] += 1 + number
            case "begin":
                sender.outbox.restart()
            case "backward":
                sender.backward()
            case _:
                staged, rest = sender.commit()
                assert set(staged) | set(rest) == set(sender.keys)
