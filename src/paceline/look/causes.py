"""Sentences about what held a run back and what would help. They begin a report, and end the output of a command.

Each cause is computed from measured times, and says how many seconds it has cost, summed over the workers. A cause is
named only if it has cost at least `LEAST_SHARE` of the workers' time, and at least `LEAST_S` per worker. `ROWS` has
the sentences and the remedies of each cause. The kinds of time are `trace.activity_cells.KINDS`.

Waiting alone says little, because a worker waits for what another worker does. So the awaited worker is compared with
the workers that waited. The cause is the activity on which the awaited worker spends more time in each iteration:
computing, loading, transfers, or something outside of training.

If processes have too few cores, everything takes longer. So a lack of cores is named instead of waits and transfers
that are similar in all workers.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from ..core.layout import advise_wire
from ..core.lease import Split
from ..errors import ConfigurationError
from ..sync.model import EFFECTS, backup_quorum
from ..sync.schedule import read_schedule
from ..trace.activity_cells import KINDS
from ..trace.findings import DISTRIBUTE, Handout, how_to_check, in_python
from ..trace.report import Cause, LinkTotal, WorkerReport
from ..words import counted, length, listed, percent, size
from .step_cost import StepCost, step_cost_in
from .summary import unapplied_in

LEAST_SHARE = 0.05
LEAST_S = 1.0
GUILTY_SHARE = 0.7  # a few workers are named if at least this share of all waiting was for them
SLOWER = 1.15  # a worker is named as slower than others if it takes at least this many times as long
MORE_DATA = 1.2  # a worker is named for its data if it had at least this many times as much as others
# Loading, time outside of training, and transfers on one machine are named if they take at least this share.
LEAST_OUTSIDE = 0.1
# Optimizer steps are named instead of transfers if they take at least this share of the time of the transfers.
MOST_OF_TRANSFERS = 0.5

MOSTLY = 0.8  # if workers compute for at least this share of their time, the rest is not described
LEAST_NAMED = 0.05  # if no cause is found, the kinds of time with at least this share are named
SHORT_S = 20.0  # in a shorter run, `LEAST_S` is more than `LEAST_SHARE` of the time
ALONE_FASTER = 1.5  # a single worker is named if it would train at least this many times as fast as the run

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
    "The script distributes no loader, so it is not known how much of this time was computing, and how much was "
    "something else, such as evaluating the model."
)
COMPARE = "To compare the sync models on these machines, run"


def causes_of(evidence: Evidence) -> tuple[Cause, ...]:
    """Return the causes: first doubts about the result, then what cost time, the most costly cause first.

    The last cause says that one worker alone would have been faster, if this is certain.
    """
    doubts = [Cause(sentence) for sentence in (evidence.unapplied, *evidence.noticed) if sentence]
    crowded = _cores(evidence)
    awaited, explained = _waiting(evidence)
    if crowded is not None and not _guilty(evidence):
        awaited, explained = None, ""
    steps = None if explained == "transfer" else steps_of(evidence)
    told = {explained, *(["transfer"] if steps else [])}
    if crowded is not None and not (
        evidence.links and evidence.total_s("transfer") > (crowded.lost_s or 0.0)
    ):
        told.add("transfer")  # pushes and pulls take longer because processes wait for a core
    further = [_of_kind(evidence, name) for name, (kind, _) in KINDS_OF_CAUSES.items() if kind not in told]
    found = [crowded, awaited, _idle(evidence), steps, *further]
    slow = sorted((each for each in found if each is not None), key=lambda each: -(each.lost_s or 0.0))
    said: set[str] = set()  # each remedy is named once
    for number, cause in enumerate(slow):
        remedies = tuple(remedy for remedy in cause.remedies if remedy not in said)
        said.update(remedies)
        slow[number] = msgspec.structs.replace(cause, remedies=remedies)
    alone = _alone(evidence)
    return (*doubts, *slow, *([Cause(alone)] if alone else []))


def sentences_of(evidence: Evidence) -> list[str]:
    """Return the sentences that the terminal shows: what cost the workers time, and what would help."""
    slow = [cause for cause in causes_of(evidence) if cause.lost_s is not None]
    sentences = [sentence for cause in slow for sentence in (cause.words, *cause.remedies)]
    if sentences and evidence.run_dir and evidence.matters(evidence.total_s("waiting")):
        sentences.append(f"{COMPARE}: paceline advise {shlex.quote(evidence.run_dir)}")
    alone = _alone(evidence)
    return [*sentences, *([alone] if alone else [])]


def headline_of(evidence: Evidence, causes: Sequence[Cause]) -> str:
    """Return one or two sentences: how much was trained, how fast, and the most costly cause."""
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
    """Return what the workers did with their time in a run for which no cause is named."""
    present_s = evidence.present_s()
    shares = {kind: evidence.total_s(kind) / present_s if present_s else 0.0 for kind in SPENT}
    computed = f"workers computed for {percent(shares['computing'])} of their time"
    others = [kind for kind in sorted(SPENT, key=lambda kind: -shares[kind]) if shares[kind] >= LEAST_NAMED]
    rest = [f"{SPENT[kind]} for {percent(shares[kind])}" for kind in others if kind != "computing"]
    if not evidence.knows_computing:
        computed = f"workers spent {percent(shares['computing'])} of their time between one step and the next"
    if shares["computing"] >= MOSTLY or not rest:
        further = "" if evidence.knows_computing else f" {UNKNOWN}"
        return f"Nothing stands out that held the run back: {computed}.{further}"
    short = " The run was too short to say more." if evidence.duration_s < SHORT_S else ""
    return f"No single cause stands out: {computed}; they {', '.join(rest)}.{short}"


def _sentence(text: str) -> str:
    """Return the first line of a text, with a full stop."""
    line = text.strip().partition("\n")[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."


# -- The facts about a run from which the causes of its lost time follow -------------------------------------
#
# The terminal and the report of a run that has ended look for the causes in the same evidence: the summary of
# the run.


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a run from which the causes of its lost time follow.

    Attributes:
        state: see `RunReport`.
        failure: see `RunReport`.
        sync: the sync model or the schedule.
        lockstep: True if `sync` keeps all workers in lockstep; see `SyncModel`.
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
        server_machines: the machines of the servers; () if unknown.
        cores: number of cores that the processes of the run could use, if all ran on one machine; 0 if unknown.
        queued_s: worker -> seconds in which the worker could run, but had no core; {} if unknown.
        wire: format in which gradients and weights travelled; see `core.layout`.
        optimizers: name of the optimizer of each parameter set; () if unknown.
        vectors: name of each vector of the model -> number of its elements; {} if unknown.
        joined: True if machines have joined the run.
        handout: how the data was handed out.
        overlap: False if the run had the option `--overlap off`.
        program: what each worker ran, as in `ProcessOrder.arguments`.
        joint_batch: True if the batch size of the script's loader is the size of the joint batch.
        clips: True if the script clips the gradient that is applied.
        run_dir: the run directory, to be named in commands; "" if some records are on other machines.
        noticed: what was noticed while the run was in progress, in sentences; see `findings.find`.
        unapplied: a sentence about pushes that were never applied; "" if there is none.
        shortage: how many workers the run must have so that it does not pause; "" if it never pauses.
        step_cost: what the optimizers' steps cost the servers; None if unknown.
        lost_workers: the workers that were lost, even if they have joined again; () if unknown.
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
    server_machines: tuple[str, ...] = ()
    cores: int = 0
    queued_s: dict[int, float] = {}
    wire: str = "float32"
    optimizers: tuple[str, ...] = ()
    vectors: dict[str, int] = {}
    joined: bool = False
    handout: Handout = Handout()
    overlap: bool = True
    program: tuple[str, ...] = ()
    joint_batch: bool = False
    clips: bool = False
    run_dir: str = ""
    noticed: tuple[str, ...] = ()
    unapplied: str = ""
    shortage: str = ""
    step_cost: StepCost | None = None
    lost_workers: tuple[int, ...] = ()

    @property
    def knows_computing(self) -> bool:
        """False if the script distributes no loader, so that everything between two steps counts as computing."""
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
        """Return the total time, in seconds, for which the given workers (by default all) took part in the run."""
        return self.total_s(*SPENT, workers=workers)

    def per_iteration_s(self, kind: str) -> dict[int, float]:
        """Return the mean seconds of this kind per iteration, for each worker that has made an iteration."""
        return {
            each.worker: each.time_s.get(kind, 0.0) / each.iterations
            for each in self.workers
            if each.iterations
        }

    def matters(self, lost_s: float, share: float = LEAST_SHARE) -> bool:
        """Return True if enough time was lost for a sentence about it."""
        return self.share(lost_s) >= share and lost_s >= LEAST_S * len(self.workers) > 0

    def share(self, lost_s: float) -> float:
        """Return lost time as a share of the time of all workers, from 0 to 1."""
        whole_s = self.present_s() + self.total_s("idle")
        return lost_s / whole_s if whole_s else 0.0

    def cause(self, name: str, lost_s: float, remedies: Sequence[str] = (), **facts: str) -> Cause:
        """Return the cause that a row of `ROWS` describes, with its share of the workers' time.

        Args:
            name: the name of the row.
            lost_s: the time that the cause has cost, in seconds, summed over the workers.
            remedies: what would help. Default: the remedies of the row.
            facts: name of each placeholder in the sentences of the row -> its text.
        """
        row = ROWS[name]
        facts = {"share": self.percent(lost_s), "lost": f"{length(lost_s)} together", **facts}
        python = self.program[:1] == ("function",)
        shown = tuple(in_python(hint) if python else hint for hint in remedies or row.remedies)
        words, brief = row.words.format(**facts).strip(), row.brief.format(**facts)
        return Cause(words, lost_s, self.share(lost_s), shown, brief)

    def percent(self, lost_s: float, workers: Collection[int] | None = None) -> str:
        """Return lost time as a percentage of the time for which workers, by default all, took part in the run."""
        return percent(lost_s / (self.present_s(workers) or 1.0))

    def hints(self, *, equal_shares: bool = False, slow: int = 0, waited: bool = True) -> list[str]:
        """Return the remedies for waiting and idle workers that are possible in this run.

        Args:
            equal_shares: True if workers of unequal speed had equal shares of the work, so that some were idle.
            slow: number of workers that waited much less than the others, so that balanced batches help.
            waited: True if workers waited for the answers to their pulls.
        """
        handout, lost = self.handout, equal_shares or waited
        if handout.split is None:
            return [DISTRIBUTE] if equal_shares or (self.lockstep and waited) else []
        if self.auto:
            return []  # the run itself chooses balanced batches if possible, and other models if they save time
        hints = []
        if handout.may_balance and (slow or (self.lockstep and equal_shares)):
            hints.append(BALANCED_LOCKSTEP if self.lockstep else BALANCED)
        if self.lockstep and lost:
            # drop-stragglers does not allow a script to clip the gradient that is applied
            quorum = backup_quorum(len(self.workers), slow) if slow and not self.clips else None
            if quorum is not None:
                hints.append(BACKUP.format(quorum=quorum))
            omitted = [OMIT] * (handout.split == "static") + ["--overlap off"] * (not self.overlap)
            unless = f", if you omit {' and '.join(omitted)}" if omitted else ""
            how = how_to_check(self.run_dir or None, self.program, joint=self.joint_batch)
            hints.append(RELAXED.format(models=MODELS, unless=unless, how=how))
        elif equal_shares and handout.split == "static":
            hints.append(f"{DYNAMIC}{SHARES if handout.may_balance else ''}.")
        return hints


# -- The table of causes: their names, their sentences and their remedies ------------------------------------

BALANCED = "Try --batch balanced, which makes the size of each worker's batch proportional to its speed."
BALANCED_LOCKSTEP = (
    f"{BALANCED} The joint batch of all workers stays the same, and so does the result of training."
)
BACKUP = f"If all workers draw from the same data, try --sync drop-stragglers:quorum={{quorum}}: {EFFECTS['fresh']}."
MODELS = "--sync asp or --sync elastic-bsp"
RELAXED = (
    "Under {models}, workers do not meet at a barrier in every iteration, and data is handed out on demand{unless}. "
    f"But {EFFECTS['stale']}. Check the accuracy first: {{how}}"
)
OMIT = "--split static and split='static' in distribute(loader)"
DYNAMIC = f"Omit {OMIT}, so that data is handed out on demand"
SHARES = ", or try --batch balanced, which makes the shares proportional to the workers' speeds"

SELDOM = "It also helps to evaluate less often."
EVALUATE = (
    "While a worker is inside paceline.evaluating(model), the other workers need not wait for this worker. "
    f"{SELDOM}"
)
EVALUATE_ONCE = (
    "If every worker evaluates the same data, let one worker do this: in `if paceline.is_main():` and inside "
    f"paceline.evaluating(model), so that the other workers go on training. {SELDOM}"
)
EVALUATE_THERE = (
    "If the script evaluates or saves the model between two steps, it should do this inside "
    f"paceline.evaluating(model): the other workers then need not wait. {SELDOM}"
)
FETCH_SELDOM = (
    "Evaluate less often: before and after an evaluation, a worker fetches all weights of the servers on other "
    "machines, in float32 even if --wire sets another format."
)
READER = (
    "Or evaluate copies of the weights elsewhere: with paceline.launch(snapshot_every_s=...), a reader takes "
    "these copies, and no worker waits for it."
)
LOADERS = (
    "Give the DataLoader more processes (num_workers), so that batches are loaded while the script computes, or load "
    "from a faster disk."
)
FEWER_STEPS = (
    "Use larger batches, or accumulate the gradients of several batches before each step: then there are fewer "
    "pushes and pulls for the same data. The joint batch becomes larger, so the learning rate may have to be "
    "adapted."
)
ESTIMATE = "the time of the transfers"
ABORTS = (
    "An abort costs a computation, and the next computation gets newer weights. Choose parameters with which the "
    "sync model aborts less often, so that less is wasted. To list the parameters, run: paceline sync NAME"
)
MINIMUM = "With a smaller MIN in --workers MIN:MAX, the run goes on with fewer workers."
MORE_CORES = "Use a machine with more cores, or fewer servers and workers."


class Row(NamedTuple):
    """How a cause is described. The placeholders in braces stand for facts of the run.

    Attributes:
        words: what happened, in a sentence.
        brief: what happened, as a clause for the headline.
        remedies: what always helps, most effective first.
    """

    words: str
    brief: str
    remedies: tuple[str, ...] = ()


ROWS = {
    # workers waited for one another in turn
    "in turn": Row(
        "Workers waited {where} for {share} of their time ({lost}), now for one worker, now for another: their "
        "iterations do not take equally long each time.",
        "workers waited for one another for {share} of their time",
    ),
    # workers waited for a few workers: the activity on which these spend more time
    "their transfer": Row(
        "{waited}, whose gradients and weights are on their way for {each} in each iteration, {times} as long as "
        "those of the others. {bytes}",
        "a slow link: {brief}, whose transfers take {times} as long",
    ),
    "their outside": Row(
        "{waited}, whose script did something other than training for {outside}, such as evaluating or saving the "
        "model.",
        "{brief}, whose script did something other than training",
        (EVALUATE, READER),
    ),
    "their loading": Row(
        "{waited}, whose script waits for its loader for {each} in each iteration, {times} as long as those of the "
        "others.",
        "{brief}, which loads its batches {times} as long",
        (LOADERS,),
    ),
    "unsplit": Row(
        "{waited}, which {take} {times} as long as the others from receiving weights to the next push. This time "
        "contains the computation and the transfers, which this run has not recorded separately.",
        "{brief}, which {take} {times} as long for each iteration",
    ),
    "last": Row(
        "{waited}, which reached the barriers last, although {it} did not compute longer.", "{brief}"
    ),
    "unknown": Row(
        f"{{waited}}, which {{take}} {{times}} as long from one step to the next. {UNKNOWN}",
        "{brief}, which {take} {times} as long from one step to the next",
    ),
    "their computing": Row(
        "{waited}, whose batches take {times} as long.", "{brief}, whose batches take {times} as long"
    ),
    # some workers were idle: why other workers were still working
    "silent": Row(
        "{idle}, because the script of {blamed} did something other than training for {silent} after its last "
        "step, such as evaluating the model.",
        "{brief}",
        (READER,),
    ),
    "evaluated": Row(
        "{idle}, because the script of {blamed} spent {more} longer than their scripts on something other than "
        "training, such as evaluating the model, and made its steps later.",
        "{brief}",
        (READER, SELDOM),
    ),
    "more data": Row(
        "{Blamed} had {times} as much {much} as {who} ({amounts}), which {were} idle for {longest} ({part} of the "
        "run).",
        "{blamed} had {times} as much {much} as the others, which were idle at the end",
    ),
    "fetched": Row(
        "{idle}, because the gradients and weights of {blamed} were on their way for {more} longer than those of "
        "{who}.{equal}",
        "{brief}",
    ),
    "working": Row("{idle}, because {blamed} {was} still working.{equal}", "{brief}"),
    # a kind of time
    "cores": Row(
        "{Who} shared {cores}, perhaps with other programs: for {share} of their time ({lost}), the workers could "
        "have gone on, but had no core. Computations, pushes and pulls take longer then.",
        "{processes} busy processes shared {cores}",
    ),
    "cores of machines": Row(
        "{Who} waited for a core for {share} of the time ({lost}): too many processes, perhaps of other programs, were "
        "busy on {machines}. Computations, pushes and pulls take longer then.",
        "{who} waited for a core for {share} of the time",
        (MORE_CORES,),
    ),
    "links": Row(
        "Gradients and weights were on their way for {share} of the workers' time ({lost}), {each} in each "
        "iteration. {bytes}",
        "gradients and weights were on their way for {share} of the workers' time",
    ),
    "links in turn": Row(
        "For {share} of the workers' time ({lost}), gradients and weights were on their way ({each} in each "
        "iteration), or workers waited for gradients of other workers, now of one worker, now of another. {bytes}",
        "gradients and weights were on their way, or awaited, for {share} of the workers' time",
    ),
    "exchanges": Row(
        "For {share} of the workers' time ({lost}), gradients and weights were on their way, or a server made its "
        "part of a step: {each} in each iteration.",
        "pushes and pulls took {share} of the workers' time",
    ),
    "steps": Row(
        "For about {share} of their time ({lost}), workers waited for the servers to make a step: {step}.",
        "workers waited for the servers to make a step for {share} of their time",
    ),
    "loading": Row(
        "For {share} of the workers' time ({lost}), the script waited for its loader: {each} in each iteration.",
        "scripts waited for their loaders for {share} of the time",
        (LOADERS,),
    ),
    "wasted": Row(
        "Computations that took {wasted} ({share} of the workers' time) were wasted{why}.",
        "{share} of the workers' time was wasted",
    ),
    "paused": Row(
        "The run paused for {share} of the workers' time ({lost}), because it had {fewer}.",
        "the run paused for {share} of the workers' time",
        (MINIMUM,),
    ),
    "outside": Row(
        "For {share} of the workers' time ({lost}{whose}), the script did something other than training: it "
        "evaluated or saved the model, or waited in a barrier or a reduction, or went on after its last step.",
        "{share} of the workers' time was spent outside of training",
        (EVALUATE_ONCE, READER),
    ),
}
"""Name of a cause -> how the terminal and the report describe it."""


def _were(workers: Sequence[int]) -> str:
    return "were" if len(workers) > 1 else "was"


def _waiting(evidence: Evidence) -> tuple[Cause | None, str]:
    """Return why workers have waited for others. Also return the kind of time that this cause includes, or ""."""
    waited_s = evidence.total_s("waiting")
    if not evidence.matters(waited_s):
        return None, ""
    guilty = _guilty(evidence)
    others = [each.worker for each in evidence.workers if each.worker not in guilty and each.iterations]
    if not guilty or not others:
        moved_s = evidence.total_s("transfer")
        mostly_moved = moved_s >= max(waited_s, evidence.total_s("computing", "loading"))
        if evidence.links and evidence.lockstep and mostly_moved and steps_of(evidence) is None:
            return _links(evidence, "links in turn", moved_s + waited_s, evidence.hints()), "transfer"
        where = "at the barrier of each iteration" if evidence.lockstep else "for answers to their pulls"
        return evidence.cause("in turn", waited_s, evidence.hints(), where=where), ""
    own_s = evidence.total_s("waiting", workers=others)
    share, blamed = evidence.percent(own_s, others), listed(guilty)
    their, together = ("their", " together") if len(others) > 1 else ("its", "")
    excess = {
        kind: _excess(evidence, kind, guilty) for kind in ("computing", "loading", "transfer", "outside")
    }
    kind = max(excess, key=lambda each: excess[each][0])
    _, ratio, each_s = excess[kind]
    name, slow, lost_s, remedies = f"their {kind}", len(guilty), own_s, list[str]()
    if ratio < SLOWER:
        name, slow = "last", 0
    elif kind == "transfer":
        lost_s += evidence.total_s("transfer", workers=guilty)
        remedies = _fewer_bytes(evidence, guilty)
    elif kind == "computing" and evidence.unsplit:
        name = "unsplit"
    elif kind == "computing" and not evidence.knows_computing:
        name, remedies = "unknown", [EVALUATE_THERE]
    explained = kind if name == f"their {kind}" and kind != "computing" else ""
    cause = evidence.cause(
        name,
        lost_s,
        remedies if explained else [*remedies, *evidence.hints(slow=slow)],
        waited=f"{listed(others).capitalize()} waited {share} of {their} time ({length(own_s)}{together}) for {blamed}",
        brief=f"the others spent {share} of their time waiting for {blamed}",
        each=length(each_s),
        times=_times(ratio),
        take="take" if slow > 1 else "takes",
        it="they" if len(guilty) > 1 else "it",
        outside=length(evidence.total_s("outside", workers=guilty)),
        bytes=_bytes(evidence, guilty),
    )
    return cause, explained


def _guilty(evidence: Evidence) -> list[int]:
    """If most of the waiting was for a few workers, return these workers. Otherwise, return []."""
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
        The difference in seconds between the median time of these workers and the median time of the others, the ratio
        of these medians, and the median time of these workers in seconds.
    """
    per = evidence.per_iteration_s(kind)
    own = [seconds for worker, seconds in per.items() if worker in guilty]
    others = [seconds for worker, seconds in per.items() if worker not in guilty]
    if not own or not others:
        return 0.0, 1.0, 0.0
    own_s, others_s = median(own), median(others)
    return own_s - others_s, own_s / max(others_s, 1e-6), own_s


