"""The option `--wire`: what is rounded on its way between processes, and what is not."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, product, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer, simulate, worker_index
from paceline.core.layout import (
    Layout,
    ModelSpec,
    OptimizerSpec,
    Parameter,
    ShardSlice,
    WireAdvice,
    WireFormat,
    advise_wire,
)
from paceline.core.messages import Answer, BaseRequested, Commit, Message, Stage
from paceline.errors import ConfigurationError
from paceline.run import worker as worker_module
from paceline.run.job import describe
from paceline.run.job_options import make_job
from paceline.run.worker import WorkerSession
from paceline.run.worker_links import Links, SlowLink, WorkerMemory
from paceline.shard.codecs import BaseReceiver, Receiver, Sender
from paceline.shard.store import Push, Store
from paceline.shard.vectors import Vectors
from paceline.sim import Cluster, Presence
from paceline.sim.virtual_training import Training
from paceline.start.results import wire_line
from paceline.sync.events import Edit
from paceline.trace import replay
from paceline.wire.preface import Sending
from tests.support.live import run_program
from tests.support.live import train as live_training
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

Tensors = list[torch.Tensor]

# -- the notation and the rules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gradients", "weights", "written"),
    [
        ("float32", "float32", "float32", "float32"),
        ("bf16", "bf16", "bf16", "bf16"),
        ("gradients=bf16", "bf16", "float32", "gradients=bf16,weights=float32"),
        ("weights=bf16,gradients=float32", "float32", "bf16", "gradients=float32,weights=bf16"),
        ("weights=bf16,gradients=bf16", "bf16", "bf16", "gradients=bf16,weights=bf16"),
        ("int8", "int8", "int8", "int8"),
        ("gradients=int8,weights=int4", "int8", "int4", "gradients=int8,weights=int4"),
    ],
)
def test_each_direction_has_a_format(text: str, gradients: str, weights: str, written: str) -> None:
    wire = WireFormat.read(text)
    assert (wire.gradients, wire.weights) == (gradients, weights)
    assert str(wire) == written
    assert WireFormat.read(written) == wire
    assert wire.exact == (text == "float32")


@pytest.mark.parametrize(
    "text",
    ["", "fp16", "BF16", "bf16,bf16", "gradients=fp16", "grads=bf16", "gradients=bf16,gradients=bf16", "="],
)
def test_another_notation_is_refused_before_anything_starts(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="expected one of 'float32', 'bf16', 'int8', 'int4', or a codec for each"
    ):
        make_job(workers=1, wire=text, run_dir=tmp_path / "run")
    with pytest.raises(ConfigurationError, match="expected one of 'float32', 'bf16'"):
        simulate(Cluster(compute_s=[1.0]), wire=text)
    assert not Path(tmp_path / "run").exists()


# -- which format is recommended ----------------------------------------------------------------------------

MUON = "torch.optim._muon:Muon"
SPLIT = "gradients=int8,weights=int4"


@pytest.mark.parametrize(
    ("optimizers", "wire", "reason"),
    [
        ([], "int8", "int8 cost no measurable accuracy in any test"),
        (["SGD"], "int4", "int4 cost no measurable accuracy in tests with SGD"),
        (["ASGD"], "int4", "int4 cost no measurable accuracy in tests with SGD, which ASGD resembles"),
        (["AdamW"], "int4", "int4 cost no measurable accuracy in tests with AdamW"),
        *[
            ([name], "int4", f"int4 cost no measurable accuracy in tests with AdamW, which {name} resembles")
            for name in ("Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad")
        ],
        *[
            (
                [name],
                "int8",
                f"int8 cost no measurable accuracy in any test, and int4 was not tested with {known}",
            )
            for name, known in (("Rprop", "Rprop"), ("Adadelta", "Adadelta"), ("mine:Adam", "Adam"))
        ],
        (
            [MUON],
            SPLIT,
            "Muon makes small errors of gradients larger, so int4 is only used for weights",
        ),
        (["SGD", "AdamW"], "int4", "int4 cost no measurable accuracy in tests with SGD"),
        (
            ["AdamW", MUON],
            SPLIT,
            "Muon makes small errors of gradients larger, so int4 is only used for weights",
        ),
        (
            ["AdamW", MUON, "Rprop"],
            "int8",
            "int8 cost no measurable accuracy in any test, and int4 was not tested with Rprop",
        ),
    ],
)
def test_what_is_recommended_depends_on_the_most_careful_optimizer(
    optimizers: list[str], wire: str, reason: str
) -> None:
    advice = advise_wire(optimizers, "float32")
    assert advice is not None
    assert advice[:2] == (wire, reason)
    alone = advise_wire(optimizers, "float32", common=False)
    assert alone is not None
    assert alone.wire == ("int4" if wire == "int4" else "int8")  # can be used under every model
    WireFormat.read(alone.wire).require_usable("asp", common=False)


@pytest.mark.parametrize(
    ("optimizer", "now", "common", "wire"),
    [
        ("SGD", "int8", True, "int4"),
        ("SGD", "int8", False, "int4"),
        ("SGD", "gradients=int4", True, "int4"),
        ("SGD", "int4", True, None),
        (MUON, "int8", True, SPLIT),
        (MUON, SPLIT, True, None),
        (MUON, "int4", True, None),
        (MUON, "int8", False, None),
        ("Rprop", "bf16", True, "int8"),
        ("Rprop", "int8", True, None),
    ],
)
def test_only_what_sends_fewer_bytes_is_recommended(
    optimizer: str, now: str, common: bool, wire: str | None
) -> None:
    advice = advise_wire([optimizer], now, common=common)
    assert (None if advice is None else advice.wire) == wire


def test_how_many_bytes_are_saved_depends_on_the_dtypes_and_on_who_has_the_same_weights() -> None:
    def shares(now: str = "float32", common: bool = True, **vectors: int) -> tuple[float, float]:
        advice = advise_wire(["SGD"], now, common=common, vectors=vectors)
        assert advice is not None
        return advice[2:]

    assert shares() == shares(float32=25600) == (144 / 1024, 144 / 1024)
    assert shares(common=False) == (144 / 1024, (144 + 512) / 2048)
    assert shares("int8") == (144 / 260, 144 / 260)
    assert shares(bfloat16=25600) == (144 / 512, 144 / 512)
    assert shares(float32=2560, float64=2560) == pytest.approx(((144 + 2048) / 3072,) * 2)
    assert advise_wire(["SGD"], "float32", vectors={"float64": 1000}) is None


def watched(
    busy_s: Iterable[float], advice: WireAdvice | None = None, computing_s: float = 0.5
) -> tuple[int, str]:
    """Return the iteration whose push ends the measurement of a link, and the warning; (-1, "") if none ends it.

    Args:
        busy_s: for each iteration, how long its gradient of 8 MB is on its way.
        advice: see `SlowLink`.
        computing_s: how long the computation of each gradient takes.
    """
    watch, sent = SlowLink(advice), accumulate(busy_s, initial=0.0)
    for iteration, total_s in enumerate(sent):
        warning = watch.iterated([Sending(sent=8_000_000 * iteration, busy_s=total_s)], computing_s)
        if watch.over:
            return iteration, warning
    return -1, ""


def slow_link(advice: WireAdvice | None, busy_s: float = 2.0) -> str:
    return watched(repeat(busy_s, 20), advice)[1]


@pytest.mark.parametrize(
    ("busy_s", "computing_s", "ends"),
    [([8.0] * 20, 0.25, 4), ([1.0] * 20, 0.25, 5), ([0.05] * 20, 0.01, 14)],
    ids=["long", "shorter", "short"],
)
def test_the_longer_iterations_take_the_fewer_of_them_are_measured(
    busy_s: list[float], computing_s: float, ends: int
) -> None:
    iteration, warning = watched(busy_s, computing_s=computing_s)
    assert iteration == ends
    assert "the link to the servers is slow" in warning


def test_a_link_that_fails_for_a_moment_or_only_at_the_beginning_is_not_called_slow() -> None:
    for failing in range(20):
        assert watched([30.0 if at == failing else 0.1 for at in range(20)])[1] == ""
    assert watched([1.0] * 2 + [0.1] * 18)[1] == ""


def test_a_slow_link_is_said_with_how_much_faster_a_codec_makes_a_step() -> None:
    begins = (
        "the link to the servers is slow for this model: a gradient of 8 MB leaves at 4 MB/s, which takes 2 s, and the "
        "computation of an iteration takes 0.5 s. "
    )
    ends = "a faster link, larger batches, or servers on several machines."
    # 2.5 s now, and 0.5 s + 2 s x 144 / 1024 with int4, also if weights travel as bf16
    for common in (True, False):
        assert slow_link(advise_wire(["SGD"], "float32", common=common)) == (
            f"{begins}Try --wire int4, which rounds gradients and weights on their way: a step is then about 3.2 times "
            "as fast (estimated from the gradients, because the transfer of the weights is not measured), and int4 "
            f"cost no measurable accuracy in tests with SGD. Or use {ends}"
        )
    assert ": a step is then about 2.5 times as fast (" in slow_link(advise_wire([], "float32"))
    assert ": a step is then about 1.6 times as fast (" in slow_link(advise_wire(["SGD"], "int8"))
    assert slow_link(None) == f"{begins}Use {ends}"
    # the gradients travel as int4 already
    assert slow_link(advise_wire(["SGD"], "gradients=int4")) == f"{begins}Use {ends}"
    assert slow_link(None, busy_s=0.9) == ""


@pytest.mark.parametrize(("sync", "both"), [("bsp", 144 / 1024), ("asp", (144 + 512) / 2048)])
def test_a_worker_and_the_summary_know_the_optimizer(
    sync: str, both: float, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def watch(advice: WireAdvice | None) -> SlowLink:
        found.append(advice)
        return SlowLink(advice)

    monkeypatch.setattr(worker_module, "is_here", lambda address: False)
    monkeypatch.setattr(worker_module, "SlowLink", watch)
    run_on_threads(perceptron(2), workers=2, servers=1, transport="tcp", sync=sync)
    advice, _ = found
    assert advice is not None
    assert advice == found[1]
    assert advice.wire == "int4"
    assert advice.both == pytest.approx(both, rel=0.05)  # the last block is not full
    simulated = simulate(Cluster(compute_s=[1.0, 1.5]), sync, train_fn=perceptron(2))
    assert simulated.optimizers == ("SGD",)
    assert simulated.summary["optimizers"] == ["SGD"]


def test_an_edit_is_not_encoded() -> None:
    both = WireFormat("bf16", "bf16")
    assert Commit(0, 1).codec(both) == Stage(0, (1,)).codec(both) == "bf16"
    assert Commit(0, 1, edit=Edit(number=0, sole=True)).codec(both) == "float32"
    assert Commit(0, 1).codec(WireFormat(weights="bf16")) == "float32"


def test_only_float32_counts_half() -> None:
    layout = Layout.of(
        [
            Parameter(("a",), (100,), "float32"),
            Parameter(("b",), (100,), "float64"),
            Parameter(("c",), (100,), "bfloat16"),
            Parameter(("d",), (100,), "float32", set_index=1),
        ]
    )
    [shard] = layout.slice_evenly(1)
    halved = 4 * (layout.sizes["float32"] + layout.sizes["float32/1"]) // 2
    assert shard.encoded_bytes("bf16") == shard.size_bytes - halved


# -- live runs, with what the shards get and have -----------------------------------------------------------


class Watched:
    """What the shards of a run have received and what they have held, as flat parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # (worker, iteration) or version -> parameter -> its elements, as far as shards have told them
        self.pushed: dict[tuple[int, int], dict[int, torch.Tensor]] = defaultdict(dict)
        self.held: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._versions: dict[int, int] = defaultdict(int)
        put, apply = Store.put, Store.apply

        def watched_put(store: Store, worker: int, iteration: int, push: Push) -> None:
            with self._lock:
                self._note(self.pushed[worker, iteration], store.bounds, push.gradient)
            put(store, worker, iteration, push)

        def watched_apply(store: Store, *arguments: Any) -> None:
            apply(store, *arguments)
            with self._lock:
                self._versions[store.bounds.index] += 1
                self._note(self.held[self._versions[store.bounds.index]], store.bounds, store.weights)

        monkeypatch.setattr(Store, "put", watched_put)
        monkeypatch.setattr(Store, "apply", watched_apply)

    @staticmethod
    def _note(found: dict[int, torch.Tensor], bounds: ShardSlice, vectors: Vectors) -> None:
        for segment in bounds.segments:
            if segment.dtype in vectors:
                values = vectors[segment.dtype][segment.start : segment.stop].clone()
                whole = found.setdefault(segment.parameter, torch.zeros(0, dtype=values.dtype))
                if len(whole) < segment.offset + len(values):
                    grown = torch.zeros(segment.offset + len(values), dtype=values.dtype)
                    grown[: len(whole)] = whole
                    whole = found[segment.parameter] = grown
                whole[segment.offset : segment.offset + len(values)] = values


