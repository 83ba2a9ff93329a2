"""Studies: the same bytes however they are carried out, failing runs, bad input, and what is written."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import paceline
from paceline.cli import main
from paceline.errors import ConfigurationError
from paceline.files import Unfinished
from paceline.lab.pool import in_processes, in_this_process
from paceline.sim import Cluster, simulate
from paceline.studies.cells import Cell, Folder, Measured, Outcome, choose, tuning_cells
from paceline.studies.description import Study, describe, read_study_file
from paceline.studies.figures import _label_decades, pictures_of
from paceline.studies.pages import summary_md, table_tex
from paceline.studies.results import StudyResult, make_result
from paceline.studies.study import NO_FIGURES, run_study, write
from tests.support.marks import thorough

EXAMPLE = Path(__file__).parents[2] / "examples" / "study" / "study.toml"

SMALL: dict[str, Any] = {
    "problem": "quadratic",
    "models": ["bsp", "asp"],
    "clusters": {"jitter": {"kind": "jitter", "workers": 3}},
    "seeds": 2,
    "tuning_seeds": 1,
    "grid": {"rate": [0.05, 0.4]},
    "arguments": {"iterations": 12},
    "target": {"metric": "loss", "value": 0.3},
}


def small(**entries: Any) -> Study:
    return describe({**SMALL, **entries}, Path.cwd())


def carried_out(study: Study, out: Path) -> StudyResult:
    return run_study(study, out, in_this_process, lambda what, share: None)


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their paths in it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "runs.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResult, Path]:
    out = tmp_path_factory.mktemp("studies") / "small"
    result = carried_out(small(), out)
    write(result, out)
    return result, out


def test_a_study_writes_tables_figures_and_a_summary(done: tuple[StudyResult, Path]) -> None:
    _, out = done
    names = {path for path in content(out) if not path.startswith("cells/")}
    figures = ["loss-over-seconds", "loss-over-updates", "time-to-target", "loss-and-time", "staleness"]
    figures += ["time-of-workers", "tuning"]
    assert names == {
        "study.json",
        "runs.csv",
        "curves.csv",
        "summary.md",
        "table.tex",
        *(f"figures/{name}.{ending}" for name in figures for ending in ("pdf", "png")),
    }
    assert len(rows_of(out)) == 4 + 4  # 2 models with 2 rates and 1 seed; 2 models with 2 seeds
    assert (out / "figures" / "staleness.pdf").read_bytes().startswith(b"%PDF")


def test_the_tables_say_what_a_simulation_says(done: tuple[StudyResult, Path]) -> None:
    result, out = done
    row = next(row for row in rows_of(out) if row["purpose"] == "evaluation" and row["model"] == "asp")
    study = result.study
    run = study.trained.run({"iterations": 12, "rate": float(row["rate"])}, 0)
    own = simulate(
        study.clusters["jitter"], "asp", seed=int(row["seed"]), train_fn=run.function, on_nan="skip"
    )
    points = own.history["loss"].points
    assert float(row["final_loss"]) == pytest.approx(points[-1].value)
    assert float(row["seconds"]) == pytest.approx(own.measures.duration_s)
    assert int(row["updates"]) == own.updates
    assert float(row["mean_staleness"]) == pytest.approx(own.measures.mean_staleness)
    first = next(point.time_s for point in points if point.value <= 0.3)
    assert float(row["seconds_to_target"]) <= first  # interpolated between two evaluations


def test_another_call_computes_nothing_and_writes_the_same(done: tuple[StudyResult, Path]) -> None:
    _, out = done
    before = content(out)
    told: list[str] = []

    def none(*_: object, **__: object) -> Iterator[Any]:
        told.append("called")
        yield from ()

    run_study(
        small(), out, lambda function, tasks, fresh=False: none() if tasks else iter(()), lambda *_: None
    )
    assert content(out) == before
    assert not told


def test_missing_runs_are_made_again_and_left_overs_removed(done: tuple[StudyResult, Path]) -> None:
    _, out = done
    before = content(out)
    cells = sorted((out / "cells").iterdir())
    cells[0].unlink()
    cells[-1].unlink()
    (out / "cells" / ".x.json.0.unfinished").write_bytes(b"half")
    carried_out(small(), out)
    assert content(out) == before


@pytest.mark.parametrize("call", ["write_bytes", "mkdir"])
def test_a_study_that_was_killed_before_its_first_run_goes_on(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = small().identity

    class Killed(BaseException):
        pass

    def kill(path: Path, *arguments: Any, **options: Any) -> None:
        made(path, *arguments, **options)
        if path.parent == tmp_path / "out":
            raise Killed

    with monkeypatch.context() as patched:
        made = getattr(Path, call)
        patched.setattr(Path, call, kill)
        patched.setattr(Unfinished, "discard", lambda unfinished: None)
        with pytest.raises(Killed):
            Folder(tmp_path / "out", identity)
    assert [*(tmp_path / "out").iterdir()]
    Folder(tmp_path / "out", identity)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"study.json", "cells"}


def test_a_folder_of_another_study_is_refused(done: tuple[StudyResult, Path], tmp_path: Path) -> None:
    _, out = done
    with pytest.raises(ConfigurationError, match="belongs to another study: 'seeds' differs"):
        carried_out(small(seeds=3), out)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="is not empty and contains no study"):
        carried_out(small(), tmp_path)
    with pytest.raises(ConfigurationError, match=r"notes\.txt cannot be written: Not a directory"):
        carried_out(small(), tmp_path / "notes.txt")
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"study\.json is damaged: .*Choose another folder"):
        carried_out(small(), tmp_path)


def test_another_target_needs_no_new_runs_with_the_same_choice(tmp_path: Path) -> None:
    """The target is not part of a run, so it may be changed when all curves are known."""
    study = small(grid={"rate": [0.4]})
    carried_out(study, tmp_path / "out")
    cells = sorted(path.name for path in (tmp_path / "out" / "cells").iterdir())
    result = carried_out(
        small(grid={"rate": [0.4]}, target={"metric": "loss", "value": 0.2}), tmp_path / "out"
    )
    assert sorted(path.name for path in (tmp_path / "out" / "cells").iterdir()) == cells
    assert {row.target for row in result.rows} == {0.2}


def test_a_metric_that_nobody_logs_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    study = small(target={"metric": "accuracy", "value": 0.9})
    with pytest.raises(
        ConfigurationError, match=r"metric 'accuracy', but a run of quadratic has logged only loss"
    ):
        carried_out(study, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_target_may_be_what_the_reference_reaches(tmp_path: Path) -> None:
    result = carried_out(small(target={"metric": "loss", "of": "bsp", "within": 0.05}), tmp_path / "out")
    bsp, asp = result.rows
    assert bsp.target == asp.target == pytest.approx(bsp.final.value + 0.05)
    assert bsp.reached == 2


def ended(*losses: tuple[float, float]) -> Outcome:
    """The result of a run that has logged these losses, each with its time."""
    return Outcome(
        curve=tuple(Measured(seconds, 1, 0, loss) for seconds, loss in losses),
        metrics=("loss",),
        seconds=20.0,
        updates=1,
        samples=0,
        gradients=1,
        staleness={0: 1},
        time={"computing": 1.0},
        worker_samples={},
        bytes_sent=0,
        restarts=0,
        findings=(),
    )


def test_a_model_without_a_choice_sets_the_target_for_the_choices_of_the_others() -> None:
    study = small(
        models=[{"sync": "bsp", "grid": {"rate": [0.4]}}, "asp"], target={"metric": "loss", "of": "bsp"}
    )
    runs = {
        ("bsp", 0.4): ended((9.0, 0.5)),
        ("asp", 0.05): ended((9.0, 0.6), (18.0, 0.1)),
        ("asp", 0.4): ended((5.0, 0.4)),  # sooner at the target, but with a worse final value
    }
    found = {cell: runs[cell.contender, float(dict(cell.point)["rate"])] for cell in tuning_cells(study)}
    assert {contender: choice.point for (_, contender), choice in choose(study, found.get).items()} == {
        "bsp": (("rate", 0.4),),
        "asp": (("rate", 0.4),),
    }


def test_names_and_numbers_are_shown_as_they_are_in_the_tables() -> None:
    study = small(
        models=["bsp", {"sync": "asp", "name": "asp|^2"}],
        grid={"rate": [0.4]},
        budget={"updates": 1_234_567, "seconds": 0.5},
    )

    def find(cell: Cell) -> Outcome:
        return ended((1.0, 0.5), (3.0, 0.2))

    result = make_result(study, choose(study, find), find, [], [])
    summary = summary_md(result, [])
    assert "A run ends after 0.5 virtual seconds or 1234567 updates at the latest." in summary
    assert r"| **asp\|^2** | 0.4 |" in summary
    assert r"\textbf{asp\textbar{}\textasciicircum{}2} & 0.4 &" in table_tex(result)


def test_nothing_reaches_the_target_of_a_model_whose_training_diverges() -> None:
    study = small(grid={"rate": [0.4]}, target={"metric": "loss", "of": "bsp"})

    def find(cell: Cell) -> Outcome:
        diverges = cell.contender == "bsp" and cell.seed == 1
        return ended((1.0, 0.5), (3.0, math.inf if diverges else 0.2))

    result = make_result(study, choose(study, find), find, [], [])
    assert [row.reached for row in result.rows] == [0, 0]
    assert "3 workers; target unknown." in summary_md(result, [])


def test_a_run_that_fails_in_the_tuning_counts_as_one_that_never_reaches_the_target() -> None:
    study = small(models=["asp"], tuning_seeds=[1, 2, 3], seeds=[4])
    found = {cell: ended((9.0, 0.2)) for cell in tuning_cells(study) if cell.point == (("rate", 0.05),)}
    lucky = Cell("jitter", "asp", (("rate", 0.4),), 3)  # the two other runs with this rate have failed
    found[lucky] = ended((1.0, 0.1))
    assert choose(study, found.get)["jitter", "asp"].point == (("rate", 0.05),)


def test_runs_that_fail_stay_in_the_number_of_runs() -> None:
    study = small(models=["bsp", "asp"], grid={"rate": [0.4]}, seeds=5)
    choices = choose(study, lambda cell: None)

    def find(cell: Cell) -> Outcome | None:
        return None if cell.contender == "asp" and cell.seed >= 2 else ended((1.0, 0.5), (3.0, 0.2))

    result = make_result(study, choices, find, [], [])
    summary, table = summary_md(result, []), table_tex(result)
    assert "| 5 of 5 |" in summary
    assert "| 2 of 5, 3 failed |" in summary
    assert "asp fails in 3 of 5 runs; its times and values are those of the other runs." in summary
    assert "& 2/5, 3 failed &" in table


def test_all_models_may_have_the_hyper_parameters_of_the_reference(tmp_path: Path) -> None:
    result = carried_out(small(tuning="reference", reference="asp"), tmp_path / "out")
    assert {cell.contender for cell, _ in result.tuning} == {"asp"}
    assert len({row.choice.point for row in result.rows}) == 1


def test_a_rate_at_the_edge_of_the_grid_is_said(tmp_path: Path) -> None:
    result = carried_out(small(), tmp_path / "out")
    assert all(row.choice.edges for row in result.rows)  # with two values, each is at an edge
    assert "of the grid, so a better value may lie outside the grid" in summary_md(result, [])


def test_a_run_that_never_reaches_the_target_is_shown_as_such(tmp_path: Path) -> None:
    result = carried_out(
        small(models=["bsp", "asp"], grid={"rate": [0.4]}, target={"metric": "loss", "value": 0.01}),
        tmp_path / "out",
    )
    assert all(row.reached == 0 and math.isinf(row.time["seconds"].value) for row in result.rows)
    assert "bsp never reaches the target in 2 of 2 runs" in summary_md(result, [])
    assert "0/2" in table_tex(result)
    assert "% Dagger: significantly different" in table_tex(result)
    assert pictures_of(result)


@pytest.mark.parametrize(
    ("models", "grid"),
    [
        (["bsp", {"sync": "asp", "grid": {"momentum": [0.0, 0.5]}}], {"rate": [0.1, 0.2, 0.4]}),
        (["bsp", {"sync": "asp", "grid": {}}], {"rate": ["slow", "fast"]}),
    ],
    ids=["another grid", "text"],
)
def test_every_grid_can_be_drawn(models: list[Any], grid: dict[str, list[Any]]) -> None:
    study = small(models=models, grid=grid)
    cells = tuning_cells(study)
    result = make_result(
        study, choose(study, lambda cell: ended((1.0, 0.2))), lambda cell: ended((1.0, 0.2)), cells, []
    )
    figure = pictures_of(result)["tuning"]
    figure.draw_without_rendering()
    [axes] = figure.axes
    assert axes.get_xlabel() == "rate"
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(value) for value in grid["rate"]]


def test_the_tables_are_written_even_if_the_figures_cannot_be_drawn(
    done: tuple[StudyResult, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no figure")

    monkeypatch.setattr("paceline.studies.figures._front", fail)
    with pytest.raises(ValueError, match="no figure"):
        write(done[0], tmp_path)
    tables = ("runs.csv", "curves.csv", "table.tex", "summary.md")
    assert {name: (tmp_path / name).read_bytes() for name in tables} == {
        name: (done[1] / name).read_bytes() for name in tables
    }


@pytest.mark.thorough
def test_long_names_leave_room_for_the_figures(tmp_path: Path) -> None:
    """matplotlib warns if the axes of a figure collapse, and names are not cut off by its edge."""
    long = (
        "bsp@0,ssp:staleness=2,execution=lazy@3,dynamic-pssp:staleness=3@6,spec-sync:base=ssp:staleness=2@8"
    )
    names = [long, *(f"ssp:staleness={bound}" for bound in range(10))]
    study = small(models=names, grid={"rate": [0.4]}, seeds=1)
    for figure in pictures_of(carried_out(study, tmp_path / "out")).values():
        figure.draw_without_rendering()
        texts = [*figure.legends, *(label for axes in figure.axes for label in axes.get_yticklabels())]
        assert all(text.get_window_extent().x0 >= 0 for text in texts)


def test_a_logarithmic_axis_of_one_decade_has_few_labels() -> None:
    figure = Figure(figsize=(2.0, 2.0))
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_xlim(5.0, 65.0)
    _label_decades(axes.xaxis)
    figure.draw_without_rendering()
    places = zip(axes.xaxis.get_ticklocs(), axes.get_xticklabels(), strict=True)
    assert [label.get_text() for place, label in places if 5.0 <= place <= 65.0] == ["5", "10", "20", "50"]
    assert not any(label.get_text() for label in axes.get_xticklabels(minor=True))


def test_the_numbers_of_a_histogram_are_above_its_bars(done: tuple[StudyResult, Path]) -> None:
    figure = pictures_of(done[0])["staleness"]
    figure.draw_without_rendering()
    for axes in figure.axes:
        highest = max(bar.get_window_extent().y1 for bar in axes.patches)
        assert axes.texts[0].get_window_extent().y0 > highest


def test_a_budget_ends_each_run(tmp_path: Path) -> None:
    result = carried_out(small(grid={"rate": [0.4]}, budget={"updates": 5}), tmp_path / "out")
    assert {outcome.updates for row in result.rows for outcome in row.outcomes.values()} == {5}
    result = carried_out(small(grid={"rate": [0.4]}, budget={"seconds": 4.0}), tmp_path / "other")
    assert {outcome.seconds for row in result.rows for outcome in row.outcomes.values()} == {4.0}


def test_a_finding_is_said_once_for_all_seeds(done: tuple[StudyResult, Path]) -> None:
    result, _ = done
    findings = {
        0: ("40% of the samples were dropped.",),
        1: ("4.5% of the samples were dropped.", "All is lost."),
    }
    bsp, asp = result.rows
    outcomes = {
        seed: msgspec.structs.replace(asp.outcomes[seed], findings=found) for seed, found in findings.items()
    }
    summary = summary_md(result._replace(rows=(bsp, asp._replace(outcomes=outcomes))), [])
    assert summary.split("## Findings")[1].strip().splitlines() == [
        "- asp on jitter, 2 seeds, for example 0: 40% of the samples were dropped.",
        "- asp on jitter, seed 1: All is lost.",
    ]


FAILING = """
import os
import paceline.studies.trained