def _idle(evidence: Evidence) -> Cause | None:
    """Return why workers had finished while others were still working."""
    least_s = max(LEAST_S, LEAST_SHARE * evidence.duration_s)
    idle_s = {each.worker: each.time_s.get("idle", 0.0) for each in evidence.workers}
    idle_s = {worker: seconds for worker, seconds in idle_s.items() if seconds >= least_s}
    working = [each.worker for each in evidence.workers if each.fate != "lost" and each.worker not in idle_s]
    if not idle_s or not working:
        return None
    lost_s, longest_s, who, blamed = (
        sum(idle_s.values()),
        max(idle_s.values()),
        sorted(idle_s),
        listed(working),
    )
    longest = f"the last {length(longest_s)}"
    part = percent(longest_s / max(evidence.duration_s, 1e-9))

    def usual(amounts: Mapping[int, float]) -> tuple[float, float]:
        """Return the median of an amount over the working workers, and over the idle workers."""
        return median(amounts.get(each, 0.0) for each in working), median(
            amounts.get(each, 0.0) for each in who
        )

    facts = {
        "idle": f"{listed(who).capitalize()} {_were(who)} idle for {longest} ({part} of the run)",
        "brief": f"{blamed} worked for {length(longest_s)} longer than the others",
        "blamed": blamed,
    }
    silent_s = evidence.end_s - max(
        (evidence.last_push_s.get(worker, 0.0) for worker in working), default=0.0
    )
    if silent_s > longest_s / 2:
        return evidence.cause("silent", lost_s, **facts, silent=length(silent_s))
    outside_s, theirs_s = usual({each.worker: each.time_s.get("outside", 0.0) for each in evidence.workers})
    if outside_s - theirs_s > longest_s / 2:
        return evidence.cause("evaluated", lost_s, **facts, more=length(outside_s - theirs_s))
    more, less = usual(
        {each.worker: each.samples if evidence.samples else each.iterations for each in evidence.workers}
    )
    ratio = more / less if less else 0.0
    if ratio >= MORE_DATA and not evidence.handout.balanced:
        much, unit = ("data", "samples") if evidence.samples else ("to do", "steps")
        facts |= {"Blamed": blamed.capitalize(), "who": listed(who), "were": _were(who), "longest": longest}
        facts |= {"part": part, "much": much, "times": _times(ratio)}
        amounts = f"{more:,.0f} {unit} instead of {less:,.0f}"
        return evidence.cause("more data", lost_s, [_shared_data(evidence)], **facts, amounts=amounts)
    computing_s, theirs_s = usual(evidence.per_iteration_s("computing"))
    slower = computing_s / max(1e-9, theirs_s)
    moved_s, less_s = usual({each.worker: each.time_s.get("transfer", 0.0) for each in evidence.workers})
    fetched = bool(evidence.links) and slower < SLOWER and moved_s - less_s > longest_s / 2
    # Balanced batches are unequal shares, even if the iteration counts are equal.
    equal = less > 0 and 1 / MORE_DATA < ratio < MORE_DATA and not evidence.handout.balanced
    longer = f", but the batches of {blamed} take {_times(slower)} as long" if slower >= SLOWER else ""
    facts["equal"] = f" All of them had equal shares of the data{longer}." if equal else ""
    slow = len(working) if evidence.lockstep and slower >= SLOWER else 0
    # In lockstep, equal shares take equally long unless the computations of a worker take longer.
    hints = evidence.hints(
        equal_shares=equal and bool(slow or not evidence.lockstep), slow=slow, waited=False
    )
    if fetched:
        facts |= {"who": listed(who), "more": length(moved_s - less_s)}
        return evidence.cause("fetched", lost_s, [*hints, FETCH_SELDOM], **facts)
    return evidence.cause("working", lost_s, hints, **facts, was=_were(working))