def flat(tensors: Mapping[int, torch.Tensor]) -> Tensors:
    return [tensors[index] for index in sorted(tensors)]


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return what arrives with the codec bf16."""
    name = str(tensor.dtype).removeprefix("torch.")
    return Sender("bf16", {name: tensor}).arriving()[name]


def rounded(tensors: Tensors) -> Tensors:
    return [narrowed(tensor) for tensor in tensors]


def same(found: Tensors, expected: Tensors) -> bool:
    return all(
        torch.equal(one.flatten(), other.flatten()) for one, other in zip(found, expected, strict=True)
    )


class Mixed(nn.Module):
    """A model with parameters of three dtypes; the largest is sent in several pieces."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.large = nn.Parameter(torch.randn(700_000, generator=generator))
        self.wide = nn.Parameter(torch.randn(50, generator=generator).double())
        self.narrow = nn.Parameter(torch.randn(70, generator=generator).bfloat16())
        self.small = nn.Parameter(torch.randn(3, generator=generator))
        self.register_buffer("seen", torch.full((5,), 1 / 3))

    def forward(self, worker: int, iteration: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * worker + iteration)
        total = torch.zeros(())
        for parameter in self.parameters():
            factors = torch.randn(parameter.shape, generator=generator)
            total = total + (parameter.float().square() * factors).sum()
        return total


