"""Figures of the ElasticBSP paper (Zhao et al., Machine Learning 2021, section 6.2): accuracy during training.

All figures have the same form: BSP, ASP, SSP, DSSP and ElasticBSP with several lookaheads R train a network on four
machines. `FIGURES` lists what differs: the network, the data and the hyper-parameters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from statistics import median

import msgspec
import numpy as np
import torch

from paceline.cli.console import TellShare
from paceline.sim import Cluster, Occasional, Uniform, simulate
from paceline.zipline import solve_periodic

from .barriers import plans_of
from .comparing import compare
from .exhibit import Exhibit, Made, Options, beside
from .networks import parameter_count
from .papers import ELASTIC_BSP
from .problems import WORKLOADS, problem
from .training import Target, TrainingRun, medians, under_each
from .verdicts import Measured

PAPER = str(ELASTIC_BSP)
EPOCHS = ELASTIC_BSP.tables["fig15-epochs"]
TARGET = Target("accuracy", 0.93, in_a_row=2)
WORKERS = 4
COMPUTE_S = 0.5  # of one iteration; the paper states no times, see the preset of the cluster
BATCH = 32  # on the digits
EVALUATIONS = 20  # per run, about
QUICK = 22  # iterations of each worker with `--quick`
LOOKAHEADS = (15, 30, 60, 120, 240)
LARGE_LOOKAHEADS = (*LOOKAHEADS, 480, 960)  # "for large-sized models on data sets of higher image resolution"


class AccuracyFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the paper's figures of accuracy over time.

    Attributes:
        number: number of the figure. The rate, the epochs and the weight decay are those quoted for it.
        workload: network and data, a name in `WORKLOADS`.
        batch: the paper's images per worker and iteration.
        milestones: epochs after which the paper lowers the learning rate.
        decay: factor of the learning rate at each milestone.
        lookaheads: values of R.
        minutes: approximate time for the stand-in in minutes.
        claims: what the paper says about the figure, as a sentence.
        momentum: momentum of SGD. The paper refers to the settings of AlexNet and VGG, which include a momentum. For
            residual networks, it states none.
        compute_s: compute time of an iteration in seconds, except in slow phases.
        stand_in_epochs: epochs on the digits; milestones are scaled.
        stand_in_rate: rate of all models on the digits; None for the paper's rate.
        rates: rates on the digits from which the best rate of each model is chosen.
    """

    number: int
    workload: str
    batch: int
    milestones: tuple[int, ...] = ()
    decay: float = 1.0
    lookaheads: tuple[int, ...] = LOOKAHEADS
    minutes: float
    claims: str
    momentum: float = 0.0
    compute_s: float = COMPUTE_S
    stand_in_epochs: int
    stand_in_rate: float | None = None
    rates: tuple[float, ...]

    def quoted(self, name: str) -> float:
        """Return a hyper-parameter that the paper states for this figure; 0 if the paper states none."""
        if (self.number, name) == (15, "epochs"):  # as many as BSP completes in 24 hours
            return EPOCHS.cell("epochs", "BSP").value
        quote = ELASTIC_BSP.numbers.get(f"fig{self.number}-{name}")
        return 0.0 if quote is None else quote.value

    @property
    def schemes(self) -> dict[str, str]:
        """Label -> sync model."""
        return {**OTHERS, **{f"ElasticBSP({r})": f"elastic-bsp:lookahead={r}" for r in self.lookaheads}}

    @property
    def at_one_rate(self) -> list[str]:
        """Labels that are trained only at the common rate: with `LARGE_LOOKAHEADS`, those of all R but the smallest."""
        return [f"ElasticBSP({r})" for r in self.lookaheads[1:] if self.lookaheads == LARGE_LOOKAHEADS]


OTHERS = {
    "BSP": "bsp",
    "ASP": "asp",
    "SSP(3)": "ssp:staleness=3",
    "DSSP(3, 15)": "dssp:lower=3,upper=15",
}

