"""The table of messages: what the code sends and receives is what its rows say, and the bytes are as they were."""

from __future__ import annotations

import ast
import contextlib
import socket
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

import paceline
from paceline.core import messages
from paceline.core.messages import (
    ROWS,
    FetchSnapshot,
    Hello,
    Message,
    MessageRow,
    Phase,
    Role,
    Status,
    expected,
    first_phase,
    greeted,
    phases,
    row_phases,
    sent,
)
from paceline.errors import ProtocolError
from paceline.run.hub import Caller, Hub
from paceline.wire.stream import Stream, decoder
from paceline.wire.transports import UNIX, connect
from tests.support.made_messages import example, kinds

ROOT = Path(paceline.__file__).parent
GOLDEN = Path(__file__).parent / "wire_bytes.txt"

PHASES = [
    Phase(sender, receiver, name)
    for sender, receiver in sorted({(row.sender, row.receiver) for row in ROWS})
    for name in phases(sender, receiver)
]


def id_of(value: object) -> str | None:
    match value:
        case MessageRow():
            return f"{value.message.__name__}-{value.sender}-{value.receiver}"
        case Phase():
            return "-".join(value)
        case type():
            return value.__name__
        case _:
            return None


# -- bytes ------------------------------------------------------------------------------------------------


def encoded(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def test_the_bytes_of_every_message_are_as_they_were() -> None:
    """If a line has changed on purpose, processes of the version before no longer understand this one."""
    lines = [
        f"{kind.__name__} {encoded(example(kind, whole=whole)).hex()}"
        for kind in kinds()
        for whole in (False, True)
    ]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()


def test_every_message_has_rows() -> None:
    assert {
        kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)
    } == {
        Message,
        *kinds(),
    }


# -- what is accepted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES, ids=id_of)
def test_exactly_what_is_expected_in_a_phase_is_decoded(phase: Phase) -> None:
    for kind in kinds():
        message = example(kind)
        if kind in expected(phase):
            assert decoder(phase)(encoded(message)) == message
        else:
            with pytest.raises(msgspec.ValidationError):
                decoder(phase)(encoded(message))


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_a_row_names_phases_of_its_direction(row: MessageRow) -> None:
    known = phases(row.sender, row.receiver)
    assert {*row_phases(row), row.then or known[0]} <= set(known)


@contextlib.contextmanager
def pair(phase: Phase) -> Iterator[tuple[Stream[Any], Stream[Any]]]:
    """A stream that sends, and one that receives in a phase."""
    ends = socket.socketpair()
    back = first_phase("server", "reader")
    with (
        contextlib.closing(Stream[Any](ends[0], back)) as sender,
        contextlib.closing(Stream[Any](ends[1], phase)) as receiver,
    ):
        yield sender, receiver


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_a_message_begins_the_phase_that_its_row_names(row: MessageRow) -> None:
    for name in row_phases(row):
        with pair(Phase(row.sender, row.receiver, name)) as (sender, receiver):
            sender.send(example(row.message))
            assert receiver.wait() == example(row.message)
            assert receiver._phase == Phase(row.sender, row.receiver, row.then or name)


def test_phases_follow_the_messages_of_a_connection() -> None:
    told: list[Message] = [
        example(kind)
        for kind in (Hello, messages.DataRequested, messages.Register, Status, messages.WorkerFinished)
    ]
    with pair(first_phase("worker", "coordinator")) as (sender, receiver):
        for message in told:
            sender.send(message)
            assert receiver.wait() == message
        sender.send(example(Status))
        with pytest.raises(
            ProtocolError, match=r"Status is not expected in the phase 'left' .* only in 'training'"
        ):
            receiver.wait()


