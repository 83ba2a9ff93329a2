"""Tables 1 and 2 and Figs. 3, 5, 8 and 9 of ElasticBSP (Zhao et al., 2021), which explain how barriers are chosen.

The paper draws these figures by hand. Here, the figures show simulated runs of the sync models, and steps of solvers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np

from paceline.cli.console import TellShare
from paceline.look.timelines import COLOURS, DASHES, new_figure
from paceline.sim import Cluster, simulate
from paceline.sync.actions import Plan, PublishPlan
from paceline.sync.events import IterationFinished
from paceline.trace.recording import Trace
from paceline.zipline import LastInterval, candidate_waits, generate_pushes, solve
from paceline.zipline.end_times import Floats
from paceline.zipline.zipline import timeline

from .exhibit import Axes, Exhibit, Figure, Made, Options, beside
from .papers import ELASTIC_BSP, Quote
from .verdicts import Measured
from .zipline import GENERATED, predicted

PAPER = str(ELASTIC_BSP)
MARKERS = "soDv^P"

# -- Table 1: complexity ---------------------------------------------------------------------------------------

METHODS = tuple(ELASTIC_BSP.tables["table1"].rows)
WORKERS, LOOKAHEAD = (50, 100, 200, 400), 15  # inputs whose time shows the growth in n
FEW_WORKERS, LOOKAHEADS = 50, (15, 30, 60, 120)  # inputs whose time shows the growth in R
INPUTS = 10


def growth(sizes: Sequence[float], times_s: Sequence[float]) -> float:
    """Return the exponent of the power law that fits best: the slope of the line through the logarithms.

    >>> round(growth([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(times_s), 1)[0])


def table_1(options: Options, tell: TellShare) -> Made:
    """Measure how the computation time of each method grows with n and with R."""
    workers, lookaheads = (WORKERS[:2], LOOKAHEADS[:2]) if options.quick else (WORKERS, LOOKAHEADS)
    in_n, in_r = {}, {}
    methods = (*METHODS, "auto")
    for number, method in enumerate(methods):
        tell(method, number / len(methods))
        in_n[method] = [_time_s(method, n, LOOKAHEAD) for n in workers]
        in_r[method] = [_time_s(method, FEW_WORKERS, lookahead) for lookahead in lookaheads]
    table = ELASTIC_BSP.tables["table1"]
    rows: dict[str, list[tuple[Quote | None, str]]] = {}
    for method in methods:
        quoted = [table.cell(method, size) if method in table.rows else None for size in ("R", "n")]
        ours = [f"{growth(lookaheads, in_r[method]):.2f}", f"{growth(workers, in_n[method]):.2f}"]
        rows[method] = list(zip(quoted, ours, strict=True))

    def draw() -> Figure:
        figure = new_figure(11.0, 4.4)
        for axes, sizes, found, name in zip(
            figure.subplots(1, 2),
            (workers, lookaheads),
            (in_n, in_r),
            (f"workers n, R = {LOOKAHEAD}", f"R, n = {FEW_WORKERS}"),
            strict=True,
        ):
            for number, (method, times_s) in enumerate(found.items()):
                axes.loglog(
                    sizes,
                    [each * 1000 for each in times_s],
                    marker="o",
                    color=COLOURS[number % len(COLOURS)],
                    linestyle=DASHES[number % len(DASHES)],
                    label=f"{method}, exponent {growth(sizes, times_s):.2f}",
                )
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_ylim(top=50 * 1000 * max(map(max, found.values())))  # room for the legend
            axes.set(xlabel=name, ylabel="ms")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7.5)
        return figure

    title = f"{PAPER}, Table 1: exponents of R and n in the computation time"
    return Made(
        tables=[beside(title, rows, ["exponent of R", "exponent of n"])],
        figure=draw,
        data={
            "workers": workers,
            "lookaheads": lookaheads,
            "seconds over workers": in_n,
            "seconds over lookaheads": in_r,
        },
        measured={
            f"table1: {method}, {size}": Measured.exactly(round(growth(sizes, found[method]), 2))
            for method in METHODS
            for size, sizes, found in (("R", lookaheads, in_r), ("n", workers, in_n))
        },
        notes=[
            "The paper's exponents are upper bounds for the worst case, without logarithms. A measured exponent may "
            "be lower: some of the time does not grow with the input, and the grid scans compare all end times in a "
            "single call of NumPy, which is slower per element if there are few.",
            "Every method keeps the R x n end times and one candidate, as in the paper's column for memory.",
        ],
    )


