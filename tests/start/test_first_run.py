"""The script in the README, and the notebook beside it, as new users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.live import DEADLINE_S, mark

__all__ = ["mark"]

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
CLIENT = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""))
"""


def quick(text: str) -> str:
    """Return the text with a hundredth of the paces."""
    found, changes = re.subn(r"\.06(, ?)0?\.06(, ?)0?\.18", r".0006\1.0006\2.0018", text)
    assert changes == 1
    return found


def run(folder: Path, *command: str) -> str:
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def accuracies(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", printed)]


def test_the_script_of_the_readme_runs_by_its_commands(mark: str, tmp_path: Path) -> None:
    [script, *_] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    commands = re.findall(r"^    paceline (run .*--pace .* train\.py)$", README, re.MULTILINE)
    assert len(commands) == 2
    [alone] = accuracies(run(tmp_path, sys.executable, "train.py"))
    for command in commands:
        [accuracy] = accuracies(run(tmp_path, sys.executable, "-m", "paceline", *quick(command).split()))
        assert alone > 90
        assert abs(accuracy - alone) < 5


def test_the_notebook_runs_in_a_kernel(mark: str, tmp_path: Path) -> None:
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("nbclient or ipykernel is not installed; `make porting` runs this test")
    (tmp_path / "first_run.ipynb").write_text(quick(NOTEBOOK.read_text()))
    # In a process of its own, because the client of the kernel changes the event loop and signals.
    found = accuracies(run(tmp_path, sys.executable, "-c", CLIENT, "first_run.ipynb"))
    assert len(found) == 3
    assert min(found) > 90
