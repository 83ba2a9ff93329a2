"""The section "On accelerators" of `docs/models/when-it-pays-on-links.md`, with a model of a step's time.

The model counts the copies and the update that a step needs besides the computation. Its constants are nominal rates
of links, and measured times: of an update (see `UPDATE_NS`) and of encoding (see `ENCODING_NS`).
`make_when_it_pays.py` writes the section.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.layout import CODECS

__all__ = ["ENCODING_NS", "Case", "ddp_s", "paceline_s", "section"]

BYTES_PER_WEIGHT = 4  # float32
DEVICE_RATE = 25e9  # PCIe 4.0 x16, nominal, in bytes per second and direction
BACKWARD = 2 / 3  # the share of the backward pass in the time of a computation
SLOWER = 2  # how many times as long the slow devices of the examples take
MACHINES = 4  # of the examples
WORTHWHILE = 0.9  # largest ratio of times at which Paceline is recommended

UPDATE_NS = {"SGD": (0.4, 0.7), "SGD momentum": (0.7, 1.0), "Adam": (1.4, 1.4)}
"""Optimizer -> time of an update on one core with 25 MB and with 100 MB, in nanoseconds per weight.

Measured by `python -m benchmarks transport --systems optimizer --rounds 12`: the fastest update.
"""

LARGE_NS = {optimizer: large_ns for optimizer, (_, large_ns) in UPDATE_NS.items()}


class Encoding(NamedTuple):
    """Times of a codec on one core, in nanoseconds per weight.

    Attributes:
        encode: to encode a gradient.
        decode: to decode a gradient at the servers.
        advance: to encode the difference of new weights to the base, which is done once for all workers.
        receive: to decode this difference, and to compare checksums.
    """

    encode: float = 0.0
    decode: float = 0.0
    advance: float = 0.0
    receive: float = 0.0


ENCODING_NS = {
    "float32": Encoding(),
    "int8": Encoding(encode=0.6, decode=0.3, advance=1.7, receive=1.0),
    "int4": Encoding(encode=1.1, decode=0.4, advance=1.8, receive=1.2),
}
"""Codec -> its times. Measured by `python -m benchmarks codecs`."""

ENCODED = ("encode gradients", "decode gradients", "encode weights", "decode weights")

LINKS = {
    "10-gigabit Ethernet": 1.25e9,
    "100-gigabit Ethernet": 12.5e9,
    "one machine": math.inf,  # workers and servers share memory
}
"""Link -> rate in bytes per second and direction."""


class Case(NamedTuple):
    """A row of the examples.

    Attributes:
        weights: number of weights.
        step_s: time in which a fast device computes a gradient, in seconds.
        link: key in `LINKS`.
        unequal: True if half of the devices are slower, False if all are equal.
    """

    weights: float
    step_s: float
    link: str
    unequal: bool

    @property
    def size_bytes(self) -> float:
        """Size of the weights in bytes."""
        return BYTES_PER_WEIGHT * self.weights

    def link_s(self, codec: str = "float32") -> float:
        """Return the time for which the link of a machine is busy in each direction, per step, in seconds.

        Each machine has a worker and a server. It sends the gradients of the other servers' shards, and the weights
        of its own shard to the other workers. A ring all-reduce sends the same number of bytes.
        """
        block, block_bytes = CODECS[codec][:2]
        size_bytes = self.weights * block_bytes / block
        return 2 * (MACHINES - 1) / MACHINES * size_bytes / LINKS[self.link]


CASES = (
    Case(1e6, 0.02, "10-gigabit Ethernet", unequal=True),
    Case(25e6, 0.1, "10-gigabit Ethernet", unequal=True),
    Case(25e6, 0.5, "10-gigabit Ethernet", unequal=True),
    Case(25e6, 0.5, "10-gigabit Ethernet", unequal=False),
    Case(100e6, 0.1, "one machine", unequal=True),
    Case(100e6, 0.5, "one machine", unequal=True),
    Case(100e6, 0.5, "one machine", unequal=False),
    Case(100e6, 0.5, "10-gigabit Ethernet", unequal=True),
    Case(100e6, 0.5, "100-gigabit Ethernet", unequal=True),
    Case(100e6, 2.0, "10-gigabit Ethernet", unequal=True),
    Case(1e9, 0.5, "100-gigabit Ethernet", unequal=True),
    Case(1e9, 10.0, "10-gigabit Ethernet", unequal=True),
)


def update_s(case: Case) -> float:
    """Return the time of an update by Adam with the mean of all pushes, on one core of each machine, in seconds.

    Each push after the first adds at most the time of an update by SGD, which reads as much memory and writes more.
    """
    per_weight_ns = LARGE_NS["Adam"] + (MACHINES - 1) * LARGE_NS["SGD"]
    return case.weights / MACHINES * per_weight_ns / 1e9


def paceline_s(case: Case, codec: str = "float32") -> float:
    """Return the time of a step under `bsp` with balanced batches, in seconds.

    What fits beside the backward pass is taken to be hidden: the gradients' way to the host, and from there to the
    servers, with encoding and decoding. Weights are copied to the device while others still arrive. They are decoded
    when all of a shard has arrived, and the shards arrive at the same time.
    """
    fast = MACHINES / 2
    computation_s = case.step_s * (MACHINES / (fast + fast / SLOWER) if case.unequal else 1)
    device_s, half_link_s = case.size_bytes / DEVICE_RATE, case.link_s(codec) / 2
    encoding = Encoding(*(case.weights * ns / 1e9 for ns in ENCODING_NS[codec]))
    gradients_s = max(device_s, half_link_s, encoding.encode, encoding.decode)
    exposed_s = max(0.0, gradients_s - BACKWARD * computation_s)
    weights_s = encoding.advance / MACHINES + max(half_link_s, device_s) + encoding.receive
    return computation_s + exposed_s + update_s(case) + weights_s


def ddp_s(case: Case) -> float:
    """Return the time of a step of DDP with NCCL and equal batches, in seconds.

    All-reduce is taken to be hidden as far as it fits beside the backward pass, and the update to take no time. On
    one machine, all-reduce uses PCIe.
    """
    computation_s = case.step_s * (SLOWER if case.unequal else 1)
    reduce_s = case.link_s() or 2 * (MACHINES - 1) / MACHINES * case.size_bytes / DEVICE_RATE
    return computation_s + max(0.0, reduce_s - BACKWARD * computation_s)


def section() -> list[str]:
    """Return the lines of the section."""
    large = Case(100e6, 1.0, "10-gigabit Ethernet", unequal=True)
    adam_s = large.weights * LARGE_NS["Adam"] / 1e9
    numbers = {
        "device_ms": 1e3 * large.size_bytes / DEVICE_RATE,
        "ethernet_ms": 1e3 * large.size_bytes / LINKS["10-gigabit Ethernet"],
        "adam_ms": 1e3 * adam_s,
        "adam_rate": 1 / adam_s,
        "adam_rate_4": MACHINES / adam_s,
        "gigabytes": large.size_bytes / 1e9,
        "machines": MACHINES,
    }
    lines: list[str] = []
    for block in TEXT.format(**numbers).strip("\n").split("\n\n"):
        if block.startswith("#"):
            lines += [block, ""]
        elif block.startswith("- "):
            for item in block.removeprefix("- ").split("\n- "):
                lines += textwrap.wrap(f"- {item}", 118, subsequent_indent="  ", break_on_hyphens=False)
            lines.append("")
        elif block == "UPDATES":
            lines += table(
                ["ns per weight", "25 MB", "100 MB"],
                [[f"`{name}`", *(f"{ns:.1f}" for ns in figures)] for name, figures in UPDATE_NS.items()],
            )
        elif block == "ENCODING":
            lines += table(
                ["ns per weight", *ENCODED],
                [[f"`{codec}`", *(f"{ns:.1f}" for ns in ENCODING_NS[codec])] for codec in ("int8", "int4")],
            )
        elif block == "EXAMPLES":
            lines += table(
                [
                    "weights",
                    "gradient",
                    "GPUs",
                    "link",
                    "Paceline",
                    "`int8`",
                    "`int4`",
                    "DDP",
                    "ratio",
                    "use",
                ],
                [_row(case) for case in CASES],
            )
        elif block.startswith("|"):
            lines += [*block.splitlines(), ""]
        else:
            lines += [*textwrap.wrap(block, 118, break_on_hyphens=False), ""]
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def _row(case: Case) -> list[str]:
    own_s, other_s = paceline_s(case), ddp_s(case)
    ratio = own_s / other_s
    return [
        f"{case.weights / 1e6:,.0f} million",
        f"{case.step_s:g} s",
        "half of them 2x slower" if case.unequal else "equal",
        case.link,
        f"{own_s:.3f} s",
        *(f"{paceline_s(case, codec):.3f} s" if case.link_s() else "-" for codec in ("int8", "int4")),
        f"{other_s:.3f} s",
        f"{ratio:.2f}",
        "Paceline" if ratio <= WORTHWHILE else "DDP with NCCL",
    ]


TEXT = """
## On accelerators

