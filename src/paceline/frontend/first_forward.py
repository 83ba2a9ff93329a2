"""Notices the first forward pass in which a script uses given parameters to compute gradients.

Workers must have the same weights before they compute their first gradients. Until then, a script may edit its
weights, and may wrap or compile its model. It may also call only a part of the model. So the hook belongs to no
module: a *global* hook of torch is called before every module's `forward()`, and is removed as soon as it has seen
the pass that it waits for. A model that is copied, saved or compiled before training therefore contains no hook.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .session import Session, current

__all__ = ["builds_graph", "can_compute_gradients", "computes", "may_look"]


def builds_graph(session: Session) -> bool:
    """Return True if operations of this session's worker are now recorded in a graph that `backward()` can use."""
    return torch.is_grad_enabled() and computes(session)


def can_compute_gradients(session: Session, module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a module is about to run in this session's worker, and may compute gradients of the parameters.

    Passes without gradients do not count. Neither do those in which torch compiles, traces or intercepts operations,
    because it would record that the weights are replaced.
    """
    return builds_graph(session) and _holds(module, parameters)


def may_look(session: Session, module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a module with one of the parameters is about to run in this worker, without gradients."""
    return not torch.is_grad_enabled() and computes(session) and _holds(module, parameters)


def computes(session: Session) -> bool:
    """Return True unless another worker computes, or torch only compiles, traces or intercepts operations."""
    if torch.compiler.is_compiling() or current() is not session:
        return False
    return torch._C._get_tracing_state() is None and _get_current_dispatch_mode() is None


def _holds(module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    held = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in held for parameter in parameters)
