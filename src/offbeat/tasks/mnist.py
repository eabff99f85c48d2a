"""MNIST, the usual benchmark, read from a folder of the user's and never downloaded."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.errors import TaskError
from offbeat.task import Data
from offbeat.tasks._common import Classifier, check_at_least, divide, once

_SIDE = 28
_CLASSES = 10
_MOST_EXAMPLES = 10_000_000  # A header that claims more than this is damaged: trusting it would exhaust the memory.


class Mnist(Classifier):
    """Classify MNIST's digits, or any set in its format, with a small convolutional network.

    The folder holds the four usual files, packed or not: `train-images-idx3-ubyte[.gz]`,
    `train-labels-idx1-ubyte[.gz]`, and the same two of `t10k`. Images stay bytes until the model sees them.

    Its arguments:
    - `data`: the folder.
    - `held_out`: training images that are used for validation, always the same ones.
    - `rate`: learning rate of SGD with momentum 0.9.
    """

    target = 0.97
    global_batch = 64
    epochs = 5
    evaluate_every = 200
    score_by_parts = True

    def __init__(self, data: str, held_out: int = 5000, rate: float = 0.03) -> None:
        super().__init__(rate)
        check_at_least(1, held_out=held_out)
        self.folder = Path(data)
        self.held_out = held_out

    def model(self) -> nn.Module:
        """Two convolutions and a linear layer, after the grey levels are scaled."""
        return nn.Sequential(
            _Scale(),
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 5, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, _CLASSES),
        )

    @once
    def data(self) -> Data:
        """Images (1, 28, 28) of bytes, and their digits."""
        learned = divide(*_labelled(self.folder, "train"), validation=self.held_out, test=0)
        return Data(learned.train, learned.validation, TensorDataset(*_labelled(self.folder, "t10k")))


class _Scale(nn.Module):
    """Scales bytes to mean 0 and deviation 1, by MNIST's mean and deviation."""

    def forward(self, images: Tensor) -> Tensor:
        return (images.to(torch.float32) / 255 - 0.1307) / 0.3081


def _labelled(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """The images of one part, and their labels."""
    image_file, label_file = _find(folder, f"{part}-images-idx3-ubyte"), _find(folder, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(image_file, dimensions=3), read_idx(label_file, dimensions=1)
    if images.shape[1:] != (_SIDE, _SIDE):
        raise TaskError(f"{image_file} has images of {images.shape[1:]} pixels; MNIST's are {(_SIDE, _SIDE)}.")
    if len(images) != len(labels):
        raise TaskError(
            f"{image_file} has {len(images)} images, but {label_file} has {len(labels)} labels. "
            f"They belong to different sets: fetch both again from one source."
        )
    if labels.size and int(labels.max()) >= _CLASSES:
        raise TaskError(f"{label_file} has a label {int(labels.max())}; digits go from 0 to {_CLASSES - 1}.")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise TaskError(
        f"There is no {name} or {name}.gz in {str(folder)!r}. Put MNIST's four files there, or name the folder that "
        f"has them: Mnist(data=...), on the command line `-- --data FOLDER`."
    )


def read_idx(file: Path, dimensions: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array of bytes in an idx file, compressed with gzip or not; its length is checked against its header."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            return _parse(stream, file, dimensions)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TaskError(f"{file} is damaged: {error}. Fetch it again, or unpack it with gunzip to see more.") from error
    except OSError as error:
        raise TaskError(f"{file} cannot be read: {error.strerror or error}.") from error


def _parse(stream: IO[bytes] | gzip.GzipFile, file: Path, dimensions: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # The format: two zero bytes, 8 for "unsigned bytes", the number of dimensions; then each as 4 bytes, big first.
    expected = bytes([0, 0, 8, dimensions])
    magic = stream.read(4)
    if magic != expected:
        raise TaskError(
            f"{file} begins with {magic.hex(' ') or 'nothing'}, not with {expected.hex(' ')}: it is not an idx file of "
            f"bytes with {dimensions} dimension(s). Is it another file, or still packed under a name without .gz?"
        )
    header = stream.read(4 * dimensions)
    if len(header) != 4 * dimensions:
        raise TaskError(f"{file} is truncated: it ends inside its header. Fetch it again.")
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4"))
    if shape[0] > _MOST_EXAMPLES or any(size > _SIDE for size in shape[1:]):
        raise TaskError(f"{file} claims the shape {shape}, which no MNIST file has. Its header is damaged.")
    size = math.prod(shape)
    content = stream.read(size + 1)
    if len(content) != size:
        wrong = f"only {len(content)}" if len(content) < size else "more than that"
        raise TaskError(f"{file} claims the shape {shape}, {size} bytes, but has {wrong}. Fetch it again.")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()