DDP with NCCL keeps everything on the devices: they send their gradients to each other, and each of them computes the
whole update. In Paceline, servers on CPUs hold the weights. This lets unequal devices of any kind train together, and
costs copies and time on the CPUs. **If all devices are equal, use DDP with NCCL**: Paceline sends as many bytes as
the all-reduce of DDP, and also copies these bytes to the host and back. Otherwise, add up the costs of a step. A copy
that runs during the backward pass is *hidden*: it takes no additional time. P is the size of the weights in bytes, 4
for each weight.

- *Gradients to the host:* P / 25 GB/s over PCIe 4.0 x16 (nominal). A gradient is copied as soon as it is complete, so
these copies are hidden if the backward pass is long enough. Nothing is hidden if the device has no streams, or
if the script changes its gradients after the backward pass, as `clip_grad_norm_` does, because the changed gradients
are copied again.
- *Gradients to the servers:* at most P / 1.25 GB/s over 10-gigabit Ethernet. The parts that are sent during the
backward pass are hidden.
- *The update*, on the CPUs of the servers. It begins when the last gradient has arrived, so nothing is hidden.
- *Weights to the workers:* at most P / 1.25 GB/s, as for the gradients. Nothing is hidden.
- *Weights to the device:* P / 25 GB/s, as for the gradients. A piece is copied as soon as it has arrived, so
this time is hidden behind the transfer if the link is slower than the device. In shared memory, nothing is hidden.

