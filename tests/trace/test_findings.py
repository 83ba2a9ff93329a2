"""What is said about the time that the workers of a run lost."""

from __future__ import annotations

import msgspec
import pytest

from paceline.core.protocol.lease import Order
from paceline.sim import Cluster, Presence, simulate
from paceline.trace.findings import Handout, find
from paceline.trace.measures import Meter

HOW = "paceline simulate CLUSTER --script SCRIPT --sync bsp,asp,elastic-bsp (see docs/rehearse.md)"
RESERVED = (
    "But gradients are computed on outdated weights, which changes how training proceeds. "
    "Check the accuracy first: {}"
)
ON_DEMAND = (
    "Under --sync asp or --sync elastic-bsp, there is no barrier in every iteration, and data is handed out on "
    "demand"
)
OTHER_MODEL = f"{ON_DEMAND}. {RESERVED.format(HOW)}"
BACKUP = (
    "If all workers draw from the same data, try --sync drop-stragglers:quorum=2: no gradient is stale, but late "
    "ones are dropped, so an update averages fewer of them."
)
BALANCED = "Try --batch balanced, which makes the size of each worker's batch proportional to its speed."
BALANCED_LOCKSTEP = (
    f"{BALANCED} The joint batch of all workers stays the same, and so does the result of training."
)
DISTRIBUTE = (
    "The script decides how many iterations each worker makes. If it distributes its data with "
    "paceline.distribute(loader), faster workers can use more of the data."
)
AUTO = Handout("auto", divisible=True)
STATIC = Handout("static", divisible=True)
NOTHING = Meter(1).measures()


def lost(
    idle_s: dict[int, float],
    iterations: dict[int, int],
    *,
    duration_s: float = 30.0,
    pushed_s: float = 30.0,
    lockstep: bool = False,
    handout: Handout = AUTO,
) -> list[str]:
    """What is found if workers were idle at the end of a run, and the others pushed at `pushed_s`."""
    left_s = {worker: duration_s - idle_s.get(worker, 0.0) for worker in iterations}
    measures = msgspec.structs.replace(
        NOTHING,
        duration_s=duration_s,
        iterations=iterations,
        idle_s={worker: idle_s.get(worker, 0.0) for worker in iterations},
        left_s=left_s,
        last_push_s={worker: min(left_s[worker], pushed_s) for worker in iterations},
    )
    return find(measures, lockstep=lockstep, handout=handout)


def test_nothing_is_said_about_a_run_in_which_nothing_was_lost() -> None:
    assert find(NOTHING, lockstep=True, run_dir="runs/1") == []
    equal = simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", iterations=20).measures
    assert find(equal, lockstep=True, run_dir="runs/1") == []


def test_idle_workers_are_counted_and_the_one_that_still_worked_is_named() -> None:
    idle, shares, hint = lost({0: 8.0, 1: 8.0, 2: 8.0}, {0: 100, 1: 100, 2: 100, 3: 100}, handout=STATIC)
    assert (
        idle == "3 workers were idle for the last 8.0 s (27% of the run), because worker 3 was still working."
    )
    assert shares == "All of them had equal shares (100 iterations each), although their speeds differ."
    assert hint == (
        "Omit --split static and split='static' in distribute(loader), so that data is handed out on demand, or try "
        "--batch balanced, which makes the shares proportional to the workers' speeds."
    )


def test_who_was_idle_for_unequal_times_is_said_with_the_shortest_and_the_longest() -> None:
    first, *_ = lost({0: 3.0, 1: 8.0}, {0: 100, 1: 100, 2: 100, 3: 100})
    assert first == (
        "2 workers were idle for the last 3.0 to 8.0 s (10% to 27% of the run), because workers 2 and 3 were still "
        "working."
    )
    first, *_ = lost({1: 8.0}, {0: 100, 1: 100, 2: 100, 3: 100})
    assert first == (
        "Worker 1 was idle for the last 8.0 s (27% of the run), because workers 0, 2 and 3 were still working."
    )


