"""The studies that ask the questions of two pages again: they are about the same clusters, models and problems."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from paceline.sim import Cluster, simulate
from paceline.studies.cells import Cell, run_cell, task_of
from paceline.studies.description import Budget, Study, read_study_file
from reproductions.evidence.on_networks import STUDIES
from reproductions.same_accuracy.digits import DigitsMLP
from reproductions.same_accuracy.plan import FACTORS, MODELS, SEEDS, cluster_of
from reproductions.same_accuracy.table import SCHEDULE_SEED, Result, Tuned, read

ROOT = Path(__file__).parents[2] / "reproductions"


def study(name: str) -> Study:
    return read_study_file(ROOT / "studies" / f"{name}.toml")


def unnamed(cluster: Cluster) -> Cluster:
    return dataclasses.replace(cluster, name="")


@pytest.fixture(scope="module")
def table() -> tuple[dict[str, Tuned], dict[tuple[object, ...], Result]]:
    return read(ROOT / "results" / "same-accuracy.jsonl")


def test_the_study_of_same_accuracy_is_a_part_of_the_table(
    table: tuple[dict[str, Tuned], dict[tuple[object, ...], Result]],
) -> None:
    found = study("same-accuracy")
    for name, cluster in found.clusters.items():
        assert unnamed(cluster) == unnamed(cluster_of(name, 4))
    wanted = {(MODELS[name](4), "translated") for name in MODELS}
    wanted |= {(MODELS[name](4), "raw") for name in MODELS if name != "bsp"}
    assert {(each.sync, each.hyperparameters) for each in found.contenders} == wanted
    for each in found.contenders:
        assert each.sync == MODELS[each.name.removesuffix(", raw")](4)
        assert each.name.endswith(", raw") == (each.hyperparameters == "raw")
    assert found.arguments["rate"] == table[0]["digits-mlp"].best / 2
    assert found.seeds == SEEDS


PLACES = ("steady 3x", "jitter", "pauses")
IN_EVERY_RUN = {("jitter", "ssp, raw")}


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        pytest.param(cluster, name, marks=[] if (cluster, name) in IN_EVERY_RUN else pytest.mark.thorough)
        for cluster in PLACES
        for name in (*MODELS, *(f"{name}, raw" for name in MODELS if name != "bsp"))
    ],
)
def test_a_run_alone_ends_as_in_the_table(
    cluster: str,
    name: str,
    table: tuple[dict[str, Tuned], dict[tuple[object, ...], Result]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the seed of the table's schedule. Evaluations would delay the main worker, so there are none."""
    task = task_of(study("same-accuracy"), Cell(cluster, name, (), SCHEDULE_SEED))
    function, _ = task.trained.run(task.values, SCHEDULE_SEED)
    assert isinstance(function, functools.partial)
    monkeypatch.setitem(function.func.__globals__, "log_accuracy", lambda network: None)
    found = simulate(
        task.cluster,
        task.sync,
        seed=SCHEDULE_SEED,
        train_fn=function,
        hyperparameters=task.hyperparameters,
        on_nan="skip",
    )
    assert found.state_dict is not None
    weights = {key: value.unsqueeze(0) for key, value in found.state_dict.items()}
    model, _, kind = name.partition(", ")
    result = table[1][
        "digits-mlp", cluster, 4, model, "raw" if model == "bsp" else kind or "translated", len(SEEDS)
    ]
    expected = result.runs[FACTORS.index(0.5)].finals[SCHEDULE_SEED]
    assert DigitsMLP().quality(weights).item() == pytest.approx(expected, abs=0.5 / 360)  # half of an image
    assert found.time_s == pytest.approx(result.end_s, abs=1e-3)


def test_a_run_of_a_study_logs_what_the_study_aims_at() -> None:
    for name, point in (("same-accuracy", ()), ("evidence-digits", (("rate", 0.177), ("momentum", 0.0)))):
        found = study(name)._replace(budget=Budget(seconds=20.0))
        outcome = run_cell(task_of(found, Cell(next(iter(found.clusters)), "asp", point, 0)))
        assert found.target.metric in outcome.metrics
        assert len(outcome.curve) > 2


def test_the_study_on_digits_is_a_part_of_the_evidence() -> None:
    found, page = study("evidence-digits"), STUDIES["digits"]
    assert list(found.clusters) == [place.name for place in page.places]
    for place in page.places:
        assert unnamed(found.clusters[place.name]) == unnamed(place.cluster())
    assert {each.name: each.sync for each in found.contenders} == {
        each.name: each.variants(4)[0].sync for each in page.contenders
    }
    assert all(each.hyperparameters == "raw" for each in found.contenders)
