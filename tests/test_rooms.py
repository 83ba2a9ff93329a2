"""The layout of the package: each room imports only from rooms above it, and the pure ones from nowhere else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import paceline
from tests.support.structure import Structure, circles, structure_of

ROOT = Path(paceline.__file__).parent

# From the top down. A room is a module or a package right under `paceline`.
ROOMS = [
    "errors",
    "state",
    "zipline",
    "sync",
    "plugins",
    "core",
    "testing",
    "files",
    "trust",
    "trace",
    "report",
    "shard",
    "checkpoints",
    "wire",
    "settings",
    "frontend",
    "runtime",
    "outlets",
    "sim",
    "launcher",
    "inspection",
    "demo",
    "rehearsal",
    "studies",
    "cli",
]

SUBJECTS = {
    "core": ["protocol", "data", "metrics", "sync", "machines", "oversight", "changes", "", "status"],
    "launcher": ["terminal", "processes", "live_run", "clusters", ""],
}
"""Room -> its parts from the top down, by the same rule. "" stands for the files right in the room."""

EXEMPT = {
    "__init__",
    "__main__",
    "join",
}  # the lazy table of public names; `python -m paceline` and `paceline.join`

PURE = ["errors", "state", "zipline", "sync", "core"]

FACES = {"sync/__init__.py": {"plugins"}}  # it shows `Conditions`, which users know as one of the models

IMPURE = {
    "importlib",
    "torch",
    "socket",
    "socketserver",
    "ssl",
    "select",
    "selectors",
    "time",
    "datetime",
    "random",
    "secrets",
    "os",
    "io",
    "pathlib",
    "sys",
    "signal",
    "threading",
    "multiprocessing",
    "concurrent",
    "subprocess",
    "asyncio",
    "logging",
}


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(file for file in ROOT.rglob("*.py") if room_of(file) not in EXEMPT)


@cache  # several tests look at each file
def imports(file: Path) -> list[tuple[int, str]]:
    """(line, full name) of everything that a file imports, in functions and under TYPE_CHECKING too.

    `from .x import y` counts as x, and `from . import y` as y.
    """
    package = ["paceline", *file.relative_to(ROOT).parent.parts]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            if name == "paceline":
                found += ((node.lineno, f"paceline.{alias.name}") for alias in node.names)
            else:
                found.append((node.lineno, name))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_room_imports_only_from_rooms_above_it(file: Path) -> None:
    room = room_of(file)
    assert room in ROOMS, f"{room} has no place in the order of the rooms"
    above = set(ROOMS[: ROOMS.index(room) + 1])
    for line, name in imports(file):
        if name.split(".")[0] == "paceline" and name != "paceline.__version__":
            other = name.split(".")[1] if "." in name else ""
            assert other in above | FACES.get(str(file.relative_to(ROOT)), set()), (
                f"{file.relative_to(ROOT)}:{line} imports {name}, which is not above {room}"
            )


def part_of(room: str, path: Sequence[str]) -> str:
    """Return the part of a room to which the module with this path below the room belongs."""
    return path[0] if path and (ROOT / room / path[0]).is_dir() else ""


def test_no_two_rooms_have_a_file_of_the_same_name() -> None:
    places: dict[str, set[str]] = {}
    for file in FILES:
        if file.name != "__init__.py":
            places.setdefault(file.name, set()).add(str(file.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("room", SUBJECTS)
def test_a_part_of_a_room_imports_only_from_parts_above_it(room: str) -> None:
    parts = SUBJECTS[room]
    assert {*parts} == {"", *(path.parent.name for path in (ROOT / room).glob("*/__init__.py"))}
    for file in (ROOT / room).rglob("*.py"):
        part = part_of(room, file.relative_to(ROOT / room).parts)
        for line, name in imports(file):
            if name.startswith(f"paceline.{room}."):
                other = part_of(room, name.split(".")[2:])
                assert parts.index(other) <= parts.index(part), (
                    f"{file.relative_to(ROOT)}:{line} imports {name}, which is not above {room}/{part}"
                )


@pytest.mark.parametrize(
    "file", [file for file in FILES if room_of(file) in PURE], ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_pure_room_knows_no_tensor_clock_socket_or_thread(file: Path) -> None:
    found = {name.split(".")[0] for _, name in imports(file)} & IMPURE
    assert not found, f"{file.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize(
    "file", [file for file in FILES if room_of(file) in PURE], ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_pure_room_uses_no_global_random_source(file: Path) -> None:
    """NumPy's generators may be passed in; the module's own functions draw from a global one."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random"):
            assert node.attr in ("Generator", "BitGenerator"), (
                f"{file.name}:{node.lineno} uses np.random.{node.attr}"
            )


