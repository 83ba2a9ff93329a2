"""A color means the same in all pictures: a sync model, or a use of time."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from paceline.lab.demo import EVERY_SETTING, SETTINGS
from paceline.lab.ranking import EVERY_MODEL, rank
from paceline.look.models import FURTHER_COLORS, model_styles, styles_of
from paceline.look.summary import LossCurve, loss_picture
from paceline.look.tables import ranking_picture, sweep_picture
from paceline.sim import Cluster
from paceline.sync import MODELS
from paceline.words import COLOR_OF, run_name

OF_TIME = {*COLOR_OF.values()}


def test_every_model_of_the_package_has_a_color_of_its_own_that_no_use_of_time_has() -> None:
    assert set(model_styles()) >= {
        name for name, model in MODELS.items() if model.__module__.startswith("paceline.")
    }
    colors = [style.color for style in model_styles().values()] + [*FURTHER_COLORS]
    assert len(colors) == len(set(colors))
    assert not OF_TIME & set(colors)


def test_a_model_has_the_same_color_whatever_is_beside_it() -> None:
    alone, beside = styles_of(["asp"]), styles_of(["mine", "bsp", "ssp:staleness=3", "asp"])
    assert alone["asp"] == beside["asp"] == model_styles()["asp"]


def test_what_is_special_about_a_run_changes_only_its_dashes() -> None:
    names = [run_name("bsp", "equal"), run_name("bsp", "balanced"), run_name("bsp", "equal", "translated")]
    styles = styles_of(names)
    assert {style.color for style in styles.values()} == {model_styles()["bsp"].color}
    assert len({style.dashes for style in styles.values()}) == 3
    assert styles_of(names[1:])[names[1]] == styles[names[1]]


def test_all_runs_of_a_picture_look_different() -> None:
    for settings in (SETTINGS, EVERY_SETTING):
        names = [setting.name for setting in settings]
        assert len(set(styles_of(names).values())) == len(names)


def test_the_curves_of_twelve_runs_of_a_model_differ_in_their_dashes() -> None:
    styles = styles_of(run_name(f"ssp:staleness={n}", "equal" if n % 2 else "balanced") for n in range(12))
    assert {style.color for style in styles.values()} == {model_styles()["ssp"].color}
    assert len({style.dashes for style in styles.values()}) == 12


def test_models_of_the_user_and_schedules_have_further_colors_in_their_order() -> None:
    names = ["mine:quorum=3", "bsp", "bsp@0,asp@50", "bsp|asp", "mine:quorum=4"]
    styles = styles_of(names)
    colors = [styles[name].color for name in names]
    assert colors == [
        *(
            FURTHER_COLORS[0],
            model_styles()["bsp"].color,
            FURTHER_COLORS[1],
            FURTHER_COLORS[2],
            FURTHER_COLORS[0],
        )
    ]
    many = styles_of([f"own-{number}" for number in range(36)])
    assert len(set(many.values())) == 36


def _drawn(lines: list[Line2D]) -> dict[str, str]:
    return {str(line.get_label()).partition(":")[0]: to_hex(line.get_color()).upper() for line in lines}


@pytest.mark.usefixtures("one_core")
def test_all_pictures_use_them() -> None:
    expected = {name: model_styles()[name].color for name in ("bsp", "asp")}
    losses = loss_picture("t", "n", [LossCurve(name, [(0.0, 1.0)]) for name in expected])
    assert _drawn([*losses.axes[0].lines]) == expected
    rows = rank(Cluster(compute_s=[1.0, 3.0]), EVERY_MODEL, iterations=5)
    scatter = ranking_picture("t", "n", rows).axes[0]
    edges = [
        to_hex(tuple(np.asarray(points.get_edgecolor(), dtype=float)[0])).upper()
        for points in scatter.collections
    ]
    assert edges == [styles_of(row.name for row in rows)[row.name].color.upper() for row in rows]
    swept = sweep_picture("t", "k", {name: [(1.0, rows[0])] for name in expected})
    assert _drawn([*swept.axes[0].lines]) == expected
