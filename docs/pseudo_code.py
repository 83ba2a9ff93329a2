"""The lines of the papers' pseudo-code, each with the function that does the same, for `docs/models/pseudo-code.md`."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

__all__ = ["text"]


class Line(NamedTuple):
    """Some lines of an algorithm.

    Attributes:
        lines: their numbers.
        what: what they do, in our words.
        where: the function that does so, as "module:Class.method".
        deviation: how it differs; "" if it does not.
    """

    lines: str
    what: str
    where: str
    deviation: str = ""


ALGORITHMS: dict[str, list[Line]] = {
    "FluentPS, Algorithm 1, worker (all models)": [
        Line("2-4", "compute a gradient, and push it to each shard", "core.worker:Worker.push"),
        Line(
            "5",
            "pull, and wait for the weights of all shards",
            "core.worker:Worker.handle",
            "The push and the pull are one message.",
        ),
    ],
    "FluentPS, Algorithm 1, server (`ssp`, `dsps`, `pssp`, `dynamic-pssp`, `drop-stragglers`, `conditions`)": [
        Line("1", "begin with round 0", "sync.conditions:ConditionMachine.__init__"),
        Line(
            "2-5",
            "answer a pull if the pull condition holds on its arrival",
            "sync.conditions:ConditionMachine.pulled",
        ),
        Line(
            "6-12",
            "else file the pull under a round",
            "sync.conditions:ConditionMachine.pulled",
            "The paper files it under the worker's progress (`execution=lazy`, where the round is at least V_train). "
            "The default files it under V_train, because only then does a worker start exactly when SSP lets it.",
        ),
        Line(
            "14-15",
            "add a part of the gradient to the weights",
            "sync.conditions:ConditionMachine._receive",
            "The paper adds 1/N of it (`push_scale=1/n`, where n is the largest number of workers that were present "
            "at the same time). The default hands the whole gradient to the optimizer.",
        ),
        Line("16", "count the push", "sync.model:Counts.pushed"),
        Line(
            "17-23",
            "if the push condition holds, answer the pulls that are filed under the round, and begin the next round",
            "sync.conditions:ConditionMachine._close_rounds",
            "The condition is tested again until it fails, because several rounds may become complete when a worker "
            "is lost. A worker that has left no longer counts.",
        ),
        Line(
            "24",
            "acknowledge the push",
            "core.server:Server._commit",
            "Only a push without a pull is acknowledged. Otherwise, the answer to the pull acknowledges the push.",
        ),
    ],
    "SpecSync, Algorithm 2 (`spec-sync`)": [
        Line(
            "worker 4-7",
            "drop the computation, and begin it again on new weights",
            "core.worker:Worker.pull_again",
        ),
        Line(
            "worker 8-10",
            "push the gradient, pull, and notify the scheduler",
            "core.worker:Worker.push",
            "The push and the pull are one message, and the notification is sent with it.",
        ),
        Line(
            "scheduler 1-3",
            "begin each epoch at all workers",
            "sync.spec_sync:Speculator._end_epoch_if_complete",
            "Workers begin their epochs themselves. For the tuning, an epoch ends when every live worker has pushed.",
        ),
        Line(
            "scheduler 4-6",
            "on a notification, note the push, and test later",
            "sync.spec_sync:Speculator.started",
            "ABORT_TIME begins with the worker's next computation, which may have to wait first if the base model is "
            "`ssp`.",
        ),
        Line(
            "scheduler 7-10",
            "order a restart if the other workers have pushed more often than the rate allows",
            "sync.spec_sync:Speculator.timer_fired",
            "An iteration is restarted at most once.",
        ),
    ],
    "SpecSync, Algorithm 1 (`spec-sync` without fixed parameters)": [
        Line(
            "2-8",
            "try each candidate for the abort time, and keep the candidate with the largest gain",
            "sync.spec_sync:tune",
            "Candidates are the times from the start of an iteration to a later push of another worker, up to the "
            "mean iteration time. Nothing is aborted if no candidate gains anything.",
        ),
    ],
    "ElasticBSP, Algorithm 1, GridScan (a baseline of the paper, which `elastic-bsp` does not use)": [
        Line("4", "designate the worker with the earliest end time", "zipline.searches:grid_scan"),
        Line(
            "5-11",
            "for each end time e of this worker, form the set Z of e and, for each other worker, its end time that is "
            "nearest to e",
            "zipline.searches:_narrowest_near",
            "Of two end times that are equally near, the earlier column is taken.",
        ),
        Line(
            "12-16",
            "keep the set Z with the least difference",
            "zipline.searches:_narrowest_near",
            "By its indentation, the listing evaluates Z in the loops of lines 8 and 9, when Z still lacks the "
            "end times of some workers. Here, as in the text of section 5.1 and in Fig. 7 (15 sets for R = 15), only "
            "complete sets are evaluated.",
        ),
    ],
    "ElasticBSP, Algorithm 2, ZipLine (`elastic-bsp`)": [
        Line("2-3", "merge and sort the predicted end times", "zipline.zipline:timeline"),
        Line(
            "4-9",
            "take end times in this order, and keep the latest of each worker, until the set Z has an end time of "
            "every worker",
            "zipline.zipline:_candidates",
        ),
        Line(
            "13-19",
            "take the next end times; each replaces the end time of the same worker in Z",
            "zipline.zipline:_candidates",
            "Line 14 first removes the earliest end time from Z, and lines 15 to 19 add other end times until Z is "
            "complete again. But line 16 may find no further end time. Here, as in the text of section 5.2 and "
            "in Fig. 7, Z stays complete.",
        ),
        Line(
            "10-12, 20-24",
            "keep the set Z with the least difference",
            "zipline.zipline:zipline",
            "By its indentation, the listing evaluates Z in the loop of lines 15 to 19, while Z lacks a worker. The "
            "difference is then too small, so the listing may return a set that lacks the end times of some workers. "
            "Here, only complete sets are evaluated. Of sets with the same difference, the earliest is kept.",
        ),
    ],
}

BETWEEN_THE_LINES = """
These differences are not visible in the pseudo-code, or concern models without pseudo-code:

- `bsp`: Table III of FluentPS describes this model with conditions, and applies N gradients one by one. Here, a
  shard applies their mean once, so that momentum and Adam see one gradient per round, as in one process.
- `ssp`: Ho and others (2013) let a worker read from its own cache, which may be up to s iterations old. Here, each
  pull gets the newest weights, as in FluentPS. So weights are never older than SSP permits.
- `pssp`, `dynamic-pssp`: the paper draws at each shard. Here, all shards draw the same number for an iteration, so
  the number of shards does not change the model.
- `rennala`, `ringmaster`, `naive-waiting`: each is one rule, which its page states.
"""


def text() -> str:
    """Return the page. Raise `AttributeError` or `ImportError` if a function does not exist."""
    parts = [
        "# The papers' pseudo-code, line by line\n\nThe names of functions are relative to `src/paceline`. The "
        "pages of the [models](index.md) state their other deviations.\n"
    ]
    for title, lines in ALGORITHMS.items():
        rows = ["| lines | what they do | where | how it differs |\n|---|---|---|---|"]
        for each in lines:
            module, _, path = each.where.partition(":")
            found: object = import_module(f"paceline.{module}")
            for name in path.split("."):
                found = getattr(found, name)
            rows.append(f"| {each.lines} | {each.what} | `{module}`, `{path}` | {each.deviation} |")
        parts.append(f"**{title}**\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts) + BETWEEN_THE_LINES
