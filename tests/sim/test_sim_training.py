"""Training in virtual time: real gradients, on a cluster that need not exist."""

from __future__ import annotations

import _thread
import copy
import gc
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.core.lease import Split
from paceline.errors import ConfigurationError, NonFiniteGradientError, RunFailedError, UsageError
from paceline.sim import Cluster, Presence, SimResult, Uniform, simulate
from paceline.sim.virtual_training import VirtualSession
from paceline.trace import replay
from paceline.train.session import current
from tests.support.live import run_program

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

UNEQUAL = Cluster(compute_s=[Uniform(low=0.9, high=1.1)] * 2 + [3.0], servers=2, latency_s=0.01)

SYNCS = [
    "bsp",
    "asp",
    "ssp:staleness=2",
    "pssp:staleness=1",
    "dynamic-pssp:staleness=1,alpha=significance",
    "drop-stragglers:quorum=2",
    "elastic-bsp:lookahead=4",
    "spec-sync",
    "naive-waiting:delay_s=0.2",
    "bsp@0,asp@epoch:1,elastic-bsp:lookahead=4@8",
]


def _first_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        return nn.Sequential(*layers).to(torch.float64)


FIRST = _first_model()  # made once: the threads of a live run share torch's generator


def model_of() -> nn.Sequential:
    """The same at every call."""
    return copy.deepcopy(FIRST)


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    """Ninety-six examples of three classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def train(
    epochs: int = 3,
    lr: float = 0.05,
    counted: list[int] | None = None,
    *,
    shuffle: bool = True,
    split: Split | None = "auto",
) -> None:
    """What every worker runs."""
    model = model_of()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)
    data = torch.utils.data.TensorDataset(*examples())
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=shuffle)
    part: Iterable[list[torch.Tensor]] = [batch for _ in range(12) for batch in itertools.islice(loader, 1)]
    if split is not None:
        part = paceline.distribute(loader, split=split)
    for _ in range(epochs):
        for x, y in part:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                if counted is not None:
                    counted.append(paceline.worker_index())
                return loss

            optimizer.step(closure)


def same_weights(one: SimResult, other: SimResult) -> bool:
    assert one.state_dict is not None
    assert other.state_dict is not None
    return all(torch.equal(tensor, other.state_dict[name]) for name, tensor in one.state_dict.items())


@pytest.mark.parametrize("sync", SYNCS)
def test_every_model_trains_replays_and_comes_out_the_same_twice(sync: str) -> None:
    one, other = (
        simulate(UNEQUAL, sync, train_fn=train, args=(4, 0.1), seed=3, record=True) for _ in range(2)
    )
    assert same_weights(one, other)
    assert (one.trace, one.losses, one.time_s) == (other.trace, other.losses, other.time_s)
    for trace in one.trace:
        assert replay(trace) == []
        assert trace.header.computed_by.startswith("torch ")
    assert one.losses is not None
    assert len(one.losses) == 3 * 4 * 4
    begin, end = one.losses[:6], one.losses[-6:]
    assert sum(loss.loss for loss in end) < 0.9 * sum(loss.loss for loss in begin)


def test_bsp_is_what_a_live_run_computes(run_on_threads: RunOnThreads) -> None:
    def in_order() -> None:  # the threads of a live run share torch's generator
        train(shuffle=False)

    live = run_on_threads(in_order, workers=3, servers=2, sync="bsp").state_dict
    simulated = simulate(UNEQUAL, "bsp", train_fn=in_order).state_dict
    assert simulated is not None
    assert simulated.keys() == live.keys()
    for name, tensor in live.items():
        torch.testing.assert_close(simulated[name], tensor, rtol=0, atol=1e-12)


def test_the_time_is_the_clusters_and_not_the_computations() -> None:
    timing = simulate(UNEQUAL, "elastic-bsp:lookahead=4", iterations=12, seed=3)
    trained = simulate(
        UNEQUAL, "elastic-bsp:lookahead=4", train_fn=lambda: train(epochs=1, split=None), seed=3
    )
    assert trained.time_s == timing.time_s
    assert trained.measures == timing.measures


def test_a_gradient_that_is_to_be_dropped_is_never_computed() -> None:
    counted: list[int] = []
    result = simulate(
        UNEQUAL, "spec-sync:abort_time_s=0.5,abort_rate=0", train_fn=train, args=(3, 0.02, counted)
    )
    assert result.restarts > 5
    assert len(counted) == 3 * 12


def test_a_step_without_a_closure_is_not_dropped_half_way() -> None:
    def plain() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.Adam(model.parameters()), model=model)
        for _ in range(6):
            optimizer.zero_grad()
            model(examples()[0]).square().mean().backward()
            optimizer.step()

    result = simulate(UNEQUAL, "spec-sync:abort_time_s=0.1,abort_rate=0", train_fn=plain, record=True)
    assert result.restarts == 0
    assert [len(records) for records in result.records] == [6, 6, 6]


def test_a_step_that_cannot_be_dropped_takes_all_its_time() -> None:
    def plain() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in range(6):
            optimizer.zero_grad()
            model(examples()[0]).square().mean().backward()
            optimizer.step()

    ordered = simulate(UNEQUAL, "spec-sync:abort_time_s=0.1,abort_rate=0", train_fn=plain)
    free = simulate(UNEQUAL, "asp", train_fn=plain)
    assert ordered.finished_s == free.finished_s


@pytest.mark.parametrize("sync", ["asp", "spec-sync:abort_time_s=0.5,abort_rate=0"])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_gradient_that_is_refused_has_taken_its_time(sync: str, with_closure: bool) -> None:
    def stumbling() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for iteration in range(4):

            def closure(iteration: int = iteration) -> float:
                optimizer.zero_grad()
                loss = model(examples()[0]).square().mean() * (math.nan if iteration == 1 else 1.0)
                loss.backward()
                return float(loss.detach())

            try:
                if with_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
            except NonFiniteGradientError:
                assert iteration == 1

    result = simulate(Cluster(compute_s=[2.0]), sync, train_fn=stumbling)
    assert (result.measures.iterations, result.finished_s) == ({0: 3}, (8.0,))


def test_a_limit_of_samples_that_are_not_counted_is_refused() -> None:
    def plain() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in range(20):
            optimizer.zero_grad()
            model(examples()[0]).square().mean().backward()
            optimizer.step()

    with pytest.raises(UsageError, match="none were counted in the first 5 iterations of worker 0"):
        simulate(Cluster(compute_s=[1.0, 2.0]), "asp", train_fn=plain, until_samples=100)


def test_a_worker_that_is_lost_while_it_computes_has_pushed_nothing() -> None:
    def plain() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in range(3):
            optimizer.zero_grad()
            model(examples()[0]).square().mean().backward()
            optimizer.step()

    cluster = Cluster(compute_s=[1.0, 4.0], presence={1: Presence(lost_at_s=2.0)})
    result = simulate(cluster, "asp", train_fn=plain)
    assert (result.measures.iterations, result.updates) == ({0: 3, 1: 0}, 3)


def test_ctrl_c_between_two_turns_ends_all_functions() -> None:
    def interrupted() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for iteration in range(5):
            optimizer.zero_grad()
            model(examples()[0]).square().mean().backward()
            if iteration == 3:
                _thread.interrupt_main()
            optimizer.step()

    before = threading.active_count()
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            simulate(UNEQUAL, "asp", train_fn=interrupted)
    assert threading.active_count() == before


STUBBORN = """
import torch, paceline
from paceline.sim import Cluster, simulate