def _time_s(method: str, workers: int, lookahead: int) -> float:
    """Return the shortest CPU time in seconds of a method over several inputs."""
    times_s = []
    for seed in range(INPUTS):
        times = predicted(workers, lookahead, seed)
        begun_s = time.thread_time()
        solve(times, method)
        times_s.append(time.thread_time() - begun_s)
    return min(times_s)


# -- Table 2: the synthetic data sets ----------------------------------------------------------------------------


def table_2(options: Options, tell: TellShare) -> Made:
    """Generate the data sets, and show their shapes."""
    table = ELASTIC_BSP.tables["table2"]
    *places, last = table.columns
    tables, data = [], []
    for name in table.rows:
        lookahead = table.cell(name, last)
        rows: dict[str, list[tuple[Quote | None, str]]] = {}
        for place in places:
            workers = table.cell(name, place)
            times = predicted(int(workers.value), int(lookahead.value))
            pushes = generate_pushes(int(workers.value), np.random.default_rng(0))
            _, intervals = LastInterval()(pushes)
            rows[place] = [
                (workers, str(times.shape[0])),
                (lookahead, str(times.shape[1])),
                (None, f"{times.size:,}"),
                (None, f"{intervals.min():.0f} to {intervals.max():.0f}"),
                (None, f"{solve(times).wait:,.0f}"),
            ]
            data.append({"set": name, "n": times.shape[0], "R": times.shape[1], "end_times": times.size})
        columns = ["n", "R", "end times", "intervals,\nms", "smallest\nd_Z, ms"]
        tables.append(beside(f"{PAPER}, Table 2: {name}", rows, columns))

    def draw() -> Figure:
        figure = new_figure(11.0, 3.6)
        workers, lookahead = 10, 15
        times = predicted(workers, lookahead) / 1000
        axes, spread = figure.subplots(1, 2, width_ratios=(3, 1))
        for worker, row in enumerate(times):
            axes.plot(row, [worker] * lookahead, ".", color=COLOURS[worker % len(COLOURS)])
        axes.set(xlabel="seconds", ylabel="worker", yticks=range(workers))
        axes.set_title(f"SmallR, n = {workers}: predicted end times")
        _, intervals = LastInterval()(generate_pushes(1000, np.random.default_rng(0)))
        spread.hist(intervals, bins=20, color=COLOURS[5])
        spread.set(xlabel="interval of a worker, ms", ylabel="workers", title="n = 1,000")
        return figure

    return Made(tables=tables, figure=draw, data=data)


# -- Simulated runs ------------------------------------------------------------------------------------------------

TRANSFER_S = 0.25  # time to transfer a push; the answer to a pull takes as long


class Finished(msgspec.Struct, frozen=True):
    """A push, as it is reported to the coordinator.

    Attributes:
        time_s: time of the push in seconds.
        worker: the worker that pushed.
        iteration: the worker's iteration.
        stopped: True if the worker stopped at this push for a barrier.
    """

    time_s: float
    worker: int
    iteration: int
    stopped: bool


def pushes_of(trace: Trace) -> list[Finished]:
    """Return the pushes in the trace of a coordinator, in order of time."""
    return [
        Finished(
            float(trace.time_s(entry)),
            entry.event.worker,
            entry.event.iteration,
            entry.event.superstep is not None,
        )
        for entry in trace.entries
        if isinstance(entry.event, IterationFinished)
    ]


