"""`optimizer.editing()`: one worker's edit of the weights becomes everybody's. Edits without effect are no error."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer, simulate, worker_count, worker_index
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.messages import Commit, CreateShards, InitialWeights
from paceline.core.reconfiguration import Edits
from paceline.core.requests import COORDINATOR, Discard, Overwrite, worker_peer
from paceline.core.server import Server
from paceline.errors import ProtocolError, UsageError, WeightsChangedError
from paceline.run.worker import WorkerSession
from paceline.shard.store import Push, Store
from paceline.shard.vectors import segment_views
from paceline.sim import Cluster, Presence
from paceline.sync.events import Edit, PushReceived
from paceline.trace import replay
from paceline.train import session as sessions
from paceline.train.weights import WATCHED_PULLS
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
SYNCS = [
    "bsp",
    "ssp:staleness=1",
    "drop-stragglers:quorum=2",
    "elastic-bsp:lookahead=4",
    "spec-sync",
    *thorough("asp", "bsp|asp", "bsp@0,asp@4,bsp@8"),
]


class Net(nn.Module):
    """A small network with an embedding, BatchNorm, and a parameter that never has a gradient."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, width)
        self.head = nn.Linear(width, 2)
        self.unused = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.to(torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.hidden(self.norm(self.embedding(rows)))))
        return out


Change = Callable[[Net, int], None]


def rows(worker: int, iteration: int) -> torch.Tensor:
    return torch.randint(8, (6,), generator=torch.Generator().manual_seed(100 * worker + iteration))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def weights_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def assert_close(found: State, expected: State, tolerance: float = 1e-12) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


# -- what scripts do to weights -----------------------------------------------------------------------------


