"""One shard and its store together, with real optimizers and real gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from paceline.core.layout import HyperParameters, Layout, OptimizerSpec, Parameter
from paceline.core.messages import Answer
from paceline.core.requests import Host, Peer
from paceline.core.shard import Shard
from paceline.errors import InvalidEventError, ProtocolError
from paceline.shard.optimizers import ELEMENTWISE, read_groups, server_optimizer
from paceline.shard.store import Push, Store
from paceline.shard.vectors import Vectors
from paceline.sync import ASP, BSP, SSP, Conditions, ElasticBSP, PullState, PushState, SyncModel
from paceline.sync.events import (
    AnyEvent,
    PullRequested,
    PushReceived,
    Stop,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.trace import Header, Recorder, read, replay
from paceline.trace.measures import measure

SHAPES = [(7, 5), (5,), (), (3, 4, 2), (40,)]  # a scalar among them; 104 elements on 3 shards cut across them

Gradients = Sequence[torch.Tensor | None]
Factory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, betas=(0.8, 0.95)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=1e-3, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2, weight_decay=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}

# The default eps of 1e-8 is nothing in float16: torch's own step then divides by zero.
HALF_PRECISION: dict[str, Factory] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
}

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def initial_weights(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def gradients(seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


class _ShardHost(Host):
    """Carries out the requests of one shard, and notes its answers."""

    def __init__(self, index: int, stores: Sequence[Store], answers: list[tuple[int, int, int, int]]) -> None:
        self.stores = stores
        self._index = index
        self._answers = answers

    def _answer(self, to: Peer, answer: Answer) -> None:
        self._answers.append((self._index, to.index, answer.iteration, answer.version))

    senders: ClassVar = {Answer: _answer}


class Job:
    """Some shards that hold one model, and the host that tells them the same things.

    Attributes:
        shards: the shards.
        stores: the store of each.
        answers: (shard, worker, iteration, version) of every pull that was answered.
    """

    def __init__(
        self,
        sync: SyncModel,
        factory: Factory,
        *,
        shards: int = 1,
        workers: int = 2,
        weights: Sequence[torch.Tensor] | None = None,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        weights = initial_weights() if weights is None else weights
        dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights]
        self.layout = Layout.of(
            [Parameter((f"p{i}",), tuple(w.shape), dtypes[i]) for i, w in enumerate(weights)]
        )
        optimizer = factory([weight.clone() for weight in weights])
        self.groups = read_groups(optimizer)
        group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        spec = OptimizerSpec(server_optimizer(optimizer).name, self.groups, tuple(group_of))
        flat = self.flatten(weights)
        self.slices = self.layout.slice_evenly(shards)
        self.shards = []
        self.stores = []
        for i, bounds in enumerate(self.slices):
            mine = {d: flat[d][start:stop].clone() for d, (start, stop) in bounds.bounds.items()}
            recorder = recorders[i] if recorders else None
            self.stores.append(Store(bounds, mine, [spec]))
            self.shards.append(Shard(i, [sync], recorder=recorder))
        self.answers: list[tuple[int, int, int, int]] = []
        for worker in range(workers):
            self.tell(WorkerJoined(now_ticks=0, worker=worker))

    def flatten(self, tensors: Gradients) -> Vectors:
        """One flat vector per dtype; what is None is nothing but zeros."""
        flat = {dtype: torch.zeros(n, dtype=getattr(torch, dtype)) for dtype, n in self.layout.sizes.items()}
        for tensor, offset, parameter in zip(
            tensors, self.layout.offsets, self.layout.parameters, strict=True
        ):
            if tensor is not None:
                flat[parameter.dtype][offset : offset + parameter.size] = tensor.reshape(-1)
        return flat

    def tell(self, event: AnyEvent, pushes: Sequence[Push | None] | None = None) -> None:
        for index, (shard, store) in enumerate(zip(self.shards, self.stores, strict=True)):
            requests = shard.handle(event)
            push = pushes[index] if pushes is not None else None
            if push is not None and isinstance(event, PushReceived):
                store.put(event.worker, event.iteration, push)
            _ShardHost(index, self.stores, self.answers).carry_out(requests)

    def push(
        self,
        worker: int,
        iteration: int,
        grads: Gradients,
        *,
        groups: tuple[HyperParameters, ...] | None = None,
        stop: Stop | None = None,
        pull: bool = True,
    ) -> list[Push]:
        """One iteration of one worker."""
        flat = self.flatten(grads)
        present = bytes(grad is not None for grad in grads)
        pushes = []
        for bounds in self.slices:
            mine = {d: flat[d][start:stop].clone() for d, (start, stop) in bounds.bounds.items()}
            pushes.append(Push(mine, present, groups or self.groups))
        self.tell(PushReceived(now_ticks=0, worker=worker, iteration=iteration, stop=stop), pushes)
        if pull:
            self.tell(PullRequested(now_ticks=0, worker=worker, iteration=iteration))
        return pushes

    def weights(self) -> list[torch.Tensor]:
        """The model's tensors, put together from the shards."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.layout.parameters]
        for store in self.stores:
            for segment in store.bounds.segments:
                parts[segment.parameter].append(store.weights[segment.dtype][segment.start : segment.stop])
        return [
            torch.cat(part).reshape(parameter.shape)
            for part, parameter in zip(parts, self.layout.parameters, strict=True)
        ]