def test_the_simulator_imports_nothing_from_the_live_hosts() -> None:
    for file in (ROOT / "sim").rglob("*.py"):
        found = {name for _, name in imports(file) if name.startswith("paceline.runtime")}
        assert not found, f"{file.relative_to(ROOT)} imports {found}"


SHARED = {"best_effort", "compute_devices", "job", "segmented", "spin"}
"""What the processes of workers and of servers have in common in `runtime`."""


def used_by(module: str) -> set[str]:
    """Return a module of `runtime`, and those of `runtime` that it imports, directly or not."""
    found, new = set[str](), {module}
    while new:
        found |= new
        names = (name for each in new for _, name in imports(ROOT / "runtime" / f"{each}.py"))
        new = {name.split(".")[2] for name in names if name.startswith("paceline.runtime.")} - found
    return found


def test_a_worker_imports_nothing_from_the_modules_of_the_server() -> None:
    assert used_by("worker_session") & used_by("server_host") == SHARED


@pytest.mark.parametrize("folder", ["benchmarks", "reproductions"])
def test_nothing_that_is_installed_imports_what_only_a_checkout_has(folder: str) -> None:
    for file in ROOT.rglob("*.py"):
        for line, name in imports(file):
            assert name.split(".")[0] != folder, f"{file.relative_to(ROOT)}:{line} imports {name}"


def test_benchmarks_import_only_the_quoted_numbers_from_reproductions() -> None:
    files = sorted((ROOT.parents[1] / "benchmarks").rglob("*.py"))
    assert files
    for file in files:
        names = {
            node.module or ""
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        assert {name for name in names if name.startswith("reproductions")} <= {"reproductions.papers"}, file


MOST = Structure(
    modules=458,
    nodes=327_500,
    names_over_borders=4_810,
    edges=2_511,
    with_one_importer=135,
    private_imports=8,
    defined_twice=72,
)
"""What the package may have at most. Lower a limit when a change lowers the measure. To raise one needs a reason."""


def test_the_package_is_not_more_than_it_was() -> None:
    found = structure_of(ROOT)
    assert {name: value for name, value in found._asdict().items() if value > getattr(MOST, name)} == {}


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles(ROOT) == []


def test_imports_are_seen_in_every_form() -> None:
    file = ROOT / "sync" / "elastic_bsp.py"
    assert "paceline.zipline" in {name for _, name in imports(file)}
    names = {name for _, name in imports(ROOT / "core" / "shard.py")}
    assert {
        "paceline.errors",
        "paceline.sync",
        "paceline.sync.actions",
        "paceline.core.protocol.entry",
    } <= names


def in_a_fresh_interpreter(program: str) -> str:
    """What a program prints on standard output, run by a new interpreter in isolation."""
    program = f"import sys\nsys.path.insert(0, {str(ROOT.parent)!r})\n{program}"
    result = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stderr == ""
    return result.stdout.strip()


HEAVY = "print(sorted({'torch', 'numpy', 'multiprocessing', 'asyncio', 'matplotlib'} & sys.modules.keys()))"


def test_importing_the_package_has_no_side_effect() -> None:
    program = """
import threading, os
before = (threading.active_count(), dict(os.environ), list(sys.path))
import paceline
assert (threading.active_count(), dict(os.environ), list(sys.path)) == before
assert [name for name in sys.modules if name.startswith("paceline")] == ["paceline"]
"""
    assert in_a_fresh_interpreter(program + HEAVY) == "[]"


def test_the_pure_rooms_run_without_torch() -> None:
    program = """
import paceline
machine = paceline.sync.parse("elastic-bsp:lookahead=3").at_coordinator()
paceline.zipline.solve([[1.0, 2.0], [1.5, 3.0]])
import paceline.core.protocol.layout
"""
    assert in_a_fresh_interpreter(program + HEAVY) == "['numpy']"


def test_a_simulation_of_times_runs_without_torch() -> None:
    program = """
import paceline
paceline.simulate(paceline.Cluster(compute_s=[1.0, 2.0], servers=2), "bsp@0,elastic-bsp@2,spec-sync@4", 6)
"""
    assert in_a_fresh_interpreter(program + HEAVY) == "['numpy']"
