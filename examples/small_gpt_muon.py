"""Train a small GPT on the source files of Python's standard library, byte by byte, with Muon and AdamW.

    python examples/small_gpt_muon.py                                        # one ordinary process, about a minute
    python examples/small_gpt_muon.py --optimizer adamw                      # AdamW for all parameters, to compare
    paceline run --workers 2 examples/small_gpt_muon.py                      # two workers divide each batch

Muon makes the update of a matrix orthogonal, so the servers hold whole matrices. Muon updates the matrices inside the
network. AdamW updates the embeddings, the output layer and the scales of the norms.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

BYTES = 256
CONTEXT = 64  # bytes in a sequence
TEXT_BYTES = 4_000_000
VALIDATION = 128  # sequences that are not trained on
WARM_UP = 0.1  # share of the steps in which the learning rates rise

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon", help="Default: muon.")
parser.add_argument("--steps", type=int, default=1000, help="Number of steps. Default: 1000.")
parser.add_argument("--batch-size", type=int, default=16, help="Sequences in a step. Default: 16.")
parser.add_argument("--width", type=int, default=64, help="Width of the network. Default: 64.")
parser.add_argument("--layers", type=int, default=3, help="Number of layers. Default: 3.")
parser.add_argument("--lr", type=float, default=0.008, help="Learning rate of AdamW. Default: 0.008.")
parser.add_argument("--muon-lr", type=float, default=0.02, help="Learning rate of Muon. Default: 0.02.")
options = parser.parse_args()


class Block(nn.Module):
    """A layer of the transformer: attention to the earlier bytes, and a perceptron."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.RMSNorm(width)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations after this layer. Shape of `x` and of the result: (sequences, context, width)."""
        count, length, width = x.shape
        heads = self.attention(self.attention_norm(x)).view(count, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).reshape(count, length, width))
        change: Tensor = self.narrow(functional.gelu(self.wide(self.perceptron_norm(x))))
        return x + change


class GPT(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, BYTES, bias=False)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next bytes, in nats. Shape of the text: (sequences, context + 1)."""
        x = self.embedding(text[:, :-1]) + self.position.weight
        scores = self.output(self.norm(self.blocks(x)))
        return functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def library_text(size: int) -> Tensor:
    """Return the first bytes of the standard library's source files, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


def learning_rate_factor(step: int) -> float:
    """Return the factor of the learning rates, which rise, and then fall to 0 along a cosine."""
    steps: int = options.steps
    return min(1.0, (step + 1) / (WARM_UP * steps)) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


samples, length = options.steps * options.batch_size, CONTEXT + 1
text = library_text(TEXT_BYTES)
sequences = text[: len(text) // length * length].view(-1, length)
order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
held_out = sequences[order[:VALIDATION]]
trained_on = TensorDataset(sequences[order[VALIDATION : VALIDATION + samples]])
loader = DataLoader(trained_on, options.batch_size, shuffle=True)

torch.manual_seed(0)
model = GPT(options.width, options.layers)
if options.optimizer == "muon":
    matrices = [each for each in model.blocks.parameters() if each.dim() == 2]
    inside = set(matrices)
    others = [each for each in model.parameters() if each not in inside]
    optimizers = [
        torch.optim.Muon(matrices, lr=options.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01),
    ]
else:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)]
schedulers = [torch.optim.lr_scheduler.LambdaLR(each, learning_rate_factor) for each in optimizers]

model, loader, *prepared = paceline.prepare(model, loader, *optimizers, *schedulers, joint_batch=True)
optimizers, schedulers = prepared[: len(optimizers)], prepared[len(optimizers) :]
for _ in paceline.epochs(1):
    for (batch,) in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()

with paceline.evaluating(model) as trained, torch.inference_mode():
    if paceline.is_main():
        bits = float(trained.loss(held_out)) / math.log(2)
        paceline.log(bits_per_byte=bits)
        print(f"{options.optimizer}: {bits:.3f} bits per byte on text that was not trained on")
