"""Compiled programs: torch's numbers, in place, chunk by chunk, and refusals that change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from offbeat.errors import NonFiniteError, ProgramError
from offbeat.protocols.programs.library import RECIPES, recipe_program
from offbeat.protocols.programs.plan import plan_of
from offbeat.protocols.programs.program import Program
from offbeat.runtime.programs import compile as compiling
from offbeat.runtime.programs.compile import CompiledProgram, compiled
from offbeat.runtime.programs.kernels import kernel_of

LENGTH = 10_007
OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "CHUNK_BYTES", 4_096)


def vectors(count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LENGTH, dtype=dtype, generator=generator) for _ in range(count)]


def without_kernel(program: Program) -> CompiledProgram:
    plain = CompiledProgram(plan_of(program))
    plain.kernel = None
    return plain


@pytest.mark.parametrize("apart", [False, True], ids=["in_place", "apart"])
@pytest.mark.parametrize("kernel", [False, True], ids=["plan", "kernel"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_programs_of_the_library_give_torchs_numbers(
    name: str, dtype: torch.dtype, most: float, kernel: bool, apart: bool
) -> None:
    program = recipe_program(name)
    ours = compiled(program) if kernel else without_kernel(program)
    (start,) = vectors(1, dtype)
    parameter = Parameter(start.clone())
    optimizer = OPTIMIZERS[name]([parameter])
    state = [start, *(torch.zeros_like(start) for _ in program.states)]
    for step in range(1, 6):
        (gradient,) = vectors(1, dtype, seed=step)
        parameter.grad = gradient.clone()
        optimizer.step()
        out = [torch.empty_like(vector) for vector in state] if apart else None
        ours.run([state[0], gradient, *state[1:]], {"lr": 0.01, "step": step}, out)
        state = out or state
    assert torch.allclose(state[0], parameter.detach(), rtol=most, atol=most)


def test_delay_compensation_elastic_averaging_and_clipping_are_their_formulas() -> None:
    w, g, read = vectors(3)
    expected = w - 0.1 * (g + 0.04 * g * g * (w - read))
    compiled(recipe_program("delay_compensated")).run([w, g, read], {"lr": 0.1})
    assert torch.allclose(w, expected, rtol=1e-14)
    centre, worker = vectors(2)
    expected = centre + 0.05 * (worker - centre)
    compiled(recipe_program("elastic")).run([centre, worker], {})
    assert torch.allclose(centre, expected, rtol=1e-13)
    w, g = vectors(2)
    parameter = Parameter(w.clone())
    parameter.grad = g.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.optim.SGD([parameter], lr=0.1).step()
    compiled(recipe_program("clipped_sgd")).run([w, g], {"lr": 0.1})
    assert torch.allclose(w, parameter.detach(), rtol=1e-12)


EVERY_OPERATION: list[tuple[str, Callable[..., Any]]] = [
    ("w + 1 - g / 3", lambda w, g: w + 1 - g / 3),
    ("1 / (g * g + 1) - w", lambda w, g: 1 / (g * g + 1) - w),
    ("w * g / (abs g + 1) * 2", lambda w, g: w * g / (g.abs() + 1) * 2),
    ("(abs w + 1) ** 1.5 + 2 ** g", lambda w, g: (w.abs() + 1) ** 1.5 + 2**g),
    ("(abs w + 1) ** g", lambda w, g: (w.abs() + 1) ** g),
    ("(abs g + 1) ** 2 + (abs w + 1) ** -1 + g ** 1", lambda w, g: (g.abs() + 1) ** 2 + 1 / (w.abs() + 1) + g),
    ("exp w + log (abs g) + sqrt (abs w)", lambda w, g: w.exp() + g.abs().log() + w.abs().sqrt()),
    ("sign w * -g", lambda w, g: w.sign() * -g),
    ("min w g + max w 0 + min 1 g", lambda w, g: torch.minimum(w, g) + w.clamp(min=0) + g.clamp(max=1)),
    ("clip w (-1) 1 + max w g", lambda w, g: w.clamp(-1, 1) + torch.maximum(w, g)),
    ("(w < g) + (w <= 0) + (1 > g)", lambda w, g: (w < g).double() + (w <= 0).double() + (g < 1).double()),
    ("(w >= g) + (w == w) + (w != g)", lambda w, g: (w >= g).double() + 1 + (w != g).double()),
    ("where (w < g) w 0", lambda w, g: torch.where(w < g, w, 0.0)),
    ("where (1 < 2) g w + 0 * w", lambda *vectors: vectors[1]),
    ("where (norm w < 1) w g", lambda *vectors: vectors[1]),
    ("w + dot w g + norm g + sum w + length w", lambda w, g: w + w @ g + g.norm() + w.sum() + LENGTH),
    ("w + (g - w) * 0.25", lambda w, g: w + (g - w) * 0.25),
    ("g * norm (g / norm w)", lambda w, g: g * (g / w.norm()).norm()),
    ("w * largest g - largest (0 - w)", lambda w, g: w * g.max() + w.min()),
    ("w * mean g", lambda w, g: w * g.mean()),
    ("w * 0 + 2", lambda *vectors: torch.full_like(vectors[0], 2.0)),
    ("g", lambda *vectors: vectors[1]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), EVERY_OPERATION, ids=[body for body, _ in EVERY_OPERATION])
def test_every_operation_computes_what_torch_does(body: str, expected: Callable[..., Tensor]) -> None:
    w, g = vectors(2)
    right = expected(w.clone(), g)
    compiled(Program.parse(rf"\w g. {body}")).run([w, g], {})
    assert torch.allclose(w, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_choice_takes_the_chosen_number_bit_for_bit_whatever_the_other_is(dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 1e-45, -1.0, math.inf, -math.inf, math.nan, 3e38]
    grid = torch.cartesian_prod(torch.tensor([0.0, -0.0, 1.0, -2.0, math.nan]), *[torch.tensor(special)] * 2).to(dtype)
    condition, yes, no = (column.contiguous() for column in grid.T)
    for out in (torch.empty_like(yes), yes.clone(), no.clone(), condition.clone()):
        compiling.OPERATIONS["where"]([condition, yes, no], [], out)
        right = torch.where(condition != 0, yes, no)
        assert torch.equal(out.isnan(), right.isnan())
        assert torch.equal(out.nan_to_num(7.0), right.nan_to_num(7.0))
        assert torch.equal(out.signbit() & ~out.isnan(), right.signbit() & ~right.isnan())
    for place, shared in enumerate((condition, yes, no)):  # The result may take the place of any argument.
        arguments = [condition, yes, no]
        arguments[place] = out = shared.clone()
        right = torch.where(arguments[0] != 0, arguments[1], arguments[2])
        compiling.OPERATIONS["where"](arguments, [], out)
        assert torch.equal(out.nan_to_num(7.0), right.nan_to_num(7.0))


def test_results_may_be_other_vectors_without_reading_what_was_replaced() -> None:
    for body, expected in (
        ("(w, b, a)", lambda w, _, a, b: (w, b, a)),
        ("(a, w, w)", lambda *v: (v[2], v[0], v[0])),
        ("(a + 1, w + a, a + 1)", lambda *v: (v[2] + 1, v[0] + v[2], v[2] + 1)),
        ("(b - a, w - b, a - w)", lambda w, _, a, b: (b - a, w - b, a - w)),
        ("w - g", lambda w, g, a, b: (w - g, a, b)),
    ):
        w, g, a, b = vectors(4)
        right = [vector.clone() for vector in expected(w, g, a, b)]
        compiled(Program.parse(rf"\w g a b. {body}")).run([w, g, a, b], {})
        assert all(map(torch.equal, (w, a, b), right)), body


@pytest.mark.parametrize("apart", [False, True], ids=["in_place", "apart"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("(w / (g - g), s)", "new parameters would not be finite"),
        ("(w, log (s - 1e9))", "new state 's' would not be finite"),
        ("(w - lr / (sum (g - g)) * g, s)", "not a finite real number.*No vector was changed"),
        ("(w * norm (g * 1e200 * 1e200), s)", "not a finite real number|'dot' over all numbers is inf"),
        ("(w - g / (sqrt s + 1e-10) * step, s + g * g)", "scalar 'step' is nan"),
    ],
)
def test_results_that_are_not_finite_are_refused_and_change_nothing(body: str, words: str, apart: bool) -> None:
    w, g, s = vectors(3)
    s = s.abs()
    before = [w.clone(), g.clone(), s.clone()]
    out = [torch.empty_like(w), torch.empty_like(w)] if apart else None
    with pytest.raises((NonFiniteError, ProgramError), match=words):
        compiled(Program.parse(rf"\w g s. {body}")).run([w, g, s], {"lr": 0.1, "step": float("nan")}, out)
    assert all(map(torch.equal, (w, g, s), before))


SPREADS = [(1.0,), (0.0,), (1e-40, 1.0), (1e37, 1.0), (1e18, 1e-18), (1e30,), (0.0, 1e-44, 3e38)]


@pytest.mark.parametrize("body", [body for body, _ in EVERY_OPERATION])
def test_what_bounds_prove_to_be_finite_is_finite_and_within_them(body: str) -> None:
    program = without_kernel(Program.parse(rf"\w g. {body}"))
    proved = 0
    for spread in SPREADS:
        random = torch.Generator().manual_seed(1)
        scale = torch.tensor(spread).repeat(LENGTH)[:LENGTH]
        w, g = (torch.randn(LENGTH, generator=random).clamp(-1, 1) * scale for _ in range(2))
        try:
            prepared = program.prepare([w, g], {})
        except NonFiniteError:
            continue
        bounds = prepared.proved({})
        if bounds is not None:
            proved += 1
            prepared.finish()
            assert bool(torch.isfinite(w).all())
            assert bounds[0][0] <= float(w.min()) <= float(w.max()) <= bounds[0][1]
    assert proved or "log" in body or "**" in body


@pytest.mark.parametrize(("body", "state"), [("w + 1e6 * g / s", 1e20), ("w + 1e6 * g * s", 1e-20)])
def test_bounds_count_with_every_order_in_which_torch_multiplies(body: str, state: float) -> None:
    w, g, s = (torch.full((LENGTH,), number) for number in (0.0, 1e33, state))
    with pytest.raises(NonFiniteError):  # 1e6 * 1e33 is no number of 32 bits, whatever it is divided by.
        compiled(Program.parse(rf"\w g s. ({body}, s)")).run([w, g, s], {})
    assert not w.any()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_kept_bounds_prove_the_library_finite_without_computing_it_twice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = without_kernel(recipe_program(name))
    checks: list[bool] = []
    run_pass = program.run_pass

    def observed(*arguments: Any, check: bool) -> Any:
        checks.append(check)
        return run_pass(*arguments, check=check)

    monkeypatch.setattr(program, "run_pass", observed)
    w, *others = vectors(len(program.plan.vectors) - 1, torch.float32)
    states = [torch.zeros_like(w) for _ in program.plan.outputs[1:]]
    bounds: dict[int, tuple[float, float]] = {}
    for step in range(1, 20):
        (gradient,) = vectors(1, torch.float32, seed=step)
        read = others[-1:] if "read" in program.plan.vectors else []
        program.run([w, gradient, *states, *read], {"lr": 0.1, "step": step}, bounds=bounds)
        for output, vector in zip(program.plan.outputs, (w, *states), strict=True):
            assert bounds[output][0] <= float(vector.min()) <= float(vector.max()) <= bounds[output][1]
    assert not any(checks)
    (gradient,) = vectors(1, torch.float32)
    gradient[3] = float("nan")
    before = w.clone()
    with pytest.raises(NonFiniteError):
        program.run([w, gradient, *states, *read], {"lr": 0.1, "step": 20}, bounds=bounds)
    assert torch.equal(w, before)


def test_sums_that_overflow_over_finite_numbers_are_not_mistaken_for_infinity() -> None:
    w, g = torch.full((100,), 1e308, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    compiled(Program.parse(r"\w g. w - g")).run([w, g], {})
    assert torch.equal(w, torch.full((100,), 1e308, dtype=torch.float64))


def test_vectors_and_scalars_that_do_not_fit_are_refused() -> None:
    program = compiled(recipe_program("adagrad"))
    w, g, s = vectors(3)
    with pytest.raises(ProgramError, match="takes 3 vectors"):
        program.run([w, g], {"lr": 0.1})
    with pytest.raises(ProgramError, match="'g' 10,006 of"):
        program.run([w, g[1:], s], {"lr": 0.1})
    with pytest.raises(ProgramError, match="must be alike"):
        program.run([w, g.float(), s], {"lr": 0.1})
    with pytest.raises(ProgramError, match="needs the scalar 'lr'"):
        program.run([w, g, s], {})
    with pytest.raises(ProgramError, match="2 results, not 1"):
        program.run([w, g, s], {"lr": 0.1}, [torch.empty_like(w)])
    with pytest.raises(ProgramError, match=r"not on torch\.int64"):
        program.run([w.long(), g.long(), s.long()], {"lr": 0.1})


def test_programs_that_do_the_same_are_compiled_once() -> None:
    assert compiled(recipe_program("adam")) is compiled(recipe_program("adam"))
    assert compiled(recipe_program("adam")) is not compiled(recipe_program("adam", beta1=0.5))


def test_a_program_that_torch_has_a_kernel_for_is_recognized_however_it_is_written() -> None:
    adam = (
        r"\w g v m step. let v = 0.9 * v + 0.1 * g ** 2 in let m = m + 0.5 * (g - m) in "
        r"(w - lr / (1 - 0.5 ** step) * (m / (sqrt v / sqrt (1 - 0.9 ** step) + 1e-4)), v, m)"
    )
    w, g, v, m = vectors(4)
    v = v.abs()
    for program in (compiled(Program.parse(adam)), without_kernel(Program.parse(adam))):
        for step in (1, 2, 3, 1_000, 10**7):
            first, second = [vector.clone() for vector in (w, v, m)], [vector.clone() for vector in (w, v, m)]
            program.run([first[0], g, *first[1:]], {"lr": 0.1, "step": step})
            without_kernel(Program.parse(adam)).run([second[0], g, *second[1:]], {"lr": 0.1, "step": step})
            assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(first, second, strict=True))
    assert kernel_of(plan_of(Program.parse(adam))) is not None
    assert kernel_of(plan_of(recipe_program("rmsprop"))) is None


ADAM = (
    r"\w g m v. let m = m + {} * (g - m) in let v = 0.9 * v + {} * g * g in (w - lr * m / (sqrt v / {} + 1e-8), m, v)"
)


@pytest.mark.parametrize(
    "text",
    [
        r"\w g s. let s = s + 2 * g * g in (w - lr * g / (sqrt s + 1e-10), s)",
        r"\w g s. let s = s + g * g in (w + lr * g / (sqrt s + 1e-10), s)",
        ADAM.format(0.1, 0.3, 0.5),
        ADAM.format(0.1, 0.1, 2),
        ADAM.format(2, 0.1, 0.5),
    ],
)
def test_a_program_of_the_same_shape_with_other_constants_is_not_mistaken_for_torchs(text: str) -> None:
    program = Program.parse(text)
    assert kernel_of(plan_of(program)) is not None
    states = [vector.abs() for vector in vectors(len(program.states), seed=1)]
    w, g = vectors(2)
    other = [w.clone(), *(state.clone() for state in states)]
    compiled(program).run([w, g, *states], {"lr": 0.1})
    without_kernel(program).run([other[0], g, *other[1:]], {"lr": 0.1})
    assert all(map(torch.equal, (w, *states), other))
