"""Output that nobody takes: a pipe that is closed, a full disk, closed descriptors. A run goes on to its end."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from tests.support.marks import chaos, thorough
from tests.support.warm import bare_environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full"),
]

DEADLINE_S = 120.0  # a safety net: nothing here takes that long unless something hangs
STEPS = 40

# Each worker prints far more than a pipe holds, so it ends only if somebody reads to the end.
FIT = f"""
import torch
import paceline


def fit():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for iteration in range({STEPS}):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        print(f"iteration {{iteration}}", "x" * 10_000)
"""
LAST_LINE = f"iteration {STEPS - 1} " + "x" * 10_000
LAUNCH = "paceline.launch(fit, workers=1, servers=1, run_dir='run', progress=True)\n"
LOOKING = f"""
import sys
from paceline.start.display import ProgressDisplay
{FIT}
mine, seen, update = sys.stdout, set(), ProgressDisplay.update


def look(self):
    seen.add(id(sys.stdout))
    update(self)


ProgressDisplay.update = look
{LAUNCH}
print("the same" if seen == {{id(mine)}} and sys.stdout is mine else "another")
"""
RUN = ("-m", "paceline", "run", "--workers", "1", "--servers", "1", "--run-dir", "run", "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the programs run: `train.py` is for `paceline run`, `launching.py` calls `launch`."""
    (tmp_path / "train.py").write_text(FIT + "\nfit()\n")
    (tmp_path / "launching.py").write_text(FIT + f"\n{LAUNCH}\nopen('over', 'w').close()\n")
    return tmp_path


@contextlib.contextmanager
def program(
    arguments: Sequence[str],
    folder: Path,
    *,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    redirect: str = "",
    term: str = "dumb",
) -> Iterator[subprocess.Popen[bytes]]:
    """The interpreter with some arguments. A shell starts it if there is a redirection such as ">&-"."""
    command = [sys.executable, *arguments]
    if redirect:
        command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *command]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=bare_environment(TERM=term, HOME=str(folder)),
    ) as process:
        net = threading.Timer(DEADLINE_S, process.kill)  # what it has started ends with it
        net.start()
        try:
            yield process
        finally:
            net.cancel()
            net.join()
            if process.poll() is None:
                process.kill()


def rest_of(stream: IO[bytes] | None) -> str:
    """What is left to be read, without the progress that a slow run shows now and then."""
    text = "" if stream is None or stream.closed else stream.read().decode()
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("bsp, 1 worker"))


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int, list[bytes]]]:
    """A terminal: our end, the program's, and what was drawn on it."""
    ours, theirs = pty.openpty()
    drawn: list[bytes] = []

    def draw() -> None:
        with contextlib.suppress(OSError):  # nobody holds the other end any more
            while part := os.read(ours, 65536):
                drawn.append(part)

    reader = threading.Thread(target=draw)
    reader.start()
    try:
        yield ours, theirs, drawn
    finally:
        reader.join(DEADLINE_S)
        os.close(ours)


def assert_trained_to_the_end(folder: Path) -> None:
    """The worker was drained until it ended, and the weights are there."""
    assert (folder / "run" / "worker-0.log").read_text().splitlines()[-1] == LAST_LINE
    assert {"summary.json", "weights.safetensors"} <= {path.name for path in (folder / "run").iterdir()}


# -- the command line -------------------------------------------------------------------------------------


def test_a_run_whose_standard_output_is_closed_after_two_lines_goes_on_to_its_end(folder: Path) -> None:
    with program(RUN, folder) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        process.stdout.close()
        stderr = rest_of(process.stderr)
        assert process.wait(DEADLINE_S) == 0

    assert stderr == ""
    assert_trained_to_the_end(folder)


@pytest.mark.chaos
def test_a_run_whose_standard_output_is_full_says_so_once_and_goes_on_to_its_end(folder: Path) -> None:
    with program(RUN, folder, redirect=">/dev/full") as process:
        stderr = rest_of(process.stderr)
        assert process.wait(DEADLINE_S) == 0

    assert stderr == "standard output can no longer be written: No space left on device\n"
    assert_trained_to_the_end(folder)


@pytest.mark.parametrize("redirect", ["<&- >&- 2>&-", *chaos(">&- 2>/dev/full")])
@pytest.mark.thorough
def test_a_run_without_standard_streams_goes_on_to_its_end(folder: Path, redirect: str) -> None:
    """Without care a socket gets the number of a closed one, and what is printed goes to its other end."""
    with program(RUN, folder, redirect=redirect) as process:
        assert rest_of(process.stdout) + rest_of(process.stderr) == ""
        assert process.wait(DEADLINE_S) == 0

    assert_trained_to_the_end(folder)


