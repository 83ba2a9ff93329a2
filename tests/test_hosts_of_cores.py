"""The protocol is written once: these files construct the cores, and no others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent

# Class -> the module that defines it, and the files that construct it.
CORES = {
    "Worker": ("core.worker", {"runtime/worker.py", "sim/job.py", "testing/small_job.py"}),
    "Server": ("core.server", {"runtime/server.py", "sim/job.py", "testing/small_job.py"}),
    "Coordinator": (
        "core.coordinator",
        {"runtime/coordinator.py", "sim/job.py", "testing/small_job.py", "trace/replay.py"},
    ),
    "Shard": ("core.shard", {"core/server.py", "trace/replay.py"}),
    "ShardSync": ("core.shard_sync", {"core/shard.py", "testing/small_job.py"}),
    "JobSync": ("core.job_sync", {"core/coordinator.py"}),
    "PushReceived": ("sync.events", {"core/server.py"}),
    "PullRequested": ("sync.events", {"core/server.py", "sync/model.py"}),
    "PullRepeated": ("sync.events", {"core/server.py"}),
    "IterationFinished": ("sync.events", {"core/coordinator.py"}),
    "IterationStarted": ("sync.events", {"core/coordinator.py"}),
    "SyncRequested": ("sync.events", {"core/coordinator.py"}),
}
"""The live host, the simulator, the replay and the exhaustive search run the same cores; and each message becomes an
event in one place. (`sync/model.py` tests a delayed pull again.)"""

BY_HAND = {"testing/legal_events.py", "testing/promises.py", "testing/scripts.py"}
"""These test a machine directly: they make events by hand, from no message, and host no core."""


def constructs(file: Path, module: str, name: str) -> bool:
    """True if a file calls this class of this module, or takes it as a default, by the name that it has there."""
    tree = ast.parse(file.read_text())
    package = ["paceline", *file.relative_to(ROOT).parent.parts]
    direct, modules = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                if source == f"paceline.{module}" and alias.name == name:
                    direct.add(alias.asname or name)
                elif f"{source}.{alias.name}" == f"paceline.{module}":
                    modules.add(alias.asname or alias.name)
    used = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            used |= {ast.unparse(default) for default in (*node.defaults, *node.kw_defaults) if default}
    return bool(used & (direct | {f"{known}.{name}" for known in modules}))


@pytest.mark.parametrize("name", CORES)
def test_only_these_files_construct(name: str) -> None:
    module, expected = CORES[name]
    files = (
        file for file in ROOT.rglob("*.py") if file != ROOT / Path(*module.split(".")).with_suffix(".py")
    )
    found = {str(file.relative_to(ROOT)) for file in files if constructs(file, module, name)}
    by_hand = BY_HAND if module == "sync.events" or name in ("ShardSync", "JobSync") else set()
    assert found - by_hand == expected