def _shared_data(evidence: Evidence) -> str:
    """Return the advice for sharing the data fairly."""
    if evidence.handout.split is None:
        return (
            "Let Paceline hand out the data: pass the loader to paceline.prepare or paceline.distribute(loader). "
            "Then all workers get equal shares of each epoch or, with --split dynamic, each gets its next batch when "
            "it needs one."
        )
    return "Use --split dynamic, with which each worker gets its next batch when it needs one."


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
    made: dict[str, int] = {}  # machine at an end of the link -> the iterations of its workers
    for each in evidence.workers:
        if each.machine in busiest:
            made[each.machine] = made.get(each.machine, 0) + each.iterations
    # If only one side has a server, only the workers on the other side use the link.
    users = made.keys() - evidence.server_machines or made.keys()
    iterations = min((made[machine] for machine in users), default=0)
    ends = " and ".join(sorted(busiest))
    if not iterations:
        return f"The link between {ends} carried {size(pairs[busiest])}."
    return (
        f"In each iteration, {size(pairs[busiest] / iterations)} pass between {ends} "
        f"({size(pairs[busiest] / max(evidence.duration_s, 1e-9))} per second on average)."
    )


def _fewer_bytes(evidence: Evidence, workers: Collection[int]) -> list[str]:
    """Return what helps against a slow link of these workers."""
    ends = (end for link in evidence.links for end in (link.sender, link.receiver))
    machines = {*ends, *(each.machine for each in evidence.workers), *evidence.server_machines} - {""}
    # The advice is to use one machine more for servers than now: the serving machine and `remote` other machines.
    remote = len(evidence.server_machines) or evidence.servers
    others = "the other machine" if len(machines) == 2 else f"{remote} of the other machines"
    servers = (
        "Put the servers on several machines, so that no link carries all of the bytes: "
        f"paceline serve --servers {remote + 1} --remote-servers {remote}, and paceline join --servers 1 on {others}."
    )
    common, vectors = evidence.lockstep, evidence.vectors
    advice = advise_wire(evidence.optimizers, evidence.wire, common=common, vectors=vectors)
    transfer_s = evidence.total_s("transfer", workers=workers)
    other_s = evidence.total_s("computing", "loading", "waiting", workers=workers)
    rounding = "" if advice is None else advice.sentence(transfer_s, other_s, advice.both, ESTIMATE)
    return [*([servers] if remote < len(machines) else []), *([rounding] if rounding else []), FEWER_STEPS]


