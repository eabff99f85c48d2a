"""Connections to the page's server: any local user can open them, so idle ones are few and end soon."""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_WAITING: Final = 64
"""Connections without a request under way; for one more, the one that has waited longest is closed."""
PATIENCE: Final = 5.0
"""Seconds that a connection may take to send a whole request."""


class BoundedProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, but whoever only holds a connection loses it.

    The descriptors are those of the process that serves the page, which may be a run's launcher.
    """

    def connection_made(self, transport: Any) -> None:
        """Let it in, at the expense of the one that has waited longest if there are too many."""
        self._opened: float = self.loop.time()
        super().connection_made(transport)
        known: Any = self.connections
        waiting = sorted((other._opened, id(other), other) for other in known if other._waits)
        if len(waiting) > MOST_WAITING:
            waiting[0][-1].transport.abort()
        self.loop.call_later(PATIENCE, self._look, None)

    @property
    def _waits(self) -> bool:
        """Whether no request is under way."""
        answered: Any = self.cycle
        return not self.transport.is_closing() and (answered is None or answered.response_complete)

    def _look(self, last: Any) -> None:
        """End it if no request has come since the last look, at which this was the latest one."""
        if self.transport.is_closing():
            return
        if self._waits and self.cycle is last:
            self.transport.abort()
        else:
            self.loop.call_later(PATIENCE, self._look, self.cycle)
