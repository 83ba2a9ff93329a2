"""The protocol as a table: who sends each message to whom, in which phase of a connection, and which phase follows.

A class of messages states its rows of the table itself, with `sent`. No other place repeats the rows: the messages that
a process accepts on a connection, the decoders, the page about the messages and the tests are derived from the rows.

A connection has two *directions*, from each of its ends to the other. Each direction has a *phase*, which only messages
in this direction change. So both ends know the phase of a direction without a further message, although messages in
opposite directions may cross. The first message of a process that opens a connection is its greeting (`Hello`).

    worker -> coordinator     greeting -Hello-> joining -Register-> training -WorkerFinished-> left
    coordinator -> server     starting -CreateShards-> serving

According to the table, the role of a process and the messages that it has sent determine what it may send. Everything
else is checked where it is known: the order of labels in `core.order`, the members of the run in `core.members`, and
answers by the process that has sent the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, NamedTuple, TypeVar, dataclass_transform

import msgspec

from ...errors import ProtocolError

Role = Literal["coordinator", "server", "worker", "reader", "agent", "observer"]
"""The role of a process in a run. A reader reads weights, an agent starts the processes of a machine, and an observer
shows the state of the job."""

GREETING, OPEN, LEFT = "greeting", "open", "left"
"""The phase before the first message of a caller, the only phase of a direction whose rows name no phases, and the
phase after the last message."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, tag=True):
    """The base class of all messages. Its subclasses are also frozen and tagged."""


class MessageRow(NamedTuple):
    """One row of the table: a kind of message in one direction.

    Attributes:
        message: the class of the message.
        sender: role of the process that sends the message.
        receiver: role of the process that receives the message.
        during: the phases of the direction in which the message may be sent; () for all phases except "greeting" and
            "left".
        then: the phase that begins with the message; "" if the message does not change the phase.
        forwarded: True if the receiving host passes the message to its core; False if the message is for the host
            alone.
    """

    message: type[Message]
    sender: Role
    receiver: Role
    during: tuple[str, ...] = ()
    then: str = ""
    forwarded: bool = True


class Phase(NamedTuple):
    """A phase of one direction of a connection.

    Attributes:
        sender: role of the sending end; "" if the caller has not sent its role yet.
        receiver: role of the receiving end.
        name: name of the phase.
    """

    sender: Role | Literal[""]
    receiver: Role
    name: str


ROWS: list[MessageRow] = []
"""The table. The rows of one message follow each other."""

Kind = TypeVar("Kind", bound=type[Message])


def sent(
    sender: Role, *, to: Role, during: str = "", then: str = "", forwarded: bool = True
) -> Callable[[Kind], Kind]:
    """Add a row for a class of messages to the table, as a decorator. See `MessageRow`.

    Args:
        sender: role of the process that sends the message.
        to: role of the process that receives the message.
        during: names of phases, separated by spaces.
        then: name of a phase.
        forwarded: see `MessageRow`.
    """

    def add(kind: Kind) -> Kind:
        ROWS.append(MessageRow(kind, sender, to, tuple(during.split()), then, forwarded))
        expected.cache_clear()
        return kind

    return add


def phases(sender: str, receiver: str) -> list[str]:
    """Return the names of the phases of a direction, in order."""
    rows = [row for row in ROWS if (row.sender, row.receiver) == (sender, receiver)]
    turns = {name: row.then for row in rows for name in row.during if row.then not in ("", name)}
    later = {LEFT, *turns.values()}
    names = [next((name for row in rows for name in row.during if name not in later), OPEN)]
    while names[-1] in turns:
        names.append(turns[names[-1]])
    return names + [LEFT] * any(row.then == LEFT for row in rows)


def first_phase(sender: Role | Literal[""], receiver: Role) -> Phase:
    """Return the first phase of a direction. An empty sender stands for a caller that is not known yet."""
    return Phase(sender, receiver, phases(sender, receiver)[0] if sender else GREETING)


def greeted(caller: Role, receiver: Role) -> Phase:
    """Return the phase after the greeting of a caller.

    Raises:
        ProtocolError: callers with this role do not connect to this host.
    """
    for row in ROWS:
        if (row.sender, row.receiver, row.during) == (caller, receiver, (GREETING,)):
            return Phase(caller, receiver, row.then)
    raise ProtocolError(f"{_a(caller)} does not connect to {_a(receiver)}")


@cache
def expected(phase: Phase) -> Mapping[type[Message], Phase]:
    """Return the classes of messages that may be sent in a phase, each with the phase that follows it."""
    found = {}
    for row in ROWS:
        if row.receiver == phase.receiver and phase.sender in ("", row.sender):
            anytime = not row.during and phase.name not in (GREETING, LEFT)
            if anytime or phase.name in row.during:
                after = row.then if row.then and phase.sender else phase.name
                found[row.message] = phase._replace(name=after)
    return found


def refusal(phase: Phase, name: str) -> str:
    """Return the reason why a message is not expected in a phase; "" if the message is expected, or does not exist.

    Args:
        phase: the phase.
        name: name of the class of the message.

    >>> refusal(Phase("reader", "server", "reading"), "Commit")
    'Commit is not expected from a reader: it is sent by a worker to a server'
    >>> refusal(Phase("worker", "coordinator", "training"), "Register")
    "Register is not expected in the phase 'training' of a connection, only in 'joining'"
    """
    rows = [row for row in ROWS if row.message.__name__ == name]
    own = [row for row in rows if (row.sender, row.receiver) == phase[:2]]
    if not rows or rows[0].message in expected(phase):
        return ""
    if not phase.sender:
        return f"{name} is not expected before the greeting with the run's token"
    if own:
        during = " or ".join(map(repr, row_phases(own[0])))
        return f"{name} is not expected in the phase {phase.name!r} of a connection, only in {during}"
    ways = " or ".join(f"by {_a(row.sender)} to {_a(row.receiver)}" for row in rows)
    return f"{name} is not expected from {_a(phase.sender)}: it is sent {ways}"


def row_phases(row: MessageRow) -> list[str]:
    """Return the names of the phases in which a message may be sent."""
    return list(row.during) or [
        name for name in phases(row.sender, row.receiver) if name not in (GREETING, LEFT)
    ]


def _a(role: str) -> str:
    """Return a role with its article.

    >>> _a("agent"), _a("coordinator"), _a("reader")
    ('an agent', 'the coordinator', 'a reader')
    """
    return f"{'the' if role == 'coordinator' else 'an' if role[0] in 'aeiou' else 'a'} {role}"
