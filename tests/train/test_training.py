"""What a run of several workers computes, against one process that sees all of the data."""

from __future__ import annotations

import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedOptimizer, distribute, set_sync, worker_count, worker_index
from paceline.errors import UsageError
from paceline.run import worker as worker_module
from paceline.run.server_memory import StreamedInbox
from paceline.run.worker import WorkerSession
from paceline.shard.optimizers import ELEMENTWISE
from paceline.sync import ASP, BSP, SSP, ElasticBSP, SyncModel
from paceline.sync.actions import AnswerPull, ApplyMean, PublishPlan
from paceline.sync.events import PullRequested, WorkerFinished
from paceline.trace import Trace, replay
from paceline.trace.measures import measure
from paceline.train.session import current
from paceline.train.training import how_to_distribute
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

BATCH = 6
INPUTS = 5
TIMEOUT_S = 30.0
MODELS: tuple[SyncModel, ...] = (BSP(), ASP(), SSP(staleness=3), ElasticBSP(lookahead=5))


class Net(nn.Module):
    """Odd sizes, so that slices of it cut through layers; a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, 23)
        self.outer = nn.Linear(23, 2)
        self.gain = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.inner(x))) * self.gain
        return out


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    """A factory whose models all start with the same weights, whichever thread calls it."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        template = make().to(dtype)
    return lambda: copy.deepcopy(template)


def batch(worker: int, iteration: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A worker's inputs for one iteration, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * worker + iteration)
    return torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - torch.stack([x.sum(1), x[:, 0]], 1)).square().mean()
    return loss


def weights_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def flat(state: State) -> torch.Tensor:
    return torch.cat([state[name].double().reshape(-1) for name in sorted(state)])


def relative_error(state: State, expected: State) -> float:
    """Over the whole parameter vector."""
    assert state.keys() == expected.keys()
    return float((flat(state) - flat(expected)).norm() / flat(expected).norm())


def assert_same(state: State, expected: State) -> None:
    """Bit by bit."""
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0, equal_nan=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-2)


def slow(model: nn.Module) -> torch.optim.Optimizer:
    """Stable whatever the staleness."""
    return torch.optim.SGD(model.parameters(), lr=0.005)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-2)


def training(
    make: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    steps: int | Sequence[int],
    *,
    backward: Callable[[nn.Module, int, int], None] | None = None,
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
) -> Callable[[], State]:
    """A training function for the workers of a run. `backward(model, worker, iteration)` fills in gradients."""
    backward = backward or plain_backward

    def train() -> State:
        model, worker = make(), worker_index()
        optimizer = DistributedOptimizer(make_optimizer(model), model=model)
        scheduler = schedule(optimizer) if schedule is not None else None
        for iteration in range(steps if isinstance(steps, int) else steps[worker]):
            optimizer.zero_grad()
            backward(model, worker, iteration)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return weights_of(model)

    return train


def plain_backward(model: nn.Module, worker: int, iteration: int) -> None:
    loss_of(model, batch(worker, iteration, next(model.parameters()).dtype)).backward()


def alone(
    make: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    steps: int,
    workers: int,
    *,
    backward: Callable[[nn.Module, int, int], None] | None = None,
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
) -> State:
    """One process without Paceline.

    It trains on the joint batch; or, with `backward`, on the mean of what that gives for each worker, where a
    parameter has no gradient if no worker has one for it.
    """
    model = make()
    optimizer = make_optimizer(model)
    scheduler = schedule(optimizer) if schedule is not None else None
    dtype = next(model.parameters()).dtype
    for iteration in range(steps):
        optimizer.zero_grad()
        if backward is None:
            joint = torch.cat([batch(worker, iteration, dtype) for worker in range(workers)])
            loss_of(model, joint).backward()
        else:
            means: dict[nn.Parameter, torch.Tensor] = {}
            for worker in range(workers):
                model.zero_grad()
                backward(model, worker, iteration)
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        means[parameter] = means.get(parameter, 0) + parameter.grad.detach() / workers
            for parameter in model.parameters():
                parameter.grad = means.get(parameter)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return weights_of(model)


def answers(trace: Trace) -> list[list[AnswerPull]]:
    """For each event of a trace, the pulls that it had answered."""
    return [[a for a in entry.actions if isinstance(a, AnswerPull)] for entry in trace.entries]


# -- BSP is one process on the joint batch ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "servers"),
    [("shm", 1), ("shm", 3), ("tcp", 2), *thorough(("shm", 2), ("tcp", 1), ("tcp", 3))],
)
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_bsp_equals_one_process_on_the_joint_batch(
    run_on_threads: RunOnThreads, make_optimizer: MakeOptimizer, transport: str, servers: int
) -> None:
    make = seeded(Net)
    run = run_on_threads(training(make, make_optimizer, 50), workers=4, servers=servers, transport=transport)
    expected = alone(make, make_optimizer, 50, workers=4)
    assert relative_error(run.state_dict, expected) <= 1e-12
    for weights in run.results.values():
        assert_same(weights, run.state_dict)  # type: ignore[arg-type]


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_bsp_equals_one_process_in_single_precision(
    run_on_threads: RunOnThreads, make_optimizer: MakeOptimizer
) -> None:
    make = seeded(Net, torch.float32)
    run = run_on_threads(training(make, make_optimizer, 50), workers=4, servers=2)
    assert relative_error(run.state_dict, alone(make, make_optimizer, 50, workers=4)) <= 2e-4


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_supported_optimizer_computes_on_slices_what_it_computes_on_whole_tensors(
    run_on_threads: RunOnThreads, name: str
) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        kind: Any = ELEMENTWISE[name]
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01)
        return optimizer

    make = seeded(Net)
    run = run_on_threads(training(make, make_optimizer, 10), workers=2, servers=2)
    assert relative_error(run.state_dict, alone(make, make_optimizer, 10, workers=2)) <= 1e-12


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda model: torch.optim.SGD(
            model.parameters(), lr=0.02, momentum=0.9, nesterov=True, maximize=True
        ),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, dampening=0.3),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, betas=(0.8, 0.95)),
        lambda model: torch.optim.Adam(
            model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), foreach=False
        ),
        lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1),
    ],
    ids=["nesterov-maximize", "dampening", "amsgrad", "tensor-lr", "centered", "accumulator"],
)
def test_every_hyper_parameter_of_an_optimizer_reaches_the_servers(
    run_on_threads: RunOnThreads, make_optimizer: MakeOptimizer
) -> None:
    make = seeded(Net)
    run = run_on_threads(training(make, make_optimizer, 8), workers=2, servers=3)
    assert relative_error(run.state_dict, alone(make, make_optimizer, 8, workers=2)) <= 1e-12


