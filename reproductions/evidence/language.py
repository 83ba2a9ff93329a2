"""Byte-level language models on the source files of Python's standard library.

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


class ByteModel:
    """The data of both language models."""

    def __init__(self) -> None:
        text = library_text(TEXT_BYTES + VALIDATION_BYTES + 1)
        used = TEXT_BYTES // (CONTEXT * SEQUENCES) * CONTEXT * SEQUENCES
        self._inputs = text[:used].reshape(-1, SEQUENCES, CONTEXT)
        self._targets = text[1 : used + 1].reshape(-1, SEQUENCES, CONTEXT)
        held_out = text[TEXT_BYTES : TEXT_BYTES + VALIDATION_BYTES + 1]
        self._held_out = held_out[:-1].reshape(-1, CONTEXT), held_out[1:].reshape(-1, CONTEXT)
        self._orders: dict[int, Tensor] = {}

    @property
    def batches(self) -> int:
        """Number of batches in one pass."""
        return len(self._inputs)

    def batch(self, seed: int, gradient: Gradient) -> tuple[Tensor, ...]:
        """Return the inputs and the bytes that follow them."""
        if seed not in self._orders:
            generator = torch.Generator().manual_seed(seed)
            self._orders[seed] = torch.randperm(self.batches, generator=generator)
        index = self._orders[seed][gradient.number % self.batches]
        return self._inputs[index], self._targets[index]

    def loss(self, weights: Weights, *batch: Tensor) -> Tensor:
        """Return the cross-entropy in nats per byte."""
        inputs, targets = batch
        return functional.cross_entropy(self.logits(weights, inputs).flatten(0, 1), targets.flatten())

    def validation(self, weights: Weights) -> Tensor:
        """Return the cross-entropy on the held-out bytes, in bits per byte."""
        return self.loss(weights, *self._held_out) / math.log(2)

    def logits(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return the scores of the next byte. Shape: (sequences, context, 256)."""
        raise NotImplementedError


def drawn(seed: int, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Return random weights with variance 1 / (number of inputs). Vectors are 0, and scales of norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape) if name.endswith("scale") else torch.zeros(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[0])
    return weights


class ByteGRU(ByteModel):
    """A gated recurrent network with about 60,000 parameters."""

    EMBEDDING, HIDDEN = 24, 88

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        e, h = self.EMBEDDING, self.HIDDEN
        shapes = {
            "embedding": (BYTES, e),
            "input": (e, 3 * h),
            "recurrent": (h, 3 * h),
            "bias": (3 * h,),
            "output": (h, BYTES),
            "output_bias": (BYTES,),
        }
        weights = drawn(seed, shapes)
        weights["embedding"] *= math.sqrt(BYTES)  # rows are selected, not summed
        return weights

    def logits(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return the scores of the next byte."""
        h = self.HIDDEN
        driven = weights["embedding"][inputs] @ weights["input"] + weights["bias"]
        state = driven.new_zeros(len(inputs), h)
        states = []
        for now in driven.unbind(dim=1):
            recurrent = state @ weights["recurrent"]
            gates = torch.sigmoid(now[:, : 2 * h] + recurrent[:, : 2 * h])
            update, reset = gates.chunk(2, dim=-1)
            proposed = torch.tanh(torch.addcmul(now[:, 2 * h :], reset, recurrent[:, 2 * h :]))
            state = torch.lerp(proposed, state, update)
            states.append(state)
        return torch.stack(states, dim=1) @ weights["output"] + weights["output_bias"]


class ByteTransformer(ByteModel):
    """A transformer with one layer, four heads and about 60,000 parameters."""

    WIDTH, LAYERS, HEADS = 48, 1, 4

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        w = self.WIDTH
        shapes: dict[str, tuple[int, ...]] = {"embedding": (BYTES, w), "position": (CONTEXT, w)}
        for layer in range(self.LAYERS):
            shapes |= {
                f"{layer}.attention_scale": (w,),
                f"{layer}.attention": (w, 3 * w),
                f"{layer}.mixed": (w, w),
                f"{layer}.wide_scale": (w,),
                f"{layer}.wide": (w, 4 * w),
                f"{layer}.narrow": (4 * w, w),
            }
        shapes |= {"final_scale": (w,), "output": (w, BYTES)}
        weights = drawn(seed, shapes)
        weights["embedding"] *= math.sqrt(BYTES)
        return weights

    def logits(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return the scores of the next byte."""
        sequences, length = inputs.shape
        x = weights["embedding"][inputs] + weights["position"][:length]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in range(self.LAYERS):
            normed = _norm(x, weights[f"{layer}.attention_scale"])
            heads = (normed @ weights[f"{layer}.attention"]).reshape(sequences, length, 3, self.HEADS, -1)
            query, key, value = (heads[:, :, part].transpose(1, 2) for part in range(3))
            scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
            shares = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
            mixed = (shares @ value).transpose(1, 2).reshape(sequences, length, self.WIDTH)
            x = x + mixed @ weights[f"{layer}.mixed"]
            wide = functional.gelu(_norm(x, weights[f"{layer}.wide_scale"]) @ weights[f"{layer}.wide"])
            x = x + wide @ weights[f"{layer}.narrow"]
        return _norm(x, weights["final_scale"]) @ weights["output"]


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    """Divide by the root mean square."""
    return scale * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
