"""`log`, with which a script logs metrics, and the values that it has logged since the worker's last push.

A value in the memory of the CPU is read when the script calls `log`. Reading a value on another device would wait for
this device, so a copy is kept on the device and read at the next push. A push waits for the device anyway, because the
gradient must have been computed.

Most scripts log the loss of an iteration either before its `step()` or right after it. If the script has drawn a batch
or has begun to compute since the last step, the value belongs to the coming step; otherwise, it belongs to the last
step.

A value that a script logs right after its `step()` belongs to the push that has just been made. So the record of this
iteration, and the guard's observation of it, wait for the next push. The loss of an iteration is the loss that the
script has logged; otherwise, the result of a closure; otherwise, a guess: the tensor on which `backward()` was called
(`train/forward.py`). The integration of a framework adds the values that a script logs with the framework.
"""

from __future__ import annotations

import numbers
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import torch

from ..core.messages import LONGEST_NAME, Source
from ..core.metrics import LOSS, MOST_METRICS, Noted, Settled, merge
from ..errors import UsageError
from .forward import Guess, guess_of, keep, read
from .session import OfSession, Session, current

MOST_UNREAD = 1000
"""If there are more values than this, values that were logged at the same progress of the job are merged.

This limits the memory that the values need.
"""

NOTHING, FOLLOWS = Settled(), Settled(follows=True)

LONGEST_REPR = 60
"""Maximum number of characters of a value in an error message."""


def log(**metrics: Any) -> None:
    """Log metrics, such as `paceline.log(loss=loss, accuracy=0.9)`.

    Any worker may call this function at any time: in some or all iterations, before the first step, during an
    evaluation, and after the last step. The values of all workers are merged over the progress of the job: the samples
    that the job uses are divided into buckets, and all values in a bucket are replaced by their mean, weighted by the
    numbers of samples of the workers' steps. Values that were logged only inside `paceline.evaluating()`, or only by
    the main worker, are not merged with the values of other workers. The result is in `history` of the run's result,
    and in `metrics.jsonl` in the run directory.

    The metric `loss` is shown as the loss of the worker. Log the loss of the iteration, either before `step()` or
    between `step()` and the next batch: the guard of the run looks at this loss. If the script does not log `loss`, the
    result of a closure of `step()` is logged as `loss`.

    The call does not wait for a device. A tensor is copied, so it may be changed afterwards. Outside a run, the call
    only checks its arguments.

    Args:
        metrics: numbers, which may be NaN or infinite, or tensors of one number. A name has at most 100 characters,
            and a script may log at most 200 names.

    Raises:
        UsageError: a value is not a real number, or there are too many names, or a name is too long.

    Example:
        >>> import paceline, torch
        >>> paceline.log(loss=torch.tensor(0.25), accuracy=0.9)
        >>> paceline.log(loss="low")
        Traceback (most recent call last):
            ...
        paceline.errors.UsageError: log() got 'loss' = 'low', expected a real number or a tensor of one real number.
    """
    session = current()
    if session is None:
        _checked(metrics, set())
    else:
        metrics_of(session).add(session, metrics)


class _Entry(NamedTuple):
    """A value that a script has logged since the last push.

    Attributes:
        noted: the value, and where and when it was logged.
        unread: the value if it has yet to be read, so that `noted` does not contain it; else None.
        is_loss: True if the value may be the loss of one iteration. A framework may log a mean over several iterations.
        repeats: True if a closure has logged the value. If the closure is restarted, it logs the value again.
    """

    noted: Noted
    unread: torch.Tensor | None
    is_loss: bool
    repeats: bool


