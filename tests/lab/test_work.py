"""Work of many tasks: what is kept, what is told, and the order of what has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.study import failure_lines
from paceline.errors import RunFailedError
from paceline.lab.pool import EndedTask, Failure, in_processes, work_off
from paceline.studies.description import describe
from paceline.studies.study import run_study


def backwards(
    function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
) -> Iterator[EndedTask[Any]]:
    """A pool whose tasks end in the opposite order, of which the even ones fail."""
    for number in reversed(range(len(tasks))):
        error = None if number % 2 else ValueError(f"{tasks[number]} is even")
        yield EndedTask(number, function(tasks[number]) if error is None else None, error)


def test_failures_are_in_the_order_of_the_tasks_whichever_ends_first() -> None:
    kept: dict[int, int] = {}
    told: list[str] = []
    failures = work_off(
        lambda task: 10 * task,
        range(5),
        kept.__setitem__,
        lambda what, share: told.append(f"{share:.2f} {what}"),
        pool=backwards,
        later=5,
    )
    assert kept == {1: 10, 3: 30}
    assert [failure.name for failure in failures] == ["0", "2", "4"]
    assert told[0] == "0.10 1 of 10, less than a minute left: 4"
    assert told[-1] == "0.50 5 of 10, less than a minute left: 0"


def test_of_many_failures_the_first_ones_are_shown() -> None:
    error = RunFailedError("worker 0", "ValueError: too large", "Traceback\nin line 7")
    failures = [Failure(f"run {number}", error) for number in range(12)]
    lines = failure_lines(failures)
    assert lines[0] == f"failed: run 0: {error}"
    assert "in line 7" in lines[0]
    assert lines[9:] == [
        "failed: run 9: worker 0 failed: ValueError: too large",
        "failed: 2 more; summary.md names all failed runs",
    ]
    assert failure_lines(failures[:10]) == lines[:10]
    assert failure_lines([Failure("run 0", ValueError("too small"))]) == [
        "failed: run 0: ValueError: too small"
    ]


@pytest.mark.processes
def test_on_ray_the_runs_are_those_of_processes(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from paceline.lab.pool import on_ray

    study = describe(
        {
            "problem": "quadratic",
            "models": ["bsp", "asp"],
            "clusters": {"jitter": {"kind": "jitter", "workers": 3}},
            "seeds": 1,
            "arguments": {"iterations": 6},
            "target": {"metric": "loss", "value": 0.5},
        },
        Path.cwd(),
    )
    with on_ray() as pool:
        run_study(study, tmp_path / "ray", pool, lambda what, share: None)
    assert not ray.is_initialized()
    with in_processes(1) as pool:
        run_study(study, tmp_path / "local", pool, lambda what, share: None)
    cells = sorted((tmp_path / "local" / "cells").iterdir())
    assert len(cells) == 2
    for cell in cells:
        assert (tmp_path / "ray" / "cells" / cell.name).read_bytes() == cell.read_bytes()
