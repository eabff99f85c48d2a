"""Signs of life: who was heard of when, and who has been silent for too long."""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.protocols.machine import Name
from offbeat.protocols.servers.messages import Timeouts


class Liveness:
    """What the coordinator knows of who lives."""

    def __init__(self, timing: Timeouts) -> None:
        self.heartbeat = timing.heartbeat
        """Seconds between two looks."""
        self._timing = timing
        self._heard: dict[Name, float] = {}
        self._burden = 0
        self._begun = self._looked = 0.0

    def begin(self, now: float) -> None:
        """Begin to listen."""
        self._begun = self._looked = now

    def hear(self, name: Name, now: float, burden: int = 0) -> None:
        """Somebody has given a sign of life, who may have payloads of so many bytes to deal with."""
        self._heard[name] = now
        self._burden = max(self._burden, burden)

    def forget(self, name: Name) -> None:
        """Somebody takes part no longer."""
        self._heard.pop(name, None)

    def knows(self, name: Name) -> bool:
        """Whether somebody was ever heard of."""
        return name in self._heard

    def silent(self, names: Iterable[Name], now: float) -> list[Name]:
        """Who of these is silent. The time that the coordinator itself was stopped for counts against nobody."""
        asleep = max(0.0, now - self._looked - 2 * self.heartbeat)
        self._looked = now
        self._begun += asleep
        self._heard = {name: heard + asleep for name, heard in self._heard.items()}
        longest = self._timing.longest_silence(self._burden)
        return [
            name
            for name in names
            if (now - self._heard[name] > longest if name in self._heard else now - self._begun > self._timing.startup)
        ]
