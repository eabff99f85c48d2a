"""Server machines of which one line is broken: the tests of machines must notice each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from offbeat.protocols.machine import Name, Payload, Received
from offbeat.protocols.servers.messages import Replicate, Replicated
from offbeat.protocols.servers.pacing import Parked
from offbeat.protocols.servers.replication import Feed, Replication
from offbeat.protocols.servers.server import ServerMachine


class ForgetsWhatItKnows(ServerMachine):
    def _push(self, push: Any, payload: Payload, now: float) -> None:
        self.shard.knows = lambda *_: False  # type: ignore[method-assign]
        self._admission.inspect(push, payload, self._out)


class AnswersBeforeBackupsHold(ServerMachine):
    def _advance(self, now: float) -> None:
        super()._advance(now)
        replication = self.replication
        while replication.applied < replication.log.end:
            entry, payload = replication.log[replication.applied]
            replication.applied += 1
            self._answers.tell(self.shard.apply(entry, payload, self._out), self._out)


class FencesNobody(ServerMachine):
    def _replicate(self, event: Received, message: Replicate) -> None:
        for entry in self.replication.hold(message, event.payload):
            self.shard.apply(*entry, self._out)
        self._out.send(event.sender, Replicated(message.epoch, self.replication.log.end - 1))


class ExactlyParked(Parked[Any]):
    def release(self, minimum: int) -> list[Any]:
        return self._waiting.pop(minimum, [])


class WakesOnlyTheExactMinimum(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shard.pacing._parked = ExactlyParked()


class TakesWhateverComesAsNext(ServerMachine):
    def _replicate(self, event: Received, message: Replicate) -> None:
        if message.index >= self.replication.log.end:
            super()._replicate(event, structs.replace(message, index=self.replication.log.end))


class TakesPushesOutOfOrder(ServerMachine):
    def _push(self, push: Any, payload: Payload, now: float) -> None:
        if self.shard.knows(push.worker, push.life, push.number):
            super()._push(push, payload, now)
        else:
            self._admission.inspect(push, payload, self._out)


class Selfish(Replication):
    def take_over(self, backups: Iterable[Name], now: float) -> None:
        super().take_over(backups, now)
        self.feed = Feed(backups, self.log.end, now)


class KeepsTheRestToItself(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replication.__class__ = Selfish


class NeverUnsettled(Replication):
    settled = True  # type: ignore[assignment]


class ServesTooEarly(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replication.__class__ = NeverUnsettled
