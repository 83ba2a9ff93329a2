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

from paceline.errors import ConfigurationError, InvalidEventError
from paceline.sync import ASP, BSP, SSP, AnySyncModel, ElasticBSP, Machine
from paceline.sync.actions import ApplyMean, ApplyPush
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    PullRequested,
    PushReceived,
    Stop,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.trace import Entry, Header, Recorder, Trace, new_machine, read, replay

MODELS: list[AnySyncModel] = [
    BSP(),
    ASP(),
    SSP(),
    SSP(staleness=0),
    SSP(staleness=math.inf),
    ElasticBSP(lookahead=4),
]

every_model = pytest.mark.parametrize("sync", MODELS, ids=str)


def events_of_two_workers(seed: int, length: int = 60) -> list[AnyEvent]:
    """Joins, and then anything at all at odd times: what is not allowed is refused, and recorded as such."""
    draw = random.Random(seed)
    now_s = 0.0
    events: list[AnyEvent] = [WorkerJoined(now_s=0.0, worker=worker) for worker in range(2)]
    next_label = [0, 0]
    for _ in range(length):
        now_s += draw.random() / 3
        worker = draw.randrange(3)
        label = next_label[worker] if worker < 2 else 0
        if draw.random() < 0.5:
            stop = Stop(superstep=draw.randrange(3), members=(0, 1)) if draw.random() < 0.2 else None
            empty = draw.random() < 0.2
            events.append(PushReceived(now_s=now_s, worker=worker, iteration=label, empty=empty, stop=stop))
            events.append(PullRequested(now_s=now_s, worker=worker, iteration=label))
            if worker < 2:
                next_label[worker] += draw.random() < 0.7
        elif draw.random() < 0.05:
            events.append(WorkerLost(now_s=now_s, worker=worker))
    return [*events, WorkerFinished(now_s=now_s, worker=0)]


def live(machine: Machine, events: list[AnyEvent]) -> list[Entry]:
    """What a host would record."""
    entries = []
    for event in events:
        try:
            entries.append(Entry(event, machine.handle(event)))
        except InvalidEventError as error:
            entries.append(Entry(event, refused=str(error)))
    return entries


def recorded(path: Path, header: Header, entries: list[Entry]) -> Path:
    recorder = Recorder.to_path(path, header)
    for entry in entries:
        recorder.record(entry)
    recorder.close()
    return path


@every_model
@pytest.mark.parametrize("seed", range(3))
def test_a_shards_trace_reads_back_equal_and_replays_identically(
    sync: AnySyncModel, seed: int, tmp_path: Path
) -> None:
    header = Header(sync=sync, host="shard", index=3, emulated="pace 0.05,0.15")
    entries = live(sync.at_shard(), events_of_two_workers(seed))
    assert any(entry.refused for entry in entries)
    trace = read(recorded(tmp_path / "trace.jsonl", header, entries))
    assert trace == Trace(header, entries)
    assert replay(trace) == []


def test_the_coordinators_trace_reads_back_equal_and_replays_identically(tmp_path: Path) -> None:
    header = Header(sync=ElasticBSP(lookahead=4), host="coordinator")
    machine = new_machine(header)
    draw = random.Random(0)
    entries = live(machine, [WorkerJoined(now_s=0.0, worker=worker) for worker in range(3)])
    now_s = 0.0
    label = [0, 0, 0]
    for _ in range(80):
        now_s += draw.random() / 7
        worker = draw.randrange(3)
        superstep = draw.choice([None, None, 0])
        event = IterationFinished(now_s=now_s, worker=worker, iteration=label[worker], superstep=superstep)
        entries += live(machine, [event])
        label[worker] += entries[-1].refused is None
    assert any(entry.actions for entry in entries)
    assert any(entry.refused for entry in entries)
    trace = read(recorded(tmp_path / "trace.jsonl", header, entries))
    assert trace == Trace(header, entries)
    assert replay(trace) == []


@every_model
def test_the_header_reads_back_whatever_the_model(sync: AnySyncModel, tmp_path: Path) -> None:
    header = Header(sync=sync, host="shard", index=1)
    assert read(recorded(tmp_path / "trace.jsonl", header, [])).header == header


def test_a_lookahead_written_as_a_float_reads_back(tmp_path: Path) -> None:
    """`ElasticBSP` takes 15.0 for 15, so a trace of it must be readable too."""
    sync = ElasticBSP(lookahead=15.0)  # type: ignore[arg-type]
    path = recorded(tmp_path / "trace.jsonl", Header(sync=sync, host="shard"), [])
    assert read(path).header.sync == ElasticBSP(lookahead=15)


