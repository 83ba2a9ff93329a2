"""A trace can be replayed from any of its entries, given a keyframe."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.shard import Shard
from paceline.errors import ConfigurationError
from paceline.sim import Cluster, Presence, simulate
from paceline.sync import MODELS as REGISTERED
from paceline.sync import Conditions, PullState, ShardMachine, SyncModel, register
from paceline.sync.actions import AnswerPull, ApplyPush, DropPush
from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
from paceline.sync.model import Handover
from paceline.trace import Entry, Header, Replay, Trace, replay
from paceline.trace.keyframes import Keyframe, fill, keyframe_of
from tests.support.marks import thorough

MODELS = [
    "bsp",
    "asp",
    "ssp:staleness=1",
    "ssp:staleness=inf",
    "ssp:staleness=0,execution=lazy,push_scale=1/n",
    "dssp:lower=0,upper=3",
    "dsps:lower=1,upper=9",
    "pssp:staleness=0,probability=0.5",
    "dynamic-pssp:staleness=0",
    "drop-stragglers:quorum=2",
    "naive-waiting:delay_s=0.25",
    "elastic-bsp:lookahead=4",
    "spec-sync",
    "spec-sync:abort_time_s=0.5,abort_rate=0.3",
    "rennala:batch=2",
    "ringmaster:threshold=2",
    "bsp@0,asp@4,elastic-bsp:lookahead=3@9,drop-stragglers:quorum=2@20,spec-sync@26",
    "ssp:staleness=9|drop-stragglers:quorum=2",
    "bsp@0,ssp:staleness=2|dssp:lower=0,upper=3@5,naive-waiting:delay_s=0.1@15",
]


def near(state: PullState) -> bool:
    return state.gap <= 1


def fails_late(state: PullState) -> bool:
    return bool(1 // (state.progress < 7))


def traces_of(sync: str | SyncModel, seed: int = 0) -> list[Trace]:
    """The traces of a run with a worker that is lost and comes back, and one that is preempted."""
    cluster = Cluster(
        compute_s=[0.9, 1.0, 1.1, 3.0],
        servers=1 if str(sync)[0] == "r" else 2,
        latency_s=0.001,
        presence={
            1: Presence(lost_at_s=9.0, back_after_s=5.0),
            2: Presence(preempted_every_s=12.0, back_after_s=3.0),
        },
    )
    return simulate(cluster, sync, 40, seed, record=True).trace


def continued(trace: Trace, place: int) -> tuple[Trace, Keyframe]:
    """A trace without its first entries, as it is read from a file."""
    host = Replay(trace.header)
    for entry in trace.entries[:place]:
        host.take(entry.event)
    imports = () if trace.header.imports is msgspec.UNSET else trace.header.imports
    header = trace.header.continued(keyframe_of(host.core, imports))
    header = msgspec.json.decode(msgspec.json.encode(header), type=Header)
    assert header.keyframe is not msgspec.UNSET
    return Trace(header, trace.entries[place:]), header.keyframe


def translated(trace: Trace) -> Trace:
    """The trace of the same events with translated hyper-parameters."""
    header = msgspec.structs.replace(trace.header, hyperparameters="translated")
    host = Replay(header)
    return Trace(header, [host.take(entry.event) for entry in trace.entries])


@pytest.mark.parametrize("sync", MODELS)
@pytest.mark.parametrize("places", [3, *thorough(12)])
def test_every_model_goes_on_from_a_keyframe(sync: str, places: int) -> None:
    traces = traces_of(sync)
    for trace in [*traces, translated(traces[0])]:
        for place in random.Random(0).sample(range(len(trace.entries) + 1), places):
            rest, keyframe = continued(trace, place)
            assert keyframe.why == ""
            assert replay(rest) == []


@settings(max_examples=40)
@given(sync=st.sampled_from(MODELS), seed=st.integers(0, 5), cuts=st.lists(st.floats(0, 1), max_size=4))
def test_a_trace_may_be_cut_again_and_again(sync: str, seed: int, cuts: list[float]) -> None:
    for trace in traces_of(sync, seed):
        for cut in cuts:
            trace, _ = continued(trace, round(cut * len(trace.entries)))
            assert replay(trace) == []


@pytest.mark.parametrize("condition", [near, fails_late])
def test_conditions_are_those_of_the_new_machine(condition: object) -> None:
    trace = traces_of(Conditions(pull=condition))[0]
    recorded = [entry for entry in trace.entries if isinstance(entry.event, PullRequested)]
    assert any(not entry.actions for entry in recorded)
    for place in range(0, len(trace.entries), 7):
        rest, keyframe = continued(trace, place)
        assert keyframe.why == ""
        assert replay(rest) == []


class Tally:
    """An object in the state of a user's model."""

    def __init__(self) -> None:
        self.pulls = 0
        self.itself = self


