"""The values of frozen parameters at the server of shard 0, which passes them on from one worker to others.

Every worker loads the frozen parameters itself, so a server has only their digests. A worker that has other values
than the run requests those of the run. The server then requests them from a worker that has them: the initializer or,
if it is gone, any other worker. It keeps the values, because several workers may request the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from ..core.protocol.messages import FetchFrozen, FrozenTensors
from ..errors import ProtocolError

__all__ = ["FrozenSend", "FrozenValues"]

Peer = TypeVar("Peer")


class FrozenSend(NamedTuple, Generic[Peer]):
    """A message that the server must send.

    Attributes:
        to: a peer that has requested values, or the index of a worker.
        message: the message.
        payload: its payload, which does not change.
    """

    to: Peer | int
    message: FetchFrozen | FrozenTensors
    payload: list[memoryview]


class FrozenValues(Generic[Peer]):
    """The values of frozen parameters that have been requested, and the peers that wait for some.

    Attributes:
        kept: digest -> value, for the values that have arrived.
    """

    def __init__(self) -> None:
        self.kept: dict[str, bytearray] = {}
        self._sizes: dict[str, int] = {}  # digest -> size in bytes, for the values that were requested
        self._waiting: dict[Peer, tuple[str, ...]] = {}
        self._source = -1  # the worker that has been asked and has not answered yet; -1 for none
        self._tried: defaultdict[str, set[int]] = defaultdict(
            set
        )  # digest -> the workers that were asked for it

    def request(self, peer: Peer, digests: tuple[str, ...], sizes: Mapping[str, int]) -> None:
        """Note the request of a peer. `sizes` contains the size in bytes of each frozen parameter, by its digest.

        Raises:
            ProtocolError: the model has no such parameter, or the peer waits already.
        """
        if peer in self._waiting or len(set(digests)) != len(digests) or not sizes.keys() >= set(digests):
            raise ProtocolError("it requested values of frozen parameters that the model does not have")
        self._sizes |= {digest: sizes[digest] for digest in digests}
        self._waiting[peer] = digests

    def sizes(self, digests: Sequence[str]) -> list[int]:
        """Return the sizes of the values that a worker is about to send.

        Raises:
            ProtocolError: nobody has requested them.
        """
        if len(set(digests)) != len(digests) or not self._sizes.keys() >= set(digests):
            raise ProtocolError("it sent values of frozen parameters that were not requested")
        return [self._sizes[digest] for digest in digests]

    def arrived(self, worker: int, digests: Sequence[str], values: Sequence[bytearray]) -> None:
        """Keep the values that a worker has sent. It does not have the others for which it was asked."""
        for digest, value in zip(digests, values, strict=True):
            self.kept.setdefault(digest, value)  # an earlier value may be on its way to a peer
        if worker == self._source:
            self._source = -1

    def gone(self, worker: int) -> None:
        """Note that the connection to a worker has ended, perhaps because there is a new one."""
        for tried in self._tried.values():
            tried.discard(worker)
        if worker == self._source:
            self._source = -1

    def forget(self, peer: Peer) -> None:
        """Note that a peer does not wait any more."""
        self._waiting.pop(peer, None)

    def retain(self, digests: Iterable[str]) -> None:
        """Drop all values except those with these digests."""
        wanted = set(digests)
        self.kept = {digest: value for digest, value in self.kept.items() if digest in wanted}
        self._sizes = {digest: size for digest, size in self._sizes.items() if digest in wanted}

    def due(self, workers: Sequence[int]) -> list[FrozenSend[Peer]]:
        """Return what must be sent now.

        Args:
            workers: the connected workers, in the order in which they are asked.
        """
        missing = [
            digest
            for digest in dict.fromkeys(each for digests in self._waiting.values() for each in digests)
            if digest not in self.kept
        ]
        sends: list[FrozenSend[Peer]] = []
        if self._source < 0:
            for worker in workers:
                if asked := tuple(digest for digest in missing if worker not in self._tried[digest]):
                    self._source = worker
                    for digest in asked:
                        self._tried[digest].add(worker)
                    sends.append(FrozenSend(worker, FetchFrozen(0, asked), []))
                    break
        for peer, digests in list(self._waiting.items()):
            known = tuple(digest for digest in digests if digest in self.kept)
            if len(known) == len(digests) or self._source < 0:
                del self._waiting[peer]
                payload = [memoryview(self.kept[digest]) for digest in known]
                sends.append(FrozenSend(peer, FrozenTensors(0, known), payload))
        if not self._waiting and self._source < 0:
            self._tried.clear()
        return sends
