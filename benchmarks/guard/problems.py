"""Small training problems for the guard. Each provides a model, the data of each worker, and the loss of a batch."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import cache

import msgspec
import torch
from torch import nn
from torch.nn import functional

from paceline.lab.demo import CLASSES, load

CONTEXT = 8  # number of characters from which the next character is predicted
USERS, ITEMS, RANK = 60, 40, 4
DIRECTIONS = 64  # number of dimensions of the quadratic


class Batch(msgspec.Struct):
    """Inputs and targets of one step, one row per sample. A scenario may change a batch before the loss is computed."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Problem(msgspec.Struct, frozen=True):
    """A model, its data and its loss."""

    model: Callable[[], nn.Module]  # the caller seeds torch's generator
    draw: Callable[[int, torch.Generator], Batch]  # draws a batch of this many samples
    loss: Callable[[nn.Module, Batch], torch.Tensor]  # the mean loss of a model on a batch


def _mlp(*, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, CLASSES)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load()
    return digits.train_images, digits.train_labels


def _draw_digits(samples: int, generator: torch.Generator) -> Batch:
    images, labels = _digits()
    drawn = torch.randint(len(labels), (samples,), generator=generator)
    return Batch(images[drawn], labels[drawn])


def _cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch.inputs), batch.targets)


@cache
def _text() -> tuple[torch.Tensor, int]:
    text = inspect.getsource(textwrap)
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(letter) for letter in text]), len(alphabet)


def _letters() -> nn.Module:
    size = _text()[1]
    return nn.Sequential(
        nn.Embedding(size, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 96), nn.Tanh(), nn.Linear(96, size)
    )


def _draw_letters(samples: int, generator: torch.Generator) -> Batch:
    text, _ = _text()
    begin = torch.randint(len(text) - CONTEXT, (samples, 1), generator=generator)
    return Batch(text[begin + torch.arange(CONTEXT)], text[begin[:, 0] + CONTEXT])


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Parameter(0.1 * torch.randn(USERS, RANK))
        self.items = nn.Parameter(0.1 * torch.randn(ITEMS, RANK))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return (self.users[pairs[:, 0]] * self.items[pairs[:, 1]]).sum(dim=1)


@cache
def _ratings() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.randn(size, RANK, generator=generator) for size in (USERS, ITEMS))
    ratings: torch.Tensor = users @ items.T / RANK**0.5
    return ratings


def _draw_ratings(samples: int, generator: torch.Generator) -> Batch:
    pairs = torch.stack(
        [torch.randint(size, (samples,), generator=generator) for size in (USERS, ITEMS)], dim=1
    )
    noise = 0.1 * torch.randn(samples, generator=generator)
    return Batch(pairs, _ratings()[pairs[:, 0], pairs[:, 1]] + noise)


def _squared_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.mse_loss(model(batch.inputs).squeeze(-1), batch.targets)


class _Bowl(nn.Module):
    """A quadratic with curvatures from 1/64 to 1; the inputs are the noise of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(DIRECTIONS))
        self.register_buffer("curvatures", torch.logspace(-6, 0, DIRECTIONS, base=2.0))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        curvatures = self.curvatures
        assert isinstance(curvatures, torch.Tensor)
        return 0.5 * (curvatures * self.place**2).sum() + (noise.mean(dim=0) * self.place).sum()


def _draw_noise(samples: int, generator: torch.Generator) -> Batch:
    return Batch(0.3 * torch.randn(samples, DIRECTIONS, generator=generator), torch.zeros(samples))


def _height(model: nn.Module, batch: Batch) -> torch.Tensor:
    height: torch.Tensor = model(batch.inputs)
    return height


PROBLEMS = {
    "digits": Problem(_mlp, _draw_digits, _cross_entropy),
    "digits with dropout": Problem(lambda: _mlp(dropout=0.5), _draw_digits, _cross_entropy),
    "digits with BatchNorm": Problem(_cnn, _draw_digits, _cross_entropy),
    "letters": Problem(_letters, _draw_letters, _cross_entropy),
    "factors": Problem(_Factors, _draw_ratings, _squared_error),
    "quadratic": Problem(_Bowl, _draw_noise, _height),
}
