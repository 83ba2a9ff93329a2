"""Write `docs/internals/messages.md` and its picture, from the table of messages: `python docs/make_messages.py`.

With --check, nothing is written, and the exit code is 0 if the page and the picture match the table, 1 otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from paceline.core.messages import ROWS, MessageRow, phases, row_phases

HERE = Path(__file__).parent
TARGET = HERE / "internals" / "messages.md"
PICTURE = HERE / "pictures" / "phases.svg"

HEAD = """\
# The messages

A run consists of processes with different roles, which exchange messages over connections. Workers and servers
connect to the coordinator, and workers also connect to every server. *Readers*, which read weights, connect to
servers. *Agents*, which start the processes of machines that join the run, and *observers*, which show the state of
the job, connect to the coordinator.

A connection has two directions, and each direction has a *phase*. Only messages in the same direction change the
phase. So both ends know the phase, although messages in opposite directions may cross. The picture shows the phases
of every direction that has more than one. Below the name of a phase are the messages that may be sent in this phase,
but not in all phases. The message at an arrow begins the next phase.

![The phases of each direction](../pictures/phases.svg)

A process closes a connection on which it receives a message that the tables do not allow in this direction and
phase, and says in its log what was expected. The tables say which messages a process may send, depending on its role
and on the messages that it has already sent. The order of iterations is checked in `core/order.py`, and membership in
the run in `core/members.py`. "Any" phase means any except *greeting* and *left*.

In the tables, "core" means that the receiving process passes the message to its core, which decides what follows (see
[the design](../design.md#the-cores)). A message for the "host" concerns only the receiving process itself: its
connections, its memory, or the machine.

Some terms in the tables: a *cut* is a copy of the state of the job, from which a checkpoint is written. An *extension*
adds parameters to the model during training. The *initializer* is the worker that sends the initial weights. A *base*
is the weights that a worker has after an answer; the next answer may contain only differences from the base.

**To add a message**, write its class in a module of `core/messages/`, with one decorator `@sent(...)` for
each row of the table. Then let one core send the message, and another core handle it in its method `handle`. The
decoders, the checks of received messages, the fuzzers' examples and this page (`make docs`) follow from the class.
"""


def text() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(line for direction in directions() for line in section(*direction))])


def directions() -> list[tuple[str, str]]:
    """Return (sender, receiver) of every direction."""
    return sorted({(row.sender, row.receiver) for row in ROWS})


def rows_of(sender: str, receiver: str) -> list[MessageRow]:
    """Return the rows of a direction, those of its first phases first."""
    names = phases(sender, receiver)
    rows = [row for row in ROWS if (row.sender, row.receiver) == (sender, receiver)]
    return sorted(rows, key=lambda row: (names.index(row_phases(row)[0]), row.message.__name__))


def section(sender: str, receiver: str) -> Iterator[str]:
    """Yield the lines of the section about a direction."""
    yield f"## From {named(sender)} to {named(receiver)}"
    yield ""
    several = len(phases(sender, receiver)) > 1
    yield "| message | meaning | for |" + (" phases |" if several else "")
    yield "|---|---|---|" + ("---|" if several else "")
    for row in rows_of(sender, receiver):
        module = row.message.__module__.rpartition(".")[2]
        name = f"[`{row.message.__name__}`](../../src/paceline/core/messages/{module}.py)"
        cells = [name, meaning(row), "core" if row.forwarded else "host"]
        if several:
            cells.append(when(row))
        yield f"| {' | '.join(cells)} |"
    yield ""


def named(role: str) -> str:
    """Return a role with its article."""
    return f"{'the' if role == 'coordinator' else 'an' if role[0] in 'aeiou' else 'a'} {role}"


def meaning(row: MessageRow) -> str:
    """Return the first paragraph of the docstring of a message."""
    return " ".join((row.message.__doc__ or "").partition("\n\n")[0].split()).replace("|", "\\|")


def when(row: MessageRow) -> str:
    """Return the phases in which a message may be sent, and the one that it begins."""
    during = ", ".join(row.during) or "any"
    return during + (f"; begins *{row.then}*" if row.then else "")


# -- the picture ------------------------------------------------------------------------------------------

WIDTH, MARGIN, GAP = 1034, 16, 22
BOX, ARROW = 142, 88  # widths of a phase and of the arrow to the next one
LINE, TITLE = 15, 26  # heights of a line of text in a phase, and of its name
FONT = "font-family='Helvetica, Arial, sans-serif'"


def picture() -> str:
    """Return the picture of the phases as SVG."""
    parts: list[str] = []
    top = MARGIN
    for sender, receiver in directions():
        if len(phases(sender, receiver)) > 1:
            lane, height = lane_of(sender, receiver, top)
            parts += lane
            top += height + GAP
    frame = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {top}' width='{WIDTH}' height='{top}'>"
    )
    head = "<path d='M0 0 L8 4 L0 8 z' fill='#555'/>"
    marker = (
        f"<marker id='head' markerWidth='8' markerHeight='8' refX='8' refY='4' orient='auto'>{head}</marker>"
    )
    background = f"<rect width='{WIDTH}' height='{top}' fill='white'/>"
    return "\n".join([frame, f"<defs>{marker}</defs>", background, *parts, "</svg>", ""])


def lane_of(sender: str, receiver: str, top: int) -> tuple[list[str], int]:
    """Return the elements for a direction, and their height."""
    names, rows = phases(sender, receiver), rows_of(sender, receiver)
    parts = [label(MARGIN, top + 18, f"{sender} \N{RIGHTWARDS ARROW} {receiver}", 14, bold=True)]
    within = {name: sorted(row.message.__name__ for row in rows if name in row.during) for name in names}
    height = TITLE + LINE * max(map(len, within.values())) + 8
    for number, name in enumerate(names):
        left = 186 + number * (BOX + ARROW)
        parts.append(
            f"<rect x='{left}' y='{top}' width='{BOX}' height='{height}' rx='6' fill='#eef4fa' stroke='#0072B2'/>"
        )
        parts.append(label(left + 10, top + 18, name, 13, bold=True))
        for line, message in enumerate(within[name]):
            parts.append(label(left + 10, top + TITLE + 12 + line * LINE, message, 11))
        if begins := [row for row in rows if row.then == name and row_phases(row) != [name]]:
            parts += arrow(left - ARROW, left, top + 14, (row.message.__name__ for row in begins))
    return parts, height


def arrow(left: int, right: int, y: int, names: Iterable[str]) -> list[str]:
    """Return an arrow with the names of messages below it."""
    line = f"<line x1='{left}' y1='{y}' x2='{right}' y2='{y}' stroke='#555' marker-end='url(#head)'/>"
    middle = (left + right) // 2
    return [line, *(label(middle, y + 14 + 12 * n, name, 10, middle=True) for n, name in enumerate(names))]


def label(x: int, y: int, words: str, size: int, *, bold: bool = False, middle: bool = False) -> str:
    """Return a text."""
    weight = " font-weight='bold'" if bold else ""
    anchor = " text-anchor='middle'" if middle else ""
    return (
        f"<text x='{x}' y='{y}' {FONT} font-size='{size}'{weight}{anchor} fill='#222'>{escape(words)}</text>"
    )


def main() -> int:
    """Write the page and the picture, or check them."""
    made = {TARGET: text(), PICTURE: picture()}
    if "--check" in sys.argv:
        return int(any(not path.exists() or path.read_text() != content for path, content in made.items()))
    for path, content in made.items():
        path.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
