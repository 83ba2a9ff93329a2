"""The lock on a run directory: who may take it from whom, with real processes and real process namespaces."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigurationError
from paceline.run import run_lock
from paceline.run.run_lock import (
    PROBE,
    Holder,
    RunLock,
    RunningProcess,
    await_free,
    is_held,
    is_lock,
    life_of,
    newest_lock,
)
from paceline.trace.run_dir import set_aside
from tests.support.emulated import why_not_emulated
from tests.support.live import await_that
from tests.support.marks import thorough
from tests.support.small_disk import fill, small_disk

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

ELSEWHERE = {"boot": "another", "machine": "node7"}

# Takes the lock on a directory, says so, and holds it until its standard input ends, or the lock is lost.
HOLD = """
import os, select, sys
from pathlib import Path
from paceline.errors import ConfigurationError
from paceline.run import run_lock
run_lock.HEARTBEAT_S, run_lock.LOOK_INTERVAL_S = float(sys.argv[2]), 0.05
try:
    lock = run_lock.RunLock.take(Path(sys.argv[1]))
except ConfigurationError as error:
    sys.exit(f"refused: {error}")
print(f"holds {os.getpid()}", flush=True)
while not lock.lost and not select.select([sys.stdin], [], [], 0.02)[0]:
    pass
lock.release()
sys.exit(f"lost: {lock.lost}" if lock.lost else 0)
"""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(run_lock, "LOOK_INTERVAL_S", 0.05)


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[str]]]:
    """Programs that end with the test."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for program in found:
        program.kill()
        program.communicate()


