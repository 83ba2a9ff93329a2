"""The protocol is written once: few files construct the cores, and only one tells the kinds of requests apart."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import paceline
from paceline.core.requests import METHODS, Request, Send

ROOT = Path(paceline.__file__).parent
CHECKOUT = ROOT.parents[1]

# Class -> the module that defines it, and the files that construct it.
CORES = {
    "Worker": (
        "core.worker",
        {"run/worker.py", "sim/simulated_job.py", "testing/small_job.py"},
    ),
    "Server": (
        "core.server",
        {"run/server.py", "sim/simulated_job.py", "testing/small_job.py"},
    ),
    "Coordinator": (
        "core.coordinator",
        {
            "run/coordinator.py",
            "sim/simulated_job.py",
            "testing/small_job.py",
            "trace/replay.py",
        },
    ),
    "Shard": ("core.shard", {"core/server.py", "trace/replay.py"}),
    "ShardSync": ("core.shard", {"testing/small_job.py"}),
    "JobSync": ("core.job_sync", {"core/coordinator.py"}),
    "PushReceived": ("sync.events", {"core/server.py"}),
    "PullRequested": ("sync.events", {"core/server.py", "sync/model.py"}),
    "PullRepeated": ("sync.events", {"core/server.py"}),
    "IterationFinished": ("sync.events", {"core/coordinator.py"}),
    "IterationStarted": ("sync.events", {"core/coordinator.py"}),
    "SyncRequested": ("sync.events", {"core/coordinator.py"}),
}
"""The live host, the simulator, the replay and the exhaustive search run the same cores; and each message becomes an
event in one place. (`sync/model.py` tests a delayed pull again.) The network of the tests runs them, too."""

BY_HAND = {"testing/promises.py", "testing/scripts.py"}
"""These test a machine directly: they make events by hand, from no message, and host no core."""


@cache
def used_by(file: Path) -> tuple[list[tuple[str, str, str]], set[str]]:
    """Return what a file imports, as (module, name, its name in the file), and what it calls, takes as a default, or
    for `partial` or `maker`."""
    source = file.read_text()
    if not any(name in source for name in CORES):
        return [], set()
    tree = ast.parse(source)
    package = ["paceline", *file.relative_to(ROOT).parent.parts]
    imports = []
    used = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                home = ".".join([*base, *filter(None, [node.module])])
                imports += [(home, alias.name, alias.asname or alias.name) for alias in node.names]
            case ast.Call(func=called):
                used.add(ast.unparse(called).removesuffix(".of"))  # see `Event.of`
                if ast.unparse(called) in ("partial", "maker"):
                    used |= {ast.unparse(argument) for argument in node.args[:1]}
            case ast.arguments():
                used |= {ast.unparse(default) for default in (*node.defaults, *node.kw_defaults) if default}
    return imports, used


def constructs(file: Path, module: str, name: str) -> bool:
    """True if a file calls this class of this module, or takes it as a default or for `partial`, by its name."""
    imports, used = used_by(file)
    defined_in = f"paceline.{module}"
    direct = {known for source, imported, known in imports if (source, imported) == (defined_in, name)}
    modules = {known for source, imported, known in imports if f"{source}.{imported}" == defined_in}
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


# -- requests ---------------------------------------------------------------------------------------------

REQUESTS = {kind.__name__ for kind in get_args(Request)}
NAMED = re.compile(rf"\b(?:{'|'.join(REQUESTS)})\b")  # most files name no request

ALLOWED = {
    "src/paceline": {"core/requests.py", "core/shard.py", "testing/state_pools.py"},
    "tests": {"sim/test_clocks_apart.py", "sync/test_exhaustive_search.py"},
    "benchmarks": set[str](),
    "reproductions": set[str](),
}
"""Folder -> the host, and files that carry out no request.

`core/shard.py` holds back some requests of a shard. `testing/state_pools.py` renames the worker of a
timer. The tests replace timers and messages that a core has requested, before its host carries them out.
"""


def dispatches(source: str) -> Iterator[int]:
    """Yield the lines of a file that branch on the kind of a request: in a `match`, an `if` or a `while`.

    An assertion, or the condition of a comprehension, only looks at the requests of a core.
    """
    tree = ast.parse(source if NAMED.search(source) else "")
    for node in ast.walk(tree):
        match node:
            case ast.MatchClass(cls=kind) if names(kind) & REQUESTS:
                yield node.lineno
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield from (node.lineno for each in ast.walk(test) if asks_for_kind(each))


def asks_for_kind(node: ast.AST) -> bool:
    """True for `isinstance(request, Send)`, `type(request) is Send`, and the like."""
    match node:
        case ast.Call(func=ast.Name("isinstance"), args=[_, kinds]):
            return bool(names(kinds) & REQUESTS)
        case ast.Compare(left=ast.Call(func=ast.Name("type")), comparators=kinds):
            return any(names(kind) & REQUESTS for kind in kinds)
        case _:
            return False


def names(node: ast.AST) -> set[str]:
    """Return the last part of every name in an expression."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


@pytest.mark.parametrize("folder", ALLOWED)
def test_requests_are_told_apart_in_one_file(folder: str) -> None:
    root = CHECKOUT / folder
    found = {
        str(file.relative_to(root)): line
        for file in root.rglob("*.py")
        for line in dispatches(file.read_text())
    }
    assert found.keys() == ALLOWED[folder], found


@pytest.mark.parametrize(
    "branch",
    [
        "match request:\n    case Send(to, Answer()):\n        pass",
        "match request:\n    case requests.Timer():\n        pass",
        "if isinstance(request, Send):\n    pass",
        "if type(request) is Apply and live:\n    pass",
        "if done:\n    pass\nelif type(request) in (Discard, Preserve):\n    pass",
        "x = 1 if isinstance(request, requests.Measure | requests.Apply) else 2",
    ],
)
def test_a_branch_on_the_kind_of_a_request_is_found(branch: str) -> None:
    assert list(dispatches(branch))
    assert not list(dispatches("assert isinstance(request, Send)\n[r for r in rs if isinstance(r, Apply)]"))


def test_every_kind_of_request_has_a_method() -> None:
    assert METHODS.keys() | {Send} == set(get_args(Request))
