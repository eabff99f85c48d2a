"""Connections between workers: the rendezvous store, the process groups, and waits in them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from offbeat.errors import RunError, UsageError, WaitError
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import CollectiveError, ConsequenceError, MismatchError, OffbeatGroup, open_group
from offbeat.runtime.groups.presence import Presence
from offbeat.runtime.run.rank_environment import Place

ROLL_CALL = timedelta(seconds=2)
"""How long a worker whose deadline has passed waits to learn which others are stuck at the same place."""


def meet(place: Place, timeout: timedelta) -> tuple[Any, int]:
    """The rendezvous store, and the number of this worker's team."""
    # The store may outlive a team: the next one in the same processes must not find this one's addresses.
    # env:// lets torch join a store that the launcher already serves; Slurm has no such server, so rank 0 opens one.
    address = "env://" if place.launcher == "torchrun" else f"tcp://{place.address}:{place.port}"
    store, rank, _ = next(iter(dist.rendezvous(address, place.rank, place.size, timeout=timeout)))
    store.set_timeout(timeout)
    return store, store.add(f"offbeat/teams/{rank}", 1)


def presence_store(store: Any, number: int) -> Any:
    """A separate connection to the store, so that a thread need not wait for another's answer."""
    return dist.PrefixStore(f"offbeat/team/{number}", store.clone())


