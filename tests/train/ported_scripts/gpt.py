"""A transformer of characters, with gradient accumulation, clipping, a schedule per step, and early stopping."""

import bisect
import inspect
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline

BATCH = int(sys.argv[1])
EPOCHS, PATIENCE, ACCUMULATED, BLOCK, WIDTH = 20, 2, 2, 16, 16

text = inspect.getsource(bisect)[:1800]
characters = sorted(set(text))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(len(characters), WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(characters), bias=False)
        self.head.weight = self.characters.weight

    def forward(self, x, targets):
        x = self.characters(x) + self.positions(torch.arange(x.shape[1]))
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
codes = torch.tensor([characters.index(character) for character in text])
codes = codes[: (len(codes) - 1) // BLOCK * BLOCK + 1]
blocks = TensorDataset(codes[:-1].view(-1, BLOCK), codes[1:].view(-1, BLOCK))
train_set, validation_set = random_split(blocks, [64, len(blocks) - 64])
loader = DataLoader(train_set, batch_size=BATCH)
validation_loader = DataLoader(validation_set, batch_size=16)

model = GPT()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.95))
steps = EPOCHS * len(loader) // ACCUMULATED
scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)


@torch.no_grad()
def validation_loss():
    total = sum(len(x) * model(x, y).item() for x, y in validation_loader)
    return paceline.reduce(total / len(validation_set))  # the same in all workers


losses, best, waited = [], math.inf, 0
loop = paceline.epochs(EPOCHS)
for epoch in loop:
    for number, (x, y) in enumerate(loader, 1):
        loss = model(x, y) / ACCUMULATED
        loss.backward()
        losses.append(ACCUMULATED * loss.item())
        if number % ACCUMULATED == 0:
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            paceline.log(loss=losses[-1])
            optimizer.zero_grad()
            scheduler.step()

    current = validation_loss()
    if paceline.is_main():
        paceline.log(validation_loss=current)
        print(f"epoch {epoch}: validation loss {current:.3f}")
    if current < best:
        best, waited = current, 0
        paceline.save(model.state_dict(), "gpt.pt")
    elif (waited := waited + 1) == PATIENCE:
        loop.stop()
