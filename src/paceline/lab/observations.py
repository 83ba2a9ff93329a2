"""The observations of a running script: records in a file for each process."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal[
    "advised",  # an optimizer that is not distributed made a step; detail: what to do about it
    "asked",  # the script asked for the index or the number of workers; detail: the function
    # The script computed a loss that compares the samples of a batch with one another. Detail: the number of samples.
    "compared",
    "clipped",  # the script clipped gradients; detail: the function
    "distributed",  # a loader was distributed; detail: identity of the loader
    "gradient",  # an optimizer made a step; detail: digest of the gradients
    "hyper-parameters",  # an optimizer made a step; detail: its hyper-parameters
    "imported",  # a file of the user was imported
    "initialized",  # first forward pass; detail: digest of the weights before it
    "looped",  # the script began a loop over paceline.epochs; detail: "<epochs> <updates>", 0 for no limit
    "looped by progress",  # the script began such a loop without a number of epochs; detail: the other limits
    "measured",  # the script called len() of a loader; detail: identity of the loader
    "measured part",  # the script called len() of a distributed loader
    "metric",  # the script stepped a scheduler with a metric; detail: the metric
    # A scheduler was prepared, so it follows the progress of the job. Detail: "<length> <batches>", the length of the
    # schedule and the number of batches in an epoch of the given loader; 0 if they are not known.
    "prepared schedule",
    "raised",  # the script failed; detail: the error
    "seeded",  # the script seeded a random generator; detail: the function and the seed
    "scheduled",  # the script stepped a scheduler that was not prepared; detail: the scheduler
    "stepped",  # an optimizer made a step; detail: "distributed", or else the class of the optimizer
    "timed out",  # the script did not make the wanted number of iterations in time
    "warned",  # Paceline logged a warning; detail: the text
    "wrote",  # the script opened a file for writing; detail: the path
]


class ScriptObservation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that a script did.

    Attributes:
        kind: what the script did.
        detail: see `Kind`.
        file: the user's file that did it; "" if it is unknown.
        line: the line in this file.
        iteration: number of optimizer steps that had been made before.
    """

    kind: Kind
    detail: str = ""
    file: str = ""
    line: int = 0
    iteration: int = 0


class Observations:
    """Writes each observation to a file immediately, as a line. So none is lost if the process is killed.

    An observation that equals an earlier one is not written again.

    Args:
        path: the file, which is created.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._seen: set[ScriptObservation] = set()

    def add(self, observation: ScriptObservation) -> None:
        """Write an observation."""
        if observation not in self._seen:
            self._seen.add(observation)
            self._file.write(msgspec.json.encode(observation) + b"\n")


def read_observations(path: Path) -> list[ScriptObservation]:
    """Return the observations in a file, in order; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=ScriptObservation) for line in path.read_bytes().splitlines()]


# -- Calls in the source of a script that write a file in every worker, or step a scheduler with one worker's number

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
"""Names of functions and methods that are assumed to write a file, regardless of their module or class."""

SAFE_METHODS = frozenset({"save_model"})
"""Names of methods that write in one worker only: in a run, the methods of `Trainer` and `Accelerator` do so."""

SAVERS = frozenset({"torch", "np", "numpy", "joblib"})
"""Modules whose function `save` or `dump` writes a file."""

GUARDS = ("is_main", "worker_index", "rank", "main_process", "is_master", "master_process")
"""A condition that contains one of these words is assumed to be true in one worker only."""


class SourceCall(msgspec.Struct, frozen=True):
    """A call in the source of a script.

    Attributes:
        call: the function, perhaps with its arguments, as it is written in the source.
        file: path of the source file.
        line: line of the call.
    """

    call: str
    file: str
    line: int


def unguarded_writes(files: Sequence[Path]) -> list[SourceCall]:
    """Return the calls in these files that write a file and are not inside an `if` that selects one worker.

    Example:
        >>> import tempfile
        >>> script = Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("if is_main():\\n    torch.save(a, 'a.pt')\\ntorch.save(b, 'b.pt')\\n")
        >>> [(found.call, found.line) for found in unguarded_writes([script])]
        [('torch.save', 3)]
    """
    found = []
    for file, tree in _parsed(files):
        found += [SourceCall(ast.unparse(each.func), str(file), each.lineno) for each in _writes(tree)]
    return found


def _parsed(files: Sequence[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """Yield each of these files that can be parsed, with its syntax tree."""
    for file in files:
        try:
            yield file, ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # the run of the script reports this error


def unreduced_metrics(files: Sequence[Path]) -> list[SourceCall]:
    """Return the calls in these files that step a `ReduceLROnPlateau` with a number that was not reduced.

    Example:
        >>> import tempfile
        >>> script = Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("s = ReduceLROnPlateau(sgd)\\ns.step(loss)\\ns.step(paceline.reduce(loss))\\n")
        >>> [(found.call, found.line) for found in unreduced_metrics([script])]
        [('s.step(loss)', 2)]
    """
    found = []
    for file, tree in _parsed(files):
        values: dict[str, list[ast.expr]] = {}  # name -> what is assigned to it
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    values.setdefault(ast.unparse(target), []).append(node.value)
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Attribute(owner, "step"), [metric, *_]) if any(
                    _calls(value, "ReduceLROnPlateau") for value in values.get(ast.unparse(owner), ())
                ):
                    known = [metric, *values.get(ast.unparse(metric), ())]
                    if not any(_calls(value, "reduce") for value in known):
                        found.append(SourceCall(ast.unparse(node), str(file), node.lineno))
    return found


def _calls(node: ast.expr, name: str) -> bool:
    """Return True if an expression contains a call of a function or method with this name."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(ast.unparse(function).rpartition(".")[2] == name for function in calls)


def _writes(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls below a node that write a file, except for those in an `if` that selects one worker."""
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
            return name in WRITERS - SAFE_METHODS
    return False


def _opens_for_writing(call: ast.Call) -> bool:
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)
