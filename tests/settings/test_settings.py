"""The table of settings: every row is documented, and a new row reaches commands, Python, the job and the report."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
import typer
from typer.testing import CliRunner

import paceline
from paceline.cli.options import takes_settings
from paceline.cli.run import run
from paceline.errors import ConfigurationError
from paceline.run import job_options
from paceline.run.job import Job, decode_job, encode_job
from paceline.settings import SETTINGS, Setting, checked, table
from paceline.settings.checks import RUN, whole
from paceline.settings.table import shows_settings
from paceline.sim import simulate
from paceline.start.results import description_of


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_documented(name: str) -> None:
    row = SETTINGS[name]
    assert row.doc.endswith(".")
    assert row.help.endswith(".")
    words = " ".join((inspect.getdoc(paceline.launch) or "").split())
    assert f" {name}: {' '.join(row.doc.split())} " in words
    assert row.commands
    assert row.option.startswith("--")


@pytest.mark.parametrize("name", [name for name, row in SETTINGS.items() if row.field])
def test_every_setting_of_the_job_is_one_of_its_attributes_and_described_there(name: str) -> None:
    field = SETTINGS[name].field
    assert field in get_type_hints(Job)
    assert f" {field}: " in " ".join((Job.__doc__ or "").split())


def test_every_default_is_valid() -> None:
    checked({})


def test_a_job_with_all_defaults_is_the_same_on_another_machine() -> None:
    job = job_options.make_job(workers=2, dry_run=True)
    other = decode_job(encode_job(job), 0)
    assert msgspec.structs.replace(other, epoch_ns=job.epoch_ns) == job


def test_launch_shows_each_setting_with_its_default_and_its_type() -> None:
    parameters = inspect.signature(paceline.launch).parameters
    assert {name: parameters[name].default for name in SETTINGS} == {
        name: row.default for name, row in SETTINGS.items()
    }
    assert parameters["shards"].annotation == int | None


def test_an_argument_that_is_no_setting_is_refused_and_a_similar_one_named() -> None:
    with pytest.raises(TypeError, match=r"unknown argument 'shard'; did you mean 'shards'\?"):
        paceline.launch(print, workers=1, shard=2)  # type: ignore[call-arg]


def test_a_simulation_has_the_defaults_of_a_run() -> None:
    parameters = inspect.signature(simulate).parameters
    # A directory is new in a simulation, and is not written unless it is named.
    shared = parameters.keys() & SETTINGS.keys()
    assert {"sync", "shards", "slicing", "overlap", "on_nan", "hyperparameters", "wire", "guard"} <= shared
    for name in shared:
        assert parameters[name].default == SETTINGS[name].default


# A setting that does not exist takes a row and an attribute of the job. What uses the setting is the test.

ROW = Setting(
    default=3,
    doc="number of the newest files that are kept.",
    help="Number of the newest files that are kept.",
    check=whole(least=1),
)


class LongerJob(Job, frozen=True, kw_only=True):
    newest: int


@pytest.fixture
def with_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.SETTINGS, "newest", ROW.named("newest"))
    monkeypatch.setitem(table.TYPES, "newest", int)
    monkeypatch.setattr(job_options, "Job", LongerJob)


def made(**settings: Any) -> Job:
    return job_options.make_job(workers=1, dry_run=True, **settings)


@pytest.mark.usefixtures("with_a_row")
def test_a_new_row_reaches_the_processes_of_a_run_and_its_report() -> None:
    job = made(newest=5)
    received = msgspec.json.decode(encode_job(job), type=LongerJob)
    assert (received.newest, made().newest) == (5, 3)  # type: ignore[attr-defined]
    told = {setting.name: (setting.value, setting.default) for setting in description_of(job, []).settings}
    assert told["--newest"] == ("5", False)
    with pytest.raises(ConfigurationError, match="newest is 0, expected a whole number >= 1"):
        made(newest=0)


@pytest.mark.usefixtures("with_a_row")
def test_a_new_row_is_an_option_of_the_commands_and_an_argument_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    @takes_settings(RUN, before="last")
    def command(last: Annotated[int, typer.Option("--last")] = 0, **settings: Any) -> None:
        given.update(settings)

    app = typer.Typer()
    app.command()(command)
    monkeypatch.setenv("COLUMNS", "120")
    assert "--newest" in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["--newest", "7"]).exit_code == 0
    assert made(**given).newest == 7  # type: ignore[attr-defined]

    @shows_settings
    def function(**settings: Any) -> None:
        """Do something.

        Args:
            settings: all of them.

        Raises:
            ValueError: never.
        """

    assert inspect.signature(function).parameters["newest"].default == 3
    assert "    newest: number of the newest files that are kept.\n\nRaises:" in (
        inspect.getdoc(function) or ""
    )


def test_the_command_run_takes_each_of_its_settings() -> None:
    expected = {name for name, row in SETTINGS.items() if RUN in row.commands}
    assert expected <= inspect.signature(run).parameters.keys()


NEW_ROW = """
    newest: Annotated[
        int,
        Setting(
            default=3,
            doc="number of the newest files that are kept.",
            help="Number of the newest files that are kept.",
            check=whole(least=1),
        ),
    ]
"""

SCRIPT = """
import torch
import paceline
from paceline.train.session import current

model = torch.nn.Linear(1, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1)).sum().backward()
optimizer.step()
print("kept:", current()._job.newest)
"""


@pytest.mark.thorough
def test_a_setting_that_is_added_in_two_places_of_the_source_reaches_a_worker(tmp_path: Path) -> None:
    """The third place is the code that uses the setting: here, the script."""
    source = tmp_path / "paceline"
    shutil.copytree(Path(paceline.__file__).parent, source)
    for file, before, added in (
        ("settings/table.py", "\n\nTYPES: ", NEW_ROW),
        ("run/job.py", "\n    def __repr__", "    newest: int\n"),
    ):
        head, found, rest = (source / file).read_text().partition(before)
        assert found
        (source / file).write_text(f"{head.rstrip()}\n{added}{found}{rest}")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "-n", "1", "--newest", "7", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "kept: 7" in ended.stdout, ended.stderr
    described = json.loads(next(tmp_path.glob("runs/*/run.json")).read_text())
    assert {"name": "--newest", "value": "7", "default": False} in described["settings"]
