"""A worker's session in a live run: its connections, its memory, and the emulation of unequal machines.

One thread, the script's own. A commit sends every shard its slice at once and then waits until every shard has
answered, in whatever order; the coordinator's plans, restarts and changes are read in passing. What each iteration
cost is written to `worker-<index>.jsonl` in the run directory.
"""

from __future__ import annotations

import contextlib
import math
import random
import select
import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import safetensors.torch
import torch

from ..buffers import pack
from ..errors import ConfigurationError, PeerLostError, ProtocolError
from ..layout import ShardSlice
from ..shard import Vectors
from ..sync import SyncModel
from ..sync.following import WorkerSync
from ..sync.schedule import read_schedule
from ..wire.addresses import connect
from ..wire.memory import Region, cut
from ..wire.messages import (
    Answer,
    Begun,
    Changing,
    Commit,
    Failed,
    FetchState,
    Finished,
    FromCoordinatorToWorker,
    FromServer,
    Hello,
    InitialState,
    InitialWeights,
    Message,
    ModelSpec,
    Notify,
    PullAgain,
    Refused,
    Register,
    RequestSync,
    Restart,
    Started,
    State,
    Status,
    Stopping,
)
from ..wire.stream import Stream
from .holdings import STATE_LIMIT_FACTOR, STATE_SLACK_BYTES, tensors_over
from .job import Place
from .records import IterationRecord

__all__ = ["WorkerSession"]

STATUS_INTERVAL_S = 0.1
GOODBYE_TIMEOUT_S = 5.0


