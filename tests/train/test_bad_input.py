"""Odd models, and scripts that change them in mid-run: they work as in one process, or are refused by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, launch, worker_index
from paceline.errors import ConfigurationError, UsageError, WeightsChangedError
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]

WORKERS = 2
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A factory whose models all start with the same weights, whichever thread calls it."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        template = make()
    return lambda: copy.deepcopy(template)


def inputs(worker: int, iteration: int) -> torch.Tensor:
    """(6, 4), double precision."""
    generator = torch.Generator().manual_seed(1000 * worker + iteration)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)


def weights_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def training(
    make: Callable[[], nn.Module], steps: int, change: Callable[[nn.Module, int], None] | None = None
) -> Callable[[], State]:
    """A training function. `change(model, iteration)` comes before an iteration's forward pass."""

    def train() -> State:
        model = make()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(steps):
            if change is not None:
                change(model, iteration)
            optimizer.zero_grad()
            model(inputs(worker_index(), iteration)).square().mean().backward()
            optimizer.step()
        return weights_of(model)

    return train


def alone(make: Callable[[], nn.Module], steps: int) -> State:
    """One process without Paceline: the mean of what each worker's batch gives."""
    model = make()
    optimizer = sgd(model)
    for iteration in range(steps):
        optimizer.zero_grad()
        for worker in range(WORKERS):
            (model(inputs(worker, iteration)).square().mean() / WORKERS).backward()
        optimizer.step()
    return weights_of(model)


def assert_close(state: State, expected: State, tolerance: float) -> None:
    """Over the whole parameter vector."""
    assert {n: (t.shape, t.dtype) for n, t in state.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.items()
    }
    ours, theirs = (torch.cat([s[n].double().reshape(-1) for n in sorted(s)]) for s in (state, expected))
    assert float((ours - theirs).norm() / theirs.norm()) <= tolerance


# -- shapes that change -----------------------------------------------------------------------------------


class Affine(nn.Module):
    """Broadcasts its gain: a gain of another shape computes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.gain


def to_one(model: nn.Module) -> None:
    model.gain.data = torch.ones(1, dtype=torch.float64)


def to_more(model: nn.Module) -> None:
    model.gain.data = torch.ones(6, 4, dtype=torch.float64)


def to_its_first(model: nn.Module) -> None:
    model.gain.data = model.gain.data[:1]  # type: ignore[index]  # where it was: only the shape tells


def to_transposed(model: nn.Module) -> None:
    model.weight.data = model.weight.data.t()  # type: ignore[operator]  # nor even that


@TRANSPORTS
@pytest.mark.parametrize(
    ("reshape", "message"),
    [
        (to_one, "Parameter 'gain' was changed from shape [4] to [1] outside step()"),
        (to_more, "Parameter 'gain' was changed from shape [4] to [6, 4] outside step()"),
        (to_its_first, "Parameter 'gain' was changed from shape [4] to [1] outside step()"),
        (to_transposed, "Parameter 'weight' was moved or replaced"),
    ],
)
def test_a_parameter_that_changes_its_shape_is_an_error_that_names_it(
    run_on_threads: RunOnThreads, reshape: Callable[[nn.Module], None], message: str, transport: str
) -> None:
    make = seeded(Affine)

    def change(model: nn.Module, iteration: int) -> None:
        if iteration == 3:
            reshape(model)

    run = run_on_threads(training(make, 6, change), servers=2, transport=transport, keep_errors=True)
    assert sorted(run.errors) == [0, 1]
    for error in run.errors.values():
        assert isinstance(error, WeightsChangedError), error
        assert message in str(error)


def test_a_shape_that_changes_without_a_gradient_is_noticed_too(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = Affine()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        to_its_first(model)
        with pytest.raises(WeightsChangedError, match=r"'gain' was changed from shape \[4\] to \[1\]"):
            optimizer.step()

    run_on_threads(train, workers=1)


# -- parameters that come and go --------------------------------------------------------------------------


def add_to_a_group(model: nn.Module, wrapped: torch.optim.Optimizer) -> None:
    wrapped.param_groups[0]["params"].append(model.get_parameter("late"))


def add_behind(model: nn.Module, wrapped: torch.optim.Optimizer) -> None:
    wrapped.add_param_group({"params": [model.get_parameter("late")]})


def take_out(model: nn.Module, wrapped: torch.optim.Optimizer) -> None:
    wrapped.param_groups[0]["params"].pop()


def exchange(model: nn.Module, wrapped: torch.optim.Optimizer) -> None:
    wrapped.param_groups[0]["params"][0] = model.get_parameter("late")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_behind, "groups have changed since training began: 'late' was added at index 2"),
        (add_to_a_group, "groups have changed since training began: 'late' was added at index 2"),
        (take_out, "groups have changed since training began: 'gain' was removed at index 1"),
        (exchange, "groups have changed since training began: 'late' was added at index 0"),
    ],
)
@pytest.mark.parametrize("transport", ["shm", *thorough("tcp")])
def test_a_change_of_the_groups_after_the_start_is_an_error_that_names_it(
    run_on_threads: RunOnThreads, change: Any, message: str, transport: str
) -> None:
    def train() -> None:
        model = Affine()
        wrapped = sgd(model)
        optimizer = DistributedOptimizer(wrapped, model=model)
        model(inputs(0, 0)).square().mean().backward()
        optimizer.step()
        model.register_parameter("late", nn.Parameter(torch.ones(5)))
        optimizer.zero_grad()
        model(inputs(0, 1)).square().mean().backward()
        change(model, wrapped)
        with pytest.raises(UsageError) as caught:
            optimizer.step()
        assert message in str(caught.value)

    run_on_threads(train, workers=1, servers=2, transport=transport)


# -- parameters of every kind -----------------------------------------------------------------------------


class Strided(nn.Module):
    """A transposed matrix, every other column of one, and rows that share their memory are all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t())
        self.slices = nn.Parameter(torch.randn(6, 10, dtype=torch.float64)[:, ::2])
        self.flipped = nn.Parameter(torch.randn(3, 5, 2, dtype=torch.float64).permute(2, 1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,oit->bot", torch.tanh(x @ self.transposed) @ self.slices, self.flipped)


class Image(nn.Module):
    """Weights in channels_last order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1, dtype=torch.float64)
        self.head = nn.Conv2d(5, 2, 2, dtype=torch.float64)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :2, None, None].expand(-1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = self.head(torch.tanh(self.conv(image)))
        return out


class Tied(nn.Module):
    """One matrix under three names, twice as it is and once transposed by the code; strided too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.first.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64).t())
        self.second = nn.Linear(4, 4, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.third = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x))) @ self.third.t()
        return out


