"""What all workers of a run with servers have seen so far, brought together for a line of the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import msgspec

from offbeat.protocols.servers.messages import PushReply, Status, server_name, worker_name
from offbeat.runtime.groups.group import Group

STATUSES: Final[tuple[str, ...]] = get_args(Status)
"""What can become of a push."""
OLDEST: Final = 500
"""What is more steps old than this is counted as this old: all of a worker's account goes to one meeting."""
MOST_REFUSALS: Final = 20
"""Refusals that the result tells of."""
LONGEST_REASON: Final = 150
"""Letters of each: all of a worker's go to one meeting."""
_HEAD: Final = 3 + len(STATUSES)
_LINK: Final = 4

Links = Mapping[tuple[int, int], tuple[int, int]]
"""Bytes that were sent to a server and got from it, by shard and replica."""


@dataclass
class WorkerStatistics:
    """What one worker has seen: plain numbers, so that it can be brought to a meeting as a row."""

    worker: int
    wait: float
    """Seconds that it has waited."""
    pushes: Mapping[str, int]
    """What became of its pushes, on all shards."""
    stale: Mapping[int, int]
    """How many steps old its reads were: how often each."""
    links: Links = field(default_factory=dict[tuple[int, int], tuple[int, int]])
    """Bytes that it has sent to a server and got from it, by shard and replica."""

    def row(self) -> list[float]:
        """The account as numbers."""
        counts = [float(self.pushes.get(status, 0)) for status in STATUSES]
        links = [float(number) for place, traffic in self.links.items() for number in (*place, *traffic)]
        ages: Counter[int] = Counter()
        for age, count in self.stale.items():
            ages[min(age, OLDEST)] += count
        histogram = [float(ages[age]) for age in range(max(ages, default=-1) + 1)]
        return [float(self.worker), self.wait, *counts, float(len(self.links)), *links, *histogram]

    @classmethod
    def of(cls, row: Sequence[float]) -> WorkerStatistics:
        """The account that a row is; zeros at its end mean nothing."""
        pushes = {status: int(row[2 + place]) for place, status in enumerate(STATUSES)}
        end = _HEAD + _LINK * int(row[_HEAD - 1])
        links = {
            (int(row[at]), int(row[at + 1])): (int(row[at + 2]), int(row[at + 3])) for at in range(_HEAD, end, _LINK)
        }
        return cls(int(row[0]), row[1], pushes, {age: int(count) for age, count in enumerate(row[end:])}, links)


class PushRecord:
    """What has become of one worker's pushes and reads so far."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}
        """Version of each shard that has all this worker has pushed."""
        self.unused: set[int] = set()
        """Shards on which pushes came to nothing: they were refused, or their step was complete without them."""
        self._pushes: Counter[str] = Counter()
        self._stale: Counter[int] = Counter()
        self._refused: list[str] = []

    def read(self, age: int) -> None:
        """Values so many steps old were read from a shard, or used again."""
        self._stale[max(0, age)] += 1

    def answered(self, shard: int, reply: PushReply, counts: bool) -> None:
        """A server has said what became of a push; it may say so twice, which counts once."""
        if counts:
            self._pushes[reply.status] += 1
            self.unused |= {shard} if reply.status in ("refused", "late") else set()
            self._refused += [reply.reason] if reply.status == "refused" else []
        self.written[shard] = max(reply.version, self.written.get(shard, 0))

    def figures(self) -> dict[str, Any]:
        """Pushes of this worker by what became of them, and how stale its reads were."""
        return {"pushes": dict(self._pushes), "staleness": {str(k): self._stale[k] for k in sorted(self._stale)}}

    def accounts(self, group: Group, waited: float, links: Links) -> dict[str, Any]:
        """Pushes and reads of all workers, and what each has waited, sent and got; all call this together."""
        mine = WorkerStatistics(group.rank, waited, self._pushes, self._stale, links)
        return together(map(WorkerStatistics.of, group.gather(mine.row(), "a report").tolist()))

    def staleness(self, group: Group) -> dict[str, int]:
        """Reads of all workers by how many steps old they were; all call this together."""
        most = int(group.gather([float(max(self._stale, default=0))], "the end of the run").max())
        rows = group.gather([float(self._stale[k]) for k in range(most + 1)], "the end of the run")
        return {str(k): int(count) for k, count in enumerate(rows.sum(0).tolist()) if count}

    def notes(self, group: Group) -> dict[str, Any]:
        """Why pushes of any worker were refused, if any were; all call this together."""
        reasons = refusals(group, self._refused)
        return {"refusals": reasons} if reasons else {}


def together(accounts: Iterable[WorkerStatistics]) -> dict[str, Any]:
    """All accounts as plain data: pushes and staleness of all workers, and what each has waited, sent and got."""
    found = list(accounts)
    pushes: Counter[str] = Counter()
    stale: Counter[int] = Counter()
    for account in found:
        pushes.update(account.pushes)
        stale.update(account.stale)
    return {
        "pushes": {status: count for status, count in pushes.items() if count},
        "staleness": {str(age): stale[age] for age in sorted(stale) if stale[age]},
        "waits": {worker_name(account.worker): round(account.wait, 6) for account in found},
        "links": {worker_name(account.worker): dict(_links(account)) for account in found},
    }


def refusals(group: Group, reasons: Sequence[str]) -> list[str]:
    """Why pushes of any worker were refused, the first ones; all workers call this together, each with its own."""
    mine = [f"{worker_name(group.rank)}: {reason}"[:LONGEST_REASON] for reason in reasons[:MOST_REFUSALS]]
    rows = group.gather(list(msgspec.json.encode(mine)), "the end of the run")
    # Rows are as long as the longest of them; no letter of JSON is 0.
    told = [msgspec.json.decode(bytes(int(n) for n in row if n), type=list[str]) for row in rows.tolist()]
    return [reason for of_worker in told for reason in of_worker][:MOST_REFUSALS]


def _links(account: WorkerStatistics) -> Iterator[tuple[str, dict[str, int]]]:
    for place, (sent, received) in account.links.items():
        yield server_name(*place), {"sent": sent, "received": received}
