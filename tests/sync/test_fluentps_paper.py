"""BSP, ASP, SSP and PSSP by the paper: Yao et al., "FluentPS: a parameter server design with low-frequency
synchronization for distributed deep learning", CLUSTER 2019, section III. Each test names what it holds the code
against.

The paper's words: a worker's *progress* is the index of the iteration that it has just pushed, from 0; *V_train* is
the overall progress at one shard; *Count[i]* the number of workers that have pushed iteration i.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from paceline.sim import Cluster, Uniform, simulate
from paceline.sync import ASP, BSP, PSSP, SSP, SyncModel
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush
from paceline.sync.conditions import ConditionMachine
from paceline.sync.events import AnyEvent, PullRequested, PushReceived, WorkerJoined
from paceline.testing.promises import CheckedShard
from paceline.trace import Trace
from tests.support.marks import thorough

PullCondition = Callable[[int, int], bool]
"""(progress, V_train) -> answer the pull now."""

# Table III, column "Pull condition", verbatim; the push condition of all three rows is Count[V_train] == N.
TABLE_III: list[tuple[SyncModel, PullCondition]] = [
    (BSP(), lambda progress, v_train: progress < v_train),
    (ASP(), lambda progress, v_train: progress < v_train + math.inf),
    (SSP(staleness=1), lambda progress, v_train: progress < v_train + 1),
    (SSP(staleness=2), lambda progress, v_train: progress < v_train + 2),
    (SSP(staleness=3), lambda progress, v_train: progress < v_train + 3),
]

every_row = pytest.mark.parametrize(
    ("sync", "condition"), TABLE_III, ids=[str(sync) for sync, _ in TABLE_III]
)


class AlgorithmOne:
    """Algorithm 1's parameter server, line by line, with the soft barrier: section III-C, "lazy execution uses
    progress ... as the index ... of the lazy pull buffer that records these DPRs, while the soft barrier uses
    V_train"."""

    def __init__(self, workers: int, condition: PullCondition) -> None:
        self.n = workers
        self.condition = condition
        self.v_train = 0  # line 1
        self.count: dict[int, int] = defaultdict(int)
        self.callbacks: dict[int, list[int]] = defaultdict(list)

    def pull_handler(self, worker: int, progress: int) -> list[int]:
        """Lines 2 to 13: who is answered."""
        if self.condition(progress, self.v_train):
            return [worker]
        self.callbacks[self.v_train].append(worker)
        return []

    def push_handler(self, progress: int) -> list[int]:
        """Lines 14 to 25: who is answered. The condition is tested in a loop, since one event may complete several
        rounds."""
        answered: list[int] = []
        self.count[progress] += 1  # line 16
        while self.count[self.v_train] >= self.n:  # line 17
            answered += self.callbacks.pop(self.v_train, [])  # lines 18 to 21
            self.v_train += 1  # line 22
        return answered


def begin(sync: SyncModel, workers: int) -> tuple[CheckedShard, ConditionMachine]:
    machine = sync.at_shard()
    assert isinstance(machine, ConditionMachine)
    checked = CheckedShard(machine)
    for _ in range(workers):
        checked.tell(checked.legal.join())
    return checked, machine


def answered(actions: list[AnyAction]) -> list[int]:
    return [action.worker for action in actions if isinstance(action, AnswerPull)]


def iterate(checked: CheckedShard, worker: int) -> list[int]:
    """One iteration, Algorithm 1's worker, lines 4 and 5: sPush(key, g, i), then sPull(key, &w, i)."""
    return answered(checked.tell(checked.legal.push(worker)) + checked.tell(checked.legal.pull(worker)))


@every_row
@pytest.mark.parametrize("seed", range(5))
def test_table_iii_the_pull_condition_decides_when_a_pull_arrives(
    sync: SyncModel, condition: PullCondition, seed: int
) -> None:
    checked, machine = begin(sync, 3)
    draw = random.Random(seed)
    asked = 0
    for _ in range(120):
        movable = [worker for worker in range(3) if worker not in checked.legal.waiting]
        worker = draw.choice(movable)
        progress = checked.legal.label[worker]
        checked.tell(checked.legal.push(worker))
        holds = condition(progress, machine.v_train)
        assert (answered(checked.tell(checked.legal.pull(worker))) == [worker]) == holds
        asked += not holds
    assert (asked > 0) == (not isinstance(sync, ASP))


