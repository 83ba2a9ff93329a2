"""The ledger of the data, with the workers' feeds: each position of an epoch is used once, or the reason is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from paceline.core import loader_ledger
from paceline.core.coordinator import Coordinator
from paceline.core.data_feed import DataFeed
from paceline.core.data_ledger import DataLedger
from paceline.core.job_cut import EpochCut, LoaderCut, WorkerTimes
from paceline.core.lease import Batch, DataOrder, Lease, single, split_rest
from paceline.core.messages import DataGranted, DataRequested, WorkerFinished
from paceline.core.requests import Request, Send, server_peer, worker_peer
from paceline.errors import ConfigurationError, ProtocolError
from paceline.sync.schedule import read_schedule
from tests.support.marks import thorough


@dataclass
class Life:
    """A worker of a job with one loader, which pushes after each batch."""

    index: int
    speed: float
    feed: DataFeed = field(default_factory=DataFeed)
    epoch: int = -1
    free_s: float = 0.0
    drawn: int = 0
    empty: int = 0


class Job:
    """A ledger, and workers that use up its data in virtual time. A worker that is lost may leave torn pushes."""

    def __init__(
        self, speeds: list[float], *, lockstep: bool = False, resumed: Sequence[LoaderCut] = ()
    ) -> None:
        self.ledger = DataLedger(resumed)
        self.lives = {w: Life(w, speed) for w, speed in enumerate(speeds)}
        self.lockstep = lockstep
        self.now_s = 0.0
        self.requests = 0

    def carry(self, life: Life, requests: list[Request]) -> None:
        for request in requests:
            assert isinstance(request, Send)
            message = request.message
            assert isinstance(message, DataRequested)
            self.requests += 1
            grant = self.ledger.request(
                life.index, message, now_s=self.now_s, live=self.lives.keys(), lockstep=self.lockstep
            )
            life.feed.handle(DataGranted(0, message.epoch, grant.leases, grant.last))
            self.ledger.validate()

    def begin(self, life: Life, epoch: int, order: DataOrder) -> None:
        life.epoch = epoch
        self.carry(life, life.feed.begin(0, "loader", epoch, order))

    def take(self, life: Life, order: DataOrder, real_size: int) -> Batch | None:
        """Take a batch as a sampler does; None at the end of the epoch."""
        while True:
            batch = life.feed.take(0)
            if batch is None:
                if life.feed.ended(0):
                    return None
                self.carry(life, life.feed.request(0))
                continue
            if not batch.size:  # a joint batch in which the worker has no part
                life.empty += 1
                continue
            if batch.least_size > real_size:
                self.carry(life, life.feed.exhaust(0, batch.epoch, real_size))
                continue
            if batch.start + batch.size > real_size:
                batch = batch._replace(size=real_size - batch.start)
                self.carry(life, life.feed.exhaust(0, batch.epoch, real_size))
                if order.drop_last:
                    continue
            life.feed.draw(0, batch.size, batch.size)
            life.drawn += 1
            return batch

    def push(self, life: Life, busy_s: float | None = None) -> None:
        self.carry(life, life.feed.push(busy_s))
        life.feed.answered()

    def leave(self, life: Life, drawn: tuple[int, int], *, early: bool) -> None:
        del self.lives[life.index]
        self.ledger.leave(life.index, [drawn], self.lives.keys(), early=early)
        self.ledger.validate()


def batches_of_each(job: Job, epoch: int, order: DataOrder, size: int) -> dict[int, list[tuple[int, ...]]]:
    """Let one worker after another take its part of an epoch; return (epoch, start, size) of its batches."""
    taken: dict[int, list[tuple[int, ...]]] = {}
    for life in job.lives.values():
        job.begin(life, epoch, order)
        taken[life.index] = []
        while (batch := job.take(life, order, size)) is not None:
            taken[life.index].append(batch[:3])
    return taken


def test_an_epoch_is_used_once_and_all_workers_end_it_within_one_batch_of_each_other() -> None:
    order = DataOrder(4003, 4, False, "dynamic", "")
    for slowest in (1.0, 3.0, 10.0):
        job = Job([1.0, 1.0, 1.0, slowest])
        ends: dict[int, float] = {}
        used = Counter[int]()
        for life in job.lives.values():
            job.begin(life, 0, order)
        while len(ends) < 4:
            drawing = [life for life in job.lives.values() if life.index not in ends]
            life = min(drawing, key=lambda life: (life.free_s, life.index))
            job.now_s = life.free_s
            if life.drawn:
                job.push(life)
            batch = job.take(life, order, 4003)
            if batch is None:
                ends[life.index] = life.free_s
                continue
            used.update(range(batch.start, batch.start + batch.size))
            life.free_s += 0.005 * life.speed
        assert used == Counter(range(4003))
        assert max(ends.values()) - min(ends.values()) <= 0.005 * slowest + 1e-9
        assert job.requests < 1000 / 2 + 50  # most leases have several batches


def test_a_static_split_gives_every_worker_its_part_of_each_joint_batch() -> None:
    order = DataOrder(37, 4, False, "auto", "")
    job = Job([1.0, 1.0, 1.0], lockstep=True)
    assert batches_of_each(job, 0, order, 37) == {
        0: [(0, 0, 4), (0, 12, 4), (0, 24, 4)],
        1: [(0, 4, 4), (0, 16, 4), (0, 28, 4)],
        2: [(0, 8, 4), (0, 20, 4), (0, 32, 4)],
    }  # the last position is left out, because it cannot be divided among three workers
    order = DataOrder(41, 4, False, "auto", "")
    taken = batches_of_each(job, 1, order, 41)
    assert [batches[-1] for batches in taken.values()] == [(1, 36, 2), (1, 38, 2), (1, 40, 1)]
    assert job.ledger.counts()["loader"].left_out == 1


@pytest.mark.parametrize("seed", [*range(120), *thorough(*range(120, 1000))])
def test_in_random_lives_every_position_is_used_once_or_torn_or_returned(seed: int) -> None:
    """Workers are lost, join, leave epochs early and have loaders that take batches in advance."""
    draw = random.Random(seed)
    size, batch = draw.randint(8, 200), draw.randint(1, 7)
    sized = draw.random() < 0.8
    split = draw.choice(["dynamic", "static", "auto"])
    lockstep = draw.random() < 0.5
    static = split == "static" or (split == "auto" and lockstep)
    balanced = sized and draw.random() < 0.5
    most = batch * draw.randint(1, 3) if draw.random() < 0.3 else None
    joint = sized and seed % 3 == 0
    order = DataOrder(size if sized else None, batch, draw.random() < 0.3, split, "", balanced, most, joint)  # type: ignore[arg-type]
    job = Job([draw.uniform(1, 4) for _ in range(draw.randint(1, 5))], lockstep=lockstep)
    used, torn = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    epochs, newcomer = 3, 10
    finished = 0
    last: dict[int, list[Batch]] = {w: [] for w in job.lives}  # drawn and not pushed
    while job.lives:
        life = min(job.lives.values(), key=lambda life: (life.free_s, life.index))
        job.now_s = life.free_s
        life.free_s += life.speed * draw.uniform(0.5, 1.5)
        if life.epoch < 0:
            job.begin(life, 0, order)
        pending = last[life.index]
        fate = draw.random()
        if fate < 0.01 and len(job.lives) > 1:  # lost, perhaps while some shards have its push
            pushed = life.drawn if draw.random() < 0.5 else life.drawn - len(pending)
            before = life.drawn - len(pending)
            for item in pending if pushed > before else ():
                torn.update((item.epoch, p) for p in range(item.start, item.start + item.size))
            job.leave(life, (before, pushed), early=True)
            if draw.random() < 0.5:
                job.lives[newcomer] = Life(newcomer, draw.uniform(1, 4), free_s=job.now_s)
                last[newcomer] = []
                newcomer += 1
            continue
        taken = None if fate < 0.02 else job.take(life, order, size)
        if taken is not None:
            assert 1 <= taken.size <= (order.most or size if balanced else batch)
            pending.append(taken)
            if draw.random() < 0.8:  # otherwise, gradients are accumulated
                job.push(life, draw.uniform(0.5, 1.5) * life.speed * sum(item.size for item in pending))
                used.update(
                    (item.epoch, p) for item in pending for p in range(item.start, item.start + item.size)
                )
                pending.clear()
        elif life.epoch + 1 < epochs:
            job.begin(life, life.epoch + 1, order)
        else:
            job.leave(life, (life.drawn - len(pending),) * 2, early=False)
            finished += 1
    counts = job.ledger.counts()["loader"]
    assert finished
    assert max((*used.values(), *torn.values()), default=1) == 1
    assert not used.keys() & torn.keys()
    assert counts.leased == 0
    assert (counts.used, counts.torn) == (used.total(), torn.total())
    if sized:
        opened = counts.total // size
        assert counts.total == opened * size
        unused = counts.left + counts.returned + counts.left_out
        assert used.total() + torn.total() + unused == counts.total
    assert all(0 <= position < size for _, position in (*used, *torn))
    if (joint or not static) and sized and not order.drop_last and counts.returned == counts.left == 0:
        assert used.total() + torn.total() == counts.total


@pytest.mark.parametrize("seed", [*range(40), *thorough(*range(40, 200))])
def test_accounts_are_exact_although_the_positions_of_all_batches_that_were_drawn_are_forgotten(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_ledger, "MOST_LEASES", 0)
    test_in_random_lives_every_position_is_used_once_or_torn_or_returned(seed)


# -- runs that resume each other --------------------------------------------------------------------------


def positions_of(leases: Sequence[Lease]) -> set[int]:
    return {
        position
        for lease in leases
        for number in range(lease.count or 0)
        for position in range(
            lease.start + number * lease.stride, lease.start + number * lease.stride + lease.batch
        )
    }


@pytest.mark.parametrize("seed", [*range(60), *thorough(*range(60, 200))])
def test_the_rest_of_an_epoch_is_the_longest_part_before_its_end_that_nobody_has_used(seed: int) -> None:
    draw = random.Random(seed)
    end, batch, workers = draw.randint(1, 60), draw.randint(1, 4), draw.randint(1, 3)
    joint = batch * workers
    rounds = end // joint
    used = [draw.randint(0, rounds) for _ in range(workers)]
    leases = [
        Lease(0, worker * batch + done * joint, batch, joint, rounds - done)
        for worker, done in enumerate(used)
        if done < rounds
    ]
    if end > rounds * joint and draw.random() < 0.5:
        leases.append(single(0, rounds * joint, end - rounds * joint))
    unused = positions_of(leases)
    begin, before = split_rest(leases, end)
    assert begin == max((position + 1 for position in range(end) if position not in unused), default=0)
    assert positions_of(before) == {position for position in unused if position < begin}


@pytest.mark.parametrize("seed", [*range(70), *thorough(*range(70, 500))])
def test_in_random_runs_that_resume_each_other_every_position_is_used_once(seed: int) -> None:
    """Each run has other workers, another model and another batch size, and is cut at a random moment."""
    draw = random.Random(seed)
    size, epochs = draw.randint(8, 200), 3
    sized, drop_last = draw.random() < 0.8, draw.random() < 0.3
    split = draw.choice(["dynamic", "static", "auto"])
    balanced = sized and draw.random() < 0.5
    used, torn = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    cut: tuple[LoaderCut, ...] = ()
    first, over = 0, False
    while not over:
        batch = draw.randint(1, 7)
        joint = sized and seed % 3 == 0
        order = DataOrder(size if sized else None, batch, drop_last, split, "", balanced, joint=joint)  # type: ignore[arg-type]
        speeds = [draw.uniform(1, 4) for _ in range(draw.randint(1, 5))]
        job = Job(speeds, lockstep=draw.random() < 0.5, resumed=cut)
        job.ledger.validate()
        job.ledger.keeps = draw.random() < 0.5
        pending: dict[int, list[Batch]] = {w: [] for w in job.lives}
        while job.lives:
            if draw.random() < 0.01:
                break
            life = min(job.lives.values(), key=lambda life: (life.free_s, life.index))
            job.now_s = life.free_s
            life.free_s += life.speed * draw.uniform(0.5, 1.5)
            if life.epoch < 0:
                job.begin(life, first, order)
            drawn = pending[life.index]
            if (taken := job.take(life, order, size)) is not None:
                drawn.append(taken)
                if draw.random() < 0.8:
                    job.push(life, draw.uniform(0.5, 1.5) * life.speed)
                    used.update(
                        (item.epoch, p) for item in drawn for p in range(item.start, item.start + item.size)
                    )
                    drawn.clear()
            elif life.epoch + 1 < epochs:
                job.begin(life, life.epoch + 1, order)
            else:
                job.leave(life, (life.drawn - len(drawn),) * 2, early=False)
        over = not job.lives
        labels: dict[int, list[tuple[int, int]]] = {}
        for worker, life in job.lives.items():
            before = life.drawn - len(pending[worker])
            reached = draw.choice([before, life.drawn])
            labels[worker] = [(before, reached)]
            for item in pending[worker] if reached > before else ():
                torn.update((item.epoch, p) for p in range(item.start, item.start + item.size))
        counts = job.ledger.counts()
        cut = job.ledger.cut(labels)
        assert job.ledger.counts() == counts
        cut = msgspec.json.decode(msgspec.json.encode(cut), type=tuple[LoaderCut, ...])
        first = min((max(life.epoch, first) for life in job.lives.values()), default=first)
        for loader in cut:
            assert (loader.used, loader.torn) == (used.total(), torn.total())
    assert max((*used.values(), *torn.values()), default=1) == 1
    assert not used.keys() & torn.keys()
    assert all(0 <= position < size for _, position in (*used, *torn))
    [loader] = cut
    returned = sum(len(positions_of([lease])) for lease in loader.returned)
    assert loader.total == loader.used + loader.torn + loader.left + loader.left_out + returned
    if sized:
        rests = sum(size - rest.begin for rest in loader.epochs)
        assert loader.total + rests == loader.opened * size
        if not drop_last and loader.left == loader.left_out == returned == rests == 0:
            assert used.total() + torn.total() == epochs * size


def test_workers_that_resume_in_lockstep_go_on_with_the_very_batches() -> None:
    order = DataOrder(41, 4, False, "auto", "")
    job = Job([1.0, 1.0, 1.0], lockstep=True)
    whole = batches_of_each(job, 0, order, 41)
    again = Job([1.0, 1.0, 1.0], lockstep=True)
    for life in again.lives.values():
        again.begin(life, 0, order)
        for _ in range(2):
            again.take(life, order, 41)
            again.push(life)
    cut = again.ledger.cut({worker: [(2, 2)] for worker in again.lives})
    assert [(rest.number, rest.begin) for rest in cut[0].epochs] == [(0, 24)]
    assert cut[0].returned == ()
    resumed = Job([1.0, 1.0, 1.0], lockstep=True, resumed=cut)
    rest = batches_of_each(resumed, 0, order, 41)
    assert rest == {worker: batches[2:] for worker, batches in whole.items()}
    fewer = Job([1.0], lockstep=True, resumed=cut)
    assert batches_of_each(fewer, 0, order, 41) == {
        0: [(0, 24, 4), (0, 28, 4), (0, 32, 4), (0, 36, 4), (0, 40, 1)]
    }


def test_epochs_before_the_rest_of_an_earlier_run_have_no_data() -> None:
    order = DataOrder(24, 4, False, "dynamic", "")
    job = Job([1.0, 2.0])
    for epoch in range(2):
        batches_of_each(job, epoch, order, 24)
        for life in job.lives.values():
            job.push(life)
    taken = []
    for life in job.lives.values():
        job.begin(life, 2, order)
        taken.append(job.take(life, order, 24))
    job.push(job.lives[1])  # so the first batch of the epoch is returned
    drawn = {worker: [(each, each) for each in life.feed.pushed] for worker, life in job.lives.items()}
    resumed = Job([1.0], resumed=job.ledger.cut(drawn))
    for epoch in range(2):
        assert batches_of_each(resumed, epoch, order, 24) == {0: []}
    [batches] = batches_of_each(resumed, 2, order, 24).values()
    assert taken[1] is not None
    assert taken[1].start > 0
    assert sorted(batches) == [(2, start, 4) for start in range(0, 24, 4) if start != taken[1].start]


def test_another_order_does_not_continue_an_epoch() -> None:
    job = Job([1.0])
    job.begin(job.lives[0], 0, DataOrder(10, 2, False, "auto", "a"))
    cut = job.ledger.cut({})
    for order, difference in (
        (DataOrder(9, 2, False, "auto", "a"), "it has 9 items instead of 10"),
        (DataOrder(10, 2, False, "auto", "b"), "its order is different"),
    ):
        resumed = Job([1.0], resumed=cut)
        with pytest.raises(
            ConfigurationError, match=f"cannot continue epoch 0: .* that is resumed: {difference}"
        ):
            resumed.begin(resumed.lives[0], 0, order)


def leases_kept(job: Job) -> int:
    """Return the number of leases in the ledger of the only loader."""
    [ledger] = job.ledger._loaders.values()
    return sum(len(account.leases) + len(account.forgotten) for account in ledger._accounts.values())


def test_the_ledger_of_a_script_that_never_pushes_stays_small_and_a_late_push_is_counted_exactly() -> None:
    draw = random.Random(0)
    epochs, size = 5, 60_001
    order = DataOrder(size, 3, False, "dynamic", "")
    job = Job([1.0, 1.7])
    first, second = job.lives.values()
    sizes: dict[int, list[int]] = {0: [], 1: []}  # worker -> sizes of the batches that it has drawn
    for epoch in range(epochs):
        for life in job.lives.values():
            job.begin(life, epoch, order)
        drawing = list(job.lives.values())
        while drawing:
            life = draw.choice(drawing)
            job.now_s += 0.001
            if (batch := job.take(life, order, size)) is None:
                drawing.remove(life)
            else:
                sizes[life.index].append(batch.size)
    assert first.drawn + second.drawn > 100_000
    assert leases_kept(job) < 2 * (loader_ledger.MOST_LEASES + 2 * epochs + 5)
    counts = job.ledger.counts()["loader"]
    assert (counts.total, counts.leased, counts.used) == (epochs * size, epochs * size, 0)
    before = first.drawn // 3  # in the middle of the batches whose positions are forgotten
    job.leave(first, (before, before + 1000), early=True)
    counts = job.ledger.counts()["loader"]
    assert counts.used == sum(sizes[0][:before])
    assert counts.torn == sum(sizes[0][before : before + 1000])
    assert counts.leased == sum(sizes[1])
    assert counts.returned + counts.left == sum(sizes[0][before + 1000 :])
    assert counts.returned >= loader_ledger.MOST_LEASES  # the last ones are returned
    job.leave(second, (second.drawn, second.drawn), early=False)
    assert job.ledger.counts()["loader"].used == sum(sizes[0][:before]) + sum(sizes[1])
    assert leases_kept(job) == 0


def test_orders_that_differ_are_refused() -> None:
    job = Job([1.0, 1.0])
    job.begin(job.lives[0], 0, DataOrder(10, 2, False, "auto", "a"))
    with pytest.raises(ConfigurationError, match="worker 1's loader differs from worker 0's: its order"):
        job.begin(job.lives[1], 0, DataOrder(10, 2, False, "auto", "b"))
    with pytest.raises(ConfigurationError, match="it has 9 items instead of 10"):
        job.begin(job.lives[1], 0, DataOrder(9, 2, False, "auto", "a"))
    with pytest.raises(ConfigurationError, match="its drop_last is True instead of False"):
        job.begin(job.lives[1], 0, DataOrder(10, 2, True, "auto", "a"))
    with pytest.raises(ConfigurationError, match="its max_batch is 8 instead of None"):
        job.begin(job.lives[1], 0, DataOrder(10, 2, False, "auto", "a", most=8))
    job.begin(job.lives[1], 0, DataOrder(10, 3, False, "auto", "a"))
    lockstep = Job([1.0, 1.0], lockstep=True)
    lockstep.begin(lockstep.lives[0], 0, DataOrder(10, 2, False, "auto", "a"))
    with pytest.raises(ConfigurationError, match="its batch size is 3 instead of 2"):
        lockstep.begin(lockstep.lives[1], 0, DataOrder(10, 3, False, "auto", "a"))


def test_an_earlier_epoch_is_refused() -> None:
    job = Job([1.0])
    order = DataOrder(10, 2, False, "auto", "a")
    job.begin(job.lives[0], 1, order)
    with pytest.raises(ProtocolError, match="requests data of epoch 0, after data of epoch 1"):
        job.begin(job.lives[0], 0, order)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"name": "b"}, "for loader 0 under another name: 'b'"),
        ({"drawn": 1}, "has drawn 1 batches and pushed 2, expected at least 2"),
        ({"committed": 1}, "has drawn 2 batches and pushed 1, expected at least 2"),
        ({"end": (0, 2**53)}, "reports the end of an order whose size is known"),
    ],
)
def test_a_request_that_contradicts_an_earlier_one_is_refused(second: dict[str, Any], message: str) -> None:
    ledger = DataLedger()
    request = DataRequested(0, "a", 0, DataOrder(100, 2, False, "dynamic", ""), drawn=2, committed=2)
    ledger.request(0, request, now_s=0.0, live={0}, lockstep=False)
    counts = ledger.counts()
    with pytest.raises(ProtocolError, match=message):
        ledger.request(0, msgspec.structs.replace(request, **second), now_s=0.0, live={0}, lockstep=False)
    assert ledger.counts() == counts


def test_a_refused_request_opens_no_account() -> None:
    ledger = DataLedger()
    request = DataRequested(0, "a", 0, DataOrder(100, 2, False, "dynamic", ""), drawn=1, committed=2)
    with pytest.raises(ProtocolError, match="no more than it has drawn"):
        ledger.request(0, request, now_s=0.0, live={0}, lockstep=False)
    assert ledger.counts() == {}
    assert not ledger.has_leases(0)


class Office:
    """A coordinator of two workers that train with ASP and one server."""

    def __init__(self, *, server: bool) -> None:
        self.core = Coordinator(read_schedule("asp"), workers=2, servers=1, shards=1)
        for worker in range(2):
            self.core.connected(worker_peer(worker), 0)
        if server:
            self.core.connected(server_peer(0), 0)

    def request(self, worker: int, epoch: int, size: int) -> DataGranted:
        request = DataRequested(0, "a", epoch, DataOrder(size, 4, False, "dynamic", ""), 0, 0)
        [answer] = self.core.handle(worker_peer(worker), request, 0)
        assert isinstance(answer, Send)
        assert isinstance(answer.message, DataGranted)
        return answer.message


def test_a_worker_that_is_lost_before_the_servers_connect_returns_its_data() -> None:
    office = Office(server=False)
    leases = office.request(0, 0, 8).leases
    office.core.disconnected(worker_peer(0), 0)
    assert office.request(1, 0, 8).leases == leases


@pytest.mark.parametrize("early", [True, False])
def test_a_worker_that_leaves_early_returns_its_data_to_later_epochs(early: bool) -> None:
    office = Office(server=True)
    leases = office.request(0, 0, 8).leases
    later = office.request(1, 1, 4).leases  # worker 1 is in the next epoch already
    office.core.handle(worker_peer(0), WorkerFinished((), early), 0)
    assert office.request(1, 1, 4).leases == (leases if early else ())
    assert later == (Lease(1, 0, 4, 4, 1),)


def test_a_worker_that_was_lost_without_data_may_begin_again() -> None:
    office = Office(server=True)
    office.request(0, 3, 0)
    office.core.disconnected(worker_peer(0), 0)
    office.core.admit(0, 0)
    assert office.request(0, 0, 0).last


def test_an_epoch_of_astronomic_size_is_returned_and_dealt_without_listing_it() -> None:
    order = DataOrder(10**10, 4, False, "static", "")
    job = Job([1.0, 1.0, 1.0])
    for life in list(job.lives.values()):
        job.begin(life, 0, order)
    job.take(job.lives[0], order, order.size or 0)
    job.leave(job.lives[0], (1, 1), early=True)
    assert job.ledger.counts()["loader"].returned > 3 * 10**9
    for life in job.lives.values():
        job.begin(life, 1, order)
    counts = job.ledger.counts()["loader"]
    assert counts.returned < 2
    assert counts.leased > 10**10


def test_the_end_of_an_order_may_be_found_in_a_returned_batch_of_an_epoch_that_has_ended() -> None:
    order = DataOrder(None, 5, True, "dynamic", "")
    job = Job([1.0, 1.0])
    first, second = job.lives.values()
    job.begin(first, 0, order)
    for _ in range(2):
        job.take(first, order, 13)
        job.now_s += 1.0
        job.push(first)
    job.begin(second, 0, order)
    assert job.take(second, order, 13) is None
    job.leave(first, (2, 2), early=True)  # returns the batch of positions 10 to 14
    job.begin(second, 1, order)
    assert job.take(second, order, 13) == Batch(1, 0, 5, 1)
    job.now_s += 1.0
    job.push(second)
    assert job.take(second, order, 13) == Batch(1, 5, 5, 6)
    job.leave(second, (2, 2), early=False)
    counts = job.ledger.counts()["loader"]
    assert (counts.total - counts.left, counts.used, counts.left_out) == (23, 20, 3)


def test_the_end_of_an_order_ends_no_other_returned_batch_that_the_worker_has() -> None:
    """Both returned batches come in one grant: first the batch in which the order ends, then an earlier batch."""
    order, size = DataOrder(None, 4, False, "dynamic", ""), 22
    job = Job([1.0, 1.0, 1.0])
    last, middle, first = job.lives.values()
    used = Counter[int]()
    for life in (first, middle, last):
        job.begin(life, 0, order)
    for life, now_s in ((last, 0.1), (middle, 0.3), (last, 0.31), (last, 0.32), *[(last, 0.4)] * 3):
        if now_s == 0.31:
            job.leave(first, (0, 0), early=True)
            job.leave(middle, (1, 1), early=True)
        job.now_s = now_s
        if (batch := job.take(life, order, size)) is not None:
            used.update(range(batch.start, batch.start + batch.size))
            job.push(life)
    job.leave(last, (last.drawn, last.drawn), early=False)
    counts = job.ledger.counts()["loader"]
    assert used == Counter(range(size))
    assert (counts.used, counts.left, counts.returned) == (size, 0, 0)


def test_returned_batches_that_are_too_small_for_a_worker_are_left_out_at_once() -> None:
    job = Job([1.0, 1.0])
    job.begin(job.lives[0], 0, DataOrder(10**10, 2, True, "static", ""))
    job.leave(job.lives[0], (0, 0), early=True)
    job.begin(job.lives[1], 1, DataOrder(10**10, 4, True, "dynamic", ""))
    counts = job.ledger.counts()["loader"]
    assert (counts.returned, counts.left_out, counts.leased) == (0, 5 * 10**9, 4)


@pytest.mark.parametrize("size", range(60, 76))
def test_no_balanced_batch_is_smaller_than_the_minimum(size: int) -> None:
    """Not even the last batch of an epoch, or what is left of a batch that another worker has returned."""
    order = DataOrder(size, 5, False, "dynamic", "", balanced=True)
    job = Job([1.0, 1.0, 1.0])
    for life in job.lives.values():
        life.feed.least = 2
        job.begin(life, 0, order)
    job.leave(job.lives[0], (0, 0), early=True)
    sizes = []
    while job.lives:
        for life in list(job.lives.values()):
            job.now_s += 0.01
            if (batch := job.take(life, order, size)) is None:
                job.leave(life, (life.drawn, life.drawn), early=False)
                continue
            sizes.append(batch.size)
            job.push(life, (1.0 + 2 * life.index) * batch.size)
    counts = job.ledger.counts()["loader"]
    assert min(sizes) >= 2
    assert sum(sizes) == counts.used
    assert counts.used + counts.left_out == size


def test_no_balanced_batch_that_is_dealt_anew_is_smaller_than_the_minimum() -> None:
    """Three workers cannot divide a returned batch of 4 positions in parts of two, so the batch waits."""
    order = DataOrder(48, 4, False, "static", "", balanced=True)
    job = Job([1.0, 1.0, 1.0, 1.0])
    for life in job.lives.values():
        life.feed.least = 2
        job.begin(life, 0, order)
    job.leave(job.lives[3], (0, 0), early=True)
    assert job.ledger.counts()["loader"].returned == 4
    taken = batches_of_each(job, 1, order, 48)
    assert min(size for batches in taken.values() for _, _, size in batches) >= 2
    assert job.ledger.counts()["loader"].returned == 4


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((), [6, 19, 19, 20]),
        ((3,), [6, 19, 19, 20]),
        ((0, 3), [6, 19, 19, 20]),
        ((0, 1, 2, 3), [6, 18, 20, 20]),
    ],
)
def test_balanced_batches_follow_the_speeds_and_keep_the_joint_batch(
    devices: tuple[int, ...], expected: list[int], lockstep: bool
) -> None:
    """On devices, sizes come in steps, which are 2 here. The others take what remains of the joint batch."""
    order = DataOrder(64 * 100, 16, False, "auto", "", balanced=True)
    job = Job([1.0, 1.0, 1.0, 3.0], lockstep=lockstep)
    for device in devices:
        job.lives[device].feed.accelerated = True
    sizes: dict[int, list[Batch]] = {w: [] for w in job.lives}
    for life in job.lives.values():
        job.begin(life, 0, order)
    ended: set[int] = set()
    while len(ended) < 4:
        drawing = [life for life in job.lives.values() if life.index not in ended]
        life = min(drawing, key=lambda life: (life.drawn if lockstep else life.free_s, life.index))
        job.now_s = life.free_s
        if life.drawn:
            job.push(life, life.speed * 0.003 * sizes[life.index][-1].size)
        batch = job.take(life, order, 6400)
        if batch is None:
            ended.add(life.index)
            continue
        sizes[life.index].append(batch)
        life.free_s += life.speed * 0.003 * batch.size
    used = Counter(p for batches in sizes.values() for b in batches for p in range(b.start, b.start + b.size))
    assert used == Counter(range(6400))
    last = [batches[-2].size for batches in sizes.values()]
    assert sorted(last) == expected
    for device in devices:
        assert all(batch.size % 2 == 0 for batch in sizes[device])
        assert len({batch.size for batch in sizes[device]}) <= 5
    if (
        lockstep
    ):  # all workers have the same number of batches, which together are the joint batches of equal shares
        assert {len(batches) for batches in sizes.values()} == {100}
        for number, joint in enumerate(zip(*sizes.values(), strict=True)):
            positions = sorted(p for b in joint for p in range(b.start, b.start + b.size))
            assert positions == list(range(64 * number, 64 * number + 64))


def test_new_shares_hold_for_rounds_that_no_worker_has_taken() -> None:
    """A sampler that takes many batches in advance receives the same joint batches as the others."""
    order = DataOrder(48 * 30, 16, True, "static", "", balanced=True, most=24)
    job = Job([1.0, 2.0, 4.0])
    lives = list(job.lives.values())
    for life in lives:
        job.begin(life, 0, order)
    taken: dict[int, list[Batch]] = {life.index: [] for life in lives}
    for step in range(30):
        for life in lives:
            ahead = {0: 9, 1: 3, 2: 0}[life.index]
            while len(taken[life.index]) <= min(step + ahead, 29):
                batch = job.take(life, order, 48 * 30)
                assert batch is not None
                taken[life.index].append(batch)
            job.push(life, life.speed * taken[life.index][step].size)
    for number, joint in enumerate(zip(*taken.values(), strict=True)):
        assert sum(b.size for b in joint) == 48
        assert min(b.start for b in joint) == 48 * number
        assert max(b.start + b.size for b in joint) == 48 * number + 48
    assert [batches[-1].size for batches in taken.values()] == [
        24,
        16,
        8,
    ]  # the first would be 27 without `most`


@pytest.mark.parametrize("accelerated", [False, True])
def test_the_time_of_an_accelerators_warm_up_does_not_count_for_the_sizes(accelerated: bool) -> None:
    """The first iteration with each size takes a hundred times as long, because the device compiles its programs."""
    order = DataOrder(48 * 40, 16, True, "static", "", balanced=True)
    job = Job([1.0, 1.0, 1.0])
    device = job.lives[0]
    device.feed.accelerated = accelerated
    for life in job.lives.values():
        job.begin(life, 0, order)
    seen: set[int] = set()
    times: list[tuple[int, float]] = []
    warm_ups = []
    for _ in range(20):
        for life in job.lives.values():
            batch = job.take(life, order, 48 * 40)
            assert batch is not None
            busy_s = life.speed * batch.size
            if life is device:
                warm_ups.append(life.feed.warm_up)
                assert life.feed.warm_up == (accelerated and batch.size not in seen)
                busy_s *= 1 if batch.size in seen else 100
                seen.add(batch.size)
            requests = life.feed.push(busy_s)
            if life is device:
                times += [
                    taken
                    for request in requests
                    if isinstance(request, Send) and isinstance(request.message, DataRequested)
                    for taken in request.message.times
                ]
            job.carry(life, requests)
            life.feed.answered()
    assert warm_ups.count(True) == (len(seen) if accelerated else 0)
    assert times
    assert any(seconds > 10 * samples for samples, seconds in times) == (not accelerated)


def test_the_sizes_do_not_depend_on_the_order_in_which_workers_ask() -> None:
    """Small differences between the workers' speeds do not change the sizes, whichever worker asks first."""
    order = DataOrder(192 * 50, 64, False, "static", "", balanced=True)
    job = Job([1.0, 1.0, 1.04])
    draw = random.Random(0)
    for life in job.lives.values():
        job.begin(life, 0, order)
    for _ in range(50):
        for life in draw.sample(list(job.lives.values()), 3):
            batch = job.take(life, order, 192 * 50)
            assert batch is not None
            assert batch.size == 64
            job.push(life, life.speed * batch.size)


