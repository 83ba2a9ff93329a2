"""Scripts with `torch.amp.GradScaler` and `torch.autocast`, against one process that sees all of the data."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedOptimizer, worker_count, worker_index
from paceline.errors import RunFailedError, UsageError
from paceline.run import worker as worker_module
from paceline.run.worker import WorkerSession
from paceline.sim import Cluster, Presence, SimResult, simulate
from paceline.trace.measures import measure
from paceline.train.gradients import SCALE, UNSCALE, UPDATE, unwatch_scalers, watch_scalers
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
Fitted = tuple[State, list[float], list[float]]
"""The weights after training, the scale after each step, and the norms of the gradients."""

INPUTS, ROWS, STEPS = 5, 12, 8
LARGE = 1e35  # multiplies a loss whose scaled gradients then overflow, but not those that are not scaled


class Net(nn.Module):
    """Its gradient is sent over streams in several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, 512)
        self.middle = nn.Linear(512, 512)
        self.outer = nn.Linear(512, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.middle(torch.tanh(self.inner(x)))))
        return out


def made_once() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


FIRST = made_once()


def rows(iteration: int) -> torch.Tensor:
    """The joint batch."""
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(iteration))


def own_rows(iteration: int) -> torch.Tensor:
    return rows(iteration)[worker_index() :: worker_count()]


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def scaler_of(**options: Any) -> GradScaler:
    """A scaler whose scale changes in each other step."""
    return GradScaler("cpu", **{"init_scale": 2.0**12, "growth_interval": 2, **options})


def fit(
    optimizer_of: Callable[[nn.Module], Any],
    *,
    parts: int = 1,
    scales: bool = True,
    unscales: bool = False,
    max_norm: float | None = None,
    clips_first: bool = False,
    overflowing: Callable[[int], bool] = lambda iteration: False,
) -> Fitted:
    """Train with a scaler."""
    model = copy.deepcopy(FIRST)
    optimizer, scaler = optimizer_of(model), scaler_of(enabled=scales)
    scales_seen, norms = [], []

    def clip() -> None:
        if isinstance(optimizer, DistributedOptimizer):
            norms.append(float(optimizer.clip_grad_norm(max_norm or math.inf)))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)))

    for iteration in range(STEPS):
        optimizer.zero_grad()
        for part in own_rows(iteration).chunk(parts):
            loss = loss_of(model, part) / parts
            scaler.scale(loss * LARGE if overflowing(iteration) else loss).backward()
        if max_norm is not None and clips_first:
            clip()
        if unscales:
            scaler.unscale_(optimizer)
        if max_norm is not None and not clips_first:
            clip()
        scaler.step(optimizer)
        scaler.update()
        scales_seen.append(scaler.get_scale())
    return weights_of(model), scales_seen, norms


def fit_in_run(**options: Any) -> Fitted:
    return fit(lambda model: DistributedOptimizer(sgd(model), model=model), **options)


def weights_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_close(state: State, expected: State, rtol: float = 1e-6) -> None:
    """Compare the whole vectors of parameters."""
    assert state.keys() == expected.keys()
    off, norm = (
        float(sum((each.double().square().sum() for each in values), torch.tensor(0.0)).sqrt())
        for values in ([state[name] - expected[name] for name in expected], expected.values())
    )
    assert off <= rtol * norm


