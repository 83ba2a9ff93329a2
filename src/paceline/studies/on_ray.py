"""The runs of a study as tasks of a Ray cluster.

Every node needs the same version of Paceline, and finds the modules of the study where this program does.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..plugins import imported_modules, load_models
from ..rehearsal.process_pool import Ended
from .work import Pool

__all__ = ["on_ray"]


@contextlib.contextmanager
def on_ray(prepare: Callable[[], object] = tuple) -> Iterator[Pool]:
    """Return a context with a pool that carries out each task on one core of the Ray cluster.

    If this program is not connected to a cluster, it is connected inside the context.

    Args:
        prepare: importable function that is called before each task.

    Raises:
        ConfigurationError: ray is not installed.
    """
    from ..launcher.clusters.ray_run import import_ray  # importing torch takes seconds

    ray = import_ray()
    connected = ray.is_initialized()
    if not connected:
        ray.init()
    path = [os.path.abspath(folder) for folder in sys.path if folder]

    def carry_out(
        function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
    ) -> Iterator[Ended[Any]]:
        once = ray.remote(num_cpus=1, max_retries=0, max_calls=1 if fresh else 0)(_carry_out)
        pending = {
            once.remote(function, task, prepare, path, imported_modules()): number
            for number, task in enumerate(tasks)
        }
        try:
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
            for each in pending:
                ray.cancel(each, force=True)

    try:
        yield carry_out
    finally:
        if not connected:
            ray.shutdown()


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