def clamp(model: Net, iteration: int) -> None:
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamp_data(model: Net, iteration: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def normalize(model: Net, iteration: int) -> None:
    with torch.no_grad():
        model.embedding.weight.renorm_(2, 0, 0.5)


def reset_head(model: Net, iteration: int) -> None:
    if iteration == 2:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            model.head.weight.copy_(torch.rand(model.head.weight.shape, generator=generator))
            model.head.bias.zero_()
            model.unused.fill_(-4.0)


def replace_data(model: Net, iteration: int) -> None:
    model.hidden.weight.data = model.hidden.weight.data * 0.9


def go_back(model: Net, iteration: int) -> None:
    """Load the checkpoint of an earlier iteration."""
    if iteration == 1:
        model.checkpoint = copy.deepcopy(model.state_dict())  # type: ignore[assignment]
    if iteration in (3, 4):
        model.load_state_dict(model.checkpoint)  # type: ignore[arg-type]


def swap_and_back(model: Net, iteration: int) -> None:
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(kept)


EDITS = [clamp, clamp_data, normalize, reset_head, replace_data, go_back, swap_and_back]


def training(edit: Change, steps: int = 6, *, width: int = 6) -> Callable[[], State]:
    """A training function that edits the weights after each step."""

    def train() -> State:
        model = Net(width)
        model.train()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(steps):
            optimizer.zero_grad()
            model(rows(worker_index(), iteration)).square().mean().backward()
            optimizer.step()
            with optimizer.editing():
                edit(model, iteration)
        return weights_of(model)

    return train


def alone(edit: Change, workers: int, steps: int = 6) -> State:
    """One process without Paceline: the mean of what each worker's batch gives, and the same edits."""
    model = Net()
    optimizer = sgd(model)
    for iteration in range(steps):
        optimizer.zero_grad()
        for worker in range(workers):
            (model(rows(worker, iteration)).square().mean() / workers).backward()
        optimizer.step()
        edit(model, iteration)
    return weights_of(model)


def test_edits_with_overlap_off_are_those_of_one_process(run_on_threads: RunOnThreads) -> None:
    run = run_on_threads(training(clamp), workers=2, servers=2, shards=3, transport="tcp", overlap="off")
    assert_close(run.state_dict, alone(clamp, 2))


WHERE: list[tuple[Change, str]] = [
    *((edit, "shm") for edit in EDITS),
    (clamp_data, "tcp"),
    (go_back, "tcp"),
    (swap_and_back, "unix"),
]


@pytest.mark.parametrize(
    ("edit", "transport"),
    [
        *WHERE,
        *thorough(*(case for case in itertools.product(EDITS, ["shm", "unix", "tcp"]) if case not in WHERE)),
    ],
)
def test_edits_under_bsp_are_those_of_one_process(
    run_on_threads: RunOnThreads, edit: Change, transport: str
) -> None:
    expected = alone(edit, 2)
    run = run_on_threads(training(edit), workers=2, servers=2, shards=3, transport=transport)
    for found in (run.state_dict, *run.results.values()):
        assert_close(found, expected)  # type: ignore[arg-type]
    assert all(entry.version == 6 for trace in run.shards for entry in trace.entries[-1:]), (
        "edits are no updates"
    )


@pytest.mark.parametrize("edit", [clamp, reset_head])
def test_edits_in_virtual_time_are_those_of_one_process(edit: Change) -> None:
    result = simulate(Cluster(compute_s=[1.0, 2.0, 1.5], servers=2), "bsp", train_fn=training(edit), shards=3)
    assert result.state_dict is not None
    assert_close(result.state_dict, alone(edit, 3))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_models_predict_nothing_from_the_duration_of_an_edit(sync: str) -> None:
    cluster = Cluster(compute_s=[1.0, 2.5])
    result = simulate(cluster, sync, train_fn=training(clamp), record=True)
    pushes = [entry.event for entry in result.trace[0].entries if isinstance(entry.event, PushReceived)]
    assert len(pushes) == 2 * 2 * 6
    for push in pushes:  # without a gradient, a worker pushes in the place of its edit
        assert push.warm_up == (push.edit is not None or push.empty)
    assert sum(push.warm_up for push in pushes) == len(pushes) / 2


@pytest.mark.parametrize("sync", SYNCS)
def test_an_edit_is_never_lost_under_any_model(run_on_threads: RunOnThreads, sync: str) -> None:
    """No gradient reaches the parameter `unused`, so it shows the last edit, whatever the order of the pushes."""

    def count(model: Net, iteration: int) -> None:
        with torch.no_grad():
            model.unused.fill_(float(iteration + 1))
            clamp(model, iteration)

    def train() -> State:
        return training(count, 8)()

    run = run_on_threads(train, workers=3, servers=2, shards=2, sync=sync)
    assert run.state_dict["unused"].tolist() == [8.0] * 3
    assert [replay(trace) for trace in run.traces] == [[]] * len(run.traces)
    simulated = simulate(Cluster(compute_s=[1.0, 1.1, 2.6], servers=2), sync, train_fn=train, shards=2)
    assert simulated.state_dict is not None
    assert simulated.state_dict["unused"].tolist() == [8.0] * 3


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_all_shards_take_the_edit_of_one_worker(run_on_threads: RunOnThreads, sync: str) -> None:
    def mark(model: Net, iteration: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0 + worker_index())

    def train() -> State:
        return training(mark, 1)()

    for _ in range(3):
        run = run_on_threads(train, workers=3, servers=2, shards=4, sync=sync)
        names = dict(Net().named_parameters())
        found = {value for name in names for value in run.state_dict[name].flatten().tolist()}
        if sync == "bsp":
            assert found == {1.0}, "the edit of worker 0"
        else:
            # Other workers may push a gradient after the edit, so only the parameter without gradients is certain.
            assert len(set(run.state_dict["unused"].tolist())) == 1


@TRANSPORTS
def test_gradients_survive_an_edit_between_two_backward_passes(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    def accumulate(model: Net, optimizer: torch.optim.Optimizer, workers: range) -> None:
        for iteration in range(4):
            optimizer.zero_grad()
            for half in range(2):
                for worker in workers:
                    (model(rows(worker, 10 * iteration + half)).square().mean() / len(workers)).backward()
                if isinstance(optimizer, DistributedOptimizer):
                    with optimizer.editing():
                        clamp(model, iteration)
                else:
                    clamp(model, iteration)
            optimizer.step()

    def train() -> None:
        model = Net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        accumulate(model, optimizer, range(worker_index(), worker_index() + 1))

    expected = Net()
    optimizer = sgd(expected)
    for parameter in expected.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    accumulate(expected, optimizer, range(2))
    run = run_on_threads(train, workers=2, servers=2, transport=transport)
    assert_close(run.state_dict, weights_of(expected))


class GoneError(Exception):
    """Ends a worker's function in the block of an edit: the worker's connections close, so that it is lost."""


@pytest.mark.parametrize("sync", ["bsp", "asp", "elastic-bsp:lookahead=4"])
def test_the_next_worker_edits_if_a_worker_is_lost_inside_the_block(
    run_on_threads: RunOnThreads, sync: str
) -> None:
    def count(model: Net, iteration: int) -> None:
        with torch.no_grad():
            model.unused.fill_(float(iteration + 1))
        if worker_index() == 0 and iteration == 3:
            raise GoneError

    run = run_on_threads(
        training(count, 8), workers=3, servers=2, shards=2, sync=sync, keep_errors=True, transport="tcp"
    )
    assert isinstance(run.errors.pop(0), GoneError)
    assert not run.errors
    assert run.state_dict["unused"].tolist() == [8.0] * 3


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_the_edits_of_a_late_worker_are_made_when_all_earlier_workers_are_lost(sync: str) -> None:
    """The late worker makes fewer edits than were made before it has joined."""

    def count(model: Net, iteration: int) -> None:
        with torch.no_grad():
            model.unused.fill_(float(iteration + 1))

    def train() -> State:
        return training(count, 6 if worker_index() == 2 else 40)()

    presence = {0: Presence(lost_at_s=20.5), 1: Presence(lost_at_s=20.5), 2: Presence(joins_at_s=18.3)}
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], servers=2, presence=presence)
    result = simulate(cluster, sync, train_fn=train, shards=2)
    assert result.state_dict is not None
    assert result.state_dict["unused"].tolist() == [6.0] * 3


