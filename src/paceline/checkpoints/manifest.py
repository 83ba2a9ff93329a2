"""The manifest of a checkpoint, which reveals damage; the names of directories; and a limit on the rate of writing.

The manifest is written last. So a checkpoint without a manifest is not complete. Whoever can write a checkpoint can
also write a manifest with valid checksums. So a manifest that names files outside of its directory is refused like a
damaged manifest.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from .. import VERSION
from ..core.layout import HyperParameters
from ..errors import CheckpointError
from ..files import open_regular, read_regular

FORMAT = 2
"""Number of the format of the directory. It is increased by one for a change that earlier versions cannot read."""

ADDED = {2: ("lineage", "origin")}
"""Format -> the attributes that this format has added to `Manifest`.

The checksum of a manifest in an earlier format does not include these attributes.
"""

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
        name: name of the class that the servers run. See `core.layout.OptimizerSpec`.
        replaced: number of times that the script has replaced the optimizer of these parameters. See
            `core.layout.OptimizerSpec`.
        parameters: names of the parameters that the optimizer trains. `state_dict()` refers to a parameter by its
            position in this sequence.
        counters: for each group, the values that the optimizer itself has changed in the group.
        whole: True if the optimizer needs whole tensors, so that the entries of its state may have any shape. The field
            is absent for other optimizers, as in manifests of earlier versions. So the checksums of earlier manifests
            stay valid.
    """

    name: str
    replaced: int
    parameters: tuple[str, ...]
    counters: tuple[HyperParameters, ...] = ()
    whole: bool | msgspec.UnsetType = msgspec.UNSET


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint contains.

    Attributes:
        format: number of the format. See `FORMAT`.
        paceline: the version of Paceline that has written the checkpoint.
        number: number of the checkpoint in its lineage.
        versions: for each shard, the number of updates that its weights include.
        optimizers: the optimizers.
        files: all other files, by their paths in the directory of the checkpoint.
        lineage: the identity of the lineage to which the checkpoint belongs; "" in format 1.
        origin: the checkpoint with which this lineage has begun, if that checkpoint is of another lineage; else "". See
            `origin_of`.
        sha256: checksum of this manifest, computed with "" in place of the checksum.
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
    """The part of a manifest that names the lineage of the checkpoint."""

    lineage: str = ""


def record_of(path: Path, pace: Pace) -> FileRecord:
    """Read a file at the given pace, and return its size and its checksum."""
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
        CheckpointError: the manifest is missing or damaged, its format is unknown, or it names another lineage.
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
        lineage: the lineage that the manifest must name; "" if the manifest must name no lineage.

    Raises:
        CheckpointError: the manifest is damaged, its format is unknown, or it names another lineage.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        manifest = msgspec.json.decode(data, type=Manifest) if 1 <= head.format <= FORMAT else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
    if manifest is None:
        raise CheckpointError(
            f"Paceline {head.paceline} has written it in format {head.format}, but Paceline {VERSION} reads "
            f"the formats up to {FORMAT}"
        )
    if manifest.sha256 != _checksum(manifest):
        raise CheckpointError(f"{MANIFEST} is damaged: its checksum is wrong")
    for name in manifest.files:
        if FILE.fullmatch(name) is None:
            raise CheckpointError(f"{MANIFEST} names {name!r}, which is no file of a checkpoint")
    if manifest.lineage != lineage:
        whose = f"carries the identity {manifest.lineage}" if manifest.lineage else "carries no identity"
        expected = (
            f"expected {lineage}" if lineage else "but its folder is for checkpoints without an identity"
        )
        raise CheckpointError(f"it is of another run: it {whose}, {expected}")
    return manifest


def carries(path: Path, lineage: str) -> bool:
    """Return True if a checkpoint, complete or not, names this lineage.

    A run may remove only such checkpoints.
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
    """Return the files of a checkpoint that is being written, sorted by path, without the checkpoint's mark."""
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


# -- A limit on the rate at which a checkpoint is written, so that enough of the disk and the CPU is left to training

REST = 3.0
"""Time between two pieces of a checkpoint on a link, divided by the time that a piece takes.

So a checkpoint uses a slow link for at most a quarter of the time. The rest of the time is left to training.
"""

NICENESS = 10
"""The amount that is added to the niceness of a thread that writes a checkpoint."""

LOWEST_PRIORITY = 19
"""The highest niceness that Linux has."""


