"""The places in which servers find the class of an optimizer that is not one of torch's.

A worker registers such an optimizer by the name of its class, as "module:Class". The name alone loads nothing: a server
takes a class only from the places that the user named when the run was launched:

- the modules in `--import`, and the packages that the script itself imports;
- the script, for a class that it defines: the server executes the definition of the class, the definitions and imports
  that this definition uses, and nothing else of the script;
- the pickled classes that `launch` has sent to the servers, for classes that a script or a notebook defines.

The launcher reads scripts before it starts the processes of a run. So this file does not import torch.
"""

from __future__ import annotations

import ast
import dis
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import cloudpickle
import msgspec

from ..errors import ConfigurationError

MAIN = "__main__"

NEVER = frozenset({*sys.stdlib_module_names, "torch", "numpy", "paceline"})
"""Packages that contain no optimizers of users. Servers load no class from them, even if the user names the package."""


class OptimizerSources(msgspec.Struct, frozen=True):
    """The places from which the processes of a run may take the class of an optimizer.

    Attributes:
        packages: modules and packages from which classes may be imported.
        script: path of the script that the workers run; "" if they run a function.
        sent: name -> pickled class, for the classes that were sent to the servers at launch.
    """

    packages: tuple[str, ...] = ()
    script: str = ""
    sent: dict[str, bytes] = {}

    def require_named(self, name: str) -> None:
        """Check that a class is in a place that was named at launch. This does not load anything.

        Raises:
            ConfigurationError: the class is in no such place; the message says what to do.
        """
        module, _, path = name.partition(":")
        top = module.partition(".")[0]
        if name in self.sent:
            return
        if module == MAIN or "<locals>" in path:
            if not self.script or "<locals>" in path or "." in path:
                raise ConfigurationError(
                    f"the optimizer class {path} cannot be sent to the servers, because it is defined inside a "
                    "function, or after the run was launched. Define it at the top of a module or of the script."
                )
        elif top in NEVER or not any(module == p or module.startswith(p + ".") for p in self.packages):
            raise ConfigurationError(
                f"the servers may not import the optimizer class {path} from {module!r}, because neither the script "
                f"nor --import names the package. Launch the run with --import {top}, or with "
                f"launch(imports=[{top!r}])."
            )

    def load(self, name: str) -> object:
        """Return the class with this name.

        Raises:
            ConfigurationError: the class is not in a place that was named at launch, or it cannot be loaded.
        """
        self.require_named(name)
        module, _, path = name.partition(":")
        try:
            if name in self.sent:
                return cloudpickle.loads(self.sent[name])
            if module == MAIN:
                return definition(Path(self.script), path)
            found: object = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            return found
        except ConfigurationError:
            raise
        except Exception as error:  # the user's code may raise any exception
            raise ConfigurationError(
                f"the optimizer class {name} cannot be loaded by the servers: {error!r}."
            ) from error


def class_name(kind: type) -> str:
    """Return the name under which servers look for a class: "module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def imported_packages(script: Path) -> tuple[str, ...]:
    """Return the top-level packages that a script imports anywhere, without running it; () if it cannot be read."""
    with suppress(OSError, SyntaxError, ValueError):
        names = [
            name for node in ast.walk(ast.parse(script.read_bytes())) for name in _imported_modules(node)
        ]
        return tuple(sorted({name.partition(".")[0] for name in names} - NEVER))
    return ()


def definition(script: Path, name: str) -> object:
    """Return a class or function that a script defines at its top level, without running the script.

    Only this definition is executed, with the imports, constants, functions and classes of the script that it uses.

    Raises:
        ConfigurationError: there is no such definition, or it uses a value that the script computes.
    """
    module = types.ModuleType(MAIN)
    module.__file__ = str(script)
    exec(compile(ast.Module(_required_statements(script, name), []), str(script), "exec"), vars(module))
    found: object = vars(module)[name]
    return found


def _required_statements(script: Path, name: str) -> list[ast.stmt]:
    """Return the top-level statements of a script that a definition needs, in order. See `definition`."""
    statements = ast.parse(script.read_bytes()).body
    places: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for bound in _bound(statement):
            places.setdefault(bound, []).append(statement)
    if not any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in places.get(name, [])):
        raise ConfigurationError(f"{script.name} does not define {name} at its top level.")
    required: set[ast.stmt] = set()
    required.update(n for n in statements if isinstance(n, ast.ImportFrom) and n.module == "__future__")
    waiting = [name]
    seen = set(waiting)
    while waiting:
        wanted = waiting.pop()
        for node in places[wanted]:
            if not _is_passive(node):
                raise ConfigurationError(
                    f"the servers cannot define {name} without running the script, because {name} uses {wanted!r}, "
                    f"which line {node.lineno} of {script.name} computes. Move {name} into a module of its own."
                )
            required.add(node)
            used = _globals_of(compile(ast.Module([node], []), str(script), "exec")) & places.keys()
            waiting += sorted(used - seen)
            seen |= used
    return [node for node in statements if node in required]


def _imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
        return [node.module]
    return []


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement binds."""
    for node in ast.walk(statement) if isinstance(statement, ast.Try | ast.If) else [statement]:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the global names that a piece of code, or a function or class in it, reads."""
    used = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return used.union(*(_globals_of(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _is_passive(statement: ast.stmt) -> bool:
    """Return True if a statement only imports or defines, or assigns a constant."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.ClassDef() | ast.FunctionDef():
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            # Names and attributes of modules, as in `Optimizer = torch.optim.Optimizer`, run no code of the script.
            plain = ast.Constant | ast.Name | ast.Attribute | ast.Tuple | ast.List | ast.Dict | ast.Set
            operators = (
                ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop | ast.expr_context | ast.Subscript
            )
            return all(isinstance(node, plain | operators) for node in ast.walk(value))
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
            inner = [*body, *orelse, *final, *(node for handler in handlers for node in handler.body)]
            return all(isinstance(node, ast.Pass) or _is_passive(node) for node in inner)
        case _:
            return False
