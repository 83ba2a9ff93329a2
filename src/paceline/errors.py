"""The exceptions of Paceline, grouped by the cause of the error.

    PacelineError
    ├── ConfigurationError        the input is not valid; nothing was started (exit code 2)
    │   └── SyncRefusedError      the sync model does not allow what the script asks for
    ├── UsageError                the library was used incorrectly during the run
    │   ├── WeightsChangedError   weights were changed outside step()
    │   └── NonFiniteGradientError  a gradient contains NaN or inf
    ├── ProtocolError             a peer violated the protocol; this peer is disconnected, and the run continues
    │   └── InvalidEventError     the sync model does not allow the event; the state of the model is unchanged
    ├── PeerLostError             the connection to a peer could not be established or was lost
    │   └── TakenOutError         the run continues without this worker, because it was stopped or silent
    ├── DeadlineError             an operation took longer than allowed
    ├── CheckpointError           a checkpoint cannot be written or read; the run goes on, or uses another checkpoint
    ├── RunFailedError            a process of the run failed; contains the traceback of that process
    │   └── UserCodeError         code of the user failed: a sync model or an optimizer that Paceline calls
    └── InternalError             an internal invariant is violated: a bug in Paceline, please report it

All exceptions can be pickled, because each one passes all of its arguments to `Exception`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DeadlineError",
    "InternalError",
    "InvalidEventError",
    "NonFiniteGradientError",
    "PacelineError",
    "PeerLostError",
    "ProtocolError",
    "RunFailedError",
    "SyncRefusedError",
    "TakenOutError",
    "UsageError",
    "UserCodeError",
    "WeightsChangedError",
    "first_line",
    "nearest",
    "refused_by_system",
    "unknown_name",
]


class PacelineError(Exception):
    """The base class of all exceptions that Paceline defines."""


class ConfigurationError(PacelineError):
    """An input is not valid. Paceline checks its inputs before it starts any process.

    The message states the value, what was expected, and what to do.
    """


class SyncRefusedError(ConfigurationError):
    """The sync model does not allow what the script asks for, such as to clip the joint gradient."""


class UsageError(PacelineError):
    """The library was used in a way that is not allowed at this point in the run."""


class WeightsChangedError(UsageError):
    """After training had started, something other than `step()` edited, replaced or moved weights."""


class NonFiniteGradientError(UsageError):
    """A gradient contains NaN or inf. The gradient was rejected before any part of it was sent.

    Attributes:
        worker: index of the worker.
        iteration: index of the worker's iteration, counted from 0.
        parameter: name of the first parameter whose gradient is not finite.
    """

    def __init__(self, worker: int, iteration: int, parameter: str) -> None:
        super().__init__(worker, iteration, parameter)
        self.worker = worker
        self.iteration = iteration
        self.parameter = parameter

    def __str__(self) -> str:
        return (
            f"worker {self.worker}, iteration {self.iteration}: the gradient of {self.parameter!r} contains NaN or "
            "inf. No gradient was sent, and the weights are unchanged. Lower the learning rate, clip the gradients, "
            "or skip such gradients with --on-nan skip (on_nan='skip')."
        )


class ProtocolError(PacelineError):
    """A peer violated the protocol. The connection to this peer is closed, and the run continues."""


class InvalidEventError(ProtocolError):
    """The sync model, in its current state, does not allow the event. The state is unchanged."""


class PeerLostError(PacelineError):
    """The connection to a peer could not be established or was lost."""


class TakenOutError(PeerLostError):
    """The run continues without this worker, because its process was stopped or its machine was silent.

    Nothing that the worker has sent since it was taken out has been used.
    """


class DeadlineError(PacelineError):
    """An operation took longer than allowed."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written or read. Earlier checkpoints are unchanged."""


class RunFailedError(PacelineError):
    """A process of the run failed. The message contains the traceback of that process.

    Attributes:
        process: name of the process that failed, for example ``"worker 2"``.
        reason: description of the error.
        traceback: traceback of the process; "" if there is none.
        machine: name of the machine of the process, if this machine has joined the run; "" otherwise.
    """

    def __init__(self, process: str, reason: str, traceback: str = "", machine: str = "") -> None:
        super().__init__(process, reason, traceback, machine)
        self.process = process
        self.reason = reason
        self.traceback = traceback
        self.machine = machine

    def __str__(self) -> str:
        where = f" on {self.machine}" if self.machine else ""
        shown = f"\n{self.traceback.rstrip()}" if self.traceback else ""
        return f"{self.process}{where} failed: {self.reason}{shown}"


class UserCodeError(RunFailedError):
    """A sync model or an optimizer of the user failed while Paceline called it.

    Args:
        reason: what failed, where, and for which event.
        traceback: the user's frames of the traceback; "" if there is no traceback, because the code has returned a
            wrong value.
    """

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__("the run", reason, traceback)
        self.args = (reason, traceback)  # what pickle passes to this method


class InternalError(PacelineError):
    """An internal invariant of Paceline is violated. This is a bug: please report it with the events in the message.

    Attributes:
        what: description of the error.
        story: the events that led to the error.
    """

    def __init__(self, what: str, story: tuple[object, ...] = ()) -> None:
        super().__init__(what, story)
        self.what = what
        self.story = story

    def __str__(self) -> str:
        lines = [f"{self.what} (this is a bug in Paceline; please report it)"]
        lines += [f"  {event!r}" for event in self.story]
        return "\n".join(lines)


def refused_by_system(error: OSError) -> str:
    """Return a sentence, without a full stop, about what the operating system has refused to a process, and the remedy.

    >>> refused_by_system(OSError(28, "No space left on device", "trace.jsonl"))
    'the system has refused what this process needs: No space left on device (trace.jsonl). Free space there'
    """
    remedies = {
        errno.EFBIG: "Raise the limit on the size of files: ulimit -f unlimited",
        errno.EMFILE: "Raise the limit on open files: ulimit -n",
        errno.ENOSPC: "Free space there",
        errno.ENOMEM: "Give the machine or container more memory",
    }
    where = f" ({error.filename})" if error.filename else ""
    remedy = f". {remedies[error.errno]}" if error.errno in remedies else ""
    return f"the system has refused what this process needs: {error.strerror or error}{where}{remedy}"


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message.

    >>> first_line(ValueError("the labels are missing\\nin 3 files"))
    'ValueError: the labels are missing'
    """
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    message = str(error).strip().partition("\n")[0]
    return f"{name}: {message}" if message else name


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is most similar to a name; "" if none is similar.

    >>> nearest("elastic-bps", ["asp", "elastic-bsp"])
    'elastic-bsp'
    """
    return next(iter(get_close_matches(name, choices, n=1, cutoff=0.5)), "")


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> ConfigurationError:
    """Return the error for a name that is not in `choices`. The message lists the choices and may suggest one."""
    known = sorted(choices)
    near = nearest(str(name), known)
    hint = f"; did you mean {near!r}?" if near else ""
    return ConfigurationError(f"unknown {kind} {name!r}{hint or '.'} Choices: {', '.join(known)}.")
