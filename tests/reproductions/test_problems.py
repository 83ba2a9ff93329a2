"""Problems: a paper's network on published data, or what stands in for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.errors import ConfigurationError
from paceline.sim import Cluster
from reproductions.catalogue import EXHIBITS, require_trained_on_data
from reproductions.commands import main
from reproductions.problems import WORKLOADS, accuracy, cross_entropy, problem
from reproductions.training import Target, TrainingRun, run_all

from .test_datasets import write_cifar_10


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_network_has_a_stand_in_that_takes_the_digits(workload: str) -> None:
    stand_in = problem(workload, None)
    images = stand_in.images()
    assert len(images.train) == stand_in.train_size  # type: ignore[arg-type]
    x, _ = images.test[0]
    assert stand_in.network().eval()(x.unsqueeze(0)).shape == (1, 10)


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
    assert cross_entropy(nn.Identity(), images, 700) == pytest.approx(expected)


def test_data_is_refused_for_exhibits_that_train_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["reproductions", "zipline-fig6", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "zipline-fig6 trains on no published data" in capsys.readouterr().err
    require_trained_on_data([exhibit for exhibit in EXHIBITS.values() if exhibit.with_data])
