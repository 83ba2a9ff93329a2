"""Frozen parameters: every worker loads its own, only adapters travel, and only values that differ are sent."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.layout import FrozenSpec, Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.messages import FetchFrozen, FrozenTensors, Snapshot
from paceline.errors import ConfigurationError, PacelineError, PeerLostError, ProtocolError
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job import Assignment
from paceline.run.job_options import make_job
from paceline.run.readers import Assembly, Fetches, Reader
from paceline.run.server import FrozenValues, ServerHost
from paceline.run.worker import WorkerSession
from paceline.run.worker_links import Links
from paceline.shard import vectors as digests
from paceline.shard.store import read_frozen, require_complete
from paceline.shard.vectors import chunks, digest_of, digests_of
from paceline.sim import Cluster, Presence, simulate
from paceline.train import session as sessions
from paceline.train.session import current

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads, ThreadedRun

WIDTH, RANK, BATCH = 64, 2, 8
ADAPTER_BYTES = 4 * (2 * RANK * WIDTH + WIDTH + 1)
"""Size of the trained parameters of `Adapted`: a and b of the adapter, and the head."""

MESSAGES_BYTES = 1024
"""Maximum number of bytes that a push may have besides the gradient."""

State = dict[str, torch.Tensor]


def fill(parameters: Iterable[torch.Tensor], seed: int) -> None:
    """Initialize parameters; several threads may do so at the same time."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        nn.init.normal_(parameter, std=0.1, generator=generator)


