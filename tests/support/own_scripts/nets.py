"""Models that are not a plain chain of layers, each with its loop: `python nets.py FOLDER CASE...`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from parts import CLASSES, INPUTS, batches, network, run_cases
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import offbeat

Team, Facts, Models = offbeat.Team, dict[str, Any], Mapping[str, nn.Module]


def trained(
    team: Team,
    model: nn.Module,
    *optimizers: Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    train: Iterable[Any] | None = None,
    each_epoch: Callable[[int], None] = lambda _: None,
    epochs: int = 2,
) -> nn.Module:
    optimizers = optimizers or (SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01),)
    _, loader, *_ = team.prepare(model, batches() if train is None else train, *optimizers)
    loss = loss or (lambda x, y: cross_entropy(model(x), y))
    for epoch in range(epochs):
        each_epoch(epoch)
        for x, y in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
    return model


class Branched(nn.Module):
    """One branch for the few examples whose first number is large, and one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(INPUTS, CLASSES)
        self.rare = nn.Linear(INPUTS, CLASSES)
        self.never = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = self.trunk(x), x[:, 0] > 1.2
        if bool(chosen.any()):
            out = out.index_put((chosen.nonzero()[:, 0],), self.rare(x[chosen]), accumulate=True)
        return out


def branches(team: Team, facts: Facts) -> Models:
    model = Branched()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
    trained(team, model, optimizer, epochs=3)
    facts["never"] = [p.grad is None and p not in optimizer.state for p in model.never.parameters()]
    return {"model": model}


def branches_of_a_stream(team: Team, facts: Facts) -> Models:
    """Batches that come finished, so that only the exchange tells how many examples there are."""
    model = Branched()
    ready = [(batch[0], batch[1]) for batch in batches(shuffle=False)]
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
    return {"model": trained(team, model, optimizer, train=ready, epochs=3)}


def words_of_a_stream(team: Team, facts: Facts) -> Models:
    model = Words()
    ready = [(batch[0], batch[1]) for batch in batches(shuffle=False)]
    return {"model": trained(team, model, SGD(model.parameters(), lr=0.1), train=ready, epochs=3)}


def two_models_one_branch(team: Team, facts: Facts) -> Models:
    """Two prepared models in one backward pass, one with a branch: they finish in another order on every worker."""
    first, second = network(), Branched()
    optimizer = SGD([*first.parameters(), *second.parameters()], lr=0.2, momentum=0.9)
    team.prepare(second)
    trained(team, first, optimizer, loss=lambda x, y: cross_entropy(first(x) + second(x), y), epochs=3)
    return {"first": first, "second": second}


def frozen(team: Team, facts: Facts) -> Models:
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    trained(team, model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.2))
    facts["untouched"] = torch.equal(before, model[0].weight)
    return {"model": model}


def unfrozen_later(team: Team, facts: Facts) -> Models:
    model = network()
    model[0].requires_grad_(False)
    trained(team, model, each_epoch=lambda epoch: model[0].requires_grad_(epoch % 2 == 1) and None, epochs=4)
    return {"model": model}


def frozen_later(team: Team, facts: Facts) -> Models:
    model = network()
    trained(team, model, each_epoch=lambda epoch: model[0].requires_grad_(epoch == 0) and None)
    return {"model": model}


def zeros_kept(team: Team, facts: Facts) -> Models:
    """Gradients of zero in place of none, so that nobody can tell from them which parameters had none."""
    model = Branched()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return cross_entropy(model(x), y)

    trained(team, model, loss=loss)
    return {"model": model}


def all_frozen_at_first(team: Team, facts: Facts) -> Models:
    model, head = network(), nn.Linear(CLASSES, CLASSES)
    model.requires_grad_(False)
    team.prepare(model)
    optimizer = SGD([*model.parameters(), *head.parameters()], lr=0.2)
    trained(
        team,
        head,
        optimizer,
        loss=lambda x, y: cross_entropy(head(model(x)), y),
        each_epoch=lambda epoch: model.requires_grad_(epoch > 0) and None,
        epochs=3,
    )
    return {"model": model, "head": head}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back = nn.Linear(INPUTS, 4, bias=False), nn.Linear(4, INPUTS)
        self.back.weight = nn.Parameter(torch.randn(INPUTS, 4))
        self.again = nn.Linear(INPUTS, 4, bias=False)
        self.again.weight = self.inner.weight
        self.top = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.again(torch.tanh(self.back(self.inner(x)))))


def tied(team: Team, facts: Facts) -> Models:
    model = trained(team, Tied())
    facts["tied"] = model.inner.weight is model.again.weight
    return {"model": model}


def shared_by_two_models(team: Team, facts: Facts) -> Models:
    """The same layer handed over twice: in a model and by itself."""
    model = network()
    team.prepare(model[2])
    team.prepare(model)
    return {"model": trained(team, model)}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 5, sparse=True)
        self.rare = nn.Embedding(50, 5, sparse=True)
        self.top = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        known = (x.abs() * 10).long().clamp(max=49)
        out, chosen = self.words(known).sum(1), x[:, 0] > 1.2
        if bool(chosen.any()):
            out = out.index_put((chosen.nonzero()[:, 0],), self.rare(known[chosen]).sum(1), accumulate=True)
        return self.top(out)


