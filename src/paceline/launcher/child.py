"""What a process of a run does once it has started (see `boot`): it becomes a server or a worker.

It learns its place in the run from one environment variable. A worker runs the user's script as `python script.py`
would, or calls the function that it reads from its standard input. A server finds there where modules are looked
for, and the conditions that it could not import.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import cloudpickle
import msgspec

from ..errors import PeerLostError, first_line
from ..frontend import session as sessions
from ..runtime.job import JOB_VARIABLE, Place
from ..runtime.server import serve
from ..runtime.worker import WorkerSession
from ..sync.user_conditions import local_conditions
from .endings import EXIT_PEER_LOST

__all__ = ["main"]


def main() -> int:
    """Be the process that the environment says; return its exit code."""
    place = msgspec.msgpack.decode(bytes.fromhex(os.environ.pop(JOB_VARIABLE)), type=Place)
    logging.basicConfig(level=os.environ.get("PACELINE_LOG", "WARNING"), format="%(name)s: %(message)s")
    if place.role == "server":  # which ignores Ctrl-C: the launcher decides when a server ends
        sys.path[:] = cloudpickle.load(sys.stdin.buffer)
        local_conditions.update(cloudpickle.load(sys.stdin.buffer))
        serve(place)
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    session = WorkerSession.connect(place)
    sessions.install(session)
    try:
        _train(sys.argv[1:])
    except SystemExit as end:
        if end.code not in (None, 0):
            session.fail(_ending(end.code), "")
            return 1
    except BaseException as error:  # whatever the script raises is reported, once, by the launcher
        consequence = _follows_from_a_loss(error)
        session.fail(first_line(error), _own_traceback(error), consequence=consequence)
        return EXIT_PEER_LOST if consequence else 1
    session.finish()
    session.close()
    return 0


def _train(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "function":
        sys.path[:] = cloudpickle.load(sys.stdin.buffer)
        function, args = cloudpickle.load(sys.stdin.buffer)
        function(*args)
        return
    script, *script_arguments = rest
    sys.argv = [script, *script_arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _ending(code: object) -> str:
    """How a script ended that has called `sys.exit(code)`: a text there means exit code 1."""
    if isinstance(code, int):
        return f"the script ended with exit code {code}"
    return f"the script ended with exit code 1: {code}"


def _follows_from_a_loss(error: BaseException | None) -> bool:
    """True if an error came of another process being gone, whatever the script has made of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PeerLostError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _own_traceback(error: BaseException) -> str:
    """The traceback as the script's author would see it: without the frames of whoever called the script."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and _is_ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def _is_ours(filename: str) -> bool:
    """True for this file, for `boot.py` beside it, and for what runs a script."""
    return (
        os.path.dirname(filename) == os.path.dirname(__file__)
        or filename == runpy.__file__
        or filename.startswith("<frozen ")
    )
