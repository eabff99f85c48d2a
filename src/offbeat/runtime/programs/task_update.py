"""Updates of tasks without gradients as programs: parameters from statistics, element by element.

A program is given for each parameter that changes: a function of parameters and statistics, by their names, whose
result is the parameter's new value. What its arguments name is broadcast to one shape, as by torch, and flattened, so
a count per row of a matrix is a column. Matrix products, indices and loops are not in the language: a task that needs
them has an `update` in Python (docs/decisions/0017-updates-without-gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offbeat.errors import NonFiniteError, ProgramError, TaskError, did_you_mean
from offbeat.protocols.programs.operations import OPERATIONS
from offbeat.protocols.programs.parser import parse
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.term import Abstraction, Term
from offbeat.runtime.programs.compile import CompiledProgram, compiled

StatisticsUpdate = Callable[[object, Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]


def programmed_update(**programs: str) -> StatisticsUpdate:
    r"""The update of an `IterativeTask` by programs, one for each parameter that changes.

    Each program is text in the language for servers, such as `\total count. total / max count 1`. Its arguments are
    names of parameters and statistics; one that is a word of the language gets an underscore (`mean_`).
    """
    known = {name: _ParameterUpdate(name, text) for name, text in programs.items()}
    if not known:
        raise TaskError("programmed_update() has no program: name a parameter, as in programmed_update(mean=…).")

    def update(_task: object, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name in known:
            if name not in params:
                raise TaskError(
                    f"A program is given for {name!r}, which is not a parameter.{did_you_mean(name, params)}"
                )
        both = sorted(set(params) & set(total))
        if both:
            raise TaskError(
                f"{', '.join(both)} is the name of a parameter and of a statistic: programs need one meaning."
            )
        return {**params, **{name: each(params, total) for name, each in known.items()}}

    return update


class _ParameterUpdate:
    """The program for one parameter."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._arguments = _arguments(name, text)
        own = f"{name}_" if name in OPERATIONS else name
        # As a server's program: the parameter first, then what else it looks at. It has no further results.
        others = [each for each in self._arguments if each != own] or [f"{own}'"]
        self._vectors = (own, *others)
        try:
            program = Program.parse(f"\\{own} {' '.join(others)}. ({text}) {' '.join(self._arguments)}")
            self._compiled: CompiledProgram = compiled(program)
        except ProgramError as error:
            raise TaskError(f"The program for {name!r} is refused: {error}") from error
        if unknown := self._compiled.plan.scalars:
            raise TaskError(
                f"The program for {name!r} uses {unknown[0]!r}, which only servers have: programs of a task know "
                f"parameters and statistics, as arguments."
            )

    def __call__(self, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Tensor:
        own = params[self._name]
        inputs = [self._input(name, params, total).to(own.dtype) for name in self._arguments]
        try:
            shaped = torch.broadcast_tensors(*inputs)
        except RuntimeError as error:
            raise TaskError(f"The program for {self._name!r} cannot be run: {error}") from error
        if shaped[0].numel() != own.numel():
            raise TaskError(
                f"The program for {self._name!r} has a result of shape {tuple(shaped[0].shape)}, and the parameter has "
                f"the shape {tuple(own.shape)}. Its arguments are broadcast to one: make a number per row a column."
            )
        held = dict(zip(self._arguments, (each.reshape(-1).contiguous() for each in shaped), strict=True))
        plain = own.detach().reshape(-1).contiguous()
        vectors = [held.get(name, plain) for name in self._vectors]
        result = torch.empty_like(plain)
        try:
            self._compiled.run(vectors, {}, [result])
        except (NonFiniteError, ProgramError) as error:
            raise TaskError(f"The program for {self._name!r} has no finite result: {error}") from error
        return result.reshape(own.shape)

    def _input(self, argument: str, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Tensor:
        name = argument[:-1] if argument.endswith("_") and argument[:-1] in OPERATIONS else argument
        if name in params or name in total:
            return params[name] if name in params else total[name]
        names = [*params, *total]
        raise TaskError(
            f"The program for {self._name!r} takes {name!r}, which is neither a parameter nor a statistic "
            f"({', '.join(names)}).{did_you_mean(name, names)}"
        )


def _arguments(name: str, text: str) -> tuple[str, ...]:
    """The names that a program takes; alone it is parsed with the positions of its own text."""
    try:
        term: Term = parse(text)
    except ProgramError as error:
        raise TaskError(f"The program for {name!r} is refused: {error}") from error
    names: list[str] = []
    while isinstance(term, Abstraction):
        names.append(term.name)
        term = term.body
    if not names:
        raise TaskError(
            f"The program for {name!r} is not a function of parameters and statistics, such as "
            r"`\total count. total / max count 1`."
        )
    return tuple(names)
