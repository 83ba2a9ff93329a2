"""What the steps of the optimizers cost the servers: it is measured, and predicted for other numbers of servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import paceline
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter, ShardSlice
from paceline.core.messages import StepsTimed, StepTime
from paceline.look.step_cost import StepCost, step_cost_in

BLOCK = ((768, 768), (768, 768), (3072, 768), (768, 3072))
"""Shapes of the matrices of one layer of a transformer."""


def model(shapes: Sequence[tuple[int, ...]], scales: int = 0) -> ModelSpec:
    """Return a model whose matrices Muon trains, and AdamW some vectors."""
    matrices = [Parameter((f"layer{i}.weight",), shape, "float32") for i, shape in enumerate(shapes)]
    vectors = [Parameter((f"scale{i}",), (768,), "float32", set_index=1) for i in range(scales)]
    muon = OptimizerSpec("Muon", ({"lr": 0.02},), (0,) * len(matrices), whole=True)
    adam = OptimizerSpec("AdamW", ({"lr": 1e-3},), (0,) * len(vectors))
    return ModelSpec(Layout.of([*matrices, *vectors]), muon, (), (adam,) if scales else ())


def cost_of(
    described: ModelSpec,
    step_s: Callable[[ShardSlice], Sequence[float]],
    *,
    servers: int = 1,
    share: float = 0.6,
    cores_of: Callable[[int], float] | None = lambda servers: 1.0,
    on_host: bool = False,
) -> StepCost:
    """Return what a step costs if each shard takes `step_s` for a step of each set."""
    slices = described.sliced(servers, "auto")
    reports = {
        bounds.index: StepsTimed(
            tuple(StepTime(bounds.index, i, each_s) for i, each_s in enumerate(step_s(bounds))), share
        )
        for bounds in slices
    }
    cost = StepCost.of(
        described,
        slices,
        reports,
        slicing="auto",
        block=1,
        servers=servers,
        cores_of=cores_of,
        on_host=on_host,
    )
    assert cost is not None
    return cost


def elements(bounds: ShardSlice, set_index: int = 0) -> int:
    return sum(s.stop - s.start for s in bounds.of_set(set_index).segments)


def test_equal_layers_divide_evenly_so_more_servers_are_recommended_until_steps_hardly_matter() -> None:
    cost = cost_of(model(BLOCK * 12), lambda bounds: [1.2])
    assert cost.predicted_s[4] == pytest.approx(0.3, rel=0.05)
    assert cost.predicted_s[2] == pytest.approx(0.6, rel=0.05)
    # A step takes 40 % of the time now, and the rest of the iteration 1.8 s. With 3 servers, a step takes 18 %.
    assert cost_of(model(BLOCK * 12), lambda bounds: [1.2], share=0.4).sentence() == (
        "The server needs 1.2 s for each step of Muon, which is 40 % of the time. With --servers 3, a step would take "
        "about 400 ms."
    )


def test_one_huge_tensor_is_named_because_more_servers_cannot_divide_it() -> None:
    cost = cost_of(model([(4096, 4096), *BLOCK]), lambda bounds: [2.0])
    assert cost.largest == "layer0.weight"
    assert cost.largest_s == pytest.approx(2.0 * 4096**3 / (4096**3 + 10 * 768**3))
    assert cost.sentence() == (
        "The server needs 2.0 s for each step of Muon, which is 60 % of the time. More servers do not make a step "
        "faster, because layer0.weight is one tensor, whose update takes 1.9 s."
    )
    assert cost.with_servers(4) == (
        "With 4 servers, each with as many cores as now, a step would take about 1.9 s instead of 2.0 s, because "
        "layer0.weight is one tensor, whose update takes 1.9 s. The simulations do not take this into account."
    )


def test_each_parameter_set_has_its_own_time_per_unit_of_work() -> None:
    described = model(BLOCK, scales=8)
    cost = cost_of(described, lambda bounds: [0.05, 0.45])
    assert cost.optimizers == ["Muon", "AdamW"]
    assert cost.step_s == pytest.approx(0.5)
    # AdamW's part, which can be cut anywhere, is halved. Of Muon's four matrices, the last has 40 % of the work.
    assert cost.predicted_s[2] == pytest.approx(0.225 + 0.05 * 0.6, rel=0.01)
    assert cost_of(described, lambda bounds: [0.5, 0.01]).optimizers == ["Muon"]


def test_the_slowest_server_counts_and_predictions_begin_with_its_measured_time() -> None:
    described = model(BLOCK * 4)
    works = [elements(bounds) for bounds in described.sliced(2, "auto")]
    cost = cost_of(described, lambda bounds: [works[bounds.index] * 1e-7], servers=2)
    assert cost.step_s == pytest.approx(max(works) * 1e-7)
    assert cost.predicted_s[2] == cost.step_s
    assert cost.predicted_s[4] == pytest.approx(cost.step_s / 2, rel=0.1)


def test_without_free_cores_other_machines_are_recommended() -> None:
    crowded = cost_of(
        model(BLOCK * 12), lambda bounds: [1.2], share=0.4, cores_of=lambda servers: 1 / servers
    )
    assert crowded.remedy().startswith("With 3 servers with cores of their own, a step would take about")
    elsewhere = cost_of(model(BLOCK * 12), lambda bounds: [1.2], share=0.4, cores_of=None)
    assert elsewhere.remedy().startswith("With 3 servers on as many machines, a step would take about")


def test_an_accelerator_is_named_where_it_could_make_the_steps() -> None:
    hint = " An accelerator on the servers' machine can make the steps, too (--server-device)."
    elsewhere, here = (
        cost_of(model(BLOCK), lambda bounds: [1.2], on_host=on_host) for on_host in (False, True)
    )
    assert here.sentence() == elsewhere.sentence() + hint
    sliced = structs.replace(model(BLOCK), optimizer=OptimizerSpec("AdamW", ({},), (0,) * len(BLOCK)))
    assert not cost_of(sliced, lambda bounds: [1.2], on_host=True).on_host


@pytest.mark.parametrize(("step_s", "share"), [(1.0, 0.1), (0.001, 0.9)])
def test_nothing_is_said_of_steps_that_hardly_matter(step_s: float, share: float) -> None:
    cost = cost_of(model(BLOCK), lambda bounds: [step_s], share=share)
    assert cost.sentence() == cost.with_servers(2) == ""


def test_nothing_is_known_before_every_server_has_reported() -> None:
    described = model(BLOCK)
    slices = described.sliced(2, "auto")
    reports = {0: StepsTimed((StepTime(0, 0, 0.5),), 0.5)}
    known = {"slicing": "auto", "block": 1, "servers": 2, "cores_of": None}
    assert StepCost.of(described, slices, reports, **known) is None  # type: ignore[arg-type]


def test_a_summary_of_another_version_says_nothing() -> None:
    assert step_cost_in({}) is step_cost_in({"step_cost": {"step_s": "long"}}) is None


class Slow(torch.optim.SGD):
    """An optimizer whose steps take at least 20 ms."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)
        return super().step(closure)


def train_slowly() -> None:
    weights = torch.nn.ParameterList(torch.ones(4, 4) for _ in range(4))
    optimizer = paceline.DistributedOptimizer(Slow(weights.parameters(), lr=0.1))
    for _ in range(8):
        torch.stack([*weights]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.thorough
def test_a_run_measures_its_steps(tmp_path: Path) -> None:
    summary = paceline.launch(train_slowly, workers=1, sync="asp", run_dir=tmp_path).summary
    cost = step_cost_in(summary)
    assert cost is not None
    assert cost.step_s >= 0.02
    assert 0.0 < cost.share <= 1.0
    assert cost.optimizers == ["Slow"]
    assert cost.predicted_s[2] == pytest.approx(cost.step_s / 2)  # its slices are equal
    assert {*cost.predicted_s} == {*cost.here_s}
