"""Errors in code of the user that Paceline calls: sync models, conditions, and optimizers on the servers.

Such an error is the fault of neither the sender of a message nor Paceline. It ends the run or the simulation with a
`UserCodeError`, which says what was called, where, and for which event. Its traceback has only the user's frames, and
so has that of an error in a script.
"""

from __future__ import annotations

import contextlib
import runpy
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import NoReturn

from ..errors import InternalError, PacelineError, ProtocolError, UserCodeError, first_line
from ..sync import SyncModel
from ..sync.events import (
    IterationFinished,
    IterationStarted,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

__all__ = ["blame", "blaming", "report_of_user_code", "script_traceback", "user_traceback"]

PACKAGE = str(Path(__file__).parent.parent)
# Paceline calls code of the user inside context managers, with the module that runs scripts, and on threads.
CALLERS = (PACKAGE, contextlib.__file__, runpy.__file__, threading.__file__, "<frozen ")

EVENTS: dict[type, str] = {
    PushReceived: "it received the push of iteration {0.iteration} of worker {0.worker}",
    PullRequested: "it received the pull of iteration {0.iteration} of worker {0.worker}",
    TimerFired: "the timer of worker {0.worker} for iteration {0.iteration} fired",
    WorkerJoined: "worker {0.worker} joined",
    WorkerLost: "worker {0.worker} was lost",
    WorkerFinished: "worker {0.worker} finished",
    IterationFinished: "worker {0.worker} finished iteration {0.iteration}",
    IterationStarted: "worker {0.worker} started iteration {0.iteration}",
}
"""The events that a sync model receives, as clauses about the model."""


def blame(model: SyncModel, where: str, event: object, error: Exception) -> NoReturn:
    """Raise a `UserCodeError` for an error that a sync model, or what it has returned, has caused.

    Raise `error` itself if it is not the model's fault: a refused event, or an error in a model of this package.

    Args:
        model: the sync model.
        where: where its state machine runs, for example "shard 0".
        event: the event that the state machine has received, or a clause that says what was called.
        error: the exception that is being handled.
    """
    if isinstance(error, ProtocolError | UserCodeError) or type(model).__module__.startswith("paceline."):
        raise error
    told = user_traceback(error)
    when = next((clause for kind, clause in EVENTS.items() if isinstance(event, kind)), str(event)).format(
        event
    )
    if told:
        # The context would show Paceline's frames, too.
        raise UserCodeError(
            f"the sync model {model} raised {first_line(error)} at {where}, when {when}", told
        ) from None
    if isinstance(error, OSError | MemoryError):
        raise error
    what = error.what if isinstance(error, InternalError) else first_line(error)
    raise UserCodeError(
        f"the sync model {model} returned what cannot be carried out at {where}, when {when}: {what}. Test the model "
        "with paceline.testing.check."
    ) from error


@contextmanager
def blaming(model: SyncModel, where: str, method: str) -> Iterator[None]:
    """Call `blame` if the block fails, which calls a method of the model or of its state machine."""
    try:
        yield
    except Exception as error:
        blame(model, where, f"its method {method} was called", error)


def report_of_user_code(error: BaseException) -> str:
    """Return what to tell about an error in code of the user; "" if the error is not in such code."""
    if isinstance(error, UserCodeError):
        return f"{error.reason}\n{error.traceback}".rstrip()
    return user_traceback(error).rstrip()


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception without the frames of Paceline; "" if no frame is left."""
    told = traceback.TracebackException.from_exception(error)
    if not _users_frames(told):
        return ""
    for part in _parts(told):
        part.stack = traceback.StackSummary.from_list(_users_frames(part))
    return "".join(told.format())


def script_traceback(error: BaseException) -> str:
    """Return the traceback of an exception that a script has raised. It begins with the frames of the script.

    It has no frames of Paceline, so the script's call is the last frame if the library was used incorrectly. Only if
    Paceline itself has failed, for whatever reason, are the frames of what the script has called complete.
    """
    told = traceback.TracebackException.from_exception(error)
    innermost = told.stack[-1] if told.stack else None
    meant = isinstance(error, PacelineError) and not isinstance(error, InternalError)
    # The script asked for a name that does not exist.
    meant = meant or (innermost is not None and innermost.name == "__getattr__")
    ours = innermost is not None and innermost.filename.startswith(PACKAGE) and not meant
    for part in _parts(told):
        frames = list(_called(part)) if ours else _users_frames(part)
        # Without a stack, there is no headline either.
        part.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    return "".join(told.format())


def _parts(told: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield the parts of a traceback: that of the exception, and those of the exceptions that led to it."""
    parts = [told]
    while parts:
        yield (part := parts.pop())
        parts += [each for each in (part.__cause__, part.__context__) if each is not None]


def _users_frames(told: traceback.TracebackException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code and of what it has called, without those of Paceline."""
    return [frame for frame in _called(told) if not frame.filename.startswith(PACKAGE)]


def _called(told: traceback.TracebackException) -> Iterator[traceback.FrameSummary]:
    """Return the frames of the user's code and of what it has called."""
    return dropwhile(lambda frame: frame.filename.startswith(CALLERS), told.stack)