def stubborn():
    model = torch.nn.Linear(2, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    for iteration in range(10**6):
        if paceline.worker_index() == 1 and iteration == 2:
            raise ValueError("no further")
        try:
            optimizer.step()
        except BaseException:
            if paceline.worker_index() == 1:
                raise

before = torch.get_rng_state()
torch.set_num_threads(2)
try:
    simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "asp", train_fn=stubborn)
except paceline.errors.UsageError as error:
    print(str(error).partition(",")[0], torch.get_num_threads(), torch.equal(torch.get_rng_state(), before))
"""
"""The thread of such a function exists until the process ends, so this process must not be that of the tests."""


def test_a_function_that_cannot_be_stopped_leaves_the_caller_as_before() -> None:
    ended = run_program("-c", STUBBORN)
    assert ended.stdout == "paceline worker 0 cannot be stopped 2 True\n", ended.stderr


def test_each_worker_has_generators_of_its_own_and_the_callers_stay_as_they_were() -> None:
    drawn: dict[str, dict[int, list[float]]] = {}

    def draw(sync: str) -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        mine = drawn[sync].setdefault(paceline.worker_index(), [])
        for _ in range(5):
            mine += [float(torch.rand(())), random.random(), float(np.random.rand())]
            optimizer.zero_grad()
            model(examples()[0]).square().mean().backward()
            optimizer.step()

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    for sync in ("bsp", "asp"):
        drawn[sync] = {}
        simulate(UNEQUAL, sync, train_fn=draw, args=(sync,))
    assert drawn["bsp"] == drawn["asp"]
    assert len({tuple(numbers) for numbers in drawn["bsp"].values()}) == 3
    after = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_exactly_one_worker_runs_at_a_time() -> None:
    turn = threading.Lock()

    def alone() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in range(5):

            def closure() -> float:
                with_turn = turn.acquire(blocking=False)
                assert with_turn
                model(examples()[0]).square().mean().backward()
                turn.release()
                return 0.0

            optimizer.step(closure)

    simulate(UNEQUAL, "asp", train_fn=alone)


def test_snapshots_are_taken_on_a_grid_of_virtual_time() -> None:
    result = simulate(UNEQUAL, "bsp", train_fn=train, snapshot_every_s=4.0)
    assert [time_s for time_s, _ in result.snapshots] == [4.0 * k for k in range(len(result.snapshots))]
    assert result.time_s - 4.0 < result.snapshots[-1][0] < result.time_s + 4.0
    versions = [snapshot.versions[0] for _, snapshot in result.snapshots]
    assert versions == sorted(versions)
    assert versions[-1] == result.updates == 12


def test_a_run_ends_where_a_look_at_its_weights_says_so() -> None:
    seen: list[float] = []

    def enough(time_s: float, snapshot: object) -> bool:
        seen.append(time_s)
        return time_s >= 8.0

    result = simulate(UNEQUAL, "asp", train_fn=train, snapshot_every_s=2.0, on_snapshot=enough, record=True)
    assert seen == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert result.snapshots == []
    assert max(record.answered_s for records in result.records for record in records) <= 8.0
    assert threads() == []


def test_a_preempted_worker_starts_anew_with_the_weights_of_now() -> None:
    starts: list[int] = []

    def count() -> None:
        starts.append(paceline.worker_index())
        train(epochs=4)

    cluster = Cluster(
        compute_s=[1.0, 1.0, 1.0],
        presence={1: Presence(lost_at_s=5.5, back_after_s=2.0), 2: Presence(lost_at_s=3.5)},
    )
    result = simulate(cluster, "ssp:staleness=2", train_fn=count, record=True)
    assert starts == [0, 1, 2, 1]
    records = [len(records) for records in result.records]
    assert records[2] == 3
    assert records[1] > 5  # it also works after it has come back
    assert sum(records) == 4 * 12  # every batch of every epoch was used once
    assert threads() == []


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]


def test_when_the_time_is_up_everything_stops() -> None:
    result = simulate(UNEQUAL, "asp", train_fn=train, until_s=5.0)
    assert result.updates < 20
    assert threads() == []


def test_a_script_may_change_the_model() -> None:
    def changing() -> None:
        train(epochs=1)

    def script() -> None:
        paceline.set_sync("asp")
        changing()

    result = simulate(UNEQUAL, "bsp", train_fn=script)
    assert result.updates > 4


def test_without_overlap_a_script_may_not_ask_for_asp_neither_simulated_nor_live(
    run_on_threads: RunOnThreads,
) -> None:
    refused: list[str] = []

    def asking() -> None:
        with pytest.raises(ConfigurationError) as early:
            paceline.set_sync("asp")  # before training has begun
        train(epochs=1, shuffle=False)
        with pytest.raises(ConfigurationError) as late:
            paceline.set_sync("asp")
        refused.extend([str(early.value), str(late.value)])

    result = simulate(UNEQUAL, "bsp", train_fn=asking, overlap="off")
    assert result.measures.max_staleness == 0
    run_on_threads(asking, workers=3, servers=2, sync="bsp", overlap="off")
    assert len(refused) == 2 * 2 * 3
    [reason] = set(refused)
    assert reason.startswith("overlap is 'off', which requires the sync model bsp, but the sync model is asp")


# -- what is left of a run -----------------------------------------------------------------------------------

RESTARTING = "spec-sync:abort_time_s=0.5,abort_rate=0"
CUT_SHORT = Cluster(compute_s=[1.0, 1.0, 1.0], presence={1: Presence(lost_at_s=2.5, back_after_s=1.0)})


class Left:
    """Trains, and notes without holding on to them what each worker's run is made of."""

    def __init__(self) -> None:
        self.models: list[ref[Any]] = []
        self.sessions: list[ref[Any]] = []
        self.trainings: list[ref[Any]] = []

    def __call__(self) -> None:
        model = model_of()
        session = current()
        assert isinstance(session, VirtualSession)
        self.models.append(ref(model))
        self.sessions.append(ref(session))
        self.trainings.append(ref(session._training))
        fit(model, steps=5)

    @property
    def left(self) -> list[object]:
        """Models and sessions that there still are."""
        return [found for there in (*self.models, *self.sessions) if (found := there()) is not None]


