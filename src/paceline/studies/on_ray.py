"""The runs of a study as tasks of a Ray cluster.

Every node needs the same version of Paceline, and finds the modules of the study where this program does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..launcher.clusters.ray_run import import_ray
from ..plugins import imported_modules, load_models
from ..rehearsal.process_pool import Ended
from .work import Pool

__all__ = ["on_ray"]


def on_ray(prepare: Callable[[], object] = tuple) -> Pool:
    """Return a pool that carries out each task on one core of the Ray cluster.

    If this program is not connected to a cluster, it is connected while it carries out tasks.

    Args:
        prepare: importable function that is called before each task.

    Raises:
        ConfigurationError: ray is not installed.
    """
    ray = import_ray()

    def carry_out(
        function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
    ) -> Iterator[Ended[Any]]:
        connected = ray.is_initialized()
        if not connected:
            ray.init()
        try:
            once = ray.remote(num_cpus=1, max_retries=0, max_calls=1 if fresh else 0)(_carry_out)
            path = [os.path.abspath(folder) for folder in sys.path if folder]
            pending = {
                once.remote(function, task, prepare, path, imported_modules()): number
                for number, task in enumerate(tasks)
            }
            while pending:
                [ready], _ = ray.wait(list(pending), num_returns=1)
                number = pending.pop(ready)
                try:
                    yield Ended(number, ray.get(ready), None)
                except ray.exceptions.RayTaskError as error:
                    yield Ended(number, None, error.cause or error)
                except ray.exceptions.RayError as error:
                    yield Ended(number, None, error)
        finally:
            if not connected:
                ray.shutdown()

    return carry_out


def _carry_out(
    function: Callable[[Any], Any],
    task: Any,
    prepare: Callable[[], object],
    path: Sequence[str],
    imports: Sequence[str],
) -> Any:
    sys.path += [folder for folder in path if folder not in sys.path]
    load_models("", imports)
    prepare()
    return function(task)
