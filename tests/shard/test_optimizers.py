"""The optimizers that can run on slices, and that they give the same results there as on whole tensors."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from paceline.core.layout import HyperParameters, Layout, OptimizerSpec, Parameter
from paceline.errors import ConfigurationError
from paceline.shard.optimizers import (
    ELEMENTWISE,
    OF_TORCH,
    TENSORWISE,
    make_optimizer,
    read_groups,
    server_optimizer,
)
from paceline.shard.slice_optimizers import optimizer_of_slice

SIZE = 203


def a_matrix() -> list[torch.Tensor]:
    return [torch.zeros(4, 4, requires_grad=True)]


REFUSED: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "LBFGS": lambda: torch.optim.LBFGS(a_matrix()),
    "SparseAdam": lambda: torch.optim.SparseAdam(a_matrix()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_with_the_reason_and_what_to_use(name: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        server_optimizer(REFUSED[name]())
    message = str(refusal.value)
    assert f".{name} cannot run on the servers" in message
    assert ". Use Adam, " in message


def test_every_class_of_torch_is_either_in_the_table_or_refused() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert classes == OF_TORCH.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_class_of_the_table_is_taken(name: str) -> None:
    kind = OF_TORCH[name]
    assert server_optimizer(kind(a_matrix(), lr=0.1)) == (name, name in TENSORWISE)  # type: ignore[call-arg]


def weights(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0), dtype=dtype)


def train(parts: list[torch.Tensor], name: str, groups: tuple[HyperParameters, ...]) -> torch.Tensor:
    """Make six steps on the parts of one vector and return the vector."""
    optimizer = make_optimizer(name, groups, [parts])
    dtype = parts[0].dtype
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        gradient = torch.randn(SIZE, generator=generator, dtype=dtype)
        for part, grad in zip(parts, gradient.split([part.numel() for part in parts]), strict=True):
            part.grad = grad
        optimizer.step()
    return torch.cat(parts)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("sizes", [(64, 64, 75), (16, 187), (96, 0, 107), (16,) * 12 + (11,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_slices_it_gives_what_it_gives_on_the_whole(
    name: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    kind = ELEMENTWISE[name]
    groups = read_groups(kind([weights(dtype)], lr=0.01))  # type: ignore[call-arg]
    whole = train([weights(dtype)], name, groups)
    sliced = train([part.clone() for part in weights(dtype).split(list(sizes))], name, groups)
    assert not torch.equal(whole, weights(dtype))
    assert torch.equal(sliced, whole)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_it_gives_what_the_users_own_would(name: str) -> None:
    kind = ELEMENTWISE[name]
    users = weights(torch.float64)
    optimizer = kind([users], lr=0.01)  # type: ignore[call-arg]
    ours = train([weights(torch.float64)], name, read_groups(optimizer))
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        users.grad = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        optimizer.step()
    torch.testing.assert_close(ours, users, rtol=1e-14, atol=1e-15)


def test_groups_are_plain_numbers_that_travel() -> None:
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters[:1], "lr": torch.tensor(0.5)},
            {"params": parameters[1:], "betas": [0.8, 0.9]},
        ],
        weight_decay=0.25,
        fused=True,
    )
    optimizer.param_groups[1]["lr"] = np.float32(0.125)  # a scheduler's arithmetic may produce NumPy numbers
    first, second = read_groups(optimizer)
    assert (first["lr"], first["weight_decay"], first["betas"]) == (0.5, 0.25, (0.9, 0.999))
    assert (second["lr"], second["betas"]) == (0.125, (0.8, 0.9))
    assert not {"params", "fused", "foreach", "capturable", "differentiable"} & (first.keys() | second.keys())
    spec = OptimizerSpec("AdamW", (first, second), (0, 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=OptimizerSpec) == spec


def test_a_hyper_parameter_that_is_no_number_is_refused_by_name() -> None:
    optimizer = torch.optim.SGD(a_matrix(), lr=0.1)
    optimizer.param_groups[0]["momentum"] = "much"
    with pytest.raises(ConfigurationError, match="momentum is 'much'"):
        read_groups(optimizer)


def test_a_group_may_be_empty_on_a_slice() -> None:
    settings = [{"params": a_matrix(), "lr": lr} for lr in (0.1, 0.5)]
    groups = read_groups(torch.optim.SGD(settings))
    part = torch.ones(3)
    optimizer = make_optimizer("SGD", groups, [[], [part]])
    part.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(part, torch.full((3,), 0.5))


def test_a_velocity_outlives_a_checkpoint_at_a_time_without_momentum() -> None:
    (bounds,) = Layout.of([Parameter(("p",), (16,), "float32")]).slice_evenly(1)
    served, users, gradient = torch.zeros(16), torch.zeros(16), torch.ones(16)
    users.grad = gradient
    optimizer = torch.optim.SGD([users], lr=0.1)
    spec = OptimizerSpec("SGD", read_groups(optimizer), (0,))
    server = optimizer_of_slice(spec, bounds, {"float32": served})
    for momentum in (0.9, 0.9, 0.0, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.step()
        server.step([{"float32": gradient}], [1.0], b"\1", read_groups(optimizer))
        resumed = optimizer_of_slice(spec, bounds, {"float32": served})
        resumed.load_state({name: value.clone() for name, value in server.state().items()})
        server = resumed
    torch.testing.assert_close(served, users)
