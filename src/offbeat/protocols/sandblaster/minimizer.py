"""The coordinator of Sandblaster as a machine: it commands shards, hands out portions, and sees no vector.

It keeps nothing that its shards do not know, too: with the commands they are told the optimizer's state at the start of
an iteration, and what it was answered since. So a copy of it that takes over asks the shards for their memories,
repeats the iteration's decisions up to the last batch of commands, and goes on from there. Its predecessor, if it was
only stopped, commands nothing any more: shards refuse batches of an earlier term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Effect, Effects, Event, Name, Payload, Received, Timer
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.commands import ProgramCall, encoded, reduced
from offbeat.protocols.sandblaster.iterations import Iterations
from offbeat.protocols.sandblaster.lbfgs import Answer, Evaluate, Iteration, Lbfgs
from offbeat.protocols.sandblaster.portions import Portions
from offbeat.protocols.sandblaster.shard import unpacked
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Fenced,
    Gone,
    Timeouts,
    Viewed,
    server_name,
    worker_name,
)
from offbeat.protocols.servers.replica.fencing import Fence

RETRY = 1.0
"""Seconds after which a request without an answer is sent again."""
TICK = "tick"


class OpenCommand:
    """A request to all shards, until all have answered; to whichever copies are the primaries."""

    def __init__(self) -> None:
        self._message: msg.CommandBatch | msg.Recover | None = None
        self._answers: dict[int, tuple[msg.Scalars | msg.Recovered, Payload]] = {}
        self._shards: Sequence[Name] = ()

    @property
    def number(self) -> int:
        """The request's number; -1 before the first one."""
        return -1 if self._message is None else self._message.number

    def send(self, message: msg.CommandBatch | msg.Recover, shards: Sequence[Name], out: Effects) -> None:
        """Begin."""
        self._message, self._answers = message, {}
        self.repeat(shards, out)

    def repeat(self, shards: Sequence[Name], out: Effects) -> None:
        """Send it to those shards again that have not answered."""
        self._shards = shards
        if self._message is None or len(self._answers) == len(shards):
            return
        for shard, name in enumerate(shards):
            if shard not in self._answers:
                out.send(name, self._message)
        out.timer(RETRY, ("command", self._message.number))

    def answered(self, sender: Name, message: msg.Scalars | msg.Recovered, payload: Payload) -> bool:
        """A shard has answered; returns whether it is the last one to do so."""
        recovers = isinstance(self._message, msg.Recover)
        if message.number != self.number or isinstance(message, msg.Recovered) != recovers:
            return False
        if sender not in self._shards or (shard := self._shards.index(sender)) in self._answers:
            return False
        self._answers[shard] = message, payload
        return len(self._answers) == len(self._shards)

    @property
    def memories(self) -> list[msg.ShardMemory]:
        """The shards' memories, in their order."""
        return [unpacked(self._answers[shard][1]) for shard in sorted(self._answers)]

    @property
    def values(self) -> list[tuple[float, ...]]:
        """The numbers of the shards, in their order."""
        answers = [self._answers[shard][0] for shard in sorted(self._answers)]
        return [answer.values for answer in answers if isinstance(answer, msg.Scalars)]


class WorkAccount:
    """How many portions each worker was given, and what the coordinator has sent and received; over its successors."""

    def __init__(self, saved: msg.MinimizerState | None = None) -> None:
        saved = saved or msg.MinimizerState()
        self.handed_out, self.duplicated = Counter(saved.handed_out), Counter(saved.duplicated)
        self.reissued = saved.reissued
        self.traffic: tuple[int, int] = (0, 0)
        """Bytes sent and received, by whoever drives the coordinator."""
        self._before = saved.traffic

    def hand_out(self, worker: Name, work: Portions) -> int | None:
        """A portion for an idle worker, if there is one."""
        before = work.duplicated[worker]
        portion = work.hand_out(worker)
        self.handed_out[worker] += portion is not None
        self.duplicated[worker] += work.duplicated[worker] - before
        return portion

    @property
    def all_traffic(self) -> tuple[int, int]:
        """Bytes sent and received in the whole run."""
        return self._before[0] + self.traffic[0], self._before[1] + self.traffic[1]

    def plain(self) -> dict[str, Any]:
        """The portions, as fields of messages."""
        duplicated = {name: count for name, count in self.duplicated.items() if count}
        return {"handed_out": dict(self.handed_out), "duplicated": duplicated, "reissued": self.reissued}


