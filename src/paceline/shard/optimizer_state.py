"""Splits the state of an optimizer into one state per shard, and joins the states of all shards.

The user's optimizer stores its state per parameter, but a shard holds segments of parameters. The state of a shard
maps "<segment>/<key>" to a tensor, where <segment> is the position of the segment in the shard and <key> is torch's
name for the entry, for example "0/momentum_buffer". Entries that are Python numbers, which only optimizers that are
not torch's have, become tensors without dimensions under a marked key, for example "0/#steps".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.protocol.layout import Layout, ShardSlice
from ..errors import ProtocolError
from .optimizers import PER_PARAMETER_STATE
from .vectors import Vectors

__all__ = [
    "NUMBER",
    "entry_of",
    "join_state",
    "require_plausible_state",
    "segments_of_state",
    "slice_state",
    "tensors_of",
]

# An optimizer state is rejected if it is larger than STATE_LIMIT_FACTOR times the shard's weights, plus
# STATE_SLACK_BYTES, because optimizers store only a few vectors as large as the weights.
STATE_LIMIT_FACTOR = 8
STATE_SLACK_BYTES = 16 * 1024 * 1024

NUMBER = "#"
"""First character of the keys of Python numbers."""


def slice_state(
    bounds: ShardSlice, parameters: Sequence[torch.Tensor], state: Mapping[Any, Mapping[str, Any]]
) -> Vectors:
    """Return the part of an optimizer's state that belongs to one shard.

    Args:
        bounds: the shard.
        parameters: the parameters, in the order of the layout.
        state: the optimizer's `state`: parameter -> key -> value. Values that are neither tensors nor numbers are
            omitted.
    """
    values: Vectors = {}
    single = PER_PARAMETER_STATE | {
        key
        for parameter, entries in state.items()
        for key, value in tensors_of(entries).items()
        if not value.dim() and parameter.dim()
    }
    for position, segment in enumerate(bounds.segments):
        for key, value in tensors_of(state.get(parameters[segment.parameter], {})).items():
            length = segment.stop - segment.start
            if key in PER_PARAMETER_STATE:
                value = value.to(_scalar_dtype())
            elif key not in single and key[0] != NUMBER:
                value = value.reshape(-1)[segment.offset : segment.offset + length].clone()
            values[f"{position}/{key}"] = value
    return values


def tensors_of(entries: Mapping[str, Any]) -> Vectors:
    """Return those entries of one parameter's state that are tensors or numbers, as tensors."""
    return {
        key if isinstance(value, torch.Tensor) else f"{NUMBER}{key}": value
        if isinstance(value, torch.Tensor)
        else torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        for key, value in entries.items()
        if isinstance(value, torch.Tensor | int | float)
    }


def entry_of(key: str, value: torch.Tensor) -> dict[str, Any]:
    """Return an entry of one parameter's state, given its key and value in a result of `tensors_of`."""
    return {key[1:]: value.item()} if key.startswith(NUMBER) else {key: value}


def join_state(layout: Layout, fetched: Iterable[tuple[ShardSlice, Vectors]]) -> dict[int, dict[str, Any]]:
    """Join the states of all shards. The result has the format of the "state" entry of a `state_dict()`."""
    state: dict[int, dict[str, Any]] = {}
    for bounds, values in fetched:
        for name, value in values.items():
            position, _, key = name.partition("/")
            segment = bounds.segments[int(position)]
            parameter = layout.parameters[segment.parameter]
            entries = state.setdefault(segment.parameter, {})
            if key in PER_PARAMETER_STATE or not value.dim():
                entries.update(entry_of(key, value))
                continue
            whole = entries.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype))
            whole.view(-1)[segment.offset : segment.offset + value.numel()] = value
    return dict(sorted(state.items()))


def segments_of_state(
    bounds: ShardSlice, state: Vectors, *, scalars: bool = False
) -> dict[str, tuple[int, str]]:
    """Split each name in a shard's state into a segment and a key: name -> (segment, key).

    Args:
        bounds: the shard.
        state: the state of the shard.
        scalars: True if any entry may have one number per parameter, False if only those in `PER_PARAMETER_STATE`.

    Raises:
        ProtocolError: a name or a shape matches no segment of this shard.
    """
    places = {}
    sizes = {str(position): s.stop - s.start for position, s in enumerate(bounds.segments)}
    for name, value in state.items():
        position, _, key = name.partition("/")
        shape = () if key in PER_PARAMETER_STATE else (sizes.get(position),)
        fits = tuple(value.shape) == shape or (scalars and not value.dim())
        if position not in sizes or not key or not fits:
            raise ProtocolError(
                f"optimizer state {name!r} of shape {list(value.shape)} matches no segment of this shard"
            )
        places[name] = int(position), key
    return places


def _scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch.optim creates step counts. `load_state_dict()` can change their dtype."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def require_plausible_state(shard: ShardSlice, size_bytes: int) -> None:
    """Raise `ProtocolError` if a shard's optimizer state of this size is larger than that of any optimizer."""
    limit_bytes = STATE_LIMIT_FACTOR * shard.size_bytes + STATE_SLACK_BYTES
    if size_bytes > limit_bytes:
        raise ProtocolError(f"an optimizer state has {size_bytes} bytes, expected at most {limit_bytes}")
