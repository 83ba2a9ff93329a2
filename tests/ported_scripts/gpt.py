"""A transformer with tied weights, gradient accumulation, clipping and a schedule per step."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = int(sys.argv[1])
EPOCHS, ACCUMULATED, BLOCK, WORDS, WIDTH = 4, 2, 8, 13, 16


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
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x, targets):
        x = self.words(x) + self.positions(torch.arange(x.shape[1]))
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
text = torch.arange(32 * BLOCK + 1).square().remainder(WORDS)
loader = DataLoader(TensorDataset(text[:-1].view(-1, BLOCK), text[1:].view(-1, BLOCK)), batch_size=BATCH)
model = GPT()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
steps = EPOCHS * len(loader) // ACCUMULATED
scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)

losses = []
for _ in range(EPOCHS):
    for number, (x, y) in enumerate(loader, 1):
        loss = model(x, y) / ACCUMULATED
        loss.backward()
        losses.append(ACCUMULATED * loss.item())
        if number % ACCUMULATED == 0:
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
            paceline.log(loss=losses[-1])
            optimizer.zero_grad()
            scheduler.step()