class MetricLog:
    """The values that the script of one worker has logged since the worker's last push.

    Any thread may add values. Only the thread that trains may call the other methods.

    Args:
        guess: the script's calls of `backward()`, from which the loss is guessed if the script logs no loss.
    """

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._names: set[str] = set()
        self._follows = False  # True if the script logs the loss of an iteration after its step
        self._entries: deque[_Entry] = deque()
        self._most = MOST_UNREAD  # number of entries after which they are merged
        self._draining = threading.Lock()
        # (samples, updates) at the beginning of the evaluation in progress; None if there is none
        self._evaluated: tuple[int, int] | None = None

    def add(self, session: Session, metrics: Mapping[str, Any], *, of_iteration: bool = True) -> None:
        """Add values that the script has logged. See `log`.

        Args:
            session: the session of the worker.
            metrics: name -> value.
            of_iteration: False if the loss may be a mean over several iterations.
        """
        values = _checked(metrics, self._names)
        evaluated = self._evaluated
        samples, updates = evaluated or _progress(session)
        late = not (self._guess.computes or session.core.data.has_drawn)
        now_s = session.now_s
        evaluating = evaluated is not None
        for name, value in values.items():
            unread = value if isinstance(value, torch.Tensor) else None
            number = 0.0 if isinstance(value, torch.Tensor) else value
            noted = Noted(name, number, now_s, samples, updates, "script", evaluating, late)
            is_loss = of_iteration and name == LOSS and not evaluating
            self._entries.append(_Entry(noted, unread, is_loss, self._guess.in_closure))
        if len(self._entries) > self._most:
            self._compact()

    def add_legal(self, session: Session, metrics: Mapping[Any, Any]) -> None:
        """Add values that a framework has logged, except those that `log` refuses: libraries also log texts and
        pictures.
        """
        for name, value in metrics.items():
            with suppress(UsageError):
                self.add(session, {name: value}, of_iteration=False)

    @contextmanager
    def evaluation(self, session: Session) -> Iterator[None]:
        """Return a context for an evaluation of the weights that the script has at the beginning of the context."""
        self._evaluated = _progress(session)
        try:
            yield
        finally:
            self._evaluated = None

    @contextmanager
    def closure(self) -> Iterator[None]:
        """Return a context in which a closure runs, which may be aborted and restarted."""
        self._guess.in_closure = True
        try:
            yield
        finally:
            self._guess.in_closure = False

    def restart(self) -> None:
        """Drop the values that were logged by a closure that was aborted and is restarted."""
        with self._draining:
            for _ in range(len(self._entries)):
                if not (entry := self._entries.popleft()).repeats:
                    self._entries.append(entry)

    def settle(
        self, session: Session, *, result: float | None = None, has_closure: bool = False, sets: int = 1
    ) -> Settled:
        """Before the next push, read all values that were logged since the last push.

        Args:
            session: the session of the worker.
            result: the number that the closure of the step has returned; None if there is none. If this number belongs
                only to a part of the gradient, it is not used as the loss.
            has_closure: True if the step has a closure.
            sets: number of parameter sets that the script trains.
        """
        self._guess.computes = False
        if has_closure and self._guess.accumulates():
            result = None
        guess = self._guess.take(usable=not has_closure and sets == 1)
        if not self._entries and result is None and guess is None:
            return FOLLOWS if self._follows else NOTHING
        noted: list[Noted] = []
        logged = earlier_loss = shown = None
        if self._entries:
            entries = self._drain()
            noted = [entry.noted for entry in entries]
            losses = [entry.noted for entry in entries if entry.is_loss]
            if losses:
                self._follows = losses[-1].late
                logged = _mean([loss for loss in losses if not loss.late])
                earlier_loss = _mean([loss for loss in losses if loss.late])
            shown = next((each.value for each in reversed(noted) if _is_loss(each)), None)
        guessed = False
        if result is not None:
            noted.append(_automatic(session, result, "closure"))
        elif guess is not None and shown is None:
            noted.append(_automatic(session, guess, "guess"))
            guessed = True
        loss = result if logged is None else logged
        if shown is None:
            shown = guess if guessed else result
        return Settled(noted, loss, loss is None and self._follows, earlier_loss, shown, guessed)

    def settle_rest(self) -> Settled:
        """If no other push follows, read all values that were logged since the last push."""
        entries = self._drain()
        losses = [entry.noted for entry in entries if entry.is_loss and entry.noted.late]
        return Settled([entry.noted for entry in entries], earlier_loss=_mean(losses))

    def _drain(self) -> list[_Entry]:
        """Take all entries, and read their values."""
        with self._draining:
            entries = [self._entries.popleft() for _ in range(len(self._entries))]
            self._most = MOST_UNREAD
        return [entry if entry.unread is None else _read(entry, entry.unread) for entry in entries]

    def _compact(self) -> None:
        """Merge values that were logged at the same progress, because a script logs very many values between two
        pushes.
        """
        entries = self._drain()
        for kind in sorted({entry[2:] for entry in entries}):
            merged = merge(entry.noted for entry in entries if entry[2:] == kind)
            self._entries.extend(_Entry(noted, None, *kind) for noted in merged)
        self._most = max(MOST_UNREAD, 2 * len(self._entries))


