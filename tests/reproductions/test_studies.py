"""The studies that ask the questions of two pages again: they are about the same clusters, models and problems."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.sim import Cluster
from paceline.studies.cells import Cell, run_cell
from paceline.studies.description import Study, read_file
from paceline.studies.plan import task_of
from reproductions.evidence.on_networks import STUDIES
from reproductions.same_accuracy.plan import MODELS, SEEDS, cluster_of
from reproductions.same_accuracy.table import Result, Tuned, read

ROOT = Path(__file__).parents[2] / "reproductions"


def study(name: str) -> Study:
    return read_file(ROOT / "studies" / f"{name}.toml")


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


def test_a_run_of_the_study_ends_as_in_the_table(
    table: tuple[dict[str, Tuned], dict[tuple[object, ...], Result]],
) -> None:
    """Only with the seed of the table's schedule do both compute from the same weights in the same order."""
    found = study("same-accuracy")
    outcome = run_cell(task_of(found, Cell("steady 3x", "asp", (), 0)))
    expected = table[1]["digits-mlp", "steady 3x", 4, "asp", "translated", len(SEEDS)].runs[1].finals[0]
    assert outcome.final == pytest.approx(expected, abs=2 / 360)  # images
    assert len(outcome.curve) > 40


def test_the_study_on_digits_is_a_part_of_the_evidence() -> None:
    found, page = study("evidence-digits"), STUDIES["digits"]
    assert list(found.clusters) == [place.name for place in page.places]
    for place in page.places:
        assert unnamed(found.clusters[place.name]) == unnamed(place.cluster())
    assert {each.name: each.sync for each in found.contenders} == {
        each.name: each.variants(4)[0].sync for each in page.contenders
    }
    assert all(each.hyperparameters == "raw" for each in found.contenders)
