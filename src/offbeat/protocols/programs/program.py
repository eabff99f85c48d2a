r"""A program for servers: what a server does with a push, as a function of the parameters, the gradient and its states.

    \w g s. let s = s + g * g in (w - lr * g / (sqrt s + 1e-10), s)

The first argument is the shard's parameters, the second the gradient that was pushed; each further argument is a state
vector of the shard, by name, and starts as zeros. The names in `SCALARS` are scalars that the server knows, and `read`
is the vector of parameters that the gradient was computed from; they are free in the program, or arguments as well.
The result is the new parameters, or a tuple of them and the new states in order; a program
that returns the parameters only leaves its states as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from offbeat.errors import ProgramError
from offbeat.protocols.programs.parser import parse
from offbeat.protocols.programs.printer import show
from offbeat.protocols.programs.term import Abstraction, Let, Term, Variable, apply, free_variables, opened
from offbeat.protocols.programs.types import SCALAR, VECTOR, Several, Type, check, describe

SCALARS: Final = ("lr", "step", "staleness", "workers")
"""Scalars that a server knows: its learning rate, pushes applied so far and this one, how many updates older than the
parameters the gradient is, and workers of the run."""
READ: Final = "read"
"""The parameters that the gradient was computed from, which a server keeps for programs that use them."""
STATES: Final = 16
"""State vectors of a program."""


@dataclass(frozen=True)
class Program:
    """A checked program."""

    term: Term
    """The function, as it was written."""
    states: tuple[str, ...]
    """Names of its state vectors."""
    vectors: tuple[str, ...]
    """Names of all its vectors: parameters, gradient, states, and `read` if it uses that."""
    applied: Term
    """The function applied to free variables: `vectors`, and names in `SCALARS`."""

    @property
    def uses_read(self) -> bool:
        """Whether it needs the parameters that the gradient was computed from."""
        return self.vectors[-1] == READ

    @staticmethod
    def parse(text: str) -> Program:
        """The program that a text in the language describes."""
        return Program.of(parse(text))

    @staticmethod
    def of(term: Term) -> Program:
        """The program that a term is; raises ProgramError if it is not one."""
        function = term
        while isinstance(function, Let):
            function = opened(function.body, function.value)
        names: list[str] = []
        body = function
        while isinstance(body, Abstraction):
            names.append(body.name)
            body = body.body
        if len(names) < 2:
            raise ProgramError(
                "A program for a server is a function of the parameters, the gradient and any states, such as "
                rf"`\w g. w - lr * g`; this one has {len(names)} of the two arguments that it needs.",
                term.at,
            )
        own = tuple(name for place, name in enumerate(names) if place < 2 or name not in (*SCALARS, READ))
        _check_names(own, names, term)
        applied = apply(function, *(Variable(name) for name in names))
        uses_read = READ in names or READ in free_variables(term)
        vectors = (*own, READ) if uses_read else own
        types: Mapping[str, Type] = dict.fromkeys(SCALARS, SCALAR) | dict.fromkeys(vectors, VECTOR)
        _check_result(check(applied, types), own, term)
        return Program(term, own[2:], vectors, applied)

    @property
    def text(self) -> str:
        """The program in the language."""
        return show(self.term)


def _check_names(vectors: tuple[str, ...], names: list[str], term: Term) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ProgramError(f"Two arguments of the program are named {twice!r}: rename one.", term.at)
    known = next((name for name in vectors if name in (*SCALARS, READ)), None)
    if known is not None:
        raise ProgramError(
            f"{known!r} is the name of what a server knows, but the first two arguments of a program are the "
            r"parameters and the gradient: write `\w g. …`.",
            term.at,
        )
    if len(vectors) - 2 > STATES:
        raise ProgramError(f"The program has {len(vectors) - 2} states; {STATES} are allowed.", term.at)


def _check_result(type_: Type, vectors: tuple[str, ...], term: Term) -> None:
    states = vectors[2:]
    wanted = "the new parameters" + (f", or a tuple ({', '.join((vectors[0], *states))})" if states else "")
    if type_ == VECTOR or (isinstance(type_, Several) and type_.items == (VECTOR,) * (1 + len(states))):
        return
    raise ProgramError(
        f"The program's result is of type {describe(type_)}, but a server needs {wanted}, vectors all.", term.at
    )
