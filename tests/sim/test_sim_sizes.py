"""Only what travels in a live run is counted as bytes, and takes time in a network of limited bandwidth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, worker_index
from paceline.sim import Cluster, Dataset, Recorded, SimResult, simulate
from paceline.sim.simulated_job import HEADER_BYTES

SIZE, ITERATIONS = 1000, 3
SECOND_BYTES = 4 * SIZE  # the bandwidth is one layer per second


def train(optimizers: int) -> None:
    """Step one optimizer of two layers, or an optimizer for each of the two layers in turn."""
    torch.manual_seed(worker_index())
    model = nn.ModuleList([nn.Linear(SIZE, 1, bias=False), nn.Linear(SIZE, 1, bias=False)])
    steps = [model] if optimizers == 1 else list(model)
    each = [DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), model=part) for part in steps]
    for _ in range(ITERATIONS):
        for optimizer in each:
            optimizer.zero_grad()
            sum(layer(torch.rand(SIZE)) for layer in model).backward()
            optimizer.step()


def run(optimizers: int, wire: str) -> SimResult:
    cluster = Cluster(compute_s=[1.0, 1.0], bandwidth_bps=8 * SECOND_BYTES)
    return simulate(cluster, "bsp", train_fn=train, args=(optimizers,), wire=wire)


@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_a_step_of_one_of_two_optimizers_sends_only_the_parameters_of_this_optimizer(wire: str) -> None:
    whole, parts = run(1, wire).bytes_by_kind, run(2, wire).bytes_by_kind
    headers = 2 * ITERATIONS * HEADER_BYTES  # there are twice as many messages
    assert parts["push"] - whole["push"] == headers
    assert parts["pull"] - whole["pull"] == headers


def test_the_transfers_of_one_of_two_optimizers_take_half_of_the_time() -> None:
    computing_s = 2.0 * ITERATIONS
    # Two pushes and two answers of one layer share the interface of the server.
    assert run(2, "float32").time_s == pytest.approx(computing_s + 2 * ITERATIONS * 4.0, rel=0.05)


JOINT = Dataset(samples=5, batch_size=4, joint_batch=True)  # the second batch has one sample for two workers
LATENCY_S = 2.5


def sitting_out(**options: object) -> SimResult:
    cluster = Cluster(
        compute_s=[1.0, 1.0], latency_s=LATENCY_S, bandwidth_bps=8 * SECOND_BYTES, size_bytes=SECOND_BYTES
    )
    return simulate(cluster, "bsp", None, data=JOINT, **options)  # type: ignore[arg-type]


def test_a_push_without_a_gradient_has_no_bytes() -> None:
    result = sitting_out()
    assert result.measures.iterations == {0: 2, 1: 2}
    assert result.bytes_by_kind["push"] == 4 * HEADER_BYTES + 3 * SECOND_BYTES


def test_no_transfer_is_subtracted_from_a_recorded_push_without_a_gradient(tmp_path: Path) -> None:
    sitting_out(run_dir=tmp_path / "run")
    cluster = Cluster.from_run(tmp_path / "run", 8.0 * SECOND_BYTES)
    for link in cluster.links.values():
        assert isinstance(link.to_server_s, Recorded)
        assert [*map(float, link.to_server_s.seconds)] == pytest.approx([LATENCY_S] * 2)
