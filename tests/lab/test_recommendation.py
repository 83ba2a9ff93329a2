"""What is recommended, and why, from the figures of simulations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from paceline.core.lease import BatchSizing
from paceline.lab.advice import advise
from paceline.lab.clusters import Changes
from paceline.lab.comparison import show_recommendation
from paceline.lab.ranking import rank
from paceline.lab.recommendation import (
    Candidate,
    Recommendation,
    WireVariant,
    candidates_of,
    recommend,
    wire_variants,
)
from paceline.look.tables import Figures
from paceline.sim import Cluster, Dataset, Uniform, simulate
from paceline.sync.model import EFFECTS
from paceline.trace.findings import DISTRIBUTE

BSP = Candidate(sync="bsp", times=1.0, waiting_share=0.4)
BALANCED = Candidate(sync="bsp", batch="balanced", times=2.31)
BACKUP = Candidate(sync="drop-stragglers:quorum=3", effect="fresh", times=2.0)
ASP = Candidate(sync="asp", effect="stale", times=2.42)
STALE, FRESH = EFFECTS["stale"], EFFECTS["fresh"]
MORE = WireVariant(batch="equal", servers=2, times=2.0)
FEWER = WireVariant(batch="equal", servers=1, batches_per_push=2, times=1.6)
CODED = WireVariant(batch="equal", servers=1, wire="int8", reason="because", times=2.4)


def advised(
    *candidates: Candidate, variants: tuple[WireVariant, ...] = (), steps: str = ""
) -> Recommendation:
    found = recommend(candidates, variants, servers=1, check=lambda sync: f"check {sync}", steps=steps)
    assert found is not None
    return found


def on_the_wire(candidate: Candidate, share: float) -> Candidate:
    return msgspec.structs.replace(candidate, transfer_share=share)


def test_what_leaves_the_result_as_it_is_comes_first() -> None:
    found = advised(ASP, BALANCED, BACKUP, BSP)
    assert found.text == (
        "Recommended: bsp with balanced batches: 2.3 times as fast as bsp, and the result of training stays the same."
    )
    assert (found.sync, found.batch, found.times, found.effect, found.check) == (
        *("bsp", "balanced", 2.31, "exact", ""),
    )


def test_a_model_that_is_faster_still_is_named_with_what_it_does_to_the_result() -> None:
    found = advised(BSP, msgspec.structs.replace(BALANCED, times=1.3), ASP)
    assert found.text == (
        "Recommended: bsp with balanced batches: 1.3 times as fast as bsp, and the result of training stays the "
        "same. "
        f"Or asp: 2.4 times as fast as bsp; {STALE}: check the accuracy first."
    )
    assert (found.sync, found.batch, found.check) == ("bsp", "balanced", "check asp")


def test_a_model_without_stale_gradients_is_preferred_unless_it_is_much_slower() -> None:
    found = advised(BSP, msgspec.structs.replace(ASP, times=2.1), BACKUP)
    assert found.text == (
        f"Recommended: drop-stragglers:quorum=3: 2.0 times as fast as bsp; {FRESH}: check the accuracy first."
    )
    assert (found.effect, found.check) == ("fresh", "check drop-stragglers:quorum=3")
    assert advised(BSP, ASP, BACKUP).sync == "asp"
    slower = (msgspec.structs.replace(BACKUP, times=1.5), msgspec.structs.replace(ASP, times=1.8))
    assert advised(BSP, *slower).sync == BACKUP.sync, "staleness may cost more than is saved"


def test_a_model_with_stale_gradients_that_is_not_much_faster_is_named_but_not_recommended() -> None:
    slower = msgspec.structs.replace(ASP, times=1.5)
    named = (
        f"Or asp: 1.5 times as fast as bsp; {STALE}: check the accuracy first. Below about 2 times the speed of bsp, "
        "staleness may cost more time than is saved."
    )
    found = advised(BSP, slower)
    assert found.text == f"Recommended: stay with bsp. {named}"
    assert (found.sync, found.times, found.effect, found.check) == ("bsp", 1.0, "exact", "check asp")
    assert advised(BSP, msgspec.structs.replace(BALANCED, times=1.3), slower).text.endswith(f" {named}")
    for enough in (ASP, msgspec.structs.replace(slower, measured=True)):
        found = advised(BSP, enough)
        assert found.sync == "asp"
        assert "staleness may cost" not in found.text


def test_a_difference_below_ten_percent_is_not_worth_a_change() -> None:
    close = [msgspec.structs.replace(each, times=1.09) for each in (BALANCED, BACKUP, ASP)]
    found = advised(BSP, *close)
    assert found.text == (
        "Recommended: stay with bsp. Workers wait for 40% of their time, and no other model is 10 % faster."
    )
    assert (found.sync, found.batch, found.times) == ("bsp", "equal", 1.0)


def test_if_the_wire_dominates_that_is_said_with_what_helps() -> None:
    found = advised(on_the_wire(BSP, 0.68), variants=(FEWER, MORE))
    assert found.text == (
        "Recommended: bsp with faster transfers. 68% of each iteration is on the wire: put the servers on 2 machines "
        "instead of 1 (2.0 times as fast as bsp now, with the same result), or accumulate 2 batches for each "
        "push (1.6 times as fast as bsp now, but with fewer and larger updates)."
    )
    assert (found.sync, found.servers, found.times) == ("bsp", 2, 2.0)


def test_steps_that_take_most_of_the_transfers_are_told_instead() -> None:
    steps = "The server needs 1.2 s for each step of Muon."
    found = advised(on_the_wire(BSP, 0.68), variants=(FEWER, MORE), steps=steps)
    assert found.text == (
        "Recommended: stay with bsp. Workers wait for 40% of their time, and no other model is 10 % faster. "
        + steps
    )
    assert (found.servers, found.times) == (None, 1.0)


def test_what_helps_against_transfers_is_compared_with_the_recommended_batches() -> None:
    balanced = on_the_wire(BALANCED, 0.5)
    for_balanced = msgspec.structs.replace(MORE, batch="balanced", times=4.0)
    found = advised(on_the_wire(BSP, 0.1), balanced, variants=(MORE, FEWER, for_balanced))
    assert found.text == (
        "Recommended: bsp with balanced batches: 2.3 times as fast as bsp, and the result of training stays the "
        "same. "
        "50% of each iteration is on the wire: put the servers on 2 machines instead of 1 (4.0 times as fast as bsp "
        "now, with the same result)."
    )


def test_larger_pushes_change_the_result_so_they_are_no_reason_to_leave_bsp() -> None:
    found = advised(on_the_wire(BSP, 0.5), variants=(FEWER,))
    assert found.text.startswith("Recommended: stay with bsp. ")
    assert found.text.endswith(
        " 50% of each iteration is on the wire: accumulate 2 batches for each push (1.6 times as fast as bsp "
        "now, but with fewer and larger updates)."
    )
    assert found.servers is None


def test_a_codec_is_named_first_but_is_no_model() -> None:
    found = advised(on_the_wire(BSP, 0.5), variants=(CODED, FEWER))
    assert found.text.startswith("Recommended: stay with bsp. ")
    assert (
        " 50% of each iteration is on the wire: add --wire int8, which rounds gradients and weights on their way (2.4 "
        "times as fast as bsp now; because), or accumulate "
    ) in found.text
    assert (found.times, found.servers) == (1.0, None)


def test_no_more_machines_are_recommended_than_each_doubling_is_worth() -> None:
    variants = tuple(
        WireVariant(batch="equal", servers=servers, times=times)
        for servers, times in ((8, 2.05), (2, 1.5), (4, 2.0))
    )
    assert advised(on_the_wire(BSP, 0.5), variants=variants).servers == 4


def test_without_long_transfers_nothing_is_said_about_them() -> None:
    assert "wire" not in advised(on_the_wire(BSP, 0.19), variants=(MORE, FEWER)).text


def test_a_measured_loss_replaces_the_advice_to_check_it() -> None:
    measured = msgspec.structs.replace(ASP, measured=True)
    found = advised(BSP, measured)
    assert found.text == (
        "Recommended: asp: reaches the last loss of bsp 2.4 times sooner than bsp, measured with one seed; "
        f"{STALE}."
    )
    assert found.check == ""
    found = advised(BSP, msgspec.structs.replace(measured, times=0.0))
    assert found.text.startswith("Recommended: stay with bsp. ")
    assert found.text.endswith(" asp did not reach the last loss of bsp.")


def test_a_script_that_does_not_distribute_its_data_has_to_do_that_first() -> None:
    for candidates, ends in (([BSP, ASP], DISTRIBUTE), ([BSP, BALANCED], "stays the same.")):
        found = recommend(candidates, servers=1, check=str, distributes=False)
        assert found is not None
        assert found.text.endswith(ends)


def test_without_bsp_there_is_nothing_to_compare_with() -> None:
    assert recommend([ASP], servers=1, check=str) is None


# -- from simulations ------------------------------------------------------------------------------------------

EQUAL = Cluster(compute_s=[Uniform(low=0.95, high=1.05)] * 4)
SLOW_WORKER = Cluster(compute_s=[1.0, 1.0, 1.0, 3.0])
SLOW_LINK = Cluster(compute_s=[1.0] * 4, bandwidth_bps=1e9, size_bytes=100_000_000)
MODELS = ["bsp", "asp", "elastic-bsp:lookahead=15"]


def simulated(cluster: Cluster, data: Dataset | None = None, iterations: int = 30) -> Recommendation:
    rows = rank(cluster, MODELS, iterations=iterations, data=data, balanced_bsp=True)
    variants = wire_variants(cluster, rows, seed=0, shards=None, data=data)
    found = recommend(candidates_of(rows), variants, servers=cluster.servers, check=str)
    assert found is not None
    return found


@pytest.mark.usefixtures("one_core")
def test_on_equal_machines_bsp_is_recommended() -> None:
    assert simulated(EQUAL).text.startswith("Recommended: stay with bsp. Workers wait for ")


@pytest.mark.parametrize("data", [None, Dataset(samples=12_800, batch_size=32)], ids=["no data", "data"])
@pytest.mark.usefixtures("one_core")
def test_with_one_slow_machine_balanced_batches_are_recommended(data: Dataset | None) -> None:
    found = simulated(SLOW_WORKER, data, iterations=100)
    assert found.text == (
        f"Recommended: bsp with balanced batches: {found.times:.1f} times as fast as bsp, and the result of training "
        "stays the same."
    )
    assert 2.2 < found.times < 2.5  # at most 2.5: the speeds are 1, 1, 1 and 1/3, and bsp uses 1/3 of each


@pytest.mark.usefixtures("one_core")
def test_on_a_slow_link_the_figures_are_those_of_simulations_with_more_servers_and_larger_pushes() -> None:
    found = simulated(SLOW_LINK)
    # A push and a pull of 0.8 Gbit take 6.4 s if four workers share one link of 1 Gbit/s, and 1.6 s with four.
    assert found.servers == 4
    assert found.times == pytest.approx(7.4 / 2.6, rel=0.02)
    assert found.text.startswith(
        "Recommended: bsp with faster transfers. 86% of each iteration is on the wire: "
    )
    assert (
        "accumulate 4 batches for each push (2.8 times" in found.text
    )  # 4 x 7.4 s instead of 4 x 1 s + 6.4 s
    assert "add --wire int8, " in found.text
    assert "(2.8 times as fast as bsp now; int8 cost " in found.text  # 1 s + 6.4 s x 260 / 1024


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(
    ("optimizer", "wire", "coded", "times"),
    [
        ("SGD", "float32", "int4", 7.4 / (1 + 6.4 * 144 / 1024)),
        ("mine:Lion", "float32", "int8", 7.4 / (1 + 6.4 * 260 / 1024)),
        ("SGD", "int8", "int4", (1 + 6.4 * 260 / 1024) / (1 + 6.4 * 144 / 1024)),
        ("mine:Lion", "int8", "", 0.0),
        ("SGD", "int4", "", 0.0),
    ],
)
def test_the_codec_that_is_simulated_is_that_for_the_optimizer_of_the_run(
    optimizer: str, wire: str, coded: str, times: float, tmp_path: Path
) -> None:
    made = replace(SLOW_LINK, optimizers=(optimizer,))
    simulate(made, "bsp", 30, run_dir=tmp_path / "run")
    recommendation = advise(
        tmp_path / "run", ["bsp"], changes=Changes(recorded_bandwidth="1gbit"), wire=wire
    ).recommendation
    assert recommendation is not None
    assert (f"add --wire {coded}, " in recommendation.text) == bool(coded)
    if coded:
        assert f"({times:.1f} times as fast as bsp now; {coded} cost no measurable" in recommendation.text
        assert recommendation.text.count(optimizer.rpartition(":")[2]) == 1


@pytest.mark.usefixtures("one_core")
def test_the_number_of_servers_is_not_changed_if_recorded_times_do_not_tell_what_that_would_do() -> None:
    late = Cluster(compute_s=[1.0] * 2, latency_s=1.0)
    rows = rank(late, ["bsp"])
    variants = wire_variants(late, rows, seed=0, shards=None, data=None)
    assert {(each.servers, each.batches_per_push) for each in variants} == {(1, 2), (1, 4)}
    assert variants[0].times == pytest.approx(2 * 3 / 4, rel=0.01)


@pytest.mark.parametrize("batch", ["equal", "balanced"])
@pytest.mark.usefixtures("one_core")
def test_balanced_batches_without_data_are_as_fast_as_with_data(batch: BatchSizing) -> None:
    data = Dataset(samples=64 * 4 * 100, batch_size=64)
    [without] = [row for row in rank(SLOW_WORKER, ["bsp"], balanced_bsp=True) if row.batch == batch]
    [with_data] = [row for row in rank(SLOW_WORKER, ["bsp"], data=data) if row.batch == batch]
    assert without.gradients_per_s == pytest.approx(with_data.samples_per_s / 64, rel=0.05)
    assert (without.samples_per_s, without.epoch_s) == (0.0, None)


@pytest.mark.usefixtures("one_core")
def test_models_that_do_not_train_are_no_candidates() -> None:
    rows = rank(EQUAL, ["bsp", "asp"], iterations=5)
    broken: list[Figures] = [msgspec.structs.replace(row, unapplied="nothing was applied") for row in rows]
    assert candidates_of(broken) == []
    assert [each.name for each in candidates_of([row for row in rows if row.sync == "bsp"])] == ["bsp"]


def test_without_results_for_bsp_that_is_said() -> None:
    console = Console(width=200, record=True)
    show_recommendation(None, console)
    assert "No model is recommended, because there are no results for bsp" in console.export_text()


def test_a_command_is_printed_on_a_line_of_its_own() -> None:
    console = Console(width=40, record=True, force_terminal=True)
    found = advised(BSP, ASP)
    show_recommendation(msgspec.structs.replace(found, check="paceline simulate " + "x" * 50), console)
    lines = console.export_text().splitlines()
    assert f"  paceline simulate {'x' * 50}" in lines
    assert all(len(line) <= 40 for line in lines if "simulate" not in line)


@pytest.mark.usefixtures("one_core")
@pytest.mark.thorough
def test_the_tutorial_quotes_what_is_recommended_for_its_cluster() -> None:
    root = Path(__file__).parents[2]
    cluster = Cluster.from_toml(root / "examples" / "cluster.toml")
    rows = rank(cluster, ["bsp", "asp"], balanced_bsp=True)
    variants = wire_variants(cluster, rows, seed=0, shards=None, data=None)
    found = recommend(candidates_of(rows), variants, servers=cluster.servers, check=str)
    assert found is not None
    assert found.text in " ".join(
        (root / "docs" / "how-to" / "simulate.md").read_text().replace("\n> ", "\n").split()
    )
