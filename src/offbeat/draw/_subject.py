"""What to draw: from the text of a strategy, a collective's algorithm or user-defined code, to a timeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from offbeat import limits
from offbeat.errors import StrategyError, UsageError, did_you_mean
from offbeat.protocols.collectives import ALGORITHMS, Collective, algorithm
from offbeat.protocols.compression import RowFormat
from offbeat.protocols.gossip.machine import STEPPED, Gossiper, MoveHalfway
from offbeat.protocols.gossip.machine import CopyRow as ReadRow
from offbeat.protocols.machine import NOTHING, Done, Effect, Event, Name, Payload, SetTimer, Timer
from offbeat.protocols.pipelines.orders import check_numbers
from offbeat.protocols.pipelines.plan import PartEdge, PartSeconds, PipelinePlan
from offbeat.protocols.schedule import Layout, View
from offbeat.simulate.machine_contract import MachineContract
from offbeat.simulate.machines import LossyNetwork as Delays
from offbeat.simulate.network import Network
from offbeat.simulate.pipelines import pipeline_timeline
from offbeat.simulate.predicted_step import step_schedule
from offbeat.simulate.queues import Times
from offbeat.simulate.sandblaster.iterations import IterationSetting, iteration_timeline
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.timeline import (
    Activity,
    Ensemble,
    Interval,
    ServerTraining,
    Timeline,
    machine_timeline,
    schedule_timeline,
    server_timeline,
)
from offbeat.strategies import (
    Combined,
    Compressing,
    Exchanging,
    Gossip,
    Pipeline,
    Sandblaster,
    Timing,
    aliases,
    available,
    combined,
    parse,
)
from offbeat.strategies.worker.step_cost import as_matrix
from offbeat.user_protocols import OwnSchedule, find_own

MOST_RANKS: Final = 1024
"""Of a table; a picture takes fewer."""
MOST_MICROBATCHES: Final = 512
MOST_PORTIONS: Final = 1000
SERVER_STEPS: Final = 3
"""Default number of steps with servers: enough to see which worker waits for which."""
_BUNDLED: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(\s*(\w*)\s*\))?\s*")


@dataclass(frozen=True)
class Scenario:
    """The simulated cluster."""

    hosts: tuple[int, ...]
    """The host of each worker."""
    network: Network
    nbytes: int = 100_000_000
    """Bytes of the model, of a collective's buffer, or of what a microbatch brings from one stage to the next."""
    steps: int | None = None
    """Steps to draw; None: one turn of the strategy."""
    stragglers: Stragglers = field(default_factory=Stragglers)
    """How long steps take to compute."""
    seed: int = 0
    collective: str | None = None
    """The collective that a user-defined schedule implements."""
    microbatches: int | None = None
    """Of a pipeline; None: as many as the strategy has."""

    def __post_init__(self) -> None:
        """Refuse what would be unreadable."""
        limits.whole("--workers", len(self.hosts), MOST_RANKS, why="more would fill screens")
        limits.whole("--size", self.nbytes, limits.BYTES)
        if self.steps is not None:
            limits.whole("--steps", self.steps, 1000)
        if self.microbatches is not None:
            limits.whole("--microbatches", self.microbatches, MOST_MICROBATCHES)
        limits.seed("--seed", self.seed)

    @property
    def view(self) -> View:
        """The workers and their hosts."""
        return View.of(len(self.hosts), self.hosts)

    def seconds(self, steps: int, work: int = 1) -> Times:
        """How long each worker computes in each step."""
        return self.stragglers.draw(len(self.hosts), steps, self.seed) * work


Subject = OwnSchedule | MachineContract | Combined


def subject_of(text: str, collective: str | None = None) -> Subject:
    """What a text names; refused, with what it may be, if there is no such thing."""
    own = find_own(text, collective)
    if own is None:
        own = _bundled(text)
    return combined(parse(text)) if own is None else own


def timeline_of(text: str, setting: Scenario, subject: Subject | None = None) -> Timeline:
    """Simulate what a text names, or the `subject` if it is known; refused, with the reason, if that is impossible."""
    if subject is None:
        subject = subject_of(text, setting.collective)
    if setting.microbatches is not None and not (isinstance(subject, Combined) and subject.split):
        raise UsageError(f"--microbatches makes no sense with {text.strip()}: only pipelines have them.")
    if isinstance(subject, OwnSchedule):
        return _collective(subject, text.strip(), setting)
    if isinstance(subject, MachineContract):
        return _contract(subject, text, setting)
    subject.check(len(setting.hosts))
    draw = _pipeline if subject.split else _strategy
    return draw(subject, text.strip(), setting)


