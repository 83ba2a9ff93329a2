"""Runs with real processes: one worker on the device, others on the CPU, machines that join, and the commands."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.live import mark, run_program
from tests.support.served import Served, await_training, enough, output

from .device import DEVICE, IMPORTS, KIND, SANITIZED, assert_equal

__all__ = ["mark"]


@pytest.fixture(autouse=True)
def without_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizer initializes CUDA in each process that computes anything, on whatever device. Workers on the CPU
    fail then, because CUDA is hidden from them. So only workers on the device use it, as `PROLOGUE` asks."""
    monkeypatch.delenv("TORCH_CUDA_SANITIZER", raising=False)


SANITIZE = """
import paceline
if paceline.device().type == "cuda":
    from torch.cuda._sanitizer import enable_cuda_sanitizer
    enable_cuda_sanitizer()
"""
PROLOGUE = SANITIZE if SANITIZED else ""

FIXED = """
import torch, paceline
device = paceline.device()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6)).to(device)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for iteration in range(20):
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(iteration))
    x = rows[paceline.worker_index() :: paceline.worker_count()].to(device)
    optimizer.zero_grad()
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    paceline.log(loss=loss)
    optimizer.step()
print(f"worker {paceline.worker_index()} on {device}", torch.rand(1, device=device).item())
model.cpu()  # as scripts do before they save
"""

SLOW_ON_THE_DEVICE = """
import torch, paceline, time
from pathlib import Path
torch.manual_seed(0)
device = paceline.device()
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6)).to(device)
x = torch.randn(4096, 6)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=64, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = paceline.prepare(model, optimizer, loader, device=device)
sizes = []
for epoch in paceline.epochs(4):
    for (inputs,) in loader:
        optimizer.zero_grad()
        for _ in range(20 if device.type != "cpu" else 1):
            out = model(inputs)
        (out - inputs.flip(1)).square().mean().backward()
        time.sleep(len(inputs) * (1e-3 if device.type != "cpu" else 2e-4))
        optimizer.step()
        sizes.append(len(inputs))
Path(f"sizes-{paceline.worker_index()}.txt").write_text(" ".join(map(str, sizes)))
"""

ABORTED = """
import time, torch, paceline
from pathlib import Path
device = paceline.device()
slow = device.type != "cpu"
layers = [layer for _ in range(12) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers).to(device)
x = torch.randn(256 if slow else 1, 256).to(device)
def compute():
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    return loss
times = 1
if slow:  # how often this must be repeated to take about 0.4 s on this device
    compute().item()
    begun_s = time.perf_counter()
    for _ in range(10):
        compute().item()
    model.zero_grad()
    times = max(1, round(4 / (time.perf_counter() - begun_s)))
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))
def note(name):
    if slow:
        with open(name, "a") as file:
            file.write(".")
def closure():
    note("begun")
    optimizer.zero_grad()
    for _ in range(times):
        loss = compute()
    note("ended")
    return loss
iteration = 0
while iteration < 6 if slow else not Path("over").exists():
    optimizer.step(closure)
    iteration += 1
Path("over").touch()
"""


def run(script: str, devices: str, *options: str, folder: str = "run") -> dict[str, object]:
    Path("train.py").write_text(PROLOGUE + script)
    ended = run_program(
        "-m", "paceline", "run", *IMPORTS, "--devices", devices, "--run-dir", folder, *options, "train.py"
    )
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)
    summary: dict[str, object] = json.loads(Path(folder, "summary.json").read_text())
    return summary


@pytest.mark.processes
def test_mixed_devices_equal_two_workers_on_the_cpu(mark: str) -> None:
    run(FIXED, "cpu,cpu", folder="plain")
    summary = run(FIXED, f"cpu,{KIND}", folder="mixed")
    devices = summary["devices"]
    assert isinstance(devices, dict)
    assert devices["0"] == "cpu"
    assert devices["1"].startswith(str(DEVICE))
    assert summary["faults"] == []
    expected, found = (load_file(Path(folder, "weights.safetensors")) for folder in ("plain", "mixed"))
    assert_equal(found, expected, "a run on mixed devices")


