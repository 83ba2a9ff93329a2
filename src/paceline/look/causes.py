"""What held a run back, and what would help: the sentences with which a report begins, and the terminal ends.

Each cause is computed from measured times, and says how many seconds it has cost, summed over the workers. A cause is
named only if it has cost at least `LEAST_SHARE` of the workers' time, and at least `LEAST_S` per worker. What helps
against waiting is in `trace.findings`. The kinds of time are those of `core.metrics`.

Waiting alone says little: it is the other side of what another worker does. So the worker that was awaited is
compared with the others. What it spends more time on in each iteration is the cause: its computation, its loader, its
transfers, or something outside of training.

Processes that have too few cores take longer for everything. So this cause comes before waits and transfers that are
the same in all workers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from ..core.lease import Split
from ..errors import ConfigurationError
from ..sync.model import backup_quorum
from ..sync.schedule import read_schedule
from ..trace.activity_cells import KINDS
from ..trace.findings import LEAST_S, LEAST_SHARE, Handout, hints_for, how_to_check, in_python
from ..trace.measures import PushFates, unapplied_pushes
from ..trace.report import Cause, LinkTotal, WorkerReport
from ..words import counted, length, listed, percent, size

GUILTY_SHARE = 0.7  # a few workers are named if they were awaited for at least this share of all waiting
SLOWER = 1.15  # the others are compared with a worker that takes at least this many times as long
MORE_DATA = 1.2  # and at least this many times as much data
LEAST_OUTSIDE = (
    0.1  # least share that is named of the time outside of training, and of transfers on one machine
)

MOSTLY = 0.8  # share of computing from which nothing needs to be said about the rest
LEAST_NAMED = 0.05  # least share of a kind of time that is named if there is no cause
SHORT_S = 20.0  # a run of this length is too short for `LEAST_S` to be a small share

SPENT = {
    "computing": "computed",
    "loading": "loaded batches",
    "transfer": "had messages on their way",
    "waiting": "waited for others",
    "wasted": "computed in vain",
    "paused": "were paused",
    "outside": "did something other than training",
}
"""Kind of time -> what workers did in this time."""

UNKNOWN = (
    "The script distributes no loader, so it is not known how much of this was computing, and how much was something "
    "else, such as evaluating the model."
)
COMPARE = "To compare the sync models on these machines, run"

Remedies = tuple[str, ...]


def causes_of(evidence: Evidence) -> tuple[Cause, ...]:
    """Return what held a run back: first what makes its result doubtful, then what took time, most time first."""
    doubts = [Cause(sentence) for sentence in (evidence.unapplied, *evidence.noticed) if sentence]
    crowded = _cores(evidence)
    awaited, explained = _waiting(evidence)
    if crowded is not None:
        explained = *explained, *(() if evidence.links else (_transfer,))
        awaited = awaited if _guilty(evidence) else None
    further = (find(evidence) for find in FURTHER if find not in explained)
    found = [crowded, awaited, _idle(evidence), *further]
    slow = sorted((each for each in found if each is not None), key=lambda each: -(each.lost_s or 0.0))
    said: set[str] = set()  # what helps is said once
    for number, cause in enumerate(slow):
        remedies = tuple(remedy for remedy in cause.remedies if remedy not in said)
        said.update(remedies)
        slow[number] = msgspec.structs.replace(cause, remedies=remedies)
    return (*doubts, *slow)


def sentences_of(evidence: Evidence) -> list[str]:
    """Return what cost the workers time, and what would help, as the sentences that the terminal shows."""
    slow = [cause for cause in causes_of(evidence) if cause.lost_s is not None]
    sentences = [sentence for cause in slow for sentence in (cause.words, *cause.remedies)]
    if sentences and evidence.run_dir and evidence.matters(evidence.total_s("waiting")):
        sentences.append(f"{COMPARE}: paceline advise {shlex.quote(evidence.run_dir)}")
    return sentences


def headline_of(evidence: Evidence, causes: Sequence[Cause]) -> str:
    """Return one sentence or two: what was trained how fast, and what held the run back most."""
    lasted = length(evidence.duration_s)
    who = counted(len(evidence.workers), "worker")
    is_known = evidence.duration_s > 0.0 and bool(evidence.workers)
    after = f" after {lasted}" if is_known else ""
    text = {
        "failed": f"The run failed{after}: {_sentence(evidence.failure)} ",
        "interrupted": f"The run was interrupted{after}. ",
        "cut off": f"The run was cut off{after}: its launcher was killed. ",
        "running": f"The run has been training for {lasted}. " if is_known else "The run begins. ",
    }.get(evidence.state, "")
    if not is_known:
        return f"{text}It is not known what its workers did."
    amount, unit = (evidence.samples, "sample") if evidence.samples else (evidence.updates, "update")
    rate = amount / evidence.duration_s
    verb = "trained" if evidence.samples else "made"
    text += (
        f"{who} {verb} {amount:,} {unit}s in {lasted} under {evidence.sync} "
        f"({rate:,.{0 if rate >= 100 else 1}f} {unit}s per second)."
    )
    slow = [cause for cause in causes if cause.brief]
    if slow:
        return f"{text} What held the run back most: {slow[0].brief}."
    if evidence.state == "failed":
        return text
    return f"{text} {_without_causes(evidence)}"


def _without_causes(evidence: Evidence) -> str:
    """Return what the workers did with their time in a run of which no cause is named."""
    present_s = evidence.present_s()
    shares = {kind: evidence.total_s(kind) / present_s if present_s else 0.0 for kind in SPENT}
    computed = f"workers computed for {percent(shares['computing'])} of their time"
    others = [kind for kind in sorted(SPENT, key=lambda kind: -shares[kind]) if shares[kind] >= LEAST_NAMED]
    rest = [f"{SPENT[kind]} for {percent(shares[kind])}" for kind in others if kind != "computing"]
    if not evidence.knows_computing:
        computed = f"workers spent {percent(shares['computing'])} of their time between one step and the next"
    if shares["computing"] >= MOSTLY or not rest:
        further = "" if evidence.knows_computing else f" {UNKNOWN}"
        return f"Nothing stands out that held it back: {computed}.{further}"
    short = " It was too short to say more." if evidence.duration_s < SHORT_S else ""
    return f"No single cause stands out: {computed}; they {', '.join(rest)}.{short}"


def _sentence(text: str) -> str:
    """Return the first line of a text, with a full stop."""
    line = text.strip().partition("\n")[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."


# -- What is known about a run when the causes of its lost time are looked for (see `causes`) ----------------
#
# The terminal and the report of a run that has ended look for the causes in the same evidence: the summary of
# the run.


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a run when the causes are looked for.

    Attributes:
        state: see `RunReport`.
        failure: see `RunReport`.
        sync: the sync model or the schedule.
        lockstep: True if it keeps all workers in lockstep; see `SyncModel`.
        auto: True if the run chooses its models itself.
        duration_s: see `RunReport`.
        workers: all workers, with their times.
        unsplit: the workers whose transfers count as computing, because their records are missing.
        last_push_s: worker -> when its last push arrived.
        end_s: when the last worker left.
        links: the traffic between machines.
        samples: number of samples that all workers used; 0 if unknown.
        updates: number of updates.
        restarts: number of computations that were aborted; None if unknown.
        servers: number of servers.
        cores: number of cores that the processes of the run could use, if all ran on one machine; 0 if unknown.
        queued_s: worker -> seconds in which it could run, but had no core; {} if this is unknown.
        wire: format in which gradients and weights travelled; see `core.layout`.
        joined: True if machines have joined the run.
        handout: how the data was handed out.
        overlap: False if the run had the option `--overlap off`.
        program: what each worker ran, as in `Order.arguments`.
        run_dir: the run directory, to be named in commands; "" if workers have kept their records.
        noticed: what was noticed while the run was in progress, in sentences; see `find`.
        unapplied: a sentence about pushes that were never applied; "" if there is none.
        shortage: how many workers the run must have so that it does not pause; "" if it never pauses.
    """

    state: str
    failure: str = ""
    sync: str
    lockstep: bool = False
    auto: bool = False
    duration_s: float = 0.0
    workers: tuple[WorkerReport, ...] = ()
    unsplit: tuple[int, ...] = ()
    last_push_s: dict[int, float] = {}
    end_s: float = 0.0
    links: tuple[LinkTotal, ...] = ()
    samples: int = 0
    updates: int = 0
    restarts: int | None = None
    servers: int = 1
    cores: int = 0
    queued_s: dict[int, float] = {}
    wire: str = "float32"
    joined: bool = False
    handout: Handout = Handout()
    overlap: bool = True
    program: tuple[str, ...] = ()
    run_dir: str = ""
    noticed: tuple[str, ...] = ()
    unapplied: str = ""
    shortage: str = ""

    @property
    def knows_computing(self) -> bool:
        """False if the script distributes no loader: all that it does between two steps then counts as computing."""
        return not self.program or self.handout.split is not None or self.samples > 0

    def total_s(self, *kinds: str, workers: Collection[int] | None = None) -> float:
        """Return the seconds that workers, by default all, have spent on these kinds of activity."""
        return sum(
            each.time_s.get(kind, 0.0)
            for each in self.workers
            if workers is None or each.worker in workers
            for kind in kinds
        )

    def present_s(self, workers: Collection[int] | None = None) -> float:
        """Return the seconds for which workers, by default all, took part in the run."""
        return self.total_s(
            "computing", "loading", "transfer", "waiting", "wasted", "paused", "outside", workers=workers
        )

    def per_iteration_s(self, kind: str) -> dict[int, float]:
        """Return, for each worker with an iteration, the mean seconds of this kind in each of its iterations."""
        return {
            each.worker: each.time_s.get(kind, 0.0) / each.iterations
            for each in self.workers
            if each.iterations
        }

    def matters(self, lost_s: float, share: float = LEAST_SHARE) -> bool:
        """True if so much time was lost that it is worth a sentence."""
        whole_s = self.present_s() + self.total_s("idle")
        return lost_s >= share * whole_s and lost_s >= LEAST_S * len(self.workers) > 0

    def share(self, lost_s: float) -> float:
        """Return lost time as a share of the time of all workers, from 0 to 1."""
        whole_s = self.present_s() + self.total_s("idle")
        return lost_s / whole_s if whole_s else 0.0

    def cause(self, words: str, brief: str, lost_s: float, remedies: Sequence[str]) -> Cause:
        """Return a cause, with its share of the workers' time."""
        python = self.program[:1] == ("function",)
        shown = tuple(in_python(hint) if python else hint for hint in remedies)
        return Cause(words, lost_s, self.share(lost_s), shown, brief)

    def hints(self, *, equal_shares: bool, slow: int, waited: bool) -> list[str]:
        """Return what helps against waiting and idle workers; see `hints_for`."""
        quorum = backup_quorum(len(self.workers), slow) if slow else None
        how = how_to_check(self.run_dir or None, self.program)
        return hints_for(
            self.lockstep, self.handout, self.overlap, equal_shares, waited, slow, quorum, how, self.auto
        )