REFUSED = {
    "before the greeting": (
        Phase("", "server", "greeting"),
        example(messages.Commit),
        "Commit is not expected before the greeting with the run's token",
    ),
    "from another role": (
        Phase("reader", "server", "reading"),
        example(messages.Commit),
        "Commit is not expected from a reader: it is sent by a worker to a server",
    ),
    "to another role": (
        Phase("worker", "server", "training"),
        example(messages.Register),
        "Register is not expected from a worker: it is sent by a worker to the coordinator",
    ),
    "in the other direction": (
        Phase("server", "worker", "open"),
        example(messages.RunEnded),
        "RunEnded is not expected from a server: it is sent by the coordinator to an agent",
    ),
    "too late": (
        Phase("worker", "coordinator", "training"),
        example(messages.Register),
        "Register is not expected in the phase 'training' of a connection, only in 'joining'",
    ),
    "with a wrong field": (
        Phase("reader", "server", "reading"),
        FetchSnapshot(-1),
        "a message header cannot be decoded: Expected `int` >= 0 - at `$.shard`",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_message_is_named_with_what_was_expected(what: str) -> None:
    phase, message, sentence = REFUSED[what]
    with pair(phase) as (sender, receiver):
        sender.send(message)
        with pytest.raises(ProtocolError) as raised:
            receiver.wait()
        assert str(raised.value) == sentence


def test_what_is_no_message_is_not_named() -> None:
    with pair(Phase("worker", "server", "training")) as (sender, receiver):
        sender.sock.sendall(b"PCL1" + bytes([8, 0, 0, 0]) + bytes(8) + b"\x81\xa4type\xa1x")
        with pytest.raises(ProtocolError, match=r"cannot be decoded: Invalid value 'x' - at `\$.type`"):
            receiver.wait()


CALLERS = {"coordinator": {"worker", "server", "agent", "observer"}, "server": {"worker", "reader"}}
"""Host -> who connects to it."""


@pytest.mark.parametrize("host", CALLERS)
def test_a_host_is_called_by_certain_roles(host: Role) -> None:
    for role in get_args(Role):
        if role in CALLERS[host]:
            assert Hello not in expected(greeted(role, host))
        else:
            with pytest.raises(ProtocolError, match=f"{role} does not connect to (a server|the coordinator)"):
                greeted(role, host)


# -- a new message ----------------------------------------------------------------------------------------


class House:
    """A host that notes what it accepts."""

    def __init__(self) -> None:
        listener, self.address = UNIX.listen()
        self.hub: Hub[Caller] = Hub("server 0", "token", listener, "server", Caller, self)
        self.heard: list[Message] = []

    def greeted(self, peer: Caller, hello: Hello) -> None:
        peer.role, peer.index = hello.role, hello.index

    def received(self, peer: Caller, message: Message) -> None:
        self.heard.append(message)

    def payload_targets(self, peer: Caller, message: Message, size_bytes: int) -> Sequence[memoryview]:
        return []

    def gone(self, peer: Caller, reason: str) -> None:
        pass

    def hear_from(self, role: Any, message: Message) -> list[Message]:
        """Return what the host accepts from a peer with this role that has sent its greeting and a message."""
        self.heard.clear()
        stream: Stream[Any] = Stream(connect(self.address), first_phase("server", "reader"))
        stream.send(Hello("token", role, 0))
        stream.send(message)
        stream.close()
        self.hub.poll(1.0)
        while self.hub.peers:
            self.hub.poll(1.0)
        return self.heard

    def close(self) -> None:
        self.hub.close()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MessageRow]]:
    """The table, which a test may change."""
    rows = [*ROWS]
    monkeypatch.setattr(messages.table, "ROWS", rows)
    expected.cache_clear()
    yield rows
    monkeypatch.undo()
    expected.cache_clear()


def test_a_new_message_needs_only_its_class(
    table: list[MessageRow], caplog: pytest.LogCaptureFixture
) -> None:
    @sent("worker", to="server", during="training")
    class Toy(Message, frozen=True, tag=True):
        """A worker tells a server a number."""

        number: int

    with contextlib.closing(House()) as house:
        assert house.hear_from("worker", Toy(7)) == [Toy(7)]
        assert house.hear_from("reader", Toy(7)) == []
    assert "Toy is not expected from a reader: it is sent by a worker to a server" in caplog.text


# -- the table and the code -------------------------------------------------------------------------------

ROLES = {
    "core/worker.py": "worker",
    "core/data_feed.py": "worker",
    "core/metrics.py:UnsentMetrics": "worker",
    "train": "worker",
    "run/worker.py": "worker",
    "run/worker_links.py": "worker",
    "run/readers.py:Fetches": "worker",
    "run/readers.py:Reader Assembly read_states": "reader",
    "run/observer.py": "observer",
    "core/server.py": "server",
    "core/shard.py": "server",
    "core/paces.py:PaceMeter": "server",
    "core/paces.py:PullBarrier": "coordinator",
    "core/requests.py": "server",
    "run/server.py": "server",
    "run/checkpointing.py:ShardCopies _write_copies": "server",
    "run/checkpointing.py:Checkpoints": "coordinator",
    "core/coordinator.py": "coordinator",
    "core/members.py": "coordinator",
    "core/reconfiguration.py": "coordinator",
    "core/joint_batch.py": "coordinator",
    "core/data_ledger.py": "coordinator",
    "core/agreement.py": "coordinator",
    "core/liveness.py": "coordinator agent",
    "wire/stream.py": "worker server",
    "run/coordinator.py": "coordinator",
    "run/agents.py": "coordinator",
    "start/join.py": "agent",
}
"""File or folder, or definitions in a file -> the roles whose messages it makes or tells apart."""


