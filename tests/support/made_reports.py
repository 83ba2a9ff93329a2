"""Reports of runs that never took place, for tests of the page. They are the same each time.

The times of an iteration are drawn for each worker; a barrier or the slowest worker ends each wait. The buckets and
the exact iterations of a timeline are made from the same times, so they agree.
"""

from __future__ import annotations

import base64
import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.metrics import Metric, MetricPoint
from paceline.core.status import JobStatus, LinkStatus, MachineStatus, WorkerStatus
from paceline.trace.activity_cells import KINDS
from paceline.trace.report import (
    Cause,
    LinkTotal,
    Mark,
    ModelInForce,
    ReportedSetting,
    RunReport,
    Spans,
    TimelineReport,
    WaitingFor,
    WorkerReport,
)

MARKUP = "</script><img src=x onerror=alert(1)><!--&amp;"
PARTS = ("wasted", "computing", "transfer", "waiting", "transfer")
BARRIERS = 2000


def made_report(
    name: str,
    *,
    computing_s: tuple[float, ...],
    iterations: int,
    transfer_s: float = 0.004,
    buckets: int = 1024,
    exact: int = 50_000,
    sync: str = "bsp",
    seed: int = 1,
    **more: object,
) -> RunReport:
    """Return the report of a run in lockstep.

    Args:
        name: name of the run.
        computing_s: mean time of each worker's iterations.
        iterations: number of iterations of each worker.
        transfer_s: time of one transfer.
        buckets: number of buckets of the timeline.
        exact: number of iterations of all workers together that are known exactly, the last ones.
        sync: name of the sync model.
        seed: random seed.
        more: other fields of the report.
    """
    draw = np.random.default_rng(seed)
    workers = len(computing_s)
    computing = np.array(computing_s) * draw.gamma(60, 1 / 60, (iterations, workers))
    ready = computing + transfer_s
    longest = ready.max(axis=1)
    length = longest + transfer_s
    begun = np.concatenate(([0.0], np.cumsum(length)))[:-1]
    waiting = longest[:, None] - ready
    slowest = ready.argmax(axis=1)
    # (iterations, workers, parts)
    lengths = np.stack(
        [
            np.zeros_like(computing),
            computing,
            np.full_like(computing, transfer_s),
            waiting,
            np.full_like(computing, transfer_s),
        ],
        axis=2,
    )
    duration_s = float(begun[-1] + length[-1])
    batch = 32
    time_s = [
        {
            "computing": float(computing[:, worker].sum()),
            "transfer": 2 * transfer_s * iterations,
            "waiting": float(waiting[:, worker].sum()),
        }
        for worker in range(workers)
    ]
    kept = min(iterations, exact // workers)
    made = RunReport(
        name=name,
        run_dir=f"runs/{name}",
        version="0.1.0",
        begun_at="2026-03-04T15:26:08+01:00",
        state="finished",
        duration_s=duration_s,
        headline=f"{workers} workers trained {iterations} iterations in {duration_s:.0f} s.",
        settings=(
            ReportedSetting("--sync", sync),
            ReportedSetting("--workers", str(workers)),
            ReportedSetting("--seed", str(seed), default=seed == 1),
            ReportedSetting("--servers", "1", default=True),
            ReportedSetting("--batch", "equal", default=True),
        ),
        command=f"paceline run --workers {workers} --sync {sync} train.py --epochs 3 --data 'a folder/digits'",
        figures={
            "iterations": str(iterations * workers),
            "gradients per second": "41.2",
            "accuracy": "97.1 %",
        },
        metrics=(
            losses("loss", duration_s, iterations, seed=seed),
            points("accuracy", duration_s, iterations, 12),
        ),
        progress=tuple(
            (float(at_s), int(batch * workers * step), int(step))
            for step, at_s in list(enumerate(begun))[:: max(1, iterations // 1000)]
        ),
        workers=tuple(
            WorkerReport(
                worker=worker,
                fate="finished",
                iterations=iterations,
                samples=iterations * batch,
                samples_per_s=batch / computing_s[worker],
                time_s=time_s[worker],
                awaited_s=float(waiting[slowest == worker].sum()),
                mean_batch=float(batch),
            )
            for worker in range(workers)
        ),
        timeline=TimelineReport(
            width_s=duration_s / buckets,
            buckets=buckets,
            workers=tuple(range(workers)),
            shares=tuple(
                shares_of(begun, lengths[:, worker], duration_s, buckets) for worker in range(workers)
            ),
            awaited=tuple(
                awaited_of(begun, np.where(slowest == worker, -1, slowest), duration_s, buckets)
                for worker in range(workers)
            ),
            spans=tuple(
                Spans(
                    worker,
                    tuple(np.round(begun[-kept:] * 1e4).astype(int).tolist()),
                    tuple(map(tuple, np.round(lengths[-kept:, worker] * 1e4).astype(int).tolist())),
                    tuple(np.where(slowest == worker, -1, slowest)[-kept:].tolist()),
                )
                for worker in range(workers)
            ),
            exact_from_s=float(begun[-kept]) if kept < iterations else 0.0,
            barriers_s=tuple((begun + longest)[-BARRIERS:].tolist()),
        ),
        models=(
            ModelInForce(
                sync=sync,
                from_s=0.0,
                to_s=duration_s,
                staleness=((0, iterations * workers),),
                waiting=tuple(
                    WaitingFor(
                        f"a push of worker {worker}",
                        float(waiting[slowest == worker].sum()),
                        int((slowest == worker).sum()) * (workers - 1),
                        int(worker),
                    )
                    for worker in np.argsort([-waiting[slowest == each].sum() for each in range(workers)])
                ),
                wait_lengths=tuple(
                    (0.001 * 2.0**power, int((np.ceil(np.log2(waiting[waiting > 0] / 0.001)) == power).sum()))
                    for power in range(-2, 9)
                ),
                updates=iterations,
            ),
        ),
        pushes={"averaged": iterations * workers - 3, "dropped": 2, "not yet applied": 1},
        samples={"used": iterations * workers * batch, "handed out, but not used": 64},
        marks=tuple(
            Mark(0.01 * worker, "joined", f"Worker {worker} joined.", worker) for worker in range(workers)
        ),
    )
    return msgspec.structs.replace(made, **more)


def shares_of(
    begun: NDArray[np.float64], lengths: NDArray[np.float64], duration_s: float, buckets: int
) -> str:
    """Return what `TimelineReport.shares` holds for one worker."""
    ends = begun[:, None] + np.cumsum(lengths, axis=1)
    edges = np.linspace(0.0, duration_s, buckets + 1)
    shares = np.zeros((buckets, len(KINDS)))
    for kind in dict.fromkeys(PARTS):
        # the time spent on this kind until each border of a part, between which it grows evenly
        at_s, spent_s = [begun[:, None]], [np.zeros((len(begun), 1))]
        for part, name in enumerate(PARTS):
            at_s.append(ends[:, part : part + 1])
            spent_s.append(spent_s[-1] + (lengths[:, part : part + 1] if name == kind else 0.0))
        spent = np.hstack(spent_s)
        before = np.concatenate(([0.0], np.cumsum(spent[:, -1])))[:-1]
        total_s = np.interp(edges, np.hstack(at_s).ravel(), (spent + before[:, None]).ravel())
        shares[:, KINDS.index(kind)] = np.diff(total_s) / (duration_s / buckets)
    return base64.b64encode(np.round(shares * 255).clip(0, 255).astype(np.uint8).tobytes()).decode()


def awaited_of(begun: NDArray[np.float64], whom: NDArray[np.int64], duration_s: float, buckets: int) -> str:
    """Return what `TimelineReport.awaited` holds for one worker: whom it awaits in the middle of each bucket."""
    middles = (np.arange(buckets) + 0.5) * duration_s / buckets
    places = np.searchsorted(begun, middles, side="right") - 1
    return base64.b64encode(whom[places].astype("<i2").tobytes()).decode()


def losses(
    name: str, duration_s: float, updates: int, *, count: int = 400, seed: int = 1, guessed: bool = False
) -> Metric:
    """Return a loss that falls."""
    draw = np.random.default_rng(seed)
    count = min(count, updates)
    return Metric(
        name,
        "mean",
        tuple(
            MetricPoint(
                time_s=float(duration_s * share),
                samples=int(updates * 128 * share),
                updates=int(updates * share),
                value=float(2.3 * math.exp(-3 * share) + 0.1 + 0.06 * draw.standard_normal()),
                weight=128.0,
                count=4,
            )
            for share in (np.arange(count) + 1) / count
        ),
        guessed,
    )


def points(name: str, duration_s: float, updates: int, count: int) -> Metric:
    """Return the results of evaluations by worker 0."""
    return Metric(
        name,
        "point",
        tuple(
            MetricPoint(
                time_s=float(duration_s * share),
                samples=int(updates * 128 * share),
                updates=int(updates * share),
                value=float(1 - 0.8 * math.exp(-4 * share)),
                worker=0,
            )
            for share in (np.arange(count) + 1) / count
        ),
    )


def straggler() -> RunReport:
    """Return the report of a run in which worker 3 was slow, with one evaluation after each epoch."""
    return made_report(
        "digits-bsp",
        computing_s=(0.05, 0.05, 0.06, 0.12),
        iterations=600,
        headline="Four workers trained on 76,800 samples, 960 per second; worker 3 held the others back.",
        causes=(
            Cause(
                "The other workers waited 124 s for worker 3, which needs 2.4 times as long for a batch.",
                124.0,
                0.37,
                (
                    "Add --batch balanced: each worker gets a batch in proportion to its speed. The joint batch, and "
                    "so the result of training, stays the same.",
                    "Or try --sync elastic-bsp, and check the accuracy.",
                ),
            ),
            Cause("Each worker spent 4.8 s on transferring data.", 19.2, 0.06),
        ),
    )


def slow_link() -> RunReport:
    """Return the report of a run on two machines with a slow link, whose model changed."""
    made = made_report(
        "slow-link", computing_s=(0.04,) * 4, iterations=300, transfer_s=0.03, sync="ssp:staleness=3"
    )
    half_s = made.duration_s / 2
    stale = tuple((value, int(900 * 0.7**value) + 1) for value in range(14))
    first = msgspec.structs.replace(made.models[0], sync="bsp", to_s=half_s)
    second = msgspec.structs.replace(made.models[0], from_s=half_s, staleness=stale)
    return msgspec.structs.replace(
        made,
        headline="Four workers on two machines; 61% of their time went into transfers.",
        causes=(
            Cause(
                "Transfers between alpha and beta took 72 s: the link carries 11.6 MB/s.",
                72.0,
                0.61,
                ("Put a server on each machine: --servers 2.", "Try --sync ssp with overlap."),
            ),
        ),
        workers=tuple(
            msgspec.structs.replace(row, machine="alpha" if row.worker < 2 else "beta", device="cuda:0")
            for row in made.workers
        ),
        models=(first, second),
        links=(
            LinkTotal("alpha", "beta", 1_240_000_000, 11.6e6),
            LinkTotal("beta", "alpha", 980_000_000, 9.1e6),
        ),
        marks=(
            *made.marks,
            Mark(half_s, "model", "The model changed from bsp to ssp:staleness=3."),
            Mark(half_s * 1.3, "lost", "Worker 2 was lost: its connection ended.", 2),
            Mark(half_s * 1.5, "joined", "Worker 2 joined again.", 2),
        ),
        notes=("The clocks of alpha and beta differ by at most 0.8 ms.",),
        metrics=(
            *made.metrics,
            losses("loss of the discriminator", made.duration_s, 300, seed=3),
            losses("gradient norm", made.duration_s, 300, seed=4),
        ),
    )


def nothing() -> RunReport:
    """Return the report of a run of which nothing is known."""
    return RunReport(name="empty", run_dir="runs/empty", state="cut off")


def failed() -> RunReport:
    """Return the report of a failed run in which every text contains markup, and a loss became NaN."""
    made = made_report(MARKUP, computing_s=(0.02, 0.03), iterations=40, sync=MARKUP)
    values = [
        math.nan if 60 < i < 80 else math.inf if i == 90 else math.exp(-i / 50) - 0.05 for i in range(120)
    ]
    loss = Metric(
        MARKUP,
        "mean",
        tuple(MetricPoint(0.01 * i, 64 * i, i, value) for i, value in enumerate(values)),
        guessed=True,
    )
    return msgspec.structs.replace(
        made,
        run_dir=MARKUP,
        version=MARKUP,
        begun_at=MARKUP,
        state="failed",
        failure=f"worker 1 failed: {MARKUP}\n  line 2 of the traceback",
        headline=MARKUP,
        causes=(Cause(MARKUP, 1.0, 0.2, (MARKUP,)),),
        settings=(ReportedSetting(MARKUP, MARKUP), ReportedSetting("--a", MARKUP, default=True)),
        command=MARKUP,
        emulated=MARKUP,
        figures={MARKUP: MARKUP},
        metrics=(loss, losses(f"b {MARKUP}", 1.0, 40)),
        workers=tuple(
            msgspec.structs.replace(row, machine=MARKUP, device=MARKUP, fate="lost", why=MARKUP)
            for row in made.workers
        ),
        models=tuple(
            msgspec.structs.replace(model, waiting=(WaitingFor(MARKUP, 1.0, 3),)) for model in made.models
        ),
        links=(LinkTotal(MARKUP, MARKUP, 12),),
        pushes={MARKUP: 3, "b": 4},
        samples={MARKUP: 3},
        marks=(Mark(0.1, "lost", MARKUP, 1),),
        notes=(MARKUP,),
    )


def extremes() -> RunReport:
    """Return the report of a run with long texts, many models and metrics, and numbers of every size."""
    made = made_report("x" * 100, computing_s=(300.0, 320.0), iterations=90, transfer_s=10.0)
    values = {
        "all NaN": (math.nan, math.nan),
        "one value": (3.5,),
        "no value": (),
        "x" * 100: (1e-12, 2e-12),
        "constant": (5.0, 5.0),
        "zero": (0.0, 0.0),
        "negative": (-3.0, -1e9),
        "huge": (1e30, 1e-30),
        "between gaps": tuple(math.nan if i % 2 else 1.0 + i for i in range(20)),
    }
    metrics = tuple(
        Metric(name, "mean", tuple(MetricPoint(600.0 * i, 32 * i, i, value) for i, value in enumerate(each)))
        for name, each in values.items()
    )
    return msgspec.structs.replace(
        made,
        state="interrupted",
        failure="a line of the traceback\n" * 500,
        command="paceline run " + "--option value " * 300,
        settings=tuple(
            ReportedSetting(f"--setting-{i}", "v" * 30 * i, default=i % 2 == 0) for i in range(20)
        ),
        metrics=(*metrics, *(losses(f"more {i}", made.duration_s, 90, seed=i) for i in range(8))),
        models=tuple(
            msgspec.structs.replace(
                made.models[0],
                sync=f"ssp:staleness={i}",
                from_s=1000.0 * i,
                to_s=1000.0 * (i + 1) + i,
                staleness=((0, 5), (10**6, 3)) if i % 2 else (),
                wait_lengths=((0.001, 3), (math.inf, 4)),
            )
            for i in range(12)
        ),
    )


def large(workers: int = 64, iterations: int = 10_000, buckets: int = 16_384) -> RunReport:
    """Return the report of a run of many workers."""
    speeds = tuple(0.08 + 0.002 * (worker % 7) + 0.03 * (worker == 11) for worker in range(workers))
    made = made_report(
        "large", computing_s=speeds, iterations=iterations, buckets=buckets, sync="bsp", transfer_s=0.006
    )
    more = tuple(losses(f"metric {i}", made.duration_s, iterations, count=2000, seed=i) for i in range(8))
    return msgspec.structs.replace(made, metrics=(*made.metrics, *more))


def running(report: RunReport, now_s: float) -> RunReport:
    """Return the report as it might have been during the run."""
    states = ("computing", "waiting", "transferring", "computing")
    return msgspec.structs.replace(
        report,
        state="running",
        now_s=now_s,
        duration_s=now_s,
        live=JobStatus(
            "bsp",
            1,
            now_s,
            tuple(
                WorkerStatus(
                    row.worker,
                    "alpha",
                    states[row.worker % 4],
                    0.4,
                    int(now_s),
                    0.71,
                    row.samples_per_s,
                    1,
                    "a push of worker 3" if row.worker % 4 == 1 else "",
                    (3,) if row.worker % 4 == 1 else (),
                )
                for row in report.workers
            ),
            (MachineStatus("alpha", 0.2, 0.1, (0,)),),
            (LinkStatus("alpha", "beta", 1.2e6, 3_000_000),),
        ),
    )
