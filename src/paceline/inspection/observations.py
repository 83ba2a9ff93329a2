"""What is observed while a script runs, as records in a file for each process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["Kind", "Observation", "Observations", "read_observations"]

Kind = Literal[
    "asked",  # the script asked for the index or the number of workers; detail: the function
    # The script computed a loss that compares the samples of a batch with one another. Detail: their number.
    "compared",
    "clipped",  # the script clipped gradients; detail: the function
    "distributed",  # a loader was distributed; detail: identity of the loader
    "gradient",  # an optimizer made a step; detail: digest of the gradients
    "hyper-parameters",  # an optimizer made a step; detail: its hyper-parameters
    "imported",  # a file of the user was imported
    "initialized",  # first forward pass; detail: digest of the weights before it
    "looped",  # the script began a loop over paceline.epochs; detail: "<epochs> <updates>", 0 for no limit
    "looped by progress",  # the same, if no number of epochs limits the loop; detail: what does
    "measured",  # the script called len() of a loader; detail: identity of the loader
    "measured part",  # the script called len() of a distributed loader
    "metric",  # the script stepped a scheduler with a metric; detail: the metric
    # A scheduler was prepared, so it follows the progress of the job. Detail: "<length> <batches>", the length of the
    # schedule and the number of batches in an epoch of the given loader; 0 if they are not known.
    "prepared schedule",
    "raised",  # the script failed; detail: the error
    "seeded",  # the script seeded a random generator; detail: the function and the seed
    "scheduled",  # the script stepped a scheduler that was not prepared; detail: the scheduler
    "stepped",  # an optimizer made a step; detail: "distributed", or the class of an optimizer that is not
    "timed out",  # the script did not make the wanted number of iterations in time
    "warned",  # Paceline logged a warning; detail: the text
    "wrote",  # the script opened a file for writing; detail: the path
]


class Observation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that a script did.

    Attributes:
        kind: what the script did.
        detail: see `Kind`.
        file: the user's file that did it; "" if it is unknown.
        line: the line in this file.
        iteration: number of optimizer steps that had been made before.
    """

    kind: Kind
    detail: str = ""
    file: str = ""
    line: int = 0
    iteration: int = 0


class Observations:
    """Writes observations to a file, one per line, so that none is lost if the process is killed.

    An observation that equals an earlier one is not written again.

    Args:
        path: the file, which is created.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._seen: set[Observation] = set()

    def add(self, observation: Observation) -> None:
        """Write an observation."""
        if observation not in self._seen:
            self._seen.add(observation)
            self._file.write(msgspec.json.encode(observation) + b"\n")


def read_observations(path: Path) -> list[Observation]:
    """Return the observations in a file, in order; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Observation) for line in path.read_bytes().splitlines()]