class Pace:
    """Sleeps after each piece of work, so that the average rate stays below a limit.

    Several threads may share one `Pace`. After a pause, the rate does not exceed the limit to make up for the pause.

    Args:
        bytes_per_s: the limit.
        clock_s: function that returns the time in seconds.
        sleep_s: function that sleeps for a number of seconds.

    Example:
        >>> now_s, slept_s = 100.0, []
        >>> pace = Pace(1000, lambda: now_s, slept_s.append)
        >>> pace.spend(500)
        >>> pace.spend(250)  # called 0.5 s too early, because this clock stands still
        >>> slept_s
        [0.5, 0.75]
    """

    def __init__(
        self,
        bytes_per_s: float = math.inf,
        clock_s: Callable[[], float] = time.monotonic,
        sleep_s: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock_s = clock_s
        self._sleep_s = sleep_s
        self._lock = threading.Lock()
        self._free_s = -math.inf  # time at which the work so far would have ended at the limit

    def spend(self, size_bytes: int) -> None:
        """Sleep until this number of bytes, and all earlier bytes, could have been written at the limit."""
        with self._lock:
            now_s = self._clock_s()
            self._free_s = max(self._free_s, now_s) + size_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            self._sleep_s(wait_s)


def yield_to_training() -> None:
    """Lower the priority of the calling thread, so that training goes first. This has an effect only on Linux."""
    if sys.platform.startswith("linux"):
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, LOWEST_PRIORITY))


# -- The directories of checkpoints: their names, and the identity by which a run recognizes its checkpoints
#
#     DIR/paceline-0123456789abcdef/      the checkpoints of one lineage
#         000012/                         a complete checkpoint
#         000013.partial/                 a checkpoint that is being written
#
# A *lineage* consists of a run and of all runs that have resumed this run in its directory. The identity of a lineage
# is a random text. Several runs may share DIR, which may also contain other files: no run looks outside of the folder
# of its lineage. Inside the folder, a run removes only checkpoints that name its lineage. A complete checkpoint names
# the lineage in the manifest; a checkpoint that is being written names the lineage in the file `DRAFT`.
#
# Earlier versions wrote `DIR/000012`. Such checkpoints name no lineage. They can be resumed, and are never removed.

LINEAGE = re.compile(r"paceline-[0-9a-f]{16}")
NUMBER = re.compile(r"[0-9]{6,}")

PARTIAL = ".partial"
"""End of the name of a checkpoint that is not complete."""

DRAFT = "draft.json"
"""Name of the mark in a checkpoint that is not complete. See `DraftMark`."""


class DraftMark(msgspec.Struct, frozen=True):
    """The mark of a checkpoint that is being written, which names its lineage.

    Attributes:
        lineage: the identity of the lineage.
        token: a random text. No other run writes a draft with this token.
    """

    lineage: str
    token: str


def new_lineage() -> str:
    """Return the identity of a new lineage, which is also the name of the folder with its checkpoints."""
    return f"paceline-{secrets.token_hex(8)}"


def is_lineage(name: str) -> bool:
    """Return True if a text has the form of an identity.

    >>> is_lineage("paceline-0123456789abcdef"), is_lineage("4711001")
    (True, False)
    """
    return LINEAGE.fullmatch(name) is not None


def identity_of(folder: Path) -> str:
    """Return the identity of the lineage whose checkpoints are in a folder; "" for a folder of an earlier version."""
    return folder.name if is_lineage(folder.name) else ""


def origin_of(checkpoint: Path) -> str:
    """Return the name of a checkpoint as `Manifest.origin` contains it: the lineage, if there is one, and the number.

    >>> origin_of(Path("/shared/paceline-0123456789abcdef/000012")), origin_of(Path("/shared/run/000012"))
    ('paceline-0123456789abcdef/000012', '000012')
    """
    return str(Path(identity_of(checkpoint.parent), checkpoint.name))


def lineages_in(names: Collection[str]) -> list[str]:
    """Return the identities among the names in a directory.

    If some names are checkpoints of an earlier version, the first identity is "".
    """
    earlier = [""] if any(number_of(name) is not None for name in names) else []
    return [*earlier, *sorted(filter(is_lineage, names))]


def name_of(number: int) -> str:
    """Return the name of a checkpoint's directory: "000012" for 12."""
    return f"{number:06d}"


def number_of(name: str) -> int | None:
    """Return the number of a checkpoint, given the name of its directory; None for any other name.

    >>> [number_of(name) for name in ("000012", "1000000", "0000012", "000012.partial")]
    [12, 1000000, None, None]
    """
    if NUMBER.fullmatch(name) is None or name != name_of(int(name)):
        return None
    return int(name)


def numbers_in(folder: Path, suffix: str = "") -> list[int]:
    """Return the numbers of the checkpoints in a folder, in ascending order; [] if there is no such folder.

    Args:
        folder: the folder.
        suffix: end of the names: "" for complete checkpoints, ".partial" for incomplete ones.
    """
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [path for path in paths if path.name.endswith(suffix) and path.is_dir()]
    numbers = [number_of(path.name.removesuffix(suffix)) for path in named]
    return sorted(number for number in numbers if number is not None)


def read_draft(path: Path) -> DraftMark | None:
    """Return the mark of a checkpoint that is being written; None if there is no valid mark."""
    try:
        return msgspec.json.decode(read_regular(path / DRAFT), type=DraftMark)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def await_disk(path: Path) -> None:
    """Wait until the content of a file, or the list of the names in a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
