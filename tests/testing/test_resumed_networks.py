"""Runs that are cut at a random event, and resumed with other workers, servers and models, on a hostile network.

Every ledger closes, every position of the data is used once over all runs, and nobody waits for ever.

`make test` takes a few seeds; each test of `make thorough` takes 20 x PACELINE_NETWORK of them.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from paceline.core.job_cut import JobCut
from paceline.core.lease import positions
from tests.support import network_processes
from tests.support.choosers import Hostile, Random
from tests.support.marks import thorough
from tests.support.network import Network, Step
from tests.testing.test_network import MODELS

SEEDS = 20 * int(os.environ.get("PACELINE_NETWORK", "10"))
FEW = 80
"""Number of seeds in every run of the tests."""

SCRIPTS = (
    ("epoch 0", "epoch 1", "epoch again", "finish"),
    ("epoch 0", "extend 1", "epoch 1", "extend 2", "epoch again", "finish"),
)
"""What the workers of all runs of a job do."""


class Chooser(Hostile):
    """Chooses at random, with faults, and cuts the job at random moments."""

    def __init__(self, seed: object, moments: set[int]) -> None:
        super().__init__(seed)
        self._moments = moments

    def __call__(self, network: Network, steps: Sequence[Step]) -> Step:
        if len(network.taken) in self._moments:
            return ("cut",)
        return super().__call__(network, steps)


def check(cut: JobCut, network: Network, whole: set[tuple[int, int]], some: set[tuple[int, int]]) -> None:
    """Check that the ledger of a cut closes, and says what the copies of the shards contain."""
    for loader in cut.loaders:
        settled = loader.used + loader.torn + loader.left + loader.left_out
        assert loader.total == settled + positions(loader.returned)
        assert loader.total + sum(24 - rest.begin for rest in loader.epochs) == 24 * loader.opened
        assert loader.used == network.used_by(whole).total()
        assert loader.torn <= network.used_by(some).total() - loader.used + torn_before(network)
    if cut.sync == "bsp" and network.coordinator.resumed is None and not network.coordinator.losses.torn:
        assert len(set(cut.shards)) == 1
        assert cut.torn == 0


def torn_before(network: Network) -> int:
    resumed = network.coordinator.resumed
    return 0 if resumed is None else sum(loader.torn for loader in resumed.loaders)


def resume_each_other(seed: int, runs: int = 4) -> int:
    """Let runs resume each other. Return the number of cuts."""
    draws = random.Random(seed)
    cut: JobCut | None = None
    used: Counter[tuple[int, int]] = Counter()
    cuts = 0
    script = SCRIPTS[seed % 3 == 0]
    for run in range(runs):
        sync = draws.choice(MODELS)
        workers = draws.randint(1, 3)
        servers = 2 if "|" in sync else draws.randint(1, 2)
        if "drop-stragglers" in sync:
            workers = 3
        # A script that goes on after it has added parameters may have them from the beginning, also those that the
        # earlier run was about to add.
        first_model = draws.randrange(len(network_processes.MODELS)) if cut is not None else 0
        network = Network(
            sync,
            workers=workers,
            servers=servers,
            most=4,
            script=script,
            resumed=cut,
            first_model=first_model if "extend 1" in script else 0,
            used=used,
            seed=seed,
        )
        moments = {draws.randrange(40, 500) for _ in range(0 if run == runs - 1 else 3)}
        network.run(Chooser(f"{seed} {run}", moments))
        network.check_end()
        assert "its model differs" not in network.over, network.over
        network.coordinator.data.validate()
        cuts += len(network.cuts)
        for each, whole, some in network.cuts:
            check(each, network, whole, some)
        if network.cuts:
            written, whole, _ = draws.choice(network.cuts)
            used = network.used_by(whole)
            cut = msgspec.json.decode(msgspec.json.encode(written), type=JobCut)
        if network.cuts or run == runs - 1 or network.over:
            continue
        return cuts  # it has ended before it was cut
    return cuts


@pytest.mark.parametrize(
    "seeds",
    [range(FEW), *thorough(*(range(first, first + SEEDS) for first in range(0, 25 * SEEDS, SEEDS)))],
    ids=str,
)
def test_runs_resume_each_other_on_a_hostile_network(seeds: range) -> None:
    assert sum(map(resume_each_other, seeds)) > len(seeds) / 2


def cut_after(network: Network, count: int) -> JobCut:
    """Cut a run after a number of steps, and return the cut."""
    choose = Random(count)
    for _ in range(count):
        network.take(choose(network, network.steps()))
    network.take(("cut",))
    while not network.cuts:
        network.take(choose(network, network.steps()))
    return network.cuts[0][0]


def test_parameters_that_an_earlier_run_has_added_come_from_the_cut() -> None:
    script = ("push", "extend 1", "push", "extend 2", *["push"] * 9, "finish")
    cut = cut_after(Network("bsp", workers=2, servers=2, script=script), 150)
    assert cut.models == tuple(network_processes.MODELS)
    network = Network("asp", workers=1, servers=1, script=script, resumed=cut)
    again = cut_after(network, 60)
    assert again.models == tuple(network_processes.MODELS)
    assert again.number > cut.number
    network.run(Random(0))
    network.check_end()
    assert not any("InitialWeights" in sentence for sentence in network.told)


def test_a_changed_model_is_refused_with_the_first_difference() -> None:
    cut = cut_after(Network("bsp", workers=1, script=(*["push"] * 9, "finish")), 20)
    network = Network(
        "bsp", workers=2, resumed=msgspec.structs.replace(cut, model=network_processes.MODELS[1])
    )
    network.run(Random(0))
    assert network.over == (
        "worker 0: its model differs from the model of the run that is resumed: 1 parameters instead of 2"
    )
