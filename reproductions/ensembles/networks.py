"""Networks of `torch.nn` as functions of stacked parameters, so that runs with other rates and seeds train together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import TensorDataset

from paceline.core.layout import HyperParameters

from .problems import Data, Orders, Weights, sgd
from .schedules import Batch


class StackedNetwork:
    """A network that is trained on labeled samples by SGD.

    BatchNorm always uses the statistics of the current samples, also in evaluations, because running statistics would
    be a state of each run beside its weights.

    Args:
        network: function that returns the network with initial weights, which depend on torch's random seed.
        train: training samples.
        test: samples with which the runs are evaluated.
        loss: function of the outputs and the labels that is minimized.
        quality: function of the outputs and the labels by which a run is evaluated.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        milestones: epochs of the data after which the learning rate is multiplied by `decay`.
        decay: factor of the learning rate at each milestone.
    """

    optimizer = "SGD"

    def __init__(
        self,
        network: Callable[[], nn.Module],
        train: TensorDataset,
        test: TensorDataset,
        loss: Callable[[Tensor, Tensor], Tensor],
        quality: Callable[[Tensor, Tensor], Tensor],
        *,
        momentum: float,
        weight_decay: float,
        milestones: Sequence[int],
        decay: float,
    ) -> None:
        self._make, self._train, self._test = network, train.tensors, test.tensors
        self._loss, self._quality = loss, quality
        self._fixed = {"momentum": momentum, "weight_decay": weight_decay}
        self._milestones, self._decay = milestones, decay
        self._network = self._without_statistics(network())
        self._orders = Orders(len(train))

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters at a rate. `progress` is the number of epochs so far."""
        passed = sum(milestone <= progress for milestone in self._milestones)
        return sgd(rate * self._decay**passed, **self._fixed)

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters of one run, without the dimension for the runs."""
        torch.manual_seed(seed)
        return {name: value.detach() for name, value in self._make().named_parameters()}

    def data(self, seeds: Sequence[int], batch: Batch) -> Data:
        """Return a batch for each seed. Shape of each tensor: (seeds, batch size, ...)."""
        chosen = self._orders.chosen(seeds, batch)
        return tuple(values[chosen] for values in self._train)

    def losses(self, weights: Weights, *data: Tensor) -> Tensor:
        """Return the loss of each run on its own batch. Shape: (runs,)."""

        def loss(of_run: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
            return self._loss(functional_call(self._network, of_run, (inputs,)), labels)

        losses: Tensor = vmap(loss, randomness="error")(weights, *data)
        return losses

    def quality(self, weights: Weights) -> Tensor:
        """Return the quality of each run. Shape: (runs,)."""
        inputs, labels = self._test
        runs = len(next(iter(weights.values())))
        # One after another, because the outputs of all layers for all runs would take too much memory.
        outputs = (
            functional_call(self._network, {name: value[run] for name, value in weights.items()}, (inputs,))
            for run in range(runs)
        )
        return torch.stack([self._quality(each, labels) for each in outputs])

    @staticmethod
    def _without_statistics(network: nn.Module) -> nn.Module:
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        return network
