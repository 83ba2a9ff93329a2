"""Notices the first forward pass in which a script uses given parameters to compute gradients.

Workers must have the same weights before they compute their first gradients. Until then, a script may edit its
weights, and may wrap or compile its model. It may also call only a part of the model. So the hook belongs to no
module: a *global* hook of torch is called before every module's `forward()`, and is removed as soon as it has seen
the pass that it waits for. A model that is copied, saved or compiled before training therefore contains no hook.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from .hooks import Weakly, remove_after
from .session import Session, current

__all__ = ["before_each_forward", "can_compute_gradients"]


def before_each_forward(session: Session, method: Callable[[nn.Module, object], None]) -> RemovableHandle:
    """Call a bound method with each module of this process that is about to run, until the result is removed.

    The method is referenced weakly, and no longer called when the session has been freed.
    """
    # A compiled module warns that a global hook may be called twice, which is harmless here.
    warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
    handle = register_module_forward_pre_hook(Weakly(method))
    remove_after(session, [handle])
    return handle


def can_compute_gradients(session: Session, module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a module is about to run in this session's worker, and may compute gradients of the parameters.

    Passes without gradients do not count. Neither do those in which torch compiles, traces or intercepts operations,
    because it would record that the weights are replaced.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or current() is not session:
        return False
    if torch._C._get_tracing_state() is not None or _get_current_dispatch_mode() is not None:
        return False
    wanted = list(parameters)
    held = {id(parameter) for parameter in module.parameters()}
    return any(id(p) in held for p in wanted) and not any(map(is_lazy, wanted))
