"""L-BFGS as a coroutine that commands registers and is told numbers: it never sees a vector.

Nocedal and Wright, "Numerical Optimization" (2006), algorithms 7.4 and 7.5; on shards as in Sandblaster (Dean et al.,
"Large Scale Distributed Deep Networks", 2012, section 4.2).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from offbeat.protocols.sandblaster.commands import ProgramCall, command
from offbeat.protocols.sandblaster.line_search import LineTrial, strong_wolfe
from offbeat.protocols.sandblaster.messages import PARAMETERS, POINT, Iteration, OptimizerState

_DIRECTION = "d"
_GRADIENTS = ("g0", "g1", "g2", "g3")  # Of the start, both ends of an interval, and a trial.
_LEAST_CURVATURE = 1e-10

# What shards do. Each goes over their vectors once, and asks for the number that the next one needs.
COPY = command(1, r"\x. x")
STEEPEST = command(1, r"\g. largest (abs g)")
FIRST_DIRECTION = command(1, r"\g. let d = -g in (d, dot g d, largest (abs d), sum (abs g))")
BEGIN_DIRECTION = command(2, r"\g s. let d = -g in (d, dot s d)")
BACK = command(3, r"\d y s weight. let d = d - weight * y in (d, dot s d)")
TURN = command(2, r"\d y weight size. let d = size * (d - weight * y) in (d, dot y d)")
FORTH = command(3, r"\d s y weight. let d = d + weight * s in (d, dot y d)")
END_DIRECTION = command(3, r"\d s g weight. let d = d + weight * s in (d, dot g d, largest (abs d), sum (abs g))")
MOVE = command(2, r"\x d step. x + step * d")
SLOPE = command(2, r"\g d. dot g d")
REMEMBER = command(
    4,
    r"""\x d g before step. let s = step * d in let y = g - before in
    (s, y, x + step * d, dot y s, dot y y, largest (abs g))""",
)


@dataclass(frozen=True)
class Evaluate:
    """A request: the sum of the gradients at `POINT` into this register; the answer is the loss."""

    gradient: str


Request = Sequence[ProgramCall] | Evaluate
Answer = Sequence[float]
"""The numbers that programs returned, over all shards; or the loss alone."""


@dataclass(frozen=True)
class _Pair:
    """A step and the change of the gradient over it, in registers s and y of this slot."""

    slot: int
    scale: float
    """1 / (s·y)"""

    @property
    def step(self) -> str:
        """The register of the step."""
        return f"s{self.slot}"

    @property
    def change(self) -> str:
        """The register of the gradient's change."""
        return f"y{self.slot}"


