"""Paceline: data-parallel PyTorch training on machines of unequal speed.

The public names are imported when they are first used. Importing the package has no side effects.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

VERSION = "0.2.0"
__version__ = VERSION

LEAST_TORCH = (2, 7)


def _require_torch() -> None:
    """Raise `ImportError` if the installed torch is too old. The command `paceline` ends with the same sentence.

    The version is read from torch's files, because importing torch takes more than a second. If torch is not installed,
    or if its files have another form, this function raises nothing: the first import of torch shows the problem.
    """
    spec = find_spec("torch")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        with suppress(OSError), open(f"{folder}/version.py", encoding="utf-8") as file:
            found = re.search(r"^__version__ = '((\d+)\.(\d+)[^']*)'", file.read(), re.MULTILINE)
            if found is not None and (int(found[2]), int(found[3])) < LEAST_TORCH:
                least = ".".join(map(str, LEAST_TORCH))
                reason = (
                    f"Paceline {VERSION} needs torch {least} or newer, but torch {found[1]} is installed; run: "
                    f"pip install 'torch>={least}'"
                )
                if sys.argv[0].endswith("/paceline"):
                    print(f"error: {reason}", file=sys.stderr)
                    raise SystemExit(2)
                raise ImportError(reason)


_require_torch()

_HOMES = {
    "Cluster": "sim",
    "DistributedOptimizer": "train.optimizer",
    "LARS": "shard.lars",
    "RunResult": "start.launch",
    "SimResult": "sim",
    "barrier": "train.collectives",
    "checkpoint": "train.collectives",
    "device": "train.device",
    "distribute": "train.data",
    "epochs": "train.epochs",
    "evaluating": "train.collectives",
    "is_main": "train.collectives",
    "launch": "start.launch",
    "log": "train.metrics",
    "partition": "train.partition",
    "prepare": "train.prepare",
    "reduce": "train.collectives",
    "register_elementwise": "shard.foreign",
    "register_tensorwise": "shard.foreign",
    "save": "train.collectives",
    "set_sync": "train.session",
    "simulate": "sim",
    "study": "studies.study",
    "track": "train.tracking",
    "worker_count": "train.session",
    "worker_index": "train.session",
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
    "register_tensorwise",
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
    from .shard.foreign import register_elementwise, register_tensorwise
    from .shard.lars import LARS
    from .sim import Cluster, SimResult, simulate
    from .start.launch import launch
    from .start.results import RunResult
    from .studies.study import study
    from .train.collectives import barrier, checkpoint, evaluating, is_main, reduce, save
    from .train.data import distribute
    from .train.device import device
    from .train.epochs import epochs
    from .train.metrics import log
    from .train.optimizer import DistributedOptimizer
    from .train.partition import partition
    from .train.prepare import prepare
    from .train.session import set_sync, worker_count, worker_index
    from .train.tracking import track


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        # Scripts call some of these functions in each iteration. From the second access on, Python finds the attribute
        # without calling this function.
        found = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return found
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
