"""`python -m benchmarks`: it lists its benchmarks, each explains its options, and each can be tried quickly."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.commands import BENCHMARKS, app_of
from benchmarks.overlap.namespaces import why_not

ROOT = Path(__file__).parents[2]

OPTIONS = {
    "transport": {"--sizes", "--workers", "--servers", "--rounds", "--systems", "--mxnet"},
    "overlap": {"--rate", "--rounds", "--iterations", "--shards", "--picture", "--mxnet"},
    "links": {"--rate", "--sizes", "--rounds", "--wire"},
    "codecs": {"--rounds"},
    "step": {"--rounds"},
    "slicing": {"--rounds"},
    "sync": set[str](),
    "zipline": {"--rounds"},
    "simulator": set[str](),
    "guard": set[str](),
    "look": {"--siege", "--rounds"},
    "unequal": set[str](),
    "what-if": {"--queue-ms", "--rate", "--rounds"},
    "advice": {"--rounds"},
    "auto": set[str](),
    "data": set[str](),
    "coordinator": set[str](),
    "startup": set[str](),
    "late-join": set[str](),
    "checkpoints": {"--sizes", "--rounds"},
    "ray-startup": set[str](),
    "accelerator": {"--device", "--rounds"},
    "peers": {"--python", "--results"},
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
    result = CliRunner().invoke(app_of([name]), [name, "--help"], env={"COLUMNS": "140", "TERM": "dumb"})
    assert result.exit_code == 0
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", result.stdout.partition("Options")[2]))
    assert named >= {*OPTIONS[name], "--json", "--quick", "--against", "--help"}
    assert named <= {*OPTIONS[name], "--json", "--quick", "--against", "--help", "--wire"}
    assert "Takes" in result.stdout


NEEDS = {
    **dict.fromkeys(("overlap", "links", "what-if"), why_not()),
    "links": why_not() or ("" if shutil.which("iperf3") else "iperf3"),
    "accelerator": "" if torch.cuda.is_available() else "an accelerator",
    "ray-startup": "" if importlib.util.find_spec("ray") else "ray",
}
WITH_TESTS = {"transport", "sync", "zipline", "simulator", "coordinator", "peers"}
"""Benchmarks that other tests of these files try in the same way."""


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() - WITH_TESTS))
def test_each_benchmark_can_be_tried(name: str) -> None:
    if missing := NEEDS.get(name):
        pytest.skip(f"needs {missing}")
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    conditions, *rows = map(json.loads, ended.stdout.splitlines())
    assert (conditions["benchmark"], conditions["quick"]) == (name, True)
    assert rows
