"""A worker's parameters on servers: does with tensors what the rhythm of `protocols.servers` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.protocols.servers.worker.notices import LoadRequest, PullRequest, whole_shards
from offbeat.protocols.servers.worker.rhythm import Action, Rhythm
from offbeat.runtime.events.servers import WARM_START
from offbeat.strategies.servers.compressed_push import Letters
from offbeat.strategies.servers.link import ServerLink
from offbeat.strategies.servers.parameter_row import ParameterRow
from offbeat.strategies.servers.push_queue import PushQueue, SettingsSource


class ServerDriver:
    """The row of parameters that servers hold, the pushes on their way to it, and the values that come from it."""

    def __init__(
        self,
        link: ServerLink,
        row: ParameterRow,
        rhythm: Rhythm,
        settings: SettingsSource,
        letters: Letters | None = None,
        landing: Tensor | None = None,
    ) -> None:
        self.link, self.row, self.rhythm = link, row, rhythm
        self.landing: Tensor = row.values if landing is None else landing
        """Where values that come from servers are put: into the parameters, unless something else is said."""
        self.queue = PushQueue(link, row, settings, letters)
        link.client.takes = self._take
        self._pull: int | None = None
        self._complete = 0
        self._sent_unasked: dict[int, tuple[int, int]] = {}

    def _take(self, shard: int, values: NDArray[np.uint8]) -> None:
        place = self.row.shard(self.landing, shard).numpy()
        np.copyto(place, values.view(place.dtype))

    # -- in a step ---------------------------------------------------------------------------------------------------

    def perform(
        self, actions: Iterable[Action], slot: Callable[[], int | None] = lambda: None, weight: float = 1.0
    ) -> None:
        """Do what the rhythm says, in order; `slot` has what is to be pushed ready when that is due."""
        link = self.link
        for action in actions:
            match action:
                case Action.PUSH | Action.PUSH_AND_PULL:
                    filled, pulls = slot(), action is Action.PUSH_AND_PULL
                    asked = link.client.ask(self.queue.request(filled, pulls, weight))
                    self._pull = asked.pull if pulls else self._pull
                    self.queue.sent(filled, asked.token)
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
        """Wait for values that were asked for, if any were."""
        token, self._pull = self._pull, None
        if token is not None:
            self.link.arrive(token)
            self._has_read()

    def _has_read(self) -> None:
        """Tell the rhythm how fresh the values are."""
        self._complete = min((clock for _, clock in self.link.client.machine.known.values()), default=0)
        self.rhythm.read(self._complete)

    def _take_fresh(self) -> bool:
        """Take what servers have sent unasked, if it is fresh enough for the next step and has this worker's pushes."""
        link = self.link
        shards = range(link.shards)
        newest = [link.client.newest(shard) for shard in shards]
        for shard, new in zip(shards, newest, strict=True):
            if new is not None:
                self._take(shard, new[1])
                self._sent_unasked[shard] = new[0].version, new[0].clock
        needed, written = link.rule.needed(link.clock), link.record.written
        known = [self._sent_unasked.get(shard, (-1, -1)) for shard in shards]
        if any(version < written.get(k, 0) or clock < needed for k, (version, clock) in enumerate(known)):
            return False
        for _, clock in known:
            link.reused(link.clock - clock)
        return True

    # -- between steps -----------------------------------------------------------------------------------------------

    def put(self, states: Sequence[NDArray[np.uint8]], version: int = 0, clock: int = 0) -> None:
        """The one who leads puts states on the servers; then all start from them."""
        link = self.link
        if link.group.membership.leads:
            link.load(LoadRequest(whole_shards(states), [version] * len(states), clock))
        link.group.barrier("the parameters being on the servers")
        self.refresh()

    def refresh(self) -> None:
        """Take the newest values; what is read at an evaluation need not be read again for the steps after it."""
        self.link.refresh()
        self._has_read()

    def together(self) -> None:
        """All have pushed what they have, and got what they asked for; then all read the same."""
        self.await_values()
        self.queue.settle_all()
        self.link.group.barrier("all pushes being answered")
        self.refresh()
        self.link.group.barrier("all having read the same")

    def states(self) -> list[Tensor]:
        """The state of all shards, for the one who leads."""
        self.await_values()
        self.queue.settle_all()
        self.link.group.barrier("all pushes being answered")
        states = self.link.states() if self.link.group.membership.leads else []
        self.link.group.barrier("the servers' state being fetched")
        return states