def test_groups_keep_their_own_hyper_parameters(run_on_threads: RunOnThreads) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Net)
        groups: list[dict[str, Any]] = [
            {"params": model.outer.parameters(), "lr": 0.03, "weight_decay": 0.0},
            {"params": [model.gain], "weight_decay": 0.5, "betas": (0.5, 0.9)},
            {"params": model.inner.parameters()},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    make = seeded(Net)
    run = run_on_threads(training(make, make_optimizer, 20), workers=3, servers=2)
    assert relative_error(run.state_dict, alone(make, make_optimizer, 20, workers=3)) <= 1e-12


def test_frozen_parameters_stay_as_they_are_in_spite_of_weight_decay(run_on_threads: RunOnThreads) -> None:
    def make_frozen() -> nn.Module:
        model = Net()
        model.inner.weight.requires_grad_(False)
        return model

    make = seeded(make_frozen)
    run = run_on_threads(training(make, sgd, 10), workers=2, servers=2)
    assert_same({"w": run.state_dict["inner.weight"]}, {"w": weights_of(make())["inner.weight"]})
    assert relative_error(run.state_dict, alone(make, sgd, 10, workers=2)) <= 1e-12


def test_parameters_outside_the_optimizer_come_back_unchanged(run_on_threads: RunOnThreads) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Net)
        return torch.optim.SGD(model.outer.parameters(), lr=0.1, weight_decay=0.1)

    make = seeded(Net)
    run = run_on_threads(training(make, make_optimizer, 10), workers=3, servers=2)
    assert_same({"w": run.state_dict["inner.weight"]}, {"w": weights_of(make())["inner.weight"]})
    assert relative_error(run.state_dict, alone(make, make_optimizer, 10, workers=3)) <= 1e-12


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_a_layer_can_be_frozen_and_thawed_during_training(
    run_on_threads: RunOnThreads, make_optimizer: MakeOptimizer
) -> None:
    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        assert isinstance(model, Net)
        model.inner.requires_grad_(iteration % 4 >= 2)
        plain_backward(model, worker, iteration)

    make = seeded(Net)
    run = run_on_threads(training(make, make_optimizer, 12, backward=backward), workers=2, servers=2)
    expected = alone(make, make_optimizer, 12, workers=2, backward=backward)
    assert relative_error(run.state_dict, expected) <= 1e-12


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_no_gradient_is_not_a_zero_gradient(
    run_on_threads: RunOnThreads, make_optimizer: MakeOptimizer
) -> None:
    """`gain` has a gradient in every third iteration only, `inner.bias` only on worker 1, in odd ones."""

    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        assert isinstance(model, Net)
        plain_backward(model, worker, iteration)
        if iteration % 3:
            model.gain.grad = None
        if worker != 1 or iteration % 2 == 0:
            model.inner.bias.grad = None

    make = seeded(Net)
    run = run_on_threads(training(make, make_optimizer, 12, backward=backward), workers=3, servers=2)
    expected = alone(make, make_optimizer, 12, workers=3, backward=backward)
    assert relative_error(run.state_dict, expected) <= 1e-12

    def zeros(model: nn.Module, worker: int, iteration: int) -> None:
        backward(model, worker, iteration)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    with_zeros = alone(make, make_optimizer, 12, workers=3, backward=zeros)
    assert relative_error(run.state_dict, with_zeros) > 1e-6


def test_zeroed_gradients_are_gradients(run_on_threads: RunOnThreads) -> None:
    """`zero_grad(set_to_none=False)`: momentum and weight decay go on without a backward pass."""

    def train() -> State:
        model = make()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(6):
            optimizer.zero_grad(set_to_none=False)
            if iteration % 2 == 0:
                plain_backward(model, worker_index(), iteration)
            optimizer.step()
        return weights_of(model)

    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        plain_backward(model, worker, iteration)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 - iteration % 2)

    make = seeded(Net)
    run = run_on_threads(train, workers=2, servers=2)
    assert relative_error(run.state_dict, alone(make, sgd, 6, workers=2, backward=backward)) <= 1e-12


