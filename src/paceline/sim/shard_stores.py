"""What stands in place of the tensors of a shard, in a simulation that does not train."""

from __future__ import annotations

from collections.abc import Sequence

from ..sync.translation import Standing

__all__ = ["NullStore"]


class NullStore:
    """A `core.protocol.host.ShardStore` without tensors."""

    def put(self, worker: int, iteration: int, push: object) -> None:
        pass

    def apply(
        self,
        pushes: Sequence[tuple[int, int]],
        scales: Sequence[float],
        standing: Standing | None = None,
    ) -> None:
        pass

    def squared_norm(self, pushes: Sequence[tuple[int, int]], scales: Sequence[float]) -> float:
        return 0.0

    def overwrite(self, worker: int, iteration: int, number: int) -> None:
        pass

    def discard(self, worker: int, iteration: int) -> None:
        pass

    def preserve(self, worker: int, iteration: int) -> None:
        pass
