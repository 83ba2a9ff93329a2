"""`paceline bench transport`: how long a step takes, against what the same bytes cost without Paceline.

Owns what is measured, how, and the goals; and the table of both. Reads the clock, starts processes.

    floor      in as many processes as there are workers, at once: copy each gradient into its place of a flat vector,
               one pass of SGD over it, one copy of the weights. No step through shared memory can do less
    socket     a bare echo of the same bytes over TCP on loopback, with SGD at the servers: no framing, no backward
    gloo       what DDP does on a CPU: all-reduce of the flat gradient, then fused SGD
    paceline   `zero_grad()`, backward, `step()` of a `DistributedOptimizer`, in processes that `launch` starts
    optimizer  one update of a `Shard`, without processes, against its memory traffic at the speed of a copy

Of gloo and Paceline a bare `zero_grad()` and backward is taken off. It is timed in the same processes while all of
them do it, since cores that share a memory slow each other down.

Each figure is a median over iterations, then the mean of the workers, then the median over rounds. Within a round
everything takes its turn, so that a machine whose speed drifts treats all alike. Every process has one thread.

A model is 8 tensors of equal size, or one tensor if it has less than 64 KB. MB is 2**20 bytes; a size is rounded to
whole KB. A run of Paceline's is measured under ASP, then told to change to BSP: starting its processes takes longer
than measuring does. The other processes are forked, from one that has torch loaded and has computed nothing (*the
crew*).
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import torch
from rich import box
from rich.table import Table
from torch import nn

from ..data import worker_index
from ..engines.launch import launch
from ..errors import ConfigurationError, DeadlineError, RunFailedError, unknown_name
from ..layout import ALIGNMENT_BYTES, ITEM_BYTES, Layout, Parameter
from ..optim import DistributedOptimizer
from ..optimizers import OptimizerSpec, read_groups, require_elementwise
from ..runtime.session import set_sync
from ..shard import Push, Shard
from ..sync import ASP
from ..sync.events import PullRequested, PushReceived, WorkerJoined
from .zipline_bench import Tell

__all__ = [
    "GOALS",
    "OPTIMIZERS",
    "SIZES_MB",
    "SYSTEMS",
    "WORKERS",
    "Goal",
    "GoalRow",
    "Plan",
    "Row",
    "estimate_s",
    "goal_rows",
    "measure",
    "tables",
]

SIZES_MB = (0.004, 1.0, 25.0, 100.0)
WORKERS = (2, 4)
SERVERS = 2
ROUNDS = 3

TENSORS = 8  # of equal size: a model is rarely one tensor
ONE_TENSOR_BELOW_KB = 64
SMALLEST_MB = 0.001
OPTIMIZER_MB = 100.0

SECONDS = 0.5  # of iterating, roughly, per figure and round
WARM_UP = 2
FEWEST, MOST = 8, 1500  # iterations
LR = 1e-3

MEETING_TIMEOUT_S = 120.0
MEETING_INTERVAL_S = 0.0005
SETTLING_S = 0.1  # for the coordinator's word to reach all workers
LOG_LINES = 15


class Case(NamedTuple):
    """What a figure is of."""

    system: str
    transport: str
    mode: str


FLOOR = Case("floor", "shm", "asp")
SOCKET_ASP, SOCKET_BSP = Case("socket", "tcp", "asp"), Case("socket", "tcp", "bsp")
GLOO = Case("gloo", "tcp", "bsp")
SHM_ASP, SHM_BSP = Case("paceline", "shm", "asp"), Case("paceline", "shm", "bsp")
TCP_ASP, TCP_BSP = Case("paceline", "tcp", "asp"), Case("paceline", "tcp", "bsp")

# What takes its turn: those that share their processes go together.
TURNS: tuple[tuple[Case, ...], ...] = (
    (FLOOR,),
    (SOCKET_ASP,),
    (SOCKET_BSP,),
    (GLOO,),
    (SHM_ASP, SHM_BSP),
    (TCP_ASP, TCP_BSP),
)
OPTIMIZER = Case("optimizer", "shm", "asp")
SYSTEMS = (*dict.fromkeys(turn[0].system for turn in TURNS), OPTIMIZER.system)


class Updated(NamedTuple):
    """An optimizer, and how many copies of its vector move as many bytes as one update must."""

    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    copies: float  # a copy reads one vector and writes one; any update reads g, and reads and writes w


OPTIMIZERS: dict[str, Updated] = {
    "SGD": Updated(lambda p: torch.optim.SGD(p, lr=LR), 1.5),
    "SGD momentum": Updated(lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), 2.5),
    "Adam": Updated(lambda p: torch.optim.Adam(p, lr=LR), 3.5),
    "AdamW": Updated(lambda p: torch.optim.AdamW(p, lr=LR), 3.5),
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `require_sound` before anything starts."""

    sizes_mb: tuple[float, ...] = SIZES_MB
    workers: tuple[int, ...] = WORKERS
    servers: int = SERVERS
    rounds: int = ROUNDS
    systems: tuple[str, ...] = SYSTEMS

    def require_sound(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigurationError: names the value and what was expected.
        """
        for system in self.systems:
            if system not in SYSTEMS:
                raise unknown_name("system", system, SYSTEMS)
        counts = [("servers", self.servers), ("rounds", self.rounds), *(("workers", n) for n in self.workers)]
        for name, value in counts:
            if value < 1:
                raise ConfigurationError(f"{name} is {value}, expected a whole number >= 1.")
        for size_mb in self.sizes_mb:
            if not (math.isfinite(size_mb) and size_mb >= SMALLEST_MB):
                raise ConfigurationError(
                    f"size is {size_mb:g} MB, expected a number >= {SMALLEST_MB:g}, "
                    f"for example {', '.join(f'{size:g}' for size in SIZES_MB)}."
                )
            most = elements(size_mb) * ITEM_BYTES["float32"] // ALIGNMENT_BYTES
            if self.servers > most:
                raise ConfigurationError(
                    f"servers is {self.servers}, expected at most {most}: of {size_mb:g} MB no more get a slice."
                )


class Turn(msgspec.Struct, frozen=True):
    """What is measured by one set of processes; also what they are told."""

    cases: tuple[Case, ...]
    size_mb: float
    workers: int
    servers: int
    iterations: int
    optimizer: str | None = None

    @property
    def name(self) -> str:
        """For the progress, and for errors."""
        system, transport, _ = self.cases[0]
        if self.optimizer is not None:
            return f"update by {self.optimizer}, {self.size_mb:g} MB"
        modes = " and ".join(case.mode for case in self.cases)
        return f"{self.size_mb:g} MB, {self.workers} workers, {system} {transport} {modes}"


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure.

    Attributes:
        system: in `SYSTEMS`.
        transport: "shm" or "tcp".
        mode: "asp" or "bsp".
        size_mb: of the model.
        workers: how many.
        median_ms: of a step, or of an update; over the rounds.
        low_ms: the least of a round.
        high_ms: the most.
        optimizer: in `OPTIMIZERS`, if it is of an update.
        traffic_ms: what the update's memory traffic takes at the speed of a copy.
    """

    system: str
    transport: str
    mode: str
    size_mb: float
    workers: int
    median_ms: float
    low_ms: float
    high_ms: float
    optimizer: str | None = None
    traffic_ms: float | None = None


Figures = dict[str, float]
"""Mode, or "traffic" -> seconds."""


def measure(plan: Plan, tell: Tell = lambda what, share, slow=False: None) -> list[Row]:
    """Measure everything in the plan, round by round.

    Args:
        plan: what.
        tell: called before each turn.

    Raises:
        ConfigurationError: the plan is not sound; nothing was started.
        RunFailedError: a process failed; nothing is left running.
    """
    plan.require_sound()
    turns = _turns(plan)
    total_s, done_s = estimate_s(plan), 0.0
    found: dict[Turn, list[Figures]] = {turn: [] for turn in turns}
    # Processes end before their directory goes.
    with _one_thread_each(), tempfile.TemporaryDirectory() as home, _crew(Path(home)) as crew:
        for number in range(plan.rounds):
            for turn in turns:
                tell(f"round {number + 1} of {plan.rounds}, {turn.name}", done_s / total_s, slow=True)
                out = Path(home, "turn")
                out.mkdir()
                found[turn].append(_measure_turn(turn, out, crew))
                shutil.rmtree(out)
                done_s += _work_s(turn)
    return [row for turn, rounds in found.items() for row in _rows(turn, rounds)]


def estimate_s(plan: Plan) -> float:
    """How long it will take on two cores, roughly."""
    return plan.rounds * sum(_work_s(turn) for turn in _turns(plan))


# -- what is measured --------------------------------------------------------------------------------------------


def _turns(plan: Plan) -> list[Turn]:
    """Everything that one round does."""
    turns = [
        Turn(cases, size_mb, workers, plan.servers, _iterations(size_mb, workers))
        for size_mb in dict.fromkeys(plan.sizes_mb)
        for workers in dict.fromkeys(plan.workers)
        for cases in TURNS
        if cases[0].system in plan.systems
    ]
    if OPTIMIZER.system in plan.systems:
        iterations = _iterations(OPTIMIZER_MB, 1)
        turns += [Turn((OPTIMIZER,), OPTIMIZER_MB, 1, 1, iterations, name) for name in OPTIMIZERS]
    return turns


def _guess_s(size_mb: float, workers: int) -> float:
    """Of one step."""
    return max(1.0, workers / 2) * (0.0003 + 0.002 * size_mb)


def _iterations(size_mb: float, workers: int) -> int:
    """As many as fit into the time, by a guess, so that all processes do equally many."""
    return max(FEWEST, min(MOST, int(SECONDS / _guess_s(size_mb, workers))))


def _work_s(turn: Turn) -> float:
    """How long a turn takes, by a guess."""
    system = turn.cases[0].system
    series = len(turn.cases) + (system in ("gloo", "paceline"))  # one of the bare backward
    steps_s = series * (WARM_UP + turn.iterations) * _guess_s(turn.size_mb, turn.workers)
    # Two cores import torch in so many processes, and a run keeps its weights at the end.
    launching_s = 0.8 + (turn.workers + turn.servers) * (1.0 + turn.size_mb / 200)
    start_s = launching_s if system == "paceline" else 0.2
    return start_s + steps_s


def elements(size_mb: float) -> int:
    """Of a model of this size, in float32."""
    return round(size_mb * 1024) * (1024 // ITEM_BYTES["float32"])


def lengths(size_mb: float) -> list[int]:
    """Of its tensors, in elements."""
    count = 1 if round(size_mb * 1024) < ONE_TENSOR_BELOW_KB else TENSORS
    return [elements(size_mb) // count] * count


class Flat(nn.Module):
    """A model that is all parameters: its backward costs one pass over them."""

    def __init__(self, size_mb: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(length)) for length in lengths(size_mb))

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum()


def _median_s(step: Callable[[], object], iterations: int) -> float:
    """The median time of one call."""
    times_s = []
    for index in range(WARM_UP + iterations):
        begun_s = time.perf_counter()
        step()
        if index >= WARM_UP:
            times_s.append(time.perf_counter() - begun_s)
    return median(times_s)


def _bare_backward_s(turn: Turn, index: int, out: Path) -> float:
    """What `zero_grad()` and backward take without a step, while all workers do the same."""
    model = Flat(turn.size_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()

    _meet(out, "before", index, turn.workers)
    bare_s = _median_s(step, turn.iterations)
    _meet(out, "after", index, turn.workers)
    return bare_s


# -- floor -------------------------------------------------------------------------------------------------------


def _floor(turn: Turn, index: int, out: Path) -> Figures:
    """Adopt the gradient, SGD, copy."""
    parts = lengths(turn.size_mb)
    gradients = [torch.ones(length) for length in parts]
    flat, weights, answer = (torch.zeros(sum(parts)) for _ in range(3))
    places = flat.split(parts)

    def step() -> None:
        for gradient, place in zip(gradients, places, strict=True):
            place.copy_(gradient)
        weights.add_(flat, alpha=-LR)
        answer.copy_(weights)

    _meet(out, "before", index, turn.workers)
    return {"asp": _median_s(step, turn.iterations)}


# -- sockets -----------------------------------------------------------------------------------------------------


def _echo_worker(turn: Turn, index: int, out: Path) -> Figures:
    """Send each server its slice of the gradient, receive its slice of the weights.

    Servers are sent to in order and heard in any: so whoever is stuck sending waits for one that comes after, and no
    circle closes however little the kernel buffers.
    """
    length = elements(turn.size_mb)
    gradient, weights = torch.ones(length), torch.zeros(length)
    slices = _slices(length, turn.servers)
    outgoing = [_bytes_of(gradient[part]) for part in slices]
    incoming = [_bytes_of(weights[part]) for part in slices]
    streams = [_dial(out, server) for server in range(turn.servers)]

    def step() -> None:
        for stream, view in zip(streams, outgoing, strict=True):
            stream.sendall(view)
        awaited = dict(zip(streams, incoming, strict=True))
        while awaited:
            for stream in select.select(awaited, (), ())[0]:
                _receive(stream, awaited.pop(stream))

    _meet(out, "before", index, turn.workers)
    step_s = _median_s(step, turn.iterations)
    _meet(out, "after", index, turn.workers)  # until then a connection that ends is a failure
    return {turn.cases[0].mode: step_s}


def _echo_server(turn: Turn, index: int, out: Path) -> None:
    """Hold a slice of the weights, and answer as the mode says."""
    part = _slices(elements(turn.size_mb), turn.servers)[index]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _publish(out, f"port-{index}", str(listener.getsockname()[1]))
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
    """One worker at a time: its gradient, SGD, the weights back."""
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
    """All workers' gradients, their sum, SGD, the weights to each."""
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
    """Even parts."""
    return [slice(length * i // servers, length * (i + 1) // servers) for i in range(servers)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The same memory."""
    return tensor.numpy().data.cast("B")


def _dial(out: Path, server: int) -> socket.socket:
    _await(lambda: Path(out, f"port-{server}").exists(), f"server {server} to listen")
    stream = socket.create_connection(("127.0.0.1", int(Path(out, f"port-{server}").read_text())))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _receive(stream: socket.socket, view: memoryview) -> None:
    """Fill the whole view."""
    while view:
        count = stream.recv_into(view)
        if not count:
            raise ConnectionError("the other end of a socket is gone")
        view = view[count:]


# -- gloo --------------------------------------------------------------------------------------------------------


def _gloo(turn: Turn, index: int, out: Path) -> Figures:
    """All-reduce of the flat gradient, then SGD."""
    import torch.distributed as dist

    bare_s = _bare_backward_s(turn, index, out)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/rendezvous", rank=index, world_size=turn.workers
    )
    model = Flat(turn.size_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
    parts = lengths(turn.size_mb)
    flat = torch.zeros(sum(parts))
    places = flat.split(parts)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        for layer, place in zip(model.layers, places, strict=True):
            assert layer.grad is not None
            place.copy_(layer.grad)  # a bucket, as DDP keeps them
            layer.grad = place
        dist.all_reduce(flat)
        flat.div_(turn.workers)
        optimizer.step()

    step_s = _median_s(step, turn.iterations)
    dist.destroy_process_group()
    return {"bsp": step_s - bare_s}


# -- paceline ----------------------------------------------------------------------------------------------------


def _train(turn: Turn, out: Path) -> None:
    """One worker of a run: measured under ASP, then under BSP."""
    torch.set_num_threads(1)
    index = worker_index()
    bare_s = _bare_backward_s(turn, index, out)
    model = Flat(turn.size_mb)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    figures = {"asp": _median_s(step, turn.iterations) - bare_s}
    _meet(out, "changing", index, turn.workers)  # whoever passes a change waits for the others to pass it
    if index == 0:
        set_sync("bsp")
    time.sleep(SETTLING_S)  # the change itself is then made while warming up
    figures["bsp"] = _median_s(step, turn.iterations) - bare_s
    _publish(out, f"figures-{index}", json.dumps(figures))


def _launch(turn: Turn, out: Path) -> None:
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


# -- an optimizer ------------------------------------------------------------------------------------------------


def _update(turn: Turn, index: int, out: Path) -> Figures:
    """A shard with one worker under ASP: each push is one update."""
    assert turn.optimizer is not None
    make, copies = OPTIMIZERS[turn.optimizer]
    parts = lengths(turn.size_mb)
    layout = Layout.of([Parameter((f"p{i}",), (length,), "float32") for i, length in enumerate(parts)])
    [bounds] = layout.slice_evenly(1)
    size = layout.sizes["float32"]
    optimizer = make([torch.zeros(1) for _ in parts])
    groups = read_groups(optimizer)
    spec = OptimizerSpec(require_elementwise(optimizer), groups, (0,) * len(parts))
    shard = Shard(bounds, {"float32": torch.zeros(size)}, spec, ASP())
    shard.handle(WorkerJoined(now_s=0.0, worker=0))
    push = Push({"float32": torch.ones(size)}, bytes([1] * len(parts)), groups)

    def update() -> None:
        iteration = shard.version
        shard.handle(PushReceived(now_s=0.0, worker=0, iteration=iteration), push)
        shard.handle(PullRequested(now_s=0.0, worker=0, iteration=iteration))

    update_s = _median_s(update, turn.iterations)
    source, target = torch.ones(size), torch.zeros(size)
    copy_s = _median_s(lambda: target.copy_(source), turn.iterations)
    return {"asp": update_s, "traffic": copies * copy_s}


# -- processes ---------------------------------------------------------------------------------------------------

WORKER_ROLES: dict[str, Callable[[Turn, int, Path], Figures]] = {
    "floor": _floor,
    "socket": _echo_worker,
    "gloo": _gloo,
    "optimizer": _update,
}
SERVER_ROLES: dict[str, Callable[[Turn, int, Path], None]] = {"socket": _echo_server}


class _Crew(NamedTuple):
    """The process from which the others are forked: a turn and a directory in, a line out when it is done."""

    process: subprocess.Popen[bytes]
    log: Path

    def run(self, turn: Turn, out: Path) -> None:
        """Have a turn measured.

        Raises:
            RunFailedError: a process failed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(msgspec.json.encode((turn, str(out))) + b"\n")
            self.process.stdin.flush()
            done = self.process.stdout.readline()
        except BrokenPipeError:
            done = b""
        if not done:
            tail = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise RunFailedError(turn.name, "a process of the measurement ended", "\n".join(tail))


@contextmanager
def _crew(home: Path) -> Iterator[_Crew]:
    """The crew, which no longer runs afterwards, nor anything that it has forked."""
    log = home / "crew.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # Ctrl-C reaches the launcher alone, which ends the crew
        )
    try:
        yield _Crew(process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for, so the group is still its own
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not read
                pipe.close()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Every process that is started here has one thread."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _measure_turn(turn: Turn, out: Path, crew: _Crew) -> Figures:
    """Each figure: the mean of what the workers found."""
    run = _launch if turn.cases[0].system == "paceline" else crew.run
    run(turn, out)
    found = [json.loads(path.read_text()) for path in out.glob("figures-*")]
    assert len(found) == turn.workers, f"{turn.name}: {len(found)} workers have written down what they found"
    return {mode: fmean(figures[mode] for figures in found) for mode in found[0]}


def _be_the_crew() -> None:
    """Fork the processes of each turn that comes on standard input."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=LR)  # imports what is half of torch: once, not in each process
    for line in sys.stdin.buffer:
        turn, out = msgspec.json.decode(line, type=tuple[Turn, str])
        _fork(turn, Path(out))
        print("done", flush=True)


def _fork(turn: Turn, out: Path) -> None:
    """Start the processes of a turn and wait for their end; the first that fails is the end of all."""
    fork = multiprocessing.get_context("fork")
    system = turn.cases[0].system
    servers = turn.servers if system in SERVER_ROLES else 0
    places = [*((_be_server, i) for i in range(servers)), *((_be_worker, i) for i in range(turn.workers))]
    running = [fork.Process(target=be, args=(turn, index, out), daemon=True) for be, index in places]
    for process in running:
        process.start()
    while running:
        connection.wait([process.sentinel for process in running])
        if any(process.exitcode for process in running):
            sys.exit(1)  # its traceback is in the log
        running = [process for process in running if process.exitcode is None]


def _be_server(turn: Turn, index: int, out: Path) -> None:
    SERVER_ROLES[turn.cases[0].system](turn, index, out)


def _be_worker(turn: Turn, index: int, out: Path) -> None:
    _publish(out, f"figures-{index}", json.dumps(WORKER_ROLES[turn.cases[0].system](turn, index, out)))


def _publish(out: Path, name: str, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    hidden = out / f".{name}"
    hidden.write_text(text)
    hidden.rename(out / name)


def _meet(out: Path, name: str, index: int, count: int) -> None:
    """Wait until all of them are here."""
    Path(out, f"{name}-{index}").touch()
    paths = [Path(out, f"{name}-{other}") for other in range(count)]
    _await(lambda: all(path.exists() for path in paths), f"{count} workers to get to {name!r}")


def _await(arrived: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + MEETING_TIMEOUT_S
    while not arrived():
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"waited {MEETING_TIMEOUT_S:g} s for {what}")
        time.sleep(MEETING_INTERVAL_S)


# -- rows and goals ----------------------------------------------------------------------------------------------


def _rows(turn: Turn, rounds: Sequence[Figures]) -> list[Row]:
    rows = []
    for system, transport, mode in turn.cases:
        figures_ms = [figures[mode] * 1e3 for figures in rounds]
        traffic_ms = [figures["traffic"] * 1e3 for figures in rounds if "traffic" in figures]
        rows.append(
            Row(
                system=system,
                transport=transport,
                mode=mode,
                size_mb=turn.size_mb,
                workers=turn.workers,
                median_ms=median(figures_ms),
                low_ms=min(figures_ms),
                high_ms=max(figures_ms),
                optimizer=turn.optimizer,
                traffic_ms=median(traffic_ms) if traffic_ms else None,
            )
        )
    return rows


class Goal(NamedTuple):
    """What a figure, or the ratio of two, should be."""

    top: Case
    bottom: Case | None  # None: the figure itself, in microseconds
    size_mb: float
    workers: int
    bound: float
    at_least: bool = False


def _update_of(optimizer: str) -> Case:
    """Where the figures of updates lie among the others."""
    return Case(f"update by {optimizer}", OPTIMIZER.transport, OPTIMIZER.mode)


def _traffic_of(optimizer: str) -> Case:
    return Case(f"traffic of {optimizer}", OPTIMIZER.transport, OPTIMIZER.mode)


LARGE_MB = (25.0, 100.0)

GOALS: tuple[Goal, ...] = (
    *(Goal(SHM_ASP, FLOOR, size_mb, 2, 1.3) for size_mb in LARGE_MB),
    *(Goal(GLOO, SHM_BSP, size_mb, n, 4.0, at_least=True) for size_mb in LARGE_MB for n in (2, 4)),
    Goal(SHM_ASP, None, 0.004, 2, 60.0),
    *(Goal(TCP_BSP, SOCKET_BSP, size_mb, n, 1.15) for size_mb in LARGE_MB for n in (2, 4)),
    *(
        Goal(GLOO, TCP_BSP, size_mb, n, speed, at_least=True)
        for size_mb in LARGE_MB
        for n, speed in ((2, 0.8), (4, 1.0))
    ),
    Goal(_update_of("Adam"), _traffic_of("Adam"), 100.0, 1, 1.5),
)


class GoalRow(msgspec.Struct, frozen=True):
    """A goal, what was seen of it, and whether it is met."""

    goal: Goal
    figure: float
    met: bool


Times = Mapping[tuple[Case, float, int], float]
"""Case, size, workers -> ms."""


def goal_rows(rows: Sequence[Row]) -> list[GoalRow]:
    """The goals whose figures were measured."""
    times_ms = _times_ms(rows)
    found = []
    for goal in GOALS:
        figure = _seen(times_ms, goal)
        if figure is not None:
            met = figure >= goal.bound if goal.at_least else figure <= goal.bound
            found.append(GoalRow(goal, figure, met))
    return found


def _seen(times_ms: Times, goal: Goal) -> float | None:
    if goal.bottom is not None:
        return _ratio(times_ms, goal.top, goal.bottom, goal.size_mb, goal.workers)
    median_ms = times_ms.get((goal.top, goal.size_mb, goal.workers))
    return None if median_ms is None else median_ms * 1e3


def _ratio(times_ms: Times, top: Case, bottom: Case, size_mb: float, workers: int) -> float | None:
    """None if it was not measured, or if less than nothing is left of it without the backward."""
    above, below = (times_ms.get((case, size_mb, workers), 0.0) for case in (top, bottom))
    return above / below if above > 0 and below > 0 else None


def _times_ms(rows: Sequence[Row]) -> Times:
    times_ms: dict[tuple[Case, float, int], float] = {}
    for row in rows:
        case = Case(row.system, row.transport, row.mode)
        if row.optimizer is not None:
            case = _update_of(row.optimizer)
            assert row.traffic_ms is not None
            times_ms[_traffic_of(row.optimizer), row.size_mb, row.workers] = row.traffic_ms
        times_ms[case, row.size_mb, row.workers] = row.median_ms
    return times_ms


# -- what is shown -----------------------------------------------------------------------------------------------

# Heading -> whose rows have it: the ratio of which two.
RATIOS: dict[str, dict[Case, tuple[Case, Case]]] = {
    "x floor": {SHM_ASP: (SHM_ASP, FLOOR)},
    "gloo / it": {SHM_BSP: (GLOO, SHM_BSP), TCP_BSP: (GLOO, TCP_BSP)},
    "x socket": {TCP_ASP: (TCP_ASP, SOCKET_ASP), TCP_BSP: (TCP_BSP, SOCKET_BSP)},
}


def tables(rows: Sequence[Row], rounds: int) -> list[Table]:
    """The steps, the updates and the goals, as far as they were measured."""
    steps = [row for row in rows if row.optimizer is None]
    updates = [row for row in rows if row.optimizer is not None]
    goals = goal_rows(rows)
    made = [_step_table(steps, rounds)] if steps else []
    made += [_update_table(updates)] if updates else []
    return [*made, _goal_table(goals)] if goals else made


def _step_table(rows: Sequence[Row], rounds: int) -> Table:
    table = _table("A step", ("MB", "workers", "ms", "low - high", *RATIOS), ("system", "", ""))
    table.caption = f"medians of {rounds} round{'s' if rounds != 1 else ''}; low and high are of a round"
    times_ms = _times_ms(rows)
    before = None
    for row in rows:
        case, place = Case(row.system, row.transport, row.mode), (row.size_mb, row.workers)
        if before not in (None, place):
            table.add_section()
        where = ("", "") if place == before else (f"{row.size_mb:g}", str(row.workers))
        ratios = (
            "" if case not in pairs else _text(_ratio(times_ms, *pairs[case], *place))
            for pairs in RATIOS.values()
        )
        table.add_row(*case, *where, _ms(row.median_ms), _span(row), *ratios)
        before = place
    return table


def _update_table(rows: Sequence[Row]) -> Table:
    table = _table(
        f"An update of {rows[0].size_mb:g} MB",
        ("ms", "low - high", "traffic ms", "x traffic"),
        ("optimizer",),
    )
    for row in rows:
        assert row.optimizer is not None
        assert row.traffic_ms is not None
        ratio = row.median_ms / row.traffic_ms
        table.add_row(row.optimizer, _ms(row.median_ms), _span(row), _ms(row.traffic_ms), _text(ratio))
    return table


def _goal_table(goals: Sequence[GoalRow]) -> Table:
    table = _table("Goals", ("MB", "workers", "seen", "goal", "met"), ("what",))
    for row in goals:
        goal = row.goal
        unit = "us" if goal.bottom is None else "x"
        table.add_row(
            _short(goal.top) if goal.bottom is None else f"{_short(goal.top)} / {_short(goal.bottom)}",
            f"{goal.size_mb:g}",
            str(goal.workers),
            f"{_text(row.figure)} {unit}",
            f"{'>=' if goal.at_least else '<='} {goal.bound:g} {unit}",
            "[green]yes[/]" if row.met else "[red]no[/]",
        )
    return table


def _table(title: str, numbers: Sequence[str], names: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _short(case: Case) -> str:
    """What distinguishes it.

    >>> _short(GLOO), _short(SHM_ASP), _short(_update_of("Adam"))
    ('gloo', 'paceline shm asp', 'update by Adam')
    """
    several = case.system in ("paceline", "socket")
    return " ".join(case) if several else case.system


def _ms(value: float) -> str:
    """To the microsecond if it is short.

    >>> [_ms(value) for value in (0.0512, 12.346, 123.456, 45678.9)]
    ['0.051', '12.35', '123.5', '45679']
    """
    return f"{value:.{max(0, 4 - len(f'{abs(value):.0f}'))}f}"


def _span(row: Row) -> str:
    return f"{_ms(row.low_ms)} - {_ms(row.high_ms)}"


def _text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"


if __name__ == "__main__":
    _be_the_crew()