class MixedNet(nn.Module):
    """Double and single precision, in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(INPUTS, 7).to(torch.float64)
        self.b = nn.Linear(7, 9).to(torch.float32)
        self.c = nn.Linear(9, 2).to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.b(torch.tanh(self.a(x)).float()).double())
        return out


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_parameters_of_several_dtypes_train_together(
    run_on_threads: RunOnThreads, make_optimizer: MakeOptimizer, transport: str
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        template = MixedNet()

    def make() -> nn.Module:
        return copy.deepcopy(template)

    run = run_on_threads(training(make, make_optimizer, 8), workers=2, servers=3, transport=transport)
    expected = alone(make, make_optimizer, 8, workers=2, backward=plain_backward)
    assert {name: t.dtype for name, t in run.state_dict.items()} == {n: t.dtype for n, t in expected.items()}
    assert relative_error(run.state_dict, expected) <= 2e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_trains_as_in_one_process(run_on_threads: RunOnThreads, dtype: torch.dtype) -> None:
    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    make = seeded(Net, dtype)
    run = run_on_threads(training(make, plain, 8), workers=2, servers=2)
    assert {tensor.dtype for tensor in run.state_dict.values()} == {dtype}
    assert relative_error(run.state_dict, alone(make, plain, 8, workers=2, backward=plain_backward)) <= 1e-2


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(INPUTS, INPUTS)
        self.decoder = nn.Linear(INPUTS, INPUTS)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(INPUTS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.decoder(torch.tanh(self.encoder(x))))
        return out


def test_tied_weights_come_back_under_each_of_their_names(run_on_threads: RunOnThreads) -> None:
    make = seeded(TiedNet)
    run = run_on_threads(training(make, adam, 10), workers=2, servers=2)
    assert torch.equal(run.state_dict["encoder.weight"], run.state_dict["decoder.weight"])
    assert relative_error(run.state_dict, alone(make, adam, 10, workers=2)) <= 1e-12
    model = make()
    model.load_state_dict(run.state_dict)
    blob = safetensors.torch.save(run.state_dict)  # refuses tensors that share memory
    assert_same(safetensors.torch.load(blob), run.state_dict)


def test_parameters_in_channels_last_order_keep_their_values(run_on_threads: RunOnThreads) -> None:
    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = x[:, :3, None, None].expand(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
            out: torch.Tensor = self.head(self.conv(image).mean((2, 3)))
            return out

    contiguous = seeded(ConvNet)

    def make() -> nn.Module:
        model = contiguous()
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    run = run_on_threads(training(make, sgd, 6), workers=2, servers=2)
    assert relative_error(run.state_dict, alone(make, sgd, 6, workers=2)) <= 1e-12


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_fewer_weights_than_servers_leave_some_servers_with_nothing(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    make = seeded(lambda: nn.Linear(INPUTS, 2, bias=False))
    run = run_on_threads(training(make, sgd, 5), workers=2, servers=4, transport=transport)
    assert relative_error(run.state_dict, alone(make, sgd, 5, workers=2)) <= 1e-12


@pytest.mark.parametrize("transport", ["tcp", *thorough("shm")])
def test_weights_larger_than_any_socket_buffer_arrive(run_on_threads: RunOnThreads, transport: str) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(INPUTS, 700_000)
            self.head = nn.Linear(1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.wide(x).mean(1, keepdim=True))
            return out

    make = seeded(Wide, torch.float32)
    run = run_on_threads(training(make, sgd, 2), workers=2, servers=2, transport=transport)
    assert relative_error(run.state_dict, alone(make, sgd, 2, workers=2)) <= 2e-4


def test_a_model_of_many_parameters_with_long_names_trains(run_on_threads: RunOnThreads) -> None:
    """Its description is larger than a socket's buffer."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            long = "gain" * 100
            self.gains = nn.ParameterDict({f"{long}{i}": nn.Parameter(torch.ones(2)) for i in range(1200)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :2] * torch.stack(list(self.gains.values())).mean(0)

    make = seeded(Many)
    run = run_on_threads(training(make, sgd, 2), workers=2, servers=2)
    assert relative_error(run.state_dict, alone(make, sgd, 2, workers=2)) <= 1e-12


# -- shards, slicing, overlap -----------------------------------------------------------------------------


class Broad(nn.Module):
    """Its gradient travels in several pieces, most of which are full."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, 512)
        self.middle = nn.Linear(512, 1024)
        self.outer = nn.Linear(1024, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.middle(torch.tanh(self.inner(x)))))
        return out


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have workers send early, as they do to servers on other machines; returns how many parameters' gradients
    they found ready."""
    monkeypatch.setattr(worker_module, "is_here", lambda address: False)
    ready: list[int] = []
    told = WorkerSession.gradient_ready

    def counting(session: WorkerSession, parameter: int) -> None:
        ready.append(parameter)
        told(session, parameter)

    monkeypatch.setattr(WorkerSession, "gradient_ready", counting)
    return ready


ARRANGED: dict[str, dict[str, Any]] = {
    "more shards than servers": {"servers": 2, "shards": 5},
    "by parameter": {"servers": 2, "slicing": "by-parameter"},
    "a shard for each parameter": {"servers": 2, "shards": 5, "slicing": "by-parameter"},
    "without overlap": {"servers": 2, "overlap": "off"},
    "all at once": {"servers": 2, "shards": 4, "slicing": "by-parameter", "overlap": "off"},
}


# Each arrangement over TCP, and one over each other transport.
CARRIED = [
    *((arranged, "tcp") for arranged in ARRANGED),
    *(("more shards than servers", "shm"), ("a shard for each parameter", "unix")),
]


@pytest.mark.parametrize(
    ("arranged", "transport"),
    [
        *CARRIED,
        *thorough(*(case for case in product(ARRANGED, ("shm", "unix", "tcp")) if case not in CARRIED)),
    ],
)
def test_bsp_equals_one_process_however_shards_are_cut_and_overlap(
    run_on_threads: RunOnThreads, remote: list[int], arranged: str, transport: str
) -> None:
    make = seeded(Net)
    run = run_on_threads(training(make, adam, 20), workers=3, transport=transport, **ARRANGED[arranged])
    assert relative_error(run.state_dict, alone(make, adam, 20, workers=3)) <= 1e-12
    for weights in run.results.values():
        assert_same(weights, run.state_dict)  # type: ignore[arg-type]
    assert len(run.shards) == ARRANGED[arranged].get("shards", 2)
    assert bool(remote) == (transport != "shm" and "overlap" not in ARRANGED[arranged])


IN_PIECES = [
    *(("more shards than servers", "tcp"), ("by parameter", "tcp")),
    *(("without overlap", "unix"), ("more shards than servers", "shm")),
]


@pytest.mark.parametrize(
    ("arranged", "transport"),
    [
        *IN_PIECES,
        *thorough(
            *(
                case
                for case in product(
                    ("more shards than servers", "by parameter", "without overlap"), ("shm", "unix", "tcp")
                )
                if case not in IN_PIECES
            )
        ),
    ],
)
def test_a_gradient_of_several_pieces_is_put_together(
    run_on_threads: RunOnThreads, remote: list[int], arranged: str, transport: str
) -> None:
    make = seeded(Broad)
    run = run_on_threads(training(make, sgd, 4), workers=2, transport=transport, **ARRANGED[arranged])
    assert relative_error(run.state_dict, alone(make, sgd, 4, workers=2)) <= 1e-12


@pytest.mark.parametrize("steps", [(7, 3, 5), (2, 0, 6)], ids=str)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_without_overlap_uneven_numbers_of_iterations_hang_nobody(
    run_on_threads: RunOnThreads, transport: str, steps: tuple[int, ...]
) -> None:
    run = run_on_threads(
        training(seeded(Net), slow, steps), workers=3, servers=2, transport=transport, overlap="off"
    )
    trained = {worker: count for worker, count in enumerate(steps) if count}
    assert all(measure([trace]).iterations == trained for trace in run.shards)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """Behind autograd's back: no version tells of changes."""
    return [parameter.grad.data for parameter in model.parameters() if parameter.grad is not None]


def clip(model: nn.Module) -> None:
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.75


def edit(change: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], None]:
    def all_of(model: nn.Module) -> None:
        for gradient in gradients_of(model):
            change(gradient)

    return all_of


def edit_one(model: nn.Module) -> None:
    """One element of the last layer, which was the first to leave."""
    gradients_of(model)[-1].view(-1)[0] += 0.25


GRADIENT_EDITS: dict[str, Callable[[nn.Module], None]] = {
    "clipped": clip,
    "replaced": replace,
    "one element": edit_one,
    "shifted": edit(lambda g: g.add_(0.001)),
    "scaled": edit(lambda g: g.mul_(0.3)),
    "halved": edit(lambda g: g.mul_(0.5)),
    "unscaled": edit(lambda g: g.div_(2.0**6)),
    "all signs": edit(lambda g: g.neg_()),
    "zeroed": edit(lambda g: g.zero_()),
}


# A function of torch, another tensor, the smallest change, one that keeps the norm, and a gradient of zeros.
EDITED = [
    *((what, "tcp") for what in ("clipped", "replaced", "one element", "all signs", "zeroed")),
    ("clipped", "unix"),
]


