"""Conditions: a sync model that you define with a pull condition and a push condition.

Reference: FluentPS (Yao, Wu and Wang, CLUSTER 2019), section III, Algorithm 1, SetcondPull and SetcondPush.
Admission: A pull is answered on arrival if and only if the pull condition holds. Otherwise the pull is assigned to a
round and answered when that round closes. The current round, V_train, closes when the push condition holds.
State: The same as in every model that is defined by conditions (see `paceline.sync.conditions`).
Guarantee: Each push is handled exactly once: it is applied on arrival, averaged with the other pushes of its round, or
dropped. Progress is not guaranteed: if the conditions never hold, all workers stall. The run detects and reports this.
If a condition raises an exception or returns anything other than True or False, the run reports this failure, and the
shard falls back to the last model that worked (BSP if there was none).
Use: To try out your own synchronization rule: docs/how-to/conditions.md shows examples.
Deviations: With `push_scale="1/n"`, n is the largest number of workers that have been present at the same time (see
`paceline.sync.conditions`). In the paper, N is a constant.

>>> model = Conditions(pull=lambda state: state.gap <= 2)  # SSP(2), in one line
>>> shard = model.at_shard()

Each process that needs a condition looks it up by its name, so a trace of a run with conditions can be replayed
wherever the conditions can be imported. A run imports conditions only from modules that were named when the run was
launched. No message from another process can cause the import of any other module (see `require_named`).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import runpy
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from ..errors import (
    ConfigurationError,
    InternalError,
    PacelineError,
    ProtocolError,
    UserCodeError,
    first_line,
    unknown_name,
)
from ..state import stateful
from .conditions import (
    EXECUTIONS,
    PUSH_SCALES,
    ConditionMachine,
    ConditionModel,
    PullState,
    PushState,
    everybody,
)
from .events import (
    IterationFinished,
    IterationStarted,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .model import Fault, SyncModel
from .notation import MODELS

PUSHES = ("apply", "average")

Condition = Callable[[Any], bool]

local_conditions: dict[str, Condition] = {}
"""Conditions that other processes cannot import, by name. The launcher sends the servers those that the run uses."""

LOCAL = "local"  # the part before the colon in the names of local conditions

_numbers = itertools.count()


class Conditions(ConditionModel):
    """A sync model that is defined by a pull condition and a push condition.

    Attributes:
        pull: pull condition: a function of a `PullState`, or the name of such a function as "module:function" (the
            model stores only this name). If the function returns True, the pull is answered immediately.
        push: push condition: a function of a `PushState`, or the name of such a function as "module:function". If the
            function returns True, the round is complete. By default, a round is complete when every live worker has
            pushed its gradient for this round.
        pushes: "apply" to apply each push on arrival, or "average" to apply the mean of a round's pushes when the
            round closes. With "average", a push that arrives after its round has closed is dropped.
        significance: "on" to measure |g| / |w| for each push, or "off".
    """

    name = "conditions"
    style = "#7FBC41", 1

    pull: Any
    push: Any = ""
    pushes: str = "apply"
    significance: str = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, choices in {"pushes": PUSHES, "significance": ("on", "off")}.items():
            if getattr(self, key) not in choices:
                raise unknown_name(f"{key} of {self.name}", str(getattr(self, key)), choices)
        msgspec.structs.force_setattr(self, "pull", _name_of("pull", self.pull))
        msgspec.structs.force_setattr(self, "push", _name_of("push", self.push) if self.push else "")

    @property
    def needs_significance(self) -> bool:
        return self.significance == "on"

    @property
    def agrees_on_means(self) -> bool:
        # A push condition may depend on the order of arrival, which differs between shards. And if a condition fails,
        # one shard alone falls back to another model.
        return False

    def require_runnable(self, workers: int) -> None:
        _find(self.pull)
        _find(self.push)

    def at_shard(self, seed: int = 0, shard: int = 0) -> UserMachine:
        return UserMachine(self)


def require_named(models: Iterable[object], launched: Iterable[object], imports: Sequence[str]) -> None:
    """Refuse conditions from modules that were not named when the run was launched.

    Args:
        models: the new sync models that a worker has requested.
        launched: the sync models that were given when the run was launched.
        imports: other modules that were named when the run was launched.

    Raises:
        ConfigurationError: a condition is from a module that was not named.
    """
    known = {name for model in launched if isinstance(model, Conditions) for name in (model.pull, model.push)}
    modules = {*(name.partition(":")[0] for name in known), *imports} - {LOCAL}
    for model in models:
        require_importable(model, known)
        for name in (model.pull, model.push) if isinstance(model, Conditions) else ():
            module = name.partition(":")[0]
            if not name or name in known or module in modules:
                continue
            raise ConfigurationError(
                f"conditions: the module of {name!r} was not named when the run was launched. Launch the run with "
                f"--import {module}, or with launch(imports=[{module!r}])."
            )


def require_importable(model: object, known: Collection[str] = ()) -> None:
    """Refuse conditions that servers cannot import, because they were defined in a script, a notebook or a function.

    Args:
        model: the new sync model that a worker has requested.
        known: names of the conditions that were given at launch; the launcher has sent the servers those that they
            cannot import.

    Raises:
        ConfigurationError: a condition cannot be imported.
    """
    names = (model.pull, model.push) if isinstance(model, Conditions) else ()
    if any(name.startswith(f"{LOCAL}:") and name not in known for name in names):
        raise ConfigurationError(
            f"{model} cannot be sent to the servers during the run, because they cannot import its conditions. Put "
            "these into a module, and launch the run with --import MODULE, or with launch(imports=['MODULE']). The "
            f"module must not be named {LOCAL!r}."
        )


@stateful(fixed="_model _pull _push")
class UserMachine(ConditionMachine):
    """Runs Algorithm 1 with the user's conditions. If a condition fails, sets `fault` and calls no condition again."""

    def __init__(self, model: Conditions) -> None:
        self._model = model
        self._pull = _find(model.pull)
        self._push = _find(model.push)
        super().__init__(
            self._answers,
            self._closes if model.push else everybody,
            average=model.pushes == "average",
            execution=EXECUTIONS[model.execution],
            scale=PUSH_SCALES[model.push_scale],
        )

    def _answers(self, state: PullState) -> bool:
        return self._holds("pull", self._model.pull, self._pull, state)

    def _closes(self, state: PushState) -> bool:
        return self._holds("push", self._model.push, self._push, state)

    def _holds(self, kind: str, name: str, condition: Condition, state: PullState | PushState) -> bool:
        """Return True if a condition holds. If it fails, set `fault` and return False."""
        if self.fault is not None:
            return False
        try:
            verdict = condition(state)
        except (Exception, SystemExit) as error:  # reported with only the user's part of the traceback
            own = error.__traceback__.tb_next if error.__traceback__ is not None else None
            text = "".join(traceback.format_exception(type(error), error, own))
            self.fault = Fault(f"the {kind} condition {name} raised {type(error).__name__}: {error}", text)
            return False
        if type(verdict) is not bool:
            self.fault = Fault(f"the {kind} condition {name} returned {verdict!r}, expected True or False")
            return False
        return verdict


