"""What cannot be trained on a device is refused by one sentence, before or when it happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer
from paceline.errors import RunFailedError

from .device import DEVICE, SANITIZED, loss_of, made, own_rows, simulated


def step(model: nn.Module, device: torch.device | str = DEVICE) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, own_rows(iteration, device)).backward()
        optimizer.step()


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = made("cpu"), made()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x.cpu()).to(DEVICE))
        return out


def on_two_devices() -> None:
    step(Spread())


def on_meta() -> None:
    step(made("cpu").to("meta"), "meta")


def moved(*, gradient: bool) -> None:
    model = made()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    loss_of(model, own_rows(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if gradient:
        loss_of(model, own_rows(1)).backward()
        model.cpu()
    else:
        model.cpu()
        loss_of(model, own_rows(1, "cpu")).backward()
    optimizer.step()


def in_an_unsupported_dtype() -> None:
    step(made().to(torch.complex64))


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "a model on two devices": (on_two_devices, "A worker trains on one device"),
    "parameters on meta": (on_meta, "is on the device 'meta', so it has no values to train"),
    "a model that is moved": (lambda: moved(gradient=False), "was moved from .* to cpu"),
    "a model that is moved with its gradients": (lambda: moved(gradient=True), "was moved from .* to cpu"),
    "a dtype that cannot be trained": (in_an_unsupported_dtype, "complex64"),
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused(name: str) -> None:
    train, expected = REFUSED[name]
    with pytest.raises(RunFailedError, match=expected) as raised:
        simulated(train)
    print(f"{name}: {str(raised.value).splitlines()[0]}")


@pytest.mark.skipif(SANITIZED, reason="CUDA's sanitizer raises an error for sparse tensors")
def test_sparse_gradients_are_made_dense_or_refused_by_the_backend() -> None:
    def train() -> None:
        model = nn.Embedding(7, 6, sparse=True).to(DEVICE)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        model(torch.tensor([1, 3], device=DEVICE)).square().mean().backward()
        optimizer.step()

    try:
        plain = nn.Embedding(7, 6, sparse=True).to(DEVICE)
        plain(torch.tensor([1, 3], device=DEVICE)).square().mean().backward()
    except RuntimeError as error:
        with pytest.raises(RunFailedError, match="sparse") as raised:
            simulated(train)
        print(f"refused: {str(raised.value).splitlines()[0]} ({error})")
    else:
        simulated(train)
