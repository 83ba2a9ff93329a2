"""Conditions: a sync model that is defined by a pull condition and a push condition of your own.

Reference: FluentPS (Yao, Wu and Wang, CLUSTER 2019), section III, Algorithm 1, SetcondPull and SetcondPush.
Admission: A pull is answered on arrival if and only if the pull condition holds. Otherwise it is filed under a round
and answered when that round closes. The round V_train closes when the push condition holds.
State: As in every model that is defined by conditions; see `paceline.sync.conditions`.
Guarantee: Each push is handled exactly once: it is applied on arrival, averaged with the others of its round, or
dropped. Progress is not guaranteed: conditions that never hold stall all workers, which the run detects and reports.
If a condition raises an exception or returns anything other than True or False, the run reports this failure, and the
shard falls back to the last model that worked (BSP if there was none).
Use: To try out a synchronization rule of your own.
Deviations: None.

>>> model = Conditions(pull=lambda state: state.gap <= 2)  # SSP(2), in one line
>>> shard = model.at_shard()

Each process that needs a condition looks it up by its name, so a trace of a run with conditions can be replayed
wherever the conditions can be imported. A run imports conditions only from modules that were named when the run was
launched. No message over a connection can cause the import of another module (see `require_named`).
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import msgspec

from ..errors import ConfigurationError, unknown_name
from ..sync.conditions import EXECUTIONS, ConditionMachine, ConditionModel, PullState, PushState, everybody
from ..sync.model import Fault

__all__ = ["Conditions", "UserMachine", "local_conditions", "require_named"]

PUSHES = ("apply", "average")

Condition = Callable[[Any], bool]

local_conditions: dict[str, Condition] = {}
"""Name -> condition, for conditions that other processes cannot import. They are passed on to child processes."""

LOCAL = "local"  # the module part in the names of these conditions

_numbers = itertools.count()


class Conditions(ConditionModel, frozen=True, repr_omit_defaults=True):
    """A sync model that is defined by a pull condition and a push condition.

    Attributes:
        pull: pull condition: a function of a `PullState`, or its name as "module:function" (a function is stored by
            its name). If it returns True, the pull is answered immediately.
        push: push condition: a function of a `PushState`, or its name as "module:function". If it returns True, the
            round is complete. By default, a round is complete when every live worker has pushed it.
        pushes: "apply" to apply each push on arrival, or "average" to apply the mean of a round's pushes when the
            round closes. With "average", a push that arrives after its round has closed is dropped.
        significance: "on" to measure |g| / |w| for each push, or "off".
    """

    name = "conditions"

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
    def whole_job(self) -> bool:
        return self.pushes == "average"

    def require_runnable(self, workers: int) -> None:
        _find(self.pull)
        _find(self.push)

    def at_shard(self, seed: int = 0, shard: int = 0) -> UserMachine:
        return UserMachine(self)


def require_named(models: Iterable[object], launched: Iterable[object], imports: Sequence[str]) -> None:
    """Refuse conditions from modules that were not named when the run was launched.

    Args:
        models: the models to which the run is to change.
        launched: the models with which the run was launched.
        imports: other modules that were named at the launch.

    Raises:
        ConfigurationError: a condition is from another module. The message says what to do.
    """
    known = {name for model in launched if isinstance(model, Conditions) for name in (model.pull, model.push)}
    modules = {*(name.partition(":")[0] for name in known), *imports} - {LOCAL}
    for model in models:
        for name in (model.pull, model.push) if isinstance(model, Conditions) else ():
            module = name.partition(":")[0]
            if not name or name in known or module in modules:
                continue
            if module == LOCAL:
                raise ConfigurationError(
                    f"{model} cannot be sent to the servers during the run. Put its conditions into a module, and "
                    "name this module at the launch with --import MODULE, or launch(imports=['MODULE'])."
                )
            raise ConfigurationError(
                f"conditions: the module of {name!r} was not named when the run was launched. Name it there with "
                f"--import {module}, or launch(imports=[{module!r}])."
            )


class UserMachine(ConditionMachine):
    """Algorithm 1 with conditions that may fail. A failure sets `fault`; then no further condition is called."""

    def __init__(self, model: Conditions) -> None:
        super().__init__(
            self._watched(f"the pull condition {model.pull}", _find(model.pull)),
            self._watched(f"the push condition {model.push}", _find(model.push)) if model.push else everybody,
            average=model.pushes == "average",
            execution=EXECUTIONS[model.execution],
            scale_by_live=model.push_scale == "1/n",
        )

    def _watched(self, what: str, condition: Condition) -> Callable[[PullState | PushState], bool]:
        """Return a condition that does not raise: if `condition` fails, it sets `fault` and returns False."""

        def holds(state: PullState | PushState) -> bool:
            if self.fault is not None:
                return False
            try:
                verdict = condition(state)
            except (Exception, SystemExit) as error:  # report it with the user's part of the traceback
                own = error.__traceback__.tb_next if error.__traceback__ is not None else None
                text = "".join(traceback.format_exception(type(error), error, own))
                self.fault = Fault(f"{what} raised {type(error).__name__}: {error}", text)
                return False
            if type(verdict) is not bool:
                self.fault = Fault(f"{what} returned {verdict!r}, expected True or False")
                return False
            return verdict

        return holds


def _name_of(key: str, condition: object) -> str:
    """Return the name of a condition. If the condition cannot be imported, the name is valid in this process only."""
    if isinstance(condition, str):
        module, colon, path = condition.partition(":")
        if not (module and colon and path):
            raise ConfigurationError(
                f"conditions: {key} is {condition!r}, expected a function, or its name as 'module:function'."
            )
        return condition
    if not callable(condition):
        raise ConfigurationError(
            f"conditions: {key} is {condition!r}, expected a function of one argument that returns True or False."
        )
    module = getattr(condition, "__module__", "") or ""
    path = getattr(condition, "__qualname__", type(condition).__qualname__)
    with suppress(ImportError, AttributeError):
        if module != "__main__" and _imported(module, path) is condition:
            return f"{module}:{path}"
    for name, other in local_conditions.items():
        if other is condition:
            return name
    name = f"{LOCAL}:{path}-{next(_numbers)}"
    local_conditions[name] = condition
    return name


def _imported(module: str, path: str) -> object:
    """Return the object `path` of a module. Raise `ImportError` or `AttributeError` if the module has none."""
    found: object = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            raise ImportError(f"{part!r} is a module; name it before the colon")
    return found


def _find(name: str) -> Condition:
    """Return the condition with this name.

    Raises:
        ConfigurationError: the condition cannot be imported in this process.
    """
    if not name or name in local_conditions:
        return local_conditions.get(name, everybody)
    module, _, path = name.partition(":")
    why = "it was defined in a script or a notebook of another process"
    found: object = None
    if module != LOCAL:
        try:
            found = _imported(module, path)
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