def holder(folder: Path, heartbeat_s: float = 1.5, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", HOLD, str(folder), str(heartbeat_s)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def said(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def locks_in(folder: Path) -> list[str]:
    """Return the names in a directory, without those of probes: a living process removes its own, a killed one not."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(PROBE)]


def write(folder: Path, number: int, **changes: object) -> Path:
    """Write a lock of this process, with some changes, as another process would have left it."""
    path = folder / f".lock-{number}"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(Holder.here(), **changes)))
    return path


def test_of_processes_that_start_at_once_one_has_the_lock(
    tmp_path: Path, programs: list[subprocess.Popen[str]]
) -> None:
    write(tmp_path, 3, process=RunningProcess(os.getpid(), 1))  # whoever held it before was killed
    programs += [holder(tmp_path) for _ in range(8)]
    told = [said(program) for program in programs]
    assert sum(line.startswith("holds") for line in told) == 1
    refused = [program.communicate()[1] for program, line in zip(programs, told, strict=True) if not line]
    owner = next(line.split()[1] for line in told if line)
    for words in refused:
        assert f"is still in progress: process {owner} on {os.uname().nodename} holds the directory" in words
        assert "--force" in words
    assert locks_in(tmp_path) == [".lock-4"]


def test_a_killed_holder_is_replaced_at_once_and_a_living_one_never(
    tmp_path: Path, programs: list[subprocess.Popen[str]]
) -> None:
    program = holder(tmp_path)
    programs.append(program)
    assert said(program).startswith("holds")
    assert is_held(tmp_path)
    with pytest.raises(ConfigurationError, match="is still in progress"):
        await_free(tmp_path)
    program.kill()
    program.wait()
    assert not is_held(tmp_path)
    with RunLock.take(tmp_path, tell=pytest.fail) as lock:
        assert lock.number == 2
    assert not is_held(tmp_path)
    with RunLock.take(tmp_path, tell=pytest.fail) as lock:
        assert lock.number == 3  # numbers only grow, so a slow process cannot take an old one again
    assert locks_in(tmp_path) == [".lock-3"]


def test_force_ends_the_holder_before_it_goes_on(
    tmp_path: Path, programs: list[subprocess.Popen[str]]
) -> None:
    program = holder(tmp_path)
    programs.append(program)
    assert said(program).startswith("holds")
    words: list[str] = []
    with RunLock.take(tmp_path, force=True, tell=words.append) as lock:
        assert program.wait(60) == 1
        assert not lock.look()
    assert "the run of process" in words[0]
    assert "saves no weights, and what it has done since its newest checkpoint is lost" in words[0]
    assert "lost: process" in program.communicate()[1]


def test_a_process_with_the_id_of_an_earlier_one_is_not_taken_for_it() -> None:
    here = Holder.here()
    assert life_of(here) == "alive"
    assert life_of(msgspec.structs.replace(here, process=RunningProcess(os.getpid(), 1))) == "dead"
    assert life_of(msgspec.structs.replace(here, boot="another")) == "unseen"
    assert life_of(msgspec.structs.replace(here, namespace=1)) == "unseen"


def test_a_holder_elsewhere_is_awaited_for_three_heartbeats_by_the_clock_of_the_file_server(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, 1, heartbeat_s=0.2, **ELSEWHERE)
    assert is_held(tmp_path)
    words: list[str] = []
    with RunLock.take(tmp_path, tell=words.append):
        assert "is held by process" in words[0]
        assert "on node7, which cannot be seen from here. Waiting for up to 1 s" in words[0]
        assert words[1].startswith("No sign of life of process")
    # Its last heartbeat was long ago, whatever the clock of its machine, and of this one, says.
    path = write(tmp_path, 3, heartbeat_s=3600.0, **ELSEWHERE)
    os.utime(path, (time.time() - 4 * 3600,) * 2)
    assert not is_held(tmp_path)
    RunLock.take(tmp_path, tell=pytest.fail).release()


def test_a_clock_of_the_file_server_that_was_set_back_makes_nobody_wait_longer(tmp_path: Path) -> None:
    path = write(tmp_path, 1, heartbeat_s=0.2, **ELSEWHERE)
    os.utime(path, (time.time() + 3600,) * 2)
    words: list[str] = []
    looks = itertools.count()

    def look() -> None:
        assert next(looks) < 100, "it is still awaited"

    with RunLock.take(tmp_path, tell=words.append, look=look):
        assert words[1].startswith("No sign of life of process")


def test_a_heartbeat_from_elsewhere_is_a_refusal(tmp_path: Path) -> None:
    path = write(tmp_path, 1, heartbeat_s=60.0, **ELSEWHERE)
    with pytest.raises(ConfigurationError, match=r"process .* on node7 holds the directory"):
        await_free(tmp_path, tell=lambda words: None, look=lambda: os.utime(path))
    assert newest_lock(tmp_path) == 1
    with pytest.raises(ZeroDivisionError):  # what ends the waiting leaves the lock as it is
        RunLock.take(tmp_path, tell=lambda words: None, look=lambda: 1 / 0)
    assert [path.name for path in tmp_path.iterdir()] == [".lock-1"]


def test_a_holder_notices_that_its_lock_was_taken_and_keeps_it_if_it_was_only_removed(tmp_path: Path) -> None:
    with RunLock.take(tmp_path) as lock:
        (tmp_path / ".lock-1").unlink()
        await_that((tmp_path / ".lock-1").exists, "the lock is there again")
        write(tmp_path, 2, **ELSEWHERE)
        await_that(lambda: lock.lost, "the loss is noticed")
        assert "on node7 has taken the directory" in lock.lost
    assert newest_lock(tmp_path) == 2


def test_who_decided_before_another_run_came_and_went_begins_again(tmp_path: Path) -> None:
    RunLock.take(tmp_path).release()
    seen = newest_lock(tmp_path)
    RunLock.take(tmp_path).release()
    with pytest.raises(ConfigurationError, match=r"another process has gone on with the run in .* meanwhile"):
        RunLock.take(tmp_path, after=seen)
    assert not is_held(tmp_path)


def test_a_process_acts_under_the_lock_of_the_one_that_has_started_it(tmp_path: Path) -> None:
    with RunLock.take(tmp_path) as lock:
        with RunLock.take(tmp_path, token=lock.token) as shared:
            assert shared.number == lock.number
        assert is_held(tmp_path)
    with RunLock.take(tmp_path, token=lock.token) as own:  # that process has ended meanwhile
        assert own.number == lock.number + 1


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with RunLock.take(tmp_path), pytest.raises(ConfigurationError, match="is still in progress"):
        RunLock.take(tmp_path)
    (tmp_path / ".lock-2").touch()  # whoever has just created it cannot be named yet
    assert is_held(tmp_path)


def test_on_a_full_disk_no_half_written_file_remains(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 65536) as disk:
        with RunLock.take(disk):
            fill(disk)
        (disk / "next").mkdir()
        with pytest.raises(ConfigurationError, match="cannot be written: No space left on device"):
            RunLock.take(disk / "next")
        assert sorted(locks_in(disk)) == [".lock-1", "filler", "next"]
        assert locks_in(disk / "next") == []


APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
needs_namespaces = pytest.mark.skipif(bool(why_not_emulated()), reason=f"needs {why_not_emulated()}")


@needs_namespaces
@pytest.mark.parametrize("prefix", [APART, *thorough((APART[:-1],))], ids=["own-proc", "proc-of-others"])
def test_a_heartbeat_of_a_process_in_another_namespace_is_a_refusal(
    tmp_path: Path, programs: list[subprocess.Popen[str]], prefix: tuple[str, ...]
) -> None:
    program = holder(tmp_path, prefix=prefix)
    programs.append(program)
    assert said(program) == "holds 1\n"
    # Both have a process 1, and it is not the same one.
    words: list[str] = []
    with pytest.raises(ConfigurationError, match="is still in progress: process 1 on"):
        RunLock.take(tmp_path, tell=words.append)
    assert "which cannot be seen from here" in words[0]


@needs_namespaces
@pytest.mark.parametrize("prefix", [APART, APART[:-1]], ids=["own-proc", "proc-of-others"])
@pytest.mark.thorough
def test_a_process_in_another_namespace_is_judged_by_its_heartbeats(
    tmp_path: Path,
    programs: list[subprocess.Popen[str]],
    prefix: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 1.5)  # a busy machine does not miss three of these
    program = holder(tmp_path, prefix=prefix)
    programs.append(program)
    assert said(program) == "holds 1\n"
    # It does not see us.
    words: list[str] = []
    mine = tmp_path / "mine"
    mine.mkdir()
    with RunLock.take(mine):
        other = holder(mine, prefix=prefix)
        programs.append(other)
        assert "refused: the run in" in other.communicate()[1]
    program.kill()  # nothing is left of the namespace
    with RunLock.take(tmp_path, tell=words.append):
        assert words[-1].startswith("No sign of life of process 1")


@needs_namespaces
@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_process_of_another_user_that_is_hidden_in_proc_is_unseen(
    programs: list[subprocess.Popen[str]], hidepid: int
) -> None:
    command = ["setpriv", "--reuid=65534", "--clear-groups", "sleep", "600"]
    program = subprocess.Popen(command, text=True)
    programs.append(program)
    await_that(lambda: Path(f"/proc/{program.pid}/comm").read_text() == "sleep\n", "it is of another user")
    other = msgspec.structs.replace(Holder.here(), process=RunningProcess.of(program.pid))
    powerless = "setpriv --regid=65534 --clear-groups --bounding-set=-all"
    mount = f'mount -t proc -o hidepid={hidepid} proc /proc && exec {powerless} "$@"'
    look = "import msgspec, sys; from paceline.run import run_lock as lock\n"
    look += "print(lock.life_of(msgspec.json.decode(sys.argv[1], type=lock.Holder)))"
    inside = [sys.executable, "-c", look, msgspec.json.encode(other).decode()]
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *inside], capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.stderr) == ("unseen\n", "")


def test_no_file_of_the_lock_is_moved_with_those_of_an_earlier_run(tmp_path: Path) -> None:
    """The heartbeats of whoever moves them create files that are gone again at once."""
    of_the_lock = [".lock-1", ".lock-2", ".lock-2.0a1b"]
    for name in of_the_lock:
        (tmp_path / name).touch()
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            run_lock._refresh(tmp_path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for number in range(300):
            (tmp_path / "trace-shard-0.jsonl").touch()
            folder = set_aside(tmp_path, str(number), stays=is_lock)
            assert os.listdir(folder) == ["trace-shard-0.jsonl"]
    finally:
        ended.set()
        thread.join()
    assert sorted(os.listdir(tmp_path)) == sorted([*of_the_lock, "before"])
