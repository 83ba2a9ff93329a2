"""The secret of a run whose workers are on several machines. Whoever knows it can join the run.

A secret consists of 32 random bytes, written as 64 hexadecimal digits. It is read from the environment or from a
file, never from the command line, which other users of a machine can see. A passphrase is refused: somebody who
records the traffic could try many of them.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigurationError

__all__ = ["VARIABLE", "new_secret", "read_secret", "write_secret"]

VARIABLE = "PACELINE_SECRET"
"""The environment variable that contains the secret."""

SIZE_BYTES = 32
FORMAT = re.compile(f"[0-9a-fA-F]{{{2 * SIZE_BYTES}}}")
HOW = f"expected {2 * SIZE_BYTES} hexadecimal digits, such as `openssl rand -hex {SIZE_BYTES}` prints"


def new_secret() -> str:
    """Return a new secret."""
    return secrets.token_hex(SIZE_BYTES)


def read_secret(environment: Mapping[str, str], file: Path | None = None) -> str:
    """Return the secret in a file or, without a file, in the environment; "" if there is none in the environment.

    The error messages do not contain the secret.

    Raises:
        ConfigurationError: the secret is not valid, or other users may read the file.
    """
    if file is not None:
        where, text = f"the file {str(file)!r}", _content(file)
    else:
        where, text = f"the environment variable {VARIABLE}", environment.get(VARIABLE, "")
        if not text:
            return ""
    text = text.strip()
    if not FORMAT.fullmatch(text):
        raise ConfigurationError(f"{where} contains {len(text)} characters that are not a secret; {HOW}.")
    return text.lower()


def write_secret(secret: str, file: Path) -> None:
    """Write a secret to a new file that only its owner may read."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(f"{secret}\n")


def _content(file: Path) -> str:
    """Return the text of a file that belongs to this user, and that no other user may read."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait until somebody writes to it.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as source:
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"the secret's file {str(file)!r} is not a regular file.")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigurationError(
                    f"the secret's file {str(file)!r} may be read by others: its mode is "
                    f"{stat.S_IMODE(status.st_mode):o}, expected 600, and it must belong to you. Run `chmod 600` on "
                    "it and, if others could read it, use a new secret."
                )
            return source.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"the secret's file {str(file)!r} cannot be read: {reason}.") from error