class Connection:
    """The process groups of one worker, all with the same workers."""

    def __init__(self, place: Place, timeout: timedelta, device: torch.device) -> None:
        self._rank, self._size, self._timeout = place.rank, place.size, timeout
        self._backend = "offbeat" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        self._owns_default = False
        self._opened: list[Any] = []
        self._name = ""
        self.names: Sequence[int] = range(place.size)  # The worker behind each rank.
        self.lanes = 0  # Groups opened beside the first.
        if dist.is_initialized():
            self.store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self.number = self.store.add(f"offbeat/teams/{self._rank}", 1)
            self.first = self.another()
        else:
            self._open_default(place)
            self.first: Any = dist.group.WORLD

    def _open_default(self, place: Place) -> None:
        try:
            self.store, self.number = meet(place, self._timeout)
            meeting = dist.PrefixStore(f"offbeat/team/{self.number}", self.store)
            size, timeout = self._size, self._timeout
            dist.init_process_group(self._backend, store=meeting, rank=self._rank, world_size=size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise WaitError(
                f"worker {self._rank} could not meet the other {self._size - 1} at {place.address}:{place.port} within "
                f"{self._timeout.total_seconds():g} s: {error}. Check that all workers were started and reach that "
                f"address."
            ) from error
        self._owns_default = True

    def another(self) -> Any:
        """Another group of the same workers."""
        self.lanes += 1
        if self._backend == "offbeat":
            # Unknown to torch, so that a script may destroy torch's groups while the team goes on.
            meeting = dist.PrefixStore(f"offbeat/group/{self.number}/{self._name}{self.lanes}", self.store)
            label = f"team {self.number}.{self._name}{self.lanes}"
            opened: Any = open_group(meeting, self._rank, self._size, self._timeout, label=label)
        else:
            opened = dist.new_group(backend=self._backend, timeout=self._timeout)
        self._opened.append(opened)
        return opened

    def part(self, members: Sequence[int], name: str) -> Connection:
        """A connection between some of the workers, all of which call this; it is closed with this one."""
        if self._backend != "offbeat":
            raise UsageError(f"groups of some of the workers are for workers on CPUs, not over {self._backend}")
        part = copy.copy(self)
        part._rank, part._size, part._owns_default = members.index(self._rank), len(members), False
        part._name, part.names, part.lanes = f"{name}/", tuple(members), 0
        part.first = part.another()
        return part

    @property
    def is_part(self) -> bool:
        """Whether it connects some of the workers only."""
        return bool(self._name)

    def stock(self) -> Any:
        """A stock torch group of the same workers, on Gloo or NCCL."""
        backend = "gloo" if self._backend == "offbeat" else self._backend
        if self.is_part:
            opened: Any = dist.new_group(list(self.names), self._timeout, backend, use_local_synchronization=True)
        else:
            opened = dist.new_group(backend=backend, timeout=self._timeout)
        self._opened.append(opened)
        return opened

    @property
    def view(self) -> View:
        """The workers in schedules, and the host of each as far as it is known."""
        return View.of(self._size, self.first.hosts.of if isinstance(self.first, OffbeatGroup) else None)

    def own(self, group: Any) -> OffbeatGroup:
        """The group, if it is ours; torch's, whose algorithms cannot be chosen, is refused."""
        if not isinstance(group, OffbeatGroup):
            raise UsageError(f"algorithms can be chosen for workers on CPUs; here {self._backend} uses its own")
        return group

    def roll_call(self, lane: str, number: int, what: str, patience: timedelta = ROLL_CALL) -> dict[int, str]:
        """Which workers have come to this exchange of a lane, and to what; all that fail there call this."""
        store = dist.PrefixStore(f"offbeat/late/{self.number}/{self._name}{lane}/{number}", self.store)
        came: dict[int, str] = {}
        try:
            store.set(str(self._rank), what)
            deadline = time.monotonic() + patience.total_seconds()
            while len(came) < self._size and time.monotonic() < deadline:
                came |= {rank: store.get(str(rank)).decode() for rank in range(self._size) if store.check([str(rank)])}
                time.sleep(0.05)
        except RuntimeError:
            return dict.fromkeys(range(self._size), what)  # The store is gone with its host.
        return came

    def abort(self) -> None:
        """End waits in shared memory; those inside Gloo end with the process."""
        for opened in {self.first, *self._opened}:
            if isinstance(opened, OffbeatGroup):
                opened.abort()

    def close(self) -> None:
        """Leave the groups that were opened here, and by its parts."""
        if self.is_part:
            return
        for opened in self._opened:
            if isinstance(opened, OffbeatGroup):
                opened.shutdown()
            elif dist.is_initialized() and not self._owns_default:
                dist.destroy_process_group(opened)
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()
        self._opened.clear()
        self._owns_default = False
        self.first = None


class Waits:
    """The waits of one worker in one lane."""

    def __init__(self, rank: int, size: int, timeout: timedelta, connection: Connection | None) -> None:
        self._rank, self._size, self._timeout, self._connection = rank, size, timeout, connection
        self.name, self.count = "0", 0
        """The lane, and the exchanges begun in it."""
        lanes: list[Waits] = [self]
        self._lanes = lanes
        self.presence: Any = SimpleNamespace(waiting=None)
        """Where this worker reports its waits; nowhere if it is alone."""
        if connection is not None and not connection.is_part:
            store = presence_store(connection.store, connection.number)
            presence = Presence(store, rank, size, lambda: {lane.name: lane.count for lane in lanes})
            presence.break_off = lambda _error: connection.abort()
            self.presence = presence

    def lane(self, number: int) -> Waits:
        """The waits in another lane of the same worker."""
        lane = Waits(self._rank, self._size, self._timeout, None)
        lane.name, lane.presence, lane._connection = str(number), self.presence, self._connection
        self._lanes.append(lane)
        return lane

    def explained(self, error: RuntimeError, what: str, number: int, since: float) -> RunError:
        """An error that says which workers had not arrived, or that a connection broke."""
        # Gloo raises a RuntimeError for both. A failure before the timeout is not a timeout.
        verdict = getattr(self.presence, "verdict", None)
        if verdict is not None:
            return verdict
        if isinstance(error, ConsequenceError) and (cause := self.presence.cause()) is not None:
            return cause
        text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        seconds, connection = self._timeout.total_seconds(), self._connection
        names: Sequence[int] = range(self._size) if connection is None else connection.names
        place = f"worker {names[self._rank]} in {what} (exchange {number})"
        if time.monotonic() - since < 0.99 * seconds or connection is None:
            if not isinstance(error, CollectiveError):
                return WaitError(f"{place} lost its connection to another worker, which has most likely died: {text}")
            patience = ROLL_CALL if isinstance(error, MismatchError) else timedelta(0)
            came = {} if connection is None else connection.roll_call(self.name, number, what, patience)
            apart = ", ".join(
                f"worker {names[rank]} in {where}" for rank, where in sorted(came.items()) if where != what
            )
            if apart:
                return WaitError(
                    f"{place} met {apart}. Every worker must make the same calls in the same order: does one of them "
                    f"make a call, such as `team.report`, that the others do not?"
                )
            return WaitError(f"{place}: {text}")  # It names the dead ranks, or the others' calls.
        came = connection.roll_call(self.name, number, what)
        seen = {*came, *getattr(error, "arrived", ())}  # Who arrived last may give up long after this worker.
        missing = [str(names[rank]) for rank in range(self._size) if rank not in seen]
        who = f"worker{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "nobody in particular"
        return WaitError(
            f"{place} waited {seconds:g} s for {who}. Look at the log of whoever is missing, "
            f"or, if such a wait is normal for this program, allow more with --timeout."
        )


class ExchangeWait:
    """One exchange that this worker waits in: a context around a wait, or a handle of work in flight."""

    spare = 0
    work: Any = None  # The torch work, if it is waited for later.
    then: Callable[[], None] | None = None  # Called when that is done.

    def __init__(self, waits: Waits, what: str) -> None:
        waits.count += 1
        self._waits, self.lane, self.what, self.number = waits, waits.name, what, waits.count
        self._since = time.monotonic()

    def __enter__(self) -> None:
        self._waits.presence.waiting = self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if isinstance(error, RuntimeError):
                raise self._waits.explained(error, self.what, self.number, self._since) from error
        finally:
            self._waits.presence.waiting = None

    def wait(self) -> None:
        """Wait for the work, and explain its failure."""
        with self:
            self.work.wait()
        if self.then is not None:
            self.then()
            self.then = None
