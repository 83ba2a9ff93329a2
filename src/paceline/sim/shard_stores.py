"""The tensors of the shards of a simulated job, or nothing in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..sync.translation import Standing

__all__ = ["NullStore", "ShardStore"]


class ShardStore(Protocol):
    """Interface to the tensors of one shard. See `paceline.shard.store.Store`."""

    def put(self, worker: int, iteration: int, push: Any) -> None: ...

    def apply(
        self,
        pushes: Sequence[tuple[int, int]],
        scales: Sequence[float],
        standing: Standing | None = None,
    ) -> None: ...

    def squared_norm(self, pushes: Sequence[tuple[int, int]], scales: Sequence[float]) -> float: ...

    def overwrite(self, worker: int, iteration: int, number: int) -> None: ...

    def discard(self, worker: int, iteration: int) -> None: ...

    def preserve(self, worker: int, iteration: int) -> None: ...


class NullStore:
    """A shard store without tensors, for simulations that do not train."""

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
