"""Scripts whose way to a step is not the usual one, against the same computation in one process.

Every script here works alone. In a run, some of them change weights between two steps and put them back, such as SAM,
some compute gradients of gradients, and some have buffers that get their shape in the first forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedOptimizer, worker_index
from paceline.errors import ConfigurationError, UsageError, WeightsChangedError
from paceline.shard.vectors import digest, digest_of, encode_states
from paceline.train.data import EpochOrder
from paceline.train.generator_states import generators_lock
from paceline.train.job_model import Buffers, JointModel
from paceline.train.weights import WATCHED_PULLS
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
Compute = Callable[[nn.Module, torch.Tensor], None]
"""Computes the gradients of a model on a batch, in place of `zero_grad()` and `backward()`."""

STEPS = 4
WORKERS = 2


def network(width: int = 8) -> nn.Sequential:
    with generators_lock:  # another worker's thread may be making its model
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1)).double()


def batch(worker: int, iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * worker + iteration)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def alone(model: nn.Module, compute: Compute) -> State:
    """Train in one process, with the mean of what the workers' batches give in each step."""
    optimizer = sgd(model)
    for iteration in range(STEPS):
        found = []
        for worker in range(WORKERS):
            optimizer.zero_grad()
            compute(model, batch(worker, iteration))
            found.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = torch.stack([each.detach() for each in gradients]).mean(0)
        optimizer.step()
    return model.state_dict()


def in_a_run(make: Callable[[], nn.Module], compute: Compute, *, closure: bool = False) -> Callable[[], None]:
    """A training function for each worker of a run."""
    template = make()

    def train() -> None:
        model = copy.deepcopy(template)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(STEPS):
            x = batch(worker_index(), iteration)

            def computed(x: torch.Tensor = x) -> float:
                optimizer.zero_grad()
                compute(model, x)
                return 0.0

            if closure:
                optimizer.step(computed)
            else:
                computed()
                optimizer.step()

    return train


def assert_close(found: State, expected: State, tolerance: float = 1e-12) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


# -- gradients of gradients -----------------------------------------------------------------------------------


def graph_only(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward(create_graph=True)


def penalty(model: nn.Module, x: torch.Tensor) -> None:
    """Add the squared norm of the gradient to the loss, through `.grad`."""
    loss_of(model, x).backward(create_graph=True)
    (0.1 * sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)).backward()  # type: ignore[union-attr]


def accumulated_graphs(model: nn.Module, x: torch.Tensor) -> None:
    for part in x.split(3):
        loss_of(model, part).backward(create_graph=True)


def hessian_vector(model: nn.Module, x: torch.Tensor) -> None:
    """Replace each gradient by a step of it along the Hessian."""
    loss_of(model, x).backward(create_graph=True)
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    products = torch.autograd.grad(gradients, parameters, [g.detach() for g in gradients if g is not None])  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter, product in zip(parameters, products, strict=True):
            assert parameter.grad is not None
            parameter.grad = parameter.grad.detach() - 0.01 * product


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("compute", [graph_only, penalty, accumulated_graphs, hessian_vector])
@pytest.mark.parametrize("closure", [False, True])
def test_gradients_with_a_graph_are_those_of_one_process(
    run_on_threads: RunOnThreads, compute: Compute, closure: bool
) -> None:
    run = run_on_threads(in_a_run(network, compute, closure=closure), workers=WORKERS)
    assert_close(run.state_dict, alone(network(), compute))


# -- weights that are changed and restored before the step ------------------------------------------------------

RADIUS = 0.05


