"""What a report says first: what held a run back, in words, and what would help."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec import structs

from paceline.look.causes import Evidence, causes_of, evidence_of, headline_of, sentences_of
from paceline.look.step_cost import StepCost
from paceline.trace.findings import Handout
from paceline.trace.report import Cause, LinkTotal, WorkerReport

DIVISIBLE = Handout("static", divisible=True)


def worker(index: int, *, awaited_s: float = 0.0, samples: float = 1000, **time_s: float) -> WorkerReport:
    """A worker with 100 iterations. The names of the times are those of the kinds."""
    return WorkerReport(
        worker=index,
        iterations=100,
        samples=int(samples),
        time_s=time_s,
        awaited_s=awaited_s,
        fate="finished",
        machine="10.0.0.2" if time_s.get("transfer", 0.0) > 50.0 else "this machine",
    )


def evidence(*workers: WorkerReport, **others: Any) -> Evidence:
    known = {"state": "finished", "sync": "bsp", "lockstep": True, "duration_s": 100.0, "end_s": 100.0}
    known |= {"samples": 4000, "updates": 100, "handout": DIVISIBLE, "program": ("script", "train.py")}
    known["last_push_s"] = {each.worker: 100.0 - each.time_s.get("idle", 0.0) for each in workers}
    return Evidence(workers=workers, **{**known, **others})


def only(found: tuple[Cause, ...]) -> Cause:
    assert len(found) == 1, found
    return found[0]


def test_a_straggler_is_named_with_the_time_that_the_others_waited_for_it() -> None:
    others = [worker(index, computing=30.0, waiting=64.0, transfer=3.0) for index in range(3)]
    known = evidence(*others, worker(3, computing=93.0, transfer=4.0, awaited_s=190.0), run_dir="runs/1")
    cause = only(causes_of(known))
    assert cause.words == (
        "Workers 0 to 2 waited 66 % of their time (192 s together) for worker 3, whose batches take 3.1 times as "
        "long."
    )
    assert cause.lost_s == 192.0
    assert cause.share == pytest.approx(192 / 388)
    assert cause.remedies[0].startswith("Try --batch balanced")
    assert "--sync drop-stragglers:quorum=3" in cause.remedies[1]
    # drop-stragglers would refuse a script that clips the joint gradient.
    clipped = only(causes_of(structs.replace(known, clips=True)))
    assert clipped.remedies == (cause.remedies[0], *cause.remedies[2:])
    assert cause.remedies[-1].endswith(
        "paceline simulate runs/1 --script train.py --sync bsp,asp,elastic-bsp"
    )
    assert headline_of(known, [cause]) == (
        "4 workers trained 4,000 samples in 100 s under bsp (40.0 samples per second). What held the run back most: "
        "the others spent 66 % of their time waiting for worker 3, whose batches take 3.1 times as long."
    )


def test_steps_that_take_most_of_the_transfers_are_named_with_what_helps() -> None:
    both = [worker(index, computing=40.0, transfer=60.0) for index in range(2)]
    cost = StepCost(
        optimizers=["Muon"], servers=1, step_s=0.5, share=0.5, predicted_s={1: 0.5, 4: 0.125}, here_s={}
    )
    known = evidence(*both, step_cost=cost)
    cause = only(causes_of(known))
    assert cause.words == (
        "For about 50 % of their time (100 s together), workers waited for the servers to make a step: 500 ms for each "
        "step of Muon."
    )
    assert cause.remedies == (cost.remedy(),)
    assert headline_of(known, [cause]).endswith(
        "What held the run back most: workers waited for the servers to make a step for 50 % of their time."
    )
    crowded = evidence(*both, step_cost=cost, cores=2, queued_s={0: 20.0, 1: 20.0})
    steps, cores = causes_of(crowded)
    assert steps.words == cause.words
    assert "shared 2 cores" in cores.words
    rare = structs.replace(cost, share=0.25)
    assert only(causes_of(evidence(*both, step_cost=rare))).words.startswith("For 60 % of the workers' time")


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({}, True),
        ({"duration_s": 60.0}, False),  # worker 0 alone needs 41 s
        ({"duration_s": 15.0, "samples": 80}, False),
        ({"program": ("script", "train.py"), "handout": Handout(), "samples": 0}, False),
        ({"step_cost": None}, False),
    ],
)
def test_one_worker_alone_is_compared_with_the_run_if_it_would_certainly_have_been_faster(
    changes: dict[str, Any], is_said: bool
) -> None:
    cost = StepCost(optimizers=["SGD"], servers=2, step_s=0.02, share=0.1, predicted_s={1: 0.04}, here_s={})
    workers = worker(0, computing=14.0, transfer=80.0, outside=5.0), worker(1, computing=30.0, transfer=70.0)
    known = structs.replace(
        evidence(*workers, samples=2000, step_cost=cost, links=LINKS, duration_s=90.0), **changes
    )
    said = (
        "By the times that the run has measured, worker 0 alone, without servers, would have trained these 2,000 "
        "samples in about 41 s, 2.2 times as fast as this run."
    )
    assert (causes_of(known)[-1].words == said) is is_said
    assert (said in sentences_of(known)) is is_said
    assert any("alone" in sentence for sentence in sentences_of(known)) is is_said


def test_options_are_arguments_for_a_run_that_was_launched_from_python() -> None:
    others = [worker(index, computing=30.0, waiting=64.0) for index in range(3)]
    known = evidence(*others, worker(3, computing=93.0, awaited_s=192.0), program=("function",))
    assert only(causes_of(known)).remedies[0].startswith("Try batch='balanced'")


def test_a_worker_with_a_slow_link_is_told_from_one_that_computes_slowly() -> None:
    known = evidence(
        worker(0, computing=20.0, waiting=70.0, transfer=1.0),
        worker(1, computing=20.0, transfer=75.0, awaited_s=70.0),
        links=(
            LinkTotal("this machine", "10.0.0.2", 400_000_000),
            LinkTotal("10.0.0.2", "this machine", 400_000_000),
        ),
    )
    cause = only(causes_of(known))
    assert cause.words == (
        "Worker 0 waited 77 % of its time (70 s) for worker 1, whose gradients and weights are on their way for 750 "
        "ms in each iteration, 75 times as long as those of the others. In each iteration, 8 MB pass between "
        "10.0.0.2 and this machine (8 MB per second on average)."
    )
    assert "--remote-servers 1" in cause.remedies[0]
    assert "--wire" in cause.remedies[1]
    assert "accumulate the gradients" in cause.remedies[2]
    assert "a slow link" in headline_of(known, [cause])


@pytest.mark.parametrize(
    ("computing_s", "causes"),
    [
        (10.0, ["For 90 % of the workers' time"]),
        (80.0, ["Gradients and weights were on their way", "Workers waited at the barrier"]),
    ],
)
def test_waits_in_turn_for_transfers_over_links_are_not_a_cause_of_their_own(
    computing_s: float, causes: list[str]
) -> None:
    busy = {"computing": computing_s, "transfer": 60.0, "waiting": 30.0}
    known = evidence(*(worker(index, awaited_s=30.0, **busy) for index in range(2)), links=LINKS)
    found = causes_of(known)
    assert [next(begin for begin in causes if each.words.startswith(begin)) for each in found] == causes
    assert any("--remote-servers" in remedy for remedy in found[0].remedies)
    assert any("--sync asp" in remedy for remedy in found[-1].remedies)
    assert sum(each.lost_s or 0.0 for each in found) == 180.0


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_worker_that_fetched_weights_while_another_was_idle_is_not_said_to_compute_slowly(
    lockstep: bool,
) -> None:
    known = evidence(
        worker(0, computing=40.0, transfer=55.0),
        worker(1, computing=42.0, transfer=45.0, idle=12.0),
        links=LINKS,
        lockstep=lockstep,
    )
    [cause] = (cause for cause in causes_of(known) if "idle" in cause.words)
    assert cause.words == (
        "Worker 1 was idle for the last 12 s (12 % of the run), because the gradients and weights of worker 0 were on "
        "their way for 10 s longer than those of worker 1. All of them had equal shares of the data."
    )
    assert cause.remedies[-1].startswith("Evaluate less often")
    assert not any(remedy.startswith("Try --batch balanced") for remedy in cause.remedies)


@pytest.mark.parametrize(
    ("serving", "machines", "advice"),
    [
        (["a"], "ab", "--servers 2 --remote-servers 1, and paceline join --servers 1 on the other machine."),
        (
            ["a", "b"],
            "abc",
            "--servers 3 --remote-servers 2, and paceline join --servers 1 on 2 of the other machines.",
        ),
        (["a", "b"], "ab", ""),
    ],
)
def test_servers_are_recommended_for_no_more_machines_than_the_run_has(
    serving: list[str], machines: str, advice: str
) -> None:
    known = evidence(
        *(
            structs.replace(worker(index, computing=20.0, transfer=75.0), machine=machine)
            for index, machine in enumerate(machines)
        ),
        links=tuple(LinkTotal("a", machine, 400_000_000) for machine in machines[1:]),
        servers=2,
        server_machines=tuple(serving),
    )
    remedies = only(causes_of(known)).remedies
    assert [each.partition("paceline serve ")[2] for each in remedies if "--servers" in each] == [
        advice
    ] * bool(advice)
    assert "accumulate the gradients" in remedies[-1]


def test_the_bytes_of_an_iteration_are_those_of_the_workers_that_use_the_link() -> None:
    serving = structs.replace(worker(0, computing=20.0, transfer=75.0), machine="a", iterations=40)
    others = [structs.replace(worker(index, computing=20.0, transfer=75.0), machine="b") for index in (1, 2)]
    links = (LinkTotal("a", "b", 150_000_000), LinkTotal("b", "a", 250_000_000))
    known = evidence(serving, *others, links=links, server_machines=("a",))
    assert "In each iteration, 2 MB pass between a and b" in only(causes_of(known)).words
    both = structs.replace(known, server_machines=("a", "b"))
    assert "In each iteration, 10 MB pass between a and b" in only(causes_of(both)).words


def test_the_codec_that_is_recommended_is_that_for_the_optimizer_with_what_it_gains() -> None:
    known = evidence(
        worker(0, computing=20.0, waiting=70.0, transfer=1.0),
        worker(1, computing=15.0, loading=5.0, outside=5.0, transfer=75.0, awaited_s=70.0),
        links=(LinkTotal("this machine", "10.0.0.2", 400_000_000),),
    )

    def said(*optimizers: str, **others: Any) -> str:
        found = structs.replace(known, optimizers=optimizers, **others)
        cause, *_ = causes_of(found)
        return " ".join(remedy for remedy in cause.remedies if "wire" in remedy)

    # Only the worker that was awaited counts: 95 s now, and 20 s + 75 s x 144 / 1024 with int4.
    assert said("SGD") == (
        "Try --wire int4, which rounds gradients and weights on their way: a step is then about 3.1 times as fast "
        "(estimated from the time of the transfers), and int4 cost no measurable accuracy in tests with SGD."
    )
    assert "Try --wire int8, " in said()
    assert ": a step is then about 2.4 times as fast (" in said()
    assert said("SGD", lockstep=False).startswith("Try --wire int4, ")  # its weights travel as bf16
    assert ": a step is then about 2.2 times as fast (" in said("SGD", lockstep=False)
    assert ": a step is then about 1.5 times as fast (" in said("SGD", wire="int8")
    assert said("SGD", wire="int4") == said("Rprop", wire="int8") == ""
    assert ": a step is then about 2.3 times as fast (" in said("SGD", vectors={"bfloat16": 25600})
    assert said("SGD", vectors={"float64": 25600}) == ""
    assert said("SGD", program=("function",)).startswith("Try wire='int4', ")
    muon = said("torch.optim:Muon", program=("function",))
    assert muon.startswith("Try wire='gradients=int8,weights=int4', ")


def test_transfers_that_slow_all_workers_alike_are_named() -> None:
    links = (LinkTotal("a", "b", 10_000_000),)
    known = evidence(*(worker(index, computing=60.0, transfer=30.0) for index in range(2)), links=links)
    cause = only(causes_of(known))
    assert cause.words.startswith(
        "Gradients and weights were on their way for 33 % of the workers' time (60 s together), 300 ms in each "
        "iteration."
    )
    assert (
        ": a step is then about 1.3 times as fast (" in cause.remedies[1]
    )  # 90 s to 60 s + 30 s x 260 / 1024
    seldom = evidence(*(worker(index, computing=94.0, transfer=5.5) for index in range(2)), links=links)
    assert not any("--wire" in remedy for remedy in only(causes_of(seldom)).remedies)  # 4 % less time


def test_a_worker_with_more_data_than_the_others_is_named() -> None:
    others = [worker(index, computing=20.0, idle=60.0, samples=1000) for index in range(2)]
    known = evidence(*others, worker(2, computing=80.0, samples=4000), handout=Handout())
    cause = only(causes_of(known))
    assert cause.words == (
        "Worker 2 had 4 times as much data as workers 0 and 1 (4,000 samples instead of 1,000), which were idle for "
        "the last 60 s (60 % of the run)."
    )
    assert "paceline.distribute" in cause.remedies[0]


def test_equal_shares_for_unequal_workers_are_named() -> None:
    known = evidence(
        worker(0, computing=30.0, idle=60.0), worker(1, computing=90.0), sync="asp", lockstep=False
    )
    cause = only(causes_of(known))
    assert cause.words == (
        "Worker 0 was idle for the last 60 s (60 % of the run), because worker 1 was still working. All of them had "
        "equal shares of the data, but the batches of worker 1 take 3 times as long."
    )
    assert "--split static" in " ".join(cause.remedies)


def test_what_the_main_worker_does_after_its_last_step_is_not_training() -> None:
    known = evidence(
        worker(0, computing=30.0, outside=60.0),
        worker(1, computing=30.0, idle=60.0),
        last_push_s={0: 40.0, 1: 40.0},
    )
    words = [cause.words for cause in causes_of(known)]
    assert any("did something other than training for 60 s after its last step" in each for each in words)


def test_workers_that_wait_for_each_other_in_turn_have_no_culprit() -> None:
    workers = [worker(index, computing=60.0, waiting=30.0, awaited_s=30.0) for index in range(4)]
    assert "now for one worker, now for another" in only(causes_of(evidence(*workers))).words


@pytest.mark.parametrize(
    ("time_s", "words"),
    [
        (
            {"wasted": 20.0},
            "Computations that took 40 s (20 % of the workers' time) were wasted, because the sync model ",
        ),
        (
            {"paused": 20.0},
            "The run paused for 20 % of the workers' time (40 s together), because it had fewer than 2",
        ),
        (
            {"outside": 20.0},
            "For 20 % of the workers' time (40 s together), the script did something other than",
        ),
        (
            {"transfer": 20.0},
            "For 20 % of the workers' time (40 s together), gradients and weights were on their way",
        ),
    ],
)
def test_other_lost_time_is_named(time_s: dict[str, float], words: str) -> None:
    workers = [worker(index, computing=80.0, **time_s) for index in range(2)]
    assert only(causes_of(evidence(*workers, restarts=7, shortage="2 workers"))).words.startswith(words)


def test_nothing_is_named_if_nothing_stands_out() -> None:
    known = evidence(*(worker(index, computing=96.0, waiting=2.0, transfer=2.0) for index in range(4)))
    assert causes_of(known) == ()
    assert headline_of(known, ()).endswith(
        "Nothing stands out that held the run back: workers computed for 96 % of their time."
    )


def test_what_makes_the_result_doubtful_comes_first() -> None:
    known = evidence(
        worker(0, computing=30.0, waiting=60.0),
        worker(1, computing=90.0, awaited_s=60.0),
        noticed=("The loss has risen.",),
        unapplied="Nothing was trained.",
    )
    assert [cause.words for cause in causes_of(known)][:2] == ["Nothing was trained.", "The loss has risen."]


@pytest.mark.parametrize(
    ("state", "failure", "words"),
    [
        (
            "failed",
            "worker 1 failed: ValueError: no\nmore",
            "The run failed after 100 s: worker 1 failed: ValueError: no. ",
        ),
        ("interrupted", "", "The run was interrupted after 100 s. 1 worker trained"),
        ("cut off", "", "The run was cut off after 100 s: its launcher was killed. 1 worker trained"),
        ("running", "", "The run has been training for 100 s. 1 worker trained"),
    ],
)
def test_the_headline_says_how_the_run_ended(state: str, failure: str, words: str) -> None:
    known = evidence(worker(0, computing=99.0), state=state, failure=failure)
    assert headline_of(known, ()).startswith(words)


def test_each_remedy_is_said_once() -> None:
    others = [worker(index, computing=30.0, waiting=30.0, idle=30.0) for index in range(3)]
    found = causes_of(evidence(*others, worker(3, computing=90.0, awaited_s=90.0)))
    assert len(found) == 2
    said = [re.sub(r"\W+", " ", remedy) for cause in found for remedy in cause.remedies]
    assert len(said) == len(set(said)) > 0


def test_more_busy_processes_than_cores_are_named_before_transfers_are_blamed() -> None:
    """Four workers, two servers and two cores: pushes take long because each process waits for a core."""
    workers = [
        worker(index, computing=60.0, transfer=30.0, waiting=10.0, awaited_s=10.0) for index in range(4)
    ]
    known = evidence(*workers, servers=2, cores=2, queued_s=dict.fromkeys(range(4), 40.0))
    cause = only(causes_of(known))
    assert cause.words.startswith(
        "4 workers and 2 servers shared 2 cores, perhaps with other programs: for 40 % of "
    )
    assert not any("--servers" in remedy for remedy in cause.remedies)
    assert headline_of(known, [cause]).endswith(
        "What held the run back most: 6 busy processes shared 2 cores."
    )
    # Workers that never wait for a core, because they sleep or use an accelerator, are not too many.
    for fewer in (structs.replace(known, queued_s={}), structs.replace(known, cores=8)):
        [first, *_] = causes_of(fewer)
        assert "cores" not in first.words


LINKS = (LinkTotal("this machine", "10.0.0.2", 400_000_000),)


@pytest.mark.parametrize(
    ("queued_s", "words"),
    [
        ((40.0, 40.0, 40.0), "Workers 0 to 2 waited for a core for 40 % of the time (120 s together)"),
        ((40.0, 5.0, 40.0), "Workers 0 and 2 waited for a core for 40 % of the time (80 s together)"),
        ((5.0, 5.0, 40.0), "Worker 2 waited for a core for 40 % of the time (40 s together)"),
    ],
)
def test_workers_that_lacked_a_core_are_named_in_a_run_that_machines_have_joined(
    queued_s: tuple[float, ...], words: str
) -> None:
    workers = [
        worker(index, computing=60.0, transfer=10.0, waiting=30.0, awaited_s=30.0) for index in range(3)
    ]
    workers[2] = structs.replace(workers[2], machine="10.0.0.2")
    known = evidence(*workers, joined=True, links=LINKS, queued_s=dict(enumerate(queued_s)))
    cause = only(causes_of(known))
    assert cause.words.startswith(
        f"{words}: too many processes, perhaps of other programs, were busy on 10.0.0.2"
    )
    assert " waited for a core for 40 % of the time." in headline_of(known, [cause])


def test_a_link_that_takes_longer_than_the_waits_for_a_core_is_named_with_them() -> None:
    workers = [worker(index, computing=40.0, transfer=60.0) for index in range(2)]
    known = evidence(*workers, joined=True, links=LINKS, queued_s={0: 20.0, 1: 20.0})
    link, cores = causes_of(known)
    assert link.words.startswith("Gradients and weights were on their way for 60 % of the workers' time")
    assert cores.words.startswith("Workers 0 and 1 waited for a core for 20 % of the time")
    for few in ({}, {0: 5.0, 1: 5.0}):
        assert only(causes_of(structs.replace(known, queued_s=few))) == link


def test_a_slow_loader_is_told_from_a_slow_machine() -> None:
    known = evidence(
        *(worker(index, computing=30.0, waiting=60.0, loading=1.0) for index in range(2)),
        worker(2, computing=30.0, loading=61.0, awaited_s=120.0),
    )
    cause = only(causes_of(known))
    assert cause.words == (
        "Workers 0 and 1 waited 66 % of their time (120 s together) for worker 2, whose script waits for its loader "
        "for 610 ms in each iteration, 61 times as long as those of the others."
    )
    assert cause.remedies[0].startswith("Give the DataLoader more processes")
    alike = evidence(*(worker(index, computing=60.0, loading=30.0) for index in range(2)))
    assert only(causes_of(alike)).words.startswith(
        "For 33 % of the workers' time (60 s together), the script waited for its loader: 300 ms in each iteration."
    )


def test_a_run_without_a_single_cause_says_what_its_workers_did() -> None:
    """A short run, in which no kind of time has cost a second per worker."""
    times = {"computing": 0.6, "waiting": 0.9, "transfer": 0.3, "outside": 0.9}
    known = evidence(*(worker(index, **times) for index in range(4)), duration_s=3.0)
    assert causes_of(known) == ()
    assert headline_of(known, ()).endswith(
        "No single cause stands out: workers computed for 22 % of their time; they waited for others for 33 %, did "
        "something other than training for 33 %, had messages on their way for 11 %. The run was too short to "
        "say more."
    )


def test_a_worker_that_evaluates_beside_training_ends_later_and_is_not_called_slow() -> None:
    """Inside `evaluating`, nobody waits for it, but it makes its own steps later."""
    known = evidence(
        worker(0, computing=50.0, outside=45.0),
        *(worker(index, computing=50.0, idle=45.0) for index in (1, 2)),
        last_push_s={0: 99.0, 1: 55.0, 2: 55.0},
    )
    cause, further = causes_of(known)
    assert cause.words == (
        "Workers 1 and 2 were idle for the last 45 s (45 % of the run), because the script of worker 0 spent 45 s "
        "longer than their scripts on something other than training, such as evaluating the model, and made its steps "
        "later."
    )
    assert "snapshot_every_s" in cause.remedies[0]
    assert not any("--batch" in remedy for each in (cause, further) for remedy in each.remedies)


def test_what_a_script_without_a_loader_does_between_two_steps_is_not_called_computing() -> None:
    """It may compute longer than the others, or evaluate the model: both lie between two steps."""
    known = evidence(
        worker(0, computing=90.0, awaited_s=30.0, samples=0),
        worker(1, computing=60.0, waiting=30.0, samples=0),
        samples=0,
        handout=Handout(),
    )
    cause = only(causes_of(known))
    unknown = (
        "The script distributes no loader, so it is not known how much of this time was computing, and how "
        "much was something else, such as evaluating the model."
    )
    assert cause.words == (
        "Worker 1 waited 33 % of its time (30 s) for worker 0, which takes 1.5 times as long from one step to the "
        f"next. {unknown}"
    )
    assert "paceline.evaluating(model)" in cause.remedies[0]
    assert "batches" not in cause.words + cause.brief
    simulated = structs.replace(known, program=())  # the compute times of a cluster are known
    assert only(causes_of(simulated)).words.endswith("for worker 0, whose batches take 1.5 times as long.")


def test_a_script_without_a_loader_is_not_said_to_have_computed_all_the_time() -> None:
    known = evidence(
        *(worker(index, computing=98.0, transfer=2.0, samples=0) for index in range(2)),
        samples=0,
        handout=Handout(),
    )
    assert headline_of(known, causes_of(known)).endswith(
        "workers spent 98 % of their time between one step and the next. The script distributes no loader, so it is "
        "not known how much of this time was computing, and how much was something else, such as evaluating the "
        "model."
    )


def test_an_evaluation_in_all_workers_is_not_that_of_one_and_belongs_in_one() -> None:
    known = evidence(worker(0, computing=40.0, outside=60.4), worker(1, computing=40.0, outside=59.6))
    cause = only(causes_of(known))
    assert cause.words.startswith(
        "For 60 % of the workers' time (120 s together), the script did something other "
    )
    assert "if paceline.is_main():" in cause.remedies[0]
    alone = evidence(worker(0, computing=40.0, outside=60.0), worker(1, computing=99.0, outside=1.0))
    cause = only(causes_of(alone))
    assert "(61 s together, most of it in worker 0)" in cause.words
    assert cause.remedies[0].startswith(
        "While a worker is inside paceline.evaluating(model), the other workers "
    )


def test_a_worker_that_nobody_else_worked_beside_is_not_blamed() -> None:
    """The others have made no iteration, so there is nobody who waited for it."""
    alone = worker(0, computing=50.0, waiting=40.0, awaited_s=90.0)
    other = structs.replace(worker(1, waiting=90.0), iterations=0)
    assert "now for one worker, now for another" in only(causes_of(evidence(alone, other))).words


def test_a_worker_that_was_lost_and_has_joined_again_can_be_the_one_that_worked_longest() -> None:
    idle = {"computing_s": 60.0, "idle_s": 40.0}
    departure = {"worker": 2, "incarnation": 0, "fate": "lost", "cause": "", "returned": True}
    summary = {
        "sync": "asp",
        "time_use": {"0": idle, "1": idle, "2": {"computing_s": 60.0, "wasted_s": 20.0}},
        "iterations": {"0": 100, "1": 100, "2": 100},
        "awaited_s": {},
        "last_push_s": {"0": 60.0, "1": 60.0, "2": 100.0},
        "duration_s": 100.0,
        "lost_workers": [2],
        "departures": [departure],
    }
    found = evidence_of(summary, "run")
    assert found is not None
    idle_cause, wasted = causes_of(found)
    assert idle_cause.brief == "worker 2 worked for 40 s longer than the others"
    assert wasted.words.endswith("were wasted, because worker 2 was lost.")
