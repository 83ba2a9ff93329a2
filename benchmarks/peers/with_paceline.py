"""Paceline: the script that `paceline join` runs on each machine.

The loader's batch is the joint batch, so the hyper-parameters have the same meaning as in the other systems. Everything
else is an option of `paceline serve`: see `plan.SYSTEMS`.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

import paceline

from .work import CONTEXT, JOINT_BATCH, Task, Text, Worker, loss_of, new_model, new_optimizer


def main() -> None:
    """Train until the launcher ends the run."""
    task = Task.given()
    worker = Worker(task)
    model, optimizer, loader = paceline.prepare(
        (bare := new_model(task.seed)),
        new_optimizer(bare, task.lr),
        DataLoader(Text(), batch_size=JOINT_BATCH, shuffle=True),
        joint_batch=True,
    )
    # Training begins here: all workers receive the weights of the first worker, as in the constructor of DDP.
    model(torch.zeros(1, CONTEXT, dtype=torch.long))
    worker.begin()
    for samples in loader:
        worker.pace(len(samples))
        optimizer.zero_grad()
        loss_of(model, samples).backward()
        worker.computed(len(samples))
        optimizer.step()
        worker.kept()
        worker.save(model)
        if worker.ended:
            break


if __name__ == "__main__":
    main()
