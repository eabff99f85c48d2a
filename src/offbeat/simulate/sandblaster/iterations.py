"""Iterations of Sandblaster in virtual time: every message of its machines, and what an iteration costs each role.

The optimizer is the real one. Its shards answer with numbers that are made up, so that each line search takes as many
steps as it is told: who says what to whom does not depend on the numbers otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.protocols.machine import Effect, Event, Name, Payload, SetTimer, Start, Timer
from offbeat.protocols.partition import share
from offbeat.protocols.sandblaster import lbfgs
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.lbfgs import Lbfgs
from offbeat.protocols.sandblaster.messages import RunProgram, first_view
from offbeat.protocols.sandblaster.minimizer import Minimizer
from offbeat.protocols.sandblaster.replica import VectorShard
from offbeat.protocols.sandblaster.shard import CarryOut, FetchRegister
from offbeat.protocols.sandblaster.worker import Compute, Computed, PortionWorker, Ready
from offbeat.protocols.servers.messages import ClusterView
from offbeat.simulate.machines import LossyNetwork, Sent, Simulation
from offbeat.simulate.schedules import Activity, Interval, Message
from offbeat.simulate.timeline import RoleCost, Timeline

LONGEST = 1e6
"""Virtual seconds after which iterations that have not ended never will."""
FIXED_BYTES = 24
"""Bytes in front of every message on the wire."""


@dataclass(frozen=True)
class IterationSetting:
    """A run of Sandblaster to be played."""

    workers: int
    shards: int
    portions: int
    history: int
    nbytes: int
    """Bytes of the parameters, in float32."""
    seconds: Sequence[float]
    """What each worker needs for its share of an evaluation, if all get as many portions."""
    trials: int = 1
    """Steps that each line search tries."""
    network: LossyNetwork = field(default_factory=lambda: LossyNetwork(ordered=True))


class PlayedIterations:
    """Machines that have played some iterations; `sent` has all messages of each, that of the loading first."""

    def __init__(self, setting: IterationSetting, iterations: int) -> None:
        self.setting = setting
        self.sent: list[list[Sent]] = [[]]
        self.computed: list[Interval] = []
        self._ready: set[Name] = set()
        spans = [share(setting.nbytes // 4, shard, setting.shards) for shard in range(setting.shards)]
        self._parts = [Payload(4 * (stop - start)) for start, stop in spans]
        view = first_view(setting.workers, setting.shards)
        minimizer = Minimizer(Lbfgs(setting.history, 0.0, 0.0), setting.portions, view)
        shards = [VectorShard(shard, view) for shard in range(setting.shards)]
        self._workers = [_PlayedWorker(rank, view, setting, self.computed) for rank in range(setting.workers)]
        self.roles = {minimizer.name: "coordinator"}
        """The role of each participant, the coordinator and the shards first."""
        self.roles |= dict.fromkeys((shard.name for shard in shards), "shard")
        self.roles |= dict.fromkeys((worker.name for worker in self._workers), "worker")
        perform: dict[Name, Callable[[Any], Any]] = {
            shard.name: self._shard(part) for shard, part in zip(shards, self._parts, strict=True)
        }
        perform |= {worker.name: self._worker(worker.name) for worker in self._workers}
        self._simulation = Simulation(
            [minimizer, *shards, *self._workers], network=setting.network, perform=perform, log=self._note
        )
        self._go([self._workers[0]], lambda worker: worker.load("float32", self._parts))
        for _ in range(iterations):
            self.sent.append([])
            self._go(self._workers, PortionWorker.iterate)
            self._go(self._workers, PortionWorker.read)

    def cost(self, iteration: int) -> list[RoleCost]:
        """What an iteration, from 1, cost: a row for each pair of roles."""
        messages, headers, vectors = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for sent in self.sent[iteration]:
            pair = self.roles[sent.sender], self.roles[sent.to]
            messages[pair] += 1
            headers[pair] += FIXED_BYTES + len(msgspec.msgpack.encode(sent.message))
            vectors[pair] += sent.nbytes
        return [RoleCost(*pair, messages[pair], headers[pair], vectors[pair]) for pair in sorted(messages)]

    def _go(self, workers: Sequence[PortionWorker], ask: Callable[[PortionWorker], Sequence[Effect]]) -> None:
        """Have workers ask for something, and play until all are ready."""
        self._ready = set()
        for worker in workers:
            self._simulation.carry_out(worker.name, ask(worker))
        if not self._simulation.run(LONGEST, lambda: len(self._ready) == len(workers)):
            raise RuntimeError("an iteration has not ended")

    def _note(self, happening: Any) -> None:
        # Heartbeats go to the launcher, whatever the iteration does.
        if isinstance(happening, Sent) and happening.to in self.roles:
            self.sent[-1].append(happening)

    def _worker(self, name: Name) -> Callable[[Any], Any]:
        def work(item: Any) -> Any:
            if isinstance(item, Ready):
                self._ready.add(name)
            if isinstance(item, Compute):  # Each evaluation has a smaller loss than the one before.
                return Computed(-float(item.evaluation) / self.setting.portions, self._parts)
            return None

        return work

    def _shard(self, part: Payload) -> Callable[[Any], Any]:
        tried = 0

        def work(item: Any) -> Any:
            nonlocal tried
            if isinstance(item, FetchRegister):
                return part
            numbers: list[float] = []
            for command in item.commands if isinstance(item, CarryOut) else ():
                if isinstance(command, RunProgram):
                    slopes = command.program == lbfgs.SLOPE.hash
                    tried = tried + 1 if slopes else 0 if command.program == lbfgs.REMEMBER.hash else tried
                    steep = not slopes or tried < self.setting.trials  # A slope that is flat ends the search.
                    numbers += _ANSWERS[command.program] if steep else (0.0,)
            return numbers

        return work


_DIRECTION = (-1.0, 1.0, 1.0)
_ANSWERS = {
    lbfgs.COPY.hash: (),
    lbfgs.MOVE.hash: (),
    lbfgs.STEEPEST.hash: (1.0,),
    lbfgs.FIRST_DIRECTION.hash: _DIRECTION,
    lbfgs.END_DIRECTION.hash: _DIRECTION,
    lbfgs.SLOPE.hash: (-1.0,),
    lbfgs.REMEMBER.hash: (1.0, 1.0, 1.0),
    **{program.hash: (0.5,) for program in (lbfgs.BEGIN_DIRECTION, lbfgs.BACK, lbfgs.TURN, lbfgs.FORTH)},
}
"""Numbers of each program over one shard: the direction descends, and the curvature is positive."""


class _PlayedWorker(PortionWorker):
    """A worker whose computations take time."""

    def __init__(self, rank: int, view: ClusterView, setting: IterationSetting, computed: list[Interval]) -> None:
        super().__init__(rank, view)
        self._took = setting.seconds[rank] * setting.workers / setting.portions
        self._lane, self._computed = 1 + setting.shards + rank, computed

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event; work that was begun ends later."""
        if isinstance(event, Timer) and isinstance(event.token, Compute):
            return [Start(event.token, "computed")]
        return [self._later(effect, now) for effect in super().on(event, now)]

    def _later(self, effect: Effect, now: float) -> Effect:
        if not isinstance(effect, Start) or not isinstance(effect.work, Compute):
            return effect
        label = f"portion {effect.work.portion} of evaluation {effect.work.evaluation}"
        mark = str(effect.work.portion)
        self._computed.append(Interval(self._lane, now, now + self._took, Activity.COMPUTE, label, mark))
        return SetTimer(self._took, effect.work)


