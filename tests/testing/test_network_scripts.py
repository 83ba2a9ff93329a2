"""Whole runs as scripts with golden output: `network_scripts/*.txt`, which `tests.support.network_scripts` plays.

PACELINE_REWRITE_SCRIPTS=1 writes the current output into the files. Commit the difference only if you understand why
each line of it has changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.shard import ShardSync
from tests.support.network_scripts import play_network

SCRIPTS = sorted(Path(__file__).with_name("network_scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_story_goes_as_written(path: Path) -> None:
    script = path.read_text()
    played = play_network(script)
    if os.environ.get("PACELINE_REWRITE_SCRIPTS"):
        path.write_text(played)
    else:
        assert played == script


def test_a_mistake_changes_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardSync, "may_join", lambda self, count: self.machine.may_join(count))
    script = next(path for path in SCRIPTS if path.stem == "join-given-up-before-a-change").read_text()
    with pytest.raises(AssertionError, match="worker 2 joined during change 1"):
        play_network(script)
