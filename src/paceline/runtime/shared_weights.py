"""The shared memory in which the servers update the weights, as the host of the coordinator creates it."""

from __future__ import annotations

from ..core.protocol.layout import Layout
from ..wire.memory import MASTER, Region

__all__ = ["SharedWeights"]


class SharedWeights:
    """The shared memory for the weights of the model in force, and for those of a model that is being agreed on.

    Attributes:
        master: the memory for the model in force; None if there is none.
        passed: True if the new model has been passed to workers, so that it is in force.
    """

    def __init__(self) -> None:
        self.master: Region | None = None
        self.passed = False
        self._new: Region | None = None  # the same until it has been passed to all processes

    def create(self, layout: Layout) -> None:
        """Create the memory for a new model, unless it exists."""
        if self._new is None:
            self._new = Region.create(layout, MASTER, shared=True)

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the new memory; None if there is none."""
        return None if self._new is None else self._new.descriptor

    def settle(self) -> None:
        """If the new model is in force, keep its memory, and close the descriptor: every process has received it."""
        if self.passed and self._new is not None:
            self._new.close()
            self.master, self._new = self._new, None
        self.passed = False

    def release(self) -> None:
        """Release the mappings, which keep file descriptors open."""
        self.master = self._new = None
