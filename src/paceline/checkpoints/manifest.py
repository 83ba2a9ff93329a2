"""The manifest of a checkpoint: what it contains, and the sizes and checksums by which a damaged one is recognized.

The manifest is written last. So a checkpoint without a manifest is not complete.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .. import __version__
from ..core.protocol.model_spec import HyperParameters
from ..errors import CheckpointError
from .pace import Pace

__all__ = [
    "FORMAT",
    "MANIFEST",
    "FileRecord",
    "Manifest",
    "OptimizerRecord",
    "read_manifest",
    "record_of",
    "require_whole",
]

FORMAT = 1
"""Number of the format of the directory. A change that earlier versions cannot read adds one."""

PIECE_BYTES = 1024 * 1024
MANIFEST = "manifest.json"


class FileRecord(msgspec.Struct, frozen=True):
    """The size of a file in bytes, and the SHA-256 checksum of its content, as hexadecimal digits."""

    size_bytes: int
    sha256: str


class OptimizerRecord(msgspec.Struct, frozen=True):
    """What is known of an optimizer besides its `state_dict()`.

    Attributes:
        name: name of the class that the servers run. See `core.protocol.model_spec.OptimizerSpec`.
        replaced: number of times that another optimizer has replaced it.
        parameters: names of the parameters that it trains. `state_dict()` refers to them by their positions here.
        counters: for each group, what the optimizer itself has changed in it.
    """

    name: str
    replaced: int
    parameters: tuple[str, ...]
    counters: tuple[HyperParameters, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint contains.

    Attributes:
        format: number of the format. See `FORMAT`.
        paceline: the version of Paceline that has written the checkpoint.
        number: number of the checkpoint in its run.
        versions: for each shard, the number of updates that its weights include.
        optimizers: the optimizers.
        files: all other files, by their paths in the directory of the checkpoint.
        sha256: checksum of this manifest with the checksum "".
    """

    format: int
    paceline: str
    number: int
    versions: tuple[int, ...]
    optimizers: tuple[OptimizerRecord, ...]
    files: dict[str, FileRecord]
    sha256: str = ""

    def write(self, folder: Path) -> None:
        """Write the manifest, with its checksum, and wait until it is on the disk."""
        signed = msgspec.structs.replace(self, sha256=_checksum(self))
        with (folder / MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(signed), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())


class _Origin(msgspec.Struct, frozen=True):
    """The part of a manifest that no version changes."""

    format: int
    paceline: str


def record_of(path: Path, pace: Pace) -> FileRecord:
    """Return the size and the checksum of a file, which is read at the given pace."""
    size_bytes, checksum = 0, hashlib.sha256()
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while read_bytes := file.readinto(buffer):
            checksum.update(buffer[:read_bytes])
            size_bytes += read_bytes
            pace.spend(read_bytes)
    return FileRecord(size_bytes, checksum.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or its format is another than `FORMAT`.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    try:
        origin = msgspec.json.decode(data, type=_Origin)
        manifest = msgspec.json.decode(data, type=Manifest) if origin.format == FORMAT else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
    if manifest is None:
        raise CheckpointError(
            f"Paceline {origin.paceline} has written it in format {origin.format}, but Paceline {__version__} reads "
            f"format {FORMAT}"
        )
    if manifest.sha256 != _checksum(manifest):
        raise CheckpointError(f"{MANIFEST} is damaged: its checksum is wrong")
    return manifest


def require_whole(folder: Path, manifest: Manifest, pace: Pace) -> None:
    """Check all files of a checkpoint, the quick checks first.

    Raises:
        CheckpointError: a file is missing, or it has changed.
    """
    for name, expected in manifest.files.items():
        size_bytes = _size_bytes(folder / name)
        if size_bytes != expected.size_bytes:
            raise CheckpointError(f"{name} has {size_bytes} bytes, expected {expected.size_bytes}")
    for name, expected in manifest.files.items():
        try:
            found = record_of(folder / name, pace)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
        if found != expected:
            raise CheckpointError(f"{name} is damaged: its checksum is wrong")


def files_in(folder: Path) -> Iterable[Path]:
    """Return the files in a folder and its folders, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error


def _checksum(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, sha256=""))).hexdigest()
