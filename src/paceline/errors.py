"""Every error that Paceline raises on purpose, split by whose fault it is.

    PacelineError
    ├── ConfigurationError        bad input, found before anything starts (exit code 2)
    ├── UsageError                the caller misused the library during the run
    │   ├── WeightsChangedError   weights were edited or moved outside step()
    │   └── NonFiniteGradientError  a gradient holds NaN or inf
    ├── ProtocolError             a peer broke the rules; its connection is closed, the run goes on
    │   └── InvalidEventError     an event that the sync model's contract does not allow; nothing changed
    ├── PeerLostError             a peer is gone
    ├── DeadlineError             something took longer than it was allowed to
    ├── RunFailedError            a process of the run failed; carries the process's own traceback
    └── InternalError             an invariant is broken: our bug, please report it

Waiting is never an error. Every error survives pickling: arguments are positional and are the attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "ConfigurationError",
    "DeadlineError",
    "InternalError",
    "InvalidEventError",
    "NonFiniteGradientError",
    "PacelineError",
    "PeerLostError",
    "ProtocolError",
    "RunFailedError",
    "UsageError",
    "WeightsChangedError",
    "first_line",
    "unknown_name",
]


class PacelineError(Exception):
    """The root: `except PacelineError` catches what Paceline raises on purpose and nothing else."""


class ConfigurationError(PacelineError):
    """Bad input that was found before anything started. Names the value, what was expected, what to do."""


class UsageError(PacelineError):
    """The caller did something that the library's contract does not allow at this point of the run."""


class WeightsChangedError(UsageError):
    """Weights were edited, replaced or moved outside `step()` after training had started."""


class NonFiniteGradientError(UsageError):
    """A gradient holds NaN or inf; it was refused before anything was sent.

    Attributes:
        worker: index of the worker.
        iteration: its iteration, from 0.
        parameter: name of the first parameter whose gradient is not finite.
    """

    def __init__(self, worker: int, iteration: int, parameter: str) -> None:
        super().__init__(worker, iteration, parameter)
        self.worker = worker
        self.iteration = iteration
        self.parameter = parameter

    def __str__(self) -> str:
        return (
            f"worker {self.worker}, iteration {self.iteration}: the gradient of {self.parameter!r} has NaN or "
            "inf in it. Nothing of it was sent and the weights are as they were. Lower the learning rate, clip "
            "gradients, or go on without such gradients with --on-nan skip (on_nan='skip')."
        )


class ProtocolError(PacelineError):
    """A peer sent what the protocol does not allow. Its connection is closed; the run goes on."""


class InvalidEventError(ProtocolError):
    """An event that the sync model's contract does not allow. The model's state is unchanged."""


class PeerLostError(PacelineError):
    """The other end of a connection is gone."""


class DeadlineError(PacelineError):
    """Something took longer than it was allowed to."""


class RunFailedError(PacelineError):
    """A process of the run failed. The message holds that process's own traceback.

    Attributes:
        process: who failed, for example ``"worker 2"``.
        reason: one line, the error itself.
        traceback: the failing process's own traceback, or "" if it left none.
    """

    def __init__(self, process: str, reason: str, traceback: str = "") -> None:
        super().__init__(process, reason, traceback)
        self.process = process
        self.reason = reason
        self.traceback = traceback

    def __str__(self) -> str:
        shown = f"\n{self.traceback.rstrip()}" if self.traceback else ""
        return f"{self.process} failed: {self.reason}{shown}"


class InternalError(PacelineError):
    """An invariant of Paceline's own is broken. Please report it, with the events that the message shows."""

    def __init__(self, what: str, story: tuple[object, ...] = ()) -> None:
        super().__init__(what, story)
        self.what = what
        self.story = story

    def __str__(self) -> str:
        lines = [f"{self.what} (this is a bug in Paceline; please report it)"]
        lines += [f"  {event!r}" for event in self.story]
        return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """Return the type of any error and the first line of what it says.

    >>> first_line(ValueError("the labels are missing\\nin 3 files"))
    'ValueError: the labels are missing'
    """
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    said = str(error).strip().partition("\n")[0]
    return f"{name}: {said}" if said else name


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> ConfigurationError:
    """The error for a name that is not one of `choices`: names the nearest one, then all of them."""
    known = sorted(choices)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigurationError(f"unknown {kind} {name!r}{hint or '.'} Choices: {', '.join(known)}.")