def train(rate):
    if rate == 3.0:
        raise ValueError("three is too much")
    if rate == 4.0:
        os._exit(1)
    paceline.studies.trained.quadratic(rate, iterations=6)
"""


@pytest.mark.processes
@pytest.mark.usefixtures("copied_pools")
def test_failing_runs_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    study = describe(
        {
            **SMALL,
            "problem": "",
            "train": "failing.py:train",
            "arguments": {},
            "models": ["asp"],
            "grid": {"rate": [3.0, 4.0, 0.4]},
        },
        tmp_path,
    )
    with in_processes(1) as pool:
        result = run_study(study, tmp_path / "out", pool, lambda what, share: None)
    first, second = result.failures
    assert (first.name, second.name) == (
        "asp on jitter, rate 3.0, seed 1000000",
        "asp on jitter, rate 4.0, seed 1000000",
    )
    assert "three is too much" in str(first.error)
    assert "ended without an error message" in str(second.error)
    assert len(result.rows) == 1
    assert "three is too much" in summary_md(result, [])


SCRIPT = """
import argparse
import paceline.studies.trained

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
paceline.studies.trained.quadratic(parser.parse_args().lr, iterations=6)
"""


@pytest.mark.processes
@pytest.mark.usefixtures("copied_pools")
def test_a_script_is_run_with_the_hyper_parameters_in_its_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    study = describe(
        {
            **SMALL,
            "problem": "",
            "script": "script.py --lr {rate}",
            "arguments": {},
            "models": ["asp"],
            "seeds": 1,
            "grid": {"rate": [0.4]},
        },
        tmp_path,
    )
    assert study.trained.fresh
    with in_processes(1) as pool:
        result = run_study(study, tmp_path / "out", pool, lambda what, share: None)
    assert not result.failures
    assert [row.contender.name for row in result.rows] == ["asp"]


def test_in_python_functions_and_clusters_are_given_themselves(tmp_path: Path) -> None:
    from paceline.studies.trained import quadratic

    entries = {
        **SMALL,
        "problem": "",
        "train": quadratic,
        "clusters": {"mine": Cluster(compute_s=[1.0, 2.0])},
    }
    result = carried_out(describe({**entries, "grid": {"rate": [0.4]}}, Path.cwd()), tmp_path / "out")
    assert [row.cluster for row in result.rows] == ["mine", "mine"]
    assert callable(paceline.study)


def trains_on_parts() -> None:
    """Log the number of samples in each batch."""
    model = torch.nn.Linear(1, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(32, 1))
    for (x,) in paceline.distribute(torch.utils.data.DataLoader(data, batch_size=8)):
        optimizer.zero_grad()
        model(x).mean().backward()
        paceline.log(samples=float(len(x)))
        optimizer.step()


@pytest.mark.parametrize("joint", [False, True])
def test_the_batches_of_a_study_may_be_joint_ones(joint: bool, tmp_path: Path) -> None:
    entries = {
        "train": trains_on_parts,
        "models": ["bsp"],
        "clusters": {"mine": Cluster(compute_s=[1.0, 1.0])},
        "seeds": 1,
        "target": {"metric": "samples", "value": 1.0, "better": "lower"},
    }
    study = describe(entries | ({"joint_batch": True} if joint else {}), Path.cwd())
    assert ("joint_batch" in study.identity) == joint  # folders of earlier studies remain theirs
    [row] = carried_out(study, tmp_path / "out").rows
    [outcome] = row.outcomes.values()
    assert {each.value for each in outcome.curve} == {4.0 if joint else 8.0}


def logs_late() -> None:
    """Log the number of steps, but not before the second one."""
    model = torch.nn.Linear(1, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 6):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        if step > 1:
            paceline.log(steps=float(step))


def test_a_run_that_its_budget_ends_before_the_first_value_does_not_end_the_study(tmp_path: Path) -> None:
    """After three updates, each worker has made three steps under bsp, but only one under asp."""
    entries = {
        "train": logs_late,
        "models": ["asp", "bsp"],
        "clusters": {"mine": Cluster(compute_s=[1.0, 1.0, 1.0])},
        "seeds": 1,
        "budget": {"updates": 3},
        "target": {"metric": "steps", "value": 2.0},
    }
    asp, bsp = carried_out(describe(entries, Path.cwd()), tmp_path / "out").rows
    assert math.isnan(asp.final.value)
    assert math.isfinite(bsp.final.value)


def test_models_may_be_compared_by_what_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # the tables are enough
    study = small(models=["bsp", {"sync": "bsp", "wire": "int4"}, {"sync": "asp", "wire": "int8"}])
    assert [each.name for each in study.contenders] == ["bsp", "bsp, int4", "asp, int8"]
    assert [len(each) for each in study.identity["models"]] == [
        6,
        7,
        7,
    ]  # of former studies, it stays the same
    write(carried_out(study, tmp_path), tmp_path)
    outcomes = {row["model"]: row for row in rows_of(tmp_path) if row["purpose"] == "evaluation"}
    assert outcomes.keys() == {"bsp", "bsp, int4", "asp, int8"}
    exact, coded = (float(outcomes[name]["final_loss"]) for name in ("bsp", "bsp, int4"))
    assert exact != coded
    assert coded == pytest.approx(exact, rel=0.1)


def holding(content: object) -> Callable[..., object]:
    """A training function that cannot be used without this object."""
    return lambda rate, iterations: content


BAD: list[tuple[dict[str, Any], str]] = [
    ({"problem": "digit"}, "unknown problem 'digit'; did you mean 'digits'?"),
    ({"modles": []}, "unknown entry 'modles'; did you mean 'models'?"),
    ({"models": ["bps"]}, "the model 'bps': unknown sync model 'bps'; did you mean 'bsp'?"),
    ({"models": []}, "models is empty"),
    ({"models": [3]}, "models[0] is a whole number"),
    ({"models": ["bsp", "bsp"]}, "two models are called 'bsp'"),
    ({"models": [{"sync": "asp", "nam": "x"}]}, "unknown entry in models[0] 'nam'; did you mean 'name'?"),
    ({"models": [{"sync": "bsp", "wire": "int3"}]}, "the model 'bsp, int3': wire is 'int3', expected one of"),
    ({"models": [{"sync": "asp", "wire": "weights=int4"}]}, "Use weights=bf16"),
    ({"models": ["drop-stragglers:quorum=9"]}, "quorum is 9, expected at most 3"),
    ({"grid": {"rate": []}}, "grid.rate is empty, so the study has no runs"),
    ({"grid": {"rate": [0.1, 0.1]}}, "grid.rate contains a value twice"),
    ({"grid": {"rate": 0.1}}, "grid.rate is a number, expected a list"),
    ({"grid": {"rate": [[0.1]]}}, "grid.rate[0] is a list, expected"),
    ({"arguments": {"iterations": [1]}}, "arguments.iterations is a list, expected"),
    ({"grid": {"rat": [1]}}, "unknown hyper-parameter of quadratic 'rat'; did you mean 'rate'?"),
    ({"grid": {"seed": [1]}}, "[grid] contains 'seed', but each run has a seed of its own"),
    ({"arguments": {"seed": 1}}, "[arguments] contains 'seed', but each run has a seed of its own"),
    ({"grid": {"iterations": [1]}}, "iterations is both in [grid] and in [arguments]"),
    ({"target": {"metric": "loss"}}, "target has neither a value nor the name of a model"),
    (
        {"target": {"metric": "loss", "value": 1, "of": "bsp"}},
        "target has both a value and the name of a model",
    ),
    ({"target": {"metric": "loss", "value": 1, "within": 0.1}}, "target.within is 0.1, but"),
    ({"target": {"metric": "loss", "of": "ssp"}}, "unknown model in target.of 'ssp'"),
    ({"target": {"value": 1}}, "target.metric is missing"),
    ({"seeds": "five"}, "seeds is text, expected a whole number or a list"),
    ({"seeds": 0}, "seeds is 0, expected a whole number >= 1"),
    ({"seeds": [1, 1]}, "seeds is [1, 1], expected at least one seed, and none twice"),
    ({"tuning_seeds": [0]}, "seeds and tuning_seeds both contain 0"),
    ({"clusters": {}}, "clusters is empty"),
    ({"clusters": {"a": {"kind": "jiter", "workers": 4}}}, "unknown kind of clusters.a 'jiter'"),
    ({"clusters": {"a": {"delays": "a.csv"}}}, "clusters.a.kind is missing. Choices: equal, jitter,"),
    ({"clusters": {"a": {"kind": "jitter"}}}, "clusters.a.workers is missing"),
    (
        {"clusters": {"a": {"kind": "jitter", "workers": 0}}},
        "clusters.a.workers is 0, expected a whole number >= 1",
    ),
    ({"clusters": {"a": "nowhere.toml"}}, "clusters.a: the cluster file nowhere.toml cannot be read"),
    ({"clusters": {3: "elastic-bsp"}}, "a name in clusters is a whole number, expected text"),
    ({"clusters": {"a": 4}}, "clusters.a is 4, expected a cluster file"),
    ({"reference": "ssp"}, "unknown model in reference 'ssp'"),
    ({"tuning": "all"}, "unknown tuning 'all'"),
    (
        {"tuning": "reference", "target": {"metric": "loss", "of": "asp"}},
        "expected what the reference 'bsp' reaches",
    ),
    (
        {"tuning": "reference", "models": ["bsp", {"sync": "asp", "grid": {"rate": [0.1]}}]},
        "tuning is 'reference', but a model has a grid of its own",
    ),
    ({"hyperparameters": "row"}, "unknown hyperparameters 'row'; did you mean 'raw'?"),
    ({"budget": {"second": 3}}, "unknown entry in budget 'second'; did you mean 'seconds'?"),
    ({"budget": {"seconds": -3}}, "budget.seconds is -3, expected a number > 0"),
    ({"train": "a.py:train"}, "the study has train and problem, expected one of"),
    ({"problem": ""}, "the study has nothing to train"),
    ({"problem": "", "train": "a.py:train"}, "there is no file 'a.py'"),
    ({"problem": "", "train": "train"}, "expected the name of a function"),
    ({"problem": "", "train": "math:sine"}, "unknown function of math 'sine'"),
    ({"problem": "", "train": 3}, "train is 3, expected a function or its name"),
    ({"problem": "", "script": "a.py --lr {rate}"}, "there is no file 'a.py'"),
    (
        {"problem": "", "script": "a.py 'b"},
        'script is "a.py \'b", which cannot be parsed: No closing quotation',
    ),
    (
        {"problem": "", "script": f"{__file__} --lr {{rate}}"},
        "the hyper-parameter 'iterations' is not in the command of the script: write {iterations}",
    ),
    (
        {"problem": "", "script": f"{__file__} {{rate}} {{iterations}} {{lr}}"},
        "contains {lr}, but the study has no such hyper-parameter; known ones: iterations, rate, seed",
    ),
    ({"problem": "", "train": holding(threading.Lock())}, "cannot be sent to another process: TypeError"),
    ({"problem": "", "train": "no_such_module:train"}, "no_such_module cannot be imported: ModuleNotFound"),
    (
        {"problem": "", "train": holding(0), "grid": {}},
        "has a parameter 'rate' without a value: give it in [grid]",
    ),
    ({"imports": ["no_such_module"]}, "the module 'no_such_module' cannot be imported"),
]


@pytest.mark.parametrize(("entries", "words"), BAD, ids=[words[:40] for _, words in BAD])
def test_bad_input_is_one_sentence_that_names_the_entry(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        small(**entries)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_study_file_is_named_in_its_errors(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('models = ["bsp"]\nproblem = "digits"\nclusters = {}\n')
    with pytest.raises(ConfigurationError, match=r"mine\.toml: target is missing\."):
        read_study_file(tmp_path / "mine.toml")
    with pytest.raises(ConfigurationError, match=r"the study .*other\.toml cannot be read: No such file"):
        read_study_file(tmp_path / "other.toml")
    (tmp_path / "mine.toml").write_text("models = [")
    with pytest.raises(ConfigurationError, match=r"mine\.toml is not a TOML file"):
        read_study_file(tmp_path / "mine.toml")


def test_the_reference_is_found_whatever_its_name_says_about_hyper_parameters() -> None:
    models: list[Any] = ["bsp", "asp", {"sync": "asp", "hyperparameters": "raw"}]
    study = small(models=models, reference="bsp", target={"metric": "loss", "of": "bsp"})
    assert study.reference == study.target.of == "bsp, translated"
    assert small(models=models, reference="asp").reference == "asp"  # the one with raw hyper-parameters


def test_a_study_is_a_file_or_entries(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is 'mine\.toml', and models is given as well"):
        paceline.study("mine.toml", models=["bsp"], out=tmp_path)


@pytest.mark.usefixtures("copied_pools")
def test_without_matplotlib_only_the_figures_are_missing(
    done: tuple[StudyResult, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        paceline.study(SMALL, out=out, processes=1)
    assert caplog.messages == [NO_FIGURES]
    assert NO_FIGURES.endswith("run: pip install 'paceline[report]'")
    tables = {name: (out / name).read_bytes() for name in ("runs.csv", "curves.csv", "table.tex")}
    assert f"Note: {NO_FIGURES}" in (out / "summary.md").read_text()
    assert not (out / "figures").exists()
    write(carried_out(small(), out), out)
    assert content(out) == content(done[1])
    assert NO_FIGURES not in (out / "summary.md").read_text()
    assert {name: (out / name).read_bytes() for name in tables} == tables


def test_a_changed_training_function_is_another_study(tmp_path: Path) -> None:
    entries = {**SMALL, "problem": "", "train": "mine.py:train", "grid": {"rate": [0.4]}, "arguments": {}}
    text = "from paceline.studies.trained import quadratic\ndef train(rate):\n    quadratic(rate, iterations=4)\n"
    (tmp_path / "mine.py").write_text(text)
    carried_out(describe(entries, tmp_path), tmp_path / "out")
    (tmp_path / "mine.py").write_text(text.replace("4", "5"))
    with pytest.raises(
        ConfigurationError,
        match="the name or the text of the training function, or the command or the text of the script, differs",
    ):
        carried_out(describe(entries, tmp_path), tmp_path / "out")


def test_a_changed_argument_of_a_script_is_another_study(tmp_path: Path) -> None:
    """The path of the script names no other study, but a path in an argument does not hide the other arguments."""

    def identity(folder: str, layers: int) -> dict[str, Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "script.py").write_text(SCRIPT)
        script = f"script.py --layers {layers} --data /data/mnist --lr {{rate}}"
        return describe(
            {**SMALL, "problem": "", "script": script, "arguments": {}}, tmp_path / folder
        ).identity

    before, moved, after = identity("here", 3), identity("there", 3), identity("here", 5)
    assert before == moved
    assert [key for key in before if before[key] != after[key]] == ["train"]


def test_a_changed_sync_model_is_another_study(tmp_path: Path, own_models: None) -> None:
    """Otherwise the runs of the model before and after a change would be compared with each other."""
    text = (EXAMPLE.parent / "my_models.py").read_text()
    (tmp_path / "pairs_of_mine.py").write_text(text)
    entries = {**SMALL, "imports": ["pairs_of_mine"], "models": ["pairs"]}
    before = describe(entries, tmp_path).identity
    assert describe(entries, tmp_path).identity == before
    (tmp_path / "pairs_of_mine.py").write_text(text.replace("sorted", "list"))
    after = describe(entries, tmp_path).identity
    assert [key for key in before if before[key] != after[key]] == ["imports"]


class Law:
    """Compute times of one's own, without a representation of its own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def sample(self, generator: np.random.Generator) -> float:
        return float(generator.gamma(2.0, self.scale))


