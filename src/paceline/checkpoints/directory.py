"""The directories of checkpoints: their names, and the identity by which a run recognizes its own.

    DIR/paceline-0123456789abcdef/      the checkpoints of one lineage
        000012/                         a complete checkpoint
        000013.partial/                 a checkpoint that is being written

A *lineage* is a run and the runs that have resumed it in its directory. Its identity is a random text. So several
runs may share DIR, with each other and with whatever else lies there: none looks outside of its own folder. Inside,
only what carries the identity is removed: a complete checkpoint in its manifest, a draft in `DRAFT`.

Earlier versions wrote `DIR/000012`. Such checkpoints carry no identity. They can be resumed, and are never removed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection
from pathlib import Path

import msgspec

from ..files import read_regular

__all__ = [
    "DRAFT",
    "PARTIAL",
    "DraftMark",
    "identity_of",
    "is_lineage",
    "lineages_in",
    "name_of",
    "new_lineage",
    "number_of",
    "numbers_in",
    "origin_of",
    "read_draft",
    "sync",
]

LINEAGE = re.compile(r"paceline-[0-9a-f]{16}")
NUMBER = re.compile(r"[0-9]{6,}")

PARTIAL = ".partial"
"""End of the name of a checkpoint that is not complete."""

DRAFT = "draft.json"
"""Name of the file in a checkpoint that is not complete which tells whose it is. See `DraftMark`."""


class DraftMark(msgspec.Struct, frozen=True):
    """Whose a checkpoint is that is being written.

    Attributes:
        lineage: the identity of its lineage.
        token: a random text. Nobody else writes a draft with this token.
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
    """Return the identity that the checkpoints in a folder carry; "" in a directory of an earlier version."""
    return folder.name if is_lineage(folder.name) else ""


def origin_of(checkpoint: Path) -> str:
    """Return how the first checkpoints of a lineage name the checkpoint of another one with which it has begun.

    >>> origin_of(Path("/shared/paceline-0123456789abcdef/000012")), origin_of(Path("/shared/run/000012"))
    ('paceline-0123456789abcdef/000012', '000012')
    """
    return str(Path(identity_of(checkpoint.parent), checkpoint.name))


def lineages_in(names: Collection[str]) -> list[str]:
    """Return the identities among the names in a directory; "" first if there are names of an earlier version."""
    earlier = [""] if any(number_of(name) is not None for name in names) else []
    return [*earlier, *sorted(filter(is_lineage, names))]


def name_of(number: int) -> str:
    """Return the name of a checkpoint's directory: "000012" for 12."""
    return f"{number:06d}"


def number_of(name: str) -> int | None:
    """Return the number of a checkpoint, given the name of its directory; None if this is no such name.

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
        suffix: end of the names: "" for complete checkpoints, ".partial" for those that are not.
    """
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [path for path in paths if path.name.endswith(suffix) and path.is_dir()]
    numbers = [number_of(path.name.removesuffix(suffix)) for path in named]
    return sorted(number for number in numbers if number is not None)


def read_draft(path: Path) -> DraftMark | None:
    """Return whose a checkpoint is that is being written; None if it does not say so."""
    try:
        return msgspec.json.decode(read_regular(path / DRAFT), type=DraftMark)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
