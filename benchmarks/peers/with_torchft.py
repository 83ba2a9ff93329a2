"""torchft: DDP, LocalSGD and DiLoCo. Each machine is a replica group with one process, and a store of its own.

The settings are those of torchft's examples, with these exceptions, because a run has only about 100 steps: H, the
number of local steps between two synchronizations, is 8 instead of 100; the lighthouse waits 2 s for missing groups
instead of 10 s, and looks for a quorum every 50 ms instead of 100 ms. All groups begin with the same weights, so
`init_sync` is False. A quorum needs two groups. DiLoCo's outer optimizer is SGD with the rate 0.7 and Nesterov's
momentum 0.9. torchft has no compression for CPUs.

A step counts as kept if torchft has committed it. If a step is not committed, DDP and DiLoCo give up the samples since
the last commit, and LocalSGD goes on with its local weights.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .work import Task, Text, Worker, loss_of, new_model, new_optimizer

LIGHTHOUSE_PORT = 29510
LOCAL_STEPS = 8
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def main() -> None:
    """Train until the launcher ends the run."""
    task = Task.given()
    worker = Worker(task)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    model = new_model(task.seed)
    optimizer = new_optimizer(model, task.lr)
    manager = new_manager(task, worker, model, optimizer)
    if task.system == "torchft-ddp":
        train_ddp(task, worker, manager, model, optimizer)
    else:
        train_local(task, worker, manager, model, optimizer)


def new_manager(task: Task, worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the manager of this replica group."""
    from torchft import Manager, ProcessGroupGloo

    own = task.addresses[worker.machine]
    # This process, too, connects to the store at the address that torchft gives to the other groups.
    store = TCPStore(own, 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=2,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"machine{worker.machine}",
        store_addr=own,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{task.addresses[0]}:{LIGHTHOUSE_PORT}",
        timeout=timedelta(seconds=30),
        use_async_quorum=task.system == "torchft-ddp",
        init_sync=False,  # all groups have the same initial weights
    )
    manager.own_store = store  # keeps the store alive as long as the manager
    return manager


def train_ddp(
    task: Task, worker: Worker, manager: Any, model: nn.Module, inner: torch.optim.Optimizer
) -> None:
    """Train with the gradients of all groups in each step."""
    from torchft import DistributedDataParallel, Optimizer

    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    batches = Text().batches(task.seed + 500 * task.again, worker.machine, worker.share)
    worker.begin()
    while not worker.ended:
        optimizer.zero_grad()  # the quorum is found during the computation
        worker.pace(worker.share)
        loss_of(parallel, next(batches)).backward()
        worker.computed(worker.share)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before and manager.is_participating():
            worker.kept()
            worker.save(model)
        else:
            worker.discarded()


def train_local(
    task: Task, worker: Worker, manager: Any, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Train with LocalSGD or DiLoCo."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    diloco = task.system == "torchft-diloco"
    if diloco:
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        context: Any = DiLoCo(manager, [model], optimizer, outer, sync_every=LOCAL_STEPS)
    else:
        context = LocalSGD(manager, model, optimizer, sync_every=LOCAL_STEPS)
    batches = Text().batches(task.seed + 500 * task.again, worker.machine, worker.share)
    worker.begin()
    with context:
        step = 0
        while not worker.ended:
            worker.pace(worker.share)
            optimizer.zero_grad()
            loss_of(model, next(batches)).backward()
            worker.computed(worker.share)
            before = manager.current_step()
            optimizer.step()
            step += 1
            if step % LOCAL_STEPS == 0:
                if manager.current_step() > before:
                    worker.kept()
                    worker.save(model)
                elif diloco:
                    worker.discarded()


if __name__ == "__main__":
    main()
