"""What is written from any number of shards can be read without Paceline, and by any other number of shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.checkpoints.reading import newest_whole
from paceline.shard.optimizers import ELEMENTWISE
from paceline.shard.vectors import decode_states
from tests.support.marks import thorough
from tests.support.sharded import LINEAGE, Net, Shards, model_of

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def two_groups(kind: type[torch.optim.Optimizer]) -> Optimizers:
    def make(net: nn.Module) -> list[torch.optim.Optimizer]:
        first, *others = net.parameters()
        groups = [{"params": others, "lr": 0.02}, {"params": [first], "lr": 0.05}]
        return [kind(groups)]  # type: ignore[call-arg]

    return make


def two_optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
    first, second, *others = net.parameters()
    return [torch.optim.SGD(others, lr=0.1, momentum=0.9), torch.optim.AdamW([second, first], amsgrad=True)]


CASES: dict[str, Optimizers] = {
    **{name: two_groups(kind) for name, kind in ELEMENTWISE.items()},
    "momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    "two optimizers": two_optimizers,
}


MORE_SHARDS = [(1, 1), (1, 3), (2, 5)]
"""Numbers of shards before and after."""


def give_gradients(net: nn.Module, step: int) -> None:
    """Give each parameter a gradient, but none to the scalar until the last step, as in a branch that rarely runs."""
    generator = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    if step < 3:
        net.scale.grad = None


def trained(case: str, shards: int) -> tuple[Net, list[torch.optim.Optimizer], Shards]:
    """Take three steps in plain PyTorch and, with the same gradients, in shards."""
    net = Net()
    optimizers = CASES[case](net)
    sharded = Shards(model_of(net, optimizers), shards, net)
    for step in range(3):
        take_step(net, optimizers, sharded, step)
    return net, optimizers, sharded


def take_step(net: Net, optimizers: list[torch.optim.Optimizer], sharded: Shards | None, step: int) -> None:
    give_gradients(net, step)
    for optimizer in optimizers:
        optimizer.param_groups[-1]["lr"] *= 0.9  # a schedule
        optimizer.step()
    if sharded is not None:
        sharded.step(net, optimizers)


def assert_same_weights(sharded: Shards, net: nn.Module) -> None:
    named = dict(net.named_parameters(remove_duplicate=False))
    for name, weights in sharded.named_weights().items():
        torch.testing.assert_close(weights, named[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_plain_pytorch_continues_from_the_files(case: str, tmp_path: Path) -> None:
    net, optimizers, sharded = trained(case, 3)
    path = sharded.write(tmp_path, net=net)

    again = Net(seed=1)
    again.load_state_dict(load_file(path / "model.safetensors"))
    assert_same_weights(sharded, again)
    own = CASES[case](again)
    for index, optimizer in enumerate(own):
        optimizer.load_state_dict(torch.load(path / f"optimizer-{index}.pt", weights_only=True))
    for optimizer, before in zip(own, optimizers, strict=True):
        assert optimizer.param_groups[-1]["lr"] == before.param_groups[-1]["lr"]
        assert optimizer.param_groups[0].keys() == before.param_groups[0].keys()
    for step in (3, 4):
        take_step(net, optimizers, None, step)
        take_step(again, own, None, step)
    for parameter, expected in zip(again.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        *((case, 3, 2) for case in CASES),
        *(("two optimizers", *numbers) for numbers in MORE_SHARDS),
        *thorough(
            *((case, *numbers) for case in CASES if case != "two optimizers" for numbers in MORE_SHARDS)
        ),
    ],
)
def test_any_number_of_shards_continues_from_the_files(
    case: str, before: int, after: int, tmp_path: Path
) -> None:
    net, optimizers, sharded = trained(case, before)
    sharded.write(tmp_path, net=net)
    found = newest_whole(tmp_path / LINEAGE)
    assert found.checkpoint is not None
    assert found.faults == ()
    again = Shards(sharded.model, after)
    again.restore(found.checkpoint)
    for step in (3, 4):
        take_step(net, optimizers, sharded, step)
        again.step(net, optimizers)
    for name, weights in again.named_weights().items():
        assert torch.equal(weights, sharded.named_weights()[name])


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096])
def test_the_content_of_a_shard_may_come_in_pieces_of_any_size(piece_bytes: int, tmp_path: Path) -> None:
    net, _, sharded = trained("two optimizers", 2)
    whole = sharded.write(tmp_path / "whole", net=net)
    pieces = sharded.write(tmp_path / "pieces", net=net, piece_bytes=piece_bytes)
    for name in ("model.safetensors", "optimizer-0.pt", "optimizer-1.pt"):
        assert (whole / name).read_bytes() == (pieces / name).read_bytes()


def test_a_tied_parameter_is_written_under_each_of_its_names(tmp_path: Path) -> None:
    net, _, sharded = trained("momentum", 2)
    state = load_file(sharded.write(tmp_path, net=net) / "model.safetensors")
    assert state.keys() == net.state_dict().keys()
    assert torch.equal(state["tied.weight"], state["decoder.weight"])
    assert torch.equal(state["norm.running_var"], net.norm.running_var)  # type: ignore[arg-type]


def test_the_states_of_the_job_and_of_the_workers_are_as_they_were_given(tmp_path: Path) -> None:
    net, _, sharded = trained("SGD", 2)
    sharded.write(tmp_path, 12, net=net, job=b'{"steps": 3}')
    checkpoint = newest_whole(tmp_path / LINEAGE).checkpoint
    assert checkpoint is not None
    assert checkpoint.path.name == "000012"
    assert checkpoint.manifest.versions == (12, 12)
    assert checkpoint.job == b'{"steps": 3}'
    assert {worker: decode_states(path.read_bytes()) for worker, path in checkpoint.workers.items()} == {
        0: {"worker": 0},
        12: {"worker": 12},
    }