@pytest.mark.parametrize(
    ("what", "transport"),
    [*EDITED, *thorough(*(case for case in product(GRADIENT_EDITS, ("unix", "tcp")) if case not in EDITED))],
)
def test_gradients_that_are_changed_after_they_were_sent_count_as_they_are_at_the_step(
    run_on_threads: RunOnThreads, remote: list[int], what: str, transport: str
) -> None:
    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        plain_backward(model, worker, iteration)
        if iteration != 1:  # in some iterations only, so that they are sent early again
            GRADIENT_EDITS[what](model)

    make = seeded(Broad)
    training_run = training(make, sgd, 4, backward=backward)
    run = run_on_threads(training_run, workers=2, servers=2, transport=transport)
    assert remote
    assert relative_error(run.state_dict, alone(make, sgd, 4, workers=2, backward=backward)) <= 1e-12


def test_gradients_that_accumulate_after_they_were_sent_count_as_they_are_at_the_step(
    run_on_threads: RunOnThreads, remote: list[int]
) -> None:
    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        for part in batch(worker, iteration).chunk(2):
            (loss_of(model, part) / 2).backward()

    make = seeded(Broad)
    run = run_on_threads(training(make, sgd, 4, backward=backward), workers=2, servers=2, transport="tcp")
    assert remote
    assert relative_error(run.state_dict, alone(make, sgd, 4, workers=2)) <= 1e-12


@pytest.mark.parametrize("to_none", [True, False])
def test_a_backward_that_is_thrown_away_leaves_nothing_behind(
    run_on_threads: RunOnThreads, remote: list[int], to_none: bool
) -> None:
    """The first layers' gradients are computed twice and are the same; what is on its way is the first ones."""

    def train() -> State:
        model = make()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            optimizer.zero_grad()
            x = batch(worker_index(), iteration)
            model.middle(torch.tanh(model.inner(x))).sum().backward()
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, x).backward()
            optimizer.step()
        return weights_of(model)

    make: Any = seeded(Broad)
    run = run_on_threads(train, workers=2, servers=2, transport="tcp")
    assert remote
    assert relative_error(run.state_dict, alone(make, sgd, 3, workers=2)) <= 1e-12


