"""The versions and formats that must be equal on all machines of a run. They are checked when a machine joins.

Versions of torch may differ: only the formats of the data that the processes of a run exchange must be equal. So a
machine reports its installed versions and formats. The coordinator compares the report with the versions and formats
on its own machine, and with the needs of the run.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import msgspec

from ..checkpoints.manifest import FORMAT
from ..core.layout import CODECS, ITEM_BYTES
from ..core.messages import ROWS, Installed


@cache
def installed() -> Installed:
    """Return the installed versions and formats. This does not import torch, which would take more than a second."""
    return Installed(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=_version_of_torch(),
        formats={
            "messages": _digest(_fields(row.message for row in ROWS)),
            "checkpoints": str(FORMAT),
            "codecs": _digest(f"{name} {tuple(codec)}" for name, codec in CODECS.items()),
            "dtypes": _digest(f"{name} {size_bytes}" for name, size_bytes in ITEM_BYTES.items()),
        },
        optimizers=tuple(sorted(_optimizers_of_torch())),
    )


def what_differs(
    found: Installed, expected: Installed, *, pickled: str = "", optimizers: Iterable[str] = ()
) -> str:
    """Return what a machine with the same version of Paceline must change before it can join a run; "" for nothing.

    Args:
        found: the installed versions and formats of the machine.
        expected: the installed versions and formats of the coordinator's machine.
        pickled: name, for the user, of the object that the machine's processes would unpickle; "" for none.
        optimizers: the classes of the run's optimizers, in the notation of `OptimizerSpec.name`.

    Example:
        >>> own = Installed("3.11", "2.13.0", {"messages": "1"}, ("Muon", "SGD"))
        >>> other = Installed("3.12", "2.7.1", {"messages": "1"}, ("SGD",))
        >>> what_differs(other, own, optimizers=["SGD"])
        ''
        >>> print(what_differs(other, own, optimizers=["Muon"]))
        this machine has torch 2.7.1, which has no torch.optim.Muon, but the run trains with this optimizer: ...
    """
    names = found.formats.keys() | expected.formats.keys()
    if others := sorted(name for name in names if found.formats.get(name) != expected.formats.get(name)):
        return (
            "Paceline has the same version on this machine and on the machine of the run, but different formats of "
            f"{' and '.join(others)}. Install the same wheel on all machines."
        )
    if pickled and found.python != expected.python:
        return (
            f"this machine has Python {found.python}, but {pickled} was pickled by Python {expected.python}, and no "
            f"other version of Python can load it. Use Python {expected.python} on this machine."
        )
    if found.optimizers and (lacking := sorted({*optimizers} & {*expected.optimizers} - {*found.optimizers})):
        return (
            f"this machine has torch {found.torch}, which has no torch.optim.{lacking[0]}, but the run trains with "
            f"this optimizer: install a version of torch that has it, such as {expected.torch}, or use another "
            "optimizer in the script."
        )
    return ""


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _fields(classes: Iterable[type]) -> Iterator[str]:
    """Yield the names of the fields of the given classes, and of all classes that occur in these fields.

    The types of the fields are left out, because their notation depends on the version of Python.
    """
    waiting, seen = [*classes], set[type[msgspec.Struct]]()
    while waiting:
        kind: Any = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
            seen.add(kind)
            waiting += [field.type for field in msgspec.structs.fields(kind)]
    return iter(sorted(f"{kind.__qualname__} {' '.join(kind.__struct_fields__)}" for kind in seen))


def _version_of_torch() -> str:
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:  # torch was built without metadata
        return ""


def folder_of_torch() -> Path:
    """Return the folder with the files of torch, without importing torch.

    Raises:
        ModuleNotFoundError: torch is not installed. The command line prints this error, and the same error of
            `import torch`, as a sentence (see `cli.console.run_app`).
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return Path(spec.origin).parent


def _optimizers_of_torch() -> list[str]:
    """Return the names that `torch.optim` exports, from its source; [] if the source cannot be read."""
    spec = find_spec("torch")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        try:
            tree = ast.parse(Path(folder, "optim", "__init__.py").read_bytes())
        except (OSError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
            ):
                return [str(each) for each in ast.literal_eval(node.value)]
    return []
