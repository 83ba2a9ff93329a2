"""The function `study`, which runs a study and writes its tables and figures."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..files import Unfinished
from ..lab.pool import Failure, TaskPool, Tell, in_processes, work_off
from ..look.timelines import NO_MATPLOTLIB, can_draw, save
from .cells import (
    Cell,
    CellTask,
    Folder,
    Outcome,
    choose,
    cut_off,
    evaluated_cells,
    prepare,
    run_cell,
    task_of,
    tuning_cells,
)
from .description import Study, describe, read_study_file
from .figures import names_of, pictures_of
from .pages import curves_csv, runs_csv, summary_md, table_tex
from .results import StudyResult, make_result

log = logging.getLogger("paceline.studies")

NO_FIGURES = (
    "the figures are left out, and can be drawn from the same results by repeating the study with matplotlib: "
    f"{NO_MATPLOTLIB}"
)
"""The message before a study starts on a machine without matplotlib. The message ends with a command to copy."""


def study(
    description: str | Path | Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    processes: int | None = None,
    tell: Tell = lambda what, share: None,
    **entries: Any,
) -> StudyResult:
    """Compare sync models on simulated clusters, and write tables and figures.

    Every run trains on a simulated cluster, in virtual time. Runs are carried out in several processes, and each result
    is written when its run has ended. If a study was interrupted, the same call makes the missing runs. The files
    are the same to the byte, whether the study was interrupted or not, and with any number of processes. In a script,
    call `study` below `if __name__ == "__main__":`, because each process imports the script. Without matplotlib, the
    figures are left out, and a warning is logged.

    Args:
        description: the path of a study file (see `docs/how-to/study.md`), or its entries as a mapping. Alternatively,
            the entries may be further arguments: `study(train=train, models=["bsp", "asp"], ...)`. In Python, `train`
            may be a function object, and each cluster may be a `Cluster`.
        out: folder for the results: a new folder, or the folder of the same study.
        processes: number of processes. Default: one for each core.
        tell: progress callback, which receives the current task and the fraction of all runs that have ended.

    Raises:
        ConfigurationError: an entry is not valid, or the folder belongs to another study. Nothing was started.
    """
    if isinstance(description, str | Path):
        if entries:
            raise ConfigurationError(
                f"the study is {str(description)!r}, and {', '.join(entries)} is given as well, expected either a "
                "study file or entries."
            )
        found = read_study_file(Path(description))
    else:
        found = describe({**(description or {}), **entries}, Path.cwd())
    if not can_draw():
        log.warning(NO_FIGURES)
    with in_processes(processes, prepare) as pool:
        result = run_study(found, Path(out), pool, tell)
    write(result, Path(out))
    return result


def run_study(study: Study, out: Path, pool: TaskPool, tell: Tell) -> StudyResult:
    """Make the runs of a study that are missing in its folder, and return the result.

    Raises:
        ConfigurationError: see `study`; also if the training function does not log the metric of the target.
    """
    folder = Folder(out, study.identity)
    tuning = tuning_cells(study)
    most = len(tuning) + len(study.clusters) * len(study.contenders) * len(study.seeds)
    runs = _Runs(study, folder, pool, tell, most)
    runs.make(tuning)
    choices = choose(study, folder.read)
    evaluated = evaluated_cells(study, choices)
    runs.make(evaluated)
    folder.remove_others([*tuning, *evaluated])
    return make_result(study, choices, folder.read, tuning, runs.failures)


class _Runs:
    """Makes the cells of a study that are missing in its folder.

    Args:
        study: the study.
        folder: its folder.
        pool: where the cells are run.
        tell: progress callback.
        most: number of all cells of the study.

    Attributes:
        failures: the cells that have failed.
    """

    def __init__(self, study: Study, folder: Folder, pool: TaskPool, tell: Tell, most: int) -> None:
        self.failures: list[Failure] = []
        self._study, self._folder, self._pool, self._tell, self._most = study, folder, pool, tell, most
        self._done = 0
        self._logged = False  # True once a run has logged the metric

    def make(self, cells: Sequence[Cell]) -> None:
        """Run those of the given cells whose results are missing."""
        missing = []
        for cell in cells:
            if (outcome := self._folder.read(cell)) is None:
                missing.append(cell)
            else:
                self._logged |= self._study.target.metric in outcome.metrics
        self._done += len(cells) - len(missing)
        self.failures += work_off(
            run_cell,
            [task_of(self._study, cell) for cell in missing],
            self._keep,
            self._tell,
            pool=self._pool,
            name_of=lambda task: str(task.cell),
            fresh=self._study.trained.fresh,
            done=self._done,
            later=self._most - self._done - len(missing),
        )
        self._done += len(missing)

    def _keep(self, task: CellTask, outcome: Outcome) -> None:
        """Write a result. End the study if a run has ended by itself, and no run has logged the target's metric."""
        self._logged |= self._study.target.metric in outcome.metrics
        if not self._logged and not cut_off(outcome, self._study.budget):
            self._refuse(outcome)
        self._folder.write(task.cell, outcome)

    def _refuse(self, outcome: Outcome) -> None:
        """Discard the folder, and raise `ConfigurationError`, because a run has not logged the metric."""
        metric = self._study.target.metric
        self._folder.discard()
        logged = f"only {', '.join(outcome.metrics)}" if outcome.metrics else "nothing"
        raise ConfigurationError(
            f"the target is the metric {metric!r}, but a run of {self._study.trained.title} has logged {logged}: "
            f"call paceline.log({metric}=...) in it, or name another metric in target.metric."
        )


def write(result: StudyResult, out: Path) -> None:
    """Write the tables, the summary and, with matplotlib, the figures of a study into its folder."""
    drawn = can_draw()
    figures = names_of(result) if result.rows and drawn else []
    for name, text in {
        "runs.csv": runs_csv(result),
        "curves.csv": curves_csv(result),
        "table.tex": table_tex(result),
        "summary.md": summary_md(result, figures, "" if drawn else NO_FIGURES),
    }.items():
        with Unfinished(out / name) as place:
            place.write_text(text, encoding="utf-8")
    if drawn:
        (out / "figures").mkdir(exist_ok=True)
    for name, figure in (pictures_of(result) if figures else {}).items():
        for ending in ("pdf", "png"):
            save(figure, out / "figures" / f"{name}.{ending}")
