"""One recommendation, with its reason, from the figures of simulations.

Changes that keep the result of training come first: balanced batches, and more servers if transfers take much of the
time. If a model changes the result (see `sync.model`), the recommendation describes this effect. It also contains the
command that measures the effect or, if a script was trained, the measured loss. A difference of less than 10 % is not
worth a change. A model with stale gradients is recommended only if its loss was measured, or if it is `ENOUGH` times as
fast as bsp. Otherwise, it is only named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ..core.layout import advise_wire
from ..core.lease import BatchSizing
from ..sim import Cluster, Dataset, Sum
from ..sync.model import EFFECTS, Effect, effect_of
from ..sync.schedule import read_schedule
from ..trace.findings import DISTRIBUTE
from ..words import run_name
from .pool import TellCount
from .ranking import Figures, Task, balanced_task, run_tasks

WORTH_IT = 1.1  # a change must make training at least this many times as fast
# Below this share of transfers, halving the transfers does not make training `WORTH_IT` times as fast.
WIRE_SHARE = 0.2
ENOUGH = 2.0  # a model with stale gradients that is not this many times as fast as bsp may train more slowly

SAME_RESULT = "the result of training stays the same"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run, compared with bsp and equal batches.

    Attributes:
        sync: sync model.
        batch: sizes of the workers' batches.
        effect: what the model does to the result of training; see `sync.model`.
        times: how many times as fast as bsp it is, in samples or gradients per second. If a script was trained under
            a model that is not exact, the time to the last loss of bsp counts instead; 0.0 if this loss was not
            reached.
        transfer_share: share of the workers' time in which messages were on their way, from 0 to 1.
        waiting_share: share of the workers' time spent waiting for other workers, from 0 to 1.
        measured: True if a script was trained under the model, so that its loss is known.
    """

    sync: str
    batch: BatchSizing = "equal"
    effect: Effect = "exact"
    times: float
    transfer_share: float = 0.0
    waiting_share: float = 0.0
    measured: bool = False

    @property
    def name(self) -> str:
        """The sync model, with its batches if these are balanced, for use in a sentence."""
        return f"{self.sync} with balanced batches" if self.batch == "balanced" else self.sync


