"""Compiled programs: a plan's instructions as torch operations on chunks that fit the cache, without copies.

No code is generated. A program that is one of torch's fused optimizers, however it is written, runs as that one
(`kernels`); every other runs instruction by instruction over a chunk, then over the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from offbeat.errors import NonFiniteError, ProgramError
from offbeat.protocols.programs.bounds import Interval, NumberType, bounds_of
from offbeat.protocols.programs.graph import compute, join_reductions
from offbeat.protocols.programs.plan import ChunkPlace, Instruction, Pass, Plan, plan_of
from offbeat.protocols.programs.program import Program
from offbeat.runtime.programs.kernels import Kernel, kernel_of

CHUNK_BYTES: Final = 2**19
"""Bytes of a vector in one chunk: several of them fit the second-level cache."""
KEPT: Final = 64
"""Compiled programs that are kept."""

_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Operation = Callable[[list[Tensor], list[float], Tensor], object]  # Vectors, scalars, and where the result goes.


def _where(vectors: list[Tensor], scalars: list[float], out: Tensor) -> None:
    del scalars
    condition, yes, no = vectors
    words = _WORDS.get(out.element_size())
    if words is None:
        torch.where(condition != 0, yes, no, out=out)
        return
    # Bits are chosen, without a branch for each number, which costs three times as much where the choice is random.
    chosen = torch.bitwise_xor(yes.view(words), no.view(words))
    chosen.bitwise_and_((condition != 0).to(words).neg_())
    torch.bitwise_xor(chosen, no.view(words), out=out.view(words))


OPERATIONS: Final[Mapping[str, Operation]] = {
    "copy": lambda v, _s, out: out.copy_(v[0]),
    "fill": lambda _v, s, out: out.fill_(s[0]),
    "scale": lambda v, s, out: torch.mul(v[0], s[0], out=out),
    "shift": lambda v, s, out: torch.add(v[0], s[0], out=out),
    "add": lambda v, _s, out: torch.add(v[0], v[1], out=out),
    "axpy": lambda v, s, out: torch.add(v[0], v[1], alpha=s[0], out=out),
    "mul": lambda v, _s, out: torch.mul(v[0], v[1], out=out),
    "div": lambda v, _s, out: torch.div(v[0], v[1], out=out),
    "addcmul": lambda v, s, out: torch.addcmul(v[0], v[1], v[2], value=s[0], out=out),
    "addcdiv": lambda v, s, out: torch.addcdiv(v[0], v[1], v[2], value=s[0], out=out),
    "lerp": lambda v, s, out: torch.lerp(v[0], v[1], s[0], out=out),
    "reciprocal": lambda v, _s, out: torch.reciprocal(v[0], out=out),
    "**": lambda v, s, out: torch.pow(v[0], s[0] if s else v[1], out=out),
    "sqrt": lambda v, _s, out: torch.sqrt(v[0], out=out),
    "exp": lambda v, _s, out: torch.exp(v[0], out=out),
    "log": lambda v, _s, out: torch.log(v[0], out=out),
    "abs": lambda v, _s, out: torch.abs(v[0], out=out),
    "sign": lambda v, _s, out: torch.sign(v[0], out=out),
    "min": lambda v, s, out: torch.clamp(v[0], max=s[0], out=out) if s else torch.minimum(v[0], v[1], out=out),
    "max": lambda v, s, out: torch.clamp(v[0], min=s[0], out=out) if s else torch.maximum(v[0], v[1], out=out),
    "<": lambda v, s, out: torch.lt(v[0], s[0] if s else v[1], out=out),
    "<=": lambda v, s, out: torch.le(v[0], s[0] if s else v[1], out=out),
    ">": lambda v, s, out: torch.gt(v[0], s[0] if s else v[1], out=out),
    ">=": lambda v, s, out: torch.ge(v[0], s[0] if s else v[1], out=out),
    "==": lambda v, s, out: torch.eq(v[0], s[0] if s else v[1], out=out),
    "!=": lambda v, s, out: torch.ne(v[0], s[0] if s else v[1], out=out),
    "where": _where,
}
"""What each instruction does to chunks."""
_REDUCTIONS: Final[Mapping[str, Callable[[list[Tensor]], Tensor]]] = {
    "dot": lambda v: torch.dot(v[0].double(), v[1].double()),
    "sum": lambda v: torch.sum(v[0], dtype=torch.float64),
    "largest": lambda v: torch.max(v[0]),
}
"""Numbers of a chunk: sums in 64 bits, whatever the vectors are of."""


class CompiledProgram:
    """A program that runs on a shard. It holds no vectors between calls."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.kernel = kernel_of(plan)

    def run(
        self,
        vectors: Sequence[Tensor],
        scalars: Mapping[str, float],
        out: Sequence[Tensor] | None = None,
        check: bool = True,
        bounds: dict[int, Interval] | None = None,
    ) -> tuple[float, ...]:
        """Replace the parameters and states by the program's results, and return those that are numbers.

        Args:
            vectors: The plan's vectors, in its order: contiguous, of one length and type.
            scalars: The plan's scalars by name.
            out: Where the new parameters and states go, in order; by default into the vectors they replace.
            check: Refuse results that are not finite, with NonFiniteError, before any vector is replaced. In place
                the smallest and largest number of each vector prove it for most programs; where they do not, all is
                computed twice. With `out` the results are read once more, and the vectors stay as they were.
            bounds: Where to keep bounds of the parameters and states, by vector, from one call to the next, so that
                only the gradient is looked at. Forget them (`bounds.clear()`) when vectors change otherwise.

        """
        prepared = self.prepare(vectors, scalars)
        proved = prepared.proved(bounds or {}) if check and out is None else None
        if check and out is None and proved is None:
            prepared.try_out()
        numbers = prepared.finish(out, check=check and out is not None)
        if bounds is not None:
            bounds.clear()
            bounds.update(proved or {})
        return numbers

    def prepare(
        self, vectors: Sequence[Tensor], scalars: Mapping[str, float], totals: Sequence[float] | None = None
    ) -> PreparedUpdate:
        """Compute all scalars of an update; `totals` are the plan's reductions, by default over these vectors.

        Raises NonFiniteError if one of them is not finite.
        """
        check_vectors(self.plan, vectors)
        known = self._known(scalars, len(vectors[0]))
        if totals is None:
            for level in range(len(self.plan.reductions)):
                self._learn(level, self._sums(level, vectors, known), known)
        else:
            self._learn_all(totals, known)
        self._compute_scalars(self.plan.passes[-1], known)
        return PreparedUpdate(self, vectors, known)

    def partials(
        self, level: int, vectors: Sequence[Tensor], scalars: Mapping[str, float], totals: Sequence[float]
    ) -> tuple[float, ...]:
        """The reductions of one level over these vectors alone, given those of earlier levels over all.

        They may not be finite: a sum over all is, where each part's is.
        """
        check_vectors(self.plan, vectors)
        known = self._known(scalars, len(vectors[0]))
        self._learn_all(totals, known)
        return self._sums(level, vectors, known)

    def _learn_all(self, totals: Sequence[float], known: dict[int, float]) -> None:
        start = 0
        for level, values in enumerate(self.plan.reductions):
            if start < len(totals):
                self._learn(level, totals[start : start + len(values)], known)
            start += len(values)

    def _learn(self, level: int, sums: Sequence[float], known: dict[int, float]) -> None:
        """Take the reductions of a level for known; the scalars before them are computed on the way."""
        self._compute_scalars(self.plan.passes[level], known)
        for number, total in zip(self.plan.reductions[level], sums, strict=True):
            known[number] = total
            if not math.isfinite(total):
                name = self.plan.values[number].operation
                raise NonFiniteError(f"The program's {name!r} over all numbers is {total}. No vector was changed.")

    def _sums(self, level: int, vectors: Sequence[Tensor], known: dict[int, float]) -> tuple[float, ...]:
        """The reductions of a level over these vectors."""
        part = self.plan.passes[level]
        self._compute_scalars(part, known)
        sums = self.run_pass(part, vectors, None, known, check=False)
        return tuple(self.reduced(number, sums[number], -math.inf) for number in self.plan.reductions[level])

    def joined(self, level: int, parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """The reductions of a level over all numbers, from those over their parts."""
        numbers = self.plan.reductions[level]
        columns = [[part[place] for part in parts] for place in range(len(numbers))]
        return tuple(self.reduced(number, column, -math.inf) for number, column in zip(numbers, columns, strict=True))

    def _known(self, scalars: Mapping[str, float], length: int) -> dict[int, float]:
        """The values of the scalars that a plan starts from."""
        known: dict[int, float] = {}
        given = {"length": float(length), **scalars}
        for number, value in enumerate(self.plan.values):
            if value.operation == "number":
                known[number] = value.number
            elif value.operation == "scalar":
                if value.name not in given:
                    raise ProgramError(f"The program needs the scalar {value.name!r}, which has no value here.")
                if not math.isfinite(given[value.name]):
                    raise NonFiniteError(f"The program's scalar {value.name!r} is {given[value.name]}.")
                known[number] = float(given[value.name])
        return known

    def _compute_scalars(self, part: Pass, known: dict[int, float]) -> None:
        for number in part.scalars:
            value = self.plan.values[number]
            if number not in known:
                try:
                    known[number] = compute(value.operation, *(known[argument] for argument in value.arguments))
                except ProgramError as error:
                    raise NonFiniteError(f"{error} No vector was changed.") from None

    def reduced(self, number: int, parts: Sequence[float], nothing: float = 0.0) -> float:
        """A reduction of all numbers, from those of their parts."""
        return join_reductions(self.plan.values[number].operation, parts, nothing)

    @torch.no_grad()
    def run_pass(
        self,
        part: Pass,
        vectors: Sequence[Tensor],
        targets: Mapping[int, Tensor] | None,
        known: Mapping[int, float],
        check: bool,
    ) -> dict[int, list[float]]:
        """Run a pass chunk by chunk; without targets its results go to scratch space. Returns reductions by chunk."""
        first = vectors[0]
        length = max(1, CHUNK_BYTES // first.element_size())
        steps = [(step, _operation(step), [known[scalar] for scalar in step.scalars]) for step in part.instructions]
        outputs = {step.target.number for step, _, _ in steps if step.target and step.target.kind == "output"}
        scratch = {("buffer", number): first.new_empty(min(length, len(first))) for number in range(part.buffers)}
        if targets is None:
            scratch |= {("output", output): first.new_empty(min(length, len(first))) for output in outputs}
        sums: dict[int, list[float]] = {step.value: [] for step in part.instructions if step.target is None}
        for start in range(0, len(first), length):
            stop = min(start + length, len(first))
            chunks = {("input", number): vector[start:stop] for number, vector in enumerate(vectors)}
            chunks |= {name: buffer[: stop - start] for name, buffer in scratch.items()}
            chunks |= {("output", number): vector[start:stop] for number, vector in (targets or {}).items()}
            for step, operation, scalars in steps:
                arguments = [chunks[_key(place)] for place in step.vectors]
                if step.target is None:
                    sums[step.value].append(float(_REDUCTIONS[step.operation](arguments)))
                else:
                    operation(arguments, scalars, chunks[_key(step.target)])
            if check:
                for output in outputs:
                    check_finite(self.plan, chunks["output", output], output)
        return sums


class PreparedUpdate:
    """A program and the vectors that it is about to change: all that can be said before it does."""

    def __init__(self, program: CompiledProgram, vectors: Sequence[Tensor], known: dict[int, float]) -> None:
        self._program, self._vectors, self._known = program, vectors, known

    def proved(self, kept: Mapping[int, Interval], gradient: Interval | None = None) -> dict[int, Interval] | None:
        """Bounds of the results, by vector, all finite; None if bounds of the vectors do not prove that.

        Of each vector: kept ones and the gradient's, where they are known and suffice, otherwise measured.
        """
        plan, vectors = self._program.plan, self._vectors
        if len(vectors[0]) == 0:
            return {}
        limits = torch.finfo(vectors[0].dtype)
        numbers = NumberType(limits.max, limits.tiny, limits.eps)
        trusted = {number: kept[number] for number in plan.outputs if number in kept}
        if gradient is not None:
            trusted[1] = gradient
        for known in (trusted, {}) if trusted else ({},):
            held = [known[number] if number in known else _measured(vector) for number, vector in enumerate(vectors)]
            results = bounds_of(plan, held, self._known, numbers)
            if results is not None:
                return results
        return None

    @torch.no_grad()
    def try_out(self) -> None:
        """Compute all results without writing them; raises NonFiniteError if one is not finite."""
        self._program.run_pass(self._program.plan.passes[-1], self._vectors, None, self._known, check=True)

    @torch.no_grad()
    def finish(self, out: Sequence[Tensor] | None = None, check: bool = False) -> tuple[float, ...]:
        """Write the results, in place or into `out`, and return those that are numbers.

        With `check`, raises NonFiniteError if a vector is not finite.
        """
        plan, vectors = self._program.plan, self._vectors
        if out is not None:
            check_vectors(plan, vectors, out)
        targets = dict(zip(plan.outputs, out or [vectors[output] for output in plan.outputs], strict=True))
        if self._program.kernel is not None and self._run_kernel(self._program.kernel, targets, check):
            return ()
        chunks = self._program.run_pass(plan.passes[-1], vectors, targets, self._known, check=check)
        return tuple(self._program.reduced(number, chunks[number]) for number in plan.numbers)

    def _run_kernel(self, kernel: Kernel, targets: Mapping[int, Tensor], check: bool) -> bool:
        plan = self._program.plan
        values = [self._known[scalar] for step in plan.passes[-1].instructions for scalar in step.scalars]
        updated = list(self._vectors)
        for output, target in targets.items():
            if target is not self._vectors[output]:
                target.copy_(self._vectors[output])
                updated[output] = target
        if not kernel(updated, values):
            return False
        if check:
            for output, target in targets.items():
                check_finite(plan, target, output)
        return True


def check_vectors(plan: Plan, vectors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> None:
    """Refuse vectors that do not fit a plan or each other."""
    names = plan.vectors
    if len(vectors) != len(names):
        raise ProgramError(f"The program takes {len(names)} vectors ({', '.join(names)}), not {len(vectors)}.")
    if out is not None and len(out) != len(plan.outputs):
        raise ProgramError(f"The program has {len(plan.outputs)} results, not {len(out)}.")
    first = vectors[0]
    for name, vector in (*zip(names, vectors, strict=True), *(("a result", vector) for vector in out or ())):
        if vector.shape != first.shape or vector.dtype != first.dtype or vector.device != first.device:
            raise ProgramError(
                f"The vectors of a program must be alike, but {names[0]!r} has {len(first):,} numbers of "
                f"{first.dtype} on {first.device}, and {name!r} {vector.numel():,} of {vector.dtype} on "
                f"{vector.device}."
            )
    if first.dim() != 1 or not first.is_floating_point():
        raise ProgramError(f"A program works on vectors of floating-point numbers, not on {first.dtype}.")


def check_finite(plan: Plan, vector: Tensor, output: int) -> None:
    """Refuse results that are not finite."""
    # A sum is finite only if all numbers are; if it is not, it may have overflowed.
    if not math.isfinite(float(vector.sum())) and not bool(torch.isfinite(vector).all()):
        what = "new parameters" if output == 0 else f"new state {plan.vectors[output]!r}"
        raise NonFiniteError(f"The program's {what} would not be finite: NaN or infinite. The push is refused.")


def _measured(vector: Tensor) -> Interval:
    """The smallest and the largest number of a vector; NaN if it has one."""
    low, high = torch.aminmax(vector)
    return float(low), float(high)


def _key(place: ChunkPlace) -> tuple[str, int]:
    return place.kind, place.number


def _operation(step: Instruction) -> Operation:
    return OPERATIONS[step.operation if step.target is not None else "copy"]


def compiled(program: Program | Plan) -> CompiledProgram:
    """A program, compiled; programs that do the same are compiled once."""
    plan = program if isinstance(program, Plan) else plan_of(program)
    return _compiled(plan.hash, _Unhashed(plan))


class _Unhashed:
    """A plan as an argument that a cache does not look at: its hash says what it is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unhashed)

    def __hash__(self) -> int:
        return 0


@lru_cache(KEPT)
def _compiled(hash_: str, plan: _Unhashed) -> CompiledProgram:
    del hash_
    return CompiledProgram(plan.plan)