# -- waiting ----------------------------------------------------------------------------------------------

Finder = Callable[[Evidence], Cause | None]


def _waiting(evidence: Evidence) -> tuple[Cause | None, tuple[Finder, ...]]:
    """Return why workers have waited for others. Also return the causes that this one includes."""
    waited_s = evidence.total_s("waiting")
    if not evidence.matters(waited_s):
        return None, ()
    guilty = _guilty(evidence)
    where = "at the barrier of each iteration" if evidence.lockstep else "for answers to their pulls"
    if not guilty:
        share = percent(waited_s / evidence.present_s())
        words = (
            f"Workers waited {where} for {share} of their time ({length(waited_s)} together), now for one worker, "
            "now for another: their iterations do not take equally long each time."
        )
        brief = f"workers waited for one another for {share} of their time"
        return evidence.cause(
            words, brief, waited_s, evidence.hints(equal_shares=False, slow=0, waited=True)
        ), ()
    others = [each.worker for each in evidence.workers if each.worker not in guilty and each.iterations]
    own_s = evidence.total_s("waiting", workers=others)
    share = percent(own_s / evidence.present_s(others))
    together = f"{length(own_s)} together" if len(others) > 1 else length(own_s)
    blamed = listed(guilty)
    waited = f"{listed(others).capitalize()} waited {share} of their time ({together}) for {blamed}"
    if len(others) == 1:
        waited = waited.replace("their time", "its time")
    brief = f"the others waited for {share} of their time for {blamed}"
    excess = {
        kind: _excess(evidence, kind, guilty) for kind in ("computing", "loading", "transfer", "outside")
    }
    kind = max(excess, key=lambda each: excess[each][0])
    _, ratio, each_s = excess[kind]
    slow = len(guilty)
    if kind == "transfer" and ratio >= SLOWER:
        lost_s = own_s + evidence.total_s("transfer", workers=guilty)
        words = (
            f"{waited}, whose gradients and weights are on their way for {length(each_s)} in each iteration, "
            f"{_times(ratio)} as long as those of the others. {_bytes(evidence, guilty)}"
        )
        slow_link = f"a slow link: {brief}, whose transfers take {_times(ratio)} as long"
        return evidence.cause(words.strip(), slow_link, lost_s, _fewer_bytes(evidence)), (_transfer,)
    if kind == "outside" and ratio >= SLOWER:
        outside_s = evidence.total_s("outside", workers=guilty)
        words = (
            f"{waited}, whose script did something other than training for {length(outside_s)}, such as "
            "evaluating or saving the model."
        )
        brief += ", whose script did something other than training"
        return evidence.cause(words, brief, own_s, (EVALUATE, READER)), (_outside,)
    if kind == "loading" and ratio >= SLOWER:
        words = (
            f"{waited}, whose script waits for its loader for {length(each_s)} in each iteration, {_times(ratio)} as "
            "long as those of the others."
        )
        brief += f", which loads its batches {_times(ratio)} as long"
        return evidence.cause(words, brief, own_s, (LOADERS,)), (_loading,)
    if evidence.unsplit and ratio >= SLOWER:
        words = f"{waited}, which {_takes(guilty)} {_times(ratio)} as long from an answer to the next push: for the "
        words += "computation and the transfers, which are not told apart."
        brief += f", which {_takes(guilty)} {_times(ratio)} as long for each iteration"
    elif ratio < SLOWER:
        slow, why = (
            0,
            f"{_it(guilty)} reached the barriers last, although {_it(guilty)} did not compute longer",
        )
        words = f"{waited}: {why}."
    elif not evidence.knows_computing:
        words = (
            f"{waited}, which {_takes(guilty)} {_times(ratio)} as long from one step to the next. {UNKNOWN}"
        )
        brief += f", which {_takes(guilty)} {_times(ratio)} as long from one step to the next"
        remedies = (EVALUATE_THERE, *evidence.hints(equal_shares=False, slow=slow, waited=True))
        return evidence.cause(words, brief, own_s, remedies), ()
    else:
        words = f"{waited}, whose batches take {_times(ratio)} as long."
        brief += f", whose batches take {_times(ratio)} as long"
    return evidence.cause(words, brief, own_s, evidence.hints(equal_shares=False, slow=slow, waited=True)), ()