class Minimizer:
    """Runs an iteration when a worker asks for it, if this is the copy that serves: the view says which."""

    def __init__(
        self,
        optimizer: Lbfgs,
        portions: int,
        view: ClusterView,
        replica: int = 0,
        *,
        backups: bool = True,
        timing: Timeouts | None = None,
    ) -> None:
        self._place = len(view.primaries) - 1  # The last server.
        self.name = server_name(self._place, replica)
        self.fence = Fence(self.name, self._place, view, joins=False)
        self.account = WorkAccount()
        self._iterations = Iterations(optimizer)
        self._portions, self._backups = portions, backups
        self._timing = timing or Timeouts()
        self._members = set(map(worker_name, view.workers))
        self._term = view.epoch
        self._command = OpenCommand()
        self._batch: msg.CommandBatch | None = None  # The last one that was sent.
        self._recovered = False  # Whether the shards have been asked what they know.
        self._work: Portions | None = None  # Its portions, once shards add up gradients.
        self._losses: dict[int, float] = {}
        self._calls: Sequence[ProgramCall] = ()  # What the batch asks for, besides gradients.
        self._sent: set[str] = set()  # Hashes of the programs that this coordinator has sent to shards.
        self._asks: dict[Name, msg.WorkRequest] = {}  # The latest of each worker.
        self._replies: dict[Name, msg.Assigned | msg.IterationEnd] = {}
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Send the first heartbeat, and wait for workers."""
        return self.on(Timer(TICK), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, a timer, or a view in which workers or servers are gone."""
        del now
        self._out = Effects()
        if self.fence.retired:
            return ()
        match event:
            case Received(sender, msg.WorkRequest() as ask):
                if self.fence.serving:
                    self._ask(sender, ask)
                else:
                    self.fence.keep(event)  # The view that makes this the coordinator may be on its way.
            case Received(sender, msg.Scalars() | msg.Recovered() as answer, payload):
                if self._command.answered(sender, answer, payload):
                    self._answered()
            case Received(_, Fenced() | Gone() as message):
                self.fence.step_down(message, self._out)
            case Received(sender, Viewed(view)) if sender == COORDINATOR and view.epoch > self.fence.view.epoch:
                self._change(view)
            case Timer(("command", int(number))):
                if self.fence.serving and number == self._command.number:
                    self._command.repeat(self._shards, self._out)
            case Timer():
                self._out.timer(self._timing.heartbeat, TICK)
                self.fence.sign_of_life(self._out)
            case _:
                pass
        if self.fence.serving:
            self._serve()
        return self._out.done

    @property
    def searched(self) -> int | None:
        """The iteration in whose line search portions are being computed, from 0; None between two searches."""
        return self._iterations.over if self._work is not None and self._losses else None

    @property
    def _shards(self) -> tuple[Name, ...]:
        """The primaries of the shards."""
        return self.fence.view.primaries[: self._place]

    # Views.

    def _change(self, view: ClusterView) -> None:
        """Adopt a view: workers may have died, shards have other primaries, or this has become the coordinator."""
        before = self.fence.view
        if not self.fence.enter(view):
            return
        self._bury(set(map(worker_name, before.workers)) - set(map(worker_name, view.workers)))
        self._members = set(map(worker_name, view.workers))
        if not self.fence.serving:
            return
        if before.primaries[self._place] != self.name:
            self._term = view.epoch
        elif before.primaries != view.primaries:
            self._command.repeat(self._shards, self._out)
        kept, self.fence.later = self.fence.later, []
        for event in kept:
            if isinstance(event.message, msg.WorkRequest):
                self._ask(event.sender, event.message)

    # Shards.

    def _send(self, commands: Sequence[msg.Command], answer: Answer | None, saved: msg.MinimizerState | None) -> None:
        number = 1 if self._batch is None else self._batch.number + 1
        told = None if answer is None else tuple(answer)
        self._batch = msg.CommandBatch(number, tuple(commands), self._term, told, saved)
        self._command.send(self._batch, self._shards, self._out)

    def _answered(self) -> None:
        """All shards have answered: an evaluation begins or ends, or the iteration goes on."""
        if not self._recovered:
            self._recover(self._command.memories)
            return
        commands = () if self._batch is None else self._batch.commands
        if commands and isinstance(commands[0], msg.Gather):
            self._work = Portions(self._portions, backups=self._backups)
            for portion in self._losses:  # Those that a predecessor knew of.
                self._work.finish(portion)
            self._close()
        elif commands and isinstance(commands[0], msg.Gathered):
            self._go_on((math.fsum(self._losses.values()),))
        else:
            self._go_on(reduced(self._calls, self._command.values))

    def _begin(self) -> None:
        """Begin the next iteration."""
        saved = self._iterations.save(traffic=self.account.all_traffic, **self.account.plain())
        self._iterations.begin()
        self._go_on(None, saved)

    def _go_on(self, answer: Answer | None, saved: msg.MinimizerState | None = None) -> None:
        """The next request of the iteration."""
        request = self._iterations.next(answer)
        if isinstance(request, Evaluate):
            self._losses = {}
            self._send([msg.Gather(self._iterations.evaluation, self._portions)], answer, saved)
        elif request is not None:
            self._send(self._encoded(request), answer, saved)

    def _encoded(self, request: Sequence[ProgramCall]) -> Sequence[msg.Command]:
        self._calls = tuple(request)
        return encoded(self._calls, self._sent)

    # What the shards know.

    def _recover(self, memories: Sequence[msg.ShardMemory]) -> None:
        """Go on from what the shards know: repeat the last batch, which some of them may not have carried out."""
        self._recovered = True
        newest = max(memories, key=lambda memory: memory.batch)
        if newest.saved is None:
            return
        traffic, self.account = self.account.traffic, WorkAccount(newest.saved)
        self.account.traffic = traffic
        request = self._iterations.repeat(newest.saved, newest.answers)
        answer, saved = (newest.answers[-1], None) if newest.answers else (None, newest.saved)
        commands: Sequence[msg.Command] = ()
        if isinstance(request, Evaluate):
            evaluation = self._iterations.evaluation
            self._losses = {portion: newest.portions[portion] for portion in _on_all(memories, evaluation)}
            commands = [msg.Gather(evaluation, self._portions)]
            if not newest.gathering:
                commands, answer, saved = [msg.Gathered(request.gradient)], None, None
        elif request is not None:
            commands = self._encoded(request)
        self._batch = msg.CommandBatch(newest.batch - 1, ())
        self._send(commands, answer, saved)
        self._sent.clear()  # A shard that has done this batch, in another life, was not told its programs.

    # Workers.

    def _ask(self, worker: Name, ask: msg.WorkRequest) -> None:
        known = self._asks.get(worker)
        if worker not in self._members:
            return
        if known is not None and ask.number <= known.number:
            if ask.number == known.number and worker in self._replies:
                self._out.send(worker, self._replies[worker])
            return
        self._asks[worker] = ask
        self._replies.pop(worker, None)
        if self._work is not None:
            done = ask.finished
            if done is not None and done.evaluation == self._iterations.evaluation and self._work.finish(done.portion):
                self._losses[done.portion] = done.loss
            self._work.lose([worker])  # It is idle: whatever else it had, it does not compute it any more.
            self._close()

    def _close(self) -> None:
        """End the evaluation if all of its portions are finished."""
        evaluate = self._iterations.evaluate
        if self._work is not None and self._work.over and evaluate is not None:
            self._work = None
            self._send([msg.Gathered(evaluate.gradient)], None, None)

    def _bury(self, dead: set[Name]) -> None:
        """Workers are dead: what they had is for others."""
        for name in dead:
            self._asks.pop(name, None)
        if self._work is not None:
            self.account.reissued += self._work.lose(dead)

    def _serve(self) -> None:
        """Answer the workers that wait, as far as there is an answer."""
        if self._asks and not self._recovered:
            if self._command.number < 0:
                self._command.send(msg.Recover(0, self._term), self._shards, self._out)
            return
        for worker, ask in self._asks.items():
            if worker in self._replies:
                continue
            if ask.iteration <= self._iterations.over:
                self._reply(worker, self._end(ask))
                continue
            if not self._iterations.going_on:
                self._begin()
            if self._work is None or (portion := self.account.hand_out(worker, self._work)) is None:
                continue
            self._reply(worker, msg.Assigned(ask.number, self._iterations.evaluation, portion))

    def _reply(self, worker: Name, reply: msg.Assigned | msg.IterationEnd) -> None:
        self._replies[worker] = reply
        self._out.send(worker, reply, NOTHING)

    def _end(self, ask: msg.WorkRequest) -> msg.IterationEnd:
        sent, received = self.account.all_traffic
        last = self._iterations.last or Iteration(0, math.nan, math.nan, 0.0, 0)
        return msg.IterationEnd(
            number=ask.number,
            iteration=self._iterations.over,
            **{name: value for name, value in structs.asdict(last).items() if name != "number"},
            batch=0 if self._batch is None else self._batch.number,
            sent=sent,
            received=received,
            **self.account.plain(),
        )


def _on_all(memories: Sequence[msg.ShardMemory], evaluation: int) -> set[int]:
    """The portions of an evaluation whose gradients all shards have."""
    return set.intersection(*(set(m.portions) if m.evaluation == evaluation else set[int]() for m in memories))
