"""Where shards are: a value that all processes compute alike."""

from __future__ import annotations

import re
from pathlib import Path

import paceline
from paceline.core.layout import round_robin

ROOT = Path(paceline.__file__).parent


def test_every_shard_has_one_server() -> None:
    for shards in range(1, 8):
        for servers in range(1, 8):
            placement = round_robin(shards, servers)
            held = sorted(shard for server in placement.servers for shard in placement.shards_of(server))
            assert held == list(placement.shards)
            assert placement.held_by(0, range(shards)) == placement.shards_of(0)


def test_only_the_placement_computes_the_server_of_a_shard() -> None:
    remainder = re.compile(r"%\s*(len\()?[\w.]*servers|::\s*[\w.]*servers")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in sorted(ROOT.rglob("*.py"))
        if file.name != "layout.py"
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if remainder.search(line)
    ]
    assert not found, f"{found} compute the server of a shard, which only core/layout.py may do"
