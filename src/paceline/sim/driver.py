"""What the workers of a simulated job do between messages."""

from __future__ import annotations

from typing import Protocol

from ..core.protocol.job_cut import JobCut
from ..core.protocol.requests import CompleteCut

__all__ = ["Driver"]


class Driver(Protocol):
    """Determines what the workers do between messages. `VirtualJob` calls the methods of its driver."""

    def joined(self, worker: int) -> None:
        """Called when the worker has joined and its weights have arrived."""

    def computed(self, worker: int) -> None:
        """Called when the compute time of the worker's iteration has passed."""

    def aborted(self, worker: int) -> None:
        """Called when the worker's computation must be aborted. The driver must then call `VirtualJob.pull_again`."""

    def answered(self, worker: int) -> None:
        """Called when every shard's answer to the worker's most recent pull has arrived."""

    def passed(self, worker: int) -> None:
        """Called when the time has passed that the driver has let pass with `VirtualJob.let_pass`."""

    def supplied(self, worker: int) -> None:
        """Called when the coordinator's answer to one of the worker's requests for data has arrived."""

    def combined(self, worker: int) -> None:
        """Called when the barrier or the reduction in which the worker's script waits has ended."""

    def model_extended(self, initializer: int) -> None:
        """Called when the shards must be extended, with the initial weights that this worker has proposed."""

    def extended(self, worker: int) -> None:
        """Called when the worker needs memory for the extended model. `answered` follows when its weights arrive."""

    def sent(self, worker: int, shard: int, *, rounded: bool) -> None:
        """Called when a shard sends its current weights to the worker, rounded or as they are."""

    def take_cut(self, shard: int, number: int) -> None:
        """Called when a shard must be copied as it is now, for a cut of the job."""

    def save_cut(self, cut: JobCut) -> None:
        """Called when all shards have been copied for a cut."""

    def complete_cut(self, request: CompleteCut) -> None:
        """Called when the workers have given what their scripts held at the cut that was saved last."""

    def lost(self, worker: int) -> None:
        """Called when the worker is lost. The worker's later actions have no effect."""
