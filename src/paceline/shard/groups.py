"""Decodes the hyper-parameters that come with every push."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..core.model_spec import HyperParameters
from ..errors import ProtocolError

__all__ = ["GroupsReader"]

Groups = tuple[HyperParameters, ...]

_decoder = msgspec.msgpack.Decoder(Groups)


class GroupsReader:
    """Decodes and checks the hyper-parameters of the parameter groups. The last result is cached.

    Args:
        check: function that raises `ProtocolError` for hyper-parameters that cannot be used.
    """

    def __init__(self, check: Callable[[Groups], None] = lambda groups: None) -> None:
        self._check = check
        self._last: tuple[bytes, Groups] = b"", ()

    def read(self, encoded: bytes) -> Groups:
        """Return the hyper-parameters of each group. Raise `ProtocolError` if they cannot be read or used."""
        if encoded != self._last[0]:
            try:
                groups = _decoder.decode(encoded)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"the hyper-parameters cannot be read: {error}") from error
            self._check(groups)
            self._last = encoded, groups
        return self._last[1]
