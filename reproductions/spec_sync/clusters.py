"""Figures 10 and 11 of SpecSync: other sync models, unequal machines, and other numbers of machines."""

from __future__ import annotations

from functools import partial
from statistics import median

from paceline.cli.console import TellShare
from paceline.look.timelines import new_figure
from paceline.sim import Cluster

from ..comparing import Comparison
from ..exhibit import Figure, Made, Options
from .convergence import compared, exhibit_on
from .workloads import CIFAR_10, PAPER

FIGURE_10 = {"BSP": "bsp", "SSP(3)": "ssp:staleness=3", "ASP": "asp", "SpecSync": "spec-sync"}
FIGURE_11 = {"ASP": "asp", "SpecSync": "spec-sync"}
SIZES = (20, 30, 40)
CLAIMS = {"Cluster 2": "fig10-faster", "20 machines": "fig11-faster-20", "30 machines": "fig11-faster-30"}
"""Cluster -> what the paper says of it. Fig. 8b is about Cluster 1, which has 40 machines."""


def _made(
    number: int,
    schemes: dict[str, str],
    clusters: dict[str, Cluster],
    says: str,
    options: Options,
    tell: TellShare,
) -> Made:
    """Compare sync models on several clusters."""
    found: dict[str, Comparison] = {}
    for index, (name, cluster) in enumerate(clusters.items()):
        found[name] = compared(
            CIFAR_10,
            schemes,
            options,
            lambda what, share, n=index: tell(what, (n + share) / len(clusters)),  # type: ignore[misc]
            cluster,
        )
    ends = {name: _final_ratio(each) for name, each in found.items()}
    return Made(
        tables=[each.table(f"{PAPER}, Fig. {number}: {name}", "ASP") for name, each in found.items()],
        figure=partial(_draw, number, found),
        data={name: each.plain() for name, each in found.items()},
        notes=[
            *found[next(iter(found))].notes(),
            says,
            "When the first of a pair of runs at the common rate ends, the loss under SpecSync, divided by that under "
            "ASP, is " + ", ".join(f"{ratio:.2f} ({name})" for name, ratio in ends.items()) + "; medians.",
        ],
        measured={
            CLAIMS[name]: each.measured("SpecSync", "ASP") for name, each in found.items() if name in CLAIMS
        },
    )


def _final_ratio(found: Comparison) -> float:
    """Return the loss under SpecSync, divided by that under ASP, when the first of two runs ends."""
    asp, spec_sync = ([o.values for o in found.common if o.run.label == label] for label in FIGURE_11)
    ratios = []
    for one, other in zip(asp, spec_sync, strict=True):
        end = min(len(one), len(other)) - 1
        ratios.append(other[end] / one[end])
    return median(ratios)


def _draw(number: int, found: dict[str, Comparison]) -> Figure:
    figure = new_figure(12.0, 4.2 * len(found))
    for (left, right), (name, each) in zip(figure.subplots(len(found), 2), found.items(), strict=True):
        each.draw(f"SpecSync, Fig. {number}: {name}", left, right)
    return figure


def figure_10(options: Options, tell: TellShare) -> Made:
    """Compare the loss over time under BSP, SSP, ASP and SpecSync on both clusters."""
    says = (
        "The paper prints no numbers for this figure, nor the bound of SSP; ours is 3. It says that the speed-up of "
        "SpecSync over ASP is smaller on Cluster 2 than on Cluster 1."
    )
    clusters = {f"Cluster {number}": CIFAR_10.cluster(number=number) for number in (1, 2)}
    return _made(10, FIGURE_10, clusters, says, options, tell)


def figure_11(options: Options, tell: TellShare) -> Made:
    """Compare SpecSync with ASP on 20, 30 and 40 machines: time to the target, and loss after the same time."""
    says = (
        "The paper prints no numbers for this figure. It says that both improvements grow with the number of "
        "machines."
    )
    return _made(11, FIGURE_11, {f"{n} machines": CIFAR_10.cluster(n) for n in SIZES}, says, options, tell)


EXHIBITS = (
    exhibit_on(
        "fig10", "loss over time under BSP, SSP, ASP and SpecSync, on both clusters", CIFAR_10, figure_10, 20
    ),
    exhibit_on("fig11", "speed-up and loss on 20, 30 and 40 machines", CIFAR_10, figure_11, 25),
)
