"""Where the weights of a run are saved; the rest of what it leaves behind is tried on real runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from paceline.core.metrics import Metric, MetricPoint
from paceline.shard.store import WeightsSnapshot
from paceline.sim import Cluster, simulate
from paceline.start.results import RunResult, how_to_resume, save_weights
from paceline.studies.results import StudyResult

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


@pytest.mark.parametrize(
    ("command", "joined", "resumes"),
    [
        ("paceline run -n 2 train.py", False, ": paceline run --resume 'my runs/1'"),
        ("paceline serve -n 2", True, ": paceline serve --resume 'my runs/1'"),
        (
            "torchrun --nnodes=2 -m paceline.join train.py",
            True,
            ", start the job again with --run-dir 'my runs/1'",
        ),
        ("srun paceline join --slurm train.py", True, ", start the job again with --run-dir 'my runs/1'"),
        ("python3 train.py", False, ': paceline.launch(..., resume="my runs/1")'),
        ("", False, ': paceline.launch(..., resume="my runs/1")'),
    ],
)
def test_a_run_is_resumed_as_it_was_started(command: str, joined: bool, resumes: str) -> None:
    assert how_to_resume(command, Path("my runs/1"), joined=joined) == resumes


def test_a_result_is_shown_in_a_few_words(tmp_path: Path) -> None:
    """A notebook shows the value of a cell's last line, and the weights alone may be millions of numbers."""
    weights = {"weight": torch.zeros(1000)}
    snapshot = WeightsSnapshot(weights, (3,))
    live = RunResult(weights, {"sync": "asp", "ended": "finished"}, tmp_path, [(0.5, snapshot)] * 9)
    assert repr(live) == f"RunResult(asp, finished, 1 tensors, run_dir={str(tmp_path)!r})"
    assert repr(snapshot) == "WeightsSnapshot(1 tensors, versions=(3,))"
    simulated = simulate(Cluster(compute_s=[1.0, 2.0]), "bsp", 50, record=True)
    assert repr(simulated) == "SimResult(bsp, 2 workers, 100 iterations, 100 virtual seconds)"
    assert repr(simulated.trace).startswith("[Trace(shard 0, ")
    assert len(repr(simulated.trace)) < 100
    metric = Metric("loss", "mean", (MetricPoint(0.5, 32, 1, 2.5),) * 100)
    assert repr(metric) == "Metric('loss', mean, 100 points)"
    compared = StudyResult(SimpleNamespace(name="mine"), (), (), ())  # type: ignore[arg-type]
    assert repr(compared) == "StudyResult('mine', 0 rows)"
