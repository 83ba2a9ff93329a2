"""Machines that do not see the run directory take part in its checkpoints, and in runs that begin with them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.manifest import numbers_in
from paceline.checkpoints.reading import newest_whole
from tests.support.live import await_that, mark, of_the_run, processes
from tests.support.served import Served, enough, output

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="needs root privileges and the command unshare",
    ),
]

__all__ = ["mark"]

EPOCHS = 6
BLIND = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none run && exec "$@"', "sh")
"""Runs a program that sees an empty directory in place of the run directory."""


def join(served: Served) -> subprocess.Popen[str]:
    return served.join(str(EPOCHS), "0.03", options=["--servers", "1", "--run-dir", "brought"], prefix=BLIND)


@pytest.mark.thorough
def test_a_machine_that_does_not_see_the_run_directory_takes_part_in_checkpoints(mark: str) -> None:
    options = ["--workers", "1", "--servers", "2", "--remote-servers", "1", "--checkpoint-every", "0.3"]
    served = Served(*options)
    machine = join(served)
    await_that(
        lambda: len(numbers_in(of_the_run(Path("run", "checkpoints")))) >= 2, "two checkpoints are whole"
    )
    while found := processes(mark):
        for process_id in found.values():
            os.kill(process_id, signal.SIGKILL)
        time.sleep(0.05)
    output(machine)
    served.failure(code=-signal.SIGKILL)
    checkpoint = newest_whole(of_the_run(Path("run", "checkpoints"))).checkpoint
    assert checkpoint is not None
    assert len(checkpoint.manifest.versions) == 2
    shutil.rmtree("brought")

    served = Served("--resume", "run")
    machine = join(served)
    enough()
    code, _, stderr = output(machine)
    assert code == 0, stderr
    summary: Any = served.summary()
    assert f"The run goes on from checkpoint {checkpoint.path.name}" in " ".join(served.messages.split())
    assert sum(summary["ledger"]["samples"].values()) == EPOCHS * 96
    assert summary["ledger"]["samples"]["used"] == EPOCHS * 96