def sparse_sgd(team: Team, facts: Facts) -> Models:
    model = Words()
    trained(team, model, SGD(model.parameters(), lr=0.1), epochs=3)
    facts["sparse"] = bool(model.words.weight.grad.is_sparse)
    return {"model": model}


def sparse_adam(team: Team, facts: Facts) -> Models:
    model = Words()
    rows = SparseAdam([model.words.weight, model.rare.weight], lr=0.01)
    return {"model": trained(team, model, rows, SGD(model.top.parameters(), lr=0.1))}


class Mixed(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.middle = nn.Linear(INPUTS, 8), nn.Linear(8, 8, dtype=kind)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)).to(self.kind)).to(torch.float32))


def float64_part(team: Team, facts: Facts) -> Models:
    return {"model": trained(team, Mixed(torch.float64))}


def bfloat16_part(team: Team, facts: Facts) -> Models:
    return {"model": trained(team, Mixed(torch.bfloat16))}


def odd_buffers(team: Team, facts: Facts) -> Models:
    """Kinds of numbers that Gloo does not know."""
    model = network()
    model.register_buffer("counts", torch.full((3,), 5 - team.rank, dtype=torch.int16))
    model.register_buffer("flags", torch.tensor([team.rank == 0, False]))
    return {"model": trained(team, model)}


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(INPUTS, 8, dtype=torch.complex64))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.complex64) @ self.phase).abs())


def complex_part(team: Team, facts: Facts) -> Models:
    return {"model": trained(team, Waves())}


def many_small_one_huge(team: Team, facts: Facts) -> Models:
    chain: list[nn.Module] = []
    for _ in range(12):
        chain += [nn.Linear(INPUTS, INPUTS), nn.Tanh()]
    model = nn.Sequential(*chain, nn.Linear(INPUTS, 20_000), nn.Tanh(), nn.Linear(20_000, CLASSES))
    # Long steps would multiply the rounding of sums in another order from layer to layer.
    return {"model": trained(team, model, SGD(model.parameters(), lr=0.01))}


def channels_last(team: Team, facts: Facts) -> Models:
    chance = torch.Generator().manual_seed(3)
    images, labels = torch.randn(33, 3, 6, 6, generator=chance), torch.randint(0, 3, (33,), generator=chance)
    train = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model = model.to(memory_format=torch.channels_last)
    trained(
        team, model, train=train, loss=lambda x, y: cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
    )
    facts["layout"] = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return {"model": model}


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.second(torch.tanh(self.first(x))), y)


def methods(team: Team, facts: Facts) -> Models:
    model = Methods()
    return {"model": trained(team, model, loss=lambda x, y: model.loss(x, y))}


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second, self.third = nn.Linear(INPUTS, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda z: torch.tanh(self.first(z)), x.requires_grad_(), use_reentrant=self.reentrant)
        return self.third(checkpoint(lambda z: torch.tanh(self.second(z)), hidden, use_reentrant=self.reentrant))


def recomputed(team: Team, facts: Facts) -> Models:
    return {"model": trained(team, Recomputed(reentrant=False))}


def recomputed_reentrant(team: Team, facts: Facts) -> Models:
    return {"model": trained(team, Recomputed(reentrant=True))}


class Talkative(nn.Module):
    """Hands out what it has in between as well; each part of the output is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x))
        return {"hidden": [hidden, hidden], "logits": self.second(hidden), "weight": self.second.weight}


def several_outputs(team: Team, facts: Facts) -> Models:
    model = Talkative()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return (
            cross_entropy(out["logits"], y) + 0.1 * out["hidden"][0].pow(2).mean() + out["weight"].pow(2).sum() * 0.01
        )

    return {"model": trained(team, model, loss=loss)}


def compiled(team: Team, facts: Facts) -> Models:
    model = network()
    fast = torch.compile(model, backend="aot_eager", dynamic=True)
    trained(team, fast, SGD(model.parameters(), lr=0.2))
    return {"model": model}


def compiled_in_place(team: Team, facts: Facts) -> Models:
    model = network()
    model.compile(backend="aot_eager", dynamic=True)
    return {"model": trained(team, model)}


CASES = {
    function.__name__: function
    for function in (
        branches,
        branches_of_a_stream,
        words_of_a_stream,
        two_models_one_branch,
        frozen,
        unfrozen_later,
        frozen_later,
        zeros_kept,
        all_frozen_at_first,
        tied,
        shared_by_two_models,
        sparse_sgd,
        sparse_adam,
        float64_part,
        bfloat16_part,
        odd_buffers,
        complex_part,
        many_small_one_huge,
        channels_last,
        methods,
        recomputed,
        recomputed_reentrant,
        several_outputs,
        compiled,
        compiled_in_place,
    )
}

if __name__ == "__main__":
    run_cases(CASES)