def _links(evidence: Evidence, name: str, lost_s: float, hints: Sequence[str] = ()) -> Cause:
    """Return the cause `name`, which is about links. Its remedies are those for slow links, followed by `hints`."""
    workers = [each.worker for each in evidence.workers]
    per = evidence.per_iteration_s("transfer")
    facts = {"each": length(median(per.values()) if per else 0.0), "bytes": _bytes(evidence, workers)}
    return evidence.cause(name, lost_s, [*_fewer_bytes(evidence, workers), *hints], **facts)


def _cores(evidence: Evidence) -> Cause | None:
    """Return how long workers waited for a core, because the run has more busy processes than there are cores.

    The number of cores of a machine that has joined is unknown, so only the workers that often waited are named.
    """
    if evidence.joined:
        return _cores_of_machines(evidence)
    lost_s = sum(evidence.queued_s.values())
    processes = len(evidence.workers) + evidence.servers
    if not 0 < evidence.cores < processes or not evidence.matters(lost_s, LEAST_OUTSIDE):
        return None
    fewer = evidence.cores - evidence.servers
    remedy = f"Use fewer workers: --workers {fewer} leaves each process a core of its own."
    return evidence.cause(
        "cores",
        lost_s,
        [remedy if fewer > 1 else MORE_CORES],
        Who=f"{counted(len(evidence.workers), 'worker')} and {counted(evidence.servers, 'server')}".capitalize(),
        cores=counted(evidence.cores, "core"),
        processes=str(processes),
    )


