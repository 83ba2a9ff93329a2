"""Notices the first forward pass in which a script uses given parameters to compute gradients.

Workers must have the same weights before they compute their first gradients. Until then, a script may edit its
weights, and may wrap or compile its model. It may also call only a part of the model. So the hook belongs to no
module: a *global* hook of torch is called before every module's `forward()`, and is removed as soon as it has seen
the pass that it waits for. A model that is copied, saved or compiled before training therefore contains no hook.

A *dispatch mode* of torch sees each operation. Most modes carry the operations out, such as CUDA's sanitizer and
`FlopCounterMode`, and a pass in such a mode counts like any other. A few modes of torch itself only record the
operations or imitate their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from .session import Session, current

__all__ = [
    "builds_graph",
    "can_compute_gradients",
    "computes",
    "hidden_from_modes",
    "imitates",
    "may_look",
]

IMITATING = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)
"""The kinds of dispatch modes that do not carry out the operations, as for `make_fx` and `FakeTensorMode`."""


def builds_graph(session: Session) -> bool:
    """Return True if operations of this session's worker are now recorded in a graph that `backward()` can use."""
    return torch.is_grad_enabled() and computes(session)


def can_compute_gradients(session: Session, module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a module is about to run in this session's worker, and may compute gradients of the parameters.

    Passes without gradients do not count. Neither do those in which torch compiles, traces or imitates operations,
    because it would record that the weights are replaced.
    """
    return builds_graph(session) and _holds(module, parameters)


def may_look(session: Session, module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a module with one of the parameters is about to run in this worker, without gradients."""
    return not torch.is_grad_enabled() and computes(session) and _holds(module, parameters)


def computes(session: Session) -> bool:
    """Return True unless another worker computes, or torch only compiles, traces or imitates operations."""
    if torch.compiler.is_compiling() or current() is not session:
        return False
    return torch._C._get_tracing_state() is None and not imitates()


def imitates() -> bool:
    """Return True if a dispatch mode records or imitates operations instead of carrying them out."""
    return _get_current_dispatch_mode() is not None and any(map(torch._C._get_dispatch_mode, IMITATING))


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Return a context whose operations no dispatch mode sees.

    For example, selective activation checkpointing counts the operations of a forward pass, and must find the same
    ones when it repeats the pass.
    """
    with ExitStack() as modes:
        while _get_current_dispatch_mode() is not None:
            modes.enter_context(_pop_mode_temporarily())
        yield


def _holds(module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    held = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in held for parameter in parameters)