@pytest.fixture
def watched() -> Iterator[None]:
    """As in a worker's process."""
    watch_scalers()
    yield
    unwatch_scalers()


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let workers send gradients early, as to servers on other machines. Return those that were found ready."""
    monkeypatch.setattr(worker_module, "is_here", lambda address: False)
    found: list[int] = []
    told = WorkerSession.gradient_ready

    def counting(session: WorkerSession, parameter: int) -> None:
        found.append(parameter)
        told(session, parameter)

    monkeypatch.setattr(WorkerSession, "gradient_ready", counting)
    return found


def simulated(train: Callable[[], object], sync: str = "bsp", **options: Any) -> SimResult:
    return simulate(Cluster(compute_s=[1.0, 1.3], latency_s=0.01), sync, train_fn=train, **options)


def state_of(result: SimResult) -> State:
    assert result.state_dict is not None
    return dict(result.state_dict)


# -- under bsp, a run is one process on the joint batch --------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "step": {},
    "unscale": {"unscales": True},
    "accumulate": {"parts": 2},
    "accumulate and unscale": {"parts": 3, "unscales": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_simulated_run_equals_one_process_with_a_scaler(way: str) -> None:
    expected, scales, _ = fit(sgd, **WAYS[way])
    seen: list[Any] = []
    result = simulated(lambda: seen.append(fit_in_run(**WAYS[way])))
    assert len(set(scales)) > STEPS // 2
    assert len(seen) == 2
    for weights, own_scales, _ in seen:
        assert_close(weights, expected)
        assert own_scales == scales
    assert_close(state_of(result), expected)


LIVE_WAYS = [
    ("step", "shm"),
    ("unscale", "tcp"),
    ("accumulate", "unix"),
    ("accumulate and unscale", "tcp"),
]


@pytest.mark.parametrize(
    ("way", "transport"),
    [
        *LIVE_WAYS,
        *thorough(
            *(case for case in itertools.product(WAYS, ["shm", "unix", "tcp"]) if case not in LIVE_WAYS)
        ),
    ],
)
def test_a_run_on_threads_equals_one_process_with_a_scaler(
    run_on_threads: RunOnThreads, ready: list[int], watched: None, way: str, transport: str
) -> None:
    expected, scales, _ = fit(sgd, **WAYS[way])
    run = run_on_threads(lambda: fit_in_run(**WAYS[way]), servers=2, transport=transport)
    assert not ready  # scaled gradients would have to be sent again
    assert_close(run.state_dict, expected)
    for result in run.results.values():
        weights, own_scales, _ = cast(Fitted, result)
        assert_close(weights, expected)
        assert own_scales == scales


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_were_sent_while_they_were_scaled_are_sent_again(
    run_on_threads: RunOnThreads, ready: list[int], way: str
) -> None:
    """A scaler that has its own `scale` is not noticed before the step."""
    expected, _, _ = fit(sgd, **WAYS[way])
    run = run_on_threads(lambda: fit_in_run(**WAYS[way]), servers=2, transport="tcp")
    assert ready
    assert_close(run.state_dict, expected)


def test_scales_may_differ_between_workers() -> None:
    def train() -> None:
        model = copy.deepcopy(FIRST)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        scaler = scaler_of(init_scale=2.0 ** (4 + 8 * worker_index()))
        for iteration in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, own_rows(iteration))).backward()
            scaler.step(optimizer)
            scaler.update()

    assert_close(state_of(simulated(train)), fit(sgd)[0])


@pytest.mark.parametrize("sync", ["asp", "ssp:staleness=1", "spec-sync"])
def test_other_models_train_with_a_scaler(sync: str) -> None:
    result = simulated(fit_in_run, sync)
    assert set(result.measures.iterations.values()) == {STEPS}
    model = copy.deepcopy(FIRST)
    before = loss_of(model, rows(0))
    model.load_state_dict(state_of(result))
    assert loss_of(model, rows(0)) < before


# -- what looks at gradients sees them unscaled ----------------------------------------------------------------


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_clipping_equals_one_process(unscales: bool, parts: int) -> None:
    expected, _, norms = fit(sgd, max_norm=0.5, unscales=True, parts=parts)
    assert min(norms) > 1.0  # so clipping matters
    plain: dict[int, Any] = {}
    simulated(lambda: plain.setdefault(worker_index(), fit_in_run(max_norm=0.5, parts=parts, scales=False)))
    seen: dict[int, Any] = {}
    simulated(
        lambda: seen.setdefault(worker_index(), fit_in_run(max_norm=0.5, unscales=unscales, parts=parts))
    )
    for worker, (weights, _, own_norms) in seen.items():
        assert_close(weights, expected)
        assert own_norms == pytest.approx(plain[worker][2], rel=1e-5)


def test_clipping_before_the_gradient_is_unscaled_is_the_same() -> None:
    expected, _, _ = fit(sgd, max_norm=0.5, unscales=True)
    result = simulated(lambda: fit_in_run(max_norm=0.5, unscales=True, clips_first=True))
    assert_close(state_of(result), expected)


@pytest.mark.parametrize("unscales", [True, False])
def test_under_asp_each_gradient_is_clipped_by_its_own_norm(unscales: bool) -> None:
    result = simulate(
        Cluster(compute_s=[1.0]), "asp", train_fn=lambda: fit_in_run(max_norm=0.5, unscales=unscales)
    )
    assert_close(state_of(result), fit(sgd, max_norm=0.5, unscales=True)[0])


@pytest.mark.parametrize("clips_first", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
def test_clipping_equals_one_process_with_a_scaler_that_is_not_noticed(
    run_on_threads: RunOnThreads, unscales: bool, clips_first: bool
) -> None:
    run = run_on_threads(
        lambda: fit_in_run(max_norm=0.5, unscales=unscales, clips_first=clips_first), workers=1, sync="asp"
    )
    assert_close(run.state_dict, fit(sgd, max_norm=0.5, unscales=True)[0])


@pytest.mark.parametrize("unscales", [True, False])
def test_elements_are_clamped_as_if_they_were_not_scaled(unscales: bool) -> None:
    def train() -> None:
        model = copy.deepcopy(FIRST)
        optimizer, scaler = DistributedOptimizer(sgd(model), model=model), scaler_of()
        scaler.scale(loss_of(model, rows(0))).backward()
        if unscales:
            scaler.unscale_(optimizer)
        optimizer.clip_grad_value(0.01)
        scaler.step(optimizer)
        scaler.update()

    model = copy.deepcopy(FIRST)
    optimizer = sgd(model)
    loss_of(model, rows(0)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    assert_close(state_of(simulated(train)), weights_of(model))


def test_two_optimizers_share_a_scaler() -> None:
    def fit_both(wrap: Callable[[nn.Module], Any], seen: list[State]) -> None:
        models = nn.ModuleList([copy.deepcopy(FIRST), copy.deepcopy(FIRST)])
        optimizers = [wrap(model) for model in models]
        scaler = scaler_of()
        for iteration in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                target = models[0](own_rows(iteration)) if model is models[1] else None
                loss = loss_of(model, own_rows(iteration))
                if target is not None:
                    loss = loss + (model(own_rows(iteration)) - target.detach()).square().mean()
                scaler.scale(loss).backward()
            scaler.unscale_(optimizers[1])  # only the second
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        seen.append(weights_of(models))

    expected: list[State] = []
    fit_both(sgd, expected)
    seen: list[State] = []
    simulated(lambda: fit_both(lambda model: DistributedOptimizer(sgd(model), model=model), seen))
    assert len(seen) == 2
    for weights in seen:
        assert_close(weights, expected[0])


def test_the_ratio_of_the_norms_is_that_of_the_unscaled_gradient() -> None:
    """On this ratio depends whether dynamic PSSP lets a worker wait."""
    scaled = simulated(fit_in_run, "dynamic-pssp:staleness=1", seed=3)

    def plain() -> None:
        model = copy.deepcopy(FIRST)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, own_rows(iteration)).backward()
            optimizer.step()

    assert_close(state_of(scaled), state_of(simulated(plain, "dynamic-pssp:staleness=1", seed=3)))


# -- overflows -------------------------------------------------------------------------------------------------


def skipping(iterations: dict[int, list[int]], unscales: bool = False) -> Callable[[], Any]:
    """A training function in which the gradients of some workers overflow in some iterations."""
    return lambda: fit_in_run(
        overflowing=lambda iteration: worker_index() in iterations.get(iteration, ()), unscales=unscales
    )


def skipped(iterations: dict[int, list[int]]) -> State:
    """One process that uses only the gradients that do not overflow."""
    model = copy.deepcopy(FIRST)
    optimizer = sgd(model)
    for iteration in range(STEPS):
        used = [worker for worker in range(2) if worker not in iterations.get(iteration, ())]
        if not used:
            continue
        optimizer.zero_grad()
        for worker in used:
            (loss_of(model, rows(iteration)[worker::2]) / len(used)).backward()
        optimizer.step()
    return weights_of(model)


OVERFLOWS = {0: [1], 3: [0], 5: [0, 1]}


def scales_of(worker: int) -> list[float]:
    """The scales after each step, halved by an overflow and doubled by two steps without."""
    scales, scale, good = [], 2.0**12, 0
    for iteration in range(STEPS):
        good = 0 if worker in OVERFLOWS.get(iteration, ()) else good + 1
        scale *= {0: 0.5, 1: 1.0, 2: 2.0}[good]
        good %= 2
        scales.append(scale)
    return scales


@pytest.mark.parametrize("unscales", [True, False])
def test_gradients_that_overflow_are_left_out(unscales: bool) -> None:
    seen: dict[int, Any] = {}
    result = simulated(lambda: seen.setdefault(worker_index(), skipping(OVERFLOWS, unscales)()))
    expected = skipped(OVERFLOWS)
    assert_close(state_of(result), expected)
    for worker, (weights, scales, _) in seen.items():
        assert_close(weights, expected)
        assert scales == scales_of(worker)
    assert result.measures.iterations == {0: STEPS, 1: STEPS}
    assert (result.measures.updates, result.measures.dropped_pushes) == (STEPS - 1, 4)


@pytest.mark.parametrize(
    ("transport", "sends_early", "unscales"),
    [
        ("shm", False, True),
        ("tcp", True, True),
        ("tcp", True, False),
        *thorough(
            ("shm", False, False),
            ("shm", True, True),
            ("shm", True, False),
            ("tcp", False, True),
            ("tcp", False, False),
        ),
    ],
)
def test_nobody_waits_for_gradients_that_overflow(
    run_on_threads: RunOnThreads, ready: list[int], transport: str, sends_early: bool, unscales: bool
) -> None:
    if not sends_early:
        watch_scalers()
    try:
        run = run_on_threads(skipping(OVERFLOWS, unscales), transport=transport)
    finally:
        unwatch_scalers()
    assert bool(ready) == (sends_early and transport == "tcp")
    assert not run.faults
    expected, seen = skipped(OVERFLOWS), measure(run.shards)
    assert_close(run.state_dict, expected)
    for worker, result in run.results.items():
        weights, scales, _ = cast(Fitted, result)
        assert_close(weights, expected)
        assert scales == scales_of(worker)
    assert seen.iterations == {0: STEPS, 1: STEPS}
    assert (seen.updates, seen.dropped_pushes) == (STEPS - 1, 4)


@pytest.mark.parametrize(
    "sync", ["bsp", "asp", "ssp:staleness=1", "elastic-bsp:lookahead=3", "rennala:batch=2"]
)
def test_under_every_model_an_overflow_is_progress(sync: str) -> None:
    seen = simulated(skipping(OVERFLOWS), sync).measures
    assert seen.iterations == {0: STEPS, 1: STEPS}


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_an_overflow_is_no_error_but_nan_after_it_was_unscaled_is(on_nan: str) -> None:
    def train(broken: bool) -> None:
        model = copy.deepcopy(FIRST)
        optimizer, scaler = DistributedOptimizer(sgd(model), model=model), scaler_of()
        for iteration in range(3):
            optimizer.zero_grad()
            scaler.scale(
                loss_of(model, own_rows(iteration)) * (math.nan if iteration == 1 else 1.0)
            ).backward()
            if broken and iteration == 2:
                scaler.unscale_(optimizer)
                assert model.outer.bias.grad is not None
                model.outer.bias.grad.fill_(math.nan)
            scaler.step(optimizer)
            scaler.update()

    assert simulated(lambda: train(False), on_nan=on_nan).measures.dropped_pushes == 2
    if on_nan == "skip":
        assert simulated(lambda: train(True), on_nan=on_nan).measures.dropped_pushes == 4
    else:
        with pytest.raises(RunFailedError, match=r"NonFiniteGradientError: .* 'outer\.bias' contains NaN"):
            simulated(lambda: train(True), on_nan=on_nan)


def test_a_worker_whose_gradients_always_overflow_says_so_once() -> None:
    def train(lost: int) -> None:
        model = nn.Linear(INPUTS, 1)
        optimizer, scaler = DistributedOptimizer(sgd(model), model=model), scaler_of()
        for iteration in range(100):
            optimizer.zero_grad()
            is_lost = worker_index() == 1 and iteration % 40 >= 40 - lost
            scaler.scale(loss_of(model, own_rows(iteration)) * (math.nan if is_lost else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert simulated(lambda: train(31)).faults == []
    [fault] = simulated(lambda: train(32)).faults
    assert fault.startswith("worker 1: the gradients have overflowed in 32 steps in a row")


def test_a_batch_whose_gradients_overflow_is_used_up_as_in_one_process(run_on_threads: RunOnThreads) -> None:
    drawn: list[int] = []

    def train() -> None:
        model = copy.deepcopy(FIRST)
        optimizer, scaler = DistributedOptimizer(sgd(model), model=model), scaler_of()
        data = TensorDataset(torch.arange(24), torch.cat([rows(0), rows(1)]))
        for numbers, x in paceline.distribute(DataLoader(data, batch_size=3)):
            drawn.extend(numbers.tolist())
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x) * (LARGE if 0 in numbers else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    run = run_on_threads(train)
    assert sorted(drawn) == list(range(24))
    [counts] = run.samples.values()
    assert (counts.used, counts.total) == (24, 24)
    assert measure(run.shards).dropped_pushes == 1


@pytest.mark.processes
def test_a_run_on_processes_waits_for_no_overflow(mark: str, tmp_path: Path) -> None:
    result = paceline.launch(skipping(OVERFLOWS), workers=2, servers=1, sync="bsp", run_dir=tmp_path / "run")
    assert_close(result.state_dict, skipped(OVERFLOWS))
    assert result.summary["iterations"] == {"0": STEPS, "1": STEPS}
    assert_close(load_file(tmp_path / "run" / "weights.safetensors"), result.state_dict)


# -- the calls of a scaler -------------------------------------------------------------------------------------


def test_a_closure_is_refused_in_one_sentence() -> None:
    def train() -> None:
        model = copy.deepcopy(FIRST)
        optimizer, scaler = DistributedOptimizer(sgd(model), model=model), scaler_of()
        scaler.scale(loss_of(model, rows(0))).backward()
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, closure=lambda: None)  # torch itself
        with pytest.raises(UsageError, match=r"before the closure runs\. Compute the gradients first"):
            scaler.step(optimizer, lambda: None)

    simulated(train)


def test_a_disabled_scaler_changes_nothing() -> None:
    def train(scaler: GradScaler | None) -> None:
        model = copy.deepcopy(FIRST)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, own_rows(iteration))
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()

    with_scaler = simulated(lambda: train(scaler_of(enabled=False)))
    without = simulated(lambda: train(None))
    assert_close(state_of(with_scaler), state_of(without), rtol=0.0)
    assert with_scaler.history["loss"].guessed  # it scales no loss


def test_nothing_is_guessed_of_a_scaled_loss() -> None:
    assert simulated(fit_in_run).history == {}


def test_samples_may_be_passed_to_the_step() -> None:
    def train() -> None:
        model = copy.deepcopy(FIRST)
        optimizer, scaler = DistributedOptimizer(sgd(model), model=model), scaler_of()
        x = rows(0)[: 2 + 6 * worker_index()]
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer, samples=len(x))
        scaler.update()

    model = copy.deepcopy(FIRST)
    optimizer = sgd(model)
    ((2 * loss_of(model, rows(0)[:2]) + 8 * loss_of(model, rows(0)[:8])) / 10).backward()
    optimizer.step()
    assert_close(state_of(simulated(train)), weights_of(model))


@pytest.mark.parametrize(
    "make",
    [sgd, lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True)],
    ids=["sgd", "fused adam"],
)
def test_outside_a_run_a_scaler_does_the_same_as_with_the_wrapped_optimizer(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    options: dict[str, Any] = {"overflowing": lambda iteration: iteration == 3}
    wrapped: list[torch.optim.Optimizer] = []

    def wrap(model: nn.Module) -> DistributedOptimizer:
        wrapped.append(make(model))
        return DistributedOptimizer(wrapped[0])

    weights, scales, _ = fit(wrap, **options)
    expected, expected_scales, _ = fit(make, **options)
    assert_close(weights, expected, rtol=0.0)
    assert scales == expected_scales
    assert "found_inf" not in vars(wrapped[0])


def test_a_scaler_is_as_before_after_a_run() -> None:
    simulated(fit_in_run)
    assert (GradScaler.scale, GradScaler.unscale_, GradScaler.update) == (SCALE, UNSCALE, UPDATE)
    watch_scalers()
    assert GradScaler.scale.__doc__ == SCALE.__doc__
    fit(sgd)  # outside a run, the wrappers do nothing
    unwatch_scalers()


def test_a_worker_that_joins_late_takes_over_a_scale_that_is_tracked() -> None:
    scales: dict[int, list[float]] = {0: [], 1: []}

    def train() -> None:
        model = copy.deepcopy(FIRST)
        optimizer, scaler = DistributedOptimizer(sgd(model), model=model), scaler_of()
        loader = paceline.distribute(DataLoader(TensorDataset(torch.cat([rows(0), rows(1)])), batch_size=3))
        paceline.track(scaler=scaler)
        for _ in paceline.epochs(4):
            for (x,) in loader:
                scales[worker_index()].append(scaler.get_scale())
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x)).backward()
                scaler.step(optimizer)
                scaler.update()

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=12.5)})
    simulate(cluster, "asp", train_fn=train)
    assert scales[0][0] == 2.0**12
    assert scales[1][0] == scales[0][8]  # at the beginning of the second epoch


# -- autocast --------------------------------------------------------------------------------------------------


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_step_inside_autocast_computes_with_the_weights_of_now(sync: str) -> None:
    def train(inside: bool) -> None:
        model = copy.deepcopy(FIRST)
        optimizer = DistributedOptimizer(sgd(model), model=model)

        def fit_one(iteration: int) -> None:
            optimizer.zero_grad()
            with bfloat16():
                loss = loss_of(model, own_rows(iteration))
            loss.backward()
            optimizer.step()

        with bfloat16() if inside else torch.enable_grad():
            for iteration in range(4):
                fit_one(iteration)

    inside, outside = simulated(lambda: train(True), sync), simulated(lambda: train(False), sync)
    assert_close(state_of(inside), state_of(outside), rtol=0.0)


def test_weights_that_are_replaced_inside_autocast_are_used() -> None:
    """The first forward pass, which has no gradient, is computed before a worker has worker 0's weights."""
    outputs: dict[int, torch.Tensor] = {}

    def train() -> None:
        torch.manual_seed(worker_index())
        model = nn.Linear(INPUTS, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with bfloat16():
            model(rows(0)).square().mean().backward()
            optimizer.step()
            outputs[worker_index()] = model(rows(0)).detach()

    simulated(train)
    assert torch.equal(outputs[0], outputs[1])


def test_workers_may_compute_in_different_precision(run_on_threads: RunOnThreads) -> None:
    def context(worker: int) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=worker == 1)

    def train() -> State:
        model = copy.deepcopy(FIRST)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            with context(worker_index()):
                loss = loss_of(model, own_rows(iteration))
            loss.backward()
            optimizer.step()
        return weights_of(model)

    model = copy.deepcopy(FIRST)
    optimizer = sgd(model)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        for worker in range(2):
            with context(worker):
                loss = loss_of(model, rows(iteration)[worker::2])
            (loss / 2).backward()
        optimizer.step()
    run = run_on_threads(train)
    for state in (run.state_dict, state_of(simulated(train))):
        assert_close(state, weights_of(model), rtol=1e-5)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_half_precision_with_a_scaler_equals_one_process() -> None:
    def fit_half(wrap: Callable[[nn.Module], Any]) -> State:
        model = copy.deepcopy(FIRST)
        optimizer, scaler = wrap(model), scaler_of()
        for iteration in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(own_rows(iteration))
                loss = (output.float() - own_rows(iteration).sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights_of(model)

    result = simulated(lambda: fit_half(lambda model: DistributedOptimizer(sgd(model), model=model)))
    assert_close(state_of(result), fit_half(sgd), rtol=1e-4)


# -- compiled models, activation checkpointing -----------------------------------------------------------------


class Checkpointed(nn.Module):
    """Computes the activations of the layers again in the backward pass."""

    def __init__(self, net: Net, use_reentrant: bool) -> None:
        super().__init__()
        self.net = net
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant:
            x = x.detach().requires_grad_()  # without it, the first layer would have no gradient
        hidden = checkpoint(lambda x: torch.tanh(self.net.inner(x)), x, use_reentrant=self.use_reentrant)
        out: torch.Tensor = self.net.outer(
            checkpoint(lambda x: torch.tanh(self.net.middle(x)), hidden, use_reentrant=self.use_reentrant)
        )
        return out


KINDS: dict[str, Callable[[Net], Callable[[torch.Tensor], torch.Tensor]]] = {
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "compiled ahead of time": lambda net: torch.compile(net, backend="aot_eager"),
    "checkpointed": lambda net: Checkpointed(net, use_reentrant=False),
    "checkpointed, reentrant": lambda net: Checkpointed(net, use_reentrant=True),
    "compiled and checkpointed": lambda net: torch.compile(Checkpointed(net, False), backend="aot_eager"),
}


ONLY_COMPILED = ["compiled", "compiled ahead of time"]  # so is what is also checkpointed


@pytest.mark.parametrize("autocasts", [True, *thorough(False)])
@pytest.mark.parametrize(
    "kind", [*(kind for kind in KINDS if kind not in ONLY_COMPILED), *thorough(*ONLY_COMPILED)]
)
def test_compiled_and_checkpointed_models_train_as_others(
    run_on_threads: RunOnThreads, kind: str, autocasts: bool
) -> None:
    def train(kind: str) -> None:
        net = copy.deepcopy(FIRST)
        model = KINDS[kind](net) if kind else net
        optimizer, scaler = DistributedOptimizer(sgd(net), model=net), scaler_of()
        for iteration in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
                loss = loss_of(model, own_rows(iteration))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    torch.compiler.reset()  # forget what other tests have compiled
    expected = state_of(simulated(lambda: train("")))
    assert_close(state_of(simulated(lambda: train(kind))), expected, rtol=1e-3 if autocasts else 1e-6)
    if not autocasts:
        # There is one worker, because TorchDynamo fails when two threads compile at a time.
        run = run_on_threads(lambda: train(kind), workers=1, transport="tcp")
        alone = simulate(Cluster(compute_s=[1.0]), "bsp", train_fn=lambda: train(""))
        assert_close(run.state_dict, state_of(alone))


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_model_may_be_compiled_before_and_after_it_is_prepared(when: str) -> None:
    def train() -> None:
        model: Any = copy.deepcopy(FIRST)
        if when == "before":
            model = torch.compile(model, backend="eager")
        optimizer = sgd(model)
        model, optimizer = paceline.prepare(model, optimizer)
        if when == "after":
            model = torch.compile(model, backend="eager")
        for iteration in range(4):
            optimizer.zero_grad()
            loss_of(model, own_rows(iteration)).backward()
            optimizer.step()

    torch.compiler.reset()
    model = copy.deepcopy(FIRST)
    optimizer = sgd(model)
    for iteration in range(4):
        optimizer.zero_grad()
        loss_of(model, rows(iteration)).backward()
        optimizer.step()
    state = state_of(simulated(train))
    assert_close({name.removeprefix("_orig_mod."): state[name] for name in state}, weights_of(model))


# torch asks for the gradients of all tensors that go from one graph to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.thorough
def test_a_compiled_step_trains_as_others() -> None:
    def train(compiles: bool) -> None:
        model = copy.deepcopy(FIRST)
        optimizer = DistributedOptimizer(sgd(model), model=model)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        for iteration in range(4):
            (torch.compile(step, backend="eager") if compiles else step)(own_rows(iteration))

    torch.compiler.reset()
    assert_close(state_of(simulated(lambda: train(True))), state_of(simulated(lambda: train(False))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_graph_is_refused() -> None:
    def capture(optimizer: DistributedOptimizer, x: torch.Tensor) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.mul_(2.0)
            optimizer.step()

    def train() -> None:
        model = copy.deepcopy(FIRST)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        with pytest.raises(UsageError, match="outside the graph"):
            capture(optimizer, rows(0).cuda())

    simulated(train)