def fit(model: nn.Module, steps: int) -> None:
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(examples()[0]).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("sync", ["asp", RESTARTING])
@pytest.mark.parametrize(("cluster", "until_s"), [(UNEQUAL, math.inf), (CUT_SHORT, math.inf), (UNEQUAL, 3.5)])
def test_after_the_call_nothing_of_a_run_is_left(sync: str, cluster: Cluster, until_s: float) -> None:
    left = Left()
    result = simulate(cluster, sync, train_fn=left, until_s=until_s)
    gc.collect()
    assert result.updates > 5
    assert len(left.models) >= 3
    assert left.left == []
    assert [training() for training in left.trainings if training() is not None] == []


@pytest.mark.parametrize("sync", ["asp", RESTARTING])
def test_what_is_large_is_free_at_once_and_not_when_the_garbage_collector_comes_by(sync: str) -> None:
    simulate(UNEQUAL, sync, train_fn=Left())  # what torch first imports now keeps its importer's frames
    gc.collect()
    left = Left()
    gc.disable()
    try:
        simulate(UNEQUAL, sync, train_fn=left)
        assert left.left == []
    finally:
        gc.enable()


def held() -> tuple[int, int]:
    """The number of the package's objects, and the bytes of all tensors, that there are after a collection."""
    gc.collect()
    found = gc.get_objects()
    own = sum(str(type(thing).__module__).partition(".")[0] == "paceline" for thing in found)
    # `isinstance` would look at attributes, which wakes up whatever is imported when it is first used. Other
    # subclasses of `Tensor`, such as those of torch's compiler, have no memory of their own.
    tensors = [thing for thing in found if type(thing) in (torch.Tensor, nn.Parameter)]
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)
    }
    return own, sum(storages.values())


