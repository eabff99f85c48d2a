"""The plan of a program: a flat list of vector instructions in passes over the shard, with their cost.

Each pass goes over the vectors in chunks. A reduction needs a pass of its own before the values that use it; what both
need is computed in both, because that is cheaper than a vector in memory. Results go into the vectors they replace as
soon as nothing reads the old ones any more; other values share as few buffers of a chunk's size as possible. All of it
is decided here, from the program alone, so equal programs have equal plans.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from offbeat.errors import ProgramError
from offbeat.protocols.programs.graph import REDUCTIONS, GraphValue, ValueGraph, evaluate, evaluate_term
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.term import Term

BUFFERS: Final = 64
"""Buffers of a chunk's size that a pass may use."""
_SOURCES: Final = ("number", "scalar", "vector")


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a vector's chunk is."""

    kind: str
    """`input`: a vector as it was; `output`: one that is replaced, as it will be; `buffer`: neither."""
    number: int
    """Which one."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on chunks."""

    operation: str
    """What is computed."""
    value: int
    """The number of the value that it computes."""
    vectors: tuple[ChunkPlace, ...]
    """Arguments that are vectors."""
    scalars: tuple[int, ...]
    """Arguments that are scalars, by the numbers of their values."""
    target: ChunkPlace | None
    """Where the result goes; None for reductions."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Instructions for each chunk of the vectors, in order; the sums of its reductions are known after it."""

    scalars: tuple[int, ...]
    """Scalars to compute before it, in order."""
    instructions: tuple[Instruction, ...]
    """What is done with each chunk."""
    buffers: int
    """Buffers in use."""


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """What a program costs on a shard, known before it runs."""

    operations: int
    """Operations per element, over all passes."""
    reductions: int
    """Reductions over the shard."""
    passes: int
    """Passes over the shard."""
    reads: int
    """Vectors read, over all passes."""
    writes: int
    """Vectors written."""
    buffers: int
    """Buffers of a chunk's size."""


@dataclass(frozen=True)
class Plan:
    """A program as instructions."""

    vectors: tuple[str, ...]
    """Names of its vectors: parameters, gradient, states."""
    outputs: tuple[int, ...]
    """The vectors that it replaces: 0, and 2 onward for states. Negative numbers are vectors that it does not read."""
    values: tuple[GraphValue, ...]
    """Scalars are computed from these; instructions refer to them by number."""
    passes: tuple[Pass, ...]
    """What is done, in order."""
    numbers: tuple[int, ...] = ()
    """Reductions of the last pass whose numbers are results as well."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars that a server must supply; `length` it knows by itself."""
        names = (self.values[scalar].name for part in self.passes for scalar in part.scalars)
        return tuple(dict.fromkeys(name for name in names if name and name != "length"))

    @cached_property
    def reductions(self) -> tuple[tuple[int, ...], ...]:
        """The values that are sums over all numbers, by level: each level needs those before it."""
        return tuple(
            tuple(step.value for step in part.instructions if step.target is None) for part in self.passes[:-1]
        )

    @property
    def reduces_gradient_only(self) -> bool:
        """Whether its reductions need nothing but the gradient, so that whoever has all of that can make them."""
        before = self.passes[:-1]
        places = [place for part in before for step in part.instructions for place in step.vectors]
        names = {self.values[scalar].name for part in before for scalar in part.scalars} - {"", "length"}
        return not names and all(place.kind != "input" or place.number == 1 for place in places)

    @cached_property
    def hash(self) -> str:
        """A hash of all instructions: programs of equal hashes do the same."""
        shape = (self.vectors, self.outputs, self.values, self.passes, *([self.numbers] if self.numbers else ()))
        return hashlib.sha256(repr(shape).encode()).hexdigest()

    @cached_property
    def cost(self) -> ProgramCost:
        """What it costs."""
        instructions = [instruction for part in self.passes for instruction in part.instructions]
        reads = sum(
            len({place for instruction in part.instructions for place in instruction.vectors if place.kind == "input"})
            for part in self.passes
        )
        return ProgramCost(
            len(instructions),
            sum(instruction.target is None for instruction in instructions),
            len(self.passes),
            reads,
            len({step.target for step in instructions if step.target is not None and step.target.kind == "output"}),
            max(part.buffers for part in self.passes),
        )


def plan_of(program: Program) -> Plan:
    """The plan of a program."""
    graph, results = evaluate(program)
    outputs = (0, *range(2, 1 + len(results)))
    fused = _Selection(graph, _distinct(graph, results, outputs))
    levels = fused.levels()
    passes: list[Pass] = []
    for level in range(max(levels.values(), default=0) + 1):
        roots = [value for value in fused.chosen if graph.values[value].operation in REDUCTIONS]
        wanted = [value for value in roots if levels[value] == level + 1]
        last = level == max(levels.values(), default=0)
        passes.append(fused.one_pass(fused.results if last else wanted, outputs if last else ()))
    return Plan(program.vectors, outputs, tuple(graph.values), tuple(passes))