@every_row
def test_table_iii_the_push_condition_holds_when_all_n_have_pushed_the_round(
    sync: SyncModel, condition: PullCondition
) -> None:
    checked, machine = begin(sync, 3)
    for rnd in range(4):
        for count, worker in enumerate([2, 0, 1], start=1):
            assert machine.v_train == rnd
            checked.tell(checked.legal.push(worker))
            assert machine.v_train == rnd + (count == 3)
            checked.tell(checked.legal.pull(worker))


@every_row
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_algorithm_1_line_by_line(sync: SyncModel, condition: PullCondition, workers: int, seed: int) -> None:
    checked, machine = begin(sync, workers)
    paper = AlgorithmOne(workers, condition)
    draw = random.Random(seed)
    pushed: list[int] = []  # workers whose pull has yet to come
    for _ in range(200):
        computing = checked.legal.in_phase("computing")
        if pushed and (not computing or draw.random() < 0.5):
            worker = pushed.pop(draw.randrange(len(pushed)))
            progress = checked.legal.label[worker] - 1
            assert answered(checked.tell(checked.legal.pull(worker))) == paper.pull_handler(worker, progress)
        else:
            worker = draw.choice(computing)
            progress = checked.legal.label[worker]
            assert answered(checked.tell(checked.legal.push(worker))) == paper.push_handler(progress)
            pushed.append(worker)
        assert machine.v_train == paper.v_train


def test_algorithm_1_line_15_each_push_is_applied_before_the_push_condition_is_tested() -> None:
    checked, _ = begin(SSP(staleness=0), 2)
    iterate(checked, 0)
    actions = checked.tell(checked.legal.push(1))
    assert actions == [ApplyPush(1, 0), AnswerPull(0, 0)]


def test_section_ii_bsp_aggregates_the_gradients_of_a_round() -> None:
    """Table III's first row answers nobody before the round is whole; its gradients are applied as one mean."""
    checked, _ = begin(BSP(), 3)
    assert [type(action) for worker in range(3) for action in checked.tell(checked.legal.push(worker))] == [
        HoldPush,
        HoldPush,
        HoldPush,
        ApplyMean,
    ]


def test_section_iii_b_the_faster_workers_could_avoid_reading_stale_parameters() -> None:
    """ "With proper pull condition, the faster workers could avoid reading stale parameters with some absent
    gradients": under BSP whoever is answered reads every gradient of its round, under SSP(s) all but the last s."""
    for staleness in (0, 1, 3):
        checked, machine = begin(SSP(staleness=staleness), 2)
        for _ in range(20):
            for worker in iterate(checked, 0) if 0 not in checked.legal.waiting else iterate(checked, 1):
                assert checked.legal.label[worker] - machine.v_train <= staleness


def figure_3() -> tuple[CheckedShard, ConditionMachine]:
    """Fig. 3's workers W0, W1, W2 at the moment when W0 asks for w_4 with only g_0 of the slowest, W2, applied: g_1,
    g_2 and g_3 of W2 are absent. Its steps are those of s = 2, the staleness that delays this pull by Table III."""
    checked, machine = begin(SSP(staleness=2), 3)
    for worker in (0, 1, 2):
        assert iterate(checked, worker) == [worker]
    assert iterate(checked, 0) == [0]
    assert iterate(checked, 0) == [0]
    assert iterate(checked, 1) == [1]
    assert machine.v_train == 1
    return checked, machine


def test_fig_3a_before_the_slowest_pushes_g_1_the_fast_worker_cannot_pull_w_4() -> None:
    """ "Before the slowest worker W_2 pushes g_1, the fast worker W_0 cannot pull w_4 because g_1, g_2 and g_3 are
    absent"."""
    checked, _ = figure_3()
    checked.tell(checked.legal.push(0))
    assert checked.legal.label[0] - 1 == 3  # W0 has pushed g_3
    assert checked.tell(checked.legal.pull(0)) == []