class Adapter(nn.Module):
    """LoRA: a frozen linear layer, to which a trained matrix of low rank is added."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(RANK, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


class Adapted(nn.Module):
    """An adapter on a frozen layer, a frozen layer with the same weight, and a trained head."""

    def __init__(self, seed: int = 0, bias_seed: int | None = None) -> None:
        super().__init__()
        self.inner = Adapter(nn.Linear(WIDTH, WIDTH))
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.outer.weight = self.inner.base.weight
        self.head = nn.Linear(WIDTH, 1)
        fill(self.parameters(), seed)
        if bias_seed is not None:
            fill([self.inner.base.bias], bias_seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.outer(torch.tanh(self.inner(x))))
        return out


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * worker + step))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def alone(model: nn.Module, steps: int, workers: int, make: Any = adam) -> State:
    """One process on the joint batch."""
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.cat([batch(worker, step) for worker in range(workers)])
        (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
        optimizer.step()
    return state_of(model)


def train(model: Adapted, steps: int, make: Any = adam, first: int = 0) -> Adapted:
    optimizer = paceline.DistributedOptimizer(make(model), model=model)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = batch(paceline.worker_index(), step)
        (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
        optimizer.step()
    return model


def require_close(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def kept(run: ThreadedRun) -> int:
    """Number of frozen tensors whose values the servers have."""
    return sum(len(server._frozen.kept) for server in run.servers)


# -- digests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_a_digest_depends_on_dtype_shape_and_each_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    assert digest_of(tensor) == digest_of(tensor.t().contiguous().t()) == digest_of(nn.Buffer(tensor.clone()))
    assert digest_of(tensor) != digest_of(tensor.reshape(6, 4))
    changed = tensor.clone()
    changed.view(torch.uint8)[3, -1] ^= 1
    assert digest_of(changed) != digest_of(tensor)
    assert digest_of(torch.zeros(2, dtype=torch.int32)) != digest_of(torch.zeros(2, dtype=torch.float32))
    assert digest_of(torch.tensor(0.0)) != digest_of(torch.tensor(-0.0))


def test_a_digest_does_not_depend_on_the_size_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(1000), torch.randn(()), torch.empty(0, 3), torch.randn(7, 11)]
    whole = digests_of(tensors)
    monkeypatch.setattr(digests, "CHUNK_BYTES", 64)
    assert digests_of(tensors) == whole
    assert [len(part) for part in chunks(tensors[3])][-2:] == [64, 4 * 77 % 64]
    assert b"".join(chunks(tensors[0])) == tensors[0].numpy().tobytes()


# -- what travels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2])
def test_only_the_adapters_travel_and_the_servers_have_nothing_else(
    run_on_threads: RunOnThreads, servers: int
) -> None:
    sent: dict[int, list[int]] = {0: [], 1: []}

    def function() -> None:
        session = sessions.current()
        assert isinstance(session, WorkerSession)
        model = Adapted()
        optimizer = paceline.DistributedOptimizer(adam(model), model=model)
        for step in range(11):
            optimizer.zero_grad()
            model(batch(session.worker, step)).square().mean().backward()
            optimizer.step()
            sent[session.worker].append(sum(stream.traffic[0] for stream in session.links.servers))

    run = run_on_threads(function, workers=2, servers=servers, transport="tcp")
    for totals in sent.values():  # the first push follows the initial weights
        assert totals[0] <= 2 * (ADAPTER_BYTES + MESSAGES_BYTES)
        pushes = [after - before for before, after in itertools.pairwise(totals)]
        assert all(ADAPTER_BYTES <= push <= ADAPTER_BYTES + MESSAGES_BYTES for push in pushes), pushes
    memories = [server._require_memory() for server in run.servers]
    held = [memory.weights[shard] for memory in memories for shard in memory.shards]
    assert sum(part.nbytes for weights in held for part in weights.values()) <= ADAPTER_BYTES + 64
    assert memories[0].pooled_buffers() == []
    assert kept(run) == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_adapters_are_trained_as_by_one_process_on_the_joint_batch(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    run = run_on_threads(lambda: state_of(train(Adapted(), 10)), workers=2, transport=transport)
    expected = alone(Adapted(), 10, 2)
    require_close(run.state_dict, expected)
    for state in run.results.values():
        assert isinstance(state, dict)
        require_close(state, expected)
    assert torch.equal(run.state_dict["outer.weight"], run.state_dict["inner.base.weight"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_frozen_value_that_differs_is_that_of_the_initializer(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    """The bias differs in two of three workers, the tied weight in none."""
    run = run_on_threads(
        lambda: state_of(train(Adapted(bias_seed=max(1, paceline.worker_index())), 10)),
        workers=4,
        transport=transport,
    )
    expected = alone(Adapted(bias_seed=1), 10, 4)
    require_close(run.state_dict, expected)
    for state in run.results.values():
        assert isinstance(state, dict)
        require_close(state, expected)
    assert kept(run) == 1


def test_workers_with_random_frozen_layers_train_the_same_model(run_on_threads: RunOnThreads) -> None:
    run = run_on_threads(lambda: state_of(train(Adapted(seed=paceline.worker_index()), 10)), workers=3)
    expected = alone(Adapted(seed=0), 10, 3)
    require_close(run.state_dict, expected)
    for state in run.results.values():
        assert isinstance(state, dict)
        require_close(state, expected)
    assert kept(run) == 2  # the weight with two names, and the bias


def test_nan_in_a_frozen_parameter_is_equal_to_itself(run_on_threads: RunOnThreads) -> None:
    def function() -> None:
        model = Adapted()
        model.register_parameter("unused", nn.Parameter(torch.tensor([torch.nan, 1.0]), requires_grad=False))
        train(model, 2)

    run = run_on_threads(function, workers=2)
    assert kept(run) == 0
    assert run.state_dict["unused"].isnan().tolist() == [True, False]


def test_what_is_saved_has_the_frozen_parameters_of_the_run(
    run_on_threads: RunOnThreads, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"

    def function() -> None:
        model = train(Adapted(seed=paceline.worker_index()), 3)
        with paceline.evaluating(model) as snapshot:
            assert torch.equal(snapshot.inner.base.weight, Adapted().inner.base.weight)
        paceline.save(model.state_dict(), path)

    run = run_on_threads(function, workers=2)
    saved = torch.load(path)
    require_close(saved, run.state_dict)
    require_close(saved, alone(Adapted(), 3, 2))


# -- the model grows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("differs", [False, True])
def test_a_frozen_parameter_can_be_trained_later(run_on_threads: RunOnThreads, differs: bool) -> None:
    def grow(model: Adapted, optimizer: torch.optim.Optimizer) -> None:
        model.inner.base.bias.requires_grad_(True)
        optimizer.add_param_group({"params": [model.inner.base.bias], "lr": 0.02})

    def function() -> State:
        model = Adapted(bias_seed=paceline.worker_index() if differs else 0)
        optimizer = paceline.DistributedOptimizer(adam(model), model=model)
        for step in range(8):
            if step == 4:
                grow(model, optimizer)
            optimizer.zero_grad()
            x = batch(paceline.worker_index(), step)
            (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
        return state_of(model)

    run = run_on_threads(function, workers=2, servers=2)
    simulated = simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=function)
    model = Adapted(bias_seed=0)
    optimizer = adam(model)
    for step in range(8):
        if step == 4:
            grow(model, optimizer)
        optimizer.zero_grad()
        x = torch.cat([batch(worker, step) for worker in range(2)])
        (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
        optimizer.step()
    require_close(run.state_dict, state_of(model))
    require_close(simulated.state_dict or {}, state_of(model))
    assert kept(run) == 0  # the bias is not frozen any more


def test_a_frozen_layer_that_is_added_later_is_that_of_the_initializer(run_on_threads: RunOnThreads) -> None:
    class Grown(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.before: nn.Module = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.before(x))

    def grow(model: Grown, optimizer: torch.optim.Optimizer, seed: int) -> None:
        model.before = Adapter(nn.Linear(WIDTH, WIDTH))
        fill(model.before.parameters(), seed)
        trained = [parameter for parameter in model.before.parameters() if parameter.requires_grad]
        optimizer.add_param_group({"params": trained, "lr": 0.02})

    def function() -> State:
        model = Grown()
        optimizer = paceline.DistributedOptimizer(adam(model), model=model)
        for step in range(8):
            if step == 4:
                grow(model, optimizer, 5 + paceline.worker_index())
            optimizer.zero_grad()
            x = batch(paceline.worker_index(), step)
            (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
        return state_of(model)

    run = run_on_threads(function, workers=3, transport="tcp")
    for state in run.results.values():
        assert isinstance(state, dict)
        require_close(state, run.state_dict)
    added = Adapter(nn.Linear(WIDTH, WIDTH))
    fill(added.parameters(), 5)
    assert torch.equal(run.state_dict["before.base.weight"], added.base.weight)
    assert kept(run) == 2


def test_a_value_may_arrive_when_its_parameter_is_no_longer_frozen(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that joins reads the model just before it is extended. A worker has sent a value for this machine."""
    held: list[tuple[FetchFrozen, bytes]] = []
    extended, arriving = threading.Event(), threading.Event()
    connect_links, retain, sizes = Links.connect, FrozenValues.retain, FrozenValues.sizes

    def hold(self: Fetches, message: FetchFrozen) -> None:
        held.append((message, b"".join(self._callbacks.frozen(message.digests[0]) or ())))

    def connect_after_sending(self: Links, *arguments: Any) -> None:
        if held:
            assert extended.wait(60.0)
            request, value = held.pop()
            self.to_shard(0, FrozenTensors(0, request.digests), [memoryview(value)], lent=None)
            assert arriving.wait(60.0)
        connect_links(self, *arguments)

    def retain_and_tell(self: FrozenValues[Any], digests: Iterable[str]) -> list[Any]:
        extended.set()
        return retain(self, digests)

    def sizes_and_tell(self: FrozenValues[Any], digests: Sequence[str]) -> list[int]:
        arriving.set()
        return sizes(self, digests)

    monkeypatch.setattr(Fetches, "_send_frozen", hold)
    monkeypatch.setattr(Links, "connect", connect_after_sending)
    monkeypatch.setattr(FrozenValues, "retain", retain_and_tell)
    monkeypatch.setattr(FrozenValues, "sizes", sizes_and_tell)

    def function() -> None:
        model = Adapted()
        optimizer = paceline.DistributedOptimizer(adam(model), model=model)

        def step() -> None:
            optimizer.zero_grad()
            model(batch(0, 0)).square().mean().backward()
            optimizer.step()

        step()
        session = current()
        assert isinstance(session, WorkerSession)
        described = session.servers.model
        assert described is not None
        [address] = session.core.started.addresses if session.core.started is not None else ()
        shards = [(shard, address) for shard in session.servers.shards]
        reader = Reader.connect(described, shards, session._job.token)
        errors: list[BaseException] = []

        def read() -> None:
            try:
                reader.read_frozen([spec for spec in described.frozen if spec.name == "inner.base.bias"])
            except PacelineError as error:
                errors.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        while not held:
            session.links.hear(timeout_s=0.1)
        model.inner.base.bias.requires_grad_(True)
        optimizer.add_param_group({"params": [model.inner.base.bias]})
        step()
        reading.join(60.0)
        assert [type(error) for error in errors] == [PeerLostError], (
            "the machine reads the extended model now"
        )
        reader.close()
        step()

    run = run_on_threads(function, workers=1, transport="tcp")
    assert kept(run) == 0
    assert "inner.base.bias" in run.state_dict


