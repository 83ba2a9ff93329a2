"""The program that observes a script: `python probe.py FOLDER ITERATIONS TIMEOUT SCRIPT ARGUMENTS`.

This program is run once alone, and once as the script of a run with several workers. The observations are written to
a file in FOLDER (see `observations`): `alone.jsonl`, or `worker-<index>.jsonl`. The script ends after ITERATIONS
steps of one optimizer, or after TIMEOUT seconds. The functions whose calls are observed are replaced before the
script begins.
"""

from __future__ import annotations

import logging
import math
import os
import random
import runpy
import signal
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.lab.observations import Kind, Observations, ScriptObservation
from paceline.shard.vectors import digest
from paceline.train import data, epochs, session
from paceline.train import prepare as preparing
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.sources import length_of
from paceline.train.training import how_to_distribute, unwatch_steps

PATIENCE = 10
"""Factor by which the limit of `iterations` steps grows while a scheduler that needs a metric has not been stepped."""

LEAST_COMPARED = 4
"""Minimum size of a batch in which a loss is recognized as one that compares the samples with one another.

The labels of such a loss are 0, 1, 2, ... In a smaller batch, other losses may have these labels by chance.
"""

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND

TORCH = str(Path(torch.__file__).parent) + os.sep
PACELINE = str(Path(__file__).parents[1]) + os.sep

STANDARD = (*{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")}, "<")
"""Prefixes of the names of files that belong to Python."""

LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        TORCH,
        PACELINE,
        "<",
    }
)
"""Prefixes of the names of files that do not belong to the user."""


class Enough(BaseException):
    """Raised to end the script."""


