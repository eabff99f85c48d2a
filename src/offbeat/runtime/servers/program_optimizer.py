"""A program for servers as a torch optimizer, so that servers treat both alike: groups, states, missing gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.errors import ProgramError
from offbeat.protocols.programs.plan import Plan, plan_of
from offbeat.protocols.programs.program import Program
from offbeat.runtime.programs.compile import compiled

MOST_OPERATIONS: Final = 200
"""Operations per element that a server makes for a push: Adam takes about 10."""


def accepted(text: str, announced: str = "") -> tuple[Program, Plan]:
    """A program and its plan; raises ProgramError if a server must refuse it.

    It is refused if it is wrong, costs too much, or is not the one whose hash was announced.
    """
    program = Program.parse(text)
    plan = plan_of(program)
    if plan.cost.operations > MOST_OPERATIONS:
        raise ProgramError(
            f"The program takes {plan.cost.operations:,} operations per element, and a server makes at most "
            f"{MOST_OPERATIONS}. Name what is used several times with `let`, or compute it on workers."
        )
    if announced and plan.hash != announced:
        raise ProgramError(
            f"The program is not the one that was announced: its hash is {plan.hash[:12]}, not {announced[:12]}."
        )
    return program, plan


def looks_at_whole(plan: Plan) -> bool:
    """Whether a program looks at the whole vector, as norms and sums do, and not at each number by itself."""
    return bool(plan.cost.reductions) or any(value.name == "length" for value in plan.values)


class ProgramOptimizer(Optimizer):
    """Steps by a program. Either all parameters get their new values, or, if any result is not finite, none."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], program: Program) -> None:
        self._program, self._compiled = program, compiled(program)
        self.whole = looks_at_whole(self._compiled.plan)
        """Whether it needs all of the vector at once."""
        self.staleness = 0
        """Updates that the coming gradient has missed."""
        self.workers = 1
        """Workers of the run."""
        self.read: Callable[[Tensor], Tensor] = lambda parameter: parameter
        """What the coming gradient was computed from, of each parameter."""
        super().__init__([dict(group) for group in groups], {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; raises NonFiniteError, and changes nothing, if a result is not finite."""
        del closure
        made: list[tuple[Tensor, list[Tensor], int]] = []
        for group in self.param_groups:
            members = [member for member in group["params"] if member.grad is not None]
            made += [(member, *self._results(member, member.grad, float(group["lr"]))) for member in members]
        for parameter, (values, *states), step in made:
            parameter.copy_(values)
            self.state[parameter] |= {"step": step, **dict(zip(self._program.states, states, strict=False))}

    def _results(self, parameter: Tensor, gradient: Tensor, rate: float) -> tuple[list[Tensor], int]:
        """New values and states of a parameter, and how many steps it has made then."""
        held: dict[str, Any] = self.state[parameter]
        for name in self._program.states:
            if name not in held:
                held[name] = torch.zeros_like(parameter)
        vectors = [parameter.detach(), gradient, *(held[name] for name in self._program.states)]
        if self._program.uses_read:
            vectors.append(self.read(parameter))
        step = int(held.get("step", 0)) + 1
        scalars = {"lr": rate, "step": step, "staleness": self.staleness, "workers": self.workers}
        results = [torch.empty_like(parameter) for _ in self._compiled.plan.outputs]
        self._compiled.run(vectors, scalars, results)
        return results, step
