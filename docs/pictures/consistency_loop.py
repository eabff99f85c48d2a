"""Train digits in its own loop, and record when each step was ready and when the next could start.

Started by consistency.py, like any script:

    offbeat run docs/pictures/consistency_loop.py --workers 4 --strategy server -- 100 FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic

from torch.utils.data import DataLoader, RandomSampler

import offbeat
from offbeat.task import accuracy
from offbeat.tasks.digits import Digits


def main(steps: int, folder: Path) -> None:
    task = Digits()
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    train = task.data().train
    # One long epoch: workers do not synchronize before its end.
    sampler = RandomSampler(train, replacement=True, num_samples=steps * task.global_batch)
    loader = DataLoader(train, task.global_batch, sampler=sampler)
    rows: list[tuple[int, float, float, float]] = []
    with offbeat.init() as team:
        model, optimizer, batches = team.prepare(model, optimizer, loader)
        began = monotonic()
        for images, labels in batches:
            step = team.step
            optimizer.zero_grad()
            task.criterion(model(images), labels).backward()
            ready = monotonic()
            optimizer.step()
            done = monotonic()
            rows.append((step, began, ready, done))
            began = done
        (folder / f"worker-{team.rank}.json").write_text(json.dumps(rows))
        with team.averaged(model):
            team.report(accuracy=accuracy(model, DataLoader(task.data().validation, 300)))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
