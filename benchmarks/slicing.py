"""`python -m benchmarks slicing`: compares whole tensors with even slices, and servers with threads of one server.

If an optimizer needs whole tensors, as Muon does, each shard gets whole tensors, chosen so that the updates of all
shards cost about the same. The layout is that of a transformer: Muon trains the matrices of its layers, and AdamW the
embedding and the vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from paceline.cli.console import TellShare
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter, ShardSlice
from paceline.core.messages import StepsTimed, StepTime
from paceline.look.step_cost import StepCost
from paceline.shard.optimizers import make_optimizer
from paceline.shard.store import Push, Store

from .harness import Benchmark, Columns, Figures, Rounds, marked, rounds_text

SHARDS = 4
GOAL = 1.1  # largest permitted ratio: time of a step with whole tensors / time with even slices
TABLE = 16_384  # rows of the embedding


class SlicingRow(msgspec.Struct, frozen=True):
    """A step of all shards with one way of slicing.

    Attributes:
        slicing: the optimizer of the matrices, and how the matrices are sliced.
        largest: size of the largest shard, as a multiple of the mean.
        mean_ms: mean processor time of a shard's step.
        slowest_ms: processor time of the slowest shard's step, for which workers wait.
        even_ms: `slowest_ms` of the same updates on even slices; 0 if the optimizer cannot use even slices.
    """

    slicing: str
    largest: float
    mean_ms: float
    slowest_ms: float
    even_ms: float


class PredictionRow(msgspec.Struct, frozen=True):
    """A step of Muon with several shards: the prediction from the step of one shard, and the measurement.

    Attributes:
        layout: the matrices.
        shards: number of shards.
        predicted_ms: predicted processor time of the slowest shard.
        slowest_ms: measured processor time of the slowest shard.
    """

    layout: str
    shards: int
    predicted_ms: float
    slowest_ms: float


class ParallelRow(msgspec.Struct, frozen=True):
    """A step of Muon by servers that run at the same time.

    Attributes:
        servers: number of servers.
        threads: number of threads of each server.
        step_ms: time until all servers have made their steps.
        alone_ms: time of the step by one server with one thread.
    """

    servers: int
    threads: int
    step_ms: float
    alone_ms: float


SLICING_COLUMNS: Columns[SlicingRow] = {
    "slices": lambda row: row.slicing,
    "largest / mean size": lambda row: f"{row.largest:.2f}",
    "step: mean (ms)": lambda row: f"{row.mean_ms:.1f}",
    "slowest shard (ms)": lambda row: f"{row.slowest_ms:.1f}",
    "ratio to even slices": lambda row: (
        marked(f"{row.slowest_ms / row.even_ms:.2f}", row.slowest_ms <= GOAL * row.even_ms)
        if row.even_ms
        else "-"
    ),
    "slowest / mean": lambda row: f"{row.slowest_ms / row.mean_ms:.2f}",
}

PREDICTION_COLUMNS: Columns[PredictionRow] = {
    "matrices": lambda row: row.layout,
    "shards": lambda row: str(row.shards),
    "predicted (ms)": lambda row: f"{row.predicted_ms:.1f}",
    "slowest shard (ms)": lambda row: f"{row.slowest_ms:.1f}",
    "ratio": lambda row: f"{row.predicted_ms / row.slowest_ms:.2f}",
}

PARALLEL_COLUMNS: Columns[ParallelRow] = {
    "servers": lambda row: str(row.servers),
    "threads of each": lambda row: str(row.threads),
    "step (ms)": lambda row: f"{row.step_ms:.1f}",
    "times as fast": lambda row: f"{row.alone_ms / row.step_ms:.2f}",
}


class _Shard(NamedTuple):
    store: Store
    pushes: Sequence[Push]

    def step(self) -> None:
        """Make a step of each parameter set."""
        for number, push in enumerate(self.pushes):
            self.store.put(0, number, push)
            self.store.apply([(0, number)], [1.0])


@Benchmark(minutes=3, quick={"rounds": 1, "width": 32})
def measure(tell: TellShare, rounds: Rounds = 15, width: int = 512, layers: int = 10) -> list[Figures[Any]]:
    """Compare slices of whole tensors with even slices, and several servers with one server that has several threads.

    The steps of the shards are timed one after the other, and all ways of slicing take turns. The measured processor
    time hardly depends on other programs. Servers that run at the same time are timed by the clock.
    """
    ways = {
        "AdamW, even": ("AdamW", False),
        "AdamW, whole tensors": ("AdamW", True),
        "Muon, whole tensors": ("Muon", True),
    }
    models = {name: _model(*way, width, layers) for name, way in ways.items()}
    slices = {name: model.sliced(SHARDS, "auto") for name, model in models.items()}
    shards = {name: [_shard(models[name], bounds) for bounds in slices[name]] for name in ways}
    times_ms: dict[str, list[list[float]]] = {name: [[] for _ in range(SHARDS)] for name in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(rounds + 1):  # the first round, which first uses the memory, is not measured
            tell(f"round {number}", 0.5 * number / (rounds + 1))
            for index in range(SHARDS):
                for name in ways:
                    times_ms[name][index].append(_processor_ms(shards[name][index].step))
        typical = {name: [median(each[1:]) for each in of_shards] for name, of_shards in times_ms.items()}
        rows = [
            SlicingRow(
                name,
                max(each.size_bytes for each in slices[name])
                / (sum(each.size_bytes for each in slices[name]) / SHARDS),
                sum(typical[name]) / SHARDS,
                max(typical[name]),
                0.0 if ways[name][0] == "Muon" else max(typical["AdamW, even"]),
            )
            for name in ways
        ]
        shards.clear()
        predicted = [
            row
            for layout, shapes in {
                "layers of a transformer": _layer(width // 2) * layers,
                "these layers, and one large matrix": [*_layer(width // 2) * layers, (3 * width, 3 * width)],
            }.items()
            for row in _predictions(layout, _muon(shapes), rounds)
        ]
        parallel = _parallel(models["Muon, whole tensors"], rounds, tell)
    finally:
        torch.set_num_threads(threads)
    caption = f"goal: whole tensors within {GOAL - 1:.0%} of even slices; {rounds_text(rounds)}"
    size = f"{layers} layers of width {width}, embedding of {TABLE} rows"
    return [
        Figures(f"A step of {SHARDS} shards on one core each: {size}", rows, SLICING_COLUMNS, caption),
        Figures("A step of Muon, predicted from one shard and measured", predicted, PREDICTION_COLUMNS),
        Figures("A step of Muon: several servers, or threads of one server", parallel, PARALLEL_COLUMNS),
    ]


def _predictions(layout: str, model: ModelSpec, rounds: int) -> list[PredictionRow]:
    """From the step of one shard, predict steps with several shards. Time these steps, too."""
    [alone], whole_ms = model.sliced(1, "auto"), _slowest_ms(model, 1, rounds)
    report = StepsTimed((StepTime(0, 0, whole_ms / 1e3),), share=0.5)
    cost = StepCost.of(model, [alone], {0: report}, slicing="auto", block=1, servers=1, cores_of=None)
    assert cost is not None
    return [
        PredictionRow(layout, count, 1e3 * cost.predicted_s[count], _slowest_ms(model, count, rounds))
        for count in (2, SHARDS)
    ]


def _slowest_ms(model: ModelSpec, shards: int, rounds: int) -> float:
    """Return the processor time of the slowest shard's step."""
    held = [_shard(model, bounds) for bounds in model.sliced(shards, "auto")]
    return max(median([_processor_ms(each.step) for _ in range(rounds + 1)][1:]) for each in held)


