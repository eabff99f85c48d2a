"""One worker's link to the servers: its clock, its waits, and the record of its pushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import PullReply, PushReply
from offbeat.protocols.servers.worker.notices import FetchRequest, PullRequest
from offbeat.runtime.groups.coordinated import CoordinatedGroup
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.client import Client
from offbeat.strategies.servers.metrics import PushRecord


def served(group: Group, strategy: object) -> CoordinatedGroup:
    """The group of a run that has servers; refused where there are none."""
    if not isinstance(group, CoordinatedGroup):
        raise StrategyError(
            f"{strategy} needs server processes beside the workers, which `offbeat run --strategy` and offbeat.fit "
            f"start. Here there are none. Name the strategy on the command line of `offbeat run`, or use allreduce."
        )
    return group


class ServerLink:
    """Waits for the servers' answers, and keeps this worker's clock and record by them."""

    def __init__(self, group: CoordinatedGroup, stopwatch: Stopwatch, rule: Rule) -> None:
        self.group, self.stopwatch, self.rule = group, stopwatch, rule
        self.client: Client = group.client
        self.clock = 0
        """Steps that this worker has finished."""
        self.within_step = False
        """Whether the coming batch is a microbatch of a step that goes on after it."""
        self.record = PushRecord()
        self._missed = 0

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.client.plan.shards

    def wait(self, token: int, what: str) -> Sequence[Any]:
        """Wait for answers, and record them: a push may have been refused, or its step was complete without it."""
        with self.stopwatch.spent_on("wait"):
            replies = self.client.wait(token, what)
        for shard, reply in replies:
            pushed = reply.pushed if isinstance(reply, PullReply) else reply
            if isinstance(reply, PullReply):
                self.record.read(self.clock - reply.clock)
            if not isinstance(pushed, PushReply):
                continue
            # The answer to a pull may repeat the answer to a push, which is counted once.
            self.record.answered(shard, pushed, counts=pushed is reply)
            # A step that was closed without this worker is given up when its last microbatch is done.
            if pushed.status == "late" and pushed.clock > self.clock and not self.within_step:
                self._missed += pushed.clock - self.clock
                self.clock = pushed.clock
        return replies

    def passed_over(self) -> int:
        """Steps that completed without this worker since the last call."""
        missed, self._missed = self._missed, 0
        return missed

    def arrive(self, pull: int) -> None:
        """Wait for requested values; if a shard has continued without this worker, for its newer ones."""
        self.wait(pull, "a pull")
        while self.rule.closes and any(clock < self.clock for _, clock in self.client.machine.known.values()):
            self.wait(self.client.ask(PullRequest(self.clock)).token, "a pull")

    def refresh(self) -> None:
        """Take the newest values, whatever the clock."""
        self.client.answer(PullRequest(self.clock, anew=True), "reading the parameters")

    def states(self) -> list[Tensor]:
        """The state of every shard."""
        states: dict[int, Tensor] = {}

        def keep(shard: int, _reply: Any, state: NDArray[np.uint8]) -> None:
            states[shard] = torch.from_numpy(state.copy())

        self.client.wait(self.client.ask(FetchRequest(), keep).token, "fetching the servers' state")
        return [states[shard] for shard in sorted(states)]

    def reused(self, age: int) -> None:
        """Values of this age, in steps, are used again for the next step."""
        self.record.read(age)
        self.client.used_again(self.clock, max(0, age))
