"""The papers' tables and figures, made anew on this machine: `paceline paper`.

Each is an `Exhibit`: what the paper shows there, what differs here, and a function that makes it. One file per paper.
"""

from __future__ import annotations

from .exhibit import Exhibit, Made, Options
from .fluent_ps import EXHIBITS as FLUENT_PS
from .spec_sync import EXHIBITS as SPEC_SYNC

__all__ = ["EXHIBITS", "Exhibit", "Made", "Options"]

EXHIBITS: dict[str, Exhibit] = {exhibit.name: exhibit for exhibit in (*SPEC_SYNC, *FLUENT_PS)}
"""By name, in the order of the papers."""
