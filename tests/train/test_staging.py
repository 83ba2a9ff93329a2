"""Parameters on a device whose copies are late: nothing is early, late or torn, and all is as on the CPU."""

from __future__ import annotations
import __future__

import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.errors import RunFailedError
from paceline.run.worker_links import Links, WorkerMemory
from paceline.shard.vectors import bits
from paceline.sim import Cluster, Presence, simulate
from paceline.train.device import EarlyCopies, _Checksum
from paceline.train.generator_states import generators_lock
from paceline.train.gradients import Gradients
from paceline.train.weights import Copying, Weights
from paceline.wire import stream
from paceline.wire.stream import Stream
from tests.support.delayed_queue import on_the_double
from tests.support.garbage import spare_what_exists
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

EXAMPLES = int(os.environ.get("PACELINE_STAGING_EXAMPLES", "30"))
EXAMPLES_PER_BLOCK = 100  # Hypothesis keeps all examples of a test, so thousands take ever more time
CLUSTER = Cluster(compute_s=[1.0, 1.3, 3.1], servers=2, latency_s=0.01)
LATE = Cluster(compute_s=[1.0, 1.3, 1.1], servers=2, latency_s=0.01, presence={2: Presence(joins_at_s=2.5)})

SYNCS = ["bsp", "asp", "ssp:staleness=1", "spec-sync", "elastic-bsp:lookahead=4", "drop-stragglers:quorum=2"]

EDITS = [
    "clip norm",
    "clip value",
    "double and halve",
    "scale without a version",
    "remove a gradient",
    "replace a gradient",
    "accumulate",
    "begin anew",
    "make NaN",
    "set data of weights to the same values",
    "edit weights",
    "evaluate before the step",
]
"""What a script does between the backward pass and the step. The last two are left out in a closure."""

BETWEEN = [
    "edit",
    "edit nothing",
    "evaluate",
    "reduce",
    "fail in the middle",
    "a graph that is too old",
    "extend",
]
"""What a script does between two iterations."""

REFUSED = ["The workers' calls differ", "it joins a run whose script has added parameters"]
"""How programs end that are wrong if a worker joins late."""


class Iteration(NamedTuple):
    """What a worker does in an iteration.

    Attributes:
        layers: the layers that the loss uses, in the order in which their losses are added.
        edits: what is done with the gradients.
        closure: True if the gradients are computed in a closure.
        between: what follows.
    """

    layers: tuple[int, ...]
    edits: tuple[str, ...]
    closure: bool
    between: str | None


class Program(NamedTuple):
    """What a script does.

    Attributes:
        iterations: its iterations.
        optimizers: number of optimizers, which take their steps in turn.
        momentum: momentum of the optimizers.
        sync: the sync model.
        seed: seed of the times of the copies.
        piece_bytes: maximum size of the pieces of a gradient that are copied early.
        late: True if a worker joins late.
    """

    iterations: tuple[Iteration, ...]
    optimizers: int
    momentum: float
    sync: str
    seed: int
    piece_bytes: int
    late: bool


iterations = st.builds(
    Iteration,
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple),
    st.lists(st.sampled_from(EDITS), max_size=3).map(tuple),
    st.booleans(),
    st.none() | st.sampled_from(BETWEEN),
)
programs = st.builds(
    Program,
    st.lists(iterations, min_size=2, max_size=5).map(tuple),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from(SYNCS),
    st.integers(0, 2**20),
    st.sampled_from([64, 256, 10**6]),
    st.booleans(),
)

# Some mistakes show only if nothing else is done: the same iteration three times, with one edit.
plain_programs = st.builds(
    Program,
    (st.just("double and halve") | st.sampled_from(EDITS)).map(
        lambda edit: (Iteration((3, 2, 1, 0), (edit,), closure=False, between=None),) * 3
    ),
    st.just(1),
    st.just(0.0),
    st.sampled_from(SYNCS),
    st.integers(0, 2**20),
    st.just(64),
    st.just(False),
)