class Whole:
    """The same optimizer on whole tensors, in one process."""

    def __init__(self, factory: Factory, weights: Sequence[torch.Tensor] | None = None) -> None:
        self.weights = [weight.clone() for weight in (initial_weights() if weights is None else weights)]
        self.optimizer = factory(self.weights)

    def step(self, grads: Gradients) -> None:
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = None if grad is None else grad.clone()
        self.optimizer.step()


def assert_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), f"tensor {index} differs by {(a - b).abs().max()}"


def relative_error(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    a, b = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in (one, other))
    return float((a - b).norm() / b.norm())


def test_the_table_of_optimizers_is_covered() -> None:
    assert {name.split()[0] for name in OPTIMIZERS} == set(ELEMENTWISE)


# -- BSP: the joint batch ---------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("shards", [1, 3])
def test_bsp_over_shards_equals_the_optimizer_on_whole_tensors(name: str, shards: int) -> None:
    job = Job(BSP(), OPTIMIZERS[name], shards=shards, workers=4)
    whole = Whole(OPTIMIZERS[name])
    for iteration in range(6):
        joint = [gradients(10 * iteration + worker) for worker in range(4)]
        for worker in (2, 0, 3, 1):
            job.push(worker, iteration, joint[worker])
        whole.step([sum(parts[1:], parts[0]) / 4 for parts in zip(*joint, strict=True)])
    assert relative_error(job.weights(), whole.weights) <= 1e-14
    assert {shard.version for shard in job.shards} == {6}


@every_optimizer
def test_slicing_changes_not_one_bit(name: str) -> None:
    jobs = [Job(BSP(), OPTIMIZERS[name], shards=shards) for shards in (1, 3, 16)]
    for job in jobs:
        for iteration in range(3):
            for worker in range(2):
                job.push(worker, iteration, gradients(10 * iteration + worker))
    for job in jobs[1:]:
        assert_equal(job.weights(), jobs[0].weights())


@pytest.mark.parametrize("shards", [1, 3])
def test_bsp_with_sgd_is_exact(shards: int) -> None:
    job = Job(BSP(), OPTIMIZERS["SGD"], shards=shards, workers=2)
    weights = initial_weights()
    for iteration in range(5):
        joint = [gradients(2 * iteration + worker) for worker in range(2)]
        for worker in range(2):
            job.push(worker, iteration, joint[worker])
        weights = [w - 0.1 * ((a + b) / 2) for w, a, b in zip(weights, *joint, strict=True)]
    for ours, theirs in zip(job.weights(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=1e-16)


def test_the_mean_does_not_hang_on_the_order_of_arrival() -> None:
    results = []
    for order in [(0, 1, 2), (2, 1, 0), (1, 0, 2)]:
        job = Job(BSP(), OPTIMIZERS["Adam"], workers=3)
        for worker in order:
            job.push(worker, 0, gradients(worker))
        results.append(job.weights())
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "AdamW", "RMSprop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_train_too(dtype: torch.dtype, name: str) -> None:
    weights = initial_weights(dtype)
    factory = HALF_PRECISION.get(name, OPTIMIZERS[name])
    job, whole = Job(BSP(), factory, shards=3, weights=weights), Whole(factory, weights)
    for iteration in range(3):
        for worker in range(2):
            job.push(worker, iteration, gradients(iteration, dtype))  # the mean of two equal ones
        whole.step(gradients(iteration, dtype))
    rtol = 1e-6 if dtype == torch.float32 else 0.02
    for ours, theirs in zip(job.weights(), whole.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "RMSprop"])