# -- weights of a run -------------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def first_part() -> None:
    train(Adapted(), 4, sgd)


def second_part(path: str) -> None:
    model = Adapted(seed=9)
    model.load_state_dict(load_file(path))
    train(model, 4, sgd, first=4)


@pytest.mark.processes
def test_a_run_saves_the_whole_model_from_which_another_run_goes_on(mark: str, tmp_path: Path) -> None:
    pace = [0.25, 0.25]  # the run lasts long enough for a snapshot
    first = paceline.launch(
        first_part, workers=2, run_dir=tmp_path / "first", snapshot_every_s=0.1, pace=pace
    )
    snapshots = [snapshot for _, snapshot in first.snapshots]
    assert snapshots
    assert {snapshot.frozen for snapshot in snapshots} == {()}
    assert all(snapshot.state_dict.keys() == first.state_dict.keys() for snapshot in snapshots)
    path = tmp_path / "first" / "weights.safetensors"
    assert not (tmp_path / "first" / "frozen").exists()
    require_close(load_file(path), first.state_dict)
    require_close(first.state_dict, alone(Adapted(), 4, 2, sgd))
    again = paceline.launch(second_part, args=(str(path),), workers=2, run_dir=tmp_path / "second")
    require_close(again.state_dict, alone(Adapted(), 8, 2, sgd))


