"""Links and commands on the pages of the documentation lead to what exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.commands import BENCHMARKS, app_of
from paceline.cli import app
from reproductions.commands import app as reproductions

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        ROOT / "llms.txt",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ],
    key=lambda page: page.relative_to(ROOT),
)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```$", re.MULTILINE | re.DOTALL)
BEGUN = re.compile(  # what stands before a command: a prompt, variables, a program that starts it
    r"\s*(?:\$ |# )?(?:[A-Z_]+=\S+ )*(?:srun [-=\w ]* )?"
    r"(paceline|make|python -m (?:benchmarks|reproductions)) (.*)"
)
SCRIPT_AFTER = {"run": 1, "check": 1, "join": 2, "join --slurm": 1}
"""A command that passes on what follows a script -> how many arguments the script is the last of."""


def without_code(text: str) -> str:
    """Return the text of a page without its fenced blocks."""
    return FENCE.sub("", text)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as code hosts and the site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", without_code(page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(
            next(
                f"{anchor}{n}" for n in ["", *(f"-{n}" for n in range(1, 99))] if f"{anchor}{n}" not in found
            )
        )
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_of_a_page_is_dead(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert dead == []


def commands(text: str) -> Iterator[str]:
    """Yield the commands on a page: the lines of its blocks, and code in its sentences."""
    blocks = [code for language, code in FENCE.findall(text) if language in ("", "sh", "console", "text")]
    rest = without_code(text)
    blocks += re.findall(r"(?:^ {4}\S.*\n)+", rest, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *inline]:
        begun = BEGUN.match(line)
        if begun:
            yield f"{begun[1]} {begun[2]}"


@cache
def known() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@cache
def options_of(program: str, name: str = "") -> set[str]:
    """Return the options of a benchmark, or of all commands of the reproductions."""
    commands = app_of([name]) if program == "benchmarks" and name else reproductions
    every = typer.main.get_command(commands).commands.values()  # type: ignore[attr-defined]
    return {option for command in every for parameter in command.params for option in parameter.opts}


def fault(command: str) -> str:
    """Return what is wrong with a command; "" if nothing is."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return ""  # a text that is cut off
    if words[0] == "make":
        named = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]+", word)][:1]
        return "" if set(named) <= TARGETS else f"no target {named}"
    if words[0] == "python":
        named = [word for word in words[3:4] if re.fullmatch(r"[a-z][a-z-]+", word)]
        if words[2] == "benchmarks" and not set(named) <= BENCHMARKS.keys():
            return f"no benchmark {named}"
        given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        unknown = given - {"--help"} - options_of(words[2], *named)
        return f"no options {sorted(unknown)}" if unknown else ""
    if words[1:] and words[1] in ("fork", "server", "worker"):
        return ""  # the name of a process
    if len(words) == 1 or not re.fullmatch(r"[a-z-]+", words[1]) or words[1] == "--version":
        return ""  # the name of the program alone
    name = "join --slurm" if words[1:3] == ["join", "--slurm"] else words[1]
    if name not in known():
        return f"no command {name}"
    takes = {option: parameter for parameter in known()[name].params for option in parameter.opts}
    arguments, rest = 0, words[1 + len(name.split()) :]
    while rest:
        word = rest.pop(0)
        if word in ("|", ">", "&&", ";", "--"):
            break
        if arguments == SCRIPT_AFTER.get(name):  # what follows is passed to the script
            if word.startswith("-") and word != "-m" and word.partition("=")[0] in takes:
                return f"{word} after the script of {name}"
            continue
        if not re.match(r"-{1,2}[a-zA-Z]", word):
            arguments += 1
            continue
        option, has_value, _ = word.partition("=")
        if option == "--help":
            continue
        if option not in takes:
            return f"no option {option} of {name}"
        if option == "-m" and rest and rest[0] in ("package.module",):
            continue
        if not takes[option].is_flag and not has_value and rest:
            rest.pop(0)
    return ""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],  # which names what was there earlier
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_no_command_of_a_page_is_stale(page: Path) -> None:
    wrong = {command: why for command in commands(page.read_text()) if (why := fault(command))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("paceline run --workers 4 train.py --epochs 10", ""),
        ("paceline run --worker 4 train.py", "no option --worker of run"),
        ("paceline check train.py --joint-batch", "--joint-batch after the script of check"),
        ("paceline run --workers 4 -- train.py --workers 4", ""),
        ("paceline rum train.py", "no command rum"),
        ("paceline join --workers 4 10.0.0.1:29600 train.py --anything", ""),
        ("paceline simulate --sync=bsp --sweeps a", "no option --sweeps of simulate"),
        ("make nothing-such", "no target ['nothing-such']"),
        ("make look", ""),
        ("python -m benchmarks nothing", "no benchmark ['nothing']"),
        ("python -m benchmarks links --wires int8", "no options ['--wires']"),
        ("python -m reproductions zipline-table3 --again", ""),
        ("python -m reproductions --nothing", "no options ['--nothing']"),
    ],
)
def test_stale_commands_are_noticed(command: str, why: str) -> None:
    assert fault(command) == why


def test_commands_are_found_on_many_pages() -> None:
    found = [command for page in PAGES for command in commands(page.read_text())]
    assert len(found) > 200
    assert {command.split()[0] for command in found} == {"paceline", "make", "python"}