FIGURES = (
    AccuracyFigure(
        number=11,
        workload="C3F2-Net on CIFAR-10",
        batch=128,
        minutes=30,
        momentum=0.9,
        claims=(
            "In the paper, ElasticBSP converges faster and to a higher accuracy than the other models, and BSP "
            "converges to a higher accuracy than ASP and SSP. A larger R only takes more time."
        ),
        stand_in_epochs=22,
        stand_in_rate=0.02,
        rates=(0.01, 0.02, 0.05),
    ),
    AccuracyFigure(
        number=12,
        workload="ResNet-50 on CIFAR-100",
        batch=128,
        milestones=(200,),
        decay=0.1,
        minutes=4,
        claims=(
            "In the paper, ElasticBSP converges faster and to a slightly higher accuracy than BSP. ASP and SSP "
            "converge faster than both, but take longer for all epochs, because their updates queue at the server; "
            "here, updates take no time there."
        ),
        stand_in_epochs=6,
        rates=(0.2, 0.5, 1.0),
    ),
    AccuracyFigure(
        number=13,
        workload="ResNet-110 on CIFAR-100",
        batch=128,
        milestones=(200,),
        decay=0.1,
        minutes=6,
        claims=(
            "In the paper, ElasticBSP converges as fast as BSP, because long computations leave little time to save, "
            "and reaches a slightly higher accuracy. From R = 120, planning makes it slightly slower than BSP; here, "
            "planning takes no virtual time."
        ),
        compute_s=2 * COMPUTE_S,  # "its computation time is approximately doubled"
        stand_in_epochs=6,
        rates=(0.2, 0.5, 1.0),
    ),
    AccuracyFigure(
        number=14,
        workload="VGG-16 on ImageNet 1K",
        batch=256,
        milestones=(10, 15, 18),
        decay=0.2,
        lookaheads=LARGE_LOOKAHEADS,
        minutes=90,
        momentum=0.9,
        claims="In the paper, ASP and SSP complete the epochs faster than the other models, but fail to learn.",
        stand_in_epochs=5,
        rates=(0.005, 0.01, 0.02, 0.05),
    ),
    AccuracyFigure(
        number=15,
        workload="ResNet-50 on ImageNet 1K",
        batch=256,
        milestones=(80, 90),
        decay=0.1,
        lookaheads=LARGE_LOOKAHEADS,
        minutes=60,
        claims=(
            "In the paper, ElasticBSP performs as BSP does, and both reach a higher accuracy than the others, "
            "although DSSP, ASP and SSP converge faster. In 24 hours, the models complete these numbers of epochs: "
            + ", ".join(f"{column} {EPOCHS.cell('epochs', column)}" for column in EPOCHS.columns)
            + "."
        ),
        stand_in_epochs=6,
        rates=(0.1, 0.2, 0.5),
    ),
)


@cache
def cluster(workload: str, compute_s: float) -> Cluster:
    """Return the paper's cluster: 4 machines that exchange messages as large as the network.

    The slow phases of one machine are due to the shared switch, so they add the same time to iterations of any
    length. The phases are shorter and more frequent than in the preset, because the runs on the digits are short.
    """
    machines = Cluster.preset("elastic-bsp")
    with torch.device("meta"):
        size_bytes = 4 * parameter_count(WORKLOADS[workload].network())
    usual = Uniform(low=0.96 * compute_s, high=1.04 * compute_s)
    slow = Occasional(base=compute_s, factor=1 + 2 * COMPUTE_S / compute_s, lasting=10.0, every=20.0)
    return replace(machines, compute_s=[usual] * (WORKERS - 1) + [slow], size_bytes=size_bytes)


