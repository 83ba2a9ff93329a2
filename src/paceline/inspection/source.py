"""What can be seen in the source of a script without running it: files that every worker would write."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

__all__ = ["UnguardedWrite", "unguarded_writes"]

WRITERS = frozenset(
    {
        "imsave",
        "imwrite",
        "savetxt",
        "save_file",
        "save_image",
        "save_model",
        "save_pretrained",
        "savefig",
        "savez",
        "to_csv",
        "to_json",
        "to_parquet",
        "to_pickle",
        "write_bytes",
        "write_text",
    }
)
"""Names of functions and methods that write a file, whatever they belong to."""

SAVERS = frozenset({"torch", "np", "numpy", "joblib"})
"""Modules whose function `save` or `dump` writes a file."""

GUARDS = ("is_main", "worker_index", "rank", "main_process", "is_master", "master_process")
"""A condition that contains one of these words is taken to be true in one worker only."""


class UnguardedWrite(msgspec.Struct, frozen=True):
    """A call that writes a file, and that every worker executes.

    Attributes:
        call: the name of the function, as it is written in the source.
        file: path of the source file.
        line: line of the call.
    """

    call: str
    file: str
    line: int


def unguarded_writes(files: Sequence[Path]) -> list[UnguardedWrite]:
    """Return the calls in these files that write a file and are not inside an `if` that selects one worker.

    Example:
        >>> import tempfile
        >>> script = Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("if is_main():\\n    torch.save(a, 'a.pt')\\ntorch.save(b, 'b.pt')\\n")
        >>> [(found.call, found.line) for found in unguarded_writes([script])]
        [('torch.save', 3)]
    """
    found = []
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # the run of the script reports it
        found += [UnguardedWrite(ast.unparse(each.func), str(file), each.lineno) for each in _writes(tree)]
    return found


def _writes(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls below a node that write a file, except for those in the body of a guard."""
    if isinstance(node, ast.If) and any(word in ast.unparse(node.test).lower() for word in GUARDS):
        return
    if isinstance(node, ast.Call) and _is_write(node):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _writes(child)


def _is_write(call: ast.Call) -> bool:
    match call.func:
        case ast.Name("open"):
            return _opens_for_writing(call)
        case ast.Name(name):
            return name in WRITERS
        case ast.Attribute(ast.Name(module), "save" | "dump") if module in SAVERS:
            return True
        case ast.Attribute(_, name):
            return name in WRITERS
    return False


def _opens_for_writing(call: ast.Call) -> bool:
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)