def test_fig_3a_the_soft_barrier_finishes_after_one_iteration_of_the_slowest() -> None:
    """ "soft barrier (see Figure 3(a)): after one iteration delay and g_1 is updated to servers, the barrier finishes
    and W_0 reads w_4 without g_2 and g_3 (i.e., stale parameters)"."""
    checked, machine = figure_3()
    iterate(checked, 0)
    assert checked.tell(checked.legal.push(2)) == [ApplyPush(2, 1), AnswerPull(0, 3)]
    assert machine.v_train == 2  # g_2 and g_3 of W2 are still absent


def test_fig_3a_the_soft_barrier_appears_again_at_the_next_iteration() -> None:
    """Section II-B: "since the slowest worker is still following s-1 iterations behind the fast workers, it might
    repeatedly satisfy the SSP condition and the soft barrier will appear frequently"."""
    checked, _ = figure_3()
    iterate(checked, 0)
    assert iterate(checked, 1) == [1]
    for _ in range(5):
        assert 0 in iterate(checked, 2)  # W2 releases W0,
        assert iterate(checked, 0) == []  # which pauses again after one iteration
        if 1 not in checked.legal.waiting:
            iterate(checked, 1)


def test_section_iii_b_table_iii_with_s_3_would_answer_the_pull_of_fig_3() -> None:
    """progress = 3 < V_train + s = 1 + 3: by Table III the pull that Fig. 3 delays is answered at s = 3."""
    checked, machine = begin(SSP(staleness=3), 3)
    for worker in (0, 1, 2):
        iterate(checked, worker)
    for _ in range(2):
        iterate(checked, 0)
    assert machine.v_train == 1
    assert iterate(checked, 0) == [0]


def test_fig_3b_lazy_execution_answers_when_the_slowest_has_caught_up() -> None:
    """ "W_0 needs to wait until g_1, g_2, and g_3 are pushed to the servers (i.e., three iterations delay)"."""
    checked, machine = begin(SSP(staleness=2, execution="lazy"), 3)
    for worker in (0, 1, 2):
        iterate(checked, worker)
    iterate(checked, 0)
    iterate(checked, 0)
    for _ in range(3):
        iterate(checked, 1)
    assert iterate(checked, 0) == []
    assert iterate(checked, 2) == [2]
    assert iterate(checked, 2) == [2]
    checked.tell(checked.legal.push(2))  # g_3 of W2, and all of W1's are there
    assert machine.v_train == 4
    assert 0 not in checked.legal.waiting


def first_delayed_gaps(sync: PSSP, shards: int, workers: int) -> list[int]:
    """The value of k at which each worker is first delayed at some shard, while one worker more never pushes."""
    machines = [sync.at_shard(seed=5, shard=shard) for shard in range(shards)]
    for machine in machines:
        for worker in range(workers + 1):
            machine.handle(WorkerJoined(now_ticks=0, worker=worker))
    gaps = []
    for worker in range(1, workers + 1):
        iteration = -1
        goes_on = True
        while goes_on:
            iteration += 1
            for machine in machines:
                machine.handle(PushReceived(now_ticks=0, worker=worker, iteration=iteration))
                pull = PullRequested(now_ticks=0, worker=worker, iteration=iteration)
                goes_on = answered(machine.handle(pull)) == [worker] and goes_on
        gaps.append(iteration)  # its progress; V_train is 0
    return gaps


@pytest.mark.parametrize(
    ("draws", "shards", "effective"),
    [
        ("shared", 1, 0.3),
        ("per-shard", 4, 1 - 0.7**4),
        *thorough(("shared", 4, 0.3), ("per-shard", 1, 0.3)),
    ],
)
def test_theorem_1_the_first_delayed_gap_is_geometric(draws: str, shards: int, effective: float) -> None:
    """ "the SSP model whose staleness threshold is s_i (s_i >= s) at a probability of c (1 - c)^(s_i - s)"; if each
    of M shards draws by itself, with 1 - (1 - c)^M in place of c. Chi-squared, at the level of 0.1 %."""
    s, workers = 2, 10_000
    gaps = first_delayed_gaps(PSSP(staleness=s, probability=0.3, draws=draws), shards, workers)
    assert min(gaps) == s
    expected: list[float] = []
    left = float(workers)
    while left * (1 - effective) >= 5:
        expected.append(left * effective)
        left *= 1 - effective
    observed = [gaps.count(s + k) for k in range(len(expected))]
    cells = [*zip(observed, expected, strict=True), (workers - sum(observed), left)]
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    freedom = len(cells) - 1
    quantile = (
        freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    )  # Wilson and Hilferty
    assert statistic < quantile