def test_an_equal_object_that_draws_times_is_the_same_study() -> None:
    """The representation of such an object contains its place in memory, which is another one in the next call."""
    studies = [small(clusters={"mine": Cluster(compute_s=[Law(scale), 3.0])}) for scale in (0.5, 0.5, 0.6)]
    first, same, other = (study.identity for study in studies)
    assert first == same
    assert [key for key in first if first[key] != other[key]] == ["clusters"]


def test_the_summary_names_models_whose_hyper_parameters_are_not_translated(tmp_path: Path) -> None:
    models = ["bsp", "ssp:push_scale=1/tau", {"sync": "ssp:push_scale=1/tau", "hyperparameters": "raw"}]
    study = small(models=models, grid={"rate": [0.4]}, seeds=1)
    summary = summary_md(carried_out(study, tmp_path / "out"), [])
    assert "Those of ssp:push_scale=1/tau, translated are used as they are" in summary


def test_the_study_files_of_the_documentation_are_valid(tmp_path: Path, own_models: None) -> None:
    first, second = re.findall(
        r"```toml\n(.*?)```", (EXAMPLE.parents[2] / "docs" / "how-to" / "study.md").read_text(), re.DOTALL
    )
    assert first == EXAMPLE.read_text()
    assert len(first.splitlines()) <= 40
    study = read_study_file(EXAMPLE)
    most = len(tuning_cells(study)) + len(study.contenders) * len(study.clusters) * len(study.seeds)
    assert most == 357, "the number of runs is on the page"
    (tmp_path / "study.toml").write_text(second)
    assert [each.name for each in read_study_file(tmp_path / "study.toml").contenders] == [
        "bsp",
        "asp",
        "SSP(2)",
    ]