With 100 million weights ({gigabytes:.1f} GB), a copy over PCIe takes {device_ms:.0f} ms, and 10-gigabit Ethernet
takes {ethernet_ms:.0f} ms in each direction. Over shared memory, there is no link between workers and servers.

**Codecs.** With `--wire int8`, the links take a quarter of the time, and with `int4`, a seventh. But gradients and
weights are encoded and decoded on the CPUs. The table shows how long this takes on one core (`python -m benchmarks
codecs`):

ENCODING

Gradients are encoded and decoded during the backward pass, if it is long enough. Each server encodes its part
of the weights after the update, and each worker decodes all weights. So with one core for each process, codecs save
little over 10-gigabit Ethernet, and cost time over faster links. [Over slower links](#on-slow-links), codecs save
most of the time.

**The update.** The table shows about how long an update with one push takes on one core of a virtual machine. Because
the speed of such a machine varies, the fastest of many updates counts (`python -m benchmarks transport --systems
optimizer --rounds 12`):

UPDATES

So Adam on one core takes about {adam_ms:.0f} ms for 100 million weights, which allows {adam_rate:.1f} steps per
second. The shards of several servers are updated at the same time: {machines} servers with a core each allow about
{adam_rate_4:.0f} steps per second, unless they share memory that is too slow for all of them. Under `bsp`, a step is
one update with the mean of all pushes. Each push after the first adds at most the time of an update by SGD. Under
`asp`, each push is an update, so this is the number of steps of all workers together. Muon multiplies matrices, which
takes far longer on a CPU. With `--server-device`, the servers make the steps of Muon on an accelerator, which takes
two more copies of P in each step.

**Memory.** Each worker needs 2 P on the device for flat vectors, of which the parameters and their gradients are
views, and 2 P on the host. The servers together need (1 + s) P on their hosts, where s is the number of states per
weight (0 for SGD, 1 for SGD with momentum, 2 for Adam). Without shared memory, they also need up to 2 P per worker
for data that is being received and sent. Devices hold no optimizer states: with Adam, DDP needs 2 P more on each
device.

**Examples.** There are {machines} devices, each in a machine of its own or all in one machine. Each device has a
server with a core of its own. If devices are unequal, half of them take twice as long. The optimizer is Adam.
Paceline uses `bsp` and balanced batches. DDP uses equal batches, so its steps take as long as those of the slow
devices. The backward pass takes two thirds of the computation. For both systems, communication is assumed to be hidden
if the backward pass is long enough. The times in the table are computed, not measured
(`docs/on_accelerators.py`). Paceline is recommended if it takes at least 10 % less time. The columns `int8` and `int4`
show the time of Paceline with a codec, including encoding and decoding:

EXAMPLES

**Measured.** On an NVIDIA H200 with 16 CPU cores, one worker trained language models in float32 with SGD and momentum
(`python -m benchmarks accelerator`, November 2026, torch 2.11). The time of a step includes the servers and all
copies:

| weights | sequences | plain PyTorch | Paceline | ratio | gradients to the host | hidden | weights to the device |
| --- | --- | --- | --- | --- | --- | --- | --- |
| 5.3 million | 64 | 15.9 ms | 20.9 ms | 1.32 | 0.4 ms | 60 % | 0.7 ms |
| 29.4 million | 32 | 38.3 ms | 56.2 ms | 1.47 | 2.2 ms | 84 % | 2.4 ms |
| 29.4 million | 128 | 142.9 ms | 161.1 ms | 1.13 | 2.2 ms | 91 % | 2.2 ms |

The copies use the whole bandwidth of PCIe (55 GB/s). Most copies of gradients are hidden behind the backward pass.
Copies of weights are not hidden, because the next forward pass waits for all weights. The rest of the difference to
plain PyTorch is the time of the servers.

If a script for DDP gives slow devices smaller batches, and scales their losses accordingly, then DDP with NCCL has
the advantage of balanced batches, too, and is the right choice in all rows of the examples. But NCCL cannot connect
devices of different kinds, such as those of CUDA and ROCm, and DDP has to start again when a machine leaves or joins.
In these cases, Paceline is the choice, and the table of examples shows its costs.
"""