def test_all_edits_that_meet_at_a_barrier_are_made_in_the_order_of_their_numbers() -> None:
    """Under elastic-bsp, worker 1 may make the seventh edit and worker 2 the eighth, and both stop at one barrier."""
    edits = Edits(0)
    edits.receive((1, 6), Edit(number=6, sole=True))
    edits.receive((2, 7), Edit(number=7, sole=True))
    edits.receive((0, 9), Edit(number=5, sole=True))
    done = edits.carry_out([(0, 9), (1, 6), (2, 7)])
    assert done == [Overwrite(0, 0, 9, 5), Overwrite(0, 1, 6, 6), Overwrite(0, 2, 7, 7)]


def test_in_lockstep_the_edit_of_the_lowest_worker_is_made_once() -> None:
    edits = Edits(0)
    for worker in (2, 1):
        edits.receive((worker, 3), Edit(number=4, sole=False))
    assert edits.carry_out([(2, 3), (1, 3)]) == [Overwrite(0, 1, 3, 4), Discard(0, 2, 3)]
    edits.receive((2, 4), Edit(number=4, sole=False))  # too late
    assert edits.carry_out([(2, 4)]) == [Discard(0, 2, 4)]


def test_a_new_optimizer_edits_weights_that_an_earlier_one_has_trained(run_on_threads: RunOnThreads) -> None:
    """A cross-validation with one model, which is reset before each fold, and a new optimizer for each fold."""

    def validate() -> list[State]:
        model = nn.Linear(3, 1, bias=False).double()
        first = {"weight": torch.ones(1, 3).double()}
        began = []
        for fold in range(3):
            optimizer = DistributedOptimizer(sgd(model), model=model)
            with optimizer.editing():
                model.load_state_dict(first)
            began.append({"weight": model.weight.detach().clone()})
            for iteration in range(3):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * fold + iteration)
                inputs = torch.randn(4, 3, generator=generator).double()
                model(inputs[worker_index() :: worker_count()]).square().mean().backward()
                optimizer.step()
        return [*began, {"weight": model.weight.detach().clone()}]

    alone = validate()
    assert torch.equal(alone[2]["weight"], alone[0]["weight"])
    run = run_on_threads(validate, workers=2, servers=2, sync="bsp")
    assert sorted(run.results) == [0, 1]
    for found in run.results.values():
        torch.testing.assert_close(found, alone)