def _read(entry: _Entry, unread: torch.Tensor) -> _Entry:
    """Read the value of an entry."""
    return entry._replace(noted=msgspec.structs.replace(entry.noted, value=read(unread)), unread=None)


def _is_loss(noted: Noted) -> bool:
    return noted.name == LOSS and not noted.evaluating


def _automatic(session: Session, loss: float, source: Source) -> Noted:
    """Return a loss that the script has not logged."""
    return Noted(LOSS, loss, session.now_s, *_progress(session), source)


def _progress(session: Session) -> tuple[int, int]:
    """Return the numbers of samples and of updates that the worker's weights contain.

    Before the first update, a shard may have received pushes that these weights do not contain.
    """
    updates = session.core.updates
    return session.core.samples if updates else 0, updates


def _mean(noted: list[Noted]) -> float | None:
    """Return the mean of the values; None if there are none."""
    times = sum(each.times for each in noted)
    return sum(each.value * (each.times / times) for each in noted) if noted else None


def _checked(metrics: Mapping[Any, Any], names: set[str]) -> dict[str, float | torch.Tensor]:
    """Return the values as numbers, or as tensors that have yet to be read. Add the names to `names`.

    Raises:
        UsageError: a name or a value is not legal. Nothing has changed.
    """
    values = {name: _number(name, value) for name, value in metrics.items()}
    if not values.keys() <= names:
        new = values.keys() - names
        for name in new:
            _require_name(name)
        if len(names) + len(new) > MOST_METRICS:
            raise UsageError(
                f"log() got {next(reversed(values))!r}, but a script may log at most {MOST_METRICS} metrics, and this "
                "script would log more. Use the same names in all iterations."
            )
        names |= new
    return values


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
        raise UsageError(
            f"log() got a metric with the name {_short(name)}, expected a name of 1 to {LONGEST_NAME} characters."
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"log() got a metric with the name {name!r}, which is not valid Unicode.") from error


def _number(name: object, value: Any) -> float | torch.Tensor:
    """Return a value as a number, or as a tensor that has yet to be read."""
    if type(value) is float:
        return value
    try:
        if isinstance(value, torch.Tensor):
            if value.numel() == 1 and not value.is_complex() and not value.is_meta:
                return keep(value)
        else:
            if getattr(value, "size", None) == 1 and hasattr(value, "item"):  # of NumPy
                value = value.item()
            if isinstance(value, numbers.Real):
                return float(value)
    except (RuntimeError, TypeError, OverflowError):
        pass  # the message below says what is expected
    given = _short(value)
    if isinstance(value, torch.Tensor):
        given = f"a tensor of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    raise UsageError(
        f"log() got {_short(name)} = {given}, expected a real number or a tensor of one real number."
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_REPR else f"{text[:LONGEST_REPR]}..."


metrics_of = OfSession(lambda session: MetricLog(guess_of(session)))
"""Returns the values that the script of a session's worker has logged since its last push."""