class Long(nn.Module):
    """A vector of 32 MiB, more than any socket holds, and a few weights whose gradient is there before its own."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.zeros(4 << 20))
        self.few = nn.Parameter(torch.zeros(8))


@pytest.mark.parametrize("transport", ["tcp", *thorough("unix")])
def test_what_is_changed_and_changed_back_while_it_is_on_its_way_arrives(
    run_on_threads: RunOnThreads, remote: list[int], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """It leaves from where it lies: most of it while it is zero, and at the step it is what it was when it was
    sent. The server reads slowly."""
    take = StreamedInbox.take

    def slowly(inbox: StreamedInbox, pieces: Sequence[int], codec: str = "float32") -> None:
        time.sleep(0.01)
        take(inbox, pieces, codec)

    monkeypatch.setattr(StreamedInbox, "take", slowly)

    def train() -> None:
        model = Long().double()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        for _ in range(2):
            optimizer.zero_grad()
            model.long.sum().backward()
            optimizer.zero_grad(set_to_none=False)
            time.sleep(0.05)  # there is room for more to leave
            model.few.sum().backward()
            model.long.sum().backward()
            optimizer.step()

    run = run_on_threads(train, workers=1, servers=1, transport=transport)
    assert remote
    assert run.state_dict["few"].unique().tolist() == [-2.0]
    assert run.state_dict["long"].unique().tolist() == [-2.0]


# -- weights that are read where the servers keep them ----------------------------------------------------


def reads_in_place() -> bool:
    session = current()
    assert isinstance(session, WorkerSession)
    return session.memory is not None and session.memory.in_place


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_one_worker_trains_on_through_changes_of_the_sync_model(
    run_on_threads: RunOnThreads, make_optimizer: MakeOptimizer
) -> None:
    """Every step is that of the single process, wherever the weights are read."""

    def train() -> list[State]:
        model = make()
        optimizer = DistributedOptimizer(make_optimizer(model), model=model)
        states: list[State] = []
        for sync in ("", "asp", "bsp", "asp"):
            if sync:
                set_sync(sync)
            begun = len(states)
            # A change begins a few steps after it was requested.
            while len(states) < begun + 4 or reads_in_place() != (sync != "asp"):
                assert len(states) < begun + 1000, f"the model does not change to {sync}"
                optimizer.zero_grad()
                plain_backward(model, worker_index(), len(states))
                optimizer.step()
                states.append(weights_of(model))
        return states

    make = seeded(Net)
    run = run_on_threads(train, workers=1, servers=2, shards=3, transport="shm")
    states: list[State] = run.results[0]  # type: ignore[assignment]
    for steps, state in enumerate(states, 1):
        assert relative_error(state, alone(make, make_optimizer, steps, workers=1)) <= 1e-12
    assert_same(run.state_dict, states[-1])


Watched = tuple[nn.Module, State, set[bool]]
"""The model as it lives on, a copy of its weights at the end, and where they were read."""


def watched(
    make: Callable[[], nn.Module], steps: Sequence[int], changes: dict[int, str]
) -> Callable[[], Watched]:
    """Trains; fails if a parameter changes between two steps."""

    def train() -> Watched:
        model, worker = make(), worker_index()
        optimizer = DistributedOptimizer(slow(model), model=model)
        kept = weights_of(model)
        in_place: set[bool] = set()
        for iteration in range(steps[worker]):
            optimizer.zero_grad()
            plain_backward(model, worker, iteration)
            if (
                iteration == 0
            ):  # the first forward pass has pulled the first weights, which others may have changed
                kept = weights_of(model)
            time.sleep(0.0005 * (1 + worker))  # others go on meanwhile
            assert_same(weights_of(model), kept)
            if iteration in changes:
                set_sync(changes[iteration])
            optimizer.step()
            kept = weights_of(model)
            in_place.add(reads_in_place())
        return model, kept, in_place

    return train


@pytest.mark.parametrize(
    ("transport", "sync"),
    [
        *(("shm", "bsp"), ("shm", "asp"), ("tcp", "ssp:staleness=2")),
        *thorough(("shm", "ssp:staleness=2"), ("tcp", "bsp"), ("tcp", "asp")),
    ],
)
def test_nobodys_parameters_change_outside_a_step(
    run_on_threads: RunOnThreads, transport: str, sync: str
) -> None:
    train = watched(seeded(Net), (40, 40, 40), {})
    run = run_on_threads(train, workers=3, servers=2, shards=3, sync=sync, transport=transport)
    results: dict[int, Watched] = run.results  # type: ignore[assignment]
    for model, kept, in_place in results.values():
        assert_same(weights_of(model), kept)
        assert in_place == {transport == "shm" and sync == "bsp"}


@pytest.mark.parametrize(
    "changes",
    [{10: "asp", 25: "bsp"}, *thorough({10: "asp"}, {0: "asp", 20: "bsp", 30: "asp"})],
    ids=str,
)
def test_parameters_change_in_steps_only_through_changes_of_the_sync_model(
    run_on_threads: RunOnThreads, changes: dict[int, str]
) -> None:
    train = watched(seeded(Net), (40, 40, 40), changes)
    run = run_on_threads(train, workers=3, servers=2, shards=3, transport="shm")
    results: dict[int, Watched] = run.results  # type: ignore[assignment]
    for model, kept, in_place in results.values():
        assert_same(weights_of(model), kept)
        assert in_place == {True, False} or 0 in changes
    for trace in run.shards:
        assert measure([trace]).iterations == {0: 40, 1: 40, 2: 40}
    # At each shard, the worker whose push came last pulls the final weights. The last push may be of a
    # different worker at each shard, so no single worker needs to have all of them.
    for name, final in run.state_dict.items():
        held = torch.stack([weights_of(model)[name] == final for model, _, _ in results.values()])
        assert bool(held.any(dim=0).all())


@pytest.mark.parametrize("overlap", ["shards", "off"])
@pytest.mark.parametrize("steps", [(3, 12, 7), (12, 1, 12)], ids=str)
def test_a_worker_that_has_finished_keeps_its_last_weights_while_others_go_on(
    run_on_threads: RunOnThreads, steps: tuple[int, ...], overlap: str
) -> None:
    train = watched(seeded(Net), steps, {})
    run = run_on_threads(train, workers=3, servers=2, transport="shm", overlap=overlap)
    results: dict[int, Watched] = run.results  # type: ignore[assignment]
    for worker, (model, kept, in_place) in results.items():
        assert in_place == {True}
        assert_same(weights_of(model), kept)
        same = relative_error(kept, run.state_dict) == 0
        assert same == (steps[worker] == max(steps))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_weights_that_are_put_aside_for_a_while_and_put_back_are_trained_on(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    """Through .data, as scripts do to evaluate an average of the weights: what is there at the step is unchanged."""

    def train() -> State:
        model = make()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(6):
            optimizer.zero_grad()
            plain_backward(model, worker_index(), iteration)
            if iteration == 2 and worker_index() == 1:
                aside = [parameter.data.clone() for parameter in model.parameters()]
                for parameter in model.parameters():
                    parameter.data.zero_()
                for parameter, weights in zip(model.parameters(), aside, strict=True):
                    parameter.data.copy_(weights)
            optimizer.step()
        return weights_of(model)

    make = seeded(Net)
    run = run_on_threads(train, workers=2, servers=2, transport=transport)
    for weights in run.results.values():
        assert_same(weights, run.state_dict)  # type: ignore[arg-type]
    assert relative_error(run.state_dict, alone(make, sgd, 6, workers=2)) <= 1e-12


# -- what scripts do around a step ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=13),
        lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.001, 0.05, 3),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    ],
    ids=["step", "cosine", "one-cycle", "cyclic", "lambda"],
)
def test_a_learning_rate_scheduler_changes_what_the_servers_use(
    run_on_threads: RunOnThreads,
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> None:
    make = seeded(Net)
    run = run_on_threads(training(make, sgd, 12, schedule=schedule), workers=2, servers=2)
    expected = alone(make, sgd, 12, workers=2, schedule=schedule)
    assert relative_error(run.state_dict, expected) <= 1e-12
    assert relative_error(run.state_dict, alone(make, sgd, 12, workers=2)) > 1e-6


def test_a_learning_rate_that_numpy_computed_is_a_number(run_on_threads: RunOnThreads) -> None:
    np = pytest.importorskip("numpy")

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.9) ** step)

    make = seeded(Net)
    run = run_on_threads(training(make, sgd, 4, schedule=schedule), workers=2)
    assert relative_error(run.state_dict, alone(make, sgd, 4, workers=2, schedule=schedule)) <= 1e-12


def test_a_learning_rate_set_by_hand_is_the_next_steps(run_on_threads: RunOnThreads) -> None:
    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        plain_backward(model, worker, iteration)

    def train() -> State:
        model = make()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for iteration in range(4):
            optimizer.zero_grad()
            backward(model, worker_index(), iteration)
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if iteration else 0.05
            optimizer.step()
        return weights_of(model)

    make = seeded(Net)
    run = run_on_threads(train, workers=2)
    expected = alone(make, lambda model: torch.optim.SGD(model.parameters(), lr=0.05), 1, workers=2)
    assert relative_error(run.state_dict, expected) <= 1e-12


def test_each_workers_gradient_is_clipped_before_the_mean(run_on_threads: RunOnThreads) -> None:
    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        plain_backward(model, worker, iteration)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        nn.utils.clip_grad_value_(model.parameters(), 0.03)

    make = seeded(Net)
    run = run_on_threads(training(make, sgd, 10, backward=backward), workers=3, servers=2)
    assert relative_error(run.state_dict, alone(make, sgd, 10, workers=3, backward=backward)) <= 1e-12


def test_gradients_accumulate_over_several_backward_passes(run_on_threads: RunOnThreads) -> None:
    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        for part in batch(worker, iteration).chunk(3):
            (loss_of(model, part) / 3).backward()

    make = seeded(Net)
    run = run_on_threads(training(make, adam, 10, backward=backward), workers=2, servers=2)
    assert relative_error(run.state_dict, alone(make, adam, 10, workers=2)) <= 1e-12


def test_with_and_without_a_closure_are_the_same(run_on_threads: RunOnThreads) -> None:
    losses: list[float] = []

    def train() -> State:
        model = make()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(10):
            x = batch(worker_index(), iteration)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            returned: Any = optimizer.step(closure)
            if worker_index() == 0:
                losses.append(float(returned.detach()))
        return weights_of(model)

    make = seeded(Net)
    without = run_on_threads(training(make, sgd, 10), workers=2, servers=2)
    assert_same(run_on_threads(train, workers=2, servers=2).state_dict, without.state_dict)
    assert len(losses) == 10
    assert losses[0] == float(loss_of(make(), batch(0, 0)).detach())


def test_a_closure_computes_its_gradient_on_worker_0s_first_weights(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = make()
        if worker_index():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(worker_index())
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch(worker_index(), 0))
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    make = seeded(Net)
    run = run_on_threads(train, workers=3, servers=2)
    expected = alone(make, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 1, workers=3)
    assert relative_error(run.state_dict, expected) <= 1e-12


def make_own(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that has different initial weights in worker 1."""
    model = make()
    if worker_index() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    return model


def test_no_gradient_is_lost_if_workers_start_with_different_weights(run_on_threads: RunOnThreads) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    make = seeded(Net)
    run = run_on_threads(training(lambda: make_own(make), make_optimizer, 3), workers=2, servers=2)
    expected = alone(make, make_optimizer, 3, workers=2)
    assert relative_error(run.state_dict, expected) <= 1e-12
    assert measure(run.shards).dropped_pushes == 0


