"""One wrong line in the text of pipelines shows in the proof, in the simulator, and in stages that train a model.

The stages are the executors of real runs, each in a thread, with tensors and a deadline. They prove the rounds before
they run them, and refuse what is wrong; without that, their gradients or waits show it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from threaded_stages import agree, train_alone, train_stages
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.errors import ScheduleError, WaitError
from offbeat.protocols.pipelines import orders as order_text
from offbeat.protocols.pipelines import rounds as round_text
from offbeat.protocols.pipelines.checker import check_pipeline
from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.protocols.pipelines.plan import PipelinePlan, TiedWeights
from offbeat.protocols.pipelines.rounds import rounds
from offbeat.runtime.pipeline import executor
from offbeat.runtime.pipeline.executor import PipelineShape
from offbeat.simulate.network import Link, Network
from offbeat.simulate.schedules import trace

STAGES, MICROBATCHES, SYMBOLS = 3, 4, 11
NETWORK = Network.uniform(Link(0.01, 1e-9))
KIND = PipelineKind.ONE_F_ONE_B


class Tied(nn.Module):
    """Its output layer is its embedding, on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(SYMBOLS, 6), nn.Linear(6, 6)
        self.output = nn.Linear(6, SYMBOLS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.middle(self.embedding(tokens))))


class WrongLine(NamedTuple):
    """A line of the text that is changed, and the new one."""

    owner: ModuleType | type
    function: str
    right: str
    wrong: str

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Make the line wrong."""
        known: Callable[..., Any] = getattr(self.owner, self.function)
        text = textwrap.dedent(inspect.getsource(known))
        assert text.count(self.right) == 1, f"{self.right!r} is not one line of {self.function}"
        names = dict(vars(inspect.getmodule(known)))
        exec(text.replace(self.right, self.wrong), names)  # noqa: S102
        patch.setattr(self.owner, self.function, names[self.function])


LINES = {
    "a backward less": WrongLine(
        order_text,
        "_one_chunk",
        right="Action(Work.BACKWARD, number) for number in range(microbatches)",
        wrong="Action(Work.BACKWARD, number) for number in range(microbatches - 1)",
    ),
    "backward before its forward": WrongLine(
        order_text,
        "_in_turn",
        right="order += [*forward[ahead + number : ahead + number + 1], action]",
        wrong="order += [action, *forward[ahead + number : ahead + number + 1]]",
    ),
    "tied gradients stay where they are": WrongLine(
        round_text._RoundWriter,
        "end",
        right="self.send(value)",
        wrong="pass",
    ),
    "a stage is not told the loss": WrongLine(
        round_text._RoundWriter,
        "compute",
        right="for target in range(plan.stages):",
        wrong="for target in range(1, plan.stages):",
    ),
}


def plan() -> PipelinePlan:
    return PipelinePlan(KIND, STAGES, MICROBATCHES, tied=(TiedWeights((0, 2)),), tells_loss=True)


def proved() -> bool:
    try:
        check_pipeline(plan())
    except ScheduleError:
        return False
    return True


def simulated() -> list[list[float]]:
    """When each round ends on each stage in virtual time; nothing if that is never."""
    try:
        return np.nan_to_num(trace(rounds(plan()), plan().view(), plan().layout, NETWORK).end).tolist()
    except ScheduleError:
        return []


def trained() -> bool:
    """Whether stages end with the loss and the gradients of one process."""
    draws = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    model = Tied().double()
    batch = tuple(torch.randint(0, SYMBOLS, (10,), generator=draws) for _ in range(2))
    shape = PipelineShape(KIND, STAGES)
    try:
        stages = train_stages(model, batch, cross_entropy, shape, (0, 1, 2, 3), MICROBATCHES, deadline=1.0)
    except WaitError:
        return False
    return agree(train_alone(model, batch, cross_entropy), stages)


@pytest.mark.parametrize("name", LINES)
def test_a_wrong_line_shows_in_the_proof_in_the_simulator_and_in_training(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = simulated()
    assert right == simulated()
    assert proved()
    assert trained()
    LINES[name].install(monkeypatch)
    assert not proved()
    assert simulated() != right
    with pytest.raises(ScheduleError):
        trained()
    monkeypatch.setattr(executor, "check_pipeline", lambda *_: None)
    if name == "backward before its forward":
        with pytest.raises(ScheduleError, match="never ends"):
            trained()
    else:
        assert not trained()
