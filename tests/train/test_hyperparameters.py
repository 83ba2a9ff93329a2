"""Tests of the option `hyperparameters`: what users can say, where it arrives, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cli.options import as_options
from paceline.errors import ConfigurationError
from paceline.run.job import describe
from paceline.run.job_options import make_job
from paceline.sim import Cluster, SimResult, simulate
from paceline.trace.replay import replay
from tests.conftest import RunOnThreads
from tests.support.marks import thorough

CLUSTER = Cluster(compute_s=[1.0, 1.2, 3.1])
RELAXED = [
    "ssp:staleness=2",
    "elastic-bsp:lookahead=3",
    "drop-stragglers:quorum=2",
    "spec-sync",
    "bsp@0,asp@6",
    *thorough("asp", "rennala:batch=2", "ringmaster:threshold=2", "asp@0,bsp@6"),
]


def train(make: Callable[[Any], torch.optim.Optimizer] | None = None, epochs: int = 4) -> Callable[[], None]:
    """Return a training function with batches of 16, the last of which in an epoch are smaller."""

    def run() -> None:
        from paceline.train.generator_states import generators_lock  # here, because a lock cannot be sent

        with generators_lock:  # another worker's thread may be making its model
            torch.manual_seed(0)
            x = torch.randn(150, 6)
            model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if make is None
            else make(model.parameters())
        )
        optimizer, loader = paceline.prepare(optimizer, DataLoader(TensorDataset(x), 16))
        for _ in paceline.epochs(epochs):
            for (batch,) in loader:

                def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)

    return run


def simulated(sync: str, hyperparameters: str, **options: Any) -> SimResult:
    return simulate(CLUSTER, sync, train_fn=train(**options), record=True, hyperparameters=hyperparameters)


def weights(result: SimResult) -> dict[str, torch.Tensor]:
    assert result.state_dict is not None
    return result.state_dict


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_the_option_is_checked_described_and_passed_on_by_schedulers() -> None:
    assert describe(make_job(workers=2, dry_run=True))["hyper-parameters"].endswith("(translated)")
    raw = make_job(workers=2, hyperparameters="raw", dry_run=True)
    assert describe(raw)["hyper-parameters"] == "used as they are in each update (raw)"
    settings = {"hyperparameters": "raw"}
    assert as_options(settings) == ["--hyperparameters=raw"]


@pytest.mark.parametrize(
    "call",
    [
        lambda **options: paceline.launch(train(), workers=2, **options),
        lambda **options: simulate(CLUSTER, "asp", train_fn=train(), **options),
    ],
    ids=["launch", "simulate"],
)
def test_an_unknown_value_is_refused_before_anything_starts(call: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown hyperparameters 'row'; .* Choices: raw, translated"
    ):
        call(hyperparameters="row", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bsp_computes_the_same_bits_in_both_ways() -> None:
    raw, translated = (simulated("bsp", each) for each in ("raw", "translated"))
    assert equal(weights(raw), weights(translated))
    assert [entry for trace in raw.trace for entry in trace.entries] == [
        entry for trace in translated.trace for entry in trace.entries
    ]


@pytest.mark.parametrize("sync", RELAXED)
def test_a_translated_run_takes_the_same_decisions_moves_the_weights_differently_and_can_be_replayed(
    sync: str,
) -> None:
    raw, translated = (simulated(sync, each) for each in ("raw", "translated"))
    assert not equal(weights(raw), weights(translated))
    for before, after in zip(raw.trace, translated.trace, strict=True):
        assert [entry.actions for entry in before.entries] == [entry.actions for entry in after.entries]
        assert not any(entry.standings for entry in before.entries)
        assert replay(after) == []
    assert translated.trace[0].header.translated
    assert not raw.trace[0].header.translated
    assert translated.summary["hyperparameters"] == "translated"
    assert raw.summary["hyperparameters"] == "raw"


@pytest.mark.parametrize("scale", ["1/tau", *thorough("1/n", "n/tau")])
def test_a_model_that_scales_pushes_computes_the_same_bits_in_both_ways(scale: str) -> None:
    raw, translated = (simulated(f"asp:push_scale={scale}", each) for each in ("raw", "translated"))
    assert equal(weights(raw), weights(translated))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(
            parameters, lr=0.05, nesterov=True, momentum=0.9, weight_decay=1e-3
        ),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        *thorough(
            lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
            lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
        ),
    ],
    ids=["SGD", "AdamW", "RMSprop", "Rprop"],
)
def test_a_single_worker_computes_the_same_bits_under_every_model(make: Any) -> None:
    """The joint batch is its batch, also if the last one of an epoch is smaller."""
    alone = Cluster(compute_s=[1.0])
    exact = weights(simulate(alone, "bsp", train_fn=train(make, epochs=2)))
    for sync in ("asp", "elastic-bsp", "ssp:staleness=1", "rennala:batch=1"):
        assert equal(weights(simulate(alone, sync, train_fn=train(make, epochs=2))), exact), sync


def test_a_simulation_without_training_has_no_hyper_parameters() -> None:
    result = simulate(CLUSTER, "asp", 10, record=True)
    assert result.hyperparameters is None
    assert "hyperparameters" not in result.summary
    assert result.trace[0].header.hyperparameters is msgspec.UNSET
    assert not any(entry.standings for entry in result.trace[0].entries)


@pytest.mark.parametrize("sync", ["asp", "elastic-bsp:lookahead=3", "drop-stragglers:quorum=2"])
def test_live_runs_record_their_standings_and_can_be_replayed(
    sync: str, run_on_threads: RunOnThreads
) -> None:
    run = run_on_threads(train(), workers=3, servers=2, sync=sync)
    for trace in run.shards:
        assert trace.header.translated
        assert any(entry.standings for entry in trace.entries)
        assert replay(trace) == []


def test_each_shard_translates_for_its_own_model(run_on_threads: RunOnThreads) -> None:
    exact, relaxed = run_on_threads(train(), workers=2, servers=2, sync="bsp|asp").shards
    assert not any(entry.standings for entry in exact.entries)
    assert any(entry.standings for entry in relaxed.entries)


@pytest.mark.parametrize("sync", ["asp", "elastic-bsp:lookahead=3", *thorough("bsp", "ssp:staleness=1")])
def test_an_epoch_moves_the_weights_as_far_as_in_one_process(sync: str) -> None:
    """Without curvature, the sum of the steps depends only on the samples: 24 joint steps of rate 1."""

    def constant() -> None:
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        loader = DataLoader(TensorDataset(torch.ones(24 * 6, 3)), 2)
        optimizer, loader = paceline.prepare(torch.optim.SGD(model.parameters(), lr=1.0), loader)
        for _ in paceline.epochs(2):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()

    moved = weights(simulate(CLUSTER, sync, train_fn=constant)).popitem()[1]
    assert torch.allclose(moved, torch.full((1, 3), -48.0), rtol=0.05)


@pytest.mark.parametrize(
    ("sync", "hyperparameters", "fractions"),
    [
        ("bsp", "translated", False),
        ("asp", "raw", False),
        ("asp", "translated", True),
        ("bsp@0,asp@epoch:2", "translated", True),
        ("auto", "translated", True),  # it begins with bsp, but may choose another model
    ],
)
def test_memory_for_fractions_is_needed_if_a_planned_or_chosen_model_takes_them(
    sync: str, hyperparameters: str, fractions: bool
) -> None:
    job = make_job(workers=2, sync=sync, hyperparameters=hyperparameters, dry_run=True)
    assert job.takes_fractions == fractions
