"""`epochs`, the training loop over the epochs of a run, which all workers end together."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Generator, Iterator
from weakref import WeakKeyDictionary

from ..core.messages import LoopPosition, StopRequested, Warned
from ..core.requests import COORDINATOR, Send
from ..errors import ConfigurationError, UsageError
from ..shard.vectors import decode_states, encode_states
from .collectives import update_main
from .loops import Limits, LoopProgress, enter_loop, latest_position, leave_loop, progress_of
from .session import Session, begins_with_the_run, came_late, current, hold_job_model
from .sources import streams_of
from .worker_state import begin_late, begin_resumed, has_tracked, tracked_states

log = logging.getLogger("paceline.train.epochs")


def epochs(
    count: int | None = None,
    *,
    minutes: float | None = None,
    updates: int | None = None,
    samples: int | None = None,
) -> Epochs:
    """Return the numbers of the epochs to train, for a `for` loop.

    If several limits are given, the first one that is reached ends the loop. All limits count from the beginning of
    the loop. In a run, the first worker to notice that the limit on time, updates or samples has been reached stops
    the loop in all workers: each worker finishes its current iteration, and its pass over a distributed loader ends.
    Outside a run, the loop ends after the current epoch.

    A worker that joins a run in progress begins with the epoch that the job has reached; `track` names the objects of
    the script whose states this worker needs. The limits of this worker's loop count from the same beginning as the
    limits of the other workers.

    A worker that is lost in the last epochs may leave data unused. The workers that have not finished their last epoch
    by then make one more pass, over this data only, for which their loops yield the number of the last epoch again.

    Args:
        count: number of epochs.
        minutes: time after which training ends, in minutes.
        updates: number of updates of the weights, by all workers together. Under `bsp` and other models that average
            the pushes of a round, each round is one update; under models that apply each push on arrival, such as `asp`
            and `ssp`, each push is one update. Pushes that are not applied do not count.
        samples: number of samples that all workers together use. The samples of a push count if the push is applied or
            held to be averaged. Outside a run, each step counts as one full batch of the loader that was given to
            `distribute` last, unless `step(samples=...)` says otherwise.

    Returns:
        An iterator over 0, 1, ..., or, in a worker that joins late, over the remaining numbers. The iterator has the
        method `stop`, which stops the loop in all workers.

    Raises:
        ConfigurationError: no limit is given, or a limit is not positive.
        UsageError: `samples` is given, but no step says how many samples it has used. Raised during the loop.

    Example:
        >>> import paceline
        >>> for epoch in paceline.epochs(3):
        ...     print(epoch)
        0
        1
        2
    """
    if count is None and minutes is None and updates is None and samples is None:
        raise ConfigurationError(
            "epochs() needs a limit: epochs(10), epochs(minutes=30), epochs(updates=1000) or epochs(samples=10**6)."
        )
    for name, value, meaning in (
        ("count", count, "epochs"),
        ("updates", updates, "updates of the weights"),
        ("samples", samples, "samples that all workers together use"),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigurationError(
                f"{name} is {value!r}, expected a positive integer: the number of {meaning}."
            )
    if minutes is not None and not (isinstance(minutes, int | float) and minutes > 0):
        raise ConfigurationError(f"minutes is {minutes!r}, expected a positive number.")
    time_s = math.inf if minutes is None else 60.0 * minutes
    return Epochs(Limits(count, time_s, updates or math.inf, samples or math.inf), current())


class Epochs:
    """A training loop over epochs. See `epochs`.

    Args:
        limits: the limits of the loop.
        session: the session of this worker; None outside a run.

    Attributes:
        limits: the limits of the loop.
    """

    def __init__(self, limits: Limits, session: Session | None) -> None:
        self.limits = limits
        self._session = session
        self._number = -1  # set when the loop begins
        self._begun_s = math.inf
        # The progress at the beginning of the loop. None if it is not known yet, because this worker has not trained
        # in an earlier loop.
        self._begun: LoopProgress | None = None
        self._stopped = False

    def __iter__(self) -> Generator[int]:
        session, count = self._session, self.limits.epochs
        self._begun_s = self._now_s()
        if session is not None:
            self._number = next(_loops.setdefault(session, itertools.count()))
            enter_loop(session, self)
        if session is None or session.weights:
            self._begun = progress_of(session)
        elif self._number == 0:
            self._begun = LoopProgress()
        try:
            first = self._begin()
            if first is None:
                return
            last = max(first - 1, 0)
            for last in itertools.count(first) if count is None else range(first, count):
                if self.over:
                    return
                if session is not None:
                    update_main(session)
                yield last
                over = self.over or last + 1 == count
                self._reach(last + 1, over=over)
                if not over:
                    self._say_idle(last)
            if session is not None and not self.over:
                session.exchange(session.core.data.reopen)
                if session.core.data.has_batches:
                    session.core.data.again = True
                    yield last
                    self._reach(last + 1, over=True)
            self._say_idle(last, over=True)
        finally:
            if session is not None:
                session.core.data.again = False
                leave_loop(session)
                update_main(session)

    def _begin(self) -> int | None:
        """Return the number of the first epoch of this worker; None if the job has ended this loop already."""
        session = self._session
        if session is None:
            return 0
        if session.weights:
            self._reach(0)
            return 0
        session.exchange(lambda: session.core.data.enter(self._number, self.limits.told))
        entered = session.core.data.entered
        position = entered.position
        if position is None:  # the run has only just begun
            begins_with_the_run(session)
            return 0
        hold_job_model(session, newest=True)
        kept = session.servers.fetch_states(entered.address) if position.loop >= self._number else None
        if kept is None:
            begin_resumed(session)
        else:  # even in a resumed run, these states are newer than those in the checkpoint
            position, states = kept
            begin_late(session, decode_states(states))
        streams_of(session).skip(position.passes)
        self._begun_s -= entered.elapsed_s
        if position.loop == self._number:
            self._begun = LoopProgress(0, position.updates, position.samples)
            return position.epoch
        return 0 if position.loop < self._number else None

    def _reach(self, epoch: int, *, over: bool = False) -> None:
        """Report that the script has reached an epoch or the end of the loop, and send the states if necessary."""
        session = self._session
        if session is None or not session.weights:
            return
        begun = self._begun or LoopProgress()
        position = LoopPosition(self._number, epoch, begun.updates, begun.samples, streams_of(session).passes)
        tracks = has_tracked(session)
        limits = self.limits.told
        session.exchange(lambda: session.core.data.reach(position, over=over, tracks=tracks, limits=limits))
        if tracks and session.core.data.states_wanted:
            session.servers.keep_states(position, encode_states(tracked_states(session)))

    def _say_idle(self, epoch: int, *, over: bool = False) -> None:
        """Say that a worker that has joined late had no data in an epoch, because all data was handed out before."""
        session = self._session
        if session is None or session.weights or not came_late(session):
            return
        position = latest_position(session)
        static = position is not None and not position.dynamic
        name = f"epoch {epoch + 1}{'' if self.limits.epochs is None else f' of {self.limits.epochs}'}"
        text = (
            f"the data of {name} was handed out before this worker joined, so the worker takes "
            f"{'no part in the training' if over else 'part from the next epoch on'}."
            f"{' With --split dynamic, a worker that joins gets data of the epoch in progress.' if static else ''}"
        )
        log.warning("%s", text)
        session.exchange(lambda: [Send(COORDINATOR, Warned(text))])

    @property
    def over(self) -> bool:
        """True if the loop must end, because it was stopped or has reached a limit."""
        if self._session is not None and self._number in self._session.core.data.stopped:
            self._stopped = True
        elif not self._stopped and self._has_reached_a_limit():
            self.stop()
        return self._stopped

    def done(self) -> LoopProgress | None:
        """Return the progress since the loop began; None if the beginning is not known yet."""
        now = progress_of(self._session)
        if self._begun is None and self._session is not None and self._session.weights:
            self._begun = now
        return None if self._begun is None else now.since(self._begun)

    def stop(self) -> None:
        """Stop the loop in all workers. Each worker finishes its current iteration."""
        if not self._stopped and self._session is not None:
            self._session.exchange(lambda: [Send(COORDINATOR, StopRequested(self._number))])
        self._stopped = True

    def _has_reached_a_limit(self) -> bool:
        limits = self.limits
        if self._now_s() - self._begun_s >= limits.time_s:
            return True
        if math.isinf(limits.updates) and math.isinf(limits.samples):
            return False
        done = self.done()
        if done is None:
            return False
        if limits.samples < math.inf and done.steps and done.updates and not done.samples:
            raise UsageError(
                "epochs(samples=...) cannot count the samples, because no step says how many it has used. Distribute "
                "a DataLoader with a batch_size, or call optimizer.step(samples=...)."
            )
        return done.updates >= limits.updates or done.samples >= limits.samples

    def _now_s(self) -> float:
        return self._session.now_s if self._session is not None else time.monotonic()


_loops: WeakKeyDictionary[Session, Iterator[int]] = WeakKeyDictionary()
