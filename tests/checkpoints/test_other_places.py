"""Checkpoints in buckets, and in the format of `torch.distributed.checkpoint`."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from paceline.checkpoints.buckets import lineages_at, newest_from, require_bucket, upload
from paceline.checkpoints.export import export_distributed
from paceline.checkpoints.manifest import DRAFT
from paceline.errors import CheckpointError, ConfigurationError
from paceline.run.job import ResumedFrom
from paceline.run.job_options import make_job
from paceline.run.resuming import find_resumed
from paceline.trace.report import ReportedSetting, RunFile
from tests.support.sharded import LINEAGE, Shards, model_of


def net_of(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def optimizers_of(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = net.parameters()
    return [torch.optim.AdamW(others, lr=0.02), torch.optim.SGD([first], lr=0.1, momentum=0.9)]


def take_step(net: torch.nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


def trained() -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Shards]:
    net = net_of(0)
    optimizers = optimizers_of(net)
    shards = Shards(model_of(net, optimizers), 2, net)
    for step in range(3):
        take_step(net, optimizers, step)
        shards.step(net, optimizers)
    return net, optimizers, shards


# Functionalities of torch.distributed warn about each other.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_an_export_is_loaded_by_torch_distributed_checkpoint(tmp_path: Path) -> None:
    net, optimizers, shards = trained()
    export_distributed(shards.write(tmp_path / "checkpoints", net=net), tmp_path / "exported")

    again = net_of(1)
    first, second = optimizers_of(again)
    state: dict[str, Any] = {
        "model": get_model_state_dict(again),
        "optimizer": get_optimizer_state_dict(again, first),
        "optimizer-1": get_optimizer_state_dict(again, second),
    }
    load(state, checkpoint_id=tmp_path / "exported", no_dist=True)
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, first, state["optimizer"])
    set_optimizer_state_dict(again, second, state["optimizer-1"])
    for step in (3, 4):
        take_step(net, optimizers, step)
        take_step(again, [first, second], step)
    for parameter, expected in zip(again.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a bucket is, in memory or in a directory."""
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/run"
        return
    name = f"/{uuid.uuid4().hex}"
    yield f"memory:/{name}/run"
    fsspec.filesystem("memory").rm(name, recursive=True)


def test_a_run_continues_from_the_copy_in_a_bucket(url: str, tmp_path: Path) -> None:
    assert newest_from(url, tmp_path / "copy", LINEAGE).checkpoint is None
    net, optimizers, shards = trained()
    for number in (1, 2, 3):
        upload(shards.write(tmp_path / "checkpoints", number, net=net), url, keep=2)
    found = newest_from(url, tmp_path / "copy", LINEAGE)
    assert found.faults == ()
    assert found.checkpoint is not None
    assert found.checkpoint.path == tmp_path / "copy" / LINEAGE / "000003"
    again = Shards(shards.model, 3)
    again.restore(found.checkpoint)
    take_step(net, optimizers, 3)
    shards.step(net, optimizers)
    again.step(net, optimizers)
    for name, weights in again.named_weights().items():
        assert torch.equal(weights, shards.named_weights()[name])
    system, root = fsspec.core.url_to_fs(url)
    names = [Path(name).name for name in system.ls(f"{root}/{LINEAGE}", detail=False)]
    assert sorted(names) == ["000002", "000003"]
    assert not [name for name in system.find(root) if name.endswith(DRAFT)]


def test_a_damaged_copy_in_a_bucket_is_not_used(url: str, tmp_path: Path) -> None:
    _, _, shards = trained()
    for number in (1, 2, 3):
        upload(shards.write(tmp_path / "checkpoints", number), url)
    system, root = fsspec.core.url_to_fs(url)
    system.rm(f"{root}/{LINEAGE}/000003/manifest.json")  # as if the copy had not been finished
    system.pipe_file(f"{root}/{LINEAGE}/000002/optimizer-1.pt", b"damaged")
    checkpoint, faults, _ = newest_from(url, tmp_path / "copy", LINEAGE)
    assert checkpoint is not None
    assert checkpoint.manifest.number == 1
    assert [path.name for path in (tmp_path / "copy" / LINEAGE).iterdir()] == ["000001"]
    assert len(faults) == 2
    assert "manifest.json cannot be read" in faults[0]
    assert "optimizer-1.pt has 7 bytes" in faults[1]


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = trained()[2].write(tmp_path / "checkpoints")
    with pytest.raises(ConfigurationError, match="the checkpoint directory nowhere://run has no file system"):
        upload(path, "nowhere://run")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(CheckpointError, match="cannot be copied to"):
        upload(path, f"file://{tmp_path}/file/run")


