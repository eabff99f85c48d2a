"""A worker's line to the servers: asks for what the training loop needs, and stays alive while it computes.

The machine is driven in a thread of its own, so that signs of life and answers to lost messages do not wait for a step
to end. The loop asks with `push`, `pull`, `meet` and the like, and waits where it needs the answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import RunError, WaitError
from offbeat.protocols.machine import Effect, Event, Payload
from offbeat.protocols.servers.client import (
    Arrived,
    Asked,
    Changed,
    ClientMachine,
    Completed,
    Departed,
    Failed,
    Part,
    Refreshed,
)
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Fresh,
    Lost,
    Message,
    Met,
    Settings,
    Timing,
    server_name,
    worker_name,
)
from offbeat.runtime.messages import Codec, Endpoint, Inbox, drive
from offbeat.runtime.servers.plan import Plan
from offbeat.runtime.shared.segment import Segment

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Call:
    """Something that the loop wants the machine to do."""

    act: Callable[[float], Sequence[Effect]]


class _Commanded:
    """A client's machine that also takes what the loop asks for."""

    def __init__(self, machine: ClientMachine) -> None:
        self._machine = machine
        self.name = machine.name

    def begin(self, now: float) -> Sequence[Effect]:
        return self._machine.begin(now)

    def on(self, event: Event | _Call, now: float) -> Sequence[Effect]:
        return event.act(now) if isinstance(event, _Call) else self._machine.on(event, now)


