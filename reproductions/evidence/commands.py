"""Runs a study from the command line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from paceline.cli.console import shown_progress

from ..exhibit import known
from ..result_file import machine
from .on_networks import STUDIES
from .on_quadratics import QUADRATICS
from .study import Study, missing, run

EVERY = {QUADRATICS.name: QUADRATICS, **STUDIES}


def chosen(name: str, places: Sequence[str], contenders: Sequence[str]) -> Study:
    """Return a study, restricted to these places and contenders; an empty sequence means all of them.

    Raises:
        ConfigurationError: a name is unknown.
    """
    study = EVERY[known("study", [name], EVERY)[0]]
    places = known("place", places, [each.name for each in study.places])
    contenders = known("contender", contenders, [each.name for each in study.contenders])
    return msgspec.structs.replace(
        study,
        places=tuple(each for each in study.places if each.name in places),
        contenders=tuple(each for each in study.contenders if each.name in contenders),
    )


def run_study(
    name: str,
    places: Sequence[str],
    contenders: Sequence[str],
    path: Path,
    console: Console,
    *,
    only_estimate: bool,
) -> None:
    """Print how long the missing results of a study will take, and compute them unless `only_estimate` is True."""
    study = chosen(name, places, contenders)
    left = missing(study, path)
    minutes = sum(study.estimate_s(place, contender) for place, contender in left) / 60
    total = len(study.places) * len(study.contenders)
    console.print(f"{len(left)} of {total} results are missing: about {minutes:.0f} min on one core")
    if only_estimate or not left:
        return
    begun_s = time.monotonic()
    with shown_progress(console) as tell:
        run(study, path, tell)
    took_s = time.monotonic() - begun_s
    with path.with_suffix(".txt").open("a") as file:
        words = [f" --place '{each}'" for each in places] + [f" --contender '{each}'" for each in contenders]
        file.write(f"python -m reproductions evidence {name}{''.join(words)}: {len(left)} results\n")
        file.write(f"{took_s:.0f} s on {machine()}\n")
    console.print(f"finished in {took_s / 60:.0f} min: {path}")
