"""Write the pages of the reference that the code knows: `python docs/make_reference.py`.

They are `command-line*.md`, from the commands, `settings.md`, from the table of settings, and the pages `api*.md`, from
the public names. The site adds the docstrings to the latter (`docs/conf.py`). With --check, nothing is written, and the
exit code is 0 if the pages match the code, 1 otherwise.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import typer

from paceline.cli import app
from paceline.settings.checks import RUN, SCHEDULED, SERVE
from paceline.settings.table import SETTINGS

FOLDER = Path(__file__).parent / "reference"
PACKAGE = Path(__file__).parents[1] / "src" / "paceline"

OFFLINE = ("simulate", "advise", "study", "replay", "sync")
"""The commands that start no live run. They have a page of their own."""

WITH_SETTINGS = {"run": RUN, "serve": SERVE, "join --slurm": SCHEDULED}
"""Each command that takes settings -> its name in the table of settings."""

SIMULATING = """\
# Command line: simulate and compare

[Command line](command-line.md) has the commands that start and show a run.

"""

COMMANDS = """\
# Command line

Each command has a help text: `paceline run --help`. An option that begins with two hyphens may be written
`--option VALUE` or `--option=VALUE`. Options of Paceline go before the name of the script; everything after this name
is passed to the script. In `paceline join`, options go before the address. The [exit codes](exit-codes.md) say how a
command has ended. `paceline --version` prints the version. [Simulate and compare](command-line-simulate.md) has the
commands that start no run.

"""

SETTING = """\
# Settings

These are options of `paceline run`, `paceline serve` and `paceline join --slurm`, and arguments of `paceline.launch`. A
run writes its settings to `run.json`, and its report lists those that are not the default.

"""

VARIABLES = {
    "PACELINE_SECRET": "the secret of a run that several machines join. `--secret-file` names a file instead",
    "PACELINE_LOG": "the level of the logs of servers and workers, such as `INFO`. Default: `WARNING`",
    "XDG_CONFIG_HOME": "the folder with `paceline/key`, which signs the runs that you start. Default: `~/.config`",
}

DETAILS = """\
In Python, `help(paceline.prepare)` shows the arguments of `paceline.prepare`. The site (`make site`) shows the
arguments of all names, below the tables.
"""

LIGHTNING = """\
## `paceline.integrations.lightning`

If a script imports this module, Lightning knows the strategy `"paceline"`: see
[Use Lightning and Fabric](../how-to/lightning.md).
"""

EVERY_COMMAND = typer.main.get_command(app).commands  # type: ignore[attr-defined]
"""Each command of the command line, by its name."""


class Group(NamedTuple):
    """Some public names of a module, under a heading."""

    heading: str
    module: str
    names: tuple[str, ...] = ()  # () means all that the module lists


API: dict[str, tuple[str, tuple[Group, ...]]] = {
    "api.md": (
        "The interface: `paceline`",
        (
            Group(
                "In a script",
                "paceline",
                (
                    "prepare",
                    "DistributedOptimizer",
                    "distribute",
                    "epochs",
                    "evaluating",
                    "device",
                    "log",
                    "set_sync",
                    "checkpoint",
                    "track",
                ),
            ),
            Group(
                "All workers together",
                "paceline",
                ("is_main", "save", "barrier", "reduce", "worker_index", "worker_count", "partition"),
            ),
            Group("Optimizers", "paceline", ("LARS", "register_elementwise", "register_tensorwise")),
            Group("Start a run", "paceline", ("launch", "RunResult")),
            Group("Simulate and compare", "paceline", ("simulate", "Cluster", "SimResult", "study")),
        ),
    ),
    "api-sync.md": ("The interface: sync models", (Group("`paceline.sync`", "paceline.sync"),)),
    "api-testing.md": ("The interface: checks of models", (Group("`paceline.testing`", "paceline.testing"),)),
    "api-sim.md": (
        "The interface: simulation, traces and ZipLine",
        (
            Group("`paceline.sim`", "paceline.sim"),
            Group("`paceline.trace`", "paceline.trace"),
            Group("`paceline.zipline`", "paceline.zipline"),
        ),
    ),
    "api-errors.md": ("The interface: errors", (Group("`paceline.errors`", "paceline.errors"),)),
    "api-integrations.md": (
        "The interface: frameworks",
        (
            Group("`paceline.integrations.accelerate`", "paceline.integrations.accelerate", ("Accelerator",)),
            Group(
                "`paceline.integrations.transformers`", "paceline.integrations.transformers", ("distribute",)
            ),
        ),
    ),
}
"""Each page -> its title and its groups of names."""


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    plain = re.sub(r"\[/?(?:bold|italic|dim|cyan)?\]", "", " ".join(text.split()))
    return plain.replace("|", "\\|").replace("<", "\\<")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    heads = [*heads]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`"


def option(parameter: Any) -> str:
    """Return how an option or an argument is written."""
    if parameter.param_type_name == "argument":
        return code((parameter.metavar or parameter.name.upper()).replace("[", "").replace("]", ""))
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return ", ".join(code(f"{name}{value}") for name in parameter.opts)


def command_line(head: str, *, offline: bool) -> str:
    """Return a page of commands: those that start no live run, or the others."""
    lines = [head.rstrip(), ""]
    for name, command in EVERY_COMMAND.items():
        if (name in OFFLINE) != offline:
            continue
        lines += [f"## `paceline {name}`", "", *first_paragraphs(command.help), ""]
        settings = {row.option for row in SETTINGS.values() if WITH_SETTINGS.get(name) in row.commands}
        own = [
            parameter
            for parameter in command.params
            if not parameter.hidden and "--help" not in parameter.opts and not set(parameter.opts) & settings
        ]
        lines += table(["argument or option", "meaning"], ([option(each), meaning(each)] for each in own))
        if name in WITH_SETTINGS:
            lines += ["The other options are [settings](settings.md) of the run.", ""]
    return "\n".join(lines).rstrip() + "\n"


def meaning(parameter: Any) -> str:
    """Return what an option or an argument means, with its default."""
    text = cell(parameter.help or "")
    default = parameter.default
    if not parameter.show_default or default in (None, False, "", [], ()) or "Default: " in text:
        return text
    return f"{text} Default: {f'{default:g}' if isinstance(default, float) else default}."


def first_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a help text, with its examples as code."""
    made = []
    for paragraph in text.split("\n\n"):
        example = paragraph.startswith(("paceline ", "PACELINE_", "srun "))
        plain = cell(paragraph).replace("\\|", "|")
        made += [f"    {paragraph}"] if example else textwrap.wrap(plain, 118, break_on_hyphens=False)
        made += [""]
    return made[:-1]


