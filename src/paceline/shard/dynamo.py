"""Keeps `torch._dynamo` from being imported before it has anything to do.

Some methods of `torch.optim.Optimizer`, among them `add_param_group` and so the constructor, ask `torch._dynamo` not
to trace them. The first call of such a method imports `torch._dynamo`, which takes as much time as importing torch
itself. But nothing can be tracing while `torch._dynamo` has not been imported, so until then, the request has no
effect.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["defer_dynamo"]

# In torch 2.13, a function that `torch._disable_dynamo` has wrapped looks up its untraced version in this attribute
# of the original function, and imports `torch._dynamo` only if it is missing.
UNTRACED = "__dynamo_disable"


@functools.cache
def defer_dynamo() -> None:
    """Let optimizers be created and used without importing `torch._dynamo`, until something else imports it."""
    from torch.optim import Optimizer

    for method in list(vars(Optimizer).values()):
        original = getattr(method, "__wrapped__", None)
        code = getattr(method, "__code__", None)
        if original is not None and code is not None and UNTRACED in code.co_consts:
            setattr(original, UNTRACED, _deferred(method, original))


def _deferred(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the original, or the method if `torch._dynamo` has been imported."""

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return original(*args, **options)
        if getattr(original, UNTRACED, None) is call:
            delattr(original, UNTRACED)
        return method(*args, **options)

    return call
