"""Decodes the hyper-parameters that every push carries."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..core.protocol.model_spec import HyperParameters
from ..errors import ProtocolError

__all__ = ["GroupsReader"]

Groups = tuple[HyperParameters, ...]

_decoder = msgspec.msgpack.Decoder(Groups)


class GroupsReader:
    """Decodes and checks the hyper-parameters of the parameter groups. The result of the last decoding is cached.

    Args:
        check: function that raises `ProtocolError` if the optimizer cannot use the given hyper-parameters.
    """

    def __init__(self, check: Callable[[Groups], None] = lambda groups: None) -> None:
        self._check = check
        self._last: tuple[bytes, Groups] = b"", ()

    def read(self, encoded: bytes) -> Groups:
        """Return each group's hyper-parameters. Raise `ProtocolError` if they cannot be decoded or used."""
        if encoded != self._last[0]:
            try:
                groups = _decoder.decode(encoded)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"the hyper-parameters of a push cannot be decoded: {error}") from error
            self._check(groups)
            self._last = encoded, groups
        return self._last[1]