def test_an_edit_that_raises_is_undone(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = Net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            optimizer.zero_grad()
            model(rows(worker_index(), iteration)).square().mean().backward()
            optimizer.step()
            before = weights_of(model)
            with pytest.raises(GoneError), optimizer.editing():  # noqa: PT012
                clamp(model, 0)
                model.hidden.weight.data = torch.zeros(6, 4, dtype=torch.float64)
                raise GoneError
            assert_close(weights_of(model), before, 0)

    for sync, workers in (("bsp", 2), ("asp", 1)):
        run_on_threads(train, workers=workers, sync=sync)


def test_what_is_not_allowed_inside_the_block(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = Net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        model(rows(0, 0)).square().mean().backward()
        optimizer.step()
        with (
            pytest.raises(UsageError, match=r"^step\(\) was called inside `with optimizer\.editing\(\):`"),
            optimizer.editing(),
        ):
            optimizer.step()
        with (
            pytest.raises(UsageError, match=r"^editing\(\) was called inside"),
            optimizer.editing(),
            optimizer.editing(),
        ):
            pass
        with (
            pytest.raises(WeightsChangedError, match=r"'hidden\.weight' was float64\[6, 4\].* as float32"),
            optimizer.editing(),
        ):
            model.hidden.to(torch.float32)
        optimizer.step()

    run_on_threads(train, workers=1)


def test_outside_a_run_and_before_training_the_block_does_nothing(run_on_threads: RunOnThreads) -> None:
    def train() -> float:
        model = Net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        with optimizer.editing(), torch.no_grad():
            model.unused.fill_(worker_count() + 5.0)
        return float(model.unused[0].detach())

    assert train() == 6.0
    assert run_on_threads(train, workers=2).results == {0: 7.0, 1: 7.0}


# -- edits that put the same values back --------------------------------------------------------------------


def convert(model: Net) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def to_and_back(model: Net) -> None:
    model.head.bias.data = model.head.bias.data.to(torch.bfloat16).to(
        torch.float64
    )  # the bias has such values


def load_equal(model: Net) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def load_part(model: Net) -> None:
    model.hidden.load_state_dict(copy.deepcopy(model.hidden.state_dict()))


def load_average_and_back(model: Net) -> None:
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: tensor * 2 for name, tensor in kept.items()})
    model.load_state_dict(kept)


def swap_in_place(model: Net) -> None:
    with torch.no_grad():
        kept = model.hidden.weight.clone()
        model.hidden.weight.mul_(2.0)
        model.hidden.weight.copy_(kept)


