"""Scripted interactions with golden output: `scripts/*.txt`, in the language of `paceline.testing.play`.

PACELINE_REWRITE_SCRIPTS=1 writes the current output into the files. Commit the difference only if you understand why
each line of it has changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.testing import play

SCRIPTS = sorted(Path(__file__).with_name("scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_story_goes_as_written(path: Path) -> None:
    script = path.read_text()
    played = play(script)
    if os.environ.get("PACELINE_REWRITE_SCRIPTS"):
        path.write_text(played)
    else:
        assert played == script


def test_there_are_stories_of_every_model() -> None:
    assert {path.stem for path in SCRIPTS} >= {
        "bsp",
        "asp",
        "ssp",
        "elastic-bsp-shard",
        "elastic-bsp-planner",
        "naive-waiting",
        "spec-sync",
        "change-at-a-shard",
        "change-at-the-coordinator",
    }
    assert all("refused:" in path.read_text() for path in SCRIPTS)
