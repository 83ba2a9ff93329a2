"""What is said about the time that the workers of a run lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.core.lease import DataOrder
from paceline.look.causes import evidence_of, sentences_of
from paceline.look.run_reading import read_report
from paceline.sim import Cluster, Outside, Presence, Recorded, SimResult, simulate
from paceline.trace.findings import Handout, find
from paceline.trace.measures import Meter

HOW = "paceline simulate CLUSTER --script SCRIPT --sync bsp,asp,elastic-bsp (see docs/how-to/simulate.md)"
RESERVED = (
    "But gradients are computed on outdated weights, which changes how training proceeds. "
    "Check the accuracy first: {}"
)
ON_DEMAND = (
    "Under --sync asp or --sync elastic-bsp, workers do not meet at a barrier in every iteration, and data is handed "
    "out on demand"
)
OTHER_MODEL = f"{ON_DEMAND}. {RESERVED.format(HOW)}"
BACKUP = (
    "If all workers draw from the same data, try --sync drop-stragglers:quorum=2: no gradient is stale, but late "
    "gradients are dropped, so an update averages fewer gradients."
)
BALANCED = "Try --batch balanced, which makes the size of each worker's batch proportional to its speed."
BALANCED_LOCKSTEP = (
    f"{BALANCED} The joint batch of all workers stays the same, and so does the result of training."
)
DISTRIBUTE = (
    "The script decides how many iterations each worker makes. If this is a fixed number, the run lasts as long as "
    "its slowest worker under every sync model. If the script distributes its data with paceline.distribute(loader), "
    "faster workers can use more of the data."
)
AUTO = Handout("auto", divisible=True)
STATIC = Handout("static", divisible=True)
NOTHING = Meter(1).measures()


def said(result: SimResult, *, run_dir: str = "", **others: Any) -> list[str]:
    """What the terminal says about the lost time of a run whose data was handed out dynamically."""
    evidence = evidence_of({**result.summary, "ended": "finished"}, run_dir)
    assert evidence is not None
    return sentences_of(msgspec.structs.replace(evidence, **{"handout": AUTO, **others}))


def test_nothing_is_said_about_a_run_in_which_nothing_was_lost() -> None:
    assert find(NOTHING) == []
    assert said(simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", iterations=20), run_dir="runs/1") == []


def test_equal_shares_on_unequal_machines_leave_fast_workers_idle_without_barriers() -> None:
    result = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "asp", iterations=10)
    idle, hint = said(result, handout=STATIC, run_dir="runs/1")
    assert idle == (
        "Workers 0 and 1 were idle for the last 20 s (67 % of the run), because worker 2 was still working. All of "
        "them had equal shares of the data, but the batches of worker 2 take 3 times as long."
    )
    assert hint == (
        "Omit --split static and split='static' in distribute(loader), so that data is handed out on demand, or try "
        "--batch balanced, which makes the shares proportional to the workers' speeds."
    )


def test_balanced_batches_are_not_called_equal_shares() -> None:
    result = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "asp", iterations=10)
    [idle] = said(result, handout=Handout("static", balanced=True, divisible=True))
    assert "equal shares" not in idle


def test_waiting_at_barriers_is_said_with_what_helps() -> None:
    script = ("script", "train.py", "--epochs", "3")
    waiting, balance, backup, other, command = said(WAITED, run_dir="runs/1", program=script)
    assert waiting == (
        "Workers 0 and 1 waited 67 % of their time (40 s together) for worker 2, whose batches take 3 times as long."
    )
    how = "paceline simulate runs/1 --script 'train.py --epochs 3' --sync bsp,asp,elastic-bsp"
    assert (balance, backup) == (BALANCED_LOCKSTEP, BACKUP)
    assert other == f"{ON_DEMAND}. {RESERVED.format(how)}"
    assert command == "To compare the sync models on these machines, run: paceline advise runs/1"
    assert said(WAITED) == [waiting, balance, backup, OTHER_MODEL]
    balanced = Handout("auto", balanced=True, divisible=True)
    assert said(WAITED, handout=balanced) == [waiting, backup, OTHER_MODEL]


def test_waiting_for_a_slow_worker_under_another_model_is_said_with_balanced_batches() -> None:
    result = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "ssp:staleness=1", until_s=30.0)
    waiting, balance, command = said(result, run_dir="runs/1")
    assert waiting.startswith("Workers 0 and 1 waited ")
    assert balance == BALANCED
    assert command.endswith("paceline advise runs/1")


def test_a_lost_worker_is_neither_idle_nor_working() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 3.0], presence={0: Presence(lost_at_s=2.5)})
    result = simulate(cluster, "asp", iterations=10)
    gone = {"lost_workers": [0], "departures": [{"worker": 0, "fate": "lost"}]}
    evidence = evidence_of({**result.summary, **gone}, "")
    assert evidence is not None
    first, *_ = sentences_of(evidence)
    assert first.startswith(
        "Worker 1 was idle for the last 20 s (67 % of the run), because worker 2 was still working."
    )


@pytest.mark.parametrize("who", [[0], [0, 1, 2]])
def test_evaluations_are_not_blamed_on_the_machine_and_the_report_says_what_the_terminal_says(
    tmp_path: Path, who: list[int]
) -> None:
    """What would help is not to wait for the evaluation of one worker, and not to evaluate in all of them."""
    outside = {worker: Outside(each_s=Recorded(seconds=(0.0,) * 9 + (30.0,))) for worker in who}
    cluster = Cluster(compute_s=[1.0] * 3, outside=outside)
    result = simulate(cluster, "bsp", iterations=50, record=True)
    evidence = evidence_of(result.summary, str(result.save(tmp_path / "run")))
    assert evidence is not None
    sentences = sentences_of(evidence)
    assert "something other than training" in sentences[0]
    remedy = (
        "If every worker evaluates the same data"
        if len(who) > 1
        else "While a worker is inside paceline.evaluating(model)"
    )
    assert sentences[1].startswith(remedy)
    assert not any("--batch" in each or "--sync" in each for each in sentences)
    causes = read_report(tmp_path / "run").causes
    assert [each for cause in causes for each in (cause.words, *cause.remedies)] == [
        each for each in sentences if "paceline advise" not in each
    ]


WAITED = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "bsp", iterations=10)


@pytest.mark.parametrize(
    ("order", "asked", "hints"),
    [
        (DataOrder(600, 16, False, "auto", ""), False, [BALANCED_LOCKSTEP, BACKUP, OTHER_MODEL]),
        (DataOrder(600, 16, False, "auto", "", balanced=True), True, [BACKUP, OTHER_MODEL]),
        # The run has asked for balanced batches, and was told that its data, or its script, does not allow them.
        (DataOrder(600, 16, False, "auto", ""), True, [BACKUP, OTHER_MODEL]),
        # batches of a batch sampler, or of one item
        (DataOrder(600, 1, False, "auto", ""), False, [BACKUP, OTHER_MODEL]),
        # a dataset without a length
        (DataOrder(None, 16, False, "auto", ""), False, [BACKUP, OTHER_MODEL]),
        (
            DataOrder(600, 16, False, "static", ""),
            False,
            [
                BALANCED_LOCKSTEP,
                BACKUP,
                f"{ON_DEMAND}, if you omit --split static and split='static' in distribute(loader). "
                f"{RESERVED.format(HOW)}",
            ],
        ),
    ],
)
def test_only_what_the_data_allows_is_suggested(order: DataOrder, asked: bool, hints: list[str]) -> None:
    handout = Handout.of(order, asked=asked)
    assert said(WAITED, handout=handout)[1:] == hints


def test_without_a_distributed_loader_nothing_is_said_to_be_handed_out_on_demand() -> None:
    assert said(WAITED, handout=Handout())[1:] == [DISTRIBUTE]
    idle = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "asp", iterations=10)
    assert said(idle, handout=Handout())[1:] == [DISTRIBUTE]
    assert said(idle)[1:] == []
    assert said(idle, handout=Handout("static"))[1:] == [
        "Omit --split static and split='static' in distribute(loader), so that data is handed out on demand."
    ]


def test_an_option_that_other_models_do_not_have_is_named() -> None:
    assert said(WAITED, overlap=False)[-1] == (
        f"{ON_DEMAND}, if you omit --overlap off. {RESERVED.format(HOW)}"
    )


def test_a_program_that_calls_launch_is_told_its_arguments() -> None:
    _, balance, backup, other = said(WAITED, program=("function",))
    assert balance.startswith("Try batch='balanced', which")
    assert "try sync='drop-stragglers:quorum=2': no gradient is stale" in backup
    assert other.startswith("Under sync='asp' or sync='elastic-bsp', workers do not meet")
    assert other.endswith("first: paceline.simulate(cluster, sync, train_fn=FUNCTION)")


def test_stale_gradients_are_never_suggested_without_what_they_do_to_the_accuracy() -> None:
    """Whoever follows the suggestions in their order tries first what leaves the result as it is."""
    for handout in (AUTO, STATIC, Handout("dynamic")):
        hints = said(WAITED, handout=handout)
        assert all("Check the accuracy first: " in hint for hint in hints if "--sync asp" in hint)
        assert "--sync asp" in hints[-1]


def test_joint_clipping_is_suggested_only_where_it_is_possible() -> None:
    pushes = msgspec.structs.replace(NOTHING.pushes, averaged=4)
    clipped = msgspec.structs.replace(NOTHING, clipped_alone=4, pushes=pushes)
    assert len(find(clipped)) == 2
    assert len(find(clipped, clippable=False)) == 1
