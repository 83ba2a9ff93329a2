"""The end of a forked process.

The normal end of the interpreter takes all modules apart. A forked process shares the memory of the modules that the
fork server has imported, so taking them apart would first copy more than 100 MiB, which takes half a second. `leave`
does everything else that the interpreter does at its end, and leaves these modules alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Collection
from typing import Any, NoReturn, cast

__all__ = ["leave"]


def leave(status: int, kept: Collection[str]) -> NoReturn:
    """End this process.

    Threads are waited for, and `atexit` handlers are called. The modules that are not kept lose their contents, so
    that objects in them are finalized and files are closed. Then the process ends, without C's own `atexit` handlers.

    Args:
        status: the exit code.
        kept: names of the modules that are not taken apart.
    """
    # The interpreter calls these two functions at its end.
    cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    _take_apart([name for name in sys.modules if name not in kept])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def _take_apart(names: list[str]) -> None:
    """Remove modules, as the interpreter does at its end: first those that nothing refers to, then the others."""
    modules = []
    for name in names:
        with contextlib.suppress(TypeError):  # any object can be a module, also one without weak references
            modules.append(weakref.ref(sys.modules.pop(name)))
    gc.collect()
    for reference in reversed(modules):
        contents = getattr(reference(), "__dict__", {})
        for name in contents:
            if name != "__builtins__":
                contents[name] = None
