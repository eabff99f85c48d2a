"""What a model achieves: its score on one part of a task's data, and a loss that must be finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from offbeat.errors import NonFiniteError, TaskError
from offbeat.task import Task
from offbeat.team.team import Team
from offbeat.worker.task_data import loader_over, on_device, size_of


def scorer(task: Task, model: nn.Module, team: Team, data: Dataset[Any]) -> Callable[[], float]:
    """The function that scores the model on this part of the data."""
    whole = loader_over(data, task.evaluate_batch, task.collate, shuffle=False)
    # A worker without examples could not score: then every worker scores all of them.
    parted = task.score_by_parts and team.size > 1 and size_of(data) >= team.size * 2
    batches = team.divided(whole) if parted else whole

    def score() -> float:
        was_training = model.training
        with team.averaged(model), torch.no_grad():
            model.eval()
            value = float(task.score(model, (on_device(batch, team.device) for batch in batches)))
            model.train(was_training)
        return value

    return score


def finite(loss: object, team: Team) -> float:
    """The loss as a number; refused if it is none."""
    if not (isinstance(loss, Tensor) and loss.numel() == 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TaskError(f"the loss is {shape}, not a tensor of one number. Return a mean over the batch's examples.")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NonFiniteError(
            f"worker {team.rank} has a loss of {value} in step {team.step + 1}. Training stops before it can spread; "
            f"the last checkpoint is from before. A lower learning rate often helps."
        )
    return value
