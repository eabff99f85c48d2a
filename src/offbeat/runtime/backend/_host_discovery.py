"""How the ranks of a new group find out which of them share a host, and open an arena there."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from offbeat.runtime.backend._call_ids import CollectiveError, ranks_in_words
from offbeat.runtime.collectives.one_sided.arena import Arena, Explains
from offbeat.runtime.collectives.one_sided.segment import Segment, SegmentError
from offbeat.runtime.collectives.one_sided.tickets import host_identity


@dataclass(frozen=True)
class RankHosts:
    """Which host each rank of a group is on."""

    of: tuple[int, ...]
    """The host of each rank; hosts are numbered in the order of their first ranks."""
    rank: int

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on this rank's host, itself included."""
        return tuple(rank for rank, host in enumerate(self.of) if host == self.of[self.rank])

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(self.of.index(host) for host in range(self.count))

    @property
    def count(self) -> int:
        return max(self.of) + 1


@contextmanager
def anew(store: Store, rank: int) -> Generator[Store]:
    """A part of the store that no earlier group of this name has used; an attempt that fails does not count.

    A world that is destroyed and initialized again has the same names in torch's store, which still holds the keys of
    the first.
    """
    mine = f"opened/{rank}"
    number = store.add(mine, 1)
    try:
        yield PrefixStore(f"{number}/", store)
    except BaseException:
        store.add(mine, -1)
        raise


def find_hosts(
    store: Store, rank: int, names: Sequence[int], timeout: timedelta, label: str, identity: str | None
) -> RankHosts:
    """Exchange host identities with all ranks; names the ranks that do not arrive in time."""
    keys = [f"host/{other}" for other in range(len(names))]
    store.set(keys[rank], identity or host_identity())
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [name for name, key in zip(names, keys, strict=True) if not store.check([key])]
        if not missing:
            raise
        raise CollectiveError(
            f"rank {names[rank]} cannot open group {label or 'default'}: Timed out after {timeout.total_seconds():g} s "
            f"of waiting for {ranks_in_words(missing)}; "
            f"{ranks_in_words([name for name in names if name not in missing])} had arrived. All ranks of a group must "
            f"open it, in the same order as other groups."
        ) from error
    numbers: dict[bytes, int] = {}
    hosts = store.multi_get(keys)
    return RankHosts(tuple(numbers.setdefault(bytes(host), len(numbers)) for host in hosts), rank)


def open_arena(
    store: Store, hosts: RankHosts, names: tuple[int, ...], timeout: timedelta, explain: Explains
) -> Arena | None:
    """The arena of this host; None on all ranks of the group where any host cannot share memory."""
    neighbours = hosts.neighbours
    leader, arena, segment = neighbours[0], None, None
    key, done = f"arena/{leader}", [f"met/{rank}" for rank in range(len(hosts.of))]
    try:
        if hosts.rank == leader:
            try:
                segment = Arena.create(len(neighbours))
                store.set(key, segment.ticket)
            except SegmentError as error:
                store.set(key, str(error))
                raise
        else:
            ticket = bytes(store.get(key)).decode(errors="replace")
            segment = Segment.attach(ticket, Arena.bytes_for(len(neighbours)))
        arena = Arena(segment, neighbours.index(hosts.rank), [names[rank] for rank in neighbours], explain)
        arena.timeout = timeout.total_seconds
        store.set(done[hosts.rank], "yes")
    except SegmentError as error:
        store.set(done[hosts.rank], str(error))
    answers = store.multi_get(done)
    if segment is not None:
        segment.seal()
    return arena if all(bytes(answer) == b"yes" for answer in answers) else None
