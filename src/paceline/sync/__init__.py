"""Synchronization models: who may go on, who waits. Pure: events in, actions out.

One paper's model per file. `parse` reads the notation of the command line, `name:key=value,key=value`;
`MODELS` is the table of all of them. No module here reads a clock, the environment or a global random source.

>>> parse("ssp:staleness=4")
SSP(staleness=4)
>>> str(ElasticBSP())
'elastic-bsp:lookahead=15'
"""

from __future__ import annotations

from typing import get_args

import msgspec

from ..errors import ConfigurationError, unknown_name
from .asp import ASP
from .bsp import BSP
from .drop_stragglers import DropStragglers
from .dsps import DSPS
from .dssp import DSSP
from .elastic_bsp import ElasticBSP
from .model import Machine, SyncModel
from .pssp import PSSP, DynamicPSSP
from .ssp import SSP

__all__ = [
    "ASP",
    "BSP",
    "DSPS",
    "DSSP",
    "MODELS",
    "PSSP",
    "SSP",
    "AnySyncModel",
    "DropStragglers",
    "DynamicPSSP",
    "ElasticBSP",
    "Machine",
    "SyncModel",
    "parse",
]

AnySyncModel = BSP | ASP | SSP | DSSP | DSPS | PSSP | DynamicPSSP | DropStragglers | ElasticBSP
"""What a message or a trace may hold; msgspec tells them apart by their tag."""

MODELS: dict[str, type[AnySyncModel]] = {model.name: model for model in get_args(AnySyncModel)}


def parse(text: str) -> AnySyncModel:
    """Read `name:key=value,key=value`.

    Raises:
        ConfigurationError: naming the unknown model or key with the nearest known one, or the bad value.
    """
    name, _, rest = text.strip().partition(":")
    if name not in MODELS:
        raise unknown_name("sync model", name, MODELS)
    model = MODELS[name]
    fields = {field.name: field for field in msgspec.structs.fields(model)}
    values: dict[str, object] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigurationError(
                f"sync model {text!r}: {item!r} is not key=value, as in 'ssp:staleness=3'."
            )
        if not fields:
            raise ConfigurationError(f"unknown key of sync model {name!r}: {key!r}; it takes none.")
        if key not in fields:
            raise unknown_name(f"key of sync model {name!r}:", key, fields)
        if key in values:
            raise ConfigurationError(f"sync model {text!r}: {key!r} is given twice.")
        values[key] = _value(text, key, value, fields[key].type)
    missing = [key for key, field in fields.items() if field.required and key not in values]
    if missing:
        raise ConfigurationError(f"sync model {text!r} needs {missing[0]}, as in '{name}:{missing[0]}=2'.")
    return model(**values)  # type: ignore[arg-type]  # each model checks its own values


def _value(text: str, key: str, value: str, kind: object) -> float | str:
    """A number, or a word where the key takes one."""
    try:
        number = float(value)
    except ValueError:
        if kind is str or str in get_args(kind):
            return value
        raise ConfigurationError(f"sync model {text!r}: {key} is {value!r}, expected a number.") from None
    return int(number) if number.is_integer() else number
