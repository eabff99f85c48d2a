"""What an exchange of compressed rows takes: the schedules that carry them, with the bytes that are left."""

from __future__ import annotations

from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.compression import Way
from offbeat.protocols.schedule import Layout, View
from offbeat.simulate.network import Network
from offbeat.simulate.schedules import finish_times


def compressed_sum_time(nbytes: int, way: Way, workers: int, network: Network) -> float:
    """Seconds until all workers, each on a host of its own, have the sum of what each brings in `nbytes` bytes.

    Letters that cannot be summed on the way travel round a ring, from everybody to everybody; others are summed by the
    ring's all-reduce.
    """
    view = View.of(workers, range(workers))
    if way is Way.GATHER:
        schedule, count = algorithm(Collective.ALL_GATHER, "ring").schedule, nbytes * workers
    else:
        schedule, count = algorithm(Collective.ALL_REDUCE, "ring").schedule, nbytes
    layout = Layout(count, itemsize=1)
    return float(finish_times(schedule(view, layout), view, layout, network).max())