@pytest.mark.parametrize(
    ("transport", "sync"), [("shm", "bsp"), ("tcp", "asp"), *thorough(("shm", "asp"), ("tcp", "bsp"))]
)
@pytest.mark.parametrize("change", [convert, load_equal, load_part, load_average_and_back])
@pytest.mark.parametrize("width", [6, 5000])
def test_edits_without_effect_are_no_error(
    run_on_threads: RunOnThreads, change: Callable[[Net], None], width: int, transport: str, sync: str
) -> None:
    def train() -> State:
        model = Net(width)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            optimizer.zero_grad()
            model(rows(0, iteration)).square().mean().backward()
            optimizer.step()
            change(model)
        return weights_of(model)

    run = run_on_threads(train, workers=1, sync=sync, transport=transport)
    assert_close(run.state_dict, run.results[0], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sync", "transport", "width", "known"),
    [
        ("bsp", "shm", 5000, True),
        ("asp", "shm", 5000, False),
        ("bsp", "tcp", 5000, False),
        ("asp", "tcp", 6, True),
    ],
)
def test_a_large_weight_that_is_swapped_in_place_late_is_known_only_where_the_servers_memory_is_read(
    run_on_threads: RunOnThreads, sync: str, transport: str, width: int, known: bool
) -> None:
    def train() -> None:
        model = Net(width)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(WATCHED_PULLS + 1):
            model(rows(0, iteration)).square().mean().backward()
            optimizer.step()
        swap_in_place(model)
        if known:
            optimizer.step()
        else:
            with pytest.raises(
                WeightsChangedError, match=r"'hidden\.weight' was edited, perhaps .*optimizer\.editing"
            ):
                optimizer.step()

    run_on_threads(train, workers=1, sync=sync, transport=transport)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_loading_other_values_is_an_error_even_if_few_differ(run_on_threads: RunOnThreads, sync: str) -> None:
    def train() -> None:
        model = Net(5000)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        model(rows(0, 0)).square().mean().backward()
        optimizer.step()
        state = copy.deepcopy(model.state_dict())
        state["hidden.weight"][4321, 1] += 1e-9
        model.load_state_dict(state)
        with pytest.raises(WeightsChangedError, match=r"^Parameter .* was edited"):
            optimizer.step()

    run_on_threads(train, workers=1, sync=sync)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_what_is_loaded_last_is_what_the_servers_hold(run_on_threads: RunOnThreads, sync: str) -> None:
    def train(inside: bool) -> None:
        model = Net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        model(rows(0, 0)).square().mean().backward()
        optimizer.step()
        best = {name: torch.full_like(tensor, 2) for name, tensor in model.state_dict().items()}
        if inside:
            with optimizer.editing():
                model.load_state_dict(best)
        else:
            model.load_state_dict(best)

    run = run_on_threads(lambda: train(True), workers=1, sync=sync)
    assert all(bool((tensor == 2).all()) for tensor in run.state_dict.values())
    assert not run.faults
    run = run_on_threads(lambda: train(False), workers=1, sync=sync)
    assert not bool((run.state_dict["unused"] == 2).all())
    simulated = simulate(Cluster(compute_s=[1.0]), sync, train_fn=lambda: train(False))
    for faults in (run.faults, simulated.faults):
        [fault] = faults
        assert fault.startswith("worker 0: Parameter 'unused' was edited after the last step")


@pytest.mark.parametrize("leaves", [True, False])
def test_weights_from_a_pull_that_does_not_end_are_no_edit(
    leaves: bool, run_on_threads: RunOnThreads
) -> None:
    """A worker leaves or loses a server during a pull: some of its weights are new, and no step has recorded them."""

    def train() -> None:
        model = Net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        model(rows(0, 0)).square().mean().backward()
        optimizer.step()
        session = sessions.current()
        assert isinstance(session, WorkerSession)
        next(iter(session.weights.values()))[0] += 1
        if worker_index() == 1 and leaves:
            session.links.asked_to_leave = True
        elif worker_index() == 1:
            session.core.waiting_for = "answers"

    run = run_on_threads(train, workers=2, sync="asp", transport="tcp")
    [fault] = run.faults
    assert fault.startswith("worker 0: ")


# -- the last edit of a live run, and a worker that is killed inside the block -------------------------------


