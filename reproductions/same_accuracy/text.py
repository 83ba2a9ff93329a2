"""A small GPT on the characters of Python's standard library, trained by AdamW with a cosine schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.layout import HyperParameters

from ..ensembles.problems import Data, Orders, Weights, hyper_parameters
from ..ensembles.schedules import Batch
from ..evidence.language import library_text, sequences
from .digits import cross_entropies

CHARACTERS = 97
"""The printable characters of ASCII, the newline, and one number for all others."""

HEADS = 4
CONTEXT = 16
WARM_UP = 0.1
"""Part of the run in which the rate rises."""

TESTED = 128
"""Number of sequences in the test."""


class TextGPT:
    """A transformer with four layers and about 200,000 parameters. Its embedding is also its output layer."""

    name = "text-gpt"
    width, layers = 64, 4
    optimizer = "AdamW"
    higher_is_better = False
    chance = 3.15
    rates = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    samples = 16000
    joint_batch = 80
    epochs = 1

    def __init__(self) -> None:
        length = self.samples * CONTEXT
        text = _numbered(library_text(2 * length))
        self._inputs, self._targets = sequences(text[: length + 1], CONTEXT)
        # The test uses text that is far away from what is trained on.
        self._tested = sequences(text[-TESTED * CONTEXT - 1 :], CONTEXT)
        self._orders = Orders(self.samples)

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters of AdamW. The rate rises to `rate`, and then falls to 0 along a cosine."""
        now = rising_and_falling(rate, progress)
        return hyper_parameters(torch.optim.AdamW, now, betas=(0.9, 0.95), weight_decay=0.1)

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int, spread: float) -> Tensor:
            return spread * torch.randn(rows, columns, generator=generator)

        width = self.width
        weights = {"embedding": drawn(CHARACTERS, width, 0.1), "position": drawn(CONTEXT, width, 0.1)}
        inner, last = width**-0.5, (2 * self.layers * width) ** -0.5
        for layer in range(self.layers):
            weights |= {
                f"{layer}.attention.scale": torch.ones(width),
                f"{layer}.attention": drawn(width, 3 * width, inner),
                f"{layer}.mixed": drawn(width, width, last),
                f"{layer}.wide.scale": torch.ones(width),
                f"{layer}.wide": drawn(width, 4 * width, inner),
                f"{layer}.narrow": drawn(4 * width, width, last / 2),
            }
        return weights | {"final.scale": torch.ones(width)}

    def data(self, seeds: Sequence[int], batch: Batch) -> Data:
        """Return sequences of characters, and the characters that follow."""
        chosen = self._orders.chosen(seeds, batch)
        return self._inputs[chosen], self._targets[chosen]

    def losses(self, weights: Weights, *data: Tensor) -> Tensor:
        """Return the cross-entropies in nats per character."""
        inputs, targets = data
        return cross_entropies(_scores(weights, inputs), targets.flatten(1))

    def quality(self, weights: Weights) -> Tensor:
        """Return the cross-entropies on the test's text."""
        inputs, targets = (part.expand(len(weights["position"]), -1, -1) for part in self._tested)
        return self.losses(weights, inputs, targets)


def rising_and_falling(rate: float, progress: float) -> float:
    """Return a learning rate that rises at the beginning, and then falls to 0 along a cosine."""
    rising = min(1.0, (progress + 0.01) / WARM_UP)
    falling = 0.5 * (1 + math.cos(math.pi * progress))
    return rate * rising * falling


def _numbered(text: Tensor) -> Tensor:
    """Return the number of each character, from 0 to `CHARACTERS` - 1."""
    printable = (text >= 32) & (text < 127)
    return torch.where(printable, text - 32, torch.where(text == ord("\n"), 95, 96))


def _scores(weights: Weights, inputs: Tensor) -> Tensor:
    """Return the scores of the next characters. Shapes: (runs, sequences, context), (runs, places, characters)."""
    runs, sequences, length = inputs.shape
    offsets = torch.arange(runs).view(-1, 1, 1) * CHARACTERS
    embedded = functional.embedding(inputs + offsets, weights["embedding"].flatten(0, 1))
    x = (embedded + weights["position"][:, None, :length]).flatten(1, 2)  # (runs, places, width)
    for layer in range(sum(name.endswith("mixed") for name in weights)):
        normed = _normalized(x, weights[f"{layer}.attention.scale"])
        heads = torch.bmm(normed, weights[f"{layer}.attention"])
        query, key, value = heads.view(runs * sequences, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = torch.baddbmm(x, mixed.transpose(1, 2).reshape(x.shape), weights[f"{layer}.mixed"])
        wide = torch.bmm(_normalized(x, weights[f"{layer}.wide.scale"]), weights[f"{layer}.wide"])
        x = torch.baddbmm(x, functional.gelu(wide, approximate="tanh"), weights[f"{layer}.narrow"])
    return torch.bmm(_normalized(x, weights["final.scale"]), weights["embedding"].transpose(1, 2))


def _normalized(x: Tensor, scale: Tensor) -> Tensor:
    """Divide by the root mean square."""
    return functional.rms_norm(x, x.shape[-1:]) * scale.unsqueeze(1)