def one_pass_plan(term: Term, vectors: Sequence[str], outputs: Sequence[int]) -> Plan:
    """The plan of a term whose results are vectors, which go into `outputs`, and reductions; both in one pass.

    Reductions are over a part of the vectors only, so nothing may be computed from them but by whoever has all parts.
    """
    graph, results = evaluate_term(term, vectors)
    replaced = tuple(result for result in results if graph.is_vector(result))
    numbers = tuple(result for result in results if not graph.is_vector(result))
    operations = [value.operation for value in graph.values]
    for value in graph.values:
        partial = next((operations[each] for each in value.arguments if operations[each] in REDUCTIONS), value.name)
        if partial in (*REDUCTIONS, "length"):
            raise ProgramError(
                f"{partial!r} is known for each shard's part only, so nothing can be computed from it here: let the "
                "program return it, and give the number to the next program."
            )
    if any(operations[number] not in REDUCTIONS for number in numbers):
        raise ProgramError(
            f"The program returns a scalar that is not {', '.join(REDUCTIONS)} of a vector: shards have no others."
        )
    selection = _Selection(graph, [*_distinct(graph, replaced, tuple(outputs)), *dict.fromkeys(numbers)])
    return Plan(
        tuple(vectors),
        tuple(outputs),
        tuple(graph.values),
        (selection.one_pass(selection.results, tuple(outputs)),),
        numbers,
    )


def _distinct(graph: ValueGraph, results: tuple[int, ...], outputs: tuple[int, ...]) -> list[int | None]:
    """Results that are computed, each once: copies of others and of vectors are values of their own.

    None for a vector that stays what it is.
    """
    distinct: list[int | None] = []
    for result, output in zip(results, outputs, strict=True):
        vector = graph.values[result].operation == "vector"
        if vector and result == output:
            distinct.append(None)
        elif vector or result in distinct:
            copies = sum(graph.values[value or 0].operation == "copy" for value in distinct)
            distinct.append(graph.add(GraphValue("copy", (result,), vector=True, name=str(copies))))
        else:
            distinct.append(result)
    return distinct


@dataclass(frozen=True, slots=True)
class _Choice:
    """An instruction that computes a value: its name, its vectors and its scalars."""

    operation: str
    vectors: tuple[int, ...]
    scalars: tuple[int, ...] = ()