# -- a worker that joins late -----------------------------------------------------------------------------


def test_simulated_workers_with_random_frozen_layers_train_the_same_model() -> None:
    states: list[State] = []
    result = simulate(
        Cluster(compute_s=[1.0, 2.0]),
        "bsp",
        train_fn=lambda: states.append(state_of(train(Adapted(seed=paceline.worker_index()), 6))),
    )
    for state in [*states, result.state_dict or {}]:
        require_close(state, alone(Adapted(seed=0), 6, 2))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_simulated_worker_that_joins_late_has_the_frozen_parameters_of_the_run(sync: str) -> None:
    seen: list[State] = []

    def function() -> None:
        late = paceline.worker_index() == 1
        model = Adapted(seed=1 if late else 0)
        optimizer = paceline.DistributedOptimizer(adam(model), model=model)
        loader = DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=4)
        for _ in paceline.epochs(3):
            for (x,) in paceline.distribute(loader):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if late:
                    seen.append(state_of(model))

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=4.5)})
    result = simulate(cluster, sync, train_fn=function)
    assert result.state_dict is not None
    for state in (seen[0], result.state_dict):
        for name in ("inner.base.weight", "inner.base.bias", "outer.weight"):
            assert torch.equal(state[name], Adapted().state_dict()[name]), name


def by_evaluating(model: Adapted) -> torch.Tensor:
    with paceline.evaluating(model) as snapshot:
        return snapshot.inner.base.weight.detach().clone()


def by_training(model: Adapted) -> torch.Tensor:
    return torch.empty(0)


def by_its_steps(model: Adapted, late_has_trained: threading.Event, step: Callable[[], None]) -> None:
    while not late_has_trained.is_set():
        step()


def in_a_barrier(model: Adapted, late_has_trained: threading.Event, step: Callable[[], None]) -> None:
    paceline.barrier()
    assert late_has_trained.is_set()


def in_an_evaluation(model: Adapted, late_has_trained: threading.Event, step: Callable[[], None]) -> None:
    with paceline.evaluating(model):
        assert late_has_trained.wait(30.0)


