"""A plain PyTorch loop, as most people have one. docs/tutorial.md distributes it; the result is examples/loop.py.

It trains alone; under offbeat it runs unchanged, but every worker would train its own model:

    python examples/plain.py
    offbeat run examples/plain.py --workers 1
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from offbeat.tasks.digits import Digits  # Only for its images of handwritten digits.


def evaluate(model: nn.Module, held_out: Dataset[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The share of images that are recognized."""
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float() for x, y in DataLoader(held_out, batch_size=100)]
    return float(torch.cat(right).mean())


def main() -> None:
    """Train until 97 % of the held-out digits are recognized."""
    torch.manual_seed(0)
    data = Digits().data()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data.train, batch_size=64, shuffle=True)
    for epoch in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model, data.validation)
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        if accuracy >= 0.97:
            break


if __name__ == "__main__":
    main()
