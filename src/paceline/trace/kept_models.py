"""The modules with a user's own sync models and conditions, whose names are kept with each run.

The sync model of a finished run can then be simulated and replayed without naming its module again. `summary.json`
also contains the folder in which each module was found, because it may be next to the script of the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..plugins import load_models
from ..plugins.user_conditions import LOCAL
from ..sync import Conditions, SyncModel

__all__ = ["folders_of", "load_kept_models", "modules_of_models"]


def modules_of_models(models: Iterable[SyncModel]) -> tuple[str, ...]:
    """Return the names of the modules that define these models or their conditions, without those of Paceline."""
    names: list[str] = []
    for model in models:
        names.append(type(model).__module__)
        if isinstance(model, Conditions):
            names += [name.partition(":")[0] for name in (model.pull, model.push) if name]
    own = [name for name in names if not name.startswith("paceline.") and name not in ("__main__", LOCAL)]
    return tuple(dict.fromkeys(own))


def folders_of(modules: Sequence[str]) -> dict[str, str]:
    """Return a mapping from the name of each imported module to the folder in which Python has found it.

    For a module in a package, this is the folder that contains the package. It is "" if the folder is unknown.
    """
    found = {}
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        depth = name.count(".") + (file is not None and Path(file).name == "__init__.py")
        found[name] = str(Path(file).resolve().parents[depth]) if file is not None else ""
    return found


def load_kept_models(run_dir: Path) -> tuple[str, ...]:
    """Import the modules that the summary of a run names, and return their names; () if there is no summary.

    A module that is not on the module search path is imported from the folder that the summary names, unless it is in
    the run directory: what is in there is data.

    Raises:
        ConfigurationError: a module cannot be imported.
    """
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
        kept: Mapping[str, str] = {str(name): str(folder) for name, folder in summary["imports"].items()}
        sync = str(summary["sync"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    for name, folder in kept.items():
        if _is_missing(name) and folder not in sys.path and _is_outside(Path(folder), run_dir):
            sys.path.append(folder)
    load_models(sync, kept)
    return tuple(kept)


def _is_missing(name: str) -> bool:
    return name not in sys.modules and find_spec(name.partition(".")[0]) is None


def _is_outside(folder: Path, run_dir: Path) -> bool:
    return folder.is_absolute() and not folder.resolve().is_relative_to(run_dir.resolve())