@pytest.mark.thorough
def test_eighty_calls_hold_no_more_than_the_first_ones() -> None:
    syncs = ("bsp", "asp", "elastic-bsp:lookahead=2", "spec-sync", RESTARTING)
    pair = Cluster(compute_s=[1.0, 1.5])
    restarts = 0
    first = None
    for call in range(80):
        sync = syncs[call % len(syncs)]
        restarts += simulate(pair, sync, train_fn=lambda: fit(model_of(), steps=3), seed=call).restarts
        if call == 2 * len(syncs):
            first = held()
    assert restarts > 0
    assert first is not None
    objects, size_bytes = held()
    assert objects <= first[0]
    assert size_bytes <= first[1]


@pytest.mark.parametrize("host", ["simulated", "live"])
def test_a_model_that_outlives_its_run_has_no_hooks_left(host: str, run_on_threads: RunOnThreads) -> None:
    models: list[nn.Module] = []

    def keep() -> None:
        models.append(model_of())
        fit(models[-1], steps=3)

    if host == "live":
        run_on_threads(keep, workers=3, servers=2, sync=RESTARTING)
    else:
        simulate(UNEQUAL, RESTARTING, train_fn=keep)
    gc.collect()
    assert len(models) == 3
    for model in models:
        assert [module for module in model.modules() if module._forward_pre_hooks] == []
        assert [p for p in model.parameters() if getattr(p, "_post_accumulate_grad_hooks", None)] == []


# -- what fails ----------------------------------------------------------------------------------------------


def raising() -> None:
    if paceline.worker_index() == 1:
        raise ValueError("no such file")
    train()


def idle() -> None:
    pass


def other_model() -> None:
    if paceline.worker_index() < 2:
        train()
        return
    model = nn.Linear(2, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raising, "worker 1 failed: ValueError: no such file"),
        (idle, "no worker ever called step"),
        (other_model, "worker 2 failed: its model differs from the model of worker 0"),
    ],
)
def test_what_fails_is_named_and_nothing_is_left_running(function: Callable[[], None], reason: str) -> None:
    with pytest.raises(RunFailedError, match=reason):
        simulate(UNEQUAL, "bsp", train_fn=function)
    assert threads() == []


def test_what_only_timings_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="shard_bytes"):
        simulate(UNEQUAL, "bsp", train_fn=train, shard_bytes=[1, 2])


def test_a_loader_on_another_thread_is_refused() -> None:
    """Only one thread of a simulation may run at a time."""
    errors: list[BaseException] = []

    def train_with_thread() -> None:
        model = model_of()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        data = torch.utils.data.TensorDataset(*examples())
        loader = paceline.distribute(torch.utils.data.DataLoader(data, batch_size=8))
        nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()

        def load() -> None:
            try:
                next(iter(loader))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()

    simulate(Cluster(compute_s=[1.0]), "asp", train_fn=train_with_thread)
    assert "only on the thread that runs the training" in str(errors[0])