Steps = list[tuple[Tensors, Tensors]]  # for each iteration, the gradients and the weights after it


def training(steps: int = 4, scale: float = 1.0) -> Callable[[], Steps]:
    def train() -> Steps:
        model = Mixed()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
        found = []
        for iteration in range(steps):
            optimizer.zero_grad()
            model(worker_index(), iteration).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if scale != 1.0:
                    parameter.grad.mul_(scale)
            gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
            optimizer.step()
            found.append((gradients, [parameter.detach().clone() for parameter in model.parameters()]))
        return found

    return train


WIRES = ["bf16", "gradients=bf16", "weights=bf16", "float32"]


REPRESENTATIVES = [
    ("bf16", "tcp", True),
    ("gradients=bf16", "unix", False),
    ("weights=bf16", "tcp", True),
    ("float32", "unix", False),
]
"""Each format; gradients that leave early over tcp, and all at once over unix."""


@pytest.mark.parametrize(
    ("wire", "transport", "early"),
    [
        *REPRESENTATIVES,
        *thorough(
            *(case for case in product(WIRES, ["tcp", "unix"], [True, False]) if case not in REPRESENTATIVES)
        ),
    ],
)
def test_shards_get_rounded_gradients_and_workers_rounded_weights(
    wire: str, transport: str, early: bool, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "is_here", lambda address: not early)
    watched = Watched(monkeypatch)
    run = run_on_threads(training(), workers=2, servers=2, shards=3, transport=transport, wire=wire)
    wire_format = WireFormat.read(wire)
    for worker, steps in run.results.items():
        assert isinstance(steps, list)
        for iteration, (gradients, weights) in enumerate(steps):
            sent = rounded(gradients) if wire_format.gradients == "bf16" else gradients
            assert same(flat(watched.pushed[worker, iteration]), sent)
            held = flat(watched.held[iteration + 1])
            assert same(weights, rounded(held) if wire_format.weights == "bf16" else held)
            assert wire == "float32" or not same(gradients + weights, sent + held)
    final = [run.state_dict[name] for name, _ in Mixed().named_parameters()]
    assert same(final, flat(watched.held[4]))  # readers receive what the shards have
    assert torch.equal(run.state_dict["seen"], torch.full((5,), 1 / 3))
    for trace in run.traces:
        assert replay(trace) == []


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_pieces_that_were_sent_early_and_changed_are_rounded_again(
    scale: float, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "is_here", lambda address: False)
    watched = Watched(monkeypatch)
    run = run_on_threads(
        training(scale=scale), workers=2, servers=1, shards=2, sync="asp", transport="tcp", wire="bf16"
    )
    for worker, steps in run.results.items():
        assert isinstance(steps, list)
        for iteration, (gradients, _) in enumerate(steps):
            assert same(flat(watched.pushed[worker, iteration]), rounded(gradients))


