"""The checkpoint with which a run begins, on a machine that joins the run and does not see its directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.directory import origin_of
from ...checkpoints.manifest import MANIFEST, read_manifest, require_intact
from ...checkpoints.pace import REST, Pace
from ...core.protocol.messages import CheckpointPiece, FetchCheckpoint, Message
from ...errors import CheckpointError, ProtocolError
from ...files import read_regular
from ...wire.stream import Stream, no_payload

__all__ = ["fetch_checkpoint"]


class _Piece(NamedTuple):
    """A piece of a file, and what the coordinator says about the checkpoint."""

    about: CheckpointPiece
    data: bytearray


def fetch_checkpoint(stream: Stream[Message], space: Callable[[], str]) -> Path | None:
    """Return the directory of the checkpoint with which a run begins; None if there is none.

    If this machine does not see the directory of the run, the files are fetched. While the run trains, they come with
    pauses that leave the link to training.

    Args:
        stream: a connection to the coordinator on which the greeting has been sent.
        space: creates an empty directory, in which a directory with the files is created. It is called if necessary.

    Raises:
        CheckpointError: the files cannot be written, or have not arrived as they are there.
        DeadlineError: the coordinator does not answer.
        PeerLostError: the connection is lost.
    """
    pieces = list(_pieces(stream, MANIFEST))
    if not (path := pieces[0].about.path):
        return None
    manifest = b"".join(piece.data for piece in pieces)
    try:
        if read_regular(Path(path, MANIFEST)) == manifest:
            return Path(path)
    except OSError:
        pass  # this machine does not see the directory
    try:
        folder = Path(space(), origin_of(Path(path)))
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_bytes(manifest)
        found = read_manifest(folder)
        for name in found.files:
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("wb") as file:
                for piece in _pieces(stream, name):
                    file.write(piece.data)
        require_intact(folder, found, Pace())
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of the run cannot be copied to this machine: {error.strerror or error}"
        ) from error
    return folder


def _pieces(stream: Stream[Message], name: str) -> Iterator[_Piece]:
    """Fetch a file, and yield its pieces. The last one is empty."""
    begin = 0
    while True:
        asked_s = time.monotonic()
        data = bytearray()

        def target(message: Message, size_bytes: int, data: bytearray = data) -> list[memoryview]:
            data.extend(bytes(size_bytes))
            return [memoryview(data)] if size_bytes else []

        stream.sink = target
        stream.send(FetchCheckpoint(name, begin))
        about = stream.wait()
        stream.sink = no_payload
        if not isinstance(about, CheckpointPiece):
            raise ProtocolError(f"the coordinator sent {type(about).__name__}, expected CheckpointPiece")
        yield _Piece(about, data)
        if not data:
            return
        begin += len(data)
        if about.begun:
            time.sleep(REST * (time.monotonic() - asked_s))