@pytest.mark.parametrize(("idle_s", "duration_s"), [(0.9, 3.0), (4.9, 100.0)])
def test_what_is_shorter_than_a_second_or_a_twentieth_of_the_run_is_not_said(
    idle_s: float, duration_s: float
) -> None:
    assert lost({0: idle_s}, {0: 10, 1: 10}, duration_s=duration_s, pushed_s=duration_s) == []


def test_unequal_shares_give_no_hint() -> None:
    assert len(lost({0: 8.0}, {0: 200, 1: 100})) == 1


def test_idle_workers_with_equal_shares_under_lockstep_are_told_to_balance_their_batches() -> None:
    *_, first, second = lost({0: 8.0}, {0: 100, 1: 100}, lockstep=True)
    assert (first, second) == (BALANCED_LOCKSTEP, OTHER_MODEL)


@pytest.mark.parametrize("lockstep", [True, False])
def test_balanced_batches_are_not_called_equal_shares(lockstep: bool) -> None:
    handout = Handout("static", balanced=True, divisible=True)
    assert len(lost({0: 8.0}, {0: 100, 1: 100}, lockstep=lockstep, handout=handout)) == 1


def test_a_worker_that_no_longer_pushed_is_not_said_to_be_slow() -> None:
    _, only = lost({0: 8.0}, {0: 100, 1: 100}, pushed_s=22.0)
    assert only == (
        "Its last push arrived 8.0 s before the end: after that, the script did something other than training, such "
        "as evaluating the model."
    )


def test_equal_shares_on_unequal_machines_leave_fast_workers_idle_without_barriers() -> None:
    measures = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "asp", iterations=10).measures
    idle, shares, _ = find(measures, lockstep=False, run_dir="runs/1")
    assert (
        idle
        == "2 workers were idle for the last 20.0 s (67% of the run), because worker 2 was still working."
    )
    assert "equal shares (10 iterations each)" in shares


def test_waiting_at_barriers_is_said_with_what_helps() -> None:
    measures = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "bsp", iterations=10).measures
    script = ["script", "train.py", "--epochs", "3"]
    waiting, balance, backup, other, command = find(
        measures, lockstep=True, handout=AUTO, run_dir="runs/1", program=script
    )
    assert waiting == (
        "Workers waited at the barrier of each iteration for 44% of their time (13.3 s each, on average); worker 2 "
        "waited least (0.0 s)."
    )
    how = "paceline simulate runs/1 --script 'train.py --epochs 3' --sync bsp,asp,elastic-bsp"
    assert (balance, backup) == (BALANCED_LOCKSTEP, BACKUP)
    assert other == f"{ON_DEMAND}. {RESERVED.format(how)}"
    assert command == "To compare the sync models on these machines, run: paceline advise runs/1"
    assert find(measures, lockstep=True, handout=AUTO) == [waiting, balance, backup, OTHER_MODEL]
    balanced = Handout("auto", balanced=True, divisible=True)
    assert find(measures, lockstep=True, handout=balanced) == [waiting, backup, OTHER_MODEL]


def test_balanced_batches_are_no_help_where_all_wait_alike() -> None:
    measures = msgspec.structs.replace(
        NOTHING, duration_s=30.0, waiting_s={0: 6.0, 1: 6.0}, waiting_share=0.2
    )
    assert find(measures, lockstep=True, handout=AUTO) == [
        "Workers waited at the barrier of each iteration for 20% of their time (6.0 s each, on average).",
        OTHER_MODEL,
    ]


def test_waiting_for_a_slow_worker_under_another_model_is_said_with_balanced_batches() -> None:
    measures = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "ssp:staleness=1", until_s=30.0).measures
    waiting, balance, command = find(measures, lockstep=False, handout=AUTO, run_dir="runs/1")
    assert waiting.startswith("Workers waited for the answers to their pulls for ")
    assert balance == BALANCED
    assert command.endswith("paceline advise runs/1")
    balanced = Handout("auto", balanced=True, divisible=True)
    assert find(measures, lockstep=False, handout=balanced, run_dir="runs/1") == [waiting, command]


