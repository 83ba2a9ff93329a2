"""The benchmark that compares Paceline with other systems: what is left to run, the table, and what is refused.

With PACELINE_PEERS (`make peers`), the last test runs each system for a few steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.commands import app_of
from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from benchmarks.peers import measurement, work
from benchmarks.peers.measurement import FULL, error_in
from benchmarks.peers.plan import (
    CONDITIONS,
    LIMIT_S,
    RATES,
    SEEDS,
    SYSTEMS,
    TUNING_SEED,
    Case,
    Outcome,
    append_results,
    best_rate,
    left,
    quick_cases,
    read_results,
    rows,
)
from docs.make_comparison import findings, text
from paceline.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
MACHINES = "benchmarks.peers.measurement.require_machines"


def outcome(case: Case, time_s: float | None = 10.0, **fields: object) -> Outcome:
    return Outcome(*case, time_s=time_s, **{"sent_mb": 5.0, "lost_samples": 0, "loss": 2.7, **fields})  # type: ignore[arg-type]


def tuned(best: float = RATES[1]) -> list[Outcome]:
    """Return the runs with which all systems have found a rate."""
    cases = left([])
    return [outcome(case, 10.0 + (case.lr != best)) for case in cases]


def complete() -> list[Outcome]:
    found = tuned()
    while cases := [*left(found)]:
        found += [outcome(case) for case in cases]
    return found


# -- what is left ---------------------------------------------------------------------------------------------------


def test_all_systems_find_their_rate_before_anything_else() -> None:
    cases = [*left([])]
    assert {case.condition for case in cases} == {"equal"}
    assert {case.seed for case in cases} == {TUNING_SEED}
    assert TUNING_SEED not in SEEDS
    own = {name for name, system in SYSTEMS.items() if not system.rate_of}
    assert {(case.system, case.lr) for case in cases} == {(name, lr) for name in own for lr in RATES}
    assert [*left(tuned()[:-1])] == cases[-1:]


def test_then_each_system_runs_with_its_best_rate_one_seed_after_the_other() -> None:
    cases = [*left(tuned(RATES[2]))]
    assert {case.lr for case in cases} == {RATES[2]}
    assert [case.seed for case in cases] == sorted(case.seed for case in cases)
    found = {(case.system, case.condition) for case in cases}
    wanted = {
        (name, each) for name, system in SYSTEMS.items() for each in CONDITIONS if each not in system.without
    }
    assert found == wanted
    assert len(cases) == len(SEEDS) * len(wanted)
    assert len(complete()) == measurement.TOTAL


def test_a_rate_that_reaches_the_target_beats_those_that_do_not() -> None:
    cases = [case for case in left([]) if case.system == "ddp"]
    none = [outcome(case, None, loss=3.0 - case.lr) for case in cases]
    assert best_rate(none, "ddp") == max(RATES)
    assert best_rate([outcome(cases[0], 80.0), *none[1:]], "ddp") == cases[0].lr
    assert best_rate(none[1:], "ddp") is None
    assert best_rate(none, "ddp-by-hand") == max(RATES)  # has the rate of DDP


def test_a_system_whose_runs_all_fail_has_no_rate_and_is_left_out() -> None:
    found = [
        outcome(case, None, loss=None, failure="x") if case.system == "hivemind" else outcome(case)
        for case in left([])
    ]
    assert best_rate(found, "hivemind") is None
    assert "hivemind" not in {case.system for case in left(found)}
    assert {row.remark for row in rows(found) if row.system == "hivemind, gradients"} == {"failed: x"}


def test_what_a_file_has_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made, found = tmp_path / "results.jsonl", list[Case](), complete()

    def run_case(case: Case, python: str, limits: object) -> Outcome:
        assert limits is FULL
        made.append(case)
        if len(made) == 3:
            raise KeyboardInterrupt
        return next(each for each in found if each.case == case)

    monkeypatch.setattr(measurement, "run_case", run_case)
    monkeypatch.setattr(measurement, "versions_of", lambda python: {"torch": "2"})
    monkeypatch.setattr(measurement, "busy_share", lambda: 0.0)
    with pytest.raises(KeyboardInterrupt):
        measurement.measure(lambda what, share, slow=False: None, results=str(path))
    assert made == [*islice(left([]), 3)]
    path.write_bytes(path.read_bytes() + b'{"type":"outcome","system":"ddp"')  # killed while it wrote a line
    _, kept = read_results(path)
    assert [each.case for each in kept] == made[:2]
    append_results(path, *found[2:])
    [figures] = measurement.measure(lambda what, share, slow=False: None, results=str(path))
    assert len(made) == 3
    assert len(figures.rows) == len(SYSTEMS) * len(CONDITIONS)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="is not a file of results"):
        read_results(path)


# -- what is shown --------------------------------------------------------------------------------------------------


def row_of(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the cells of the first row: condition, system, seconds, low - high, reached, and so on."""
    return tuple(cell(rows(outcomes)[0]) for cell in measurement.COLUMNS.values())  # type: ignore[misc]


