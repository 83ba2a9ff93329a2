"""The section "On slow links" of `docs/models/when-it-pays-on-links.md`: what the codecs of `--wire` save.

The times of steps are those of the simulator. It counts no time for encoding, which `docs.on_accelerators.ENCODING_NS`
contains. `make_when_it_pays.py` writes the section.
"""

from __future__ import annotations

import textwrap

from docs.on_accelerators import BYTES_PER_WEIGHT, ENCODING_NS, table
from paceline.core.layout import CODECS
from paceline.sim import Cluster, simulate

__all__ = ["section"]

WORKERS = 4
COMPUTE_S = 0.2
SIZES_MB = (2.4, 25.0, 400.0)
RATES = {"20 Mbit/s": 20e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
ITERATIONS = 10


def step_s(size_mb: float, rate_bps: float, wire: str) -> float:
    """Return the time of a step under `bsp`, without the beginning of the run, in seconds."""
    cluster = Cluster(
        compute_s=[COMPUTE_S] * WORKERS, bandwidth_bps=rate_bps, size_bytes=round(size_mb * 1e6)
    )
    once_s, twice_s = (simulate(cluster, "bsp", times * ITERATIONS, wire=wire).time_s for times in (1, 2))
    return (twice_s - once_s) / ITERATIONS


def encoding_s(size_mb: float, wire: str) -> float:
    """Return the time of a step for encoding and decoding, if each process has one core, in seconds."""
    times = ENCODING_NS[wire]
    whole_ns = times.encode + WORKERS * times.decode + times.advance + times.receive
    return size_mb * 1e6 / BYTES_PER_WEIGHT * whole_ns / 1e9


def section() -> list[str]:
    """Return the lines of the section."""
    rows = [
        [f"{size_mb:g} MB", link, *(_seconds(step_s(size_mb, rate_bps, wire)) for wire in CODECS)]
        for size_mb in SIZES_MB
        for link, rate_bps in RATES.items()
    ]
    encoding = [
        f"{encoding_s(size_mb, 'int8'):.2g} s with `int8` and {encoding_s(size_mb, 'int4'):.2g} s with `int4` for "
        f"{size_mb:g} MB"
        for size_mb in SIZES_MB[1:]
    ]
    text = (
        f"The table shows the time of a step under `bsp`, with {WORKERS} workers and a server, each on a machine of "
        f"its own. A computation takes {COMPUTE_S:g} s, and the gradient is sent afterwards. All gradients and weights "
        "pass through the link of the server. In the examples above, codecs save less, because each machine has a "
        "server, and gradients are sent during the backward pass. The times are those of `paceline.simulate` "
        "(`docs/slow_links.py`):",
        "A simulation counts no time for encoding. In each step, encoding and decoding take about "
        f"{', and '.join(encoding)}, if each process has a core. So at 10 Gbit/s, encoding and decoding cost a part "
        "of the time that is saved. [Slow links](../how-to/slow-links.md) says which codec suits which optimizer.",
    )
    before, after = (textwrap.wrap(each, 118, break_on_hyphens=False) for each in text)
    head = ["weights", "link", *(f"`{wire}`" for wire in CODECS)]
    return ["## On slow links", "", *before, "", *table(head, rows), *after, ""]


def _seconds(time_s: float) -> str:
    """Return a time with three significant digits at most if it is less than 100 s."""
    return f"{time_s:,.0f} s" if time_s >= 100 else f"{time_s:.3g} s"
