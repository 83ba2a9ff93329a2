"""Runs that are shown while they go on, for tests."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from .live import DEADLINE_S

SCRIPT = """
import time
from pathlib import Path
import torch
import paceline

model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 6)
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in paceline.epochs(100_000):
    for inputs, targets in loader:
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss
        optimizer.step(closure)
        time.sleep(0.005)
    if Path("enough").exists():
        break
"""

# The process that shows the run has a low priority, so beside other tests it may take long to end.
PROGRAM = f"""
from paceline.cli import main
from paceline.start import beside

beside.END_TIMEOUT_S = {DEADLINE_S}
main()
"""


class Shown:
    """A run that is shown on a live page, in TensorBoard and as OpenMetrics."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.folder = folder
        self.count = workers
        (folder / "train.py").write_text(SCRIPT)
        (folder / "show.py").write_text(PROGRAM)
        options = [
            "--run-dir=run",
            "--dashboard",
            "--tensorboard=logs",
            "--metrics-port=0",
            f"-n{workers}",
            "--servers=1",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "show.py", "run", *options, "train.py"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        lines = [self.process.stderr.readline() for _ in range(3)]
        page, metrics = (re.search(r"http://\S+", line) for line in lines[:2])
        assert page is not None, lines
        assert metrics is not None, lines
        assert lines[2] == f"TensorBoard: tensorboard --logdir {folder / 'logs'}\n"
        self.address = page[0]
        self.page: SplitResult = urlsplit(page[0])
        self.metrics: SplitResult = urlsplit(metrics[0])
        self.connection = http.client.HTTPConnection(self.page.netloc, timeout=DEADLINE_S)
        self.cookie = ""

    def get(self, path: str) -> tuple[int, str]:
        """Return the answer of the live page to a browser that has shown the token."""
        if not self.cookie:
            self.connection.request("GET", f"/?{self.page.query}")
            answer = self.connection.getresponse()
            answer.read()
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        self.connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        return answer.status, answer.read().decode()

    def data(self) -> dict[str, Any]:
        """Return the report as of now."""
        status, text = self.get("/data")
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def workers(self) -> list[dict[str, Any]]:
        """Return what the workers do now."""
        workers: list[dict[str, Any]] = (self.data()["live"] or {}).get("workers", [])
        return workers if len(workers) == self.count else [{"iteration": None}]

    def listens(self) -> bool:
        """Return True while the process that shows the run exists."""
        try:
            socket.create_connection((self.page.hostname, self.page.port), timeout=5).close()
        except OSError:
            return False
        return True

    def end(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()
