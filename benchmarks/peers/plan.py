"""The compared systems and the conditions, the runs that are left, and the table of results.

Each system first makes a run under the first condition with each of four learning rates. With the best of these rates,
each system then makes a run with each of three other seeds under each condition. Results are kept in a file. A run
whose result is in the file is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from paceline.errors import ConfigurationError

__all__ = [
    "CONDITIONS",
    "LIMIT_S",
    "RATES",
    "RESULTS",
    "SEEDS",
    "SYSTEMS",
    "TARGET",
    "Case",
    "Condition",
    "Outcome",
    "Row",
    "Session",
    "System",
    "append_results",
    "best_rate",
    "left",
    "quick_cases",
    "read_results",
    "rows",
]

RESULTS = Path(__file__).with_name("results.jsonl")
TARGET = 2.6  # validation loss at which a run ends, in nats per byte
LIMIT_S = 90.0  # a run is ended if it has not reached the target after this time
RATES = (0.002, 0.004, 0.008, 0.016)
TUNING_SEED = 0
SEEDS = (1, 2, 3)
KILLED_S, RETURNED_S = (
    3.0,
    4.0,
)  # the times at which machine 2 is switched off and on again, counted from the beginning of the training


class Condition(NamedTuple):
    """The speeds and the links of three machines, and whether one of them is killed."""

    title: str
    slowness: tuple[float, float, float] = (1.0, 1.0, 1.0)
    rate: str = "1gbit"
    killed: bool = False

    @property
    def slow_link(self) -> bool:
        """True if systems send fewer bytes, by the means that their documentation describes."""
        return self.rate != "1gbit"


CONDITIONS = {
    "equal": Condition("equal, 1 Gbit/s"),
    "unequal": Condition("one 3 x slower, 1 Gbit/s", (1.0, 1.0, 3.0)),
    "slow-link": Condition("one 3 x slower, 20 Mbit/s", (1.0, 1.0, 3.0), "20mbit"),
    "killed": Condition("equal, 1 Gbit/s, one killed that returns", killed=True),
}
"""All conditions by name. The learning rates are chosen under the first condition."""


class System(NamedTuple):
    """A system, and how the benchmark uses it.

    Attributes:
        title: its name in the table.
        program: module of `benchmarks.peers` that its workers run.
        survives: True if the other workers go on when a worker is lost.
        without: name of a condition -> why the system has no result there.
        rate_of: system whose learning rate this system uses, too; "" if the rate is chosen by comparing runs of this
            system.
        options: options of `paceline serve`.
        slow_link_options: further options for slow links.
    """

    title: str
    program: str
    survives: bool = True
    without: Mapping[str, str] = {}
    rate_of: str = ""
    options: tuple[str, ...] = ()
    slow_link_options: tuple[str, ...] = ("--wire", "int4", "--servers", "3", "--remote-servers", "2")


ENDS = {"killed": "cannot: all workers end"}
SYSTEMS = {
    "ddp": System("DDP, equal shares", "collectives", False, ENDS),
    "ddp-by-hand": System("DDP, shares by hand", "collectives", False, {"equal": "as DDP", **ENDS}, "ddp"),
    "post-local-sgd": System("PostLocalSGD, H 4", "collectives", False, ENDS),
    "accelerate-local-sgd": System("Accelerate LocalSGD, H 8", "collectives", False, ENDS),
    "torchft-ddp": System("torchft DDP", "with_torchft", survives=False),  # an assertion of torchft fails
    "torchft-local-sgd": System("torchft LocalSGD, H 8", "with_torchft"),
    "torchft-diloco": System("torchft DiLoCo, H 8", "with_torchft"),
    "hivemind": System("hivemind, gradients", "with_hivemind"),
    "hivemind-local": System("hivemind, local updates", "with_hivemind"),
    "paceline-bsp": System("Paceline bsp", "with_paceline", options=("--sync", "bsp")),
    "paceline-balanced": System(
        "Paceline bsp, balanced", "with_paceline", options=("--sync", "bsp", "--batch", "balanced")
    ),
    "paceline-asp": System("Paceline asp", "with_paceline", options=("--sync", "asp")),
    "paceline-auto": System("Paceline auto", "with_paceline", options=("--sync", "auto")),
}
"""All systems by name."""


class Case(NamedTuple):
    """A run: a system under a condition."""

    system: str
    condition: str
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.system}, {self.condition}, rate {self.lr:g}, seed {self.seed}"


class Session(msgspec.Struct, frozen=True, tag="session"):
    """The circumstances of the runs that follow in the file."""

    date: str
    machine: str
    busy_share: float  # part of all cores that other programs used at the beginning
    versions: dict[str, str]


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """The outcome of a run.

    Attributes:
        time_s: seconds from the first step to the first weights whose validation loss is at most the target; None if
            the target was not reached.
        sent_mb: megabytes (10**6 bytes) that the three machines sent until the target was reached, or in the whole run
            if the target was not reached.
        lost_samples: samples that workers had computed or received, but that had no part in the weights that the
            system has agreed on (see `work`).
        loss: validation loss of the last weights.
        returned_s: seconds from the return of the machine to the first gradient of its new worker; None if there was no
            such gradient.
        failure: how the run has failed; "" if it has not failed.
    """

    system: str
    condition: str
    lr: float
    seed: int
    time_s: float | None
    sent_mb: float
    lost_samples: int
    loss: float | None
    returned_s: float | None = None
    failure: str = ""

    @property
    def case(self) -> Case:
        """The run."""
        return Case(self.system, self.condition, self.lr, self.seed)


def read_results(path: Path) -> tuple[list[Session], list[Outcome]]:
    """Return the content of a file of results; nothing if there is no file. An incomplete last line is ignored.

    Raises:
        ConfigurationError: the file cannot be read, or it is not a file of results.
    """
    decoder = msgspec.json.Decoder(Session | Outcome)
    try:
        found = decoder.decode_lines(_whole_lines(path.read_bytes()) if path.exists() else b"")
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} is not a file of results: {error}. Choose another file.") from error
    sessions = [each for each in found if isinstance(each, Session)]
    return sessions, [each for each in found if isinstance(each, Outcome)]


def append_results(path: Path, *results: Session | Outcome) -> None:
    """Append results to a file. The first result replaces an incomplete last line."""
    path.touch()
    with path.open("r+b") as file:
        file.truncate(len(_whole_lines(file.read())))
        file.seek(0, 2)
        file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in results))


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def best_rate(outcomes: Iterable[Outcome], system: str) -> float | None:
    """Return the learning rate with which a system was fastest, or had the least loss if no rate reached the target.

    Return None if a run with one of the four rates has not been made yet, or if all of these runs have failed.
    """
    system = SYSTEMS[system].rate_of or system
    first = next(iter(CONDITIONS))
    own = [
        each
        for each in outcomes
        if (each.system, each.condition, each.seed) == (system, first, TUNING_SEED) and each.lr in RATES
    ]
    if {each.lr for each in own} != {*RATES}:
        return None
    best = min(own, key=lambda each: (_or_inf(each.time_s), _or_inf(each.loss)))
    return None if best.loss is None else best.lr


def left(outcomes: Sequence[Outcome]) -> Iterator[Case]:
    """Yield the remaining runs that can be made now: at first, only the runs by which the learning rates are chosen."""
    done = {each.case for each in outcomes}
    first = next(iter(CONDITIONS))
    tuned = [name for name, system in SYSTEMS.items() if not system.rate_of]
    tuning = [Case(name, first, lr, TUNING_SEED) for lr, name in product(RATES, tuned)]
    if missing := [case for case in tuning if case not in done]:
        yield from missing
        return
    for seed, condition, (name, system) in product(SEEDS, CONDITIONS, SYSTEMS.items()):
        lr = best_rate(outcomes, name)
        if condition not in system.without and lr is not None:
            case = Case(name, condition, lr, seed)
            if case not in done:
                yield case


def quick_cases() -> list[Case]:
    """Return a run of each system. If a system can continue without a machine, a machine is killed in its run."""
    return [
        Case(
            name,
            "killed" if system.survives else next(each for each in CONDITIONS if each not in system.without),
            RATES[1],
            1,
        )
        for name, system in SYSTEMS.items()
    ]


class Row(msgspec.Struct, frozen=True):
    """The results of a system under a condition: medians over the seeds.

    Attributes:
        system: title of the system.
        condition: title of the condition.
        lr: its learning rate.
        runs: number of runs.
        reached: number of runs that have reached the target.
        time_s: median time; None unless more than half of the runs have reached the target.
        low_s, high_s: the shortest and the longest time of the runs that have reached the target.
        remark: the text in the place of a time; "" if there is a time.
    """

    system: str
    condition: str
    lr: float | None = None
    runs: int = 0
    reached: int = 0
    time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    sent_mb: float | None = None
    lost_samples: float | None = None
    returned_s: float | None = None
    remark: str = ""


def rows(outcomes: Sequence[Outcome], seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Return a row for each system and condition."""
    found = []
    for condition, name in product(CONDITIONS, SYSTEMS):
        own = [each for each in outcomes if (each.system, each.condition) == (name, condition)]
        if condition in SYSTEMS[name].without:
            remark = SYSTEMS[name].without[condition]
        else:
            tuning = [each.failure for each in outcomes if (each.system, each.seed) == (name, TUNING_SEED)]
            remark = f"failed: {tuning[0]}" if len(tuning) == len(RATES) and all(tuning) else "not measured"
        found.append(_row(name, condition, [each for each in own if each.seed in seeds], remark))
    return found


def _row(name: str, condition: str, own: Sequence[Outcome], otherwise: str) -> Row:
    titles = SYSTEMS[name].title, CONDITIONS[condition].title
    if not own:
        return Row(*titles, remark=otherwise)
    times_s = sorted(_or_inf(each.time_s) for each in own)
    reached = [time_s for time_s in times_s if time_s < math.inf]
    middle_s = median(times_s)
    failures = [each.failure for each in own if each.failure]
    ended = [each for each in own if not each.failure]
    remark = "" if middle_s < math.inf else f"failed: {failures[0]}" if failures else f"not in {LIMIT_S:g} s"
    backs = [each.returned_s for each in own if each.returned_s is not None]
    return Row(
        *titles,
        lr=own[0].lr,
        runs=len(own),
        reached=len(reached),
        time_s=None if remark else middle_s,
        low_s=min(reached, default=None),
        high_s=max(reached, default=None),
        sent_mb=median(each.sent_mb for each in ended) if ended else None,
        lost_samples=median(each.lost_samples for each in ended) if ended else None,
        returned_s=median(backs) if backs else None,
        remark=remark,
    )


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value
