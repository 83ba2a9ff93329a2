"""A job of four workers that loses two and gets two others trains as well as one that nothing happens to."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from tests.support.live import await_that, mark, run_program
from tests.support.served import Served, output

__all__ = ["mark"]

SCRIPT = """
import time
import torch
from sklearn.datasets import load_digits
import paceline

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images[:1400] / 16, dtype=torch.float32), torch.tensor(labels[:1400])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
data = torch.utils.data.TensorDataset(images, labels)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)
paceline.track(scheduler=scheduler)
for epoch in paceline.epochs(12):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    print(f"worker {paceline.worker_index()}: epoch {epoch}, rate {rate:g}", flush=True)
"""


def accuracy(weights: str) -> float:
    """Return the share of the digits that the script does not train with and that the weights classify correctly."""
    images, labels = load_digits(return_X_y=True)
    state = load_file(weights)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model.load_state_dict(state)
    with torch.inference_mode():
        found = model(torch.tensor(images[1400:] / 16, dtype=torch.float32)).argmax(dim=1)
    return float((found == torch.tensor(labels[1400:])).float().mean())


@pytest.mark.chaos
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=2", "elastic-bsp:lookahead=8"])
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM], ids=lambda way: way.name)
def test_two_of_four_workers_are_replaced(sync: str, way: signal.Signals, mark: str) -> None:
    with network(3, NetworkLink()) as machines:
        served = Served("--workers", "4:6", "--servers", "2", "--sync", sync, "--listen", "0.0.0.0")
        Path("train.py").write_text(SCRIPT)
        address = f"{machines.host}:{served.port}"
        stays, goes, comes = (
            partial(served.join, options=["-n", "2"], address=address, prefix=machine.prefix)
            for machine in machines.machines
        )
        first, second = stays(), goes()
        await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
        assert second.stdout is not None
        while "epoch 2" not in (line := second.stdout.readline()):
            assert line, output(second)
        second.send_signal(way)
        output(second)
        third = comes()
        ends = [output(program) for program in (first, third)]
        summary = served.summary()
    alone = run_program(
        *(
            "-m",
            "paceline",
            "run",
            "-n",
            "4",
            "--servers",
            "2",
            "--sync",
            sync,
            "--run-dir",
            "alone",
            "train.py",
        )
    )

    assert [code for code, *_ in ends] == [0, 0], ends
    assert alone.returncode == 0, alone.stderr
    gone = summary["lost_workers"] if way == signal.SIGKILL else summary["left"]
    assert len(gone) == 2  # type: ignore[arg-type]
    assert "rate 0.00625" in ends[0][1]
    # The workers that come continue with the epoch and the learning rate of the job.
    assert "epoch 0" not in ends[1][1]
    assert "epoch 11, rate 0.00625" in ends[1][1]
    disturbed, undisturbed = accuracy("run/weights.safetensors"), accuracy("alone/weights.safetensors")
    print(f"\n{sync}, {way.name}: accuracy {disturbed:.3f}, undisturbed {undisturbed:.3f}")
    assert undisturbed > 0.85
    assert abs(disturbed - undisturbed) < 0.02
    total = 12 * 1400
    lost = total - summary["samples"]  # type: ignore[operator]
    assert 0 <= lost <= (0 if way == signal.SIGTERM else 2 * 8)
