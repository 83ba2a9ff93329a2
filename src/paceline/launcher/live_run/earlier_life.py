"""A run that goes on from a checkpoint: what its directory keeps of the time before, and what the user is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import MsgspecError

from ...core.protocol.job_cut import JobCut
from ...errors import ConfigurationError
from ...report.run_file import NAME, Resumption, RunFile, read_run_file
from ...runtime.job import CHECKPOINTS, Job
from ...runtime.resuming import SOURCE, cut_of
from ...runtime.run_lock import is_lock
from ...sync.ticks import TICKS_PER_S
from ...trace.digest import Digest
from ...trace.run_dir import set_aside
from ...wire.secret import SECRET

__all__ = ["Earlier", "make_room"]

log = logging.getLogger("paceline.run")

QUIET = ("--devices", "--transport")
"""Options whose usual values depend on the machine, so that a change is not worth a word."""


class _Progress(NamedTuple):
    """How far a job has come: updates, samples that updates include, and seconds, over all runs of the job."""

    updates: int
    samples: int
    elapsed_s: float


class Earlier(NamedTuple):
    """What is known of the time before a run goes on.

    Attributes:
        cut: the state of the job with which the run goes on.
        checkpoint: the directory of the checkpoint.
        faults: a sentence for each newer checkpoint, which says why it is not used.
        file: the description of the run before; None if it cannot be read.
        progress: how far the job had come; None if this cannot be read.
    """

    cut: JobCut
    checkpoint: str
    faults: tuple[str, ...]
    file: RunFile | None
    progress: _Progress | None

    def resumption(self, now: RunFile, why: str) -> Resumption:
        """Return the description of the interruption.

        Args:
            now: the description of the run that goes on.
            why: why the run was interrupted, as a sentence; "" if a user has resumed it.
        """
        at, lost = _reached(self.cut), self.progress
        before = {} if self.file is None else {each.name: each.value for each in self.file.settings}
        changes = [
            f"{each.name} {before[each.name] or 'none'} -> {each.value or 'none'}"
            for each in now.settings
            if each.name in before and before[each.name] != each.value and each.name not in QUIET
        ]
        return Resumption(
            why=why,
            begun_at=now.begun_at,
            checkpoint=self.checkpoint,
            updates=at.updates,
            samples=at.samples,
            elapsed_s=at.elapsed_s,
            lost_updates=None if lost is None else max(0, lost.updates - at.updates),
            lost_samples=None if lost is None else max(0, lost.samples - at.samples),
            lost_s=None if lost is None else max(0.0, lost.elapsed_s - at.elapsed_s),
            changes=tuple(changes),
            faults=self.faults,
        )


def make_room(job: Job) -> Earlier:
    """Move what a run has written to its directory into a folder of it, because the run goes on there.

    Raises:
        ConfigurationError: the directory cannot be written, or the checkpoint cannot be read.
    """
    assert job.resumed is not None
    run_dir, cut = Path(job.run_dir), cut_of(job.resumed)
    try:
        file = read_run_file(run_dir)
    except (OSError, MsgspecError):
        file = None
    folder = set_aside(
        run_dir,
        Path(job.resumed.path).name,
        # This process writes and removes files of the lock meanwhile.
        stays=lambda name: name in (CHECKPOINTS, NAME, SOURCE, SECRET) or is_lock(name),
    )
    return Earlier(cut, job.resumed.path, job.resumed.faults, file, _progress_in(folder, file))


def _reached(cut: JobCut) -> _Progress:
    """Return how far a job had come at a cut."""
    first = cut.shards[0]
    return _Progress(first.version, first.samples, cut.elapsed_s)


def _progress_in(folder: Path, file: RunFile | None) -> _Progress | None:
    """Return how far a job had come when a run ended, from the traces of the run; None if they cannot be read."""
    before: Sequence[Resumption] = () if file is None else file.resumptions
    samples, elapsed_s = (before[-1].samples, before[-1].elapsed_s) if before else (0, 0.0)
    try:
        digest = Digest(folder, only_statistics=True)
        digest.advance()
        measures = digest.meter.measures()
    except (ConfigurationError, OSError, MsgspecError) as error:
        log.info("the traces in %s cannot be read: %s", folder, error)
        return None
    end_s = max(shard.now for shard in digest.meter.state.shards) / TICKS_PER_S
    return _Progress(measures.updates, samples + measures.samples, elapsed_s + end_s)
