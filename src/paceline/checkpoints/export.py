"""Exports a checkpoint to the format of `torch.distributed.checkpoint`, which FSDP and other trainers load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from .reading import Checkpoint


def export_distributed(checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the weights and the optimizers' states of a checkpoint for `torch.distributed.checkpoint.load`.

    The states refer to parameters by name, like the results of `get_model_state_dict` and `get_optimizer_state_dict`.
    The states have the names "model", "optimizer" and, if there are further optimizers, "optimizer-1" and so on.

    Args:
        checkpoint: directory of the checkpoint.
        folder: directory to write to. The directory is created if necessary.

    Raises:
        CheckpointError: the checkpoint is not whole.
        OSError: a file cannot be written.

    Example (`model` and `optimizer` are the objects of the script):

        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    """
    source = Checkpoint(Path(checkpoint))
    state: dict[str, Any] = {"model": source.state_dict}
    for index, record in enumerate(source.manifest.optimizers):
        own, names = source.optimizers[index], record.parameters
        state[f"optimizer-{index}" if index else "optimizer"] = {
            "state": {names[position]: entries for position, entries in own["state"].items()},
            "param_groups": [
                {**group, "params": [names[position] for position in group["params"]]}
                for group in own["param_groups"]
            ],
        }
    save(state, checkpoint_id=folder, no_dist=True)