def _parallel(model: ModelSpec, rounds: int, tell: TellShare) -> list[ParallelRow]:
    """Time steps of one server with one and two threads, and of two servers at the same time with one thread each."""
    held = {count: [_shard(model, bounds) for bounds in model.sliced(count, "auto")] for count in (1, 2)}
    cases = [(1, 1), (1, 2), (2, 1)]
    times_ms: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds + 1):
            tell(f"servers, round {number}", 0.5 + 0.5 * number / (rounds + 1))
            for servers, threads in cases:

                def step(shard: _Shard, threads: int = threads) -> None:
                    torch.set_num_threads(threads)
                    shard.step()

                begun_s = time.perf_counter()
                list(pool.map(step, held[servers]))
                times_ms[servers, threads].append(1e3 * (time.perf_counter() - begun_s))
    typical = {case: median(each[1:]) for case, each in times_ms.items()}
    return [ParallelRow(*case, typical[case], typical[1, 1]) for case in cases]


def _model(name: str, whole: bool, width: int, layers: int) -> ModelSpec:
    """Return a transformer whose matrices are trained by the optimizer `name`; AdamW trains everything else."""
    matrices, vectors = list[Parameter](), [Parameter(("embedding",), (TABLE, width), "float32", set_index=1)]
    for layer in range(layers):
        matrices += [Parameter((f"{layer}.{i}",), s, "float32") for i, s in enumerate(_layer(width))]
        sizes = [width] * 2 + [4 * width, width]
        vectors += [
            Parameter((f"{layer}.{i}.bias",), (n,), "float32", set_index=1) for i, n in enumerate(sizes)
        ]
    first, second = (_spec(kind, len(each)) for kind, each in ((name, matrices), ("AdamW", vectors)))
    return ModelSpec(
        Layout.of([*matrices, *vectors]), msgspec.structs.replace(first, whole=whole), (), (second,)
    )


def _layer(width: int) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a layer."""
    return [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]


def _muon(shapes: Sequence[tuple[int, int]]) -> ModelSpec:
    """Return a model of matrices that Muon trains."""
    matrices = [Parameter((str(index),), shape, "float32") for index, shape in enumerate(shapes)]
    optimizer = msgspec.structs.replace(_spec("Muon", len(matrices)), whole=True)
    return ModelSpec(Layout.of(matrices), optimizer, ())


def _spec(name: str, parameters: int) -> OptimizerSpec:
    group = make_optimizer(name, ({"lr": 1e-3},), [[torch.zeros(1, 1)]]).param_groups[0]
    settings = {key: value for key, value in group.items() if key != "params"}
    return OptimizerSpec(name, (settings,), (0,) * parameters)


def _shard(model: ModelSpec, bounds: ShardSlice) -> _Shard:
    generator = torch.Generator().manual_seed(bounds.index)
    weights, gradient = (
        {
            name: torch.randn(stop - start, generator=generator)
            for name, (start, stop) in bounds.bounds.items()
        }
        for _ in range(2)
    )
    present = b"\1" * len(model.layout.parameters)
    pushes = [
        Push(
            {name: each for name, each in gradient.items() if name in bounds.of_set(i).bounds},
            present,
            spec.groups,
            i,
        )
        for i, spec in enumerate(model.optimizers)
    ]
    return _Shard(Store(bounds, weights, model.optimizers_over_layout), pushes)


def _processor_ms(work: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - begun_s)
