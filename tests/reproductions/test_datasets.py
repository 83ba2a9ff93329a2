"""Readers of published data sets, on small files in the published formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from paceline.errors import ConfigurationError
from reproductions.datasets import (
    mnist_digits,
    read_cifar,
    read_imagenet,
    read_movielens_100k,
)
from reproductions.datasets.cifar import read_records


def write_cifar_10(folder: Path, records: int = 4) -> None:
    """Write every file of CIFAR-10 with few records: the label of record i is i, its first red pixel 10 i."""
    root = folder / "cifar-10-batches-bin"
    root.mkdir()
    data = np.zeros((records, 3073), np.uint8)
    data[:, 0] = np.arange(records)
    data[:, 1] = 10 * np.arange(records)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data.tofile(root / f"{name}.bin")


def write_cifar_100(folder: Path) -> None:
    root = folder / "cifar-100-binary"
    root.mkdir()
    data = np.zeros((3, 3074), np.uint8)
    data[:, 0] = [1, 2, 3]  # coarse
    data[:, 1] = [7, 99, 0]  # fine
    for name in ("train", "test"):
        data.tofile(root / f"{name}.bin")


def test_cifar_10_is_read(tmp_path: Path) -> None:
    write_cifar_10(tmp_path)
    images = read_cifar(tmp_path)
    assert len(images.train) == 20  # type: ignore[arg-type]
    assert [int(label) for _, label in (images.test[index] for index in range(4))] == [0, 1, 2, 3]
    pixels, _ = images.test[3]
    assert pixels.shape == (3, 32, 32)
    assert float(pixels[0, 0, 0] * 0.247 + 0.491) == pytest.approx(30 / 255)


def test_cifar_images_are_cropped(tmp_path: Path) -> None:
    write_cifar_10(tmp_path)
    images = read_cifar(tmp_path, crop=28)
    for part in (images.train, images.test):
        assert part[0][0].shape == (3, 28, 28)


def test_pixels_are_ordered_by_channel_row_and_column(tmp_path: Path) -> None:
    record = np.concatenate([[5], np.arange(3072) % 251]).astype(np.uint8)
    record.tofile(tmp_path / "one.bin")
    images, labels = read_records(tmp_path / "one.bin", labels=1, classes=10)
    assert labels.tolist() == [5]
    assert int(images[0, 2, 3, 4]) == (2 * 1024 + 3 * 32 + 4) % 251


def test_cifar_100_uses_the_fine_labels(tmp_path: Path) -> None:
    write_cifar_100(tmp_path)
    images = read_cifar(tmp_path, classes=100)
    assert [int(images.train[index][1]) for index in range(3)] == [7, 99, 0]


def test_a_missing_file_is_named_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cifar-10-batches-bin does not exist.*https://"):
        read_cifar(tmp_path)
    write_cifar_10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"data_batch_3\.bin does not exist"):
        read_cifar(tmp_path)


def test_an_incomplete_cifar_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.bin").write_bytes(bytes(3072))
    with pytest.raises(ConfigurationError, match="has 3072 bytes, which is not a multiple of 3073"):
        read_records(tmp_path / "cut.bin", labels=1, classes=10)


def test_a_label_outside_the_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(bytes(3073) + b"\x0a" + bytes(3072))
    with pytest.raises(ConfigurationError, match="record 1 has the label 10"):
        read_records(tmp_path / "odd.bin", labels=1, classes=10)


def write_ratings(folder: Path, *lines: str) -> None:
    (folder / "ml-100k").mkdir(exist_ok=True)
    (folder / "ml-100k" / "u.data").write_text("".join(f"{line}\n" for line in lines))


def test_ratings_are_read_and_split(tmp_path: Path) -> None:
    write_ratings(tmp_path, *(f"{user}\t{1683 - user}\t{1 + user % 5}\t881250949" for user in range(1, 21)))
    ratings = read_movielens_100k(tmp_path)
    parts = [part.tensors for part in (ratings.train, ratings.test) if isinstance(part, TensorDataset)]
    assert [len(pairs) for pairs, _ in parts] == [18, 2]
    pairs, values = (torch.cat(tensors).tolist() for tensors in zip(*parts, strict=True))
    assert sorted(zip(map(tuple, pairs), values, strict=True)) == [
        ((user - 1, 1682 - user), 1.0 + user % 5) for user in range(1, 21)
    ]


@pytest.mark.parametrize("line", ["1\t2\t6\t0", "0\t2\t3\t0", "1\t1683\t3\t0", "1,2,3,0", "1\t2\t3", ""])
def test_a_line_that_is_no_rating_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    write_ratings(tmp_path, "1\t2\t3\t881250949", line)
    with pytest.raises(ConfigurationError, match="line 2: expected a user from 1 to 943"):
        read_movielens_100k(tmp_path)


def write_imagenet(folder: Path) -> None:
    """Write one image of 300 x 260 pixels for each of two classes: red and blue."""
    for part in ("train", "val"):
        for name, color in (("n01440764", (255, 0, 0)), ("n01443537", (0, 0, 255))):
            place = folder / "imagenet" / part / name
            place.mkdir(parents=True)
            Image.new("RGB", (300, 260), color).save(place / f"{name}_1.JPEG")


def test_imagenet_is_read(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    images = read_imagenet(tmp_path)
    for part in (images.train, images.test):
        for label, brightest in ((0, 0), (1, 2)):
            pixels, found = part[label]
            assert pixels.shape == (3, 224, 224)
            assert found == label
            assert int(pixels.mean(dim=(1, 2)).argmax()) == brightest


def test_validation_images_without_folders_are_refused(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    (tmp_path / "imagenet" / "val" / "n01443537").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"'n01443537' is only in one.*sort them into folders"):
        read_imagenet(tmp_path)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    broken = tmp_path / "imagenet" / "val" / "n01440764" / "n01440764_1.JPEG"
    broken.write_bytes(b"no image")
    with pytest.raises(ConfigurationError, match=r"n01440764_1\.JPEG cannot be decoded"):
        read_imagenet(tmp_path).test[0]


def test_the_mnist_digits_are_divided_and_the_training_images_enlarged() -> None:
    images = mnist_digits()
    train, test = (part.tensors for part in (images.train, images.test) if isinstance(part, TensorDataset))
    assert train[0].shape == (16_000, 1, 28, 28)
    assert test[0].shape == (1_000, 1, 28, 28)
    assert test[1].bincount().tolist() == [100] * 10
    assert torch.equal(train[1][:4_000], train[1][12_000:])  # copies keep their labels
    originals, copies = train[0][:4_000], train[0][4_000:8_000]
    apart = (originals - copies).square().mean(dim=(1, 2, 3))
    assert apart.min() > 0.0  # each copy is moved
    assert apart.mean() < (originals - copies.roll(1, 0)).square().mean()  # and still like its original
    trained = {image.numpy().tobytes() for image in originals}
    assert not any(image.numpy().tobytes() in trained for image in test[0])
