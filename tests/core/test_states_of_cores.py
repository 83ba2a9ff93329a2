"""The state of a core is a value: what is declared, what decides, and what a new core can be given.

The lives of the cores are those of simulated runs, in which workers join, are lost, change their model, clip, edit,
log and add parameters. See `recorded_lives`.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import paceline
from paceline.core.coordinator import Coordinator
from paceline.core.job_sync import JobSync
from paceline.core.loader_ledger import LoaderLedger
from paceline.core.members import Losses, Members
from paceline.core.messages import Message
from paceline.core.order import Order, Reporter
from paceline.core.server import Server
from paceline.core.shard import Shard, ShardSync, Versions
from paceline.core.worker import Worker
from paceline.errors import InternalError
from paceline.sim import Cluster, Dataset, Presence, simulate
from paceline.state import DECLARED, Outlook, fields_of, parts, restore, snapshot
from paceline.sync import BSP, Conditions, PullState, SyncModel
from paceline.sync.actions import AnswerPull, AnyAction, ApplyPush
from paceline.sync.conditions import ConditionMachine
from paceline.sync.elastic_bsp import Planner
from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
from paceline.sync.model import Counts, ShardMachine
from tests.support.choosers import Random
from tests.support.marks import thorough
from tests.support.network import Network
from tests.support.recorded_lives import Core, Life, recorded
from tests.support.wrong_declarations import declare_as_history


def fleeting(servers: int) -> Cluster:
    """Machines of which two leave and come back."""
    return Cluster(
        compute_s=[0.9, 1.0, 1.1, 3.0],
        servers=servers,
        latency_s=0.001,
        presence={
            1: Presence(lost_at_s=5.0, back_after_s=3.0),
            2: Presence(preempted_every_s=7.0, back_after_s=2.0),
        },
    )


FLEETING = fleeting(2)
STEADY = Cluster(compute_s=[0.9, 1.0, 1.6], servers=2, latency_s=0.001)

CUTS = [1, *thorough(6)]
"""Numbers of moments that are drawn in each life."""

MOST_LIVES = 4
"""Number of lives of workers, of servers and of coordinators in each scenario.

Under `auto`, most of them are those of simulations within the simulation. A worker that comes back has another life.
"""

LONGEST = 30
"""Number of calls after a moment that are repeated."""


# -- lives --------------------------------------------------------------------------------------------------


def within_two(pull: PullState) -> bool:
    return pull.gap <= 2


def fails_late(pull: PullState) -> bool:
    return bool(1 // (pull.progress < 4))


def train(*, clips: bool = True, extends: bool = True) -> None:
    """A script that uses most of what a script can use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model=model)
    data = torch.utils.data.TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
    loader = paceline.distribute(torch.utils.data.DataLoader(data, batch_size=4))
    loop = paceline.epochs(3)
    for epoch in loop:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if clips:
                optimizer.clip_grad_norm(0.1)
            optimizer.step()
            paceline.log(loss=loss.item())
        with optimizer.editing(), torch.no_grad():
            for weights in model.parameters():
                weights.clamp_(-1.0, 1.0)
        with paceline.evaluating(model):
            paceline.log(accuracy=0.5)
        if paceline.reduce(float(epoch)) >= 2.0:
            loop.stop()
        if extends and epoch == 0:
            model.append(nn.Linear(2, 2))
            optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.01})


def simulated(sync: str | SyncModel, cluster: Cluster = FLEETING, **options: Any) -> Callable[[], object]:
    return lambda: simulate(cluster, sync, **{"iterations": 12} | options)


def cut(sync: str) -> Callable[[], object]:
    """A run that is cut again and again."""

    def run() -> None:
        network = Network(sync, workers=2, servers=2, script=("epoch 0", "epoch 1", "finish"))
        choose = Random(sync)
        while steps := network.steps():
            network.take(("cut",) if len(network.taken) % 50 == 49 else choose(network, steps))
        assert network.cuts

    return run


STOPPING = "ringmaster:threshold=2,stop=true"
CHANGING = "bsp@0,asp@3,elastic-bsp:lookahead=3@6,spec-sync@9"

