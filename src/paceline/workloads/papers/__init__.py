"""The papers' tables and figures, made anew on this machine: `paceline paper`.

Each is an `Exhibit`: what the paper shows there, what differs here, and a function that makes it. One file per paper.
"""

from __future__ import annotations

from .claims import EXHIBITS as CLAIMS
from .elastic_bsp import EXHIBITS as ELASTIC_BSP
from .exhibit import Exhibit, Made, Options
from .fluent_ps import EXHIBITS as FLUENT_PS
from .spec_sync import EXHIBITS as SPEC_SYNC
from .when_it_pays import EXHIBITS as MAP
from .zipline import EXHIBITS as ZIPLINE

__all__ = ["EXHIBITS", "Exhibit", "Made", "Options"]

EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit for exhibit in (*ZIPLINE, *ELASTIC_BSP, *SPEC_SYNC, *FLUENT_PS, *CLAIMS, *MAP)
}
"""By name, in the order of the papers."""
