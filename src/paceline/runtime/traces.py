"""The traces of servers on other machines, which these servers send at the end of a run.

The coordinator writes each trace to the run directory as it arrives, and gives the file its name when it is complete.
So a file that a server has written to the same directory, which several machines may share, stays complete as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from ..core.messages import TracePart
from ..errors import ProtocolError
from .best_effort import BestEffortFile

__all__ = ["PART_BYTES", "TraceFiles", "trace_path"]

PART_BYTES = 2**20
"""Maximum size of one part of a trace in bytes."""


def trace_path(run_dir: Path, shard: int) -> Path:
    """Return the path of the trace of a shard."""
    return run_dir / f"trace-shard-{shard}.jsonl"


class TraceFiles:
    """Writes the traces that arrive.

    Args:
        run_dir: the run directory.
        servers: number of servers. Server k % servers holds shard k.
        failed: called with an error message when a file cannot be written.
    """

    def __init__(self, run_dir: Path, servers: int, failed: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._servers = servers
        self._failed = failed
        self._parts: dict[int, bytearray] = {}  # shard -> the part that is being received
        self._files: dict[int, BestEffortFile] = {}  # shard -> the file of its trace, which is incomplete
        self._complete: set[int] = set()

    def targets(self, message: TracePart, server: int, size_bytes: int) -> list[memoryview]:
        """Return the memory into which a part is received.

        Raises:
            ProtocolError: the part is not expected from this server, or is too large.
        """
        if message.shard % self._servers != server or message.shard in self._complete:
            raise ProtocolError(f"the trace of shard {message.shard} is not expected from server {server}")
        if size_bytes > PART_BYTES:
            raise ProtocolError(
                f"a part of a trace has {size_bytes} bytes, expected at most {PART_BYTES} bytes"
            )
        self._parts[message.shard] = bytearray(size_bytes)
        return [memoryview(self._parts[message.shard])] if size_bytes else []

    def arrived(self, message: TracePart) -> None:
        """Write a part that has been received."""
        shard = message.shard
        if shard not in self._files:
            self._files[shard] = BestEffortFile(self._unfinished(shard), self._failed)
        self._files[shard].write(self._parts.pop(shard, b""))
        if message.last:
            self._files.pop(shard).close()
            self._complete.add(shard)
            try:
                self._unfinished(shard).replace(trace_path(self._run_dir, shard))
            except OSError as error:
                self._failed(f"the trace of shard {shard} cannot be written: {error}")

    def close(self) -> None:
        """Remove the traces that are incomplete."""
        for shard, file in self._files.items():
            file.close()
            with contextlib.suppress(OSError):
                self._unfinished(shard).unlink()
        self._files.clear()

    def _unfinished(self, shard: int) -> Path:
        path = trace_path(self._run_dir, shard)
        return path.with_name(f".{path.name}.unfinished")