def _guilty(evidence: Evidence) -> list[int]:
    """Return the few workers for which the others have waited most of the time; [] if there are no such workers."""
    total_s = sum(each.awaited_s for each in evidence.workers)
    found: list[int] = []
    sum_s = 0.0
    for each in sorted(evidence.workers, key=lambda each: -each.awaited_s):
        if sum_s >= GUILTY_SHARE * total_s:
            break
        found.append(each.worker)
        sum_s += each.awaited_s
    # If many workers were awaited in turn, none of them is slow.
    few = len(found) <= max(1, len(evidence.workers) // 2) and len(evidence.workers) > 1
    return sorted(found) if few and total_s > 0.0 else []


def _excess(evidence: Evidence, kind: str, guilty: Collection[int]) -> tuple[float, float, float]:
    """Compare some workers with the others in the time that they spend on one kind of activity in each iteration.

    Returns:
        By how many seconds they take longer, how many times as long they take, and how long they take. The first two
        are those of the worker in the middle.
    """
    per = evidence.per_iteration_s(kind)
    own = [seconds for worker, seconds in per.items() if worker in guilty]
    others = [seconds for worker, seconds in per.items() if worker not in guilty]
    if not own or not others:
        return 0.0, 1.0, 0.0
    own_s, others_s = median(own), median(others)
    return own_s - others_s, own_s / max(others_s, 1e-6), own_s


# -- other causes -----------------------------------------------------------------------------------------

EVALUATE = "Inside paceline.evaluating(model), the other workers need not wait. It also helps to evaluate less often."
EVALUATE_ONCE = (
    "If every worker evaluates the same data, let one worker do this: in `if paceline.is_main():` and inside "
    "paceline.evaluating(model), so that the others go on training. It also helps to evaluate less often."
)
EVALUATE_THERE = (
    "If the script evaluates or saves the model there, do so inside paceline.evaluating(model): the other workers "
    "then need not wait. It also helps to evaluate less often."
)
READER = (
    "Or evaluate copies of the weights elsewhere: with paceline.launch(snapshot_every_s=...), a reader takes "
    "them, for which no worker waits."
)
SELDOM = "It also helps to evaluate less often."
LOADERS = (
    "Give the DataLoader more processes (num_workers), so that batches are loaded while the script computes, or load "
    "from a faster disk."
)


def _idle(evidence: Evidence) -> Cause | None:
    """Return why workers had finished while others were still working."""
    least_s = max(LEAST_S, LEAST_SHARE * evidence.duration_s)
    idle_s = {
        each.worker: each.time_s.get("idle", 0.0)
        for each in evidence.workers
        if each.time_s.get("idle", 0.0) >= least_s
    }
    lost_s = sum(idle_s.values())
    working = [each.worker for each in evidence.workers if each.fate != "lost" and each.worker not in idle_s]
    if not idle_s or not working:
        return None
    longest = f"the last {length(max(idle_s.values()))}"
    blamed, were = listed(working), "were" if len(working) > 1 else "was"
    who = f"{listed(sorted(idle_s))} {'were' if len(idle_s) > 1 else 'was'}".capitalize()
    idle = f"{who} idle for {longest} ({percent(max(idle_s.values()) / max(evidence.duration_s, 1e-9))} of the run)"
    brief = f"{blamed} worked for {length(max(idle_s.values()))} longer than the others"
    silent_s = evidence.end_s - max(
        (evidence.last_push_s.get(worker, 0.0) for worker in working), default=0.0
    )
    if silent_s > max(idle_s.values()) / 2:
        words = (
            f"{idle}, because the script of {blamed} went on for {length(silent_s)} after its last step with "
            "something other than training, such as evaluating the model."
        )
        return evidence.cause(words, brief, lost_s, (READER,))
    outside_s = {each.worker: each.time_s.get("outside", 0.0) for each in evidence.workers}
    usual_s = median(outside_s[worker] for worker in idle_s)
    more_s = median(outside_s[worker] for worker in working) - usual_s
    if more_s > max(idle_s.values()) / 2:
        words = (
            f"{idle}, because the script of {blamed} did something other than training for {length(more_s)} longer "
            "than theirs, such as evaluating the model, and made its steps later."
        )
        return evidence.cause(words, brief, lost_s, (READER, SELDOM))
    amounts = {
        each.worker: float(each.samples if evidence.samples else each.iterations) for each in evidence.workers
    }
    usual, more = median(amounts[worker] for worker in idle_s), median(amounts[worker] for worker in working)
    ratio = more / usual if usual else 0.0
    if ratio >= MORE_DATA and not evidence.handout.balanced:
        much = "data" if evidence.samples else "to do"
        unit = "samples" if evidence.samples else "steps"
        brief = f"{blamed} had {_times(ratio)} as much {much} as the others, which were idle at the end"
        words = (
            f"{blamed.capitalize()} had {_times(ratio)} as much {much} as {listed(sorted(idle_s))} "
            f"({more:,.0f} {unit} instead of {usual:,.0f}), which {'were' if len(idle_s) > 1 else 'was'} idle for "
            f"{longest} ({percent(max(idle_s.values()) / evidence.duration_s)} of the run)."
        )
        return evidence.cause(words, brief, lost_s, (_shared_data(evidence),))
    per = evidence.per_iteration_s("computing")
    slower = median(per.get(worker, 0.0) for worker in working) / max(
        1e-9, median(per.get(worker, 0.0) for worker in idle_s)
    )
    words = f"{idle}, because {blamed} {were} still working."
    # Balanced batches are unequal shares, even if the iteration counts are equal.
    equal = usual > 0 and 1 / MORE_DATA < ratio < MORE_DATA and not evidence.handout.balanced
    if equal:
        longer = f", but the batches of {blamed} take {_times(slower)} as long" if slower >= SLOWER else ""
        words += f" All of them had equal shares of the data{longer}."
    hints = evidence.hints(equal_shares=equal, slow=len(working) if evidence.lockstep else 0, waited=False)
    return evidence.cause(words, brief, lost_s, hints)


def _shared_data(evidence: Evidence) -> str:
    """Return how the data is shared fairly."""
    if evidence.handout.split is None:
        return (
            "Let Paceline hand out the data: pass the loader to paceline.prepare or paceline.distribute(loader). "
            "Then all workers get equal shares of each epoch or, with --split dynamic, each gets its next batch when "
            "it needs one."
        )
    return "Use --split dynamic, with which each worker gets its next batch when it needs one."


def _transfer(evidence: Evidence) -> Cause | None:
    """Return how long messages were on their way."""
    lost_s = evidence.total_s("transfer")
    if not evidence.matters(lost_s, LEAST_SHARE if evidence.links else LEAST_OUTSIDE):
        return None
    share = percent(lost_s / evidence.present_s())
    per = evidence.per_iteration_s("transfer")
    each_s = median(per.values()) if per else 0.0
    if not evidence.links:
        words = (
            f"For {share} of the workers' time ({length(lost_s)} together), gradients and weights were on their "
            f"way, or a server made its part of a step: {length(each_s)} in each iteration."
        )
        brief = f"pushes and pulls took {share} of the workers' time"
        return evidence.cause(words, brief, lost_s, _shorter_exchanges(evidence))
    words = (
        f"Gradients and weights were on their way for {share} of the workers' time ({length(lost_s)} together), "
        f"{length(each_s)} in each iteration. {_bytes(evidence, [each.worker for each in evidence.workers])}"
    )
    brief = f"gradients and weights were on their way for {share} of the workers' time"
    return evidence.cause(words.strip(), brief, lost_s, _fewer_bytes(evidence))


def _bytes(evidence: Evidence, workers: Collection[int]) -> str:
    """Return how many bytes each iteration of these workers moves over the busiest of their links."""
    machines = {each.machine for each in evidence.workers if each.worker in workers}
    pairs: dict[frozenset[str], int] = {}
    for link in evidence.links:
        if machines & {link.sender, link.receiver}:
            pair = frozenset((link.sender, link.receiver))
            pairs[pair] = pairs.get(pair, 0) + link.total_bytes
    if not pairs:
        return ""
    busiest = max(pairs, key=lambda pair: pairs[pair])
    iterations = sum(each.iterations for each in evidence.workers if each.machine in busiest)
    local = {each.machine for each in evidence.workers if each.machine in busiest}
    if len(local) > 1:  # only the workers at the end without a server use the link; this is not known exactly
        iterations = min(
            sum(each.iterations for each in evidence.workers if each.machine == machine) for machine in local
        )
    ends = " and ".join(sorted(busiest))
    if not iterations:
        return f"The link between {ends} carried {size(pairs[busiest])}."
    return (
        f"In each iteration, {size(pairs[busiest] / iterations)} pass between {ends} "
        f"({size(pairs[busiest] / max(evidence.duration_s, 1e-9))} per second on average)."
    )


def _fewer_bytes(evidence: Evidence) -> Remedies:
    """Return what helps against a slow link."""
    more = evidence.servers + 1 if evidence.servers > 1 else 2
    servers = (
        "Put the servers on several machines, so that no link carries all of the bytes: "
        f"paceline serve --servers {more} --remote-servers {more - 1}, and paceline join --servers 1 on the other "
        "machine."
    )
    if evidence.wire != "float32":
        return servers, *_fewer_steps()
    rounding = (
        "Try --wire bf16: float32 gradients and weights are rounded on their way, so half as many bytes travel. The "
        "servers keep float32 weights."
    )
    return servers, rounding, *_fewer_steps()


def _fewer_steps() -> Remedies:
    return (
        "Use larger batches, or accumulate the gradients of several batches before each step: then there are fewer "
        "pushes and pulls for the same data. The joint batch becomes larger, so the learning rate may have to be "
        "adapted.",
    )


def _shorter_exchanges(evidence: Evidence) -> Remedies:
    """Return what helps if pushes and pulls take long on one machine."""
    return (
        *_fewer_steps(),
        f"If there are cores that the workers leave free, try --servers {evidence.servers + 1}: each server then "
        "makes a smaller part of each step.",
    )


def _cores(evidence: Evidence) -> Cause | None:
    """Return how long workers waited for a core, because the run has more busy processes than there are cores."""
    lost_s = sum(evidence.queued_s.values())
    processes = len(evidence.workers) + evidence.servers
    if not 0 < evidence.cores < processes or not evidence.matters(lost_s, LEAST_OUTSIDE):
        return None
    share = percent(lost_s / evidence.present_s())
    who = f"{counted(len(evidence.workers), 'worker')} and {counted(evidence.servers, 'server')}"
    cores = counted(evidence.cores, "core")
    words = (
        f"{who.capitalize()} shared {cores}, perhaps with other programs: for {share} of their time "
        f"({length(lost_s)} together), the workers could have gone on, but had no core. Computations, pushes and "
        "pulls take longer then."
    )
    fewer = max(1, evidence.cores - evidence.servers)
    remedies = [f"Use fewer workers: --workers {fewer} leaves each process a core of its own."]
    if evidence.cores <= evidence.servers:
        remedies = ["Use a machine with more cores, or fewer servers and workers."]
    return evidence.cause(words, f"{processes} busy processes shared {cores}", lost_s, remedies)


def _loading(evidence: Evidence) -> Cause | None:
    """Return how long scripts waited for their loaders."""
    lost_s = evidence.total_s("loading")
    if not evidence.matters(lost_s, LEAST_OUTSIDE):
        return None
    share = percent(lost_s / evidence.present_s())
    per = evidence.per_iteration_s("loading")
    each_s = median(per.values()) if per else 0.0
    words = (
        f"For {share} of the workers' time ({length(lost_s)} together), the script waited for its loader: "
        f"{length(each_s)} in each iteration."
    )
    return evidence.cause(
        words, f"scripts waited for their loaders for {share} of the time", lost_s, (LOADERS,)
    )


def _wasted(evidence: Evidence) -> Cause | None:
    """Return how long was computed for nothing."""
    lost_s = evidence.total_s("wasted")
    if not evidence.matters(lost_s):
        return None
    share = percent(lost_s / evidence.present_s())
    lost = [each.worker for each in evidence.workers if each.fate == "lost"]
    aborted = (
        f"the sync model aborted {counted(evidence.restarts, 'computation')}" if evidence.restarts else ""
    )
    with_worker = f"{listed(lost)} {'were' if len(lost) > 1 else 'was'} lost" if lost else ""
    why = " and ".join(filter(None, (aborted, with_worker)))
    words = f"Computations of {length(lost_s)} ({share} of the workers' time) came to nothing"
    words += f", because {why}." if why else "."
    hint = (
        "An abort costs a computation, and gives the next one newer weights. With parameters of the model under "
        "which it aborts less often, less is wasted. The parameters are listed by: paceline sync NAME"
    )
    return evidence.cause(
        words, f"{share} of the workers' time was wasted", lost_s, (hint,) if aborted else ()
    )


def _paused(evidence: Evidence) -> Cause | None:
    """Return how long the run paused."""
    lost_s = evidence.total_s("paused")
    if not evidence.matters(lost_s):
        return None
    share = percent(lost_s / evidence.present_s())
    fewer = f"fewer than {evidence.shortage}" if evidence.shortage else "too few workers"
    words = f"The run paused for {share} of the workers' time ({length(lost_s)} together), because it had {fewer}."
    hint = "With a smaller MIN in --workers MIN:MAX, the run goes on with fewer workers."
    return evidence.cause(words, f"the run paused for {share} of the workers' time", lost_s, (hint,))


def _outside(evidence: Evidence) -> Cause | None:
    """Return for how long scripts did something other than training."""
    lost_s = evidence.total_s("outside")
    if not evidence.matters(lost_s, LEAST_OUTSIDE):
        return None
    share = percent(lost_s / evidence.present_s())
    per = {each.worker: each.time_s.get("outside", 0.0) for each in evidence.workers}
    most = max(per, key=lambda worker: per[worker])
    mostly = len(per) > 1 and per[most] >= GUILTY_SHARE * lost_s
    whose = f", most of it worker {most}" if mostly else ""
    words = (
        f"For {share} of the workers' time ({length(lost_s)} together{whose}), the script did something other than "
        "training: it evaluated or saved the model, or waited in a barrier or a reduction, or went on after its last "
        "step."
    )
    return evidence.cause(
        words,
        f"{share} of the workers' time was spent outside of training",
        lost_s,
        (EVALUATE if mostly else EVALUATE_ONCE, READER),
    )


FURTHER: tuple[Finder, ...] = (_transfer, _loading, _wasted, _paused, _outside)


def _times(ratio: float) -> str:
    """Return a ratio in words.

    >>> _times(3.14), _times(4.0), _times(120.4)
    ('3.1 times', '4 times', '120 times')
    """
    return f"{ratio:.0f} times" if ratio >= 10 or abs(ratio - round(ratio)) < 0.05 else f"{ratio:.1f} times"


def _takes(workers: Sequence[int]) -> str:
    return "takes" if len(workers) == 1 else "take"


def _it(workers: Sequence[int]) -> str:
    return "it" if len(workers) == 1 else "they"


def evidence_of(summary: Mapping[str, Any], run_dir: str) -> Evidence | None:
    """Return what the summary of a run says about lost time; None if it contains no statistics.

    Args:
        summary: the summary of a live run, as in `summary.json`.
        run_dir: the run directory.
    """
    if not summary.keys() >= {"time_use", "iterations", "awaited_s"}:
        return None
    links = links_of(summary)
    lockstep, auto = read_model(str(summary["sync"]))
    joined = bool(summary.get("joined", links))
    pushes = summary.get("ledger", {}).get("pushes", {})
    unapplied = ""
    if pushes and "unapplied" in summary:
        unapplied = unapplied_pushes(PushFates(**pushes), summary["unapplied"])
    return Evidence(
        state=str(summary.get("ended", "finished")),
        failure=str(summary.get("failure", "")),
        sync=str(summary["sync"]),
        lockstep=lockstep,
        auto=auto,
        duration_s=summary["duration_s"],
        workers=_workers(summary),
        last_push_s={int(worker): at_s for worker, at_s in summary["last_push_s"].items()},
        end_s=summary["duration_s"],
        links=links,
        samples=summary.get("samples", 0),
        updates=summary.get("updates", 0),
        restarts=summary.get("restarts"),
        servers=int(summary.get("servers", 1)),
        cores=int(summary.get("cores", 0)),
        queued_s={int(worker): queued_s for worker, queued_s in summary.get("queued_s", {}).items()},
        wire=str(summary.get("wire", "float32")),
        joined=joined,
        handout=handout_of(summary),
        overlap=summary.get("overlap", "shards") == "shards",
        program=tuple(summary.get("program", ())),
        run_dir="" if joined else run_dir,
        noticed=tuple(summary.get("noticed", ())),
        unapplied=unapplied,
        shortage=shortage_of(summary),
    )


def _workers(summary: Mapping[str, Any]) -> tuple[WorkerReport, ...]:
    """Return the figures of each worker from which causes follow."""
    machines: Mapping[str, str] = summary.get("machines", {})
    samples: Mapping[str, int] = summary.get("worker_samples", {})
    left, lost = summary.get("left", ()), summary.get("lost_workers", ())
    found = []
    for worker, use in sorted(summary["time_use"].items(), key=lambda each: int(each[0])):
        index = int(worker)
        found.append(
            WorkerReport(
                worker=index,
                machine=machines.get(worker, ""),
                fate="lost" if index in lost else "left" if index in left else "finished",
                iterations=summary["iterations"].get(worker, 0),
                samples=samples.get(worker, 0),
                time_s={kind: use.get(f"{kind}_s", 0.0) for kind in KINDS},
                awaited_s=summary["awaited_s"].get(worker, 0.0),
            )
        )
    return tuple(found)


def links_of(summary: Mapping[str, Any]) -> tuple[LinkTotal, ...]:
    """Return the traffic between machines, according to a summary."""
    duration_s = summary.get("duration_s", 0.0)
    return tuple(
        LinkTotal(sender, receiver, total, total / duration_s if duration_s else None)
        for sender, receiver, total in summary.get("links", ())
    )


def handout_of(summary: Mapping[str, Any]) -> Handout:
    """Return how the data of a run was handed out, according to its summary."""
    split: Split | None = summary.get("split")
    return Handout(split, summary.get("batch") == "balanced", bool(summary.get("divisible", True)))


def shortage_of(summary: Mapping[str, Any]) -> str:
    """Return how many workers a run must have so that it does not pause; "" if its summary does not say this."""
    return counted(int(summary["least_workers"]), "worker") if "least_workers" in summary else ""


def read_model(sync: str) -> tuple[bool, bool]:
    """Return whether a schedule keeps all workers in lockstep, and whether the run chooses its models itself."""
    try:
        schedule = read_schedule(sync)
    except ConfigurationError:  # a model of the user, which is not imported for a report
        return False, False
    return all(model.lockstep for model in schedule.models), schedule.auto
