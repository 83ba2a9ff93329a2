"""Paceline: data-parallel PyTorch training on machines of unequal speed.

The public names are imported when they are first used. Importing the package has no side effects.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "sim",
    "DistributedOptimizer": "frontend.optimizer",
    "LARS": "shard.lars",
    "RunResult": "launcher.launch",
    "SimResult": "sim",
    "barrier": "frontend.collectives",
    "checkpoint": "frontend.saving",
    "device": "frontend.device",
    "distribute": "frontend.data",
    "epochs": "frontend.epochs",
    "evaluating": "frontend.evaluating",
    "is_main": "frontend.is_main",
    "launch": "launcher.launch",
    "log": "frontend.metrics",
    "partition": "frontend.partition",
    "prepare": "frontend.prepare",
    "reduce": "frontend.collectives",
    "register_elementwise": "shard.foreign",
    "save": "frontend.saving",
    "set_sync": "frontend.session",
    "simulate": "sim",
    "study": "studies.study",
    "track": "frontend.tracking",
    "worker_count": "frontend.session",
    "worker_index": "frontend.session",
}

__all__ = [
    "LARS",
    "Cluster",
    "DistributedOptimizer",
    "RunResult",
    "SimResult",
    "barrier",
    "checkpoint",
    "device",
    "distribute",
    "epochs",
    "errors",
    "evaluating",
    "is_main",
    "launch",
    "log",
    "partition",
    "prepare",
    "reduce",
    "register_elementwise",
    "save",
    "set_sync",
    "sim",
    "simulate",
    "study",
    "sync",
    "track",
    "worker_count",
    "worker_index",
    "zipline",
]

if TYPE_CHECKING:
    from . import errors, sim, sync, zipline
    from .frontend.collectives import barrier, reduce
    from .frontend.data import distribute
    from .frontend.device import device
    from .frontend.epochs import epochs
    from .frontend.evaluating import evaluating
    from .frontend.is_main import is_main
    from .frontend.metrics import log
    from .frontend.optimizer import DistributedOptimizer
    from .frontend.partition import partition
    from .frontend.prepare import prepare
    from .frontend.saving import checkpoint, save
    from .frontend.session import set_sync, worker_count, worker_index
    from .frontend.tracking import track
    from .launcher.launch import RunResult, launch
    from .shard.foreign import register_elementwise
    from .shard.lars import LARS
    from .sim import Cluster, SimResult, simulate
    from .studies.study import study


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        # Scripts call some of these functions in each iteration, so the next access finds the attribute here.
        found = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return found
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
