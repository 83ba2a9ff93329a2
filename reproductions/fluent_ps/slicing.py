"""Figure 6 of FluentPS: overlap synchronization and Elastic Parameter Slicing (EPS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from paceline.cli.console import TellShare
from paceline.core.layout import Layout, Parameter, ShardSlice
from paceline.look.timelines import COLOURS, new_figure
from paceline.sim import Cluster, Uniform
from paceline.sim.simulate import simulate

from ..exhibit import Exhibit, Figure, Made, Options, beside
from ..networks import resnet_cifar
from ..papers import FLUENT_PS
from ..verdicts import Measured

PAPER = str(FLUENT_PS)
SERVERS = 8
COMPUTE_S_OF_32 = (
    FLUENT_PS.tables["table4-time"].cell("ResNet-56 on CIFAR-10", "soft P=0").value / 100
)  # under ASP with 32 workers
# The aggregate bandwidth is divided among 32 workers.
RATE_BPS = FLUENT_PS.numbers["bandwidth"].value * 1e9 / 32


def resnet_56() -> Layout:
    """Return the parameters of ResNet-56 for CIFAR-10 (He et al., 2016): 0.85 million in 3 stages of 9 blocks.

    They are those of its convolutions, of the normalizations in its blocks, and of its last layer.
    """
    with torch.device("meta"):
        named = resnet_cifar(56).named_parameters()
    first_normalization = "1."
    return Layout.of(
        [
            Parameter((name,), tuple(value.shape), "float32")
            for name, value in named
            if not name.startswith(first_normalization)
        ]
    )


class FluentSetting(msgspec.Struct, frozen=True):
    """The settings for one bar in Fig. 6 of the paper.

    Attributes:
        label: label of the bar.
        overlap: "off" as in PS-Lite, or "shards".
        even: True for even slicing (EPS), False for slicing by key as in PS-Lite.
    """

    label: str
    overlap: str
    even: bool


SETTINGS = (
    FluentSetting("PS-Lite: one barrier, by key", "off", False),
    FluentSetting("overlap, by key", "shards", False),
    FluentSetting("overlap, EPS", "shards", True),
)
SAVED = (None, FLUENT_PS.numbers["overlap-saves"], FLUENT_PS.numbers["eps-saves"])
"""In the paper, each setting saves at most this share of the previous setting's communication time."""


def communication(setting: FluentSetting, workers: int, iterations: int) -> tuple[float, float]:
    """Return mean computation and communication times in seconds per BSP iteration, with workers of similar speed."""
    layout = resnet_56()
    slices: Sequence[ShardSlice] = (
        layout.slice_evenly(SERVERS) if setting.even else layout.slice_by_parameter(SERVERS)
    )
    compute_s = COMPUTE_S_OF_32 * 32 / workers
    cluster = Cluster(
        compute_s=[Uniform(low=0.98 * compute_s, high=1.02 * compute_s)] * workers,
        servers=SERVERS,
        latency_s=200e-6,
        bandwidth_bps=RATE_BPS,
    )
    result = simulate(
        cluster,
        "bsp",
        iterations,
        shard_bytes=[part.size_bytes for part in slices],
        overlap=setting.overlap,
    )
    computed_s = result.computed_s / workers / iterations
    return computed_s, result.time_s / iterations - computed_s


def figure_6(options: Options, tell: TellShare) -> Made:
    """Compare the computation and communication times of the settings, for 8, 16 and 32 workers."""
    counts = (8, 16, 32)
    iterations = 5 if options.quick else 100
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for number, setting in enumerate(SETTINGS):
        tell(setting.label, number / len(SETTINGS))
        found[setting.label] = {n: communication(setting, n, iterations) for n in counts}
    rows = {}
    for index, setting in enumerate(SETTINGS):
        here = found[setting.label]
        times = [(None, f"{here[n][1] * 1000:.1f}") for n in counts]
        ours = "-" if not index else f"{_saved(found[SETTINGS[index - 1].label], here):.0f} %"
        rows[setting.label] = [*times, (SAVED[index], ours)]
    ps_lite, overlap, both = (found[setting.label] for setting in SETTINGS)
    measured = {
        "overlap-saves": _saved(ps_lite, overlap),
        "eps-saves": _saved(overlap, both),
        "overlap-and-eps-save": _saved(ps_lite, both),
        "overlap-faster": _faster(ps_lite, overlap),
        "eps-faster": _faster(overlap, both),
        "faster-than-ps-lite": _faster(ps_lite, both),
    }
    columns = [*(f"{n} workers, ms" for n in counts), "saved, at most"]

    def draw() -> Figure:
        figure = new_figure(9.0, 4.4)
        axes = figure.subplots()
        width = 0.25
        for number, setting in enumerate(SETTINGS):
            places = [group + (number - 1) * width for group in range(len(counts))]
            computing = [found[setting.label][n][0] for n in counts]
            moving = [found[setting.label][n][1] for n in counts]
            axes.bar(
                places, computing, width * 0.92, color="#BBBBBB", label="computing" if not number else None
            )
            axes.bar(
                places, moving, width * 0.92, bottom=computing, color=COLOURS[number], label=setting.label
            )
        axes.set_xticks(range(len(counts)), [f"{n} workers" for n in counts])
        axes.set(ylabel="seconds per iteration", title="FluentPS, Fig. 6: ResNet-56 under BSP, 8 servers")
        axes.legend(frameon=False, fontsize=9)
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Fig. 6: communication per iteration under BSP", rows, columns)],
        figure=draw,
        data=found,
        measured={key: Measured.exactly(value) for key, value in measured.items()},
        notes=[
            f"Overlap and even slicing together save up to {measured['overlap-and-eps-save']:.0f} % of the "
            f"communication time, and are up to {measured['faster-than-ps-lite']:.2f} times as fast as PS-Lite. The "
            "paper reports "
            f"{FLUENT_PS.numbers['overlap-and-eps-save']} and {FLUENT_PS.numbers['faster-than-ps-lite']} times.",
            "The simulation models the transfer of the bytes and the wait for the last byte, but not the costs of "
            "PS-Lite's scheduler and of the work that PS-Lite does for each message. Therefore, it does not show "
            "how much of the paper's saving comes from avoiding these costs.",
        ],
    )


Times = Mapping[int, tuple[float, float]]
"""Number of workers -> seconds of computation and of communication per iteration."""


def _saved(before: Times, after: Times) -> float:
    """Return the largest percentage of communication time that is saved."""
    return max(100 * (1 - after[n][1] / before[n][1]) for n in before)


def _faster(before: Times, after: Times) -> float:
    """Return the largest ratio of the times of an iteration."""
    return max(sum(before[n]) / sum(after[n]) for n in before)


EXHIBITS = (
    Exhibit(
        name="fluentps-fig6",
        title="communication time under BSP: as in PS-Lite, with overlap only, and with overlap and EPS",
        differs="Simulated: messages of the size of ResNet-56 over network interfaces of 780 Mbit/s. "
        "No gradients are computed.",
        minutes=0.5,
        make=figure_6,
    ),
)