def test_a_lost_worker_is_neither_idle_nor_working() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 3.0], presence={0: Presence(lost_at_s=2.5)})
    first, *_ = find(simulate(cluster, "asp", iterations=10).measures, lockstep=False)
    assert (
        first == "Worker 1 was idle for the last 20.0 s (67% of the run), because worker 2 was still working."
    )


WAITED = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "bsp", iterations=10).measures


@pytest.mark.parametrize(
    ("order", "asked", "hints"),
    [
        (Order(600, 16, False, "auto", ""), False, [BALANCED_LOCKSTEP, BACKUP, OTHER_MODEL]),
        (Order(600, 16, False, "auto", "", balanced=True), True, [BACKUP, OTHER_MODEL]),
        # The run has asked for balanced batches, and was told that its data, or its script, does not allow them.
        (Order(600, 16, False, "auto", ""), True, [BACKUP, OTHER_MODEL]),
        # batches of a batch sampler, or of one item
        (Order(600, 1, False, "auto", ""), False, [BACKUP, OTHER_MODEL]),
        # a dataset without a length
        (Order(None, 16, False, "auto", ""), False, [BACKUP, OTHER_MODEL]),
        (
            Order(600, 16, False, "static", ""),
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
def test_only_what_the_data_allows_is_suggested(order: Order, asked: bool, hints: list[str]) -> None:
    handout = Handout.of(order, asked=asked)
    assert find(WAITED, lockstep=True, handout=handout)[1:] == hints


def test_without_a_distributed_loader_nothing_is_said_to_be_handed_out_on_demand() -> None:
    assert find(WAITED, lockstep=True)[1:] == [DISTRIBUTE]
    idle = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "asp", iterations=10).measures
    assert find(idle, lockstep=False)[2:] == [DISTRIBUTE]
    assert find(idle, lockstep=False, handout=AUTO)[2:] == []
    not_divisible = Handout("static")
    assert find(idle, lockstep=False, handout=not_divisible)[2:] == [
        "Omit --split static and split='static' in distribute(loader), so that data is handed out on demand."
    ]


def test_an_option_that_other_models_do_not_have_is_named() -> None:
    assert find(WAITED, lockstep=True, handout=AUTO, overlap=False)[-1] == (
        f"{ON_DEMAND}, if you omit --overlap off. {RESERVED.format(HOW)}"
    )


def test_a_program_that_calls_launch_is_told_its_arguments() -> None:
    _, balance, backup, other = find(WAITED, lockstep=True, handout=AUTO, program=["function"])
    assert balance.startswith("Try batch='balanced', which")
    assert "try sync='drop-stragglers:quorum=2': no gradient is stale" in backup
    assert other.startswith("Under sync='asp' or sync='elastic-bsp', there is")
    assert other.endswith("first: paceline.simulate(cluster, sync, train_fn=FUNCTION)")


def test_stale_gradients_are_never_suggested_without_what_they_do_to_the_accuracy() -> None:
    """Whoever follows the suggestions in their order tries first what leaves the result as it is."""
    for handout in (AUTO, STATIC, Handout("dynamic")):
        hints = find(WAITED, lockstep=True, handout=handout)
        assert all("Check the accuracy first: " in hint for hint in hints if "--sync asp" in hint)
        assert "--sync asp" in hints[-1]


def test_joint_clipping_is_suggested_only_where_it_is_possible() -> None:
    pushes = msgspec.structs.replace(NOTHING.pushes, averaged=4)
    clipped = msgspec.structs.replace(NOTHING, clipped_alone=4, pushes=pushes)
    assert len(find(clipped, lockstep=True)) == 2
    assert len(find(clipped, lockstep=True, clippable=False)) == 1
