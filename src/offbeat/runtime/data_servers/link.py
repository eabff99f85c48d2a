"""A worker's connection to the data servers of its run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from offbeat.errors import DataError, WaitError
from offbeat.protocols.data_servers.passes import LoaderPass, Piece
from offbeat.protocols.data_servers.reader import BatchReader, SpoiledBatchError
from offbeat.protocols.servers.messages import worker_name
from offbeat.runtime.data_servers.batch_format import read
from offbeat.runtime.data_servers.plan import DataServerPlan
from offbeat.runtime.messages import Endpoint
from offbeat.runtime.messages.drive import LONGEST_SLEEP, Driver

Note = TypeVar("Note")


class Supplied(NamedTuple):
    """A batch from a data server, the loop's note on it, and whether it is the last."""

    content: Any
    note: Any
    last: bool


class DataLink:
    """Reads batches from data servers, ahead of need; messages are handled when the loop asks for a batch."""

    def __init__(self, plan: DataServerPlan, rank: int, timeout: float) -> None:
        # A worker that replaces another must not be taken for it: its passes have later numbers.
        self._reader = BatchReader(worker_name(rank), rank, plan.names, turns=time.time_ns())
        self._timeout = timeout
        self._endpoint: Endpoint[Any] = Endpoint(self._reader.name, plan.codec(), keys=plan.keys)
        for name in plan.names:
            self._endpoint.connect(name, plan.address(name))
        self._driver = Driver(self._reader, self._endpoint, _no_work)
        self._passes = 0
        self._closed = False
        self.bytes_received = 0
        self.waited = 0.0
        """Seconds in which the next batch was not here yet."""

    def batches(self, first: int, pieces: Iterator[Piece[Note]], division: Callable[[], object]) -> Iterator[Supplied]:
        """The batches of one pass, in order; `pieces` and `division` as `LoaderPass` takes them."""
        # Each pass has a number of its own: a loop may evaluate on a loader in the middle of a pass over it.
        self._passes += 1
        line = self._passes
        try:
            yield from self._pass(line, LoaderPass(self._reader, line, first, pieces, division))
        finally:
            if not self._closed:
                self._driver.perform(self._reader.close(line))

    def _pass(self, line: int, run: LoaderPass[Note]) -> Iterator[Supplied]:
        self._driver.perform(run.ordered())
        while True:
            # Ordered again where the division has changed since.
            self._driver.perform(run.ordered())
            if run.over:
                return
            self._await(line)
            try:
                payload = self._reader.take(line)
            except SpoiledBatchError as error:
                raise DataError(str(error)) from None
            supplied = Supplied(read(payload.handle), run.note, run.is_last)
            self.bytes_received += payload.nbytes
            self._driver.perform(run.use())
            self._driver.perform(run.ordered())
            yield supplied

    def _await(self, line: int) -> None:
        begun = time.monotonic()
        while not self._reader.ready(line):
            if time.monotonic() - begun > self._timeout:
                names = " and ".join(self._reader.waits_for(line))
                raise WaitError(
                    f"{self._reader.name} has waited {self._timeout:g} s for a batch from {names}. Its log says what "
                    f"it is doing; if preparing a batch takes that long, set a longer --timeout."
                )
            self._driver.turn(LONGEST_SLEEP)
        self.waited += time.monotonic() - begun

    @property
    def moved(self) -> int:
        """Orders that were given to another data server, because theirs was silent."""
        return self._reader.moved

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._endpoint.close()


def _no_work(work: Any, token: Any) -> None:
    """A reader starts no work."""
    del work, token
