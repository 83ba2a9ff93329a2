"""A graph convolutional network on the whole graph: each worker has a part of the labeled nodes."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import paceline

BATCH = int(sys.argv[1]) * 3

torch.manual_seed(0)
labels = torch.arange(40) % 2
features = torch.randn(40, 5) + labels[:, None]
edges = (torch.rand(40, 40) < torch.where(labels[:, None] == labels, 0.3, 0.05)).to(features.dtype)
edges = (edges + edges.t() + torch.eye(40)).clamp(max=1.0)
adjacency = edges / edges.sum(1, keepdim=True)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x, adjacency):
        return self.second(adjacency @ F.relu(self.first(adjacency @ x)))


nodes = DataLoader(range(24), batch_size=BATCH)  # the labeled nodes
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)
model, optimizer, nodes = paceline.prepare(model, optimizer, nodes)

losses = []
for _ in range(20):
    for labeled in nodes:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features, adjacency)[labeled], labels[labeled])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
with torch.no_grad():
    accuracy = (model(features, adjacency).argmax(1) == labels)[24:].double().mean()
if paceline.is_main():
    print(f"accuracy on the other nodes: {accuracy:.0%}")