@pytest.mark.processes
def test_a_slow_device_gets_smaller_batches_than_a_fast_cpu(mark: str) -> None:
    summary = run(SLOW_ON_THE_DEVICE, f"cpu,{KIND}", "--batch", "balanced")
    samples, iterations = summary["worker_samples"], summary["iterations"]
    assert isinstance(samples, dict)
    assert isinstance(iterations, dict)
    sizes = {worker: samples[worker] / iterations[worker] for worker in iterations}
    print(f"mean size of a batch: {sizes}")
    assert sizes["1"] < 0.6 * sizes["0"]
    on_cpu, on_device = ([*map(int, Path(f"sizes-{k}.txt").read_text().split())] for k in (0, 1))
    print(f"sizes on the device: {Counter(on_device)}")
    assert {sum(joint) for joint in zip(on_cpu, on_device, strict=True)} == {128}
    assert all(size % 8 == 0 or size in (1, 2, 4) for size in on_device)
    assert len(set(on_device)) <= 5


@pytest.mark.processes
def test_a_restart_saves_the_rest_of_a_computation_on_the_device(mark: str) -> None:
    """An aborted closure does not come to its end. If the host ran ahead of the device, it would."""
    order = "spec-sync:abort_time_s=0.1,abort_rate=0"
    run(ABORTED, f"{KIND},cpu", "--sync", order, "--hyperparameters", "raw", "--guard", "off")
    records = [json.loads(line) for line in Path("run/worker-0.jsonl").read_text().splitlines()]
    saved = [
        1 - (record["dropped_s"] - record["begun_s"]) / (record["computed_s"] - record["restarted_s"])
        for record in records
        if record.get("dropped_s") is not None
    ]
    begun, ended = (Path(name).read_text().count(".") for name in ("begun", "ended"))
    print(f"share of a computation that restarts saved: {[round(share, 2) for share in saved]}")
    assert saved
    assert ended < begun


@pytest.mark.processes
def test_a_worker_on_the_device_joins_in_mid_run(mark: str) -> None:
    served = Served("--workers", "1:2", "--sync", "asp")
    script = Path("train.py").read_text().replace("loader)\n", "loader, device=paceline.device())\n")
    script = script.replace(
        "model, optimizer, loader =", "model = model.to(paceline.device())\nmodel, optimizer, loader ="
    )
    Path("train.py").write_text(PROLOGUE + script)
    first = served.join("20", "0.05", options=["--devices", "cpu"])
    await_training(1)
    second = served.join("20", "0.05", options=[*IMPORTS, "--devices", KIND])
    await_training(2)
    enough()
    ends = [output(first), output(second)]
    summary = served.summary()
    assert [code for code, *_ in ends] == [0, 0], ends
    assert str(DEVICE) in str(summary["devices"])
    assert summary["samples"] == 20 * 96


@pytest.mark.processes
def test_check_observes_a_script_on_the_device(mark: str) -> None:
    Path("train.py").write_text(SLOW_ON_THE_DEVICE.replace("import torch, paceline, time", IMPORTED))
    ended = run_program("-m", "paceline", "check", "train.py")
    print(ended.stdout, ended.stderr)
    assert ended.returncode in (0, 1)
    assert "Traceback" not in ended.stderr
    assert "failed" not in ended.stdout


IMPORTED = "\n".join([*(f"import {package}" for package in IMPORTS[1::2]), "import torch, paceline, time"])


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(f"{KIND}:77", f"{KIND}:77"), ("cuda:7" if KIND != "cuda" else "cuda:99", "cuda")],
)
def test_devices_that_are_not_there_are_refused(devices: str, expected: str, mark: str) -> None:
    Path("train.py").write_text(FIXED)
    ended = run_program("-m", "paceline", "run", *IMPORTS, "--devices", devices, "train.py")
    words = " ".join(ended.stderr.split())
    print(words)
    assert ended.returncode == 2
    assert words.count("error:") == 1
    assert expected in words


@pytest.mark.skipif(not IMPORTS, reason="torch loads the backend by itself")
def test_a_backend_that_was_not_imported_is_named(mark: str) -> None:
    Path("train.py").write_text(FIXED)
    ended = run_program("-m", "paceline", "run", "--devices", KIND, "train.py")
    words = " ".join(ended.stderr.split())
    print(words)
    assert ended.returncode == 2
    assert "--import" in words
