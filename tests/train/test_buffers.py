"""The buffers and frozen parameters of a model, on the CPU and on the accelerator of this machine, if it has one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.shard.vectors import digest_of
from paceline.train.job_model import Buffers, JointModel

ACCELERATOR = torch.accelerator.current_accelerator()
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
