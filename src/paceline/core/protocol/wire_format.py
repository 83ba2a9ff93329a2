"""The format in which float32 gradients and weights travel between processes: the option `--wire`.

On a slow link, the transfers of a large model take longer than its gradients. With the format bf16, the sender rounds
float32 values to bfloat16, which has the same exponents, and the receiver widens them again. So half as many bytes
travel. Each direction has a format of its own: gradients from the workers to the servers, and weights back. The
shards hold float32 weights and apply updates to those, so an update that is too small to change a rounded weight is
not lost. `core.protocol.rounded_messages` says which messages contain rounded values.

The outbox of a worker rounds a piece when it is sent, into memory of half the size. Its checksums are those of the
bits before. The inbox of a server widens a piece when its message is complete. In the other direction, a server
rounds the weights of a shard once for all answers between two updates, and flags each `Answer`. It needs this flag
because an answer to an edit, or to a pull for an evaluation, is exact.
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from ...errors import ConfigurationError

__all__ = ["EXACT", "Format", "WireFormat"]

Format = Literal["float32", "bf16"]
FORMATS = ("float32", "bf16")
DIRECTIONS = ("gradients", "weights")


class WireFormat(msgspec.Struct, frozen=True):
    """The format of float32 values in each direction: "float32" for their own, or "bf16" for bfloat16.

    Attributes:
        gradients: format of the gradients that workers send to servers.
        weights: format of the weights that servers send to workers.

    Example:
        >>> str(WireFormat.read("gradients=bf16")), str(WireFormat.read("gradients=bf16,weights=bf16"))
        ('gradients=bf16,weights=float32', 'bf16')
    """

    gradients: Format = "float32"
    weights: Format = "float32"

    @classmethod
    def read(cls, text: str) -> WireFormat:
        """Parse the notation of the command line: a format, or `gradients=FORMAT,weights=FORMAT`.

        A direction that is not named has the format "float32".

        Raises:
            ConfigurationError: the notation is not valid.
        """
        pairs = [part.partition("=")[::2] for part in text.split(",")] if "=" in text else []
        named = dict(pairs) if pairs else dict.fromkeys(DIRECTIONS, text)
        known = named.keys() <= set(DIRECTIONS) and all(value in FORMATS for value in named.values())
        if not known or len(named) < len(pairs):
            raise ConfigurationError(
                f"wire is {text!r}, expected 'float32' or 'bf16', or a format for each direction, such as "
                "'gradients=bf16,weights=float32'."
            )
        return cls(**cast(dict[str, Format], named))

    def __str__(self) -> str:
        if self.gradients == self.weights:
            return self.gradients
        return f"gradients={self.gradients},weights={self.weights}"

    @property
    def exact(self) -> bool:
        """True if nothing is rounded."""
        return self == EXACT


EXACT = WireFormat()
"""The format in which nothing is rounded."""
