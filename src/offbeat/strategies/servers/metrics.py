"""Pushes, staleness, waits and traffic of the workers of a run with servers, for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import msgspec

from offbeat.protocols.servers.messages import PushReply, Status, server_name, worker_name
from offbeat.runtime.groups.group import Group

STATUSES: Final[tuple[str, ...]] = get_args(Status)
"""Outcomes of a push."""
OLDEST: Final = 500
"""Larger staleness is counted as this: a worker's statistics are exchanged in one message."""
MOST_REFUSALS: Final = 20
"""Refusals listed in the result."""
LONGEST_REASON: Final = 150
"""Characters of each reason: a worker's reasons are exchanged in one message."""
_HEAD: Final = 3 + len(STATUSES)
_LINK: Final = 4

Links = Mapping[tuple[int, int], tuple[int, int]]
"""Bytes sent to a server and received from it, by shard and replica."""


@dataclass
class WorkerStatistics:
    """Statistics of one worker, which can be exchanged as a row of numbers."""

    worker: int
    wait: float
    """Seconds spent waiting."""
    pushes: Mapping[str, int]
    """Its pushes by outcome, on all shards."""
    stale: Mapping[int, int]
    """Its reads by staleness."""
    links: Links = field(default_factory=dict[tuple[int, int], tuple[int, int]])

    def row(self) -> list[float]:
        """The statistics as numbers."""
        counts = [float(self.pushes.get(status, 0)) for status in STATUSES]
        links = [float(number) for place, traffic in self.links.items() for number in (*place, *traffic)]
        ages: Counter[int] = Counter()
        for age, count in self.stale.items():
            ages[min(age, OLDEST)] += count
        histogram = [float(ages[age]) for age in range(max(ages, default=-1) + 1)]
        return [float(self.worker), self.wait, *counts, float(len(self.links)), *links, *histogram]

    @classmethod
    def of(cls, row: Sequence[float]) -> WorkerStatistics:
        """The statistics of a row; zeros at its end mean nothing."""
        pushes = {status: int(row[2 + place]) for place, status in enumerate(STATUSES)}
        end = _HEAD + _LINK * int(row[_HEAD - 1])
        links = {
            (int(row[at]), int(row[at + 1])): (int(row[at + 2]), int(row[at + 3])) for at in range(_HEAD, end, _LINK)
        }
        return cls(int(row[0]), row[1], pushes, {age: int(count) for age, count in enumerate(row[end:])}, links)


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
        mine = WorkerStatistics(group.rank, waited, self._pushes, self._stale, links)
        return together(map(WorkerStatistics.of, group.gather(mine.row(), "a report").tolist()))

    def staleness(self, group: Group) -> dict[str, int]:
        """Reads of all workers by staleness. Collective."""
        most = int(group.gather([float(max(self._stale, default=0))], "the end of the run").max())
        rows = group.gather([float(self._stale[k]) for k in range(most + 1)], "the end of the run")
        return {str(k): int(count) for k, count in enumerate(rows.sum(0).tolist()) if count}

    def notes(self, group: Group) -> dict[str, Any]:
        """Why pushes of any worker were refused, if any were: the first reasons. Collective."""
        mine = [f"{worker_name(group.rank)}: {reason}"[:LONGEST_REASON] for reason in self._refused[:MOST_REFUSALS]]
        rows = group.gather(list(msgspec.json.encode(mine)), "the end of the run")
        # Rows are padded with zeros to one length; no byte of JSON is 0.
        lists = [msgspec.json.decode(bytes(int(n) for n in row if n), type=list[str]) for row in rows.tolist()]
        reasons = [reason for of_worker in lists for reason in of_worker][:MOST_REFUSALS]
        return {"refusals": reasons} if reasons else {}


def together(statistics: Iterable[WorkerStatistics]) -> dict[str, Any]:
    """The statistics of all workers as plain data: their pushes and staleness, and each one's waits and traffic."""
    workers = list(statistics)
    pushes: Counter[str] = Counter()
    stale: Counter[int] = Counter()
    for worker in workers:
        pushes.update(worker.pushes)
        stale.update(worker.stale)
    return {
        "pushes": {status: count for status, count in pushes.items() if count},
        "staleness": {str(age): stale[age] for age in sorted(stale) if stale[age]},
        "waits": {worker_name(worker.worker): round(worker.wait, 6) for worker in workers},
        "links": {
            worker_name(worker.worker): {
                server_name(*place): {"sent": sent, "received": received}
                for place, (sent, received) in worker.links.items()
            }
            for worker in workers
        },
    }