def runs_of(figure: AccuracyFigure, options: Options) -> list[TrainingRun]:
    """Return the runs at the common rate, with the paper's protocol or, on the digits, with a shorter protocol."""
    learned = problem(figure.workload, options.data)
    machines = cluster(figure.workload, figure.compute_s)
    on_digits = options.data is None
    batch = BATCH if on_digits else figure.batch
    epochs = figure.stand_in_epochs if on_digits else int(figure.quoted("epochs"))
    iterations = QUICK if options.quick else learned.train_size // WORKERS // batch * epochs
    first = f"ElasticBSP({figure.lookaheads[0]})"
    compared = ("BSP", first)  # the numbers of the paper, which --again compares, are of these models
    labels = (*OTHERS, first) if options.quick else compared if options.again else tuple(figure.schemes)
    schemes = {label: figure.schemes[label] for label in labels}
    common = TrainingRun(
        cluster=machines,
        target=TARGET,
        until_target=False,
        learning_rate=(on_digits and figure.stand_in_rate) or figure.quoted("rate"),
        momentum=figure.momentum,
        weight_decay=figure.quoted("weight-decay"),
        milestones=tuple(
            round(milestone * epochs / figure.quoted("epochs")) for milestone in figure.milestones
        ),
        decay=figure.decay,
        batch_size=batch,
        iterations=iterations,
        every_s=iterations * figure.compute_s / EVALUATIONS,
        problem=learned,
    )
    return under_each(common, schemes, options)


def make(figure: AccuracyFigure, options: Options, tell: TellShare) -> Made:
    """Compare the models' accuracy over time at a common rate and, on the digits, at the best rate for each model."""
    runs = runs_of(figure, options)
    found = compare(runs, figure.rates, options, tell, figure.at_one_rate)
    ends = medians(found.common, lambda o: o.time_s)
    finals = [medians(outcomes, lambda o: o.values[-1]) for outcomes in found.panels.values()]
    planning_ms = {
        f"ElasticBSP({lookahead})": _planning_ms(lookahead)
        for lookahead in figure.lookaheads
        if f"ElasticBSP({lookahead})" in ends
    }
    title = f"{PAPER}, Fig. {figure.number}: {runs[0].problem.name}"
    table = found.table(
        title,
        "BSP",
        None,
        {
            f"final,\nrate {found.rate:g}": lambda label: (None, f"{finals[0][label]:.1%}"),
            "final,\nown rate": lambda label: (None, f"{finals[1][label]:.1%}"),
            "s, all\nepochs": lambda label: (None, f"{ends[label]:.0f}"),
            "steps per\nsuperstep": lambda label: (None, _supersteps(figure, figure.schemes[label])),
            "ms to\nplan": lambda label: (None, f"{planning_ms[label]:.3f}" if label in planning_ms else "-"),
        },
    )
    first = next(iter(planning_ms))  # with the smallest R, as the paper recommends
    gains = found.gains(first, "BSP")
    notes = [
        *found.notes(),
        *["Of the values of R, only the first is tried at other rates."] * bool(figure.at_one_rate),
        *(
            f"The final accuracy of {first} differs from that of BSP by {gain} percentage points ({gain.how})."
            for gain in gains
        ),
    ]
    faster, more_accurate = (
        ("faster-than-bsp", "more-accurate-than-bsp")
        if figure.number == 14
        else (f"fig{figure.number}-faster", f"fig{figure.number}-more-accurate")
    )
    measured: dict[str, list[Measured]] = {
        key: values
        for key, values in ((faster, found.measured(first, "BSP")), (more_accurate, gains))
        if key in ELASTIC_BSP.numbers
    }
    if figure.number == 14:
        notes.append(
            f"In the paper, ElasticBSP converges {ELASTIC_BSP.numbers['faster-than-bsp']} times faster than BSP, and "
            f"its final accuracy is {ELASTIC_BSP.numbers['more-accurate-than-bsp']} higher."
        )
    tables = [table]
    if figure.number == 15:
        by_cost = {share: _epochs(figure, first, share) for share in (UPDATE_SHARE, 0.0)}
        rows = {
            column: [
                (EPOCHS.cell("epochs", column), f"{EPOCHS.cell('epochs', 'BSP').value * ratios[column]:.0f}")
                for ratios in by_cost.values()
            ]
            for column in EPOCHS.columns
        }
        columns = ["with a cost\nper update", "without"]
        tables.append(
            beside(f"{PAPER}, Fig. {figure.number}: epochs in the time of 99 under BSP", rows, columns)
        )
        notes.append(
            f"If an update costs {UPDATE_SHARE:.0%} of a computation, as assumed here, ASP completes as many epochs "
            "as in the paper if all machines are equally fast. So ASP agrees by construction, unlike the other models."
        )
        measured |= {
            f"fig15-epochs: epochs, {column}": [
                Measured.exactly(by_cost[UPDATE_SHARE][column], "with a cost per update"),
                Measured.exactly(by_cost[0.0][column], "without"),
            ]
            for column in EPOCHS.columns[1:]
            if column != "ASP"  # to which the cost is fitted
        }
    return Made(
        tables=tables,
        figure=partial(found.picture, f"Fig. {figure.number}"),
        data=found.plain(),
        notes=[*notes, figure.claims, _planning(planning_ms)],
        measured=measured,
    )


