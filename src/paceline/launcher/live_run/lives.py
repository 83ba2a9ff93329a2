"""How a run goes on after it has lost a server: from its newest checkpoint, with all its processes started again."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from msgspec import structs

from ...errors import RunFailedError
from ...runtime.agents import MachinesLeft
from ...runtime.job import Job
from ...runtime.resuming import resumed_with

if TYPE_CHECKING:
    from ...checkpoints.reading import Found  # imports torch

__all__ = ["Lives", "ServerLost", "is_loss", "on_machines"]

MOST_IN_VAIN = 3
"""How often a run goes on from the same checkpoint. A server may run out of memory each time."""


class ServerLost(Exception):
    """A run has lost a server, and goes on from a checkpoint.

    Attributes:
        words: what has happened, as a sentence.
        next_life: the configuration with which it goes on.
    """

    def __init__(self, words: str, next_life: Job) -> None:
        super().__init__(words)
        self.words = words
        self.next_life = next_life


def is_loss(failure: RunFailedError) -> bool:
    """Return True if a run has failed because a server was lost, and not because of an exception in the server."""
    return failure.process.startswith("server ") and not failure.traceback


def on_machines(job: Job, left: MachinesLeft) -> Job:
    """Return a job that the machines that are left can begin. The serving machine has the servers that they lack.

    The run may have fewer workers than when it began, but not fewer than it continues with (`Job.pause_below`). A job
    that no machine can join stays as it is.

    Example:
        Of two machines with a worker and a server each, one is lost:

        >>> from paceline.runtime.job_options import make_job
        >>> job = make_job(workers=2, servers=3, remote_servers=2, joined=True, dry_run=True)
        >>> job = on_machines(job, MachinesLeft(workers=1, servers=1))
        >>> job.least, job.local_servers, job.remote_servers
        (1, 2, 1)
    """
    if not job.joined:
        return job
    least = max(1, job.pause_below, min(job.least, left.workers))
    return structs.replace(job, least=least, remote_servers=min(job.remote_servers, left.servers))


class Lives:
    """Decides whether a run goes on by itself."""

    def __init__(self) -> None:
        self._in_vain = 0

    def next(self, job: Job, address: str, newest: Found) -> Job | None:
        """Return the configuration with which a run goes on after the loss of a server; None if it does not.

        Args:
            job: the configuration of the run.
            address: the address of its coordinator, which machines that have joined the run call again.
            newest: its newest whole checkpoint. A run that goes on by itself checks a checkpoint as strictly as a
                user does who resumes the run.
        """
        resumed = resumed_with(newest)
        again = resumed is not None and job.resumed is not None and resumed.path == job.resumed.path
        self._in_vain = self._in_vain + 1 if again else 0
        if job.on_server_loss != "resume" or resumed is None or self._in_vain > MOST_IN_VAIN:
            return None
        return structs.replace(
            job,
            port=int(address.rpartition(":")[2]) if job.joined else job.port,
            resumed=resumed,
            epoch_ns=time.monotonic_ns(),
            mark=secrets.token_hex(8),
        )