class WorkerSession:
    """See `paceline.runtime.session.Session` for the contract."""

    def __init__(self, place: Place, coordinator: Stream[FromCoordinatorToWorker]) -> None:
        job = place.job
        self.worker = place.index
        self.workers = job.workers
        self.seed = job.seed
        self.counts_epochs = any(step.epoch is not None for step in job.sync.steps)
        self.skips_nan = job.on_nan == "skip"
        self.weights: Vectors = {}
        self.gradients: Vectors = {}
        self._job = job
        self._sync = WorkerSync(job.sync, job.servers)
        self._requests: list[RequestSync] = []  # made before training has begun
        self._restarted: tuple[float, float] | None = None  # when this one was dropped, and when started anew
        self._computed_s = 0.0  # when the gradient at hand was ready
        self._jitter = random.Random(f"paceline jitter {job.seed} {place.index}")
        self._coordinator = coordinator
        self._selector = selectors.DefaultSelector()
        self._selector.register(coordinator, selectors.EVENT_READ)
        self._orders = select.poll()  # for the coordinator's alone
        self._orders.register(coordinator, select.POLLIN)
        self._servers: list[Stream[FromServer]] = []  # one for each shard, in order
        self._shards: tuple[ShardSlice, ...] = ()
        self._region: Region | None = None
        self._awaited: set[int] = set()  # shards that have yet to answer
        self._states: dict[int, bytearray] = {}  # shard -> its optimizer state, while it is fetched
        self._started: Started | None = None  # the coordinator's word that training begins
        self._begun_s: float | None = None  # when this iteration's weights came; None before the first
        self._status_s = -math.inf
        self._shown = ""
        self._finished = False
        self._log = Path(job.run_dir, f"worker-{place.index}.jsonl").open("wb")  # noqa: SIM115  # closed with the session

    @classmethod
    def connect(cls, place: Place) -> WorkerSession:
        """A session whose coordinator knows that this worker is alive. Raises `PeerLostError`."""
        stream: Stream[FromCoordinatorToWorker] = Stream(connect(place.coordinator), FromCoordinatorToWorker)
        stream.send(Hello(place.job.token, "worker", place.index))
        return cls(place, stream)

    # -- the session's contract ---------------------------------------------------------------------------

    def begin(self, model: ModelSpec) -> bool:
        self._send(self._coordinator, Register(model))
        started = self._await_start()
        self._shards = started.shards
        shared = self._job.transport == "shm"
        self._region = region = Region.create(model.layout, shared=shared)
        self.weights = tensors_over(region.weights)
        self.gradients = tensors_over(region.gradients)
        descriptors = [region.descriptor] if region.descriptor is not None else []
        hello = Hello(
            self._job.token, "worker", self.worker, memory_bytes=region.size_bytes if descriptors else 0
        )
        for address in started.addresses:
            stream: Stream[FromServer] = Stream(connect(address), FromServer, self._payload_targets)
            self._servers.append(stream)
            self._selector.register(stream, selectors.EVENT_READ)
            self._send(stream, hello, descriptors=descriptors)
        for request in self._requests:
            self._send(self._coordinator, request)
        self._requests = []
        return started.publisher == self.worker

    def publish(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        assert self._region is not None
        for shard, stream in zip(self._shards, self._servers, strict=True):
            state = state_of(shard)
            if state:
                blob = safetensors.torch.save({key: value.contiguous() for key, value in state.items()})
                self._send(stream, InitialState(shard.index), [memoryview(blob)])
            payload = list(cut(self._region.weights, shard).values())
            if shard.index == 0:
                payload += pack(buffers)
            self._send(stream, InitialWeights(shard.index), payload, stable=True)
        self.await_first_weights()

    def await_first_weights(self) -> None:
        self._await_answers()
        self._begun_s = self._job.now_s()
        self._show("computing", None)

    @property
    def iteration(self) -> int:
        return self._sync.iteration

    @property
    def needs_significance(self) -> bool:
        return self._sync.needs_significance

    @property
    def may_restart(self) -> bool:
        return self._sync.may_restart

    def restart_ordered(self) -> bool:
        self._hear_coordinator()
        return self._sync.restart_ordered

    def hold_back(self) -> bool:
        """Sleep until this iteration has taken as long as on the machine that is emulated."""
        assert self._begun_s is not None
        job = self._job
        self._computed_s = now_s = job.now_s()
        if job.pace_s or job.slowdown:
            begun_s = self._restarted[1] if self._restarted is not None else self._begun_s
            computed_s = now_s - begun_s
            factor = 1 + job.jitter * self._jitter.uniform(-1, 1)
            pace_s = job.pace_s[self.worker] if job.pace_s else 0.0
            slowdown = job.slowdown[self.worker] if job.slowdown else 1.0
            until_s = begun_s + max(computed_s, max(pace_s, computed_s * slowdown) * factor)
            while now_s < until_s:
                if not self.may_restart:
                    time.sleep(until_s - now_s)
                elif self.restart_ordered():
                    return False
                else:
                    self._orders.poll((until_s - now_s) * 1000)
                now_s = job.now_s()
        return not (self.may_restart and self.restart_ordered())

    def pull_again(self) -> None:
        dropped_s = self._job.now_s()
        self._sync.restarted()
        for shard, stream in zip(self._shards, self._servers, strict=True):
            self._send(stream, PullAgain(shard.index, self.iteration))
        self._await_answers()
        self._restarted = dropped_s, self._job.now_s()

    def epoch_begins(self, epoch: int) -> None:
        self._sync.reach(epoch)

    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        request = RequestSync(*self._sync.ask(read_schedule(sync).first, self.workers, shard))
        if self._started is None:
            self._requests.append(request)
        else:
            self._send(self._coordinator, request)

    def commit(
        self,
        present: bytes,
        groups: bytes,
        *,
        empty: bool,
        significance: float | None,
        buffers: Mapping[int, torch.Tensor],
        loss: float | None,
    ) -> None:
        assert self._region is not None
        assert self._begun_s is not None
        self._hear_coordinator()
        for request in self._sync.due():
            self._send(self._coordinator, RequestSync(*request))
        stop, change, notify, progress = self._sync.push()
        pushed_s = self._job.now_s()
        for shard, stream in zip(self._shards, self._servers, strict=True):
            mine = buffers if shard.index == 0 else {}
            payload = [] if empty else self._region.outgoing(shard)
            message = Commit(
                shard.index,
                self.iteration,
                present,
                groups,
                empty=empty,
                stop=stop,
                change=change,
                significance=significance,
                progress=progress,
                buffers=tuple(mine),
            )
            self._send(stream, message, payload + pack(list(mine.values())), stable=True)
        superstep = stop.superstep if stop is not None else None
        number = change.number if change is not None else None
        if notify:
            self._send(self._coordinator, Notify(self.iteration, superstep, number))
        self._await_answers(loss)
        answered_s = self._job.now_s()
        dropped_s, restarted_s = self._restarted or (None, None)
        record = IterationRecord(
            iteration=self.iteration,
            begun_s=self._begun_s,
            computed_s=self._computed_s,
            pushed_s=pushed_s,
            answered_s=answered_s,
            loss=loss,
            superstep=superstep,
            change=number,
            dropped_s=dropped_s,
            restarted_s=restarted_s,
        )
        self._log.write(msgspec.json.encode(record) + b"\n")
        self._begun_s, self._restarted = answered_s, None
        if self._sync.answered():
            self._send(self._coordinator, Begun(self.iteration))
        self._show("computing", loss)

    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        self._awaited = {shard.index for shard in self._shards}
        for shard, stream in zip(self._shards, self._servers, strict=True):
            self._send(stream, FetchState(shard.index))
        while self._awaited:
            self._hear(timeout_s=None)
        fetched = [
            (shard, safetensors.torch.load(bytes(self._states[shard.index]))) for shard in self._shards
        ]
        self._states = {}
        return fetched

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        for stream in self._streams():
            with contextlib.suppress(PeerLostError):  # whoever is gone need not be told
                stream.send(Finished())
                stream.drain(GOODBYE_TIMEOUT_S)
        self._log.flush()

    # -- for whoever runs the script ----------------------------------------------------------------------

    def fail(self, reason: str, traceback: str) -> None:
        """Report that the script raised; the run is over."""
        with contextlib.suppress(PeerLostError):  # the coordinator is gone: nobody is left to tell
            self._coordinator.send(Failed(reason, traceback))
            self._coordinator.drain(GOODBYE_TIMEOUT_S)

    def close(self) -> None:
        """Close the connections."""
        for stream in self._streams():
            stream.close()
        self._selector.close()
        if self._region is not None:
            self._region.close()
        self._log.close()

    # -- connections --------------------------------------------------------------------------------------

    def _await_start(self) -> Started:
        while self._started is None:
            self._hear(timeout_s=None)
        return self._started

    def _await_answers(self, loss: float | None = None) -> None:
        """Wait until every shard has answered."""
        self._awaited = {shard.index for shard in self._shards}
        while self._awaited:
            if not self._hear(timeout_s=STATUS_INTERVAL_S) and self._begun_s is not None:
                self._show("waiting" if len(self._awaited) == len(self._shards) else "pulling", loss)

    def _hear(self, timeout_s: float | None) -> bool:
        """Handle what arrives within the time; False if nothing did."""
        ready = self._selector.select(timeout_s)
        for key, events in ready:
            stream = key.fileobj
            assert isinstance(stream, Stream)
            if events & selectors.EVENT_WRITE:
                stream.flush()
                self._watch(stream)
            if events & selectors.EVENT_READ:
                if stream is self._coordinator:
                    self._hear_coordinator()
                else:
                    self._hear_server(stream.receive())
        return bool(ready)

    def _hear_server(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case Answer():
                    self._sync.hear_answer(message.v_train)
                    self._awaited.discard(message.shard)
                case State():
                    self._awaited.discard(message.shard)
                case _:
                    raise ProtocolError(f"a server sent {type(message).__name__}")

    def _hear_coordinator(self) -> None:
        for message in self._coordinator.receive():
            match message:
                case Stopping():
                    self._sync.plan(message.stop, message.iteration)
                case Restart():
                    self._sync.order_restart(message.iteration)
                case Changing():
                    self._sync.announce(message.change)
                case Started():
                    self._started = message
                case Refused():
                    raise ConfigurationError(message.reason)

    def _send(
        self,
        stream: Stream[Any],
        message: Message,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
        *,
        stable: bool = False,
    ) -> None:
        stream.send(message, payload, descriptors, stable=stable)
        self._watch(stream)

    def _payload_targets(self, message: Message, size_bytes: int) -> list[memoryview]:
        assert self._region is not None
        shards = {shard.index: shard for shard in self._shards}
        match message:
            case Answer() if message.shard in self._awaited:
                return self._region.incoming(shards[message.shard])
            case State() if message.shard in self._awaited:
                limit_bytes = STATE_LIMIT_FACTOR * shards[message.shard].size_bytes + STATE_SLACK_BYTES
                if size_bytes > limit_bytes:
                    raise ProtocolError(
                        f"an optimizer state of {size_bytes} bytes, expected <= {limit_bytes}"
                    )
                self._states[message.shard] = bytearray(size_bytes)
                return [memoryview(self._states[message.shard])]
            case _:
                return []

    def _streams(self) -> list[Stream[Any]]:
        return [*self._servers, self._coordinator]

    def _watch(self, stream: Stream[Any]) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.backlog else 0)
        if self._selector.get_key(stream).events != wanted:
            self._selector.modify(stream, wanted)

    def _show(self, state: Literal["computing", "waiting", "pulling"], loss: float | None) -> None:
        """Tell the user what this worker does, at most every tenth of a second; but never leave it at waiting."""
        now_s = self._job.now_s()
        due = now_s - self._status_s >= STATUS_INTERVAL_S
        if (state != self._shown and (due or state == "computing")) or (due and state == "computing"):
            self._send(self._coordinator, Status(self.iteration, loss, state))
            self._status_s, self._shown = now_s, state
