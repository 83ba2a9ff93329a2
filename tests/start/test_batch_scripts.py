"""The batch scripts for Slurm, without Slurm: what a cancelled job leaves behind, and when a job succeeds."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.live import await_that

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"

# Stands for the tasks: it ends when the file "end" exists, and writes the summary that the test has prepared.
SRUN = """#!/bin/sh
trap '' TERM
touch began
while [ ! -e end ]; do sleep 0.02; done
for run in runs/*/; do cp summary.json "$run"; done
exit $(cat end)
"""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-heterogeneous.sbatch"]),
]


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts find programs that stand for those of Slurm, in the directory of the test."""
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": '#!/bin/sh\necho "$@" > requeued\n',
        "openssl": "#!/bin/sh\necho 0123\n",
    }.items():
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")


def start(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", EXAMPLES / name, "train.py"])


def secrets() -> list[Path]:
    return list(Path("runs").rglob("*secret*"))


def test_a_cancelled_job_removes_its_secret_before_its_tasks_have_ended(name: str) -> None:
    """Slurm signals the shell and the tasks at once, and kills both if they take long."""
    with start(name) as script:
        await_that(Path("began").exists, "the tasks have begun")
        assert [file.stat().st_mode & 0o777 for file in secrets()] == [0o600]
        script.send_signal(signal.SIGTERM)
        await_that(lambda: not secrets(), "the secret is removed")
        assert script.poll() is None
        Path("summary.json").write_text('{\n  "ended": "finished"\n}\n')
        Path("end").write_text("0")

    assert script.returncode == 0


@pytest.mark.parametrize(
    ("summary", "code"),
    [
        ('{\n  "ended": "finished",\n  "sync": "bsp"\n}\n', 0),
        ('{\n  "ended": "interrupted",\n  "sync": "bsp"\n}\n', 1),
        ("", 1),
    ],
)
def test_a_job_succeeds_only_if_its_run_has_finished(name: str, summary: str, code: int) -> None:
    Path("summary.json").write_text(summary)
    Path("end").write_text("9")  # a task was lost
    with start(name) as script:
        pass

    assert script.returncode == code
    assert secrets() == []


def test_a_secret_that_cannot_be_written_starts_nothing(name: str) -> None:
    Path("bin", "openssl").write_text("#!/bin/sh\nexit 1\n")
    with start(name) as script:
        pass

    assert script.returncode == 1
    assert secrets() == []
    assert not Path("began").exists()
