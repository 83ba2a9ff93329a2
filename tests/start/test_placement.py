"""Where the processes of a run are placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline.run.job_options import make_job
from paceline.start.local import HostMachine, ProcessPlacement


def test_a_placement_must_fit_the_run(tmp_path: Path) -> None:
    here = HostMachine()
    placement = ProcessPlacement("127.0.0.1", (here,), (here, here))
    job = make_job(workers=2, servers=1, transport="tcp", run_dir=tmp_path / "a")
    placement.require_for(job)
    with pytest.raises(ConfigurationError, match="1 servers and 2 workers, expected 1 servers and 3 workers"):
        placement.require_for(make_job(workers=3, servers=1, transport="tcp", run_dir=tmp_path / "b"))
    with pytest.raises(ConfigurationError, match="use 'tcp' between machines"):
        placement.require_for(make_job(workers=2, servers=1, transport="unix", run_dir=tmp_path / "c"))