def iteration_timeline(setting: IterationSetting, iterations: int, title: str) -> Timeline:
    """Every message of the first iterations, and what one costs when the history is full."""
    played, per_byte = PlayedIterations(setting, iterations), setting.network.per_byte
    lanes = {name: lane for lane, name in enumerate(played.roles)}
    messages: list[Message] = []
    for sent in (each for part in played.sent for each in part):
        took = per_byte * sent.nbytes
        for arrival in sent.arrivals:
            times = sent.at, sent.at + took, arrival - took, arrival, arrival
            messages.append(Message(lanes[sent.sender], lanes[sent.to], sent.nbytes, *times, _label(sent.message)))
    shards = [f"shard {shard}" for shard in range(setting.shards)]
    names = ("coordinator", *shards, *(f"worker {rank}" for rank in range(setting.workers)))
    return Timeline(
        title,
        names,
        tuple(range(len(names))),
        tuple(played.computed),
        tuple(messages),
        costs=tuple(full_cost(setting)),
        costs_of=f"an iteration with a history of {setting.history} and one evaluation",
    )


_WORDS = {
    msg.Scalars: "numbers",
    msg.LoadVector: "first parameters",
    msg.Read: "asks for parameters",
    msg.Values: "parameters",
    msg.Gradient: "gradient of portion",
    msg.Accepted: "has it",
    msg.WorkRequest: "is idle",
    msg.Assigned: "portion",
    msg.IterationEnd: "the iteration is over",
}


def _label(message: Any) -> str:
    if isinstance(message, msg.CommandBatch):
        return ", ".join(map(_command, message.commands))
    words = _WORDS.get(type(message), type(message).__name__.lower())
    return f"{words} {message.portion}" if isinstance(message, msg.Gradient | msg.Assigned) else words


def _command(command: msg.Command) -> str:
    match command:
        case msg.DefineProgram(_, text):
            return f"program {text}"
        case msg.RunProgram(program, registers, _, into):
            return f"run {program[:4]} on {' '.join(registers)}" + (f" into {' '.join(into)}" if into else "")
        case msg.Gather():
            return "add up gradients"
        case _:
            return f"the sum into {command.into}"


def full_cost(setting: IterationSetting) -> list[RoleCost]:
    """What an iteration costs when the history is full."""
    return PlayedIterations(setting, setting.history + 2).cost(setting.history + 2)