def test_a_model_of_several_dtypes_trains_as_one(name: str) -> None:
    def mixed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(torch.float32 if i % 2 else torch.float64) for i, tensor in enumerate(tensors)]

    weights = mixed(initial_weights())
    job = Job(BSP(), OPTIMIZERS[name], shards=3, weights=weights)
    whole = Whole(OPTIMIZERS[name], weights)
    for iteration in range(4):
        for worker in range(2):
            job.push(worker, iteration, mixed(gradients(iteration)))  # the mean of two equal ones
        whole.step(mixed(gradients(iteration)))
    for ours, theirs in zip(job.weights(), whole.weights, strict=True):
        rtol = 1e-6 if ours.dtype == torch.float32 else 1e-14
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


# -- ASP and barriers: what is applied when ---------------------------------------------------------------


@every_optimizer
def test_asp_applies_each_push_on_arrival_at_scale_1(name: str) -> None:
    job = Job(ASP(), OPTIMIZERS[name], shards=3)
    whole = Whole(OPTIMIZERS[name])
    for step, worker in enumerate([0, 0, 1, 0, 1]):
        iteration = [0, 1, 0, 2, 1][step]
        job.push(worker, iteration, gradients(step))
        whole.step(gradients(step))
        assert relative_error(job.weights(), whole.weights) <= 1e-14


@every_optimizer
def test_a_pushed_gradient_is_read_and_never_written(name: str) -> None:
    for sync in (ASP(), BSP()):
        job = Job(sync, OPTIMIZERS[name])
        for iteration in range(2):
            pushes = [job.push(worker, iteration, gradients(worker)) for worker in range(2)]
            for worker, [push] in enumerate(pushes):
                assert torch.equal(push.gradient["float64"], job.flatten(gradients(worker))["float64"])


def test_a_held_push_whose_pull_is_answered_survives_the_workers_next_one() -> None:
    """A user's conditions may hold a push for a mean and let its worker go on, which uses its memory again."""
    sync = Conditions(pull=always, push=when_both_have_pushed, pushes="average")
    job, control = (Job(sync, OPTIMIZERS["SGD"]) for _ in range(2))
    for one in (job, control):
        [push] = one.push(0, 0, gradients(0))
        assert one.answers == [(0, 0, 0, 0)]
        if one is job:
            push.gradient["float64"].fill_(7.0)
        one.push(1, 0, gradients(1))
        assert one.shards[0].version == 1
    assert_equal(job.weights(), control.weights())


def always(state: PullState) -> bool:
    return True


def when_both_have_pushed(state: PushState) -> bool:
    return state.pushed == 2


def test_elastic_bsp_applies_the_mean_of_the_stopping_pushes_once() -> None:
    job = Job(ElasticBSP(), OPTIMIZERS["SGD momentum"], shards=2)
    whole = Whole(OPTIMIZERS["SGD momentum"])
    flag = Stop(superstep=0, members=(0, 1))
    job.push(0, 0, gradients(0))
    whole.step(gradients(0))
    job.push(0, 1, gradients(1), stop=flag)
    job.push(1, 0, gradients(2))
    whole.step(gradients(2))
    assert relative_error(job.weights(), whole.weights) <= 1e-14
    job.push(1, 1, gradients(3), stop=flag)
    whole.step([(a + b) / 2 for a, b in zip(gradients(1), gradients(3), strict=True)])
    assert relative_error(job.weights(), whole.weights) <= 1e-14
    assert {shard.version for shard in job.shards} == {3}


