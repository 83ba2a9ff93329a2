"""A trainer class with callbacks, which draws batches with replacement for a number of iterations."""

import sys
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import paceline


class SortDataset(Dataset):
    """The target of three digits is the same digits in order."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        digits = torch.tensor([index % 4, index // 4 % 4, index // 16])
        return digits, digits.sort().values


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 12))

    def configure_optimizers(self, config):
        return torch.optim.AdamW(self.parameters(), lr=config["learning_rate"])

    def forward(self, x, targets):
        logits = self.body(self.embedding(x)).view(-1, 3, 4)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.callbacks = defaultdict(list)

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def run(self):
        model, config = self.model, self.config
        optimizer = model.configure_optimizers(config)
        sampler = RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10))
        loader = DataLoader(self.train_dataset, sampler=sampler, batch_size=config["batch_size"])
        model, optimizer, loader = paceline.prepare(model, optimizer, loader)
        model.train()
        data_iter = iter(loader)
        for self.iter_num in range(config["max_iters"]):
            try:
                x, y = next(data_iter)
            except StopIteration:
                data_iter = iter(loader)
                x, y = next(data_iter)
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            optimizer.clip_grad_norm(config["grad_norm_clip"])
            optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)


torch.manual_seed(0)
config = {"batch_size": int(sys.argv[1]), "max_iters": 40, "learning_rate": 5e-3, "grad_norm_clip": 1.0}
model, losses = Model(), []
trainer = Trainer(config, model, SortDataset())
trainer.add_callback("on_batch_end", lambda trainer: losses.append(trainer.loss.item()))
trainer.run()
