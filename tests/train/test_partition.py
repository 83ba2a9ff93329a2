"""Unequal shares of a dataset, and how evenly workers contribute to the updates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline import Cluster, launch, simulate
from paceline.errors import ConfigurationError
from paceline.look.summary import summary_rows
from paceline.sim import Uniform

LABELS = np.random.default_rng(3).integers(0, 10, 1000)


@pytest.mark.parametrize("settings", [{"dirichlet": 0.3}, {"dirichlet": 100.0}, {"shards": 2}, {"shards": 1}])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_every_sample_belongs_to_one_worker(settings: dict[str, float], workers: int) -> None:
    parts = paceline.partition(LABELS, workers, **settings)  # type: ignore[arg-type]
    assert len(parts) == workers
    assert sorted(sample for part in parts for sample in part) == list(range(LABELS.size))
    assert parts == paceline.partition(torch.from_numpy(LABELS), workers, **settings)  # type: ignore[arg-type]
    assert parts == paceline.partition(LABELS.tolist(), workers, **settings)  # type: ignore[arg-type]
    if workers > 1:
        assert parts != paceline.partition(LABELS, workers, seed=1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("concentration", [0.1, 0.3, 5.0])
def test_the_mixtures_of_labels_are_those_of_numpy(concentration: float) -> None:
    """The share of each label in each worker is the proportion that NumPy draws from the Dirichlet distribution."""
    draws = [
        (label, worker, len(set(part) & set(np.flatnonzero(labels == label))) / (labels == label).sum())
        for labels in [np.repeat(np.arange(5), 2000)]
        for worker, part in enumerate(paceline.partition(labels, 4, dirichlet=concentration, seed=8))
        for label in range(5)
    ]
    generator = np.random.default_rng(8)
    for label in range(5):
        generator.permutation(2000)
        expected = generator.dirichlet([concentration] * 4)
        found = [share for each, _, share in draws if each == label]
        assert found == pytest.approx(expected, abs=1 / 2000)


def test_shares_are_spread_as_a_dirichlet_distribution_is() -> None:
    """A share of a symmetric Dirichlet distribution has the variance (1/n)(1 - 1/n) / (n a + 1)."""
    for concentration in (0.3, 3.0):
        sizes = [
            len(part) / 1000
            for seed in range(300)
            for part in _parts_or_none(np.zeros(1000, int), concentration, seed)
        ]
        assert np.mean(sizes) == pytest.approx(0.25, rel=0.01)
        assert np.var(sizes) == pytest.approx(0.25 * 0.75 / (4 * concentration + 1), rel=0.1)


def _parts_or_none(labels: np.ndarray, concentration: float, seed: int) -> list[list[int]]:
    """Divide among 4 workers, also if one of them gets nothing: the first 3 of 4 groups of labels fill it up."""
    try:
        return paceline.partition(labels, 4, dirichlet=concentration, seed=seed)
    except ConfigurationError:
        generator = np.random.default_rng(seed)
        generator.permutation(labels.size)
        ends = np.round(np.cumsum(generator.dirichlet([concentration] * 4))[:-1] * labels.size).astype(int)
        return [part.tolist() for part in np.split(np.arange(labels.size), ends)]


def test_shards_give_a_worker_few_labels() -> None:
    labels = np.repeat(np.arange(10), 100)
    for part in paceline.partition(labels, 10, shards=2):
        assert len(part) == 100
        assert len(set(labels[part])) <= 2


def test_bad_input_is_named() -> None:
    ragged: Any = [[0], [0, 1]]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: paceline.partition([], 2, dirichlet=1.0), r"labels has the shape \(0,\)"),
        (lambda: paceline.partition(torch.zeros(3, 2), 2, dirichlet=1.0), r"labels has the shape \(3, 2\)"),
        (
            lambda: paceline.partition([0, 1], 3, dirichlet=1.0),
            "workers is 3, expected a whole number from 1 to",
        ),
        (lambda: paceline.partition([0, 1], 2), "expected either dirichlet or shards"),
        (
            lambda: paceline.partition([0, 1], 2, dirichlet=1.0, shards=1),
            "expected either dirichlet or shards",
        ),
        (lambda: paceline.partition([0, 1], 2, dirichlet=0.0), "dirichlet is 0.0, expected a number > 0"),
        (lambda: paceline.partition([0, 1], 2, shards=2), "shards is 2, expected a whole number from 1 to 1"),
        (
            lambda: paceline.partition(ragged, 2, shards=1),
            "labels cannot be converted to an array: ValueError",
        ),
        (
            lambda: paceline.partition([0, 1], 2, shards=1, seed=-1),
            "seed is -1, expected a whole number >= 0",
        ),
        (lambda: paceline.partition([0] * 4, 4, dirichlet=0.01), "would get none of the 4 samples"),
    ]
    for call, reason in cases:
        with pytest.raises(ConfigurationError, match=reason):
            call()


def train_on_own_data(folder: str) -> None:
    """Train for two epochs on this worker's own data, and write down which samples it has used."""
    torch.manual_seed(0)
    labels = torch.arange(120) % 4
    data = torch.utils.data.TensorDataset(torch.arange(120), torch.randn(120, 3), labels)
    worker = paceline.worker_index()
    own = paceline.partition(labels, paceline.worker_count(), dirichlet=0.3, seed=2)[worker]
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(data, own), batch_size=8, shuffle=True)
    model = torch.nn.Linear(3, 4)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    epochs: list[list[int]] = []
    for _ in range(2):
        epochs.append([])
        for samples, inputs, targets in loader:
            epochs[-1] += samples.tolist()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    Path(folder, f"{worker}.json").write_text(json.dumps([sorted(epoch) for epoch in epochs]))


