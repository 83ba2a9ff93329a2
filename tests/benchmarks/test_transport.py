"""`python -m benchmarks transport`: what it measures, shows and refuses. No test checks how fast anything is."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import commands, transport
from benchmarks.commands import app_of
from benchmarks.harness import NOTHING_LEFT
from benchmarks.transport import GOALS, TransportRow, figures_of, goal_rows, plan
from benchmarks.transport.plan import (
    FLOOR,
    GLOO,
    OPTIMIZER,
    OPTIMIZERS,
    SHM_ASP,
    SHM_BSP,
    SOCKET_ASP,
    SOCKET_BSP,
    SYSTEMS,
    TCP_ASP,
    TCP_BSP,
    TURNS,
    Case,
    Turn,
)
from benchmarks.transport.systems import launch_paceline, measure_turn
from paceline.cli import console
from paceline.errors import RunFailedError
from tests.support.marks import thorough

KEYS = {"system", "transport", "mode", "size_mb", "workers", "median_ms", "low_ms", "high_ms"}
CASES = [case for turn in TURNS for case in turn]
DEADLINE_S = 120.0  # only reached if something hangs


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure few iterations."""
    monkeypatch.setattr(plan, "SECONDS", 0.001)


def tell(what: str, share: float, slow: bool = False) -> None:
    pass


def row(case: Case, size_mb: float, workers: int, median_ms: float) -> TransportRow:
    return TransportRow(
        **case._asdict(),
        size_mb=size_mb,
        workers=workers,
        median_ms=median_ms,
        low_ms=median_ms,
        high_ms=median_ms,
    )


def update(optimizer: str, median_ms: float, traffic_ms: float) -> TransportRow:
    return TransportRow(
        system="optimizer",
        transport="shm",
        mode="asp",
        size_mb=100.0,
        workers=1,
        median_ms=median_ms,
        low_ms=median_ms,
        high_ms=median_ms,
        optimizer=optimizer,
        traffic_ms=traffic_ms,
        fastest_ms=median_ms,
    )


def full(median_ms: float = 10_000.0) -> list[TransportRow]:
    """Return rows for everything that is measured by default."""
    sizes = [(size_mb, n) for size_mb in transport.SIZES_MB for n in transport.WORKERS]
    steps = [row(case, size_mb, n, median_ms) for size_mb, n in sizes for case in CASES]
    return steps + [update(name, median_ms, median_ms) for name in OPTIMIZERS]


def shown(rows: Sequence[TransportRow], most: int = 3) -> str:
    """Return the tables as text, 80 columns wide."""
    console = Console(file=StringIO(), width=80, color_system=None)
    for figures in figures_of(rows, 3)[:most]:
        console.print(figures.table())
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# -- a real run ----------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.usefixtures("few")
@pytest.mark.thorough
def test_a_small_run_ends_with_a_row_for_everything_there_is() -> None:
    result = CliRunner().invoke(app_of(["transport"]), ["transport", "--json", "--quick"])
    assert result.exit_code == 0, result.output
    _, *rows = map(json.loads, result.stdout.splitlines())
    steps = [found for found in rows if found.get("system", "optimizer") != "optimizer"]
    updates = [found for found in rows if found.get("system") == "optimizer"]
    assert [(found["system"], found["transport"], found["mode"]) for found in steps] == CASES
    assert all(set(found) == KEYS for found in steps)
    assert all((found["size_mb"], found["workers"]) == (0.004, 2) for found in steps)
    assert all(found["low_ms"] > 0 for found in (*steps, *updates))
    assert all(0 < found["fastest_ms"] <= found["low_ms"] for found in updates)
    assert [found["optimizer"] for found in updates] == ["SGD", "SGD momentum", "Adam", "AdamW"]
    assert all(set(found) == {*KEYS, "optimizer", "traffic_ms", "fastest_ms"} for found in updates)
    assert "0%, round 1 of 1, 0.004 MB, 2 workers, floor shm asp" in result.stderr


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("few")
def test_any_number_of_workers_and_servers_is_measured() -> None:
    """One of the sizes fits into the buffer of a socket, the other does not."""
    systems = ("floor", "socket", "gloo")
    steps, *_ = transport.measure(tell, (0.004, 3.0), (3,), servers=2, rounds=2, systems=systems)
    assert [row.case for row in steps.rows] == 2 * [case for case in CASES if case.system in systems]
    assert all(row.low_ms <= row.median_ms <= row.high_ms for row in steps.rows)


