"""Compares Paceline with MXNet's kvstore on slow links. Fig. 6 of FluentPS is a comparison with PS-Lite in MXNet.

The parameters are those of ResNet-56, with one key of MXNet for each tensor. Eight workers and eight servers have a
link each. To leave the cores of this machine to the exchange, the forward and the backward pass only sleep for each
layer: the forward pass for a third of the compute time, and the backward pass for the rest. A layer's gradients are
ready when its part of the backward pass ends.

By default, MXNet has overlap: it pushes, pulls and begins the next forward pass layer by layer. MXNet chooses the
server of a tensor by a hash. With "even", MXNET_KVSTORE_BIGARRAY_BOUND makes MXNet divide the largest convolutions,
which have three quarters of the parameters, among all servers. With "one server", all keys are on one server. PS-Lite
itself would also put all keys on one server: it gives each server an equal range of all possible keys, and the few keys
of this model all lie in the first range.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.cli.console import TellShare
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import worker_index
from reproductions.papers import FLUENT_PS

from ..harness import WARM_UP, Columns, Figures, in_turns, live, median_s, rounds_text, spread
from ..transport.kvstore import KvTask, KvTimes, run_kvstore
from .namespaces import Network, NetworkLink, network

WORKERS = 8
SERVERS = 8
COMPUTE_S = 0.38  # compute time of an iteration of each of 32 workers (FluentPS, Table IV)
LR = 1e-3
EVEN = {"MXNET_KVSTORE_BIGARRAY_BOUND": "30000"}  # smaller bounds mean far more messages
PAPER = ("overlap-saves", "overlap-and-eps-save", "faster-than-ps-lite")


class BesideRow(msgspec.Struct, frozen=True):
    """The results for one setting: medians over the rounds, and two comparisons with the first setting."""

    setting: str
    communication_ms: float  # time of an iteration minus the time of its forward and backward pass
    low_ms: float
    high_ms: float
    iteration_ms: float
    saved: float  # fraction of the first setting's communication time that this setting saves
    faster: float  # time of an iteration in the first setting, divided by the time in this setting


COLUMNS: Columns[BesideRow] = {
    "setting": lambda row: row.setting,
    "ms": lambda row: f"{row.communication_ms:.0f}",
    "low - high": lambda row: f"{row.low_ms:.0f} - {row.high_ms:.0f}",
    "saved": lambda row: f"{row.saved:.1%}",
    "iteration": lambda row: f"{row.iteration_ms:.0f}",
    "times as fast": lambda row: f"{row.faster:.2f}",
}


def resnet_56() -> list[list[int]]:
    """Return the number of elements of each tensor of each layer of ResNet-56 for CIFAR-10."""
    layers, before = [[16 * 3 * 9]], 16
    for width in (16, 32, 64):
        for _ in range(9):
            layers += [[width * inputs * 9, width, width] for inputs in (before, width)]
            before = width
    return [*layers, [10 * 64, 10]]


def measure_beside(
    tell: TellShare,
    python: str,
    link: NetworkLink,
    rounds: int,
    iterations: int,
    shards: int,
    compute_s: float,
) -> list[Figures[BesideRow]]:
    """Measure all settings in turn. `python` is an interpreter that can import MXNet."""
    with network(SERVERS + WORKERS, link) as machines:
        mxnet = partial(_run_mxnet, python, machines, iterations, compute_s)
        paceline = partial(_run_paceline, machines, iterations, compute_s, shards=SERVERS)
        many = f"overlap, even, {shards} shards"
        cases = {
            "MXNet bsp, off": partial(mxnet, "bsp", overlap=False),
            "MXNet bsp, off, one server": partial(mxnet, "bsp", overlap=False, servers=1),
            "MXNet bsp, overlap": partial(mxnet, "bsp"),
            "MXNet bsp, overlap, even": partial(mxnet, "bsp", variables=EVEN),
            "MXNet asp, overlap": partial(mxnet, "asp"),
            "Paceline bsp, off, by parameter": partial(
                paceline, sync="bsp", overlap="off", slicing="by-parameter"
            ),
            "Paceline bsp, overlap, by parameter": partial(paceline, sync="bsp", slicing="by-parameter"),
            f"Paceline bsp, overlap, even, {SERVERS} shards": partial(paceline, sync="bsp"),
            f"Paceline bsp, {many}": partial(paceline, sync="bsp", shards=shards),
            f"Paceline asp, {many}": partial(paceline, sync="asp", shards=shards),
        }
        found = in_turns(tell, rounds, cases, lambda case: case())
    saved, both, faster = (FLUENT_PS.numbers[name] for name in PAPER)
    delay = f"{1e3 * link.delay_s:g} ms of delay" if machines.delayed else "no delay"
    caption = (
        f"{WORKERS} workers and {SERVERS} servers, each with a link of {link.rate} and {delay}; passes of "
        f"{1e3 * compute_s:g} ms; {rounds_text(rounds)}\nsaved, times as fast: compared with the first setting\n"
        f"FluentPS, compared with PS-Lite: overlap saves {saved}; with even slices, it saves {both} and is "
        f"{faster} as fast"
    )
    return [Figures("Communication time per iteration of ResNet-56, ms", rows_of(found), COLUMNS, caption)]


def rows_of(found: Mapping[str, Sequence[Sequence[KvTimes]]]) -> list[BesideRow]:
    """Return a row for each setting, from the times of all workers in each round."""
    rows: list[BesideRow] = []
    for name, rounds in found.items():
        times_ms = spread(1e3 * fmean(each.whole_s - each.bare_s for each in workers) for workers in rounds)
        iteration_ms = median(1e3 * fmean(each.whole_s for each in workers) for workers in rounds)
        first = rows[0] if rows else BesideRow(name, *times_ms, iteration_ms, 0.0, 1.0)
        saved, faster = 1 - times_ms.median / first.communication_ms, first.iteration_ms / iteration_ms
        rows.append(BesideRow(name, *times_ms, iteration_ms, saved, faster))
    return rows


def _run_mxnet(
    python: str,
    machines: Network,
    iterations: int,
    compute_s: float,
    mode: str,
    overlap: bool = True,
    servers: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[KvTimes]:
    task = KvTask(mode, resnet_56(), LR, WARM_UP, iterations, compute_s, overlap)
    place = machines.placement(SERVERS)
    return run_kvstore(python, task, machines.host, place.servers[:servers], place.workers, variables)


def _run_paceline(machines: Network, iterations: int, compute_s: float, **settings: Any) -> list[KvTimes]:
    settings = {"workers": WORKERS, "servers": SERVERS, "transport": "tcp", **settings}
    place = machines.placement(SERVERS)
    return live(_train, iterations, compute_s, kind=KvTimes, placement=place, **settings)[1]


class Layer(torch.autograd.Function):
    """A layer that computes by sleeping. All elements of its gradients are `slope`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer_s: float, slope: float, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer_s, ctx.slope, ctx.weights = layer_s, slope, weights
        time.sleep(layer_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.layer_s)
        return *gradients, None, None, *(torch.full_like(weight, ctx.slope) for weight in ctx.weights)


def _train(iterations: int, compute_s: float) -> KvTimes:
    torch.set_num_threads(1)
    layers = resnet_56()
    model, bare = (
        nn.ModuleList(nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in layer) for layer in layers)
        for _ in range(2)
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)

    def compute(net: nn.ModuleList) -> None:
        net.zero_grad()
        x = torch.zeros((), requires_grad=True)
        for layer in net:
            slope = worker_index() + 1.0
            x = Layer.apply(x, compute_s / 3 / len(layers), slope, *layer.parameters())  # type: ignore[no-untyped-call]
        x.backward()

    def step() -> None:
        compute(model)
        optimizer.step()

    return KvTimes(median_s(step, iterations), median_s(lambda: compute(bare), iterations))
