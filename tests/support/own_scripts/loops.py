"""Training loops as people write them, one function each: `python loops.py FOLDER CASE...`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from parts import INPUTS, batches, network, run_cases
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import LBFGS, SGD, Adagrad
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import offbeat

Team, Facts, Models = offbeat.Team, dict[str, Any], Mapping[str, nn.Module]


def plain(team: Team, facts: Facts) -> Models:
    mine = network()
    its_optimizer = SGD(mine.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, train = team.prepare(mine, its_optimizer, batches())
    facts["same objects"] = model is mine and optimizer is its_optimizer
    facts["kinds"] = [type(model).__name__, type(optimizer).__name__]
    facts["keys"] = list(model.state_dict())
    seen = 0
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            seen += 1
    facts["batches"] = seen
    facts["length"] = len(train)
    return {"model": model}


def clip_norm(team: Team, facts: Facts) -> Models:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer, train = team.prepare(model, optimizer, batches())
    facts["norms"] = []
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x) * 5, y).backward()
            facts["norms"].append(float(clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
    return {"model": model}


def clip_norm_of_two(team: Team, facts: Facts) -> Models:
    """What accumulate(2) means, by hand: two batches are one; the last of an epoch is not kept for the next."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer, train = team.prepare(model, optimizer, batches())
    for _ in range(2):
        held: list[Any] = []
        for number, batch in enumerate(train, 1):
            held.append(batch)
            if number % 2 == 0 or number == len(train):
                x, y = (torch.cat(column) for column in zip(*held, strict=True))
                held.clear()
                optimizer.zero_grad()
                cross_entropy(model(x) * 5, y).backward()
                clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
    return {"model": model}


def clip_value(team: Team, facts: Facts) -> Models:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer, train = team.prepare(model, optimizer, batches())
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x) * 5, y).backward()
            clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return {"model": model}


def schedule_per_epoch(team: Team, facts: Facts) -> Models:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, train, schedule = team.prepare(model, optimizer, batches(), schedule)
    for _ in range(3):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    facts["rate"] = schedule.get_last_lr()
    return {"model": model}


def schedule_per_batch(team: Team, facts: Facts) -> Models:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    schedule = ExponentialLR(optimizer, 0.9)
    model, optimizer, train = team.prepare(model, optimizer, batches())
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    facts["rate"] = schedule.get_last_lr()
    return {"model": model}


def parameter_groups(team: Team, facts: Facts) -> Models:
    model = network()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.01},
        {"params": [model[2].weight], "momentum": 0.8},
        {"params": [model[2].bias]},
    ]
    model, optimizer, train = team.prepare(model, SGD(groups, lr=0.4), batches())
    for epoch in range(2):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 2)
    return {"model": model}


def two_optimizers(team: Team, facts: Facts) -> Models:
    model = network()
    first = SGD(model[0].parameters(), lr=0.2, momentum=0.9)
    second = Adagrad(model[2].parameters(), lr=0.1)
    train, model, first, second = team.prepare(batches(), model, first, second)
    for _ in range(2):
        for x, y in train:
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            first.step()
            second.step()
    facts["steps"] = team.step
    return {"model": model}


def cleared_one_by_one(team: Team, facts: Facts) -> Models:
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.2), Adagrad(model[2].parameters(), lr=0.1)
    train, model, first, second = team.prepare(batches(), model, first, second)
    for x, y in train:
        cross_entropy(model(x), y).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model}


def gan(team: Team, facts: Facts) -> Models:
    maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, INPUTS))
    judge = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 1))
    its, others = SGD(judge.parameters(), lr=0.2, momentum=0.5), SGD(maker.parameters(), lr=0.2)
    maker, judge, its, others, train = team.prepare(maker, judge, its, others, batches())
    for _ in range(2):
        for x, _ in train:
            fake = maker(x[:, :4])
            its.zero_grad()
            real, made = judge(x), judge(fake.detach())
            loss = binary_cross_entropy_with_logits(real, torch.ones_like(real))
            (loss + binary_cross_entropy_with_logits(made, torch.zeros_like(made))).backward()
            its.step()
            others.zero_grad()
            made = judge(fake)
            binary_cross_entropy_with_logits(made, torch.ones_like(made)).backward()
            others.step()
    return {"maker": maker, "judge": judge}