def test_a_gradient_computed_on_weights_that_were_replaced_is_not_used(run_on_threads: RunOnThreads) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def backward_of_copy(model: nn.Module, worker: int, iteration: int) -> None:
        """Compute gradients without a forward pass of the model that the optimizer trains."""
        twin = copy.deepcopy(model)
        plain_backward(twin, worker, iteration)
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = other.grad

    def backward(model: nn.Module, worker: int, iteration: int) -> None:
        """What is expected: in the first iteration worker 1 has nothing to say."""
        plain_backward(model, worker, iteration)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 if iteration else (2.0, 0.0)[worker])

    make = seeded(Net)
    train = training(lambda: make_own(make), make_optimizer, 3, backward=backward_of_copy)
    run = run_on_threads(train, workers=2, servers=2)
    expected = alone(make, make_optimizer, 3, workers=2, backward=backward)
    assert relative_error(run.state_dict, expected) <= 1e-12
    assert measure(run.shards).dropped_pushes == 2  # one for each shard


# -- BatchNorm ----------------------------------------------------------------------------------------------


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, 4)
        self.norm = nn.BatchNorm1d(4)
        self.outer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.norm(self.inner(x)))
        return out


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_running_statistics_are_pooled_over_the_workers(run_on_threads: RunOnThreads, transport: str) -> None:
    make = seeded(NormedNet)
    run = run_on_threads(training(make, sgd, [7, 7, 5]), workers=3, servers=2, transport=transport)
    own: list[State] = [run.results[worker] for worker in range(3)]  # type: ignore[misc]
    means = torch.stack([state["norm.running_mean"] for state in own])
    variances = torch.stack([state["norm.running_var"] for state in own])
    assert means.var(0).min() > 0
    torch.testing.assert_close(run.state_dict["norm.running_mean"], means.mean(0))
    torch.testing.assert_close(
        run.state_dict["norm.running_var"], variances.mean(0) + means.var(0, correction=0)
    )
    assert run.state_dict["norm.num_batches_tracked"] == 7
    make().load_state_dict(run.state_dict)


def test_a_worker_that_never_trained_has_no_part_in_the_running_statistics(
    run_on_threads: RunOnThreads,
) -> None:
    make = seeded(NormedNet)
    run = run_on_threads(training(make, sgd, [5, 0]), workers=2)
    own: State = run.results[0]  # type: ignore[assignment]
    torch.testing.assert_close(run.state_dict["norm.running_mean"], own["norm.running_mean"])
    torch.testing.assert_close(run.state_dict["norm.running_var"], own["norm.running_var"])


