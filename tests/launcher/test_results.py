"""Where the weights of a run are saved; the rest of what it leaves behind is tried on real runs."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from paceline.launcher.live_run.run_results import save_weights
from paceline.shard.snapshot import WeightsSnapshot

WEIGHT = torch.arange(6.0).reshape(2, 3).T  # not contiguous, as a model's may be


def test_weights_are_saved_whole(tmp_path: Path) -> None:
    path, said = save_weights(WeightsSnapshot({"weight": WEIGHT}, (3,)), tmp_path)

    assert (path, said) == (tmp_path / "weights.safetensors", [])
    assert torch.equal(safetensors.torch.load_file(tmp_path / "weights.safetensors")["weight"], WEIGHT)
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_what_is_left_of_the_weights_is_saved_under_another_name_and_the_rest_is_named(
    tmp_path: Path,
) -> None:
    absent = tuple(f"layer{index}.weight" for index in range(200))
    path, said = save_weights(WeightsSnapshot({"weight": WEIGHT}, (3, -1), absent), tmp_path)

    assert path == tmp_path / "weights-partial.safetensors"
    [line] = said
    assert line.startswith("the saved weights are incomplete; missing: layer0.weight, layer1.weight, ")
    assert line.endswith(" more")


def test_without_any_weights_no_file_is_made(tmp_path: Path) -> None:
    path, said = save_weights(WeightsSnapshot({}, (-1,), ("weight",)), tmp_path)

    assert (path, said) == (None, ["no weights were saved, because no weights could be read"])
    assert list(tmp_path.iterdir()) == []
