"""The modules with a user's own sync models and conditions, whose names are kept with each run.

The sync model of a finished run can then be simulated and replayed without naming its module again. `summary.json`
also contains the folder in which each module was found, because it may be next to the script of the run.

To import a module is to run it. So what the summary says about modules is signed (see `paceline.trust`), and a module
that is not imported yet is imported only if the run is this user's, or if the user says so.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..files import read_regular
from ..plugins import load_models
from ..plugins.user_conditions import LOCAL
from ..sync import Conditions, SyncModel
from ..sync.schedule import read_schedule
from ..trust import SIGNATURE, is_own, is_signed, printable, signature_of

__all__ = ["kept_modules", "load_kept_models", "modules_of_models", "require_known"]


def modules_of_models(models: Iterable[SyncModel]) -> tuple[str, ...]:
    """Return the names of the modules that define these models or their conditions, without those of Paceline."""
    names: list[str] = []
    for model in models:
        names.append(type(model).__module__)
        if isinstance(model, Conditions):
            names += [name.partition(":")[0] for name in (model.pull, model.push) if name]
    own = [name for name in names if not name.startswith("paceline.") and name not in ("__main__", LOCAL)]
    return tuple(dict.fromkeys(own))


def kept_modules(modules: Sequence[str]) -> dict[str, Any]:
    """Return what the summary of a run says about the modules that it has imported, signed if there are any."""
    content = {"imports": folders_of(modules)}
    return {**content, SIGNATURE: signature_of(content)} if modules else content


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


def load_kept_models(run_dir: Path, *, trust: bool = False) -> tuple[str, ...]:
    """Import the modules that the summary of a run names, and return their names; () if there is no summary.

    A module that is not on the module search path is imported from the folder that the summary names, unless it is in
    the run directory: what is in there is data.

    Args:
        run_dir: the directory of the run.
        trust: True to import them whoever has written the summary.

    Raises:
        ConfigurationError: a module cannot be imported, or it would be imported because somebody else says so.
    """
    path = run_dir / "summary.json"
    try:
        summary = json.loads(read_regular(path))
        kept: Mapping[str, str] = {str(name): str(folder) for name, folder in summary["imports"].items()}
        sync = str(summary["sync"])
        content = {"imports": summary["imports"], SIGNATURE: summary.get(SIGNATURE)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    trust = trust or (is_signed(content) and is_own(run_dir, path))
    if not trust:
        require_known(kept, run_dir, [folder for name, folder in kept.items() if _is_missing(name)])
    for name, folder in kept.items():
        if _is_missing(name) and folder not in sys.path and _is_outside(Path(folder), run_dir):
            sys.path.append(folder)
    load_models(sync, kept)
    require_known([name for name in modules_in(sync) if name not in kept], run_dir)
    return tuple(kept)


def modules_in(sync: str) -> tuple[str, ...]:
    """Return the modules with the conditions in the notation of a sync model; () if it cannot be read here."""
    try:
        return modules_of_models(read_schedule(sync).models)
    except ConfigurationError:  # whoever needs the model says what is wrong
        return ()


def require_known(modules: Iterable[str], where: object, folders: Sequence[str] = ()) -> None:
    """Require that the modules which data names are imported already, so that data does not decide what is run.

    Args:
        modules: names of modules.
        where: what names them.
        folders: the folders from which they would be imported, if these are known.

    Raises:
        ConfigurationError: a module is not imported, or is one of Python's own, which are no sync models.
    """
    unknown = [name for name in modules if name not in sys.modules or _is_of_python(name)]
    if unknown:
        found = f" from {printable(folders)}" if folders else ""
        raise ConfigurationError(
            f"{where} names the module {printable(unknown)}{found}, but your key has not signed this, so somebody "
            "else may have written it; look at the module, and name it with --import, or add --trust. In Python, "
            "import it first, or give trust=True."
        )


def _is_of_python(name: str) -> bool:
    """Return True if an imported module belongs to Python itself."""
    file = getattr(sys.modules[name], "__file__", None)
    if name.partition(".")[0] not in sys.stdlib_module_names:
        return False
    return file is None or (Path(os.__file__).parent in Path(file).parents and "site-packages" not in file)


def _is_missing(name: str) -> bool:
    return name not in sys.modules and find_spec(name.partition(".")[0]) is None


def _is_outside(folder: Path, run_dir: Path) -> bool:
    return folder.is_absolute() and not folder.resolve().is_relative_to(run_dir.resolve())
