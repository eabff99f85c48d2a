"""Writes the folders of three parties: python examples/three_parties/make_folders.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from offbeat.tasks.digits import Digits

PARTIES = {"north": (0, 1, 2, 3), "east": (4, 5, 6), "south": (7, 8, 9)}
"""The digits that each party has images of."""


def main(folder: Path) -> None:
    """Give each party the images of its digits."""
    images, labels = Digits().data().train[:]
    for name, digits in PARTIES.items():
        own = torch.isin(labels, torch.tensor(digits))
        (folder / name).mkdir(parents=True, exist_ok=True)
        save_file({"images": images[own], "labels": labels[own]}, folder / name / "digits.safetensors")
        print(f"{folder / name}: {int(own.sum())} images of {', '.join(map(str, digits))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
