"""Programs that start warm find what executed programs find, and end as they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.start.processes import program
from tests.support.live import DEADLINE_S, await_that, processes, run_program, start_program
from tests.support.marks import thorough
from tests.support.warm import WarmStarts

pytestmark = pytest.mark.usefixtures("mark")

LOOK = """
import atexit, gc, json, os, random, resource, signal, sys, threading, warnings
from pathlib import Path

def kept(path):
    return Path(path).read_bytes().decode().strip("\\0").split("\\0")

def end():
    print("atexit", file=sys.stderr)

atexit.register(end)
text = sys.stdin.read()
print(json.dumps({
    "argv": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "main": {name: str(value).partition(" at 0x")[0] for name, value in globals().items() if name.startswith("__")
             if name != "__builtins__"},
    "known as main": sys.modules["__main__"].__dict__ is globals(),
    "shown": [kept("/proc/self/cmdline"), sorted(kept("/proc/self/environ")), kept("/proc/self/comm")],
    "variables": dict(os.environ),
    "children's variables": os.popen("env | sort").read(),
    "directory": os.getcwd(),
    "parent": os.getppid(),
    "groups": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "streams": [[str(s), s.encoding, s.errors, s.newlines, s.line_buffering, s.write_through, str(s.buffer)]
                for s in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)],
    "input": text,
    "signals": {s.name: getattr(signal.getsignal(s), "__qualname__", signal.getsignal(s)) for s in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "main thread": threading.main_thread().native_id == os.getpid(),
    "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")],
    "garbage": [gc.isenabled(), gc.get_threshold()],
    "warnings": sys.warnoptions,
}))
random.seed(len(sys.argv))
if sys.argv[1] == "raise":
    raise ValueError("of the script")
if sys.argv[1] == "interrupt":
    signal.raise_signal(signal.SIGINT)
sys.exit({"text": "what went wrong", "seven": 7, "many": 256 + 8, "true": True, "none": None}[sys.argv[1]])
"""


def look(*words: str, **options: Any) -> tuple[dict[str, Any], str, int]:
    """Return what a program finds, its messages, and how it ends."""
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, input="typed", **options)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found, ended.stderr, ended.returncode


@pytest.mark.parametrize(
    ("before", "end", "options"),
    [
        (["look.py"], "none", {"start_new_session": True}),
        (["look.py"], "raise", {}),
        (["below/../look.py"], "interrupt", {"process_group": 0}),
        (["-m", "look"], "raise", {"cwd": "/"}),
        (["-P", "-u", "look.py"], "text", {}),
        (["-P", "-m", "package.look"], "seven", {"cwd": "/"}),
        (["-m", "package.look"], "many", {}),
    ],
)
def test_a_warm_program_is_like_an_executed_one(
    before: list[str],
    end: str,
    options: dict[str, Any],
    tmp_path: Path,
    warm_starts: WarmStarts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in ("package", "below"):
        Path(folder).mkdir()
    for place in (".", "package"):
        Path(place, "look.py").write_text(LOOK)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{tmp_path}")
    environment = dict(os.environ, UNUSUAL="a=b c")
    warm = look(*before, end, "--option", env=environment, **options)
    monkeypatch.setattr(warm_starts, "allowed", False)
    executed = look(*before, end, "--option", env=environment, **options)
    for mine, theirs in zip(warm, executed, strict=True):
        assert mine == theirs


def test_a_warm_program_ends_with_a_signal_like_any_other(mark: str) -> None:
    Path("wait.py").write_text("import time; print('waits', flush=True); time.sleep(1000)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        with start_program("wait.py") as waits:
            assert waits.stdout is not None
            assert waits.stdout.readline() == "waits\n"
            assert processes(mark) == {"launcher": waits.pid}
            waits.send_signal(number)
            assert waits.wait(DEADLINE_S) == -number


WARM = "import sys; print('torch' in sys.modules)"


@pytest.mark.parametrize(
    ("words", "variables", "is_warm"),
    [
        (["look.py"], {}, True),
        (["-m", "look"], {"PYTHONPATH": "."}, True),
        (["-P", *program.main_of("look")], {"PYTHONPATH": "."}, True),
        (["-c", WARM], {}, False),
        (["look.py"], {"OMP_NUM_THREADS": "3"}, False),
        (["shadows/look.py"], {}, False),
        *thorough(
            (["-W", "error", "look.py"], {}, False),
            (["look.py"], {"PYTHONHASHSEED": "0"}, False),
            (["look.py"], {"PYTHONPATH": "shadows"}, False),
        ),
    ],
)
def test_programs_that_would_notice_are_executed(
    words: list[str], variables: dict[str, str], is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("shadows").mkdir()
    Path("shadows/rich.py").touch()
    for place in (".", "shadows"):
        Path(place, "look.py").write_text(f"def main():\n    pass\n{WARM}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_program(*words).stdout == f"{is_warm}\n"


LANE = f"""
import os, signal, subprocess, sys
sys.path.append({str(Path(__file__).parents[1])!r})
from tests.support.warm import WarmStarts
WarmStarts(dict(os.environ)).begin()
subprocess.Popen([sys.executable, "wait.py"]).pid
signal.pause()
"""


@pytest.mark.thorough
def test_a_warm_server_ends_with_the_process_that_has_started_it(mark: str) -> None:
    Path("wait.py").write_text("print('waits', flush=True); import time; time.sleep(1000)")
    with start_program("-c", LANE) as lane:
        assert lane.stdout is not None
        assert lane.stdout.readline() == "waits\n"
        server, waits = Path(f"/proc/{lane.pid}/task/{lane.pid}/children").read_text().split()
        lane.kill()
        await_that(lambda: not os.path.exists(f"/proc/{server}"), "the warm server has ended")
        os.kill(int(waits), signal.SIGKILL)  # like an executed program, it does not end with its parent
        await_that(lambda: processes(mark) == {}, "the program has ended")