@pytest.mark.parametrize(
    "constant",
    [
        torch.full((2,), torch.finfo(torch.float64).min, dtype=torch.float64),
        torch.tensor([-math.inf, math.nan, 0.1], dtype=torch.float64),
        torch.rand(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        torch.tensor([1 + 2j, 0.1j], dtype=torch.complex128),
        torch.tensor([2**63 - 1, -5]),
        torch.tensor([True, False]),
        torch.tensor(3.5, dtype=torch.float16),
        torch.ones(3, dtype=torch.uint16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.empty(0, 4),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_a_buffer_that_nobody_changes_comes_back_bit_by_bit(
    run_on_threads: RunOnThreads, constant: torch.Tensor
) -> None:
    def make() -> nn.Module:
        model = normed()
        model.register_buffer("constant", constant.clone())
        return model

    normed = seeded(NormedNet)
    run = run_on_threads(training(make, sgd, 3), workers=7, servers=2)
    kept = run.state_dict["constant"]
    assert kept.dtype == constant.dtype
    assert kept.shape == constant.shape
    bits = kept.reshape(-1).view(torch.uint8), constant.reshape(-1).view(torch.uint8)
    assert torch.equal(*bits)


def test_a_buffer_that_changes_its_shape_is_an_error_of_the_script(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = make()
        model.register_buffer("seen", torch.zeros(1))
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            optimizer.zero_grad()
            plain_backward(model, 0, iteration)
            model.seen = torch.zeros(iteration + 1)
            optimizer.step()

    make = seeded(Net)
    run = run_on_threads(train, workers=1, keep_errors=True)
    assert "seen" in str(run.errors[0])


# -- the four sync models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", *thorough("tcp")])
@pytest.mark.parametrize(
    "sync", [BSP(), SSP(staleness=3), ElasticBSP(lookahead=5), *thorough(ASP())], ids=str
)
def test_a_live_trace_gives_identical_actions_when_replayed(
    run_on_threads: RunOnThreads, sync: SyncModel, transport: str
) -> None:
    make = seeded(Net)
    run = run_on_threads(
        training(make, slow, 40),
        workers=4,
        servers=2,
        sync=sync,
        transport=transport,
        pace=[0, 0, 0.001, 0.004],
    )
    assert [trace.header.sync for trace in run.traces] == [str(sync)] * 3
    for trace in run.traces:
        assert replay(trace) == []
    for trace in run.shards:
        pushes = measure([trace]).iterations
        assert pushes == dict.fromkeys(range(4), 40)
    if isinstance(sync, ElasticBSP):
        plans = [a for e in run.traces[-1].entries for a in e.actions if isinstance(a, PublishPlan)]
        means = [a for e in run.shards[0].entries for a in e.actions if isinstance(a, ApplyMean)]
        assert plans
        assert max(len(mean.pushes) for mean in means) > 1
        barriers = [
            [a for e in trace.entries for a in e.actions if isinstance(a, ApplyMean)] for trace in run.shards
        ]
        assert barriers[0] == barriers[1]  # no two shards disagree on a superstep


@pytest.mark.parametrize(
    "sync", [ASP(), ElasticBSP(lookahead=5), *thorough(BSP(), SSP(staleness=3))], ids=str
)
def test_every_model_learns(run_on_threads: RunOnThreads, sync: SyncModel) -> None:
    make = seeded(Net)
    run = run_on_threads(
        training(make, slow, 60),
        workers=3,
        servers=2,
        sync=sync,
    )
    trained = make()
    trained.load_state_dict(run.state_dict)
    judged = torch.cat([batch(worker, 1000) for worker in range(8)])
    assert loss_of(trained, judged) < 0.9 * loss_of(make(), judged)


def staggered(make: Callable[[], nn.Module], lead: int) -> Callable[[], None]:
    """Worker 0 takes its first step only when worker 1 has had `lead` pulls answered (or training is ASP's)."""
    ahead = threading.Semaphore(0)

    def train() -> None:
        model = make()
        optimizer = DistributedOptimizer(slow(model), model=model)
        for iteration in range(lead + 5):
            optimizer.zero_grad()
            plain_backward(model, worker_index(), iteration)
            if worker_index() == 0 and iteration == 1:
                for _ in range(lead + 1):
                    assert ahead.acquire(timeout=TIMEOUT_S)
            optimizer.step()
            if worker_index() == 1:
                ahead.release()

    return train


def test_under_ssp_nobody_starts_more_than_s_ahead_and_someone_starts_exactly_s_ahead(
    run_on_threads: RunOnThreads,
) -> None:
    """Worker 0 has pushed once; worker 1 gets its answers until it is 3 ahead, and then waits for worker 0."""
    run = run_on_threads(staggered(seeded(Net), lead=3), workers=2, servers=2, sync=SSP(staleness=3))
    figures = measure(run.shards)
    assert figures.max_gap == 3
    assert figures.iterations == {0: 8, 1: 8}


def test_under_ssp_with_infinite_staleness_no_pull_is_delayed(run_on_threads: RunOnThreads) -> None:
    sync = SSP(staleness=math.inf)
    run = run_on_threads(staggered(seeded(Net), lead=12), workers=2, servers=2, sync=sync)
    assert [trace.header.sync for trace in run.traces] == [str(sync)] * 3
    assert measure(run.shards).delayed_pulls == 0
    assert measure(run.shards).max_gap >= 12
    for trace in run.traces:
        assert replay(trace) == []


@pytest.mark.parametrize("recorded", [BSP(), SSP(staleness=0)], ids=str)
def test_ssp_with_staleness_0_waits_exactly_where_bsp_waits(
    run_on_threads: RunOnThreads, recorded: SyncModel
) -> None:
    """What one of the two was told in a live run, told to the other, has the same pulls answered at each event."""
    run = run_on_threads(
        training(seeded(Net), slow, [25, 20, 25]), workers=3, servers=2, sync=recorded, pace=[0, 0.001, 0]
    )
    other: SyncModel = SSP(staleness=0) if isinstance(recorded, BSP) else BSP()
    delayed = 0
    for trace in run.shards:
        machine: Any = other.at_shard()
        replayed = [[a for a in machine.handle(e.event) if isinstance(a, AnswerPull)] for e in trace.entries]
        assert replayed == answers(trace)
        delayed += sum(
            isinstance(entry.event, PullRequested) and not answered
            for entry, answered in zip(trace.entries, replayed, strict=True)
        )
    assert delayed > 0


@pytest.mark.parametrize("sync", MODELS, ids=str)
@pytest.mark.parametrize("steps", [(3, 40, 17, 0), (0, 0, 2, 9)], ids=str)
def test_a_worker_that_is_done_has_left(
    run_on_threads: RunOnThreads, sync: SyncModel, steps: tuple[int, ...]
) -> None:
    """Uneven numbers of iterations hang nobody; a worker need not train at all."""
    run = run_on_threads(training(seeded(Net), slow, steps), workers=4, servers=2, sync=sync)
    trained = {worker: count for worker, count in enumerate(steps) if count}
    for trace in run.shards:
        assert measure([trace]).iterations == trained
        left = {entry.event.worker for entry in trace.entries if isinstance(entry.event, WorkerFinished)}
        assert left == set(trained)
    for trace in run.traces:
        assert replay(trace) == []


def test_one_worker_trains_as_one_process_does(run_on_threads: RunOnThreads) -> None:
    make = seeded(Net)
    run = run_on_threads(training(make, adam, 10), workers=1, servers=2)
    assert relative_error(run.state_dict, alone(make, adam, 10, workers=1)) <= 1e-12


# -- saving and resuming ------------------------------------------------------------------------------------


def resumable(
    make: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    iterations: Iterable[int],
    weights: State | None = None,
    state: dict[str, Any] | None = None,
) -> Callable[[], tuple[State, dict[str, Any]]]:
    """Trains some iterations, from a saved state if there is one; returns what a script would save."""
    todo = list(iterations)

    def train() -> tuple[State, dict[str, Any]]:
        model = make()
        if weights is not None:
            model.load_state_dict(weights)
        optimizer = DistributedOptimizer(make_optimizer(model), model=model)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        for iteration in todo:
            optimizer.zero_grad()
            plain_backward(model, worker_index(), iteration)
            optimizer.step()
        return weights_of(model), optimizer.state_dict()

    return train


def assert_same_form(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """An optimizer's state_dict, as torch itself would have made it."""
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        assert state["state"][index].keys() == tensors.keys()
        for key, value in tensors.items():
            torch.testing.assert_close(state["state"][index][key], value)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd-momentum": sgd,
    "adam": adam,
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), t0=2),
}


@pytest.mark.parametrize(
    "name", ["sgd-momentum", "adam", "amsgrad", "rprop", *thorough("adagrad", "rmsprop", "asgd")]
)
def test_a_run_that_was_saved_and_resumed_equals_one_that_was_not_interrupted(
    run_on_threads: RunOnThreads, name: str
) -> None:
    """Resumed with another number of servers, as on another machine."""
    make, make_optimizer = seeded(Net), OPTIMIZERS[name]
    whole = run_on_threads(resumable(make, make_optimizer, range(8)), workers=2, servers=2)
    first = run_on_threads(resumable(make, make_optimizer, range(4)), workers=2, servers=2)
    saved: tuple[State, dict[str, Any]] = first.results[0]  # type: ignore[assignment]
    second = run_on_threads(resumable(make, make_optimizer, range(4, 8), *saved), workers=2, servers=3)
    assert_same(second.state_dict, whole.state_dict)

    model = make()
    optimizer = make_optimizer(model)
    for iteration in range(8):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(0, iteration), batch(1, iteration)])).backward()
        optimizer.step()
    fetched: tuple[State, dict[str, Any]] = second.results[0]  # type: ignore[assignment]
    assert_same_form(fetched[1], optimizer.state_dict())


def test_a_saved_run_goes_on_in_one_process_without_paceline(run_on_threads: RunOnThreads) -> None:
    make = seeded(Net)
    first = run_on_threads(resumable(make, adam, range(4)), workers=1, servers=2)
    saved: tuple[State, dict[str, Any]] = first.results[0]  # type: ignore[assignment]
    model = make()
    model.load_state_dict(saved[0])
    optimizer = adam(model)
    optimizer.load_state_dict(saved[1])
    for iteration in range(4, 8):
        optimizer.zero_grad()
        plain_backward(model, 0, iteration)
        optimizer.step()
    assert relative_error(weights_of(model), alone(make, adam, 8, workers=1)) <= 1e-12


def test_state_can_be_fetched_in_the_middle_of_a_run_by_any_worker(run_on_threads: RunOnThreads) -> None:
    """It is the state that belongs to the weights that this worker has."""

    def train() -> None:
        model = make()
        optimizer = DistributedOptimizer(adam(model), model=model)
        for iteration in range(6):
            optimizer.zero_grad()
            plain_backward(model, worker_index(), iteration)
            optimizer.step()
            if worker_index() == iteration % worker_count():
                saved[iteration] = weights_of(model), optimizer.state_dict()

    make = seeded(Net)
    saved: dict[int, tuple[State, dict[str, Any]]] = {}
    whole = run_on_threads(train, workers=2, servers=2)
    assert sorted(saved) == list(range(6))
    for iteration in (1, 4):
        resumed = run_on_threads(
            resumable(make, adam, range(iteration + 1, 6), *saved[iteration]), workers=2, servers=2
        )
        assert_same(resumed.state_dict, whole.state_dict)


