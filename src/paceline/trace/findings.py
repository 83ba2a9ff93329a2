"""Describes in sentences what was wrong with a run, or could be better, and what would help.

Pushes that were never applied come first, because such a run trains less than its speed promises. The other sentences
are about time that the workers lost, and about unusual clipping.

A sentence about time appears only if the statistics support it: the lost time must be at least 5 % of the run and at
least one second. Clipping by each worker is named whenever it occurs, because it changes the result.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from statistics import fmean

from .measures import Measures
from .unapplied import unapplied_pushes

__all__ = ["find"]

LEAST_SHARE = 0.05
LEAST_S = 1.0
# The workers' iteration counts are considered equal if the smallest is at least this fraction of the largest.
EQUAL = 0.95
# The workers' waiting times are considered uneven if the shortest is at most this fraction of the mean.
UNEVEN = 0.5

OTHER_MODEL = (
    "Under a sync model without a barrier in every iteration, data is handed out on demand: try --sync asp or "
    "--sync elastic-bsp."
)
BALANCED = "Try --batch balanced, which makes the size of each worker's batch proportional to its speed."
BALANCED_LOCKSTEP = f"{BALANCED} The joint batch of all workers stays the same."
DISTRIBUTE = (
    "Omit split='static' in paceline.distribute(loader), so that data is handed out on demand, or try "
    "--batch balanced, which makes the shares proportional to the workers' speeds."
)


def find(
    measures: Measures, *, lockstep: bool, balanced: bool = False, run_dir: str | None = None
) -> list[str]:
    """Return sentences about pushes that were never applied, lost time, and clipping.

    If all pushes were applied or dropped, and the workers lost little time and did not clip their own gradients, the
    result is [].

    Args:
        measures: the statistics of the run.
        lockstep: True if the sync model keeps all workers in lockstep, as `bsp` does. Its epochs are split into equal
            shares, and it has a barrier in every iteration.
        balanced: True if the run had balanced batches, which are then not suggested.
        run_dir: the run directory, to be named in the command that compares the sync models. Default: the command is
            not mentioned.
    """
    sentences, hints = _idle(measures, lockstep, balanced)
    waiting, more = _waiting(measures, lockstep, balanced)
    advice = []
    if waiting and run_dir is not None:
        command = f"paceline advise {shlex.quote(run_dir)}"
        advice = [f"To compare the sync models on these machines, run: {command}"]
    unapplied = unapplied_pushes(measures.pushes, measures.unapplied)
    # Both causes may have the same hint.
    return list(
        dict.fromkeys(
            [*filter(None, [unapplied]), *_clipping(measures), *sentences, *waiting, *hints, *more, *advice]
        )
    )


def _clipping(measures: Measures) -> list[str]:
    """Return a sentence about gradients that workers clipped before they were averaged, and a hint."""
    if not measures.clipped_alone:
        return []
    share = f"{measures.clipped_alone} of {measures.pushes.averaged} averaged gradients were"
    if measures.clipped_alone == measures.pushes.averaged:
        share = "The averaged gradients were"
    return [
        f"{share} clipped by each worker before they were averaged (torch.nn.utils.clip_grad_norm_), which differs "
        "from clipping the joint gradient, as a single process does.",
        "To clip the joint gradient, call optimizer.clip_grad_norm(max_norm) between backward() and step() instead.",
    ]


def _idle(measures: Measures, lockstep: bool, balanced: bool) -> tuple[list[str], list[str]]:
    """Return sentences about workers that had finished while others were still working, and hints."""
    least_s = max(LEAST_S, LEAST_SHARE * measures.duration_s)
    idle_s = {worker: time_s for worker, time_s in measures.idle_s.items() if time_s >= least_s}
    if not idle_s:
        return [], []
    working = [worker for worker, left_s in measures.left_s.items() if measures.duration_s - left_s < least_s]
    who = f"{len(idle_s)} workers were" if len(idle_s) > 1 else f"Worker {next(iter(idle_s))} was"
    sentence = (
        f"{who} idle for the last {_range(idle_s.values(), '{:.1f}')} s "
        f"({_range([time_s / measures.duration_s for time_s in idle_s.values()], '{:.0%}')} of the run), because "
        f"{_names(working)} {'were' if len(working) > 1 else 'was'} still working."
    )
    # If the remaining workers hardly pushed toward the end, their scripts did something other than training.
    pushed_s = max((measures.last_push_s.get(worker, 0.0) for worker in working), default=0.0)
    if measures.duration_s - pushed_s > max(idle_s.values()) / 2:
        others = "Their last pushes" if len(working) > 1 else "Its last push"
        return [
            sentence,
            f"{others} arrived {measures.duration_s - pushed_s:.1f} s before the end: after that, the script did "
            "something other than training, such as evaluating the model.",
        ], []
    counts = [measures.iterations[worker] for worker in [*idle_s, *working]]
    # Balanced batches are unequal shares, even if the iteration counts are equal.
    if balanced or min(counts) < EQUAL * max(counts):
        return [sentence], []
    equal = f"All of them had equal shares ({_range(counts, '{}')} iterations each), although their speeds differ."
    return [sentence, equal], [BALANCED_LOCKSTEP, OTHER_MODEL] if lockstep else [DISTRIBUTE]


def _waiting(measures: Measures, lockstep: bool, balanced: bool) -> tuple[list[str], list[str]]:
    """Return sentences about the time for which workers waited for the answers to their pulls, and hints."""
    mean_s = fmean(measures.waiting_s.values()) if measures.waiting_s else 0.0
    if measures.waiting_share < LEAST_SHARE or mean_s < LEAST_S:
        return [], []
    what = "at the barrier of each iteration" if lockstep else "for the answers to their pulls"
    share = f"Workers waited {what} for {measures.waiting_share:.0%} of their time ({mean_s:.1f} s each, on average)"
    shortest = min(measures.waiting_s, key=lambda worker: measures.waiting_s[worker])
    uneven = measures.waiting_s[shortest] <= UNEVEN * mean_s
    if uneven:
        share += f"; worker {shortest} waited least ({measures.waiting_s[shortest]:.1f} s)"
    hints = []
    # Balanced batches help if the same workers always wait for the same others.
    if uneven and not balanced:
        hints.append(BALANCED_LOCKSTEP if lockstep else BALANCED)
    if lockstep:
        hints.append(OTHER_MODEL)
    return [f"{share}."], hints


def _range(numbers: Collection[float], form: str) -> str:
    """Return the smallest and the largest number as text, or one number if both have the same text."""
    least, most = form.format(min(numbers)), form.format(max(numbers))
    return least if least == most else f"{least} to {most}"


def _names(workers: Sequence[int]) -> str:
    """Return the workers as text, for example "workers 2 and 3"."""
    if len(workers) == 1:
        return f"worker {workers[0]}"
    first = ", ".join(str(worker) for worker in workers[:-1])
    return f"workers {first} and {workers[-1]}"