def test_an_update_is_applied_before_the_pulls_that_wait_for_it_are_answered() -> None:
    job = Job(BSP(), OPTIMIZERS["SGD"])
    job.push(0, 0, gradients(0))
    assert job.answers == []
    job.push(1, 0, gradients(1))
    assert job.answers == [(0, 0, 0, 1), (0, 1, 0, 1)]


def test_the_held_push_of_a_lost_worker_is_in_the_mean() -> None:
    job = Job(BSP(), OPTIMIZERS["SGD"], workers=2)
    whole = Whole(OPTIMIZERS["SGD"])
    job.push(1, 0, gradients(1))
    job.tell(WorkerLost(now_ticks=0, worker=1))
    job.push(0, 0, gradients(0))
    whole.step([(a + b) / 2 for a, b in zip(gradients(0), gradients(1), strict=True)])
    assert relative_error(job.weights(), whole.weights) <= 1e-14


def test_an_empty_push_updates_nothing() -> None:
    job = Job(ASP(), OPTIMIZERS["Adam"])
    job.tell(PushReceived(now_ticks=0, worker=0, iteration=0, empty=True))
    job.tell(PullRequested(now_ticks=0, worker=0, iteration=0))
    assert_equal(job.weights(), initial_weights())
    assert job.shards[0].version == 0
    assert job.answers == [(0, 0, 0, 0)]


def test_a_worker_that_joins_anew_while_its_old_push_is_held_loses_neither() -> None:
    """A worker's iteration is pushed and held, the worker dies and starts that iteration over."""
    job = Job(BSP(), OPTIMIZERS["SGD"], workers=2)
    whole = Whole(OPTIMIZERS["SGD"])
    job.push(1, 0, gradients(1))
    job.tell(WorkerLost(now_ticks=0, worker=1))
    try:
        job.tell(WorkerJoined(now_ticks=0, worker=1, iteration=0))
    except InvalidEventError:
        job.tell(WorkerJoined(now_ticks=0, worker=1, iteration=1))  # a label that was used up may be refused
        job.push(1, 1, gradients(2))
    else:
        job.push(1, 0, gradients(2))
    job.push(0, 0, gradients(0))
    whole.step([(a + b + c) / 3 for a, b, c in zip(*(gradients(i) for i in range(3)), strict=True)])
    assert relative_error(job.weights(), whole.weights) <= 1e-14


# -- hyper-parameters and missing gradients ---------------------------------------------------------------


def with_lr(groups: tuple[HyperParameters, ...], lr: float) -> tuple[HyperParameters, ...]:
    return tuple({**group, "lr": lr} for group in groups)


def test_each_push_is_applied_with_the_hyper_parameters_it_brings() -> None:
    job = Job(ASP(), OPTIMIZERS["SGD momentum"], shards=2)
    whole = Whole(OPTIMIZERS["SGD momentum"])
    for step, lr in enumerate([0.1, 0.01, 0.5]):
        job.push(0, step, gradients(step), groups=with_lr(job.groups, lr))
        whole.optimizer.param_groups[0]["lr"] = lr
        whole.step(gradients(step))
    assert relative_error(job.weights(), whole.weights) <= 1e-14


def test_a_mean_is_applied_with_the_hyper_parameters_of_the_most_advanced_worker() -> None:
    flag = Stop(superstep=0, members=(0, 1))
    for ahead, behind in [(0, 1), (1, 0)]:
        job = Job(ElasticBSP(), OPTIMIZERS["SGD"])
        whole = Whole(OPTIMIZERS["SGD"])
        for iteration in range(2):
            job.push(ahead, iteration, gradients(iteration))
            whole.step(gradients(iteration))
        job.push(ahead, 2, gradients(2), groups=with_lr(job.groups, 0.25), stop=flag)
        job.push(behind, 0, gradients(3), groups=with_lr(job.groups, 0.5), stop=flag)
        whole.optimizer.param_groups[0]["lr"] = 0.25
        whole.step([(a + b) / 2 for a, b in zip(gradients(2), gradients(3), strict=True)])
        assert relative_error(job.weights(), whole.weights) <= 1e-14


