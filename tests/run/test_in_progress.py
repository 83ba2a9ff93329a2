"""The file by which a run in progress is found: who may read it, and what is said if there is no such run."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigurationError, PacelineError, PeerLostError
from paceline.run import run_lock as in_progress
from paceline.run.run_lock import (
    FILE_NAME,
    Holder,
    RunInProgress,
    RunLock,
    RunningProcess,
    newest_run,
    published,
    run_in,
    unreachable,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, in which runs make their directories."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_dir(name: str, written_s: float | None = None, *, address: str = "unix:x", **others: object) -> Path:
    """The directory of a run of this process that is in progress, unless its file says otherwise."""
    path = Path("runs", name)
    path.mkdir(parents=True)
    launcher = msgspec.structs.replace(Holder.here(), **others)
    content = RunInProgress(address, "token", launcher)
    file = path / FILE_NAME
    file.write_bytes(msgspec.json.encode(content))
    if written_s is not None:
        os.utime(file, (written_s, written_s))
        os.utime(path, (written_s, written_s))
    return path


ENDED = RunningProcess(os.getpid(), 1)  # an earlier process with our id


def test_only_its_owner_may_read_the_file_which_is_gone_after_the_run(folder: Path) -> None:
    with published(folder, "unix:/proc/1/fd/3", "secret"):
        file = folder / FILE_NAME
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        found = run_in(folder)
        assert (found.address, found.token, found.dashboard) == ("unix:/proc/1/fd/3", "secret", "")
    assert list(folder.iterdir()) == []


def test_the_file_names_the_live_page(folder: Path) -> None:
    with published(folder, "unix:x", "secret", "http://127.0.0.1:8080/?token=x"):
        assert run_in(folder).dashboard == "http://127.0.0.1:8080/?token=x"


def test_the_file_is_gone_after_a_run_that_fails(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), published(folder, "unix:x", "secret"):
        raise ZeroDivisionError
    assert list(folder.iterdir()) == []


def test_a_run_goes_on_if_the_file_cannot_be_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = folder / "missing"
    with published(missing, "unix:x", "secret"):
        pass
    [record] = caplog.records
    assert re.fullmatch(
        r"`paceline status` will not find the run, because \S+/missing/running.json cannot be written: .*",
        record.getMessage(),
    )


@pytest.mark.parametrize(
    ("files", "error", "said"),
    {
        "no directory of a run": ({}, ConfigurationError, "run is not the directory of a run; name one that"),
        "a run that has finished": (
            {"summary.json": '{"ended": "finished"}'},
            PeerLostError,
            "the run in run has finished; its results are there",
        ),
        "a run that has failed": (
            {"summary.json": '{"ended": "failed"}'},
            PeerLostError,
            "the run in run has failed; its results",
        ),
        "a summary of an earlier version": (
            {"summary.json": "{}"},
            PeerLostError,
            "the run in run has ended; its",
        ),
        "a run without a summary": (
            {"trace-coordinator.jsonl": ""},
            PeerLostError,
            "the run in run has ended without a summary; its logs are there",
        ),
    }.values(),
)
def test_a_directory_without_the_file_is_explained(
    files: dict[str, str], error: type[PacelineError], said: str, folder: Path
) -> None:
    Path("run").mkdir()
    for name, content in files.items():
        Path("run", name).write_text(content)
    with pytest.raises(error, match=said):
        run_in(Path("run"))
    Path("run", FILE_NAME).write_text('{"another": "file"}')
    with pytest.raises(error, match=said):
        run_in(Path("run"))


@pytest.mark.parametrize(("address", "command"), [("unix:x", "run"), ("tls:10.0.0.1:29600", "serve")])
def test_a_run_whose_launcher_was_killed_has_been_cut_off_and_may_be_resumed(
    address: str, command: str, folder: Path
) -> None:
    said = (
        f"the run in runs/a was cut off: its launcher, process {os.getpid()}, has ended without .*: paceline"
    )
    with pytest.raises(PeerLostError, match=f"{said} {command} --resume runs/a$"):
        run_in(run_dir("a", process=ENDED, address=address))


def test_a_run_on_another_machine_is_never_called_cut_off(folder: Path) -> None:
    path = run_dir("a", boot="another", machine="node7", process=ENDED)
    found = run_in(path)
    assert not found.seen
    words = str(unreachable(path, found))
    assert words.startswith("whether the run in runs/a is in progress cannot be told from here")
    assert (
        f"process {os.getpid()} on node7, can be neither seen nor reached. Call `paceline status` on that machine"
        in words
    )
    with RunLock.take(path):
        words = str(unreachable(path, found))
    assert words.startswith("the run in runs/a is in progress: its launcher, process")
    assert "has just given a sign of life, but cannot be reached from here" in words


def test_a_run_leaves_the_file_of_the_run_that_has_taken_its_directory(folder: Path) -> None:
    with published(folder, "unix:x", "secret"), published(folder, "unix:y", "other"):
        content = (folder / FILE_NAME).read_bytes()
        (folder / FILE_NAME).write_bytes(content.replace(b"other", b"third"))
    assert run_in(folder).token == "third"


def test_a_run_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_dir("a")

    def refuse(file: Path) -> bytes:
        raise PermissionError(file)

    monkeypatch.setattr(in_progress, "read_regular", refuse)
    with pytest.raises(ConfigurationError, match="the run in runs/a belongs to another user"):
        run_in(path)


def test_the_newest_run_in_progress_is_found(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no run is in progress in ./runs; name the directory"):
        newest_run()
    run_dir("newer", 200.0)
    run_dir("older", 100.0)
    run_dir("cut-off", 300.0, process=ENDED)
    run_dir("elsewhere", 400.0, boot="another")
    assert newest_run() == Path("runs/newer")
    shutil.rmtree("runs/newer")
    shutil.rmtree("runs/older")
    assert newest_run() == Path("runs/elsewhere")


def test_it_is_said_that_the_newest_run_was_cut_off_but_not_an_older_one(folder: Path) -> None:
    run_dir("a", 100.0, process=ENDED)
    with pytest.raises(PeerLostError, match="the run in runs/a was cut off"):
        newest_run()
    Path("runs", "b").mkdir()
    with pytest.raises(ConfigurationError, match="no run is in progress"):
        newest_run()
