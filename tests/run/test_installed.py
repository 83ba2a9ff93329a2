"""What must be equal on all machines of a run, and in which words a machine is refused."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import paceline
from paceline.core.messages import ROWS, Installed, MachineAdmitted, MachineJoined, Refused
from paceline.run import installed as place
from paceline.run.coordinator import CoordinatorHost
from paceline.run.installed import installed, what_differs
from paceline.run.job_options import make_job
from paceline.shard.optimizer_sources import OptimizerSources
from tests.support.hosts import agent_of

DEADLINE_S = 60.0

OWN = Installed("3.11", "2.13.0", {"messages": "a", "codecs": "b"}, ("Muon", "SGD"))
OLD = msgspec.structs.replace(OWN, torch="2.7.1", optimizers=("SGD",))


def said(found: Installed, **options: Any) -> str:
    return what_differs(found, OWN, **options)


def test_machines_with_other_versions_of_torch_may_join() -> None:
    assert said(OLD) == said(OLD, optimizers=["SGD"]) == ""
    assert said(msgspec.structs.replace(OWN, python="3.13")) == ""


@pytest.mark.parametrize(
    ("reason", "found", "options"),
    [
        (
            "has the same version .* but different formats of codecs and messages. Install the same wheel",
            msgspec.structs.replace(OWN, formats={"messages": "c"}),
            {},
        ),
        (
            r"this machine has Python 3\.12, but the function was pickled by Python 3\.11, .* Use Python 3\.11",
            msgspec.structs.replace(OWN, python="3.12"),
            {"pickled": "the function"},
        ),
        (
            r"this machine has torch 2\.7\.1, which has no torch\.optim\.Muon, .*: install a version of torch that "
            r"has it, such as 2\.13\.0",
            OLD,
            {"optimizers": ["SGD", "Muon", "__main__:Own"]},
        ),
    ],
)
def test_each_difference_is_a_sentence_with_what_to_do(
    reason: str, found: Installed, options: dict[str, Any]
) -> None:
    assert re.search(reason, said(found, **options))


def test_a_machine_that_cannot_say_what_torch_has_is_not_refused() -> None:
    assert said(msgspec.structs.replace(OLD, optimizers=()), optimizers=["Muon"]) == ""


def test_what_is_installed_is_said_without_importing_torch() -> None:
    program = (
        "import sys; from paceline.run.installed import installed; installed(); print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
    found = installed()
    assert found.torch == torch.__version__.partition("+")[0]
    assert {"SGD", "Adam"} <= {*found.optimizers}
    assert all(hasattr(torch.optim, name) for name in found.optimizers)


def test_the_format_of_messages_is_another_if_a_field_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of structs inside messages count, too."""
    fields = [*place._fields(row.message for row in ROWS)]
    assert "MachineJoined version workers wanted servers installed unpickles" in fields
    assert "Installed python torch formats optimizers" in fields
    assert any(line.startswith("OptimizerSpec ") for line in fields)
    before = installed().formats["messages"]
    monkeypatch.setattr(place, "ROWS", ROWS[:-1])
    assert installed.__wrapped__().formats["messages"] != before


def test_a_coordinator_refuses_machines_that_differ_and_admits_the_others(tmp_path: Path) -> None:
    job = make_job(workers=1, servers=1, joined=True, transport="tcp", run_dir=tmp_path / "run")
    sources = OptimizerSources(sent={"__main__:Own": b""})
    job = msgspec.structs.replace(job, version=paceline.__version__, optimizers=sources)
    coordinator = CoordinatorHost.listen(job)
    coordinator.start()
    own = installed()
    answers = []
    try:
        for offer in (
            MachineJoined("0.1.0", 1),
            MachineJoined(paceline.__version__, 1, installed=msgspec.structs.replace(own, formats={})),
            MachineJoined(paceline.__version__, 1, installed=msgspec.structs.replace(own, python="3.0")),
            MachineJoined(paceline.__version__, 1, installed=msgspec.structs.replace(own, torch="2.7.1")),
        ):
            with contextlib.closing(agent_of(coordinator)) as stream:
                stream.send(offer)
                answers.append(stream.wait(DEADLINE_S))
    finally:
        coordinator.stop()
    *refused, admitted = answers
    reasons = [answer.reason for answer in refused if isinstance(answer, Refused)]
    assert len(reasons) == 3, answers
    assert isinstance(admitted, MachineAdmitted)
    assert "this machine has Paceline 0.1.0, but the run uses" in reasons[0]
    assert "the optimizer __main__:Own was pickled" in reasons[2]
