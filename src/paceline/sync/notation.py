"""Sync models as text: the notation used on the command line, in traces and in messages.

name:key=value,key=value      one model
model|model|...               one model for each shard
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar, get_args

import msgspec

from ..errors import ConfigurationError, first_line, unknown_name
from .model import SyncModel

M = TypeVar("M", bound=SyncModel)

AUTO = "auto"
"""If this word is given instead of a model, the coordinator chooses the models of the run; see `core.auto`."""

MODELS: dict[str, type[SyncModel]] = {}
"""The registered sync models by name."""


def register(model: type[M]) -> type[M]:
    """Register a class of sync models under its `name`. Can be used as a class decorator.

    A registered model can be used like the models of this package: on the command line, in live runs, in simulations,
    in traces, for individual shards, and as the new model when the model changes during a run. Every process that
    uses the model must import its module. To have the module imported, list it in `--import` or
    `launch(imports=[...])`, or install it with an entry point in the group `paceline.sync`.

    Raises:
        ConfigurationError: the name is invalid or already taken, or `parse(str(model()))` differs from `model()`.

    Example:
        >>> @register
        ... class Patient(SyncModel, frozen=True):
        ...     name = "patient"
        ...     patience: int = 3
        >>> parse("patient:patience=5")
        Patient(patience=5)
        >>> del MODELS["patient"]
    """
    name = getattr(model, "name", "")
    if not re.fullmatch("[a-z][a-z0-9-]*", name):
        raise ConfigurationError(
            f"{model.__qualname__}.name is {name!r}, expected lower-case letters, digits and hyphens, for example "
            "'my-model'."
        )
    if name == AUTO:
        raise ConfigurationError(
            f"the name 'auto' of {model.__qualname__} means that a run chooses its models itself; choose another name."
        )
    known = MODELS.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (model.__module__, model.__qualname__):
        raise ConfigurationError(
            f"the name {name!r} of {model.__qualname__} is taken by {known.__module__}.{known.__qualname__}; choose "
            "another name."
        )
    MODELS[name] = model
    parse.cache_clear()
    if all(not field.required for field in msgspec.structs.fields(model)):
        try:
            require_registered(model())
        except ConfigurationError:
            del MODELS[name]
            raise
    return model


def require_registered(model: SyncModel) -> None:
    """Raise `ConfigurationError` unless this model is registered and can be written as text and read back."""
    kind = type(model)
    if MODELS.get(getattr(model, "name", "")) is not kind:
        raise ConfigurationError(
            f"the sync model {kind.__qualname__} is not registered; decorate its class with @paceline.sync.register."
        )
    if parse(str(model)) != model:
        raise ConfigurationError(
            f"the sync model {model!r} is written as {str(model)!r}, which parses as {parse(str(model))!r}. Each "
            "field must be a number, or text without commas, and __post_init__ must not change any field."
        )


def misplaced_auto(text: str) -> ConfigurationError:
    """Return the error for "auto" where only a model can stand."""
    return ConfigurationError(
        f"sync {text!r}: 'auto' is not a sync model, but chooses the models for the whole run. So it stands alone, "
        "without parameters: --sync auto, or in Python sync='auto'. It cannot be a step of a schedule or the model "
        "of one shard, and it cannot be requested during a run."
    )


def several_models(text: str) -> ConfigurationError:
    """Return the error for a list of models where only one model can stand."""
    return ConfigurationError(
        f"sync {text!r} lists several models. Say when each of them begins, as in 'bsp@0,asp@100', or write '|' "
        "between the models of shard 0, shard 1 and so on, as in 'bsp|asp'."
    )


def unknown_model(name: str) -> ConfigurationError:
    """Return the error for a name under which no model is registered."""
    known = unknown_name("sync model", name, [*MODELS, AUTO])
    return ConfigurationError(f"{known} For a model of your own, name its module with --import.")


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> SyncModel:
    """Parse `name:key=value,key=value`. The parameters of the base model, if any, may follow the model's own.

    Raises:
        ConfigurationError: a name or a value is not valid. The message suggests the closest known name.

    >>> parse("spec-sync:base=ssp,staleness=4")
    SpecSync(base=SSP(staleness=4))
    """
    name, _, rest = text.strip().partition(":")
    listed = [item.partition(":")[0].strip() for item in text.split(",")]
    if AUTO in listed:
        raise misplaced_auto(text)
    if any(item in MODELS for item in listed[1:]):
        raise several_models(text)
    if name not in MODELS:
        raise unknown_model(name)
    model = MODELS[name]
    fields = {field.name: field for field in msgspec.structs.fields(model)}
    given: dict[str, str] = {}
    of_base: list[str] = []
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigurationError(
                f"sync model {text!r}: {item!r} does not have the form key=value, as in 'ssp:staleness=3'."
            )
        if key not in fields and "base" in given:
            of_base.append(item)
            continue
        if not fields:
            raise ConfigurationError(
                f"unknown parameter of sync model {name!r}: {key!r}. This model has no parameters."
            )
        if key not in fields:
            raise unknown_name(f"parameter of sync model {name!r}:", key, fields)
        if key in given:
            raise ConfigurationError(f"sync model {text!r}: {key!r} is given twice.")
        given[key] = value
    missing = [key for key, field in fields.items() if field.required and key not in given]
    if missing:
        raise ConfigurationError(
            f"sync model {text!r} needs a value for {missing[0]}, as in {_example(model, missing[0])!r}."
        )
    values: dict[str, object] = {}
    for key, value in given.items():
        if key == "base":
            colon = "," if ":" in value else ":"
            values[key] = parse(colon.join([value, ",".join(of_base)]) if of_base else value)
        else:
            values[key] = _value(text, key, value, fields[key].type)
    try:
        return model(**values)  # the constructor checks the values
    except ConfigurationError:
        raise
    except Exception as error:  # a user's own model may raise any exception
        raise ConfigurationError(f"sync model {text!r} cannot be created: {first_line(error)}.") from error


def parse_shards(text: str) -> tuple[SyncModel, ...]:
    """Parse one model, or one model per shard, separated by "|". Raise `ConfigurationError` if a model is not valid.

    >>> parse_shards("bsp|ssp:staleness=1")
    (BSP(), SSP(staleness=1))
    """
    return tuple(parse(part) for part in text.split("|"))


def notation(models: Sequence[SyncModel]) -> str:
    """Return the text that `parse_shards` parses as these models. If all models are equal, the text names one model."""
    return str(models[0]) if len(set(models)) == 1 else "|".join(map(str, models))


def require_shards(models: Sequence[SyncModel], shards: int) -> None:
    """Raise `ConfigurationError` unless these models can run together on this number of shards.

    There must be one model, or one per shard. A model with `whole_job` cannot be combined with other models, and a
    model with `one_shard` cannot run on several shards.
    """
    if shards > 1 and (only := next((model for model in models if model.one_shard), None)):
        raise ConfigurationError(
            f"{only} needs a single shard, but this job has {shards}: pushes reach the shards in different orders, "
            "and this model would apply a push at one shard and drop it at another. Use one server and one shard."
        )
    if len(models) not in (1, shards):
        raise ConfigurationError(
            f"{notation(models)!r} names {len(models)} sync models for {shards} shards; give one, or one per shard."
        )
    if len(set(models)) > 1 and (alone := next((model for model in models if model.whole_job), None)):
        raise ConfigurationError(
            f"{notation(models)!r}: {alone} applies to the whole job, so all shards must use it."
        )


def _example(model: type[SyncModel], key: str) -> str:
    return f"{model.name}:{key}={ {'pull': 'module:function', 'delay_s': '0.5'}.get(key, '2') }"


def _value(text: str, key: str, value: str, kind: object) -> float | Fraction | str:
    """Return the value of a parameter: a number, a fraction such as 1/3, or text if the parameter accepts text."""
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigurationError(f"sync model {text!r}: {key} is {value!r}, expected true or false.")
        return value.lower() == "true"
    if kind not in (int, float) and not get_args(kind):
        return value
    try:
        number = Fraction(value) if "/" in value and Fraction in get_args(kind) else float(value)
    except (ValueError, ZeroDivisionError):
        if str in get_args(kind):
            return value
        raise ConfigurationError(f"sync model {text!r}: {key} is {value!r}, expected a number.") from None
    return int(number) if number % 1 == 0 else number
