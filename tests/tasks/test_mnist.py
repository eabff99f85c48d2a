"""Reading MNIST's files: right ones, packed or not, and every way in which they can be wrong."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import paths
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from offbeat.errors import TaskError
from offbeat.tasks.mnist import Mnist, read_idx

REAL = paths.MNIST
Spoil = Callable[[bytes], bytes]


def idx(content: bytes, *shape: int, magic: int | None = None) -> bytes:
    first = 0x0800 + len(shape) if magic is None else magic
    return struct.pack(f">I{len(shape)}I", first, *shape) + content


def write(folder: Path, train: int = 30, test: int = 6, packed: bool = False) -> Path:
    for part, count in (("train", train), ("t10k", test)):
        images = b"".join(bytes([i]) * 784 for i in range(count))
        labels = bytes(i % 10 for i in range(count))
        for name, content in (
            (f"{part}-images-idx3-ubyte", idx(images, count, 28, 28)),
            (f"{part}-labels-idx1-ubyte", idx(labels, count)),
        ):
            target = folder / (name + (".gz" if packed else ""))
            target.write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("packed", [False, True])
def test_files_are_read_packed_or_not(tmp_path: Path, packed: bool) -> None:
    data = Mnist(str(write(tmp_path, packed=packed)), held_out=10).data()
    assert all(type(part) is TensorDataset for part in (data.train, data.validation, data.test))
    train, validation, test = data.train.tensors, data.validation.tensors, data.test.tensors  # type: ignore[attr-defined]
    assert [len(part[0]) for part in (train, validation, test)] == [20, 10, 6]
    # Image i is made of bytes i and has the label i mod 10, so each part shows whether pairs were kept.
    for images, labels in (train, validation, test):
        assert images.shape[1:] == (1, 28, 28)
        assert images.dtype == torch.uint8
        assert torch.equal(images[:, 0, 3, 4] % 10, labels)
    seen = torch.cat([train[0], validation[0]])[:, 0, 0, 0]
    assert sorted(seen.tolist()) == list(range(30))


def test_the_held_out_images_are_the_same_every_time(tmp_path: Path) -> None:
    folder = str(write(tmp_path))
    torch.manual_seed(1)
    first = Mnist(folder, held_out=10).data().validation
    torch.manual_seed(2)
    second = Mnist(folder, held_out=10).data().validation
    assert torch.equal(first.tensors[0], second.tensors[0])  # type: ignore[attr-defined]


def test_the_model_takes_bytes(tmp_path: Path) -> None:
    task = Mnist(str(write(tmp_path)), held_out=10)
    model = task.model()
    images, labels = next(iter(DataLoader(task.data().train, batch_size=8)))
    assert model(images).shape == (8, 10)
    task.loss(model, (images, labels)).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_folder_without_the_files_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"):
        Mnist(str(tmp_path)).data()
    (write(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(TaskError, match="t10k-labels-idx1-ubyte"):
        Mnist(str(tmp_path), held_out=10).data()


def test_holding_out_more_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="30 examples cannot give 5000"):
        Mnist(str(write(tmp_path))).data()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _: b"", "begins with nothing"),
        (lambda _: b"\x1f\x8b\x08\x00rest", "begins with 1f 8b 08 00"),
        (lambda whole: b"\x00\x00\x08\x01" + whole[4:], "begins with 00 00 08 01, not with 00 00 08 03"),
        (lambda whole: b"\x00\x00\x0d\x03" + whole[4:], "begins with 00 00 0d 03"),
        (lambda whole: whole[:10], "ends inside its header"),
        (lambda whole: whole[:-1], "has only 23519"),
        (lambda whole: whole + b"x", "has more than that"),
        (lambda whole: whole[:4] + b"\xff\xff\xff\xff" + whole[8:], "header is damaged"),
        (lambda whole: whole[:8] + b"\x7f\xff\xff\xff" + whole[12:], "header is damaged"),
        (lambda _: idx(bytes(30 * 49), 30, 7, 7), r"images of \(7, 7\) pixels"),
        (lambda _: idx(bytes(29 * 784), 29, 28, 28), "29 images, but .* has 30 labels"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, spoil: Spoil, said: str, packed: bool) -> None:
    file = write(tmp_path, packed=packed) / ("train-images-idx3-ubyte" + (".gz" if packed else ""))
    whole = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
    file.write_bytes(gzip.compress(spoil(whole)) if packed else spoil(whole))
    with pytest.raises(TaskError, match=said) as caught:
        Mnist(str(tmp_path), held_out=10).data()
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[: len(packed) // 2],
        lambda packed: b"no gzip" + packed,
        lambda packed: packed[:30] + b"\xff\xff\xff" + packed[33:],
    ],
    ids=["cut", "not gzip", "flipped"],
)
def test_a_damaged_gzip_file_is_named(tmp_path: Path, spoil: Spoil) -> None:
    file = write(tmp_path, packed=True) / "train-images-idx3-ubyte.gz"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(TaskError, match=r"train-images-idx3-ubyte\.gz"):
        read_idx(file, dimensions=3)


def test_a_label_beyond_nine_is_refused(tmp_path: Path) -> None:
    (write(tmp_path) / "train-labels-idx1-ubyte").write_bytes(idx(bytes([10] * 30), 30))
    with pytest.raises(TaskError, match="label 10"):
        Mnist(str(tmp_path), held_out=10).data()


@pytest.mark.skipif(not REAL.is_dir(), reason="MNIST's files are not on this machine")
def test_the_real_files_have_the_known_shapes_and_labels() -> None:
    data = Mnist(str(REAL)).data()
    parts = [part.tensors for part in (data.train, data.validation, data.test)]  # type: ignore[attr-defined]
    assert [len(images) for images, _ in parts] == [55_000, 5_000, 10_000]
    assert parts[2][1][:5].tolist() == [7, 2, 1, 0, 4]
    counts = sum(torch.bincount(labels, minlength=10) for _, labels in parts[:2])
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="MNIST's files are not on this machine")
def test_the_real_digits_are_learned_to_the_target_within_two_epochs() -> None:
    task = Mnist(str(REAL))
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    optimizer = task.optimizer(model.parameters())
    images, labels = data.train.tensors  # type: ignore[attr-defined]
    for _ in range(2):
        for rows in torch.randperm(len(images)).split(task.global_batch):
            optimizer.zero_grad()
            task.loss(model, (images[rows], labels[rows])).backward()
            optimizer.step()
    with torch.no_grad():
        score = task.score(model.eval(), DataLoader(data.validation, batch_size=task.evaluate_batch))
    assert score >= task.target
