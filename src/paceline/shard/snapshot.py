"""A snapshot of the weights and buffers of the model, by their names in the script's `state_dict()`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import safetensors.torch
import torch

from ..core.protocol.layout import Layout
from ..core.protocol.model_spec import FrozenSpec
from ..files import Unfinished
from .frozen_files import read_frozen
from .vectors import Vectors, parameter_views

__all__ = ["WeightsSnapshot", "named_weights"]


class WeightsSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of the weights and buffers of the model.

    Attributes:
        state_dict: name -> tensor, as in the model's `state_dict()`. A tied weight appears under each of its names.
        versions: for each shard, the number of updates that its weights include; -1 if the number is unknown.
        absent: names of the tensors that are missing or incomplete because a shard could not be read.
        frozen: the frozen parameters whose values the servers do not have, because every worker has loaded the same.
    """

    state_dict: dict[str, torch.Tensor]
    versions: tuple[int, ...]
    absent: tuple[str, ...] = ()
    frozen: tuple[FrozenSpec, ...] = ()

    def __repr__(self) -> str:
        return f"WeightsSnapshot({len(self.state_dict)} tensors, versions={self.versions})"

    def completed(self, run_dir: Path) -> WeightsSnapshot:
        """Return the snapshot with the frozen parameters that are in files in the run directory."""
        read = {
            spec.name: tensor for spec in self.frozen if (tensor := read_frozen(run_dir, spec)) is not None
        }
        left = tuple(spec for spec in self.frozen if spec.name not in read)
        return msgspec.structs.replace(self, state_dict=self.state_dict | read, frozen=left)

    def save(self, path: Path) -> Path:
        """Write the tensors to a file in safetensors format, which is then complete or absent. Return its path."""
        with Unfinished(path) as place:
            safetensors.torch.save_file(
                {name: tensor.contiguous() for name, tensor in self.state_dict.items()}, place
            )
        return path


def named_weights(layout: Layout, vectors: Vectors) -> dict[str, torch.Tensor]:
    """Return copies of all parameters in the flat vectors, as a dictionary from name to tensor.

    Tied parameters appear under all of their names.
    """
    return {
        name: view.clone()
        for p, view in zip(layout.parameters, parameter_views(layout, vectors), strict=True)
        for name in p.names
    }
