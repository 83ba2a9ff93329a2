"""Servers that make the steps of optimizers on a device: its copies are waited for, and nobody else sees it.

The device is the double of one with streams, whose copies are late (see `delayed_queue`). `tests/accelerator` trains on
a device of torch.
"""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ConfigurationError
from paceline.shard import slice_optimizers
from paceline.shard.device_queue import SliceOnDevice
from paceline.shard.slice_optimizers import HOST
from paceline.shard.vectors import Vectors
from tests.support.delayed_queue import DelayedQueue
from tests.support.store_training import SETTINGS, StoreTraining, tensorwise_model

DOUBLE = torch.device("cpu", 0)  # is not `HOST`, so it counts as a device


@pytest.fixture(params=range(3))
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[DelayedQueue]:
    """The queues of the devices that are created, whose copies are late."""
    queues: list[DelayedQueue] = []

    def on_the_double(weights: Vectors, gradient: Vectors, device: torch.device) -> SliceOnDevice:
        host = [*weights.values(), *gradient.values()]
        queues.append(DelayedQueue(request.param + len(queues), dict(enumerate(host))))  # type: ignore[arg-type]
        return SliceOnDevice(weights, gradient, device, queues[-1])

    monkeypatch.setattr(slice_optimizers, "SliceOnDevice", on_the_double)
    return queues


def equal(state: Vectors, other: Vectors) -> bool:
    return state.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in state.items()
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_updates_and_states_are_those_of_the_host_bit_by_bit(name: str, late: list[DelayedQueue]) -> None:
    described = tensorwise_model(name)
    host, device = StoreTraining(described, HOST), StoreTraining(described, DOUBLE)
    for iteration in range(6):
        for each in (host, device):
            each.step(iteration)
        assert equal(device.weights, host.weights), iteration
        assert equal(device.store.optimizer_state(), host.store.optimizer_state())
    assert len(late) == 1  # AdamW is on the host


def test_a_state_goes_on_from_the_host_to_a_device_and_back(late: list[DelayedQueue]) -> None:
    described = tensorwise_model("Adafactor")
    host, device = StoreTraining(described, HOST), StoreTraining(described, DOUBLE)
    for iteration in range(2):
        host.step(iteration)
        device.step(iteration)
    to_device, to_host = StoreTraining(described, DOUBLE), StoreTraining(described, HOST)
    for before, after in ((host, to_device), (device, to_host)):
        after.go_on(before)
        after.step(2)
    assert equal(to_device.weights, to_host.weights)


def test_memory_of_the_host_is_registered_as_long_as_the_optimizer_lives(late: list[DelayedQueue]) -> None:
    training = StoreTraining(tensorwise_model("Muon"), DOUBLE)
    [queue] = late
    assert len(queue.registered) == 2  # the weights, and the mean of the gradients
    del training
    assert not queue.registered


def out_of_memory(*arguments: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")


TOO_SMALL = "server_device is 'cpu:0', whose memory is too small for the weights and the state of Muon"


def test_a_device_whose_memory_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_optimizers, "SliceOnDevice", out_of_memory)
    with pytest.raises(ConfigurationError, match=TOO_SMALL):
        StoreTraining(tensorwise_model("Muon"), DOUBLE)


def test_so_is_one_whose_memory_is_too_small_for_a_step(
    late: list[DelayedQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = StoreTraining(tensorwise_model("Muon"), DOUBLE)
    monkeypatch.setattr(slice_optimizers, "take_step", out_of_memory)
    with pytest.raises(ConfigurationError, match=TOO_SMALL):
        training.step(0)
