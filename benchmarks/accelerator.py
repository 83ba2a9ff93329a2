"""Measures what Paceline adds to a training step on an accelerator, and how much of its copies is hidden.

One worker trains a language model on the device, as plain PyTorch and with servers on the same machine. So their
optimizers and all copies belong to the step, and nothing else does: there is nobody to wait for.

Copies run beside computations on streams of their own. The profiler of torch records when each copy and each kernel
ran on the device. A copy is *hidden* while a kernel of the training itself runs.
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
from typing import Any, NamedTuple

import msgspec
import torch
from rich import box
from rich.table import Table
from torch import nn

import paceline
from paceline.cli.progress_bar import TellShare

__all__ = ["MODELS", "AcceleratorRow", "LanguageModel", "copies_of", "estimate_s", "measure", "table"]

WARM_UP = 5
STEPS = 20
PROFILED = 3
WORDS = 4096
LENGTH = 256


class LanguageModel(msgspec.Struct, frozen=True):
    """The size of a model and of its batches.

    Attributes:
        width: width of the layers.
        layers: number of layers.
        batch: number of sequences, of 256 words each, in a batch.
    """

    width: int
    layers: int
    batch: int


MODELS = (LanguageModel(256, 4, 64), LanguageModel(512, 8, 32), LanguageModel(512, 8, 128))


class AcceleratorRow(msgspec.Struct, frozen=True):
    """What was measured with one model. Times are medians over the rounds, in seconds.

    Attributes:
        device: name of the device.
        weights: number of weights, in float32.
        batch: number of sequences in a batch.
        plain_s: time of a step of plain PyTorch.
        paceline_s: time of a step with one worker.
        sent_s: time, in a step, of the copies of gradients to the host.
        sent_hidden: share of this time in which kernels of the training ran.
        received_s: time, in a step, of the copies of weights to the device.
        received_hidden: share of this time in which kernels of the training ran.
    """

    device: str
    weights: int
    batch: int
    plain_s: float
    paceline_s: float
    sent_s: float
    sent_hidden: float
    received_s: float
    received_hidden: float


def estimate_s(models: Sequence[LanguageModel] = MODELS, rounds: int = 3) -> float:
    """Return about how long the benchmark takes, in seconds."""
    return 25.0 * len(models) * rounds


def measure(
    device: str, tell: TellShare, models: Sequence[LanguageModel] = MODELS, rounds: int = 3
) -> list[AcceleratorRow]:
    """Measure every model on a device, in turn as plain PyTorch and with Paceline."""
    rows = []
    for number, model in enumerate(models):
        plain_s, found = [], []
        for turn in range(rounds):
            what = f"width {model.width}, {model.layers} layers, batches of {model.batch}"
            share = (number + turn / rounds) / len(models)
            tell(f"{what}, plain PyTorch", share, slow=True)
            plain_s.append(_run(model, device, alone=True).step_s)
            tell(f"{what}, Paceline", share + 0.5 / rounds / len(models), slow=True)
            found.append(_run(model, device, alone=False))
        last = found[-1]
        rows.append(
            AcceleratorRow(
                last.device,
                last.weights,
                model.batch,
                median(plain_s),
                median(each.step_s for each in found),
                *(
                    median(each.copies[kind][part] for each in found)
                    for kind in ("DtoH", "HtoD")
                    for part in (0, 1)
                ),
            )
        )
    return rows


def table(rows: Iterable[AcceleratorRow]) -> Table:
    """Return the table that the command prints."""
    rows = list(rows)
    shown = Table(
        "weights",
        "batch",
        "plain",
        "Paceline",
        "ratio",
        "to the host",
        "hidden",
        "to the device",
        "hidden",
        box=box.SIMPLE,
    )
    for row in rows:
        shown.add_row(
            f"{row.weights / 1e6:.1f} million",
            str(row.batch),
            f"{row.plain_s * 1e3:.1f} ms",
            f"{row.paceline_s * 1e3:.1f} ms",
            f"{row.paceline_s / row.plain_s:.2f}",
            f"{row.sent_s * 1e3:.1f} ms",
            f"{row.sent_hidden:.0%}",
            f"{row.received_s * 1e3:.1f} ms",
            f"{row.received_hidden:.0%}",
        )
    shown.title = f"A training step on {rows[0].device}" if rows else None
    return shown


# -- what the worker does ---------------------------------------------------------------------------------


class _Found(msgspec.Struct, frozen=True):
    """What a worker has measured. `copies` maps a direction to seconds in a step, and to the hidden share."""

    device: str
    weights: int
    step_s: float
    copies: dict[str, tuple[float, float]]


def _run(model: LanguageModel, device: str, *, alone: bool) -> _Found:
    """Measure in a process of its own, so that no run finds memory or compiled kernels of another."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        if alone:
            process = multiprocessing.get_context("spawn").Process(
                target=_train, args=(model, str(found), device)
            )
            process.start()
            process.join()
        else:
            paceline.launch(
                _train,
                args=(model, str(found)),
                workers=1,
                devices=device,
                traces="off",
                progress=False,
                run_dir=Path(folder, "run"),
            )
        return msgspec.json.decode(found.read_bytes(), type=_Found)


def _train(model: LanguageModel, found: str, alone_on: str | None = None) -> None:
    """Train on a device and write what was measured to a file.

    Args:
        model: what is trained.
        found: path of the file.
        alone_on: the device of plain PyTorch; None for a worker of Paceline.
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
    Path(found).write_bytes(msgspec.json.encode(_Found(name, weights, step_s, per_step)))


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
    """Return, for "DtoH" and "HtoD", the time of the copies in seconds, and the share of it that was hidden.

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
    """Return the length of some spans in seconds, and the share of it in which kernels ran, which do not overlap."""
    total = sum(span.end - span.begin for span in spans)
    hidden = sum(
        max(0.0, min(span.end, kernel.end) - max(span.begin, kernel.begin))
        for span in spans
        for kernel in kernels
    )
    return total * 1e-6, hidden / total if total else 0.0
