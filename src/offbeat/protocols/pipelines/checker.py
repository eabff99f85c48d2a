"""Proof, without starting a process, that the rounds of a pipeline compute everything once and never wait for ever.

What each round must come after is compared with what the model needs; then the programs that stages read off the rounds
are followed twice, with sends that are buffered and with sends that wait until their receive is posted. A stage does
one thing after the other and receives name their sender, so in which order stages are followed cannot matter: if one
run ends, all do (Kahn 1974).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import ScheduleError
from offbeat.protocols.pipelines.formulas import most_in_flight
from offbeat.protocols.pipelines.orders import Action, Work
from offbeat.protocols.pipelines.plan import Crossing, LossMessage, Message, PipelinePlan, TiedGradient
from offbeat.protocols.pipelines.rounds import (
    AHEAD,
    ComputeStep,
    EndStep,
    PipelineStep,
    ReceiveStep,
    SendStep,
    StepEnd,
    own_lack,
    program,
    rounds,
)
from offbeat.protocols.schedule import Op, Round, Stream


@dataclass(frozen=True)
class PipelineReport:
    """Result of checking a correct pipeline."""

    computations: int
    messages: int
    bytes_sent: int
    in_flight: tuple[int, ...]  # For each stage: of how many microbatches it holds activations at once, at most.


def check_pipeline(plan: PipelinePlan, played: Sequence[Round] | None = None, ahead: int = AHEAD) -> PipelineReport:
    """Prove that the rounds, by default the plan's own, are a correct pipeline; a ScheduleError says where not."""
    played = rounds(plan) if played is None else played
    proof = _Proof(plan)
    for number, each in enumerate(played):
        proof.take(number, each)
    proof.conclude()
    programs = [program(played, stage, ahead) for stage in range(plan.stages)]
    for buffered in (True, False):
        follow(programs, buffered)
    nbytes = sum(int(each.lengths.sum()) for each in played if each.op is Op.SEND)
    return PipelineReport(len(proof.computed), len(proof.sent), nbytes, tuple(proof.most))


