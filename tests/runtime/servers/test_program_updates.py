"""What a server does with a push under a program: torch's numbers, all or nothing, and what it refuses at the door."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor, optim
from torch.nn import Parameter

from offbeat.protocols.machine import Done, Effect, Payload, Received, Send, Start
from offbeat.protocols.programs.library import RECIPES, recipe_program
from offbeat.protocols.programs.plan import plan_of
from offbeat.protocols.programs.program import Program
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Load, Push, PushReply
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.works import AccumulateGradient, ReadShard, Restore, Update
from offbeat.runtime.programs import compile as compiling
from offbeat.runtime.servers.program_optimizer import MOST_OPERATIONS, ProgramOptimizer
from offbeat.runtime.servers.shard_state import Numbers, first_state
from offbeat.runtime.servers.state_inspection import why_unusable
from offbeat.runtime.servers.updater import PROGRAM, Recipe, settings_of

RANGES = (((0, 3),), ((3, 5),))
RATES = (0.1, 0.02)
COUNTING = r"\w g s. (w + step + 10 * staleness + 100 * workers, s + 1)"
ROOT = r"\w g s. let s = s + g in (w + sqrt s, s)"


def payload(*numbers: float) -> Payload:
    raw = np.array(numbers, dtype=np.float32).view(np.uint8)
    return Payload(raw.nbytes, raw)


def recipe_of(program: Program | str, **more: Any) -> Recipe:
    """A recipe with two groups, each with a rate of its own."""
    checked = Program.parse(program) if isinstance(program, str) else program
    whole: dict[str, Any] = {"ranges": RANGES, "pieces": RANGES, "settings": tuple({"lr": rate} for rate in RATES)}
    text = {"program": checked.text, "program_hash": plan_of(checked).hash}
    return Recipe(optimizer=PROGRAM, **(whole | text | more))


def one_range(program: str, count: int = 4, **more: Any) -> Recipe:
    return recipe_of(program, ranges=(((0, count),),), pieces=(((0, count),),), settings=({"lr": 0.5},), **more)


def made(recipe: Recipe, values: Tensor) -> Numbers:
    numbers = Numbers(lambda _segment: None)
    state = first_state(recipe, values)
    assert why_unusable(state) == ""
    numbers.do(Restore(Payload(state.nbytes, state), 0))
    return numbers


def held(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers.do(ReadShard()).handle.copy())


def torchs(kind: Any, **settings: Any) -> Recipe:
    groups = [{"params": [Parameter(torch.zeros(1))], "lr": rate} for rate in RATES]
    optimizer = kind(groups, **settings)
    return Recipe(optimizer=kind.__name__, ranges=RANGES, pieces=RANGES, settings=settings_of(optimizer))


PAIRS = {
    "sgd": torchs(optim.SGD),
    "momentum": torchs(optim.SGD, momentum=0.9),
    "adagrad": torchs(optim.Adagrad),
    "rmsprop": torchs(optim.RMSprop),
    "adam": torchs(optim.Adam),
    "adamw": torchs(optim.AdamW),
    "delay_compensated": structs.replace(torchs(optim.SGD), delay_compensation=0.04),
}


@pytest.mark.parametrize("alone", [False, True], ids=["summed", "alone"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_library_gives_the_numbers_of_the_servers_own_optimizers(name: str, alone: bool) -> None:
    start = torch.linspace(-1, 1, 5)
    program, built_in = made(recipe_of(recipe_program(name)), start), made(PAIRS[name], start)
    chance = torch.Generator().manual_seed(3)
    for step in range(8):
        gradient = payload(*torch.randn(5, generator=chance).tolist())
        settings = ({"lr": 0.05}, {"lr": 0.01}) if step == 4 else ()
        # Every third gradient lacks the second group, and every fourth is from two updates ago.
        absent = ((3, 5),) if step % 3 == 2 and name != "delay_compensated" else ()
        missed = min(step, 2) if step % 4 == 3 else 0
        for numbers in (program, built_in):
            if alone:
                more = {"payload": gradient, "absent": absent, "missed": missed, "oldest": 0, "workers": 2}
                assert not numbers.do(Update(step + 1, 0.5, settings, **more))
            else:
                numbers.do(AccumulateGradient(gradient, 3.0, 0, -1, absent))
                assert not numbers.do(Update(step + 1, 1 / 3, settings, workers=2))
    assert not torch.equal(held(program), start)
    torch.testing.assert_close(held(program), held(built_in), rtol=1e-5, atol=1e-6)


def test_a_program_knows_its_step_and_how_old_a_gradient_is_and_how_many_workers_there_are() -> None:
    numbers = made(one_range(COUNTING), torch.zeros(4))
    numbers.do(Update(1, 1 / 3, (), payload=payload(0, 0, 0, 0), missed=2, workers=3))
    assert held(numbers).tolist() == [1 + 20 + 300.0] * 4
    numbers.do(AccumulateGradient(payload(0, 0, 0, 0), 1.0, 0, -1))
    numbers.do(Update(2, 1.0, (), workers=2))
    assert held(numbers).tolist() == [321 + 2 + 0 + 200.0] * 4, "a sum of a step is never old"


def test_a_result_that_is_not_finite_changes_neither_values_nor_states_nor_the_step() -> None:
    disturbed, plain = (made(recipe_of(ROOT), torch.zeros(5)) for _ in range(2))
    for numbers in (disturbed, plain):
        assert numbers.do(Update(1, 1.0, (), payload=payload(1, 2, 3, 4, 5))) == ""
    # Only the second group's numbers have no root: the first must not move either.
    reason = disturbed.do(Update(2, 1.0, (), payload=payload(1, 1, 1, -9, 1)))
    assert "new parameters would not be finite" in reason
    assert torch.equal(held(disturbed), held(plain))
    for numbers in (disturbed, plain):
        assert numbers.do(Update(3, 1.0, (), payload=payload(1, 1, 1, 1, 1))) == ""
    assert torch.equal(held(disturbed), held(plain))


def test_a_division_of_scalars_by_zero_is_named() -> None:
    numbers = made(one_range(r"\w g. w / (step - 1)"), torch.ones(4))
    reason = numbers.do(Update(1, 1.0, (), payload=payload(0, 0, 0, 0)))
    assert "1.0 / 0.0 is not a finite real number" in reason
    assert held(numbers).tolist() == [1.0] * 4


def test_a_fetched_state_goes_on_to_the_same_bits() -> None:
    first = made(recipe_of(recipe_program("adam")), torch.linspace(-1, 1, 5))
    for step in range(3):
        first.do(Update(step + 1, 1.0, (), payload=payload(*range(step, step + 5))))
    state = first.do(ReadShard(state=True)).handle
    assert why_unusable(state) == ""
    second = Numbers(lambda _segment: None)
    second.do(Restore(Payload(state.nbytes, state), 3))
    for numbers in (first, second):
        numbers.do(Update(4, 1.0, (), payload=payload(5, 4, 3, 2, 1)))
    assert torch.equal(held(first), held(second))


def test_a_program_with_a_norm_sees_missing_gradients_as_zeros() -> None:
    numbers = made(one_range(r"\w g. w - norm g"), torch.zeros(4))
    numbers.do(Update(1, 1.0, (), payload=payload(3, 4, 0, 0), absent=((2, 4),)))
    assert held(numbers).tolist() == [-5.0] * 4


def test_a_norm_is_over_all_groups_and_pieces() -> None:
    program = recipe_of(r"\w g. w - lr / norm (g / norm g + 0 * w) * mean g * length g", ranges=(((0, 2),), ((3, 5),)))
    numbers = made(program, torch.zeros(5))
    assert numbers.do(Update(1, 1.0, (), payload=payload(3, 0, 100, 4, 0))) == ""
    expected = [-0.1 * 7, -0.1 * 7, 0, -0.02 * 7, -0.02 * 7]
    torch.testing.assert_close(held(numbers), torch.tensor(expected))


EXTREMES = (0.0, -0.0, 1e-45, -1e-38, 1e-20, 1.0, -3.0, 1e4, 1e18, -1e19, 3e30, -1e37, 3.4e38, math.inf, math.nan)
PROGRAMS = {name: recipe_program(name).text for name in RECIPES} | {
    "root": ROOT,
    "growing": r"\w g s. (w * w + g, s + w)",
    "dividing": r"\w g s. let s = 0.5 * s + g in (w - lr * g / s, s)",
    "scaled": r"\w g. w + 1e30 * g / (1e25 + abs g)",
    "products": r"\w g. w + 1e20 * g * (1e-30 * w)",
    "wild": r"\w g s. (where (g < 0) (exp w) (1 / (s - g)), max s (g ** 3))",
}


class Unproved(ProgramOptimizer):
    """The same, by looking at every result."""

    def step(self, closure: Any = None) -> None:
        del closure
        inputs = self._inputs()
        updates = [self._compiled.prepare(each.vectors, each.scalars, self._totals(inputs)) for each in inputs]
        self._write_checked(inputs, updates)
        for each in inputs:
            self.state[each.parameter]["step"] = int(each.scalars["step"])


@pytest.mark.parametrize("alone", [False, True], ids=["summed", "alone"])
@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_result_that_is_not_finite_slips_through_kept_bounds(name: str, alone: bool, data: st.DataObject) -> None:
    number = st.one_of(st.sampled_from(EXTREMES), st.floats(width=32))
    finite = number.filter(math.isfinite)
    start = torch.tensor(data.draw(st.lists(finite, min_size=5, max_size=5)), dtype=torch.float32)
    ours, looked = (made(recipe_of(PROGRAMS[name]), start) for _ in range(2))
    updater = cast("Any", looked.updater)
    updater._optimizer.__class__ = Unproved
    for step in range(6):
        gradient = payload(*data.draw(st.lists(number, min_size=5, max_size=5)))
        scale, settings_ = data.draw(st.sampled_from([1.0, 0.5, 1e-30, 1e30])), ({"lr": 0.1}, {"lr": data.draw(finite)})
        reasons: list[str] = []
        for numbers in (ours, looked):
            with np.errstate(all="ignore"):
                if alone:
                    more = {"payload": gradient, "missed": step % 3, "oldest": 0}
                    reasons.append(numbers.do(Update(step + 1, 0.5, settings_, **more)))
                else:
                    for weight in (3.0, 0.25):
                        numbers.do(AccumulateGradient(gradient, weight, 0, -1))
                    reasons.append(numbers.do(Update(step + 1, scale, settings_)))
        assert reasons[0] == reasons[1]
        assert bool(torch.isfinite(held(ours)).all())
        assert torch.equal(held(ours), held(looked))
        assert bool((ours.do(ReadShard(state=True)).handle == looked.do(ReadShard(state=True)).handle).all())


def test_updates_of_the_library_are_proved_finite_by_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramOptimizer, "_write_checked", lambda *_: pytest.fail("computed beside the old values"))
    for name in set(RECIPES) - {"delay_compensated"}:  # Its third vector is measured in every update.
        monkeypatch.setattr(compiling, "_measured", lambda _: (0.0, 1.0))
        numbers = made(recipe_of(recipe_program(name)), torch.linspace(0, 1, 5))
        for step in range(50):
            assert numbers.do(Update(step + 1, 1.0, (), payload=payload(1, -2, 3, -4, 5))) == ""
            monkeypatch.setattr(compiling, "_measured", lambda _: pytest.fail("looked at a whole vector"))


# -- at the door -------------------------------------------------------------------------------------------------------


def saved(recipe: Recipe, states: Sequence[str] = (), count: int = 4) -> np.ndarray:
    kept = {0: {name: torch.zeros(count) for name in states} | {"step": 1}} if states else None
    return first_state(recipe, torch.zeros(count), kept)


EXPENSIVE = r"\w g. " + " + ".join(f"sqrt (w + {n})" for n in range(MOST_OPERATIONS))


def changed(recipe: Recipe, **fields: Any) -> np.ndarray:
    return saved(structs.replace(recipe, **fields))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (changed(one_range(ROOT), program=r"\w g. w +", program_hash=""), "the program is refused: line 1, column"),
        (changed(one_range(ROOT), program=r"\w. w", program_hash=""), "needs"),
        (changed(one_range(ROOT), program=r"\w g. (\x. x x) (\x. x x)"), "applied to itself"),
        (changed(one_range(ROOT), program="(" * 100_000), "the program is refused"),
        (changed(one_range(ROOT), program=r"\w g. w - g"), "is not the one that was announced"),
        (changed(one_range(ROOT), program=EXPENSIVE, program_hash=""), "a server makes at most"),
        (saved(one_range(ROOT), ["m", "v"]), r"has the states s, and the saved one lacks s and has m, v"),
        (changed(recipe_of(ROOT), ranges=(((0, 3),), ((2, 4),))), "its ranges overlap"),
        (changed(one_range(ROOT), optimizer="Psychic"), "which no server has"),
        (changed(one_range(ROOT), kind="float16"), "float16"),
        (np.zeros(40, np.uint8), "cannot be read"),
        (np.full(40, 255, np.uint8), "cannot be read"),
        (np.empty(0, np.uint8), "cannot be read"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_state_that_a_server_cannot_hold_is_refused_with_the_reason(state: np.ndarray, reason: str) -> None:
    assert reason in why_unusable(state)


class Door:
    """A server and its numbers, to which a worker's messages are delivered at once."""

    def __init__(self, rule: Rule) -> None:
        self.machine = ServerMachine("server 0.0", 0, rule, ClusterView.of(1, 1))
        self.numbers = Numbers(lambda _segment: None)
        self.sent = 0

    def load(self, state: np.ndarray) -> PushReply:
        return self._take(Load(worker=0, number=self.sent, version=0, clock=0), state)

    def push(self, clock: int, *numbers: float) -> PushReply:
        message = Push(worker=0, number=self.sent, clock=clock, version=self.machine.shard.version)
        return self._take(message, payload(*numbers).handle)

    def _take(self, message: Load | Push, numbers: np.ndarray) -> PushReply:
        self.sent += 1
        todo: list[Effect] = list(self.machine.on(Received("worker 0", message, Payload(numbers.nbytes, numbers)), 0.0))
        replies: list[PushReply] = []
        while todo:
            effect = todo.pop(0)
            if isinstance(effect, Start):
                result = self.numbers.do(effect.work, effect.token)
                todo += self.machine.on(Done(effect.token, result), 0.0) if effect.token is not None else ()
            elif isinstance(effect, Send) and isinstance(effect.message, PushReply):
                replies.append(effect.message)
        (reply,) = replies
        return reply


