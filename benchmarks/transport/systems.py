"""The compared systems: the code that runs in their workers and servers, and how their processes are started."""

from __future__ import annotations

import multiprocessing
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import msgspec
import torch

from paceline.core.layout import Layout, OptimizerSpec, Parameter
from paceline.core.requests import Host
from paceline.core.shard import Shard
from paceline.errors import DeadlineError, RunFailedError
from paceline.shard.optimizers import read_groups, server_optimizer
from paceline.shard.store import Push, Store
from paceline.start.local import HostMachine
from paceline.sync import ASP
from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import set_sync, worker_index

from ..harness import WARM_UP, live, median_s, publish, times_s
from .kvstore import KvTask, run_kvstore
from .plan import LR, OPTIMIZERS, Flat, Times, Turn, elements, lengths

LOG_LINES = 15  # number of log lines that are shown if a process fails
MEETING_TIMEOUT_S = 120.0
MEETING_INTERVAL_S = 0.0005

# -- processes ---------------------------------------------------------------------------------------------------


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit every process that is started in this context to one thread."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def measure_turn(turn: Turn) -> Times:
    """Measure a turn. Return the mean time over the workers, in seconds, for each mode (and for "traffic")."""
    with TemporaryDirectory() as folder:
        out = Path(folder)
        if turn.cases[0].system == "paceline":
            found = launch_paceline(turn, out, out / "run")
        elif turn.mxnet is not None and turn.cases[0].system == "mxnet":
            found = _run_mxnet(turn, turn.mxnet)
        else:
            _run_processes(turn, out)
            found = [msgspec.json.decode(path.read_bytes()) for path in out.glob("figures-*")]
    assert len(found) == turn.workers, f"{turn.name}: only {len(found)} workers have written their results"
    return {mode: fmean(figures[mode] for figures in found) for mode in found[0]}


def _run_processes(turn: Turn, out: Path) -> None:
    """Run the processes of a turn until they exit. The processes write their results into the directory `out`.

    The processes are forked from a process that has imported torch but has not computed anything.

    Raises:
        RunFailedError: a process failed. All other processes have been stopped.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", __name__])  # torch's optimizers import torch._dynamo
    servers = turn.servers if turn.cases[0].system in SERVER_ROLES else 0
    places = [
        *((True, index) for index in range(servers)),
        *((False, index) for index in range(turn.workers)),
    ]
    started = [context.Process(target=_run, args=(turn, *place, out), daemon=True) for place in places]
    try:
        for process in started:
            process.start()
        running = list(started)
        while running:
            connection.wait([process.sentinel for process in running])
            # A process may end at any moment, so its exit code is read only once.
            codes = [(process, process.exitcode) for process in running]
            if any(code for _, code in codes):
                tail = (out / "log").read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise RunFailedError(turn.name, "a measured process failed", "\n".join(tail))
            running = [process for process, code in codes if code is None]
    finally:
        for process in started:
            if process.pid is not None:
                process.kill()
                process.join()


def _run(turn: Turn, server: bool, index: int, out: Path) -> None:
    """Run as a process of a turn. Errors of the process are written to a log."""
    if not out.is_dir():
        return  # Ctrl-C has ended the measurement while this process was being started
    with (out / "log").open("ab") as log:
        os.dup2(log.fileno(), 2)
    system = turn.cases[0].system
    if server:
        SERVER_ROLES[system](turn, index, out)
    else:
        publish(out, f"figures-{index}", msgspec.json.encode(WORKER_ROLES[system](turn, index, out)))


def meet(out: Path, name: str, index: int, count: int) -> None:
    """Wait until `count` workers have called this function with the same name. `index` is the caller's index."""
    Path(out, f"{name}-{index}").touch()
    paths = [Path(out, f"{name}-{other}") for other in range(count)]
    await_until(lambda: all(path.exists() for path in paths), f"{count} workers to reach {name!r}")


def await_until(arrived: Callable[[], bool], what: str) -> None:
    """Poll until `arrived()` returns True. The error message contains `what`, a description of this condition.

    Raises:
        DeadlineError: `arrived()` still returns False after `MEETING_TIMEOUT_S` seconds.
    """
    deadline_s = time.monotonic() + MEETING_TIMEOUT_S
    while not arrived():
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"waited {MEETING_TIMEOUT_S:g} s for {what}")
        time.sleep(MEETING_INTERVAL_S)


# -- the systems -------------------------------------------------------------------------------------------------


def _floor(turn: Turn, index: int, out: Path) -> Times:
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


def _gloo(turn: Turn, index: int, out: Path) -> Times:
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


def _train(turn: Turn, out: Path) -> Times:
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
    return figures


def launch_paceline(turn: Turn, out: Path, run_dir: Path) -> list[Times]:
    """Measure the system `paceline` by launching a run. The workers meet in the directory `out`."""
    settings = {"sync": "asp", "transport": turn.cases[0].transport, "run_dir": run_dir}
    _, found = live(_train, turn, out, kind=Times, workers=turn.workers, servers=turn.servers, **settings)
    return found


def _run_mxnet(turn: Turn, python: str) -> list[Times]:
    """Measure the system `mxnet`."""
    mode, here = turn.cases[0].mode, HostMachine()
    task = KvTask(mode, [lengths(turn.size_mb)], LR, WARM_UP, turn.iterations)
    found = run_kvstore(python, task, here.host, [here] * turn.servers, [here] * turn.workers)
    return [{mode: each.whole_s} for each in found]


class _StoreHost(Host):
    """Carries out the requests of a shard whose pulls need no answer."""

    def __init__(self, store: Store) -> None:
        self.stores = [store]