class _Selection:
    """Chooses an instruction for each value that is needed: several operations in one where that exists."""

    def __init__(self, graph: ValueGraph, results: list[int | None]) -> None:
        self.graph, self.results = graph, results
        self.uses: Counter[int] = Counter(value for value in results if value is not None)
        reachable = self._reachable()
        for value in reachable:
            self.uses.update(graph.values[value].arguments)
        self.chosen: dict[int, _Choice] = {}
        """Instructions by the value they compute; and reductions."""
        self.needed: set[int] = {value for value in results if value is not None}
        for value in sorted(reachable, reverse=True):
            if value in self.needed and graph.values[value].operation not in _SOURCES:
                choice = self.choose(value)
                self.needed.update(choice.vectors, choice.scalars)
                self.chosen[value] = choice
        self.order = sorted(self.chosen)

    def _reachable(self) -> set[int]:
        todo = [value for value in self.results if value is not None]
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if value not in seen:
                seen.add(value)
                todo.extend(self.graph.values[value].arguments)
        return seen

    def once(self, value: int) -> bool:
        return self.uses[value] == 1

    def choose(self, value: int) -> _Choice:
        found = self.graph.values[value]
        if found.operation == "add":
            a, b = found.arguments
            return self.merged(a, b) or self.merged(b, a) or self.weighted(a, b)
        vectors = tuple(argument for argument in found.arguments if self.graph.is_vector(argument))
        scalars = tuple(argument for argument in found.arguments if not self.graph.is_vector(argument))
        return _Choice(found.operation, vectors, scalars)

    def factored(self, value: int) -> tuple[int, int]:
        """A vector without its factor, and the factor."""
        found = self.graph.values[value]
        return (found.arguments[0], found.arguments[1]) if found.operation == "scale" else (value, self.unit())

    def unit(self) -> int:
        return self.graph.number(1.0)

    def merged(self, a: int, b: int) -> _Choice | None:
        """The sum of a value and a product, a quotient, or a part of the way to another value."""
        if not self.once(b):
            return None
        inner, factor = self.factored(b)
        found = self.graph.values[inner]
        if inner != b and not self.once(inner):
            return None
        if found.operation in ("mul", "div"):
            return _Choice("addcmul" if found.operation == "mul" else "addcdiv", (a, *found.arguments), (factor,))
        if found.operation == "add" and inner != b:
            for start, end in (found.arguments, found.arguments[::-1]):
                back, sign = self.factored(end)
                if back == a and self.graph.constant(sign) == -1.0:
                    return _Choice("lerp", (a, start), (factor,))
        return None

    def weighted(self, a: int, b: int) -> _Choice:
        """The sum of a value and a multiple of another."""
        if self.graph.values[b].operation != "scale":
            a, b = b, a
        inner, factor = self.factored(b)
        return _Choice("axpy", (a, inner), (factor,))

    def levels(self) -> dict[int, int]:
        """For each value that is computed, how many reductions after each other come before it."""
        levels: dict[int, int] = {}
        for value in self.order:
            choice = self.chosen[value]
            below = max((levels.get(argument, 0) for argument in (*choice.vectors, *choice.scalars)), default=0)
            levels[value] = below + (self.graph.values[value].operation in REDUCTIONS)
        return levels

    def one_pass(self, roots: list[int | None] | list[int], outputs: tuple[int, ...]) -> Pass:
        """A pass that computes these values: results into these vectors, or reductions."""
        steps, scalars = self._needed_for([root for root in roots if root is not None])
        # Reductions may follow the results that are vectors.
        targets = {root: output for root, output in zip(roots, outputs, strict=False) if root is not None}
        return _Allocation(self, steps, targets).whole(tuple(scalars))

    def _needed_for(self, roots: list[int]) -> tuple[list[int], list[int]]:
        """The vector values and reductions to compute for these, in order; and the scalars, in order."""
        todo, seen = list(roots), set[int]()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            # What a reduction in another pass was computed from is not needed again.
            if value in self.chosen and (value in roots or self.graph.values[value].operation not in REDUCTIONS):
                todo.extend((*self.chosen[value].vectors, *self.chosen[value].scalars))
        reductions = {value for value in seen if self.graph.values[value].operation in REDUCTIONS}
        vectors = [value for value in sorted(seen) if value in self.chosen and self.graph.is_vector(value)]
        steps = sorted([*vectors, *(reductions & set(roots))])
        scalars = [value for value in sorted(seen) if not self.graph.is_vector(value) and value not in reductions]
        return steps, scalars


class _Allocation:
    """Decides where each value of a pass goes."""

    def __init__(self, selection: _Selection, steps: list[int], targets: dict[int, int]) -> None:
        self.selection, self.steps, self.targets = selection, steps, targets
        self.names = selection.graph.values
        self.last = {vector: place for place, step in enumerate(steps) for vector in selection.chosen[step].vectors}
        self.places: dict[int, ChunkPlace] = {}
        self.free: list[int] = []
        self.count = 0

    def whole(self, scalars: tuple[int, ...]) -> Pass:
        instructions: list[Instruction] = []
        late: list[Instruction] = []
        for place, step in enumerate(self.steps):
            choice = self.selection.chosen[step]
            vectors = tuple(self.place_of(vector) for vector in choice.vectors)
            self.release(choice.vectors, place)
            target = None if self.names[step].operation in REDUCTIONS else self.target(step, place)
            if target is not None:
                self.places[step] = target
                if step in self.targets and target.kind == "buffer":
                    late.append(Instruction("copy", step, (target,), (), ChunkPlace("output", self.targets[step])))
            instructions.append(Instruction(choice.operation, step, vectors, choice.scalars, target))
        return Pass(scalars, (*instructions, *late), self.count)

    def place_of(self, vector: int) -> ChunkPlace:
        return self.places.get(vector, ChunkPlace("input", vector))

    def release(self, vectors: tuple[int, ...], place: int) -> None:
        """Buffers whose last use this is are free, also for the result: operations work element by element."""
        for vector in dict.fromkeys(vectors):
            held = self.places.get(vector)
            if held is not None and held.kind == "buffer" and self.last[vector] == place and vector not in self.targets:
                self.free.append(held.number)

    def target(self, step: int, place: int) -> ChunkPlace:
        output = self.targets.get(step)
        # Vectors have the first numbers, so the vector that is replaced is the value of that number.
        if output is not None and self.last.get(output, -1) <= place:
            return ChunkPlace("output", output)
        if self.free:
            return ChunkPlace("buffer", self.free.pop())
        self.count += 1
        if self.count > BUFFERS:
            raise ProgramError(f"The program needs more than {BUFFERS} buffers, the limit.")
        return ChunkPlace("buffer", self.count - 1)
