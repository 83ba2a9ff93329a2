"""The options that say how a run trains. All commands that start a run take them.

A command takes them as `**settings: Unpack[JobSettings]`, and passes them on to `make_job` in the same way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, get_type_hints

from .options import (
    BatchOption,
    GuardOption,
    HyperparametersOption,
    Imports,
    OnNanOption,
    OverlapOption,
    Seed,
    Shards,
    SlicingOption,
    SplitOption,
    StallTimeout,
    Sync,
    TracesOption,
    WireOption,
)

__all__ = ["JobSettings", "as_options", "takes_job_settings"]


class JobSettings(TypedDict):
    """The values of these options; see `make_job` for their meaning."""

    sync: Sync
    imports: Imports
    shards: Shards
    slicing: SlicingOption
    overlap: OverlapOption
    split: SplitOption
    batch: BatchOption
    seed: Seed
    on_nan: OnNanOption
    hyperparameters: HyperparametersOption
    wire: WireOption
    guard: GuardOption
    traces: TracesOption
    stall_timeout: StallTimeout


DEFAULTS = JobSettings(
    sync="bsp",
    imports=[],
    shards=None,
    slicing="even",
    overlap="shards",
    split="auto",
    batch="equal",
    seed=0,
    on_nan="stop",
    hyperparameters="translated",
    wire="float32",
    guard=None,
    traces="recent",
    stall_timeout=None,
)

HINTS: dict[str, Any] = get_type_hints(JobSettings, include_extras=True)


def takes_job_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each setting, in place of its parameter `**settings`.

    In the help text, the options precede `--run-dir`.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    options = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=HINTS[name]
        )
        for name, default in DEFAULTS.items()
    ]
    place = [parameter.name for parameter in own].index("run_dir")
    parameters = [*own[:place], *options, *own[place:]]

    @functools.wraps(command)
    def with_settings(**values: Any) -> None:
        command(**values)

    with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_settings


def as_options(settings: JobSettings) -> list[str]:
    """Return the settings as they are written on a command line, except those that have their default value."""
    words = [f"--import={name}" for name in settings["imports"]]
    for name, value in settings.items():
        if name != "imports" and value != DEFAULTS[name]:  # type: ignore[literal-required]
            words.append(f"--{name.replace('_', '-')}={value}")
    return words