def _update(turn: Turn, index: int, out: Path) -> Times:
    """Measure the system `optimizer`: a shard with one worker under ASP, so that each push is one update."""
    assert turn.optimizer is not None
    make, copies = OPTIMIZERS[turn.optimizer]
    parts = lengths(turn.size_mb)
    layout = Layout.of([Parameter((f"p{i}",), (length,), "float32") for i, length in enumerate(parts)])
    [bounds] = layout.slice_evenly(1)
    size = layout.sizes["float32"]
    optimizer = make([torch.zeros(1) for _ in parts])
    groups = read_groups(optimizer)
    spec = OptimizerSpec(server_optimizer(optimizer).name, groups, (0,) * len(parts))
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


# -- the system `socket`: servers that receive gradients over TCP on loopback, apply SGD and send weights ----------


def echo_worker(turn: Turn, index: int, out: Path) -> Times:
    """In each iteration, compute a gradient, send a slice to each server and receive the same slice of the weights.

    A worker sends to the servers in a fixed order and receives from them in any order. If a send blocks, the server
    is waiting for another worker, and that worker can only be sending to a server that comes later in the order.
    Therefore, the processes cannot deadlock, even if kernel buffers are small.
    """
    length = elements(turn.size_mb)
    model = Flat(turn.size_mb, index)
    gradient, weights = torch.zeros(length), torch.zeros(length)
    places = gradient.split(lengths(turn.size_mb))
    slices = _slices(length, turn.servers)
    outgoing = [_bytes_of(gradient[part]) for part in slices]
    incoming = [_bytes_of(weights[part]) for part in slices]
    streams = [_dial(out, server) for server in range(turn.servers)]

    def step() -> None:
        model.compute()
        model.copy_gradients(places)
        for stream, view in zip(streams, outgoing, strict=True):
            stream.sendall(view)
        awaited = dict(zip(streams, incoming, strict=True))
        while awaited:
            for stream in select.select(awaited, (), ())[0]:
                _receive(stream, awaited.pop(stream))

    meet(out, "before", index, turn.workers)
    step_s = median_s(step, turn.iterations)
    meet(out, "after", index, turn.workers)  # servers fail if a worker closes its connection too early
    return {turn.cases[0].mode: step_s}


def echo_server(turn: Turn, index: int, out: Path) -> None:
    """Hold a slice of the weights. Answer pushes immediately (ASP), or all pushes of an iteration together (BSP)."""
    part = _slices(elements(turn.size_mb), turn.servers)[index]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        publish(out, f"port-{index}", str(listener.getsockname()[1]).encode())
        streams = [listener.accept()[0] for _ in range(turn.workers)]
    poll = selectors.DefaultSelector()
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(stream, selectors.EVENT_READ)
    echo = _echo_each if turn.cases[0].mode == "asp" else _echo_all
    echo(streams, poll, part.stop - part.start, WARM_UP + turn.iterations)


def _echo_each(
    streams: Sequence[socket.socket], poll: selectors.BaseSelector, length: int, exchanges: int
) -> None:
    """Serve one worker at a time: receive its gradient, apply SGD, send the weights."""
    gradient, weights = torch.zeros(length), torch.zeros(length)
    incoming, outgoing = _bytes_of(gradient), _bytes_of(weights)
    remaining = exchanges * len(streams)
    while remaining:
        for stream in _readable(poll):
            _receive(stream, incoming)
            weights.add_(gradient, alpha=-LR)
            stream.sendall(outgoing)
            remaining -= 1


def _echo_all(
    streams: Sequence[socket.socket], poll: selectors.BaseSelector, length: int, exchanges: int
) -> None:
    """Receive the gradients of all workers, apply SGD with their mean, and send the weights to each worker."""
    gradients = [torch.zeros(length) for _ in streams]
    weights = torch.zeros(length)
    incoming = dict(zip(streams, map(_bytes_of, gradients), strict=True))
    outgoing = _bytes_of(weights)
    for _ in range(exchanges):
        missing = len(streams)
        while missing:
            for stream in _readable(poll):
                _receive(stream, incoming[stream])
                missing -= 1
        for other in gradients[1:]:
            gradients[0].add_(other)
        weights.add_(gradients[0], alpha=-LR / len(streams))
        for stream in streams:
            stream.sendall(outgoing)


def _readable(poll: selectors.BaseSelector) -> Iterator[socket.socket]:
    for key, _ in poll.select():
        assert isinstance(key.fileobj, socket.socket)
        yield key.fileobj


def _slices(length: int, servers: int) -> list[slice]:
    """Return slices that cut a vector into nearly equal parts, one for each server."""
    return [slice(length * i // servers, length * (i + 1) // servers) for i in range(servers)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the tensor's memory."""
    return tensor.numpy().data.cast("B")


def _dial(out: Path, server: int) -> socket.socket:
    await_until(lambda: Path(out, f"port-{server}").exists(), f"server {server} to listen")
    stream = socket.create_connection(("127.0.0.1", int(Path(out, f"port-{server}").read_text())))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _receive(stream: socket.socket, view: memoryview) -> None:
    """Receive bytes until the view is full."""
    while view:
        count = stream.recv_into(view)
        if not count:
            raise ConnectionError("the peer has closed the connection")
        view = view[count:]


WORKER_ROLES: dict[str, Callable[[Turn, int, Path], Times]] = {
    "floor": _floor,
    "socket": echo_worker,
    "gloo": _gloo,
    "optimizer": _update,
}
SERVER_ROLES: dict[str, Callable[[Turn, int, Path], None]] = {"socket": echo_server}
