"""Splits the state of an optimizer into one state per shard, and joins the states of all shards.

The user's optimizer stores its state per parameter, but a shard holds segments of parameters. The state of a shard
maps "<segment>/<key>" to a tensor, where <segment> is the position of the segment in the shard and <key> is torch's
name for the entry, for example "0/momentum_buffer".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.layout import Layout, ShardSlice
from ..errors import ProtocolError
from .optimizers import PER_PARAMETER_STATE
from .vectors import Vectors

__all__ = ["join_state", "segments_of_state", "slice_state"]


def slice_state(
    bounds: ShardSlice, parameters: Sequence[torch.Tensor], state: Mapping[Any, Mapping[str, Any]]
) -> Vectors:
    """Return the part of an optimizer's state that belongs to one shard.

    Args:
        bounds: the shard.
        parameters: the parameters, in the order of the layout.
        state: the optimizer's `state`: parameter -> key -> value. Values that are not tensors are omitted.
    """
    values: Vectors = {}
    for position, segment in enumerate(bounds.segments):
        for key, value in state.get(parameters[segment.parameter], {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            length = segment.stop - segment.start
            values[f"{position}/{key}"] = (
                value.to(_scalar_dtype())
                if key in PER_PARAMETER_STATE
                else value.reshape(-1)[segment.offset : segment.offset + length].clone()
            )
    return values


def join_state(
    layout: Layout, fetched: Iterable[tuple[ShardSlice, Vectors]]
) -> dict[int, dict[str, torch.Tensor]]:
    """Join the states of all shards. The result has the format of the "state" entry of a `state_dict()`."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for bounds, values in fetched:
        for name, value in values.items():
            position, _, key = name.partition("/")
            segment = bounds.segments[int(position)]
            parameter = layout.parameters[segment.parameter]
            entries = state.setdefault(segment.parameter, {})
            if key in PER_PARAMETER_STATE:
                entries[key] = value
                continue
            whole = entries.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype))
            whole.view(-1)[segment.offset : segment.offset + value.numel()] = value
    return dict(sorted(state.items()))


def segments_of_state(bounds: ShardSlice, state: Vectors) -> dict[str, tuple[int, str]]:
    """Split each name in a shard's state into a segment and a key: name -> (segment, key).

    Raises:
        ProtocolError: a name or a shape matches no segment of this shard.
    """
    places = {}
    sizes = {str(position): s.stop - s.start for position, s in enumerate(bounds.segments)}
    for name, value in state.items():
        position, _, key = name.partition("/")
        shape = () if key in PER_PARAMETER_STATE else (sizes.get(position),)
        if position not in sizes or tuple(value.shape) != shape:
            raise ProtocolError(
                f"optimizer state {name!r} of shape {list(value.shape)} matches no segment of this shard"
            )
        places[name] = int(position), key
    return places


def _scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch.optim creates step counts. `load_state_dict()` can change their dtype."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
