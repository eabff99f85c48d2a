"""Streams that may come faster than they are used: a bounded buffer, and what happens when it is full."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, Final

from torch.utils.data import IterableDataset

from offbeat import limits
from offbeat.errors import UsageError, did_you_mean

POLICIES: Final = ("block", "sample")
LOOK = 0.5  # Seconds after which a waiting reader looks whether the other side still lives.


def bounded(
    source: Iterable[Any] | Callable[[], Iterable[Any]], *, buffer: int = 1000, when_full: str = "block", seed: int = 0
) -> BoundedStream:
    """A stream that is read in the background into a bounded buffer.

    Args:
        source: The stream, or a function that opens it anew for each pass.
        buffer: Most examples that wait to be used.
        when_full: `block`: the source waits, and nothing is lost. `sample`: it does not, and each example that comes
            too fast replaces a random waiting one; how many were skipped is counted.
        seed: Of that choice.

    """
    return BoundedStream(source, buffer, when_full, seed)


class BoundedStream(IterableDataset[Any]):
    """A stream with a bounded buffer; see `bounded`."""

    def __init__(
        self, source: Iterable[Any] | Callable[[], Iterable[Any]], buffer: int, when_full: str, seed: int
    ) -> None:
        limits.whole("buffer =", buffer, limits.COUNT)
        limits.seed("seed =", seed)
        if when_full not in POLICIES:
            raise UsageError(
                f"when_full={when_full!r} is not a policy: say block or sample.{did_you_mean(when_full, POLICIES)}"
            )
        self._source, self._buffer, self._when_full, self._seed = source, buffer, when_full, seed
        self.skipped = 0
        """Examples that came too fast and were left out, so far."""
        self.yielded = 0
        """Examples that were used."""

    def __iter__(self) -> Iterator[Any]:
        source = self._source() if callable(self._source) else self._source
        pump = _Pump(source, self._buffer, self._when_full == "sample", Random(self._seed))  # noqa: S311
        try:
            while True:
                more, example = pump.take()
                self.skipped += pump.skips()
                if not more:
                    return
                self.yielded += 1
                yield example
        finally:
            pump.stop()


class _Pump:
    """A thread that reads a source into a buffer."""

    def __init__(self, source: Iterable[Any], buffer: int, samples: bool, chance: Random) -> None:
        self._source, self._most, self._samples, self._chance = source, buffer, samples, chance
        self._waiting: deque[Any] = deque()
        self._changed = threading.Condition()
        self._skipped = 0
        self._over = self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="stream", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for example in self._source:
                with self._changed:
                    while len(self._waiting) >= self._most and not self._samples and not self._stopped:
                        self._changed.wait(LOOK)
                    if self._stopped:
                        return
                    if len(self._waiting) >= self._most:
                        self._skipped += 1
                        del self._waiting[self._chance.randrange(self._most)]
                    self._waiting.append(example)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def take(self) -> tuple[bool, Any]:
        """The oldest waiting example; False at the end. Raises what the source has raised, after what came before."""
        with self._changed:
            while not self._waiting and not self._over:
                self._changed.wait(LOOK)
            if self._waiting:
                example = self._waiting.popleft()
                self._changed.notify_all()
                return True, example
        if self._error is not None:
            raise self._error
        return False, None

    def skips(self) -> int:
        """Examples left out since the last call."""
        with self._changed:
            skipped, self._skipped = self._skipped, 0
            return skipped

    def stop(self) -> None:
        """Read no further; the thread ends with the next example that its source yields."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
