"""Objects whose state can be saved and loaded, as torch's schedulers, modules and some loaders have it."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["METHODS", "Stateful"]

METHODS = ("state_dict", "load_state_dict")


class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...
