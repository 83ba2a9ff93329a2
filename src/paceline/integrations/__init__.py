"""Training frameworks that a run can use as they are: `accelerate`, `transformers`, and `lightning`.

Each module is imported only by a script that uses the framework. Outside a run, it leaves the script as it is.

Imports from `errors`, `train`.
"""

from __future__ import annotations

import re
from importlib import metadata

from ..errors import ConfigurationError


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


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