def test_each_group_keeps_its_own_hyper_parameters() -> None:
    def factory(p: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:], "lr": 0.5, "momentum": 0.9}]
        return torch.optim.SGD(groups, lr=0.1)

    job, whole = Job(BSP(), factory, shards=3), Whole(factory)
    for iteration in range(3):
        for worker in range(2):
            job.push(worker, iteration, gradients(10 * iteration + worker))
        pairs = zip(gradients(10 * iteration), gradients(10 * iteration + 1), strict=True)
        whole.step([(a + b) / 2 for a, b in pairs])
    assert relative_error(job.weights(), whole.weights) <= 1e-14


@every_optimizer
@pytest.mark.parametrize("absent", [(0, 3), (1,), (0, 1, 2, 3, 4)])
def test_a_parameter_without_a_gradient_is_skipped(name: str, absent: tuple[int, ...]) -> None:
    """None and zero are different things: weight decay and momentum go on with zeros."""
    job, whole = Job(ASP(), OPTIMIZERS[name], shards=3), Whole(OPTIMIZERS[name])
    for iteration in range(4):
        grads: list[torch.Tensor | None] = [*gradients(iteration)]
        if iteration in (0, 2):
            for index in absent:
                grads[index] = None
        before = job.weights()
        job.push(0, iteration, grads)
        whole.step(grads)
        for index, weight in enumerate(job.weights()):
            if grads[index] is None:
                assert torch.equal(weight, before[index])
    assert relative_error(job.weights(), whole.weights) <= 1e-14


def test_a_zero_gradient_is_not_skipped() -> None:
    job = Job(ASP(), OPTIMIZERS["SGD momentum"])  # with weight decay
    job.push(0, 0, [torch.zeros_like(weight) for weight in initial_weights()])
    for weight, before in zip(job.weights(), initial_weights(), strict=True):
        assert not torch.equal(weight, before)


def test_in_a_mean_a_gradient_that_only_some_have_is_divided_by_all() -> None:
    job, whole = Job(BSP(), OPTIMIZERS["SGD"]), Whole(OPTIMIZERS["SGD"])
    some: list[torch.Tensor | None] = [*gradients(0)]
    some[0] = None
    job.push(0, 0, some)
    job.push(1, 0, gradients(1))
    whole.step(
        [gradients(1)[0] / 2, *((a + b) / 2 for a, b in zip(gradients(0)[1:], gradients(1)[1:], strict=True))]
    )
    assert relative_error(job.weights(), whole.weights) <= 1e-14


# -- state, staleness, refusals ---------------------------------------------------------------------------


@every_optimizer
def test_the_optimizers_state_saved_and_restored_goes_on_as_if_nothing_had_happened(name: str) -> None:
    job = Job(ASP(), OPTIMIZERS[name], shards=3)
    for iteration in range(3):
        job.push(0, iteration, gradients(iteration))
    resumed = Job(ASP(), OPTIMIZERS[name], shards=3, weights=job.weights())
    for old, new in zip(job.stores, resumed.stores, strict=True):
        state = {key: value.clone() for key, value in old.optimizer_state().items()}
        new.load_optimizer_state(state)
        assert new.optimizer_state().keys() == state.keys()
        assert all(torch.equal(new.optimizer_state()[key], state[key]) for key in state)
    for iteration in range(3):
        job.push(0, 3 + iteration, gradients(3 + iteration))
        resumed.push(0, iteration, gradients(3 + iteration))
    assert_equal(resumed.weights(), job.weights())


def test_a_restored_state_is_a_copy() -> None:
    job = Job(ASP(), OPTIMIZERS["SGD momentum"])
    job.push(0, 0, gradients(0))
    state = {key: value.clone() for key, value in job.stores[0].optimizer_state().items()}
    fresh = Job(ASP(), OPTIMIZERS["SGD momentum"])
    fresh.stores[0].load_optimizer_state(state)
    kept = {key: value.clone() for key, value in state.items()}
    fresh.push(0, 0, gradients(1))
    assert all(torch.equal(state[key], kept[key]) for key in kept)


