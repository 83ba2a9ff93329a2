"""Simulations beside a live run, with which `--sync auto` chooses sync models.

Each simulation is a process of its own with a low priority, so that the coordinator never waits for it. A thread
waits for its results. If it fails, or takes too long, the run simply goes on with its sync model.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable, Sequence

import msgspec

from ...core.protocol.requests import Situation
from ...core.sync.auto import Prospect
from .program import execute, main_of

__all__ = ["Rehearsals"]

log = logging.getLogger("paceline.rehearsal")

TIMEOUT_S = 120.0


class Rehearsals:
    """Starts the simulations of a run, one after another. A context manager that ends them.

    An object is a `runtime.coordinator_host.Rehearsal`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def __enter__(self) -> Rehearsals:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()

    def __call__(self, situation: Situation, take: Callable[[Sequence[Prospect]], None]) -> None:
        """Start a simulation, unless another one is in progress. `take` is called with its results."""
        with self._lock:
            if self._over or self._process is not None:
                return
            try:
                self._process = execute(
                    main_of("paceline.sim.rehearse"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                log.warning("a simulation for --sync auto cannot be started: %s", error)
                return
            process = self._process
        data = msgspec.msgpack.encode(situation)
        threading.Thread(
            target=self._await, args=(process, data, take), name="paceline-rehearsal", daemon=True
        ).start()

    def _await(
        self, process: subprocess.Popen[bytes], data: bytes, take: Callable[[Sequence[Prospect]], None]
    ) -> None:
        """Wait for the results of a process, and pass them on."""
        output, errors = b"", b""
        try:
            output, errors = process.communicate(data, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors = f"it took longer than {TIMEOUT_S:g} s".encode()
        finally:
            with self._lock:
                self._process = None
        if process.returncode == 0:
            take(msgspec.msgpack.decode(output, type=list[Prospect]))
        elif not self._over:
            with contextlib.suppress(IndexError):
                errors = errors.strip().splitlines()[-1]
            log.warning("a simulation for --sync auto has failed: %s", errors.decode(errors="replace"))
