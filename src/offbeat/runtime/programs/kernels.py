"""Programs that torch has a fused kernel for: recognized by their plans, whatever their text and constants.

A plan of the same instructions as Adam's is Adam, with whatever numbers its scalars have. A kernel takes these numbers
as its settings, or refuses them (constants that are not Adam's), and then the plan runs as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from offbeat.protocols.programs.plan import Plan, plan_of
from offbeat.protocols.programs.program import Program

Kernel = Callable[[Sequence[Tensor], Sequence[float]], bool]
"""Updates vectors in place, given the scalars of a plan's instructions in order; False if these are not its own."""
STEP: Final = 10_000_000
"""A step at which the bias corrections of Adam are 1 in 64 bits, for decays up to 0.99999."""


def kernel_of(plan: Plan) -> Kernel | None:
    """The fused kernel for a plan, if there may be one."""
    kernel = _kernels().get(_shape(plan))
    return None if kernel is None else partial(kernel, plan)


Kind = Callable[[Plan, Sequence[Tensor], Sequence[float]], bool]  # A kernel for plans of one shape.


@cache
def _kernels() -> Mapping[object, Kind]:
    """Kernels by the shape of the plans that they are for."""
    kernels: dict[object, Kind] = {}
    for text, kernel in _templates():
        kernels[_shape(plan_of(Program.parse(text)))] = kernel
    return kernels


def _shape(plan: Plan) -> object:
    """A plan without its scalars."""
    return plan.outputs, tuple(
        tuple((step.operation, step.vectors, step.target) for step in part.instructions) for part in plan.passes
    )


def _templates() -> Iterator[tuple[str, Kind]]:
    """Programs that have a kernel: in either order of states and of their updates."""
    yield r"\w g s. let s = s + g * g in (w - lr * g / (sqrt s + 3), s)", _adagrad
    first, second = "let m = m + 3 * (g - m) in ", "let v = 5 * v + 7 * g * g in "
    for decayed in (False, True):
        start = "let w = 11 * w in " if decayed else ""
        step = "w - lr * m / (sqrt v / 13 + 17)"
        for states in ("m v", "v m"):
            results = f"({step}, {states.replace(' ', ', ')})"
            for body in (first + second, second + first):
                kernel = partial(_adam, decayed, states.index("m") == 0)
                yield rf"\w g {states}. {start}{body}{results}", kernel
                yield rf"\w g {states}. {body}{start}{results}", kernel


def _adagrad(plan: Plan, vectors: Sequence[Tensor], scalars: Sequence[float]) -> bool:
    del plan
    one, eps, rate = scalars
    if one != 1.0 or rate >= 0:
        return False
    w, g, s = vectors
    ops: Any = torch.ops.aten
    ops._fused_adagrad_(
        *([w], [g], [s], [_step(1, w)]), lr=-rate, lr_decay=0.0, weight_decay=0.0, eps=eps, maximize=False
    )
    return True


def _adam(decayed: bool, m_first: bool, plan: Plan, vectors: Sequence[Tensor], scalars: Sequence[float]) -> bool:
    values = _adam_settings(plan, scalars)
    beta1, beta2 = 1 - values["lerp"], values["v"]
    correction, rate = 1 / values["correction"] if values["correction"] else 0.0, values["addcdiv"]
    if not (0 <= beta1 < 1 and 0 < beta2 < 1 and math.isclose(values["addcmul"], 1 - beta2, rel_tol=1e-9)):
        return False
    if not 0 < correction <= 1 or rate >= 0:
        return False
    # The kernel makes its corrections of a step: find the step from that of beta2, and undo that of beta1.
    step = STEP if correction == 1 else max(1, round(math.log1p(-(correction**2)) / math.log(beta2)))
    if not math.isclose(math.sqrt(1 - beta2**step), correction, rel_tol=1e-9):
        return False
    lr = -rate * (1 - beta1**step)
    w, g, m, v = vectors if m_first else (vectors[0], vectors[1], vectors[3], vectors[2])
    ops: Any = torch.ops.aten
    kernel = ops._fused_adamw_ if decayed else ops._fused_adam_
    kernel(
        *([w], [g], [m], [v], [], [_step(step, w)]),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=(1 - values["w"]) / lr if decayed else 0.0,
        eps=values["shift"],
        amsgrad=False,
        maximize=False,
    )
    return True


def _adam_settings(plan: Plan, scalars: Sequence[float]) -> dict[str, float]:
    """The scalars of a plan of Adam's shape: by what they scale, or by the instruction that they are in."""
    settings: dict[str, float] = {}
    rest = iter(scalars)
    for step in plan.passes[-1].instructions:
        for _ in step.scalars:
            name = step.operation
            if name == "scale":
                (place,) = step.vectors
                name = "correction" if place.kind == "buffer" else "w" if place.number == 0 else "v"
            settings[name] = next(rest)
    return settings


def _step(step: float, like: Tensor) -> Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device=like.device)
