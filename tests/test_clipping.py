"""Clipping of what is applied: under BSP as in one process on the joint batch, with one factor for all shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import paceline
from paceline.sim import Cluster, simulate
from paceline.sync.events import MeanClipped
from paceline.trace import replay
from paceline.trace.recording import Trace

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

VOCABULARY, WIDTH, LENGTH = 23, 16, 8
STEPS, MICRO, ROWS = 12, 2, 12  # optimizer steps, batches that each accumulates, rows of a joint batch
CLUSTER = Cluster(compute_s=[1.0, 1.3, 2.1], servers=2, latency_s=0.01)


class TinyGPT(nn.Module):
    """One block of causal attention, whose output layer shares the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = self.embedding(tokens) + self.position
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        logits: torch.Tensor = self.head(x + self.mlp(self.norm(x)))
        return logits


def gpt() -> TinyGPT:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return TinyGPT().double()


FIRST = gpt().state_dict()


def made() -> TinyGPT:
    model = gpt()
    model.load_state_dict(FIRST)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def tokens(step: int, micro: int) -> torch.Tensor:
    """The rows of a joint batch."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def alone(max_norm: float, clip: Callable[..., Any] = nn.utils.clip_grad_norm_) -> dict[str, torch.Tensor]:
    """One process on the joint batch."""
    model = made()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            (loss_of(model, tokens(step, micro)) / MICRO).backward()
        clip(model.parameters(), max_norm)
        optimizer.step()
    return model.state_dict()


def train(max_norm: float | Callable[[int], float], steps: int = STEPS) -> dict[str, torch.Tensor]:
    """One worker of a run: each worker has an equal part of the rows."""
    model = made()
    optimizer = paceline.DistributedOptimizer(optimizer_of(model), model=model)
    worker, workers = paceline.worker_index(), paceline.worker_count()
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(MICRO):
            (loss_of(model, tokens(step, micro)[worker::workers]) / MICRO).backward()
        optimizer.clip_grad_norm(max_norm(worker) if callable(max_norm) else max_norm)
        optimizer.step()
    return model.state_dict()


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    off = [float(torch.linalg.norm(actual[name] - expected[name])) for name in expected]
    return max(d / float(torch.linalg.norm(expected[name])) for d, name in zip(off, expected, strict=True))


def clipped(trace: Trace) -> list[MeanClipped]:
    return [entry.event for entry in trace.entries if isinstance(entry.event, MeanClipped)]


# -- BSP is one process on the joint batch ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_bsp_with_clipping_equals_one_process(
    run_on_threads: RunOnThreads, workers: int, transport: str
) -> None:
    run = run_on_threads(lambda: train(0.1), workers=workers, servers=2, transport=transport)
    assert relative_error(run.state_dict, alone(0.1)) <= 1e-9
    assert relative_error(run.state_dict, alone(math.inf)) > 1e-3  # so clipping matters
    first, second = map(clipped, run.shards)
    assert [event.factor for event in first] == [event.factor for event in second]
    assert len(first) == STEPS
    assert all(event.factor < 1 for event in first)
    for trace in run.traces:
        assert replay(trace) == []


def test_clipping_in_virtual_time_equals_one_process() -> None:
    result = simulate(CLUSTER, "bsp", train_fn=lambda: train(0.1))
    assert result.state_dict is not None
    weights = {name: result.state_dict[name] for name in alone(0.1)}
    assert relative_error(weights, alone(0.1)) <= 1e-9
