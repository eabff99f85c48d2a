"""Drives a worker's parameters on servers: performs with tensors the actions of its rhythm (`protocols.servers`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.protocols.servers.worker.notices import LoadRequest, PullRequest, whole_shards
from offbeat.protocols.servers.worker.rhythm import Action, Rhythm
from offbeat.runtime.events.servers import WARM_START
from offbeat.strategies.servers.link import ServerLink
from offbeat.strategies.servers.parameter_row import ParameterRow
from offbeat.strategies.servers.push_queue import PushQueue


class ServerDriver:
    """The row of parameters that servers hold, the pushes to it, and the values pulled from it."""

    def __init__(self, link: ServerLink, row: ParameterRow, rhythm: Rhythm, queue: PushQueue, landing: Tensor) -> None:
        self.link, self.row, self.rhythm, self.queue = link, row, rhythm, queue
        self.landing = landing
        """Where pulled values are put: into the parameters, or a buffer beside them."""
        link.client.takes = self._take
        self._pull: int | None = None
        self._complete = 0
        self._eager: dict[int, tuple[int, int]] = {}

    def _take(self, shard: int, values: NDArray[np.uint8]) -> None:
        place = self.row.shard(self.landing, shard).numpy()
        np.copyto(place, values.view(place.dtype))

    # -- in a step ---------------------------------------------------------------------------------------------------

    def perform(
        self, actions: Iterable[Action], slot: Callable[[], int | None] = lambda: None, weight: float = 1.0
    ) -> None:
        """Perform the rhythm's actions in order; `slot` returns what is to be pushed when that is due."""
        link = self.link
        for action in actions:
            match action:
                case Action.PUSH | Action.PUSH_AND_PULL:
                    filled, pulls = slot(), action is Action.PUSH_AND_PULL
                    request = link.client.ask(self.queue.request(filled, pulls, weight))
                    self._pull = request.pull if pulls else self._pull
                    self.queue.sent(filled, request.token)
                case Action.PULL:
                    self._pull = link.client.ask(PullRequest(link.clock, anew=True)).token
                case Action.AWAIT:
                    self.await_values()
                case Action.SETTLE:
                    self.queue.settle_all()
                case Action.TAKE_FRESH:
                    if not self._take_fresh():
                        link.arrive(link.client.ask(PullRequest(link.clock, anew=True)).token)
                case Action.REUSE:
                    link.reused(link.clock - self._complete)
                case Action.MEET:
                    link.group.barrier(WARM_START)

    def await_values(self) -> None:
        """Wait for requested values, if any are in flight."""
        token, self._pull = self._pull, None
        if token is not None:
            self.link.arrive(token)
            self._has_read()

    def _has_read(self) -> None:
        self._complete = min((clock for _, clock in self.link.client.machine.known.values()), default=0)
        self.rhythm.read(self._complete)

    def _take_fresh(self) -> bool:
        """Take the values that servers sent eagerly, if they are fresh enough and contain this worker's pushes."""
        link = self.link
        shards = range(link.shards)
        newest = [link.client.newest(shard) for shard in shards]
        for shard, new in zip(shards, newest, strict=True):
            if new is not None:
                self._take(shard, new[1])
                self._eager[shard] = new[0].version, new[0].clock
        needed, written = link.rule.needed(link.clock), link.record.written
        known = [self._eager.get(shard, (-1, -1)) for shard in shards]
        if any(version < written.get(k, 0) or clock < needed for k, (version, clock) in enumerate(known)):
            return False
        for _, clock in known:
            link.reused(link.clock - clock)
        return True

    # -- between steps -----------------------------------------------------------------------------------------------

    def put(self, states: Sequence[NDArray[np.uint8]], version: int = 0, clock: int = 0) -> None:
        """The leader puts states on the servers; then all start from them. Collective."""
        self.load(LoadRequest(whole_shards(states), [version] * len(states), clock))
        self.refresh()

    def load(self, request: LoadRequest) -> None:
        """Put states on the servers, if this worker leads. Collective."""
        if self.link.group.membership.leads:
            self.link.client.answer(request, "putting the parameters on the servers")
        self.link.group.barrier("the parameters being on the servers")

    def refresh(self) -> None:
        """Pull the newest values; values read at an evaluation are not read again for the next steps."""
        self.link.refresh()
        self._has_read()

    def together(self) -> None:
        """Wait for all pushes and pulls of all workers; then all read the same values. Collective."""
        self._settle()
        self.refresh()
        self.link.group.barrier("all having read the same")

    def states(self) -> list[Tensor]:
        """The state of all shards, on the leader. Collective."""
        self._settle()
        states = self.link.states() if self.link.group.membership.leads else []
        self.link.group.barrier("the servers' state being fetched")
        return states

    def _settle(self) -> None:
        self.await_values()
        self.queue.settle_all()
        self.link.group.barrier("all pushes being answered")