def settings() -> str:
    """Return the page of the settings and the environment variables."""
    lines = [SETTING.rstrip(), ""]
    for panel in dict.fromkeys(row.panel for row in SETTINGS.values()):
        lines += [f"## {panel}", ""]
        rows = [
            [
                f"{code(name)}, {code(row.option)}",
                code(repr(row.default)),
                cell(row.help) + only(row.option, row.commands),
            ]
            for name, row in SETTINGS.items()
            if row.panel == panel
        ]
        lines += table(["argument, option", "default", "meaning"], rows)
    lines += ["## Environment variables", ""]
    lines += table(["variable", "meaning"], ([code(name), cell(what)] for name, what in VARIABLES.items()))
    lines += [
        "Each worker also has the variables that select its",
        "[accelerator](../how-to/gpus.md#each-worker-sees-its-own-accelerator-only) and, with `--torchrun-env`, those",
        "of torchrun.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def only(name: str, commands: tuple[str, ...]) -> str:
    """Return which commands have the option of a setting, and which others have another option with the same name."""
    if len(commands) == len(WITH_SETTINGS):
        return ""
    others = [
        command
        for command, kind in WITH_SETTINGS.items()
        if kind not in commands and any(name in each.opts for each in EVERY_COMMAND[command].params)
    ]
    also = f" See [Command line](command-line.md) for the same option of `{'` and `'.join(others)}`."
    return f" Only `{'` and `'.join(commands)}`.{also * bool(others)}"


def names_of(group: Group) -> list[str]:
    """Return the names of a group."""
    listed = group.names or import_module(group.module).__all__
    return [name for name in listed if not (group.module == "paceline.errors" and name.islower())]


def summary(module: str, name: str) -> str:
    """Return the first sentence of the docstring of a public name."""
    file = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if file.exists() and "integrations" in module:  # these need packages that may be missing
        found = next(
            node
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        )
        doc = ast.get_docstring(found)
    else:
        value = getattr(import_module(module), name)
        named = isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value)
        doc = inspect.getdoc(value) if named else doc_of_constant(import_module(module), name)
    return cell((doc or "").split("\n\n")[0])


def doc_of_constant(module: ModuleType, name: str) -> str:
    """Return the text below the assignment of a constant, in the module or in the one from which it imports it."""
    lines = ast.parse(inspect.getsource(module)).body
    for node, below in pairwise(lines):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            told = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            return str(below.value.value) if told else ""  # type: ignore[attr-defined]
    for node in lines:
        if isinstance(node, ast.ImportFrom) and any(name == alias.name for alias in node.names):
            home = import_module("." * node.level + (node.module or ""), package_of(module))
            return doc_of_constant(home, name)
    return ""


def package_of(module: ModuleType) -> str:
    return module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]


def interface(title: str, groups: Sequence[Group]) -> str:
    """Return a page of public names."""
    lines = [f"# {title}", ""]
    if not any("integrations" in group.module for group in groups):  # the site shows no details of these
        lines += [*DETAILS.splitlines(), ""]
    for group in groups:
        lines += [f"## {group.heading}", ""]
        rows = ([code(f"{group.module}.{name}"), summary(group.module, name)] for name in names_of(group))
        lines += table(["name", "what it is"], rows)
    return "\n".join(lines).rstrip() + "\n"


def texts() -> dict[Path, str]:
    """Return the pages."""
    made = {name: interface(title, groups) for name, (title, groups) in API.items()}
    made["api-integrations.md"] += f"\n{LIGHTNING}"
    made["command-line.md"] = command_line(COMMANDS, offline=False)
    made["command-line-simulate.md"] = command_line(SIMULATING, offline=True)
    made["settings.md"] = settings()
    return {FOLDER / name: text for name, text in made.items()}


def main() -> int:
    """Write the pages or, with --check, only check them. Return the exit code."""
    made = texts()
    if "--check" in sys.argv[1:]:
        return any(not path.exists() or path.read_text() != text for path, text in made.items())
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
