"""Servers that make the steps of optimizers on the device: what they compute, and a run that resumes without it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.checkpoints.manifest import numbers_in
from paceline.shard.slice_optimizers import HOST, TorchOptimizer
from tests.support.live import await_that, mark, of_the_run, processes, run_program, start_program
from tests.support.store_training import SETTINGS, StoreTraining, tensorwise_model

from .device import DEVICE, IMPORTS, KIND, State

__all__ = ["mark"]

TOLERANCES = {"Adafactor": 1e-5, "Muon": 2e-2}
"""Optimizer -> largest difference of a weight, as a share of the largest one. A device adds products in another order,
so they are rounded differently. Muon computes products of matrices in bfloat16, each from those before."""


def difference(state: State, other: State) -> float:
    assert state.keys() == other.keys()
    largest = max(float(each.abs().max()) for each in other.values())
    return max(float((each - other[name]).abs().max()) for name, each in state.items()) / largest


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_on_the_device_equal_those_on_the_host(name: str) -> None:
    host, device = (StoreTraining(tensorwise_model(name), place) for place in (HOST, DEVICE))
    for iteration in range(6):
        for each in (host, device):
            each.step(iteration)
    off = difference(device.weights, host.weights)
    print(f"{name}: {off:.1e} of the largest weight")
    assert off <= TOLERANCES[name]
    [whole, _] = device.store._sets
    assert isinstance(whole.optimizer, TorchOptimizer)
    assert {each.device for each in whole.optimizer._parameters} == {DEVICE}
    states = [each.store.optimizer_state() for each in (host, device)]
    assert all(value.is_cpu for value in states[1].values())
    assert difference(*({key: value.float() for key, value in state.items()} for state in states)) <= 0.1


@pytest.mark.parametrize("name", SETTINGS)
def test_a_state_goes_on_from_the_device_to_the_host_and_back(name: str) -> None:
    described = tensorwise_model(name)
    first, host, device = (StoreTraining(described, place) for place in (DEVICE, HOST, DEVICE))
    first.step(0)
    first.step(1)
    for after in (host, device):
        after.go_on(first)
        after.step(2)
    assert difference(device.weights, host.weights) <= TOLERANCES[name]


SCRIPT = """
import sys, time
from pathlib import Path
import torch, paceline

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6))
matrices, vectors = ([each for each in model.parameters() if each.dim() == dim] for dim in (2, 1))
first, second = torch.optim.Adafactor(matrices, lr=0.05), torch.optim.AdamW(vectors, lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 6))
loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
model, first, second, loader = paceline.prepare(model, first, second, loader)
for epoch in paceline.epochs(8):
    for (x,) in loader:
        first.zero_grad()
        second.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        first.step()
        second.step()
        if not Path("go").exists():
            time.sleep(0.1)
"""


def test_a_run_on_the_device_resumes_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("go").touch()
    workers = ["run", "-n", "2", "--devices", "cpu", "--servers", "2", *IMPORTS]
    whole = run_program("-m", "paceline", *workers, "--run-dir", "whole", "train.py")
    assert whole.returncode == 0, whole.stderr
    Path("go").unlink()
    options = ["--server-device", KIND, "--checkpoint-every", "0.3", "--run-dir", "run", "train.py"]
    program = start_program("-m", "paceline", *workers, *options, stderr=subprocess.STDOUT)
    await_that(lambda: numbers_in(of_the_run(Path("run", "checkpoints"))), "a checkpoint is whole")
    program.kill()
    while found := processes(mark):
        for process_id in found.values():
            os.kill(process_id, signal.SIGKILL)
        time.sleep(0.05)
    said, _ = program.communicate()
    assert f"the servers make the steps of Adafactor on {DEVICE}" in said
    Path("go").touch()
    again = ["run", "--resume", "run", "--server-device", "cpu", "--servers", "1"]
    resumed = run_program("-m", "paceline", *again)
    assert resumed.returncode == 0, resumed.stderr
    expected = load_file("whole/weights.safetensors")
    assert difference(load_file("run/weights.safetensors"), expected) <= TOLERANCES["Adafactor"]
