"""How the ranks of a new group find out who lives on which host, and meet in a room there."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from offbeat.runtime.backend._call_ids import CollectiveError, ranks_in_words
from offbeat.runtime.collectives.one_sided.arena import Explains, Room
from offbeat.runtime.collectives.one_sided.segment import Segment, SegmentError, host_identity


@dataclass(frozen=True)
class RankHosts:
    """Where the ranks of a group live."""

    of: tuple[int, ...]
    """The host of each rank: hosts are counted in the order of their first ranks."""
    rank: int
    """This rank."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on this rank's host, itself included."""
        return tuple(rank for rank, host in enumerate(self.of) if host == self.of[self.rank])

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return tuple(self.of.index(host) for host in range(self.count))

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return max(self.of) + 1


@contextmanager
def anew(store: Store, rank: int) -> Generator[Store]:
    """A part of the store that no earlier group of this name has used; an attempt that fails does not count.

    A world that is ended and begun again has the same names in torch's store, where those of the first are still told.
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
    """Ask everybody where it lives; waits until all have come, and says who has not."""
    keys = [f"host/{other}" for other in range(len(names))]
    store.set(keys[rank], identity or host_identity())
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        come = [store.check([key]) for key in keys]
        missing = [name for name, there in zip(names, come, strict=True) if not there]
        if not missing:
            raise
        raise CollectiveError(
            f"rank {names[rank]} cannot open group {label or 'default'}: Timed out after {timeout.total_seconds():g} s "
            f"of waiting for {ranks_in_words(missing)}; "
            f"{ranks_in_words([name for name in names if name not in missing])} had arrived. All ranks of a group must "
            f"open it, in the same order as other groups."
        ) from error
    numbers: dict[bytes, int] = {}
    told = store.multi_get(keys)
    return RankHosts(tuple(numbers.setdefault(bytes(name), len(numbers)) for name in told), rank)


def open_room(
    store: Store, hosts: RankHosts, names: tuple[int, ...], timeout: timedelta, explain: Explains
) -> Room | None:
    """Meet the others of this host; None where memory cannot be shared, which all ranks of the group agree on."""
    neighbours = hosts.neighbours
    leader, room, segment = neighbours[0], None, None
    key, done = f"room/{leader}", [f"met/{rank}" for rank in range(len(hosts.of))]
    try:
        if hosts.rank == leader:
            try:
                segment = Room.create(len(neighbours))
                store.set(key, segment.ticket)
            except SegmentError as error:
                store.set(key, str(error))
                raise
        else:
            ticket = bytes(store.get(key)).decode(errors="replace")
            segment = Segment.attach(ticket, Room.bytes_for(len(neighbours)))
        room = Room(segment, neighbours.index(hosts.rank), [names[rank] for rank in neighbours], explain)
        room.timeout = timeout.total_seconds
        store.set(done[hosts.rank], "yes")
    except SegmentError as error:
        store.set(done[hosts.rank], str(error))
    answers = store.multi_get(done)
    if segment is not None:
        segment.seal()
    return room if all(bytes(answer) == b"yes" for answer in answers) else None
