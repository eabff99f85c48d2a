"""The coordinator of Sandblaster as a machine: it commands shards, hands out portions, and sees no vector."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Sequence

from offbeat.protocols.machine import NOTHING, Effect, Effects, Ended, Event, Name, Received, Timer
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.commands import ProgramCall, encoded, reduced
from offbeat.protocols.sandblaster.lbfgs import Answer, Evaluate, Iteration, Lbfgs, Request
from offbeat.protocols.sandblaster.portions import Portions

RETRY = 1.0
"""Seconds after which a request without an answer is sent again."""


class Minimizer:
    """Runs an iteration when a worker asks for it."""

    def __init__(self, optimizer: Lbfgs, shards: int, portions: int, *, backups: bool = True) -> None:
        self.name = msg.MINIMIZER
        self.traffic: tuple[int, int] = (
            0,
            0,
        )  # Bytes sent and received, by whoever drives it; they go into the results.
        self.handed_out: Counter[Name] = Counter()
        self.duplicated: Counter[Name] = Counter()
        self.reissued = 0
        self._optimizer, self._portions, self._backups = optimizer, portions, backups
        self._shards = [msg.shard_name(shard) for shard in range(shards)]
        self._asking: Generator[Request, Answer, Iteration] | None = None  # The iteration that is going on.
        self._iteration = 0  # Iterations over.
        self._last: Iteration | None = None
        self._evaluate: Evaluate | None = None  # The evaluation that is wanted.
        self._evaluation = 0
        self._work: Portions | None = None  # Its portions, once shards add up gradients.
        self._losses: dict[int, float] = {}
        self._calls: Sequence[ProgramCall] = ()  # What the batch asks for, besides gradients.
        self._sent: set[str] = set()  # Hashes of the programs that shards have.
        self._batch = msg.CommandBatch(0, ())
        self._answers: dict[Name, tuple[float, ...]] = {}
        self._asks: dict[Name, msg.WorkRequest] = {}  # The latest of each worker.
        self._replies: dict[Name, msg.Assigned | msg.IterationEnd] = {}
        self._dead: set[Name] = set()
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Wait for workers."""
        del now
        return ()

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, a timer, or the death of a worker."""
        del now
        self._out = Effects()
        match event:
            case Received(sender, msg.WorkRequest() as ask):
                self._ask(sender, ask)
            case Received(sender, msg.Scalars(number, values)) if number == self._batch.number:
                if sender in self._shards and sender not in self._answers:
                    self._answers[sender] = values
                    self._answered()
            case Timer(("batch", int(number))) if number == self._batch.number:
                self._send_batch()
            case Ended(name):
                self._bury([name])
            case _:
                pass
        self._serve()
        return self._out.done

    # Shards.

    def _command(self, commands: Sequence[msg.Command]) -> None:
        self._batch = msg.CommandBatch(self._batch.number + 1, tuple(commands))
        self._answers = {}
        self._send_batch()

    def _send_batch(self) -> None:
        waiting = [shard for shard in self._shards if shard not in self._answers]
        for shard in waiting:
            self._out.send(shard, self._batch)
        if waiting:
            self._out.timer(RETRY, ("batch", self._batch.number))

    def _answered(self) -> None:
        """All shards may have answered a batch: an evaluation begins or ends, or the iteration goes on."""
        if len(self._answers) < len(self._shards):
            return
        commands = self._batch.commands
        if commands and isinstance(commands[0], msg.Gather):
            self._work = Portions(self._portions, backups=self._backups)
            self._losses = {}
        elif commands and isinstance(commands[0], msg.Gathered):
            self._go_on((math.fsum(self._losses.values()),))
        else:
            self._go_on(reduced(self._calls, [self._answers[shard] for shard in self._shards]))

    def _go_on(self, answer: Answer | None) -> None:
        """The next request of the iteration."""
        if self._asking is None:
            return
        try:
            request = next(self._asking) if answer is None else self._asking.send(answer)
        except StopIteration as end:
            self._asking, self._last, self._iteration = None, end.value, self._iteration + 1
            return
        if isinstance(request, Evaluate):
            self._evaluate = request
            self._evaluation += 1
            self._command([msg.Gather(self._evaluation, self._portions)])
        else:
            self._calls = tuple(request)
            self._command(encoded(self._calls, self._sent))

    # Workers.

    def _ask(self, worker: Name, ask: msg.WorkRequest) -> None:
        self._bury(ask.dead)
        known = self._asks.get(worker)
        if known is not None and ask.number <= known.number:
            if ask.number == known.number and worker in self._replies:
                self._out.send(worker, self._replies[worker])
            return
        self._asks[worker] = ask
        self._replies.pop(worker, None)
        if ask.finished is not None and self._work is not None and ask.finished.evaluation == self._evaluation:
            if self._work.finish(ask.finished.portion):
                self._losses[ask.finished.portion] = ask.finished.loss
            self._close()

    def _close(self) -> None:
        """End the evaluation if all of its portions are finished."""
        if self._work is not None and self._work.over and self._evaluate is not None:
            self._work, gradient = None, self._evaluate.gradient
            self._command([msg.Gathered(gradient)])

    def _bury(self, dead: Sequence[Name]) -> None:
        """Workers are dead: what they had is for others."""
        new = [name for name in dead if name not in self._dead]
        self._dead.update(new)
        for name in new:
            self._asks.pop(name, None)
        if self._work is not None and new:
            before = self._work.reissued
            self._work.lose(new)
            self.reissued += self._work.reissued - before

    def _serve(self) -> None:
        """Answer the workers that wait, as far as there is an answer."""
        for worker, ask in self._asks.items():
            if worker in self._replies or worker in self._dead:
                continue
            if ask.iteration <= self._iteration:
                self._reply(worker, self._end(ask))
                continue
            if self._asking is None:
                self._asking = self._optimizer.iterate()
                self._go_on(None)
            if self._work is None or (portion := self._hand_out(worker, self._work)) is None:
                continue
            self._reply(worker, msg.Assigned(ask.number, self._evaluation, portion))

    def _hand_out(self, worker: Name, work: Portions) -> int | None:
        before = work.duplicated[worker]
        portion = work.hand_out(worker)
        self.handed_out[worker] += portion is not None
        self.duplicated[worker] += work.duplicated[worker] - before
        return portion

    def _reply(self, worker: Name, reply: msg.Assigned | msg.IterationEnd) -> None:
        self._replies[worker] = reply
        self._out.send(worker, reply, NOTHING)

    def _end(self, ask: msg.WorkRequest) -> msg.IterationEnd:
        last = self._last or Iteration(0, math.nan, math.nan, 0.0, 0)
        return msg.IterationEnd(
            number=ask.number,
            iteration=self._iteration,
            loss=last.loss,
            gradient=last.gradient,
            step=last.step,
            evaluations=last.evaluations,
            stopped=last.stopped,
            handed_out=dict(self.handed_out),
            duplicated={name: count for name, count in self.duplicated.items() if count},
            reissued=self.reissued,
            sent=self.traffic[0],
            received=self.traffic[1],
        )
