"""Paceline: data-parallel PyTorch training on machines that are not equally fast.

The public names are here and are loaded when they are first used; importing the package has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "DistributedOptimizer": "optim",
    "LARS": "lars",
    "RunResult": "engines.launch",
    "distribute": "data",
    "launch": "engines.launch",
    "set_sync": "runtime.session",
    "worker_count": "data",
    "worker_index": "data",
}

__all__ = [
    "LARS",
    "DistributedOptimizer",
    "RunResult",
    "distribute",
    "errors",
    "launch",
    "set_sync",
    "sync",
    "worker_count",
    "worker_index",
    "zipline",
]

if TYPE_CHECKING:
    from . import errors, sync, zipline
    from .data import distribute, worker_count, worker_index
    from .engines.launch import RunResult, launch
    from .lars import LARS
    from .optim import DistributedOptimizer
    from .runtime.session import set_sync


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