class OddShard(ShardMachine):
    """Answers every pull, and keeps what its model says in its state."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.tally = Tally()
        self.again = self.tally
        self.random = random.Random(3)
        self.kept = sys.stdout if kept == "file" else {(1, 2): [{3}, frozenset({4})]}

    def handle(self, event: object) -> list[object]:  # type: ignore[override]
        match event:
            case WorkerJoined():
                self.counts.joined(event.worker, event.count or 0)
                return []
            case PushReceived():
                self.counts.pushed(event.worker, event.progress)
                drop = self.random.random() < 0.5
                return [(DropPush if drop else ApplyPush)(event.worker, event.iteration)]
            case PullRequested():
                self.again.pulls += 1
                assert self.tally.itself.pulls == self.again.pulls
                return [AnswerPull(event.worker, event.iteration)]
        return []

    def take_over(self, handover: Handover, now_ticks: int) -> list[object]:  # type: ignore[override]
        raise AssertionError


class Odd(SyncModel, frozen=True, repr_omit_defaults=True):
    name = "odd-for-keyframes"

    kept: str = "values"

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return OddShard(self.kept)


@pytest.fixture
def odd() -> Iterator[None]:
    register(Odd)
    yield
    del REGISTERED[Odd.name]


def entries_of(header: Header, count: int) -> list[Entry]:
    host = Replay(header)
    entries = [host.take(WorkerJoined(now_ticks=0, worker=0))]
    for iteration in range(count):
        entries += [
            host.take(kind(now_ticks=iteration, worker=0, iteration=iteration))
            for kind in (PushReceived, PullRequested)
        ]
    return entries


@pytest.mark.usefixtures("odd")
def test_a_users_model_keeps_its_state_and_its_random_numbers() -> None:
    header = Header(sync="odd-for-keyframes", host="shard", imports=(__name__,))
    trace = Trace(header, entries_of(header, 40))
    for place in (0, 1, 2, 33, 80):
        rest, keyframe = continued(trace, place)
        assert keyframe.why == ""
        assert replay(rest) == []


@pytest.mark.usefixtures("odd")
def test_a_users_model_with_a_state_that_cannot_be_written_is_named_when_it_is_replayed() -> None:
    header = Header(sync="odd-for-keyframes:kept=file", host="shard", index=2, imports=(__name__,))
    rest, keyframe = continued(Trace(header, entries_of(header, 5)), 4)
    assert keyframe.state is None
    assert keyframe.workers == (0,)
    with pytest.raises(
        ConfigurationError, match="the trace of shard 2 cannot be replayed: its beginning was"
    ) as e:
        replay(rest)
    assert "it contains a " in str(e.value)


@pytest.mark.usefixtures("odd")
def test_a_class_of_a_module_that_was_not_named_is_not_written() -> None:
    header = Header(sync="odd-for-keyframes", host="shard")
    _, keyframe = continued(Trace(header, entries_of(header, 5)), 4)
    assert keyframe.why == f"it contains a {__name__}.OddShard"


def of_asp() -> tuple[Shard, Keyframe]:
    host = Replay(Header(sync="asp", host="shard"))
    assert isinstance(host.core, Shard)
    return host.core, keyframe_of(host.core)


@pytest.mark.parametrize(
    "state",
    [
        {"version": ["object", 0, "subprocess:Popen", {}]},
        {"version": ["object", 0, "paceline.core.shard:msgspec.Struct", {}]},
        {"version": ["object", 0, "paceline.errors:PacelineError", {}]},
        {"version": ["struct", "paceline.core.shard:Shard", {}]},
        {"version": ["named", "paceline.core.shard:Shard"]},
        {"version": ["met", 7]},
        {"version": ["run", "this"]},
        {"version": []},
        {"version": ["model", 0, "no-such-model"]},
        ["not", "attributes"],
        None,
    ],
)
def test_a_state_contains_nothing_but_parts_of_cores(state: object) -> None:
    core, keyframe = of_asp()
    with pytest.raises(ConfigurationError):
        fill(core, msgspec.structs.replace(keyframe, state=state))


def test_a_keyframe_is_small(tmp_path: Path) -> None:
    [first, *_] = traces_of("elastic-bsp:lookahead=4")
    sizes: Sequence[int] = [
        len(msgspec.json.encode(continued(first, place)[1])) for place in (20, len(first.entries) // 2)
    ]
    assert max(sizes) < 4000
