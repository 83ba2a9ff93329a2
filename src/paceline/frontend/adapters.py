"""What scripts log with Lightning, Fabric, the Hugging Face Trainer and Accelerate is logged by itself.

Each of these libraries has one method through which everything passes that a script logs. During a run, this method
is wrapped, as soon as a script that has imported the library wraps an optimizer. The method does what it does without
a run; then the wrapper logs the numbers that it was given. Loggers and trackers of the libraries would not do: a
script must name them, and they receive only some of the values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .metrics import metrics_of
from .session import current

__all__ = ["unwatch_adapters", "watch_adapters"]


class Adapter(NamedTuple):
    """A method with which scripts log.

    Attributes:
        module: name of the module that defines its class.
        owner: name of the class.
        method: name of the method.
        takes: the names of its arguments: the metrics; or the name and the value of one metric.
    """

    module: str
    owner: str
    method: str
    takes: tuple[str, ...]


ADAPTERS = (
    Adapter("lightning.pytorch.core.module", "LightningModule", "log", ("name", "value")),
    Adapter("pytorch_lightning.core.module", "LightningModule", "log", ("name", "value")),
    Adapter("lightning.fabric.fabric", "Fabric", "log_dict", ("metrics",)),
    Adapter("lightning_fabric.fabric", "Fabric", "log_dict", ("metrics",)),
    Adapter("transformers.trainer", "Trainer", "log", ("logs",)),
    Adapter("accelerate.accelerator", "Accelerator", "log", ("values",)),
)

_originals: dict[Adapter, tuple[type, Callable[..., Any]]] = {}


def watch_adapters() -> None:
    """Wrap the methods of the libraries that the script has imported, unless they are wrapped already."""
    for adapter in ADAPTERS:
        owner = getattr(sys.modules.get(adapter.module), adapter.owner, None)
        original = getattr(owner, adapter.method, None)
        if adapter not in _originals and isinstance(owner, type) and original is not None:
            _originals[adapter] = owner, original
            setattr(owner, adapter.method, _logging(original, adapter.takes))


def unwatch_adapters() -> None:
    """Restore the methods of the libraries."""
    for adapter, (owner, original) in _originals.items():
        setattr(owner, adapter.method, original)
    _originals.clear()


def _logging(original: Callable[..., Any], takes: tuple[str, ...]) -> Callable[..., Any]:
    """Return a method that calls the original one, and logs what it was given."""

    @functools.wraps(original)
    def log(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if (session := current()) is not None:
            # A decorated method does not tell its signature. The first of the arguments is the object itself.
            given = (
                arguments[place] if place < len(arguments) else options.get(name)
                for place, name in enumerate(takes, 1)
            )
            first, *rest = given
            metrics = {first: rest[0]} if rest else first
            if isinstance(metrics, Mapping):
                metrics_of(session).add_legal(session, metrics)
        return result

    return log
