"""What another model would have decided about a recorded run, and `paceline replay`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import ConfigurationError
from paceline.sim import Cluster, Uniform, simulate
from paceline.sync import parse
from paceline.trace.replay import decisions_of, redecide

CLUSTER = Cluster([1.0, Uniform(low=0.9, high=1.1), 3.0], servers=2)
RUNNER = CliRunner()


@pytest.mark.parametrize(
    "sync",
    [
        "bsp",
        "asp",
        "ssp:staleness=2",
        "pssp:staleness=1",
        "drop-stragglers:quorum=2",
        "naive-waiting:delay_s=0.5",
    ],
)
def test_the_same_model_decides_the_same(sync: str) -> None:
    result = simulate(CLUSTER, sync, 20, seed=3, record=True)
    for trace in result.trace[:2]:
        recorded, again = decisions_of(trace), redecide(trace, parse(sync))
        assert again == recorded
        assert again.differs_s is None
        assert not again.too_early


def test_asp_would_have_delayed_nothing_of_a_run_under_bsp() -> None:
    [trace, _, _] = simulate(CLUSTER, "bsp", 20, record=True).trace
    recorded, other = decisions_of(trace), redecide(trace, parse("asp"))
    assert (recorded.updates, other.updates) == (20, 60)
    assert sum(recorded.waited_s.values()) == pytest.approx(2 * 20 * 2.0, rel=0.05)
    assert not any(other.waited_s.values())
    assert not other.delayed
    assert other.differs_s == pytest.approx(0.9, abs=0.2)


def test_bsp_would_have_deferred_the_pushes_of_a_run_under_asp() -> None:
    [trace, _, _] = simulate(CLUSTER, "asp", 9, record=True).trace
    other = redecide(trace, parse("bsp"))
    # By hand: worker 2 pushes at 3, 6, ..., 27 s. Each of its pushes closes a round.
    assert (other.pushes, other.updates, other.mean_staleness) == (27, 9, 0.0)
    assert set(other.too_early) == {0, 1}
    assert other.too_early[0] == 8
    assert other.waited_s[2] == 0.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    simulate(CLUSTER, "ssp:staleness=2", 20, run_dir=tmp_path / "run")
    return tmp_path / "run"


def test_the_command_repeats_all_decisions(run: Path) -> None:
    ended = RUNNER.invoke(app, ["replay", str(run)])
    assert ended.exit_code == 0, ended.output
    assert ended.output.endswith(
        "events at 3 state machines. Decisions that differ from the recorded ones: 0\n"
    )


def test_the_command_names_decisions_that_differ(run: Path) -> None:
    path = run / "trace-shard-1.jsonl"
    lines = path.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if '"AnswerPull"' in line)
    entry = json.loads(lines[number])
    entry["actions"] = []
    lines[number] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    ended = RUNNER.invoke(app, ["replay", str(run)])
    assert ended.exit_code == 1
    assert f"shard 1: entry {number - 1}: " in ended.output
    assert "Decisions that differ from the recorded ones: 1\n" in ended.output


def test_the_command_tells_what_another_model_decides(run: Path) -> None:
    ended = RUNNER.invoke(app, ["replay", str(run), "--sync", "asp"])
    assert ended.exit_code == 0, ended.output
    assert "shard 0: asp decides differently from ssp:staleness=2, first at" in ended.output
    ended = RUNNER.invoke(app, ["replay", str(run), "--sync", "ssp:staleness=7"], env={"COLUMNS": "80"})
    table = ended.output.partition("shard 0:")[0]
    assert "staleness=2" in "".join(table.split()), "the parameters of equal models tell their rows apart"
    assert "staleness=7" in "".join(table.split())
    ended = RUNNER.invoke(app, ["replay", str(run), "--sync", "bsp", "--json"])
    [first, _] = json.loads(ended.output)
    assert (first["other"]["sync"], first["other"]["updates"]) == ("bsp", 20)


def test_another_model_needs_the_beginning_of_the_traces(run: Path) -> None:
    path = run / "trace-shard-0.jsonl"
    header, _, entries = path.read_text().partition("\n")
    kept = {"sync": "ssp:staleness=2", "workers": [0, 1, 2]}
    path.write_text(json.dumps({**json.loads(header), "format": 5, "keyframe": kept}) + "\n" + entries)
    ended = RUNNER.invoke(app, ["replay", str(run), "--sync", "asp"])
    assert "the beginning of the traces was deleted" in str(ended.exception)


def test_a_command_that_is_suggested_quotes_the_directory(run: Path, tmp_path: Path) -> None:
    ended = RUNNER.invoke(app, ["replay", str(run.rename(tmp_path / "my run")), "--sync", "elastic-bsp"])
    _, _, command = str(ended.exception).partition("with the recorded times instead: ")
    assert shlex.split(command) == ["paceline", "simulate", f"{tmp_path}/my run", "--sync", "elastic-bsp"]


def test_models_that_plan_and_folders_without_traces_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, reason in (
        ([str(run), "--sync", "elastic-bsp"], "elastic-bsp plans for the whole job"),
        ([str(tmp_path / "none")], "none' does not exist; give the directory of a run"),
        ([str(tmp_path / "empty")], "contains no traces"),
    ):
        ended = RUNNER.invoke(app, ["replay", *arguments])
        assert isinstance(ended.exception, ConfigurationError)
        assert reason in str(ended.exception)
