"""The process of a data server: one thread answers the workers, while the main one prepares batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from torch.utils.data import DataLoader

from offbeat.protocols import disturbances
from offbeat.protocols.data_servers.server import DataServer, PrepareBatch, ReleaseBatch
from offbeat.protocols.machine import Done
from offbeat.runtime.data_servers.plan import DataServerPlan
from offbeat.runtime.data_servers.preparer import Preparer
from offbeat.runtime.data_servers.room import BatchRoom
from offbeat.runtime.disturb import Disturber
from offbeat.runtime.messages import Endpoint, Inbox, drive
from offbeat.runtime.messages.drive import LATER
from offbeat.runtime.system.malloc import keep_freed_memory

GOODBYE = 5.0  # Seconds that the thread with the sockets has to end.


class DataServerProcess:
    """A data server: begins to answer when it is made, and prepares batches in `serve`."""

    def __init__(
        self,
        plan: DataServerPlan,
        number: int,
        send: Callable[[Mapping[str, Any]], None],
        *,
        disturb: Sequence[str] = (),
        seed: int = 0,
        fired: Collection[int] = (),
    ) -> None:
        keep_freed_memory()
        self.number, self._send = number, send
        self._machine = DataServer(plan.names[number])
        self._work: SimpleQueue[PrepareBatch | BaseException] = SimpleQueue()
        name = self._machine.name
        self._endpoint: Endpoint[Any] = Endpoint(name, plan.codec(), bind=plan.address(name), keys=plan.keys)
        self._inbox = Inbox(self._endpoint)
        self._room = BatchRoom(self._endpoint.lend)
        faults = [disturbances.parse(sentence) for sentence in disturb]
        self._disturber = Disturber(faults, disturbances.DATA_SERVER, number, seed, send, fired)
        self._ending = False
        self._thread = threading.Thread(target=self._answer, name="data server's sockets", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        try:
            drive(self._machine, self._endpoint, self._do, lambda: self._ending, self._inbox, self._after)
        except BaseException as error:
            self._work.put(error)

    def _do(self, work: Any, token: Any) -> Any:
        del token
        if isinstance(work, PrepareBatch):
            self._work.put(work)
            return LATER
        if isinstance(work, ReleaseBatch):
            self._room.free(work.payload.handle)
        return None

    def _after(self, *_: object) -> None:
        if self._disturber.active:
            self._disturber.step(self._machine.step)

    def serve(self, loaders: Callable[[int], DataLoader[Any]]) -> None:
        """PrepareBatch batches until the launcher ends this process."""
        preparer = Preparer(self._machine.name, loaders, self._room.allocate)
        try:
            while True:
                work = self._work.get()
                if isinstance(work, BaseException):
                    raise work
                begun = time.perf_counter()
                made = preparer.prepare(work)
                preparer.seconds += time.perf_counter() - begun
                self._inbox.put(Done("prepared", made))
        finally:
            self._close(preparer)

    def _close(self, preparer: Preparer) -> None:
        self._ending = True
        self._endpoint.wake()
        self._disturber.close()
        self._thread.join(GOODBYE)
        traffic = self._endpoint.traffic.values()
        account = {
            "name": self._machine.name,
            "batches": self._machine.made,
            "examples": preparer.examples,
            "seconds": preparer.seconds,
            "skipped": preparer.skipped,
            "bytes_sent": sum(each.bytes_sent for each in traffic),
            "bytes_lent": sum(each.bytes_lent for each in traffic),
        }
        self._send({"kind": "data server", "account": account})
        if not self._thread.is_alive():
            self._endpoint.close()