def _name_of(key: str, condition: object) -> str:
    """Return the name of a condition. If the condition cannot be imported, add it to `local_conditions`."""
    if isinstance(condition, str):
        module, colon, path = condition.partition(":")
        if not (module and colon and path):
            raise ConfigurationError(
                f"conditions: {key} is {condition!r}, expected a function or its name in the form 'module:function'."
            )
        return condition
    if not callable(condition):
        raise ConfigurationError(
            f"conditions: {key} is {condition!r}, expected a function of one argument that returns True or False."
        )
    module = getattr(condition, "__module__", "") or ""
    path = getattr(condition, "__qualname__", type(condition).__qualname__)
    with suppress(ImportError, AttributeError):
        if module != "__main__" and _object_at(module, path) is condition:
            return f"{module}:{path}"
    for name, other in local_conditions.items():
        if other is condition:
            return name
    name = f"{LOCAL}:{path}-{next(_numbers)}"
    local_conditions[name] = condition
    return name


def _object_at(module: str, path: str) -> object:
    """Return the object at a dotted path in a module. Raise `ImportError` or `AttributeError` if there is none."""
    found: object = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            raise ImportError(f"{part!r} is a module; module names belong before the colon")
    return found


def _find(name: str) -> Condition:
    """Return the condition with this name.

    Raises:
        ConfigurationError: the condition cannot be imported in this process.
    """
    if not name or name in local_conditions:
        return local_conditions.get(name, everybody)
    module, _, path = name.partition(":")
    why = (
        "it was defined in a script or notebook that runs in another process, or in a module named "
        f"{LOCAL!r}, a name that stands for such scripts"
    )
    found: object = None
    if module != LOCAL:
        try:
            found = _object_at(module, path)
        except (ImportError, AttributeError) as error:
            why = str(error)
    if found is None:
        raise ConfigurationError(
            f"conditions: {name!r} cannot be imported here: {why}. Put the function into a module that every process "
            "of the run can import."
        )
    if not callable(found):
        raise ConfigurationError(f"conditions: {name!r} is {found!r}, expected a function.")
    return found