class Model(nn.Module):
    """Four layers, of which a loss may use some, and the statistics of a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, size) for size in (1, 20, 7, 2)])

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = self.norm(x)
        return torch.stack([self.layers[index](x).square().mean() for index in used]).sum()


class Added(nn.Module):
    """A layer that is trained later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 9))


class ScriptError(Exception):
    """Raised by the script in the middle of an iteration."""


def outcome_of(program: Program, let_run: Callable[[], None] = lambda: None) -> list[Any]:
    """Return what every worker sees after each step: its loss, and the bits of its weights and buffers.

    Args:
        program: what the script does.
        let_run: function that lets copies be carried out, as they may be at any time.
    """
    seen: dict[int, list[Any]] = {}

    def train() -> None:
        records: list[Any] = []
        seen[paceline.worker_index()] = records
        torch.manual_seed(paceline.worker_index())
        with generators_lock, torch.random.fork_rng():  # another worker's thread may be making its model
            torch.manual_seed(7)
            model = Model()
        groups = [
            [*model.norm.parameters(), *model.layers[:2].parameters()],
            [*model.layers[2:].parameters()],
        ]
        if program.optimizers == 1:
            groups = [groups[0] + groups[1]]
        optimizers = [
            paceline.DistributedOptimizer(
                torch.optim.SGD(group, lr=0.1, momentum=program.momentum), model=model
            )
            for group in groups
        ]
        added = Added()
        Script(program, model, optimizers, added, records, let_run).run()

    try:
        result = simulate(
            LATE if program.late else CLUSTER,
            program.sync,
            train_fn=train,
            seed=program.seed,
            on_nan="skip",
            hyperparameters="raw",
            guard="off",
        )
    except RunFailedError as error:
        refused = [reason for reason in REFUSED if reason in str(error)]
        if not refused:
            raise
        return [seen, refused]
    assert result.state_dict is not None
    return [seen, {name: bits_of(value) for name, value in sorted(result.state_dict.items())}]


