"""Server machines of which one line is broken: the tests of machines must notice each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from offbeat.protocols.machine import Effects, Name, Payload, Received
from offbeat.protocols.servers.messages import Replicate, Replicated
from offbeat.protocols.servers.pacing import Parked
from offbeat.protocols.servers.replica.answers import Admission
from offbeat.protocols.servers.replica.replication import BackupProgress, Follower, Replication
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import Inspect


class Indiscriminate(Admission):
    def admit(self, push: Any, payload: Payload, out: Effects) -> bool:
        self._tokens += 1
        self._inspected[self._tokens] = (push, payload)
        out.start(Inspect(payload, push.worker), ("inspect", self._tokens))
        return True


class Oblivious(Shard):
    def knows(self, worker: int, life: int, number: int) -> bool:
        return False


class ForgetsWhatItKnows(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.admission.__class__, self.shard.__class__ = Indiscriminate, Oblivious


class AnswersBeforeBackupsHold(ServerMachine):
    def _advance(self, now: float) -> None:
        super()._advance(now)
        replication = self.replication
        while replication.applied < replication.log.end:
            entry, payload = replication.log[replication.applied]
            replication.applied += 1
            self._answers.tell(self.shard.apply(entry, payload, self._out), self._out)


class Credulous(Follower):
    def replicate(self, event: Received, message: Replicate, out: Effects) -> None:
        for entry in self._replication.hold(message, event.payload):
            self._shard.apply(*entry, out)
        out.send(event.sender, Replicated(message.epoch, self._replication.log.end - 1))


class FencesNobody(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._follower.__class__ = Credulous


class ExactlyParked(Parked[Any]):
    def release(self, minimum: int) -> list[Any]:
        return self._waiting.pop(minimum, [])


class WakesOnlyTheExactMinimum(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shard.pacing._parked = ExactlyParked()


class Hasty(Follower):
    def replicate(self, event: Received, message: Replicate, out: Effects) -> None:
        if message.index >= self._replication.log.end:
            super().replicate(event, structs.replace(message, index=self._replication.log.end), out)


class TakesWhateverComesAsNext(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._follower.__class__ = Hasty


class Unordered(Indiscriminate):
    def admit(self, push: Any, payload: Payload, out: Effects) -> bool:
        known = self._shard.knows(push.worker, push.life, push.number)
        return False if known else super().admit(push, payload, out)


class TakesPushesOutOfOrder(ServerMachine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.admission.__class__ = Unordered


class Selfish(Replication):
    def take_over(self, backups: Iterable[Name], now: float) -> None:
        super().take_over(backups, now)
        self.feed = BackupProgress(backups, self.log.end, now)


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
