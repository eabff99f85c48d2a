"""Operations of process groups that are under way, and whose end is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offbeat.runtime.events.recorder import Mark, Recorder

# A member of an enumeration is looked up and written more slowly than a number.
WAIT, EXIT, FAIL = int(Mark.WAIT), int(Mark.EXIT), int(Mark.FAIL)
BareWork: Any = dist._Work  # pyright: ignore[reportPrivateUsage]
"""Torch's own, which torch's annotations do not know well."""
CAPTURES = torch.backends.cuda.is_built()
"""Whether there can be CUDA graphs here."""


def may_ask() -> bool:
    """Whether an operation may be asked if it has ended: not while a CUDA graph is captured, which that would spoil."""
    return not (CAPTURES and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _handed_on(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **more: Any) -> Any:
        return getattr(self._work, method)(*args, **more)

    call.__name__ = method
    return call


def handing_on(kind: type[Any]) -> type[Any]:
    """Let a class of works ask the work it holds whatever it does not answer itself."""
    for method in vars(BareWork):
        if not method.startswith("__") and method not in vars(kind):
            setattr(kind, method, _handed_on(method))
    return kind


@handing_on
class StampedWork(BareWork):
    """An operation under way, whose end is written down."""

    def __init__(
        self, work: Any, recorder: Recorder, name: int, sequence: int, waiting: bool, trails: bool = False
    ) -> None:
        super().__init__()
        self._work, self._recorder, self._name, self._sequence = work, recorder, name, sequence
        self._waiting, self._trails = waiting, trails
        self._future: Any = None
        self.sources: Sequence[int] = ()
        """Of a receipt from anybody: who may have sent it, by their ranks in the group."""
        recorder.open.append(self)

    def _note(self, mark: int) -> None:
        value = self._sender() if self.sources and mark == EXIT else 0
        self._recorder.stamp(mark, self._name, self._sequence, 0, value)

    def _over(self, mark: int) -> None:
        if self in self._recorder.open:
            self._recorder.open.remove(self)
            self._note(mark)

    def _sender(self) -> int:
        """1 + who has sent what was received from anybody; 0 if that is not known."""
        try:
            return 1 + self.sources[self._work._source_rank()]
        except (RuntimeError, IndexError):
            return 0

    def look(self) -> None:
        """Write its end down if it has ended."""
        # Gloo tells those who wait for its future a moment before it says so itself. On a device a future only says
        # that the work was handed over.
        told = self._future is not None and not self._trails and self._future.done()
        if told or (may_ask() and self._work.is_completed()):
            self._over(EXIT)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, and say so."""
        if not self._waiting:
            self._waiting = True
            self._note(WAIT)
        try:
            answer = self._work.wait() if timeout is None else self._work.wait(timeout)
        except BaseException:
            self._over(FAIL)
            raise
        if self._trails:
            self.look()  # A device's queue waits, this process goes on: it has ended only when it says so.
        else:
            self._over(EXIT)
        return answer

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def get_future(self) -> Any:
        """Torch's own: what follows on it is not delayed."""
        self._future = self._work.get_future()
        return self._future

    def __getattr__(self, name: str) -> Any:
        """Whatever else the work of this backend can say."""
        return getattr(self._work, name)


class Gathered(StampedWork):
    """Several operations that were begun one by one, and are under way as one."""

    def __init__(self, work: Any, recorder: Recorder, parts: Sequence[tuple[int, int]], trails: bool) -> None:
        super().__init__(work, recorder, *parts[0], False, trails)
        self._parts = parts

    def _note(self, mark: int) -> None:
        for name, sequence in self._parts:
            self._recorder.stamp(mark, name, sequence)