def _cores_of_machines(evidence: Evidence) -> Cause | None:
    """Return how long workers waited for a core in a run that machines have joined."""
    queued_s = {
        worker: queued_s
        for worker, queued_s in sorted(evidence.queued_s.items())
        if queued_s >= LEAST_OUTSIDE * evidence.present_s([worker]) > 0.0
    }
    lost_s = sum(queued_s.values())
    if not evidence.matters(lost_s, LEAST_OUTSIDE):
        return None
    who = listed([*queued_s])
    return evidence.cause(
        "cores of machines",
        lost_s,
        share=evidence.percent(lost_s, queued_s),
        who=who,
        Who=who.capitalize(),
        machines=", ".join(sorted({each.machine for each in evidence.workers if each.worker in queued_s})),
    )


KINDS_OF_CAUSES = {
    "links": ("transfer", LEAST_SHARE),
    "exchanges": ("transfer", LEAST_OUTSIDE),
    "loading": ("loading", LEAST_OUTSIDE),
    "wasted": ("wasted", LEAST_SHARE),
    "paused": ("paused", LEAST_SHARE),
    "outside": ("outside", LEAST_OUTSIDE),
}
"""Name of a cause -> its kind of time, and the share of the workers' time that it must take to be named."""


def _of_kind(evidence: Evidence, name: str) -> Cause | None:
    """Return the cause for a kind of time other than computing; None if this kind took too little time."""
    kind, least = KINDS_OF_CAUSES[name]
    lost_s = evidence.total_s(kind)
    if not evidence.matters(lost_s, least) or name == ("exchanges" if evidence.links else "links"):
        return None
    per = evidence.per_iteration_s(kind)
    facts, remedies = {"each": length(median(per.values()) if per else 0.0)}, list[str]()
    if name == "links":
        return _links(evidence, name, lost_s)
    if name == "exchanges":
        remedies = [
            FEWER_STEPS,
            f"If there are cores that the workers leave free, try --servers {evidence.servers + 1}: each server then "
            "makes a smaller part of each step.",
        ]
    elif name == "wasted":
        lost = sorted({*evidence.lost_workers, *(w.worker for w in evidence.workers if w.fate == "lost")})
        why = [f"{listed(lost)} {_were(lost)} lost"] if lost else []
        if evidence.restarts:
            why.insert(0, f"the sync model aborted {counted(evidence.restarts, 'computation')}")
            remedies = [ABORTS]
        facts |= {"wasted": length(lost_s), "why": f", because {' and '.join(why)}" if why else ""}
    elif name == "paused":
        facts["fewer"] = f"fewer than {evidence.shortage}" if evidence.shortage else "too few workers"
    elif name == "outside":
        spent_s = {each.worker: each.time_s.get(kind, 0.0) for each in evidence.workers}
        most = max(spent_s, key=lambda worker: spent_s[worker])
        mostly = len(spent_s) > 1 and spent_s[most] >= GUILTY_SHARE * lost_s
        facts["whose"] = f", most of it in worker {most}" if mostly else ""
        remedies = [EVALUATE, READER] if mostly else []
    return evidence.cause(name, lost_s, remedies, **facts)


