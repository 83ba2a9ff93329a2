"""The layout of the package: what each folder imports from, as its docstring says, and how much there is of it all."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paceline
from tests.support.structure import Structure, circles, structure_of, unreachable

ROOT = Path(paceline.__file__).parent

FOLDERS = sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))

PURE = ["errors", "state", "zipline", "sync", "core"]

PROMISED = {
    "paceline",
    "paceline.__main__",
    "paceline.join",
    "paceline.testing",
    "paceline.checkpoints.export",
}
"""The modules that users import or run. The integrations of frameworks belong to them, too."""

PLUGINS = ROOT / "sync" / "plugins.py"  # imports and calls what users have defined

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


FILES = sorted(ROOT.rglob("*.py"))


def folder_of(file: Path) -> str:
    """Return the folder of a file right under the package; of a file outside of any folder, its own name."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


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


def declared(folder: str) -> set[str]:
    """Return what a folder imports from, as its docstring says: the last paragraph begins with "Imports from"."""
    documentation = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    last = documentation.split("\n\n")[-1]
    assert last.startswith("Imports from "), (
        f"{folder}/__init__.py does not end with what the folder imports from"
    )
    return set(re.findall(r"`(\w+)`", last))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_from_what_its_docstring_says(folder: str) -> None:
    found: dict[str, str] = {}
    for file in (ROOT / folder).rglob("*.py"):
        for line, name in imports(file):
            if name.startswith("paceline.") and name.split(".")[1] not in (folder, "VERSION"):
                found.setdefault(name.split(".")[1], f"{file.relative_to(ROOT)}:{line}")
    assert {*found} == declared(folder), found


def test_nothing_that_only_tests_need_is_in_the_package() -> None:
    integrations = {f"paceline.integrations.{file.stem}" for file in (ROOT / "integrations").glob("[!_]*.py")}
    assert unreachable(ROOT, PROMISED | integrations) == set()


def in_order() -> list[str]:
    """Return the folders, each of them after those from which it imports. Raise if there is a circle."""
    return [
        *TopologicalSorter(
            {folder: sorted(declared(folder) & {*FOLDERS}) for folder in FOLDERS}
        ).static_order()
    ]


def test_no_folders_import_from_each_other() -> None:
    assert {*in_order()} == {*FOLDERS}


@pytest.mark.parametrize(
    "file", [file for file in FILES if folder_of(file) in PURE], ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_pure_folder_knows_no_tensor_clock_socket_or_thread(file: Path) -> None:
    found = {name.split(".")[0] for _, name in imports(file)} & IMPURE
    assert not found or file == PLUGINS, f"{file.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize(
    "file", [file for file in FILES if folder_of(file) in PURE], ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_pure_folder_uses_no_global_random_source(file: Path) -> None:
    """NumPy's generators may be passed in; the module's own functions draw from a global one."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random"):
            assert node.attr in ("Generator", "BitGenerator"), (
                f"{file.name}:{node.lineno} uses np.random.{node.attr}"
            )


def test_the_simulator_imports_nothing_from_the_live_hosts() -> None:
    for file in (ROOT / "sim").rglob("*.py"):
        found = {name for _, name in imports(file) if name.startswith("paceline.run.")}
        assert not found, f"{file.relative_to(ROOT)} imports {found}"


SERVERS_OWN = {"server", "server_memory", "registration", "footprint", "checkpointing"}
"""What only the processes of servers and of the coordinator need."""


def used_by(module: str) -> set[str]:
    """Return a module of `run`, and those of `run` that it imports, directly or not."""
    found, new = set[str](), {module}
    while new:
        found |= new
        names = (
            name
            for each in new
            if (file := ROOT / "run" / f"{each}.py").exists()
            for _, name in imports(file)
        )
        new = {name.split(".")[2] for name in names if name.startswith("paceline.run.")} - found
    return found


def test_a_worker_imports_nothing_from_the_modules_of_the_server() -> None:
    assert not used_by("worker") & SERVERS_OWN


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
    modules=226,
    nodes=348_822,
    names_over_borders=4_264,
    edges=1_660,
    with_one_importer=35,
    private_imports=0,
    defined_twice=28,
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
        "paceline.sync.events",
        "paceline.core.requests",
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


def test_the_pure_folders_run_without_torch() -> None:
    program = """
import paceline
machine = paceline.sync.parse("elastic-bsp:lookahead=3").at_coordinator()
paceline.zipline.solve([[1.0, 2.0], [1.5, 3.0]])
import paceline.core.layout
"""
    assert in_a_fresh_interpreter(program + HEAVY) == "['numpy']"


def test_a_simulation_of_times_runs_without_torch() -> None:
    program = """
import paceline
paceline.simulate(paceline.Cluster(compute_s=[1.0, 2.0], servers=2), "bsp@0,elastic-bsp@2,spec-sync@4", 6)
"""
    assert in_a_fresh_interpreter(program + HEAVY) == "['numpy']"
