"""Memory that is followed: others' writes are seen, one's own are found, and given up if they differ in nothing."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from paceline.train.optimizer import DistributedOptimizer
from paceline.wire import memory
from paceline.wire.follow import COMPARED_BYTES, PAGE_BYTES, MappedMemory, MemoryFollower

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

SIZE_BYTES = 3 * COMPARED_BYTES


@dataclass
class Followed:
    """What the servers map, and what a worker does."""

    shown: mmap.mmap
    follower: MemoryFollower


@pytest.fixture
def followed() -> Iterator[Followed]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, SIZE_BYTES)
    shown = mmap.mmap(descriptor, SIZE_BYTES)
    shown[:] = bytes(range(256)) * (SIZE_BYTES // 256)
    follower = MemoryFollower(descriptor, SIZE_BYTES)
    yield Followed(shown, follower)
    follower.close()


def test_what_others_write_is_seen_and_is_no_edit(followed: Followed) -> None:
    for value in range(3):
        followed.shown[5 * PAGE_BYTES] = value
        assert followed.follower.memory[5 * PAGE_BYTES] == value
        assert not followed.follower.edited()


@pytest.mark.parametrize("place", [0, PAGE_BYTES - 1, 7 * PAGE_BYTES + 3, SIZE_BYTES - 1])
def test_a_single_byte_is_an_edit_until_it_is_taken_back(followed: Followed, place: int) -> None:
    before = followed.follower.memory[place]
    followed.follower.memory[place] = before ^ 1
    assert followed.shown[place] == before  # nobody else sees it
    assert followed.follower.edited()
    assert followed.follower.edited()  # it does not get used to it
    followed.follower.memory[place] = before
    assert not followed.follower.edited()
    followed.shown[place] = before ^ 2
    assert followed.follower.memory[place] == before ^ 2  # the page is followed again


def test_all_of_it_may_be_put_aside_and_put_back(followed: Followed) -> None:
    kept = bytes(followed.follower.memory)
    followed.follower.memory[:] = bytes(SIZE_BYTES)
    assert followed.follower.edited()
    followed.follower.memory[:] = kept
    assert not followed.follower.edited()
    followed.shown[:] = bytes([9]) * SIZE_BYTES
    assert followed.follower.memory == followed.shown[:]
    assert not followed.follower.edited()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_where_pages_cannot_be_told_apart_weights_are_copied(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    def refuse(descriptor: int, size_bytes: int) -> MemoryFollower:
        raise OSError("no pagemap here")

    def train() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 4, dtype=torch.float64)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 8, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    expected = run_on_threads(train, workers=1, servers=2, sync=sync).state_dict["weight"]
    monkeypatch.setattr(memory, "MemoryFollower", refuse)
    run = run_on_threads(train, workers=1, servers=2, sync=sync)
    assert torch.equal(run.state_dict["weight"], expected)
    assert torch.equal(run.results[0], expected)  # type: ignore[arg-type]


def test_a_read_only_view_follows_and_cannot_be_written_to() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, SIZE_BYTES)
    shown = mmap.mmap(descriptor, SIZE_BYTES)
    reader = MappedMemory(descriptor, SIZE_BYTES)
    shown[5] = 7
    assert reader.memory[5] == 7
    assert reader.memory.readonly
    assert not reader.edited()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