@pytest.mark.parametrize(
    ("bucket", "why"),
    [
        (
            "nowhere://run",
            "nowhere://run has no file system: Protocol not known: nowhere; give a path, or a URL that fsspec knows, "
            "for example s3://bucket/run or gs://bucket/run.",
        ),
        ("s3://bucket/run", "s3://bucket/run needs another package: Install s3fs to access S3."),
        (
            "memory://secret",
            "memory://secret cannot be read: PermissionError: denied. Check the name and the credentials, or give "
            "the path of a directory instead.",
        ),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_before_anything_starts(
    bucket: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def denied(self: object, path: str) -> bool:
        raise PermissionError("denied")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "exists", denied)
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    with pytest.raises(ConfigurationError) as raised:
        make_job(workers=1, checkpoint_dir=bucket, run_dir=tmp_path / "run")
    assert str(raised.value) == f"the checkpoint directory {why}"
    assert not (tmp_path / "run").exists()


def test_a_bucket_that_is_unreachable_is_an_error_of_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some file systems, such as sftp, connect as soon as they are created."""

    def unreachable(url: str) -> Any:
        raise OSError("no route to host")

    path = trained()[2].write(tmp_path / "checkpoints")
    url = "sftp://host/run"
    monkeypatch.setattr("paceline.checkpoints.buckets.url_to_fs", unreachable)
    uses: list[Callable[[], object]] = [
        lambda: upload(path, url),
        lambda: newest_from(url, tmp_path / "copy", LINEAGE),
        lambda: lineages_at(url),
    ]
    for use in uses:
        with pytest.raises(CheckpointError, match=r"sftp://host/run.*: OSError: no route to host"):
            use()
    with pytest.raises(
        ConfigurationError, match=r"sftp://host/run cannot be read: OSError: no route to host\. Check"
    ):
        require_bucket(url)


def test_a_copy_is_given_up_when_the_run_has_ended(url: str, tmp_path: Path) -> None:
    took: list[float] = []

    def ended(took_s: float) -> bool:
        took.append(took_s)
        return len(took) == 2

    path = trained()[2].write(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"cannot be copied to .*: the run has ended"):
        upload(path, url, pause=ended)
    assert len(took) == 2
    assert newest_from(url, tmp_path / "copy", LINEAGE).checkpoint is None


def test_a_run_is_resumed_from_the_bucket_if_its_copy_is_newer(url: str, tmp_path: Path) -> None:
    _, _, shards = trained()
    earlier = RunFile(
        version="",
        begun_at="",
        command="",
        folder="",
        settings=(ReportedSetting("--checkpoint-dir", url),),
        lineage=LINEAGE,
        sync="bsp",
        workers=1,
        servers=1,
        shards=1,
    )
    with pytest.raises(ConfigurationError, match=f"there is no whole checkpoint in {url}"):
        find_resumed(earlier, tmp_path, None, trust=True)
    usual = tmp_path / "checkpoints"
    for number in (1, 2):
        upload(shards.write(usual, number), url)
    shutil.rmtree(usual / LINEAGE / "000002")
    assert find_resumed(earlier, tmp_path, None, trust=True).number == 2  # from the bucket
    shards.write(usual, 3)
    assert find_resumed(earlier, tmp_path, None, trust=True).number == 3  # from here
    shutil.rmtree(usual)
    assert find_resumed(earlier, tmp_path, None, trust=True) == ResumedFrom(
        str(usual / LINEAGE / "000002"), highest=2, lock=0
    )