@pytest.mark.thorough
def test_a_run_whose_terminal_goes_away_goes_on_to_its_end(folder: Path) -> None:
    """A thread of rich's draws the live table, and would end with its first failing write."""
    ours, theirs = pty.openpty()
    with program(RUN, folder, stderr=theirs, term="xterm") as process:
        os.close(theirs)
        assert process.stdout is not None
        process.stdout.readline()
        os.close(ours)
        rest_of(process.stdout)
        assert process.wait(DEADLINE_S) == 0

    assert_trained_to_the_end(folder)


@pytest.mark.chaos
def test_a_run_whose_logs_cannot_be_written_says_so_once_for_each_and_goes_on_to_its_end(
    folder: Path,
) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "worker-0.log").symlink_to("/dev/full")
    (folder / "run" / "worker-1.log").symlink_to("a/folder/that/is/gone")
    with program([*RUN[:3], "--workers", "2", *RUN[5:]], folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        stdout, stderr = (stream.read().decode() for stream in (process.stdout, process.stderr))
        assert process.wait(DEADLINE_S) == 0

    # The script's workers train on the same data, which is said, too.
    notes = sorted(line for line in stderr.splitlines() if line.startswith("the "))
    assert len(notes) == 2
    assert re.fullmatch(r"the log \S+/worker-1.log cannot be written: No such file or directory", notes[0])
    assert re.fullmatch(
        r"the output for the log \S+/worker-0.log can no longer be written: .*No space left.*", notes[1]
    )
    assert LAST_LINE in stdout.splitlines()
    assert (folder / "run" / "weights.safetensors").exists()


def test_a_refused_run_without_standard_error_still_ends_with_2(folder: Path) -> None:
    with program(("-m", "paceline", "run", "--workers", "0", "train.py"), folder, redirect="2>&-") as process:
        assert rest_of(process.stdout) == ""
        assert process.wait(DEADLINE_S) == 2


@pytest.mark.parametrize(
    "arguments", [("sync",), ("run", "--help"), *thorough((("--help",),), (("--version",),))]
)
def test_a_command_that_only_prints_into_a_closed_pipe_shows_no_traceback(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    with program(("-m", "paceline", *arguments), folder) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert rest_of(process.stderr) == ""
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.thorough
def test_json_that_could_not_be_written_ends_with_1(folder: Path) -> None:
    """A program that reads it must learn that it is not whole."""
    simulate = ("simulate", "elastic-bsp", "--iterations", "2", "--sync", "asp", "--out", "out", "--json")
    with (
        open("/dev/full", "w") as full,
        program(("-m", "paceline", *simulate), folder, stdout=full.fileno()) as process,
    ):
        stderr = rest_of(process.stderr)
        assert process.wait(DEADLINE_S) == 1

    assert stderr == "standard output can no longer be written: No space left on device\n"


# -- from code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("redirect", ["", *chaos(">&- 2>/dev/full", ">/dev/full 2>&-")])
def test_a_launch_goes_on_to_its_end_whatever_becomes_of_the_scripts_output(
    folder: Path, redirect: str
) -> None:
    with program(["launching.py"], folder, redirect=redirect) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        process.wait(DEADLINE_S)

    assert (folder / "over").exists()
    assert_trained_to_the_end(folder)


def test_the_root_logger_is_the_scripts_own(folder: Path) -> None:
    lines = "import logging\nlogging.basicConfig(level='INFO', format='mine %(message)s')\nlogging.info('configured')\n"
    (folder / "train.py").write_text(f"{lines}{FIT}\nfit()\n")
    with program(RUN, folder) as process:
        rest_of(process.stdout)
        assert process.wait(DEADLINE_S) == 0

    assert "mine configured\n" in (folder / "run" / "worker-0.log").read_text()


@pytest.mark.chaos
def test_a_launch_with_a_live_table_leaves_the_scripts_own_standard_output_alone(folder: Path) -> None:
    (folder / "looking.py").write_text(LOOKING)
    with (
        terminal() as (_, theirs, drawn),
        program(["looking.py"], folder, stderr=theirs, term="xterm") as process,
    ):
        os.close(theirs)
        stdout = rest_of(process.stdout)
        assert process.wait(DEADLINE_S) == 0

    *lines, last = stdout.splitlines()
    assert lines == [f"iteration {iteration} " + "x" * 10_000 for iteration in range(STEPS)]
    assert last == "the same"
    assert b"iteration" in b"".join(drawn)
    assert b"xxxxxxxxxx" not in b"".join(drawn)
