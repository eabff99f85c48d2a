"""Recorded events of workers' requests to servers, and of the servers' handling of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from offbeat.protocols.machine import Effect, Event, Received, Send
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Pull, PullReply, Push, PushReply
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.worker import notices
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.runtime.events.recorder import About, Mark, Recorder

GROUP: Final = "servers"  # The group of events about servers.
MEETINGS: Final = "meetings"  # The group of the live workers' meetings.
WARM_START: Final = "a step of the warm start"  # A meeting where all wait, by design, for the one that trains.
PUSH, PULL = "push", "pull"

_START, _WAIT, _EXIT, _FAIL = map(int, (Mark.START, Mark.WAIT, Mark.EXIT, Mark.FAIL))
_READ, _PARKED, _ANSWERED = int(Mark.READ), int(Mark.PARKED), int(Mark.ANSWERED)
_STATUS: Final = {status: int(Mark[status.upper()]) for status in ("applied", "refused", "duplicate", "late")}


def message_number(life: int, number: int) -> int:
    """The number of a push or pull, unique over all lives of a worker."""
    return (life << 32) + number


def meeting(what: str) -> str:
    """The name of a meeting in events."""
    return f"meeting for {what}"


class Requests:
    """A worker's side: its requests to servers and peers, its waits, and its reads."""

    def __init__(self, recorder: Recorder, rule: Rule, shards: Sequence[int], workers: int) -> None:
        self._stamp = recorder.stamp
        self._open: dict[int, tuple[int, int, int]] = {}  # Pending requests: name, number and step.
        pull = About(
            GROUP,
            PULL,
            workers,
            bound=None if rule.deadline is not None else rule.bound,
            spare=rule.drop + rule.coded,
            words=str(rule),
        )
        self._push = recorder.name("servers: push", lambda: About(GROUP, PUSH))
        self._pull = recorder.name("servers: pull", lambda: pull)
        self._reads = [recorder.name(("servers: read", k), lambda k=k: About(GROUP, "read", shard=k)) for k in shards]
        self._recorder = recorder
        self._workers = workers

    def asked(self, request: notices.ClientRequest, opened: notices.OpenRequest, machine: ClientMachine) -> None:
        """Record a request: the final push ends a step; after a load all continue from its clock."""
        match request:
            case notices.PushRequest(parts, clock, final=final):
                if final or parts[0].shard == 0:  # Pushes are identified by their number on the first shard.
                    number = message_number(machine.life, machine.composer.pushes[0] - 1)
                    self._open[opened.token] = (self._push, number, clock)
                    self._stamp(_START, self._push, number, clock, int(final))
                if opened.pull:
                    self._open[opened.pull] = (self._pull, opened.pull, clock + 1)
            case notices.PullRequest(clock) | notices.RangeRequest(_, clock):
                self._open[opened.token] = (self._pull, opened.token, clock)
            case notices.LoadRequest():
                name = self._recorder.name("servers: load", lambda: About(GROUP, "load"))
                self._stamp(_START, name, 0, request.clock)
            case _:
                pass

    def meets(self, token: int, what: str, number: int) -> None:
        """Record a meeting of all live workers."""
        name = self._recorder.name((MEETINGS, what), lambda: About(MEETINGS, meeting(what), self._workers))
        self._open[token] = (name, number, 0)
        self._stamp(_START, name, number)

    def waits(self, token: int) -> None:
        """The worker waits for the reply."""
        if (request := self._open.get(token)) is not None:
            self._stamp(_WAIT, *request)

    def answered(self, token: int, replies: Sequence[tuple[int, Any]], life: int) -> None:
        """The replies have come: values, or the outcome of a push."""
        request = self._open.pop(token, None)
        if request is None:
            return
        *_, step = request
        for shard, reply in replies:
            if isinstance(reply, PullReply):
                number = message_number(life, reply.number)
                self._stamp(_READ, self._reads[shard], number, step, max(0, step - reply.clock))
        self._stamp(_EXIT, *request)

    def used_again(self, step: int, staleness: int) -> None:
        """Values read before are reused for another step."""
        self._stamp(_READ, self._reads[0], 0, step, staleness)

    def failed(self, token: int) -> None:
        """No reply came."""
        if (request := self._open.pop(token, None)) is not None:
            self._stamp(_FAIL, *request)

    def viewed(self, view: ClusterView) -> None:
        """Record a new view; where there are servers, they do."""
        if not view.primaries:
            _note_view(self._recorder, view)

    def leaves(self) -> None:
        """The worker leaves the run."""
        self._stamp(int(Mark.LEAVE))


class Serves:
    """A server's side: the outcome of pushes, pulls that had to wait, and views."""

    def __init__(self, recorder: Recorder, machine: ServerMachine) -> None:
        self._recorder, self._machine = recorder, machine
        self._steps: dict[tuple[int, int, int], int] = {}
        self._view = machine.view
        _note_view(recorder, machine.view)

    def after(self, event: Event, effects: Sequence[Effect]) -> None:
        """Record an event and its effects."""
        if isinstance(event, Received) and isinstance(event.message, Push | Pull):
            self._asked(event.message)
        if self._machine.view is not self._view:
            self._view = self._machine.view
            _note_view(self._recorder, self._view)
        sent = [(effect.to, effect.message) for effect in effects if isinstance(effect, Send)]
        for to, message in sent:  # Pushes first: reads answered along with them contain them.
            pushed = message.pushed if isinstance(message, PullReply) else message
            if isinstance(pushed, PushReply):
                self._settled(_number_of(to), pushed)
        for to, message in sent:
            if isinstance(message, PullReply):
                number = message_number(message.life, message.number)
                self._recorder.stamp(_ANSWERED, self._name("answered", _number_of(to)), number, message.clock)

    def _asked(self, message: Push | Pull) -> None:
        clock = message.clock
        if isinstance(message, Push):
            self._steps[message.worker, message.life, message.number] = clock
            if not message.then_pull:
                return
            clock += 1
        if self._machine.serving and self._machine.shard.rule.needed(clock) > self._machine.shard.minimum:
            self._recorder.stamp(_PARKED, self._name("parked", message.worker), message.number, clock)

    def _settled(self, worker: int, reply: PushReply) -> None:
        step = self._steps.pop((worker, reply.life, reply.number), -1)
        if step >= 0 or reply.status == "duplicate":
            name = self._name(f"push {reply.status}", worker, reply.reason[:200])
            self._recorder.stamp(_STATUS[reply.status], name, message_number(reply.life, reply.number), step)

    def _name(self, what: str, worker: int, words: str = "") -> int:
        return self._recorder.name(
            (what, worker, words),
            lambda: About(GROUP, what, peer=worker, shard=self._machine.number, words=words or None),
        )


def _note_view(recorder: Recorder, view: ClusterView) -> None:
    name = recorder.name(("view", view.epoch), lambda: About(GROUP, "view", view.workers, servers=view.primaries))
    recorder.stamp(int(Mark.VIEW), name, view.epoch)


def _number_of(name: str) -> int:
    return int(name.partition(" ")[2])