@pytest.mark.processes
def test_a_worker_that_is_killed_inside_the_block_takes_no_edit_with_it(tmp_path: Path) -> None:
    def work() -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for iteration in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            with optimizer.editing(), torch.no_grad():
                model.weight.fill_(iteration + 0.5)
                if (paceline.worker_index(), iteration) == (0, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
            assert bool((model.weight == iteration + 0.5).all())

    result = paceline.launch(work, workers=3, servers=2, sync="bsp", run_dir=tmp_path / "run", progress=False)
    assert result.summary["lost_workers"] == [0]
    assert result.summary["iterations"] == {"0": 7, "1": 12, "2": 12}
    saved = safetensors.torch.load_file(tmp_path / "run" / "weights.safetensors")
    assert saved["weight"].tolist() == [[5.5] * 6] * 3
    assert [replay(trace) for trace in result.trace] == [[]] * 3


# -- the parts of an edit, one by one ------------------------------------------------------------------------


def test_an_edit_leaves_alone_what_a_later_edit_has_set() -> None:
    layout = Layout.of([Parameter(("a",), (2,), "float32"), Parameter(("b",), (2,), "float32")])
    [bounds] = layout.slice_evenly(1)
    spec = OptimizerSpec("SGD", (dict(torch.optim.SGD([torch.ones(1)], lr=0.1).defaults),), (0, 0))
    store = Store(bounds, {"float32": torch.zeros(layout.sizes["float32"])}, [spec])
    for worker, number, present in ((1, 1, b"\1\0"), (0, 0, b"\1\1")):
        values = {"float32": torch.full((layout.sizes["float32"],), number + 5.0)}
        store.put(worker, 0, Push(values, present, ()))
        store.overwrite(worker, 0, number)
    a, b = segment_views(bounds, store.weights)
    assert (a.tolist(), b.tolist()) == ([6.0, 6.0], [5.0, 5.0])
    assert float(store.weights["float32"].sum()) == 22.0, "the padding stays zero"


def test_shard_0_names_the_first_worker_and_another_one_if_that_is_lost() -> None:
    edits = Edits(0)
    assert edits.name(2, 0)
    assert not edits.name(1, 0)
    edits.leave(2)
    assert edits.name(1, 0)
    edits.receive((1, 4), Edit(number=0, sole=True))
    edits.leave(1)
    assert not edits.name(0, 0), "its edit was received"
    assert edits.carry_out([(1, 4)]) == [Overwrite(0, 1, 4, 0)]
    assert not edits.name(0, 0)
    assert edits.name(0, 1)


def test_a_worker_that_counts_from_the_next_edit_is_named_when_all_earlier_workers_are_lost() -> None:
    edits = Edits(0)
    edits.receive((0, 9), Edit(number=5, sole=True))
    edits.carry_out([(0, 9)])
    edits.leave(0)
    assert not edits.name(2, 0)
    assert edits.next == 6
    assert edits.name(2, edits.next)


def test_in_lockstep_the_lowest_index_counts_and_an_edit_is_made_once() -> None:
    edits = Edits(0)
    for worker in (2, 1):
        edits.receive((worker, 3), Edit(number=0, sole=False))
    assert edits.carry_out([(2, 3), (1, 3)]) == [Overwrite(0, 1, 3, 0), Discard(0, 2, 3)]
    edits.receive((0, 4), Edit(number=0, sole=False))
    assert edits.carry_out([(0, 4)]) == [Discard(0, 0, 4)]
    assert not edits.pending


@pytest.mark.parametrize("wrong", [{"empty": True}, {"samples": 3}])
def test_a_server_refuses_an_edit_without_values_or_with_properties_of_a_gradient(
    wrong: dict[str, Any],
) -> None:
    shard = simple_server()
    commit = Commit(0, 0, edit=Edit(number=0, sole=True), **wrong)
    with pytest.raises(ProtocolError, match="its push contains an edit"):
        shard.handle(worker_peer(0), commit, 1)
    assert not shard.shards[0].sync.counts.at(1)


def simple_server() -> Server:
    server = Server()
    model = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
    [bounds] = Layout((), (), {}).slice_evenly(1)
    server.handle(COORDINATOR, CreateShards(model, (bounds,), "asp", (0, 1), 0), 0)
    server.handle(worker_peer(0), InitialWeights(0), 0)
    return server
