"""Keeps `torch.compile` from tracing what talks to servers.

If a script compiles a function that calls `backward()` and `step()`, torch would trace the functions that these call.
This takes half a minute, and all it finds are reasons to stop. Instead, the graph ends before the call, as it does
before each method of torch's own that is not traced, and a new graph begins after it.

`torch.compiler.disable` imports `torch._dynamo`, which takes as long as importing torch. Nothing is traced before
something else has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["untraced"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that does the same, and that `torch.compile` does not trace."""
    called = function

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        nonlocal called
        if called is function and "torch._dynamo" in sys.modules:
            called = torch.compiler.disable(function)
        return called(*arguments, **options)

    return call
