"""L-BFGS as a coroutine that commands registers and is told numbers: it never sees a vector.

Nocedal and Wright, "Numerical Optimization" (2006), algorithms 7.4 and 7.5; on shards as in Sandblaster (Dean et al.,
"Large Scale Distributed Deep Networks", 2012, section 4.2).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from offbeat.protocols.sandblaster.line_search import LineTrial, strong_wolfe
from offbeat.protocols.sandblaster.messages import (
    PARAMETERS,
    POINT,
    AbsoluteSum,
    Axpy,
    Command,
    Copy,
    DotProduct,
    Largest,
    Scale,
)

_DIRECTION = "d"
_GRADIENTS = ("g0", "g1", "g2", "g3")  # Of the start, both ends of an interval, and a trial.
_LEAST_CURVATURE = 1e-10


@dataclass(frozen=True)
class Evaluate:
    """A request: the sum of the gradients at `POINT` into this register; the answer is the loss."""

    gradient: str


Request = Sequence[Command] | Evaluate
Answer = Sequence[float]
"""The numbers that commands gave, over all shards; or the loss alone."""


@dataclass(frozen=True)
class Iteration:
    """The end of an iteration."""

    number: int
    loss: float
    gradient: float
    """The largest absolute value of the gradient."""
    step: float
    evaluations: int
    """Evaluations of the whole run."""
    stopped: str = ""
    """Why no further iteration would help; empty: one may."""


@dataclass(frozen=True)
class _Pair:
    """A step and the change of the gradient over it, in registers s and y of this slot."""

    slot: int
    scale: float
    """1 / (s·y)"""


class Lbfgs:
    """The optimizer: `iterate` is one iteration, a generator of requests that are answered by `send`."""

    def __init__(self, history: int = 10, tolerance: float = 1e-7, least_change: float = 1e-9) -> None:
        self._history, self._tolerance, self._least_change = history, tolerance, least_change
        self._pairs: deque[_Pair] = deque()
        self._diagonal = 1.0
        self._gradient = ""  # The register of the gradient at the parameters; empty before it is known.
        self._loss = self._steepest = math.nan
        self.iterations = self.evaluations = 0

    def iterate(self) -> Generator[Request, Answer, Iteration]:
        """One iteration: direction, line search, and the new pair of the history."""
        if not self._gradient:
            yield [Copy(PARAMETERS, POINT)]
            self._loss = yield from self._evaluate(_GRADIENTS[0])
            self._gradient = _GRADIENTS[0]
            (self._steepest,) = yield [Largest(self._gradient)]
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
        weights: list[float] = []
        commands: list[Command] = [Copy(self._gradient, _DIRECTION), Scale(_DIRECTION, -1.0)]
        for pair in reversed(self._pairs):
            (product,) = yield [*commands, DotProduct(f"s{pair.slot}", _DIRECTION)]
            weights.append(product * pair.scale)
            commands = [Axpy(_DIRECTION, -weights[-1], f"y{pair.slot}")]
        commands.append(Scale(_DIRECTION, self._diagonal))
        for pair, weight in zip(self._pairs, reversed(weights), strict=True):
            (product,) = yield [*commands, DotProduct(f"y{pair.slot}", _DIRECTION)]
            commands = [Axpy(_DIRECTION, weight - product * pair.scale, f"s{pair.slot}")]
        wanted = [DotProduct(self._gradient, _DIRECTION), Largest(_DIRECTION), AbsoluteSum(self._gradient)]
        slope, longest, absolute = yield [*commands, *wanted]
        return slope, longest, absolute

    def _search(self, start: LineTrial, first: float, longest: float) -> Generator[Request, Answer, LineTrial]:
        """The line search. A trial's gradient goes to a register that neither start nor interval has."""
        search = strong_wolfe(start, first, longest, self._least_change)
        probe = next(search)
        while True:
            yield [Copy(PARAMETERS, POINT), Axpy(POINT, probe.step, _DIRECTION)]
            register = next(name for name in _GRADIENTS if name not in {trial.gradient for trial in probe.kept})
            loss = yield from self._evaluate(register)
            (slope,) = yield [DotProduct(register, _DIRECTION)]
            try:
                probe = search.send(LineTrial(probe.step, loss, slope, register))
            except StopIteration as end:
                return end.value

    def _remember(self, start: LineTrial, taken: LineTrial) -> Generator[Request, Answer, None]:
        """Move to the new parameters, and add the step and the change of the gradient to the history."""
        slot = next(n for n in range(self._history + 1) if n not in {pair.slot for pair in self._pairs})
        step, change = f"s{slot}", f"y{slot}"
        curvature, square, self._steepest = yield [
            Copy(_DIRECTION, step),
            Scale(step, taken.step),
            Axpy(PARAMETERS, taken.step, _DIRECTION),
            Copy(taken.gradient, change),
            Axpy(change, -1.0, start.gradient),
            DotProduct(change, step),
            DotProduct(change, change),
            Largest(taken.gradient),
        ]
        if curvature > _LEAST_CURVATURE:
            self._pairs.append(_Pair(slot, 1.0 / curvature))
            self._diagonal = curvature / square
            if len(self._pairs) > self._history:
                self._pairs.popleft()
