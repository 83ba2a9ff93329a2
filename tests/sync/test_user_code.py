"""Errors in a user's own sync model or optimizer name what failed, where and when, and show the user's lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import ConfigurationError, UserCodeError
from paceline.sim import Cluster, Presence, simulate
from paceline.sync import parse
from paceline.sync.plugins import user_traceback
from paceline.testing import check
from tests.support.live import run_program
from tests.support.marks import thorough

OURS = f'File "{Path(paceline.__file__).parent}/'  # other files may lie in a folder with this name, too

SCRIPT = """
import sys
import torch
import paceline
import failing_models

model = torch.nn.Linear(1236, 1)
kind = failing_models.FailingSGD if "own" in sys.argv else torch.optim.SGD
optimizer = paceline.DistributedOptimizer(kind(model.parameters(), lr=0.01))
x = torch.randn(8, 1236)
for _ in range(8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def shows_only_the_users_lines(text: str, method: str) -> None:
    assert re.search(rf'File "[^"]*failing_models.py", line \d+, in {method}', text)
    assert re.search(r'File "[^"]*failing_models.py", line \d+, in look_up', text)
    assert "KeyError: 'missing'" in text
    assert OURS not in text


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("pushed", "at shard 1, when it received the push of iteration 3 of worker [01]"),
        ("pulled", "at shard 1, when it received the pull of iteration 3 of worker [01]"),
        ("joined", "at shard 0, when worker 0 joined"),
        ("check", "at shard 0, when worker 0 joined"),
        ("left", "at shard 0, when worker [01] was lost"),
        ("at_shard", "at shard 0, when its method at_shard was called"),
        ("planner", "at the coordinator, when worker [01] finished iteration 3"),
    ],
)
@pytest.mark.usefixtures("failing")
def test_a_model_that_fails_is_named_with_the_shard_and_the_event(how: str, when: str) -> None:
    cluster = Cluster(compute_s=[1.0, 1.0], servers=2, presence={1: Presence(lost_at_s=7.5)})
    with pytest.raises(
        UserCodeError, match=rf"the sync model failing:how={how} raised KeyError: .*{when}"
    ) as e:
        simulate(cluster, f"failing:how={how}", 10)
    method = {"planner": "finished"}.get(how, how)
    shows_only_the_users_lines(str(e.value), method)


@pytest.mark.parametrize("how", ["none", "text", "stranger"])
@pytest.mark.usefixtures("failing")
def test_a_model_that_returns_nonsense_is_named_and_not_called_a_bug_of_ours(how: str) -> None:
    words = (
        rf"the sync model failing:how={how} returned something that cannot be carried out at shard 0, when it received "
        r"the push of iteration 3 of worker 0: .*Test the model with paceline\.testing\.check"
    )
    with pytest.raises(UserCodeError, match=words) as raised:
        simulate(Cluster(compute_s=[1.0]), f"failing:how={how}", 10)
    assert "please report it" not in str(raised.value)


@pytest.mark.usefixtures("failing")
def test_values_that_a_model_refuses_are_bad_input() -> None:
    words = "sync model 'failing:how=refused' cannot be created: ValueError: how is refused"
    with pytest.raises(ConfigurationError, match=words):
        simulate(Cluster(compute_s=[1.0]), "failing:how=refused", 1)


@pytest.mark.parametrize("how", ["pushed", "left"])
@pytest.mark.usefixtures("failing")
def test_a_check_shows_the_lines_of_the_model_that_fails(how: str) -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)failing.* breaks a promise: .*after these events"
    ) as raised:
        check(parse(f"failing:how={how}"))
    shows_only_the_users_lines(str(raised.value), how)


def test_the_lines_of_a_package_whose_name_begins_with_ours_are_the_users() -> None:
    file = f"{Path(paceline.__file__).parent}_models/rules.py"
    rules: dict[str, Any] = {}
    exec(compile("def close(state):\n    return state['missing']\n", file, "exec"), rules)
    with pytest.raises(KeyError) as raised:
        rules["close"]({})
    assert file in user_traceback(raised.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "pushed",
            "server 0 failed: the sync model failing:how=pushed raised KeyError: 'missing' at shard 0, when",
        ),
        *thorough(
            (
                "planner",
                "the coordinator failed: the sync model failing:how=planner raised KeyError: 'missing' at the",
            ),
            (
                "optimizer",
                "server 0 failed: the optimizer failing_models:FailingSGD raised KeyError: 'missing' in a step",
            ),
        ),
    ],
)
@pytest.mark.usefixtures("mark")
def test_the_terminal_shows_why_a_run_failed(failing: Path, how: str, words: str) -> None:
    (failing / "train.py").write_text(SCRIPT)
    own = how == "optimizer"
    sync = "bsp" if own else f"failing:how={how}"
    options = ["--servers", "1", "--sync", sync, "--import", "failing_models", "train.py", *["own"] * own]
    ended = run_program("-m", "paceline", "run", *options)
    assert ended.returncode == 1
    assert f"error: {words}" in ended.stderr
    method = {"planner": "finished", "optimizer": "step"}.get(how, how)
    shows_only_the_users_lines(ended.stderr, method)
    assert "the weights at the time of the failure were saved to" in ended.stderr
