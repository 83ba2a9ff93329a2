"""Decides which content of a directory is trusted, such as commands to run, modules to import, and paths to write.

A run directory is data, and a copy of a run directory may come from anybody. So a launcher has a key that only its user
can read, and signs what it writes. The key is a file in the user's configuration folder. This file is made when the key
is first needed. Machines with the same home directory have the same key.

The signature is a keyed checksum (HMAC-SHA256) of a JSON object without its field `signature`. The signature does not
depend on the order of the fields, and includes fields that only a later version of Paceline knows. The signature says
who has written the object, unlike the checksums in a checkpoint, which say that nothing was damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("paceline.run")

SIGNATURE = "signature"
"""The field of a JSON object that contains its signature."""

KEY_BYTES = 32


def key_file() -> Path | None:
    """Return the file with the key of this user; None if the user has no home."""
    if folder := os.environ.get("XDG_CONFIG_HOME"):
        return Path(folder, "paceline", "key")
    try:
        return Path.home() / ".config" / "paceline" / "key"
    except RuntimeError:
        return None


def signature_of(content: Mapping[str, Any]) -> str:
    """Return the signature of a JSON object, made with the key of this user; "" if there can be no key.

    Args:
        content: the object. Its field `signature` does not count.
    """
    file = key_file()
    key = b"" if file is None else _read(file) or _make(file)
    if not key:
        log.info("what this run writes is not signed, because there is no key in %s", file)
    return _signature(content, key) if key else ""


def is_signed(content: object) -> bool:
    """Return True if a JSON object has the signature of this user."""
    file = key_file()
    key = b"" if file is None else _read(file)
    if not key or not isinstance(content, dict):
        return False
    found = content.get(SIGNATURE)
    return isinstance(found, str) and hmac.compare_digest(found.encode(), _signature(content, key).encode())


def is_own(*paths: Path) -> bool:
    """Return True if files and directories belong to this user."""
    try:
        return all(path.stat().st_uid == os.geteuid() for path in paths)
    except OSError:
        return False


def printable(words: str | Iterable[str]) -> str:
    """Return a text, or several texts separated by commas, with escapes for characters that control a terminal.

    >>> printable("rm -rf \\x1b[8m~")
    'rm -rf \\\\x1b[8m~'
    """
    text = words if isinstance(words, str) else ", ".join(words)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _signature(content: Mapping[str, Any], key: bytes) -> str:
    signed = {name: value for name, value in content.items() if name != SIGNATURE}
    return hmac.new(key, msgspec.json.encode(signed, order="sorted"), hashlib.sha256).hexdigest()


def _read(file: Path) -> bytes:
    """Return the key in a file; b"" if the file contains no key, or if other users can read or change it."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait until a process writes to it.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                log.warning(
                    "%s is not used, because it is not a file that only you can read; remove it", file
                )
                return b""
            key = bytes.fromhex(source.read(4 * KEY_BYTES).decode())
    except (OSError, ValueError):
        return b""
    return key if len(key) == KEY_BYTES else b""


def _make(file: Path) -> bytes:
    """Write a new key, unless another process has written a key. Return the key in the file; b"" if this fails."""
    place = file.with_name(f".{file.name}.{secrets.token_hex(6)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as target:
            target.write(secrets.token_hex(KEY_BYTES) + "\n")
        # If another process writes a key at the same time, both processes use the key of one of them.
        try:
            os.link(place, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.rename(place, file)
    except OSError:
        return b""
    finally:
        with contextlib.suppress(OSError):
            place.unlink()
    return _read(file)
