"""Worker 0's terminal: what is shown, what the log keeps, who reads the keys, and how the user's terminal is left."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from paceline.start.terminal import _Lines, print_sentence
from tests.support.live import DEADLINE_S, mark
from tests.support.marks import thorough
from tests.support.screens import Screen

__all__ = ["mark"]

# -- the screen -----------------------------------------------------------------------------------------------


class Shown:
    def __init__(self) -> None:
        self.events: list[str | bytes] = []

    def print(self, line: str) -> None:
        self.events.append(line)

    def draw(self, data: bytes) -> None:
        self.events.append(data)


@pytest.mark.parametrize(
    ("chunks", "events"),
    {
        "lines stay lines, in color": ([b"a\r\n\x1b[31mb", b"\x1b[0m\r\n"], ["a", "\x1b[31mb\x1b[0m"]),
        "a divided line end is no drawing": ([b"a\r", b"\nb\n"], ["a", "b"]),
        "a divided color is no drawing": ([b"\x1b[3", b"1ma\n"], ["\x1b[31ma"]),
        "a bar draws, and all that follows": (
            [b"a\n", b"\r 0%", b"\r 1%", b"b\n"],
            ["a", b"\r 0%", b"\r 1%", b"b\n"],
        ),
        "a prompt draws": ([b"name? ", b"", b"x\n"], [b"name? ", b"x\n"]),
        "silence draws nothing": ([b"a\n", b"", b"b\n"], ["a", "b"]),
        "a hidden cursor draws": ([b"\x1b[?25l"], [b"\x1b[?25l"]),
    }.values(),
)
def test_lines_are_shown_as_lines_until_the_script_draws(
    chunks: list[bytes], events: list[str | bytes]
) -> None:
    shown = Shown()
    lines = _Lines(shown)
    for chunk in chunks:
        lines.write(chunk)
    assert shown.events == events
    assert not lines.unfinished


# -- in a terminal --------------------------------------------------------------------------------------------

SCRIPT = """
import os, pdb, sys, time
import torch
import paceline

model = torch.nn.Linear(2, 2)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
main = paceline.worker_index() == 0

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

step()
if main:
    print("terminal", [os.isatty(number) for number in range(3)], os.get_terminal_size().columns)
    print("argv", sys.argv, __name__, sys.path[0] == os.getcwd())
    for share in range(3):
        print(f"share {share}", end="\\r", flush=True)
    print()
    print("hello", input("name? "))
    if sys.argv[1:] == ["debug"]:
        pdb.set_trace()
step()
print("the end of", paceline.worker_index())
"""


@pytest.fixture
def screen(mark: str) -> Iterator[type[Screen]]:
    opened = []

    class Opened(Screen):
        def __init__(self, *arguments: str, columns: int = 77) -> None:
            super().__init__(*arguments, columns=columns)
            opened.append(self)

    Path("package").mkdir()
    Path("package", "__init__.py").touch()
    Path("package", "train.py").write_text(SCRIPT)
    yield Opened
    for each in opened:
        each.close()


RUN = ("-m", "paceline", "run", "-n", "2", "--run-dir", "out")


def test_worker_0_has_a_terminal_and_reads_what_the_user_types(screen: type[Screen], mark: str) -> None:
    shown = screen(*RUN, "--stall-timeout", "2", "-m", "package.train")
    shown.await_text("name? ")
    # Each key is passed on. Worker 0's terminal edits the line, or readline, which pdb loads from Python 3.13 on.
    shown.type("Adx\x7fa")
    shown.await_text("Adx\b")
    time.sleep(2.5)  # the user thinks for longer than the stall timeout
    shown.type("\r")
    assert shown.end() == 0, shown.text
    assert "terminal [True, True, True] 77" in shown.text
    assert "hello Ada" in shown.text
    assert "the end of 0" in shown.text
    assert "the end of 1" not in shown.text
    assert "share 0\rshare 1\rshare 2\r" in shown.text
    assert termios.tcgetattr(shown.other) == shown.settings
    log = Path("out", "worker-0.log").read_bytes().decode()
    path = str(Path("package", "train.py").resolve())
    # The log has what a script writes and the terminal echoes, as it is.
    assert f"argv {[path]} __main__ True\nshare 0\rshare 1\rshare 2\r\n" in log
    assert re.search(r"name\? Adx\x08[^a]*a[^\n]*\n[^\n]*hello Ada\n", log), log
    # The user was awaited for longer than the stall timeout, but worker 0 was not silent for a reason of its own.
    assert "waiting for worker 0" not in shown.text


@pytest.mark.parametrize(
    ("number", "code"), [(None, 130), *thorough((signal.SIGTERM, 143), (signal.SIGQUIT, 131))]
)
@pytest.mark.thorough
def test_a_run_in_the_debugger_ends_and_leaves_the_terminal_as_it_was(
    number: int | None, code: int, screen: type[Screen], mark: str
) -> None:
    shown = screen(*RUN, "package/train.py", "debug")
    shown.await_text("name? ")
    shown.type("Ada\r")
    shown.await_text("(Pdb) ")
    shown.type("1000+1\r")
    shown.await_text("1001")
    assert termios.tcgetattr(shown.other) != shown.settings
    if number is None:
        shown.type("\x03")
    else:
        shown.program.send_signal(number)
    assert shown.end() == code, shown.text
    assert termios.tcgetattr(shown.other) == shown.settings
    assert len(re.findall(r"\x1b\[\?2004h", shown.text)) <= len(re.findall(r"\x1b\[\?2004l", shown.text))


def test_piped_input_goes_to_worker_0_and_show_all_names_each_process(mark: str) -> None:
    Path("train.py").write_text(SCRIPT.replace("os.get_terminal_size().columns", "0"))
    ended = subprocess.run(
        [sys.executable, *RUN, "--show-all", "train.py"],
        input="Ada\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert "worker 0 | terminal [False, False, False] 0" in lines
    assert "worker 0 | name? hello Ada" in lines
    assert "worker 1 | the end of 1" in lines


HELD = """
import os, subprocess, sys, time
from paceline.start.terminal import Terminal

