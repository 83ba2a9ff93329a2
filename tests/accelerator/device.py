"""The device of the tests, the model that most of them train, and what must be equal.

The environment variable `PACELINE_ACCELERATOR` is the name of the device, such as `cuda`. Most tests simulate workers
in this process: the tensors are those of the device, and its shaders are compiled only once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from paceline import worker_count, worker_index
from paceline.sim import Cluster, SimResult, simulate
from paceline.train import device as early_copies
from paceline.train import weights as staging

__all__ = [
    "DEVICE",
    "IMPORTS",
    "KIND",
    "SANITIZED",
    "Immediate",
    "State",
    "assert_equal",
    "cluster",
    "copying_early",
    "loss_of",
    "made",
    "own_rows",
    "rows",
    "simulated",
    "weights_of",
]

PACKAGES = {"vulkan": "torchvulkan"}
"""Package that adds a kind of device to torch, if torch does not load it by itself."""

KIND = os.environ["PACELINE_ACCELERATOR"]
IMPORTS = ["--import", PACKAGES[KIND]] if KIND in PACKAGES else []

if KIND in PACKAGES:
    importlib.import_module(PACKAGES[KIND])

DEVICE = torch.device(KIND, 0)
SANITIZED = "TORCH_CUDA_SANITIZER" in os.environ
INPUTS, ROWS = 6, 12

State = dict[str, torch.Tensor]


def made(device: torch.device | str = DEVICE, seed: int = 5) -> nn.Sequential:
    """Return a model on a device. It is the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, INPUTS))
    return model.to(device)


def rows(iteration: int, device: torch.device | str = DEVICE) -> torch.Tensor:
    """Return the joint batch of an iteration."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(ROWS, INPUTS, generator=generator).to(device)


def own_rows(iteration: int, device: torch.device | str = DEVICE) -> torch.Tensor:
    """Return this worker's part of the joint batch; the whole batch outside a run."""
    return rows(iteration, "cpu")[worker_index() :: worker_count()].to(device)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.flip(1)).square().mean()


def weights_of(*models: nn.Module) -> State:
    """Return the weights, in the memory of the host."""
    return {
        name: tensor.detach().cpu().clone() for model in models for name, tensor in model.state_dict().items()
    }


def cluster(workers: int = 2, servers: int = 2, **options: Any) -> Cluster:
    return Cluster(compute_s=[1.0, 1.3, 3.1][:workers], servers=servers, latency_s=0.01, **options)


def simulated(
    train: Callable[[], object], sync: str = "bsp", workers: int = 2, servers: int = 2, **options: Any
) -> SimResult:
    return simulate(cluster(workers, servers), sync, train_fn=train, **options)


def assert_equal(state: State, expected: State, what: str) -> None:
    """Check that weights differ by at most 1e-5 of the largest one, and print the difference."""
    assert state.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    off = max(float((state[name].cpu() - expected[name].cpu()).abs().max()) for name in expected)
    print(f"{what}: {off / largest:.1e} of the largest weight")
    assert off <= 1e-5 * largest


class Immediate:
    """A queue that counts as one with streams, and carries out everything at once."""

    overlaps = True

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, work: Callable[[], object], *, writes: Sequence[torch.Tensor]) -> Immediate:
        self.submitted += 1
        work()
        return self

    def done(self) -> bool:
        return True

    def drain(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def keep_close(self) -> None:
        pass

    def order(self) -> None:
        pass

    def register(self, memory: Sequence[torch.Tensor], *, only_read: bool) -> Callable[[], None]:
        return lambda: None


@contextmanager
def copying_early(early: bool, piece_bytes: int = 256) -> Iterator[list[Immediate]]:
    """Return a context in which gradients are copied early, whether the device has streams or not.

    Args:
        early: False to leave the device's own queue.
        piece_bytes: maximum size, in bytes, of a piece.

    Returns:
        The queues that have been created.
    """
    queues: list[Immediate] = []
    if not early:
        yield queues
        return

    def queue_of(device: torch.device) -> Immediate:
        queues.append(Immediate())
        return queues[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "queue_of", queue_of)
        patch.setattr(early_copies, "PIECE_BYTES", piece_bytes)
        yield queues
