"""A worker's line to the servers: asks for what the training loop needs, and stays alive while it computes.

The loop asks with `push`, `pull`, `meet` and the like, and drives the machine itself while it waits for the answer: no
thread stands between a request and its answer. While the loop computes, a thread looks in a few times a second, so that
signs of life and what must be sent again do not wait for a step to end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from offbeat.errors import RunError, StrategyError, WaitError
from offbeat.protocols.machine import NOTHING, Name, Payload
from offbeat.protocols.servers.client import ClientMachine
from offbeat.protocols.servers.coordinator import Changed
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Fresh,
    Lost,
    Met,
    PullReply,
    Push,
    Settings,
    Timing,
    WorkerCut,
    place_of,
    worker_name,
)
from offbeat.protocols.servers.notices import (
    Arrived,
    Asked,
    Completed,
    Departed,
    Failed,
    Joined,
    Part,
    Refreshed,
    Wanted,
)
from offbeat.runtime.messages import Driver, Endpoint
from offbeat.runtime.presence import Waiting
from offbeat.runtime.servers.noting import Requests, message_number
from offbeat.runtime.servers.plan import Plan
from offbeat.runtime.shared.segment import Segment
from offbeat.runtime.stamps import RECORDER

Bytes = NDArray[np.uint8]
_SLICE = 0.5
"""Seconds after which a wait looks whether there is still hope."""
_LOOK_IN = 0.05
"""Seconds between two looks while the loop computes."""


class DeclaredDeadError(SystemExit):
    """Ends a worker that was silent for so long that the others have gone on without it, and have its part of the data.

    A request to end, and no failure: the run goes well without this process.
    """

    def __init__(self) -> None:
        super().__init__(0)


class Client:
    """What a worker asks of the servers and the coordinator of its run."""

    def __init__(self, plan: Plan, worker: int, seconds: float, joins: bool = False) -> None:
        self.plan = plan
        _come_once(plan, f"{worker}-{os.getpid()}" if joins else str(worker))
        timing = plan.timing
        patient = Timing(
            heartbeat=timing.heartbeat,
            silence=timing.silence,
            startup=timing.startup,
            resend=timing.resend,
            longest_resend=timing.longest_resend,
            per_byte=timing.per_byte,
            deadline=seconds,
        )
        view = plan.view
        if joins:
            view = structs.replace(view, workers=tuple(other for other in view.workers if other != worker))
        self.machine = ClientMachine(worker, view, process=os.getpid(), timing=patient)
        self.view: ClusterView = view
        """Who takes part, as far as is known here."""
        self.fresh: dict[int, tuple[Fresh, Bytes]] = {}
        """The newest values that servers have sent unasked, by shard."""
        self.takes: Callable[[int, Bytes], None] = lambda _shard, _values: None
        """What is done with values or states that were asked for, when they come."""
        self.total: Bytes | None = None
        """The sum of the rows that were brought to the last meeting, if any were."""
        self.presence: Any = SimpleNamespace(waiting=None)
        """Where this worker says what it waits in."""
        self.clock = 0
        """Steps whose pushes have been sent."""
        self._reads_at = 0
        self._heard: Callable[[ClusterView], None] = lambda _view: None
        self.bytes_received = 0
        self._takers: dict[int, Callable[[int, PullReply, Bytes], None]] = {}
        self._joined: Joined | None = None
        self._results: dict[int, tuple[Any, ...] | Exception] = {}
        self._broken: BaseException | None = None
        recorder = RECORDER.get()
        self._notes = None if recorder is None else Requests(recorder, plan.rule, plan.shards, plan.workers)
        if self._notes is not None:
            self._notes.viewed(view)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._endpoint: Endpoint[Any] = Endpoint(worker_name(worker), plan.codec(), keys=plan.keys)
        self._endpoint.connect(COORDINATOR, plan.address(COORDINATOR))
        self._connected: set[Name] = set()
        self._connect(plan.view)
        self._driver = Driver(self.machine, self._endpoint, self._told)
        self._driver.begin()
        self._thread = threading.Thread(target=self._look_in, name="offbeat client", daemon=True)
        self._thread.start()

    def _connect(self, view: ClusterView) -> None:
        """Reach all servers of a view: one that is new there may be the next to serve."""
        for name in view.servers:
            if name not in self._connected:
                self._connected.add(name)
                self._endpoint.connect(name, self.plan.address(name))

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that went to servers, lent ones too."""
        return sum(traffic.bytes_sent for traffic in self._endpoint.traffic.values())

    @property
    def links(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Payload bytes that went to each server and came from it, lent ones too, by shard and replica."""
        with self._lock:
            known = {place_of(peer): traffic for peer, traffic in self._endpoint.traffic.items()}
        return {place: (one.bytes_sent, one.bytes_received) for place, one in known.items() if place is not None}

    def lend(self, segment: Segment) -> None:
        """Let servers of this host read this memory instead of sending them what lies there."""
        with self._lock:
            self._endpoint.lend(segment)

    def expect(self, nbytes: int) -> None:
        """Payloads of so many bytes are going to come: on a slow link, asking again too soon would double them."""
        with self._lock:
            if self.machine.member:
                self._driver.perform(self.machine.announce(nbytes))
            self.machine.expect(nbytes)

    # -- what the loop asks for --------------------------------------------------------------------------------------

    def push(
        self,
        parts: Sequence[Bytes],
        clock: int,
        weight: float,
        settings: Settings,
        then_pull: bool,
        microbatch: bool = False,
        absent: Sequence[tuple[tuple[int, int], ...]] = (),
    ) -> tuple[int, int]:
        """Push a gradient, a part for each shard (an empty one only lets the clock tick). Answers two tokens.

        One of a microbatch counts by itself, and the step goes on. `absent` has, for each shard, the ranges of
        parameters that have no gradient.
        """
        missing = absent or [()] * len(parts)
        self.clock = clock if microbatch else clock + 1
        self._reads_at = clock + 1 if then_pull else self._reads_at
        given = [
            Part(shard, Payload(part.nbytes, part), absent=lacks) if part.nbytes else Part(shard, Payload(0), 0, 0)
            for shard, (part, lacks) in enumerate(zip(parts, missing, strict=True))
        ]
        asked = self._asked(
            lambda now: self.machine.push(
                given,
                now,
                clock=clock,
                weight=weight,
                settings=settings,
                final=not microbatch,
                counts=microbatch,
                then_pull=then_pull,
            )
        )
        if self._notes is not None:
            number = message_number(self.machine.life, self.machine.pushes - 1)
            self._notes.pushed(asked.token, number, clock, final=not microbatch)
            if then_pull:
                self._notes.pulls(asked.pull, clock + 1)
        return asked.token, asked.pull

    def pull(self, clock: int, anew: bool = False) -> int:
        """Ask for the values that a step from this clock on starts from."""
        self._reads_at = clock
        token = self._asked(lambda now: self.machine.pull(now, clock=clock, anew=anew)).token
        if self._notes is not None:
            self._notes.pulls(token, clock)
        return token

    def push_parts(self, parts: Sequence[tuple[int, int, int, Bytes]], clock: int, settings: Settings = ()) -> int:
        """Push numbers for ranges (shard, start, stop) of shards: parts of a step that goes on."""
        given = [Part(shard, Payload(numbers.nbytes, numbers), start, stop) for shard, start, stop, numbers in parts]
        act = partial(self.machine.push, given, clock=clock, settings=settings, final=False)
        token = self._asked(lambda now: act(now=now)).token
        if self._notes is not None and given[0].shard == 0:
            self._notes.pushed(token, message_number(self.machine.life, self.machine.pushes - 1), clock, final=False)
        return token

    def pull_parts(self, parts: Sequence[Wanted], clock: int, takes: Callable[[int, PullReply, Bytes], None]) -> int:
        """Ask for ranges of shards, each if it is newer than known; `takes` is given what comes."""

        def ask(now: float) -> Asked:
            asked = self.machine.pull_parts(parts, now, clock=clock)
            self._takers[asked.token] = takes
            return asked

        token = self._asked(ask).token
        if self._notes is not None:
            self._notes.pulls(token, clock)
        return token

    def used_again(self, clock: int, staleness: int) -> None:
        """A step starts from values that were read before: only for what is written down of the run."""
        if self._notes is not None:
            self._notes.used_again(clock, staleness)

    def fetch(self) -> int:
        """Ask for the whole state of all shards."""
        return self._asked(lambda now: self.machine.fetch(now)).token

    def trial(self, parts: Sequence[Bytes], letter: bool) -> int:
        """Have servers look at payloads as at pushes, without using them: to see what that takes."""
        given = [Part(shard, Payload(part.nbytes, part if part.nbytes else None)) for shard, part in enumerate(parts)]
        return self._asked(lambda now: self.machine.trial(given, now, letter=letter)).token

    def load(
        self,
        states: Sequence[Bytes],
        versions: Sequence[int],
        clock: int,
        took: Sequence[tuple[tuple[int, int, int], ...]] = (),
    ) -> int:
        """Put a state on every shard; `took`: of whom how many pushes are in each, and their clocks."""
        given = [Part(shard, Payload(state.nbytes, state)) for shard, state in enumerate(states)]
        if self._notes is not None:
            self._notes.loaded(clock)
        return self._asked(lambda now: self.machine.load(given, now, versions=versions, clock=clock, took=took)).token

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def want_snapshot(self) -> None:
        """Ask the coordinator for a snapshot of the run."""
        with self._lock:
            self._driver.perform(self.machine.want_snapshot())

    def snapshot_due(self) -> bool:
        """Whether the worker, which is between two steps, is to record its state."""
        with self._lock:
            while self._driver.turn(0.0):
                pass
            return self._broken is None and self.machine.member and self.machine.colour.due

    def turn(self, clock: int, meetings: int) -> tuple[int, WorkerCut]:
        """Be cut here; answers by which snapshot, and where."""
        with self._lock:
            cut, effects = self.machine.turn(time.monotonic(), clock=clock, meetings=meetings)
            self._driver.perform(effects)
            return self.machine.colour.own, cut

    def recorded(self, colour: int, cut: WorkerCut) -> None:
        """The state of that cut is on the disk; may be called by any thread."""
        with self._lock:
            if self._broken is None and not self._over.is_set():
                self._driver.perform(self.machine.recorded(colour, cut, time.monotonic()))

    def replay(self, sent: Sequence[int], under_way: Sequence[tuple[int, Push, Bytes | None]]) -> int:
        """Go on from a snapshot: so many pushes went to each shard, of which these are to be sent again."""
        given = [
            (shard, push, Payload(0) if part is None else Payload(part.nbytes, part)) for shard, push, part in under_way
        ]
        return self._asked(lambda now: self.machine.replay(sent, given, now)).token

    def meet(
        self, what: str, number: int, values: Sequence[float], admits: bool = False, row: NDArray[Any] | None = None
    ) -> Met:
        """Wait until all live workers have come to this meeting: who came, what each brought, and who waits to join.

        It is the worker's meeting of this number. If it `admits`, those who wait are then let in. If any brings a
        `row`, which must not change any more, `total` is then the sum of all rows.
        """
        named = f"{what} ({number})"
        kind, brought = ("", NOTHING) if row is None else (row.dtype.name, Payload(row.nbytes, row))
        self.total = None
        token = self._asked(lambda now: self.machine.meet(named, tuple(values), now, admits, kind, brought)).token
        if self._notes is not None:
            self._notes.meets(token, what, number)
        ((_, met),) = self._wait(token, Waiting(named, "meeting", number))
        if not isinstance(met, Met):
            raise RunError(f"a meeting was answered with {met!r}")
        return met

    def join(self) -> Joined:
        """Wait until the others let this worker in; if the run ends before they do, this process does too."""
        with self._lock:
            self._driver.perform(self.machine.join(patient=True))
            while self._joined is None:
                if self._broken is not None:
                    raise self._broken
                self._driver.turn(_SLICE)
        return self._joined

    def wait(self, token: int, what: str) -> tuple[Any, ...]:
        """The answers to what was asked for under this token; `what` is for the message if they do not come."""
        rule = self.plan.rule
        # A read waits until all others, but for those that the rule can do without, have pushed so many steps.
        spare = self.plan.workers if rule.deadline is not None else rule.drop + rule.coded
        return self._wait(token, Waiting(what, "clock", rule.needed(self._reads_at), spare))

    def _wait(self, token: int, waiting: Waiting) -> tuple[Any, ...]:
        self.presence.waiting = waiting
        try:
            return self._answers(token, waiting.what)
        finally:
            self.presence.waiting = None

    def _answers(self, token: int, what: str) -> tuple[Any, ...]:
        notes = self._notes
        if notes is not None and token not in self._results:
            notes.waits(token)
        with self._lock:
            while token not in self._results:
                if self._broken is not None:
                    raise self._broken
                self._driver.turn(_SLICE)
            found = self._results.pop(token)
        if isinstance(found, Exception):
            if notes is not None:
                notes.failed(token)
            raise WaitError(f"worker {self.machine.worker} in {what}: {found}")
        if notes is not None:
            notes.answered(token, found, self.machine.life)
        return found

    def _asked(self, act: Callable[[float], Asked]) -> Asked:
        with self._lock:
            if self._broken is not None:
                raise self._broken
            asked = act(time.monotonic())
            self._driver.perform(asked.effects)
        return asked

    def tell(self, heard: Callable[[ClusterView], None]) -> None:
        """Have this called with the view of now, and with every later one; in any thread, and it must not wait."""
        with self._lock:
            self._heard = heard
            heard(self.view)

    def check(self) -> None:
        """Raise if this worker takes part no longer, or its line is broken."""
        if self._broken is not None:
            raise self._broken

    def newest(self, shard: int) -> tuple[Fresh, Bytes] | None:
        """Values of a shard that its server has sent unasked, if any have come since the last call."""
        with self._lock:
            while self._driver.turn(0.0):
                pass
            found = self.fresh.pop(shard, None)
            if found is not None:
                self.machine.took(shard, found[0])
            return found

    def _look_in(self) -> None:
        """In a thread: what happens while the loop computes."""
        while not self._over.wait(_LOOK_IN):
            if self._lock.acquire(blocking=False):
                try:
                    while self._driver.turn(0.0):
                        pass
                except Exception as error:
                    self._break(RunError(f"the line to the servers broke: {error!r}"))
                    return
                finally:
                    self._lock.release()

    def _told(self, notice: Any, _token: Any) -> None:
        match notice:
            case Arrived(_, -1, _, payload):
                self.total = payload.handle
            case Arrived(token, shard, reply, payload):
                if payload.handle is not None:
                    self.bytes_received += payload.nbytes
                    takes = self._takers.get(token)
                    if takes is not None and isinstance(reply, PullReply):
                        takes(shard, reply, payload.handle)
                    else:
                        self.takes(shard, payload.handle)
            case Completed(token, replies):
                self._takers.pop(token, None)
                self._settle(token, replies)
            case Failed(token, waited_for):
                names = ", ".join(waited_for)
                self._settle(token, WaitError(f"no answer from {names} within {self.machine_patience:g} s"))
            case Refreshed(shard, fresh, payload):
                if payload.handle is not None:
                    self.fresh[shard] = (fresh, payload.handle)
            case Changed(view):
                self.view = view
                self._connect(view)
                self._heard(view)
                if self._notes is not None:
                    self._notes.viewed(view)
            case Joined():
                self._joined = notice
            case Departed(epoch):
                self._depart(epoch)
            case Lost(shard):
                self._break(
                    RunError(f"shard {shard} is lost: no server is left that holds this part of the parameters")
                )
            case _:
                pass

    @property
    def machine_patience(self) -> float:
        """Seconds after which a request is given up."""
        return self.machine._timing.deadline  # pyright: ignore[reportPrivateUsage]

    def _settle(self, token: int, result: tuple[Any, ...] | Exception) -> None:
        self._results[token] = result

    def _depart(self, epoch: int) -> None:
        if self._broken is None:
            silence = self.plan.timing.silence
            print(
                f"{self.machine.name} gave no sign of life for {silence:g} s and was declared dead (epoch {epoch}). "
                f"The others have gone on without it and have its part of the data; it ends here.",
                file=sys.stderr,
                flush=True,
            )
        self._break(DeclaredDeadError())

    def break_off(self, error: WaitError) -> None:
        """End the wait that this worker is in, and all later ones, with an error."""
        self._break(error)

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error

    def close(self) -> None:
        """Say goodbye, so that nobody waits for this worker, and close the line."""
        self._over.set()
        self._thread.join(timeout=5.0)
        with self._lock:
            if self._broken is None:
                if self._notes is not None:
                    self._notes.leaves()
                self._driver.perform(self.machine.leave())
                deadline = time.monotonic() + 1.0
                while not self.machine.left and time.monotonic() < deadline:
                    self._driver.turn(0.05)
            self._endpoint.close()


def _come_once(plan: Plan, worker: str) -> None:
    """Refuse one who has left and comes again: nobody waits for it any more."""
    try:
        (Path(plan.folder) / f"came-{worker}").touch(exist_ok=False)
    except FileExistsError:
        kept = "servers serve" if plan.shards else "asynchronous gossip has"
        raise StrategyError(
            f"worker {worker} joins for the second time, but {kept} one team in a run. Train everything in one "
            f"offbeat.init(), in runs of their own, or with allreduce."
        ) from None
