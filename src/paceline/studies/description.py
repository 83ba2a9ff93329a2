"""The description of a study, from its TOML file or the call of `paceline.study`, and the `Study` made from it.

All entries are checked here, before the first run begins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from ..core.layout import WireFormat
from ..core.lease import BATCH_SIZINGS, BatchSizing
from ..errors import ConfigurationError, unknown_name
from ..lab.clusters import load_cluster
from ..settings.checks import converted, read_toml
from ..sim import Cluster, Link, LogNormal, Occasional, Times, Uniform
from ..sync.plugins import load_models
from ..sync.schedule import read_schedule
from ..words import run_name
from .trained import SEED, TrainedProblem, Value, of_function, of_name, of_problem, of_script, source_digest

Point = tuple[tuple[str, Value], ...]
"""Values of the hyper-parameters of a grid, by name."""

Hyperparameters = Literal["translated", "raw"]
Tuning = Literal["each", "reference"]
Better = Literal["higher", "lower"]
MEANINGS, TUNINGS, BETTER = get_args(Hyperparameters), get_args(Tuning), get_args(Better)
Whole = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Grid = dict[str, Any]

FIRST_TUNING_SEED = 1_000_000
"""First seed of the runs in which hyper-parameters are chosen, if the study does not list these seeds."""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model with its notation and further entries. See `Contender`. Omitted entries are those of the whole study."""

    sync: str
    name: str = ""
    batch: BatchSizing = "equal"
    hyperparameters: Hyperparameters | None = None
    grid: Grid | None = None
    wire: str = "float32"


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The target of the runs.

    Attributes:
        metric: the metric that the training function logs.
        value: the value to be reached; None if the final value of a model sets the target.
        of: the model whose mean final value is to be reached on each cluster; "" if `value` is given.
        within: by how much the value may be worse than the final value of that model.
        better: "higher" or "lower"; by default "lower" if the metric is called a loss, an error or a perplexity.
    """

    metric: str
    value: float | None = None
    of: str = ""
    within: Annotated[float, Meta(ge=0)] = 0.0
    better: Better | None = None

    @property
    def higher_is_better(self) -> bool:
        """True if larger values of the metric are better."""
        if self.better is not None:
            return self.better == "higher"
        return not re.search("loss|error|perplexity", self.metric)


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of each run. A run that has not ended by itself ends at the first limit that it reaches.

    Attributes:
        seconds: virtual time in seconds.
        updates: number of updates.
        samples: number of samples in the pushes of all workers, including dropped ones.
    """

    seconds: Positive | None = None
    updates: Whole | None = None
    samples: Whole | None = None


class StudyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a study file, and the arguments of `paceline.study`. See `docs/how-to/study.md`."""

    models: list[str | ModelEntry]
    clusters: dict[str, Any]
    target: Target
    name: str = ""
    train: Any = None
    script: str = ""
    problem: str = ""
    seeds: Whole | list[Annotated[int, Meta(ge=0)]] = 5
    tuning_seeds: Whole | list[Annotated[int, Meta(ge=0)]] = 3
    reference: str = ""
    tuning: Tuning = "each"
    hyperparameters: Hyperparameters = "translated"
    grid: Grid = {}
    arguments: dict[str, Any] = {}
    budget: Budget = Budget()
    imports: list[str] = []
    paired: bool = True
    joint_batch: bool = False


class Contender(NamedTuple):
    """A model of the study.

    Attributes:
        name: its name in tables and figures.
        style: the notation on which its color in the figures depends.
        sync: the sync model, in the notation of the command line.
        batch: "equal" or "balanced".
        hyperparameters: "translated" or "raw".
        points: the combinations of hyper-parameters from which the best one is chosen.
        wire: format in which gradients and weights travel, in the notation of `--wire`.
    """

    name: str
    style: str
    sync: str
    batch: BatchSizing
    hyperparameters: Hyperparameters
    points: tuple[Point, ...]
    wire: str = "float32"

    @property
    def identity(self) -> list[Any]:
        """Plain values that identify the model, without the default `wire`, because earlier versions had no `wire`."""
        plain: list[Any] = msgspec.to_builtins(self._replace(style=""))
        return plain if self.wire != "float32" else plain[:-1]


class Study(NamedTuple):
    """A study whose parts have been found and checked.

    Attributes:
        name: title of the study.
        trained: what is trained.
        arguments: the hyper-parameters that have the same values in all runs.
        contenders: the models.
        clusters: the clusters by name.
        seeds: seeds of the runs that are evaluated.
        tuning_seeds: seeds of the runs in which hyper-parameters are chosen.
        reference: name of the model with which the other models are compared.
        tuning: "each" if each model has its own best hyper-parameters, "reference" if all models have those of the
            reference.
        target: the target of the runs.
        budget: the limits of each run.
        imports: modules that define the user's own sync models.
        folder: folder to which paths are relative.
        paired: True if runs with the same seed are compared with each other.
        joint_batch: True if the batch sizes of loaders are those of joint batches. See `paceline.distribute`.
    """

    name: str
    trained: TrainedProblem
    arguments: Mapping[str, Value]
    contenders: tuple[Contender, ...]
    clusters: Mapping[str, Cluster]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    reference: str
    tuning: Tuning
    target: Target
    budget: Budget
    imports: tuple[str, ...]
    folder: Path
    paired: bool
    joint_batch: bool

    def contender(self, name: str) -> Contender:
        """Return a model by its name."""
        return next(each for each in self.contenders if each.name == name)

    @property
    def identity(self) -> dict[str, Any]:
        """Plain values that two studies must share so that one study can go on with the runs of the other."""
        return {
            "train": [self.trained.kind, self.trained.title, self.trained.digest],
            "arguments": dict(self.arguments),
            "models": [each.identity for each in self.contenders],
            "clusters": {name: _digest(cluster) for name, cluster in self.clusters.items()},
            "seeds": list(self.seeds),
            "tuning_seeds": list(self.tuning_seeds),
            "reference": self.reference,
            "tuning": self.tuning,
            "metric": self.target.metric,
            "budget": msgspec.to_builtins(self.budget),
            "imports": {name: source_digest(sys.modules[name]) for name in self.imports},
            **({"joint_batch": True} if self.joint_batch else {}),
        }


def read_study_file(path: Path, imports: Sequence[str] = ()) -> Study:
    """Return the study that a TOML file describes. Paths in the file are relative to its folder.

    Args:
        path: the file.
        imports: further modules that define the user's own sync models.

    Raises:
        ConfigurationError: the file cannot be read, or an entry is not valid. The message names the entry.
    """
    values = read_toml(path, "the study", "Give the path of a TOML file.")
    try:
        return describe({"name": path.stem, **values}, path.parent, imports)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def describe(values: Mapping[str, Any], folder: Path, imports: Sequence[str] = ()) -> Study:
    """Return the study that the entries of a study file describe.

    Args:
        values: the entries. In Python, `train` may be a function object, and each cluster may be a `Cluster`.
        folder: folder to which paths are relative.
        imports: further modules that define the user's own sync models.

    Raises:
        ConfigurationError: an entry is not valid. The message names the entry.
    """
    file = converted(values, StudyFile, tables=TABLES, choices=CHOICES)
    trained = _trained(file, folder)
    modules = tuple(dict.fromkeys([*file.imports, *imports]))
    if modules and str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    load_models("", modules)
    clusters = _clusters(file.clusters, folder)
    contenders = _contenders(file)
    for contender in contenders:
        _require_runnable(contender, clusters)
    reference = _whole_name("reference", file.reference, contenders) if file.reference else contenders[0].name
    of = _whole_name("target.of", file.target.of, contenders) if file.target.of else ""
    if (file.target.value is None) == (not file.target.of):
        raise ConfigurationError(
            f"target has {'both' if file.target.of else 'neither'} a value {'and' if file.target.of else 'nor'} the "
            "name of a model in 'of', expected one of the two."
        )
    if file.target.within and not file.target.of:
        raise ConfigurationError(
            f"target.within is {file.target.within:g}, but it can only ease a target that a model sets: name the model "
            "in target.of, or omit within."
        )
    if file.tuning == "reference" and any(
        each.grid is not None for each in file.models if not isinstance(each, str)
    ):
        raise ConfigurationError(
            "tuning is 'reference', but a model has a grid of its own, expected the same grid for all models."
        )
    if file.tuning == "reference" and of not in ("", reference):
        raise ConfigurationError(
            f"tuning is 'reference', but the target is what {of!r} reaches, expected what the reference "
            f"{reference!r} reaches."
        )
    arguments = _entries("arguments", file.arguments, Value)
    for where, known in (("arguments", arguments), *(("grid", dict(each.points[0])) for each in contenders)):
        if SEED in known:
            raise ConfigurationError(
                f"[{where}] contains {SEED!r}, but each run has a seed of its own: list seeds in the entry 'seeds'."
            )
    seeds = _seeds("seeds", file.seeds, 0)
    tuning_seeds = _seeds("tuning_seeds", file.tuning_seeds, FIRST_TUNING_SEED)
    if both := set(seeds) & set(tuning_seeds):
        raise ConfigurationError(
            f"seeds and tuning_seeds both contain {min(both)}, expected different seeds, so that no hyper-parameters "
            "are chosen by the runs that are evaluated."
        )
    for contender in contenders:
        for key, _ in contender.points[0]:
            if key in arguments:
                raise ConfigurationError(
                    f"{key} is both in [grid] and in [arguments], expected it in one of them."
                )
        trained.require([*arguments, *(key for key, _ in contender.points[0])])
    return Study(
        name=file.name or trained.name,
        trained=trained,
        arguments=arguments,
        contenders=contenders,
        clusters=clusters,
        seeds=seeds,
        tuning_seeds=tuning_seeds,
        reference=reference,
        tuning=file.tuning,
        target=msgspec.structs.replace(file.target, of=of),
        budget=file.budget,
        imports=modules,
        folder=folder,
        paired=file.paired,
        joint_batch=file.joint_batch,
    )


def _trained(file: StudyFile, folder: Path) -> TrainedProblem:
    given = {"train": file.train, "script": file.script, "problem": file.problem}
    stated = [key for key, value in given.items() if value]
    if len(stated) != 1:
        raise ConfigurationError(
            f"the study has {' and '.join(stated) or 'nothing to train'}, expected one of train, script and problem."
        )
    if file.script:
        return of_script(file.script, folder)
    if file.problem:
        return of_problem(file.problem)
    if isinstance(file.train, str):
        return of_name(file.train, folder)
    if not callable(file.train):
        raise ConfigurationError(f"train is {file.train!r}, expected a function or its name.")
    return of_function(file.train)


def _clusters(entries: Mapping[str, Any], folder: Path) -> dict[str, Cluster]:
    if not entries:
        raise ConfigurationError("clusters is empty, so the study has no runs: name at least one cluster.")
    return {name: _cluster(name, entry, folder) for name, entry in entries.items()}


def _cluster(name: str, entry: Any, folder: Path) -> Cluster:
    """Return a cluster: the entry itself, a generated cluster, or one from a file, a recorded run or a paper."""
    if isinstance(entry, Cluster):
        return entry
    if isinstance(entry, Generator):
        return entry.cluster(name)
    if isinstance(entry, Mapping):
        if "kind" not in entry:
            raise ConfigurationError(
                f"clusters.{name}.kind is missing. Choices: {', '.join(sorted(GENERATORS))}. Any other cluster is "
                f'described in a file of its own, as in {name} = "cluster.toml".'
            )
        if entry["kind"] not in GENERATORS:
            raise unknown_name(f"kind of clusters.{name}", entry["kind"], GENERATORS)
        kind = GENERATORS[entry["kind"]]
        generator: Generator = converted(entry, kind, tables={"": kind}, where=f"clusters.{name}")
        return generator.cluster(name)
    if isinstance(entry, str):
        path = folder / entry
        try:
            return load_cluster(str(path) if path.exists() else entry)
        except ConfigurationError as error:
            raise ConfigurationError(f"clusters.{name}: {error}") from error
    raise ConfigurationError(
        f"clusters.{name} is {entry!r}, expected a cluster file, the directory of a recorded run, or a table such as "
        '{ kind = "jitter", workers = 8 }.'
    )


def _contenders(file: StudyFile) -> tuple[Contender, ...]:
    if not file.models:
        raise ConfigurationError("models is empty, so the study has no runs: name at least two models.")
    entries = [each if isinstance(each, ModelEntry) else ModelEntry(sync=each) for each in file.models]
    meanings = [each.hyperparameters or file.hyperparameters for each in entries]
    mixed = len(set(meanings)) > 1
    found = []
    for entry, meaning in zip(entries, meanings, strict=True):
        style = run_name(entry.sync, entry.batch, meaning if mixed else "raw", entry.wire)
        grid = file.grid if entry.grid is None else entry.grid
        name = entry.name or style
        found.append(Contender(name, style, entry.sync, entry.batch, meaning, _points(grid), entry.wire))
    for name in (names := [each.name for each in found]):
        if names.count(name) > 1:
            raise ConfigurationError(
                f"two models are called {name!r}: give one of them a name, as in {{ sync = ..., name = ... }}."
            )
    return tuple(found)


def _whole_name(key: str, name: str, contenders: Sequence[Contender]) -> str:
    """Return the whole name of a model. The name may be given without "translated" if this is unambiguous."""
    names = [each.name for each in contenders]
    alike = [each.name for each in contenders if run_name(each.sync, each.batch, wire=each.wire) == name]
    if name not in names and len(alike) != 1:
        raise unknown_name(f"model in {key}", name, names)
    return name if name in names else alike[0]


def _points(grid: Grid) -> tuple[Point, ...]:
    """Return all combinations of the values of a grid."""
    grid = _entries("grid", grid, list[Value])
    for key, values in grid.items():
        if not values:
            raise ConfigurationError(
                f"grid.{key} is empty, so the study has no runs: give at least one value."
            )
        if len(set(map(repr, values))) < len(values):
            raise ConfigurationError(f"grid.{key} contains a value twice: {values}.")
    return tuple(tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def _entries(where: str, table: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return a table whose entries may have any name, but must be of one type."""
    return {name: converted(value, kind, tables={}, where=f"{where}.{name}") for name, value in table.items()}


