"""The code that runs in the workers and servers of the compared systems."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from paceline.core.protocol.host import Host
from paceline.core.protocol.layout import Layout, Parameter
from paceline.core.protocol.model_spec import OptimizerSpec
from paceline.core.shard import Shard
from paceline.frontend.optimizer import DistributedOptimizer
from paceline.frontend.session import set_sync, worker_index
from paceline.launcher.launch import launch
from paceline.shard.optimizers import read_groups, require_elementwise
from paceline.shard.store import Push, Store
from paceline.sync import ASP
from paceline.sync.events import PullRequested, PushReceived, WorkerJoined

from .plan import LR, OPTIMIZERS, Figures, Turn, lengths
from .rendezvous import meet, publish
from .socket_echo import echo_server, echo_worker
from .timing import Flat, median_s, times_s

__all__ = ["SERVER_ROLES", "WORKER_ROLES", "launch_paceline"]


def _floor(turn: Turn, index: int, out: Path) -> Figures:
    """Measure the system `floor`: compute and copy the gradient, apply SGD, copy the weights."""
    model = Flat(turn.size_mb, index)
    parts = lengths(turn.size_mb)
    flat, weights, answer = (torch.zeros(sum(parts)) for _ in range(3))
    places = flat.split(parts)

    def step() -> None:
        model.compute()
        model.copy_gradients(places)
        weights.add_(flat, alpha=-LR)
        answer.copy_(weights)

    meet(out, "before", index, turn.workers)
    return {"asp": median_s(step, turn.iterations)}


def _gloo(turn: Turn, index: int, out: Path) -> Figures:
    """Measure the system `gloo`: all-reduce of the flat gradient, then SGD."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{out}/rendezvous", rank=index, world_size=turn.workers
    )
    model = Flat(turn.size_mb, index)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
    parts = lengths(turn.size_mb)
    flat = torch.zeros(sum(parts))
    places = flat.split(parts)

    def step() -> None:
        model.compute()
        model.copy_gradients(places)
        dist.all_reduce(flat)
        flat.div_(turn.workers)
        optimizer.step()

    step_s = median_s(step, turn.iterations)
    dist.destroy_process_group()
    return {"bsp": step_s}


SETTLING_S = 0.1  # time that the change of the sync model needs to reach all workers


def _train(turn: Turn, out: Path) -> None:
    """Train as one worker of a Paceline run. Measure steps under ASP and then under BSP."""
    torch.set_num_threads(1)
    index = worker_index()
    model = Flat(turn.size_mb, index)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)

    def step() -> None:
        model.compute()
        optimizer.step()

    figures = {"asp": median_s(step, turn.iterations)}
    # Without this barrier, the sync model could change while slower workers are still measuring ASP.
    meet(out, "changing", index, turn.workers)
    if index == 0:
        set_sync("bsp")
    time.sleep(SETTLING_S)  # the change must take effect before the measured steps
    figures["bsp"] = median_s(step, turn.iterations)
    publish(out, f"figures-{index}", json.dumps(figures))


def launch_paceline(turn: Turn, out: Path) -> None:
    """Measure the system `paceline` by launching a run. The workers write their results into the directory `out`."""
    launch(
        _train,
        args=(turn, out),
        workers=turn.workers,
        servers=turn.servers,
        sync="asp",
        transport=turn.cases[0].transport,
        run_dir=out / "run",
        progress=False,
    )


class _StoreHost(Host):
    """Carries out the requests of a shard whose pulls need no answer."""

    def __init__(self, store: Store) -> None:
        self.stores = [store]


def _update(turn: Turn, index: int, out: Path) -> Figures:
    """Measure the system `optimizer`: a shard with one worker under ASP, so that each push is one update."""
    assert turn.optimizer is not None
    make, copies = OPTIMIZERS[turn.optimizer]
    parts = lengths(turn.size_mb)
    layout = Layout.of([Parameter((f"p{i}",), (length,), "float32") for i, length in enumerate(parts)])
    [bounds] = layout.slice_evenly(1)
    size = layout.sizes["float32"]
    optimizer = make([torch.zeros(1) for _ in parts])
    groups = read_groups(optimizer)
    spec = OptimizerSpec(require_elementwise(optimizer), groups, (0,) * len(parts))
    shard = Shard(0, [ASP()])
    store = Store(bounds, {"float32": torch.zeros(size)}, [spec])
    shard.handle(WorkerJoined(now_ticks=0, worker=0))
    push = Push({"float32": torch.ones(size)}, bytes([1] * len(parts)), groups)

    host = _StoreHost(store)

    def update() -> None:
        iteration = shard.version
        requests = shard.handle(PushReceived(now_ticks=0, worker=0, iteration=iteration))
        store.put(0, iteration, push)
        host.carry_out(requests)
        shard.handle(PullRequested(now_ticks=0, worker=0, iteration=iteration))

    updates_s = times_s(update, turn.iterations)
    source, target = torch.ones(size), torch.zeros(size)
    copy_s = median_s(lambda: target.copy_(source), turn.iterations)
    return {"asp": median(updates_s), "traffic": copies * copy_s, "fastest": min(updates_s)}


WORKER_ROLES: dict[str, Callable[[Turn, int, Path], Figures]] = {
    "floor": _floor,
    "socket": echo_worker,
    "gloo": _gloo,
    "optimizer": _update,
}
SERVER_ROLES: dict[str, Callable[[Turn, int, Path], None]] = {"socket": echo_server}
