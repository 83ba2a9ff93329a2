"""A store that updates matrices with an optimizer that needs whole tensors, and a vector with AdamW, for tests."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.shard.optimizers import make_optimizer
from paceline.shard.store import Push, Store
from paceline.sync.translation import Standing

__all__ = ["SETTINGS", "StoreTraining", "tensorwise_model"]

MATRICES = ((20, 12), (12, 20), (7, 5))
SETTINGS: dict[str, dict[str, Any]] = {
    "Muon": {"lr": 0.05, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.05, "weight_decay": 0.1},
}
"""Optimizer that needs whole tensors -> its hyper-parameters."""

HALF = Standing(share=0.5)


def tensorwise_model(name: str) -> ModelSpec:
    """Return a model whose matrices an optimizer trains that needs whole tensors, and AdamW a vector."""
    matrices = [Parameter((f"layer{i}",), shape, "float32") for i, shape in enumerate(MATRICES)]
    layout = Layout.of([*matrices, Parameter(("scale",), (40,), "float32", set_index=1)])
    first, second = (
        make_optimizer(kind, ({**settings},), [[torch.zeros(1, 1)]]).param_groups[0]
        for kind, settings in ((name, SETTINGS[name]), ("AdamW", {"lr": 0.01}))
    )
    first_settings, second_settings = (
        {key: value for key, value in group.items() if key != "params"} for group in (first, second)
    )
    optimizer = OptimizerSpec(name, (first_settings,), (0,) * len(matrices), whole=True)
    return ModelSpec(layout, optimizer, (), (OptimizerSpec("AdamW", (second_settings,), (0,)),))


class StoreTraining:
    """A store of one shard, to which two workers push gradients that are made anew in the same memory."""

    def __init__(self, described: ModelSpec, device: torch.device) -> None:
        [bounds] = described.sliced(1, "auto")
        generator = torch.Generator().manual_seed(1)
        self.weights = {
            name: torch.randn(stop - start, generator=generator)
            for name, (start, stop) in bounds.bounds.items()
        }
        optimizers = described.optimizers_over_layout
        self.store = Store(bounds, self.weights, optimizers, device=device)
        self._groups = [each.groups for each in optimizers]
        self._memory = [
            {name: torch.zeros_like(each) for name, each in self.weights.items()} for _ in range(2)
        ]
        self._generator = torch.Generator().manual_seed(2)
        self._present = bytearray(b"\1" * len(described.layout.parameters))

    def push(self, worker: int, iteration: int, set_index: int) -> None:
        vectors = {
            name: each
            for name, each in self._memory[worker].items()
            if (name == "float32") == (set_index == 0)
        }
        for each in vectors.values():
            each.normal_(generator=self._generator)
        push = Push(vectors, bytes(self._present), self._groups[set_index], set_index)
        self.store.put(worker, iteration, push)

    def step(self, iteration: int) -> None:
        """Make an update of each kind, and change a weight without one."""
        self._present[2] = iteration % 2  # a parameter that has no gradient in some steps
        for set_index in (0, 1):
            for worker in (0, 1):
                self.push(worker, iteration, set_index)
            self.store.apply([(0, iteration), (1, iteration)], [0.5, 0.5])
            self.push(0, iteration, set_index)
            self.store.apply([(0, iteration)], [1.0], HALF)
        if iteration == 3:
            values = {name: torch.full_like(each, 0.25) for name, each in self.weights.items()}
            self.store.put(0, iteration, Push(values, b"\1\0\0\0", ()))
            self.store.overwrite(0, iteration, 1)

    def go_on(self, before: StoreTraining) -> None:
        """Continue where another training has stopped, with its weights, its optimizer state and its gradients."""
        for name, each in self.weights.items():
            each.copy_(before.weights[name])
        self.store.take_over(before.store, {}, len(self._present))
        for part in self.store._sets:
            part.optimizer.weights_changed()
        self._generator = before._generator.clone_state()
