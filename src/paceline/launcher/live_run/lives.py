"""How a run goes on after it has lost a server: from its newest checkpoint, with all its processes started again."""

from __future__ import annotations

import secrets
import time

from msgspec import structs

from ...errors import RunFailedError
from ...runtime.checkpoints import Saved
from ...runtime.job import Job, Resumed

__all__ = ["Lives", "ServerLost"]

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


class Lives:
    """Decides whether a run goes on by itself."""

    def __init__(self) -> None:
        self._in_vain = 0

    def next(self, job: Job, address: str, failure: RunFailedError | None, saved: Saved | None) -> Job | None:
        """Return the configuration with which a run goes on after a failure; None if it does not.

        Args:
            job: the configuration of the run.
            address: the address of its coordinator, which machines that have joined the run call again.
            failure: why the run has ended; None if it has not failed.
            saved: the newest checkpoint that was written since the run began or went on; None if there is none.
        """
        if failure is None or not failure.process.startswith("server ") or failure.traceback:
            return None
        if job.remote_servers:  # a machine that has brought servers does not join again by itself
            return None
        path = str(saved.path) if saved is not None else "" if job.resumed is None else job.resumed.path
        self._in_vain = 0 if saved is not None else self._in_vain + 1
        if job.on_server_loss != "resume" or not path or self._in_vain > MOST_IN_VAIN:
            return None
        return structs.replace(
            job,
            port=int(address.rpartition(":")[2]) if job.joined else job.port,
            resumed=Resumed(path),
            epoch_ns=time.monotonic_ns(),
            mark=secrets.token_hex(8),
        )
