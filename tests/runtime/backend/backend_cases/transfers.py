"""From one rank to another: tags, any source, batches, and messages beside collectives."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from backend_cases.running import World, contribution, same

SIZES = (0, 1, 1000, 16_385, 262_145, 1_500_001)


def neighbours(world: World) -> tuple[int, int]:
    """The rank before and the rank after this one, in a ring."""
    return (world.rank - 1) % world.size, (world.rank + 1) % world.size


def case_send_and_receive_of_every_size_and_dtype(world: World) -> None:
    """Rank 0 sends to all others, which answer with what they got."""
    for size in SIZES:
        for dtype in (torch.float32, torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.int64):
            original = contribution(0, (size,), dtype)
            found = torch.zeros_like(original)
            if world.rank == 0:
                for other in range(1, world.size):
                    dist.send(original, other)
                    assert dist.recv(found, other) == other
                    same(found, original, (size, dtype))
            else:
                assert dist.recv(found, 0) == 0
                dist.send(found, 0)


def case_large_messages_cross_without_deadlock(world: World) -> None:
    before, after = neighbours(world)
    found = torch.zeros(1_000_003)
    sending = dist.isend(contribution(world.rank, (1_000_003,)), after)
    receiving = dist.irecv(found, before)
    assert sending is not None
    assert receiving is not None
    receiving.wait()
    sending.wait()
    assert sending.is_completed()
    same(found, contribution(before, (1_000_003,)))


def case_tags_pick_messages_out_of_order(world: World) -> None:
    before, after = neighbours(world)
    sent = [dist.isend(contribution(world.rank, (100,), seed=tag), after, tag=tag) for tag in range(5)]
    for tag in (3, 0, 4, 1, 2):
        found = torch.zeros(100)
        dist.recv(found, before, tag=tag)
        same(found, contribution(before, (100,), seed=tag), tag)
    for work in sent:
        assert work is not None
        work.wait()


def case_messages_with_one_tag_keep_their_order(world: World) -> None:
    before, after = neighbours(world)
    sent = [dist.isend(torch.full((number % 7 + 1,), float(number)), after) for number in range(200)]
    for number in range(200):
        found = torch.zeros(number % 7 + 1)
        dist.recv(found, before)
        same(found, torch.full((number % 7 + 1,), float(number)), number)
    for work in sent:
        assert work is not None
        work.wait()


def case_receiving_from_anybody_tells_from_whom(world: World) -> None:
    if world.rank == 0:
        seen: list[int] = []
        for _ in range(2 * (world.size - 1)):
            found = torch.zeros(10)
            sender = dist.recv(found)
            same(found, torch.full((10,), float(sender)))
            seen.append(sender)
        assert sorted(seen) == sorted(2 * list(range(1, world.size)))
    else:
        for _ in range(2):
            dist.send(torch.full((10,), float(world.rank)), 0)


def case_receiving_from_anybody_with_a_tag_leaves_other_tags_alone(world: World) -> None:
    if world.rank == 0:
        for tag in (9, 8):
            for _ in range(world.size - 1):
                found = torch.zeros(1)
                dist.recv(found, tag=tag)
                assert float(found) == tag
    else:
        works = [dist.isend(torch.tensor([float(tag)]), 0, tag=tag) for tag in (8, 9)]
        for work in works:
            assert work is not None
            work.wait()


def case_batches_in_any_order(world: World) -> None:
    before, after = neighbours(world)
    for receive_first in (False, True):
        for size in (1, 400_000):
            found = [torch.zeros(size) for _ in range(2)]
            sends = [dist.P2POp(dist.isend, contribution(world.rank, (size,), seed=n), after) for n in range(2)]
            receives = [dist.P2POp(dist.irecv, found[n], before) for n in range(2)]
            for work in dist.batch_isend_irecv(receives + sends if receive_first else sends + receives):
                work.wait()
            for number in range(2):
                same(found[number], contribution(before, (size,), seed=number), (receive_first, size))


def case_a_message_may_overtake_a_collective(world: World) -> None:
    """Rank 0 starts an all-reduce and then sends; the others receive first and only then join the all-reduce."""
    for size in (10, 500_000):
        tensor = torch.ones(size)
        if world.rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            for other in range(1, world.size):
                dist.send(torch.tensor([7.0]), other)
            assert work is not None
            work.wait()
        else:
            found = torch.zeros(1)
            dist.recv(found, 0)
            assert float(found) == 7.0
            dist.all_reduce(tensor)
        same(tensor, torch.full((size,), float(world.size)))


def case_a_receive_started_early_does_not_hold_up_collectives(world: World) -> None:
    before, after = neighbours(world)
    found = torch.zeros(30_000)
    receiving = dist.irecv(found, before)
    tensor = torch.ones(200_000)
    dist.all_reduce(tensor)
    same(tensor, torch.full((200_000,), float(world.size)))
    dist.send(contribution(world.rank, (30_000,)), after)
    assert receiving is not None
    receiving.wait()
    same(found, contribution(before, (30_000,)))


def case_lists_of_objects(world: World) -> None:
    if world.rank == 0:
        for other in range(1, world.size):
            dist.send_object_list([{"to": other}, "x" * 5000], other)
    else:
        found: list[object] = [None, None]
        dist.recv_object_list(found, 0)
        assert found == [{"to": world.rank}, "x" * 5000]


def case_beyond_gloo_any_layout_is_sent_and_received(world: World) -> None:
    """Gloo refuses tensors that are not contiguous."""
    before, after = neighbours(world)
    for rows in (40, 40_000):
        found = torch.zeros(30, rows)
        receiving = dist.irecv(found.t()[:, 3:5], before)
        sending = dist.isend(contribution(world.rank, (rows, 30))[:, 3:5], after)
        assert receiving is not None
        assert sending is not None
        receiving.wait()
        sending.wait()
        same(found.t()[:, 3:5], contribution(before, (rows, 30))[:, 3:5])
        assert found.t()[:, :3].count_nonzero() == found.t()[:, 5:].count_nonzero() == 0


def case_beyond_gloo_a_message_of_another_size_is_an_error(world: World) -> None:
    before, after = neighbours(world)
    for sent, expected in ((3, 4), (5000, 4), (4, 5000), (300_000, 4), (4, 300_000)):
        sending = dist.isend(torch.ones(sent), after)
        with pytest.raises(RuntimeError, match=rf"the message that came has {4 * sent:,} bytes"):
            dist.recv(torch.zeros(expected), before)
        assert sending is not None
        sending.wait()


def case_two_ranks_may_send_before_either_receives(world: World) -> None:
    before, after = neighbours(world)
    found = torch.zeros(1_000_000)
    receiving = dist.irecv(found, before)
    dist.send(contribution(world.rank, (1_000_000,)), after)
    assert receiving is not None
    receiving.wait()
    same(found, contribution(before, (1_000_000,)))


def case_a_large_message_arrives_while_its_receiver_is_busy_elsewhere(world: World) -> None:
    """A send must not wait until the receiver waits for it: here it hears of that by another way only afterwards."""
    if world.rank == 0:
        found = torch.zeros(1_000_000)
        receiving = dist.irecv(found, 1)
        dist.barrier(group=dist.distributed_c10d._get_default_group())
        assert receiving is not None
        receiving.wait()
        same(found, torch.full((1_000_000,), 5.0))
    else:
        if world.rank == 1:
            dist.send(torch.full((1_000_000,), 5.0), 0)
        dist.barrier()


def case_many_messages_in_flight_arrive_in_order(world: World) -> None:
    before, after = neighbours(world)
    sizes = [1 + 997 * number % 9000 for number in range(150)] + [70_000 + number for number in range(80)]
    sent = [dist.isend(torch.full((size,), float(n)), after, tag=n % 3) for n, size in enumerate(sizes)]
    found = [torch.zeros(size) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda number: (number % 3 - 1, number))
    received = [dist.irecv(found[number], before, tag=number % 3) for number in order]
    for work in (*received, *sent):
        assert work is not None
        work.wait()
    for number, size in enumerate(sizes):
        same(found[number], torch.full((size,), float(number)))


def case_beyond_gloo_ranks_that_are_not_there_are_refused(world: World) -> None:
    """Gloo waits for a rank beyond the last one until its time is over."""
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match=f"no rank {world.size + 1} in a group of {world.size}"):
            call(torch.ones(1), world.size + 1)


def case_threads_send_beside_each_other(world: World) -> None:
    before, after = neighbours(world)
    bad: list[str] = []

    def exchange(tag: int) -> None:
        for number in range(20):
            sending = dist.isend(torch.full((500,), float(tag * 100 + number)), after, tag=tag)
            found = torch.zeros(500)
            dist.recv(found, before, tag=tag)
            assert sending is not None
            sending.wait()
            if not torch.equal(found, torch.full((500,), float(tag * 100 + number))):
                bad.append(f"tag {tag}, message {number}: {found[0]}")

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


def case_what_is_sent_may_be_changed_once_the_send_is_done(world: World) -> None:
    if world.rank == 0:
        for size in (10, 300_000):
            tensor = torch.ones(size)
            dist.send(tensor, 1)
            tensor.fill_(-1.0)
    elif world.rank == 1:
        for size in (10, 300_000):
            found = torch.zeros(size)
            dist.recv(found, 0)
            same(found, torch.ones(size))
