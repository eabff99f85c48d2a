"""The iterations of an optimizer as its coordinator makes them: what it wants next, and where a successor goes on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.lbfgs import Answer, Evaluate, Iteration, Lbfgs, Request


class Iterations:
    """An optimizer, how many iterations it has finished, and the one that is going on."""

    def __init__(self, optimizer: Lbfgs) -> None:
        self.over = 0  # Iterations over.
        self.last: Iteration | None = None
        self.evaluate: Evaluate | None = None  # The evaluation that is wanted.
        self.evaluation = 0  # Its number.
        self._optimizer = optimizer
        self._asking: Generator[Request, Answer, Iteration] | None = None

    @property
    def going_on(self) -> bool:
        """Whether an iteration has begun and is not over."""
        return self._asking is not None

    def begin(self) -> None:
        """Begin the next iteration; `next` has its first request."""
        self._asking = self._optimizer.iterate()

    def next(self, answer: Answer | None) -> Request | None:
        """What the optimizer wants next, given the answer to its last request; None if the iteration is over."""
        if self._asking is None:
            return None
        try:
            request = next(self._asking) if answer is None else self._asking.send(answer)
        except StopIteration as end:
            self._asking, self.last, self.over = None, end.value, self.over + 1
            return None
        self.evaluate = request if isinstance(request, Evaluate) else None
        self.evaluation += isinstance(request, Evaluate)
        return request

    def save(self, **account: Any) -> msg.MinimizerState:
        """The state between two iterations, with what else the coordinator leaves with the shards."""
        state = self._optimizer.save()
        return msg.MinimizerState(state, self.over, self.evaluation, self.last, **account)

    def repeat(self, saved: msg.MinimizerState, answers: tuple[Answer, ...]) -> Request | None:
        """Make the decisions of an iteration again, from its start and what was answered since; returns the last."""
        self._optimizer.restore(saved.optimizer)
        self.over, self.evaluation, self.last = saved.iteration, saved.evaluation, saved.last
        self.begin()
        request = self.next(None)
        for answer in answers:
            request = self.next(answer)
        return request
