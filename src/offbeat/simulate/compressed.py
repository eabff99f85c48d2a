"""What an exchange of compressed rows takes: the schedules that carry them, with the bytes that are left."""

from __future__ import annotations

from offbeat.protocols.compression import SumMethod
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.schedule import View
from offbeat.simulate.network import Network
from offbeat.simulate.schedules import finish_times


def exchange_of(nbytes: int, way: SumMethod) -> Exchanged:
    """The sum of what each worker brings in `nbytes` bytes, between hosts: gathered by all, or summed on the way."""
    return Exchanged(what="all_gather" if way is SumMethod.GATHER else "all_reduce", by="ring", nbytes=nbytes)


def compressed_sum_time(nbytes: int, way: SumMethod, workers: int, network: Network) -> float:
    """Seconds until all workers, each on a host of its own, have the sum of what each brings in `nbytes` bytes.

    Letters that cannot be summed on the way travel round a ring, from everybody to everybody; others are summed by the
    ring's all-reduce.
    """
    view = View.of(workers, range(workers))
    schedule, layout = exchange_of(nbytes, way).part(workers)
    return float(finish_times(schedule(view, layout), view, layout, network).max())
