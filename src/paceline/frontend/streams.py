"""The streams of epochs of a worker: which passes belong together, and how many of them have begun."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from weakref import ref

from ..core.protocol.messages import MOST_LOADERS
from ..errors import ConfigurationError
from .of_session import OfSession

__all__ = ["Stream", "Streams", "streams_of"]

log = logging.getLogger("paceline.frontend.data")


class Stream:
    """The passes over one source, and the place in the script where the source is distributed.

    Attributes:
        number: this worker's number for the stream.
        name: name of the stream, which is the same in all workers.
        epoch: number of the last pass that has begun, counted from 0; -1 before the first one.
        first: number of the pass that is epoch 0 for `set_epoch`; None if this is not known, because the worker has
            joined late.
        skipped: number of passes that the job had begun, and that this worker does not make, because it has joined
            late.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.epoch = -1
        self.first: int | None = 0
        self.skipped = 0
        self._key: Callable[[], object] = lambda: None
        self._weak = True
        self._warned: set[str] = set()

    def warn(self, warnings: Iterable[str]) -> None:
        """Log warnings about the source. Each of them is logged only once, even if every epoch repeats it."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s", warning)

    def serves(self, key: object) -> bool:
        """Return True if this is the stream of the source with this key."""
        return self._key() is key

    @property
    def free(self) -> bool:
        """True if another source may take over the stream: its source no longer exists, or cannot be tracked."""
        return not self._weak or self._key() is None

    def adopt(self, key: object) -> None:
        """Become the stream of another source."""
        try:
            self._key, self._weak = ref(key), True
        except TypeError:  # for example, a list
            self._key, self._weak = lambda: key, False


class Streams:
    """The streams of one worker.

    A stream belongs to a call of `distribute` in the script and to a dataset, not to a loader. So `distribute` may be
    called once or in every epoch, even with a new loader each time. If the dataset is new each time as well, its
    stream continues the stream of an earlier dataset that no longer exists. Since all workers run the same script,
    they give a stream the same name, even if one of them distributes more sources than the others.
    """

    def __init__(self) -> None:
        self._by_site: dict[str, list[Stream]] = {}
        self._count = 0
        # name -> number of passes that the job had begun when the worker joined
        self._skipped: dict[str, int] = {}

    @property
    def passes(self) -> tuple[tuple[str, int], ...]:
        """(name, number of passes that have begun) for each stream."""
        begun = {stream.name: stream.epoch + 1 for streams in self._by_site.values() for stream in streams}
        return tuple({**self._skipped, **begun}.items())

    def skip(self, passes: Iterable[tuple[str, int]]) -> None:
        """Skip the passes that the job had begun when the worker joined: (name, number of passes)."""
        self._skipped = dict(passes)
        for streams in self._by_site.values():
            for stream in streams:
                self._skip_in(stream)

    def of(self, key: object, site: str) -> Stream:
        """Return the stream of a source that is distributed at this place in the script."""
        streams = self._by_site.setdefault(site, [])
        for stream in streams:
            if stream.serves(key):
                return stream
        for stream in streams:
            if stream.free:
                break
        else:
            if self._count == MOST_LOADERS:
                raise ConfigurationError(
                    f"distribute() was called for more than {MOST_LOADERS} datasets that still exist. Delete the "
                    "datasets that are no longer used."
                )
            stream = Stream(self._count, f"{site}#{len(streams)}")
            self._skip_in(stream)
            self._count += 1
            streams.append(stream)
        stream.adopt(key)
        return stream

    def _skip_in(self, stream: Stream) -> None:
        if (passes := self._skipped.get(stream.name, 0)) > stream.epoch + 1:
            stream.skipped += passes - 1 - stream.epoch
            stream.epoch, stream.first = passes - 1, None


streams_of = OfSession(lambda _: Streams())
"""Returns the streams of a worker, given its session."""
