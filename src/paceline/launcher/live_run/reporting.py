"""`report.html` in the run directory: the report of a run, at the end of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ...errors import ConfigurationError
from ...files import Unfinished

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"
TELL_S = 2.0  # time after which the user is told what takes so long


def write_report(run_dir: Path, tell: Callable[[str], object], hurried: Callable[[], bool]) -> str:
    """Write the report of a run that has ended. Return a message if this fails, else "".

    No error of this kind makes a run fail, because its results are there.

    Args:
        run_dir: the run directory.
        tell: called with a sentence if reading the traces takes long.
        hurried: called from time to time. If it returns True, no report is written.
    """
    # Loading these modules takes a moment, which no command but this one should take.
    from ...report.page import page_of
    from ...report.run_reading import ReportReader

    teller = threading.Timer(TELL_S, tell, ["Reading the traces for the report. Ctrl-C twice skips it."])
    teller.daemon = True
    teller.start()
    try:
        report = ReportReader(run_dir).read(hurried=hurried)
        if not hurried():
            with Unfinished(run_dir / REPORT) as place:
                place.write_text(page_of([report]), encoding="utf-8")
    except (ConfigurationError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return f"{REPORT} cannot be written to {run_dir}: {reason}"
    except Exception as error:
        return f"{REPORT} cannot be written to {run_dir}, which is a bug, please report it: {error!r}"
    finally:
        teller.cancel()
        teller.join()
    return ""
