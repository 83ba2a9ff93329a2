"""Problems: a paper's network on published data, or what stands in for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.errors import ConfigurationError
from paceline.sim import Cluster
from reproductions.catalogue import EXHIBITS
from reproductions.commands import main
from reproductions.elastic_bsp import FIGURES, runs_of
from reproductions.exhibit import Options
from reproductions.fluent_ps.accuracy import protocol_of
from reproductions.problems import WORKLOADS, Protocol, accuracy, mean_loss, problem
from reproductions.spec_sync.convergence import runs_of as convergence_runs
from reproductions.spec_sync.workloads import WORKLOADS as SPEC_SYNC
from reproductions.spec_sync.workloads import Workload
from reproductions.training import Target, TrainingRun, on_data, run_all
from tests.support.marks import thorough

from .test_datasets import write_cifar_10

LARGEST = "VGG-16 on ImageNet 1K"


@pytest.mark.parametrize(
    "workload", [*(workload for workload in WORKLOADS if workload != LARGEST), *thorough(LARGEST)]
)
def test_every_network_has_a_stand_in_that_takes_its_samples(workload: str) -> None:
    stand_in = problem(workload, None)
    images = stand_in.images()
    assert len(images.train) == stand_in.train_size  # type: ignore[arg-type]
    x, y = images.test[0]
    outputs = (1, 10) if y.dtype == torch.int64 else (1,)
    assert stand_in.network().eval()(x.unsqueeze(0)).shape == outputs


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'LeNet'"):
        problem("LeNet", None)


def test_a_paper_s_network_is_trained_on_published_data(tmp_path: Path) -> None:
    write_cifar_10(tmp_path)
    run = TrainingRun(
        label="bsp",
        cluster=Cluster(compute_s=[1.0, 1.0]),
        sync="bsp",
        target=Target("accuracy", 1.0, 1),
        until_target=False,
        learning_rate=0.01,
        batch_size=2,
        iterations=2,
        problem=problem("C3F2-Net on CIFAR-10", tmp_path),
        weight_decay=0.0005,
        milestones=(1,),
        decay=0.1,
    )
    [outcome] = run_all([run])
    assert outcome.gradients == 4
    assert 0 <= outcome.values[-1] <= 1


def test_with_data_the_protocol_is_the_paper_s(tmp_path: Path) -> None:
    by_number = {figure.number: figure for figure in FIGURES}
    options = Options(seeds=1, data=tmp_path)
    for number, batch, epochs, rate, weight_decay, milestones in (
        (11, 128, 400, 0.001, 0.0005, ()),
        (12, 128, 300, 0.5, 0.0, (200,)),
        (13, 128, 300, 0.5, 0.0, (200,)),
        (14, 256, 19, 0.01, 0.0005, (10, 15, 18)),
        (15, 256, 99, 0.2, 0.0, (80, 90)),
    ):
        for run in runs_of(by_number[number], options):
            assert run.problem.name == by_number[number].workload
            assert (run.batch_size, run.learning_rate, run.weight_decay) == (batch, rate, weight_decay)
            assert run.iterations == run.problem.train_size // 4 // batch * epochs
            assert run.milestones == milestones


def test_on_the_digits_the_milestones_keep_their_share_of_the_epochs() -> None:
    [figure] = (each for each in FIGURES if each.number == 12)
    run = runs_of(figure, Options())[0]
    assert run.problem.name == "ResNet-8 with half the channels on scikit-learn's digits"
    assert run.milestones == (4,)
    assert run.iterations == 1438 // 4 // run.batch_size * 6


def test_fewer_images_than_a_batch_are_refused(tmp_path: Path) -> None:
    write_cifar_10(tmp_path)
    run = TrainingRun(
        label="bsp",
        cluster=Cluster(compute_s=[1.0]),
        sync="bsp",
        target=Target("accuracy", 1.0, 1),
        batch_size=128,
        iterations=1,
        problem=problem("C3F2-Net on CIFAR-10", tmp_path),
    )
    with pytest.raises(ConfigurationError, match="20 training images are fewer than a batch of 128"):
        run_all([run])


def test_the_learning_rate_falls_at_a_milestone() -> None:
    def trained(milestones: tuple[int, ...]) -> list[float]:
        run = TrainingRun(
            label="bsp",
            cluster=Cluster(compute_s=[1.0]),
            sync="bsp",
            target=Target("loss", 0.0, 1),
            until_target=False,
            learning_rate=0.1,
            batch_size=700,  # two iterations per epoch
            iterations=6,
            milestones=milestones,
            decay=0.0,
        )
        return run_all([run])[0].values

    constant, stopped = trained(()), trained((2,))
    assert constant[:4] == stopped[:4]
    assert stopped[-1] == stopped[-2] != constant[-1]


def test_accuracy_and_loss_are_those_of_all_images() -> None:
    inputs, labels = torch.eye(3).repeat(400, 1), torch.arange(3).repeat(400)
    labels[:300] = 0
    images = TensorDataset(inputs, labels)
    assert accuracy(nn.Identity(), images) == pytest.approx(
        float((inputs.argmax(1) == labels).float().mean())
    )
    expected = float(nn.functional.cross_entropy(inputs[:700], labels[:700]))
    assert mean_loss(nn.Identity(), images, 700, nn.functional.cross_entropy) == pytest.approx(expected)


def test_data_is_refused_for_exhibits_that_train_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["reproductions", "zipline-fig6", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "zipline-fig6 trains on no published data" in capsys.readouterr().err
    assert all(bool(exhibit.trains_on) == bool(exhibit.with_data) for exhibit in EXHIBITS.values())


def refused(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the error of an exhibit with a folder of data, from which nothing may have been trained."""
    monkeypatch.setattr("sys.argv", ["reproductions", name, "--data", str(data), "--out", str(data / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert not (data / "out").exists()
    return capsys.readouterr().err.replace("\n", " ")


def test_data_that_are_missing_or_incomplete_are_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = refused("specsync-fig8", tmp_path, monkeypatch, capsys)
    assert "cifar-10-batches-bin does not exist" in missing
    write_cifar_10(tmp_path)  # a few images
    assert "20 training samples, expected 50,000" in refused("fluentps-fig10", tmp_path, monkeypatch, capsys)
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    file.write_bytes(file.read_bytes()[:-1])  # as of a download that was broken off
    assert "The file is incomplete" in refused("fluentps-fig7", tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("workload", list(SPEC_SYNC.values()), ids=list(SPEC_SYNC))
def test_with_data_spec_sync_trains_as_the_paper_does(workload: Workload, tmp_path: Path) -> None:
    options = Options(seeds=1, data=tmp_path)
    [run] = convergence_runs(workload, {"Original": "asp"}, options)
    protocol = workload.protocol
    assert (run.problem.name, run.batch_size) == (workload.published, protocol.batch_size)
    assert (run.learning_rate, run.milestones) == (protocol.rate, protocol.milestones)
    assert run.iterations == round(protocol.epochs * run.problem.train_size / protocol.batch_size / 40)


def test_with_data_fluent_ps_trains_with_lars_on_the_joint_batch() -> None:
    for workload, workers, batch, iterations in (
        ("AlexNet on CIFAR-10", 64, 100, 4000),
        ("ResNet-56 on CIFAR-10", 32, 128, 64_000),
    ):
        protocol = protocol_of(workload, workers)
        assert (protocol.batch_size, protocol.optimizer) == (batch, "LARS")
        assert protocol.epochs * WORKLOADS[workload].train_size / batch / workers == pytest.approx(iterations)


def test_lars_is_trained(tmp_path: Path) -> None:
    write_cifar_10(tmp_path)
    run = TrainingRun(
        label="bsp",
        cluster=Cluster(compute_s=[1.0, 1.0]),
        sync="bsp",
        target=Target("accuracy", 1.0, 1),
        until_target=False,
    )
    protocol = Protocol(batch_size=2, rate=3.2, epochs=8 / 50_000, optimizer="LARS")
    [outcome] = run_all([on_data(run, "AlexNet on CIFAR-10", protocol, tmp_path)])
    assert outcome.gradients == 4
    assert 0 <= outcome.values[-1] <= 1