def test_a_row_has_medians_over_the_seeds() -> None:
    cases = [Case("ddp", "equal", 0.004, seed) for seed in SEEDS]
    tuning = outcome(Case("ddp", "equal", 0.004, TUNING_SEED), 1.0)
    times = [outcome(case, 10.0 + case.seed, sent_mb=case.seed * 2.0) for case in cases]
    assert row_of([tuning, *times])[2:] == ("12.0", "11.0 - 13.0", "3 of 3", "4.0", "0", "0.004")
    once = [outcome(cases[0], None), *times[1:]]
    assert row_of(once)[2:5] == ("13.0", "12.0 - 13.0", "2 of 3")
    assert row_of([outcome(case, None) for case in cases])[2] == f"not in {LIMIT_S:g} s"
    failed = [outcome(case, None, failure="worker 1 ended") for case in cases]
    assert row_of(failed)[2] == "failed: worker 1 ended"


def test_what_a_system_cannot_do_is_said_in_words() -> None:
    found = {(row.system, row.condition): row.remark for row in rows([])}
    assert found["DDP, equal shares", CONDITIONS["killed"].title] == "cannot: all workers end"
    assert found["Paceline asp", CONDITIONS["killed"].title] == "not measured"


def test_the_page_says_who_was_fastest_and_where_paceline_was_not() -> None:
    assert text([], []) == ""
    found = [
        each if each.case.system != "ddp" or each.case.condition != "equal" else outcome(each.case, 8.0)
        for each in complete()
    ]
    found = [
        outcome(each.case, 6.0) if each.case[:2] == ("paceline-asp", "unequal") else each for each in found
    ]
    said = findings(rows(found))
    assert len(said) == len(CONDITIONS)
    assert said[0] == (
        "Equal, 1 Gbit/s: the fastest is DDP, equal shares (8.0 s). Paceline is not: its best is bsp (10.0 s), "
        "1.25 times slower."
    )
    assert said[1].startswith(
        "One 3 x slower, 1 Gbit/s: the fastest is Paceline asp (6.0 s), 1.67 times faster than "
    )
    page = text(found, [])
    assert "| DDP, equal shares | cannot: all workers end |" in page
    assert f"{measurement.TOTAL} of {measurement.TOTAL} runs" in page


# -- the work ------------------------------------------------------------------------------------------------------


def test_workers_draw_different_samples_that_are_never_those_of_the_validation() -> None:
    text = work.Text()
    one, other = (next(text.batches(1, machine, 4)) for machine in (0, 1))
    assert one.shape == (4, work.CONTEXT + 1)
    assert not torch.equal(one, other)
    assert torch.equal(one, next(text.batches(1, 0, 4)))
    assert text.validation().shape == (work.TESTED, work.CONTEXT + 1)
    whole = work.library_text()
    assert len(text) + work.CONTEXT + work.TESTED * (work.CONTEXT + 1) == len(whole)