@pytest.mark.processes
@pytest.mark.usefixtures("few")
def test_a_run_changes_to_bsp_in_every_shard(tmp_path: Path) -> None:
    turn = Turn((SHM_ASP, SHM_BSP), 0.004, 2, 2, 10)
    launch_paceline(turn, tmp_path, tmp_path / "run")
    for index in range(2):
        trace = (tmp_path / "run" / f"trace-shard-{index}.jsonl").read_text()
        assert trace.count("ApplyPush") >= 2 * turn.iterations
        assert trace.count("ApplyMean") >= turn.iterations


@pytest.mark.thorough
@pytest.mark.processes
def test_a_process_that_fails_ends_all_with_its_traceback() -> None:
    turn = Turn((OPTIMIZER,), 0.004, 1, 1, 10, "no optimizer")
    with pytest.raises(RunFailedError, match="KeyError: 'no optimizer'"):
        measure_turn(turn)
    assert multiprocessing.active_children() == []


@pytest.mark.thorough
@pytest.mark.processes
def test_ctrl_c_ends_every_process_and_says_so() -> None:
    arguments = ["-m", "benchmarks", "transport", "--systems", "floor", "--rounds", "50"]
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as program:
        assert program.stderr is not None
        while "round 1" not in program.stderr.readline():
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        stdout, stderr = program.communicate(timeout=DEADLINE_S)
    assert (program.returncode, stdout) == (console.EXIT_INTERRUPTED, "")
    assert stderr.splitlines()[-1] == f"interrupted: {NOTHING_LEFT}"
    assert "Traceback" not in stderr


# -- the goals -----------------------------------------------------------------------------------------------


def test_the_goals_are_these() -> None:
    assert [tuple(goal) for goal in GOALS if goal.size_mb != 100.0] == [
        (SHM_ASP, FLOOR, 25.0, 2, 1.3, False),
        (GLOO, SHM_BSP, 25.0, 2, 4.0, True),
        (GLOO, SHM_BSP, 25.0, 4, 4.0, True),
        (SHM_ASP, None, 0.004, 2, 60.0, False),
        (TCP_BSP, SOCKET_BSP, 25.0, 2, 1.15, False),
        (TCP_BSP, SOCKET_BSP, 25.0, 4, 1.15, False),
        (GLOO, TCP_BSP, 25.0, 2, 0.8, True),
        (GLOO, TCP_BSP, 25.0, 4, 1.0, True),
    ]
    large = [(*goal[:2], *goal[3:]) for goal in GOALS if goal.size_mb == 25.0]
    assert [(*goal[:2], *goal[3:]) for goal in GOALS if goal.size_mb == 100.0][:-1] == large
    assert GOALS[-1].bound == 1.5


@pytest.mark.parametrize(
    ("rows", "figure", "met"),
    [
        ([row(SHM_ASP, 25.0, 2, 13.0), row(FLOOR, 25.0, 2, 10.0)], 1.3, True),
        ([row(SHM_ASP, 25.0, 2, 14.0), row(FLOOR, 25.0, 2, 10.0)], 1.4, False),
        ([row(GLOO, 100.0, 4, 40.0), row(SHM_BSP, 100.0, 4, 10.0)], 4.0, True),
        ([row(GLOO, 100.0, 4, 39.0), row(SHM_BSP, 100.0, 4, 10.0)], 3.9, False),
        ([row(SHM_ASP, 0.004, 2, 0.05)], 50.0, True),
        ([row(SHM_ASP, 0.004, 2, 0.07)], 70.0, False),
        ([row(TCP_BSP, 25.0, 4, 11.0), row(SOCKET_BSP, 25.0, 4, 10.0)], 1.1, True),
        ([row(TCP_BSP, 25.0, 4, 12.0), row(SOCKET_BSP, 25.0, 4, 10.0)], 1.2, False),
        ([row(TCP_BSP, 25.0, 2, 10.0), row(GLOO, 25.0, 2, 9.0)], 0.9, True),
        ([row(TCP_BSP, 25.0, 4, 10.0), row(GLOO, 25.0, 4, 9.0)], 0.9, False),
        ([update("Adam", 15.0, 10.0)], 1.5, True),
        ([update("Adam", 16.0, 10.0)], 1.6, False),
    ],
)
def test_a_goal_is_met_if_its_figure_keeps_to_the_bound(
    rows: list[TransportRow], figure: float, met: bool
) -> None:
    [found] = goal_rows(rows)
    assert found.figure == pytest.approx(figure)
    assert found.met == met


def test_goals_that_were_not_measured_are_left_out() -> None:
    assert goal_rows([]) == []
    assert goal_rows([row(SHM_ASP, 25.0, 2, 1.0), row(FLOOR, 25.0, 4, 1.0), row(FLOOR, 24.0, 2, 1.0)]) == []
    assert goal_rows([update("SGD", 1.0, 1.0), update("AdamW", 1.0, 1.0)]) == []
    assert [found.goal for found in goal_rows(full())] == list(GOALS)