def plans_of(trace: Trace) -> list[tuple[float, Plan]]:
    """Return (time in seconds, plan) of each plan in the trace of a coordinator."""
    return [
        (float(trace.time_s(entry)), action.plan)
        for entry in trace.entries
        for action in entry.actions
        if isinstance(action, PublishPlan)
    ]


def _rows(axes: Axes, workers: int) -> None:
    axes.set_yticks(range(workers), [f"worker {worker}" for worker in range(workers)])
    axes.set(ylim=(workers - 0.4, -0.6), xlabel="seconds")


# -- Figure 3: iteration intervals ---------------------------------------------------------------------------------

FIGURE_3 = (1.2, 1.9, 2.7)


def figure_3(options: Options, tell: TellShare) -> Made:
    """Measure the iteration intervals from the pushes of a simulated run, and map the pushes onto one timeline."""
    workers = len(FIGURE_3)
    result = simulate(
        Cluster(compute_s=FIGURE_3, latency_s=TRANSFER_S / 2), "elastic-bsp:lookahead=3", 5, record=True
    )
    assert result.recording is not None
    pushes = pushes_of(result.trace[-1])
    until_s = min(max(p.time_s for p in pushes if p.worker == worker) for worker in range(workers))
    pushes = [push for push in pushes if push.time_s <= until_s]
    found = {
        worker: np.diff([push.time_s for push in pushes if push.worker == worker])
        for worker in range(workers)
    }
    rows: dict[str, list[tuple[Quote | None, str]]] = {
        f"worker {worker}": [
            (None, f"{FIGURE_3[worker]:.2f}"),
            (None, ", ".join(f"{interval:.2f}" for interval in found[worker])),
        ]
        for worker in range(workers)
    }

    def draw() -> Figure:
        figure = new_figure(11.0, 3.8)
        axes = figure.subplots()
        for push in pushes:
            color = COLOURS[push.worker]
            end_s = push.time_s - TRANSFER_S / 2
            axes.barh(push.worker, FIGURE_3[push.worker], 0.5, end_s - FIGURE_3[push.worker], color=color)
            axes.plot([push.time_s] * 2, [push.worker - 0.3, workers], ":", color=color, linewidth=1)
            axes.plot(push.time_s, workers, "o", color=color)
        z: dict[int, float] = {}
        for push in pushes:
            z[push.worker] = push.time_s
            if len(z) == workers:
                break
        ends = [min(z.values()), max(z.values())]
        axes.plot([ends[0], *ends, ends[1]], workers + np.array([0.2, 0.35, 0.35, 0.2]), color="black")
        axes.text(float(np.mean(ends)), workers + 0.6, "first set Z", ha="center", fontsize=9)
        _rows(axes, workers)
        axes.set_ylim(workers + 0.8, -0.6)
        axes.set_yticks([*axes.get_yticks(), workers], [*(f"worker {w}" for w in range(workers)), "timeline"])
        axes.set_title("Fig. 3: computation (blocks), communication and waiting (gaps), pushes (dots)")
        return figure

    return Made(
        tables=[
            beside(
                f"{PAPER}, Fig. 3: intervals between pushes, s", rows, ["computation", "intervals, in order"]
            )
        ],
        figure=draw,
        data=[msgspec.to_builtins(push) for push in pushes],
        notes=[
            "The coordinator measures an interval as the time between two pushes of a worker. It contains the "
            "computation, the push and the pull, and the wait at a barrier if there is one."
        ],
    )


# -- Figure 5: monitoring and prediction ---------------------------------------------------------------------------

FIGURE_5 = ([1.0] * 40, [1.7] * 40, [2.6] * 4 + [1.3] * 36)
FIGURE_5_LOOKAHEAD = 6