class Lbfgs:
    """The optimizer: `iterate` is one iteration, a generator of requests that are answered by `send`."""

    def __init__(self, history: int = 10, tolerance: float = 1e-7, least_change: float = 1e-9) -> None:
        self._history, self._tolerance, self._least_change = history, tolerance, least_change
        self._pairs: deque[_Pair] = deque()
        self._diagonal = 1.0
        self._gradient = ""  # The register of the gradient at the parameters; empty before it is known.
        self._loss = self._steepest = math.nan
        self.iterations = self.evaluations = 0

    def save(self) -> OptimizerState:
        """Its state between two iterations."""
        pairs = tuple((pair.slot, pair.scale) for pair in self._pairs)
        known = self._diagonal, self._gradient, self._loss, self._steepest
        return OptimizerState(pairs, *known, self.iterations, self.evaluations)

    def restore(self, state: OptimizerState) -> None:
        """Go on from a state that was saved."""
        self._pairs = deque(_Pair(*pair) for pair in state.pairs)
        self._diagonal, self._gradient = state.diagonal, state.gradient
        self._loss, self._steepest = state.loss, state.steepest
        self.iterations, self.evaluations = state.iterations, state.evaluations

    def iterate(self) -> Generator[Request, Answer, Iteration]:
        """One iteration: direction, line search, and the new pair of the history."""
        if not self._gradient:
            yield [ProgramCall(COPY, (PARAMETERS,), into=(POINT,))]
            self._loss = yield from self._evaluate(_GRADIENTS[0])
            self._gradient = _GRADIENTS[0]
            (self._steepest,) = yield [ProgramCall(STEEPEST, (self._gradient,))]
        if self._steepest <= self._tolerance:
            return self._end(0.0, f"the gradient is at most {self._tolerance:g} everywhere")
        slope, longest, absolute = yield from self._direct()
        if slope > -self._least_change:
            return self._end(0.0, "the direction does not descend any more, up to rounding")
        self.iterations += 1
        first = 1.0 if self.iterations > 1 else min(1.0, 1.0 / absolute)
        start = LineTrial(0.0, self._loss, slope, self._gradient)
        taken = yield from self._search(start, first, longest)
        change = abs(taken.loss - start.loss)
        yield from self._remember(start, taken)
        self._loss, self._gradient = taken.loss, taken.gradient
        if self._steepest <= self._tolerance:
            return self._end(taken.step, f"the gradient is at most {self._tolerance:g} everywhere")
        if taken.step * longest <= self._least_change or change < self._least_change:
            return self._end(taken.step, f"parameters or loss changed by less than {self._least_change:g}")
        return self._end(taken.step)

    def _end(self, step: float, stopped: str = "") -> Iteration:
        return Iteration(self.iterations, self._loss, self._steepest, step, self.evaluations, stopped)

    def _evaluate(self, gradient: str) -> Generator[Request, Answer, float]:
        self.evaluations += 1
        (loss,) = yield Evaluate(gradient)
        return loss

    def _direct(self) -> Generator[Request, Answer, tuple[float, float, float]]:
        """The two loops over the history; returns slope, the direction's largest number, and the gradient's sum.

        Each request updates the direction by the number that the one before gave, and asks for the next.
        """
        pairs, into = list(self._pairs), (_DIRECTION,)
        if not pairs:
            slope, longest, absolute = yield [ProgramCall(FIRST_DIRECTION, (self._gradient,), into=into)]
            return slope, longest, absolute
        weights: list[float] = []
        call = ProgramCall(BEGIN_DIRECTION, (self._gradient, pairs[-1].step), into=into)
        for pair, older in zip(reversed(pairs), [*reversed(pairs[:-1]), None], strict=True):
            (product,) = yield [call]
            weights.append(product * pair.scale)
            if older is None:
                call = ProgramCall(TURN, (_DIRECTION, pair.change), (weights[-1], self._diagonal), into)
            else:
                call = ProgramCall(BACK, (_DIRECTION, pair.change, older.step), (weights[-1],), into)
        for pair, newer, weight in zip(pairs, [*pairs[1:], None], reversed(weights), strict=True):
            (product,) = yield [call]
            left = (weight - product * pair.scale,)
            if newer is None:
                call = ProgramCall(END_DIRECTION, (_DIRECTION, pair.step, self._gradient), left, into)
            else:
                call = ProgramCall(FORTH, (_DIRECTION, pair.step, newer.change), left, into)
        slope, longest, absolute = yield [call]
        return slope, longest, absolute

    def _search(self, start: LineTrial, first: float, longest: float) -> Generator[Request, Answer, LineTrial]:
        """The line search. A trial's gradient goes to a register that neither start nor interval has."""
        search = strong_wolfe(start, first, longest, self._least_change)
        probe = next(search)
        while True:
            yield [ProgramCall(MOVE, (PARAMETERS, _DIRECTION), (probe.step,), (POINT,))]
            register = next(name for name in _GRADIENTS if name not in {trial.gradient for trial in probe.kept})
            loss = yield from self._evaluate(register)
            (slope,) = yield [ProgramCall(SLOPE, (register, _DIRECTION))]
            try:
                probe = search.send(LineTrial(probe.step, loss, slope, register))
            except StopIteration as end:
                return end.value

    def _remember(self, start: LineTrial, taken: LineTrial) -> Generator[Request, Answer, None]:
        """Move to the new parameters, and add the step and the change of the gradient to the history."""
        slot = next(n for n in range(self._history + 1) if n not in {pair.slot for pair in self._pairs})
        pair = _Pair(slot, math.inf)
        registers = (PARAMETERS, _DIRECTION, taken.gradient, start.gradient)
        into = (pair.step, pair.change, PARAMETERS)
        curvature, square, self._steepest = yield [ProgramCall(REMEMBER, registers, (taken.step,), into)]
        if curvature > _LEAST_CURVATURE:
            self._pairs.append(_Pair(slot, 1.0 / curvature))
            self._diagonal = curvature / square
            if len(self._pairs) > self._history:
                self._pairs.popleft()
