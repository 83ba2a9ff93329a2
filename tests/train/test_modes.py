"""Optimizers with `train()` and `eval()`, such as schedule-free ones, which exchange the weights for others."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import schedulefree
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedOptimizer, simulate, worker_count, worker_index
from paceline.errors import UsageError, WeightsChangedError
from paceline.sim import Cluster
from tests.support.delayed_queue import on_the_double
from tests.support.marks import thorough
from tests.train.test_tensorwise import largest_difference

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
Make = Callable[..., Any]
BATCH = 16
STEPS = 12  # twice as many as the warm-up has


class Net(nn.Module):
    """A tied matrix, a frozen layer, and a parameter without gradients in some steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.second = nn.Linear(20, 12)
        self.tied = nn.Linear(12, 20, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(20, 5)
        self.sometimes = nn.Parameter(torch.ones(3, 4))
        generator = torch.Generator().manual_seed(0)  # threads share the default one
        for parameter in self.parameters():
            parameter.data = (0.3 * torch.randn(parameter.shape, generator=generator)).to(dtype)

    def loss(self, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.second(self.frozen(self.first(x).tanh())).tanh()
        loss = nn.functional.cross_entropy(self.last(self.tied(hidden)), y)
        return loss if step % 3 else loss + 0.01 * self.sometimes.square().sum()


class Averaging(torch.optim.SGD):
    """Evaluates the mean of all earlier weights, which is its state. In this mode, the state has the other weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["steps"] = state.get("steps", 0) + 1
                    state.setdefault("mean", torch.zeros_like(p)).lerp_(p, 1 / state["steps"])

    def train(self) -> None:
        self._exchange(self.evaluates)
        self.evaluates = False

    def eval(self) -> None:
        self._exchange(not self.evaluates)
        self.evaluates = True

    evaluates = False

    @torch.no_grad()
    def _exchange(self, wanted: bool) -> None:
        for group in self.param_groups if wanted else ():
            for p in group["params"]:
                if "mean" in self.state[p]:
                    kept = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"].copy_(kept)


OWN = "a class of one's own"
MAKERS: dict[str, Make] = {
    "SGD": lambda p: schedulefree.SGDScheduleFree(p, lr=0.5, warmup_steps=6, weight_decay=0.01),
    "AdamW": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.02, warmup_steps=6, weight_decay=0.1),
    "RAdam": lambda p: schedulefree.RAdamScheduleFree(p, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1),
    OWN: lambda p: Averaging(p, lr=0.05, momentum=0.9),
}
LIVE = ["SGD", "AdamW"]  # servers cannot import this file


def others(chosen: list[Any], *values: Iterable[object]) -> list[Any]:
    """All combinations of values except the chosen ones, which every run tests."""
    return thorough(*(case for case in itertools.product(*values) if case not in chosen))


def training(
    name: str,
    *,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    told: Callable[[Any], None] = lambda state: None,
) -> Any:
    """A script that trains on a joint batch, of which each worker takes its part, and evaluates from time to time."""

    def train() -> State:
        net = Net(dtype)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer: Any = DistributedOptimizer(MAKERS[name](trained), model=net)
        count, worker = worker_count(), worker_index()
        losses = []
        for step in range(steps):
            optimizer.train()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 12, generator=generator).to(dtype)
            y = torch.randint(0, 5, (BATCH,), generator=generator)
            part = slice(worker * BATCH // count, (worker + 1) * BATCH // count)
            optimizer.zero_grad()
            for half in (0, 1):  # accumulates
                (net.loss(x[part][half::2], y[part][half::2], step) / 2).backward()
            optimizer.clip_grad_norm(0.5)
            optimizer.step()
            if step % 7 == 3:
                optimizer.eval()
                with torch.no_grad():
                    losses.append(float(net.loss(x, y, 1)))
        optimizer.eval()
        told(losses)
        return {key: value.clone() for key, value in net.state_dict().items()}

    return train


ON_HOW_MANY = [("SGD", (2, 2)), ("AdamW", (4, 5)), ("RAdam", (2, 2)), (OWN, (2, 2))]
"""Every optimizer on several workers and servers, one of them on more servers than workers."""


@pytest.mark.parametrize(
    ("name", "hosts"), [*ON_HOW_MANY, *others(ON_HOW_MANY, MAKERS, [(1, 1), (2, 2), (4, 5)])], ids=str
)
def test_under_bsp_a_run_equals_one_process_on_the_joint_batch(name: str, hosts: tuple[int, int]) -> None:
    workers, servers = hosts
    of_workers: list[Any] = []
    of_process: list[Any] = []
    cluster = Cluster([1.0 + 0.1 * worker for worker in range(workers)], servers=servers)
    run = simulate(cluster, "bsp", train_fn=training(name, told=of_workers.append))
    alone = training(name, told=of_process.append)()
    assert largest_difference(run.state_dict, alone) <= 1e-12
    for losses in of_workers:
        assert losses == pytest.approx(of_process[0], abs=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_in_single_precision_too_after_200_steps(name: str, workers: int, servers: int) -> None:
    options: dict[str, Any] = {"steps": 200, "dtype": torch.float32}
    cluster = Cluster([1.0 + 0.1 * worker for worker in range(workers)], servers=servers)
    run = simulate(cluster, "bsp", train_fn=training(name, **options))
    assert largest_difference(run.state_dict, training(name, **options)()) <= 1e-6


LIVE_RUNS = [("AdamW", "shm"), ("SGD", "tcp")]


@pytest.mark.parametrize(("name", "transport"), [*LIVE_RUNS, *others(LIVE_RUNS, LIVE, ["shm", "tcp"])])
def test_a_live_run_is_its_simulation_to_the_bit(
    name: str, transport: str, run_on_threads: RunOnThreads
) -> None:
    live: list[Any] = []
    simulated: list[Any] = []
    options: dict[str, Any] = {
        "workers": 2,
        "servers": 3,
        "transport": transport,
        "imports": ["schedulefree"],
    }
    run = run_on_threads(training(name, told=live.append), sync="bsp", **options)
    cluster = Cluster([1.0, 1.5], servers=3)
    expected = simulate(cluster, "bsp", train_fn=training(name, told=simulated.append)).state_dict
    assert expected is not None
    for key, value in run.state_dict.items():
        assert torch.equal(value, expected[key])
    assert live[0] == live[1] == simulated[0]


FROM_A_CUT = [("AdamW", (1, 3)), ("SGD", (3, 2)), (OWN, (3, 2))]
"""More servers and fewer, and states of different kinds."""


@pytest.mark.parametrize(
    ("name", "servers"), [*FROM_A_CUT, *others(FROM_A_CUT, MAKERS, [(1, 3), (3, 2)])], ids=str
)
def test_a_run_goes_on_from_a_cut_on_another_number_of_servers(name: str, servers: tuple[int, int]) -> None:
    def train() -> None:
        net = Net(torch.float64)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer: Any = DistributedOptimizer(MAKERS[name](trained), model=net)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(64, 12, generator=generator).double(), torch.arange(64) % 5
        loader = paceline.distribute(DataLoader(TensorDataset(x, y), batch_size=8))
        for _ in paceline.epochs(3):
            optimizer.train()
            for inputs, labels in loader:
                optimizer.zero_grad()
                net.loss(inputs, labels, int(labels[0])).backward()
                optimizer.step()
            optimizer.eval()
            with torch.no_grad():
                told.append(float(net.loss(x, y, 1)))

    def on(count: int, **options: Any) -> Any:
        return simulate(Cluster([1.0], servers=count), "bsp", train_fn=train, **options)

    told: list[float] = []
    whole = on(servers[0], cut_at_s=[9.7])
    expected = told.copy()
    told.clear()
    resumed = on(servers[1], resumed=whole.cuts[0])
    assert largest_difference(resumed.state_dict, whole.state_dict) <= 1e-12
    assert told == pytest.approx(expected[-len(told) :], abs=1e-12)
    assert len(told) == 2


@pytest.mark.parametrize("name", ["AdamW", *thorough(OWN)])
def test_on_a_device_whose_copies_are_late_too(name: str) -> None:
    of_device: list[Any] = []
    of_host: list[Any] = []
    cluster = Cluster([1.0, 1.3], servers=2)
    with on_the_double(seed=1, piece_bytes=256):
        found = simulate(cluster, "bsp", train_fn=training(name, told=of_device.append)).state_dict
    expected = simulate(cluster, "bsp", train_fn=training(name, told=of_host.append)).state_dict
    assert found is not None
    assert expected is not None
    assert of_device == of_host
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


# -- what is evaluated, and when ----------------------------------------------------------------------------


class Script:
    """A model that is trained with a class of this file or of another package, alone or in a run."""

    def __init__(self, make: Make = MAKERS[OWN]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Linear(6, 4)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.optimizer: Any = DistributedOptimizer(make(self.model.parameters()), model=self.model)
        self.generator = torch.Generator().manual_seed(worker_index())

    def step(self, count: int = 1) -> None:
        self.optimizer.train()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 6, generator=self.generator)).square().mean().backward()
            self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    @property
    def evaluated(self) -> torch.Tensor:
        """The weights between `eval()` and `train()`."""
        self.optimizer.eval()
        weights = self.weights
        self.optimizer.train()
        return weights


HOSTS = ["simulated", "shm", "tcp"]


@pytest.fixture(params=["simulated", "shm", *thorough("tcp")])  # some tests choose their hosts, tcp too
def host(request: pytest.FixtureRequest, run_on_threads: RunOnThreads) -> Callable[..., Any]:
    """host(train, workers=..., sync=...): simulates a run, or runs it on threads; returns the final weights."""

    def run(train: Callable[[], object], workers: int = 1, sync: str = "bsp") -> Any:
        if request.param == "simulated":
            cluster = Cluster([1.0 + 0.3 * worker for worker in range(workers)], servers=2)
            return simulate(cluster, sync, train_fn=train).state_dict
        options: dict[str, Any] = {"transport": request.param, "imports": ["schedulefree"]}
        return run_on_threads(train, workers=workers, servers=2, sync=sync, **options).state_dict

    return run


def test_train_gives_back_the_very_weights(host: Callable[..., Any]) -> None:
    def train() -> None:
        script = Script(MAKERS["SGD"])
        script.step(5)
        before = script.weights
        script.optimizer.eval()
        evaluated = script.weights
        assert not torch.equal(before, evaluated)
        script.optimizer.eval()
        assert torch.equal(script.weights, evaluated)
        script.optimizer.train()
        script.optimizer.train()
        assert torch.equal(script.weights, before)

    host(train)


WHERE = [("bsp", "simulated"), ("asp", "tcp"), ("ssp:staleness=1", "shm")]
"""Each sync model and each host once."""


@pytest.mark.parametrize(
    ("sync", "host"),
    [*WHERE, *others(WHERE, ["bsp", "asp", "ssp:staleness=1"], HOSTS)],
    indirect=["host"],
)
def test_the_weights_do_not_change_while_a_script_evaluates_and_reduces(
    sync: str, host: Callable[..., Any]
) -> None:
    def train() -> None:
        script = Script(MAKERS["AdamW"])
        script.step(4)
        script.optimizer.eval()
        evaluated = script.weights
        paceline.reduce(1.0)
        paceline.barrier()
        assert torch.equal(script.weights, evaluated)
        script.step(3 if sync == "bsp" else 3 + worker_index())

    final = host(train, workers=2, sync=sync)
    assert all(value.isfinite().all() for value in final.values())


def test_evaluating_and_save_use_the_weights_for_evaluation(host: Callable[..., Any], tmp_path: Path) -> None:
    def train() -> None:
        script = Script(MAKERS["AdamW"])
        for number in range(3):
            script.step(2)
            own, expected, model = script.weights, script.evaluated, script.model
            assert not torch.equal(own, expected)
            for evaluates in (False, True):
                if evaluates:
                    script.optimizer.eval()
                with paceline.evaluating(model) as snapshot:
                    found = torch.cat([p.detach().flatten() for p in snapshot.parameters()])
                    loaded = torch.load(paceline.save(model.state_dict(), tmp_path / "inside.pt"))
                assert torch.equal(found, expected)
                assert torch.equal(torch.cat([p.flatten() for p in loaded.values()]), expected)
                assert torch.equal(script.weights, expected if evaluates else own)
                place = tmp_path / f"{number}-{evaluates}.pt"
                loaded = torch.load(paceline.save([model.state_dict()], place))[0]
                assert torch.equal(torch.cat([p.flatten() for p in loaded.values()]), expected)
            script.optimizer.train()
            # With the state of its optimizer, a model is saved as it is trained.
            pair = {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": []}}
            loaded = torch.load(paceline.save(pair, tmp_path / "pair.pt"))["model"]
            assert torch.equal(torch.cat([p.flatten() for p in loaded.values()]), own)
        last.append(script.evaluated)

    last: list[torch.Tensor] = []
    final = host(train)
    assert torch.equal(torch.cat([value.flatten() for value in final.values()]), last[0])


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_worker_that_joins_late_has_the_weights_for_an_evaluation_until_it_trains(
    sync: str, run_on_threads: RunOnThreads
) -> None:
    joins, looked = threading.Event(), threading.Event()

    def train() -> None:
        script = Script(MAKERS["AdamW"])
        if worker_index() == 0:
            script.step(5)
            told.append(script.evaluated)
            joins.set()
            assert looked.wait(60.0)
        else:
            with paceline.evaluating(script.model) as snapshot:
                found = torch.cat([p.detach().flatten() for p in snapshot.parameters()])
            assert torch.equal(found, told[0])
            looked.set()
        script.step(3)
        script.optimizer.eval()

    told: list[torch.Tensor] = []
    run = run_on_threads(train, workers=2, servers=2, sync=sync, late=joins, imports=["schedulefree"])
    assert all(value.isfinite().all() for value in run.state_dict.values())


SAVED = [("SGD", False, "simulated"), ("AdamW", True, "shm"), ("SGD", True, "tcp")]
"""Each optimizer, each mode and each host."""


@pytest.mark.parametrize(
    ("name", "evaluates", "host"), [*SAVED, *others(SAVED, LIVE, [False, True], HOSTS)], indirect=["host"]
)
def test_a_model_and_its_optimizer_may_be_saved_in_both_modes_and_go_on_alone_or_in_a_run(
    name: str, evaluates: bool, host: Callable[..., Any]
) -> None:
    def train() -> None:
        script = Script(MAKERS[name])
        script.step(5)
        if evaluates:
            script.optimizer.eval()
        saved.append(copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict())))
        script.step(5)
        script.optimizer.eval()
        told.append(script.weights)

    def go_on() -> None:
        script = Script(MAKERS[name])
        for _ in range(5):  # the data of the first steps
            torch.randn(8, 6, generator=script.generator)
        model, optimizer = copy.deepcopy(saved[0])
        script.model.load_state_dict(model)
        script.optimizer.load_state_dict(optimizer)
        script.step(5)
        script.optimizer.eval()
        told.append(script.weights)

    saved: list[Any] = []
    told: list[torch.Tensor] = []
    host(train)
    host(go_on)
    go_on()
    assert saved[0][1]["param_groups"][0]["train_mode"] is not evaluates
    assert saved[0][1]["param_groups"][0]["k"] == 5
    whole, resumed, alone = told
    assert (resumed - whole).abs().max() <= 1e-6
    assert (alone - whole).abs().max() <= 1e-6


def test_between_eval_and_train_no_step_and_no_edit_is_possible(host: Callable[..., Any]) -> None:
    def train() -> None:
        script = Script(MAKERS["SGD"])
        optimizer, model = script.optimizer, script.model
        optimizer.eval()
        model(torch.ones(1, 6)).mean().backward()
        for call in (optimizer.step, lambda: optimizer.editing().__enter__()):
            with pytest.raises(
                UsageError, match=r"was called after the optimizer's eval\(\).*train\(\) first"
            ):
                call()
        with pytest.raises(UsageError, match="was called after the optimizer's eval"):
            optimizer.editing(private=True).__enter__()
        script.step(2)
        with paceline.evaluating(model), pytest.raises(UsageError, match=r"eval\(\) was called inside"):
            optimizer.eval()
        optimizer.eval()
        with torch.no_grad():
            model.bias.add_(1.0)
        with pytest.raises(WeightsChangedError, match=r"'bias' was edited after the optimizer's eval\(\)"):
            optimizer.train()

    host(train)


def test_several_optimizers_have_modes_of_their_own(host: Callable[..., Any]) -> None:
    def train() -> None:
        first, second = Script(MAKERS["AdamW"]), Script(lambda p: torch.optim.SGD(p, lr=0.1))
        assert not hasattr(second.optimizer, "eval")
        for _ in range(3):
            first.step()
            second.optimizer.zero_grad()
            second.model(torch.ones(2, 6)).square().mean().backward()
            before = second.weights
            first.optimizer.eval()
            assert torch.equal(second.weights, before)
            second.optimizer.step()
            assert not torch.equal(second.weights, before)
        first.optimizer.eval()
        told.append(torch.cat([first.weights, second.weights]))

    told: list[torch.Tensor] = []
    final = host(train)
    assert torch.equal(torch.cat([value.flatten() for value in final.values()]), told[0])


def test_a_model_may_grow(host: Callable[..., Any]) -> None:
    def train() -> None:
        script = Script(MAKERS["AdamW"])
        script.step(3)
        head = nn.Linear(4, 2)
        for parameter in head.parameters():
            nn.init.constant_(parameter, 0.3)
        script.optimizer.add_param_group({"params": list(head.parameters())})
        script.optimizer.train()
        for _ in range(3):
            script.optimizer.zero_grad()
            head(script.model(torch.ones(2, 6))).square().mean().backward()
            script.optimizer.step()
        script.optimizer.eval()
        told.append(torch.cat([script.weights, *(p.detach().flatten() for p in head.parameters())]))

    told: list[torch.Tensor] = []
    final = host(train)
    assert torch.equal(torch.cat([value.flatten() for value in final.values()]), told[0])


def test_a_fraction_of_a_step_begins_with_a_copy_of_the_weights_and_adds_a_fraction_to_sums() -> None:
    """The state of a schedule-free optimizer begins with the weights, and its groups contain a sum of floats."""

    def train() -> None:
        Script(lambda p: schedulefree.SGDScheduleFree(p, lr=0.05)).step(20)

    states: list[Any] = [
        simulate(Cluster([1.0] * 4), sync, train_fn=train).state_dict for sync in ("bsp", "asp")
    ]
    first = Script().model.state_dict()
    for name, value in states[0].items():
        assert (states[1][name] - value).norm() < 0.05 * (value - first[name]).norm()
