"""Measures the time that Paceline adds to a training step on an accelerator, and which share of the copies is hidden.

One worker trains a language model on the device, once with plain PyTorch and once with servers on the same machine.
With servers, a step includes their optimizers and all copies of gradients and weights between the device and the host.
It includes no wait for other workers, because there are none.

The copies run at the same time as the computations, on streams of their own. The profiler of torch records when each
copy and each kernel ran on the device. A copy is *hidden* while a kernel of the training itself runs.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import typer
from torch import nn

import paceline
from paceline.cli.console import TellShare

from .harness import Benchmark, Columns, Figures, Rounds, in_turns, live

WARM_UP = 5
STEPS = 20
PROFILED = 3
WORDS = 4096
LENGTH = 256


class LanguageModel(NamedTuple):
    """The size of a model and of its batches. `batch` is a number of sequences of 256 words each."""

    width: int
    layers: int
    batch: int


MODELS = (LanguageModel(256, 4, 64), LanguageModel(512, 8, 32), LanguageModel(512, 8, 128))


class AcceleratorRow(msgspec.Struct, frozen=True):
    """The measurements with one model. Times are medians over the rounds, in seconds."""

    device: str
    weights: int  # number of weights, each of which is a float32 number
    batch: int
    plain_s: float  # time of a step of plain PyTorch
    paceline_s: float  # time of a step with one worker
    sent_s: float  # time that the copies of gradients to the host take in a step
    sent_hidden: float  # share of `sent_s` in which kernels of the training ran
    received_s: float  # time that the copies of weights to the device take in a step
    received_hidden: float


COLUMNS: Columns[AcceleratorRow] = {
    "weights": lambda row: f"{row.weights / 1e6:.1f} million",
    "batch": lambda row: row.batch,
    "plain": lambda row: f"{row.plain_s * 1e3:.1f} ms",
    "Paceline": lambda row: f"{row.paceline_s * 1e3:.1f} ms",
    "ratio": lambda row: f"{row.paceline_s / row.plain_s:.2f}",
    "to the host": lambda row: f"{row.sent_s * 1e3:.1f} ms",
    "hidden": lambda row: f"{row.sent_hidden:.0%}",
    "to the device": lambda row: f"{row.received_s * 1e3:.1f} ms",
    "hidden ": lambda row: f"{row.received_hidden:.0%}",
}
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="The device, for example cuda or cuda:1.")
]


@Benchmark(minutes=4, quick={"models": (LanguageModel(64, 1, 2),), "rounds": 1})
def measure(
    tell: TellShare, device: Device = "cuda", rounds: Rounds = 3, models: Sequence[LanguageModel] = MODELS
) -> list[Figures[AcceleratorRow]]:
    """Compare a training step on an accelerator with plain PyTorch, and measure how much copying overlaps with kernels.

    Needs a device with streams, such as cuda.
    """
    cases = {
        f"{what}, width {model.width}, {model.layers} layers, batches of {model.batch}": (model, what)
        for model in models
        for what in ("plain PyTorch", "Paceline")
    }
    found = in_turns(tell, rounds, cases, lambda case: _run(case[0], device, alone=case[1] != "Paceline"))
    in_pairs = iter(found.values())
    rows = [_row(model, plain, ours) for model, plain, ours in zip(models, in_pairs, in_pairs, strict=True)]
    return [Figures(f"A training step on {rows[0].device}", rows, COLUMNS)]


def _row(model: LanguageModel, plain: Sequence[_Found], ours: Sequence[_Found]) -> AcceleratorRow:
    copies = ([each.copies[kind][part] for each in ours] for kind in ("DtoH", "HtoD") for part in (0, 1))
    steps_s = (median(each.step_s for each in runs) for runs in (plain, ours))
    return AcceleratorRow(ours[0].device, ours[0].weights, model.batch, *steps_s, *map(median, copies))


# -- what the worker does ---------------------------------------------------------------------------------


class _Found(msgspec.Struct, frozen=True):
    """The measurements of a worker. `copies` maps a direction to (seconds in a step, hidden share)."""

    device: str
    weights: int
    step_s: float
    copies: dict[str, tuple[float, float]]


def _run(model: LanguageModel, device: str, *, alone: bool) -> _Found:
    """Measure in a new process, which cannot reuse the memory or the compiled kernels of an earlier run."""
    if alone:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_train, (model, device))
    _, [found] = live(_train, model, kind=_Found, workers=1, devices=device, traces="off")
    return found


def _train(model: LanguageModel, alone_on: str | None = None) -> _Found:
    """Train on a device.

    Args:
        model: what is trained.
        alone_on: device on which plain PyTorch trains; None to train as a worker of Paceline.
    """
    device = torch.device(alone_on) if alone_on is not None else paceline.device()
    net = _Net(model).to(device)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    if alone_on is None:
        optimizer = paceline.DistributedOptimizer(optimizer)
    words = torch.randint(WORDS, (model.batch, LENGTH + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        out = net(words[:, :-1])
        nn.functional.cross_entropy(out.flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    for _ in range(WARM_UP):
        step()
    wait()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    step_s = (time.perf_counter() - begin) / STEPS
    with torch.profiler.profile() as profile:
        for _ in range(PROFILED):
            step()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        copies = copies_of(json.loads(path.read_text())["traceEvents"])
    name = torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else "the CPU"
    weights = sum(parameter.numel() for parameter in net.parameters())
    per_step = {kind: (seconds / PROFILED, hidden) for kind, (seconds, hidden) in copies.items()}
    return _Found(name, weights, step_s, per_step)


class _Net(nn.Module):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, model.width)
        layer = nn.TransformerEncoderLayer(
            model.width, 8, 4 * model.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, model.layers, enable_nested_tensor=False)
        self.out = nn.Linear(model.width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        out: torch.Tensor = self.out(self.layers(self.embedding(words), mask=mask, is_causal=True))
        return out


# -- what the profiler has recorded -----------------------------------------------------------------------


class _Span(NamedTuple):
    begin: float
    end: float


def copies_of(events: Iterable[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return, for "DtoH" (to the host) and "HtoD" (to the device), the time of the copies in s, and its hidden share.

    Args:
        events: events of torch's profiler in Chrome's format, with times in microseconds. Kernels of the training are
            those on the stream that has computed for the longest time.
    """
    busy: Counter[object] = Counter()
    kernels: dict[object, list[_Span]] = {}
    copies: dict[str, list[_Span]] = {"DtoH": [], "HtoD": []}
    for event in events:
        category = event.get("cat")
        if category not in ("kernel", "gpu_memcpy"):
            continue
        span = _Span(event["ts"], event["ts"] + event["dur"])
        if category == "kernel":
            stream = event["args"]["stream"]
            busy[stream] += event["dur"]
            kernels.setdefault(stream, []).append(span)
        for kind in copies:
            if category == "gpu_memcpy" and kind in event["name"]:
                copies[kind].append(span)
    training = kernels[max(busy, key=lambda stream: busy[stream])] if busy else []
    return {kind: _hidden(spans, sorted(training)) for kind, spans in copies.items()}


def _hidden(spans: Sequence[_Span], kernels: Sequence[_Span]) -> tuple[float, float]:
    """Return the total length of time spans in seconds, and the share of this time in which kernels ran.

    The kernels must not overlap each other.
    """
    total = sum(span.end - span.begin for span in spans)
    hidden = sum(
        max(0.0, min(span.end, kernel.end) - max(span.begin, kernel.begin))
        for span in spans
        for kernel in kernels
    )
    return total * 1e-6, hidden / total if total else 0.0
