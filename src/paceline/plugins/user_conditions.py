"""Conditions: a sync model that you define with a pull condition and a push condition.

Reference: FluentPS (Yao, Wu and Wang, CLUSTER 2019), section III, Algorithm 1, SetcondPull and SetcondPush.
Admission: A pull is answered on arrival if and only if the pull condition holds. Otherwise the pull is assigned to a
round and answered when that round closes. The current round, V_train, closes when the push condition holds.
State: The same as in every model that is defined by conditions (see `paceline.sync.conditions`).
Guarantee: Each push is handled exactly once: it is applied on arrival, averaged with the others of its round, or
dropped. Progress is not guaranteed: conditions that never hold stall all workers. The run detects and reports this.
If a condition raises an exception or returns anything other than True or False, the run reports this failure, and the
shard falls back to the last model that worked (BSP if there was none).
Use: To try out your own synchronization rule.
Deviations: With `push_scale="1/n"`, n is the largest number of workers that have been present at once (see
`paceline.sync.conditions`). In the paper, N is a constant.

>>> model = Conditions(pull=lambda state: state.gap <= 2)  # SSP(2), in one line
>>> shard = model.at_shard()

Each process that needs a condition looks it up by its name, so a trace of a run with conditions can be replayed
wherever the conditions can be imported. A run imports conditions only from modules that were named when the run was
launched. No message from another process can cause the import of any other module (see `require_named`).
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
from ..state import stateful
from ..sync.conditions import (
    EXECUTIONS,
    PUSH_SCALES,
    ConditionMachine,
    ConditionModel,
    PullState,
    PushState,
    everybody,
)
from ..sync.model import Fault

__all__ = ["Conditions", "UserMachine", "local_conditions", "require_named"]

PUSHES = ("apply", "average")

Condition = Callable[[Any], bool]

local_conditions: dict[str, Condition] = {}
"""Conditions that other processes cannot import, by name. The launcher sends those that a run uses to its servers."""

LOCAL = "local"  # the part before the colon in the names of local conditions

_numbers = itertools.count()


class Conditions(ConditionModel, frozen=True, repr_omit_defaults=True):
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
        models: the new sync models that a worker has requested.
        launched: the sync models that were given when the run was launched.
        imports: other modules that were named when the run was launched.

    Raises:
        ConfigurationError: a condition is from a module that was not named.
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
                    f"{model} cannot be sent to the servers during the run, because they cannot import its "
                    "conditions. Put these into a module, and launch the run with --import MODULE, or with "
                    "launch(imports=['MODULE'])."
                )
            raise ConfigurationError(
                f"conditions: the module of {name!r} was not named when the run was launched. Launch the run with "
                f"--import {module}, or with launch(imports=[{module!r}])."
            )


@stateful(fixed="_model _pull _push")
class UserMachine(ConditionMachine):
    """Runs Algorithm 1 with the user's conditions. If one fails, sets `fault` and calls none of them again."""

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
        if module != "__main__" and _imported(module, path) is condition:
            return f"{module}:{path}"
    for name, other in local_conditions.items():
        if other is condition:
            return name
    name = f"{LOCAL}:{path}-{next(_numbers)}"
    local_conditions[name] = condition
    return name


def _imported(module: str, path: str) -> object:
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
    why = "it was defined in a script or notebook that runs in another process"
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
