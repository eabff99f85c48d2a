"""Groups: made in any order, used side by side, ended and made again."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_cases.running import World, contribution, reduced, same
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp


def summed(world: World, group: ProcessGroup | None, ranks: list[int], size: int = 1000, seed: int = 0) -> None:
    """One all-reduce in a group, checked."""
    found = contribution(world.rank, (size,), seed=seed)
    dist.all_reduce(found, group=group)
    same(found, reduced(ReduceOp.SUM, [contribution(rank, (size,), seed=seed) for rank in ranks]), (ranks, size))


def member(group: object) -> ProcessGroup | None:
    """The group, or nothing if this rank is not in it."""
    return group if isinstance(group, ProcessGroup) else None


def case_every_pair_of_ranks(world: World) -> None:
    pairs = list(itertools.combinations(world.ranks, 2))
    groups = [(list(pair), member(dist.new_group(list(pair)))) for pair in pairs]
    for size in (3, 100_000):
        for ranks, group in groups:
            if group is not None:
                summed(world, group, ranks, size)
        summed(world, None, list(world.ranks), size)
    for _, group in groups:
        if group is not None:
            dist.destroy_process_group(group)


def case_ranks_of_a_group_are_numbered_within_it(world: World) -> None:
    ranks = list(reversed(world.ranks))[: max(2, world.size - 1)]
    group = member(dist.new_group(ranks))
    if group is None:
        return
    assert dist.get_process_group_ranks(group) == sorted(ranks)
    assert dist.get_group_rank(group, world.rank) == group.rank()
    assert dist.get_global_rank(group, group.rank()) == world.rank
    assert group.size() == len(ranks) == dist.get_world_size(group)
    found = torch.tensor([world.rank])
    dist.broadcast(found, max(ranks), group)
    assert int(found) == max(ranks)
    dist.destroy_process_group(group)


def case_one_rank_alone(world: World) -> None:
    groups = [member(dist.new_group([rank])) for rank in world.ranks]
    mine = groups[world.rank]
    assert mine is not None
    assert sum(group is not None for group in groups) == 1
    summed(world, mine, [world.rank])
    dist.barrier(mine)
    found = [torch.zeros(3)]
    dist.all_gather(found, torch.ones(3), mine)
    same(found[0], torch.ones(3))
    dist.destroy_process_group(mine)


def case_groups_made_by_their_members_alone(world: World) -> None:
    """The first half makes one group and then another; the second half makes only one."""
    half = max(1, world.size // 2)
    ranks = list(world.ranks)[:half] if world.rank < half else list(world.ranks)[half:]
    # Ended only when all are made: torch names such groups by their ranks and by how many there are.
    groups = [dist.new_group(ranks, use_local_synchronization=True) for _ in range(2 if world.rank < half else 1)]
    for seed, group in enumerate(groups):
        summed(world, group, ranks, seed=seed)
    summed(world, None, list(world.ranks))
    for group in groups:
        dist.destroy_process_group(group)


def case_groups_used_in_different_orders_by_different_ranks(world: World) -> None:
    """All start calls in four groups of everybody, each rank in an order of its own, and wait in yet another."""
    groups = [member(dist.new_group()) for _ in range(4)]
    orders = list(itertools.permutations(range(4)))
    for size in (10, 200_000):
        tensors = [contribution(world.rank, (size,), seed=number) for number in range(4)]
        started = {
            number: dist.all_reduce(tensors[number], group=groups[number], async_op=True)
            for number in orders[world.rank * 5 + 1]
        }
        for number in orders[world.rank * 3 + 2]:
            work = started[number]
            assert work is not None
            work.wait()
            parts = [contribution(rank, (size,), seed=number) for rank in world.ranks]
            same(tensors[number], reduced(ReduceOp.SUM, parts), (size, number))
    for group in groups:
        dist.destroy_process_group(group)


def case_threads_with_a_group_each(world: World) -> None:
    groups = [member(dist.new_group()) for _ in range(3)]
    bad: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for seed in range(15):
                summed(world, groups[number], list(world.ranks), (5, 20_000, 150_000)[(seed + number) % 3], seed)
        except BaseException as error:
            bad.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []
    for group in groups:
        dist.destroy_process_group(group)


def case_halves_of_the_world(world: World) -> None:
    if world.size % 2:
        return
    group, _ = dist.new_subgroups(2)
    first = world.rank // 2 * 2
    summed(world, group, [first, first + 1])
    dist.destroy_process_group(group)


def case_a_gloo_group_beside_ours(world: World) -> None:
    beside = member(dist.new_group(backend="gloo"))
    summed(world, beside, list(world.ranks))
    summed(world, None, list(world.ranks))
    dist.destroy_process_group(beside)


def case_messages_inside_groups(world: World) -> None:
    """The same tag between the same ranks in two groups: nothing crosses over."""
    groups = [member(dist.new_group([0, 1])) for _ in range(2)]
    first, second = groups
    if world.rank == 0:
        works = [dist.isend(torch.full((5,), float(n)), 1, group, tag=4) for n, group in enumerate(groups)]
        for work in works:
            assert work is not None
            work.wait()
    elif world.rank == 1:
        for number, group in ((1, second), (0, first)):
            found = torch.zeros(5)
            dist.recv(found, 0, group, tag=4)
            same(found, torch.full((5,), float(number)))
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)


def case_a_group_ended_with_others_going_on(world: World) -> None:
    for seed in range(5):
        group = member(dist.new_group())
        summed(world, group, list(world.ranks), seed=seed)
        dist.destroy_process_group(group)
        summed(world, None, list(world.ranks), seed=seed)


def case_what_was_started_ends_with_the_world_too(world: World) -> None:
    tensor = torch.ones(500_000)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    world.close()
    try:
        work.wait()
        same(tensor, torch.full((500_000,), float(world.size)))
    except RuntimeError:
        pass  # An error is as good an end; what must not be is waiting for ever.
    world.meet()
    world.open()


def case_the_world_ended_and_begun_again_leaves_nothing_open(world: World) -> None:
    def held() -> tuple[int, int, int]:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        tasks = len(list(Path("/proc/self/task").iterdir()))
        maps = sum("/dev/shm" in line or "memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return descriptors, tasks, maps

    counts: list[tuple[int, int, int]] = []
    for seed in range(5):
        summed(world, None, list(world.ranks), 200_000, seed)
        group = member(dist.new_group())
        summed(world, group, list(world.ranks), 200_000, seed)
        world.close()
        world.meet()
        counts.append(held())
        world.open()
    # What was open when it had begun twice may still be closing: only more than that has grown.
    most = [max(pair) for pair in zip(*counts[:3], strict=True)]
    grown = any(now > before for now, before in zip(counts[-1], most, strict=True))
    assert not grown, f"open descriptors, threads and shared maps grew: {counts}"


def case_a_world_found_through_the_environment(world: World) -> None:
    world.close()
    # Each start needs keys of its own in the launcher's store, as a restart by torchrun has.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    dist.init_process_group(world.backend, timeout=world.timeout)
    assert dist.get_backend() == world.backend
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    summed(world, None, list(world.ranks))
    world.close()
    world.open()


def case_beyond_gloo_a_world_begun_again_with_the_same_keys(world: World) -> None:
    """Under torchrun the store outlives a world, and torch gives the next one the same names."""
    world.close()
    store = dist.PrefixStore("again and again", world.store)
    for seed in range(3):
        dist.init_process_group(
            world.backend, store=store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        summed(world, None, list(world.ranks), seed=seed)
        summed(world, member(dist.new_group()), list(world.ranks), seed=seed)
        world.close()
    world.open()


def case_a_backend_named_for_a_device(world: World) -> None:
    world.close()
    world.backend, name = f"cpu:{world.backend}", world.backend
    try:
        world.open()
        summed(world, None, list(world.ranks))
        summed(world, member(dist.new_group()), list(world.ranks))
        world.close()
    finally:
        world.backend = name
    world.open()


def case_calls_of_a_group_by_all_names_of_their_arguments(world: World) -> None:
    group: Any = dist.group.WORLD
    mine, total = torch.tensor([float(world.rank)]), torch.tensor([float(sum(world.ranks))])
    everybody = [torch.tensor([float(rank)]) for rank in world.ranks]

    def empty() -> list[Tensor]:
        return [torch.empty(1) for _ in world.ranks]

    summed, told, reduced_here = mine.clone(), mine.clone(), mine.clone()
    group.allreduce(tensor=summed, op=ReduceOp.SUM).wait()
    same(summed, total)
    group.broadcast(tensor=told, root=1).wait()
    same(told, everybody[1])
    group.reduce(tensor=reduced_here, root=0, op=ReduceOp.SUM).wait()
    gathered = empty()
    group.allgather(output_tensors=gathered, input_tensor=mine).wait()
    same(torch.cat(gathered), torch.cat(everybody))
    at_root, here = empty(), torch.empty(1)
    group.gather(output_tensors=at_root if world.rank == 0 else [], input_tensor=mine, root=0).wait()
    if world.rank == 0:
        same(reduced_here, total)
        same(torch.cat(at_root), torch.cat(everybody))
    group.scatter(output_tensor=here, input_tensors=everybody if world.rank == 0 else [], root=0).wait()
    same(here, mine)
    group.reduce_scatter(output=here, input=everybody, op=ReduceOp.SUM).wait()
    same(here, mine * world.size)
    group._reduce_scatter_base(outputTensor=here, inputTensor=torch.cat(everybody)).wait()
    same(here, mine * world.size)
    swapped = torch.empty(world.size)
    group.alltoall_base(
        swapped, torch.full((world.size,), float(world.rank)), output_split_sizes=[], input_split_sizes=[]
    ).wait()
    same(swapped, torch.cat(everybody))
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = group.send([mine], dstRank=after, tag=0)
    group.recv([here], srcRank=before, tag=0).wait()
    sent.wait()
    same(here, everybody[before])


def case_futures_of_coalesced_gathers_have_a_list_for_each_rank(world: World) -> None:
    given = [torch.tensor([10 * world.rank]), torch.tensor([10 * world.rank + 1])]
    lists = [[torch.empty_like(tensor) for tensor in given] for _ in world.ranks]
    found: Any = dist.all_gather_coalesced(lists, given, async_op=True)
    assert [[int(tensor) for tensor in row] for row in found.wait()] == [[10 * r, 10 * r + 1] for r in world.ranks]


def case_wrong_calls_of_a_group_are_refused_in_the_words_that_programs_know(world: World) -> None:
    group: Any = dist.group.WORLD
    single, double, longer = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("invalid root rank", lambda: group.broadcast(single, root=world.size)),
        ("invalid root rank", lambda: group.reduce(single, root=-1)),
        ("invalid root rank", lambda: group.gather([], single, root=world.size)),
        ("invalid root rank", lambda: group.scatter(single, [], root=-1)),
        ("invalid tensor type", lambda: group.allreduce([single, double])),
        ("invalid tensor size", lambda: group.allreduce([single, longer])),
        ("must all have the same type", lambda: group.allreduce_coalesced([single, double])),
        ("single-element tensor list", lambda: group.reduce([single, single])),
        ("invalid output tensor list", lambda: group.allgather([[single] * (world.size + 1)], [single])),
        ("invalid tensor type", lambda: group.allgather([[double] * world.size], [single])),
        ("Incorrect output list size", lambda: group.gather([single] * (world.size + 1), single, root=world.rank)),
        ("Incorrect input list size", lambda: group.scatter(single, [single] * (world.size + 1), root=world.rank)),
        ("invalid tensor size", lambda: group.scatter(single, [longer] * world.size, root=world.rank)),
    ]
    for words, call in wrong:
        with pytest.raises(RuntimeError, match=words):
            call()
    summed(world, None, list(world.ranks))


def case_groups_made_in_debug_mode(world: World) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    summed(world, member(group), list(world.ranks))
    dist.barrier(group)
    dist.destroy_process_group(group)  # pyright: ignore[reportArgumentType]