def gradients_at(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Compute the gradients anew, and return how far sharpness-aware minimization climbs along them."""
    model.zero_grad()
    plain(model, x)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (RADIUS / norm) for gradient in gradients]


@torch.no_grad()
def copied_back(model: nn.Module, x: torch.Tensor) -> None:
    with torch.enable_grad():
        climb = gradients_at(model, x)
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter, step in zip(model.parameters(), climb, strict=True):
        parameter.add_(step)
    with torch.enable_grad():
        gradients_at(model, x)
    for parameter, value in zip(model.parameters(), before, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def subtracted(model: nn.Module, x: torch.Tensor) -> None:
    with torch.enable_grad():
        climb = gradients_at(model, x)
    for parameter, step in zip(model.parameters(), climb, strict=True):
        parameter.add_(step)
    with torch.enable_grad():
        gradients_at(model, x)
    for parameter, step in zip(model.parameters(), climb, strict=True):
        parameter.sub_(step)


def subtracted_through_data(model: nn.Module, x: torch.Tensor) -> None:
    climb = gradients_at(model, x)
    for parameter, step in zip(model.parameters(), climb, strict=True):
        parameter.data.add_(step)
    gradients_at(model, x)
    for parameter, step in zip(model.parameters(), climb, strict=True):
        parameter.data.sub_(step)


def put_back(model: nn.Module, x: torch.Tensor) -> None:
    climb = gradients_at(model, x)
    before = [parameter.data.clone() for parameter in model.parameters()]
    for parameter, step in zip(model.parameters(), climb, strict=True):
        parameter.data.add_(step)
    gradients_at(model, x)
    for parameter, value in zip(model.parameters(), before, strict=True):
        parameter.data = value


def adversarial(model: nn.Module, x: torch.Tensor) -> None:
    """Add the gradient at other weights to that at these weights."""
    model.zero_grad()
    plain(model, x)
    [*_, last] = model.parameters()
    before = last.data.clone()
    last.data.add_(0.3)
    plain(model, x)
    last.data = before


@pytest.mark.parametrize(
    ("width", "sync", "transport"),
    [
        *((8, "bsp", "shm"), (3000, "bsp", "tcp"), (8, "asp", "shm")),
        *thorough((3000, "bsp", "shm"), (8, "bsp", "tcp"), (3000, "asp", "shm")),
    ],
)
@pytest.mark.parametrize("compute", [copied_back, subtracted, subtracted_through_data, put_back, adversarial])
def test_weights_that_are_restored_before_the_step_are_no_edit(
    run_on_threads: RunOnThreads, compute: Compute, width: int, sync: str, transport: str
) -> None:
    """Each worker pushes exactly the gradient of its second pass, and its batch counts once."""

    def make() -> nn.Module:
        return network(width)

    workers = WORKERS if sync == "bsp" else 1
    run = run_on_threads(in_a_run(make, compute), workers=workers, sync=sync, transport=transport)
    expected = alone(make(), compute) if sync == "bsp" else trained(make(), compute)
    assert_close(run.state_dict, expected)
    assert not run.faults


def decay_in_place(model: nn.Module, x: torch.Tensor) -> None:
    plain(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-9)


def decay_through_data(model: nn.Module, x: torch.Tensor) -> None:
    plain(model, x)
    for parameter in model.parameters():
        parameter.data.mul_(1 - 1e-9)


def climb_and_stay(model: nn.Module, x: torch.Tensor) -> None:
    copied_back(model, x)
    with torch.no_grad():
        [*_, last] = model.parameters()
        last.add_(1e-9)


@pytest.mark.parametrize(("sync", "transport"), [("bsp", "shm"), ("asp", "tcp")])
@pytest.mark.parametrize("width", [8, 3000])
@pytest.mark.parametrize("compute", [decay_in_place, decay_through_data, climb_and_stay])
def test_an_edit_between_the_gradient_and_the_step_is_refused_however_small(
    run_on_threads: RunOnThreads, compute: Compute, width: int, sync: str, transport: str
) -> None:
    train = in_a_run(lambda: network(width), compute)
    run = run_on_threads(train, workers=1, sync=sync, transport=transport, keep_errors=True)
    error = run.errors[0]
    assert isinstance(error, WeightsChangedError)
    assert "editing(private=True)" in str(error)


def noisy(optimizer: DistributedOptimizer | None, model: nn.Module, x: torch.Tensor) -> None:
    """Compute the gradient at weights with noise, from the first step on."""
    noise = [torch.full_like(parameter, 0.1) for parameter in model.parameters()]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.zero_grad()
    with optimizer.editing(private=True) if optimizer is not None else nullcontext():
        for parameter, each in zip(model.parameters(), noise, strict=True):
            parameter.data.add_(each)
        plain(model, x)
        if optimizer is None:
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.data.copy_(value)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_training_does_not_begin_with_the_weights_of_a_private_edit(
    run_on_threads: RunOnThreads, sync: str
) -> None:
    def train() -> None:
        model = network()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(STEPS):
            noisy(optimizer, model, batch(worker_index(), iteration))
            optimizer.step()

    run = run_on_threads(train, workers=WORKERS if sync == "bsp" else 1, sync=sync)
    if sync == "bsp":
        assert_close(run.state_dict, alone(network(), lambda model, x: noisy(None, model, x)))
    else:
        assert_close(run.state_dict, trained(network(), lambda model, x: noisy(None, model, x)))


def private(optimizer: DistributedOptimizer, model: nn.Module, x: torch.Tensor) -> None:
    """Climb late, so that nothing but the block restores the weights."""
    climb = gradients_at(model, x)
    with optimizer.editing(private=True):
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), climb, strict=True):
                parameter.add_(step)
        gradients_at(model, x)


@pytest.mark.parametrize(("sync", "transport"), [("bsp", "shm"), ("asp", "tcp"), (None, "")])
@pytest.mark.parametrize("width", [8, 3000])
def test_a_private_edit_ends_with_its_block(
    run_on_threads: RunOnThreads, width: int, sync: str | None, transport: str
) -> None:
    def train() -> State:
        model = network(width)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(WATCHED_PULLS + 3):
            if iteration < WATCHED_PULLS + 1:
                model.zero_grad()
                plain(model, batch(0, iteration))
            else:
                private(optimizer, model, batch(0, iteration))
            optimizer.step()
        return model.state_dict()

    model = network(width)
    optimizer = sgd(model)
    for iteration in range(WATCHED_PULLS + 3):
        model.zero_grad()
        (plain if iteration < WATCHED_PULLS + 1 else copied_back)(model, batch(0, iteration))
        optimizer.step()
    found = (
        train()
        if sync is None
        else run_on_threads(train, workers=1, sync=sync, transport=transport).state_dict
    )
    assert_close(found, model.state_dict())


def test_inside_a_private_edit_no_step_and_no_call_of_all_workers_is_made(
    run_on_threads: RunOnThreads,
) -> None:
    def train() -> None:
        model = network()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        plain(model, batch(0, 0))
        optimizer.step()
        for call in (optimizer.step, paceline.barrier, lambda: optimizer.editing().__enter__()):
            with (
                pytest.raises(UsageError, match=r"inside `with optimizer\.editing\(private=True\):`"),
                optimizer.editing(private=True),
            ):
                call()
        optimizer.step()

    run_on_threads(train, workers=1)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_two_passes_over_a_batch_are_one_iteration(run_on_threads: RunOnThreads, sync: str) -> None:
    def train() -> None:
        loader = DataLoader(TensorDataset(torch.randn(24, 5, dtype=torch.float64)), batch_size=4)
        model = network()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for (x,) in paceline.distribute(loader):
            copied_back(model, x)
            optimizer.step()

    run = run_on_threads(train, workers=2, sync=sync)
    [counts] = run.samples.values()
    assert (counts.used, counts.torn, counts.returned) == (24, 0, 0)


# -- buffers that get their shape in the first forward pass ----------------------------------------------------


class Observed(nn.Module):
    """Scales by the largest input, with buffers that grow in place, as observers for quantization do."""

    largest: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("largest", torch.empty(0, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.detach().abs().amax(0)
        if self.largest.numel() == 0:
            self.largest.resize_(largest.shape).copy_(largest)
        else:
            self.largest.copy_(torch.maximum(self.largest, largest))
        self.scale.resize_(largest.shape).copy_(self.largest)
        out: torch.Tensor = self.inner(x / self.scale)
        return out


def plain(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("sync", ["bsp", "spec-sync"])
def test_buffers_may_get_their_shape_in_the_first_forward_pass(
    run_on_threads: RunOnThreads, sync: str, closure: bool
) -> None:
    run = run_on_threads(in_a_run(Observed, plain, closure=closure), workers=WORKERS, sync=sync)
    if sync == "bsp":
        models = [Observed() for _ in range(WORKERS)]
        optimizers = [sgd(model) for model in models]
        for iteration in range(STEPS):
            for worker, model in enumerate(models):
                plain(model, batch(worker, iteration))
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_close(run.state_dict, dict(models[0].named_parameters()))
    assert run.state_dict["largest"].shape == run.state_dict["scale"].shape == (5,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("workers", [1, 2])
def test_quantization_aware_training_is_that_of_one_process(
    run_on_threads: RunOnThreads, workers: int
) -> None:
    def make() -> nn.Module:
        with generators_lock:
            torch.manual_seed(3)
            layers = [quantization.QuantStub(), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)]
        model = nn.Sequential(*layers, quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        prepared: nn.Module = quantization.prepare_qat(model)
        return prepared

    def compute(model: nn.Module, x: torch.Tensor) -> None:
        loss_of(model, x.float()).backward()

    run = run_on_threads(in_a_run(make, compute), workers=workers)
    assert run.state_dict["1.weight_fake_quant.scale"].shape == (8,), "one for each channel"
    if workers == 1:
        assert_close(run.state_dict, trained(make(), compute), 0)


def trained(model: nn.Module, compute: Compute) -> State:
    optimizer = sgd(model)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        compute(model, batch(0, iteration))
        optimizer.step()
    return model.state_dict()


def test_a_buffer_that_grows_later_is_refused_with_advice(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = Observed()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(2):
            plain(model, batch(0, iteration))
            optimizer.step()
        model.scale.resize_(40).fill_(1)
        with pytest.raises(
            UsageError, match=r"^Buffer 'scale' was .*\[5\] .* now .*\[40\].*persistent=False"
        ):
            optimizer.step()

    run_on_threads(train, workers=1)


@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: digest([tensor]),
        lambda tensor: digest_of(tensor),
        lambda tensor: b"".join(encode_states({"ema": {"weights": tensor}})),
        lambda tensor: EpochOrder(lambda: [tensor], 1, 1).digest(),
        lambda tensor: buffers_with(tensor).changed(),
        lambda tensor: (buffers := buffers_with(tensor)).values(buffers.specs),
    ],
    ids=["norms", "frozen", "states", "order", "changed buffers", "all buffers"],
)
def test_what_looks_at_a_tensor_of_the_script_lets_it_grow(look: Callable[[torch.Tensor], object]) -> None:
    for size in (4, 100_000):
        tensor = torch.ones(size, dtype=torch.float64)
        seen = look(tensor)
        tensor.resize_(2 * size)
        del seen


def buffers_with(tensor: torch.Tensor) -> Buffers:
    model = nn.Module()
    model.register_buffer("grows", tensor)
    return Buffers(JointModel([model]), [])


# -- parameters and buffers that are replaced, added and removed during training -----------------------------------


def assign(model: nn.Sequential) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def new_head(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 1).double()


def convert(model: nn.Sequential) -> None:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


@pytest.mark.parametrize("clears", ["optimizer", "model", "nothing"])
@pytest.mark.parametrize(
    ("replace", "named"),
    [
        (assign, r"4 .*: '0\.weight', '0\.bias', '2\.weight', \.\.\."),
        (new_head, r"2 .*: '2\.weight', '2\.bias'"),
    ],
)
def test_a_parameter_that_was_replaced_is_named(
    run_on_threads: RunOnThreads, replace: Callable[[nn.Sequential], None], named: str, clears: str
) -> None:
    def train() -> None:
        model = network()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            plain(model, batch(0, iteration))
            optimizer.step()
        if clears != "nothing":
            optimizer.zero_grad() if clears == "optimizer" else model.zero_grad()
        replace(model)
        plain(model, batch(0, 4))
        with pytest.raises(UsageError, match=rf"^The optimizer holds {named}"):
            optimizer.step()

    run_on_threads(train, workers=1)


def test_a_conversion_that_replaces_parameters_is_named(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = network()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        plain(model, batch(0, 0))
        optimizer.step()
        convert(model)
        plain(model, batch(0, 1))
        with pytest.raises(
            UsageError, match=r"^The optimizer holds 4 parameters that the model no longer has"
        ):
            optimizer.step()

    run_on_threads(train, workers=1)


@pytest.mark.parametrize("anew", [False, True])
def test_a_part_that_was_removed_is_no_mistake(run_on_threads: RunOnThreads, *, anew: bool) -> None:
    """With a new optimizer or without. The saved weights contain the last content of the part."""

    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = network()
            self.extra: nn.Sequential | None = nn.Sequential(network(), nn.BatchNorm1d(1).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.main(x)
            return out if self.extra is None else out + self.extra(x)

    def train() -> None:
        model = Extra()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(6):
            if iteration == 2:
                removed.update(copy.deepcopy(model.state_dict()))
                model.extra = None
                if anew:
                    new_head(model.main)
                    optimizer = DistributedOptimizer(sgd(model), model=model)
            optimizer.zero_grad()
            plain(model, batch(worker_index(), iteration))
            optimizer.step()
        kept.update(model.state_dict())

    removed: State = {}
    kept: State = {}
    run = run_on_threads(train, workers=2)
    assert not run.faults
    assert list(run.state_dict) == list(removed)
    for name, tensor in run.state_dict.items():
        if name in kept or ".running_" not in name:  # each worker has statistics of its own
            assert torch.equal(tensor, {**removed, **kept}[name])


@pytest.mark.parametrize("replace", [assign, new_head])
def test_a_new_optimizer_trains_what_was_replaced(
    run_on_threads: RunOnThreads, replace: Callable[[nn.Sequential], None]
) -> None:
    def train() -> None:
        model = network()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(6):
            if iteration == 4:
                replace(model)
                optimizer = DistributedOptimizer(sgd(model), model=model)
            optimizer.zero_grad()
            plain(model, batch(worker_index(), iteration))
            optimizer.step()
        for name, tensor in model.state_dict().items():
            trained_by[worker_index(), name] = tensor

    trained_by: dict[tuple[int, str], torch.Tensor] = {}
    run = run_on_threads(train, workers=2)
    for (_, name), tensor in trained_by.items():
        assert torch.equal(tensor, run.state_dict[name])


def test_a_replacement_before_training_is_named(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = network()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        new_head(model)
        with pytest.raises(ConfigurationError, match=r"parameter 2, .* create the optimizer after that"):
            plain(model, batch(0, 0))
        del optimizer

    run_on_threads(train, workers=1)


def test_a_buffer_that_is_added_during_training_is_said_to_be_missing(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = network()
        model.register_buffer("early", torch.zeros(1))
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(4):
            plain(model, batch(0, iteration))
            optimizer.step()
            if iteration == 2:
                del model.early
                model.register_buffer("late", torch.zeros(1))

    run = run_on_threads(train, workers=1)
    [fault] = run.faults
    assert fault.startswith("worker 0: Buffer 'late' was added to the model after training had begun.")
    assert run.state_dict.keys() == {"0.weight", "0.bias", "2.weight", "2.bias", "early"}
