"""A program for servers as a torch optimizer, so that servers treat both alike: groups, states, missing gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import NonFiniteError, ProgramError
from offbeat.protocols.programs.bounds import Interval
from offbeat.protocols.programs.plan import Plan, plan_of
from offbeat.protocols.programs.program import Program
from offbeat.runtime.programs.compile import PreparedUpdate, compiled

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


class _MemberInput(NamedTuple):
    """What a program takes of one member: a range of the shard with a rate of its own."""

    parameter: Parameter
    vectors: list[Tensor]
    scalars: dict[str, float]


class ProgramOptimizer(Optimizer):
    """Steps by a program. Either all parameters get their new values, or, if any result is not finite, none.

    Where bounds of parameters, states and gradient prove that all results are finite, they are written in place; else
    they are computed beside the old vectors, looked at, and copied.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], program: Program, owns: bool = True, length: int = 0
    ) -> None:
        self._program, self._compiled = program, compiled(program)
        self.whole = looks_at_whole(self._compiled.plan)
        """Whether it needs all of the vector at once."""
        self.staleness = 0
        """Updates that the coming gradient has missed."""
        self.workers = 1
        """Workers of the run."""
        self.read: Callable[[Tensor], Tensor] = lambda parameter: parameter
        """What the coming gradient was computed from, of each parameter."""
        self.magnitude: float | None = None
        """What no number of the coming gradient exceeds; None: unknown."""
        self.totals: tuple[float, ...] = ()
        """Reductions over all shards, where these are not all numbers; empty: over these."""
        self._owns, self._length = owns, length
        self._bounds: dict[Parameter, dict[int, Interval]] = {}
        super().__init__([dict(group) for group in groups], {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; raises NonFiniteError, and changes nothing, if a result is not finite."""
        del closure
        inputs = self._inputs()
        totals = self.totals or self._totals(inputs)
        updates = [self._compiled.prepare(member.vectors, member.scalars, totals) for member in inputs]
        known = None if self.magnitude is None else (-self.magnitude, self.magnitude)
        proved = [update.proved(self._kept(member), known) for member, update in zip(inputs, updates, strict=True)]
        if None in proved:
            self._write_checked(inputs, updates)
        else:
            for update in updates:
                update.finish()
        # What is refused has changed nothing, so that the bounds from before still hold.
        self._bounds = {member.parameter: bounds or {} for member, bounds in zip(inputs, proved, strict=True)}
        for member in inputs:
            self.state[member.parameter]["step"] = int(member.scalars["step"])

    def _write_checked(self, inputs: Sequence[_MemberInput], updates: Sequence[PreparedUpdate]) -> None:
        outputs = self._compiled.plan.outputs
        results = [[torch.empty_like(member.vectors[0]) for _ in outputs] for member in inputs]
        for update, result in zip(updates, results, strict=True):
            update.finish(result, check=True)
        for member, result in zip(inputs, results, strict=True):
            for output, vector in zip(outputs, result, strict=True):
                member.vectors[output].copy_(vector)

    def _kept(self, member: _MemberInput) -> dict[int, Interval]:
        """Bounds of a member's parameters and states from its last step."""
        kept = self._bounds.get(member.parameter, {})
        return kept if self._owns else {number: bounds for number, bounds in kept.items() if number}

    def partials(self, level: int, totals: tuple[float, ...]) -> tuple[float, ...]:
        """The reductions of one level over these numbers; not numbers where they have no finite value."""
        try:
            return self._partials(self._inputs(), level, totals)
        except (NonFiniteError, ProgramError):
            return (math.nan,) * len(self._compiled.plan.reductions[level])

    def _partials(self, inputs: Sequence[_MemberInput], level: int, totals: tuple[float, ...]) -> tuple[float, ...]:
        parts = [self._compiled.partials(level, member.vectors, member.scalars, totals) for member in inputs]
        return self._compiled.joined(level, parts)

    def _totals(self, inputs: Sequence[_MemberInput]) -> tuple[float, ...]:
        """All reductions, over all members."""
        if self._length and self._compiled.plan.reductions:
            raise ProgramError("The program looks at the whole vector, and this push has no sums over all shards.")
        totals: tuple[float, ...] = ()
        for level in range(len(self._compiled.plan.reductions)):
            totals += self._partials(inputs, level, totals)
        return totals

    def _inputs(self) -> list[_MemberInput]:
        """What the program takes of every member that has a gradient."""
        inputs: list[_MemberInput] = []
        for group in self.param_groups:
            members = [member for member in group["params"] if member.grad is not None]
            inputs += [self._input(member, member.grad, float(group["lr"])) for member in members]
        length = float(self._length or sum(len(member.vectors[0]) for member in inputs))
        for member in inputs:
            member.scalars["length"] = length
        return inputs

    def _input(self, parameter: Parameter, gradient: Tensor, rate: float) -> _MemberInput:
        held: dict[str, Any] = self.state[parameter]
        for name in self._program.states:
            if name not in held:
                held[name] = torch.zeros_like(parameter)
        vectors = [parameter.detach(), gradient, *(held[name] for name in self._program.states)]
        if self._program.uses_read:
            vectors.append(self.read(parameter))
        step = int(held.get("step", 0)) + 1
        scalars = {"lr": rate, "step": step, "staleness": self.staleness, "workers": self.workers}
        return _MemberInput(parameter, vectors, scalars)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states; what was known of their numbers is forgotten."""
        super().load_state_dict(state_dict)
        self._bounds.clear()
