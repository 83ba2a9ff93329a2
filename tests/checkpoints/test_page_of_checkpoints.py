"""The page about checkpoints is true of a checkpoint that is written here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoints.manifest import files_in
from tests.support.sharded import Shards, model_of

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoints.md").read_text()
EXAMPLE, EXPORT, COPY = re.findall(r"```python\n(.+?)```\n", PAGE, re.DOTALL)
PRINTED, *_ = re.findall(r"This prints, for example:\n\n```\n(.+?)```\n", PAGE, re.DOTALL)

OF_PAGE = re.findall(r"paceline-[0-9a-f]{16}", PAGE)[0]

WITHOUT_PACELINE = "import sys\nsys.modules['paceline'] = None  # an import would fail\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A directory with checkpoint 12 of the model on the page, after three steps in two shards."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shards = Shards(model_of(model, [optimizer]), 2, model)
    optimizer.param_groups[0]["lr"] = 0.005
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        shards.step(model, [optimizer])
    further = {"run.json": b"{}", "script.py": b""}
    shards.write(tmp_path / "checkpoints", 12, net=model, further=further, lineage=OF_PAGE)
    return tmp_path


def printed_by(program: str, folder: Path) -> str:
    """Return what a program prints in a folder."""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.thorough
def test_the_example_runs_without_paceline(run_dir: Path) -> None:
    assert printed_by(WITHOUT_PACELINE + EXAMPLE, run_dir) == PRINTED


@pytest.mark.thorough
def test_the_other_examples_run(run_dir: Path) -> None:
    assert printed_by(EXPORT + COPY, run_dir) == f"copied/{OF_PAGE}/000012\n"
    assert (run_dir / "exported" / ".metadata").exists()


def test_the_page_names_all_files(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / OF_PAGE / "000012"
    described = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))
    written = {str(file.relative_to(path)) for file in files_in(path)} - {"workers/12.bin"}
    assert described == written
