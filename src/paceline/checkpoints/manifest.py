"""The manifest of a checkpoint: what it contains, and the sizes and checksums by which a damaged one is recognized.

The manifest is written last. So a checkpoint without a manifest is not complete. Whoever can write a checkpoint can
also sign it, so a manifest that names files outside of its directory is refused like a damaged one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..core.protocol.model_spec import HyperParameters
from ..errors import CheckpointError
from ..files import open_regular, read_regular
from .directory import DRAFT, identity_of, read_draft
from .pace import Pace

__all__ = [
    "FORMAT",
    "MANIFEST",
    "FileRecord",
    "Manifest",
    "OptimizerRecord",
    "carries",
    "files_in",
    "manifest_of",
    "read_manifest",
    "record_of",
    "require_intact",
]

FORMAT = 2
"""Number of the format of the directory. A change that earlier versions cannot read adds one."""

ADDED = {2: ("lineage", "origin")}
"""The attributes of `Manifest` that a format has added. Checksums of earlier formats do not include these."""

FILE = re.compile(
    r"model\.safetensors|optimizer-[0-9]+\.pt|job\.json|workers/[0-9]+\.bin|run\.json|script\.py"
)
"""The files of a checkpoint, besides its manifest."""

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
        number: number of the checkpoint in its lineage.
        versions: for each shard, the number of updates that its weights include.
        optimizers: the optimizers.
        files: all other files, by their paths in the directory of the checkpoint.
        lineage: the identity of the run and of those that have resumed it. See `directory`. "" in format 1.
        origin: the checkpoint of another lineage with which this one has begun. See `origin_of`; "" for none.
        sha256: checksum of this manifest with the checksum "".
    """

    format: int
    paceline: str
    number: int
    versions: tuple[int, ...]
    optimizers: tuple[OptimizerRecord, ...]
    files: dict[str, FileRecord]
    lineage: str = ""
    origin: str = ""
    sha256: str = ""

    def write(self, folder: Path) -> None:
        """Write the manifest, with its checksum, and wait until it is on the disk."""
        signed = msgspec.structs.replace(self, sha256=_checksum(self))
        with (folder / MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(signed), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())


class _Head(msgspec.Struct, frozen=True):
    """The part of a manifest that no version changes."""

    format: int
    paceline: str


class _Owner(msgspec.Struct, frozen=True):
    """The part of a manifest that says whose the checkpoint is."""

    lineage: str = ""


def record_of(path: Path, pace: Pace) -> FileRecord:
    """Return the size and the checksum of a file, which is read at the given pace."""
    size_bytes, checksum = 0, hashlib.sha256()
    buffer = memoryview(bytearray(PIECE_BYTES))
    with open_regular(path) as file:
        while read_bytes := file.readinto(buffer):
            checksum.update(buffer[:read_bytes])
            size_bytes += read_bytes
            pace.spend(read_bytes)
    return FileRecord(size_bytes, checksum.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, its format is unknown, or it is that of another lineage.
    """
    try:
        data = read_regular(folder / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    return manifest_of(data, identity_of(folder.parent))


def manifest_of(data: bytes, lineage: str) -> Manifest:
    """Return the manifest with this content.

    Args:
        data: the content of the file.
        lineage: the identity that it has to carry; "" if it may carry none.

    Raises:
        CheckpointError: it is damaged, its format is unknown, or it is that of another lineage.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        manifest = msgspec.json.decode(data, type=Manifest) if 1 <= head.format <= FORMAT else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
    if manifest is None:
        raise CheckpointError(
            f"Paceline {head.paceline} has written it in format {head.format}, but Paceline {__version__} reads "
            f"the formats up to {FORMAT}"
        )
    if manifest.sha256 != _checksum(manifest):
        raise CheckpointError(f"{MANIFEST} is damaged: its checksum is wrong")
    for name in manifest.files:
        if FILE.fullmatch(name) is None:
            raise CheckpointError(f"{MANIFEST} names {name!r}, which is no file of a checkpoint")
    if manifest.lineage != lineage:
        whose = f"carries the identity {manifest.lineage}" if manifest.lineage else "carries no identity"
        expected = f"expected {lineage}" if lineage else "but its folder is that of checkpoints without one"
        raise CheckpointError(f"it is of another run: it {whose}, {expected}")
    return manifest


def carries(path: Path, lineage: str) -> bool:
    """Return True if a checkpoint, complete or not, says that it belongs to this lineage.

    Nothing else may be removed.
    """
    if not lineage or path.is_symlink():
        return False
    if (draft := read_draft(path)) is not None:
        return draft.lineage == lineage
    try:
        return msgspec.json.decode(read_regular(path / MANIFEST), type=_Owner).lineage == lineage
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False


def require_intact(folder: Path, manifest: Manifest, pace: Pace) -> None:
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
    """Return the files of a checkpoint that is being written, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DRAFT)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error


def _checksum(manifest: Manifest) -> str:
    content: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=""))
    for number, names in ADDED.items():
        if manifest.format < number:
            content = {name: value for name, value in content.items() if name not in names}
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()