SCENARIOS: dict[str, Callable[[], object]] = {
    **{
        sync: simulated(sync)
        for sync in [
            "bsp",
            "asp",
            "asp:push_scale=1/tau",
            "ssp:staleness=1",
            "ssp:staleness=0,execution=lazy",
            "dssp:lower=0,upper=3",
            "dsps:lower=1,upper=9",
            "pssp:staleness=0,probability=0.5",
            "dynamic-pssp:staleness=0",
            "drop-stragglers:quorum=2",
            "ssp:staleness=4|drop-stragglers:quorum=2",
            "naive-waiting:delay_s=0.25",
            "elastic-bsp:lookahead=4",
            "spec-sync",
            "spec-sync:abort_time_s=0.5,abort_rate=0.3",
            CHANGING,
            "bsp@0,ssp:staleness=2|dssp:lower=0,upper=3@4,naive-waiting:delay_s=0.1@8",
        ]
    },
    **{
        sync: simulated(sync, fleeting(1)) for sync in ["rennala:batch=2", "ringmaster:threshold=2", STOPPING]
    },
    "conditions": simulated(Conditions(pull=within_two)),
    "a condition that fails": simulated(Conditions(pull=fails_late, pushes="average")),
    "codecs": simulated("bsp@0,asp@3,bsp@6", wire="int4"),
    "overlap off": simulated("bsp", STEADY, overlap="off"),
    "data": simulated("bsp", data=Dataset(samples=96, batch_size=4, epochs=2), batch="balanced"),
    "joint batches": simulated("bsp", data=Dataset(samples=50, batch_size=7, epochs=2, joint_batch=True)),
    "data on demand": simulated("asp", data=Dataset(samples=96, batch_size=4, epochs=2), batch="balanced"),
    "auto": simulated("auto", STEADY, data=Dataset(samples=240, batch_size=4, epochs=6)),
    "cuts": cut("bsp"),
    "cuts on demand": cut("asp"),
    "a script": simulated("bsp", STEADY, train_fn=train),
    "a script on demand": simulated("asp", STEADY, train_fn=train, guard="tell"),
    "a script with losses": simulated(
        "asp", train_fn=lambda: train(clips=False, extends=False), guard="tell"
    ),
}


REPRESENTATIVES = [
    "bsp",
    "pssp:staleness=0,probability=0.5",
    "elastic-bsp:lookahead=4",
    "spec-sync:abort_time_s=0.5,abort_rate=0.3",
    CHANGING,
    STOPPING,
    "conditions",
    "data on demand",
    "cuts",
    "a script",
]
"""Between them, they reach the cores of averages, draws, plans, restarts, changes, stops, data, cuts and calls."""

EACH_SCENARIO = [
    *REPRESENTATIVES,
    *thorough(*(scenario for scenario in SCENARIOS if scenario not in REPRESENTATIVES)),
]


@cache
def lives(scenario: str) -> list[Life]:
    with recorded() as found:
        SCENARIOS[scenario]()
    of_kind: dict[type, list[Life]] = {}
    for life in found:
        if life.calls:
            of_kind.setdefault(type(life.make()), []).append(life)
    return [
        life for kind in of_kind.values() for life in (*kind[: MOST_LIVES - 1], *kind[MOST_LIVES - 1 :][-1:])
    ]


def moments(life: Life, draw: random.Random, count: int) -> Iterator[tuple[Core, int]]:
    """Yield the core in some moments of its life, with the number of calls until then.

    These are drawn, and those after the first call of each kind, so that short phases are not missed.
    """
    core: Core = life.make()
    first: dict[object, int] = {}
    for number, call in enumerate(life.calls, 1):
        first.setdefault(call.kind, number)
    cuts = {*first.values(), *draw.sample(range(len(life.calls)), min(count, len(life.calls)))}
    for number, call in enumerate(life.calls):
        if number in cuts:
            yield core, number
        call.repeat(core)


def go_on(life: Life, core: Core, number: int) -> None:
    """Let a core live the rest of a life, and check that it does what the original has done."""
    for call in life.calls[number : number + LONGEST]:
        done = call.repeat(core)
        assert done == call.value, (
            f"{type(core).__name__}.{call.name}{call.arguments}: {done} != {call.value}"
        )