@pytest.mark.parametrize("rule", [Rule(0, proves=True), Rule(None, proves=True)], ids=str)
def test_a_push_whose_result_is_not_finite_is_refused_named_and_counted(rule: Rule) -> None:
    door = Door(rule)
    assert door.load(saved(one_range(ROOT))).status == "applied"
    assert door.push(0, 1, 1, 1, 1).status == "applied"
    before = held(door.numbers)
    refused = door.push(1, -9, 1, 1, 1)
    assert refused.status == "refused"
    assert refused.reason.startswith("step 1: The program's new parameters would not be finite")
    assert torch.equal(held(door.numbers), before)
    assert door.push(2, 1, 1, 1, 1).status == "applied"
    assert dict(door.machine.shard.counts) == {"applied": 2, "refused": 1}
    assert [(refusal.worker, refusal.step) for refusal in door.machine.admission.refusals] == [(0, 1)]


def test_random_and_mutated_programs_at_the_door_are_refused_or_run_and_the_server_goes_on() -> None:
    chance, door = random.Random(5), Door(Rule(None, proves=True))
    texts = [recipe_program(name).text for name in ("adam", "momentum", "clipped_sgd")] + [ROOT, COUNTING]
    letters = "\\.()=,+-*/<>! λ0123456789ewgsm'lr\x00é#\n" + "".join(("let", "in", "sqrt"))
    statuses: set[str] = set()
    for _ in range(400):
        text = list(chance.choice(texts))
        for _ in range(chance.choice((1, 1, 2, 5, 40))):
            place, what = chance.randrange(len(text) + 1), chance.choice(letters)
            text[place : place + chance.randrange(3)] = [what] * chance.choice((0, 1, 1, 3))
        recipe = structs.replace(one_range(ROOT), program="".join(text), program_hash="")
        reply = door.load(saved(recipe))
        statuses.add(reply.status)
        assert reply.status == "applied" or "the program" in reply.reason
        if reply.status == "applied":
            assert door.push(door.machine.shard.minimum, 1, 2, 3, 4).status in ("applied", "refused")
    assert statuses == {"applied", "refused"}


def test_mutated_states_at_the_door_are_refused_or_held() -> None:
    chance, door = random.Random(6), Door(Rule(None, proves=True))
    good = saved(one_range(ROOT), ["s"])
    for _ in range(300):
        state = good.copy()
        header = 8 + int.from_bytes(state[:8].tobytes(), "little")
        for _ in range(chance.choice((1, 2, 8))):
            state[chance.randrange(header)] = chance.randrange(256)
        expected = "refused" if why_unusable(state) else "applied"
        assert door.load(state).status == expected
        door.push(door.machine.shard.minimum, 1, 1, 1, 1)
    assert door.load(good).status == "applied"


def test_the_state_that_is_saved_names_the_program_and_its_states() -> None:
    numbers = made(one_range(ROOT), torch.zeros(4))
    numbers.do(Update(1, 1.0, (), payload=payload(1, 1, 1, 1)))
    state = numbers.do(ReadShard(state=True)).handle
    header = json.loads(state[8 : 8 + int.from_bytes(state[:8].tobytes(), "little")].tobytes())
    assert json.loads(header["__metadata__"]["said"])["recipe"]["program"] == Program.parse(ROOT).text
    assert "state.0.s" in header
