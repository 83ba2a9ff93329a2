"""Synchronization models, which decide whether workers may continue or must wait.

Each model has its own module. A model receives events and returns actions that depend only on these events. No
module here reads a clock, the environment or a global random source. `parse` reads the notation that is used on the
command line, `name:key=value,key=value`. `MODELS` maps names to registered models.

>>> parse("ssp:staleness=4")
SSP(staleness=4)
>>> str(ElasticBSP())
'elastic-bsp:lookahead=15'

Read first: `events` and `actions`, then `model` (the interface) and `ssp`, a model in fifty lines.

Imports from `errors`, `state` and `zipline`.
"""

from __future__ import annotations

from .asp import ASP
from .bsp import BSP
from .conditions import PullState, PushState
from .drop_stragglers import DropStragglers
from .dsps import DSPS
from .dssp import DSSP
from .elastic_bsp import ElasticBSP
from .model import JobMachine, Machine, ShardMachine, SyncModel
from .naive_waiting import NaiveWaiting
from .notation import MODELS, parse, register
from .plugins import Conditions
from .pssp import PSSP, DynamicPSSP
from .rennala import Rennala
from .ringmaster import Ringmaster
from .spec_sync import SpecSync
from .ssp import SSP

__all__ = [
    "ASP",
    "BSP",
    "DSPS",
    "DSSP",
    "MODELS",
    "PSSP",
    "SSP",
    "Conditions",
    "DropStragglers",
    "DynamicPSSP",
    "ElasticBSP",
    "JobMachine",
    "Machine",
    "NaiveWaiting",
    "PullState",
    "PushState",
    "Rennala",
    "Ringmaster",
    "ShardMachine",
    "SpecSync",
    "SyncModel",
    "parse",
    "register",
]

for _model in (
    BSP,
    ASP,
    SSP,
    DSSP,
    DSPS,
    PSSP,
    DynamicPSSP,
    DropStragglers,
    NaiveWaiting,
    ElasticBSP,
    SpecSync,
    Rennala,
    Ringmaster,
    Conditions,
):
    register(_model)