def _bundled(text: str) -> OwnSchedule | None:
    """A collective's algorithm, such as `all_gather(ring)`; None if the text is a strategy."""
    match = _BUNDLED.fullmatch(text)
    if match is None:
        return None
    word, name = match[1], match[2]
    collectives = [one.value for one in Collective]
    if word in collectives:
        collective = Collective(word)
        if not name:
            known = ALGORITHMS[collective]
            raise UsageError(
                f"{word} has several algorithms; name one, as in {word}({next(iter(known))}).{did_you_mean('', known)}"
            )
        return OwnSchedule(algorithm(collective, name).schedule, collective, "offbeat", name)
    known = [*available(), *aliases()]
    if word not in known:
        raise StrategyError(
            f"{word!r} is neither a strategy nor a collective.{did_you_mean(word, known + collectives)}"
        )
    return None


def _collective(own: OwnSchedule, text: str, setting: Scenario) -> Timeline:
    view, size = setting.view, len(setting.hosts)
    count = max(1, setting.nbytes // 4)
    if own.collective is Collective.ALL_TO_ALL:
        count = max(1, count // size) * size
    return schedule_timeline(own.schedule, view, Layout(count), setting.network, text)


def _strategy(strategy: Combined, text: str, setting: Scenario) -> Timeline:
    exchange = strategy.exchange
    assert isinstance(exchange, Exchanging)  # noqa: S101 (what all strategies of that axis are)
    forms = _forms(strategy)
    if isinstance(exchange, Gossip) and exchange.asynchronous:
        _alone(strategy, text)
        return _gossip(exchange, text, setting)
    if isinstance(exchange, Sandblaster):
        _alone(strategy, text)
        return _sandblaster(exchange, text, setting)
    rhythm, needed = exchange.rhythm(), exchange.servers(len(setting.hosts))
    if rhythm is not None and needed is not None:
        if strategy.when is not None:
            _alone(strategy, text)
        pushed = forms[0].message_bytes(as_matrix(setting.nbytes), 4, *forms[1:]) if forms else setting.nbytes
        training = ServerTraining(needed[2], rhythm, needed[0], setting.network.between, setting.nbytes, pushed)
        durations = setting.seconds(setting.steps or SERVER_STEPS, exchange.work)
        return server_timeline(training, durations, text)
    when = strategy.when
    if isinstance(when, Timing):
        step = when.planned(exchange, setting.view, setting.nbytes, forms)
    else:
        step = exchange.planned(setting.view, setting.nbytes, forms)
    if isinstance(step, str):
        raise StrategyError(f"{text} cannot be drawn: {step}.")
    try:
        strategy.check_hosts(len(set(setting.hosts)))
    except StrategyError as error:
        raise StrategyError(f"{error} To draw it on one host, add --per-host {len(setting.hosts)}.") from error
    _, count = step_schedule(step, [[0.0] * len(setting.hosts)], setting.steps)
    schedule, _ = step_schedule(step, setting.seconds(count).tolist(), count)
    return schedule_timeline(schedule, setting.view, Layout(0, 1), setting.network, text, role="worker")


def _sandblaster(exchange: Sandblaster, text: str, setting: Scenario) -> Timeline:
    """The first iterations, one by default. `--step` is what a worker needs for its share of an evaluation."""
    if exchange.portions > MOST_PORTIONS:
        raise StrategyError(
            f"{text} is drawn with at most {MOST_PORTIONS:,} portions: each is a handful of messages. Say portions=8."
        )
    iterations = IterationSetting(
        workers=len(setting.hosts),
        shards=exchange.shards,
        portions=exchange.portions,
        history=exchange.history,
        nbytes=setting.nbytes,
        seconds=setting.seconds(1)[0].tolist(),
        network=_delays(setting),
    )
    return iteration_timeline(iterations, setting.steps or 1, text)


def _pipeline(strategy: Combined, text: str, setting: Scenario) -> Timeline:
    """One step of one replica. `--step` is what each stage computes in it."""
    pipeline = strategy.split[0]
    if len(strategy.split) > 1 or not isinstance(pipeline, Pipeline):
        raise StrategyError(f"{text} cannot be drawn: of models that are split, only pipelines are played.")
    if not strategy.implied or strategy.when is not None or strategy.compressions:
        raise StrategyError(
            f"{text} cannot be drawn as a whole: a pipeline is drawn for one replica. Draw {pipeline} by itself."
        )
    if len(setting.hosts) != pipeline.stages:
        raise StrategyError(
            f"{text} is drawn for one replica, which takes {pipeline.stages} workers, not {len(setting.hosts)}: omit "
            f"--workers."
        )
    if setting.steps is not None:
        raise StrategyError(f"--steps {setting.steps} makes no sense with {text}: one step of a pipeline is drawn.")
    count = setting.microbatches or pipeline.microbatches_of(None)
    check_numbers(pipeline.schedule, pipeline.stages, count, pipeline.chunks)
    own = (setting.seconds(1)[0] / (3 * count * pipeline.chunks)).tolist()
    parts = range(pipeline.stages * pipeline.chunks)
    seconds = tuple(PartSeconds(own[part % pipeline.stages], 2 * own[part % pipeline.stages]) for part in parts)
    edges = tuple(PartEdge(part, part + 1, setting.nbytes) for part in parts[:-1])
    plan = PipelinePlan(pipeline.schedule, pipeline.stages, count, pipeline.chunks, edges, seconds, tells_loss=True)
    return pipeline_timeline(plan, setting.network, text, setting.hosts)


def _forms(strategy: Combined) -> list[RowFormat]:
    forms: list[RowFormat] = []
    for one in strategy.compressions:
        form = one.format() if isinstance(one, Compressing) else None
        if form is None:
            raise StrategyError(
                f"{one} does not say how many bytes it leaves (give it `format`), so nothing can be drawn."
            )
        forms.append(form)
    return forms


def _alone(strategy: Combined, text: str) -> None:
    if len(strategy.parts()) > 1:
        raise StrategyError(
            f"{text} cannot be drawn: only the exchange itself is played. Omit what is added to {strategy.exchange}."
        )


# -- machines ---------------------------------------------------------------------------------------------------------


def _contract(contract: MachineContract, text: str, setting: Scenario) -> Timeline:
    """User-defined machines, without faults, until they are done."""
    machines = list(contract.machines(len(setting.hosts), setting.seed))
    named = {machine.name: machine for machine in machines}
    ensemble = Ensemble(machines, lambda name: lambda work: contract.perform(name, work))
    return machine_timeline(
        ensemble, contract.patience, _delays(setting), setting.seed, text, lambda: contract.done(named)
    )


def _delays(setting: Scenario) -> Delays:
    link = setting.network.between
    return Delays(delay=link.alpha, per_byte=link.beta, ordered=True)


class _SteppingWorker:
    """A worker of asynchronous gossip: it steps, and notifies its machine."""

    def __init__(self, machine: Gossiper, lane: int, seconds: Sequence[float]) -> None:
        self.name: Name = machine.name
        self._machine, self._lane, self._seconds = machine, lane, seconds
        self.computed: list[Interval] = []

    def begin(self, now: float) -> Sequence[Effect]:
        return [*self._machine.begin(now), *self._compute(now)]

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if event != Timer("computed"):
            return self._machine.on(event, now)
        return [*self._machine.on(Done(STEPPED), now), *self._compute(now)]

    def _compute(self, now: float) -> Sequence[Effect]:
        number = len(self.computed)
        if number == len(self._seconds):
            return ()
        took = self._seconds[number]
        self.computed.append(Interval(self._lane, now, now + took, Activity.COMPUTE, f"step {number + 1}"))
        return [SetTimer(took, "computed")]


def _gossip(gossip: Gossip, text: str, setting: Scenario) -> Timeline:
    size, row = len(setting.hosts), Payload(setting.nbytes)
    mixing, durations = gossip.mixing(size), setting.seconds(setting.steps or SERVER_STEPS).T.tolist()
    patience = 4 * (setting.network.between.alpha + setting.network.between.beta * setting.nbytes) + 0.1
    chance = Random(setting.seed)  # noqa: S311 - who meets whom, not a secret
    workers = [
        _SteppingWorker(
            Gossiper(f"worker {k}", [f"worker {n}" for n in mixing.neighbours(k)], chance.getrandbits(32), patience),
            k,
            durations[k],
        )
        for k in range(size)
    ]

    def perform(work: object) -> Payload:
        return row if isinstance(work, ReadRow | MoveHalfway) else NOTHING

    ensemble = Ensemble(workers, lambda _: perform, lambda: [one for worker in workers for one in worker.computed])
    longest = max(sum(own) for own in durations)
    return machine_timeline(ensemble, longest + patience, _delays(setting), setting.seed, text)
