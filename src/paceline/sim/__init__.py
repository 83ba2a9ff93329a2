"""Discrete-event simulation of runs in virtual time, with the same sync models, shards and front end as a live run.

- `simulate` simulates a run with any number of workers, with or without gradients, and returns a `SimResult`.
- `Cluster` describes the machines and the network. `Presence`, `Link` and `Outside` are settings for single workers.
- `Dataset` describes the data that workers use up in a simulation without gradients.
- `Constant`, `Uniform`, `LogNormal`, `Pareto`, `Recorded`, `Resampled`, `Timed`, `Scaled`, `Drifting`, `Occasional`
  and `Sum` are distributions of durations. `Law` is the interface of your own distributions, and `read_delays` reads
  measured durations from a CSV file.
- `Pause` and `Uplink` describe pauses and links that several workers share.

>>> simulate(Cluster(compute_s=[1.0, 1.0, Uniform(low=2.0, high=4.0)]), "ssp:staleness=3").updates
300

Read first: `simulate`, then `simulated_job`, the host of the cores in virtual time. `virtual_training` adds gradients.

Imports from `errors`, `files`, `sync`, `core`, `trace`, `shard`, `settings` and `train`.
"""

from .clockwork import Dataset
from .cluster import Cluster
from .cluster_file import PRESETS
from .result import Loss, SimResult
from .simulate import simulate
from .times import (
    Constant,
    Drifting,
    Law,
    Link,
    LogNormal,
    Occasional,
    Outside,
    Pareto,
    Pause,
    Presence,
    Recorded,
    Resampled,
    Scaled,
    Sum,
    Timed,
    Times,
    Uniform,
    Uplink,
    read_delays,
)

__all__ = [
    "PRESETS",
    "Cluster",
    "Constant",
    "Dataset",
    "Drifting",
    "Law",
    "Link",
    "LogNormal",
    "Loss",
    "Occasional",
    "Outside",
    "Pareto",
    "Pause",
    "Presence",
    "Recorded",
    "Resampled",
    "Scaled",
    "SimResult",
    "Sum",
    "Timed",
    "Times",
    "Uniform",
    "Uplink",
    "read_delays",
    "simulate",
]
