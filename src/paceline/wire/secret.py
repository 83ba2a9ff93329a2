"""The secret of a run whose workers are on several machines. Whoever knows it can join the run.

A secret consists of 32 random bytes, written as 64 hexadecimal digits. It is read from the environment or from a
file, never from the command line, which other users of a machine can see. A passphrase is refused: somebody who
records the traffic could try many of them.

A program that takes the secret from its environment removes it there, so that what the program starts does not
inherit it. The kernel shows the memory of the initial environment in `/proc/PID/environ`, and would go on to show the
secret after `unsetenv`. So this memory is overwritten, too.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ..errors import ConfigurationError

__all__ = ["SECRET", "VARIABLE", "new_secret", "read_secret", "take_secret", "without_secret", "write_secret"]

VARIABLE = "PACELINE_SECRET"
"""The environment variable that contains the secret."""

SECRET = "secret"
"""Name of the file with the secret in the directory of a run."""

SIZE_BYTES = 32
FORMAT = re.compile(f"[0-9a-fA-F]{{{2 * SIZE_BYTES}}}")
HOW = f"expected {2 * SIZE_BYTES} hexadecimal digits, such as `openssl rand -hex {SIZE_BYTES}` prints"


def new_secret() -> str:
    """Return a new secret."""
    return secrets.token_hex(SIZE_BYTES)


def take_secret(environment: MutableMapping[str, str], file: Path | None = None) -> str:
    """Return the secret in a file or, without a file, in the environment; "" if there is none in the environment.

    In either case, the environment does not contain a secret afterwards.

    Args:
        environment: the variables of the environment. For `os.environ`, the initial environment of this process,
            which the kernel shows to its user, is changed as well.
        file: the file that contains the secret.

    Raises:
        ConfigurationError: the secret is not valid, or other users may read the file.

    >>> environment = {"PACELINE_SECRET": "AB" * 32, "HOME": "/root"}
    >>> take_secret(environment) == "ab" * 32, environment
    (True, {'HOME': '/root'})
    """
    if environment is os.environ:
        _overwrite(VARIABLE)
    text = environment.pop(VARIABLE, "")
    if file is not None:
        return read_secret(file)
    return _checked(text, f"the environment variable {VARIABLE}") if text else ""


def read_secret(file: Path) -> str:
    """Return the secret in a file.

    Raises:
        ConfigurationError: the secret is not valid, or other users may read the file.
    """
    return _checked(_content(file), f"the file {str(file)!r}")


def without_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that must not know the secret."""
    return {name: value for name, value in environment.items() if name != VARIABLE}


def _checked(text: str, where: str) -> str:
    """Return the secret in a text, which has been found at `where`. The error message does not contain it."""
    text = text.strip()
    if not FORMAT.fullmatch(text):
        raise ConfigurationError(f"{where} contains {len(text)} characters that are not a secret; {HOW}.")
    return text.lower()


def write_secret(secret: str, file: Path) -> None:
    """Write a secret to a new file that only its owner may read. If the disk is full, there is no file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as target:
            target.write(f"{secret}\n")
    except OSError:
        file.unlink()
        raise


def _overwrite(variable: str) -> None:
    """Overwrite the memory with the value of a variable of this process's environment, if the variable is set."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(variable.encode())
    if address:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))


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