def _require_runnable(contender: Contender, clusters: Mapping[str, Cluster]) -> None:
    try:
        load_models(contender.sync)
        schedule = read_schedule(contender.sync)
        WireFormat.read(contender.wire).require_usable(contender.sync, common=schedule.lockstep)
        for cluster in clusters.values():
            schedule.require_runnable(cluster.workers, cluster.servers)
    except ConfigurationError as error:
        raise ConfigurationError(f"the model {contender.name!r}: {error}") from error


def _seeds(key: str, given: int | Sequence[int], first: int) -> tuple[int, ...]:
    seeds = tuple(range(first, first + given)) if isinstance(given, int) else tuple(given)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"{key} is {list(seeds)}, expected at least one seed, and none twice.")
    return seeds


TABLES: Mapping[str, type[msgspec.Struct]] = {
    "target": Target,
    "budget": Budget,
    r"models\[.*\]": ModelEntry,
    "": StudyFile,
}
"""Pattern of the place of a table in a study file -> the entries of the table."""

CHOICES = {"batch": BATCH_SIZINGS, "better": BETTER, "hyperparameters": MEANINGS, "tuning": TUNINGS}
"""Name of an entry -> the values that it may have."""


def _digest(cluster: Cluster) -> str:
    """Return a fingerprint of a cluster. The name of the cluster does not matter."""
    plain = msgspec.to_builtins(dataclasses.replace(cluster, name=""), enc_hook=_own_object)
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