@settings(max_examples=50, deadline=None)
@given(times_s=st.lists(st.floats(0, 1e12, allow_nan=False), max_size=20))
def test_times_survive_exactly(times_s: list[float]) -> None:
    file = io.BytesIO()
    recorder = Recorder(file, Header(sync=ASP(), host="shard"))
    for now_s in times_s:
        recorder.record(Entry(WorkerLost(now_s=now_s, worker=0), refused="as a matter of course"))
    lines = file.getvalue().splitlines()[1:]
    assert [msgspec.json.decode(line, type=Entry).event.now_s for line in lines] == times_s


def test_what_came_of_the_actions_is_kept(tmp_path: Path) -> None:
    entry = Entry(
        PushReceived(now_s=1.5, worker=0, iteration=4),
        [ApplyMean(((0, 4), (1, 3)))],
        version=17,
        staleness=[(0, 4, 2), (1, 3, 0)],
    )
    trace = read(recorded(tmp_path / "trace.jsonl", Header(sync=BSP(), host="shard"), [entry]))
    assert trace.entries == [entry]


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    entries = live(BSP().at_shard(), events_of_two_workers(0))
    path = recorded(tmp_path / "trace.jsonl", Header(sync=BSP(), host="shard"), entries)
    whole = path.read_bytes()
    last_line = len(whole.splitlines()[-1])
    for missing in (1, 2, last_line // 2, last_line):
        path.write_bytes(whole[:-missing])
        trace = read(path)
        assert trace.entries == entries[:-1]
        assert replay(trace) == []


def test_a_trace_may_end_after_its_header(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.jsonl", Header(sync=BSP(), host="shard"), [])
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
    "a model that there is not": b'{"sync":"nope","host":"shard","format":1}\n',
    "no model": b'{"host":"shard","format":1}\n',
    "a model of another kind": b'{"sync":7,"host":"shard","format":1}\n',
}


@pytest.mark.parametrize("what", NO_TRACES)
def test_what_is_no_trace_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(NO_TRACES[what])
    with pytest.raises(ConfigurationError):
        read(path)


@pytest.mark.parametrize("line", [b'{"event":{}}', b"[]", b"half a line", b"", b'{"event":{"type":"Nope"}}'])
def test_a_broken_line_in_the_middle_is_refused(line: bytes, tmp_path: Path) -> None:
    entries = live(ASP().at_shard(), events_of_two_workers(1))
    path = recorded(tmp_path / "trace.jsonl", Header(sync=ASP(), host="shard"), entries)
    header, first, *rest = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([header, first, line, *rest, b""]))
    with pytest.raises(ConfigurationError, match="is not a trace of Paceline"):
        read(path)


def test_another_version_of_the_format_is_refused_by_number(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.jsonl", Header(sync=ASP(), host="shard", format=2), [])
    with pytest.raises(ConfigurationError, match="format 2; this version reads 1"):
        read(path)


def tampered(entries: list[Entry], number: int, entry: Entry) -> Trace:
    return Trace(Header(sync=BSP(), host="shard"), [*entries[:number], entry, *entries[number + 1 :]])


def test_a_replay_says_where_the_actions_part() -> None:
    entries = live(BSP().at_shard(), events_of_two_workers(0))
    number = next(n for n, entry in enumerate(entries) if entry.actions)
    entry = msgspec.structs.replace(entries[number], actions=[ApplyPush(0, 0)])
    [difference] = replay(tampered(entries, number, entry))
    assert difference.startswith(f"entry {number}: ")
    assert "recorded [ApplyPush" in difference
    assert "replayed [HoldPush" in difference


def test_a_replay_says_what_was_refused_and_is_not() -> None:
    entries = live(BSP().at_shard(), events_of_two_workers(0))
    entry = msgspec.structs.replace(entries[0], refused="worker 0 is unwelcome")
    [difference] = replay(tampered(entries, 0, entry))
    assert "worker 0 is unwelcome" in difference


def test_a_replay_says_what_was_not_refused_and_is() -> None:
    entries = live(BSP().at_shard(), events_of_two_workers(0))
    number = next(n for n, entry in enumerate(entries) if entry.refused)
    entry = msgspec.structs.replace(entries[number], refused=None)
    [difference] = replay(tampered(entries, number, entry))
    assert f"replayed {entries[number].refused}" in difference


def test_a_replay_of_another_model_parts_company() -> None:
    entries = live(ASP().at_shard(), events_of_two_workers(0))
    assert replay(Trace(Header(sync=ASP(), host="shard"), entries)) == []
    assert replay(Trace(Header(sync=BSP(), host="shard"), entries)) != []


def test_a_model_without_a_part_at_the_coordinator_has_nothing_to_replay_there() -> None:
    with pytest.raises(ConfigurationError, match="bsp has no machine at the coordinator"):
        replay(Trace(Header(sync=BSP(), host="coordinator"), []))