# -- Errors in code of the user that Paceline calls: sync models, conditions, and optimizers on the servers
#
# Such an error is neither the fault of the sender of a message nor a bug of Paceline. It ends the run or the
# simulation with a `UserCodeError`, which says what was called, where, and for which event. The traceback has
# only the user's frames, as it has for an error in a script.

PACKAGE = f"{Path(__file__).parent.parent}/"  # another package may be named paceline_...
# Python's own modules through which Paceline calls code of the user: context managers, `runpy`, and threads.
CALLERS = (
    PACKAGE,
    contextlib.__file__,
    runpy.__file__,
    str(Path(contextlib.__file__).with_name("threading.py")),
    "<frozen ",
)

EVENTS: dict[type, str] = {
    PushReceived: "it received the push of iteration {0.iteration} of worker {0.worker}",
    PullRequested: "it received the pull of iteration {0.iteration} of worker {0.worker}",
    TimerFired: "the timer of worker {0.worker} for iteration {0.iteration} fired",
    WorkerJoined: "worker {0.worker} joined",
    WorkerLost: "worker {0.worker} was lost",
    WorkerFinished: "worker {0.worker} finished",
    IterationFinished: "worker {0.worker} finished iteration {0.iteration}",
    IterationStarted: "worker {0.worker} started iteration {0.iteration}",
}
"""The events that a sync model receives, as clauses about the model."""


def blame(model: SyncModel, where: str, event: object, error: Exception) -> NoReturn:
    """Raise a `UserCodeError` for an error in a sync model, or in carrying out what the model has returned.

    Raise `error` itself if it is not the model's fault: a refused event, or an error in a model of this package.

    Args:
        model: the sync model.
        where: where its state machine runs, for example "shard 0".
        event: the event that the state machine has received, or a clause that says what was called.
        error: the exception that is being handled.
    """
    if isinstance(error, ProtocolError | UserCodeError) or type(model).__module__.startswith("paceline."):
        raise error
    told = user_traceback(error)
    when = EVENTS.get(type(event), str(event)).format(event)
    if told:
        # The context of the error would show Paceline's frames, too, so it is left out.
        raise UserCodeError(
            f"the sync model {model} raised {first_line(error)} at {where}, when {when}", told
        ) from None
    if isinstance(error, OSError | MemoryError):
        raise error
    what = error.what if isinstance(error, InternalError) else first_line(error)
    raise UserCodeError(
        f"the sync model {model} returned something that cannot be carried out at {where}, when {when}: {what}. "
        "Test the model with paceline.testing.check."
    ) from error


@contextmanager
def blaming(model: SyncModel, where: str, method: str) -> Iterator[None]:
    """Run a block that calls a method of the model or of its state machine. If the block fails, call `blame`."""
    try:
        yield
    except Exception as error:
        blame(model, where, f"its method {method} was called", error)