class Script:
    """A script that carries out a program."""

    def __init__(
        self,
        program: Program,
        model: Model,
        optimizers: list[paceline.DistributedOptimizer],
        added: Added,
        records: list[Any],
        let_run: Callable[[], None],
    ) -> None:
        self.let_run = let_run
        self.program = program
        self.model = model
        self.optimizers = optimizers
        self.added = added
        self.records = records
        self.extended = False

    def run(self) -> None:
        """Carry out the program."""
        for number, iteration in enumerate(self.program.iterations):
            optimizer = self.optimizers[number % len(self.optimizers)]
            x = torch.randn(5, 3)

            def compute(
                iteration: Iteration = iteration,
                optimizer: paceline.DistributedOptimizer = optimizer,
                x: torch.Tensor = x,
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = self.loss(x, iteration)
                loss.backward()
                for edit in iteration.edits:
                    self.edit(edit, x, iteration, optimizer)
                return loss.detach()

            loss = optimizer.step(compute) if iteration.closure else compute()
            if not iteration.closure:
                optimizer.step()
            self.record(loss)
            if iteration.between is not None:
                self.between(iteration.between, x)
                self.record(loss)

    def loss(self, x: torch.Tensor, iteration: Iteration) -> torch.Tensor:
        """Return the loss of the layers that an iteration uses."""
        loss: torch.Tensor = self.model(x, iteration.layers)
        return loss * self.added.scale.square().mean() if self.extended else loss

    def edit(
        self, edit: str, x: torch.Tensor, iteration: Iteration, optimizer: paceline.DistributedOptimizer
    ) -> None:
        """Do something with the gradients."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        if edit.startswith("clip") and not with_gradients:
            return
        if edit == "clip norm":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        elif edit == "clip value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        elif edit == "double and halve":
            for parameter in with_gradients:
                parameter.grad.mul_(2)
            self.let_run()
            for parameter in with_gradients:
                parameter.grad.mul_(0.5)
        elif edit == "scale without a version":
            for parameter in with_gradients:
                parameter.grad.data.mul_(0.5)
        elif edit == "accumulate":
            self.loss(x + 1, iteration).backward()
        elif edit == "begin anew":
            optimizer.zero_grad(set_to_none=len(iteration.layers) > 1)
            self.loss(x - 1, iteration).backward()
        elif edit in EDITS[-2:]:
            if not iteration.closure:
                self.between("edit" if edit == "edit weights" else "evaluate", x)
        elif edit == "set data of weights to the same values":
            for parameter in parameters:
                parameter.data = parameter.data.clone()
        elif with_gradients:
            changed = with_gradients[-1]
            assert changed.grad is not None
            if edit == "remove a gradient":
                changed.grad = None
            elif edit == "replace a gradient":
                changed.grad = torch.ones_like(changed)
            else:
                changed.grad.view(-1)[0] = torch.nan

    def between(self, action: str, x: torch.Tensor) -> None:
        """Do something between two iterations."""
        optimizer = self.optimizers[0]
        if action.startswith("edit"):
            with optimizer.editing(), torch.no_grad():
                if action == "edit":
                    self.model.layers[1].get_parameter("weight").clamp_(-0.2, 0.2)
        elif action == "evaluate":
            with paceline.evaluating(self.model), torch.no_grad():
                self.records.append(bits_of(self.model(x, (0, 1, 2, 3))))
        elif action == "reduce":
            self.records.append(paceline.reduce(float(paceline.worker_index())))
        elif action == "fail in the middle":
            handle = self.model.layers[0].get_parameter("weight").register_hook(_fail)
            with pytest.raises(ScriptError):
                self.model(x, (0, 1, 2, 3)).backward()
            handle.remove()
        elif action == "a graph that is too old":
            loss = self.model(x, (0, 1, 2, 3)) * 1.0
            self.model.zero_grad()
            self.model(x, (0, 3)).backward()
            for each in self.optimizers:
                each.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        elif action == "extend" and not self.extended:
            self.extended = True
            optimizer.add_param_group({"params": [self.added.scale]})

    def record(self, loss: torch.Tensor) -> None:
        """Note the loss, the weights and the statistics of the BatchNorm."""
        state = [*self.model.state_dict().values(), self.added.scale]
        self.records.append([bits_of(loss), *(bits_of(tensor) for tensor in state)])


def bits_of(tensor: torch.Tensor) -> list[int]:
    """Return the bits of a tensor."""
    values: list[int] = bits(tensor).reshape(-1).tolist()
    return values


def _fail(gradient: torch.Tensor) -> None:
    raise ScriptError


def on_device(program: Program) -> list[Any]:
    """Return the outcome of a program on the double."""
    with on_the_double(program.seed, program.piece_bytes) as queues:

        def let_run() -> None:
            for queue in queues:
                queue.run_on()

        outcome = outcome_of(program, let_run)
        assert queues
    return outcome


PROGRAMS = settings(
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.parametrize("block", range(-(-EXAMPLES // EXAMPLES_PER_BLOCK)))
def test_a_device_computes_what_the_cpu_computes(block: int) -> None:
    @seed(block)
    @settings(PROGRAMS, max_examples=min(EXAMPLES, EXAMPLES_PER_BLOCK))
    @given(programs | plain_programs)
    def check(program: Program) -> None:
        assert on_device(program) == outcome_of(program)

    spare_what_exists()  # the first block has imported torch's compiler, and the search for a model takes long
    check()


def test_nothing_is_copied_again_if_no_gradient_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []
    find_changed = EarlyCopies._changed

    def count(copies: EarlyCopies, early: Sequence[int]) -> set[int]:
        changed = find_changed(copies, early)
        counts.append((len(early), len(changed)))
        return changed

    monkeypatch.setattr(EarlyCopies, "_changed", count)
    unchanged = Iteration((0, 1, 2, 3), (), closure=False, between=None)
    for number in range(5):
        on_device(HALVED._replace(iterations=(unchanged,) * 3, seed=number))
    assert counts
    assert all(early > 1 and not changed for early, changed in counts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checksum_sees_changes_that_cancel_out(dtype: torch.dtype) -> None:
    """For example, rounding makes such changes if the same gradients are computed anew, in another order."""
    values = torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=dtype)
    changed = values.clone()
    bits(changed).add_(torch.tensor([-1, 2, -1, 0], dtype=bits(changed).dtype))
    checksum = _Checksum(1000, values.device)
    assert not torch.equal(checksum.of(values), checksum.of(changed))


class Mutation(NamedTuple):
    """A mistake.

    Attributes:
        owner: the class with the method.
        method: name of the method.
        right: a part of its source.
        wrong: what is there instead.
        found_by: a program that finds it, if few do.
    """

    owner: type
    method: str
    right: str
    wrong: str
    found_by: Program | None = None


HALVED = Program(
    (Iteration((3, 2, 1, 0), ("double and halve",), closure=False, between=None),) * 3,
    optimizers=1,
    momentum=0.0,
    sync="asp",
    seed=2274,
    piece_bytes=64,
    late=False,
)
TOO_OLD = Program(
    (
        Iteration((1, 3, 2), ("make NaN", "begin anew"), closure=False, between=None),
        Iteration((1, 3, 2), (), closure=True, between="extend"),
        Iteration(
            (0, 1, 3, 2),
            ("accumulate", "begin anew", "edit weights"),
            closure=False,
            between="a graph that is too old",
        ),
    ),
    optimizers=1,
    momentum=0.0,
    sync="spec-sync",
    seed=13209,
    piece_bytes=10**6,
    late=False,
)
IN_TURN = Program(
    (
        Iteration((0, 2), ("remove a gradient", "edit weights"), closure=True, between="reduce"),
        Iteration((3, 0), ("make NaN",), closure=True, between=None),
        Iteration((2, 1, 3), ("double and halve", "begin anew"), closure=False, between="edit"),
    ),
    optimizers=2,
    momentum=0.0,
    sync="elastic-bsp:lookahead=4",
    seed=524289,
    piece_bytes=10**6,
    late=True,
)

MUTATIONS = [
    Mutation(Copying, "deliver", "self._queue.drain()", "pass"),
    Mutation(Copying, "__init__", "session.callbacks.before_exchange = queue.drain", "pass"),
    Mutation(Copying, "weights_pulled", ".order()", ""),
    Mutation(
        Copying, "weights_pulled", "of_set(self.weights, set_index)", "of_set(self.weights, 0)", IN_TURN
    ),
    Mutation(Copying, "weights_pulled", "self._copied.clear()", "pass"),
    Mutation(Copying, "_weights_arrived", "self._copy([(name, copied, stop)])", "pass"),
    Mutation(EarlyCopies, "_copy", "between.ticket.order()", "pass"),
    Mutation(EarlyCopies, "_copy", "self._sum.of(piece)", "self._sum.of(source)"),
    Mutation(EarlyCopies, "_copy", "target.copy_(piece", "target.copy_(source", HALVED),
    Mutation(EarlyCopies, "_changed", "not unchanged", "False"),
    Mutation(EarlyCopies, "rest", "del self._copies[number]", "pass"),
    Mutation(
        _Checksum, "of", "integers.sum(dtype=torch.int64), weighted", "weighted, weighted * 0, 0 * weighted"
    ),
    Mutation(Gradients, "replaced_by", "self._stager.deliver(None)", "pass", TOO_OLD),
    Mutation(
        Weights,
        "mark_pulled",
        "torch.autograd.graph.increment_version(pulled)",
        "pass",
        TOO_OLD,
    ),
    Mutation(Weights, "mark_pulled", "self._stager.weights_pulled(set_index)", "pass"),
]
"""Each wait, copy and version call of the stager that decides what is computed, left out or done too early.

Not those that only save copies.
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda each: f"{each.owner.__name__}.{each.method}: {each.right}"
)
def test_each_mistake_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(
        PROGRAMS,
        max_examples=100,
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        database=None,
    )
    @given(programs | plain_programs)
    def check(program: Program) -> None:
        assert on_device(program) == outcome_of(program)

    if mutation.found_by is not None:
        assert on_device(mutation.found_by) == outcome_of(mutation.found_by)
        check = example(mutation.found_by)(check)
    make(mutation, monkeypatch)
    with pytest.raises((AssertionError, RunFailedError)):
        check()


