"""Figures 2, 4 and 6 of SpecSync: an example of 4 workers, run by the simulator."""

from __future__ import annotations

import msgspec

from paceline.cli.console import TellShare
from paceline.look.timelines import COLOURS, new_figure
from paceline.sim import Cluster, simulate
from paceline.sync.actions import AnswerPull
from paceline.sync.events import PullRepeated, PushReceived
from paceline.trace.recording import Trace

from ..exhibit import Exhibit, Figure, Made, Options, beside
from ..papers import SPEC_SYNC, Quote
from .workloads import PAPER

COMPUTE_S = (2.0, 3.2, 2.8, 2.4)  # worker-1 pushes first, then worker-4, worker-3 and worker-2
CLUSTER = Cluster(compute_s=COMPUTE_S)
MODELS = {
    "Fig. 2: asynchronous": "asp",
    "Fig. 4: naive waiting": "naive-waiting:delay_s=0.9",
    "Fig. 6: speculative synchronization": "spec-sync:abort_time_s=0.9,abort_rate=0.4",  # more than 1.6 pushes
}


class Computation(msgspec.Struct, frozen=True):
    """A computation of a worker."""

    worker: int  # the worker
    begun_s: float  # time of the pull at its beginning
    ended_s: float  # time of its push, or of the pull that aborted it
    updates: int  # number of pushes that the pulled weights contain
    aborted: bool  # True if it was aborted


def computations(shard: Trace) -> list[Computation]:
    """Return the computations after each worker's first push, from the trace of the only shard."""
    found, pushes = [], 0
    begun: dict[int, tuple[float, int]] = {}
    for entry in shard.entries:
        time_s, event = shard.time_s(entry), entry.event
        if isinstance(event, PushReceived | PullRepeated) and event.worker in begun:
            begun_s, updates = begun.pop(event.worker)
            aborted = isinstance(event, PullRepeated)
            found.append(Computation(event.worker, begun_s, time_s, updates, aborted))
        pushes += isinstance(event, PushReceived)
        for action in entry.actions:
            if isinstance(action, AnswerPull) and pushes:
                begun[action.worker] = time_s, pushes
    return found


def figures_2_4_and_6(options: Options, tell: TellShare) -> Made:
    """Compare how many updates each worker's second iteration uses."""
    found = {}
    for number, (label, sync) in enumerate(MODELS.items()):
        tell(label, number / len(MODELS))
        found[label] = computations(simulate(CLUSTER, sync, 2, record=True).trace[0])
    rows: dict[str, list[tuple[Quote | None, str]]] = {label: [] for label in found}
    for label, done in found.items():
        quoted = label.partition(":")[0].replace(". ", "").lower()
        for worker in range(CLUSTER.workers):
            key = f"{quoted}-worker-{worker + 1}"
            updates = max(each.updates for each in done if each.worker == worker and not each.aborted)
            rows[label].append((SPEC_SYNC.numbers.get(key), str(updates)))

    def draw() -> Figure:
        figure = new_figure(9.0, 7.5)
        for axes, (label, done) in zip(
            figure.subplots(len(found), 1, sharex=True), found.items(), strict=True
        ):
            for worker in range(CLUSTER.workers):
                axes.barh(worker, COMPUTE_S[worker], 0.5, color="#BBBBBB")
            for each in done:
                axes.barh(
                    each.worker,
                    each.ended_s - each.begun_s,
                    0.5,
                    left=each.begun_s,
                    color="white" if each.aborted else COLOURS[0],
                    edgecolor=COLOURS[1] if each.aborted else COLOURS[0],
                    hatch="//" if each.aborted else None,
                )
                axes.text(
                    each.begun_s + 0.06,
                    each.worker,
                    f"{each.updates} updates" if each.updates > 1 else "1 update",
                    va="center",
                    fontsize=8,
                    color="black" if each.aborted else "white",
                )
            axes.set_yticks(
                range(CLUSTER.workers), [f"worker-{worker + 1}" for worker in range(CLUSTER.workers)]
            )
            axes.invert_yaxis()
            axes.set_title(f"SpecSync, {label}", fontsize=10)
        figure.axes[-1].set_xlabel("virtual seconds (gray: first iteration; hatched: aborted)")
        return figure

    return Made(
        tables=[
            beside(
                f"{PAPER}, Figs. 2, 4 and 6: updates in the weights of each worker's second iteration",
                rows,
                [f"worker-{worker + 1}" for worker in range(CLUSTER.workers)],
            )
        ],
        figure=draw,
        data=found,
        notes=[
            "As in the paper, naive waiting delays every worker, whereas speculative synchronization restarts "
            + " and ".join(f"worker-{each.worker + 1}" for each in found[list(MODELS)[-1]] if each.aborted)
            + ". In the paper, worker-1 and worker-4 restart.",
        ],
    )


EXHIBITS = (
    Exhibit(
        name="specsync-examples",
        title="an example of 4 workers: asynchronous, naive waiting, speculative synchronization",
        differs="The paper prints no times. We chose ours to have the order of pushes that its text describes.",
        minutes=0.1,
        make=figures_2_4_and_6,
        numbers=("Fig. 2", "Fig. 4", "Fig. 6"),
        stand_in=False,
    ),
)
