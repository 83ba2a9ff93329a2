"""Measures of a package that do not change when files are concatenated, lines wrapped or docstrings deleted."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Structure", "circles", "structure_of", "unreachable"]

NOT_COUNTED = (ast.Import, ast.ImportFrom, ast.alias, ast.Load, ast.Store, ast.Del)


class Structure(NamedTuple):
    """How much there is in a package, and how much of it depends on something else.

    Attributes:
        modules: number of modules, without those that make a folder a package.
        nodes: number of nodes of the syntax trees, without docstrings and imports.
        names_over_borders: number of names of a module that another one uses, counted once for each user.
        edges: number of pairs of modules of which one imports the other.
        with_one_importer: number of modules that exactly one other module imports.
        private_imports: number of imported names that begin with an underscore.
        defined_twice: number of public functions and classes whose name more than one module defines.
    """

    modules: int
    nodes: int
    names_over_borders: int
    edges: int
    with_one_importer: int
    private_imports: int
    defined_twice: int


class _Module:
    """The syntax tree of one module, and what it imports from the package."""

    def __init__(self, name: str, file: Path, known: Mapping[str, Path]) -> None:
        self.name, self.is_package = name, file.name == "__init__.py"
        self.tree = ast.parse(file.read_text())
        self.edges: set[str] = set()
        self.names: set[tuple[str, str]] = set()  # (module, name in it)
        self.private_imports = 0
        folder = name.split(".") if self.is_package else name.split(".")[:-1]
        modules: dict[str, str] = {}  # local name -> module
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = folder[: len(folder) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                if (whole := f"{source}.{alias.name}") in known:
                    modules[alias.asname or alias.name] = whole
                    self.edges.add(whole)
                elif source in known:
                    self.edges.add(source)
                    self.names.add((source, alias.name))
                    self.private_imports += alias.name.startswith("_")
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in modules
            ):
                self.names.add((modules[node.value.id], node.attr))

    @property
    def nodes(self) -> int:
        texts = {
            id(part)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for part in (node, node.value)
        }
        return sum(
            id(node) not in texts and not isinstance(node, NOT_COUNTED) for node in ast.walk(self.tree)
        )

    @property
    def public(self) -> Iterator[str]:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield node.name


@cache
def _read(root: Path) -> dict[str, _Module]:
    files = {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root.parent).with_suffix("").parts
        files[".".join(path[:-1] if path[-1] == "__init__" else path)] = file
    modules = {name: _Module(name, file, files) for name, file in files.items()}
    for module in modules.values():
        module.edges -= {module.name, root.name}  # `paceline.__version__` is no dependency
    return modules


def structure_of(root: Path) -> Structure:
    """Return the measures of the package in the folder `root`."""
    modules = _read(root)
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for edge in module.edges:
            importers[edge].add(module.name)
    real = [module for module in modules.values() if not module.is_package]
    defined = Counter(name for module in modules.values() for name in module.public)
    return Structure(
        modules=len(real),
        nodes=sum(module.nodes for module in modules.values()),
        names_over_borders=sum(len(module.names) for module in modules.values()),
        edges=sum(len(module.edges) for module in modules.values()),
        with_one_importer=sum(len(importers[module.name]) == 1 for module in real),
        private_imports=sum(module.private_imports for module in modules.values()),
        defined_twice=sum(count > 1 for count in defined.values()),
    )


def circles(root: Path) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or not."""
    edges = {module.name: module.edges for module in _read(root).values() if not module.is_package}
    reached: dict[str, set[str]] = {}
    for name in edges:
        found, new = set[str](), {name}
        while new:
            new = set().union(*(edges.get(each, set()) for each in new)) - found
            found |= new
        reached[name] = found
    groups = {
        frozenset(n for n in reached[name] if name in reached.get(n, ()))
        for name in edges
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def unreachable(root: Path, promised: Iterable[str]) -> set[str]:
    """Return the modules to which no path of imports and starts leads from those that users import or run.

    A module also leads to those whose name is in one of its strings: "paceline.lab.probe", "lab.probe", "probe.py".

    Args:
        root: the folder of the package.
        promised: full names of the modules that users import or run.
    """
    modules = _read(root)
    found, new = set[str](), {*promised}
    while new:
        found |= new
        led = set[str]()
        for module in (modules[name] for name in new):
            strings = {
                node.value
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            beside = module.name if module.is_package else module.name.rpartition(".")[0]
            led |= module.edges
            led |= {f"{root.name}.{text}" for text in strings}
            led |= {f"{beside}.{text.removesuffix('.py')}" for text in strings if text.endswith(".py")}
            led |= {name for text in strings for name in re.findall(rf"{root.name}(?:\.\w+)+", text)}
        led |= {name.rpartition(".")[0] for name in led | found}  # importing a module imports its folder
        new = (led & {*modules}) - found
    return {*modules} - found
