"""Every program that a test, an example or a page keeps can be compiled, and what it imports from here exists.

Nothing is imported: modules are found as files, and names by what stands at the top of a module. So this covers the
programs of tests that `make test` does not run, too.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = {
    "paceline": ROOT / "src" / "paceline",
    **{name: ROOT / name for name in ("tests", "benchmarks", "reproductions", "examples", "docs")},
}
"""Each package whose modules are looked for -> its folder."""

FILES = sorted(
    path for folder in PACKAGES.values() for path in folder.rglob("*.py") if path != Path(__file__).resolve()
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# A string with such a line is a program. In prose, a line that begins like this goes on differently.
IMPORTS = re.compile(
    r"""
    ^[ \t]* (?:
        import [ ] [a-z][\w.]* (?:[ ]as[ ]\w+)? (?:,[ ][a-z][\w.]*)*
        | from [ ] [a-z][\w.]* [ ] import [ ] [\w, *]+
        | from [ ] [a-z][\w.]* [ ] import [ ] \(.*
    ) (?:;.* | [ ]{2}\#.*)? $
    """,
    re.MULTILINE | re.VERBOSE,
)

PLACEHOLDER = "0"  # stands for a part of an f-string that is not known here
FIELD = re.compile(r"\{\w*(?:!r)?\}")  # what `str.format` puts something in for

MEANT = {"paceline.distrubute"}
"""What programs of tests use in vain to see what is said then."""


# -- modules and their names --------------------------------------------------------------------------------


def found(module: str) -> Path | None:
    """Return the file of a module, the folder of a package without one, or None if there is no such module."""
    first, *rest = module.split(".")
    place = PACKAGES[first].joinpath(*rest)
    if (place / "__init__.py").is_file():
        return place / "__init__.py"
    if place.with_suffix(".py").is_file():
        return place.with_suffix(".py")
    return place if any(place.glob("*.py")) else None


@cache
def bound(module: str) -> frozenset[str] | None:
    """Return the names that the statements of a module bind, or None if some are only known when it runs."""
    path = found(module)
    assert path is not None
    if path.is_dir():
        return frozenset()
    names: set[str] = set()
    lazy = False
    for statement in statements(ast.parse(path.read_text()).body):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(statement.name)
                lazy = lazy or statement.name == "__getattr__"
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                names |= bound(source(statement, module)) or set()
            case ast.Import() | ast.ImportFrom():
                names |= {each.asname or each.name.partition(".")[0] for each in statement.names}
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as listed):
                names |= {"__all__", *ast.literal_eval(listed)}
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.With():
                names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return None if lazy and "__all__" not in names else frozenset(names)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those under a condition."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody", "handlers") if not hasattr(statement, "name") else ():
            for each in getattr(statement, name, []):
                yield from statements(each.body if isinstance(each, ast.ExceptHandler) else [each])


def source(statement: ast.ImportFrom, module: str) -> str:
    """Return the name of the module from which a statement in a module imports."""
    if not statement.level:
        return statement.module or ""
    path = found(module)
    assert path is not None
    parts = module.split(".") + ["__init__"] * (path.name == "__init__.py")
    return ".".join([*parts[: -statement.level], *filter(None, [statement.module])])


def missing(nodes: Sequence[ast.AST], *, attributes: bool) -> Iterator[str]:
    """Yield what a program imports from the packages here in vain, and attributes that an imported module has not."""
    modules: dict[str, str] = {}  # a name in the program -> the module that it stands for
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] in PACKAGES:
                    if found(each.name) is None:
                        yield each.name
                    elif each.asname or "." not in each.name:
                        modules[each.asname or each.name] = each.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            home = node.module
            if found(home) is None:
                yield home
                continue
            names = bound(home)
            for each in node.names:
                if names is None or each.name in names or each.name == "*":
                    continue
                if found(f"{home}.{each.name}") is None:
                    yield f"{home}.{each.name}"
                else:
                    modules[each.asname or each.name] = f"{home}.{each.name}"
    for node in nodes if attributes else ():
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                names, whole = bound(modules[name]), f"{modules[name]}.{attribute}"
                if not (names is None or attribute in names or attribute.startswith("__") or found(whole)):
                    yield whole


# -- programs -----------------------------------------------------------------------------------------------


def programs_in(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield each string of a file that is a program, and its line. The file itself is the first node."""
    constants: dict[str, str] = {}  # strings at the top of the file, from which others are made
    inside: set[int] = set()  # parts of longer strings, and docstrings
    for node in nodes:
        if isinstance(node, ast.JoinedStr | ast.BinOp) and id(node) not in inside:
            inside |= {id(each) for each in ast.walk(node) if each is not node}
        if (
            isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            inside.add(id(node.body[0].value))  # type: ignore[attr-defined]
    for statement in nodes[0].body:  # type: ignore[attr-defined]
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                text = text_of(value, constants)
                if text is not None:
                    constants[name] = text
    for node in nodes:
        if id(node) not in inside and isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = text_of(node, constants)
            if text is not None and IMPORTS.search(text):
                yield node.lineno, text


def text_of(node: ast.AST, constants: dict[str, str]) -> str | None:
    """Return the string that an expression stands for, as far as it is known, or None if it is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name)
        case ast.JoinedStr(values=values):
            return "".join(text_of(each, constants) or "" for each in values)
        case ast.FormattedValue(value=value):
            return text_of(value, constants) or PLACEHOLDER
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = [text_of(each, constants) for each in (left, right)]
            return None if None in texts else "".join(filter(None, texts))
    return None


def faults(text: str) -> list[str]:
    """Return what is wrong with a program: that it cannot be compiled, or what is not there."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError as error:
        if FIELD.search(text):
            return faults(FIELD.sub("put_in", text))
        return [f"{error.msg}: {error.text}"]
    return [each for each in missing([*ast.walk(tree)], attributes=True) if each not in MEANT]


@pytest.mark.parametrize("folder", PACKAGES)
def test_what_a_file_imports_and_what_the_programs_in_its_strings_import_is_there(folder: str) -> None:
    wrong = []
    for path in (path for path in FILES if path.is_relative_to(PACKAGES[folder])):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        if folder != "paceline":  # mypy knows more of it than this, and of what a file uses of a module
            wrong += [f"{path.relative_to(ROOT)}: {each}" for each in missing(nodes, attributes=False)]
        for line, program in programs_in(nodes):
            wrong += [f"{path.relative_to(ROOT)}:{line}: {each}" for each in faults(program)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_programs_on_a_page_import_is_there(page: Path) -> None:
    wrong = []
    for program in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if not program.startswith(">>>"):
            wrong += faults(program)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("from paceline.start import progress\n", ["paceline.start.progress"]),
        ("from paceline.core.no_such import Core\n", ["paceline.core.no_such"]),
        ("import paceline\npaceline.no_such()\n", ["paceline.no_such"]),
        ("from paceline.cli import console\nconsole.no_such\n", ["paceline.cli.console.no_such"]),
        ("from tests.support.live import no_such\n", ["tests.support.live.no_such"]),
        ("import paceline\nfrom paceline import Cluster, sync\npaceline.launch(sync.parse)\n", []),
        ("import other\nfrom other import more\n", []),
        ("import torch\nmodel = (\n", ["'(' was never closed: model = (\n"]),
    ],
)
def test_what_is_not_there_is_found(program: str, fault: list[str]) -> None:
    assert faults(program) == fault


def test_programs_are_found_in_strings_and_put_together() -> None:
    file = '''
        PART = "    import paceline"
        PROGRAM = f"""
        def train():
        {PART}
            print({number}, {{}})
        """
        ARGUMENTS = ["-c", "import torch; torch.ones(1)"]
        """No program. It says
        from where to import things, which are many."""
    '''
    found_here = [program for _, program in programs_in([*ast.walk(ast.parse(textwrap.dedent(file)))])]
    assert "import torch; torch.ones(1)" in found_here
    assert "\ndef train():\n    import paceline\n    print(0, {})\n" in found_here
    assert len(found_here) == 3