@pytest.mark.processes
def test_each_worker_keeps_its_own_data_live_and_simulated(tmp_path: Path) -> None:
    used = []
    for kind in ("live", "simulated"):
        (tmp_path / kind).mkdir()
        if kind == "live":
            launch(
                train_on_own_data,
                args=(str(tmp_path / kind),),
                workers=3,
                servers=1,
                sync="asp",
                run_dir=tmp_path / "run",
                progress=False,
            )
        else:
            simulate(Cluster([1.0] * 3), "asp", train_fn=train_on_own_data, args=(str(tmp_path / kind),))
        used.append([json.loads((tmp_path / kind / f"{worker}.json").read_text()) for worker in range(3)])
    live, simulated = used
    assert live == simulated
    parts = paceline.partition(torch.arange(120) % 4, 3, dirichlet=0.3, seed=2)
    assert live == [[part, part] for part in parts]
    assert sorted(sample for [first, _] in live for sample in first) == list(range(120))


def test_the_report_says_how_evenly_workers_contribute() -> None:
    cluster = Cluster([1.0, Uniform(low=0.9, high=1.1), 4.0])
    result = simulate(cluster, "asp", None, until_s=200.0)
    assert result.measures.worker_gradients == result.measures.iterations
    text = summary_rows(result.summary | {"ended": "finished"})["fairness"]
    # 200, 200 and 50 gradients: (450)^2 / (3 * 82,500) = 0.82
    assert text.startswith("a worker's share of the updates is 11.1% to 44.")
    assert "(Jain's index 0.82; 1 if all shares are equal)" in text
    even = simulate(cluster, "bsp", None, until_s=200.0)
    assert "fairness" not in summary_rows(even.summary | {"ended": "finished"})


def test_gradients_that_are_dropped_count_for_nobody() -> None:
    result = simulate(Cluster([1.0, 1.0, 1.0, 3.0]), "drop-stragglers:quorum=3", None, until_s=60.0)
    assert result.measures.worker_gradients[3] < 0.1 * result.measures.worker_gradients[0]
    assert sum(result.measures.worker_gradients.values()) == result.measures.gradients