def awaits(expected):
    while terminal.awaits_user(child.pid) != expected:
        time.sleep(0.01)

terminal = Terminal.here()
with terminal:
    worker = terminal.take_worker()
    program = "import time; input(); time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=worker, stdout=worker, stderr=worker)
    awaits(True)
    print("held", flush=True)
    awaits(False)
    child.kill()
    child.wait()
    os.close(worker)
    print("free", flush=True)
"""


def test_a_process_that_reads_its_terminal_awaits_the_user_until_a_line_is_typed(
    screen: type[Screen],
) -> None:
    shown = screen("-c", HELD)
    shown.await_text("held")
    shown.type("a line\r")
    shown.await_text("free")
    assert shown.end() == 0
    assert termios.tcgetattr(shown.other) == shown.settings


SENTENCES = {
    "a summary": ("run", "--dry-run", "--workers", "4", "--pace", ".05,.05,.05,.15", "package/train.py"),
    "a warning": ("run", "--dry-run", "package/train.py", "--workers", "3"),
    "an error": ("status", "foo"),
    "an error with many names": ("run", "--sync", "elastic", "package/train.py"),
}
REPRESENTATIVES = ("a summary", "an error with many names")
"""A table with two columns, and the longest sentence."""


@pytest.mark.parametrize("widths", [(40, 120), *thorough(((60, 80),))], ids=str)
@pytest.mark.parametrize(
    "case", [*REPRESENTATIVES, *thorough(*(case for case in SENTENCES if case not in REPRESENTATIVES))]
)
def test_what_the_commands_say_is_wrapped_between_words_in_a_terminal_only(
    case: str, widths: tuple[int, int], screen: type[Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # the width of a dumb terminal is taken for 80
    monkeypatch.delenv("COLUMNS", raising=False)  # would be taken for the width of any terminal
    arguments = ("-m", "paceline", *SENTENCES[case])
    piped = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    said = piped.stdout + piped.stderr
    for columns in widths:
        shown = screen(*arguments, columns=columns)
        assert shown.end() == piped.returncode
        lines = re.sub(r"\x1b\[[\d;]*m", "", shown.text).replace("\r", "").splitlines()
        if "--dry-run" in arguments:  # a path may be longer than the second column of the summary
            assert sorted("".join(lines).replace(" ", "")) == sorted("".join(said.split()))
        else:
            assert sorted(" ".join(lines).split()) == sorted(said.split())
            assert said.count("\n") == 1
        assert [line for line in lines if len(line.rstrip()) > columns and " " in line.strip()] == []


def test_a_path_that_is_longer_than_a_line_is_left_whole() -> None:
    path = "/a/path/" + 20 * "x"
    console = Console(file=io.StringIO(), width=20, force_terminal=True, color_system=None)
    print_sentence(console, f"the run is in {path} and a [word] :smile:")
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == ["the run is in", path, "and a [word] :smile:"]
