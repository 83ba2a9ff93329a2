"""The training loop over `paceline.epochs` that a worker runs: the limits of the loop, and the progress of the job."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakMethod, ref

from ..core.lease import Batch
from ..core.messages import LoopLimits
from .session import OfSession, Session


class Limits(NamedTuple):
    """The limits of a training loop, counted from its beginning.

    Attributes:
        epochs: number of epochs; None for no limit.
        time_s: time in seconds.
        updates: number of updates of the weights.
        samples: number of samples that all workers together use.
    """

    epochs: int | None = None
    time_s: float = math.inf
    updates: float = math.inf
    samples: float = math.inf

    @property
    def told(self) -> LoopLimits:
        """The limits that the coordinator is told, so that it can show how long the loop will take."""
        return LoopLimits(
            _most(self.epochs),
            self.time_s if self.time_s < math.inf else None,
            _most(self.updates),
            _most(self.samples),
        )


def _most(limit: float | None) -> int | None:
    """Return a limit that may be sent; None for no limit."""
    return None if limit is None or math.isinf(limit) else min(int(limit), 2**53)


class Loop(Protocol):
    """A training loop over epochs."""

    @property
    def limits(self) -> Limits: ...

    @property
    def over(self) -> bool:
        """True if the loop must end, because it was stopped or has reached a limit."""

    def done(self) -> LoopProgress | None:
        """Return the progress since the loop began; None if the beginning is not known yet."""


_active: WeakKeyDictionary[Session, Loop] = WeakKeyDictionary()


def enter_loop(session: Session, loop: Loop) -> None:
    """Record that the script of a worker begins a loop."""
    _active[session] = loop


def leave_loop(session: Session) -> None:
    """Record that the script of a worker has left its loop."""
    _active.pop(session, None)


def active_loop(session: Session) -> Loop | None:
    """Return the loop over epochs that a worker is in, if any."""
    return _active.get(session)


# -- How far a script has come with the data of a distributed loader -----------------------------------------
#
# With a dynamic split, a worker's own iteration count says little about the progress of the job, because a
# fast worker performs more iterations than a slow one. The position of a batch in the order of its epoch
# shows the progress exactly.


class Position:
    """The progress of a script through the data of a distributed loader.

    Args:
        joint: number of positions in a joint batch, which consists of one batch of each worker.
        name: name of the loader's stream of epochs (see `DataStream`), which is the same in all workers.

    Attributes:
        drawn: number of batches that the script of this worker has drawn.
        drawn_in_pass: number of batches that the script of this worker has drawn in the current pass.
        epoch: the epoch whose batches the job is handing out, as far as the drawn batches show.
        joint_batches: number of joint batches of this epoch that the job has begun, as far as the drawn batches show.
        end: the position after the last joint batch of this epoch that the job has begun, as far as the drawn batches
            show.
        skipped: number of joint batches that the script has skipped at the beginning of the first pass.
        passes: for each pass over the loader that has begun, the number of its epoch. A worker that has joined late
            does not count the passes that it has missed, so its first pass has the same number as in other workers.
        in_pass: True while the script is making a pass.
        dynamic: True if the data of the current pass is handed out dynamically.
    """

    def __init__(self, joint: int, name: str) -> None:
        self.name = name
        self.drawn = self.drawn_in_pass = self.epoch = self.joint_batches = self.end = self.skipped = 0
        self.passes: list[int] = []
        self.in_pass = False
        self.dynamic = False
        self._joint = joint
        self._followers: list[WeakMethod[Callable[[], None]]] = []

    def follow(self, catch_up: Callable[[], None]) -> None:
        """Call a method at the end of each pass. The object of the method is not kept alive."""
        self._followers.append(WeakMethod(catch_up))

    @contextmanager
    def making_a_pass(self, session: Session, epoch: int, *, dynamic: bool) -> Iterator[None]:
        """Return a context in which the script makes a pass over the loader.

        Args:
            session: this worker's session.
            epoch: number of the epoch. See `passes`.
            dynamic: True if the data of the pass is handed out dynamically.
        """
        self.passes.append(epoch)
        self.drawn_in_pass = 0
        number = len(self.passes)
        self.in_pass, self.dynamic = True, dynamic
        _positions[session] = ref(self)
        try:
            yield
        finally:
            # The iterator of an earlier pass may outlive that of a later pass. Only the end of the latest pass clears
            # `in_pass`.
            self.in_pass = self.in_pass and len(self.passes) != number

    def draw(self, batch: Batch) -> None:
        """Record that the script has drawn a batch."""
        self.drawn += 1
        self.drawn_in_pass += 1
        # A batch that a lost worker has not used may precede the batches that were drawn before, and may even belong to
        # an earlier epoch.
        self._reach(batch.epoch, batch.start // self._joint + 1, batch.start + batch.size)

    def complete(self, epoch: int) -> None:
        """Record that all batches of an epoch have been handed out."""
        self._reach(epoch, sys.maxsize, sys.maxsize)
        for follower in self._followers:
            if (catch_up := follower()) is not None:
                catch_up()

    def _reach(self, *place: int) -> None:
        """Advance to a place in the data: an epoch, a number of joint batches of it, and a position in it."""
        self.epoch, self.joint_batches, self.end = max(place, (self.epoch, self.joint_batches, self.end))


def current_position(session: Session) -> Position | None:
    """Return the position in the loader over which a worker is making a pass; None if it is not making a pass."""
    position = latest_position(session)
    return position if position is not None and position.in_pass else None


def latest_position(session: Session) -> Position | None:
    """Return the position in the loader over which a worker has made its latest pass, if any."""
    found = _positions.get(session)
    return found() if found is not None else None


_positions: WeakKeyDictionary[Session, ref[Position]] = WeakKeyDictionary()


# -- The progress of training: the number of updates of the weights, and the number of samples that were used
#
# In a run, the answers of shard 0 contain the progress of all workers together. The script's own share, and
# everything outside a run, is counted here.


class LoopProgress(NamedTuple):
    """The progress of training.

    Attributes:
        steps: number of steps that the script of this worker has made with its optimizers.
        updates: number of updates of the weights by all workers together.
        samples: number of samples that all workers together have used, as far as they are known.
        own_samples: number of samples that this worker has used, as far as they are known.
    """

    steps: int = 0
    updates: int = 0
    samples: int = 0
    own_samples: int = 0

    def since(self, earlier: LoopProgress) -> LoopProgress:
        """Return the difference between this progress and an earlier one."""
        return LoopProgress(*(now - then for now, then in zip(self, earlier, strict=True)))


class _Own:
    """The steps of the script of one worker, and the samples in them."""

    def __init__(self) -> None:
        self.steps = self.samples = 0


def progress_of(session: Session | None) -> LoopProgress:
    """Return the progress of a run, or, if there is no session, that of a script outside a run."""
    if session is None:
        return _alone
    own = _own(session)
    return LoopProgress(own.steps, session.core.updates, session.core.samples, own.samples)


def set_batch(samples: int | None) -> None:
    """Set the batch size of a script outside a run; None if it is unknown."""
    global _batch
    _batch = samples


def count_step(session: Session | None, samples: int | None) -> None:
    """Count a step of the script.

    Args:
        session: the session of this worker; None outside a run.
        samples: number of samples in the step; None if it is unknown. Outside a run, the step then counts as one
            batch.
    """
    global _alone
    if session is not None:
        own = _own(session)
        own.steps += 1
        own.samples += samples or 0
        return
    known = samples if samples is not None else _batch or 0
    _alone = LoopProgress(*(a + b for a, b in zip(_alone, (1, 1, known, known), strict=True)))


_alone = LoopProgress()
_batch: int | None = None
_own = OfSession(lambda _: _Own())


# -- Progress bars over a loader whose data is handed out dynamically ----------------------------------------
#
# A bar takes `len()` of the loader for the number of batches. But with a dynamic split, a fast worker
# receives more batches, and a slow worker fewer. tqdm would then drop the bar of a fast worker, and never
# fill the bar of a slow worker.


def bars_over(loader: object) -> Sequence[Any]:
    """Return the bars of tqdm that iterate over a loader.

    Their attribute `total` is the expected number of batches.
    """
    tqdm = sys.modules.get("tqdm.std")  # if the script has not imported tqdm, there are no bars
    return [bar for bar in tqdm.tqdm._instances if bar.iterable is loader] if tqdm else []


def expected_batches(drawn: int, begun: int, rounds: int) -> int:
    """Return how many batches a worker will have drawn at the end of an epoch, if all speeds stay as they are.

    Args:
        drawn: number of batches that the worker has drawn in this epoch.
        begun: number of joint batches of this epoch that the job has begun.
        rounds: number of joint batches of the epoch.

    >>> expected_batches(drawn=15, begun=10, rounds=50)  # the worker is 1.5 times faster than the mean
    75
    """
    return max(drawn, round(drawn * max(rounds, begun) / begun))
