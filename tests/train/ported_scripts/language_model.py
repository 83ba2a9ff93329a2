"""A recurrent language model: the best weights are saved, and reloaded when the validation loss rises."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import paceline

COLUMNS = int(sys.argv[1]) * paceline.worker_count()  # the text is cut into as many columns
LENGTH, WORDS = 6, 11


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 12)
        self.rnn = nn.GRU(12, 12)
        self.head = nn.Linear(12, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, words, hidden=None):
        output, hidden = self.rnn(self.embedding(words), hidden)
        return self.head(output), hidden


def loss_of(words, hidden=None):
    output, hidden = model(words[:-1], hidden)
    return F.cross_entropy(output.flatten(0, 1), words[1:].flatten()), hidden.detach()


def evaluate():
    with torch.no_grad():
        return paceline.reduce(loss_of(validation)[0].item())


torch.manual_seed(0)
text = torch.arange(400).remainder(WORDS)
validation = text[336:].view(4, 16).t()
columns = text[:336].view(COLUMNS, -1).t()
columns = columns[:, paceline.worker_index() :: paceline.worker_count()]  # this worker's columns

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
model, optimizer = paceline.prepare(model, optimizer)

losses, best = [], float("inf")
for epoch in range(6):
    hidden = None
    for start in range(0, len(columns) - LENGTH, LENGTH):
        optimizer.zero_grad()
        loss, hidden = loss_of(columns[start : start + LENGTH + 1], hidden)
        loss.backward()
        optimizer.clip_grad_norm(0.25)
        optimizer.step()
        losses.append(loss.item())
    if (loss_now := evaluate()) < best and epoch != 4:
        best = loss_now
        paceline.save(model.state_dict(), "best.pt")
        paceline.barrier()  # the file is complete
    else:
        with optimizer.editing():
            model.load_state_dict(torch.load("best.pt"))
        for group in optimizer.param_groups:
            group["lr"] /= 4
