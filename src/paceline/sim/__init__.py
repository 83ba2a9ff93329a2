"""Virtual time: the same sync models, shards and front end, hosted by a heap of events.

- `simulate`: a run, of a few workers or thousands, with or without gradients; a `SimResult`.
- `Cluster`: the machines, with `Presence` and `Link` for the unusual ones.
- `Constant`, `Uniform`, `LogNormal`, `Pareto`, `Recorded`, `Drifting`, `Occasional`: how long things take.

>>> simulate(Cluster(compute_s=[1.0, 1.0, Uniform(low=2.0, high=4.0)]), "ssp:staleness=3").updates
300
"""

from .cluster import Cluster
from .cluster_file import PRESETS
from .machines import Link, Presence
from .result import Loss, SimResult
from .simulate import simulate
from .times import Constant, Drifting, LogNormal, Occasional, Pareto, Recorded, Times, Uniform

__all__ = [
    "PRESETS",
    "Cluster",
    "Constant",
    "Drifting",
    "Link",
    "LogNormal",
    "Loss",
    "Occasional",
    "Pareto",
    "Presence",
    "Recorded",
    "SimResult",
    "Times",
    "Uniform",
    "simulate",
]
