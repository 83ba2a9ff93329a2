"""Discrete-event simulation of runs in virtual time, with the same sync models, shards and front end as a live run.

- `simulate` simulates a run with any number of workers, with or without gradients, and returns a `SimResult`.
- `Cluster` describes the machines and the network. `Presence` and `Link` are settings for individual workers.
- `Dataset` describes the data that workers use up in a simulation without gradients.
- `Constant`, `Uniform`, `LogNormal`, `Pareto`, `Recorded`, `Resampled`, `Scaled`, `Drifting`, `Occasional` and `Sum`
  are distributions of durations.

>>> simulate(Cluster(compute_s=[1.0, 1.0, Uniform(low=2.0, high=4.0)]), "ssp:staleness=3").updates
300
"""

from .clockwork import Dataset
from .cluster import Cluster
from .cluster_file import PRESETS
from .result import Loss, SimResult
from .simulate import simulate
from .times import (
    Constant,
    Drifting,
    LogNormal,
    Occasional,
    Pareto,
    Recorded,
    Resampled,
    Scaled,
    Sum,
    Times,
    Uniform,
)
from .worker_settings import Link, Presence

__all__ = [
    "PRESETS",
    "Cluster",
    "Constant",
    "Dataset",
    "Drifting",
    "Link",
    "LogNormal",
    "Loss",
    "Occasional",
    "Pareto",
    "Presence",
    "Recorded",
    "Resampled",
    "Scaled",
    "SimResult",
    "Sum",
    "Times",
    "Uniform",
    "simulate",
]
