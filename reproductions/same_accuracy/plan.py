"""Which runs the table consists of: problems, clusters, numbers of workers, sync models, rates and seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paceline.errors import ConfigurationError
from paceline.sim import Cluster
from paceline.studies.description import Generator, Jitter, Steady, StudyPauses

from ..ensembles.problems import Problem
from ..exhibit import known
from .digits import DigitsCNN, DigitsMLP
from .families import FAMILIES, NORMALIZED
from .quadratics import Quadratic
from .ratings import Ratings
from .text import TextGPT

FACTORS = (1.0, 0.5, 0.25)
"""The learning rates of the table, as shares of the best one for bsp."""

TUNING_SEEDS = (100, 101, 102)
SEEDS = tuple(range(8))
WORKERS = (4, 16, 40)

CLUSTERS: dict[str, Callable[[int], Generator]] = {
    "steady 3x": lambda n: Steady(workers=n, slower=3.0),
    "jitter": lambda n: Jitter(workers=n),
    "pauses": lambda n: StudyPauses(workers=n),
}
"""The clusters by name and number of workers. A usual gradient takes 1 s."""

MODELS: dict[str, Callable[[int], str]] = {
    "bsp": lambda n: "bsp",
    "asp": lambda n: "asp",
    "ssp": lambda n: "ssp:staleness=3",
    "dssp": lambda n: "dssp",
    "dsps": lambda n: "dsps",
    "pssp": lambda n: "pssp",
    "spec-sync": lambda n: "spec-sync",
    "naive-waiting": lambda n: "naive-waiting:delay_s=0.3",
    "ringmaster": lambda n: f"ringmaster:threshold={n}",
    "elastic-bsp": lambda n: "elastic-bsp",
    "drop-stragglers": lambda n: f"drop-stragglers:quorum={n - n // 4}",
    "rennala": lambda n: f"rennala:batch={n}",
}
"""The models by name, in the notation of the command line for a number of workers. The first one is the reference."""

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "digits-mlp": DigitsMLP,
    "digits-cnn": DigitsCNN,
    "text-gpt": TextGPT,
    "ratings": Ratings,
    "quadratic-8": lambda: Quadratic(8),
    "quadratic-64": lambda: Quadratic(64),
    "quadratic-256": lambda: Quadratic(256),
    **FAMILIES,
    **NORMALIZED,
}
"""The problems by name."""


@functools.cache
def problem_of(name: str) -> Problem:
    """Return a problem by its name."""
    return PROBLEMS[name]()


def sign_of(problem: str) -> float:
    """Return 1 if a larger quality is better, and -1 if it is a loss."""
    return 1.0 if problem_of(problem).higher_is_better else -1.0


GPT_MODELS = ("bsp", "asp", "elastic-bsp")
GPT_PLACES = (("steady 3x", 4),)


FAMILY_MODELS = ("bsp", "asp", "elastic-bsp")
FAMILY_PLACES = (("steady 3x", 4), ("steady 3x", 16))
NORMALIZED_MODELS = ("bsp", "asp", "ssp", "elastic-bsp", "drop-stragglers")

MANY = 40
MODELS_OF_MANY = ("bsp", "asp", "ssp", "dssp", "elastic-bsp")
"""The models that `MANY` workers train under in all clusters. The others train only in the first cluster."""


def covered(problem: str, cluster: str, workers: int, model: str) -> bool:
    """Return True if a problem is part of the table for a cluster under a model.

    The table is meant to take four hours on two cores. So the GPT, whose runs take 300 times as long as those of the
    perceptron, and the perceptron with other optimizers are trained only in some clusters. Many workers train under
    most models only in the first cluster.
    """
    if problem in FAMILIES or problem in NORMALIZED:
        models = FAMILY_MODELS if problem in FAMILIES else NORMALIZED_MODELS
        return model in models and (cluster, workers) in FAMILY_PLACES
    if problem == "text-gpt":
        return model in GPT_MODELS and (cluster, workers) in GPT_PLACES
    return workers < MANY or model in MODELS_OF_MANY or cluster == next(iter(CLUSTERS))


def kinds_of(problem: str, model: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return those of the given kinds of hyper-parameters with which a problem is trained under a model."""
    if model == "bsp":
        return ("raw",)
    return tuple(kind for kind in kinds if problem not in NORMALIZED or kind == "translated")


def factors_of(problem: str) -> tuple[float, ...]:
    """Return the learning rates with which a problem is trained, as shares of the best one for bsp."""
    return FACTORS[:1] if problem.startswith("small-gpt") else FACTORS


COSTS_S = {
    "digits-mlp": (1.0, 0.45),
    "digits-cnn": (15.0, 0.45),
    "text-gpt": (370.0, 12.0),
    "ratings": (2.0, 1.1),
    "quadratic-8": (0.5, 0.35),
    "quadratic-64": (0.5, 0.35),
    "quadratic-256": (0.5, 0.35),
    **dict.fromkeys(FAMILIES, (2.0, 0.5)),
    **dict.fromkeys(NORMALIZED, (100.0, 20.0)),
}
"""Problem -> approximate time for 48 runs on one core, in seconds, and what each worker adds."""


class Scope(NamedTuple):
    """The part of the table that is asked for."""

    problems: Sequence[str]
    clusters: Sequence[str]
    workers: Sequence[int]
    models: Sequence[str]

    @classmethod
    def chosen(
        cls,
        problems: Iterable[str],
        clusters: Iterable[str],
        workers: Iterable[int],
        models: Iterable[str],
    ) -> Scope:
        """Return the scope with these names. No names stand for all names. The model bsp is always part of the scope.

        Raises:
            ConfigurationError: a name is unknown.
        """
        return cls(
            known("problem", problems, PROBLEMS),
            known("cluster", clusters, CLUSTERS),
            _known_workers(workers),
            list(dict.fromkeys(["bsp", *known("model", models, MODELS)])),
        )


def _known_workers(counts: Iterable[int]) -> list[int]:
    wanted = list(counts)
    for count in wanted:
        if count < 4:
            raise ConfigurationError(
                f"--workers is {count}, but a quarter of the workers are slow: at least 4."
            )
    return wanted or list(WORKERS)


class Job(NamedTuple):
    """A cluster under a model, on which some problems are trained along the same schedules."""

    cluster: str  # name of the cluster
    workers: int  # number of workers
    model: str  # name of the model
    problems: tuple[str, ...]  # names of the problems

    @property
    def sync(self) -> str:
        """The sync model, in the notation of the command line."""
        return MODELS[self.model](self.workers)


def jobs(scope: Scope) -> list[Job]:
    """Return the jobs of a scope: the small ones first, and bsp before the models that are compared with it."""
    every = [
        Job(cluster, workers, model, tuple(p for p in scope.problems if covered(p, cluster, workers, model)))
        for workers in scope.workers
        for model in scope.models
        for cluster in scope.clusters
    ]
    return [job for job in every if job.problems]


def cluster_of(name: str, workers: int) -> Cluster:
    """Return a cluster by its name and its number of workers."""
    return CLUSTERS[name](workers).cluster(f"{name}, {workers} workers")
