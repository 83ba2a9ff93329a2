"""Sync models side by side on one cluster, and what is advised after a run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

import paceline
from paceline.cli import main
from paceline.core.lease import BatchSizing
from paceline.errors import ConfigurationError
from paceline.lab import comparison
from paceline.lab.advice import advise, show
from paceline.lab.clusters import describe
from paceline.lab.ranking import (
    EVERY_MODEL,
    Task,
    rank,
    read_syncs,
    run_task,
    run_tasks,
    sweep,
    sweep_values,
    variants,
)
from paceline.look.tables import Figures, sweep_picture
from paceline.sim import Cluster, Dataset, Outside, Presence, Recorded, Uniform, simulate
from tests.support.marks import chaos, thorough

STRAGGLER = Cluster(compute_s=[Uniform(low=0.9, high=1.1)] * 3 + [3.0], latency_s=0.01, servers=2)
PACED = dataclasses.replace(STRAGGLER, emulated="--pace 1,1,1,3 (minimum seconds per iteration)")
EQUAL = Cluster(compute_s=[Uniform(low=0.99, high=1.01)] * 4)


@pytest.mark.usefixtures("one_core")
def test_the_ranking_is_by_gradients_and_marks_what_nothing_beats() -> None:
    rows = rank(STRAGGLER, ["bsp", "ssp:staleness=3", "asp", "elastic-bsp:lookahead=15"], iterations=40)
    assert [row.gradients_per_s for row in rows] == sorted(
        (row.gradients_per_s for row in rows), reverse=True
    )
    by_name = {row.sync: row for row in rows}
    assert rows[0].sync == "asp"
    assert by_name["asp"].gradients_per_s == pytest.approx(3 / 1.02 + 1 / 3.02, rel=0.02)
    assert by_name["bsp"].gradients_per_s == pytest.approx(4 / 3.02, rel=0.02)
    assert by_name["bsp"].front
    assert by_name["asp"].front
    for row in rows:
        assert row.until_s == pytest.approx(40 * 3.02, rel=0.05)
        shares = row.computing_share + row.waiting_share + row.wasted_share + row.transfer_share
        assert shares == pytest.approx(1.0, abs=0.03)


@pytest.mark.usefixtures("one_core")
def test_what_is_beaten_in_both_respects_is_not_marked() -> None:
    rows = rank(STRAGGLER, ["bsp", "naive-waiting:delay_s=3", "asp"], iterations=20)
    assert {row.sync: row.front for row in rows}["naive-waiting:delay_s=3"] is False


def test_the_result_does_not_depend_on_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    alone = rank(STRAGGLER, ["asp"], iterations=20)
    [beside] = [row for row in rank(STRAGGLER, ["asp", "bsp"], iterations=20) if row.sync == "asp"]
    assert (alone[0].gradients_per_s, alone[0].mean_staleness) == (
        beside.gradients_per_s,
        beside.mean_staleness,
    )


@pytest.mark.usefixtures("one_core")
def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    rank(EQUAL, ["asp", "bsp"], iterations=3, tell=lambda done, of, what: told.append((done, of)))
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert run_tasks([]) == []


@pytest.mark.usefixtures("one_core")
def test_a_sweep_tries_each_value_under_each_model_that_has_the_key() -> None:
    points = sweep(STRAGGLER, ["bsp", "ssp", "pssp:staleness=9"], "staleness", [0.0, 4.0], iterations=20)
    assert [(value, row.sync) for value, row in points] == [
        (0.0, "ssp:staleness=0"),
        (4.0, "ssp:staleness=4"),
        (0.0, "pssp:staleness=0"),
        (4.0, "pssp:staleness=4"),
    ]
    assert points[0][1].mean_staleness < points[1][1].mean_staleness


@pytest.mark.usefixtures("one_core")
def test_each_variant_of_a_model_is_a_line_of_its_own_in_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[float]] = {}

    def picture(title: str, key: str, lines: Mapping[str, Sequence[tuple[float, Figures]]]) -> Figure:
        drawn.update({name: [value for value, _ in points] for name, points in lines.items()})
        return sweep_picture(title, key, lines)

    monkeypatch.setattr(comparison, "sweep_picture", picture)
    comparison.explore_models(
        EQUAL,
        ["ssp", "ssp:staleness=3,execution=lazy"],
        "staleness",
        [1.0, 4.0],
        iterations=20,
        seed=0,
        shards=None,
        out=tmp_path,
        console=Console(quiet=True),
        tell=lambda done, of, what: None,
    )
    assert drawn == {"ssp": [1.0, 4.0], "ssp:execution=lazy": [1.0, 4.0]}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lookahead=5..480", [5, 10, 20, 40, 80, 160, 320, 480]),
        ("staleness=1..9:2", [1, 3, 5, 7, 9]),
        ("staleness=1,5,20", [1, 5, 20]),
        ("delay_s=0.5", [0.5]),
    ],
)
def test_a_sweep_is_written_in_three_ways(text: str, values: list[float]) -> None:
    assert sweep_values(text)[1] == values


@pytest.mark.parametrize(
    "text", ["lookahead", "lookahead=", "=5", "lookahead=9..5", "lookahead=0..5", "lookahead=a..b"]
)
def test_a_sweep_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected key=from..to"):
        sweep_values(text)


def test_a_key_that_no_model_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"has a parameter 'lookback'.*lookahead"):
        sweep(EQUAL, ["bsp", "asp"], "lookback", [1.0])


def test_several_models_in_one_text() -> None:
    text = "bsp,ssp:staleness=3,execution=lazy,spec-sync:base=ssp,staleness=4,bsp@0,asp@epoch:5,asp"
    assert read_syncs(text) == [
        "bsp",
        "ssp:staleness=3,execution=lazy",
        "spec-sync:base=ssp,staleness=4",
        "bsp@0,asp@epoch:5",
        "asp",
    ]
    assert read_syncs("all") == list(EVERY_MODEL)
    with pytest.raises(ConfigurationError, match="unknown sync model 'asb'"):
        read_syncs("bsp,asb")


def test_a_cluster_in_one_line() -> None:
    assert describe(STRAGGLER) == "4 workers (3 at 1 s, 1 at 3 s); 2 servers"


# -- advice ----------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, cluster: Cluster, sync: str = "bsp") -> Path:
    return simulate(cluster, sync, iterations=60, record=True).save(tmp_path / "run")


def test_what_a_run_recorded_is_the_cluster_that_it_ran_on(tmp_path: Path) -> None:
    cluster = Cluster.from_run(saved(tmp_path, STRAGGLER))
    assert cluster.workers == 4
    for worker in range(4):
        sample = STRAGGLER.compute(worker).sampler(0, worker, 0)
        expected = [round(sample(k, 0.0), 9) for k in range(60)]
        recorded = cluster.compute(worker).sampler(0)
        assert [round(recorded(k, 0.0), 9) for k in range(60)] == expected
        assert cluster.latency(worker, to_server=True).typical_s == pytest.approx(0.01)
        assert cluster.latency(worker, to_server=False).typical_s == pytest.approx(0.01)


def test_the_records_of_a_worker_belong_to_its_own_messages(tmp_path: Path) -> None:
    """The name of the file says whose records they are, although the file of an earlier worker is missing."""
    folder = saved(tmp_path, STRAGGLER)
    (folder / "worker-0.jsonl").unlink()
    cluster = Cluster.from_run(folder)
    assert [round(cluster.compute(worker).typical_s) for worker in range(cluster.workers)] == [1, 1, 3]
    for worker in range(cluster.workers):
        assert cluster.latency(worker, to_server=True).typical_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("summary.json", {"joined": True}),
        ("worker-1.jsonl", {"machine": 1}),
        ("trace-shard-0.jsonl", {"machine": 2}),
    ],
)
def test_a_run_that_machines_have_joined_is_no_cluster(
    tmp_path: Path, name: str, entry: dict[str, object]
) -> None:
    """The times of other machines are on clocks of their own."""
    file = saved(tmp_path, EQUAL) / name
    head, rest = file.read_text().split("\n", 1) if name.endswith("l") else (file.read_text(), "")
    file.write_text(f"{json.dumps({**json.loads(head), **entry})}\n{rest}")
    with pytest.raises(ConfigurationError, match="machines have joined the run"):
        Cluster.from_run(file.parent)


def saved_with_data(tmp_path: Path, cluster: Cluster, sync: str, data: Dataset, batch: BatchSizing) -> Path:
    """Save a run with what the summary of a live run says about the data."""
    run_dir = simulate(cluster, sync, data=data, batch=batch, record=True).save(tmp_path / "run")
    path = run_dir / "summary.json"
    known: dict[str, Any] = {
        "epochs": data.epochs,
        "epoch_samples": data.samples,
        "batch_size": data.batch_size,
        "batches_per_push": 1,
        "batch": batch,
        "joint_batch": data.joint_batch,
        "split": data.split,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **known}))
    return run_dir


FEW = Outside(each_s=Recorded(seconds=(0.0,) * 7 + (4.0,)))  # as for saving after every eighth step
KINDS_OF_SCRIPTS: dict[str, tuple[list[float], dict[int, Outside], str, BatchSizing]] = {
    "equal machines": ([1.0] * 3, {}, "asp", "equal"),
    "a slow worker, balanced": ([1.0, 1.0, 2.5], {}, "bsp", "balanced"),
    "a slow worker, on demand": ([1.0, 1.0, 2.5], {}, "asp", "equal"),
    "evaluation in one worker, balanced": ([1.0] * 3, {0: Outside(epoch_s=20.0)}, "bsp", "balanced"),
    "evaluation in one worker, on demand": ([1.0] * 3, {0: Outside(epoch_s=20.0)}, "asp", "equal"),
    "evaluation in all workers": (
        [1.0, 1.0, 2.5],
        dict.fromkeys(range(3), Outside(epoch_s=20.0)),
        "bsp",
        "balanced",
    ),
    "saving in the middle": ([1.0] * 3, {0: FEW}, "asp", "equal"),
    "logging": ([1.0, 2.0, 1.0], dict.fromkeys(range(3), Outside(each_s=0.5)), "bsp", "balanced"),
}
"""Compute times, what is outside of training, and the change of model or batches that is predicted."""

REPRESENTATIVES = (
    "a slow worker, balanced",
    "evaluation in one worker, on demand",
    "evaluation in all workers",
    "saving in the middle",
)
"""These differ most: nothing outside of training, some in one worker or in all, at ends of epochs or in the middle."""


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(
    "kind", [*REPRESENTATIVES, *thorough(*(kind for kind in KINDS_OF_SCRIPTS if kind not in REPRESENTATIVES))]
)
def test_what_is_advised_for_a_script_holds_when_the_change_is_made(tmp_path: Path, kind: str) -> None:
    """`python -m benchmarks advice` compares the same with live runs."""
    compute_s, outside, sync, batch = KINDS_OF_SCRIPTS[kind]
    cluster = Cluster(compute_s=compute_s, outside=outside, latency_s=0.01)
    data = Dataset(samples=3 * 16 * 12, batch_size=16, epochs=5)
    rows = advise(saved_with_data(tmp_path, cluster, "bsp", data, "equal"), ("bsp", sync)).rows
    speeds = {(row.sync, row.batch): row.speed for row in rows}
    promised = speeds[sync, batch] / speeds["bsp", "equal"]
    made = simulate(cluster, sync, data=data, batch=batch).measures.samples_per_s
    before = simulate(cluster, "bsp", data=data).measures.samples_per_s
    assert promised == pytest.approx(made / before, rel=0.1)
    if "evaluation in one" in kind:
        assert promised < (1.05 if batch == "balanced" else 1.6)


@pytest.mark.usefixtures("one_core")
def test_models_without_barriers_are_not_promised_to_a_run_whose_shares_are_equal(tmp_path: Path) -> None:
    """With a static split, as Lightning needs it, the worker that evaluates has its whole share of the data."""
    cluster = Cluster(compute_s=[1.0] * 3, outside={0: Outside(epoch_s=20.0)}, latency_s=0.01)
    data = Dataset(samples=3 * 16 * 12, batch_size=16, epochs=5, split="static")
    report = advise(saved_with_data(tmp_path, cluster, "bsp", data, "equal"), ("bsp", "asp"))
    speeds = {(row.sync, row.batch): row.speed for row in report.rows}
    made = simulate(cluster, "asp", data=data).measures.samples_per_s
    before = simulate(cluster, "bsp", data=data).measures.samples_per_s
    assert speeds["asp", "equal"] / speeds["bsp", "equal"] == pytest.approx(made / before, rel=0.1)
    assert made / before < 1.1
    assert "--split static" in report.advice[0].command


@pytest.mark.usefixtures("one_core")
def test_with_data_models_are_advised_by_samples_per_second_and_balanced_batches_compete(
    tmp_path: Path,
) -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0, 3.0])
    data = Dataset(samples=1600, batch_size=16, epochs=10)
    syncs = ("bsp", "ssp:staleness=3", "asp")
    report = advise(saved_with_data(tmp_path, cluster, "bsp", data, "equal"), syncs)
    assert report.data == data
    assert report.simulated_gradients_per_s == pytest.approx(report.measured_gradients_per_s, rel=0.02)
    assert (report.advice[0].sync, report.advice[0].batch) == ("bsp", "balanced")
    assert "times as many samples per second as under bsp" in report.advice[0].reason
    assert (
        report.advice[0].command == "paceline run --workers 4 --servers 1 --sync bsp --batch balanced SCRIPT"
    )
    assert {row.batch for row in report.rows if row.sync == "ssp:staleness=3"} == {"equal", "balanced"}
    console = Console(width=120, record=True)
    show(report, console)
    assert "s per" in (text := console.export_text())
    assert "10 epochs of 1,600 samples, in batches of 16" in text
    assert "the result of one process: bsp, balanced batches" in text
    assert "Accuracy: every update is that of one process on the joint batch." in text


def test_the_machines_of_a_run_with_balanced_batches_are_those_of_a_run_with_equal_ones(
    tmp_path: Path,
) -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0, 3.0], fixed_share=0.4)
    data = Dataset(samples=1600, batch_size=16, epochs=3)
    found = Cluster.from_run(saved_with_data(tmp_path, cluster, "bsp", data, "balanced"))
    assert found.fixed_share == pytest.approx([0.4] * 4, abs=0.1)
    assert [found.compute(worker).typical_s for worker in range(4)] == pytest.approx([1, 1, 1, 3], rel=0.05)


@pytest.mark.usefixtures("one_core")
def test_a_run_with_joint_batches_is_advised_with_joint_batches(tmp_path: Path) -> None:
    """The recorded times are those of parts of a joint batch; the cluster has those of whole batches."""
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0, 3.0])
    data = Dataset(samples=1600, batch_size=64, epochs=10, joint_batch=True)
    run_dir = saved_with_data(tmp_path, cluster, "bsp", data, "equal")
    found = Cluster.from_run(run_dir)
    assert [found.compute(worker).typical_s for worker in range(4)] == pytest.approx([1, 1, 1, 3], rel=0.05)
    report = advise(run_dir, ("bsp", "asp"))
    assert report.data == data
    assert report.simulated_gradients_per_s == pytest.approx(report.measured_gradients_per_s, rel=0.02)
    assert (report.advice[0].sync, report.advice[0].batch) == ("bsp", "balanced")
    assert report.advice[0].command == (
        "paceline run --workers 4 --servers 1 --sync bsp --batch balanced --joint-batch SCRIPT"
    )
    truth = {
        batch: simulate(cluster, "bsp", data=data, batch=batch).measures.samples_per_s
        for batch in ("equal", "balanced")
    }
    speeds = {row.batch: row.samples_per_s for row in report.rows if row.sync == "bsp"}
    assert speeds["balanced"] / speeds["equal"] == pytest.approx(truth["balanced"] / truth["equal"], rel=0.05)
    console = Console(width=120, record=True)
    show(report, console)
    assert "10 epochs of 1,600 samples, in joint batches of 64" in console.export_text()


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("sync", ["bsp", "asp", "spec-sync:abort_time_s=0.3,abort_rate=0"])
def test_a_run_is_predicted_from_what_another_one_recorded(tmp_path: Path, sync: str) -> None:
    cluster = Cluster.from_run(saved(tmp_path, STRAGGLER, sync))
    for other in ("ssp:staleness=2", "elastic-bsp:lookahead=5"):
        truth = simulate(STRAGGLER, other, iterations=60)
        predicted = simulate(cluster, other, iterations=60)
        assert predicted.time_s == pytest.approx(truth.time_s, rel=0.01)
        assert predicted.measures.mean_staleness == pytest.approx(truth.measures.mean_staleness, rel=0.03)


@pytest.mark.usefixtures("one_core")
def test_with_a_straggler_something_faster_is_advised_with_its_command(tmp_path: Path) -> None:
    report = advise(saved(tmp_path, STRAGGLER))
    assert report.simulated_updates_per_s == pytest.approx(report.measured_updates_per_s, rel=0.02)
    assert report.simulated_gradients_per_s == pytest.approx(report.measured_gradients_per_s, rel=0.02)
    assert report.measured_gradients_per_s == pytest.approx(4 * report.measured_updates_per_s, rel=0.02)
    assert report.emulated == ""
    assert report.findings[0].startswith("Workers 0 to 2 waited ")
    backup = "drop-stragglers:quorum=3"
    assert [advice.sync for advice in report.advice] == ["bsp", backup, "elastic-bsp:lookahead=15", "asp"]
    assert [advice.effect for advice in report.advice] == ["exact", "fresh", "stale", "stale"]
    assert "times as many gradients per second as under bsp" in report.advice[1].reason
    # The accuracy of a model that is not exact is to be checked, on the machines of the run.
    assert [advice.check for advice in report.advice] == [
        "",
        *(
            f"paceline simulate CLUSTER --script SCRIPT --sync bsp,{sync} (see docs/how-to/simulate.md)"
            for sync in (backup, "elastic-bsp:lookahead=15", "asp")
        ),
    ]
    assert all(
        ("may still train more slowly" in advice.reason)
        == (row.mean_staleness > 0 and row.speed < 2 * bsp.speed)
        for advice in report.advice
        for row in report.rows
        if (bsp := next(row for row in report.rows if row.sync == "bsp")) and row.sync == advice.sync
    )
    assert report.advice[2].command == (
        "paceline run --workers 4 --servers 2 --sync elastic-bsp:lookahead=15 SCRIPT"
    )


@pytest.mark.usefixtures("one_core")
def test_recommendations_are_called_rough_if_the_run_itself_is_not_simulated_well(tmp_path: Path) -> None:
    accurate = advise(saved(tmp_path / "accurate", STRAGGLER), ["bsp"])
    assert abs(accurate.deviation) < 0.02
    assert accurate.caution == ""
    # In the first half of the run, most workers are not there, which a simulation of the recorded times cannot know.
    late = {worker: Presence(joins_at_s=30.0) for worker in range(1, 4)}
    report = advise(saved(tmp_path / "rough", Cluster(compute_s=[1.0] * 4, presence=late), "asp"), ["bsp"])
    assert report.deviation == pytest.approx(
        report.simulated_gradients_per_s / report.measured_gradients_per_s - 1
    )
    assert report.caution.startswith(
        f"A simulation of this run computes {report.deviation:.0%} more gradients per second than were measured, so "
        "the recommendations are rough. Possible reasons: the run had few iterations (60 by the "
        "worker with the fewest), "
    )
    console = Console(width=400, record=True)
    show(report, console)
    assert report.caution in console.export_text()


@pytest.mark.usefixtures("one_core")
def test_where_machines_are_equal_bsp_is_advised(tmp_path: Path) -> None:
    report = advise(saved(tmp_path, EQUAL))
    assert [advice.sync for advice in report.advice] == ["bsp"]


@pytest.mark.usefixtures("one_core")
def test_a_model_that_such_a_job_cannot_have_is_left_out(tmp_path: Path) -> None:
    report = advise(saved(tmp_path, EQUAL), ["drop-stragglers:quorum=9", "asp"])
    assert {row.sync for row in report.rows} == {"bsp", "asp"}


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("clips", [True, *thorough(False)])
def test_a_model_that_refuses_to_clip_is_left_out_for_a_script_that_clips(
    tmp_path: Path, clips: bool
) -> None:
    def train() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if clips:
                optimizer.clip_grad_norm(1.0)
            optimizer.step()

    run_dir = simulate(STRAGGLER, train_fn=train, record=True).save(tmp_path / "run")
    path = run_dir / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "split": "auto"}))  # as in a live run
    report = advise(run_dir)
    assert report.recommendation is not None
    assert any("--sync drop-stragglers" in finding for finding in report.findings) != clips
    assert any("drop-stragglers" in each.sync for each in report.advice) != clips
    assert "drop-stragglers" not in report.recommendation.text
    left_out = {row.sync: row.failure for row in report.rows if row.failure}
    assert left_out.keys() == ({"drop-stragglers:quorum=3"} if clips else set())
    console = Console(width=200, record=True)
    show(report, console)
    said = "drop-stragglers:quorum=3: left out, because it does not allow optimizer.clip_grad_norm(), which the script"
    assert (said in console.export_text()) == clips


# -- the commands ----------------------------------------------------------------------------------------------

FILE = """
servers = 2
[[workers]]
count = 3
compute = "1 s"
jitter = "10 %"
[[workers]]
compute = "3 s"
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command."""
    monkeypatch.setattr("sys.argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.usefixtures("one_core")
def test_simulate_prints_a_ranking_and_leaves_figures_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    out = tmp_path / "out"
    arguments = ["--sync", "bsp,ssp:staleness=3,asp", "--iterations", "20", "--out", str(out)]
    assert run(monkeypatch, "simulate", str(tmp_path / "mine.toml"), *arguments) == 0
    printed = capsys.readouterr().out
    assert "mine" in printed
    table, _, advised = printed.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    names = ["asp", "bsp, balanced batches", "ssp: staleness=3", "bsp  "]
    assert [table.index(name) for name in names] == sorted(table.index(name) for name in names)
    assert advised.startswith("Recommended: bsp with balanced batches: 2.")
    assert {path.name for path in out.iterdir()} == {"ranking.json", "ranking.png", "timelines.png"}
    found = json.loads((out / "ranking.json").read_text())
    assert found["rows"][0]["sync"] == "asp"
    assert advised.startswith(found["recommendation"]["text"])
    assert (found["recommendation"]["sync"], found["recommendation"]["batch"]) == ("bsp", "balanced")


CONDITIONS = """
def broken(state):
    return {}["no such key"]
