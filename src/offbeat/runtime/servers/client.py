"""A worker's client of the servers: requests from the training loop, and heartbeats while it computes.

The loop calls `ask` with a request and drives the machine itself while it waits: no thread stands between a request and
its reply. While the loop computes, a thread polls a few times a second, so that heartbeats and resends
do not wait for a step to end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from offbeat.errors import RunError, StrategyError, WaitError
from offbeat.protocols.machine import NOTHING, Machine, Payload
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.coordinator import Changed
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Fresh, Met, WorkerCut, place_of
from offbeat.protocols.servers.worker import notices
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.events.recorder import RECORDER
from offbeat.runtime.events.servers import Requests
from offbeat.runtime.groups.presence import Waiting
from offbeat.runtime.messages import Driver, Endpoint
from offbeat.runtime.servers.plan import Lines, ServerPlan

_POLL = 0.05  # Seconds between polls while nobody waits.


class ServerConnection:
    """A machine and its endpoint, until an error breaks them."""

    def __init__(self, machine: Machine, plan: ServerPlan, notice: Callable[[Any, Any], Any]) -> None:
        self.broken: BaseException | None = None  # Why no more requests can be made.
        self.over = False  # Whether it is being closed.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._endpoint: Endpoint[Any] = Endpoint(machine.name, plan.codec(), keys=plan.keys)
        self._lines = Lines(plan, self._endpoint)
        self._partners = plan.partners
        self._lines.reach([COORDINATOR, *plan.partners(plan.view)])
        self.close = self._endpoint.close
        self.driver = Driver(machine, self._endpoint, notice)
        self._thread = threading.Thread(target=self._poll, name="offbeat client", daemon=True)

    def start(self) -> None:
        """Start the machine and the polling."""
        self.driver.begin()
        self._thread.start()

    def __enter__(self) -> ServerConnection:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def reach(self, view: ClusterView) -> None:
        """Connect to all servers of a view: a new one may be the next primary."""
        self._lines.reach(self._partners(view))

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent to servers, including lent memory."""
        return sum(traffic.bytes_sent for traffic in self._endpoint.traffic.values())

    def links(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Payload bytes sent to and received from each server, by shard and replica, including lent memory."""
        with self:
            known = {place_of(peer): traffic for peer, traffic in self._endpoint.traffic.items()}
        return {place: (t.bytes_sent, t.bytes_received) for place, t in known.items() if place is not None}

    def lend(self, segment: Segment) -> None:
        """Let servers on this host read this memory instead of sending its contents."""
        with self:
            self._endpoint.lend(segment)

    def catch_up(self) -> None:
        """Handle all pending events."""
        while self.driver.turn(0.0):
            pass

    def check(self) -> None:
        """Raise if no more requests can be made."""
        if self.broken is not None:
            raise self.broken

    def break_off(self, error: BaseException) -> None:
        """End the current wait, and all later ones, with an error."""
        self.broken = self.broken or error

    def _poll(self) -> None:
        while not self._over.wait(_POLL):
            if self._lock.acquire(blocking=False):
                try:
                    self.catch_up()
                except Exception as error:
                    self.break_off(RunError(f"the connection to the servers broke: {error!r}"))
                    return
                finally:
                    self._lock.release()

    def stop(self) -> None:
        """Stop polling."""
        self.over = True
        self._over.set()
        self._thread.join(timeout=5.0)


Bytes = NDArray[np.uint8]
Takes = Callable[[int, msg.PullReply | msg.Fetched, Bytes], None]
_SLICE = 0.5  # Seconds between checks, during a wait, that the connection is intact.


class DeclaredDeadError(SystemExit):
    """Ends a worker that was declared dead for its silence: the others continue without it, with its part of the data.

    It exits with code 0, because the run can succeed without it.
    """

    def __init__(self) -> None:
        super().__init__(0)


class ClientSnapshots:
    """A worker's part in snapshots of the run."""

    def __init__(self, machine: ClientMachine, connection: ServerConnection) -> None:
        self._machine, self._connection = machine, connection

    def want(self) -> None:
        """Request a snapshot of the run from the coordinator."""
        with self._connection as connection:
            connection.driver.perform(self._machine.snapshots.want())

    def due(self) -> bool:
        """Whether the worker, which is between two steps, must record its state."""
        with self._connection as connection:
            connection.catch_up()
            return connection.broken is None and self._machine.member and self._machine.colour.due

    def turn(self, clock: int, meetings: int) -> tuple[int, WorkerCut]:
        """Cut the worker here; returns the snapshot's number and the cut."""
        with self._connection as connection:
            cut, effects = self._machine.snapshots.turn(time.monotonic(), clock=clock, meetings=meetings)
            connection.driver.perform(effects)
            return self._machine.colour.own, cut

    def recorded(self, colour: int, cut: WorkerCut) -> None:
        """The state of that cut is on disk; from any thread."""
        with self._connection as connection:
            if connection.broken is None and not connection.over:
                connection.driver.perform(self._machine.snapshots.recorded(colour, cut, time.monotonic()))


class Client:
    """A worker's requests to the servers and the coordinator of its run."""

    def __init__(self, plan: ServerPlan, worker: int, seconds: float, joins: bool = False) -> None:
        self.plan = plan
        _register_once(plan, f"{worker}-{os.getpid()}" if joins else str(worker))
        view = plan.view
        if joins:
            view = structs.replace(view, workers=tuple(other for other in view.workers if other != worker))
        timing = structs.replace(plan.timing, deadline=seconds)
        self.machine = ClientMachine(worker, view, process=os.getpid(), timing=timing)
        self.view: ClusterView = view  # The latest view known here.
        self.takes: Callable[[int, Bytes], None] = lambda _shard, _values: None
        """Receives requested values on arrival, unless `ask` names another receiver."""
        self.total: Bytes | None = None  # The sum of the rows brought to the last meeting, if any.
        self.presence: Any = SimpleNamespace(waiting=None)  # Where this worker publishes what it waits for.
        self.clock = 0  # Steps whose pushes have been sent.
        self.bytes_received = 0
        self._fresh: dict[int, tuple[Fresh, Bytes]] = {}
        self._reads_at = 0
        self._heard: Callable[[ClusterView], None] = lambda _view: None
        self._takers: dict[int, Takes] = {}
        self._joined: notices.Joined | None = None
        self._results: dict[int, tuple[Any, ...] | Exception] = {}
        recorder = RECORDER.get()
        self._notes = None if recorder is None else Requests(recorder, plan.rule, view.shards_of(worker), plan.workers)
        if self._notes is not None:
            self._notes.viewed(view)
        self.connection = ServerConnection(self.machine, plan, self._on_notice)
        self.snapshots = ClientSnapshots(self.machine, self.connection)
        self.connection.start()

    def expect(self, nbytes: int) -> None:
        """Announce the payload size: on a slow link, resending too early would double the traffic."""
        with self.connection as connection:
            connection.driver.perform(self.machine.announce(nbytes))

    def ask(self, request: notices.ClientRequest, takes: Takes | None = None) -> notices.OpenRequest:
        """Send a request; `wait` has the replies under its token. Values go to `takes` on arrival."""
        with self.connection as connection:
            connection.check()
            opened = self.machine.ask(request, time.monotonic())
            if takes is not None:
                self._takers[opened.token] = takes
            connection.driver.perform(opened.effects)
        if isinstance(request, notices.PushRequest):
            self.clock = request.clock + request.final
            self._reads_at = request.clock + 1 if request.then_pull else self._reads_at
        elif isinstance(request, notices.PullRequest):
            self._reads_at = request.clock
        if self._notes is not None:
            self._notes.asked(request, opened, self.machine)
        return opened

    def wait(self, token: int, what: str) -> tuple[Any, ...]:
        """The replies to the request with this token; `what` names it in the error if they do not come."""
        rule = self.plan.rule
        # A read waits until enough others, all but the spare ones, have pushed the needed steps.
        spare = self.plan.workers if rule.deadline is not None else rule.drop + rule.coded
        return self._wait(token, Waiting(what, "clock", rule.needed(self._reads_at), spare))

    def answer(self, request: notices.ClientRequest, what: str) -> tuple[Any, ...]:
        """Send a request and wait for its replies."""
        return self.wait(self.ask(request).token, what)

    def meet(
        self, what: str, number: int, values: Sequence[float], admits: bool = False, row: NDArray[Any] | None = None
    ) -> Met:
        """Wait until all live workers have come to this meeting: who came, with what, and who waits to join.

        If it `admits`, waiting workers are then admitted. If any worker brings a `row`, which must not change any more,
        `total` is then the sum of all rows.
        """
        title = f"{what} ({number})"
        kind, brought = ("", NOTHING) if row is None else (row.dtype.name, Payload(row.nbytes, row))
        self.total = None
        token = self.ask(notices.MeetRequest(title, tuple(values), admits, kind, brought)).token
        if self._notes is not None:
            self._notes.meets(token, what, number)
        ((_, met),) = self._wait(token, Waiting(title, "meeting", number))
        return met

    def _wait(self, token: int, waiting: Waiting) -> tuple[Any, ...]:
        self.presence.waiting = waiting
        notes = self._notes
        if notes is not None and token not in self._results:
            notes.waits(token)
        try:
            with self.connection as connection:
                while token not in self._results:
                    connection.check()
                    connection.driver.turn(_SLICE)
                result = self._results.pop(token)
        finally:
            self.presence.waiting = None
        if isinstance(result, Exception):
            if notes is not None:
                notes.failed(token)
            raise WaitError(f"worker {self.machine.worker} in {waiting.what}: {result}")
        if notes is not None:
            notes.answered(token, result, self.machine.life)
        return result

    def newest(self, shard: int) -> tuple[Fresh, Bytes] | None:
        """Values of a shard that its server sent unrequested since the last call, if any."""
        with self.connection as connection:
            connection.catch_up()
            values = self._fresh.pop(shard, None)
            if values is not None:
                self.machine.took(shard, values[0])
            return values

    def used_again(self, clock: int, staleness: int) -> None:
        """Record that a step starts from values read before."""
        if self._notes is not None:
            self._notes.used_again(clock, staleness)

    def join(self) -> notices.Joined:
        """Wait until the others admit this worker; if the run ends first, so does this process."""
        with self.connection as connection:
            connection.driver.perform(self.machine.join(patient=True))
            while self._joined is None:
                connection.check()
                connection.driver.turn(_SLICE)
        return self._joined

    def tell(self, heard: Callable[[ClusterView], None]) -> None:
        """Call this with the current view and every later one, from any thread; it must not block."""
        with self.connection:
            self._heard = heard
            heard(self.view)

    def close(self) -> None:
        """Leave the run, so that nobody waits for this worker, and close the connection."""
        self.connection.stop()
        with self.connection as connection:
            if connection.broken is None:
                if self._notes is not None:
                    self._notes.leaves()
                connection.driver.perform(self.machine.leave())
                deadline = time.monotonic() + 1.0
                while not self.machine.left and time.monotonic() < deadline:
                    connection.driver.turn(0.05)
            connection.close()

    def _on_notice(self, notice: Any, _token: Any) -> None:
        match notice:
            case notices.Arrived(_, -1, _, payload):
                self.total = payload.handle
            case notices.Arrived(token, shard, reply, payload):
                if payload.handle is not None:
                    self.bytes_received += payload.nbytes
                    takes = self._takers.get(token)
                    if takes is not None and not isinstance(reply, Met):
                        takes(shard, reply, payload.handle)
                    else:
                        self.takes(shard, payload.handle)
            case notices.Completed(token, replies):
                self._takers.pop(token, None)
                self._results[token] = replies
            case notices.Failed(token, waited_for):
                seconds = self.machine.timing.deadline
                self._results[token] = WaitError(f"no answer from {', '.join(waited_for)} within {seconds:g} s")
            case notices.Refreshed(shard, fresh, payload):
                if payload.handle is not None:
                    self._fresh[shard] = (fresh, payload.handle)
            case Changed(view):
                self.view = view
                self.connection.reach(view)
                self._heard(view)
                if self._notes is not None:
                    self._notes.viewed(view)
            case notices.Joined():
                self._joined = notice
            case notices.Departed(epoch):
                self._depart(epoch)
            case msg.Lost(shard):
                self.connection.break_off(
                    RunError(f"shard {shard} is lost: no server is left that holds this part of the parameters")
                )
            case _:
                pass

    def _depart(self, epoch: int) -> None:
        if self.connection.broken is None:
            silence = self.plan.timing.silence
            print(
                f"{self.machine.name} gave no sign of life for {silence:g} s and was declared dead (epoch {epoch}). "
                f"The others have gone on without it and have its part of the data; it ends here.",
                file=sys.stderr,
                flush=True,
            )
        self.connection.break_off(DeclaredDeadError())


def _register_once(plan: ServerPlan, worker: str) -> None:
    """Refuse a worker that has left and joins again: nobody waits for it any more."""
    try:
        (Path(plan.folder) / f"came-{worker}").touch(exist_ok=False)
    except FileExistsError:
        kept = "servers serve" if plan.shards else "asynchronous gossip has"
        raise StrategyError(
            f"worker {worker} joins for the second time, but {kept} one team in a run. Train everything in one "
            f"offbeat.init(), in runs of their own, or with allreduce."
        ) from None