def gan_maker_first(team: Team, facts: Facts) -> Models:
    """The maker's pass leaves gradients in the judge, which are set to zero before the judge's own pass."""
    maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, INPUTS))
    judge = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 1))
    its, others = SGD(judge.parameters(), lr=0.2), SGD(maker.parameters(), lr=0.2, momentum=0.5)
    judge, its, maker, others, train = team.prepare(judge, its, maker, others, batches())
    for _ in range(2):
        for x, _ in train:
            others.zero_grad(set_to_none=False)
            made = judge(maker(x[:, :4]))
            binary_cross_entropy_with_logits(made, torch.ones_like(made)).backward()
            others.step()
            its.zero_grad(set_to_none=False)
            real, made = judge(x), judge(maker(x[:, :4]).detach())
            loss = binary_cross_entropy_with_logits(real, torch.ones_like(real))
            (loss + binary_cross_entropy_with_logits(made, torch.zeros_like(made))).backward()
            its.step()
    return {"maker": maker, "judge": judge}


def zeros_kept(team: Team, facts: Facts) -> Models:
    model = network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.3, momentum=0.9), batches())
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad(set_to_none=False)
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"model": model}


def two_losses(team: Team, facts: Facts) -> Models:
    """Two backward passes into the same gradients before one step."""
    model = network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.2), batches())
    for _ in range(2):
        for x, y in train:
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            (model(x * 0.5) ** 2).mean().backward()
            optimizer.step()
    return {"model": model}


def own_accumulation(team: Team, facts: Facts) -> Models:
    model = network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.4), batches())
    for _ in range(2):
        for number, (x, y) in enumerate(train, 1):
            (cross_entropy(model(x), y) / 3).backward()
            if number % 3 == 0 or number == len(train):
                optimizer.step()
                optimizer.zero_grad()
    facts["steps"] = team.step
    return {"model": model}


def penalty_on_weights(team: Team, facts: Facts) -> Models:
    """A part of the loss that does not go through the model's output."""
    model = network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.2), batches())
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            penalty = sum(p.abs().sum() for p in model.parameters())
            (cross_entropy(model(x), y) + 0.01 * penalty).backward()
            optimizer.step()
    return {"model": model}


def called_twice(team: Team, facts: Facts) -> Models:
    model = network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.2), batches())
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + cross_entropy(model(x * 0.9), y)).backward()
            optimizer.step()
    return {"model": model}


def numbered_epochs(team: Team, facts: Facts) -> Models:
    model = network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.2), batches())
    facts["epochs"] = []
    for epoch in team.epochs(3):
        facts["epochs"].append(epoch)
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"model": model}


def evaluated(team: Team, facts: Facts) -> Models:
    """The evaluation's loader is prepared too; 13 examples in batches of 4 give workers uneven numbers of batches."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, train, check = team.prepare(model, optimizer, batches(), batches(13, batch_size=4, shuffle=False))
    facts["losses"] = []
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        with team.averaged(model), torch.no_grad():
            total = count = 0.0
            for x, y in check:
                total += float(cross_entropy(model(x), y, reduction="sum"))
                count += len(y)
        team.report(loss=total / count)
        facts["losses"].append(team.ledger.metrics["loss"])
    return {"model": model}


def closures(optimizer_of: Any) -> Any:
    def case(team: Team, facts: Facts) -> Models:
        model = network().double()  # Line searches decide by small differences.
        model, optimizer, train = team.prepare(model, optimizer_of(model.parameters()), batches())
        facts["losses"], facts["calls"] = [], 0
        for _ in range(2):
            for x, y in train:

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = cross_entropy(model(x.double()), y)
                    loss.backward()
                    facts["calls"] += 1
                    return loss

                facts["losses"].append(float(optimizer.step(closure)))
        return {"model": model}

    return case


CASES = {
    function.__name__: function
    for function in (
        plain,
        clip_norm,
        clip_norm_of_two,
        clip_value,
        schedule_per_epoch,
        schedule_per_batch,
        parameter_groups,
        two_optimizers,
        cleared_one_by_one,
        gan,
        gan_maker_first,
        zeros_kept,
        two_losses,
        own_accumulation,
        penalty_on_weights,
        called_twice,
        numbered_epochs,
        evaluated,
    )
}
CLOSURES = {
    "lbfgs": closures(lambda parameters: LBFGS(parameters, lr=0.1, max_iter=4)),
    "lbfgs_strong_wolfe": closures(
        lambda parameters: LBFGS(parameters, lr=0.5, max_iter=3, history_size=3, line_search_fn="strong_wolfe")
    ),
    "sgd_with_closure": closures(lambda parameters: SGD(parameters, lr=0.2)),
}

if __name__ == "__main__":
    run_cases(CASES | CLOSURES)
