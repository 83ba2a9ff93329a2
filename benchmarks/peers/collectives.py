"""The workers of PyTorch's own methods, with gloo, and of Accelerate's LocalSGD.

PyTorch's methods are DDP, DDP with shares of the joint batch that are set by hand, and PostLocalSGD. DDP takes the
mean of the workers' gradients. So if the shares of the joint batch are unequal, each worker multiplies its loss by its
share and by the number of workers. On slow links, DDP sends float16 (`fp16_compress_hook`).

PostLocalSGD has the period of PyTorch's examples, 4, and 10 steps of warm-up instead of 100. The subgroups of
PostLocalSGD have one worker each, because each machine has only one worker. So no gradients are exchanged after the
warm-up. Accelerate synchronizes every 8 steps, as in its guide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .work import WORKERS, Task, Text, Worker, loss_of, new_model, new_optimizer, shares

PORT = 29400
WARM_UP, PERIOD = 10, 4  # of PostLocalSGD
LOCAL_STEPS = 8  # of Accelerate's LocalSGD
TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Train until the launcher ends the run."""
    task = Task.given()
    worker = Worker(task)
    os.environ |= {
        "MASTER_ADDR": task.addresses[0],
        "MASTER_PORT": str(PORT),
        "RANK": str(worker.machine),
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    if task.system == "accelerate-local-sgd":
        train_accelerate(task, worker)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        train_ddp(task, worker)


def train_ddp(task: Task, worker: Worker) -> None:
    """Train with DDP or PostLocalSGD."""
    size, scale = worker.share, 1.0
    if task.system == "ddp-by-hand":
        sizes = shares(task.slowness)
        size = sizes[worker.machine]
        scale = size * WORKERS / sum(sizes)
    model = DistributedDataParallel(new_model(task.seed))
    optimizer: Any = new_optimizer(model, task.lr)
    agreed: Callable[[int], bool] = lambda step: True  # noqa: E731
    if task.system == "post-local-sgd":
        optimizer = _post_local_sgd(model, optimizer)
        agreed = lambda step: step < WARM_UP or (step - WARM_UP) % PERIOD == 0  # noqa: E731
    elif task.slow_link:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)

    def step(samples: Tensor) -> None:
        optimizer.zero_grad()
        (scale * loss_of(model, samples)).backward()
        worker.computed(size)
        optimizer.step()

    train(task, worker, size, model.module, step, agreed)


def train_accelerate(task: Task, worker: Worker) -> None:
    """Train with Accelerate's LocalSGD."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    bare = new_model(task.seed)
    model, optimizer = accelerator.prepare(bare, new_optimizer(bare, task.lr))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=LOCAL_STEPS, enabled=True) as local:

        def step(samples: Tensor) -> None:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, samples))
                worker.computed(worker.share)
                optimizer.step()
                optimizer.zero_grad()
                local.step()

        train(task, worker, worker.share, bare, step, lambda step: (step + 1) % LOCAL_STEPS == 0)


def train(
    task: Task,
    worker: Worker,
    size: int,
    model: nn.Module,
    step: Callable[[Tensor], None],
    agreed: Callable[[int], bool],
) -> None:
    """Make steps until the launcher ends the run.

    Args:
        task: the task of the run.
        worker: this worker.
        size: number of samples in a step.
        model: the model.
        step: makes a step with the given samples.
        agreed: returns True if all workers have the same weights after the step with this number, counted from 0.
    """
    batches = Text().batches(task.seed, worker.machine, size)
    worker.begin()
    number = 0
    while not worker.ended:
        worker.pace(size)
        step(next(batches))
        if agreed(number):
            worker.kept()
            worker.save(model)
        number += 1


def _post_local_sgd(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=WARM_UP)
    model.register_comm_hook(state, post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP))


if __name__ == "__main__":
    main()