class WireVariant(msgspec.Struct, frozen=True, kw_only=True):
    """bsp with fewer or faster transfers, compared with bsp on the cluster as it is.

    Attributes:
        batch: sizes of the workers' batches.
        servers: number of servers, each on a machine of its own.
        batches_per_push: number of batches from which a worker computes a gradient before it pushes.
        wire: the format in which gradients and weights travel; "" for the format of the ranking.
        reason: why this format is recommended, as a clause.
        times: samples per second, as a multiple of those of bsp on the cluster as it is.
    """

    batch: BatchSizing
    servers: int
    batches_per_push: int = 1
    wire: str = ""
    reason: str = ""
    times: float


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, and why.

    Attributes:
        text: the recommendation and its reason, in sentences.
        sync: the recommended sync model.
        batch: the recommended sizes of the workers' batches.
        servers: the recommended number of servers; None to leave it as it is.
        times: how many times as fast as under bsp the training would be; 1.0 if nothing is worth a change.
        effect: what the recommended model does to the result of training.
        check: the command that shows the accuracy of the script under a model that the text names; "" if the accuracy
            of all named models is known.
    """

    text: str
    sync: str
    batch: BatchSizing
    servers: int | None = None
    times: float
    effect: Effect
    check: str = ""


def candidates_of(rows: Sequence[Figures]) -> list[Candidate]:
    """Return the candidates among the rows of a ranking; [] unless bsp with equal batches is one of them."""
    rows = [row for row in rows if row.sound]
    bsp = next((row for row in rows if (row.sync, row.batch) == ("bsp", "equal")), None)
    if bsp is None or not bsp.speed:
        return []
    return [
        Candidate(
            sync=row.sync,
            batch=row.batch,
            effect=_effect(row.sync),
            times=row.speed / bsp.speed,
            transfer_share=row.transfer_share,
            waiting_share=row.waiting_share,
        )
        for row in rows
    ]


def _effect(sync: str) -> Effect:
    schedule = read_schedule(sync)
    # A run that chooses its models itself may choose a model with stale gradients.
    return "stale" if schedule.auto else effect_of(schedule.models)


def recommend(
    candidates: Sequence[Candidate],
    variants: Sequence[WireVariant] = (),
    *,
    servers: int,
    check: Callable[[str], str],
    distributes: bool = True,
    steps: str = "",
) -> Recommendation | None:
    """Return the recommendation that follows from simulations; None without bsp, with which all models are compared.

    Args:
        candidates: the ways to run that were simulated, as `candidates_of` returns them.
        variants: simulations with fewer or faster transfers.
        servers: number of servers of the cluster as it is.
        check: returns the command that shows the accuracy of the script under a sync model.
        distributes: False if the script of a run distributes no data. Then each worker makes a fixed number of
            iterations, and the run takes as long as its slowest worker under any model.
        steps: sentences about the cost of the optimizers' steps, and about remedies; "" unless steps take at
            least half of the time that counts as transfers. With such sentences, fewer or faster transfers are not
            recommended.

    >>> rows = [Candidate(sync="bsp", times=1.0), Candidate(sync="bsp", batch="balanced", times=2.31)]
    >>> recommend(rows, servers=1, check=str).text
    'Recommended: bsp with balanced batches: 2.3 times as fast as bsp, and the result of training stays the same.'
    """
    bsp = next((each for each in candidates if (each.sync, each.batch) == ("bsp", "equal")), None)
    if bsp is None:
        return None
    exact = _better([each for each in candidates if each.effect == "exact"], bsp)
    wire = _Wire.of(exact, () if steps else variants, servers)
    relaxed = _relaxed(candidates, exact.times)
    pick, times = exact, exact.times
    if exact is not bsp:
        sentences = [f"Recommended: {exact.name}: {_gain(exact)}, and {SAME_RESULT}.", wire.sentence()]
    elif wire.more is not None:
        sentences, times = [f"Recommended: bsp with faster transfers. {wire.sentence()}"], wire.more.times
    elif relaxed is None:
        sentences = [f"Recommended: stay with bsp. {_no_gain(bsp, candidates)}", wire.sentence()]
    elif _caution(relaxed):
        sentences = ["Recommended: stay with bsp.", wire.sentence()]
    else:
        pick, times = relaxed, relaxed.times
        sentences = [f"Recommended: {_with_its_price(relaxed)}", wire.sentence()]
    if relaxed is not None and pick is not relaxed:
        sentences.append(f"Or {_with_its_price(relaxed)}{_caution(relaxed)}")
    sentences.append(steps)
    if relaxed is not None and not distributes:
        sentences.append(DISTRIBUTE)
    return Recommendation(
        text=" ".join(filter(None, sentences)),
        sync=pick.sync,
        batch=pick.batch,
        servers=None if wire.more is None else wire.more.servers,
        times=times,
        effect=pick.effect,
        check=check(relaxed.sync) if relaxed is not None and not relaxed.measured else "",
    )


def _better(found: Sequence[Candidate], than: Candidate) -> Candidate:
    """Return the fastest candidate if it is worth a change, else `than`."""
    best = max(found, key=lambda each: each.times, default=than)
    return best if best.times >= WORTH_IT * than.times else than


def _relaxed(candidates: Sequence[Candidate], times: float) -> Candidate | None:
    """Return the best candidate that changes the result of training; None if no such candidate is worth it.

    A model without stale gradients is preferred, unless a model with stale gradients is clearly faster and can be
    recommended.
    """
    best = None
    for effect in ("fresh", "stale"):
        found = [each for each in candidates if each.effect == effect and each.times >= WORTH_IT * times]
        fastest = max(found, key=lambda each: each.times, default=None)
        if fastest is not None and (best is None or not _caution(fastest)):
            best, times = fastest, fastest.times
    return best


class _Wire(NamedTuple):
    """The remedies for slow transfers under an exact candidate, which does not change the result of training.

    Attributes:
        share: share of the workers' time in which messages are on their way.
        servers: current number of servers.
        more: the fastest variant with more servers, if it is worth a change.
        fewer: the fastest variant with more batches per push, if it is worth a change.
        coded: the variant with a codec that sends fewer bytes, if it is worth a change.
    """

    share: float
    servers: int
    more: WireVariant | None = None
    fewer: WireVariant | None = None
    coded: WireVariant | None = None

    @classmethod
    def of(cls, exact: Candidate, variants: Sequence[WireVariant], servers: int) -> _Wire:
        """Return the remedies, if transfers take a considerable part of the time. Otherwise, return no remedies."""
        worth = [
            each for each in variants if each.batch == exact.batch and each.times >= WORTH_IT * exact.times
        ]
        if exact.transfer_share < WIRE_SHARE:
            worth = []
        more = [each for each in worth if each.servers > servers]
        fewer = [each for each in worth if each.batches_per_push > 1]
        coded = [each for each in worth if each.wire]
        return cls(exact.transfer_share, servers, _least(more), _least(fewer), _least(coded))

    def sentence(self) -> str:
        """Return a sentence about the transfers and what would help; "" if nothing would help."""
        options = []
        if self.coded is not None:
            options.append(
                f"add --wire {self.coded.wire}, which rounds gradients and weights on their way "
                f"({self.coded.times:.1f} times as fast as bsp now; {self.coded.reason})"
            )
        if self.more is not None:
            options.append(
                f"put the servers on {self.more.servers} machines instead of {self.servers} "
                f"({self.more.times:.1f} times as fast as bsp now, with the same result)"
            )
        if self.fewer is not None:
            options.append(
                f"accumulate {self.fewer.batches_per_push} batches for each push ({self.fewer.times:.1f} times as "
                "fast as bsp now, but with fewer and larger updates)"
            )
        share = f"{self.share:.0%} of each iteration is on the wire"
        return f"{share}: {', or '.join(options)}." if options else ""


def _least(variants: Sequence[WireVariant]) -> WireVariant | None:
    """Return the smallest variant for which no larger variant is clearly faster; None if there are no variants."""
    found = None
    for each in sorted(variants, key=lambda each: (each.servers, each.batches_per_push)):
        if found is None or each.times >= WORTH_IT * found.times:
            found = each
    return found


def _gain(candidate: Candidate) -> str:
    """Return how much faster a candidate is than bsp."""
    if candidate.measured and candidate.effect != "exact":
        return f"reaches the last loss of bsp {candidate.times:.1f} times sooner than bsp, measured with one seed"
    return f"{candidate.times:.1f} times as fast as bsp"


def _with_its_price(candidate: Candidate) -> str:
    """Return a sentence that says how much faster a candidate is, and what it does to the result of training."""
    unknown = "" if candidate.measured else ": check the accuracy first"
    return f"{candidate.name}: {_gain(candidate)}; {EFFECTS[candidate.effect]}{unknown}."


def _caution(candidate: Candidate) -> str:
    """Return why a model is not recommended, but only named; "" if it is fast enough, or its loss was measured."""
    if candidate.measured or candidate.effect != "stale" or round(candidate.times, 1) >= ENOUGH:
        return ""
    return f" Below about {ENOUGH:g} times the speed of bsp, staleness may cost more time than is saved."


def _no_gain(bsp: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return why it is best to stay with bsp."""
    failing = [each for each in candidates if each.measured and not each.times]
    missed = (
        f" {' and '.join(run_name(each.sync, each.batch) for each in failing)} did not reach the last loss of bsp."
        if failing
        else ""
    )
    return (
        f"Workers wait for {bsp.waiting_share:.0%} of their time, and no other model is 10 % faster.{missed}"
    )


