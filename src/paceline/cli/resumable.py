"""Commands that resume a run: they repeat the options and the script of the run, unless new ones are given."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from ..errors import ConfigurationError
from ..settings import SETTINGS
from ..settings.checks import is_bucket
from ..trace.report import RunFile
from ..trust import printable
from .options import OptionalValues

HIDDEN = "..."
"""Replaces a secret in the description of a run."""

FLAGS = ("--accept-changes", "--force", "--trust")
NOT_REPEATED = ("--resume", "--run-dir", "--command", *FLAGS)
"""Options that concern only one start of a run. The `FLAGS` have no value."""

PATHS = ("--checkpoint-dir", "--tensorboard")
"""Options whose values are paths, or URLs of buckets."""

OWN_TRUSTED = {"listen": "--listen", "observer": "--observer", "announce_to": "--announce"}
"""Options that are not settings, but for which `Setting.trusted` would be True."""

CONDITION = re.compile(r"=[^,|@]*:")
"""Matches a condition of a sync model, such as "pull=module:function", whose module is imported."""


class Resumable(OptionalValues):
    """A command which, with --resume, repeats the options and the script of the run that is resumed.

    New options follow the earlier options, and the last value of an option counts.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        found, options = self._split(ctx, args)
        # With `announce_to`, the arguments are from `start.schedulers`, which gives all options itself.
        if (run_dir := found.get("resume")) and "announce_to" not in found:
            args = self._with_earlier(ctx, options, found, run_dir)
        return super().parse_args(ctx, args)

    def _with_earlier(
        self,
        ctx: Any,
        options: Sequence[str],
        given: Mapping[str, Any],
        resumed: str,
    ) -> list[str]:
        """Return the earlier arguments, followed by the new arguments. Without a new script, the earlier one is used.

        Args:
            options: the options that are given.
            given: the given options, and the given script and its arguments, by their names.
            resumed: the directory of the earlier run, or the URL of the bucket with its checkpoints.

        Raises:
            ConfigurationError: the directory contains no run that has ended, its command cannot be repeated, or the
                directory is not trusted.
        """
        from ..run.resuming import earlier_run, fetch_run, has_finished

        run_dir, further, program, force = Path(resumed), [], _program(given), bool(given.get("force"))
        if is_bucket(resumed):
            run_dir, bucket = fetch_run(resumed, given.get("run_dir"), force=force)
            further = [f"--checkpoint-dir={bucket}"]
            options = [*_without(options, ("--resume", "--run-dir")), f"--resume={run_dir}"]
        again = shlex.join(["paceline", ctx.info_name, "--resume", str(run_dir)])
        file = earlier_run(run_dir, force=force)
        if not program and has_finished(run_dir):
            raise ConfigurationError(
                f"the run in {run_dir} has finished, so nothing is left to resume. To train longer, give the script "
                f"with other arguments: {again} SCRIPT ..."
            )
        words = shlex.split(file.command)
        if words[:2] != ["paceline", ctx.info_name]:
            by = f"by {file.command!r}" if file.command else "in a notebook"
            raise ConfigurationError(
                f"the run in {run_dir} was started {by}, so `paceline {ctx.info_name}` cannot resume it. Start it "
                "in the same way again, with this directory for `resume`."
            )
        found, before = self._split(ctx, words[2:])
        if Path(file.folder) != Path.cwd():
            found, before = self._split(ctx, [*_located(before, Path(file.folder)), *_program(found)])
        trusted = [] if given.get("trust") else _require_trusted(file, run_dir, found, given)
        if not program and (program := _program(found)):
            if HIDDEN in " ".join(program):
                raise ConfigurationError(
                    f"an argument of the script was secret, so the run directory {run_dir} does not contain it. Give "
                    f"the script with all of its arguments again: {again} {shlex.quote(program[0])} ..."
                )
            if Path(file.folder) != Path.cwd():
                raise ConfigurationError(
                    f"the run in {run_dir} was started in {printable(file.folder)}, and paths in its command refer "
                    "to this directory. Resume it there, or give the script and its arguments here."
                )
        kept = [*_without(before), *further]
        command = shlex.join([*words[:2], *kept, *_without(options), *program])
        return [
            *kept,
            *_without_dashes(options),
            *trusted,
            f"--command={command}",
            *(["--", *program] if program else []),
        ]

    def _split(self, ctx: Any, args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the options and arguments by their names, and the words before the script, if any.

        Wrong options are no error here: the command itself refuses them later.
        """
        args = self.completed(ctx, args)
        strict, ctx.resilient_parsing = ctx.resilient_parsing, True
        found, _, _ = self.make_parser(ctx).parse_args(args.copy())  # the parser empties its list
        ctx.resilient_parsing = strict
        return found, args[: len(args) - len(_program(found))]


def _require_trusted(
    file: RunFile, run_dir: Path, found: Mapping[str, Any], given: Mapping[str, Any]
) -> list[str]:
    """Require that a directory is trusted if it names code, places or addresses. At a terminal, ask the user.

    Args:
        file: the description of the run in the directory.
        run_dir: the directory.
        found: the options and the script in its command, by their names.
        given: the options and the script that the user has given, which replace those in the command.

    Returns:
        ["--trust"] if the user has trusted the directory now; [] if no answer was needed.

    Raises:
        ConfigurationError: the directory is not trusted.
    """
    from ..run.resuming import require_trust

    options = {**{row.name: row.option for row in SETTINGS.values() if row.trusted}, **OWN_TRUSTED}
    named = {
        option: value
        for name, option in options.items()
        if (value := _still_counting(found.get(name), given.get(name)))
    }
    if "sync" not in given and CONDITION.search(str(found.get("sync", ""))):
        named["--sync"] = str(found["sync"])
    if not _program(given) and _program(found):
        named = {"the command": file.command, **named}
    try:
        require_trust(file, run_dir, named)
    except ConfigurationError:
        if not _can_ask():
            raise
        print(
            f"You have not started the run in {printable(str(run_dir))}. Resuming it would use:",
            file=sys.stderr,
        )
        for name, value in named.items():
            print(f"  {name}: {printable(value)}", file=sys.stderr)
        if not typer.confirm("Is this what you want?", err=True):
            raise
        return ["--trust"]
    return []


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _still_counting(found: Any, given: Any) -> str:
    """Return, as a text, the part of an earlier value that still has an effect; "" if there is none.

    A new value replaces the earlier value. The values of an option that can be repeated add up.
    """
    if isinstance(found, list | tuple):
        return ", ".join(str(each) for each in found if each not in (given or ()))
    return str(found) if found and given is None else ""


def _program(found: Mapping[str, Any]) -> list[str]:
    """Return the script and its arguments; [] if there is no script."""
    return [found["script"], *(found.get("arguments") or ())] if found.get("script") else []


def _located(options: Sequence[str], folder: Path) -> list[str]:
    """Return the options with absolute paths. Relative paths refer to `folder`."""

    def located(path: str) -> str:
        return path if is_bucket(path) else str(folder / path)

    words: list[str] = []
    for word in options:
        name, equals, value = word.partition("=")
        if words and words[-1] in PATHS:
            word = located(word)
        elif name in PATHS and equals:
            word = f"{name}={located(value)}"
        words.append(word)
    return words


def _without_dashes(options: Sequence[str]) -> list[str]:
    """Return the options without a -- at their end."""
    return list(options[:-1] if options[-1:] == ["--"] else options)


def _without(options: Sequence[str], left_out: Collection[str] = NOT_REPEATED) -> list[str]:
    """Return the options without those in `left_out`; by default, the options that a resumed run repeats."""
    kept: list[str] = []
    left = _without_dashes(options)
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        if name not in left_out:
            kept.append(word)
        elif not equals and name not in FLAGS and left:
            left.pop(0)
    return kept