@pytest.mark.parametrize(
    ("sync", "wait", "look"),
    [
        ("bsp", by_its_steps, by_evaluating),
        ("asp", by_its_steps, by_training),
        ("asp", in_a_barrier, by_training),  # in lockstep, the late worker joins only when worker 0 pushes
        ("asp", in_an_evaluation, by_evaluating),
        ("bsp", in_an_evaluation, by_training),
        ("asp", in_an_evaluation, by_training),
    ],
)
def test_a_live_worker_that_joins_late_receives_what_differs_from_a_worker_that_trains(
    sync: str, wait: Callable[..., None], look: Callable[[Adapted], torch.Tensor], tmp_path: Path
) -> None:
    """Worker 0 alone has begun the run, so no server has the values. The late worker looks first, or trains."""
    job = make_job(
        workers=2, servers=1, sync=sync, transport="tcp", run_dir=tmp_path / "run", least=1, joined=True
    )
    coordinator = CoordinatorHost.listen(job)
    coordinator.core.invite(1)
    coordinator.start()
    server = ServerHost.connect(Assignment(job=job, role="server", index=0, coordinator=coordinator.address))
    begun, invited_late, late_has_trained = (threading.Event() for _ in range(3))
    states: dict[int, State] = {}
    seen: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def function() -> None:
        worker = paceline.worker_index()
        model = Adapted(seed=worker)
        optimizer = paceline.DistributedOptimizer(adam(model), model=model)
        if worker:
            seen.append(look(model))

        def step() -> None:
            optimizer.zero_grad()
            model(batch(worker, 0)).square().mean().backward()
            optimizer.step()

        step()
        if worker:
            step()
            late_has_trained.set()
        else:
            begun.set()
            assert invited_late.wait(60.0)
            while wait is in_a_barrier and 1 not in coordinator.core.members.present:
                time.sleep(0.01)
            wait(model, late_has_trained, step)
        if wait is in_a_barrier and worker:
            paceline.barrier()
        states[worker] = state_of(model)

    def work(index: int) -> None:
        place = Assignment(job=job, role="worker", index=index, coordinator=coordinator.address)
        session = WorkerSession.connect(place)
        sessions.install(session, for_thread=True)
        try:
            function()
            session.finish()
        except BaseException as error:
            errors.append(error)
        finally:
            late_has_trained.set()
            session.close()

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    serving = threading.Thread(target=server.run, daemon=True)
    try:
        serving.start()
        threads[0].start()
        assert begun.wait(60.0)
        invited: Future[dict[int, int]] = Future()
        coordinator.call(lambda: invited.set_result(coordinator.core.invite(1)))
        assert invited.result(30.0) == {1: 0}
        assert server._frozen.kept == {}
        invited_late.set()
        threads[1].start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a worker hangs"
        assert coordinator.over.wait(10.0)
        collection = coordinator.collect()
        assert collection.finished.wait(10.0)
        final = collection.result()
    finally:
        coordinator.stop()
        serving.join(10.0)
    assert errors == []
    expected = Adapted(seed=0).state_dict()
    for state in (states[1], final.state_dict):
        for name in ("inner.base.weight", "inner.base.bias", "outer.weight"):
            assert torch.equal(state[name], expected[name]), name
    if look is by_evaluating:
        assert torch.equal(seen[0], expected["inner.base.weight"])
    assert len(server._frozen.kept) == 2
    assert not (tmp_path / "run" / "frozen").exists(), "a machine that joins keeps no copy"


def test_without_files_the_missing_frozen_parameters_are_listed(run_on_threads: RunOnThreads) -> None:
    run = run_on_threads(lambda: train(Adapted(), 2), workers=2)
    assert {spec.name for spec in run.servers[0]._require_memory()._plan.model.frozen} == {
        *("inner.base.weight", "inner.base.bias", "outer.weight")
    }
    spec = run.servers[0]._require_memory()._plan.model.frozen[0]
    assert read_frozen(run.run_dir / "elsewhere", spec) is None
    read = read_frozen(run.run_dir, spec)
    assert read is not None
    assert digest_of(read) == spec.digest


def test_a_value_that_has_not_arrived_completely_is_missing_in_the_snapshot() -> None:
    optimizer, spec = OptimizerSpec("SGD", ({"lr": 0.1},), (0,)), FrozenSpec("b", (2,), "float32", "0" * 64)
    layout = Layout.of([Parameter(("a",), (4,), "float32")])
    model = ModelSpec(layout, optimizer, (), frozen=(spec,))
    assembly, message = Assembly(model, layout.slice_evenly(1)), Snapshot(0, 1, (spec.digest,))
    assert assembly.targets(message)[-1].nbytes == 8
    assert assembly.snapshot().frozen == (spec,)  # the server was lost
    assembly.arrived(message)
    assert assembly.snapshot().frozen == ()


# -- the server's part, by hand ---------------------------------------------------------------------------

SIZES = {"a": 3, "b": 2, "c": 1}


def asked(values: FrozenValues[str], workers: list[int]) -> list[tuple[str | int, tuple[str, ...]]]:
    """What is sent, without the payloads."""
    return [(to, message.digests) for to, message, _ in values.due(workers)]


