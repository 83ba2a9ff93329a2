"""The first code of every process that an engine starts: `python -m paceline.engines.child`.

It learns its place in the run from one environment variable, ties its life to its parent's, and becomes a
server or a worker. A worker runs the user's script as `python script.py` would, or calls the function that it
reads from its standard input. A server finds there where modules are looked for, and the conditions that it could
not import.
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

from ..runtime import session as sessions
from ..runtime.job import JOB_VARIABLE, Place
from ..runtime.server import serve
from ..runtime.worker import WorkerSession
from ..sync.user_conditions import local_conditions
from .lifetime import end_with_parent

__all__ = ["main"]


def main() -> int:
    """Be the process that the environment says."""
    place = msgspec.msgpack.decode(bytes.fromhex(os.environ.pop(JOB_VARIABLE)), type=Place)
    end_with_parent(int(os.environ.pop("PACELINE_PARENT")))
    logging.basicConfig(level=os.environ.get("PACELINE_LOG", "WARNING"), format="%(name)s: %(message)s")
    if place.role == "server":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when a server ends
        sys.path[:] = cloudpickle.load(sys.stdin.buffer)
        local_conditions.update(cloudpickle.load(sys.stdin.buffer))
        serve(place)
        return 0
    session = WorkerSession.connect(place)
    sessions.install(session)
    try:
        _train(sys.argv[1:])
    except SystemExit as end:
        if end.code not in (None, 0):
            session.fail(f"the script ended with exit code {end.code}", "")
            return 1
    except BaseException as error:  # whatever the script raises is reported, once, by the launcher
        session.fail(_one_line(error), _own_traceback(error))
        return 1
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
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _own_traceback(error: BaseException) -> str:
    """The traceback as the script's author would see it: without the frames of whoever called the script."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and _is_ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen ") or filename == runpy.__file__


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