def test_all_processes_begin_with_the_same_weights_and_the_gradient_is_finite() -> None:
    one, other = work.new_model(3), work.new_model(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    loss = work.loss_of(one, next(work.Text().batches(0, 0, 2)))
    loss.backward()
    assert 5 < loss.item() < 7
    assert all(p.grad is not None and p.grad.isfinite().all() for p in one.parameters())


def test_a_worker_records_its_steps_and_saves_weights_on_machine_0_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = work.Task("ddp", str(tmp_path), ("a", "b", "c"), (1.0, 1.0, 3.0), 0.004, 1, again=True)
    model = work.new_model(1)
    for machine in (0, 2):
        monkeypatch.setenv("PEERS_MACHINE", str(machine))
        worker = work.Worker(task)
        worker.begin()
        worker.computed(14)
        worker.kept()
        worker.computed(14)
        worker.discarded()
        worker.save(model)
        lines = (tmp_path / f"events-{machine}.jsonl").read_text().splitlines()
        assert work.lost_samples(map(json.loads, lines)) == 14
    [saved] = tmp_path.glob("weights-*")
    at_s, loss = measurement.evaluation()(saved)
    assert at_s > 0
    assert loss == pytest.approx(work.loss_of(model, work.Text().validation()).item())


def test_the_last_exception_of_a_log_is_found() -> None:
    log = "Traceback (most recent call last):\n  File x\nValueError: no\nwarning\n[rank1]: a.b.DistError: gone\nbye"
    assert error_in(log) == "a.b.DistError: gone"
    assert error_in("fine") == ""


# -- the machines ---------------------------------------------------------------------------------------------------


LAUNCHER = """
import subprocess, sys, time
from benchmarks.overlap.namespaces import NetworkLink
from benchmarks.peers.machines import machines
with machines(2, NetworkLink("1gbit", 0.0)) as on, open(sys.argv[1], "wb") as log:
    on[0].start("sh", "-c", "hostname; ls /proc | grep -c '^[0-9]'", env={}, log=log).wait()
    on[1].start("sleep", "1000", env={}, log=subprocess.DEVNULL)  # may say that the machine went off before it began
    on[1].switch_off()
    on[1].switch_on()
    program = on[1].start("sleep", "1000", env={}, log=subprocess.DEVNULL)
    print(program.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"network namespaces need {why_not()}")
def test_a_machine_has_its_own_processes_and_ends_with_the_launcher_even_if_that_is_killed(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(log)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        program = int(launcher.stdout.readline())
        name, count = log.read_text().split()
        assert name == "machine0"
        assert int(count) < 8  # the first process and those that count
        os.kill(program, 0)
        launcher.kill()
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{program}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    with network(1, NetworkLink()):  # removes what the launcher has left
        pass


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_python_without_the_systems_is_refused_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MACHINES, lambda: None)
    for python, words in ((sys.executable, "No package metadata"), ("/nowhere/python", "No such file")):
        with pytest.raises(ConfigurationError, match=words) as error:
            CliRunner().invoke(app_of(["peers"]), ["peers", "--python", python], catch_exceptions=False)
        assert "make .venv-peers/.ready" in str(error.value)


def test_what_is_missing_for_machines_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match=r"needs root \(try sudo\) .* the command 'nsenter'"):
        CliRunner().invoke(app_of(["peers"]), ["peers"], catch_exceptions=False)


@pytest.mark.processes
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif("PACELINE_PEERS" not in os.environ, reason="only `make peers` tries all systems")
def test_each_system_trains_and_those_that_can_go_on_without_a_machine() -> None:
    command = [sys.executable, "-m", "benchmarks", "peers", "--quick", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert ended.returncode == 0
    _, *found = map(json.loads, ended.stdout.splitlines())
    assert [each["system"] for each in found] == [case.system for case in quick_cases()]
    for each in found:
        assert each["failure"] == "", each
        assert each["time_s"] is not None, each
        assert (each["returned_s"] is not None) == (each["condition"] == "killed"), each