def steps_of(evidence: Evidence) -> Cause | None:
    """Return how long workers waited for optimizer steps; None if steps took less than half of the time of transfers.

    A server makes a step before it answers a pull, so the step counts as a transfer.
    """
    cost, transfer_s = evidence.step_cost, evidence.total_s("transfer")
    if cost is None or not cost.matters:
        return None
    lost_s = min(transfer_s, cost.share * evidence.present_s())
    if lost_s < MOST_OF_TRANSFERS * transfer_s or not evidence.matters(lost_s, LEAST_OUTSIDE):
        return None
    return evidence.cause("steps", lost_s, [cost.remedy()], step=cost.words)


def _alone(evidence: Evidence) -> str:
    """Return a sentence that says how much faster one worker alone would have been; "" unless this is certain.

    Alone, the worker needs its own times of computing and loading for the samples of all workers, the time of an
    optimizer step for each of its batches, and the longest time that any worker has spent outside of training.
    """
    cost = evidence.step_cost
    measured = [each for each in evidence.workers if each.samples and each.iterations]
    if evidence.duration_s < SHORT_S or not evidence.knows_computing or cost is None or not measured:
        return ""
    best = max(
        measured, key=lambda each: (each.samples, -evidence.total_s("computing", workers=[each.worker]))
    )
    step_s = max(cost.step_s, cost.predicted_s.get(1, 0.0))
    own_s = evidence.total_s("computing", "loading", workers=[best.worker]) + step_s * best.iterations
    outside_s, paused_s = (
        max(each.time_s.get(kind, 0.0) for each in evidence.workers) for kind in ("outside", "paused")
    )
    alone_s = own_s * evidence.samples / best.samples + outside_s
    ratio = (evidence.duration_s - paused_s) / alone_s if alone_s else 0.0
    if ratio < ALONE_FASTER:
        return ""
    return (
        f"By the times that the run has measured, worker {best.worker} alone, without servers, would have trained "
        f"these {evidence.samples:,} samples in about {length(alone_s)}, {_times(ratio)} as fast as this run."
    )