def _own_object(value: object) -> object:
    """Return what identifies an object of the user that generates random times: its class's digest, and its attributes.

    The `repr` of the object would contain its address in memory, which differs between processes.
    """
    attributes = getattr(value, "__dict__", None)
    return repr(value) if attributes is None else [source_digest(type(value)), attributes]


# -- Clusters that are generated from the number of workers and the kind of difference between them -----------
#
# A worker that is neither slow nor disturbed takes about 1 s for a gradient. So times in a study are in units
# of the time that an undisturbed worker takes for a gradient.

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1)]


def near(mean_s: float) -> Uniform:
    """Return compute times that vary by up to 3 %."""
    return Uniform(low=0.97 * mean_s, high=1.03 * mean_s)


class Generator(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Base class of the kinds of clusters.

    Attributes:
        workers: number of workers.
        latency_s: latency of every message, in seconds.
    """

    workers: Count
    latency_s: Seconds = 0.02

    def times(self) -> tuple[Times, ...]:
        """Return the compute times of each worker."""
        return (near(1.0),) * self.workers

    def links(self) -> Mapping[int, Link]:
        """Return the workers whose network differs from that of the others."""
        return {}

    def cluster(self, name: str = "") -> Cluster:
        """Return the cluster."""
        return Cluster(compute_s=self.times(), latency_s=self.latency_s, links=self.links(), name=name)

    def some(self, share: float) -> int:
        """Return a share of the number of workers, rounded down."""
        return int(share * self.workers)


class Equal(Generator, frozen=True, kw_only=True, tag="equal"):
    """Workers that are equally fast, except for random differences of up to 3 %."""


class Steady(Generator, frozen=True, kw_only=True, tag="steady"):
    """The workers with the highest indices are always slower than the others.

    Attributes:
        slower: how many times longer a gradient of a slow worker takes.
        share: share of the workers that are slow.
    """

    slower: Factor = 2.0
    share: Share = 0.25

    def times(self) -> tuple[Times, ...]:
        slow = self.some(self.share)
        return (near(1.0),) * (self.workers - slow) + (near(self.slower),) * slow


class Jitter(Generator, frozen=True, kw_only=True, tag="jitter"):
    """All times vary at random, log-normally.

    Attributes:
        sigma: standard deviation of the natural logarithm of a time.
    """

    sigma: Annotated[float, Meta(gt=0)] = 0.5

    def times(self) -> tuple[Times, ...]:
        return (LogNormal(median=1.0, sigma=self.sigma),) * self.workers


class StudyPauses(Generator, frozen=True, kw_only=True, tag="pauses"):
    """From time to time, each worker is slow for a while.

    Attributes:
        slower: how many times longer a gradient takes while the worker is slow.
        lasting_s: how long the worker is slow, in seconds.
        every_s: length of the periods, in seconds. The worker is slow once in each period.
    """

    slower: Factor = 10.0
    lasting_s: Seconds = 5.0
    every_s: Seconds = 50.0

    def times(self) -> tuple[Times, ...]:
        slow = Occasional(base=near(1.0), factor=self.slower, lasting=self.lasting_s, every=self.every_s)
        return (slow,) * self.workers


class SlowLinks(Generator, frozen=True, kw_only=True, tag="slow-links"):
    """The messages of the workers with the highest indices take longer than those of the others.

    Attributes:
        message_s: time that a message from or to a slow worker takes, in seconds.
        share: share of the workers whose messages are slow.
    """

    message_s: Seconds = 0.5
    share: Share = 0.25

    def links(self) -> Mapping[int, Link]:
        slow = Link(to_server_s=self.message_s, from_server_s=self.message_s)
        return {self.workers - 1 - index: slow for index in range(self.some(self.share))}


GENERATORS: Mapping[str, type[Generator]] = {
    str(kind.__struct_config__.tag): kind for kind in (Equal, Steady, Jitter, StudyPauses, SlowLinks)
}
"""The kinds of clusters by name."""
