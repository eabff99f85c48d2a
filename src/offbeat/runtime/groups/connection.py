"""How workers are connected: the store at which they meet, and the process groups between them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offbeat.errors import UsageError, WaitError
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import OffbeatGroup, open_group
from offbeat.runtime.run.rank_environment import Place

ROLL_CALL = timedelta(seconds=2)
"""How long a worker whose deadline has passed waits to hear which others are stuck at the same place."""


def meet(place: Place, timeout: timedelta) -> tuple[Any, int]:
    """The store at which the workers meet, and the number of the team that this worker is in.

    The store may outlive a team: the next one in the same processes must not find this one's addresses.
    """
    # env:// lets torch join a store that the launcher already serves; Slurm has no such server, so rank 0 opens one.
    address = "env://" if place.launcher == "torchrun" else f"tcp://{place.address}:{place.port}"
    store, rank, _ = next(iter(dist.rendezvous(address, place.rank, place.size, timeout=timeout)))
    store.set_timeout(timeout)
    return store, store.add(f"offbeat/teams/{rank}", 1)


def line_of_presence(store: Any, number: int) -> Any:
    """A line of its own to the store, on which a thread need not wait for another's answer."""
    return dist.PrefixStore(f"offbeat/team/{number}", store.clone())


class Connection:
    """What connects one worker with all others: several process groups of the same workers."""

    def __init__(self, place: Place, timeout: timedelta, device: torch.device) -> None:
        self._rank, self._size, self._timeout = place.rank, place.size, timeout
        self._backend = "offbeat" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        self._owns_default = False
        self._opened: list[Any] = []
        self.lanes = 0
        """How many groups were opened beside the first."""
        if dist.is_initialized():
            self.store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self.number = self.store.add(f"offbeat/teams/{self._rank}", 1)
            self.first = self.another()
        else:
            self._open_default(place)
            self.first: Any = dist.group.WORLD
            """The first group."""

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
        """The same workers once more."""
        self.lanes += 1
        if self._backend == "offbeat":
            # Unknown to torch, so that a script may destroy torch's groups while the team goes on.
            meeting = dist.PrefixStore(f"offbeat/group/{self.number}/{self.lanes}", self.store)
            label = f"team {self.number}.{self.lanes}"
            opened: Any = open_group(meeting, self._rank, self._size, self._timeout, label=label)
        else:
            opened = dist.new_group(backend=self._backend, timeout=self._timeout)
        self._opened.append(opened)
        return opened

    def stock(self) -> Any:
        """The same workers in a group as torch makes it by itself, on Gloo or NCCL."""
        backend = "gloo" if self._backend == "offbeat" else self._backend
        opened: Any = dist.new_group(backend=backend, timeout=self._timeout)
        self._opened.append(opened)
        return opened

    @property
    def view(self) -> View:
        """Who takes part in schedules, and on which host each lives, as far as it is known."""
        return View.of(self._size, self.first.hosts.of if isinstance(self.first, OffbeatGroup) else None)

    def own(self, group: Any) -> OffbeatGroup:
        """Our own process group; refuse torch's, whose algorithms cannot be chosen."""
        if not isinstance(group, OffbeatGroup):
            raise UsageError(f"algorithms can be chosen for workers on CPUs; here {self._backend} sums by its own ways")
        return group

    def roll_call(self, lane: str, number: int, what: str, patience: timedelta = ROLL_CALL) -> dict[int, str]:
        """Which workers have come to this exchange of a lane, and in what; those who fail there all call this."""
        store = dist.PrefixStore(f"offbeat/late/{self.number}/{lane}/{number}", self.store)
        came: dict[int, str] = {}
        try:
            store.set(str(self._rank), what)
            deadline = time.monotonic() + patience.total_seconds()
            while len(came) < self._size and time.monotonic() < deadline:
                came |= {rank: store.get(str(rank)).decode() for rank in range(self._size) if store.check([str(rank)])}
                time.sleep(0.05)
        except RuntimeError:
            return dict.fromkeys(range(self._size), what)  # The store went with its host: nobody is left to ask.
        return came

    def abort(self) -> None:
        """End waits in shared memory; those inside of Gloo end with the process."""
        for opened in {self.first, *self._opened}:
            if isinstance(opened, OffbeatGroup):
                opened.abort()

    def close(self) -> None:
        """Leave what was opened here."""
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