def _times(ratio: float) -> str:
    """Return a ratio in words.

    >>> _times(3.14), _times(4.0), _times(120.4)
    ('3.1 times', '4 times', '120 times')
    """
    return f"{ratio:.0f} times" if ratio >= 10 or abs(ratio - round(ratio)) < 0.05 else f"{ratio:.1f} times"


def evidence_of(summary: Mapping[str, Any], run_dir: str, **known: Any) -> Evidence | None:
    """Return what the summary of a run says about lost time; None if it is unknown what the workers did.

    Args:
        summary: the summary of a run, as in `summary.json`, perhaps without statistics.
        run_dir: the run directory.
        known: attributes of the result that are better known from another source than the summary.
    """
    if "workers" not in known:
        if not summary.keys() >= {"time_use", "iterations", "awaited_s"}:
            return None
        known["workers"] = _workers(summary)
        last_push_s = {int(worker): at_s for worker, at_s in summary["last_push_s"].items()}
        known |= {"last_push_s": last_push_s, "end_s": summary["duration_s"]}
    sync = known.setdefault("sync", str(summary.get("sync", "")))
    joined = known.setdefault("joined", bool(summary.get("joined", summary.get("links"))))
    lockstep, auto = read_model(sync)
    names = (
        "failure",
        "duration_s",
        "samples",
        "updates",
        "restarts",
        "servers",
        "cores",
        "wire",
        "vectors",
        "clips",
    )
    found = {name: summary[name] for name in names if name in summary}
    found["joint_batch"] = bool(summary.get("joint_batch"))
    found |= {
        name: tuple(summary[name])
        for name in ("program", "noticed", "optimizers", "server_machines", "lost_workers")
        if name in summary
    }
    found |= {
        "state": str(summary.get("ended", "finished")),
        "lockstep": lockstep,
        "auto": auto,
        "links": links_of(summary),
        "queued_s": {int(worker): queued_s for worker, queued_s in summary.get("queued_s", {}).items()},
        "handout": handout_of(summary),
        "overlap": summary.get("overlap", "shards") == "shards",
        "run_dir": "" if joined else run_dir,
        "unapplied": unapplied_in(summary),
        "shortage": counted(int(summary["least_workers"]), "worker") if "least_workers" in summary else "",
        "step_cost": step_cost_in(summary),
    }
    return Evidence(**{**found, **known})


def _workers(summary: Mapping[str, Any]) -> tuple[WorkerReport, ...]:
    """Return, for each worker, the figures from which the causes follow."""
    machines: Mapping[str, str] = summary.get("machines", {})
    samples: Mapping[str, int] = summary.get("worker_samples", {})
    # worker that was lost or has left early, and whose index was not used again -> "lost" or "left"
    gone = {
        each["worker"]: each["fate"] for each in summary.get("departures", ()) if not each.get("returned")
    }
    found = []
    for worker, use in sorted(summary["time_use"].items(), key=lambda each: int(each[0])):
        index = int(worker)
        found.append(
            WorkerReport(
                worker=index,
                machine=machines.get(worker, ""),
                fate=gone.get(index, "finished"),
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


def read_model(sync: str) -> tuple[bool, bool]:
    """Return whether a schedule keeps all workers in lockstep, and whether the run chooses its models itself."""
    try:
        schedule = read_schedule(sync)
    except ConfigurationError:  # a model of the user, which is not imported for a report
        return False, False
    return all(model.lockstep for model in schedule.models), schedule.auto
