"""Record, read back, replay."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.job_sync import JobSync
from paceline.core.shard import ShardSync
from paceline.errors import ConfigurationError, InvalidEventError
from paceline.sync import (
    ASP,
    BSP,
    SSP,
    Conditions,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    Machine,
    NaiveWaiting,
    PullState,
    SpecSync,
    SyncModel,
)
from paceline.sync.actions import (
    AnyAction,
    ApplyMean,
    ApplyPush,
    PublishChange,
    PublishPlan,
    ReportFault,
    RestartWorker,
    SetTimer,
)
from paceline.sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.ticks import in_ticks
from paceline.trace import Entry, Header, Recorder, Replay, Trace, read, replay


def near(state: PullState) -> bool:
    return state.gap <= 1


def fails(state: PullState) -> bool:
    return bool(1 // (state.progress < 2))


MODELS: list[SyncModel] = [
    BSP(),
    ASP(),
    SSP(),
    SSP(staleness=0),
    SSP(staleness=math.inf),
    SSP(staleness=0, execution="lazy", push_scale="1/n"),
    DynamicPSSP(staleness=0, alpha="significance"),
    DropStragglers(quorum=1),
    NaiveWaiting(delay_s=0.25),
    ElasticBSP(lookahead=4),
    SpecSync(base=SSP(staleness=1)),
    Conditions(pull=near),
    Conditions(pull=fails),
]

every_model = pytest.mark.parametrize("sync", MODELS, ids=str)


def events_of_two_workers(seed: int, length: int = 60) -> list[AnyEvent]:
    """Joins, and then anything at all at odd times: what is not allowed is refused, and recorded as such."""
    draw = random.Random(seed)
    now_s = 0.0
    events: list[AnyEvent] = [WorkerJoined(now_ticks=0, worker=worker) for worker in range(2)]
    next_label = [0, 0]
    for _ in range(length):
        now_s += draw.random() / 3
        worker = draw.randrange(3)
        label = next_label[worker] if worker < 2 else 0
        if draw.random() < 0.2:
            events.append(PullRepeated(now_ticks=in_ticks(now_s), worker=worker, iteration=label))
        if draw.random() < 0.5:
            stop = Stop(superstep=draw.randrange(3), members=(0, 1)) if draw.random() < 0.2 else None
            empty = draw.random() < 0.2
            significance = draw.random() if draw.random() < 0.5 else None
            events.append(
                PushReceived(
                    now_ticks=in_ticks(now_s),
                    worker=worker,
                    iteration=label,
                    empty=empty,
                    stop=stop,
                    significance=significance,
                )
            )
            events.append(PullRequested(now_ticks=in_ticks(now_s), worker=worker, iteration=label))
            if worker < 2:
                next_label[worker] += draw.random() < 0.7
        elif draw.random() < 0.05:
            events.append(WorkerLost(now_ticks=in_ticks(now_s), worker=worker))
    return [*events, WorkerFinished(now_ticks=in_ticks(now_s), worker=0)]


def live(machine: Machine, events: list[AnyEvent]) -> list[Entry]:
    """What a host would record. A timer fires before the first event that is later than it is due."""
    entries: list[Entry] = []
    timers: list[SetTimer] = []

    def tell(event: AnyEvent) -> None:
        try:
            entries.append(Entry(event, machine.handle(event)))
        except InvalidEventError as error:
            entries.append(Entry(event, refused=str(error)))
        timers.extend(action for action in entries[-1].actions if isinstance(action, SetTimer))

    for event in events:
        for timer in [timer for timer in timers if timer.due_ticks < event.now_ticks]:
            timers.remove(timer)
            tell(TimerFired(now_ticks=timer.due_ticks, worker=timer.worker, iteration=timer.iteration))
        tell(event)
    return entries


def asked_for(entries: list[Entry]) -> set[type[AnyAction]]:
    return {type(action) for entry in entries for action in entry.actions}


def recorded(path: Path, header: Header, entries: list[Entry]) -> Path:
    recorder = Recorder.to_path(path, header)
    for entry in entries:
        recorder.record(entry)
    recorder.close()
    return path


@every_model
@pytest.mark.parametrize("seed", range(3))
def test_a_shards_trace_reads_back_equal_and_replays_identically(
    sync: SyncModel, seed: int, tmp_path: Path
) -> None:
    header = Header(sync=str(sync), host="shard", index=3, seed=5, emulated="pace 0.05,0.15")
    entries = live(ShardSync(sync, seed=5, shard=3), events_of_two_workers(seed))
    assert any(entry.refused for entry in entries)
    assert (SetTimer in asked_for(entries)) == isinstance(sync, NaiveWaiting)
    assert (ReportFault in asked_for(entries)) == (sync == Conditions(pull=fails))
    trace = read(recorded(tmp_path / "trace.jsonl", header, entries))
    assert trace == Trace(header, entries)
    assert replay(trace) == []


def test_the_coordinators_trace_reads_back_equal_and_replays_identically(tmp_path: Path) -> None:
    header = Header(sync="elastic-bsp:lookahead=4", host="coordinator")
    machine = JobSync(header.sync)
    draw = random.Random(0)
    entries = live(machine, [WorkerJoined(now_ticks=0, worker=worker) for worker in range(3)])
    now_s = 0.0
    label = [0, 0, 0]
    for _ in range(80):
        now_s += draw.random() / 7
        worker = draw.randrange(3)
        superstep = draw.choice([None, None, 0])
        event = IterationFinished(
            now_ticks=in_ticks(now_s), worker=worker, iteration=label[worker], superstep=superstep
        )
        entries += live(machine, [event])
        label[worker] += entries[-1].refused is None
    assert any(entry.actions for entry in entries)
    assert any(entry.refused for entry in entries)
    trace = read(recorded(tmp_path / "trace.jsonl", header, entries))
    assert trace == Trace(header, entries)
    assert replay(trace) == []


def test_a_shards_trace_with_changes_replays_identically(tmp_path: Path) -> None:
    syncs = [
        "bsp|naive-waiting:delay_s=0.25",
        "asp",
        "elastic-bsp:lookahead=2",
        "dssp:lower=0,upper=2",
        "bsp",
    ]
    machine = ShardSync(NaiveWaiting(delay_s=0.1), seed=2, shard=1)
    entries = live(machine, [WorkerJoined(now_ticks=0, worker=worker) for worker in range(3)])
    now_s = 0.0
    for number, sync in enumerate(syncs, start=1):
        change = Change(number=number, members=(0, 1, 2), sync=sync)
        events: list[AnyEvent] = []
        for iteration in (2 * number - 2, 2 * number - 1):
            for worker in range(3):
                now_s += 0.125
                flag = change if iteration % 2 else None
                events += [
                    PushReceived(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration, change=flag),
                    PullRequested(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration),
                ]
        events.append(PullRepeated(now_ticks=in_ticks(now_s + 0.5), worker=0, iteration=2 * number))
        now_s += 1.0
        entries += live(machine, events)
        assert str(machine.sync) == sync.split("|")[-1]
    assert not any(entry.refused for entry in entries)
    header = Header(sync="naive-waiting:delay_s=0.1", host="shard", index=1, seed=2)
    trace = read(recorded(tmp_path / "trace.jsonl", header, entries))
    assert trace == Trace(header, entries)
    assert replay(trace) == []


def test_the_coordinators_trace_with_timers_restarts_and_changes_replays_identically(tmp_path: Path) -> None:
    machine = JobSync("spec-sync", seed=1)
    events: list[AnyEvent] = [WorkerJoined(now_ticks=0, worker=worker) for worker in range(2)]
    for iteration in range(6):
        for worker in range(2):
            now_s = 4.0 * iteration + 4.0 + worker / 4
            events.append(IterationFinished(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration))
            events.append(IterationStarted(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration + 1))
    for number, sync in enumerate(["elastic-bsp:lookahead=2", "asp|bsp"]):
        events.append(
            SyncRequested(now_ticks=in_ticks(30.0), worker=1, source="script", number=number, sync=sync)
        )
    events += [
        IterationFinished(now_ticks=in_ticks(31.0), worker=worker, iteration=6, change=1)
        for worker in range(2)
    ]
    events += [
        IterationFinished(now_ticks=in_ticks(32.0), worker=worker, iteration=7, change=2)
        for worker in (1, 0, 0)
    ]
    entries = live(machine, events)
    assert asked_for(entries) == {SetTimer, RestartWorker, PublishChange}
    assert entries[-1].refused
    header = Header(sync="spec-sync", host="coordinator", seed=1)
    trace = read(recorded(tmp_path / "trace.jsonl", header, entries))
    assert trace == Trace(header, entries)
    assert replay(trace) == []


@every_model
def test_the_header_reads_back_whatever_the_model(sync: SyncModel, tmp_path: Path) -> None:
    header = Header(sync=str(sync), host="shard", index=1)
    trace = read(recorded(tmp_path / "trace.jsonl", header, []))
    assert trace.header == header
    entry = Replay(trace.header).take(WorkerJoined(now_ticks=0, worker=0))
    assert entry.refused is None


def test_the_coordinator_of_a_job_whose_shards_differ_has_a_trace_too(tmp_path: Path) -> None:
    header = Header(sync="bsp|ssp:staleness=1", host="coordinator")
    machine = JobSync(header.sync)
    events: list[AnyEvent] = [
        WorkerJoined(now_ticks=0, worker=0),
        SyncRequested(
            now_ticks=in_ticks(1.0), worker=0, source="schedule", number=0, sync="elastic-bsp:lookahead=1"
        ),
        IterationFinished(now_ticks=in_ticks(2.0), worker=0, iteration=0, change=1),
        IterationStarted(now_ticks=in_ticks(2.0), worker=0, iteration=1),
        IterationFinished(now_ticks=in_ticks(3.0), worker=0, iteration=1),
        IterationFinished(now_ticks=in_ticks(4.0), worker=0, iteration=2),
    ]
    entries = live(machine, events)
    assert asked_for(entries) == {PublishChange, PublishPlan}
    assert replay(read(recorded(tmp_path / "trace.jsonl", header, entries))) == []


@settings(max_examples=50)
@given(times=st.lists(st.integers(0, 2**100), max_size=20))
def test_times_survive_exactly(times: list[int]) -> None:
    file = io.BytesIO()
    recorder = Recorder(file, Header(sync="asp", host="shard"))
    for now_ticks in times:
        recorder.record(Entry(WorkerLost(now_ticks=now_ticks, worker=0), refused="as a matter of course"))
    lines = file.getvalue().splitlines()[1:]
    assert [msgspec.json.decode(line, type=Entry).event.now_ticks for line in lines] == times


def test_what_came_of_the_actions_is_kept(tmp_path: Path) -> None:
    entry = Entry(
        PushReceived(now_ticks=in_ticks(1.5), worker=0, iteration=4),
        [ApplyMean(((0, 4), (1, 3)))],
        version=17,
        staleness=[(0, 4, 2), (1, 3, 0)],
        gap=2,
    )
    trace = read(recorded(tmp_path / "trace.jsonl", Header(sync="bsp", host="shard"), [entry]))
    assert trace.entries == [entry]


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    entries = live(ShardSync(BSP()), events_of_two_workers(0))
    path = recorded(tmp_path / "trace.jsonl", Header(sync="bsp", host="shard"), entries)
    whole = path.read_bytes()
    last_line = len(whole.splitlines()[-1])
    for missing in (1, 2, last_line // 2, last_line):
        path.write_bytes(whole[:-missing])
        trace = read(path)
        assert trace.entries == entries[:-1]
        assert replay(trace) == []


def test_a_trace_may_end_after_its_header(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.jsonl", Header(sync="bsp", host="shard"), [])
    trace = read(path)
    assert trace.entries == []
    assert replay(trace) == []


NO_TRACES = {
    "nothing": b"",
    "text": b"hello\n",
    "a header that was cut short": b'{"sync":"bsp","host":"sha',
    "another JSON object": b'{"loss": 3}\n',
    "a JSON list": b"[1, 2]\n",
    "a JSON null": b"null\n",
    "bytes": b"\x00\xff\xfe\n",
    "text in another encoding": '{"läuft": 1}\n'.encode("latin-1"),
    "a list of models": b'{"sync":["bsp"],"host":"shard","format":3}\n',
    "no model": b'{"host":"shard","format":3}\n',
    "a model of another kind": b'{"sync":7,"host":"shard","format":3}\n',
}


@pytest.mark.parametrize("what", NO_TRACES)
def test_what_is_no_trace_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(NO_TRACES[what])
    with pytest.raises(ConfigurationError):
        read(path)


@pytest.mark.parametrize("line", [b'{"event":{}}', b"[]", b"half a line", b"", b'{"event":{"type":"Nope"}}'])
def test_a_broken_line_in_the_middle_is_refused(line: bytes, tmp_path: Path) -> None:
    entries = live(ShardSync(ASP()), events_of_two_workers(1))
    path = recorded(tmp_path / "trace.jsonl", Header(sync="asp", host="shard"), entries)
    header, first, *rest = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([header, first, line, *rest, b""]))
    with pytest.raises(ConfigurationError, match="is not a Paceline trace"):
        read(path)


@pytest.mark.parametrize("version", [1, 2])
def test_another_version_of_the_format_is_refused_by_number(version: int, tmp_path: Path) -> None:
    """Entries of version 2 do not say how far ahead anybody was: read as they are, nobody ever would have been."""
    path = recorded(tmp_path / "trace.jsonl", Header(sync="asp", host="shard", format=version), [])
    with pytest.raises(
        ConfigurationError,
        match=f"format {version}; this version of Paceline reads format 4. Repeat the run",
    ):
        read(path)


def tampered(entries: list[Entry], number: int, entry: Entry) -> Trace:
    return Trace(Header(sync="bsp", host="shard"), [*entries[:number], entry, *entries[number + 1 :]])


def test_a_replay_says_where_the_actions_part() -> None:
    entries = live(ShardSync(BSP()), events_of_two_workers(0))
    number = next(
        n for n, entry in enumerate(entries) if isinstance(entry.event, PushReceived) and entry.actions
    )
    entry = msgspec.structs.replace(entries[number], actions=[ApplyPush(0, 0)])
    [difference] = replay(tampered(entries, number, entry))
    assert difference.startswith(f"entry {number}: ")
    assert "recorded [ApplyPush" in difference
    assert "replayed [HoldPush" in difference


def test_a_replay_says_what_was_refused_and_is_not() -> None:
    entries = live(ShardSync(BSP()), events_of_two_workers(0))
    entry = msgspec.structs.replace(entries[0], refused="worker 0 is unwelcome")
    [difference] = replay(tampered(entries, 0, entry))
    assert "worker 0 is unwelcome" in difference


def test_a_replay_says_what_was_not_refused_and_is() -> None:
    entries = live(ShardSync(BSP()), events_of_two_workers(0))
    number = next(n for n, entry in enumerate(entries) if entry.refused)
    entry = msgspec.structs.replace(entries[number], refused=None)
    [difference] = replay(tampered(entries, number, entry))
    assert f"replayed {entries[number].refused}" in difference


def test_a_replay_of_another_model_parts_company() -> None:
    entries = live(ShardSync(ASP()), events_of_two_workers(0))
    assert replay(Trace(Header(sync="asp", host="shard"), entries)) == []
    assert replay(Trace(Header(sync="bsp", host="shard"), entries)) != []


def test_a_trace_of_a_model_that_there_is_not_is_refused() -> None:
    for host in ("shard", "coordinator"):
        with pytest.raises(ConfigurationError, match="unknown sync model 'nope'"):
            replay(Trace(Header(sync="nope", host=host), []))


def test_a_trace_of_conditions_that_cannot_be_imported_is_refused() -> None:
    header = Header(sync="conditions:pull=no_such_module_anywhere:f", host="shard")
    with pytest.raises(ConfigurationError, match="'no_such_module_anywhere:f' cannot be imported here"):
        replay(Trace(header, []), trust=True)
    with pytest.raises(
        ConfigurationError, match="names the module no_such_module_anywhere, but this is not signed"
    ):
        replay(Trace(header, []))


def test_a_model_without_a_part_at_the_coordinator_is_replayed_there_for_its_changes() -> None:
    assert replay(Trace(Header(sync="bsp", host="coordinator"), [])) == []
