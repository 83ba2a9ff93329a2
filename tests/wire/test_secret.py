"""The secret of a run: where it comes from, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline.start.processes import program
from paceline.wire.secure import new_secret, read_secret, take_secret, write_secret
from tests.support.live import DEADLINE_S, await_that, mark, processes, start_program
from tests.support.served import ENDLESS_SCRIPT, Served, enough, output

__all__ = ["mark"]


def test_a_secret_is_read_as_it_was_written(tmp_path: Path) -> None:
    secret, file = new_secret(), tmp_path / "secret"
    write_secret(secret, file)

    assert len(bytes.fromhex(secret)) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret(file) == secret
    assert take_secret({"PACELINE_SECRET": f" {secret.upper()}\n"}) == secret
    assert take_secret({}) == ""


def test_a_secret_is_never_written_over_another_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("precious")
    with pytest.raises(FileExistsError):
        write_secret(new_secret(), tmp_path / "secret")


@pytest.mark.parametrize("text", ["correct horse battery staple", "0" * 63, "0" * 65, "g" * 64, " "])
def test_passphrases_and_short_secrets_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected 64 hexadecimal digits") as caught:
        take_secret({"PACELINE_SECRET": text})
    assert not text.strip() or text not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    secret, file = new_secret(), tmp_path / "secret"
    write_secret(secret, file)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"its mode is {mode:o}, expected 600") as caught:
        read_secret(file)
    assert secret not in str(caught.value)


def test_what_is_not_a_file_with_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff" * 64)
    (tmp_path / "bytes").chmod(0o600)
    for name, reason in [("missing", "No such file"), (".", "Is a directory"), ("bytes", "it is not text")]:
        with pytest.raises(ConfigurationError, match=f"cannot be read: {reason}"):
            read_secret(tmp_path / name)


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        read_secret(tmp_path / "pipe")


def test_a_secret_that_was_taken_is_no_longer_in_the_environment(tmp_path: Path) -> None:
    """A secret in a file takes precedence, and the one in the environment is removed all the same."""
    write_secret("cd" * 32, tmp_path / "secret")
    for file in (None, tmp_path / "secret"):
        variables = {"PACELINE_SECRET": "ab" * 32, "HOME": "/root"}
        assert take_secret(variables, file) == ("ab" if file is None else "cd") * 32
        assert variables == {"HOME": "/root"}


def test_the_kernel_does_not_show_a_secret_that_was_taken() -> None:
    """Neither the process that has taken it nor one that it has forked or executed."""
    program = """
import os, subprocess
from pathlib import Path
from paceline.wire.secure import take_secret
assert take_secret(os.environ) == "ab" * 32
print(Path("/proc/self/environ").read_bytes())
print(subprocess.run(["env"], capture_output=True, text=True, check=True).stdout)
if os.fork():
    os.wait()
else:
    print(Path("/proc/self/environ").read_bytes(), flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PACELINE_SECRET": "ab" * 32, "OTHER": "is kept"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "abab" not in ended.stdout
    assert ended.stdout.count("OTHER=is kept") == 3


def test_processes_of_a_run_on_one_machine_do_not_inherit_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "ab" * 32)
    assert "PACELINE_SECRET" not in program.environment(1)
    assert os.environ["PACELINE_SECRET"] == "ab" * 32


# Writes the environment that it sees, the one of a program that it has started, and the one of a loader's process.
LOOKS = """
import os, subprocess
from pathlib import Path

def look(name):
    program = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    kernel = Path("/proc/self/environ").read_bytes().decode()
    Path(f"{name}.seen").write_text(repr(dict(os.environ)) + program + kernel)

def look_in_loader(number):
    look(f"loader-{os.getppid()}")
"""


@pytest.mark.processes
@pytest.mark.usefixtures("plain_starts")  # the memory in which a program receives its environment is meant
@pytest.mark.thorough
def test_no_process_of_a_run_keeps_the_secret_in_its_environment(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = new_secret()
    with monkeypatch.context() as environment:
        environment.setenv("PACELINE_SECRET", secret)
        served = Served("--workers", "2", "--servers", "2", "--remote-servers", "1", secret=secret)
    looks = "shuffle=True, num_workers=1, worker_init_fn=look_in_loader"
    script = ENDLESS_SCRIPT.replace("shuffle=True", looks)
    Path("train.py").write_text(f"{LOOKS}\nlook(f'worker-{{os.getpid()}}')\n{script}")
    forks = served.join("1000000", options=["--servers", "1", "--workers", "1"])
    executes = served.join("1000000")
    await_that(lambda: len(list(Path().glob("loader-*.seen"))) == 2, "both workers use their loaders")
    with monkeypatch.context() as environment:
        environment.setenv("PACELINE_SECRET", secret)
        watches = start_program("-m", "paceline", "status", served.address, "--watch")
    assert watches.stdout is not None
    assert "bsp, 2 workers" in watches.stdout.readline()
    named = processes(mark)
    alive = [served.program.pid, forks.pid, executes.pid, watches.pid, *named.values()]
    shown = [Path(f"/proc/{process}/environ").read_bytes() for process in alive]
    watches.kill()
    watches.communicate(timeout=DEADLINE_S)
    enough()
    ends = [output(forks), output(executes)]
    served.summary()

    assert [code for code, *_ in ends] == [0, 0], ends
    assert {"server 0", "server 1", "worker 0", "worker 1"} <= named.keys()
    assert not [environ for environ in shown if secret.encode() in environ]
    assert len(list(Path().glob("*.seen"))) == 4
    assert not [path for path in Path().glob("*.seen") if secret in path.read_text()]
