"""A byte-level language model on the source files of Python's standard library.

The first megabyte of the files, in the order of their names, is cut into batches, which are shuffled for each seed
and used once: the n-th gradient that is pushed is computed from the n-th batch. The validation loss is the
cross-entropy on bytes that follow, in bits per byte.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from .batched import Weights
from .schedules import Gradient

TEXT_BYTES = 1_000_000
VALIDATION_BYTES = 8_192
CONTEXT = 64  # bytes in a sequence
SEQUENCES = 8  # sequences in a batch
BYTES = 256
WIDTH, HEADS = 48, 4


@functools.cache
def library_text(size: int) -> Tensor:
    """Return the first bytes of the standard library's source files, as numbers."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


def sequences(text: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut a text into sequences, and return them with the character that follows each of their characters."""
    return text[:-1].view(-1, length), text[1:].view(-1, length)


class ByteTransformer:
    """A transformer with one layer, four heads and about 60,000 parameters."""

    def __init__(self) -> None:
        text = library_text(TEXT_BYTES + VALIDATION_BYTES + 1)
        used = TEXT_BYTES // (CONTEXT * SEQUENCES) * CONTEXT * SEQUENCES
        self._inputs, self._targets = (
            part.view(-1, SEQUENCES, CONTEXT) for part in sequences(text[: used + 1], CONTEXT)
        )
        self._held_out = sequences(text[TEXT_BYTES:], CONTEXT)
        self._orders: dict[int, Tensor] = {}

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters: scales are 1, and others have the variance 1 / (number of inputs)."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / math.sqrt(rows)

        return {
            "embedding": drawn(BYTES, WIDTH) * math.sqrt(BYTES),  # rows are selected, not summed
            "position": drawn(CONTEXT, WIDTH),
            "attention.scale": torch.ones(WIDTH),
            "attention": drawn(WIDTH, 3 * WIDTH),
            "mixed": drawn(WIDTH, WIDTH),
            "wide.scale": torch.ones(WIDTH),
            "wide": drawn(WIDTH, 4 * WIDTH),
            "narrow": drawn(4 * WIDTH, WIDTH),
            "final.scale": torch.ones(WIDTH),
            "output": drawn(WIDTH, BYTES),
        }

    def batch(self, seed: int, gradient: Gradient) -> tuple[Tensor, ...]:
        """Return the inputs and the bytes that follow them."""
        batches = len(self._inputs)
        if seed not in self._orders:
            self._orders[seed] = torch.randperm(batches, generator=torch.Generator().manual_seed(seed))
        index = self._orders[seed][gradient.number % batches]
        return self._inputs[index], self._targets[index]

    def loss(self, weights: Weights, *batch: Tensor) -> Tensor:
        """Return the cross-entropy in nats per byte."""
        inputs, targets = batch
        return functional.cross_entropy(_scores(weights, inputs).flatten(0, 1), targets.flatten())

    def validation(self, weights: Weights) -> Tensor:
        """Return the cross-entropy on the held-out bytes, in bits per byte."""
        return self.loss(weights, *self._held_out) / math.log(2)


def _scores(weights: Weights, inputs: Tensor) -> Tensor:
    """Return the scores of the next byte. Shape: (sequences, context, 256)."""
    count, length = inputs.shape
    x = weights["embedding"][inputs] + weights["position"][:length]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = (_norm(x, weights["attention.scale"]) @ weights["attention"]).reshape(count, length, 3, HEADS, -1)
    query, key, value = (heads[:, :, part].transpose(1, 2) for part in range(3))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    shares = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
    x = x + (shares @ value).transpose(1, 2).reshape(count, length, WIDTH) @ weights["mixed"]
    wide = functional.gelu(_norm(x, weights["wide.scale"]) @ weights["wide"])
    return _norm(x + wide @ weights["narrow"], weights["final.scale"]) @ weights["output"]


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    """Divide by the root mean square."""
    return scale * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