class Probe:
    """Observes what a script does in this process.

    Args:
        folder: the folder for the observations.
        iterations: number of steps of one optimizer after which the script ends.
    """

    def __init__(self, folder: Path, iterations: int) -> None:
        joined = session.current()
        name = "alone" if joined is None else f"worker-{joined.worker}"
        self._observations = Observations(folder / f"{name}.jsonl")
        self._own = str(folder)
        self._iterations = iterations
        self._steps: Counter[int] = Counter()  # id of an optimizer -> number of its steps
        # Scheduler -> the user's frame that created it, as file and line. Schedulers are compared by identity.
        self._created: dict[Any, tuple[str, int]] = {}
        # True while there is a scheduler that needs a metric and has not been stepped yet
        self._awaits_metric = False
        self._initialized = False

    def note(self, kind: Kind, detail: str = "", frame: FrameType | None = None) -> None:
        """Write an observation. `frame` is the innermost frame that may belong to the user; None for no frame."""
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            self._add(kind, detail)
        else:
            self._add(kind, detail, frame.f_code.co_filename, frame.f_lineno)

    def install(self) -> None:
        """Replace the functions whose calls are observed, and install hooks."""
        unwatch_steps()  # this probe observes the steps itself
        sys.addaudithook(self._audit)
        register_optimizer_step_post_hook(self._stepped)
        register_module_forward_pre_hook(self._forward)
        handler = _Warnings(lambda text: self.note("warned", text))
        logging.getLogger("paceline").addHandler(handler)
        for name in ("clip_grad_norm_", "clip_grad_norm"):
            self._observe(
                [torch.nn.utils, torch.nn.utils.clip_grad], name, lambda *a: ("clipped", _name_of(a[0]))
            )
        for owner, name, label in (
            (torch, "manual_seed", "torch.manual_seed"),
            (random, "seed", "random.seed"),
        ):
            self._observe(
                [owner], name, lambda *a, label=label: ("seeded", f"{label}({', '.join(map(repr, a[1:]))})")
            )
        self._observe(
            [torch, torch.serialization], "save", lambda *a: ("wrote", path_of(a[2]) if len(a) > 2 else "")
        )
        for name in ("worker_index", "worker_count", "is_main"):
            self._observe(
                [session, sys.modules["paceline"]], name, lambda *a, name=name: ("asked", name), direct=False
            )
        self._observe_comparisons()
        self._observe([torch.utils.data.DataLoader], "__len__", lambda *a: ("measured", str(id(a[1]))))
        self._observe([data.DistributedLoader], "__len__", lambda *a: ("measured part", ""))
        self._observe_distribution()
        self._observe_schedules()
        self._observe_loops()

    def _observe(
        self,
        owners: Iterable[Any],
        name: str,
        observed: Callable[..., tuple[Kind, str]],
        *,
        direct: bool = True,
    ) -> None:
        """Observe the calls of a function.

        Args:
            owners: the modules or classes of which the function is an attribute.
            name: name of the function.
            observed: given the function and the arguments of a call, returns the kind and the detail to write.
            direct: True to observe only calls from files of the user, not from other libraries.
        """
        for owner in owners:
            original = getattr(owner, name, None)
            if original is None:
                continue

            def call(*arguments: Any, _original: Any = original, **options: Any) -> Any:
                frame = sys._getframe(1)
                if not direct or is_users(frame.f_code.co_filename):
                    kind, detail = observed(_original, *arguments)
                    self.note(kind, detail, frame)
                return _original(*arguments, **options)

            setattr(owner, name, wraps(original)(call))

    def _observe_comparisons(self) -> None:
        """Observe losses for which the other samples of a batch are the negatives, as in contrastive training.

        Such a loss is a cross entropy of a square matrix whose targets are the diagonal of the matrix.
        """
        original = torch.nn.functional.cross_entropy

        @wraps(original)
        def cross_entropy(input: Any, target: Any, *arguments: Any, **options: Any) -> Any:
            if compares_samples(input, target):
                self.note("compared", str(len(target)), sys._getframe(1))
            return original(input, target, *arguments, **options)

        torch.nn.functional.cross_entropy = cross_entropy

    def _observe_distribution(self) -> None:
        original, following, followed = data.distribute_at, preparing._following, preparing.follow

        def distribute_at(site: str, loader: Any, **options: Any) -> Any:
            self.note("distributed", str(id(loader)), sys._getframe(1))
            return original(site, loader, **options)

        def follow(scheduler: Any, optimizer: Any, given: Any, loader: Any) -> Any:
            batches = length_of(given) if given is not None else None
            detail = f"{length_of_schedule(scheduler) or 0} {batches or 0}"
            self._add("prepared schedule", detail, *self._created.get(scheduler, ("", 0)))
            return following(scheduler, optimizer, given, loader)

        def follow_in_framework(scheduler: Any, *arguments: Any, **options: Any) -> Any:
            self._add("prepared schedule", "0 0", *self._created.get(scheduler, ("", 0)))
            return followed(scheduler, *arguments, **options)

        for owner, name, replacement in (
            (data, "distribute_at", distribute_at),
            (preparing, "distribute_at", distribute_at),
            (preparing, "_following", follow),
            (preparing, "follow", follow_in_framework),
        ):
            setattr(owner, name, replacement)

    def _observe_schedules(self) -> None:
        """Observe where schedulers are created, and which schedulers the script steps itself."""
        for kind in (LRScheduler, *subclasses(LRScheduler)):
            for name, observed in (("__init__", self._created_scheduler), ("step", self._stepped_scheduler)):
                if name in vars(kind):
                    setattr(kind, name, observed(vars(kind)[name]))

    def _created_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def create(scheduler: Any, *arguments: Any, **options: Any) -> None:
            self._created.setdefault(scheduler, users_place(sys._getframe(1)))
            self._awaits_metric |= isinstance(scheduler, ReduceLROnPlateau)
            original(scheduler, *arguments, **options)

        return create

    def _stepped_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(scheduler: Any, *arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            if isinstance(scheduler, ReduceLROnPlateau):
                metric = options.get("metrics", arguments[0] if arguments else None)
                if metric is not None:
                    self._awaits_metric = False
                    self.note("metric", f"{float(metric):g}", frame)
            elif is_users(frame.f_code.co_filename):
                length = length_of_schedule(scheduler)
                described = type(scheduler).__name__ + (f" of {length} steps" if length else "")
                self._add("scheduled", described, *self._created.get(scheduler, ("", 0)))
            return original(scheduler, *arguments, **options)

        return step

    def _observe_loops(self) -> None:
        original = epochs.Epochs.__init__

        def begin(loop: Any, limits: Any, joined: Any) -> None:
            frame = sys._getframe(1)
            finite = {
                name: value for name, value in limits._asdict().items() if value not in (None, math.inf)
            }
            self.note("looped", f"{limits.epochs or 0} {finite.get('updates', 0)}", frame)
            if "epochs" not in finite:
                self.note("looped by progress", ", ".join(f"{k}={v:g}" for k, v in finite.items()), frame)
            original(loop, limits, joined)

        epochs.Epochs.__init__ = begin  # type: ignore[assignment,method-assign]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, mode, flags = arguments
        writes = set(mode) & set("wax+") if isinstance(mode, str) else flags & WRITE_FLAGS
        if not writes or not isinstance(path, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(path))
        frame = sys._getframe(1)
        if path.startswith(("/dev/", "/proc/", self._own)) or {"__pycache__", ".cache"} & {*Path(path).parts}:
            return
        if not is_called_by_paceline(frame, STANDARD):  # files that Paceline writes are not mistakes
            self.note("wrote", path, frame)

    def _forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._initialized and torch.is_grad_enabled():
            self._initialized = True
            self.note("initialized", digest(module.parameters()))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        frame = sys._getframe(1)
        # Paceline itself makes such steps inside a distributed optimizer, and in the test of an optimizer's class.
        if is_called_by_paceline(frame):
            return
        distributed = isinstance(optimizer, DistributedOptimizer)
        self.note("stepped", "distributed" if distributed else type(optimizer).__name__, frame)
        if not distributed:
            self.note("advised", how_to_distribute(frame))
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        self.note("gradient", digest(gradients), frame)
        self.note("hyper-parameters", hyper_parameters_of(optimizer), frame)
        self._steps[id(optimizer)] += 1
        enough = self._iterations * (PATIENCE if self._awaits_metric else 1)
        if self._steps[id(optimizer)] >= enough:
            raise Enough

    def finish(self, script: str) -> None:
        """Write which files of the user in the script's folder were imported."""
        folder = os.path.dirname(os.path.abspath(script)) + os.sep
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.startswith(folder) and is_users(file):
                self._observations.add(ScriptObservation("imported", file=file))

    def raised(self, error: BaseException) -> None:
        """Write that the script has failed, with the user's line that was last reached."""
        frames = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
        text = "".join(traceback.format_exception_only(error)).strip()
        if frames:
            self._add("raised", text, frames[-1].filename, frames[-1].lineno or 0)
        else:
            self._add("raised", text)

    def _add(self, kind: Kind, detail: str, file: str = "", line: int = 0) -> None:
        iteration = max(self._steps.values(), default=0)
        path = os.path.abspath(file) if file else ""
        self._observations.add(ScriptObservation(kind, detail, path, line, iteration))


class _Warnings(logging.Handler):
    """Passes the text of each warning to a function."""

    def __init__(self, receive: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        self._receive(record.getMessage())


def is_users(file: str) -> bool:
    """Return True if a file belongs to the user, not to Python, an installed library or Paceline."""
    return not file.startswith(LIBRARIES)


def is_called_by_paceline(frame: FrameType | None, between: tuple[str, ...] = (TORCH,)) -> bool:
    """Return True if a call comes from Paceline, either directly or through certain libraries.

    Args:
        frame: the innermost frame.
        between: prefixes of the names of the files of these libraries.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACELINE) or not file.startswith(between):
            return file.startswith(PACELINE)
        frame = frame.f_back
    return False


def users_place(frame: FrameType | None) -> tuple[str, int]:
    """Return the file and the line of the innermost frame that belongs to the user; ("", 0) if there is none."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def compares_samples(logits: Any, target: Any) -> bool:
    """Return True if the targets select the diagonal of the logits, which hardly happens by chance."""
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or target.dim() != 1:
        return False
    size = len(target)
    square = tuple(logits.shape) == (size, size) and size >= LEAST_COMPARED
    return square and not target.is_floating_point() and target.tolist() == list(range(size))


def subclasses(kind: type[Any]) -> list[type[Any]]:
    """Return all subclasses of a class."""
    return [each for direct in kind.__subclasses__() for each in (direct, *subclasses(direct))]


def length_of_schedule(scheduler: Any) -> int | None:
    """Return the number of steps for which a schedule is written; None if it has no such length.

    A warm-up is only a part of a schedule, so it has no such length.
    """
    if isinstance(scheduler, LinearLR | ConstantLR):
        return None
    if isinstance(scheduler, SequentialLR):
        last = length_of_schedule(scheduler._schedulers[-1])
        return last and last + scheduler._milestones[-1]
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(length := getattr(scheduler, name, None), int):
            return length
    return None


def hyper_parameters_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the hyper-parameters of all groups of an optimizer, in one line."""
    groups = [
        ", ".join(
            f"{key}={float(group[key]) if isinstance(group[key], torch.Tensor) else group[key]}"
            for key in optimizer.defaults
            if isinstance(group.get(key), float | int | tuple | torch.Tensor)
            and not isinstance(group[key], bool)
        )
        for group in optimizer.param_groups
    ]
    return "; ".join(groups)


def _name_of(function: Any) -> str:
    """Return the qualified name of a function."""
    return f"{function.__module__}.{function.__name__}"


def path_of(target: Any) -> str:
    """Return the path to which `torch.save` writes; "" if it writes to a file object."""
    return os.path.abspath(os.fsdecode(target)) if isinstance(target, str | os.PathLike) else ""


def main(folder: str, iterations: str, timeout_s: str, script: str, *arguments: str) -> None:
    """Run a script and observe it. If the script fails, its exception is raised again."""
    probe = Probe(Path(folder), int(iterations))
    sys.path[:] = [
        os.path.dirname(os.path.abspath(script)),
        *(p for p in sys.path if p != os.path.dirname(__file__)),
    ]
    sys.argv[:] = [script, *arguments]

    def late(*_: object) -> None:
        probe.note("timed out")
        raise Enough

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, float(timeout_s))
    probe.install()
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            probe.raised(end)
            raise
    except BaseException as error:
        probe.raised(error)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        probe.finish(script)


if __name__ == "__main__":
    main(*sys.argv[1:])
