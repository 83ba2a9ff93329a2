"""Loads user-defined sync models, from modules that users name and from installed packages.

A model registers itself when its module is imported (`paceline.sync.register`). Every process that reads the notation
of the model must have imported that module. Users need not name the module if its package declares an entry point:

    [project.entry-points."paceline.sync"]
    buffered = "my_package.buffered"

A message from another process never causes the import of a module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from ..errors import ConfigurationError
from ..sync import MODELS, SyncModel

__all__ = ["imported_modules", "load_models", "modules_of"]

GROUP = "paceline.sync"

NAME = re.compile(r"(?:^|[|,@=])\s*([a-z][a-z0-9-]*)")
"""Matches every model name in the notation of a schedule, and also some parameter values."""


def load_models(sync: object, imports: Iterable[str] = ()) -> None:
    """Import the modules that define the models of a run.

    Args:
        sync: notation of the sync models. Objects other than strings are ignored.
        imports: modules to import.

    Raises:
        ConfigurationError: a module, or an installed model, cannot be imported.
    """
    _import(imports)
    unknown = set(NAME.findall(sync)) - MODELS.keys() if isinstance(sync, str) else set()
    if unknown:
        for point in entry_points(group=GROUP):
            if point.name in unknown:
                try:
                    point.load()
                    _imported[point.module] = None
                except Exception as error:  # a module may raise any exception when it is imported
                    raise ConfigurationError(
                        f"the installed sync model {point.name!r} cannot be imported from {point.value}: {error!r}."
                    ) from error


def imported_modules() -> tuple[str, ...]:
    """Return the names of the imported modules, so that other processes can import the same models."""
    return tuple(_imported)


_imported: dict[str, None] = {}


def _import(names: Iterable[str]) -> None:
    for name in names:
        try:
            import_module(name)
            _imported[name] = None
        except ConfigurationError as error:  # for example because the name of a model is taken
            raise ConfigurationError(f"the module {name!r} cannot be imported: {error}") from error
        except Exception as error:  # a module may raise any exception when it is imported
            raise ConfigurationError(
                f"the module {name!r} cannot be imported: {error!r}. Name a module that is next to the script or on "
                "Python's module search path."
            ) from error


def modules_of(models: Sequence[SyncModel]) -> tuple[str, ...]:
    """Return the names of the modules outside Paceline that define these models. All processes must import them.

    Raises:
        ConfigurationError: a model is defined in a script, which other processes cannot import.
    """
    modules = []
    for model in models:
        module = type(model).__module__
        if module == "__main__":
            raise ConfigurationError(
                f"the sync model {model} is defined in the script itself, which the servers cannot import. Move the "
                "class into a module next to the script."
            )
        if not module.startswith("paceline."):
            modules.append(module)
    return tuple(dict.fromkeys(modules))
