"""What a server does to its numbers: sums, steps of torch's own optimizers, corrections for delay, states."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor, optim
from torch.nn import Parameter

from offbeat.protocols.compression import (
    HalfFormat,
    QuantizeFormat,
    RandomKFormat,
    RowFormat,
    ThresholdFormat,
    TopKFormat,
)
from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.replica.works import (
    AccumulateGradient,
    Discard,
    Inspect,
    ReadShard,
    Release,
    Restore,
    Update,
)
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.compression import Coder, build
from offbeat.runtime.gradients.optimizers import ELEMENT_WISE, why_not
from offbeat.runtime.servers.shard_state import Numbers, first_state
from offbeat.runtime.servers.updater import ADD, Recipe, settings_of


def payload(*numbers: float, kind: Any = np.float32) -> Payload:
    raw = np.array(numbers, dtype=kind).view(np.uint8)
    raw.flags.writeable = False  # As it comes from another process.
    return Payload(raw.nbytes, raw)


def made(recipe: Recipe, values: Tensor) -> Numbers:
    numbers = Numbers(lambda _segment: None)
    state = first_state(recipe, values)
    numbers.do(Restore(Payload(state.nbytes, state), 0))
    return numbers


def held(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers.do(ReadShard()).handle.copy())


def sgd(rate: float = 0.5, momentum: float = 0.0, **more: Any) -> Recipe:
    optimizer = optim.SGD([Parameter(torch.zeros(4))], lr=rate, momentum=momentum)
    return Recipe(optimizer="SGD", ranges=(((0, 4),),), settings=settings_of(optimizer), **more)


def test_gradients_of_a_step_are_summed_by_their_weights_and_applied_once() -> None:
    numbers = made(sgd(), torch.ones(4))
    for _ in range(2):  # The second time the sum must begin with nothing.
        before = held(numbers)
        numbers.do(AccumulateGradient(payload(1, 2, 3, 4), 3.0, 0, -1))
        numbers.do(AccumulateGradient(payload(5, 6, 7, 8), 1.0, 0, -1))
        assert torch.equal(held(numbers), before), "a sum that is not complete is not applied"
        numbers.do(Update(numbers.version + 1, 0.25, ()))
        mean = (3 * torch.tensor([1.0, 2, 3, 4]) + torch.tensor([5.0, 6, 7, 8])) / 4
        torch.testing.assert_close(held(numbers), before - 0.5 * mean)
    assert numbers.version == 2


def test_parts_of_a_step_come_one_by_one() -> None:
    numbers = made(sgd(1.0), torch.zeros(4))
    numbers.do(AccumulateGradient(payload(1, 2), 1.0, 0, 2))
    numbers.do(AccumulateGradient(payload(3), 1.0, 3, 4))
    numbers.do(Update(1, 1.0, ()))
    assert held(numbers).tolist() == [-1.0, -2.0, 0.0, -3.0]
    numbers.do(Update(2, 1.0, (), 1, 3, payload(5, 6)))
    assert held(numbers).tolist() == [-1.0, -7.0, -6.0, -3.0]


def test_a_push_that_is_applied_alone_moves_by_its_share() -> None:
    numbers = made(sgd(), torch.zeros(4))
    numbers.do(Update(1, 0.25, (), payload=payload(4, 4, 4, 4)))
    assert held(numbers).tolist() == [-0.5] * 4


def test_what_is_discarded_changes_nothing() -> None:
    numbers = made(sgd(), torch.ones(4))
    numbers.do(Discard(payload(1, 1, 1, 1)))
    numbers.do(Update(1, 1.0, ()))
    assert held(numbers).tolist() == [1.0] * 4


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ELEMENT_WISE),
    *((name, {"weight_decay": 0.01, "maximize": True}) for name in ELEMENT_WISE if name != "Rprop"),
    ("Rprop", {"etas": (0.4, 1.3), "step_sizes": (1e-5, 2.0), "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "foreach": True}),
    ("Adam", {"amsgrad": True, "betas": (0.8, 0.95)}),
    ("Adam", {"fused": True}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("ASGD", {"t0": 2, "lambd": 0.1}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_every_optimizer_does_on_a_slice_what_it_does_on_the_whole(name: str, settings: dict[str, Any]) -> None:
    whole = [Parameter(torch.linspace(-1, 1, 5)), Parameter(torch.linspace(1, 2, 3))]
    groups = [{"params": [whole[0]]}, {"params": [whole[1]], "lr": 0.01}]
    own = cast("Any", ELEMENT_WISE[name])(groups, lr=0.1, **settings)
    recipe = Recipe(optimizer=name, ranges=(((0, 3),), ((3, 5),)), settings=settings_of(own))
    numbers = made(recipe, torch.cat([whole[0].data[2:], whole[1].data[:2]]))
    for step in range(4):
        if step == 2:  # A schedule changes the learning rate.
            for group in own.param_groups:
                group["lr"] *= 0.5
        changed = tuple({"lr": float(group["lr"])} for group in own.param_groups) if step == 2 else ()
        gradient = torch.randn(8, generator=torch.Generator().manual_seed(step))
        whole[0].grad, whole[1].grad = gradient[:5].clone(), gradient[5:].clone()
        own.step()
        numbers.do(Update(step + 1, 1.0, changed, payload=payload(*gradient[2:7].tolist())))
    torch.testing.assert_close(held(numbers), torch.cat([whole[0].data[2:], whole[1].data[:2]]))


def test_a_state_that_is_fetched_and_put_back_goes_on_to_the_same_bits() -> None:
    optimizer = optim.Adam([Parameter(torch.zeros(4))], lr=0.1)
    recipe = Recipe(optimizer="Adam", ranges=(((0, 4),),), settings=settings_of(optimizer))
    one = made(recipe, torch.ones(4))
    one.do(Update(1, 1.0, (), payload=payload(1, -2, 3, -4)))
    state = one.do(ReadShard(state=True))
    other = Numbers(lambda _segment: None)
    other.do(Restore(state, 1))
    for numbers in (one, other):
        numbers.do(Update(2, 1.0, (), payload=payload(4, 3, 2, 1)))
    assert torch.equal(held(one), held(other))


def test_sums_of_statistics_are_added_whatever_their_scale() -> None:
    numbers = made(Recipe(optimizer=ADD, kind="float64"), torch.zeros(2, dtype=torch.float64))
    numbers.do(Update(1, 0.5, (), payload=payload(1, 2, kind=np.float64)))
    numbers.do(AccumulateGradient(payload(10, 20, kind=np.float64), 1.0, 0, -1))
    numbers.do(AccumulateGradient(payload(1, 1, kind=np.float64), 1.0, 0, -1))
    numbers.do(Update(2, 0.5, ()))
    assert held(numbers).tolist() == [12.0, 23.0]


def test_the_more_a_gradient_has_missed_the_shorter_its_step() -> None:
    numbers = made(sgd(1.0, staleness_scaling=True), torch.zeros(4))
    numbers.do(Update(1, 0.5, (), payload=payload(1, 1, 1, 1), missed=2))
    assert held(numbers).tolist() == [-0.5 / (1 + 2 * 0.5)] * 4


def test_a_late_gradient_is_corrected_by_how_far_the_values_have_moved() -> None:
    numbers = made(sgd(1.0, delay_compensation=0.5), torch.zeros(4))
    numbers.do(Update(1, 1.0, (), payload=payload(2, 2, 2, 2), oldest=0))
    # Another replica, which nobody has read from, is made in between: it knows what was read before.
    state, another = numbers.do(ReadShard(state=True, kept=True)), Numbers(lambda _segment: None)
    another.do(Restore(state, 1))
    for one in (numbers, another):
        one.do(Update(2, 1.0, (), payload=payload(1, -1, 3, 0), missed=1, oldest=0))
    gradient, moved = torch.tensor([1.0, -1, 3, 0]), torch.full((4,), -2.0)
    expected = moved - (gradient + 0.5 * gradient * gradient * moved)
    torch.testing.assert_close(held(numbers), expected)
    assert torch.equal(held(another), held(numbers))


def test_a_state_is_handed_over_in_lent_memory_which_goes_when_it_is_held() -> None:
    lent: list[Segment] = []
    numbers = Numbers(lent.append, lent.remove)
    numbers.do(Restore(made(sgd(momentum=0.5), torch.arange(4.0)).do(ReadShard(state=True)), 0))
    numbers.do(Update(1, 1.0, (), payload=payload(1, 1, 1, 1)))
    state = numbers.do(ReadShard(state=True, kept=True))
    (_, memory) = lent
    assert np.shares_memory(state.handle, memory.bytes)
    novice = Numbers(lent.append)
    novice.do(Restore(state, 1))
    numbers.do(Release(state))
    assert memory not in lent
    assert not memory.bytes.any(), "whoever has it mapped keeps no copy of it"
    for one in (numbers, novice):
        one.do(Update(2, 1.0, (), payload=payload(1, 2, 3, 4)))
    assert torch.equal(held(novice), held(numbers))


def test_a_shard_that_nothing_was_put_on_yet_can_be_copied() -> None:
    empty, novice = Numbers(lambda _segment: None), Numbers(lambda _segment: None)
    novice.do(Restore(empty.do(ReadShard(state=True, kept=True)), 0))
    assert (novice.updater, novice.version) == (None, 0)


def test_values_are_kept_as_long_as_gradients_may_come_from_them_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = made(sgd(1.0, delay_compensation=0.5), torch.zeros(4))

    def versions(kept: bool = True) -> list[int]:
        names = load(numbers.do(ReadShard(state=True, kept=kept)).handle.tobytes())
        return sorted(int(name.split()[-1]) for name in names if name.startswith("kept"))

    for version in range(1, 8):
        numbers.do(Update(version, 1.0, (), payload=payload(1, 1, 1, 1), oldest=max(0, version - 4)))
    assert versions() == [3, 4, 5, 6]
    assert versions(kept=False) == [], "checkpoints, at which nobody computes, need none"
    monkeypatch.setattr("offbeat.runtime.servers.updater._LEAST_KEPT", 2)
    monkeypatch.setattr("offbeat.runtime.servers.updater._KEPT_BYTES", 0)
    numbers.do(Update(8, 1.0, (), payload=payload(1, 1, 1, 1), oldest=0))
    assert versions() == [6, 7]
    numbers.do(Update(9, 1.0, (), payload=payload(1, 1, 1, 1)))
    assert versions() == [6, 7], "where it was not asked for nothing is kept"


@pytest.mark.parametrize(
    ("brought", "why"),
    [
        (payload(1, float("nan"), 3, 4), "1 of 4 numbers are NaN or inf"),
        (payload(1, float("inf"), float("-inf"), 4), "2 of 4"),
        (payload(3e38, 3e38, 3e38, 3e38), ""),
        (payload(*[1.0] * 5), "20 bytes where 16 were expected"),
        (Payload(3, np.zeros(3, np.uint8)), "3 bytes"),
        (payload(1, 2), "8 bytes where 16 were expected"),
        (Payload(0), ""),
    ],
)
def test_what_is_not_fit_is_found_at_the_door(brought: Payload, why: str) -> None:
    said = made(sgd(), torch.zeros(4)).do(Inspect(brought, 0))
    assert said == "" if not why else why in said


@pytest.mark.parametrize(
    ("start", "stop", "count", "why"),
    [
        (1, 3, 2, ""),
        (2, -1, 2, ""),
        (1, 3, 3, "12 bytes where 8 were expected"),
        (3, 1, 2, "the range 3:1 of a shard of 4 numbers"),
        (2, 6, 4, "the range 2:6"),
        (-2, 2, 4, "the range -2:2"),
    ],
)
def test_a_push_for_a_range_that_the_shard_does_not_have_is_refused(
    start: int, stop: int, count: int, why: str
) -> None:
    said = made(sgd(), torch.zeros(4)).do(Inspect(payload(*[1.0] * count), 0, start, stop))
    assert said == "" if not why else why in said


def test_every_optimizer_of_torch_is_taken_or_refused_with_a_reason() -> None:
    kinds = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    refused = {kind.__name__: why_not(kind) for kind in kinds if kind is not optim.Optimizer and why_not(kind)}
    assert set(refused) == {"LBFGS", "Adafactor", "Muon", "SparseAdam"}
    assert not any("not known" in why for why in refused.values()), "a new one: try it, or say why not"
    assert "not known" in why_not(type("Own", (optim.SGD,), {}))
    assert "learning rate" in why_not(optim.Rprop, by_rate=True)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_a_parameter_without_a_gradient_is_passed_over_as_by_torch(name: str) -> None:
    """Three parameters side by side, of which the middle one has a gradient in every other step only."""
    settings: dict[str, Any] = {"lr": 0.1} | ({} if name == "Rprop" else {"weight_decay": 0.1})
    settings |= {"momentum": 0.9} if name == "SGD" else {}
    plain = [Parameter(torch.ones(2) * (k + 1)) for k in range(3)]
    alone = ELEMENT_WISE[name](plain, **settings)  # pyright: ignore[reportCallIssue]
    recipe = Recipe(
        optimizer=name, ranges=(((0, 6),),), pieces=(((0, 2), (2, 4), (4, 6)),), settings=settings_of(alone)
    )
    numbers = made(recipe, torch.cat([p.detach() for p in plain]))
    source = torch.Generator().manual_seed(3)
    for step in range(6):
        gradient = torch.randn(6, generator=source)
        absent = ((2, 4),) if step % 2 else ()
        for k, parameter in enumerate(plain):
            parameter.grad = None if absent and k == 1 else gradient[2 * k : 2 * k + 2].clone()
        alone.step()
        numbers.do(AccumulateGradient(payload(*gradient.tolist()), 1.0, 0, -1, absent))
        numbers.do(Update(step + 1, 1.0, ()))
        torch.testing.assert_close(held(numbers), torch.cat([p.detach() for p in plain]), rtol=0, atol=1e-6)
    again = made(recipe, torch.zeros(6))
    state = numbers.do(ReadShard(state=True))
    again.do(Restore(state, 6))
    for replica in (numbers, again):
        replica.do(Update(7, 1.0, (), payload=payload(*[1.0] * 6)))
    assert torch.equal(held(again), held(numbers)), "a state that was put back has each parameter's own"


def test_a_state_has_what_schedulers_have_changed() -> None:
    numbers = made(sgd(0.5), torch.zeros(4))
    numbers.do(Update(1, 1.0, ({"lr": 0.25},), payload=payload(0, 0, 0, 0)))
    again = made(sgd(), torch.zeros(4))
    again.do(Restore(numbers.do(ReadShard(state=True)), 1))
    again.do(Update(2, 1.0, (), payload=payload(4, 4, 4, 4)))
    assert held(again).tolist() == [-1.0] * 4


# --- letters


def letter(row: Tensor, *forms: RowFormat) -> Payload:
    coder: Coder | None = None
    for form in reversed(forms):
        coder = build(form, seed=7, inner=coder)
    assert coder is not None
    raw = coder.encode(row).numpy()
    raw.flags.writeable = False  # As it comes from another process.
    return Payload(raw.nbytes, raw)


@pytest.mark.parametrize(
    "forms",
    [
        (HalfFormat(),),
        (TopKFormat(0.5),),
        (RandomKFormat(0.5),),
        (TopKFormat(0.5), QuantizeFormat(8)),
        (ThresholdFormat(2.5),),
    ],
)
def test_letters_are_read_before_they_are_used(forms: tuple[RowFormat, ...]) -> None:
    row = torch.tensor([1.0, -4.0, 3.0, 2.0])
    numbers = made(sgd(1.0, coders=forms, seed=7), torch.zeros(4))
    sent = letter(row, *forms)
    said = torch.zeros(4)
    inner = None
    for form in reversed(forms):
        inner = build(form, seed=7, inner=inner)
    assert inner is not None
    inner.add(torch.from_numpy(np.array(sent.handle)), said)
    assert said.any()
    assert numbers.do(Inspect(sent, 0)) == ""
    numbers.do(AccumulateGradient(sent, 2.0, 0, -1))
    numbers.do(Update(1, 0.5, ()))
    torch.testing.assert_close(held(numbers), -said)
    numbers.do(Update(2, 1.0, (), 0, -1, sent))
    torch.testing.assert_close(held(numbers), -2 * said)
    again = numbers.do(ReadShard(state=True))
    copy = Numbers(lambda _segment: None)
    copy.do(Restore(Payload(again.nbytes, again.handle), 2))
    assert copy.do(Inspect(sent, 0)) == "", "a copy of the shard reads letters, too"


def test_letters_that_do_not_fit_or_say_nan_are_refused_at_the_door() -> None:
    numbers = made(sgd(coders=(TopKFormat(0.5),)), torch.zeros(4))
    row = torch.tensor([1.0, -4.0, 3.0, 2.0])
    good = letter(row, TopKFormat(0.5))
    assert "7 bytes came where one of 8" in numbers.do(Inspect(Payload(15, good.handle[:15]), 0))
    assert "2 bytes came where one of 8" in numbers.do(Inspect(Payload(2, good.handle[:2]), 0))
    astray = np.array(good.handle)
    astray.view(np.int32)[1] = 4
    assert "do not fit a row of 4" in numbers.do(Inspect(Payload(16, astray), 0))
    row[0] = float("nan")
    assert "NaN" in numbers.do(Inspect(letter(row, TopKFormat(0.5)), 0))