@pytest.mark.parametrize(
    "state", [{"99/momentum_buffer": torch.zeros(3)}, {"0/momentum_buffer": torch.zeros(3)}]
)
def test_a_state_that_fits_no_segment_is_refused(state: Vectors) -> None:
    with pytest.raises(ProtocolError, match="matches no segment"):
        Job(ASP(), OPTIMIZERS["SGD momentum"]).stores[0].load_optimizer_state(state)


def test_staleness_is_the_updates_between_a_pull_and_the_pushs_own_application(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = Recorder.to_path(path, Header(sync="asp", host="shard"))
    job = Job(ASP(), OPTIMIZERS["SGD"], recorders=[recorder])
    for iteration in range(3):
        job.push(0, iteration, gradients(iteration))  # alone: nothing in between
    job.push(1, 0, gradients(3))  # computed on the weights of version 0: 3 behind
    job.push(0, 3, gradients(4))  # computed on version 3, before worker 1's
    job.push(1, 1, gradients(5), pull=False)
    recorder.close()
    trace = read(path)
    assert [entry.staleness for entry in trace.entries if isinstance(entry.event, PushReceived)] == [
        [(0, 0, 0)],
        [(0, 1, 0)],
        [(0, 2, 0)],
        [(1, 0, 3)],
        [(0, 3, 1)],
        [(1, 1, 1)],
    ]
    assert measure([trace]).max_staleness == 3
    assert replay(trace) == []


def test_under_bsp_no_gradient_is_ever_stale(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = Recorder.to_path(path, Header(sync="bsp", host="shard"))
    job = Job(BSP(), OPTIMIZERS["SGD"], workers=3, recorders=[recorder])
    for iteration in range(4):
        for worker in range(3):
            job.push(worker, iteration, gradients(worker))
    job.tell(WorkerFinished(now_ticks=1, worker=2))
    recorder.close()
    measures = measure([read(path)])
    assert (measures.updates, measures.max_staleness, measures.max_gap) == (4, 0, 0)


@pytest.mark.parametrize("sync", [BSP(), ASP(), SSP(staleness=0), ElasticBSP()], ids=str)
def test_a_refused_event_leaves_weights_version_and_state_as_they_were(
    sync: SyncModel, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = Recorder.to_path(path, Header(sync=str(sync), host="shard"))
    job = Job(sync, OPTIMIZERS["Adam"], recorders=[recorder])
    control = Job(sync, OPTIMIZERS["Adam"])
    for one in (job, control):
        one.push(0, 0, gradients(0))
    before, version, answers = job.weights(), job.shards[0].version, list(job.answers)
    state = {key: value.clone() for key, value in job.stores[0].optimizer_state().items()}
    for worker, iteration in [(0, 0), (0, 5), (1, 3), (7, 0)]:
        with pytest.raises(InvalidEventError):
            job.push(worker, iteration, gradients(99))
    with pytest.raises(InvalidEventError):
        job.tell(WorkerJoined(now_ticks=0, worker=1))
    assert_equal(job.weights(), before)
    assert (job.shards[0].version, job.answers) == (version, answers)
    assert job.stores[0].optimizer_state().keys() == state.keys()
    for one in (job, control):
        one.push(1, 0, gradients(1))
    assert_equal(job.weights(), control.weights())
    recorder.close()
    trace = read(path)
    assert sum(entry.refused is not None for entry in trace.entries) == 5
    assert replay(trace) == []


def test_a_shard_without_any_parameter_counts_along() -> None:
    job = Job(BSP(), OPTIMIZERS["Adam"], shards=16)
    hollow = [store for store in job.stores if not store.bounds.segments]
    assert hollow
    for worker in range(2):
        job.push(worker, 0, gradients(worker))
    assert {shard.version for shard in job.shards} == {1}
