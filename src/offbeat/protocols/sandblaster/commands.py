r"""Commands to shards, as programs over registers: a program is sent once, as text, and named by its hash from then on.

    \d y s weight. let d = d - weight * y in (d, dot s d)

Of the arguments, the first ones are registers and the others scalars. Of the results, vectors go into registers and
scalars come back: each is a `dot`, `sum` or `largest` over the shard's part, of which the coordinator makes the whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from offbeat.errors import ProgramError
from offbeat.protocols.programs.parser import parse
from offbeat.protocols.programs.plan import Plan, one_pass_plan
from offbeat.protocols.programs.term import Abstraction, Term, Variable, apply, free_variables
from offbeat.protocols.programs.types import SCALAR, VECTOR, Plain, Several, check, describe
from offbeat.protocols.sandblaster import messages as msg

MOST_OPERATIONS = 200
"""Operations per element that a shard makes for a command."""
MOST_PROGRAMS = 1_000
"""Programs that a shard keeps."""
MOST_REGISTERS = 1_000
"""Registers of a shard: a history of 100 takes about 200."""


@dataclass(frozen=True)
class CommandProgram:
    """A program over registers."""

    vectors: int
    """How many of its arguments, from the first, are registers; the others are scalars."""
    text: str
    """The program in the language."""

    @cached_property
    def hash(self) -> str:
        """What names the program once it was sent."""
        return hashlib.sha256(f"{self.vectors} {self.text}".encode()).hexdigest()[:16]

    @cached_property
    def term(self) -> Term:
        """The function that the text describes."""
        return parse(self.text)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of its arguments; raises ProgramError if it is not a function of as many."""
        names: list[str] = []
        body = self.term
        while isinstance(body, Abstraction):
            names.append(body.name)
            body = body.body
        if not 0 < self.vectors <= len(names) or len(set(names)) < len(names):
            raise ProgramError(
                f"A command is a function of {max(1, self.vectors)} registers and any scalars, all of different names; "
                f"this one has the arguments ({', '.join(names)})."
            )
        if free := sorted(free_variables(self.term)):
            raise ProgramError(f"{free[0]!r} is not an argument of the command, and shards know no names of their own.")
        return tuple(names)

    @cached_property
    def results(self) -> tuple[Plain, ...]:
        """Types of its results, of which each is a scalar or a vector."""
        names = self.arguments
        types = dict.fromkeys(names, SCALAR) | dict.fromkeys(names[: self.vectors], VECTOR)
        type_ = check(apply(self.term, *map(Variable, names)), types)
        items = type_.items if isinstance(type_, Several) else (type_,)
        results = tuple(item for item in items if isinstance(item, Plain))
        if len(results) < len(items):
            raise ProgramError(f"A command returns vectors and scalars, but this one's type is {describe(type_)}.")
        return results

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """What each number that it returns is of the shard's part: `dot`, `sum` or `largest`."""
        names = self.arguments
        plan = self.plan(names[: self.vectors], [f"result {number}" for number in range(self.results.count(VECTOR))])
        return tuple(plan.values[number].operation for number in plan.numbers)

    def plan(self, registers: Sequence[str], into: Sequence[str]) -> Plan:
        """The plan for these registers: what is named twice is one vector; what is in `into` is replaced in place."""
        names, targets = self.arguments, self.results.count(VECTOR)
        if len(registers) != self.vectors or len(into) != targets or len(set(into)) < targets:
            raise ProgramError(
                f"The command takes {self.vectors} registers and has {targets} vectors as results, for registers that "
                f"differ; it was sent with ({', '.join(registers)}) and ({', '.join(into)})."
            )
        distinct = list(dict.fromkeys(registers))
        argument = {register: names[registers.index(register)] for register in distinct}
        values = [argument[register] for register in registers]
        fresh = iter(range(-1, -1 - targets, -1))
        outputs = [distinct.index(name) if name in distinct else next(fresh) for name in into]
        applied = apply(self.term, *map(Variable, (*values, *names[self.vectors :])))
        plan = one_pass_plan(applied, [argument[register] for register in distinct], outputs)
        if plan.cost.operations > MOST_OPERATIONS:
            raise ProgramError(
                f"The command takes {plan.cost.operations:,} operations per element, and a shard makes at most "
                f"{MOST_OPERATIONS}."
            )
        return plan


@lru_cache(MOST_PROGRAMS)
def command(vectors: int, text: str) -> CommandProgram:
    """A program over registers, checked; raises ProgramError if no shard would take it."""
    program = CommandProgram(vectors, text)
    _ = program.reductions
    return program


@dataclass(frozen=True)
class ProgramCall:
    """A program with the registers and scalars that it is to run on."""

    program: CommandProgram
    registers: tuple[str, ...]
    scalars: tuple[float, ...] = ()
    into: tuple[str, ...] = ()


def encoded(calls: Sequence[ProgramCall], sent: set[str]) -> list[msg.Command]:
    """Calls as commands; programs that are not in `sent` are defined first, and are in it then."""
    commands: list[msg.Command] = []
    for call in calls:
        program = call.program
        if program.hash not in sent:
            sent.add(program.hash)
            commands.append(msg.DefineProgram(program.vectors, program.text))
        commands.append(msg.RunProgram(program.hash, call.registers, call.scalars, call.into))
    return commands


def reduced(calls: Sequence[ProgramCall], parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The numbers of calls over whole vectors, from those over each shard's part."""
    reductions = [name for call in calls for name in call.program.reductions]
    columns = zip(*parts, strict=True)
    return tuple(
        max(column) if name == "largest" else math.fsum(column)
        for name, column in zip(reductions, columns, strict=True)
    )


class KnownPrograms:
    """The programs that a shard was sent, by their hashes."""

    def __init__(self, programs: Sequence[CommandProgram] = ()) -> None:
        self._programs: dict[str, CommandProgram] = {program.hash: program for program in programs}

    @property
    def all(self) -> Sequence[CommandProgram]:
        """All of them, for a copy of the shard."""
        return tuple(self._programs.values())

    def define(self, vectors: int, text: str) -> None:
        """Check and keep a program."""
        program = command(vectors, text)
        if len(self._programs) >= MOST_PROGRAMS and program.hash not in self._programs:
            raise ProgramError(f"A shard keeps at most {MOST_PROGRAMS:,} programs.")
        self._programs[program.hash] = program

    def scalars_of(self, call: msg.RunProgram) -> Mapping[str, float]:
        """The scalars of a call, by name."""
        program = self[call.program]
        names = program.arguments[program.vectors :]
        if len(names) != len(call.scalars):
            raise ProgramError(f"The command {program.text!r} takes {len(names)} scalars, not {len(call.scalars)}.")
        return dict(zip(names, call.scalars, strict=True))

    def __getitem__(self, hash_: str) -> CommandProgram:
        if hash_ not in self._programs:
            raise ProgramError(f"This shard was never sent the program {hash_}; it knows {len(self._programs)} others.")
        return self._programs[hash_]
