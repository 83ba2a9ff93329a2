"""The buffers and frozen parameters of a model, on the CPU and on the accelerator of this machine, if it has one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import paceline
from paceline.core.layout import BufferSpec
from paceline.errors import UsageError
from paceline.shard.store import BufferSlots
from paceline.shard.vectors import digest_of
from paceline.sim import Cluster, simulate
from paceline.sim.times import Presence
from paceline.train.job_model import Buffers, JointModel

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICES = [
    torch.device("cpu"),
    pytest.param(ACCELERATOR, marks=pytest.mark.skipif(ACCELERATOR is None, reason="no accelerator")),
]


def model_on(device: torch.device) -> nn.Sequential:
    """Six buffers of two dtypes, and two frozen parameters."""
    torch.manual_seed(0)
    frozen = nn.Linear(16, 16).requires_grad_(False)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), frozen, nn.BatchNorm1d(16), nn.Linear(16, 1)]
    return nn.Sequential(*layers).to(device)


def buffers_of(model: nn.Module) -> Buffers:
    return Buffers(JointModel([model]), [p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_has_changed_is_returned_in_host_memory(device: torch.device) -> None:
    model = model_on(device)
    buffers = buffers_of(model)
    assert len(buffers.changed()) == 6
    assert buffers.changed() == {}
    assert not buffers.have_changed
    model(torch.randn(4, 8).to(device))
    changed = buffers.changed()
    state = model.state_dict()
    assert sorted(changed) == list(range(6))
    for index, value in changed.items():
        assert value.device.type == "cpu"
        assert torch.equal(value, state[buffers.specs[index].name].cpu())
    assert buffers.changed() == {}
    assert buffers.have_changed
    state["3.running_var"].fill_(torch.nan)
    assert [buffers.specs[index].name for index in buffers.changed()] == ["3.running_var"]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_there_is_one_copy_for_each_dtype_of_a_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_on(device)
    buffers = buffers_of(model)
    copied: list[torch.dtype] = []
    to_host = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.dtype)
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    for _ in range(3):
        copied.clear()
        buffers.changed()
        assert copied == ([] if device.type == "cpu" else [torch.float32, torch.int64])


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_values_are_taken_over_to_the_device(device: torch.device) -> None:
    model = model_on(device)
    buffers = buffers_of(model)
    before = {spec.name: spec.digest for spec in buffers.frozen}
    own = dict(zip((spec.name for spec in buffers.specs), buffers.values(buffers.specs), strict=True))
    assert not buffers.take_over({name: value.clone() for name, value in own.items()})
    values = {name: torch.full_like(value, 3) for name, value in own.items()}
    values["2.bias"] = torch.full((16,), 3.0)
    assert buffers.take_over(values)
    assert buffers.changed() == {}, "what was taken over counts as sent"
    for name, value in values.items():
        assert torch.equal(model.state_dict()[name].cpu(), value)
        assert model.state_dict()[name].device.type == device.type
    after = {spec.name: spec.digest for spec in buffers.frozen}
    assert after == before | {"2.bias": digest_of(values["2.bias"])}
    parts = buffers.chunks_of(after["2.bias"])
    assert parts is not None
    assert b"".join(parts) == values["2.bias"].numpy().tobytes()
    assert buffers.chunks_of(before["2.bias"]) is None


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_digest_is_the_same_on_every_device(device: torch.device) -> None:
    there, here = buffers_of(model_on(device)), buffers_of(model_on(torch.device("cpu")))
    assert there.frozen == here.frozen


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t[:3]], ids=["dtype", "shape"])
def test_a_buffer_that_becomes_another_is_refused(change: object) -> None:
    model = model_on(torch.device("cpu"))
    buffers = buffers_of(model)
    assert callable(change)
    norm = model[1]
    norm.running_mean = change(norm.running_mean)
    with pytest.raises(
        UsageError, match=r"'1.running_mean' was float32\[16\] .* now (float64\[16\]|float32\[3\])"
    ):
        buffers.changed()


# -- the buffers of workers that have left before they finished ----------------------------------------------


def test_a_worker_that_has_left_early_has_no_part_in_the_pool_until_it_is_replaced() -> None:
    slots = BufferSlots([BufferSpec("place", (), "float32")], [torch.tensor(0.0)])
    slots.leave_out(0)
    assert slots.pooled()["place"] == 0
    for worker in range(3):
        slots.put(worker, {0: torch.tensor(float(worker))})
    slots.leave_out(2)
    assert slots.pooled()["place"] == 0.5
    slots.leave_out(1)
    slots.leave_out(0)
    assert slots.pooled()["place"] == 1  # nobody else has sent any
    slots.put(1, {0: torch.tensor(5.0)})
    assert slots.pooled()["place"] == 5


class Marked(nn.Module):
    """A model with a buffer that tells which workers have changed it."""

    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("place", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.place.fill_(1.0 + paceline.worker_index())
        out: torch.Tensor = self.linear(x)
        return out


def train_marked() -> None:
    torch.manual_seed(0)
    model = Marked()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    for iteration in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 4) + paceline.worker_index()).square().mean().backward()
        if iteration == 3 and paceline.worker_index() == 2 and "PACELINE_LOSES" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_lost_worker_has_no_part_in_the_buffers_of_a_simulated_run(sync: str) -> None:
    cluster = Cluster(compute_s=[1.0] * 3, presence={2: Presence(lost_at_s=3.5)})
    weights = simulate(cluster, sync, train_fn=train_marked).state_dict
    assert weights is not None
    assert weights["place"] == 1.5


@pytest.mark.processes
def test_a_lost_worker_has_no_part_in_the_buffers_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOSES", "1")
    result = paceline.launch(train_marked, workers=3, servers=2, run_dir=tmp_path / "run", progress=False)
    assert result.summary["lost_workers"] == [2]
    assert safetensors.torch.load_file(tmp_path / "run" / "weights.safetensors")["place"] == 1.5