# -- Fig. 2: three servers that run different models ---------------------------------------------------------

FIG_2 = "ssp:staleness=3|pssp:staleness=3,probability=0.5|drop-stragglers:quorum={quorum}"


def decided(trace: Trace, paper: AlgorithmOne) -> list[tuple[AnyEvent, list[int], list[int]]]:
    """Each push and pull of a trace, whom the shard has answered, and whom Algorithm 1 answers.

    A worker reports its own iteration as its progress, lines 4 and 5, whatever another server has done.
    """
    found: list[tuple[AnyEvent, list[int], list[int]]] = []
    for entry in trace.entries:
        match entry.event:
            case PushReceived(iteration=iteration, progress=told):
                assert told is None
                found.append((entry.event, answered(entry.actions), paper.push_handler(iteration)))
            case PullRequested(worker=worker, iteration=iteration):
                found.append((entry.event, answered(entry.actions), paper.pull_handler(worker, iteration)))
            case _:
                pass
    return found


def unequal(servers: int) -> Cluster:
    times = [Uniform(low=0.5, high=1.5)] * 3 + [Uniform(low=0.5, high=5.5)]
    return Cluster(compute_s=times, latency_s=Uniform(low=0.0, high=0.6), servers=servers)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_fig_2_each_server_decides_by_its_own_conditions(quorum: int, seed: int) -> None:
    """The staleness bounds of two servers hold as if the third one dropped nothing, and nobody waits at the third one
    whom Algorithm 1 with Table III's row "drop stragglers" would answer."""
    result = simulate(unequal(3), FIG_2.format(quorum=quorum), 50, seed, record=True)
    ssp, pssp, dropping, _ = result.trace
    for _, ours, papers in decided(ssp, AlgorithmOne(4, lambda progress, v_train: progress < v_train + 3)):
        assert sorted(ours) == sorted(papers)
    bounded = AlgorithmOne(4, lambda progress, v_train: progress < v_train + 3)
    for event, ours, papers in decided(pssp, bounded):
        assert {*papers} <= {*ours} or isinstance(event, PushReceived)
    waiting: dict[str, set[int]] = {"ours": set(), "paper's": set()}
    for event, ours, papers in decided(
        dropping, AlgorithmOne(quorum, lambda progress, v_train: progress < v_train)
    ):
        if isinstance(event, PullRequested):
            for each in waiting.values():
                each.add(event.worker)
        waiting["ours"] -= {*ours}
        waiting["paper's"] -= {*papers}
        assert waiting["ours"] <= waiting["paper's"]
    assert waiting == {"ours": set(), "paper's": set()}
    stale = [updates for entry in dropping.entries for _, _, updates in entry.staleness]
    assert {*stale} == {0}
    dropped = [a for entry in dropping.entries for a in entry.actions if isinstance(a, DropPush)]
    assert dropped or quorum == 3


@pytest.mark.parametrize("seed", range(5))
def test_beside_a_server_that_drops_stragglers_every_round_of_bsp_has_a_push_of_every_worker(
    seed: int,
) -> None:
    bsp, dropping, _ = simulate(unequal(2), "bsp|drop-stragglers:quorum=2", 50, seed, record=True).trace
    means = [a.pushes for entry in bsp.entries for a in entry.actions if isinstance(a, ApplyMean)]
    assert means == [tuple((worker, rnd) for worker in range(4)) for rnd in range(50)]
    assert any(isinstance(a, DropPush) for entry in dropping.entries for a in entry.actions)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_if_all_shards_drop_stragglers_a_push_misses_at_most_one_update_and_none_of_one_shard(
    shards: int,
) -> None:
    """A late worker continues from the latest round, which another shard may begin only after it has answered."""
    most = [
        simulate(unequal(shards), "drop-stragglers:quorum=3", 60, seed).measures.max_staleness
        for seed in range(8)
    ]
    assert max(most) == min(shards - 1, 1)