# -- what is declared ---------------------------------------------------------------------------------------


def declared_classes() -> set[type]:
    """The classes of the package that declare their fields."""
    rooms = ("paceline.core.", "paceline.sync.", "paceline.sync.plugins.")
    return {kind for kind in DECLARED if kind.__module__.startswith(rooms)}


@cache
def names_found() -> dict[type, set[str]]:
    """Declared class -> the attributes that its objects have in some moments of the scenarios."""
    found: dict[type, set[str]] = {}
    for scenario in SCENARIOS:
        draw = random.Random(scenario)
        for life in lives(scenario):
            for core, _ in moments(life, draw, 5):
                for part in parts(core):
                    names = {field.name for field, _ in fields_of(part)}
                    for kind in type(part).__mro__:
                        if kind in DECLARED:
                            found.setdefault(kind, set()).update(names)
    return found


@pytest.mark.thorough
def test_the_lives_reach_every_class_with_a_declaration() -> None:
    """Otherwise, a name that is declared by mistake might not be noticed."""
    assert {kind.__qualname__ for kind in declared_classes() - names_found().keys()} == set()


@pytest.mark.thorough
def test_a_name_in_a_declaration_is_that_of_an_attribute() -> None:
    for kind, found in names_found().items():
        names = DECLARED[kind].keys()
        assert names <= found, f"{kind.__name__} has no {names - found}"
        wrong = {
            name
            for name, field in DECLARED[kind].items()
            if field.mark != "decides" and (field.about or field.maker)
        }
        assert not wrong, f"{kind.__name__} declares more about {wrong} than that they do not decide"


def test_an_attribute_that_nobody_declares_decides() -> None:
    members, other = Members(2), Members(2)
    members.another = [7]  # type: ignore[attr-defined]
    assert snapshot(members) != snapshot(other)
    assert Outlook()(members) != Outlook()(other)
    restore(other, snapshot(members))
    assert other.another == [7]  # type: ignore[attr-defined]
    assert Outlook()(members) == Outlook()(other)
    restore(other, snapshot(Members(2)))
    assert not hasattr(other, "another")


# -- history ------------------------------------------------------------------------------------------------


def forget(core: Core, draw: random.Random) -> None:
    """Reset each field that is history, or change it."""
    for part in list(parts(core)):
        for field, value in list(fields_of(part)):
            if field.mark == "history":
                setattr(part, field.name, another(value, draw))