UPDATE_SHARE = 0.465
"""Cost u of an update, relative to a computation, with which n = 4 equal workers complete 78 epochs under ASP in the
time of 99 epochs under BSP. The server limits ASP, so the ratio of these epochs is (1 + u) / (n u)."""


def _epochs(figure: AccuracyFigure, elastic: str, update_share: float) -> dict[str, float]:
    """Return the epochs of each model in the time of one epoch under BSP, if machines are equal and transfers take 0 s.

    Args:
        figure: the figure.
        elastic: label of the model that stands for ElasticBSP.
        update_share: time that the server takes for an update, relative to a computation.
    """
    machines = Cluster(
        compute_s=[Uniform(low=0.99 * figure.compute_s, high=1.01 * figure.compute_s)] * WORKERS,
        update_s=update_share * figure.compute_s,
    )
    syncs = {label: figure.schemes[elastic if label == "ElasticBSP" else label] for label in EPOCHS.columns}
    times_s = {label: simulate(machines, sync, SUPERSTEPS_OF).time_s for label, sync in syncs.items()}
    return {label: times_s["BSP"] / time_s for label, time_s in times_s.items()}


SUPERSTEPS_OF = 1500  # iterations of each worker in the simulation that measures the length of supersteps


def _supersteps(figure: AccuracyFigure, sync: str) -> str:
    """Return, as text, the mean number of iterations per superstep in a simulation; "-" if there are no supersteps."""
    if sync == "bsp":
        return "1"
    if not sync.startswith("elastic"):
        return "-"
    result = simulate(cluster(figure.workload, figure.compute_s), sync, SUPERSTEPS_OF, record=True)
    return f"{SUPERSTEPS_OF / len(plans_of(result.trace[-1])):.1f}"


def _planning_ms(lookahead: int) -> float:
    """Return the median time in milliseconds that this machine takes to compute one plan."""
    last, interval = np.array([1.0, 1.1, 1.2, 1.3]), np.array([0.5, 0.51, 0.52, 1.5])
    times_s = []
    for _ in range(200):
        begun_s = time.perf_counter()
        solve_periodic(last, interval, lookahead)
        times_s.append(time.perf_counter() - begun_s)
    return median(times_s) * 1000


def _planning(planning_ms: Mapping[str, float]) -> str:
    labels = list(planning_ms)
    ends = dict.fromkeys((labels[0], labels[-1]))
    times = " and ".join(f"{planning_ms[label]:.3f} ms for {label}" for label in ends)
    return f"Computing a plan takes {times}."


SIMULATED = (
    "The paper says only that the shared switch caused stragglers; we chose the time of an iteration, which machine "
    "is slow and when."
)


def _exhibit(figure: AccuracyFigure) -> Exhibit:
    stand_in = WORKLOADS[figure.workload].stand_in.name
    rate = "" if figure.stand_in_rate is None else " at a larger rate"
    return Exhibit(
        name=f"elasticbsp-fig{figure.number}",
        title=f"accuracy over time under every model, {figure.workload}, on 4 machines",
        differs=(
            f"{stand_in} replaces {figure.workload}{rate}, for {figure.stand_in_epochs} epochs; the messages are as "
            f"large as those of the paper's network. {SIMULATED}"
        ),
        minutes=figure.minutes,
        make=partial(make, figure),
        with_data=f"The machines are simulated. {SIMULATED}",
        trains_on=(figure.workload,),
    )


EXHIBITS = tuple(map(_exhibit, FIGURES))
