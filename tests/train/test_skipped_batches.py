"""A batch of which a script computes no gradient belongs to no push: neither its weight nor its samples count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedOptimizer
from paceline.core.data_ledger import DataLedger
from paceline.core.lease import MOST_BATCHES, DataOrder, Drawn, DrawnBatch, PackedPushed, positions
from paceline.core.loader_ledger import PositionCounts
from paceline.core.members import WorkerLoss
from paceline.core.messages import DataRequested, PushesReported
from paceline.trace.measures import measure

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

WORKERS, BATCH, STEPS = 2, 3, 30
ITEMS = WORKERS * BATCH * STEPS - 4  # so that the last batches are smaller

DATASET = TensorDataset(
    torch.arange(ITEMS),
    torch.randn(ITEMS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()
        for parameter in self.parameters():  # torch's generator is shared by the threads
            nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def is_bad(number: int) -> bool:
    """True for the batches that a script skips. Each worker skips other ones."""
    return number % 5 == 1 + paceline.worker_index()


class Script:
    """A script that skips some batches. `pushed` contains the items of each of its pushes."""

    def __init__(self) -> None:
        self.model = Net()
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = DistributedOptimizer(sgd, model=self.model)
        self.pushed: list[list[int]] = []

    def batches(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        loader = DataLoader(DATASET, batch_size=BATCH)
        for number, (items, x) in enumerate(paceline.distribute(loader)):
            yield number, items, x

    def step(self, *items: torch.Tensor) -> None:
        self.optimizer.step()
        self.pushed.append([int(item) for each in items for item in each])


def fails_in_forward(script: Script) -> None:
    for number, items, x in script.batches():
        script.optimizer.zero_grad()
        try:
            if is_bad(number):
                script.model(x[:, :2])  # a matrix of the wrong shape
            loss_of(script.model, x).backward()
        except RuntimeError:
            continue
        script.step(items)


def fails_in_backward(script: Script) -> None:
    """The backward pass fails after the gradient of the weight has been accumulated; the script drops it."""

    for number, items, x in script.batches():
        script.optimizer.zero_grad()
        try:
            loss = loss_of(script.model, x)
            loss.backward()
            if is_bad(number):
                raise RuntimeError
        except RuntimeError:
            continue
        script.step(items)


def fails_in_the_middle_of_backward(script: Script) -> None:
    """Gradients of the layer are accumulated, and then a hook fails, before the last one."""

    first = nn.Parameter(torch.ones(4, dtype=torch.float64))
    for number, items, x in script.batches():
        script.optimizer.zero_grad()

        def fail(gradient: torch.Tensor, number: int = number) -> None:
            if is_bad(number):
                raise RuntimeError

        scaled = x * first
        scaled.register_hook(fail)
        try:
            loss_of(script.model, scaled - x * (first - 1.0)).backward()
        except RuntimeError:
            assert any(parameter.grad is not None for parameter in script.model.parameters())
            continue
        script.step(items)


def is_not_finite(script: Script) -> None:
    for number, items, x in script.batches():
        loss = loss_of(script.model, x) * (float("nan") if is_bad(number) else 1.0)
        if not torch.isfinite(loss):
            continue
        script.optimizer.zero_grad()
        loss.backward()
        script.step(items)


def is_refused_before_the_forward_pass(script: Script) -> None:
    for number, items, x in script.batches():
        if is_bad(number):
            continue
        script.optimizer.zero_grad()
        loss_of(script.model, x).backward()
        script.step(items)


def is_only_evaluated(script: Script) -> None:
    for number, items, x in script.batches():
        if is_bad(number):
            with torch.no_grad():
                loss_of(script.model, x)
            continue
        script.optimizer.zero_grad()
        loss_of(script.model, x).backward()
        script.step(items)


def has_a_gradient_that_is_dropped(script: Script) -> None:
    """As GradScaler does: the gradient is computed, but there is no step."""
    for number, items, x in script.batches():
        script.optimizer.zero_grad()
        loss_of(script.model, x).backward()
        if is_bad(number):
            continue
        script.step(items)


def has_a_gradient_that_is_set_to_zero(script: Script) -> None:
    for number, items, x in script.batches():
        script.optimizer.zero_grad(set_to_none=False)
        loss_of(script.model, x).backward()
        if is_bad(number):
            continue
        script.step(items)


def is_one_of_several(script: Script) -> None:
    """Three batches are accumulated for each step, in proportion to their sizes."""
    kept: list[torch.Tensor] = []
    for number, items, x in script.batches():
        if not is_bad(number):
            (loss_of(script.model, x) * len(x)).backward()
            kept.append(items)
        if number % 3 == 2:
            count = sum(map(len, kept))
            for parameter in script.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= count
            script.step(*kept)
            script.model.zero_grad()
            kept.clear()


def is_in_a_closure(script: Script) -> None:
    for number, items, x in script.batches():
        if is_bad(number):
            continue

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            script.optimizer.zero_grad()
            loss = loss_of(script.model, x)
            loss.backward()
            return loss

        script.optimizer.step(closure)
        script.pushed.append(items.tolist())


SKIPS: list[Callable[[Script], None]] = [
    fails_in_forward,
    fails_in_backward,
    fails_in_the_middle_of_backward,
    is_not_finite,
    is_refused_before_the_forward_pass,
    is_only_evaluated,
    has_a_gradient_that_is_dropped,
    has_a_gradient_that_is_set_to_zero,
    is_one_of_several,
    is_in_a_closure,
]


def trained_alone(steps: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return the weights after a single process has used these items in each step."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for items in steps:
        optimizer.zero_grad()
        loss_of(model, DATASET.tensors[1][items]).backward()
        optimizer.step()
    return model.state_dict()


def check(run_on_threads: RunOnThreads, train: Callable[[Script], None], *, skipped: bool = True) -> None:
    """Train with two workers under bsp, and compare the weights, the samples and the ledger."""

    def run() -> list[list[int]]:
        script = Script()
        train(script)
        return script.pushed

    outcome = run_on_threads(run, workers=WORKERS, sync="bsp")
    pushed: list[list[list[int]]] = [outcome.results[worker] for worker in range(WORKERS)]  # type: ignore[misc]
    rounds = max(map(len, pushed))
    joint = [[item for own in pushed for item in (own[k] if k < len(own) else [])] for k in range(rounds)]
    for name, expected in trained_alone(joint).items():
        torch.testing.assert_close(outcome.state_dict[name], expected, rtol=0.0, atol=1e-12)
    used = sum(map(len, joint))
    (counts,) = outcome.samples.values()
    assert measure(outcome.shards).samples == counts.used == used
    assert (used < ITEMS) is skipped
    assert (counts.left_out, counts.left, counts.leased, counts.torn) == (ITEMS - used, 0, 0, 0)


@pytest.mark.parametrize("skip", SKIPS, ids=lambda function: function.__name__)
def test_a_batch_that_a_script_skips_has_no_weight(
    run_on_threads: RunOnThreads, skip: Callable[[Script], None]
) -> None:
    check(run_on_threads, skip)


def adds_up_losses(script: Script) -> None:
    """The gradient of two batches is computed by one backward pass."""
    batches = script.batches()
    for (_, first, x), (_, second, y) in zip(batches, batches, strict=True):
        script.optimizer.zero_grad()
        (loss_of(script.model, x) * len(x) + loss_of(script.model, y) * len(y)).div(
            len(x) + len(y)
        ).backward()
        script.step(first, second)


def adds_up_losses_in_a_loop(script: Script) -> None:
    total, kept = torch.zeros((), dtype=torch.float64), []
    for number, items, x in script.batches():
        total = total + loss_of(script.model, x) * len(x)
        kept.append(items.tolist())
        if number % 2:
            script.optimizer.zero_grad()
            (total / sum(map(len, kept))).backward()
            script.step(*map(torch.tensor, kept))
            total, kept = torch.zeros((), dtype=torch.float64), []


def joins_batches(script: Script) -> None:
    batches: list[Any] = []
    for number, *batch in script.batches():
        batches.append(batch)
        if number % 2:
            items, x = (torch.cat(parts) for parts in zip(*batches, strict=True))
            script.optimizer.zero_grad()
            loss_of(script.model, x).backward()
            script.step(items)
            batches.clear()


def sets_gradients_itself(script: Script) -> None:
    for _, items, x in script.batches():
        parameters = list(script.model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss_of(script.model, x), parameters), strict=True
        ):
            parameter.grad = gradient
        script.step(items)


@pytest.mark.parametrize(
    "train",
    [
        adds_up_losses,
        adds_up_losses_in_a_loop,
        joins_batches,
        sets_gradients_itself,
    ],
    ids=lambda function: function.__name__,
)
def test_batches_whose_gradient_is_computed_later_belong_to_the_push(
    run_on_threads: RunOnThreads, train: Callable[[Script], None]
) -> None:
    check(run_on_threads, train, skipped=False)


# -- the record of the drawn batches, and the ledger ------------------------------------------------------


def drawn_of(*batches: DrawnBatch) -> Drawn:
    drawn = Drawn()
    for batch in batches:
        drawn.draw(batch)
    return drawn


def batch(positions: int, *, held: bool = False) -> DrawnBatch:
    return DrawnBatch(positions, positions, lambda: held)


def test_without_a_gradient_from_autograd_a_push_contains_all_drawn_batches() -> None:
    drawn = drawn_of(batch(1), batch(2))
    assert drawn.samples(accumulated=False) == 3
    assert drawn.push(accumulated=False) == 0
    assert drawn.pushed == drawn.end() == (2, 0)


def test_a_batch_that_is_drawn_between_the_gradient_and_the_push_belongs_to_the_next_push() -> None:
    drawn = drawn_of(batch(1))
    drawn.accumulate()
    drawn.draw(batch(2))
    assert drawn.samples(accumulated=True) == 1
    drawn.push(accumulated=True)
    assert drawn.pushed == (2, 0)
    assert drawn.end() == (2, 2)  # if no gradient follows
    drawn.accumulate()
    assert drawn.samples(accumulated=True) == 2
    drawn.push(accumulated=True)
    assert drawn.end() == (2, 0)


def test_a_batch_that_turns_out_to_be_skipped_after_a_push_is_counted_at_the_end() -> None:
    drawn = drawn_of(batch(1))
    drawn.accumulate()
    drawn.draw(batch(2))
    drawn.push(accumulated=True)
    drawn.draw(batch(4))
    drawn.accumulate()  # of the last one
    assert (drawn.pushed, drawn.end()) == ((2, 0), (2, 2))
    drawn.push(accumulated=True)
    assert drawn.end() == (3, 2)


def test_dropped_gradients_leave_out_their_batches_unless_these_are_used_again() -> None:
    drawn = drawn_of(batch(1), batch(2, held=True), batch(4))
    drawn.accumulate()
    assert drawn.samples(accumulated=True) == 6
    drawn.drop()
    drawn.draw(batch(8))
    drawn.accumulate()
    assert drawn.samples(accumulated=True) == 10
    assert drawn.push(accumulated=True) == 5


def test_a_script_that_draws_and_never_pushes_takes_no_memory() -> None:
    drawn = Drawn()
    for _ in range(3 * MOST_BATCHES):
        drawn.draw(batch(1))
    assert len(drawn._undecided) <= MOST_BATCHES
    assert drawn.samples(accumulated=False) == 3 * MOST_BATCHES
    drawn.accumulate()
    assert drawn.push(accumulated=True) == 3 * MOST_BATCHES - 1


@pytest.mark.parametrize(
    ("least", "most", "used", "torn", "left_out"),
    [
        ((4, 5), (4, 5), 35, 0, 5),
        ((3, 0), (4, 0), 30, 10, 0),
        ((3, 0), (4, 10), 30, 0, 10),
        ((3, 0), (4, 15), 25, 0, 15),  # a batch of the earlier push was skipped, too
        ((3, 10), (4, 10), 20, 10, 10),
        ((0, 0), (0, 1000), 0, 0, 0),  # more than was pushed
    ],
)
def test_skipped_samples_of_a_worker_that_leaves_are_left_out(
    least: PackedPushed, most: PackedPushed, used: int, torn: int, left_out: int
) -> None:
    ledger = DataLedger()
    order = DataOrder(100, 10, False, "dynamic", "")
    leased = 0
    for drawn in range(4):
        request = DataRequested(0, "loader", 0, order, drawn, committed=0)
        grant = ledger.request(0, request, now_s=float(drawn), live={0}, lockstep=False)
        leased += positions(grant.leases)
    assert leased >= 40
    ledger.leave(0, [(least, most)], {0}, early=True)
    ledger.validate()
    counts = ledger.counts()["loader"]
    assert (counts.used, counts.torn, counts.left_out) == (used, torn, left_out)


def test_the_coordinator_learns_from_requests_for_data_what_was_skipped() -> None:
    ledger = DataLedger()
    order = DataOrder(100, 10, False, "dynamic", "")

    def request(drawn: int, committed: PackedPushed) -> PositionCounts:
        message = DataRequested(0, "loader", 0, order, drawn, committed)
        ledger.request(0, message, now_s=0.0, live={0}, lockstep=False)
        ledger.validate()
        return ledger.counts()["loader"]

    request(0, 0)
    assert request(1, (1, 10)).left_out == 10
    assert request(1, (1, 10)).left_out == 10


def test_a_lost_workers_servers_tell_what_was_skipped() -> None:
    loss = WorkerLoss(0, 0, {0, 1})
    loss.reported(0, PushesReported(0, 0, (3,), (False,), ((4,),)))
    loss.reported(1, PushesReported(0, 0, (4,), (False,), (((6, 10), 2),)))
    assert loss.drawn == [(4, (6, 10)), (0, 2)]