class Client:
    """What a worker asks of the servers and the coordinator of its run."""

    def __init__(self, plan: Plan, worker: int, seconds: float) -> None:
        self.plan = plan
        timing = plan.timing
        patient = Timing(
            heartbeat=timing.heartbeat,
            silence=timing.silence,
            startup=timing.startup,
            resend=timing.resend,
            longest_resend=timing.longest_resend,
            deadline=seconds,
        )
        self.machine = ClientMachine(worker, plan.view, process=os.getpid(), timing=patient)
        self.view: ClusterView = plan.view
        """Who takes part, as far as is known here."""
        self.fresh: dict[int, tuple[Fresh, Bytes]] = {}
        """The newest values that servers have sent unasked, by shard."""
        self.takes: Callable[[int, Bytes], None] = lambda _shard, _values: None
        """What is done with values or states that were asked for; called in the client's thread, while the loop
        waits."""
        self.bytes_received = 0
        self._results: dict[int, tuple[Any, ...] | Exception] = {}
        self._broken: Exception | None = None
        self._changed = threading.Condition()
        self._over = False
        self._endpoint: Endpoint[Any] = Endpoint(worker_name(worker), Codec(Message))
        self._endpoint.connect(COORDINATOR, plan.address(COORDINATOR))
        for shard in range(plan.shards):
            for replica in range(plan.replicas + 1):
                name = server_name(shard, replica)
                self._endpoint.connect(name, plan.address(name))
        self._inbox = Inbox(self._endpoint)
        self._thread = threading.Thread(target=self._drive, name="offbeat client", daemon=True)
        self._thread.start()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that went to servers, lent ones too."""
        return sum(traffic.bytes_sent for traffic in self._endpoint.traffic.values())

    def lend(self, segment: Segment) -> None:
        """Let servers of this host read this memory instead of sending them what lies there."""
        self._ask(lambda _: self._lent(segment))

    def _lent(self, segment: Segment) -> Sequence[Effect]:
        self._endpoint.lend(segment)
        return ()

    # -- what the loop asks for --------------------------------------------------------------------------------------

    def push(
        self, parts: Sequence[Bytes], clock: int, weight: float, settings: Settings, then_pull: bool
    ) -> tuple[int, int]:
        """Push a gradient, a part for each shard (an empty one only lets the clock tick). Answers two tokens."""
        given = [
            Part(shard, Payload(part.nbytes, part)) if part.nbytes else Part(shard, Payload(0), 0, 0)
            for shard, part in enumerate(parts)
        ]
        asked = self._asked(
            lambda now: self.machine.push(
                given, now, clock=clock, weight=weight, settings=settings, then_pull=then_pull
            )
        )
        return asked.token, asked.pull

    def pull(self, clock: int, anew: bool = False) -> int:
        """Ask for the values that a step from this clock on starts from."""
        return self._asked(lambda now: self.machine.pull(now, clock=clock, anew=anew)).token

    def fetch(self) -> int:
        """Ask for the whole state of all shards."""
        return self._asked(lambda now: self.machine.fetch(now)).token

    def load(self, states: Sequence[Bytes], version: int, clock: int) -> int:
        """Put a state on every shard."""
        given = [Part(shard, Payload(state.nbytes, state)) for shard, state in enumerate(states)]
        return self._asked(lambda now: self.machine.load(given, now, version=version, clock=clock)).token

    def meet(self, what: str, values: Sequence[float]) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
        """Wait until all live workers have come to this meeting; answers who, and what each brought."""
        token = self._asked(lambda now: self.machine.meet(what, tuple(values), now)).token
        ((_, met),) = self.wait(token, what)
        if not isinstance(met, Met):
            raise RunError(f"a meeting was answered with {met!r}")
        return met.ranks, met.values

    def wait(self, token: int, what: str) -> tuple[Any, ...]:
        """The answers to what was asked for under this token; in `what`, for the message if they do not come."""
        with self._changed:
            while token not in self._results:
                if self._broken is not None:
                    raise self._broken
                self._changed.wait(1.0)
                if not self._thread.is_alive() and token not in self._results and self._broken is None:
                    raise RunError("the thread that speaks to the servers has ended")
            found = self._results.pop(token)
        if isinstance(found, Exception):
            raise WaitError(f"worker {self.machine.worker} in {what}: {found}")
        return found

    def _asked(self, act: Callable[[float], Asked]) -> Asked:
        found: list[Asked] = []

        def ask(now: float) -> Sequence[Effect]:
            found.append(act(now))
            return found[0].effects

        self._ask(ask)
        return found[0]

    def _ask(self, act: Callable[[float], Sequence[Effect]]) -> None:
        """Let the client's thread do this, and return when it is done."""
        done = threading.Event()
        failure: list[BaseException] = []

        def acting(now: float) -> Sequence[Effect]:
            try:
                return act(now)
            except BaseException as error:
                failure.append(error)
                return ()
            finally:
                done.set()

        call: Any = _Call(acting)
        self._inbox.put(call)
        while not done.wait(1.0):
            if self._broken is not None:
                raise self._broken
        if failure:
            raise failure[0]

    # -- in the client's thread --------------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            machine: Any = _Commanded(self.machine)
            drive(machine, self._endpoint, self._told, until=lambda: self._over, inbox=self._inbox)
        except BaseException as error:
            self._break(RunError(f"the line to the servers broke: {error!r}"))

    def _told(self, notice: Any, _token: Any) -> None:
        match notice:
            case Arrived(_, shard, _, payload):
                if payload.handle is not None:
                    self.bytes_received += payload.nbytes
                    self.takes(shard, payload.handle)
            case Completed(token, replies):
                self._settle(token, replies)
            case Failed(token, waited_for):
                names = ", ".join(waited_for)
                self._settle(token, WaitError(f"no answer from {names} within {self.machine_patience:g} s"))
            case Refreshed(shard, fresh, payload):
                if payload.handle is not None:
                    self.fresh[shard] = (fresh, payload.handle)
            case Changed(view):
                self.view = view
            case Departed(epoch):
                self._break(
                    RunError(
                        f"worker {self.machine.worker} was silent for too long and was declared dead (epoch {epoch}); "
                        f"the others have gone on without it"
                    )
                )
            case Lost(shard):
                self._break(
                    RunError(f"server {shard} is gone, and with it the only copy of its part of the parameters")
                )
            case _:
                pass

    @property
    def machine_patience(self) -> float:
        """Seconds after which a request is given up."""
        return self.machine._timing.deadline  # pyright: ignore[reportPrivateUsage]

    def _settle(self, token: int, result: tuple[Any, ...] | Exception) -> None:
        with self._changed:
            self._results[token] = result
            self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def close(self) -> None:
        """Say goodbye, so that nobody waits for this worker, and close the line."""
        if self._thread.is_alive() and self._broken is None:
            self._ask(lambda _: self.machine.leave())
            deadline = time.monotonic() + 1.0
            while self._thread.is_alive() and not self.machine.left and time.monotonic() < deadline:
                time.sleep(0.005)
        self._over = True
        self._endpoint.wake()
        self._thread.join(timeout=5.0)
        self._endpoint.close()
