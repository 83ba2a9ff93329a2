"""Exhibits: each can be made, states what differs from the paper, and saves its numbers and its plot."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.sim import Cluster, simulate
from reproductions import comparing, training, verdicts
from reproductions.catalogue import EXHIBITS, chosen, make
from reproductions.commands import main
from reproductions.comparing import EVALUATION, compare
from reproductions.datasets.synthetic_ratings import synthetic_ratings
from reproductions.exhibit import Options
from reproductions.fluent_ps.slicing import resnet_56
from reproductions.kept_runs import kept_until_complete
from reproductions.problems import SMALL_RESNET
from reproductions.spec_sync.examples import CLUSTER, MODELS, computations
from reproductions.spec_sync.pushes import pushes_after_pulls
from reproductions.training import Target, TrainingRun, run_all
from tests.support.marks import thorough

from .test_papers import WRITTEN, paper_cells

PROMISED = {
    "zipline-table3",
    "zipline-table4",
    "zipline-fig4",
    "zipline-fig6",
    "zipline-fig7",
    "zipline-fig10",
    *(f"elasticbsp-table{number}" for number in (1, 2)),
    *(f"elasticbsp-fig{number}" for number in (3, 5, 8, 9, 11, 12, 13, 14, 15)),
    *(f"specsync-fig{number}" for number in ("3", "5", "5b", "8", "8a", "8c", "10", "11", "12")),
    *(f"specsync-{name}" for name in ("table1", "table2", "examples")),
    *(f"fluentps-fig{number}" for number in (6, 7, 8, 9, 10, 11)),
    "fluentps-table4",
}

FAST = [name for name in sorted(PROMISED) if EXHIBITS[name].minutes <= 1]

IN_EVERY_RUN = ("elasticbsp-fig3", "elasticbsp-fig9", "specsync-fig3", "zipline-fig6")
"""Some of three papers. Those of FluentPS take longer."""


LOSS = Target("loss", 0.1, in_a_row=2)


def silent(what: str, share: float, slow: bool = False) -> None:
    """Ignore the progress."""


def test_there_is_everything_that_is_promised() -> None:
    assert set(EXHIBITS) >= PROMISED
    for exhibit in EXHIBITS.values():
        assert exhibit.differs.endswith(".")
        assert exhibit.minutes > 0


@pytest.mark.parametrize(
    "name", [*IN_EVERY_RUN, *thorough(*(name for name in FAST if name not in IN_EVERY_RUN))]
)
def test_what_takes_no_training_is_made_with_its_numbers_and_its_plot(name: str, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    make(EXHIBITS[name], Options(quick=True, seeds=1), tmp_path, console, silent)
    printed = console.export_text()
    assert EXHIBITS[name].source in printed
    assert "What differs" in printed
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert kept["data"]
    for table in kept["tables"]:
        assert set(paper_cells(table["columns"], table["rows"])) <= WRITTEN


@pytest.mark.thorough
def test_an_exhibit_with_training_is_made(tmp_path: Path) -> None:
    make(EXHIBITS["specsync-fig8"], Options(quick=True, seeds=1), tmp_path, Console(quiet=True), silent)
    kept = json.loads((tmp_path / "specsync-fig8.json").read_text())
    assert kept["data"]["seconds_by_rate"].keys() == {"Original", "Adaptive", "Cherrypick"}
    keys = {"faster-cifar10", "adaptive-cifar10", "fewer-iterations"}
    assert kept["measured"].keys() == {f"specsync/{key}" for key in keys}


def test_training_runs_come_out_the_same_in_any_process() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 2.0])
    runs = [
        TrainingRun(
            label=label, cluster=cluster, sync=sync, target=LOSS, learning_rate=0.1, iterations=6, every_s=2.0
        )
        for label, sync in (("a", "bsp"), ("b", "asp"), ("again", "bsp"))
    ]
    first, second, third = run_all(runs)
    assert first.values == third.values != second.values
    assert first.time_s == 12.0
    assert first.values[-1] < first.values[0]


def slow_pair(**settings: Any) -> TrainingRun:
    """A run of two workers that ends after a few iterations."""
    cluster = Cluster(compute_s=[1.0, 1.0])
    return TrainingRun(label="bsp", cluster=cluster, sync="bsp", target=LOSS, **settings)


@pytest.mark.usefixtures("copied_pools")
def test_a_sweep_goes_on_until_the_best_learning_rate_is_not_at_an_end() -> None:
    run = slow_pair(iterations=8, every_s=4.0, until_target=False, learning_rate=0.08)
    found = compare([run], [0.16], Options(), lambda what, share: None)
    rates = list(found.by_rate["bsp"])
    assert rates == sorted(rates)
    assert found.best["bsp"] not in (rates[0], rates[-1])
    assert found.at_an_end == []
    [at_best] = found.at_best
    assert at_best.run.learning_rate == found.best["bsp"]
    assert at_best.run.seed == EVALUATION  # another seed than that by which the rate was chosen


def test_a_sweep_says_if_the_best_learning_rate_is_at_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "WIDENED", 0)
    run = slow_pair(iterations=2, every_s=1.0, learning_rate=1e-6)
    found = compare([run], [2e-6], Options(), lambda what, share: None)
    assert (found.best, found.at_an_end) == ({"bsp": 2e-6}, ["bsp"])


def test_a_label_for_which_no_rate_is_chosen_is_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "WIDENED", 0)
    run = slow_pair(iterations=2, every_s=1.0, learning_rate=1e-6)
    other = msgspec.structs.replace(run, label="asp", sync="asp")
    found = compare([run, other], [2e-6], Options(), lambda what, share: None, at_one_rate=["asp"])
    assert {label: list(tried) for label, tried in found.by_rate.items()} == {
        "bsp": [1e-6, 2e-6],
        "asp": [1e-6],
    }
    assert [outcome.run.seed for outcome in found.at_best] == [EVALUATION, 0]
    assert found.at_best[1:] == found.by_rate["asp"][1e-6]


def test_runs_that_are_trained_together_end_as_runs_of_their_own() -> None:
    """Rates and seeds share a schedule, and nothing else."""
    together = [
        slow_pair(iterations=4, learning_rate=rate, seed=seed) for rate in (0.05, 0.1) for seed in (0, 1)
    ]
    outcomes = run_all(together)
    assert len({outcome.values[-1] for outcome in outcomes}) == 4
    for run, outcome in zip(together, outcomes, strict=True):
        [alone] = run_all([run])
        assert outcome.values == pytest.approx(alone.values, rel=1e-5)
        assert (outcome.gradients, outcome.time_s) == (8, 4.0)


def test_batch_norm_is_trained_without_running_statistics() -> None:
    run = msgspec.structs.replace(slow_pair(iterations=2, learning_rate=0.1), problem=SMALL_RESNET)
    [outcome] = run_all([run])
    assert math.isfinite(outcome.values[-1])


def test_a_run_that_diverges_misses_its_target() -> None:
    [outcome] = run_all([slow_pair(iterations=4, learning_rate=1e6)])
    assert outcome.values[-1] == math.inf
    assert outcome.time.reached is False


@pytest.mark.parametrize(
    ("target", "values", "index"),
    [
        (Target("accuracy", 0.9, 2), [0.91, 0.89, 0.9, 0.95, 0.5], 3),
        (Target("accuracy", 0.9, 1), [0.1, 0.9], 1),
        (Target("loss", 0.5, 3), [0.5, 0.4, 0.6, 0.4, 0.4], None),
        (Target("loss", 0.5, 2), [0.6, math.inf, 0.4, 0.5], 3),
    ],
)
def test_a_target_is_reached_by_so_many_evaluations_in_a_row(
    target: Target, values: list[float], index: int | None
) -> None:
    assert target.reached_at(values) == index


def test_pushes_after_a_pull_are_counted_by_second() -> None:
    result = simulate(Cluster(compute_s=[4.1, 0.7]), "asp", iterations=8, record=True)
    counts = pushes_after_pulls(result.trace[0], 2, 1.0)
    # After worker 0's first pull, at 4.1 s, worker 1 pushes at 4.2, 4.9 and 5.6 s. Its own pushes do not count.
    assert max(counts[0]) == 2
    assert max(counts[1]) == 1


def test_the_example_of_4_workers_has_the_updates_and_the_restarts_that_the_paper_describes() -> None:
    cells = {}
    for label, sync in MODELS.items():
        done = computations(simulate(CLUSTER, sync, 2, record=True).trace[0])
        used = {each.worker: each.updates for each in done if not each.aborted}
        cells[label[:6]] = (
            [used[worker] for worker in range(4)],
            {each.worker for each in done if each.aborted},
        )
    assert cells["Fig. 2"][0][:2] == [1, 4]
    assert cells["Fig. 4"] == ([3, 4, 4, 4], set())
    assert cells["Fig. 6"][1] == {0, 3}


def test_the_synthetic_ratings_have_the_size_and_the_skew_of_movielens() -> None:
    images = synthetic_ratings()
    pairs = torch.cat([images.train.tensors[0], images.test.tensors[0]])  # type: ignore[attr-defined]
    assert len(pairs) == len(pairs.unique(dim=0)) == 100_000
    of_items = pairs[:, 1].bincount(minlength=1682).sort(descending=True).values
    assert 0.4 < of_items[:168].sum() / 100_000 < 0.6  # the most popular tenth


def test_resnet_56_has_the_parameters_of_the_paper() -> None:
    size = sum(parameter.size for parameter in resnet_56().parameters)
    assert 0.84e6 < size < 0.87e6


def test_the_clusters_of_the_papers_are_as_many_as_they_say() -> None:
    assert [Cluster.preset(f"fluent-ps-{n}").workers for n in (32, 64, 128)] == [32, 64, 128]
    assert [Cluster.preset(f"spec-sync-{n}").workers for n in (1, 2)] == [40, 40]


def test_an_exhibit_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown exhibit 'fluentps-fig99'"):
        chosen(["fluentps-fig99"])


def test_the_command_lists_and_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--list"], ["zipline-fig6", "--quick", "--out", str(tmp_path / "out")]):
        assert run_command(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert "fluentps-table4" in printed
    written = {path.suffix: path for path in (tmp_path / "out").glob("zipline-fig6.*")}
    assert written.keys() == {".json", ".png", ".txt"}
    assert "python -m reproductions zipline-fig6 --quick\n" in written[".txt"].read_text()


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run `python -m reproductions` in this process, and return its exit code."""
    monkeypatch.setattr("sys.argv", ["reproductions", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.thorough
def test_a_kept_result_is_made_again_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "specsync-fig3", "--again", "--out", str(tmp_path / "same")) == 0
    assert "specsync-fig3: identical tables" in capsys.readouterr().out
    kept = tmp_path / "kept"
    kept.mkdir()
    content = (verdicts.RESULTS / "specsync-fig3.json").read_text()
    assert '"value": 6.0' in content
    (kept / "specsync-fig3.json").write_text(re.sub(r'"(value|low|high)": 6.0', r'"\1": 7.0', content))
    monkeypatch.setattr(verdicts, "RESULTS", kept)
    assert run_command(monkeypatch, "specsync-fig3", "--again", "--out", str(tmp_path / "other")) == 1
    assert re.search(r"7 +6 +NO", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["specsync-fig3", "--again", "--quick"],
            "--again compares with kept results. Leave out --quick and --data.",
        ),
        (
            ["specsync-fig3", "--again"],
            "specsync-fig3 has no kept result to compare with. Leave out --again.",
        ),
    ],
)
def test_a_result_that_cannot_be_compared_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(verdicts, "RESULTS", tmp_path)
    assert run_command(monkeypatch, *arguments, "--out", str(tmp_path / "out")) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_command_that_was_stopped_goes_on_from_the_runs_that_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.jsonl"
    run, other = (slow_pair(iterations=4, learning_rate=rate) for rate in (0.1, 1e6))
    first = []

    def stopped() -> None:
        with kept_until_complete(path):
            first.extend(run_all([run, other]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with kept_until_complete(path):
        monkeypatch.setattr(training, "_execute", None)  # nothing may be trained again
        assert run_all([run, other]) == first
        assert first[1].values[-1] == math.inf
    assert not path.exists()