# -- what is shown -------------------------------------------------------------------------------------------


def test_the_tables_fit_80_columns() -> None:
    text = shown(full())
    assert "…" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert sum(line.rstrip().endswith((" yes", " no")) for line in text.splitlines()) == len(GOALS)


def test_each_row_has_the_ratios_that_matter() -> None:
    times_ms = {
        FLOOR: 2,
        SOCKET_ASP: 4,
        SOCKET_BSP: 5,
        GLOO: 30,
        SHM_ASP: 3,
        SHM_BSP: 6,
        TCP_ASP: 8,
        TCP_BSP: 15,
    }
    text = shown([row(case, 25.0, 2, float(ms)) for case, ms in times_ms.items()], most=1)
    ends = {tuple(words[:3]): words[-2:] for line in text.splitlines() if (words := line.split())}
    assert ends["paceline", "shm", "asp"] == ["3.000", "1.50"]
    assert ends["paceline", "shm", "bsp"] == ["6.000", "5.00"]
    assert ends["paceline", "tcp", "asp"] == ["8.000", "2.00"]
    assert ends["paceline", "tcp", "bsp"] == ["2.00", "3.00"]


def test_what_was_not_measured_has_no_table() -> None:
    assert figures_of([], 1) == []
    [updates] = figures_of([update("SGD", 1.0, 1.0)], 1)
    assert updates.title == "One update of 100 MB of parameters"
    [steps] = figures_of([row(FLOOR, 1.0, 2, 1.0)], 1)
    assert steps.title == "One training step"


# -- the plan ------------------------------------------------------------------------------------------------


def test_small_models_are_one_tensor_and_sizes_are_whole_kilobytes() -> None:
    lengths = plan.lengths
    assert lengths(0.004) == [1024]
    assert lengths(0.0625) == [2048] * 8
    assert lengths(100.0) == [100 * 2**20 // 4 // 8] * 8
    assert lengths(plan.SMALLEST_MB) == [256]


def test_all_processes_of_a_turn_do_equally_many_iterations_fewer_of_the_slow() -> None:
    turns = plan.turns_of(transport.SIZES_MB, transport.WORKERS, 2, SYSTEMS, (25.0, 100.0))
    assert len(turns) == 4 * 2 * len(TURNS) + 2 * len(OPTIMIZERS)
    counts = [turn.iterations for turn in turns if turn.cases[0] == FLOOR and turn.workers == 2]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= plan.FEWEST


# -- what it refuses -----------------------------------------------------------------------------------------

BAD_INPUT = {
    "--sizes 0": "error: size is 0 MB, expected a number >= 0.001, for example 0.004, 1, 25, 100.",
    "--sizes -1": "error: size is -1 MB, expected",
    "--sizes 1,nan": "error: size is nan MB, expected",
    "--sizes inf": "error: size is inf MB, expected",
    "--sizes 1 big": "error: sizes is '1,big', expected numbers separated by commas",
    "--workers 0": "error: workers is 0, expected a whole number >= 1.",
    "--workers 2 2.5": "error: workers is 2.5, expected a whole number >= 1.",
    "--servers 0": "error: servers is 0, expected a whole number >= 1.",
    "--servers 65 --sizes 1 0.004": "error: servers is 65, expected at most 64",
    "--rounds 0": "error: rounds is 0, expected a whole number >= 1.",
    "--systems floor glo": "error: unknown system 'glo'; did you mean 'gloo'? Choices: floor, gloo, mxnet, ",
}


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "transport", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        commands.main()
    stdout, stderr = capsys.readouterr()
    assert (end.value.code, stdout) == (console.EXIT_BAD_INPUT, "")
    assert stderr.startswith(BAD_INPUT[arguments])
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "--sizes 1,25 --workers 3,5 --systems floor,gloo",
        *thorough("--sizes 1 25 --workers 3 5 --systems floor gloo"),
    ],
)
def test_lists_have_spaces_or_commas_between(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "measure_turn", lambda turn: {"asp": 1.0, "bsp": 1.0})
    result = CliRunner().invoke(app_of(["transport"]), ["transport", *arguments.split(), "--json"])
    conditions, *rows = map(json.loads, result.stdout.splitlines())
    given = conditions["options"]
    assert (given["sizes_mb"], given["workers"], given["systems"]) == ([1, 25], [3, 5], ["floor", "gloo"])
    assert {(row["size_mb"], row["workers"]) for row in rows} == {(1, 3), (1, 5), (25, 3), (25, 5)}
