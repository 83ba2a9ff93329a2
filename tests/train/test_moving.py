"""Batches that are moved to a device. The device is "meta", which has no data, so that nothing is left on the CPU."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.errors import ConfigurationError
from paceline.train.data import MovedLoader, moved, pins
from tests.conftest import RunOnThreads

META = torch.device("meta")


class Pair(NamedTuple):
    inputs: torch.Tensor
    name: str


def test_tensors_are_moved_wherever_they_are_in_a_batch() -> None:
    x = torch.ones(3, 2)
    batch: Any = {"a": [x, (x, 1)], "b": OrderedDict(pair=Pair(x, "cat")), "c": None, "d": "dog"}
    found = moved(batch, META, pinned=False)
    assert [found["a"][0].device, found["a"][1][0].device] == [META, META]
    assert found["a"][1][1] == 1
    assert isinstance(found["b"]["pair"], Pair)
    assert found["b"]["pair"].inputs.device == META
    assert (found["b"]["pair"].name, found["c"], found["d"]) == ("cat", None, "dog")
    assert x.device.type == "cpu"


def test_a_tensor_that_is_there_is_not_copied() -> None:
    x = torch.ones(3)
    assert moved([x], torch.device("cpu"), pinned=False)[0] is x


def test_an_object_that_can_move_itself_does_so() -> None:
    """The lengths in a packed sequence must stay on the CPU."""
    packed = moved(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), META, pinned=False)
    assert isinstance(packed, PackedSequence)
    assert packed.data.device == META
    assert packed.batch_sizes.device.type == "cpu"


def test_an_object_that_takes_only_a_device_moves_itself_too() -> None:
    class Items:
        def to(self, device: torch.device) -> torch.device:
            return device

    batch: Any = [Items()]
    assert [moved(batch, META, pinned=pinned) for pinned in (False, True)] == [[META], [META]]


def test_copies_are_not_waited_for_if_the_loader_pins_its_memory() -> None:
    class Noting:
        """Notes how it is moved."""

        def to(self, device: torch.device, *, non_blocking: bool) -> tuple[torch.device, bool]:
            return device, non_blocking

    plain: DataLoader[Any] = DataLoader([1.0])  # type: ignore[arg-type]
    pinning: DataLoader[Any] = DataLoader([1.0], pin_memory=True)  # type: ignore[arg-type]
    assert [pins(loader) for loader in (plain, pinning, [1.0])] == [False, True, False]
    batches: list[Any] = [Noting()]
    for pinned in (False, True):
        assert list(MovedLoader(batches, META, pinned=pinned)) == [(META, pinned)]


def test_outside_a_run_only_the_batches_change() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    there = paceline.distribute(loader, device="meta")
    assert len(there) == 3  # type: ignore[arg-type]
    assert there.batch_size == 2  # type: ignore[attr-defined]
    for _ in range(2):
        assert [batch.device for (batch,) in there] == [META] * 3
    assert paceline.distribute(loader, device=None) is loader
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *_, prepared = paceline.prepare(model, optimizer, loader, device=META)
    assert [batch.device for (batch,) in prepared] == [META] * 3


@pytest.mark.parametrize("device", ["gpu", 1.5])
def test_a_device_that_torch_does_not_know_is_refused(device: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a device of torch, such as paceline.device\(\)"):
        paceline.distribute([torch.ones(1)], device=device)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(8.0))


@pytest.mark.parametrize("how", ["distribute", "prepare", "prepare what is distributed"])
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_in_a_run_each_worker_moves_its_own_batches(
    run_on_threads: RunOnThreads, how: str, kind: str
) -> None:
    def train() -> list[tuple[torch.device, int]]:
        seen = []
        data: Any = Stream() if kind == "stream" else TensorDataset(torch.arange(8.0))
        loader: Any = DataLoader(data, batch_size=2)
        model = torch.nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "distribute":
            optimizer = paceline.DistributedOptimizer(optimizer)
            loader = paceline.distribute(loader, device="meta")
        elif how == "prepare":
            model, optimizer, loader = paceline.prepare(model, optimizer, loader, device="meta")
        else:
            loader = paceline.distribute(loader)
            model, optimizer, loader = paceline.prepare(model, optimizer, loader, device="meta")
        for batch in loader:
            inputs = batch if kind == "stream" else batch[0]
            seen.append((inputs.device, len(inputs)))
            optimizer.zero_grad()
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
        return seen

    assert run_on_threads(train, workers=2).results == dict.fromkeys(range(2), [(META, 2)] * 2)
