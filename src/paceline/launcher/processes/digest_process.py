"""The process that digests the oldest traces of a run and deletes them: see `paceline.trace.digesting`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ...runtime.job import Job
from ...trace.segments import EARLIER
from .program import execute, main_of

__all__ = ["Digester"]

LOOK_INTERVAL_S = 1.0
POLL_S = 0.05


class Digester:
    """Starts this process when there is something to digest, and ends it.

    Args:
        job: the configuration of the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._earlier = Path(job.run_dir, EARLIER)
        self._process: subprocess.Popen[bytes] | None = None
        self._due_s = 0.0
        self._failure = ""  # why the process cannot be started

    def look(self) -> None:
        """Start the process if a segment is full. This method may be called at any time."""
        if self._process is not None or self._failure or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_INTERVAL_S
        if self._job.traces.kept == "recent" and self._earlier.exists():
            self._start()

    def end(self, hurried: Callable[[], bool]) -> list[str]:
        """End the process. Return what went wrong, as sentences.

        Args:
            hurried: called repeatedly while the process finishes what it is doing. If it returns True, it is killed.
        """
        process = self._process
        if process is None:
            return [self._failure] if self._failure else []
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.close()
        while process.poll() is None:
            if hurried():
                process.kill()
                process.wait()
                return []
            time.sleep(POLL_S)
        with process.stderr:
            said = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode == 0:
            return []
        why = said or f"the process has ended with code {process.returncode}"
        return [f"the oldest traces were not deleted, so they may occupy more space than they should: {why}"]

    def _start(self) -> None:
        """Start the process, in a session of its own: Ctrl-C in a terminal must not end it."""
        job = self._job
        shards = [shard for shard, server in enumerate(job.placement.server_of) if server < job.local_servers]
        # Machines that have joined the run keep the records of their workers.
        workers = () if job.joined else range(job.workers)
        try:
            self._process = execute(
                [
                    *main_of("paceline.trace.digesting"),
                    job.run_dir,
                    f"--shards={','.join(map(str, shards))}",
                    f"--workers={','.join(map(str, workers))}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._failure = (
                f"the oldest traces were not deleted, because no process could be started: {error}"
            )
