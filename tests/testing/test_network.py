"""Whole runs on a network that delays, loses and breaks at random: nobody waits for ever, and no data is lost.

The same is checked of every model, with data, changes of the model, extensions and all of them together. The scripts
in `network_scripts` are what was found here, and what excludes what; `test_network_scripts.py` plays them.

`make test` takes a few seeds of each case; each test of `make thorough` takes PACELINE_NETWORK of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from typing import Any, cast

import pytest

from paceline.core.coordinator import Coordinator
from paceline.core.joint_batch import Collectives
from paceline.core.loader_ledger import LoaderLedger
from paceline.core.members import Members, WorkerLoss
from paceline.core.reconfiguration import WAITS_FOR, Extension
from paceline.core.requests import Request, Send, worker_peer
from paceline.core.server import Server
from paceline.core.worker import Worker
from paceline.errors import InternalError
from paceline.sync.conditions import ConditionMachine
from paceline.sync.notation import parse_shards
from tests.support.choosers import Hostile, Random
from tests.support.marks import thorough
from tests.support.network import Chooser, Network

SEEDS = int(os.environ.get("PACELINE_NETWORK", "10"))
FEW = 4
"""Number of seeds in every run of the tests. With the last of them, workers pause when too few are left."""

MODELS = (
    "bsp",
    "asp",
    "ssp:staleness=1",
    "ssp:staleness=1,execution=lazy",
    "dssp:lower=1,upper=3",
    "dsps:lower=1,upper=3",
    "pssp:staleness=1,probability=0.5",
    "dynamic-pssp:staleness=1",
    "drop-stragglers:quorum=2",
    "naive-waiting:delay_s=0.2",
    "elastic-bsp:lookahead=3",
    "spec-sync",
    "bsp|asp",
    "pssp:staleness=1,probability=0.5|drop-stragglers:quorum=2",
)

SCRIPTS = {
    "data": ("epoch 0", "epoch 1", "epoch again", "finish"),
    "change": ("push", "change bsp", "push", "push", "change asp", "push", "push", "finish"),
    "calls": ("push", "change asp", "push", "barrier", "push", "change bsp", "barrier", "push", "finish"),
    "extend": ("push", "extend 1", "push", "push", "extend 2", "push", "finish"),
    "all": ("push", "change bsp", "push", "extend 1", "push", "change elastic-bsp", "push", "push", "finish"),
}


CASES = [(sync, script) for script in SCRIPTS for sync in MODELS]


def run(sync: str, script: str, choose: Chooser, **options: Any) -> Network:
    """Take all steps of a run, and check its end."""
    network = Network(sync, workers=3, servers=2, most=4, script=SCRIPTS[script], **options)
    network.run(choose)
    for _ in range(8):
        if network.coordinator.quorum.paused and not network.over:  # too few workers are left
            network.take(("join",))
            network.run(choose)
    network.check_end()
    coordinator = network.coordinator
    if not network.over:
        kept = coordinator.members.fate(coordinator.main.worker) == "finished"
        assert len(coordinator.invite(4 - kept)) == 4 - kept, "an index has been lost"
    models = parse_shards(sync)
    if (
        script in ("data", "extend")
        and len(models) == 1
        and models[0].agrees_on_means
        and not coordinator.losses.torn
    ):
        one, other = (set(store.means) for server in network.servers for store in server.stores.values())
        assert one == other, f"the shards have averaged different pushes: {one ^ other}"
    return network


def attack(seeds: range, cases: Sequence[tuple[str, str]] = CASES) -> None:
    """Let faults happen at random in each of these cases."""
    for seed in seeds:
        for sync, script in cases:
            pauses = {"pause_below": 2} if seed % 4 == 3 else {}
            run(sync, script, Hostile(f"{sync} {script} {seed}"), **pauses)


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_faults_everybody_finishes_whatever_the_order_of_messages(script: str) -> None:
    for sync in MODELS:
        network = run(sync, script, Random(f"{sync} {script}"))
        assert len(network.coordinator.members.finished) == 3
        assert not network.coordinator.members.lost


@pytest.mark.parametrize(
    "seeds",
    [range(FEW), *thorough(*(range(first, first + SEEDS) for first in range(0, 10 * SEEDS, SEEDS)))],
    ids=str,
)
def test_with_faults_nobody_waits_for_ever_and_no_position_is_lost_or_used_twice(seeds: range) -> None:
    attack(seeds)


def test_a_worker_that_waits_in_a_call_pushes_for_others_that_have_more_of_the_returned_data() -> None:
    script = ("epoch 0", "epoch again", "barrier", "finish")
    network = Network("bsp", workers=3, servers=2, script=script)
    choose = Random(0)
    while network.workers["w2"].core.iteration < 1:
        network.take(choose(network, network.steps()))
    network.take(("crash", "w2"))
    network.run(choose)
    network.check_end()
    assert len(network.coordinator.members.finished) == 2
    assert network.coordinator.data.counts()["data"].used == 24


# -- it finds mistakes --------------------------------------------------------------------------------------


def changes_do_not_wait_for_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(Any, WAITS_FOR), "change", frozenset())


def joins_do_not_wait_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(Any, WAITS_FOR), "join", frozenset({"join", "extension"}))


def shards_forget_nothing_that_a_lost_worker_has_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConditionMachine, "_forget_pull", lambda self, worker: None)


def pushes_that_some_shards_have_not_received_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WorkerLoss,
        "kept",
        property(lambda self: max(last for each in self._received.values() for last in each.last)),
    )


def indices_are_used_again_before_the_loss_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    invite = Members.invite
    monkeypatch.setattr(Members, "invite", lambda self, count, wanted=(), reserved=(): invite(self, count))


def workers_that_have_just_been_invited_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Coordinator._start

    def mistaken(self: Coordinator) -> list[Request]:
        requests = start(self)
        assert isinstance(requests[0], Send)
        return [Send(worker_peer(worker), requests[0].message) for worker in sorted(self._connected)]

    monkeypatch.setattr(Coordinator, "_start", mistaken)


def nobody_pushes_for_a_newcomer_while_waiting_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collectives, "allow_pushes", lambda self, live: [])


def nobody_passes_a_change_while_waiting_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "may_stand_in", property(lambda self: self._uneven or self._relaxed))


def extensions_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Extension, "is_void", False)


def paused_workers_pass_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "paused", property(lambda self: self._paused))


def newcomers_keep_the_model_that_they_have_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "_difference", lambda self, model: "")


def servers_do_not_wait_for_the_end_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    disconnected = Server.disconnected

    def mistaken(self: Server, worker: int, now_ticks: int) -> list[Request]:
        return [] if worker not in self.expected else disconnected(self, worker, now_ticks)

    monkeypatch.setattr(Server, "disconnected", mistaken)


def ledgers_forget_what_lost_workers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = LoaderLedger.leave

    def mistaken(self: LoaderLedger, worker: int, live: Set[int], *, early: bool) -> None:
        self._accounts.pop(worker, None)
        leave(self, worker, live, early=early)

    monkeypatch.setattr(LoaderLedger, "leave", mistaken)


MISTAKES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    changes_do_not_wait_for_joins: "all",
    joins_do_not_wait_for_changes: "all",
    shards_forget_nothing_that_a_lost_worker_has_asked_for: "data",
    pushes_that_some_shards_have_not_received_are_kept: "data",
    indices_are_used_again_before_the_loss_is_settled: "data",
    workers_that_have_just_been_invited_are_started: "data",
    nobody_pushes_for_a_newcomer_while_waiting_in_a_call: "extend",
    nobody_passes_a_change_while_waiting_in_a_call: "calls",
    extensions_wait_for_nobody: "extend",
    newcomers_keep_the_model_that_they_have_registered: "extend",
    paused_workers_pass_no_change: "change",
    servers_do_not_wait_for_the_end_of_a_connection: "data",
    ledgers_forget_what_lost_workers_have: "data",
}
"""Mistake -> the script with which it is found."""


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, InternalError)):
        attack(range(100), [(sync, MISTAKES[mistake]) for sync in MODELS])