# -- Simulations of what helps if transfers take much of the time: servers on more machines, and larger pushes

FACTORS = (2, 4, 8)  # factors by which the number of servers is multiplied
BATCHES = (2, 4)  # numbers of batches from which a push is computed


class _Change(NamedTuple):
    batch: BatchSizing
    servers: int
    batches_per_push: int = 1
    wire: str = ""


def wire_variants(
    cluster: Cluster,
    rows: Sequence[Figures],
    *,
    seed: int,
    shards: int | None,
    data: Dataset | None,
    wire: str = "float32",
    tell: TellCount = lambda done, of, what: None,
) -> list[WireVariant]:
    """Simulate bsp with other numbers of servers, with larger pushes and with a codec.

    Changes are simulated only if transfers take much of the time under bsp. The number of servers and the codec are
    changed only if the cluster has a limited bandwidth. Otherwise, it is unknown how these changes would affect the
    recorded times of messages. Each change is compared with bsp and equal batches in `rows`. Changes with balanced
    batches are simulated only if `rows` contains bsp with balanced batches.

    Args:
        cluster: the cluster as it is.
        rows: the ranking of the models on this cluster.
        seed: random seed of the ranking.
        shards: number of shards in the ranking; None for one per server.
        data: data of the ranking, if any.
        wire: format in which gradients and weights travel in the ranking.
        tell: progress callback.
    """
    of_bsp = {row.batch: row for row in rows if row.sync == "bsp" and row.sound}
    if "equal" not in of_bsp or all(row.transfer_share < WIRE_SHARE for row in of_bsp.values()):
        return []
    limited = cluster.size_bytes and any(
        math.isfinite(cluster.bandwidth_of(worker)) for worker in range(cluster.workers)
    )
    servers = [factor * cluster.servers for factor in FACTORS if limited]
    advice = advise_wire(cluster.optimizers, wire) if limited else None
    changes = [
        change
        for batch in of_bsp
        for change in [
            *(_Change(batch, count) for count in servers if count <= cluster.workers),
            *(_Change(batch, cluster.servers, batches) for batches in BATCHES),
            *([_Change(batch, cluster.servers, wire=advice.wire)] if advice is not None else []),
        ]
    ]
    tasks = [_task(change, cluster, of_bsp["equal"].until_s, seed, shards, data, wire) for change in changes]
    speed = of_bsp["equal"].speed
    return [
        WireVariant(
            batch=change.batch,
            servers=change.servers,
            batches_per_push=change.batches_per_push,
            wire=change.wire,
            reason=advice.reason if advice is not None and change.wire else "",
            # The gradients of a ranking without data are counted in pushes.
            times=row.speed * (change.batches_per_push if data is None else 1) / speed,
        )
        for change, row in zip(changes, run_tasks(tasks, tell), strict=True)
        if row.sound
    ]


def _task(
    change: _Change,
    cluster: Cluster,
    until_s: float,
    seed: int,
    shards: int | None,
    data: Dataset | None,
    wire: str,
) -> Task:
    """Return the simulation of a change. A push from several batches takes the sum of their compute times."""
    count, wire = change.batches_per_push, change.wire or wire
    compute_s = [Sum(base=cluster.compute(worker), count=count) for worker in range(cluster.workers)]
    changed = dataclasses.replace(
        cluster, servers=change.servers, compute_s=cluster.compute_s if count == 1 else compute_s
    )
    shards = None if shards is None else max(shards, change.servers)
    if data is not None:
        larger = msgspec.structs.replace(data, batch_size=data.batch_size * count)
        return Task(changed, "bsp", None, math.inf, seed, shards, larger, change.batch, wire=wire)
    if change.batch == "balanced":
        return balanced_task(changed, until_s, seed, shards, wire)
    return Task(changed, "bsp", None, until_s, seed, shards, wire=wire)