def figure_5(options: Options, tell: TellShare) -> Made:
    """Show two supersteps of ElasticBSP with three workers, one of which becomes faster in the second superstep."""
    result = simulate(
        Cluster(compute_s=FIGURE_5), f"elastic-bsp:lookahead={FIGURE_5_LOOKAHEAD}", 40, record=True
    )
    trace = result.trace[-1]
    plans, pushes = plans_of(trace), pushes_of(trace)
    rows: dict[str, list[tuple[Quote | None, str]]] = {}
    shown: list[tuple[float, Plan, dict[int, tuple[float, float]], float]] = []
    for at_s, plan in plans[:2]:
        known = {}
        for worker in plan.members:
            times_s = [push.time_s for push in pushes if push.worker == worker and push.time_s <= at_s]
            known[worker] = (times_s[-1], times_s[-1] - times_s[-2])
        stops = dict(plan.stops)
        arrived = [push.time_s for push in pushes if push.iteration == stops[push.worker]]
        ticks = trace.header.ticks_per_s
        rows[f"superstep {plan.superstep}"] = [
            (None, f"{at_s:.1f}"),
            (None, ", ".join(f"{interval:.1f}" for _, interval in known.values())),
            (None, f"{float(plan.barrier_ticks / ticks):.1f}"),
            (None, f"{max(arrived):.1f}"),
            (None, f"{float(plan.wait_ticks / ticks):.1f}"),
            (None, f"{max(arrived) - min(arrived):.1f}"),
        ]
        shown.append((at_s, plan, known, max(arrived)))

    def draw() -> Figure:
        figure = new_figure(11.5, 5.6)
        end_s = max(barrier_s for *_, barrier_s in shown) + 1
        for axes, (at_s, plan, known, barrier_s) in zip(
            figure.subplots(2, 1, sharex=True), shown, strict=True
        ):
            for push in pushes:
                if push.time_s <= barrier_s:
                    axes.plot(push.time_s, push.worker, MARKERS[push.worker], color=COLOURS[push.worker])
            for worker, (last_s, interval_s) in known.items():
                ahead = last_s + interval_s * np.arange(1, FIGURE_5_LOOKAHEAD + 1)
                ahead = ahead[ahead <= end_s]
                axes.plot(
                    ahead,
                    [worker + 0.3] * len(ahead),
                    MARKERS[worker],
                    markerfacecolor="none",
                    color=COLOURS[worker],
                )
            axes.axvspan(at_s, barrier_s, color="#eeeeee", zorder=0)
            axes.axvline(barrier_s, color=COLOURS[4])
            axes.set_xlim(0, end_s)
            _rows(axes, len(FIGURE_5))
            axes.set_xlabel("")
            axes.set_title(
                f"superstep {plan.superstep}: planned at {at_s:.1f} s, barrier at {barrier_s:.1f} s",
                fontsize=10,
            )
        axes.set_xlabel(
            "seconds (filled: pushes; hollow, below them: predicted ends; gray: prediction phase)"
        )
        return figure

    columns = [
        "planned\nat, s",
        "last intervals\nof workers, s",
        "barrier\nplanned, s",
        "barrier\nactual, s",
        "d_Z\nplanned, s",
        "d_Z\nactual, s",
    ]
    return Made(
        tables=[beside(f"{PAPER}, Fig. 5: two supersteps, R = {FIGURE_5_LOOKAHEAD}", rows, columns)],
        figure=draw,
        data={"pushes": msgspec.to_builtins(pushes), "plans": msgspec.to_builtins(plans)},
        notes=[
            "Monitoring lasts until every worker has pushed twice since the last barrier. Then, the next R ends of "
            "each worker's iterations are predicted from its last interval, and ZipLine chooses the barrier. In "
            "superstep 1, worker 2 is faster, and the plan follows it.",
        ],
    )


# -- Figure 8: stale gradients, and two barriers with the same wait ------------------------------------------------

FIGURE_8A = (1.0, 2.6)
FIGURE_8B = (2, 3, 4, 6, 12)


