"""Bytes: what exchanges count as is what their schedules send, and between hosts what the kernel counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from host_entries import Wide
from host_runs import started
from torch import Tensor

import offbeat
from offbeat.errors import ScheduleError
from offbeat.protocols.checker import check, cost
from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.collectives.across_hosts import parts_across_hosts, rounds_of
from offbeat.protocols.exchanges import Exchanged, sent_by
from offbeat.protocols.gossip.mixing import tell
from offbeat.protocols.gossip.topology import GraphShape, mixing
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, View
from offbeat.runtime.collectives.two_sided import compile_schedule, run
from offbeat.runtime.hosts import Host, Hosts, placed
from offbeat.runtime.launch import Launcher
from offbeat.simulate import Network, finish_times, trace

COUNT = 120_000
BYTES = 4 * COUNT
HEADERS = 66
"""Bytes of a packet's headers as the kernel counts them: Ethernet 14, IP 20, TCP with its time stamps 32."""
NETWORK = Network.parse("100Mbit,50us")


# What exchanges count as.


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("what", "by", "expected"),
    [
        ("all_reduce", "naive", lambda p: (p - 1) * BYTES),
        ("all_reduce", "one_shot", lambda p: (p - 1) * BYTES),
        ("all_reduce", "ring", lambda p: 2 * BYTES * (p - 1) // p),
        ("all_reduce", "two_shot", lambda p: 2 * BYTES * (p - 1) // p),
        ("reduce_scatter", "one_shot", lambda p: BYTES * (p - 1) // p),
        ("all_gather", "ring", lambda p: BYTES * (p - 1)),
    ],
)
def test_an_exchange_counts_what_its_algorithm_sends(
    size: int, what: Any, by: str, expected: Callable[[int], int]
) -> None:
    exchanged = Exchanged(what=what, by=by, nbytes=BYTES, itemsize=4)
    for rank in range(size):
        assert sent_by(*exchanged.part(size), View.of(size), rank) == expected(size)


@pytest.mark.slow
def test_groups_count_by_the_algorithm_that_ran(networks: None, launcher: Launcher, tmp_path: Path) -> None:
    with placed(Hosts.alike(3)) as apart:
        said = started(launcher, apart, tmp_path, "count_bytes", count=COUNT, names=["naive", "ring", "star", "gloo"])
    counted = [one["counted"] for one in said]
    ring = 2 * BYTES * 2 // 3
    assert [one["sum"] for one in counted] == [one["gloo"] for one in counted] == [ring] * 3
    assert [one["naive"] for one in counted] == [2 * BYTES] * 3
    assert [one["ring"] for one in counted] == [ring] * 3
    assert [one["star"] for one in counted] == [2 * BYTES, BYTES, BYTES]
    assert [one["share"] for one in counted] == [0, 2 * BYTES, 0], "worker 1 tells worker 2, and then worker 0"
    assert [one["gather"] for one in counted] == [2 * BYTES] * 3
    for one in said:
        assert one["measuring"] == one["counted"]["measuring"] == ring
        assert one["sent"] == sum(value for name, value in one["counted"].items() if name != "measuring")


@pytest.mark.slow
def test_a_group_on_several_hosts_counts_by_the_hierarchy_that_it_runs(
    networks: None, launcher: Launcher, tmp_path: Path
) -> None:
    with placed(Hosts((Host("a", workers=2), Host("b")))) as made:
        said = started(launcher, made, tmp_path, "count_bytes", count=COUNT, names=[])
    schedule = algorithm(Collective.ALL_REDUCE, "hierarchical_shared").schedule
    view, layout = View.of(3, [0, 0, 1]), Layout(COUNT, 4)
    expected = cost(schedule(view, layout), view, layout).bytes_sent.tolist()
    assert [one["counted"]["sum"] for one in said] == expected
    assert expected == [BYTES // 2 + BYTES + BYTES, BYTES // 2 + BYTES // 2, BYTES]


# Runs between hosts, against the kernel.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        ("allreduce", Hosts.alike(2)),
        ("allreduce(ring)", Hosts.alike(3)),
        ("allreduce(naive)", Hosts.alike(3)),
        ("allreduce(shard=optimizer)", Hosts.alike(2)),
        ("allreduce(shard=parameters)", Hosts.alike(3)),
        ("ddp", Hosts.alike(3)),
        ("local(4)", Hosts.alike(2)),
        ("gossip", Hosts.alike(3)),
        ("gossip(asynchronous=True)", Hosts.alike(2)),
        ("server", Hosts((Host("a"), Host("b"), Host("c", workers=0, servers=1)))),
        ("allreduce + half", Hosts.alike(2)),
        ("allreduce + topk(0.05)", Hosts.alike(3)),
        ("allreduce + threshold(0.0001)", Hosts.alike(2)),
        ("allreduce + lowrank(2)", Hosts.alike(2)),
        ("gossip + quantize(8)", Hosts.alike(2)),
        ("server + quantize(4)", Hosts((Host("a"), Host("b"), Host("c", workers=0, servers=1)))),
    ],
)
def test_the_kernel_counts_what_a_run_says_it_sent_and_headers(
    strategy: str, hosts: Hosts, networks: None, launcher: Launcher, tmp_path: Path
) -> None:
    result = offbeat.fit(Wide(), strategy, hosts=hosts, steps=12, seed=1, out=tmp_path, launcher=launcher)
    on_links = sum(host["sent_bytes"] - HEADERS * host["sent_packets"] for host in result.hosts)
    assert on_links == pytest.approx(result.bytes_sent + result.bytes_measuring, rel=0.02)


# A wrong line of a protocol shows everywhere.


class Post:
    """Messages between threads, as a process group carries them for one rank."""

    def __init__(self, boxes: dict[tuple[int, int], Queue[Tensor]], rank: int) -> None:
        self._boxes, self._rank = boxes, rank

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Post:
        self._boxes[self._rank, peer].put(tensors[0].clone())
        return self

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Arrival:
        return Arrival(tensors[0], self._boxes[peer, self._rank])

    def wait(self) -> None:
        pass


class Arrival:
    """A message on its way."""

    def __init__(self, into: Tensor, box: Queue[Tensor]) -> None:
        self._into, self._box = into, box

    def wait(self) -> None:
        self._into.copy_(self._box.get(timeout=5))


def ran(schedule: Schedule, rows: list[Tensor]) -> list[Tensor]:
    """What each rank's row holds after a schedule was run over messages."""
    size = len(rows)
    boxes = {(source, target): Queue[Tensor]() for source in range(size) for target in range(size)}
    view, layout = View.of(size), Layout(rows[0].numel(), rows[0].itemsize)

    def act(rank: int) -> None:
        run(compile_schedule(schedule, view, layout, rank), rows[rank], Post(boxes, rank))

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return rows


def without_last(schedule: Schedule) -> Schedule:
    """The same without the last entry of its last hop, neither sent nor used."""

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        made = list(schedule(view, layout))
        last = max(number for number, each in enumerate(made) if each.op is Op.SEND)
        source, target = int(made[last].source[-1]), int(made[last].target[-1])
        for number, each in enumerate(made):
            kept = (each.source != source) | (each.target != target) | (number < last)
            columns = (each.source, each.target, each.start, each.stop, each.place)
            yield Round(each.op, *(column[kept] for column in columns), each.after)

    return rounds


def test_a_wrong_line_of_the_doubling_broadcast_is_found_by_all() -> None:
    right = algorithm(Collective.BROADCAST, "doubling").schedule
    wrong, view, layout = without_last(right), View.of(5), Layout(40)
    check((right, Collective.BROADCAST), view, layout)
    with pytest.raises(ScheduleError):
        check((wrong, Collective.BROADCAST), view, layout)
    assert cost(wrong(view, layout), view, layout).bytes_sent.sum() < 4 * 4 * 40
    assert not np.array_equal(
        finish_times(wrong(view, layout), view, layout, NETWORK),
        finish_times(right(view, layout), view, layout, NETWORK),
    )

    def rows() -> list[Tensor]:
        return [torch.full((40,), float(rank)) for rank in range(5)]

    assert all(float(row.abs().max()) == 0 for row in ran(right, rows()))
    assert any(float(row.abs().max()) > 0 for row in ran(wrong, rows()))


def test_a_wrong_line_of_messages_to_neighbours_is_found_by_all() -> None:
    (matrix,) = mixing(GraphShape.RING, 5).matrices
    lengths = np.full(5, 8)
    right = tell(matrix, lengths)
    wrong, view, layout = without_last(right), View.of(5), Layout(24, 1)
    assert cost(right(view, layout), view, layout).bytes_sent.tolist() == [16] * 5
    assert cost(wrong(view, layout), view, layout).bytes_sent.sum() == 72
    played = [trace(each(view, layout), view, layout, NETWORK) for each in (right, wrong)]
    assert np.isfinite(played[0].end).sum() > np.isfinite(played[1].end).sum(), "somebody has nothing to do in a round"

    def heard(schedule: Schedule) -> list[list[int]]:
        rows = [torch.full((24,), rank + 10, dtype=torch.uint8) for rank in range(5)]
        return [row[8::8].tolist() for row in ran(schedule, rows)]

    assert heard(right) == [[11, 14], [10, 12], [11, 13], [12, 14], [10, 13]]
    assert heard(wrong) != heard(right)


def test_an_all_reduce_over_hosts_without_its_last_part_is_refused_and_costs_less() -> None:
    view, layout = View.of(4, [0, 0, 1, 1]), Layout(40)

    def wrong(view: View, layout: Layout) -> Iterator[Round]:
        yield from rounds_of(parts_across_hosts(view, layout)[:-1], layout)

    right = algorithm(Collective.ALL_REDUCE, "hierarchical_shared").schedule
    check((right, Collective.ALL_REDUCE), view, layout)
    with pytest.raises(ScheduleError, match="rank 1 ends with"):
        check((wrong, Collective.ALL_REDUCE), view, layout)
    spent = [finish_times(each(view, layout), view, layout, NETWORK).max() for each in (wrong, right)]
    assert spent[0] < spent[1]
    assert cost(wrong(view, layout), view, layout).bytes_sent.sum() < (
        cost(right(view, layout), view, layout).bytes_sent.sum()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "right"), [("sum_much", [True] * 3), ("sum_without_handing_back", [True, False, True])]
)
def test_processes_on_several_hosts_do_what_the_parts_say(
    entry: str, right: list[bool], networks: None, launcher: Launcher, tmp_path: Path
) -> None:
    with placed(Hosts((Host("a", workers=2), Host("b")))) as made:
        said = started(launcher, made, tmp_path, entry, count=3_000_000)
    assert [one["right"] for one in said] == right
