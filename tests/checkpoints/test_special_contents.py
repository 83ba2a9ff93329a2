"""Frozen parameters, settings that only the script has, counters in groups, and models that were extended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import schedulefree
import torch
from torch import nn

import paceline
from paceline.checkpoints.reading import Checkpoint
from paceline.checkpoints.writing import Draft, ShardWriter, shard_content
from paceline.core.layout import Layout, Parameter, StateEntries
from paceline.errors import CheckpointError
from paceline.run.readers import evaluated_in
from paceline.train.worker_state import hyper_parameters
from tests.support.sharded import LINEAGE, Net, Shards, model_of


def step(net: nn.Module, optimizer: torch.optim.Optimizer, shards: Shards, seed: int) -> None:
    """Take a step in the shards."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    shards.step(net, [optimizer])


def test_settings_that_only_the_script_has_are_in_the_file_of_its_optimizer(tmp_path: Path) -> None:
    net = Net()
    optimizer = paceline.LARS(net.parameters(), lr=0.1, trust_coefficient=0.02)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # adds `initial_lr`
    shards = Shards(model_of(net, [optimizer]), 2, net)
    step(net, optimizer, shards, 0)
    path = shards.write(tmp_path, settings=[hyper_parameters(optimizer)])
    saved = torch.load(path / "optimizer-0.pt")
    assert saved["param_groups"][0].items() >= optimizer.state_dict()["param_groups"][0].items()
    assert saved["state"].keys() == set(range(len(shards.model.layout.parameters)))

    again = paceline.LARS(Net().parameters(), lr=0.3)
    again.load_state_dict(saved)
    assert again.param_groups[0]["trust_coefficient"] == 0.02
    assert again.param_groups[0]["initial_lr"] == 0.1


class Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps in its groups, and in its state as a number of Python."""

    def __init__(self, params: Any, lr: float = 0.1, k: int = 0) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] = state.get("steps", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (group["k"] + state["steps"]))


def test_what_an_optimizer_counts_by_itself_goes_on(tmp_path: Path) -> None:
    net = Net()
    optimizer = Counting(net.parameters())
    shards = Shards(model_of(net, [optimizer]), 2, net)
    for seed in range(3):
        step(net, optimizer, shards, seed)
    path = shards.write(tmp_path)
    saved = torch.load(path / "optimizer-0.pt")
    assert saved["param_groups"][0]["k"] == 3
    assert saved["state"][0] == {"steps": 3}

    again = Shards(shards.model, 3)
    again.restore(Checkpoint(path))
    optimizer.param_groups[0]["lr"] = 0.01
    for each in (shards, again):
        step(net, optimizer, each, 3)
    for name, weights in again.named_weights().items():
        assert torch.equal(weights, shards.named_weights()[name])


class Marking(Counting):
    """An optimizer that keeps a truth value in its state, and a number of NumPy in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["k"] = np.float64(group["k"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["started"] = True


def test_truth_values_and_numbers_of_numpy_are_in_checkpoints(tmp_path: Path) -> None:
    net = Net()
    optimizer = Marking(net.parameters())
    shards = Shards(model_of(net, [optimizer]), 2, net)
    step(net, optimizer, shards, 0)
    for store in shards.stores:
        entries = store.state_entries(store.optimizer_state())
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(entries), type=StateEntries) == entries
    saved = torch.load(shards.write(tmp_path) / "optimizer-0.pt")
    assert saved["param_groups"][0]["k"] == 1.0
    assert saved["state"][0] == {"steps": 1, "started": True}


def test_an_empty_tensor_at_the_end_of_a_shards_state_lacks_nothing(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    shards = Shards(model_of(net, [torch.optim.SGD(net.parameters(), lr=0.1)]), 1, net)
    [store], [bounds] = shards.stores, shards.slices
    name = f"{len(bounds.segments) - 1}/empty"
    entries = msgspec.structs.replace(store.state_entries({}), vectors={name: "float32"}, shapes={name: (0,)})
    draft = Draft.begin(tmp_path / LINEAGE, 1, shards.model, shards.slices, [entries])
    with ShardWriter(draft.path, draft.token, bounds, entries) as writer:
        for part in shard_content(bounds, store.weights, {}):
            writer.write(part)
    path = draft.finish(b"{}", {}, versions=[1])
    assert torch.equal(Checkpoint(path).state_dict["weight"], net.weight)


def test_a_model_that_was_extended_later_finds_its_parameters(tmp_path: Path) -> None:
    """A resumed script begins with the model that it had before it added parameters."""
    net = Net()
    first, *others = net.parameters()
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [first], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups)
    shards = Shards(model_of(net, [optimizer]), 2, net)
    step(net, optimizer, shards, 0)
    checkpoint = Checkpoint(shards.write(tmp_path))

    layout = shards.model.layout
    earlier = msgspec.structs.replace(
        shards.model,
        layout=Layout.of(layout.parameters[:-1]),
        optimizer=msgspec.structs.replace(
            shards.model.optimizer,
            groups=shards.model.optimizer.groups[:1],
            group_of=shards.model.optimizer.group_of[:-1],
        ),
    )
    again = Shards(earlier, 3)
    again.restore(checkpoint)
    for name, weights in again.named_weights().items():
        assert torch.equal(weights, shards.named_weights()[name])
    state = {name for store in again.stores for name in store.optimizer_state()}
    assert {name.partition("/")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_the_state_of_an_optimizer_that_has_been_replaced_is_not_that_of_the_new_one(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    shards = Shards(model_of(net, [optimizer]), 2, net)
    step(net, optimizer, shards, 0)
    checkpoint = Checkpoint(shards.write(tmp_path))
    other = msgspec.structs.replace(
        shards.model, optimizer=msgspec.structs.replace(shards.model.optimizer, replaced=1)
    )
    assert checkpoint.optimizer_state(other, shards.slices[0]) == {}
    assert checkpoint.optimizer_state(shards.model, shards.slices[0])


def test_another_model_is_refused_by_its_first_parameter_that_differs(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checkpoint = Checkpoint(Shards(model_of(net, [optimizer]), 1, net).write(tmp_path))
    for parameter, expected in (
        (
            Parameter(("weight",), (4, 3), "float32"),
            r"has 'weight' as float32\[2, 3\], but the model needs float32\[4, 3\]",
        ),
        (Parameter(("gain",), (4,), "float32"), "has no parameter 'gain'"),
    ):
        layout = Layout.of([parameter])
        with pytest.raises(CheckpointError, match=expected):
            checkpoint.weights(layout, layout.slice_evenly(1)[0])


def test_a_buffer_that_the_format_cannot_contain_is_named_by_its_dtype(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    net.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    shards = Shards(model_of(net, [torch.optim.SGD(net.parameters(), lr=0.1)]), 1, net)
    with pytest.raises(CheckpointError, match=r"a tensor of torch\.complex128, which"):
        shards.write(tmp_path, net=net)
    assert list((tmp_path / LINEAGE).iterdir()) == []


@pytest.mark.parametrize("trains", [True, False])
def test_weights_and_state_are_in_training_mode_and_those_for_an_evaluation_follow(
    trains: bool, tmp_path: Path
) -> None:
    """Whether the script has called `train()` before training began makes no difference."""
    net, alone = Net(), Net()
    optimizer, expected = (schedulefree.AdamWScheduleFree(each.parameters(), lr=0.1) for each in (net, alone))
    expected.train()
    if trains:
        optimizer.train()
    shards = Shards(model_of(net, [optimizer]), 3, net)
    for seed in range(4):
        step(net, optimizer, shards, seed)
        for parameter, each in zip(alone.parameters(), net.parameters(), strict=True):
            parameter.grad = each.grad
        expected.step()
    checkpoint = Checkpoint(shards.write(tmp_path, settings=[hyper_parameters(optimizer)]))

    loaded = Net(1)
    again = schedulefree.AdamWScheduleFree(loaded.parameters())
    loaded.load_state_dict(checkpoint.state_dict)
    again.load_state_dict(checkpoint.optimizers[0])
    assert_close(loaded, dict(alone.named_parameters()))
    again.eval()
    expected.eval()
    assert_close(loaded, dict(alone.named_parameters()))
    assert_close(loaded, evaluated_in(checkpoint))
    again.train()
    again.step()


def assert_close(net: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in net.named_parameters():
        assert torch.allclose(parameter, expected[name], rtol=1e-6, atol=1e-6)
