"""What parts of a model keep for backward is counted exactly, and measuring them changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.protocols.pipelines.plan import PipelinePlan
from offbeat.runtime.pipeline.gradients import StandIns
from offbeat.runtime.pipeline.part_costs import PartCost, PartSettings, Rehearsal
from offbeat.runtime.split.stages import split_model
from offbeat.simulate.pipelines import peak_activations

ROWS, WIDTH = 8, 32
FLOAT = 4


def squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def costs_of(model: nn.Module, bounds: tuple[int, ...], inputs: Tensor, *, apart: bool = False) -> list[PartCost]:
    split = split_model(model, (inputs,), len(bounds) - 1, bounds=bounds)
    rehearsal = Rehearsal.of(split, model, inputs, torch.zeros(ROWS, WIDTH))
    stand_ins = StandIns(model, model.parameters())
    with stand_ins.in_place():
        costs = rehearsal.costs(range(len(split.parts)), PartSettings(squares, apart), lambda seconds: seconds)
        assert all(parameter.grad is None for parameter in model.parameters())  # The stand-ins.
    return costs


def test_bytes_kept_for_backward_are_counted_without_parameters_and_without_the_batch() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    first, second = costs_of(model, (0, 2, 3), torch.randn(ROWS, WIDTH))
    row = FLOAT * ROWS * WIDTH
    # Of the first part: what tanh gives, which also crosses. The linear layer's input is the batch.
    assert first.saved_bytes == row
    # Of the second: what it took, what it gave to the loss, and the loss, which torch computes in place of all squares.
    # The target is the batch's.
    assert second.saved_bytes == 3 * row
    assert min(first.forward, first.backward, second.forward, second.backward) > 0


def test_gradients_of_weights_are_measured_apart_where_they_are_computed_apart() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for cost in costs_of(model, (0, 2, 4), torch.randn(ROWS, WIDTH), apart=True):
        assert 0 <= cost.weights < cost.backward


def test_measuring_leaves_buffers_gradients_and_random_state_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    inputs = torch.randn(ROWS, WIDTH)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    costs_of(model, (0, 2, 4), inputs)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_most_that_a_stage_holds_follows_from_the_order_in_which_it_computes() -> None:
    def most(kind: PipelineKind, stage: int, nbytes: list[int], chunks: int = 1) -> int:
        return peak_activations(PipelinePlan(kind, 4, 8, chunks), stage, nbytes)

    nbytes = [100, 10, 1, 1000]
    assert [most(PipelineKind.GPIPE, stage, nbytes) for stage in range(4)] == [800, 80, 8, 8000]
    assert [most(PipelineKind.ONE_F_ONE_B, stage, nbytes) for stage in range(4)] == [400, 30, 2, 1000]
    assert [most(PipelineKind.NAIVE, stage, nbytes) for stage in range(4)] == nbytes
    assert [most(PipelineKind.ZERO_BUBBLE, stage, nbytes) for stage in range(4)] == [400, 40, 4, 4000]
    # Chunks of a stage may keep different amounts: what counts is which of them are held together.
    last_heavy = most(PipelineKind.INTERLEAVED, 0, [1, 1, 1, 1, 100, 1, 1, 1], chunks=2)
    first_heavy = most(PipelineKind.INTERLEAVED, 0, [100, 1, 1, 1, 1, 1, 1, 1], chunks=2)
    assert last_heavy < first_heavy <= 100 * 8 + 8
