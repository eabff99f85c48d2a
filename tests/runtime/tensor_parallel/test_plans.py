"""What is found to be split in models, what is not, and what is refused, with the numbers that would do."""

from __future__ import annotations

import pytest
import torch
from split_models import TiedText, mlp
from torch import Tensor, nn

from offbeat.errors import StrategyError
from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.plan import plan


class Gated(nn.Module):
    """Two layers whose outputs are multiplied, and a third; around them a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(nn.functional.silu(self.gate(value)) * self.up(value))


class Residual(nn.Module):
    """A chain that a replicated value breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(value + self.first(value))


class Unused(nn.Module):
    """A model whose parts can be traced, but not the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) if float(value.sum()) > 0 else value


def manners(model: nn.Module, ways: int = 2) -> dict[str, str]:
    return {split.name: str(split.manner) for split in plan(model, ways).splits}


def test_chains_are_found_by_tracing() -> None:
    assert manners(mlp()) == {"0": "column", "2": "row", "7": "column", "9": "row"}
    assert manners(Gated()) == {"gate": "column", "up": "column", "down": "row"}
    assert manners(Unused()) == {"inner.gate": "column", "inner.up": "column", "inner.down": "row"}


class Counting(Gated):
    """Changes buffers and an attribute, and draws a number, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("more", torch.zeros(2))

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.more = self.more + torch.rand(2)
        self.last = super().forward(value)
        return self.last


def test_planning_changes_nothing_in_the_model_and_draws_nothing() -> None:
    expected, model = manners(Gated()), Counting()
    state = torch.get_rng_state()
    assert manners(model) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.calls.any()
    assert not model.more.any()
    assert model.last is None


def test_what_breaks_a_chain_is_not_split() -> None:
    tied = nn.Linear(4, 4)
    for model in (
        Residual(),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)),
        nn.Sequential(tied, nn.ReLU(), tied),
        nn.Sequential(nn.Conv1d(2, 2, 1), nn.Linear(4, 4)),
    ):
        with pytest.raises(StrategyError, match="nothing to split"):
            plan(model, 2)


def test_dropout_inside_a_chain_is_split_with_it() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.Dropout(0.1))
    assert manners(model) == {"0": "column", "2": "column", "3": "row"}


def test_transformers_and_tied_vocabularies_are_found() -> None:
    found = manners(TiedText())
    assert found["layers.layers.1.self_attn"] == "heads"
    assert found["layers.layers.0.linear1"] == "column"
    assert found["layers.layers.0.dropout"] == "column"
    assert found["symbol"] == found["output"] == "vocabulary"


@pytest.mark.parametrize(
    ("model", "ways", "message"),
    [
        (TiedText(), 3, r"its 4 heads cannot be divided by 3 \(2, 4 would\).* can be divided by 2, 4\."),
        (nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)), 2, r"its 9 features cannot be divided by 2 \(3, 9 would\)"),
        (nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)), 2, "no number would"),
    ],
)
def test_ways_that_do_not_divide_are_refused_with_those_that_do(model: nn.Module, ways: int, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        plan(model, ways)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"1": "column"}, "names the module '1'.*Did you mean|does not have"),
        ({"0": "colum"}, "Did you mean 'column'"),
        ({"3": "row"}, "it is a ReLU, which cannot be split like that"),
        ({"0": "heads"}, "which cannot be split like that"),
        ({"0": "column", "2": "row", "4": "column"}, "which is split in another way"),
        ({"0": "whole"}, "nothing to split"),
    ],
)
def test_own_plans_that_make_no_sense_are_refused(own: dict[str, str], message: str) -> None:
    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    third.weight = second.weight
    model = nn.ModuleDict({"0": first, "2": second, "3": nn.ReLU(), "4": third})
    with pytest.raises(StrategyError, match=message):
        plan(model, 2, own)


def test_a_parameter_that_is_used_in_two_ways_stays_whole() -> None:
    chain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    other = nn.Bilinear(4, 4, 4)
    model = nn.ModuleDict({"chain": chain, "fine": Gated(), "other": other})
    other.weight = chain[0].weight
    planned = plan(model, 2)
    assert {split.name for split in planned.splits} == {"fine.gate", "fine.up", "fine.down"}
    assert planned.whole["chain.0"] == "its parameter is also other's weight, which is not split"
    assert planned.whole["chain.2"].startswith("it goes with chain.0, whose parameter is also other's weight")
    assert "fine.gate: by column, 12 features" in planned.explain()


@pytest.mark.parametrize(("size", "blocks", "ways"), [(12, 1, 3), (12, 3, 2), (7, 1, 3), (3, 1, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_make_the_whole(size: int, blocks: int, ways: int, dim: int) -> None:
    whole = torch.randn((size, 5) if dim == 0 else (5, size))
    cut = Cut(dim, size, blocks)
    parts = [cut.part(whole, way, ways) for way in range(ways)]
    assert [part.shape[dim] for part in parts] == [cut.length(way, ways) for way in range(ways)]
    assert torch.equal(cut.whole(parts), whole)