def figure_8(options: Options, tell: TellShare) -> Made:
    """Count stale gradients of two workers, and compare two barriers with the same waiting time d_Z."""
    iterations = 12
    stale: dict[str, dict[int, int]] = {}
    rows: dict[str, list[tuple[Quote | None, str]]] = {}
    for label, sync in {"BSP": "bsp", "ElasticBSP": "elastic-bsp:lookahead=4", "ASP": "asp"}.items():
        found = simulate(Cluster(compute_s=FIGURE_8A), sync, iterations).staleness
        stale[label] = found
        total = sum(found.values())
        rows[label] = [
            (None, str(total)),
            (None, str(total - found.get(0, 0))),
            (None, str(max(found))),
            (None, f"{fmean(value for value, count in found.items() for _ in range(count)):.2f}"),
        ]
    ends = np.outer(FIGURE_8B, np.arange(1, 13)).astype(float)
    counts = {at: [at // interval for interval in FIGURE_8B] for at in (12, 24)}
    chosen = solve(ends)
    waits = candidate_waits(ends)
    keys = {12: "fig8-b", 24: "fig8-a"}
    barriers: dict[str, list[tuple[Quote | None, str]]] = {
        f"Z at {at} s": [
            (None, ", ".join(map(str, count))),
            (None, f"{_wait_at(ends, at):.0f}"),
            (ELASTIC_BSP.numbers[keys[at]], str(max(count) - min(count))),
            (None, "yes" if chosen.barrier == at else "no"),
        ]
        for at, count in counts.items()
    }

    def draw() -> Figure:
        figure = new_figure(11.5, 4.2)
        left, right = figure.subplots(1, 2, width_ratios=(2, 3))
        for number, (label, found) in enumerate(stale.items()):
            places = np.array(sorted(found)) + 0.27 * (number - 1)
            left.bar(
                places, [found[value] for value in sorted(found)], 0.25, color=COLOURS[number], label=label
            )
        left.set_xticks(range(max(map(max, stale.values())) + 1))
        left.set(xlabel="staleness, in updates", ylabel="gradients")
        left.set_title("a: two workers, one 2.6 times slower")
        left.legend()
        for worker, interval in enumerate(FIGURE_8B):
            times = np.arange(interval, 25, interval)
            right.plot(times, [worker] * len(times), "o", color=COLOURS[worker])
        for at, name in ((12, "chosen"), (24, "same d_Z, later")):
            right.axvline(at, color="#777777", linestyle="--")
            difference = max(counts[at]) - min(counts[at])
            right.text(at, -0.75, f"{name}:\ndifference {difference}", ha="center", va="bottom", fontsize=8)
        right.set_xlim(0, 26)
        _rows(right, len(FIGURE_8B))
        right.set_title("b: ends of the iterations of five workers", pad=30)
        return figure

    return Made(
        tables=[
            beside(
                f"{PAPER}, Fig. 8a: {iterations} iterations of each worker",
                rows,
                ["gradients", "stale", "largest\nstaleness", "mean\nstaleness"],
            ),
            beside(
                f"{PAPER}, Fig. 8b: two barriers",
                barriers,
                ["iterations of\nthe workers", "d_Z, s", "d_iter", "chosen"],
            ),
        ],
        figure=draw,
        data={"staleness": stale, "iterations": {str(at): count for at, count in counts.items()}},
        notes=[
            f"In 8b, d_Z = {waits.min():.0f} s at both barriers. The solvers choose the earlier one, at which the "
            "difference between the numbers of iterations, d_iter, is smaller (Theorem 1). The example is ours: the "
            "paper does not state the times of its five workers.",
        ],
    )


def _wait_at(ends: Floats, at: float) -> float:
    """Return d_Z of the narrowest set whose latest end time is `at`."""
    return at - float(np.where(ends <= at, ends, 0.0).max(axis=1).min())


# -- Figure 9: the scan of ZipLine ---------------------------------------------------------------------------------

FIGURE_9 = np.array([[3.5, 7.0, 10.5, 14.0], [4.0, 8.0, 12.0, 16.0], [6.5, 11.0, 15.5, 20.0]])


def figure_9(options: Options, tell: TellShare) -> Made:
    """Follow ZipLine's scan through all end times of three workers, one candidate Z per step."""
    steps = scan(FIGURE_9)
    best = min(range(len(steps)), key=lambda index: max(steps[index].values()) - min(steps[index].values()))
    waits = candidate_waits(FIGURE_9)
    rows: dict[str, list[tuple[Quote | None, str]]] = {
        f"Z_{number}": [
            (None, ", ".join(f"{z[worker]:g}" for worker in sorted(z))),
            (None, f"{wait:g}"),
            (None, "smallest, chosen" if number - 1 == best else "smallest" if wait == waits.min() else ""),
        ]
        for number, (z, wait) in enumerate(zip(steps, waits, strict=True), start=1)
    }

    def draw() -> Figure:
        figure = new_figure(11.0, 5.4)
        axes = figure.subplots()
        for end, worker, _ in timeline(FIGURE_9):
            axes.axvline(end, color=COLOURS[worker], linewidth=0.5, alpha=0.4)
            axes.plot(end, 0, "o", color=COLOURS[worker], markersize=8)
        for number, (z, wait) in enumerate(zip(steps, waits, strict=True), start=1):
            smallest = wait == waits.min()
            color = COLOURS[4] if smallest else "#999999"
            axes.plot(
                [min(z.values()), max(z.values())],
                [number] * 2,
                color=color,
                linewidth=3 if smallest else 1.5,
            )
            for worker, end in z.items():
                axes.plot(end, number, MARKERS[worker], color=COLOURS[worker], markersize=6)
            text = f"d = {wait:g}" + (", chosen" if number - 1 == best else "")
            axes.text(max(z.values()) + 0.25, number, text, va="center", fontsize=8, color=color)
        for worker in range(len(FIGURE_9)):
            axes.plot([], [], MARKERS[worker], color=COLOURS[worker], label=f"worker {worker}")
        axes.set_yticks(range(len(steps) + 1), ["timeline", *(f"Z_{n}" for n in range(1, len(steps) + 1))])
        axes.invert_yaxis()
        axes.set(xlabel="end times", xlim=(2, 22.5))
        axes.legend(loc="lower left")
        axes.set_title("Fig. 9: the scan of ZipLine, from the top down")
        return figure

    return Made(
        tables=[
            beside(
                f"{PAPER}, Fig. 9: candidates in scan order",
                rows,
                ["end times of workers 0 to 2", "d_Z", "result"],
            )
        ],
        figure=draw,
        data=[{str(worker): end for worker, end in z.items()} for z in steps],
        notes=[
            "Every end time on the timeline replaces the same worker's earlier one in Z. Of several candidates with "
            "the smallest d_Z, the first is chosen (Corollary 1). In the paper's sketch, d_6 and d_10 are equal.",
        ],
    )


def scan(times: Floats) -> list[Mapping[int, float]]:
    """Return all candidates Z in scan order, each as worker -> end time, for an (n, R) array of end times."""
    z: dict[int, float] = {}
    steps: list[Mapping[int, float]] = []
    for end, worker, _ in timeline(times):
        z[worker] = end
        if len(z) == len(times):
            steps.append(dict(z))
    return steps


BOUNDS = "The paper derives bounds; we fit exponents to computation times that are measured on this machine."
OURS = "The example is ours; the paper draws a sketch, and does not state the times in it."

EXHIBITS = tuple(
    Exhibit(
        name=f"elasticbsp-{name}", title=title, differs=differs, minutes=minutes, make=make, stand_in=False
    )
    for name, title, differs, minutes, make in (
        ("table1", "growth of each method's computation time with n and R", BOUNDS, 1, table_1),
        ("table2", "shapes of the synthetic data sets", GENERATED, 0.1, table_2),
        ("fig3", "iteration intervals on a timeline, from a simulated run", OURS, 0.1, figure_3),
        ("fig5", "monitoring and prediction in two supersteps of a simulated run", OURS, 0.1, figure_5),
        ("fig8", "stale gradients, and two barriers with the same d_Z", OURS, 0.1, figure_8),
        ("fig9", "the scan of ZipLine, step by step", OURS, 0.1, figure_9),
    )
)
