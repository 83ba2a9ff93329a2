"""Errors of scripts: what is shown are the user's own lines."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

import paceline
from paceline.start.processes import child
from paceline.sync.plugins import script_traceback

PACKAGE = str(Path(paceline.__file__).parent)

OWN = """
def work():
    raise ValueError("no labels")  # here
work()
"""

MISUSE = """
import paceline
paceline.set_sync("nonsense")  # here
"""

MISSPELT = """
import paceline
paceline.distrubute([])  # here
"""

THROUGH_OURS = """
import torch, paceline
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        raise KeyError("x")  # here
for _ in paceline.distribute(torch.utils.data.DataLoader(Data(), batch_size=4)):
    pass
"""

CHAINED = """
import paceline.errors
try:
    paceline.set_sync("nonsense")
except paceline.errors.PacelineError as error:
    raise RuntimeError("it could not be changed") from error  # here
"""

BROKEN = "def (:  # here"

# What is not an error for users shows where it has occurred.
BUG = """
import paceline.errors
paceline.errors.unknown_name("name", "x", None)
"""


def raised(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a script as a worker does, and return the traceback that is shown."""
    path = tmp_path / "train.py"
    path.write_text(script)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        child._train("script", [str(path)], io.BytesIO())
    assert caught.tb.tb_next is not None
    return script_traceback(caught.value.with_traceback(caught.tb.tb_next))


@pytest.mark.parametrize("script", [OWN, MISUSE, MISSPELT, THROUGH_OURS, CHAINED, BROKEN])
def test_an_error_of_a_script_shows_only_its_own_lines(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = raised(script, tmp_path, monkeypatch)
    files = re.findall(r'File "([^"]+)"', shown)
    assert files[0] == str(tmp_path / "train.py")
    assert not [file for file in files if file.startswith(PACKAGE) or "runpy" in file]
    assert "# here" in shown
    assert "Traceback (most recent call last):\n  File" in shown or script == BROKEN


def test_an_error_of_paceline_shows_where_it_has_occurred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = re.findall(r'File "([^"]+)"', raised(BUG, tmp_path, monkeypatch))
    assert files[0] == str(tmp_path / "train.py")
    assert files[-1] == f"{PACKAGE}/errors.py"
