"""The traces of servers on other machines, which these servers send at the end of a run.

The coordinator writes each trace to the run directory as it arrives, and gives the file its name when it is complete.
So a file that a server has written to the same directory, which several machines may share, stays complete as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ..core.protocol.messages import TracePart
from ..core.protocol.placement import Placement
from ..errors import ProtocolError
from ..files import Unfinished
from ..trace.segments import earlier_segments

__all__ = ["PART_BYTES", "TraceFiles", "parts_of", "trace_path"]

PART_BYTES = 2**20
"""Maximum size of one part of a trace in bytes."""


def trace_path(run_dir: Path, shard: int) -> Path:
    """Return the path of the trace of a shard."""
    return run_dir / f"trace-shard-{shard}.jsonl"


def parts_of(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a trace that is complete, and for each one whether it is the last one.

    If the trace is in several segments, they become one: only the first header is kept.

    Raises:
        OSError: the trace cannot be read.
    """
    segments = [*earlier_segments(path).values(), path]
    for segment in segments:
        last = False
        with segment.open("rb") as file:
            if segment is not segments[0]:
                file.readline()
            while not last:
                part = file.read(PART_BYTES)
                last = len(part) < PART_BYTES
                yield part, last and segment is path


class TraceFiles:
    """Writes the traces that arrive.

    Args:
        run_dir: the run directory.
        placement: the servers of the shards.
        failed: called with an error message when a file cannot be written.
    """

    def __init__(self, run_dir: Path, placement: Placement, failed: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._placement = placement
        self._failed = failed
        self._parts: dict[int, bytearray] = {}  # shard -> the part that is being received
        # shard -> its trace, which is incomplete
        self._files: dict[int, tuple[Unfinished, IO[bytes]]] = {}
        self._complete: set[int] = set()
        self._broken: set[int] = set()  # shards whose traces cannot be written

    def targets(self, message: TracePart, server: int, size_bytes: int) -> list[memoryview]:
        """Return the memory into which a part is received.

        Raises:
            ProtocolError: the part is not expected from this server, or is too large.
        """
        if message.shard not in self._placement.shards_of(server) or message.shard in self._complete:
            raise ProtocolError(f"the trace of shard {message.shard} is not expected from server {server}")
        if size_bytes > PART_BYTES:
            raise ProtocolError(
                f"a part of a trace has {size_bytes} bytes, expected at most {PART_BYTES} bytes"
            )
        self._parts[message.shard] = bytearray(size_bytes)
        return [memoryview(self._parts[message.shard])] if size_bytes else []

    def arrived(self, message: TracePart) -> None:
        """Write a part that has been received. If this fails, nothing is left of the trace."""
        shard, data = message.shard, self._parts.pop(message.shard, b"")
        if message.last:
            self._complete.add(shard)
        if shard in self._broken:
            return
        try:
            if shard not in self._files:
                unfinished = Unfinished(trace_path(self._run_dir, shard))
                self._files[shard] = unfinished, unfinished.place.open("wb")
            unfinished, file = self._files[shard]
            file.write(data)
            if message.last:
                file.close()
                # If the machines share the directory, the server has written these segments, which are in the trace.
                for segment in earlier_segments(trace_path(self._run_dir, shard)).values():
                    segment.unlink()
                unfinished.finish()
                del self._files[shard]
        except OSError as error:
            self._broken.add(shard)
            self._discard(shard)
            self._failed(f"the trace of shard {shard} cannot be written: {error.strerror or error}")

    def close(self) -> None:
        """Remove the traces that are incomplete."""
        for shard in list(self._files):
            self._discard(shard)

    def _discard(self, shard: int) -> None:
        if shard in self._files:
            unfinished, file = self._files.pop(shard)
            with contextlib.suppress(OSError):  # what is still buffered cannot be written either
                file.close()
            unfinished.discard()