def another(value: Any, draw: random.Random) -> Any:
    """Return a value of the same kind: an empty one, or one that differs."""
    if value is None or isinstance(value, Message | msgspec.Struct):
        return None
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice([type(value)(), value + 1, value + 1000])
    if isinstance(value, list | deque) and draw.random() < 0.5:
        return type(value)(reversed(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple has no empty value
        return type(value)(*(another(each, draw) for each in value))
    return type(value)()


def require_that_history_decides_nothing(scenario: str, count: int) -> None:
    draw = random.Random(scenario)
    for life in lives(scenario):
        for core, number in moments(life, draw, count):
            other = life.make()
            restore(other, snapshot(core))
            forget(other, draw)
            go_on(life, other, number)


@pytest.mark.parametrize("scenario", EACH_SCENARIO)
@pytest.mark.parametrize("count", CUTS)
def test_history_changes_no_request(scenario: str, count: int) -> None:
    require_that_history_decides_nothing(scenario, count)


@pytest.mark.parametrize(
    ("kind", "name", "scenario"),
    [
        (Members, "gone", "bsp"),
        (Order, "label", "asp"),
        (Order, "_former", "asp"),
        (Reporter, "computing", "spec-sync"),
        (ConditionMachine, "_held", "bsp"),
        (Counts, "count", "ssp:staleness=1"),
        (Versions, "_pulled", "asp:push_scale=1/tau"),
        (Planner, "_pace", "elastic-bsp:lookahead=4"),
        (Shard, "samples", "data"),
        (ShardSync, "_worked", "a condition that fails"),
        (JobSync, "_remaining", CHANGING),
        (Server, "_fenced", "bsp"),
        (Worker, "_attempt", STOPPING),
        (Worker, "_calls", "a script"),
        (Coordinator, "_registered", "bsp"),
        (Losses, "open", "bsp"),
        (LoaderLedger, "_returned", "data"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value,
)
def test_a_field_that_decides_and_is_declared_as_history_is_found(
    kind: type, name: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_as_history(kind, name, monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  # a core without it may answer differently, or not at all
        require_that_history_decides_nothing(scenario, 1)


# -- snapshots ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", EACH_SCENARIO)
@pytest.mark.parametrize("count", CUTS)
def test_a_restored_core_goes_on_as_the_original_does(scenario: str, count: int) -> None:
    draw = random.Random(scenario)
    for life in lives(scenario):
        for core, number in moments(life, draw, count):
            taken, printed = snapshot(core), repr(snapshot(core))
            other = life.make()
            restore(other, taken)
            assert (snapshot(other), repr(snapshot(other))) == (taken, printed)
            assert hash(snapshot(other)) == hash(taken)
            assert Outlook()(other) == Outlook()(core)
            go_on(life, other, number)
            assert repr(taken) == printed  # the other core shares nothing with it


def test_a_snapshot_tells_different_states_apart() -> None:
    for life in lives("ssp:staleness=1"):
        core = life.make()
        before = snapshot(core)
        for call in life.calls:
            call.repeat(core)
        assert snapshot(core) != before
        assert Outlook()(core) != Outlook()(life.make())


def test_a_core_is_not_given_the_state_of_another_kind_of_core() -> None:
    with pytest.raises(InternalError, match="a Members cannot have the state of a Order"):
        restore(Members(2), snapshot(Order()))


def test_what_is_no_value_cannot_be_part_of_a_snapshot() -> None:
    machine = ShardMachine()
    machine.file = object()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"the state contains a builtins\.object"):
        snapshot(machine)


# -- models of users ----------------------------------------------------------------------------------------


class Notes:
    """An object in the state of a user's machine."""

    def __init__(self) -> None:
        self.pulls = 0


class Own(ShardMachine):
    """A machine that declares nothing: it answers every other pull at once, as a function of its own says."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        self.again = self.notes
        self.random = random.Random(1)
        self.waiting: dict[int, int] = {}
        self.answers: Callable[[], bool] = lambda: self.notes.pulls % 2 == 0

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [ApplyPush(push.worker, push.iteration, self.random.random())]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        self.again.pulls += 1
        self.waiting[pull.worker] = pull.iteration
        if not self.answers():
            return []
        waiting, self.waiting = self.waiting, {}
        return [AnswerPull(*each) for each in waiting.items()]


class OwnModel(BSP, frozen=True):
    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:  # type: ignore[override]
        return Own()


def own_shard(pulls: int) -> tuple[ShardSync, list[PushReceived | PullRequested]]:
    """A shard after some pulls by two workers, and what follows."""
    sync = ShardSync(OwnModel())
    events: list[PushReceived | PullRequested] = []
    for iteration in range(4):
        for worker in (0, 1):
            events.append(PushReceived(now_ticks=0, worker=worker, iteration=iteration))
            events.append(PullRequested(now_ticks=0, worker=worker, iteration=iteration))
    for worker in (0, 1):
        sync.handle(WorkerJoined(now_ticks=0, worker=worker))
    for event in events[: 2 * pulls]:
        sync.handle(event)
    return sync, events[2 * pulls :]


@pytest.mark.parametrize("pulls", range(8))
@pytest.mark.parametrize("how", ["restored", "copied"])
def test_the_functions_of_a_users_machine_are_bound_again(pulls: int, how: str) -> None:
    sync, rest = own_shard(pulls)
    if how == "restored":
        other, _ = own_shard(0)
        restore(other, snapshot(sync))
    else:
        other = copy.deepcopy(sync)
        other.bind_again()
    expected = [sync.handle(event) for event in rest]
    assert [other.handle(event) for event in rest] == expected
    machine = other.machine
    assert isinstance(machine, Own)
    assert machine.again is machine.notes
    assert machine.notes.pulls == 8
