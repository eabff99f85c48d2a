"""Operations of process groups in flight, whose end is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offbeat.runtime.events.recorder import Mark, Recorder

# Plain numbers: enum members are slower to look up and write.
WAIT, EXIT, FAIL = int(Mark.WAIT), int(Mark.EXIT), int(Mark.FAIL)
BareWork: Any = dist._Work  # pyright: ignore[reportPrivateUsage]
"""Torch's class, which is poorly annotated."""
CAPTURES = torch.backends.cuda.is_built()  # Whether CUDA graphs are possible here.


def may_ask() -> bool:
    """Whether an operation's completion may be queried: not during CUDA graph capture, which it would break."""
    return not (CAPTURES and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def handing_on(kind: type[Any]) -> type[Any]:
    """Make a class of works forward the methods that it does not define to the work it holds."""
    for method in vars(BareWork):
        if not method.startswith("__") and method not in vars(kind):

            def call(self: Any, *args: Any, _method: str = method, **more: Any) -> Any:
                return getattr(self._work, _method)(*args, **more)

            call.__name__ = method
            setattr(kind, method, call)
    return kind


@handing_on
class StampedWork(BareWork):
    """An operation in flight, whose end is recorded."""

    def __init__(
        self, work: Any, recorder: Recorder, name: int, sequence: int, waiting: bool, trails: bool = False
    ) -> None:
        super().__init__()
        self._work, self._recorder, self._name, self._sequence = work, recorder, name, sequence
        self._waiting, self._trails = waiting, trails
        self._future: Any = None
        self.sources: Sequence[int] = ()  # Possible senders of a receive from any source, by rank in the group.
        recorder.open.append(self)

    def _note(self, mark: int) -> None:
        value = self._sender() if self.sources and mark == EXIT else 0
        self._recorder.stamp(mark, self._name, self._sequence, 0, value)

    def _over(self, mark: int) -> None:
        if self in self._recorder.open:
            self._recorder.open.remove(self)
            self._note(mark)

    def _sender(self) -> int:
        """1 + the sender of a receive from any source; 0 if unknown."""
        try:
            return 1 + self.sources[self._work._source_rank()]
        except (RuntimeError, IndexError):
            return 0

    def look(self) -> None:
        """Record its end if it has ended."""
        # Gloo completes the future a moment before the work. On a device a future only says that the work was queued.
        done = self._future is not None and not self._trails and self._future.done()
        if done or (may_ask() and self._work.is_completed()):
            self._over(EXIT)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, and record the wait."""
        if not self._waiting:
            self._waiting = True
            self._note(WAIT)
        try:
            answer = self._work.wait() if timeout is None else self._work.wait(timeout)
        except BaseException:
            self._over(FAIL)
            raise
        if self._trails:
            self.look()  # Only the device's queue waits: it has ended once it says so.
        else:
            self._over(EXIT)
        return answer

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def get_future(self) -> Any:
        """Torch's own future, so that callbacks are not delayed."""
        self._future = self._work.get_future()
        return self._future

    def __getattr__(self, name: str) -> Any:
        """Other attributes of this backend's work."""
        return getattr(self._work, name)


class Gathered(StampedWork):
    """Several operations started one by one and in flight as one."""

    def __init__(self, work: Any, recorder: Recorder, parts: Sequence[tuple[int, int]], trails: bool) -> None:
        super().__init__(work, recorder, *parts[0], False, trails)
        self._parts = parts

    def _note(self, mark: int) -> None:
        for name, sequence in self._parts:
            self._recorder.stamp(mark, name, sequence)