class _Proof:
    """The rounds one after the other: what each is, and what it comes after."""

    def __init__(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.computed: dict[tuple[int, Action], int] = {}  # The round of each action of each stage.
        self.sent: dict[Message, int] = {}
        self.most = [0] * plan.stages
        self._what: list[object] = []
        self._computes: dict[Message, int] = {}  # By value that was computed.
        self._used: set[Message] = set()
        self._last: dict[int, int] = {}
        self._ended: set[int] = set()
        self._held = [0] * plan.stages
        self._done: set[tuple[int, Action]] = set()

    def take(self, number: int, each: Round) -> None:
        """One round."""
        for earlier in each.after:
            if not 0 <= earlier < number:
                raise ScheduleError(
                    f"round {number} comes after round {earlier}, which is not earlier: it would wait for ever"
                )
        if len(each.source) != 1 or len(each.target) != 1:
            raise ScheduleError(f"round {number} has {len(each.source)} entries; a round of a pipeline has one")
        source, target = int(each.source[0]), int(each.target[0])
        if isinstance(each.what, Action) and each.op is Op.COMPUTE and source == target:
            self._compute(number, target, each.what, each)
        elif isinstance(each.what, StepEnd) and each.op is Op.COMPUTE and source == target == each.what.stage:
            self._end(number, target, each)
        elif isinstance(each.what, Message) and each.op is Op.SEND:
            self._send(number, (source, target), each.what, each)
        else:
            raise ScheduleError(f"round {number} ({each.op}) of {each.what} is neither a computation nor a message")
        self._what.append(each.what)

    def _compute(self, number: int, stage: int, action: Action, each: Round) -> None:
        where, plan = f"round {number}, in which stage {stage} computes the {action},", self.plan
        key = stage, action
        inside = 0 <= stage < plan.stages and action.chunk in range(plan.chunks)
        if not inside or action.microbatch not in range(plan.microbatches):
            raise ScheduleError(f"{where} does not belong to this pipeline")
        if key in self.computed:
            raise ScheduleError(f"{where} repeats round {self.computed[key]}")
        if each.stream is not Stream.COMPUTE:
            raise ScheduleError(f"{where} is not on the stream of computations")
        self._follows(where, stage, each)
        lack = own_lack(action, stage, self._done)
        if lack is not None:
            raise ScheduleError(f"{where} comes before the {lack} of the same stage")
        self._use(where, plan.needs(stage, action), each)
        for value in plan.gives(stage, action):
            self._computes[value] = number
        if stage == plan.loss_stage and action == plan.last_loss:
            self._computes |= {LossMessage(target): number for target in range(plan.stages)}
        self.computed[key] = self._last[stage] = number
        self._done.add(key)
        self._held[stage] += {Work.FORWARD: 1, Work.INPUT_GRADIENT: 0}.get(action.work, -1)
        self.most[stage] = max(self.most[stage], self._held[stage])

    def _follows(self, where: str, stage: int, each: Round) -> None:
        """It comes after the stage's computation before, and the stage has not ended its step."""
        if stage in self._ended:
            raise ScheduleError(f"{where} comes after the end of the stage's step")
        if stage in self._last and self._last[stage] not in each.after:
            raise ScheduleError(
                f"{where} does not come after round {self._last[stage]}, the stage's computation before"
            )

    def _end(self, number: int, stage: int, each: Round) -> None:
        where = f"round {number}, in which stage {stage} ends its step,"
        self._follows(where, stage, each)
        self._use(where, self.plan.needs_at_end(stage), each)
        self._ended.add(stage)

    def _use(self, where: str, needed: Sequence[Message], each: Round) -> None:
        """Everything that it needs is there, and all that it waits for is needed by it, and by nothing else."""
        for value in needed:
            crosses = not isinstance(value, Crossing) or self.plan.crosses(value)
            source = self.sent.get(value) if crosses else self._computes.get(value)
            if source is None:
                raise ScheduleError(f"{where} uses the {value}, which nobody has {'sent' if crosses else 'computed'}")
            if crosses and source not in each.after:
                raise ScheduleError(f"{where} does not come after round {source}, which brings the {value}")
        for earlier in each.after:
            value = self._what[earlier]
            if isinstance(value, Message):
                if value not in needed:
                    raise ScheduleError(f"{where} waits for the {value}, which it does not use")
                if value in self._used:
                    raise ScheduleError(f"{where} uses the {value} a second time")
                self._used.add(value)

    def _send(self, number: int, ends: tuple[int, int], value: Message, each: Round) -> None:
        where, plan = f"round {number}, which brings the {value} from stage {ends[0]} to {ends[1]},", self.plan
        computed = self._last.get(ends[0]) if isinstance(value, TiedGradient) else self._computes.get(value)
        if computed is None:
            raise ScheduleError(f"{where} sends what nobody has computed")
        if ends != plan.ends(value) or ends[0] == ends[1]:
            raise ScheduleError(f"{where} does not go from the value's stage to the one that uses it")
        if value in self.sent:
            raise ScheduleError(f"{where} repeats round {self.sent[value]}")
        if computed not in each.after:
            raise ScheduleError(f"{where} does not come after round {computed}, which computes it")
        if isinstance(value, TiedGradient):
            self._whole(where, value)
        if (int(each.start[0]), int(each.stop[0])) != plan.extent(value):
            raise ScheduleError(f"{where} carries [{each.start[0]}, {each.stop[0]}) instead of {plan.extent(value)}")
        self.sent[value] = number

    def _whole(self, where: str, value: TiedGradient) -> None:
        """A gradient of tied weights is whole when its stage has computed everything."""
        missing = [action for action in self.plan.orders[value.source] if (value.source, action) not in self.computed]
        if missing:
            raise ScheduleError(f"{where} comes before the {missing[0]} of that stage")

    def conclude(self) -> None:
        """Nothing is missing, and no stage held more than its kind of schedule promises."""
        plan = self.plan
        split = any(action.work is Work.WEIGHT_GRADIENT for order in plan.orders for action in order)
        back = (Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT) if split else (Work.BACKWARD,)
        for stage in range(plan.stages):
            for chunk in range(plan.chunks):
                for microbatch in range(plan.microbatches):
                    for work in (Work.FORWARD, *back):
                        action = Action(work, microbatch, chunk)
                        if (stage, action) not in self.computed:
                            raise ScheduleError(f"stage {stage} never computes the {action}")
        if len(self.computed) > plan.parts * plan.microbatches * (1 + len(back)):
            raise ScheduleError("some backward is computed both as a whole and in two")
        for value in self.sent:
            if value not in self._used:
                raise ScheduleError(f"the {value} is sent in round {self.sent[value]} and never used")
        for stage in range(plan.stages):
            if stage not in self._ended and (lacking := plan.needs_at_end(stage)):
                raise ScheduleError(f"stage {stage} never ends its step, for which it needs the {lacking[0]}")
        for stage, held in enumerate(self.most):
            limit = most_in_flight(plan.kind, stage, plan.stages, plan.microbatches, plan.chunks)
            if held > limit:
                raise ScheduleError(
                    f"stage {stage} holds activations of {held} microbatches at once; under {plan.kind.value} it may "
                    f"hold {limit}"
                )


def follow(programs: Sequence[Sequence[PipelineStep]], buffered: bool) -> None:
    """Run programs on channels that keep their order; a ScheduleError if some stages wait for each other for ever.

    A send that is not `buffered` waits until its receive is posted. A computation waits for what it uses.
    """
    channels, place, moved = _Channels(buffered), [0] * len(programs), True
    while moved:
        moved = False
        for stage, steps in enumerate(programs):
            while place[stage] < len(steps) and channels.passes(stage, steps[place[stage]]):
                place[stage], moved = place[stage] + 1, True
    waiting = [
        f"stage {stage} at {_in_words(steps[place[stage]], channels.came)}"
        for stage, steps in enumerate(programs)
        if place[stage] < len(steps)
    ]
    if waiting:
        kind = "buffered" if buffered else "unbuffered"
        raise ScheduleError(f"with {kind} sends these wait for each other for ever: {'; '.join(waiting)}")
    channels.conclude()


class _Channels:
    """A queue of sends and one of receives between every two stages."""

    def __init__(self, buffered: bool) -> None:
        self.came: set[Message] = set()
        self._buffered = buffered
        self._sent: defaultdict[tuple[int, int], dict[Message, None]] = defaultdict(dict)
        self._posted: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)

    def passes(self, stage: int, step: PipelineStep) -> bool:
        """Whether a stage is done with a step; it is asked again if not."""
        match step:
            case ComputeStep(_, uses) | EndStep(uses):
                return self.came.issuperset(uses)
            case ReceiveStep(value, source):
                self._posted[source, stage].append(value)
                self._match((source, stage))
                return True
            case SendStep(value, target):
                if value not in self.came:
                    self._sent[stage, target][value] = None
                    self._match((stage, target))
                return self._buffered or value in self.came

    def _match(self, channel: tuple[int, int]) -> None:
        sent, posted = self._sent[channel], self._posted[channel]
        while sent and posted:
            value, expected = next(iter(sent)), posted.popleft()
            if value != expected:
                raise ScheduleError(
                    f"stage {channel[1]} receives the {expected} from stage {channel[0]}, which sends the {value} "
                    f"first: each would wait for the other"
                )
            del sent[value]
            self.came.add(value)

    def conclude(self) -> None:
        """Everything that was sent was received, and the other way round."""
        for queues, lack in ((self._sent, "received"), (self._posted, "sent")):
            for channel, values in queues.items():
                for value in values:
                    raise ScheduleError(f"the {value} from stage {channel[0]} to {channel[1]} is never {lack}")


def _in_words(step: PipelineStep, came: set[Message]) -> str:
    match step:
        case ComputeStep(action, uses):
            return f"the {action}, for the {next(value for value in uses if value not in came)}"
        case EndStep(uses):
            return f"the end of its step, for the {next(value for value in uses if value not in came)}"
        case SendStep(value, target):
            return f"the send of the {value} to stage {target}"
        case ReceiveStep(value, source):
            return f"the receive of the {value} from stage {source}"