class Wide(nn.Module):
    """Two layers with different dtypes, each of whose halves is received by several calls."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(300, 300)
        self.wide = nn.Linear(300, 300, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)  # several threads create such models
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.wide(self.narrow(x).double())
        return y


def train_wide() -> list[list[torch.Tensor]]:
    """Train in a live run. Return the weights after each step."""
    model = Wide()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 300) * (1 + step) * (1 + paceline.worker_index())
        model(x).square().mean().backward()
        optimizer.step()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


def train_on_the_double(run_on_threads: RunOnThreads, seed: int, wire: str) -> dict[int, Any]:
    with on_the_double(seed, piece_bytes=20_000):
        return run_on_threads(train_wide, servers=2, transport="tcp", wire=wire).results


def assert_same(expected: dict[int, Any], results: dict[int, Any]) -> None:
    """Compare the weights of each worker after each step."""
    for worker, seen in expected.items():
        for before, after in zip(seen, results[worker], strict=True):
            assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("wire", ["float32", "bf16"])
@pytest.mark.parametrize("seeds", [range(1), *thorough(range(1, 5))], ids=str)
def test_weights_go_to_the_device_in_pieces_while_later_ones_still_travel(
    wire: str, seeds: Sequence[int], run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FILLS", 1)  # between two calls, the worker looks at what has arrived
    expected = run_on_threads(train_wide, servers=2, transport="tcp", wire=wire).results
    pieces: list[tuple[str, int, int]] = []
    arrived = Copying._weights_arrived

    def record(stager: Copying, name: str, start: int, stop: int) -> None:
        pieces.append((name, start, stop))
        arrived(stager, name, start, stop)

    monkeypatch.setattr(Copying, "_weights_arrived", record)
    for number in seeds:
        pieces.clear()
        assert_same(expected, train_on_the_double(run_on_threads, number, wire))
        whole = 2 * 2 * 4 * 2  # workers, servers, steps, vectors
        assert len(pieces) > whole if wire == "float32" else len(pieces) == whole


LIVE_MUTATIONS = [
    Mutation(Links, "_tell_arrived", "(message.shard, missing_bytes)", "(message.shard, 0)"),
    Mutation(WorkerMemory, "arrived", "self.shards[shard].bounds", "self.shards[0].bounds"),
    Mutation(Stream, "_read_frames", "self._following_bytes -= target.nbytes", "self._following_bytes = 0"),
]
"""What makes sure that a part of the weights is copied only when it has arrived, left out."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mutation", LIVE_MUTATIONS, ids=lambda each: f"{each.owner.__name__}.{each.method}: {each.right}"
)
def test_a_part_of_the_weights_that_has_not_arrived_is_not_copied(
    mutation: Mutation, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FILLS", 1)
    make(mutation, monkeypatch)
    expected = run_on_threads(train_wide, servers=2, transport="tcp").results

    def check() -> None:
        for number in range(20):
            assert_same(expected, train_on_the_double(run_on_threads, number, "float32"))

    with pytest.raises(AssertionError):
        check()


def make(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a mistake in the source of a method."""
    method = getattr(mutation.owner, mutation.method)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(mutation.right) == 1
    wrong = source.replace(mutation.right, mutation.wrong)
    flags = __future__.annotations.compiler_flag
    found: dict[str, Any] = {}
    exec(compile(wrong, "mutation", "exec", flags=flags), vars(sys.modules[mutation.owner.__module__]), found)
    monkeypatch.setattr(mutation.owner, mutation.method, found[mutation.method])
