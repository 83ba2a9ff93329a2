"""Training frameworks that a run can use as they are: `accelerate`, `transformers`, and `lightning`.

Each module is imported only by a script that uses the framework. Outside a run, the module leaves the script as it is.

Imports from `errors`, `train`.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import Any

import torch

from ..errors import ConfigurationError
from ..train.collectives import reduce

MOST_BYTES = 4096
"""Maximum size of the JSON text that `broadcast` sends."""


def require(package: str, least: str, extra: str) -> None:
    """Raise `ConfigurationError` unless a framework is installed in a version that its integration works with.

    Args:
        package: name of the framework's distribution.
        least: the oldest version, such as "4.57".
        extra: the extra of Paceline that installs the framework.

    Example:
        >>> require("torch", "999", "lightning")
        Traceback (most recent call last):
            ...
        paceline.errors.ConfigurationError: paceline.integrations.lightning needs torch 999 or later, but ...
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = None
    if found is not None and _numbers(found) >= _numbers(least):
        return
    present = "it is not installed" if found is None else f"{found} is installed"
    raise ConfigurationError(
        f"paceline.integrations.{extra} needs {package} {least} or later, but {present}. Install it with: "
        f"pip install 'paceline[{extra}]'"
    )


def broadcast(obj: Any, *, sends: bool) -> Any:
    """Return the object of one worker, in all workers. All workers must make this call together.

    Args:
        obj: a text or a number. If the JSON text of an object has more than `MOST_BYTES`, each worker gets its own
            object.
        sends: True in the worker whose object is returned. If no worker sends, each worker gets its own object.
    """
    own = json.dumps(obj).encode()
    sent = torch.zeros(2 + MOST_BYTES, dtype=torch.float64)
    if sends and len(own) <= MOST_BYTES:
        sent[:2] = torch.tensor([1, len(own)])
        sent[2 : 2 + len(own)] = torch.tensor(list(own))
    found = reduce(sent, "sum")
    # When the main worker is lost, its successor may have sent the same object, so divide by the number of senders.
    senders, size, *content = map(int, (found / found[0].clamp(min=1)).tolist())
    return json.loads(bytes(content[:size])) if senders else obj


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
