"""One worker's link to the servers: its clock, its waits, and the record of its pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from offbeat.errors import StrategyError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import PullReply, PushReply, server_name, worker_name
from offbeat.protocols.servers.worker.notices import PullRequest
from offbeat.runtime.groups.coordinated_group import CoordinatedGroup
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.client import Client

OLDEST: Final = 500
"""Larger staleness is counted as this: a worker's statistics are exchanged in one message."""
MOST_REFUSALS: Final = 20
"""Refusals listed in the result."""
LONGEST_REASON: Final = 150
"""Characters of each reason: a worker's reasons are exchanged in one message."""

Links = Mapping[tuple[int, int], tuple[int, int]]
"""Bytes sent to a server and received from it, by shard and replica."""


class PushRecord:
    """Record of one worker's pushes and reads so far."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}
        """Version of each shard that contains all pushes of this worker."""
        self.unused: set[int] = set()
        """Shards that discarded pushes: they were refused, or their step was complete without them."""
        self._pushes: Counter[str] = Counter()
        self._stale: Counter[int] = Counter()
        self._refused: list[str] = []

    def read(self, age: int) -> None:
        """Values of this age, in steps, were read from a shard, or used again."""
        self._stale[max(0, age)] += 1

    def answered(self, shard: int, reply: PushReply, counts: bool) -> None:
        """A server has answered a push; of a repeated answer, `counts` is False."""
        if counts:
            self._pushes[reply.status] += 1
            self.unused |= {shard} if reply.status in ("refused", "late") else set()
            self._refused += [reply.reason] if reply.status == "refused" else []
        self.written[shard] = max(reply.version, self.written.get(shard, 0))

    def figures(self) -> dict[str, Any]:
        """Pushes of this worker by outcome, and its reads by staleness."""
        return {"pushes": dict(self._pushes), "staleness": {str(k): self._stale[k] for k in sorted(self._stale)}}

    def accounts(self, group: Group, waited: float, links: Links) -> dict[str, Any]:
        """Pushes and reads of all workers, and each one's waits and traffic. Collective."""
        stale: Counter[int] = Counter()
        for age, count in self._stale.items():
            stale[min(age, OLDEST)] += count
        named = {server_name(*place): {"sent": sent, "received": back} for place, (sent, back) in links.items()}
        waits, traffic = {worker_name(group.rank): round(waited, 6)}, {worker_name(group.rank): named}
        mine = {"pushes": self._pushes, "staleness": stale, "waits": waits, "links": traffic}
        return together(gathered(group, mine, "a report"))

    def staleness(self, group: Group) -> dict[str, int]:
        """Reads of all workers by staleness. Collective."""
        total: Counter[str] = Counter()
        for stale in gathered(group, self._stale, "the end of the run"):
            total.update(stale)
        return {age: total[age] for age in sorted(total, key=int)}

    def notes(self, group: Group) -> dict[str, Any]:
        """Why pushes of any worker were refused, if any were: the first reasons. Collective."""
        mine = [f"{worker_name(group.rank)}: {reason}"[:LONGEST_REASON] for reason in self._refused[:MOST_REFUSALS]]
        lists = gathered(group, mine, "the end of the run")
        reasons = [reason for of_worker in lists for reason in of_worker][:MOST_REFUSALS]
        return {"refusals": reasons} if reasons else {}


def gathered(group: Group, mine: object, what: str) -> list[Any]:
    """Plain data of every worker, such as this worker's: sent as JSON, in a row of numbers. Collective."""
    rows = group.gather(list(msgspec.json.encode(mine)), what)
    # Rows are padded with zeros to one length; no byte of JSON is 0.
    return [msgspec.json.decode(bytes(int(n) for n in row if n)) for row in rows.tolist()]


def together(accounts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The accounts of all workers as one: their pushes and staleness are added, and each one's waits and links kept."""
    total: dict[str, dict[str, Any]] = {"pushes": Counter(), "staleness": Counter(), "waits": {}, "links": {}}
    for account in accounts:
        for name, figures in account.items():
            total[name].update(figures)
    return total | {"staleness": {age: total["staleness"][age] for age in sorted(total["staleness"], key=int)}}


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
        """Number of shards of this worker's part of the model."""
        return len(self.client.view.shards_of(self.group.rank))

    @property
    def leads(self) -> bool:
        """Whether this worker does what only one does for this part of the model: the first live one that has it."""
        view, membership = self.client.view, self.group.membership
        own = view.shards_of(self.group.rank)
        same = [rank for rank in membership.members if view.shards_of(rank) == own]
        return not membership.outside and self.group.rank == min(same, default=self.group.rank)

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

    def reused(self, age: int) -> None:
        """Values of this age, in steps, are used again for the next step."""
        self.record.read(age)
        self.client.used_again(self.clock, max(0, age))
