"""`python -m benchmarks codecs`: the processor time of encoding and decoding gradients and weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch

from paceline.cli.console import TellShare
from paceline.core.layout import CODECS
from paceline.shard.codecs import BaseReceiver, BaseSender, Receiver, Sender

from .harness import Benchmark, Columns, Figures, Rounds, marked, rounds_text

VALUES = 6_250_000  # 25 MB
GOAL_MS, GOAL_SUMS = 20.0, 5.0


class CodecRow(msgspec.Struct, frozen=True):
    """The processor times of encoding and of decoding values with one codec, and of adding up as many values."""

    what: str
    encode_ms: float
    decode_ms: float
    sum_ms: float


def _cell(row: CodecRow, ms: float) -> str:
    ns = 1e6 * ms / VALUES
    return marked(
        f"{ms:.1f}, {ns:.1f}, {ms / row.sum_ms:.1f}", ms <= GOAL_MS and ms <= GOAL_SUMS * row.sum_ms
    )


COLUMNS: Columns[CodecRow] = {
    "25 MB of": lambda row: row.what,
    "encoding: ms, ns, sums": lambda row: _cell(row, row.encode_ms),
    "decoding: ms, ns, sums": lambda row: _cell(row, row.decode_ms),
}


@Benchmark(minutes=0.5, quick={"rounds": 1})
def measure(tell: TellShare, rounds: Rounds = 15) -> list[Figures[CodecRow]]:
    """Time the encoding and decoding of 25 MB on one core.

    The times are shown in ms, in ns per value, and as multiples of the time to sum as many values. Weights are
    sent as their difference from a base, which both ends have. The times for such a difference include its addition to
    the base at both ends, and the checksums of both bases.
    """
    rows = []
    for number, codec in enumerate(names := [name for name, each in CODECS.items() if each.dtypes]):
        tell(codec, number / len(names))
        rows += [_gradients(codec, rounds), *([_weights(codec, rounds)] if CODECS[codec].based else [])]
    caption = f"goal: at most {GOAL_MS:g} ms, and at most {GOAL_SUMS:g} times a sum; {rounds_text(rounds)}"
    return [Figures("Processor time of codecs, one core", rows, COLUMNS, caption)]


def _values() -> dict[str, torch.Tensor]:
    return {"float32": torch.randn(VALUES)}


def _gradients(codec: str, rounds: int) -> CodecRow:
    sender, receiver = Sender(codec, _values()), Receiver(codec, _values())
    ranges = sender.ranges(sender.vectors)

    def pass_on() -> None:
        for there, data in zip(receiver.memory(ranges), sender.memory(ranges), strict=True):
            there[:] = data

    return _row(
        f"gradients as {codec}",
        rounds,
        lambda: sender.encode(ranges),
        pass_on,
        lambda: receiver.decode(ranges),
    )


def _weights(codec: str, rounds: int) -> CodecRow:
    sender, receiver = BaseSender(codec, _values()), BaseReceiver(codec, _values())
    names, ranges = list(sender.vectors), sender.ranges(sender.vectors)
    number = 1

    def encode() -> int:
        nonlocal number
        number += 1
        sender.advance(None, number, names)
        return sender.checksum(names)

    def pass_on() -> None:
        for there, data in zip(receiver.memory(ranges), sender.payload(names, whole=False), strict=True):
            there[:] = data

    decode = lambda: receiver.decode(ranges, whole=False)  # noqa: E731
    return _row(f"weights as {codec}", rounds, encode, pass_on, decode)


def _row(
    what: str,
    rounds: int,
    encode: Callable[[], object],
    pass_on: Callable[[], object],
    decode: Callable[[], object],
) -> CodecRow:
    terms, total = torch.randn(2, VALUES), torch.empty(VALUES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times_ms: list[tuple[float, float, float]] = []
        for _ in range(rounds + 1):  # the first round, which first uses the memory, is not measured
            summed = _time_ms(lambda: torch.add(*terms, out=total))
            encoded = _time_ms(encode)
            pass_on()
            times_ms.append((encoded, _time_ms(decode), summed))
    finally:
        torch.set_num_threads(threads)
    return CodecRow(what, *(median(column) for column in zip(*times_ms[1:], strict=True)))


def _time_ms(work: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - begun_s)