"""


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("way", ["advise", *thorough("ranking"), *chaos("script")])
def test_a_condition_that_fails_is_shown_below_the_table(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    (tmp_path / f"own_{way}.py").write_text(CONDITIONS)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    sync = f"bsp,conditions:pull=own_{way}:broken"
    rehearse = ["simulate", str(tmp_path / "mine.toml"), "--sync", sync, "--out", str(tmp_path / "out")]
    arguments = {
        "ranking": [*rehearse, "--iterations", "20"],
        "script": [*rehearse, "--script", f"{tmp_path / 'train.py'} 30"],
        "advise": ["advise", str(saved(tmp_path, EQUAL)), "--sync", sync] if way == "advise" else [],
    }
    assert run(monkeypatch, *arguments[way]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"conditions:pull=own_{way}:broken: shard 0: the pull condition own_{way}:broken raised KeyError"
        in printed
    )
    assert "The shard continues with bsp." in printed
    assert f"--sync conditions:pull=own_{way}:broken SCRIPT" not in printed


@pytest.mark.usefixtures("one_core")
def test_simulate_sweeps_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    arguments = [
        "--sync",
        "ssp",
        "--sweep",
        "staleness=1..4",
        "--iterations",
        "10",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    assert run(monkeypatch, "simulate", str(tmp_path / "mine.toml"), *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    # The values are compared with bsp, although it is not in the sweep.
    assert found["recommendation"]["sync"] == "bsp"
    assert [row["sync"] for row in found["rows"]] == [
        "ssp:staleness=1",
        "ssp:staleness=2",
        "ssp:staleness=4",
    ]
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000


@pytest.mark.usefixtures("one_core")
def test_advise_prints_a_reason_and_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path, STRAGGLER)
    assert run(monkeypatch, "advise", str(folder), "--sync", "bsp,asp") == 0
    printed = capsys.readouterr().out
    assert "--sync asp SCRIPT" in printed
    assert "the run itself (bsp)" in printed
    assert "gradients per s measured" in " ".join(printed.split())
    assert "updates per s" not in printed
    assert "for worker 3, whose batches take 3 times as long" in " ".join(printed.split())
    assert "emulated" not in printed


@pytest.mark.usefixtures("one_core")
def test_what_is_derived_from_emulated_machines_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path, PACED)
    assert PACED.emulated in json.loads((folder / "summary.json").read_text())["emulated"]
    cluster = Cluster.from_run(folder)
    assert cluster.emulated == PACED.emulated
    assert describe(cluster).endswith(f"; recorded in a run with emulated machines: {PACED.emulated}")
    assert simulate(cluster, "asp", iterations=2).emulated == PACED.emulated
    assert run(monkeypatch, "advise", str(folder), "--sync", "bsp,asp") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"This run emulated unequal machines: {PACED.emulated}. The recommendations are for the emulated machines."
    ) in printed
    assert run(monkeypatch, "advise", str(folder), "--sync", "bsp,asp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["emulated"] == PACED.emulated


@pytest.mark.usefixtures("one_core")
def test_a_cluster_file_says_that_its_times_are_those_of_emulated_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(f"emulated = '{PACED.emulated}'\n{FILE}")
    arguments = ["--sync", "bsp,asp", "--iterations", "5", "--out", str(tmp_path / "out")]
    assert run(monkeypatch, "simulate", str(tmp_path / "mine.toml"), *arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"recorded in a run with emulated machines: {PACED.emulated}" in printed
    assert "(updates)" in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["simulate", "nowhere"], "the cluster file nowhere cannot be read"),
        (["simulate", "spec-sync-1", "--sync", "asb"], "unknown sync model 'asb'"),
        (
            ["simulate", "spec-sync-1", "--hyperparameters", "row"],
            "unknown hyperparameters 'row'; did you mean 'raw'",
        ),
        (["simulate", "spec-sync-1", "--sweep", "x"], "sweep is 'x'"),
        (
            ["simulate", "spec-sync-1", "--sync", "drop-stragglers:quorum=99"],
            "quorum is 99, expected at most 40",
        ),
        (["advise", "nowhere"], "the directory 'nowhere' does not exist"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    assert run(monkeypatch, "simulate", "spec-sync-1", "--out", str(tmp_path)) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


SCRIPT = """
import sys
import torch, paceline
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
for _ in range(int(sys.argv[1])):
    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
