"""`python -m benchmarks`: it lists its benchmarks, and each explains its options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import commands

ROOT = Path(__file__).parents[2]

OPTIONS = {
    "transport": {"--json", "--sizes", "--workers", "--servers", "--rounds", "--systems"},
    "overlap": {"--json", "--rate", "--rounds", "--iterations", "--shards", "--picture"},
    "links": {"--json", "--rate", "--sizes", "--rounds", "--wire"},
    "sync": {"--json"},
    "zipline": {"--json", "--rounds", "--quick"},
    "simulator": {"--json"},
    "guard": {"--json"},
    "look": {"--json", "--siege", "--rounds"},
    "unequal": {"--json"},
    "what-if": {"--json", "--queue-ms", "--rate", "--rounds"},
    "advice": {"--json", "--rounds"},
    "auto": {"--json"},
    "data": {"--json"},
    "coordinator": {"--json"},
    "startup": {"--json"},
    "late-join": {"--json"},
    "checkpoints": {"--json", "--sizes", "--rounds"},
    "ray-startup": {"--json"},
    "accelerator": {"--json", "--device", "--rounds"},
}


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_all_benchmarks_are_listed(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True, cwd=ROOT
    )
    shown = ended.stdout + ended.stderr
    assert "python -m benchmarks" in shown
    assert re.findall(r"^\W*([a-z-]+)  ", shown.partition("Commands")[2], re.MULTILINE) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_benchmark_explains_its_options(name: str) -> None:
    result = CliRunner().invoke(commands.app, [name, "--help"], env={"COLUMNS": "140", "TERM": "dumb"})
    assert result.exit_code == 0
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", result.stdout.partition("Options")[2]))
    assert named - {"--quick"} == {*OPTIONS[name], "--help"} - {"--quick"}
    assert OPTIONS[name] <= named
    assert "Takes" in result.stdout