@pytest.mark.parametrize(
    "options",
    [
        {"slicing": "by-parameter", "shards": 2},
        {"sync": "bsp@0,asp@2"},
        *thorough({"overlap": "off", "shards": 2}, {"sync": "ssp:staleness=1"}),
    ],
    ids=str,
)
def test_each_way_of_training_rounds_both_directions(
    options: dict[str, Any], run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    run = run_on_threads(training(), workers=2, servers=1, transport="tcp", wire="bf16", **options)
    for worker, steps in run.results.items():
        assert isinstance(steps, list)
        for iteration, (gradients, weights) in enumerate(steps):
            assert same(flat(watched.pushed[worker, iteration]), rounded(gradients))
            assert same(weights, rounded(weights))
    for trace in run.traces:
        assert replay(trace) == []


def test_weights_that_change_while_they_are_sent_arrive_as_they_were(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more than a socket holds, and the other workers push meanwhile."""
    watched = Watched(monkeypatch)
    run = run_on_threads(
        training(6), workers=3, servers=1, shards=1, sync="asp", transport="tcp", wire="bf16"
    )
    sent = [rounded(flat(held)) for held in watched.held.values()]
    for steps in run.results.values():
        assert isinstance(steps, list)
        for _, weights in steps:
            assert any(same(weights, version) for version in sent)


def test_updates_that_are_too_small_for_rounded_weights_are_not_lost(run_on_threads: RunOnThreads) -> None:
    """Next to 1, a bfloat16 has steps of 1/256 below and 1/128 above."""

    def train() -> float:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-12), model=model)
        for _ in range(40):
            optimizer.zero_grad()
            (-model.weight.sum()).backward()
            optimizer.step()
        return model.weight[0, 0].item()

    run = run_on_threads(train, workers=2, servers=1, transport="tcp", wire="bf16")
    assert run.state_dict["weight"].tolist() == [[1 + 40 * 2.0**-12] * 4]
    assert run.results == {0: 1 + 2.0**-7, 1: 1 + 2.0**-7}


# -- edits, evaluations, first weights ----------------------------------------------------------------------

THIRDS = torch.arange(1.0, 301.0) / 3


class Vector(nn.Module):
    """Two parameters whose values no bfloat16 has; updates do not change the second."""

    def __init__(self) -> None:
        super().__init__()
        self.moving = nn.Parameter(THIRDS.clone())
        self.still = nn.Parameter(-THIRDS)

    def loss(self) -> torch.Tensor:
        return self.moving.sum() + 0 * self.still.sum()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("host", ["live", "simulated"])
def test_an_edit_is_exact_and_begins_with_exact_weights(
    sync: str, host: str, run_on_threads: RunOnThreads
) -> None:
    """A worker doubles a part of a parameter: neither this part nor the others lose a bit."""
    seen: dict[int, list[Tensors]] = defaultdict(list)

    def train() -> None:
        model = Vector()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1 / 1024), model=model)
        for _ in range(3):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
        with optimizer.editing(), torch.no_grad():
            seen[worker_index()].append([each.detach().clone() for each in model.parameters()])
            model.still[:100] *= 2
        seen[worker_index()].append([each.detach().clone() for each in model.parameters()])

    if host == "live":
        state = run_on_threads(
            train, workers=2, servers=2, shards=2, sync=sync, transport="tcp", wire="bf16"
        ).state_dict
    else:
        cluster = Cluster(compute_s=[1.0, 1.5], servers=2)
        found = simulate(cluster, sync, train_fn=train, wire="bf16").state_dict
        assert found is not None
        state = found
    expected = -THIRDS
    expected[:100] *= 2
    assert torch.equal(state["still"], expected)
    assert not torch.equal(narrowed(expected), expected)
    for before, after in seen.values():
        assert torch.equal(before[1], -THIRDS) or torch.equal(before[1], expected)
        if sync == "bsp":  # every worker pushes its edit, and pulls the edited weights as they are
            assert torch.equal(after[1], expected)
            assert torch.equal(before[0], state["moving"])
            assert torch.equal(after[0], state["moving"])


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("host", ["live", "simulated"])
def test_an_evaluation_sees_exact_weights(sync: str, host: str, run_on_threads: RunOnThreads) -> None:
    def train() -> Tensors:
        model = Vector()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
        found = [model.still.detach().clone()]
        for _ in range(2):
            optimizer.zero_grad()
            model.loss().backward()
            found.append(model.still.detach().clone())
            optimizer.step()
        with paceline.evaluating(model) as snapshot:
            found.append(snapshot.still.detach().clone())
        return found

    seen: list[Tensors] = []
    if host == "live":
        run = run_on_threads(train, workers=2, servers=1, sync=sync, transport="tcp", wire="bf16")
        seen = list(run.results.values())  # type: ignore[arg-type]
    else:
        simulate(Cluster(compute_s=[1.0, 2.0]), sync, train_fn=lambda: seen.append(train()), wire="bf16")
    assert len(seen) == 2
    for before, first, second, evaluated in seen:
        for exact in (before, first, evaluated):  # the first weights are exact, too
            assert torch.equal(exact, -THIRDS)
        assert torch.equal(second, narrowed(-THIRDS))


@pytest.mark.parametrize("host", ["live", "simulated"])
def test_parameters_that_are_added_later_begin_with_exact_weights(
    host: str, run_on_threads: RunOnThreads
) -> None:
    def train() -> Tensors:
        found = []
        for _ in range(2):  # the second model is an extension
            model = Vector()
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
            for _ in range(2):
                optimizer.zero_grad()
                model.loss().backward()
                found.append(model.still.detach().clone())
                optimizer.step()
        return found

    seen: list[Tensors] = []
    if host == "live":
        run = run_on_threads(train, workers=2, servers=2, shards=3, transport="tcp", wire="bf16")
        seen = list(run.results.values())  # type: ignore[arg-type]
    else:
        simulate(Cluster(compute_s=[1.0, 2.0]), train_fn=lambda: seen.append(train()), wire="bf16")
    assert len(seen) == 2
    narrow = narrowed(-THIRDS)
    for one, two, three, four in seen:
        assert torch.equal(one, -THIRDS)
        assert torch.equal(three, -THIRDS)
        assert torch.equal(two, narrow)
        assert torch.equal(four, narrow)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_several_optimizers_round_what_each_pulls(transport: str, run_on_threads: RunOnThreads) -> None:
    """The weights of a set change only in the steps of its optimizer."""

    def train() -> list[bool]:
        one, two = Vector(), Vector()
        first = DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=0.0), model=one)
        second = DistributedOptimizer(torch.optim.SGD(two.parameters(), lr=0.0), model=two)
        narrow = narrowed(-THIRDS)
        found = []
        for optimizer in (first, second):
            first.zero_grad()
            second.zero_grad()
            (one.loss() + two.loss()).backward()
            optimizer.step()
            found += [torch.equal(model.still, narrow) for model in (one, two)]
        return found

    run = run_on_threads(train, workers=2, servers=2, transport=transport, wire="bf16")
    assert run.results == {worker: [True, False, True, True] for worker in range(2)}


@pytest.mark.parametrize("near", [False, True], ids=["another machine", "the machine of the servers"])
def test_a_worker_that_joins_late_begins_with_exact_weights(
    near: bool, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine of the servers, it shares its memory with them, so nothing is rounded later, either."""
    if not near:
        monkeypatch.setattr(worker_module, "is_here", lambda address: False)
    first: dict[int, torch.Tensor] = {}
    await_first_weights = WorkerSession.await_first_weights

    def watched(session: WorkerSession) -> None:
        await_first_weights(session)
        first[session.worker] = session.weights["float32"].clone()

    monkeypatch.setattr(WorkerSession, "await_first_weights", watched)
    stepped, joined = threading.Event(), threading.Event()
    after: list[Tensors] = []

    def train() -> None:
        index = paceline.worker_index()
        model = Vector()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1 / 1024), model=model)
        for step in range(4):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            if index:
                after.append([each.detach().clone() for each in model.parameters()])
                joined.set()
            elif step == 2:
                stepped.set()
                assert joined.wait(60.0)

    run_on_threads(train, late=stepped, servers=2, sync="asp", wire="bf16")
    size = len(THIRDS)
    offset = Layout.of([Parameter((name,), (size,), "float32") for name in ("moving", "still")]).offsets[1]
    for weights in first.values():
        assert torch.equal(weights[offset : offset + size], -THIRDS)
    moved = first[1][:size]  # by the updates of worker 0
    assert not torch.equal(moved, THIRDS)
    assert not torch.equal(moved, narrowed(moved))
    for _, still in after:
        assert torch.equal(still, -THIRDS if near else narrowed(-THIRDS))