DISTURBED = """
import multiprocessing
import os
import paceline.studies.trained

def train(rate, seed):
    match os.environ.get("DISTURB"), seed:
        case "kill", 1:
            os.kill(multiprocessing.parent_process().pid, 9)
        case "interrupt", 2:
            os.killpg(os.getpgrp(), 2)  # as a terminal does: to all processes
    paceline.studies.trained.quadratic(rate, iterations=6)
"""


def by_command(
    description: Path, out: Path, processes: int, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `paceline study` in a process group of its own."""
    options = ["--out", str(out), "--processes", str(processes)]
    return subprocess.run(
        [sys.executable, "-m", "paceline", "study", str(description), *options],
        cwd=description.parent,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
    )


@pytest.mark.processes
@pytest.mark.parametrize("interrupted", [False, *thorough(True)], ids=["killed", "killed and interrupted"])
def test_a_study_that_was_killed_ends_with_the_same_bytes(
    interrupted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    copied_pools: None,
) -> None:
    """Pictures are left out: those of equal results are equal, as another test shows."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    description, out = tmp_path / "study.toml", tmp_path / "out"
    (tmp_path / "train.py").write_text(DISTURBED)
    description.write_text(
        """
        train = "train.py:train"
        models = ["bsp", "asp"]
        seeds = [1, 2]
        tuning_seeds = [3]
        clusters = { jitter = { kind = "jitter", workers = 3 } }
        grid = { rate = [0.05, 0.4] }
        target = { metric = "loss", value = 0.5 }
        """
    )
    killed = by_command(description, out, 1, DISTURB="kill")
    assert killed.returncode == -signal.SIGKILL
    kept = content(out / "cells")
    assert 3 <= len(kept) <= 4
    if interrupted:
        ended = by_command(description, out, 1, DISTURB="interrupt")
        assert ended.returncode == 130
        assert "interrupted: the runs that had ended are kept in" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert kept.items() <= content(out / "cells").items()
    assert not (out / "summary.md").exists()
    command = ["paceline", "study", str(description), "--out", str(out), "--processes", "2"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (None, 0)
    assert capsys.readouterr().out == f"summary and tables: {out}\n"
    whole = tmp_path / "whole"
    write(carried_out(read_study_file(description), whole), whole)
    assert content(out) == content(whole)


def smaller_example(folder: Path) -> Path:
    """A study file like the example's, with fewer models, clusters, rates, seeds and epochs."""
    entries = tomllib.loads(EXAMPLE.read_text())
    for name in ("my_models.py", "train_digits.py"):
        (folder / name).write_text((EXAMPLE.parent / name).read_text())
    (folder / "small.toml").write_text(
        f"""
        train = "{entries["train"]}"
        imports = {entries["imports"]}
        models = ["bsp", "majority", "pairs"]
        seeds = 2
        tuning_seeds = 1
        [clusters]
        jitter = {{ kind = "jitter", workers = 4 }}
        [grid]
        rate = [0.1, 0.4]
        [arguments]
        momentum = 0.9
        batch = 32
        epochs = 2
        [target]
        metric = "accuracy"
        value = 0.6
        """
    )
    return folder / "small.toml"


@pytest.mark.thorough
@pytest.mark.processes
def test_a_study_with_models_of_ones_own_that_is_killed_twice_ends_with_the_same_bytes_as_one_process(
    tmp_path: Path,
) -> None:
    description = smaller_example(tmp_path)
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for count in (2, 5):
        command = [sys.executable, "-m", "paceline", "study", str(description), "--out", str(disturbed)]
        program = subprocess.Popen(
            [*command, "--processes", "2"],
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        while program.poll() is None and len(list(disturbed.glob("cells/*.json"))) < count:
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        program.wait()
        assert not (disturbed / "summary.md").exists()
    for folder, processes in ((disturbed, 2), (whole, 1)):
        ended = by_command(description, folder, processes)
        assert ended.returncode == 0, ended.stderr
    assert content(disturbed) == content(whole)
