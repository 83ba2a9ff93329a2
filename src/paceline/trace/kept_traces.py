"""What is kept of the traces and records of a run: the option `--traces`."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from ..errors import ConfigurationError, unknown_name

__all__ = ["KeptTraces"]

KEPT = ("full", "recent", "off")


class KeptTraces(msgspec.Struct, frozen=True):
    """What is kept of the traces and records of a run.

    Attributes:
        kept: "full" if everything is kept, "recent" if the oldest parts are deleted during the run, or "off" if there
            are no traces.
        megabytes: about how many megabytes recent traces and records may occupy in the run directory.

    Example:
        >>> KeptTraces.read("recent:7").size_bytes, str(KeptTraces.read("recent:7")), str(KeptTraces())
        (7000000, 'recent:7', 'recent')
    """

    kept: Literal["full", "recent", "off"] = "recent"
    megabytes: int = 100

    @classmethod
    def read(cls, text: str) -> KeptTraces:
        """Parse the notation of the command line.

        Raises:
            ConfigurationError: the notation is not valid.
        """
        kept, colon, size = text.partition(":")
        if kept not in KEPT:
            raise unknown_name("traces", text, KEPT)
        if colon and not (kept == "recent" and size.isascii() and size.isdecimal() and int(size) > 0):
            raise ConfigurationError(
                f"traces is {text!r}, expected a number of megabytes only for recent traces, such as 'recent:500'."
            )
        known = cast(Literal["full", "recent", "off"], kept)
        return cls(known, int(size)) if size else cls(known)

    def __str__(self) -> str:
        usual = self.kept != "recent" or self.megabytes == KeptTraces().megabytes
        return self.kept if usual else f"{self.kept}:{self.megabytes}"

    @property
    def size_bytes(self) -> int:
        """About how many bytes recent traces and records may occupy in the run directory."""
        return self.megabytes * 10**6
