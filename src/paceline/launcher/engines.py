"""The engines of `launch`: where the processes of a run are placed, and how the launcher hears of their end.

The local engine starts all processes on this machine (see `live_run.local`). Any other engine places *programs* on
machines: one that serves the run (see `live_run.run`), and one for each worker, which joins it (see
`clusters.join`). Each program starts the processes of its machine as the local engine does, and tells the
coordinator how they end. So such an engine knows nothing of servers and workers; it only places its programs again if
they end too early.

A scheduler that starts the programs by itself, such as Slurm, needs no engine (see `clusters.scheduled`).
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from msgspec import structs
from rich.console import Console

from .. import __version__
from ..errors import ConfigurationError
from ..outlets.wanted import Outlets
from ..runtime.job import Job
from ..settings import Settings
from ..wire.addresses import TRANSPORTS
from ..wire.secret import new_secret, take_secret
from .clusters.ray_run import import_ray, start_on_ray
from .live_run.local import Placement
from .live_run.run import start
from .live_run.run_results import RunResult
from .processes.devices import assign_devices
from .terminal.channels import Streams

__all__ = ["ENGINES", "Asked", "Engine", "Local"]


class Asked(NamedTuple):
    """What the caller of `launch` asks of an engine. See `launch` for all attributes but the last.

    Attributes:
        source: the source of the training function; "" if it cannot be read.
    """

    workers: int | tuple[int, int] | None
    devices: str | torch.device | Sequence[str | torch.device] | None
    placement: Placement | None
    resources: Mapping[str, float] | None
    snapshot_every_s: float | None
    show_all: bool
    settings: Settings
    source: str


class Engine(ABC):
    """Where `launch` places the processes of a run.

    Attributes:
        name: the name by which users choose it.
    """

    name: ClassVar[str]

    @abstractmethod
    def options(self, asked: Asked) -> dict[str, Any]:
        """Return the arguments of `make_job` that the engine decides. They replace those that the user has set.

        Raises:
            ConfigurationError: the engine does not have what the user asks for.
        """

    @abstractmethod
    def start(self, job: Job, payload: bytes, asked: Asked, console: Console, outlets: Outlets) -> RunResult:
        """Place the processes of a run, wait until all of them have ended, and return the result.

        Args:
            job: the configuration of the run. The run directory does not exist yet.
            payload: the module search path and the training function, for each worker.
            asked: what the user asks for.
            console: console for messages.
            outlets: where the run is shown while it goes on.

        Raises:
            RunFailedError: a process has failed, or could not be placed.
            KeyboardInterrupt: Ctrl-C was pressed.
        """


class Local(Engine):
    """All processes run on this machine."""

    name = "local"

    def options(self, asked: Asked) -> dict[str, Any]:
        workers, settings = asked.workers, asked.settings
        if isinstance(workers, tuple) or asked.resources is not None:
            given = "resources is given" if asked.resources is not None else f"workers is {workers!r}"
            raise ConfigurationError(
                f"{given}, but engine is {self.name!r}; this needs engine {OnRay.name!r}."
            )
        imports, masked = settings.get("imports", ()), not settings.get("torchrun_env")
        assigned = assign_devices(asked.devices, workers, usual=2, imports=imports, masked=masked)
        return {"workers": assigned.workers, "devices": assigned.devices}

    def start(self, job: Job, payload: bytes, asked: Asked, console: Console, outlets: Outlets) -> RunResult:
        return start(
            job,
            ["function"],
            payload,
            sys.path,
            console=console,
            snapshot_every_s=asked.snapshot_every_s,
            placement=asked.placement,
            streams=Streams(show_all=asked.show_all),
            source=asked.source,
            outlets=outlets,
            force=asked.settings.get("force", False),
        )


class OnRay(Engine):
    """A Ray cluster places the workers, and the coordinator together with the servers. See `clusters.ray_run`."""

    name = "ray"

    def options(self, asked: Asked) -> dict[str, Any]:
        import_ray()
        workers, settings = asked.workers, asked.settings
        transport = settings.get("transport", "auto")
        if transport not in ("auto", *(name for name, each in TRANSPORTS.items() if each.spans_machines)):
            raise ConfigurationError(
                f"transport is {transport!r}, but the nodes of a Ray cluster are connected by 'tcp'; omit transport."
            )
        if workers is None:
            raise ConfigurationError(
                "workers is None, but engine 'ray' needs their number, such as 4 or (2, 16)."
            )
        given = {
            "torchrun_env": settings.get("torchrun_env", False),
            "devices": asked.devices is not None,
            "placement": asked.placement is not None,
        }
        if name := next((name for name, is_given in given.items() if is_given), ""):
            raise ConfigurationError(
                f"{name} cannot be used with engine 'ray', because Ray places the workers; omit it."
            )
        outlets = ("dashboard", "tensorboard", "metrics_port")
        if any(settings.get(name) not in (None, False) for name in outlets):
            raise ConfigurationError(
                "dashboard, tensorboard and metrics_port cannot be used with engine 'ray', because Ray places the "
                "coordinator; omit them."
            )
        least, most = workers if isinstance(workers, tuple) else (workers, workers)
        return {
            "workers": most,
            "least": least,
            "pause_below": least if isinstance(workers, tuple) else 1,
            "joined": True,
            "servers": settings.get("servers") or 1,
            "transport": "tcp",
        }

    def start(self, job: Job, payload: bytes, asked: Asked, console: Console, outlets: Outlets) -> RunResult:
        token = take_secret(os.environ) or new_secret()
        return start_on_ray(
            structs.replace(job, version=__version__, token=token, secure=True),
            payload,
            sys.path,
            resources={"CPU": 1.0} if asked.resources is None else asked.resources,
            console=console,
            snapshot_every_s=asked.snapshot_every_s,
            show_all=asked.show_all,
            source=asked.source,
            force=asked.settings.get("force", False),
        )


ENGINES: dict[str, Engine] = {each.name: each for each in (Local(), OnRay())}
"""Name -> engine."""