@TRANSPORTS
@pytest.mark.parametrize("kind", [Strided, Image, Tied])
def test_parameters_that_are_not_contiguous_train_as_in_one_process(
    run_on_threads: RunOnThreads, kind: type[nn.Module], transport: str
) -> None:
    make = seeded(kind)
    if kind is not Tied:
        assert not all(parameter.is_contiguous() for parameter in make().parameters())
    run = run_on_threads(training(make, 12), workers=WORKERS, servers=3, transport=transport)
    expected = alone(make, 12)
    assert_close(run.state_dict, expected, 1e-12)
    for weights in run.results.values():
        assert_close(weights, expected, 1e-12)  # type: ignore[arg-type]


class Mixed(nn.Module):
    """Three dtypes, in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 7, dtype=torch.bfloat16)
        self.b = nn.Linear(7, 9, dtype=torch.float64)
        self.c = nn.Linear(9, 5, dtype=torch.float32)
        self.d = nn.Linear(5, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


@TRANSPORTS
def test_parameters_of_three_dtypes_lie_in_one_vector_each_and_train(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    make = seeded(Mixed)
    vectors: dict[str, int] = {}

    def train() -> State:
        model = make()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(8):
            optimizer.zero_grad()
            model(inputs(worker_index(), iteration)).square().mean().backward()
            optimizer.step()
        assert optimizer._session is not None
        vectors.update((dtype, vector.numel()) for dtype, vector in optimizer._session.weights.items())
        return weights_of(model)

    run = run_on_threads(train, workers=WORKERS, servers=2, transport=transport)
    # 28 + 7 + 15 + 3, 63 + 9 and 45 + 5 elements, each parameter in whole blocks of 64 bytes
    assert vectors == {"bfloat16": 4 * 32, "float64": 64 + 16, "float32": 48 + 16}
    expected = alone(make, 8)
    assert_close(run.state_dict, expected, 1e-2)
    start = weights_of(make())
    assert all(not torch.equal(run.state_dict[name], start[name]) for name in start)


# -- nothing to train -------------------------------------------------------------------------------------


@TRANSPORTS
def test_a_model_without_parameters_is_refused_before_anything_trains(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    def train() -> None:
        model = nn.Module()
        model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        optimizer.step()

    run = run_on_threads(train, workers=2, servers=2, transport=transport, keep_errors=True)
    assert sorted(run.errors) == [0, 1]
    for error in run.errors.values():
        assert isinstance(error, ConfigurationError)
        assert str(error) == "The optimizer has no parameters to train."
    assert not run.shards


# -- sparse gradients -------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """Two tables, one of them looked up with sparse gradients in each iteration."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 3, sparse=sparse, dtype=torch.float64)
        self.places = nn.Embedding(9, 3, sparse=sparse, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = x[:, 0].abs().mul(3).long()
        out: torch.Tensor = self.words(indices) * self.places(indices.clamp(max=8))
        return out


@TRANSPORTS
def test_sparse_gradients_train_as_dense_ones_and_are_mentioned_once_by_each_worker(
    run_on_threads: RunOnThreads, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    sparse, dense = (seeded(lambda sparse=sparse: Lookup(sparse)) for sparse in (True, False))  # type: ignore[misc]
    with caplog.at_level(logging.WARNING, logger="paceline.train.gradients"):
        run = run_on_threads(training(sparse, 6), workers=WORKERS, servers=2, transport=transport)
    assert_close(run.state_dict, alone(dense, 6), 1e-12)
    said = [record.getMessage() for record in caplog.records if record.name == "paceline.train.gradients"]
    assert len(said) == WORKERS
    for words in said:
        assert words.startswith("the gradient of ")
        assert "'words.weight' is sparse" in words or "'places.weight' is sparse" in words
        assert "sparse=False" in words


def test_dense_gradients_are_not_mentioned(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline.train.gradients"):
        run_on_threads(training(seeded(lambda: Lookup(sparse=False)), 3), workers=1)
    assert not [record for record in caplog.records if record.name == "paceline.train.gradients"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"jitter": 0.2}, "jitter is 0.2, but it has no effect without pace or slowdown"),
        (
            {"jitter": 0.2, "pace": [], "slowdown": []},
            "jitter is 0.2, but it has no effect without pace or slowdown",
        ),
        ({"port": 4242}, "port is 4242 and transport is 'auto', but only 'tcp' uses a port"),
        ({"port": 4242, "transport": "shm"}, "port is 4242 and transport is 'shm'"),
    ],
    ids=str,
)
def test_what_would_do_nothing_is_refused_before_anything_starts(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        launch(print, workers=2, run_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_channels_last_survives(run_on_threads: RunOnThreads) -> None:
    """The parameters become contiguous, but the activations keep the format of the inputs."""

    def train() -> bool:
        model = Image()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            optimizer.zero_grad()
            model(inputs(worker_index(), iteration)).square().mean().backward()
            optimizer.step()
        image = torch.ones(2, 2, 4, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = model.conv(image)
        return out.is_contiguous(memory_format=torch.channels_last)

    assert run_on_threads(train, workers=2).results == {0: True, 1: True}


# -- modules that would compute something else in a run ---------------------------------------------------


def with_sync_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3)).to(torch.float64)


def with_mask(*, persistent: bool = True) -> nn.Module:
    model = nn.Linear(4, 3, dtype=torch.float64)
    model.register_buffer("mask", torch.eye(3).to_sparse(), persistent=persistent)
    return model


def test_a_sparse_buffer_that_is_not_persistent_is_not_exchanged(run_on_threads: RunOnThreads) -> None:
    run_on_threads(training(partial(with_mask, persistent=False), 2), workers=2)


class Looked(nn.Module):
    """A model of an embedding whose forward pass edits its weights."""

    def __init__(self, kind: type[nn.Embedding | nn.EmbeddingBag]) -> None:
        super().__init__()
        self.table = kind(4, 3, max_norm=0.5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(x.abs().long().clamp(max=3))
        return out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_mask, r"Buffer 'mask' has the layout torch\.sparse_coo, expected .* persistent=False"),
        (with_sync_batch_norm, r"Module '1' is a SyncBatchNorm, which needs accelerators .* Use BatchNorm"),
        (lambda: Looked(nn.Embedding), r"Module 'table' has max_norm=0\.5.*`with optimizer\.editing\(\)"),
        (lambda: Looked(nn.EmbeddingBag), r"Module 'table' has max_norm=0\.5.*`with optimizer\.editing\(\)"),
    ],
)
def test_modules_that_would_differ_in_a_run_are_refused_by_name(
    run_on_threads: RunOnThreads, make: Callable[[], nn.Module], message: str
) -> None:
    train = training(make, 1)
    train()  # outside a run, nothing is refused
    with pytest.raises(ConfigurationError, match=message):
        run_on_threads(train, workers=1)
