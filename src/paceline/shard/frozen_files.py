"""Files in the run directory with the values of frozen parameters, from which the whole model is put together.

The servers do not have these values if all workers have loaded the same. Therefore, the initializer writes them to
the run directory before training begins, one file for each value, named by its digest. The launcher reads the files
when it needs the whole model, and removes them at the end of the run. A worker on a machine that has joined the run
writes none, because its run directory is on another machine than the launcher's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ..core.protocol.model_spec import FrozenSpec
from ..errors import ConfigurationError
from ..files import Unfinished
from .buffer_bytes import packed_bytes
from .vectors import torch_dtype

__all__ = ["read_frozen", "remove_frozen", "require_complete", "write_frozen"]


def _path(run_dir: Path, spec: FrozenSpec) -> Path:
    return run_dir / "frozen" / spec.digest


def write_frozen(run_dir: Path, spec: FrozenSpec, parts: Iterable[memoryview]) -> None:
    """Write the bytes of a frozen parameter, unless they have been written already.

    Raises:
        OSError: they cannot be written.
    """
    path = _path(run_dir, spec)
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    with Unfinished(path) as place, place.open("wb") as file:
        for part in parts:
            file.write(part)


def read_frozen(run_dir: Path, spec: FrozenSpec) -> torch.Tensor | None:
    """Return a frozen parameter, which is read from its file when it is used; None if there is no such file."""
    path, size_bytes = _path(run_dir, spec), packed_bytes(spec)
    if not path.exists() or path.stat().st_size != size_bytes:
        return None
    if not size_bytes:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    data = torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8)
    return data.view(torch_dtype(spec.dtype)).reshape(spec.shape)


def remove_frozen(run_dir: Path) -> None:
    """Remove the files. Tensors that were read from them remain valid."""
    shutil.rmtree(run_dir / "frozen", ignore_errors=True)


def require_complete(name_of: Mapping[str, str], found: Iterable[str]) -> None:
    """Check that values with all requested digests have been found. `name_of` maps them to names of parameters.

    Raises:
        ConfigurationError: no worker of the run has one of these values any more.
    """
    if absent := name_of.keys() - set(found):
        name = min(name_of[digest] for digest in absent)
        raise ConfigurationError(
            f"The frozen parameter {name!r} has another value here than in the run, and no worker can send the run's "
            "value. Load the frozen parameters from the same checkpoint in all workers, or seed the random "
            "generators in the same way before the model is built."
        )
