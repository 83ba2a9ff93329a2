"""The variables that torchrun sets, and models that are wrapped for torch's own data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigurationError
from paceline.run.job_options import make_job
from paceline.train.job_model import require_not_wrapped
from tests.support.live import run_program

SCRIPT = """
import os
import paceline, torch
import torch.distributed as dist

names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
print(*(os.environ[name] for name in names), flush=True)
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(total.item(), flush=True)
model = torch.nn.Linear(2, 1)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
"""


def test_a_script_finds_the_variables_and_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--workers", "2", "--servers", "1", "--torchrun-env", "--run-dir", str(run_dir)]
    ended = run_program("-m", "paceline", "run", *options, str(script))
    assert ended.returncode == 1
    assert (
        "The model is wrapped in DistributedDataParallel, which exchanges gradients between" in ended.stderr
    )
    assert "0 0 2 2 127.0.0.1" in ended.stdout + (run_dir / "worker-0.log").read_text()
    assert (run_dir / "worker-1.log").read_text().splitlines()[:2] == ["1 1 2 2 127.0.0.1", "3.0"]


def test_the_environment_is_unchanged_by_default(tmp_path: Path) -> None:
    job = make_job(workers=2, run_dir=tmp_path / "one")
    assert job.torchrun_environment(1) == {}
    job = make_job(workers=2, run_dir=tmp_path / "two", torchrun_env=True)
    environment = job.torchrun_environment(1)
    assert 0 < int(environment.pop("MASTER_PORT")) < 65_536
    assert environment == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }


def test_wrappers_are_found_around_the_model_and_in_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    require_not_wrapped([model], list(model.parameters()))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        require_not_wrapped([model], list(model.parameters()))
        wrapped = nn.parallel.DistributedDataParallel(model)
        for trained in ([], [model], [wrapped], [nn.Sequential(wrapped)]):
            with pytest.raises(ConfigurationError, match="wrapped in DistributedDataParallel"):
                require_not_wrapped(trained, list(model.parameters()))
        other = torch.nn.Linear(2, 1)
        require_not_wrapped([other], list(other.parameters()))
    finally:
        dist.destroy_process_group()
