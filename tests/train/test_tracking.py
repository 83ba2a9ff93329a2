"""`track`, and `epochs` in workers that join a run in progress."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.data_ledger import LoopPositions
from paceline.core.messages import EpochReached, LoopPosition, StatesDecided
from paceline.core.requests import Send
from paceline.errors import ProtocolError, UsageError
from paceline.shard.vectors import decode_states, encode_states
from paceline.sim import Cluster, Presence, simulate
from paceline.train import session as sessions
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads


def sent(states: dict[str, Any]) -> dict[str, Any]:
    return decode_states(b"".join(encode_states(states)))


class Script:
    """A model, a scheduler that is stepped once per epoch, and a running average of one number."""

    def __init__(self, *, track: bool = True) -> None:
        self.model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = paceline.DistributedOptimizer(optimizer, model=self.model)
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.ema = Ema()
        self.epochs: list[int] = []
        self.rates: list[float] = []
        self.averages: list[float] = []
        if track:
            paceline.track(scheduler=self.scheduler, ema=self.ema)

    def train(self, **limits: Any) -> Script:
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)
        for epoch in paceline.epochs(**limits):
            self.epochs.append(epoch)
            self.averages.append(float(self.ema.value))
            for (x,) in paceline.distribute(loader):
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.zero_grad()
                (self.model(x[:, None]).mean() * 0).backward()
                self.optimizer.step()
            self.scheduler.step()
            self.ema.update(epoch + 1.0)
        return self


class Ema:
    def __init__(self) -> None:
        self.value = torch.zeros(())

    def update(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


# -- the states as bytes ----------------------------------------------------------------------------------


def test_states_keep_their_structure() -> None:
    state = {
        "plain": [None, True, 1, -(2**63), 2.5, float("inf"), "ä", b"\x00", ()],
        "keys": {0: "zero", "1": "one", None: 2.5},
        "counter": Counter({30: 1}),
        "ordered": OrderedDict(b=1, a=2),
        "numpy": np.float64(0.5),
        "size": torch.Size([2, 3]),
    }
    decoded = sent({"x": state, "y": 3})
    assert decoded == {"x": {**state, "numpy": 0.5, "size": (2, 3)}, "y": 3}
    assert type(decoded["x"]["counter"]) is Counter
    assert type(decoded["x"]["ordered"]) is OrderedDict
    assert type(decoded["x"]["numpy"]) is float


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_tensors_keep_their_bits(dtype: torch.dtype) -> None:
    tensor = torch.arange(-3, 3).reshape(2, 3).T.to(dtype)
    decoded = sent({"x": [tensor, tensor[:0], tensor[1, 1]]})["x"]
    assert [each.dtype for each in decoded] == [dtype] * 3
    assert [each.shape for each in decoded] == [(3, 2), (0, 2), ()]
    assert torch.equal(decoded[0], tensor)
    assert torch.equal(decoded[2], tensor[1, 1])


def test_arrays_stay_arrays_unless_tensors_are_wanted() -> None:
    blob = b"".join(encode_states({"x": np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]}))
    array = decode_states(blob)["x"]
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [[0, 2], [3, 5]]
    assert torch.equal(
        decode_states(blob, arrays=False)["x"], torch.tensor([[0, 2], [3, 5]], dtype=torch.int32)
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, object()]}, r"x\['a'\]\[1\] is a builtins.object, which cannot be sent"),
        ({(1, 2): 0}, r"x has the key \(1, 2\), expected a string or a number"),
        ({"n": 2**70}, r"x\['n'\] is \d+, expected an integer of at most 64 bits"),
        ({"s": {1}}, r"x\['s'\] is a builtins.set"),
        ({"t": torch.eye(2).to_sparse()}, r"x\['t'\] is a torch.Tensor"),
        ({"t": torch.empty(1).expand(2**29)}, r"the states of x have \d+ bytes, expected at most 1073741824"),
    ],
)
def test_states_that_cannot_be_sent_are_refused(state: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode_states({"x": state})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, object] = {}
    state["self"] = state
    with pytest.raises(UsageError, match="nested more than 64 levels deep"):
        encode_states({"x": state})


def test_other_bytes_are_refused() -> None:
    blob = b"".join(encode_states({"x": {"t": torch.ones(5), "n": [1, 2]}}))
    for end in range(len(blob)):
        with pytest.raises(ProtocolError, match="cannot be read"):
            decode_states(blob[:end])
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_states(blob + b"\x00")
    generator = np.random.default_rng(0)
    for _ in range(2000):
        spoiled = bytearray(blob)
        for place in generator.integers(len(blob) - 20, size=2):
            spoiled[place] = generator.integers(256)
        with contextlib.suppress(ProtocolError):
            decode_states(spoiled)


# -- which worker keeps the states ------------------------------------------------------------------------


def wanted(loops: LoopPositions, worker: int, epoch: int, present: set[int], *, over: bool = False) -> bool:
    message = EpochReached(LoopPosition(0, epoch), over, tracks=True)
    [send] = loops.reached(worker, message, present, 0)
    assert isinstance(send, Send)
    assert isinstance(send.message, StatesDecided)
    return send.message.wanted


def test_the_present_worker_with_the_lowest_index_keeps_the_states() -> None:
    loops = LoopPositions()
    assert not wanted(loops, 2, 1, {1, 2})
    assert wanted(loops, 1, 1, {1, 2})
    assert not wanted(loops, 2, 2, {1, 2})
    assert wanted(loops, 2, 3, {2})  # worker 1 has left
    assert not wanted(loops, 0, 2, {0, 2})  # it is behind
    assert wanted(loops, 0, 4, {0, 2})


def test_at_the_end_of_the_loop_the_first_worker_keeps_the_states_and_a_lower_one_replaces_them() -> None:
    loops = LoopPositions()
    assert wanted(loops, 2, 5, {0, 1, 2}, over=True)
    assert not wanted(loops, 3, 5, {0, 1, 2, 3}, over=True)
    assert wanted(loops, 1, 5, {0, 1}, over=True)
    assert not wanted(loops, 2, 5, {0, 2}, over=True)
    assert wanted(loops, 1, 5, {0, 1}, over=True)  # after a pass over returned data


# -- arguments --------------------------------------------------------------------------------------------


def test_alone_objects_are_only_checked() -> None:
    script = Script().train(count=3)
    assert script.epochs == [0, 1, 2]
    with pytest.raises(
        UsageError, match=r"number=int, which has no method state_dict and no method load_state"
    ):
        paceline.track(number=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a distributed optimizer is kept by the servers"):
        paceline.track(optimizer=script.optimizer)
    script.ema.value = lambda: 0  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"ema\['state'\]\['value'\] is a builtins.function"):
        paceline.track(ema=script.ema)


def test_a_name_is_used_once(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        ema = Ema()
        paceline.track(ema=ema)
        paceline.track(ema=ema)
        with pytest.raises(UsageError, match="another object is tracked under this name"):
            paceline.track(ema=Ema())

    run_on_threads(train, workers=1)


# -- a worker that joins late -----------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["asp", "bsp", *thorough("ssp:staleness=2")])
def test_a_worker_that_joins_late_continues_with_the_jobs_epoch_and_states(sync: str) -> None:
    scripts: list[Script] = []

    def train() -> None:
        script = Script()
        scripts.append(script)
        script.train(count=8)

    # Two workers take 8 s for an epoch. The third one joins in the fourth epoch.
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], presence={2: Presence(joins_at_s=28.5)})
    simulate(cluster, sync, train_fn=train)
    first, second, late = scripts
    assert first.epochs == second.epochs == [*range(8)]
    assert first.averages == [*map(float, range(8))]
    assert late.epochs == [*range(3, 8)]
    assert late.averages == first.averages[3:]
    assert late.rates[0] in (0.5**3, 0.5**4)  # with a static split, it has no part in the epoch in progress
    assert late.rates[0] == 0.5 ** (4 if sync == "bsp" else 3)
    assert late.rates[-1] == first.rates[-1] == 0.5**7


def test_without_tracked_objects_a_late_worker_begins_with_the_jobs_epoch_too() -> None:
    scripts: list[Script] = []

    def train() -> None:
        scripts.append(Script(track=False))
        scripts[-1].train(count=8)

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=40.5)})
    simulate(cluster, "asp", train_fn=train)
    assert scripts[0].epochs == [*range(8)]
    assert scripts[1].epochs == [*range(2, 8)]


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_a_late_worker_makes_its_calls_before_the_first_step_alone(sync: str) -> None:
    seen: dict[int, list[Any]] = {}

    def train() -> None:
        own = seen[paceline.worker_index()] = [paceline.reduce(1, "sum")]
        paceline.barrier()
        script = Script()
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)
        for epoch in paceline.epochs(6):
            for (x,) in paceline.distribute(loader):
                script.optimizer.zero_grad()
                script.model(x[:, None]).mean().backward()
                script.optimizer.step()
            own.append((epoch, paceline.reduce(1, "sum")))

    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], presence={2: Presence(joins_at_s=20.5)})
    simulate(cluster, sync, train_fn=train)
    assert seen[0] == seen[1]
    assert seen[0][0] == 2
    assert seen[2][0] == 1
    assert [epoch for epoch, _ in seen[0][1:]] == [*range(6)]
    assert [epoch for epoch, _ in seen[2][1:]] == [*range(2, 6)]
    counts = [count for _, count in seen[0][1:]]
    if sync == "asp":
        assert counts == [2, 2, 3, 3, 3, 3]
    else:  # the late worker has no part in the epoch in progress, so it is one epoch ahead
        assert counts == [2, 2, 3, 3, 3, 2]


@pytest.mark.parametrize("limits", [{"updates": 40}, {"samples": 160}, {"minutes": 30.5 / 60}])
def test_the_limits_of_a_late_worker_count_from_the_beginning_of_the_loop(limits: dict[str, Any]) -> None:
    """The first loop lasts for 16 updates of worker 0 alone, in 16 s. Worker 1 joins in the second loop."""
    updates: list[int] = []

    def train() -> None:
        script = Script()
        script.train(count=1)
        script.train(**limits)
        updates.append(len(script.rates))

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=30.5)})
    result = simulate(cluster, "asp", train_fn=train)
    alone, joint = 30, result.measures.updates - 30
    if "minutes" in limits:
        assert abs(result.measures.duration_s - 46.5) <= 1.0
    else:
        assert abs(alone + joint - 16 - 40) <= 1
    assert sorted(updates) == sorted([updates[0], result.measures.updates - updates[0]])


def test_a_late_worker_skips_the_loops_that_have_ended() -> None:
    scripts: list[Script] = []

    def train() -> None:
        script = Script()
        scripts.append(script)
        script.train(count=2).train(count=3)

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=50.5)})
    simulate(cluster, "asp", train_fn=train)
    assert scripts[0].epochs == [0, 1, 0, 1, 2]
    assert scripts[1].epochs == [1, 2]
    assert scripts[1].rates[0] == 0.5**3


def test_a_prepared_scheduler_that_is_tracked_makes_each_step_once() -> None:
    rates: list[list[float]] = []

    def train() -> None:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)
        one_cycle = OneCycleLR(sgd, max_lr=1.0, total_steps=4 * len(batches))
        model, optimizer, loader, scheduler = paceline.prepare(model, sgd, batches, one_cycle)
        paceline.track(scheduler=scheduler)
        own: list[float] = []
        rates.append(own)
        for _ in paceline.epochs(4):
            for (x,) in loader:
                own.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                (model(x[:, None]).mean() * 0).backward()
                optimizer.step()
                scheduler.step()

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=40.5)})
    simulate(cluster, "asp", train_fn=train)
    first, late = rates
    assert late[0] == pytest.approx(first[32])  # the rate at the beginning of the epoch in progress
    assert late[1:] == pytest.approx(first[1 - len(late) :])


def test_a_script_that_tracks_another_object_is_refused() -> None:
    seen: list[str] = []

    def train() -> None:
        script = Script(track=paceline.worker_index() == 0)
        if paceline.worker_index() == 1:
            paceline.track(average=script.ema)
            with pytest.raises(
                UsageError, match=r"tracks 'average', but the job tracks only 'scheduler', 'ema'"
            ):
                script.train(count=8)
            seen.append("refused")
        else:
            script.train(count=8)

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=40.5)})
    simulate(cluster, "asp", train_fn=train)
    assert seen == ["refused"]


def test_a_state_that_does_not_fit_the_object_is_refused() -> None:
    seen: list[str] = []

    def train() -> None:
        script = Script(track=False)
        paceline.track(average=nn.Linear(1, 1 + paceline.worker_index()))
        if paceline.worker_index() == 1:
            words = (
                r"tracks as 'average' does not accept .*size mismatch for weight.* must run the same script"
            )
            with pytest.raises(UsageError, match=words):
                script.train(count=8)
            seen.append("refused")
        else:
            script.train(count=8)

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=40.5)})
    simulate(cluster, "asp", train_fn=train)
    assert seen == ["refused"]


# -- live -------------------------------------------------------------------------------------------------


class Newcomer:
    """The session of a worker, as it looks to a script before its first step in a run in progress."""

    def __init__(self, session: sessions.Session) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_keeps_the_states_and_saves_them(transport: str, run_on_threads: RunOnThreads) -> None:
    def train() -> list[Any]:
        Script().train(count=3)
        if paceline.worker_index() != 0:
            return []
        session = sessions.current()
        sessions.install(Newcomer(session), for_thread=True)  # type: ignore[arg-type]
        late = Script()
        late.ema.value = torch.tensor(-1.0)
        group = late.optimizer.param_groups[0]
        seen = [(epoch, group["lr"], float(late.ema.value)) for epoch in paceline.epochs(5)]
        sessions.install(session, for_thread=True)
        return seen

    run = run_on_threads(train, workers=2, servers=2, sync="bsp", transport=transport)
    assert run.results == {0: [(3, 0.125, 3.0), (4, 0.125, 3.0)], 1: []}
    saved = torch.load(run.run_dir / "tracked.pt")
    assert saved["epoch"] == 3
    assert saved["states"]["ema"] == {"value": torch.tensor(3.0)}
    assert saved["states"]["scheduler"]["last_epoch"] == 3


def test_large_states_arrive_whole(run_on_threads: RunOnThreads) -> None:
    size = 4_000_000

    def train() -> None:
        script = Script(track=False)
        script.ema.value = torch.arange(float(size))
        paceline.track(ema=script.ema)
        loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4)
        for _ in paceline.epochs(3):
            for (x,) in paceline.distribute(loader):
                script.optimizer.zero_grad()
                script.model(x[:, None]).mean().backward()
                script.optimizer.step()
            script.ema.value.add_(1.0)
        script.ema.value.zero_()

    run = run_on_threads(train, workers=2, sync="bsp")
    value = torch.load(run.run_dir / "tracked.pt")["states"]["ema"]["value"]
    assert torch.equal(value, torch.arange(float(size)) + 3)


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_a_worker_that_joins_a_live_run_continues_with_the_jobs_epoch_and_states(
    sync: str, run_on_threads: RunOnThreads
) -> None:
    """The hosts run on threads. Worker 0 waits in its fourth epoch until the script of worker 1 is in its loop."""
    reached, entered = threading.Event(), threading.Event()
    seen: dict[int, list[Any]] = {0: [], 1: []}

    def train() -> None:
        index = paceline.worker_index()
        script = Script()
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)
        for epoch in paceline.epochs(8):
            seen[index].append((epoch, script.optimizer.param_groups[0]["lr"], float(script.ema.value)))
            if index == 1:
                entered.set()
            for number, (x,) in enumerate(paceline.distribute(loader)):
                script.optimizer.zero_grad()
                (script.model(x[:, None]).mean() * 0).backward()
                script.optimizer.step()
                if epoch == 3 and number == 2:
                    reached.set()
                    entered.wait(30.0)
            script.scheduler.step()
            script.ema.update(epoch + 1.0)

    run = run_on_threads(train, late=reached, servers=2, sync=sync)
    assert seen[0] == [(epoch, 0.5**epoch, float(epoch)) for epoch in range(8)]
    assert seen[1] == seen[0][3:]
    assert run.lost == []
    [counts] = run.samples.values()
    assert counts.used == counts.total == 8 * 64