def report_of_user_code(error: BaseException) -> str:
    """Return the text that reports an error in code of the user; "" if the error is not in such code."""
    if isinstance(error, UserCodeError):
        return f"{error.reason}\n{error.traceback}".rstrip()
    return user_traceback(error).rstrip()


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception without the frames of Paceline; "" if no frame is left."""
    told = traceback.TracebackException.from_exception(error)
    if not _users_frames(told):
        return ""
    for part in _parts(told):
        part.stack = traceback.StackSummary.from_list(_users_frames(part))
    return "".join(told.format())


def script_traceback(error: BaseException) -> str:
    """Return the traceback of an exception that a script has raised. It begins with the frames of the script.

    The traceback has no frames of Paceline, so if the library was used incorrectly, the script's call is the last
    frame. Only if Paceline itself has failed does the traceback contain all frames below the script's call.
    """
    told = traceback.TracebackException.from_exception(error)
    innermost = told.stack[-1] if told.stack else None
    meant = isinstance(error, PacelineError) and not isinstance(error, InternalError)
    # An error in `__getattr__` means that the script asked for a name that does not exist.
    meant = meant or (innermost is not None and innermost.name == "__getattr__")
    ours = innermost is not None and innermost.filename.startswith(PACKAGE) and not meant
    for part in _parts(told):
        frames = list(_called(part)) if ours else _users_frames(part)
        # If the stack is None, the headline "Traceback (most recent call last)" is left out, too.
        part.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    return "".join(told.format())


def _parts(told: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield the parts of a traceback: the part of the exception, and those of the exceptions that led to it."""
    parts = [told]
    while parts:
        yield (part := parts.pop())
        parts += [each for each in (part.__cause__, part.__context__) if each is not None]


def _users_frames(told: traceback.TracebackException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code and of the code that it has called, without the frames of Paceline."""
    return [frame for frame in _called(told) if not frame.filename.startswith(PACKAGE)]


def _called(told: traceback.TracebackException) -> Iterator[traceback.FrameSummary]:
    """Return the frames of the user's code and of the code that it has called."""
    return dropwhile(lambda frame: frame.filename.startswith(CALLERS), told.stack)


# -- Loads user-defined sync models, from modules that users name and from installed packages ----------------
#
# A model registers itself when its module is imported (`paceline.sync.register`). Every process that reads
# the notation of the model must have imported that module. Users need not name the module if its package
# declares an entry point:
#
#     [project.entry-points."paceline.sync"]
#     buffered = "my_package.buffered"
#
# A message from another process never causes the import of a module.

GROUP = "paceline.sync"

NAME = re.compile(r"(?:^|[|,@=])\s*([a-z][a-z0-9-]*)")
"""Matches every model name in the notation of a schedule, and also some parameter values."""


def load_models(sync: object, imports: Iterable[str] = ()) -> None:
    """Import the modules that define the models of a run.

    Args:
        sync: notation of the sync models. Objects other than strings are ignored.
        imports: modules to import.

    Raises:
        ConfigurationError: a module, or an installed model, cannot be imported.
    """
    _import(imports)
    unknown = set(NAME.findall(sync)) - MODELS.keys() if isinstance(sync, str) else set()
    if unknown:
        for point in entry_points(group=GROUP):
            if point.name in unknown:
                try:
                    point.load()
                    _imported[point.module] = None
                except Exception as error:  # a module may raise any exception when it is imported
                    raise ConfigurationError(
                        f"the installed sync model {point.name!r} cannot be imported from {point.value}: {error!r}."
                    ) from error


def imported_modules() -> tuple[str, ...]:
    """Return the names of the imported modules, so that other processes can import the same models."""
    return tuple(_imported)


_imported: dict[str, None] = {}


def _import(names: Iterable[str]) -> None:
    for name in names:
        try:
            import_module(name)
            _imported[name] = None
        except ConfigurationError as error:  # for example because the name of a model is taken
            raise ConfigurationError(f"the module {name!r} cannot be imported: {error}") from error
        except Exception as error:  # a module may raise any exception when it is imported
            raise ConfigurationError(
                f"the module {name!r} cannot be imported: {error!r}. Name a module that is next to the script or on "
                "Python's module search path."
            ) from error


def modules_of(models: Sequence[SyncModel]) -> tuple[str, ...]:
    """Return the names of the modules outside Paceline that define these models. All processes must import them.

    Raises:
        ConfigurationError: a model is defined in a script, which other processes cannot import.
    """
    modules = []
    for model in models:
        module = type(model).__module__
        if module == "__main__":
            raise ConfigurationError(
                f"the sync model {model} is defined in the script itself, which the servers cannot import. Move the "
                "class into a module next to the script."
            )
        if not module.startswith("paceline."):
            modules.append(module)
    return tuple(dict.fromkeys(modules))
