"""What layers cost: bytes are exact, times tell a heavy layer from a light one, and the cut follows them."""

from __future__ import annotations

from itertools import pairwise

import torch
from split_support import MODELS, run_parts
from torch import nn

from offbeat.runtime.split.stages import split_model

WIDTHS = (32, 32, 768, 768, 32)


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)), nn.Tanh())


def test_bytes_are_those_of_parameters_of_activations_and_of_what_backward_needs() -> None:
    rows = 8
    costs = split_model(chain(), (torch.randn(rows, WIDTHS[0]),), 2).costs
    assert [cost.name for cost in costs] == ["0", "1", "2", "3", "4"]
    assert [cost.parameter_bytes for cost in costs[:4]] == [4 * (a * b + b) for a, b in pairwise(WIDTHS)]
    assert [cost.activation_bytes for cost in costs] == [*(4 * rows * width for width in WIDTHS[1:]), 4 * rows * 32]
    # A linear layer keeps its input, tanh its output.
    assert [cost.saved_bytes for cost in costs] == [*(4 * rows * width for width in WIDTHS[:4]), 4 * rows * 32]


def test_a_heavy_layer_is_measured_as_heavy_and_gets_a_part_of_its_own() -> None:
    split = split_model(chain(), (torch.randn(64, WIDTHS[0]),), 3)
    costs = split.costs
    assert all(cost.forward > 0 for cost in costs)
    assert all(cost.backward > 0 for cost in costs)
    assert max(costs, key=lambda cost: cost.seconds).name == "2"
    assert split.cut.bounds[1:3] == (2, 3)
    assert split.cut.total == sum(cost.seconds for cost in costs)


def test_a_value_that_skips_layers_is_counted_at_every_cut_that_it_crosses() -> None:
    make, batch_of = MODELS["hourglass"]
    costs = split_model(make(), batch_of(2, 4), 2).costs
    into, first, second = (4 * 2 * channels * side * side for channels, side in ((4, 16), (8, 8), (16, 4)))
    assert [cost.activation_bytes for cost in costs[:4]] == [into, into + first, into + first + second, into + first]


def test_bounds_that_are_said_are_not_measured_and_give_the_same_parts() -> None:
    make, batch_of = MODELS["blocks"]
    model, batch = make(), batch_of(4, 6)
    measured = split_model(model, batch, 3)
    said = split_model(model, batch, 3, bounds=measured.bounds)
    assert said.bounds == measured.bounds
    assert said.cut.slowest == 0
    assert [part.takes for part in said.parts] == [part.takes for part in measured.parts]
    assert [part.gives for part in said.parts] == [part.gives for part in measured.parts]
    assert [part.logical for part in said.parts] == [part.logical for part in measured.parts]
    assert said.tied == measured.tied
    assert [c.parameter_bytes for c in said.costs] == [c.parameter_bytes for c in measured.costs]


def test_a_limit_of_memory_decides_where_times_would_not() -> None:
    model = nn.Sequential(nn.Embedding(20_000, 16), nn.Flatten(), *(nn.Linear(64, 64) for _ in range(6)))
    batch = (torch.randint(0, 20_000, (512, 4)),)
    costs = split_model(model, batch, 2).costs
    limit = costs[0].memory + costs[1].memory + 1
    split = split_model(model, batch, 2, memory_limit=limit)
    assert split.bounds[1] <= 2
    assert torch.equal(run_parts(split, batch, backward=False), model(*batch))


def test_the_table_names_layers_times_and_bytes_of_each_part() -> None:
    split = split_model(chain(), (torch.randn(64, WIDTHS[0]),), 3)
    lines = split.explain().splitlines()
    assert lines[0].split("  ")[0] == "part"
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["0", "2", "0", "1"],
        ["1", "1", "2", "2"],
        ["2", "2", "3", "4"],
    ]
    assert lines[2].split()[5] == "2.36"
    assert lines[3].endswith("-")
    assert lines[4].startswith("The slowest part takes ")
    assert lines[4].endswith(f"{split.cut.evenness:.0%} even.")