def test_only_worker_0_needs_the_saved_state(run_on_threads: RunOnThreads) -> None:
    def train() -> State:
        mine = saved if worker_index() == 0 else (None, None)
        return resumable(make, sgd, range(4, 8), *mine)()[0]

    make = seeded(Net)
    whole = run_on_threads(resumable(make, sgd, range(8)), workers=2, servers=2)
    first = run_on_threads(resumable(make, sgd, range(4)), workers=2, servers=2)
    saved: tuple[State, dict[str, Any]] = first.results[0]  # type: ignore[assignment]
    run = run_on_threads(train, workers=2, servers=2)
    assert measure(run.shards).dropped_pushes == 0
    assert run.state_dict.keys() == whole.state_dict.keys()
    for weights in run.results.values():
        assert_same(weights, run.state_dict)  # type: ignore[arg-type]


# -- batches of unequal size ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD with momentum", "Adam"])
def test_bsp_with_uneven_batches_is_one_process_on_the_joint_batches(
    name: str, run_on_threads: RunOnThreads
) -> None:
    """The last joint batch of each epoch has 17 of 24 items, which three workers divide into 6, 6 and 5."""
    make: MakeOptimizer = {
        "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    }[name]
    inputs = torch.cat([batch(0, iteration) for iteration in range(11)])[:65]
    model_of = seeded(Net)
    sizes: dict[int, list[int]] = {}

    def train() -> None:
        model = model_of()
        optimizer = DistributedOptimizer(make(model), model=model)
        seen = sizes.setdefault(worker_index(), [])
        for _ in range(3):
            for (x,) in distribute(DataLoader(TensorDataset(inputs), batch_size=8)):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                seen.append(len(x))

    run = run_on_threads(train, workers=3, servers=2, sync="bsp")
    assert sizes == {0: [8, 8, 6] * 3, 1: [8, 8, 6] * 3, 2: [8, 8, 5] * 3}
    alone = model_of()
    optimizer = make(alone)
    for _ in range(3):
        for joint in inputs.split(24):
            optimizer.zero_grad()
            loss_of(alone, joint).backward()
            optimizer.step()
    torch.testing.assert_close(flat(run.state_dict), flat(weights_of(alone)), rtol=0, atol=1e-12)


def test_asp_scales_a_push_of_a_small_batch_with_sgd_only(run_on_threads: RunOnThreads) -> None:
    """A batch of 2 after one of 8 moves the weights by a quarter of its gradient's step."""
    inputs = torch.cat([batch(0, 0), batch(0, 1)])[:10]
    model_of = seeded(Net)

    def train(make: MakeOptimizer) -> Callable[[], None]:
        def run() -> None:
            model = model_of()
            optimizer = DistributedOptimizer(make(model), model=model)
            for (x,) in distribute(DataLoader(TensorDataset(inputs), batch_size=8)):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

        return run

    makes: list[tuple[MakeOptimizer, float]] = [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.05), 0.25),
        (lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05), 1.0),
    ]
    for make, scale in makes:
        run = run_on_threads(train(make), workers=1, sync="asp", hyperparameters="raw")
        alone = model_of()
        optimizer = make(alone)
        for x, factor in zip(inputs.split(8), (1.0, scale), strict=True):
            optimizer.zero_grad()
            (loss_of(alone, x) * factor).backward()
            optimizer.step()
        torch.testing.assert_close(flat(run.state_dict), flat(weights_of(alone)), rtol=0, atol=1e-12)


def test_under_asp_every_sample_of_an_epoch_is_used_once(run_on_threads: RunOnThreads) -> None:
    seen: dict[int, list[list[int]]] = {}

    def train() -> None:
        model = nn.Linear(1, 1).double()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
        mine = seen.setdefault(worker_index(), [])
        for _ in range(3):
            mine.append([])
            for (x,) in distribute(DataLoader(TensorDataset(torch.arange(103.0).double()), batch_size=4)):
                time.sleep(0.001 * (1 + 3 * (worker_index() == 2)))
                optimizer.zero_grad()
                model(x[:, None]).mean().backward()
                optimizer.step()
                mine[-1] += x.int().tolist()

    run_on_threads(train, workers=3, sync="asp")
    for epoch in range(3):
        together = [item for worker in seen.values() for item in worker[epoch]]
        assert sorted(together) == list(range(103))
    drawn = {worker: sum(map(len, epochs)) for worker, epochs in seen.items()}
    assert drawn[2] < max(drawn[0], drawn[1])  # on a busy machine, another one may be slow, too


def test_the_script_may_say_how_many_samples_a_step_has(run_on_threads: RunOnThreads) -> None:
    """Worker 0 has a mean over 3 tokens and worker 1 a mean over 1: the result is the mean over all 4."""
    model_of = seeded(Net)
    parts = {0: batch(0, 0)[:3], 1: batch(1, 0)[:1]}

    def train() -> None:
        model = model_of()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        part = parts[worker_index()]
        loss_of(model, part).backward()
        optimizer.step(samples=len(part))

    run = run_on_threads(train, workers=2, sync="bsp")
    alone = model_of()
    loss_of(alone, torch.cat([parts[0], parts[1]])).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    torch.testing.assert_close(flat(run.state_dict), flat(weights_of(alone)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("samples", [0, -4, 2.5, True])
def test_a_number_of_samples_that_makes_no_sense_is_refused(samples: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=f"samples is {samples!r}, expected a positive integer"):
        optimizer.step(samples=samples)


@pytest.mark.parametrize(
    ("modules", "remedy"),
    [
        (["accelerate.optimizer", "transformers.trainer"], "distribute(trainer)"),
        (["lightning.fabric.wrappers", "lightning.pytorch.loops.fit_loop"], 'Trainer(strategy="paceline")'),
        (["lightning_fabric.wrappers"], 'Fabric(strategy="paceline")'),
        (["accelerate.optimizer", "__main__"], "prepare(..., train=loader)"),
        (["__main__"], "paceline.prepare(model, optimizer, loader)"),
    ],
)
def test_the_remedy_for_a_step_follows_from_the_modules_on_the_stack(modules: list[str], remedy: str) -> None:
    """The modules call each other, the last one first."""
    call: Any = lambda: how_to_distribute(sys._getframe())  # noqa: E731
    for name in modules:
        space: dict[str, Any] = {"__name__": name, "inner": call}
        exec("def call():\n    return inner()", space)
        call = space["call"]
    assert remedy in call()