class Use(NamedTuple):
    """What the code does with a class of messages.

    Attributes:
        name: name of the class.
        role: the role of the process.
        sends: True if an object is made; False if what has arrived is told apart by its class.
    """

    name: str
    role: str
    sends: bool


OTHER_USES = {
    Use("Answer", "server", False),  # a shard holds back its own answers
    Use("LoopEntered", "worker", True),  # what a worker assumes until it is told
    Use("PushesReported", "coordinator", True),  # what a cut would report of a worker if it were lost
    Use("Heartbeat", "coordinator", True),  # one file is about both ends
    Use("HeartbeatAnswered", "agent", True),
}


def uses(file: Path, roles: Sequence[str], names: str = "") -> Iterator[Use]:
    """Yield what a file, or only these definitions in it, does with messages.

    It makes messages, or tells them apart by their classes.
    """
    tree = ast.parse(file.read_text())
    known: dict[str, str] = {}  # the name in this file -> the name of the class
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[-1] == "messages":
                known |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif any(alias.name == "messages" for alias in node.names):
                known |= {f"messages.{name}": name for name in vars(messages)}
    parts = [node for node in tree.body if getattr(node, "name", "") in names.split()] if names else [tree]
    assert len(parts) == len(names.split() or [file]), f"{file.name} defines not all of {names}"
    found: list[ast.AST]
    for node in chain.from_iterable(map(ast.walk, parts)):
        match node:
            case ast.MatchClass(cls=kind):
                found, sends = [kind], False
            case ast.Call(func=ast.Name("isinstance"), args=[_, kind]):
                found, sends = [*ast.walk(kind)], False
            case ast.Compare(left=ast.Call(func=ast.Name("type")), comparators=[kind]):
                found, sends = [*ast.walk(kind)], False
            case ast.AugAssign(target=ast.Attribute(attr="handlers" | "targets"), value=ast.Dict(keys=table)):
                found, sends = [key for key in table if key is not None], False
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Attribute(attr="handlers" | "targets"), slice=kind)]
            ):
                found, sends = [kind], False
            case ast.Call(func=ast.Name("maker"), args=[kind, *_]) | ast.Call(func=kind):
                found, sends = [kind], True
            case _:
                continue
        for each in found:
            if (name := known.get(ast.unparse(each))) is not None:
                yield from (Use(name, role, sends) for role in roles)


@cache  # is needed by tests alone, and takes a second
def all_uses() -> set[Use]:
    found: set[Use] = set()
    for place, roles in ROLES.items():
        path, _, names = place.partition(":")
        files = [ROOT / path] if path.endswith(".py") else [*(ROOT / path).rglob("*.py")]
        for file in files:
            found.update(uses(file, roles.split(), names))
    return {use for use in found if use.name in {kind.__name__ for kind in kinds()}} - OTHER_USES


def contradictions(rows: Sequence[MessageRow]) -> list[object]:
    """Return what the code does and no row says, and the rows with whose messages it does nothing."""
    sent_by = {(row.message.__name__, row.sender): row for row in rows}
    sent_to = {(row.message.__name__, row.receiver): row for row in rows}
    undeclared = [use for use in all_uses() if use[:2] not in (sent_by if use.sends else sent_to)]
    made = {use[:2] for use in all_uses() if use.sends}
    unmade = [row for key, row in sent_by.items() if key not in made]
    callers = {
        host: {row.sender for row in rows if row.message is Hello and row.receiver == host}
        for host in CALLERS
    }
    return [*undeclared, *unmade, *(item for item in callers.items() if item not in CALLERS.items())]


def test_the_code_sends_and_receives_what_the_rows_say() -> None:
    assert contradictions(ROWS) == []


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_no_row_can_be_left_out(row: MessageRow) -> None:
    assert contradictions([each for each in ROWS if each is not row])


CORES = {
    "worker": ["core/worker.py", "core/data_feed.py"],
    "server": ["core/server.py"],
    "coordinator": ["core/coordinator.py"],
}
"""Role -> the files in which its core tells messages apart."""


@pytest.mark.parametrize("role", CORES)
def test_a_core_handles_what_its_host_forwards(role: Role) -> None:
    handled = {use.name for file in CORES[role] for use in uses(ROOT / file, [role]) if not use.sends}
    assert handled == {row.message.__name__ for row in ROWS if row.receiver == role and row.forwarded}