def test_a_lost_workers_share_of_later_rounds_goes_to_the_others() -> None:
    order = DataOrder(48 * 20, 16, False, "static", "", balanced=True)
    job = Job([1.0, 1.0, 1.0])
    lives = list(job.lives.values())
    for life in lives:
        job.begin(life, 0, order)
    used = Counter[int]()
    for step in range(20):
        for life in list(job.lives.values()):
            if step == 7 and life.index == 2:
                job.leave(life, (7, 7), early=True)
                continue
            if (batch := job.take(life, order, 48 * 20)) is not None:
                used.update(range(batch.start, batch.start + batch.size))
                job.push(life, 1.0)
    counts = job.ledger.counts()["loader"]
    assert max(used.values()) == 1
    assert used.total() + counts.returned == 48 * 20
    assert 0 < counts.returned <= 16 * 4  # only the rounds that had been dealt


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_resumed_job_begins_with_balanced_batches(lockstep: bool) -> None:
    order = DataOrder(160, 8, False, "auto", "", balanced=True)
    times = tuple(WorkerTimes(worker, 0.0, ((8, seconds),) * 4) for worker, seconds in ((0, 1.0), (1, 3.0)))
    ledger = loader_ledger.LoaderLedger(LoaderCut(name="data", times=times))
    assert ledger.cut("data").times == times
    for worker in (0, 1):
        ledger.begin(worker, 0, order, 0, {0, 1}, lockstep)
    granted = [ledger.grant(worker, 0, order, 0, 0.0, {0, 1}).leases[0].batch for worker in (0, 1)]
    assert granted == [12, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_returned_batches_of_a_resumed_run_are_cut_to_a_new_maximum(workers: int) -> None:
    before = DataOrder(400, 100, False, "auto", "", balanced=True)
    cut = LoaderCut(
        name="loader",
        opened=1,
        order=before,
        epochs=(EpochCut(0, before, 150),),
        returned=(single(0, 0, 150),),
        total=150,
    )
    order = msgspec.structs.replace(before, most=64)
    taken = batches_of_each(Job([1.0] * workers, lockstep=True, resumed=[cut]), 0, order, 400)
    sizes = [size for each in taken.values() for _, _, size in each]
    assert max(sizes) <= 64
    assert sum(sizes) == 400


def test_an_order_of_unknown_size_cannot_be_balanced() -> None:
    with pytest.raises(ValueError, match="cannot be balanced"):
        DataOrder(None, 16, False, "auto", "", balanced=True)


def test_what_a_lost_worker_returned_is_dealt_in_the_steps_of_accelerators() -> None:
    """With equal parts, 64 positions for three workers would be 22, 21 and 21: sizes that no device has seen."""
    order = DataOrder(256 * 8, 64, False, "static", "", balanced=True)
    job = Job([1.0, 1.0, 1.0, 1.0])
    for life in job.lives.values():
        life.feed.accelerated = life.index < 2
        job.begin(life, 0, order)
    for life in list(job.lives.values()):
        assert job.take(life, order, order.size or 0) is not None
        if life.index == 3:
            job.leave(life, (0, 0), early=True)
        else:
            job.push(life, 1.0)
    taken = batches_of_each(job, 1, order, order.size or 0)
    returned = {worker: [size for epoch, _, size in each if epoch == 0] for worker, each in taken.items()}
    assert sum(map(sum, returned.values())) == 2 * 64  # the batches of the rounds that had been dealt
    assert all(size % 8 == 0 for worker in (0, 1) for size in returned[worker])


# -- joint batches of a given size ------------------------------------------------------------------------


def rounds_of(job: Job, epoch: int, order: DataOrder) -> list[list[tuple[int, int]]]:
    """Let all workers use an epoch in turn; return (start, size) of their parts of each joint batch."""
    for life in job.lives.values():
        job.begin(life, epoch, order)
    rounds: list[list[tuple[int, int]]] = []
    while True:
        parts: list[tuple[int, int]] = []
        for life in job.lives.values():
            life.empty = 0
            if (batch := life.feed.take(0)) is None and not life.feed.ended(0):
                job.carry(life, life.feed.request(0))
                batch = life.feed.take(0)
            if batch is None:
                continue
            parts.append((batch.start, batch.size))
            if batch.size:
                life.feed.draw(0, batch.size, batch.size)
                job.push(life, 0.01)
        if not parts:
            return rounds
        rounds.append(parts)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch", [7, 10, 16])
def test_the_joint_batches_are_those_of_one_process(batch: int, workers: int, drop_last: bool) -> None:
    for size in (1, 13, 50, 96):
        order = DataOrder(size, batch, drop_last, "auto", "", joint=True)
        rounds = rounds_of(Job([1.0] * workers, lockstep=True), 0, order)
        alone = [range(start, min(start + batch, size)) for start in range(0, size, batch)]
        alone = [each for each in alone if len(each) == batch or not drop_last]
        assert [sorted(p for start, n in parts for p in range(start, start + n)) for parts in rounds] == [
            list(each) for each in alone
        ]
        assert all(len(parts) == workers for parts in rounds)  # also those whose part is empty
        assert all(max(n for _, n in parts) - min(n for _, n in parts) <= 1 for parts in rounds)


def test_no_part_is_smaller_than_the_minimum_unless_it_is_empty() -> None:
    order = DataOrder(33, 10, False, "auto", "", joint=True)
    job = Job([1.0, 1.0, 1.0], lockstep=True)
    for life in job.lives.values():
        life.feed.least = 2
    assert [[n for _, n in parts] for parts in rounds_of(job, 0, order)] == [[4, 3, 3]] * 3 + [[3, 0, 0]]


@pytest.mark.parametrize("balanced", [False, True])
def test_the_minimum_of_a_part_has_precedence_over_the_maximum(balanced: bool) -> None:
    """Two workers cannot divide the last three positions in parts of two, so one worker has all of them."""
    order = DataOrder(4 * 5 + 3, 4, False, "auto", "", balanced, 2, joint=True)
    job = Job([1.0, 1.0], lockstep=True)
    for life in job.lives.values():
        life.feed.least = 2
    assert [[n for _, n in parts] for parts in rounds_of(job, 0, order)] == [[2, 2]] * 5 + [[3, 0]]


def test_no_returned_part_is_smaller_than_the_minimum() -> None:
    """A worker replaces a lost one, so three workers divide parts of 4 positions into joint batches of 11."""
    size = 11 * 9
    order = DataOrder(size, 11, False, "auto", "", joint=True)
    job = Job([1.0, 1.0, 1.0], lockstep=True)
    for life in job.lives.values():
        life.feed.least = 2
        job.begin(life, 0, order)
    for _ in range(6):  # worker 1 asks first, so some joint batches are divided before worker 0 asks again
        job.now_s += 0.01
        job.take(job.lives[1], order, size)
        job.push(job.lives[1])
    job.leave(job.lives[0], (0, 0), early=True)
    job.lives[3] = Life(3, 1.0)
    job.lives[3].feed.least = 2
    sizes = [n for parts in rounds_of(job, 1, order) for _, n in parts if n]
    assert min(sizes) >= 2


def test_balanced_parts_of_joint_batches_follow_the_speeds() -> None:
    order = DataOrder(32 * 40, 32, False, "auto", "", balanced=True, joint=True)
    job = Job([1.0, 1.0, 3.0], lockstep=True)
    for life in job.lives.values():
        job.begin(life, 0, order)
    sizes: list[tuple[int, ...]] = []
    while len(sizes) < 40:
        parts = []
        for life in job.lives.values():
            batch = job.take(life, order, 32 * 40)
            assert batch is not None
            parts.append(batch.size)
            job.push(life, 0.01 * life.speed * batch.size)
        sizes.append(tuple(parts))
    assert {sum(parts) for parts in sizes} == {32}
    fast, also_fast, slow = sizes[-1]
    assert slow <= 6 < 12 <= min(fast, also_fast)


def test_joint_batches_are_divided_anew_when_workers_join_and_are_lost() -> None:
    """Every position is used once in its own epoch, unless all of its workers are lost."""
    size = 12 * 30
    order = DataOrder(size, 12, False, "auto", "", joint=True)
    job = Job([1.0, 1.0], lockstep=True)
    for life in job.lives.values():
        job.begin(life, 0, order)
    used = Counter[int]()
    sizes: list[list[int]] = []
    while True:
        parts = []
        if len(sizes) == 5:
            job.lives[2] = Life(2, 1.0)
            job.begin(job.lives[2], 0, order)
        if len(sizes) == 15:
            job.leave(job.lives[0], (job.lives[0].drawn,) * 2, early=True)
        for life in job.lives.values():
            if (batch := job.take(life, order, size)) is not None:
                used.update(range(batch.start, batch.start + batch.size))
                job.push(life, 0.01)
                parts.append(batch.size)
        if not parts:
            break
        sizes.append(parts)
    assert used == Counter(range(size))
    assert sizes[0] == [6, 6]
    assert [4, 4, 4] in sizes[5:15]
    assert [6, 6] in sizes[15:]
    assert job.ledger.counts()["loader"].returned == 0


def test_a_worker_that_does_not_ask_has_no_part_in_further_joint_batches() -> None:
    """For example, its script evaluates after each epoch. It does not fall behind by the whole evaluation."""
    order = DataOrder(12 * 400, 12, False, "auto", "", joint=True)
    job = Job([1.0, 1.0, 1.0], lockstep=True)
    idle, *others = job.lives.values()
    for life in job.lives.values():
        job.begin(life, 0, order)
    for _ in range(300):
        for life in others:
            assert job.take(life, order, 12 * 400) is not None
            job.push(life, 0.01)
    behind = 0
    sizes: list[int] = []
    while len(sizes) < 90 and (batch := job.take(idle, order, 12 * 400)) is not None:
        behind += batch.start < 12 * 300
        sizes.append(batch.size)
        job.push(idle, 0.01)
        for life in others:
            if (taken := job.take(life, order, 12 * 400)) is not None:
                job.push(life, 0.01)
                sizes[-1] += taken.size
    assert behind < 100
    assert sizes[-2] == 12


def test_the_joint_batches_of_an_order_of_unknown_size_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        DataOrder(None, 16, False, "auto", "", joint=True)


def test_a_resumed_job_with_other_workers_has_the_same_joint_batches() -> None:
    order = DataOrder(50, 8, False, "auto", "", joint=True)
    job = Job([1.0, 1.0], lockstep=True)
    for life in job.lives.values():
        job.begin(life, 0, order)
    for _ in range(2):
        for life in job.lives.values():
            assert job.take(life, order, 50) is not None
            job.push(life, 0.01)
    cut = job.ledger.cut({worker: [(2, 2)] for worker in job.lives})
    resumed = Job([1.0, 1.0, 1.0], lockstep=True, resumed=cut)
    sizes = [sum(n for _, n in parts) for parts in rounds_of(resumed, 0, order)]
    assert sizes == [8, 8, 8, 8, 2]


def test_on_demand_a_worker_has_its_part_of_the_joint_batch() -> None:
    order = DataOrder(96, 16, False, "dynamic", "", joint=True)
    taken = batches_of_each(Job([1.0, 1.0, 1.0]), 0, order, 96)
    assert {size for _, _, size in taken[0]} == {6}
    order = DataOrder(100, 16, True, "dynamic", "", joint=True)
    job = Job([1.0, 1.0, 1.0])
    taken = batches_of_each(job, 0, order, 100)
    assert sum(size for batches in taken.values() for _, _, size in batches) == 96
    assert job.ledger.counts()["loader"].left_out == 4