def test_a_value_is_requested_once_for_all_who_wait_for_it() -> None:
    values: FrozenValues[str] = FrozenValues()
    values.request("one", ("a", "b"), SIZES)
    assert [send.message for send in values.due([0, 1])] == [FetchFrozen(0, ("a", "b"))]
    values.request("two", ("b",), SIZES)
    assert values.due([0, 1]) == []
    assert values.sizes(("a", "b")) == [3, 2]
    values.arrived(0, ("a", "b"), [bytearray(b"aaa"), bytearray(b"bb")])
    first, second = values.due([0, 1])
    assert (first.to, first.message) == ("one", FrozenTensors(0, ("a", "b")))
    assert (second.to, second.message) == ("two", FrozenTensors(0, ("b",)))
    assert [bytes(part) for part in first.payload + second.payload] == [b"aaa", b"bb", b"bb"]
    values.request("three", ("a",), SIZES)
    assert asked(values, [0, 1]) == [("three", ("a",))], "the value was kept"


def test_if_a_worker_lacks_a_value_or_is_gone_the_next_worker_is_asked() -> None:
    values: FrozenValues[str] = FrozenValues()
    values.request("one", ("a", "b"), SIZES)
    assert asked(values, [0, 1, 2]) == [(0, ("a", "b"))]
    values.arrived(0, ("b",), [bytearray(2)])
    assert asked(values, [0, 1, 2]) == [(1, ("a",))]
    values.gone(1)
    assert asked(values, [0, 2]) == [(2, ("a",))]
    values.request("two", ("c",), SIZES)
    values.arrived(2, (), [])
    assert asked(values, [0, 2]) == [(0, ("c",))]
    values.arrived(0, (), [])
    assert asked(values, [0, 2]) == [(2, ("c",))]
    values.arrived(2, (), [])
    assert asked(values, [0, 2]) == [("one", ("b",)), ("two", ())], "nobody is left to be asked"
    values.request("one", ("a",), SIZES)
    assert asked(values, [0]) == [(0, ("a",))], "a later request begins anew"


def test_a_worker_that_connects_again_is_asked_again() -> None:
    values: FrozenValues[str] = FrozenValues()
    values.request("one", ("a",), SIZES)
    assert asked(values, [0]) == [(0, ("a",))]
    values.gone(0)
    assert asked(values, [0]) == [(0, ("a",))]
    values.arrived(0, ("a",), [bytearray(b"old")])
    values.arrived(0, ("a",), [bytearray(b"new")])
    [answer] = values.due([0])
    assert bytes(answer.payload[0]) == b"old"


def test_a_value_that_is_being_received_when_it_is_dropped_is_not_kept() -> None:
    values: FrozenValues[str] = FrozenValues()
    values.request("one", ("a", "b"), SIZES)
    values.request("two", ("b",), SIZES)
    assert values.sizes(("a", "b")) == [3, 2]
    assert values.retain(("b", "c")) == ["one"]
    values.forget("one")
    values.arrived(0, ("a", "b"), [bytearray(3), bytearray(2)])
    assert [*values.kept] == ["b"], "a snapshot has no values of parameters that are not frozen"
    assert asked(values, [0]) == [("two", ("b",))]


def test_a_peer_that_is_gone_is_not_answered() -> None:
    values: FrozenValues[str] = FrozenValues()
    values.request("one", ("a",), SIZES)
    values.due([0])
    values.forget("one")
    values.arrived(0, ("a",), [bytearray(3)])
    assert values.due([0]) == []


@pytest.mark.parametrize("wanted", [("a", "a"), ("d",), ("a", "d")])
def test_a_request_for_what_there_is_not_is_refused(wanted: tuple[str, ...]) -> None:
    values: FrozenValues[str] = FrozenValues()
    with pytest.raises(ProtocolError, match="does not have"):
        values.request("one", wanted, SIZES)
    with pytest.raises(ProtocolError, match="not requested"):
        values.sizes(wanted)


def test_values_that_nobody_can_send_are_named() -> None:
    require_complete({"a": "weight"}, ["a", "b"])
    with pytest.raises(ConfigurationError, match=r"'weight' has another value here.*same checkpoint"):
        require_complete({"a": "weight", "b": "bias"}, ["b"])
