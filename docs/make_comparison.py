"""Write `comparison.md` in the internals from the results of `peers`: `python docs/make_comparison.py`.

    python -m benchmarks peers
    python docs/make_comparison.py

The results are in `benchmarks/peers/results.jsonl`. With --check, nothing is written, and the exit code is 0 if the
page matches the results, 1 otherwise. Without results there is no page.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed

from benchmarks.peers import work  # noqa: E402
from benchmarks.peers.measurement import COLUMNS, TOTAL  # noqa: E402
from benchmarks.peers.plan import (  # noqa: E402
    KILLED_S,
    LIMIT_S,
    RATES,
    RESULTS,
    RETURNED_S,
    SEEDS,
    TARGET,
    Outcome,
    Row,
    Session,
    read_results,
    rows,
)
from docs.make_same_accuracy import bullets  # noqa: E402

TARGET_FILE = ROOT / "docs" / "internals" / "comparison.md"
OWN = "Paceline "

QUESTION = (
    "How long do Paceline and the systems that people would use instead take for the same work: to train a small "
    f"language model to a validation loss of {TARGET:g} nats per byte, on three machines?"
)
METHOD = (
    "*Work.* A transformer with about 120,000 parameters learns the bytes of Python's standard library with AdamW. "
    f"The joint batch is {work.JOINT_BATCH} samples of {work.CONTEXT} bytes in every system. A step sleeps "
    f"{1000 * work.PACE_S:g} ms for each sample, as if the model were large, and then really computes the gradient, "
    "which takes a small part of this time. A slow machine sleeps three times as long.",
    "*Machines.* Three emulated machines, each with its own network, processes, mounts and shared memory, and a link "
    "with the given rate in each direction and no added delay. The processes that a system needs once (Paceline's "
    "coordinator and server, torchft's lighthouse, rank 0, the first peer of hivemind) run on the first machine. "
    f"The third machine is slow, or loses all processes after {KILLED_S:g} s and starts again at {RETURNED_S:g} s.",
    "*Time.* The clock starts when all workers are ready for their first step, and stops at the first weights with "
    "the target loss. The worker on the first machine saves the common weights, on which all workers of the system "
    f"agree, at most every {work.SNAPSHOT_S:g} s. Another process evaluates them at the lowest priority, so the cost "
    "is the same for all systems: the time to save 0.5 MB. Methods with local steps are evaluated after each "
    "synchronization. There are two exceptions: under hivemind with local updates, the peers never have the same "
    "weights, so those of the first peer are evaluated after each of its steps; under Paceline asp, the weights are "
    f"those that the first worker has received last. A run ends after {LIMIT_S:g} s.",
    f"*Rates.* Each system makes a run with each of the learning rates {', '.join(f'{lr:g}' for lr in RATES)} "
    "under the first condition, and keeps the best of these rates. DDP with shares by hand has the rate of DDP. The "
    f"results are medians over {len(SEEDS)} other seeds.",
    "*Settings.* The settings are those that the documentation of each system recommends, if they fit a run of "
    "about 100 steps: see the heads of the files in `benchmarks/peers`. H is the number of local steps: 8 for "
    "Accelerate, as in its guide; 4 for PostLocalSGD, as in PyTorch's examples, but after 10 steps of warm-up instead "
    "of 100; and 8 for torchft, instead of 100. hivemind averages local weights after 8 joint batches. It searches for "
    "a group for at most 0.5 s before each average, while a joint batch takes 0.14 s. On slow links, systems send "
    "fewer bytes if they can: Paceline uses `--wire int4` and a server on each machine, as its guide says; DDP uses "
    "float16, and hivemind uses 8 bits. PostLocalSGD, Accelerate and torchft have no such option on CPUs.",
    "*MB sent* is the amount that the interfaces of all three machines have sent until the loss was reached (in the "
    "whole run, if it was not reached). *Samples lost* are samples whose gradient a worker has computed, but which has "
    "no part in the common weights. Paceline hands out the samples of a lost worker again, so under Paceline, only the "
    "computation is lost. Samples whose gradients were still being computed or exchanged at the end of the run do not "
    "count.",
)
LIMITS = (
    "There are no results for GPUs, NCCL, or more than three workers.",
    "There are no results for large models: the sleep stands for the computation of a large model, but its gradients "
    "would also be larger than those sent here.",
    "Gradients are not exchanged during a computation: each step first sleeps. With a real model, DDP and Paceline "
    "send parts of a gradient while the other parts are still being computed. Only hivemind (averages of "
    "weights, search for groups) and torchft DDP (quorum) do a part of their work during the sleep.",
    "DDP could send fewer bytes with PowerSGD, which was not measured.",
    "There are no results for the final quality of a model, which matters most if steps are local or gradients are "
    "stale.",
    "The results say little about hivemind and DiLoCo as they are meant to be used: with joint batches of thousands "
    "of samples, or hundreds of local steps, between two exchanges over the internet.",
    "If a machine is killed, torchft DDP ends in all three runs: after the failed all-reduce, an assertion fails in "
    "its communication hook (`torchft/ddp.py`, `assert fut._fut`). It was not tried with an earlier version of torch.",
    "The connections of Paceline and hivemind are encrypted. Those of the other systems are not.",
)


def findings(found: Sequence[Row]) -> list[str]:
    """Return who was fastest under each condition, and how far behind the others are."""
    said = []
    for condition, group in groupby(found, key=lambda row: row.condition):
        timed = sorted(
            ((row.time_s, row.system) for row in group if row.time_s is not None), key=lambda pair: pair[0]
        )
        own = next((pair for pair in timed if pair[1].startswith(OWN)), None)
        peer = next((pair for pair in timed if not pair[1].startswith(OWN)), None)
        if own is None or peer is None:
            continue
        title = condition[0].upper() + condition[1:]
        if own[0] <= peer[0]:
            line = (
                f"{title}: the fastest is {own[1]} ({own[0]:.1f} s), {peer[0] / own[0]:.2f} times faster than the best "
                f"other system, {peer[1]} ({peer[0]:.1f} s)."
            )
        else:
            line = (
                f"{title}: the fastest is {peer[1]} ({peer[0]:.1f} s). Paceline is not: its best is "
                f"{own[1].removeprefix(OWN)} ({own[0]:.1f} s), {own[0] / peer[0]:.2f} times slower."
            )
        said.append(line)
    return said


def edges(found: Sequence[Row]) -> list[str]:
    """Return the systems whose best rate is the least or the largest one."""
    rates = {row.system: row.lr for row in found if row.lr in (min(RATES), max(RATES))}
    return [f"{system} ({lr:g})" for system, lr in rates.items()]


def tables(found: Sequence[Row]) -> list[str]:
    """Return a table for each condition."""
    columns = {heading: cell for heading, cell in COLUMNS.items() if heading != "condition"}
    lines = []
    for condition, group in groupby(found, key=lambda row: row.condition):
        lines += [f"### {condition[0].upper()}{condition[1:]}", "", f"| {' | '.join(columns)} |"]
        lines += ["|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(str(cell(row)) for cell in columns.values())} |" for row in group]
        lines += [""]
    return lines


def text(outcomes: Sequence[Outcome], sessions: Sequence[Session]) -> str:
    """Return the page; "" if there are no results."""
    if not outcomes:
        return ""
    found = rows(outcomes)
    where = [
        f"{each.date} on {each.machine}, of which other programs used {each.busy_share:.0%} at the beginning, with "
        f"{', '.join(f'{name} {version}' for name, version in each.versions.items())}"
        for each in sessions
    ]
    counted = f"{len(outcomes)} of {TOTAL} runs were made; {'; '.join(dict.fromkeys(where))}."
    if at_edge := edges(found):
        counted += (
            f" For {', '.join(at_edge)}, the best rate is the smallest or the largest rate that was tried."
        )
    lines = ["# Beside other systems", "", *textwrap.wrap(QUESTION, 118, break_on_hyphens=False), ""]
    lines += [*bullets(findings(found)), "", *textwrap.wrap(counted, 118, break_on_hyphens=False), ""]
    lines += ["## Results", "", *tables(found), "## How it was measured", ""]
    for paragraph in METHOD:
        lines += [*textwrap.wrap(paragraph, 118, break_on_hyphens=False), ""]
    again = (
        "The following commands repeat the runs, and write this page. Runs whose results the file already contains "
        "are not repeated:"
    )
    lines += [*textwrap.wrap(again, 118), "", "    make .venv-peers/.ready"]
    lines += ["    python -m benchmarks peers --results FILE", "    python docs/make_comparison.py", ""]
    lines += ["## Limits of these results", "", *bullets(LIMITS)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page or, with --check, only check it. Return the exit code."""
    sessions, outcomes = read_results(RESULTS)
    page = text(outcomes, sessions)
    if "--check" in sys.argv[1:]:
        return page != (TARGET_FILE.read_text() if TARGET_FILE.exists() else "")
    if page:
        TARGET_FILE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