print("worker", paceline.worker_index())
"""


@pytest.mark.usefixtures("copied_pools")
def test_simulate_trains_a_script_under_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    (tmp_path / "train.py").write_text(SCRIPT)
    out = tmp_path / "out"
    arguments = ["--script", f"{tmp_path / 'train.py'} 30", "--sync", "bsp,asp", "--out", str(out)]
    assert run(monkeypatch, "simulate", str(tmp_path / "mine.toml"), *arguments) == 0
    printed = capsys.readouterr().out
    heading, _, rest = printed.partition("──")
    assert "gradients" in heading  # this script does not say how many samples it uses
    assert "waited" in heading, "the table fits into 80 columns"
    assert "The last loss of bsp is" in " ".join(rest.split())
    assert {"training.json", "training.png", "script-0.log", "script-1.log", "script-2.log"} == {
        path.name for path in out.iterdir()
    }
    assert sorted((out / "script-0.log").read_text().splitlines()) == [f"worker {w}" for w in range(4)]
    found = json.loads((out / "training.json").read_text())
    bsp, asp = found["rows"]  # the script distributes no data, so no batches can be balanced
    # All workers train on the same data.
    assert found["recommendation"] is None
    assert "No model is recommended, because there are no results for bsp" in printed
    assert bsp["final_loss"] < 0.3 * bsp["curve"][0][1]
    assert asp["figures"]["mean_staleness"] > 0 == bsp["figures"]["mean_staleness"]


@pytest.mark.usefixtures("copied_pools")
@pytest.mark.thorough
def test_a_model_that_the_script_cannot_use_is_left_out_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clips = SCRIPT.replace("return loss", "optimizer.clip_grad_norm(1.0)\n        return loss")
    (tmp_path / "train.py").write_text(clips)
    out, refusing = tmp_path / "out", "drop-stragglers:quorum=3"
    arguments = ["--script", f"{tmp_path / 'train.py'} 6", "--sync", f"bsp,{refusing},asp", "--out", str(out)]
    assert run(monkeypatch, "simulate", "elastic-bsp", *arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    reason = "left out, because this model does not allow what the script asks for: clip_grad_norm() needs"
    assert f"{refusing}: {reason}" in printed
    assert "asp: " in printed
    rows = json.loads((out / "training.json").read_text())["rows"]
    assert [row["figures"]["sync"] for row in rows] == ["bsp", refusing, "asp"]
    assert [bool(row["curve"]) for row in rows] == [True, False, True]


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(
    ("options", "saved"),
    [
        (["--sync", "bsp,asp"], {"ranking.json": "ranking.png and timelines.png were"}),
        *chaos(
            (["--sync", "bsp", "--samples", "400"], {"ranking.json": "ranking.png and timelines.png were"}),
            (["--sync", "elastic-bsp", "--sweep", "lookahead=5,10"], {"sweep.json": "sweep.png was"}),
            (
                ["--sync", "bsp", "--script", "train.py 6"],
                {"training.json": "training.png was", "script-0.log": "", "script-1.log": ""},
            ),
        ),
    ],
    ids=["ranking", "epochs", "sweep", "script"],
)
def test_without_matplotlib_every_comparison_prints_its_table_and_says_what_to_install(
    options: list[str],
    saved: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    code = run(monkeypatch, "simulate", "elastic-bsp", "--iterations", "3", "--out", "out", *options)
    printed, told = capsys.readouterr()
    assert code == 0, told
    [left_out] = filter(None, saved.values())
    assert "ElasticBSP's 4 machines" in printed
    assert "JSON files: out\n" in printed
    assert [line for line in printed.splitlines() if "matplotlib" in line] == [
        f"{left_out} not drawn: pictures require matplotlib, which is not installed; run: pip install "
        "'paceline[report]'"
    ]
    assert {path.name for path in Path("out").iterdir()} == saved.keys()


@pytest.mark.usefixtures("copied_pools")
def test_a_script_without_losses_is_refused_at_its_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("return loss", "print('step')"))
    arguments = ["--script", f"{tmp_path / 'train.py'} 300", "--sync", "asp", "--out", str(tmp_path / "out")]
    assert run(monkeypatch, "simulate", "elastic-bsp", *arguments) == 2
    assert capsys.readouterr().err.endswith(
        "error: worker 0 has reported no loss in its first 5 iterations. Call paceline.log(loss=loss) before "
        "each step(), or step(closure) with a closure that returns the loss.\n"
    )
    steps = (tmp_path / "out" / "script-0.log").read_text().count("step")
    assert steps <= 4 * 6  # of 4 workers, each of which began its sixth step at most


@pytest.mark.thorough
@pytest.mark.usefixtures("copied_pools")
def test_a_script_that_distributes_its_data_is_compared_in_samples_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    loop = "for batch in paceline.distribute(torch.utils.data.DataLoader(torch.arange(960), batch_size=8)):"
    (tmp_path / "train.py").write_text(SCRIPT.replace("for _ in range(int(sys.argv[1])):", loop))
    arguments = ["--script", str(tmp_path / "train.py"), "--sync", "bsp,asp", "--out", str(tmp_path / "out")]
    assert run(monkeypatch, "simulate", str(tmp_path / "mine.toml"), *arguments) == 0
    heading = capsys.readouterr().out.partition("──")[0]
    assert "samples" in heading
    assert "gradients" not in heading
    found = json.loads((tmp_path / "out" / "training.json").read_text())
    bsp, balanced, asp = (row["figures"] for row in found["rows"])
    assert (balanced["sync"], balanced["batch"]) == ("bsp", "balanced")
    assert balanced["samples_per_s"] > 1.5 * bsp["samples_per_s"]
    assert found["recommendation"]["text"].startswith("Recommended: bsp with balanced batches: ")
    assert bsp["samples_per_s"] == pytest.approx(32 / 3, rel=0.01)
    assert asp["samples_per_s"] == pytest.approx(8 * (3 + 1 / 3), rel=0.1)


@pytest.mark.usefixtures("copied_pools")
def test_a_script_that_fails_is_shown_with_its_own_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no such data')")
    arguments = ["--script", str(tmp_path / "train.py"), "--sync", "bsp", "--out", str(tmp_path / "out")]
    assert run(monkeypatch, "simulate", "elastic-bsp", *arguments) == 1
    assert "worker 0 failed: ValueError: no such data" in capsys.readouterr().err


def test_a_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, EQUAL)
    trace = folder / "trace-shard-0.jsonl"
    trace.write_bytes(trace.read_bytes().replace(b'"format":4', b'"format":1', 1))
    with pytest.raises(
        ConfigurationError, match="is a trace of format 1; this version of Paceline reads format 4"
    ):
        advise(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda folder: (folder / "worker-1.jsonl").unlink(),
            "records of 3 workers, but summary.json lists 4 workers",
        ),
        (
            lambda folder: [
                (folder / "worker-1.jsonl").unlink(),
                (folder / "summary.json").write_text(
                    json.dumps({**json.loads((folder / "summary.json").read_text()), "joined": True})
                ),
            ],
            "machines have joined the run in .*, so it cannot be simulated",
        ),
        (
            lambda folder: (folder / "summary.json").write_text('{"sync": "bsp"}'),
            "does not contain iterations and",
        ),
        (
            lambda folder: (folder / "summary.json").write_text('{"sync": "bsp", "traces": "off"}'),
            r"made no traces \(--traces off\), so it cannot be simulated",
        ),
        (lambda folder: (folder / "summary.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "summary.json").unlink(), r"there is no summary\.json"),
        (
            lambda folder: (folder / "summary.json").write_text('{"sync": "bsp", "ended": "failed"}'),
            "the run has failed",
        ),
        (lambda folder: _keep_lines(folder / "trace-shard-0.jsonl", 1), "contains only a header"),
    ],
)
def test_a_damaged_run_is_refused(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    folder = saved(tmp_path, EQUAL)
    damage(folder)
    with pytest.raises(ConfigurationError, match=reason):
        advise(folder)


def _keep_lines(path: Path, count: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))


def test_a_worker_that_finished_nothing_is_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path, EQUAL, "asp")
    (folder / "worker-1.jsonl").write_bytes(b"")
    assert Cluster.from_run(folder).workers == 3


def test_preemption_is_no_transfer_and_a_cut_off_run_is_measured_to_its_end() -> None:
    preempted = Cluster(compute_s=[1.0], presence={0: Presence(preempted_every_s=1.0, back_after_s=0.1)})
    row = run_task(Task(preempted, "asp", None, 1000.0, 0))
    assert row.transfer_share == pytest.approx(0.0, abs=1e-6)
    assert row.wasted_share > 0.2
    row = run_task(Task(Cluster(compute_s=[10.0, 10.0]), "bsp", None, 19.0, 0))
    assert row.until_s == 19.0
    assert row.gradients_per_s == pytest.approx(2 / 19)
    assert row.computing_share == pytest.approx(1.0)


def test_a_cluster_on_which_nothing_happens_is_refused_in_words() -> None:
    with pytest.raises(ConfigurationError, match="no worker finishes an iteration"):
        rank(Cluster(compute_s=[0.0]), ["asp"])


def test_steps_of_a_sweep_are_exact() -> None:
    assert sweep_values("probability=0.1..0.3:0.1")[1] == [0.1, 0.2, 0.3]
    assert sweep_values("staleness=0..2:1")[1] == [0, 1, 2]
    assert variants(["elastic-bsp"], "lookahead", [1234567.0]) == [
        (1234567.0, "elastic-bsp:lookahead=1234567")
    ]
    with pytest.raises(ConfigurationError, match="more than 1000 values"):
        sweep_values("lookahead=1..1000000000:1")


@pytest.mark.parametrize(
    ("script", "arguments", "code", "reason"),
    [
        *chaos(
            (SCRIPT + "\nsys.exit(3)", "3", 1, "exit code 3"),
            (SCRIPT.replace("return loss", "pass"), "3", 2, "reported no losses"),
            (SCRIPT + "\nimport os\nos._exit(4)", "3", 1, "ended without an error message"),
            ("import paceline, sys\n" + SCRIPT + "\nsys.exit(0)", "3", 0, ""),
            (
                SCRIPT + "\nimport io\nclass Own(torch.nn.Linear): pass\ntorch.save(Own(2, 2), io.BytesIO())",
                "3",
                0,
                "",
            ),
        ),
    ],
    ids=["exit 3", "no loss", "gone", "exit 0", "pickles a class of its own"],
)
def test_however_a_script_ends_it_is_said_as_a_live_run_would(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    arguments: str,
    code: int,
    reason: str,
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [
        "--script",
        f"{tmp_path / 'train.py'} {arguments}",
        "--sync",
        "asp",
        "--out",
        str(tmp_path / "out"),
    ]
    assert run(monkeypatch, "simulate", "elastic-bsp", *command) == code
    assert reason in capsys.readouterr().err
