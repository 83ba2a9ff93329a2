"""Where shards and servers are: a value that all processes compute alike, and the terms of servers."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import paceline
from paceline.core.protocol.layout import Layout
from paceline.core.protocol.messages import Answer, Commit, CreateShards, InitialWeights, Started
from paceline.core.protocol.model_spec import ModelSpec, OptimizerSpec
from paceline.core.protocol.placement import Placement, round_robin
from paceline.core.protocol.requests import COORDINATOR, Send, worker_peer
from paceline.core.server import Server
from paceline.core.worker import Worker
from paceline.errors import ProtocolError
from paceline.sync.schedule import read_schedule

ROOT = Path(paceline.__file__).parent


def test_every_shard_has_one_server_and_every_server_one_process() -> None:
    for shards in range(1, 8):
        for servers in range(1, 8):
            placement = round_robin(shards, servers)
            held = sorted(shard for server in placement.servers for shard in placement.shards_of(server))
            hosted = sorted(s for process in placement.processes for s in placement.servers_in(process))
            assert held == list(placement.shards)
            assert hosted == list(placement.servers)


def test_a_process_may_host_several_servers() -> None:
    placement = Placement(server_of=(0, 1, 2, 0), process_of=(0, 1, 0), terms=(0, 0, 3))
    assert placement.servers_in(0) == (0, 2)
    assert placement.held_by(0, "abcd") == ("a", "d")
    assert [placement.term_of(shard) for shard in placement.shards] == [0, 0, 3, 0]


def test_only_the_placement_computes_the_server_of_a_shard() -> None:
    remainder = re.compile(r"%\s*(len\()?[\w.]*servers|::\s*[\w.]*servers")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in sorted(ROOT.rglob("*.py"))
        if file.name != "placement.py"
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if remainder.search(line)
    ]
    assert not found, f"{found} compute the server of a shard, which only core/protocol/placement.py may do"


def test_a_term_of_zero_is_not_encoded() -> None:
    for message in (Commit(1, 2), Answer(1, 2, 3)):
        assert b"term" not in msgspec.msgpack.encode(message)
        assert b"term" in msgspec.msgpack.encode(msgspec.structs.replace(message, term=1))


def server_in_term(term: int) -> Server:
    """Return a server with one shard and one worker, which has its first weights."""
    layout = Layout((), (), {})
    model = ModelSpec(layout, OptimizerSpec("", (), ()), ())
    server = Server(term=term)
    server.handle(COORDINATOR, CreateShards(model, layout.sliced(1, "even"), "asp", (0,), 0), 0)
    server.handle(worker_peer(0), InitialWeights(0), 0)
    server.connected(0, 0)
    return server


def test_a_server_answers_with_its_term_and_refuses_a_push_for_another_term() -> None:
    server = server_in_term(2)
    with pytest.raises(ProtocolError, match="for term 1 of the server, but the server is in term 2"):
        server.handle(worker_peer(0), Commit(0, 0, term=1), 0)
    requests = server.handle(worker_peer(0), Commit(0, 0, term=2), 0)
    answers = [each.message for each in requests if isinstance(each, Send)]
    assert [answer.term for answer in answers if isinstance(answer, Answer)] == [2]


def test_a_worker_ignores_an_answer_of_another_term() -> None:
    worker = Worker(read_schedule("asp"), workers=1, shards=1, servers=1)
    worker.handle(Started((), ("",), 0))
    worker.handle(Answer(0, -1, 0, term=1))
    assert worker.waiting_for == "answers"
    worker.handle(Answer(0, -1, 0))
    assert not worker.waiting_for