# -- int8 and int4: weights as differences from a base --------------------------------------------------------


def perceptron(
    steps: int,
    dtype: torch.dtype = torch.float32,
    *,
    extends_at: int = -1,
    told: Callable[[int], None] = lambda step: None,
) -> Callable[[], None]:
    """A script whose result depends only on its workers' indices. A parameter has a gradient in some steps only.

    In one step, it adds a parameter. `told` is called with the number of each step.
    """

    def train() -> None:
        generator = torch.Generator().manual_seed(1)
        layers = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 7))
        model = nn.ModuleDict({"layers": layers})
        model.sometimes = nn.Parameter(torch.ones(5))
        for parameter in model.parameters():
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(dtype)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, model=model)
        generator.manual_seed(worker_index())
        scale = nn.Parameter(torch.ones(7, dtype=dtype))
        for step in range(steps):
            told(step)
            if step == extends_at:
                model.scale = scale
                optimizer.add_param_group({"params": [scale]})
            x = torch.randn(16, 20, generator=generator).to(dtype)
            y = torch.randint(0, 7, (16,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy((layers(x) * scale).float(), y)
            (loss if step % 3 else loss + 0.01 * model.sometimes.float().sum()).backward()
            optimizer.step()

    return train


WIRES_OF_INTEGERS = ["gradients=int8", "weights=int8", "int4", "gradients=int8,weights=int4"]
DIFFERENT = [("weights=int8", 1, 1), ("gradients=int8", 2, 2), ("int4", 2, 5)]
"""One number of shards for each codec and direction."""


@pytest.mark.parametrize(
    ("wire", "servers", "shards"),
    [
        *DIFFERENT,
        *thorough(
            *(
                (wire, *numbers)
                for wire, numbers in product(WIRES_OF_INTEGERS, [(1, 1), (2, 2), (2, 5)])
                if (wire, *numbers) not in DIFFERENT
            )
        ),
    ],
)
def test_a_live_run_is_its_simulation_to_the_bit_for_any_number_of_shards(
    wire: str, servers: int, shards: int, run_on_threads: RunOnThreads
) -> None:
    train = perceptron(20)
    options: dict[str, Any] = {"sync": "bsp", "wire": wire}
    live = run_on_threads(
        train, workers=2, servers=servers, shards=shards, transport="tcp", **options
    ).state_dict
    simulated = simulate(Cluster(compute_s=[1.0, 1.5]), train_fn=train, **options).state_dict
    exact = simulate(Cluster(compute_s=[1.0, 1.5]), "bsp", train_fn=train).state_dict
    assert simulated is not None
    assert exact is not None
    for name, values in live.items():
        assert torch.equal(values, simulated[name])
    largest = max((values - exact[name]).abs().max() for name, values in live.items())
    assert 0.0 < largest < 0.02


@pytest.mark.parametrize("wire", thorough("int8", "int4"))
def test_a_long_live_run_is_its_simulation_to_the_bit(wire: str, run_on_threads: RunOnThreads) -> None:
    train = perceptron(2000, extends_at=700)
    options: dict[str, Any] = {"sync": "bsp", "wire": wire}
    live = run_on_threads(train, workers=2, servers=2, transport="tcp", **options)
    simulated = simulate(Cluster(compute_s=[1.0, 1.5]), train_fn=train, **options).state_dict
    assert simulated is not None
    for name, values in live.state_dict.items():
        assert torch.equal(values, simulated[name])
    assert live.repeated_bases == 0


@pytest.mark.parametrize("wire", thorough("int8", "int4"))
def test_a_worker_that_joins_a_long_live_run_has_the_base_of_the_others(
    wire: str, run_on_threads: RunOnThreads
) -> None:
    joins = threading.Event()
    train = perceptron(2000, told=lambda step: joins.set() if step == 500 else None)
    run = run_on_threads(train, workers=3, servers=2, sync="bsp", wire=wire, late=joins)
    assert run.results.keys() == {0, 1, 2}
    assert run.repeated_bases == 0  # each answer has the checksum of the server's base


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_parameters_with_two_bytes_are_encoded(wire: str, run_on_threads: RunOnThreads) -> None:
    train = perceptron(10, torch.bfloat16)
    options: dict[str, Any] = {"sync": "bsp", "wire": wire}
    run = run_on_threads(train, workers=2, servers=1, transport="tcp", **options)
    simulated = simulate(Cluster(compute_s=[1.0, 1.5]), train_fn=train, **options)
    assert simulated.state_dict is not None
    for name, values in run.state_dict.items():
        assert torch.equal(values, simulated.state_dict[name])
    assert sum(simulated.pull_bytes) < 0.6 * sum(simulated.shard_bytes)


@pytest.mark.parametrize(
    ("wire", "extends"), [("int8", False), ("int4", True), *thorough(("int8", True), ("int4", False))]
)
def test_several_optimizers_have_bases_of_their_own(
    wire: str, extends: bool, run_on_threads: RunOnThreads
) -> None:
    def train() -> None:
        generator = torch.Generator().manual_seed(1)
        models = [nn.Linear(30, 20), nn.Linear(20, 5)]
        for parameter in (*models[0].parameters(), *models[1].parameters()):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        optimizers: list[DistributedOptimizer] = []
        generator.manual_seed(worker_index())
        for step in range(16):
            if step in (0, 5 if extends else 0):
                for model in models[len(optimizers) :][: 1 if extends else 2]:
                    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                    optimizers.append(DistributedOptimizer(sgd, model=model))
            x = torch.randn(8, 30, generator=generator)
            for each in models:
                each.zero_grad()
            models[1](models[0](x).relu()).square().mean().backward()
            for optimizer in optimizers[:: 1 + step % 2]:  # the second one makes fewer steps
                optimizer.step()

    options: dict[str, Any] = {"sync": "bsp", "wire": wire}
    live = run_on_threads(train, workers=2, servers=2, shards=3, transport="tcp", **options).state_dict
    simulated = simulate(Cluster(compute_s=[1.0, 1.5]), train_fn=train, **options).state_dict
    assert simulated is not None
    assert live.keys() == simulated.keys()
    for name, values in live.items():
        assert torch.equal(values, simulated[name])


def test_a_worker_that_has_come_to_another_base_receives_all_of_it(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = BaseReceiver.decode
    decoded = itertools.count()

    def damaged(end: BaseReceiver, ranges: Any, *, whole: bool) -> int:
        if next(decoded) == 12:
            end.base["float32"][7] += 1.0
        return decode(end, ranges, whole=whole)

    monkeypatch.setattr(BaseReceiver, "decode", damaged)
    train = perceptron(10)
    options: dict[str, Any] = {"sync": "bsp", "wire": "int4"}
    run = run_on_threads(train, workers=2, servers=1, transport="tcp", **options)
    simulated = simulate(Cluster(compute_s=[1.0, 1.5]), train_fn=train, **options)
    assert simulated.state_dict is not None
    assert run.repeated_bases == 1
    for name, values in run.state_dict.items():
        assert torch.equal(values, simulated.state_dict[name])


def test_a_base_is_repeated_once(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that asks again and again could let the queue of its server grow without limit."""
    decode, send = WorkerMemory.decode, Links.to_shard

    def never(memory: WorkerMemory, answer: Answer) -> bool:
        return decode(memory, answer) and (answer.base < 5 or answer.codec == "float32")

    def twice(links: Links, shard: int, message: Message, *rest: Any, **options: Any) -> None:
        for _ in range(1 + (type(message) is BaseRequested)):
            send(links, shard, message, *rest, **options)

    monkeypatch.setattr(WorkerMemory, "decode", never)
    monkeypatch.setattr(Links, "to_shard", twice)
    run = run_on_threads(
        perceptron(10), workers=2, servers=1, transport="tcp", sync="bsp", wire="int4", keep_errors=True
    )
    assert run.errors.keys() == {0, 1}
    assert "it asks for the base of shard 0, which was not sent" in caplog.text


@pytest.mark.parametrize(
    ("sync", "options", "pulled"),
    [
        ("bsp", {}, "float32 int4"),
        ("asp", {}, "bf16 float32"),
        ("bsp@0,asp@4,bsp@8", {}, "bf16 float32 int4"),
        ("bsp", {"overlap": "off"}, "float32 int4"),
        ("bsp", {"slicing": "by-parameter", "shards": 3}, "float32 int4"),
    ],
    ids=str,
)
def test_the_codec_of_the_weights_depends_on_the_sync_model(
    sync: str,
    options: dict[str, Any],
    pulled: str,
    run_on_threads: RunOnThreads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = set()
    decode = WorkerMemory.decode

    def watched(memory: WorkerMemory, answer: Answer) -> bool:
        found.add(answer.codec)
        return decode(memory, answer)

    monkeypatch.setattr(WorkerMemory, "decode", watched)
    run = run_on_threads(
        perceptron(12), workers=2, servers=2, transport="tcp", wire="int4", sync=sync, **options
    )
    assert sorted(found) == pulled.split()
    for trace in run.traces:
        assert replay(trace) == []


COMING_AND_GOING = {  # before a parameter is added: later, no worker can join a simulated run
    0: Presence(lost_at_s=1400.3, back_after_s=9.0),
    1: Presence(lost_at_s=20.3, back_after_s=1000.0),
    2: Presence(joins_at_s=30.1),
}

BASED_SCRIPTS: dict[str, tuple[Callable[[], None], str, Cluster]] = {
    "steady": (perceptron(30), "bsp", Cluster(compute_s=[1.0, 1.5])),
    "long": (
        perceptron(10_000, extends_at=2000),
        "bsp@0,spec-sync@3000,bsp@3100,asp@5000,bsp@5050",
        Cluster(compute_s=[0.7, 1.0, 0.8], servers=2, presence=COMING_AND_GOING),
    ),
    "changes": (perceptron(40), "bsp@0,asp@10,bsp@20", Cluster(compute_s=[1.0, 1.5, 2.0])),
    "comes and goes": (
        perceptron(60),
        "bsp",
        Cluster(
            compute_s=[1.0, 1.5, 1.0, 1.2],
            presence={1: Presence(lost_at_s=20.3, back_after_s=9.0), 2: Presence(joins_at_s=30.1)},
        ),
    ),
}


COMING = [("comes and goes", "int8"), ("changes", "int4")]
"""Whole bases for workers that join or return, and after a change of the model."""


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        *COMING,
        *thorough(*(case for case in product(BASED_SCRIPTS, ["int8", "int4"]) if case not in COMING)),
    ],
)
def test_in_virtual_time_every_worker_comes_to_the_base_by_what_it_receives(
    name: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has received differences or whole bases has the server's base, whoever comes, goes or changes."""
    train, sync, cluster = BASED_SCRIPTS[name]
    receivers: dict[tuple[int, int], BaseReceiver] = {}
    kinds: Counter[str] = Counter()
    sent = Training.sent

    def watched(training: Training, worker: int, answer: Answer) -> float:
        share = sent(training, worker, answer)
        if not answer.base:
            return share
        based, end = training._bases[answer.shard], (worker, answer.shard)
        whole = answer.codec == "float32"
        kinds["whole" if whole else "difference"] += 1
        if end not in receivers or whole:
            receivers[end] = BaseReceiver(
                wire, {name: torch.zeros_like(each) for name, each in based.vectors.items()}
            )
        receiver, ranges = receivers[end], based.ranges(based.vectors)
        ends = Receiver("float32", receiver.vectors) if whole else receiver
        for there, data in zip(ends.memory(ranges), based.payload(based.vectors, whole=whole), strict=True):
            there[:] = data
        assert receiver.decode(ranges, whole=whole) == based.checksum(based.vectors)
        return share

    monkeypatch.setattr(Training, "sent", watched)
    run = simulate(cluster, sync, train_fn=train, wire=wire, cut_at_s=[1500.0] if name == "long" else [])
    for cut in run.cuts:
        simulate(cluster, "bsp", train_fn=perceptron(50), wire=wire, resumed=cut)
    assert kinds["whole"] >= cluster.workers
    assert kinds["difference"] > 10 * kinds["whole"] or name == "changes"


@pytest.mark.parametrize("wire", ["weights=int4", "gradients=int8,weights=int4", "weights=int8"])
@pytest.mark.parametrize("sync", ["asp", "ssp:staleness=2", "bsp@0,asp@9"])
def test_differences_need_workers_with_equal_weights(wire: str, sync: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=f"under {sync} workers have different weights. Use weights=bf16"
    ):
        make_job(workers=2, wire=wire, sync=sync, run_dir=tmp_path / "run")
    with pytest.raises(ConfigurationError, match="Use weights=bf16"):
        simulate(Cluster(compute_s=[1.0]), sync, wire=wire)
    make_job(workers=2, wire="int4", sync=sync, run_dir=tmp_path / "run")


# -- shared memory ------------------------------------------------------------------------------------------


def test_between_processes_that_share_memory_nothing_is_rounded(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    run = run_on_threads(training(), workers=2, servers=2, transport="shm", wire="bf16")
    for worker, steps in run.results.items():
        assert isinstance(steps, list)
        for iteration, (gradients, weights) in enumerate(steps):
            assert same(flat(watched.pushed[worker, iteration]), gradients)
            assert same(weights, flat(watched.held[iteration + 1]))


@pytest.mark.parametrize("wire", ["bf16", "float32"])
def test_a_format_that_has_no_effect_is_said(wire: str, tmp_path: Path) -> None:
    job = make_job(workers=1, servers=1, transport="shm", wire=wire, run_dir=tmp_path / "run")
    assert ("bf16 has no effect" in describe(job)["wire"]) == (wire == "bf16")
    assert bool(job.wire_in_vain()) == (wire == "bf16")
    over_tcp = make_job(workers=1, servers=1, transport="tcp", wire=wire, run_dir=tmp_path / "other")
    assert over_tcp.wire_in_vain() == ""
    assert wire in describe(over_tcp)["wire"]


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        (
            ["float64", "float64/1"],
            "all parameters of the model are float64, so gradients and weights travel as",
        ),
        (["float32", "float64/1"], ""),
        ([], ""),
    ],
)
def test_a_format_that_encodes_no_value_of_the_model_is_said(vectors: list[str], said: str) -> None:
    job = make_job(workers=1, servers=1, transport="tcp", wire="int4", dry_run=True)
    assert said in job.wire_in_vain(vectors)
    assert bool(job.codecs(vectors)) == (not job.wire_in_vain(vectors)) == (not said)


@pytest.mark.parametrize(
    ("optimizer", "wire", "sync", "advised"),
    [
        ("Muon", "int4", "bsp", "gradients=int8,weights=int4"),
        ("moonlight:Muon", "int4", "asp", "int8"),
        ("Muon", "gradients=int8,weights=int4", "bsp", ""),
        ("AdamW", "int4", "bsp", ""),
    ],
)
def test_gradients_in_a_format_that_their_optimizer_does_not_bear_are_said(
    optimizer: str, wire: str, sync: str, advised: str
) -> None:
    job = make_job(workers=2, transport="tcp", wire=wire, sync=sync, dry_run=True)
    layout = Layout.of([Parameter(("bias",), (2,), "float32"), Parameter(("weight",), (2, 2), "float32", 1)])
    model = ModelSpec(layout, OptimizerSpec("AdamW", (), (0,)), (), (OptimizerSpec(optimizer, (), (0,)),))
    assert wire_line(job, model).endswith(f"Try --wire {advised}." if advised else "")
    assert bool(wire_line(job, model)) == bool(advised)


# -- in virtual time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bf16", "float32", *thorough("gradients=bf16", "weights=bf16")])
def test_a_simulation_trains_as_a_live_run_does(wire: str, run_on_threads: RunOnThreads) -> None:
    cluster = Cluster(compute_s=[1.0, 2.0], servers=2)
    seen: dict[int, Steps] = {}
    simulated = simulate(
        cluster,
        train_fn=lambda: seen.update({worker_index(): training()()}),
        shards=3,
        wire=wire,
    )
    run = run_on_threads(training(), workers=2, servers=2, shards=3, transport="tcp", wire=wire)
    assert simulated.state_dict is not None
    assert simulated.wire == wire if "=" not in wire else simulated.summary["wire"].startswith("gradients=")
    for name, value in run.state_dict.items():
        assert torch.equal(simulated.state_dict[name], value), name
    for worker, steps in run.results.items():
        assert isinstance(steps, list)
        for (_, live), (_, virtual) in zip(steps, seen[worker], strict=True):
            assert same(live, virtual)


@pytest.mark.parametrize(
    ("wire", "push", "pull"),
    [("float32", 1.0, 1.0), ("bf16", 0.5, 0.5), ("gradients=bf16", 0.5, 1.0), ("weights=bf16", 1.0, 0.5)],
)
def test_half_as_many_bytes_are_simulated(wire: str, push: float, pull: float) -> None:
    cluster = Cluster(compute_s=[1.0, 1.0], servers=2, size_bytes=8_000_000, bandwidth_bps=100e6)
    result = simulate(cluster, iterations=10, wire=wire)
    sent = result.bytes_by_kind
    assert sent["push"] == pytest.approx(20 * 8e6 * push, rel=1e-3)
    assert sent["pull"] == pytest.approx(20 * 8e6 * pull, rel=1e-3)
    # Both workers send 8 MB over the links of the servers, 4 MB to each, and receive as much.
    assert result.time_s == pytest.approx(10 * (1 + 0.64 * (push + pull)), rel=0.05)


# -- runs in processes of their own ---------------------------------------------------------------------------


@pytest.mark.processes
def test_a_run_that_shares_memory_says_that_the_format_has_had_no_effect(mark: str) -> None:
    result = paceline.launch(live_training(), args=(3,), workers=1, servers=1, transport="shm", wire="bf16")
    assert result.summary["wire"] == "bf16"
    assert any("--wire bf16 has no effect" in finding for finding in result.summary["findings"])


@pytest.mark.processes
def test_a_run_over_tcp_rounds_and_its_settings_name_the_format(mark: str, tmp_path: Path) -> None:
    result = paceline.launch(
        live_training(),
        args=(3,),
        workers=2,
        servers=1,
        transport="tcp",
        wire="gradients=bf16",
        run_dir=tmp_path / "run",
    )
    assert result.summary["wire"] == "gradients=bf16,weights=float32"
    assert not any("--wire" in finding for finding in result.summary["findings"])
    assert '"--wire"' in (tmp_path / "run" / "run.json").read_text()
    assert result.summary["optimizers"] == ["SGD"]
    assert sum(result.summary["shard_bytes"]) == 4 * result.summary["vectors"]["float32"]
    assert Cluster.from_run(tmp_path / "run").optimizers == ("SGD",)


SCRIPT = """
import torch, paceline
from torch import nn

model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(2, 1).double()])
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
for _ in range(3):
    optimizer.zero_grad()
    model[1](model[0](torch.ones(1, 4)).double()).sum().backward()
    optimizer.step()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sync", "weights"),
    [("bsp", "int8, as differences from what the workers have"), *thorough(("asp", "bf16"))],
)
def test_a_run_says_at_its_beginning_what_travels_how(sync: str, weights: str, mark: str) -> None:
    Path("train.py").write_text(SCRIPT)
    options = ["--workers", "2", "--servers", "1", "--transport", "tcp", "--wire", "int8", "--sync", sync]
    said = run_program("-m", "paceline", "run", *options, "train.py").stderr
    assert (
        f"codecs between processes: gradients as int8, weights as {weights}; float64 values as they are"
        in said
    )
