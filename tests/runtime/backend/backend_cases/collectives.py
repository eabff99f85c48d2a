"""Collectives: right values for every operation, dtype, size and layout, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_cases.running import World, contribution, reduced, same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
SIZES = (0, 1, 3, 511, 512, 513, 1023, 16_384, 32_767, 32_769, 262_144, 262_145, 1_500_001)
"""In elements of 4 bytes: none, one, odd ones, and around 2 KB, 64 KB, 128 KB, 1 MiB and several MiB."""


def all_reduced(world: World, operation: ReduceOp.RedOpType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [contribution(rank, shape, dtype) for rank in world.ranks]
    found = parts[world.rank].clone()
    dist.all_reduce(found, operation)
    same(found, reduced(operation, parts), (operation, shape, dtype))
    world.shared(found)


def case_all_reduce_of_every_operation_and_dtype(world: World) -> None:
    for shape in ((7,), (40_001,)):
        for dtype in (*FLOATS, *INTEGERS):
            for operation in ARITHMETIC:
                all_reduced(world, operation, shape, dtype)
        for dtype in FLOATS:
            all_reduced(world, ReduceOp.AVG, shape, dtype)
        for dtype in COMPLEX:
            all_reduced(world, ReduceOp.SUM, shape, dtype)
        for dtype in INTEGERS:
            for operation in BITWISE:
                all_reduced(world, operation, shape, dtype)


def case_beyond_gloo_all_reduce_of_short_integers(world: World) -> None:
    for operation in (*ARITHMETIC, *BITWISE):
        all_reduced(world, operation, (1001,), torch.int16)


def case_all_reduce_of_flags(world: World) -> None:
    for operation in (*BITWISE, ReduceOp.MIN, ReduceOp.MAX):
        parts = [contribution(rank, (1001,), torch.bool) for rank in world.ranks]
        found = parts[world.rank].clone()
        dist.all_reduce(found, operation)
        expected = reduced(operation, [part.to(torch.uint8) for part in parts]).to(torch.bool)
        same(found, expected, operation)
        world.shared(found)


def case_all_reduce_of_every_size(world: World) -> None:
    for size in SIZES:
        all_reduced(world, ReduceOp.SUM, (size,), torch.float32)
    all_reduced(world, ReduceOp.MAX, (1_300_003,), torch.int8)
    all_reduced(world, ReduceOp.SUM, (300_001,), torch.bfloat16)


def case_all_reduce_again_and_again_at_the_same_place(world: World) -> None:
    """Tensors that stay where they are, of sizes that take different slots, in an order that changes; then others."""
    for kind in (torch.float32, torch.int64):
        held = [torch.empty(count, dtype=kind) for count in (1000, 4097, 40_001, 300_007, 700_001)]
        for turn in range(14):
            for tensor in held[turn % 3 :: 1 + turn % 2]:
                operation = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.SUM)[turn % 3]
                parts = [contribution(rank + turn, tensor.shape, kind) for rank in world.ranks]
                tensor.copy_(parts[world.rank])
                dist.all_reduce(tensor, operation)
                same(tensor, reduced(operation, parts), (operation, turn, tensor.shape))
                world.shared(tensor)


def case_all_reduce_again_and_again_at_other_places(world: World) -> None:
    """Tensors of the same sizes, each somewhere else, which ranks hold at places of their own."""
    for count in (3, 500, 4097, 300_007):
        held = [torch.zeros(count + world.rank)[world.rank :] for _ in range(12)]
        for turn, tensor in enumerate(held):
            for operation in (ReduceOp.SUM, ReduceOp.MAX):
                parts = [contribution(rank + turn, tensor.shape, torch.float32) for rank in world.ranks]
                tensor.copy_(parts[world.rank])
                before = held[turn - 1].clone()
                dist.all_reduce(tensor, operation)
                same(tensor, reduced(operation, parts), (operation, turn, count))
                assert torch.equal(held[turn - 1], before)  # What lies elsewhere is left alone.
                world.shared(tensor)


def case_beyond_gloo_all_reduce_of_tensors_in_shared_memory(world: World) -> None:
    """The whole and parts of it, mixed with tensors of one's own."""
    group: Any = dist.new_group(backend="offbeat")
    own = torch.empty(50_001)
    for count in (1000, 50_001, 400_003):
        whole: Tensor = group.shared_tensor(count)
        assert not whole.any()
        for turn in range(3):
            for tensor in (whole, whole[count // 3 :], own):
                for operation in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN):
                    parts = [contribution(rank + turn, tensor.shape, torch.float32) for rank in world.ranks]
                    tensor.copy_(parts[world.rank])
                    dist.all_reduce(tensor, operation, group=group)
                    same(tensor, reduced(operation, parts), (operation, turn, tensor.shape))
                    world.shared(tensor)
                    dist.barrier(group=group)
    dist.destroy_process_group(group)


def case_beyond_gloo_all_reduce_of_every_layout(world: World) -> None:
    """What is not in one piece is reduced in place, and what lies between its elements is left alone."""
    views = {
        "transposed": lambda base: base.t(),
        "every other column": lambda base: base[:, ::2],
        "a slice with an offset": lambda base: base[3:, 5:],
        "a row": lambda base: base[2],
        "one element": lambda base: base[4, 4],
        "no elements": lambda base: base[:0],
    }
    for name, view in views.items():
        bases = [contribution(rank, (50, 40)) for rank in world.ranks]
        mine = bases[world.rank].clone()
        dist.all_reduce(view(mine))
        expected = bases[world.rank].clone()
        view(expected).copy_(reduced(ReduceOp.SUM, [view(base) for base in bases]))
        same(mine, expected, name)


def case_all_reduce_of_an_image_with_channels_last(world: World) -> None:
    parts = [contribution(rank, (2, 3, 5, 7)).to(memory_format=torch.channels_last) for rank in world.ranks]
    found = parts[world.rank].clone(memory_format=torch.preserve_format)
    dist.all_reduce(found)
    same(found, reduced(ReduceOp.SUM, parts))
    assert found.is_contiguous(memory_format=torch.channels_last)


def case_all_reduce_of_a_parameter_keeps_it_a_leaf(world: World) -> None:
    parameter = torch.nn.Parameter(contribution(world.rank, (30,)))
    with torch.no_grad():
        dist.all_reduce(parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    same(parameter.detach(), reduced(ReduceOp.SUM, [contribution(rank, (30,)) for rank in world.ranks]))


def case_all_reduce_of_sparse_tensors(world: World) -> None:
    def sparse(rank: int) -> Tensor:
        return torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (world.size + 2,)).coalesce()

    found = sparse(world.rank)
    dist.all_reduce(found)
    same(found.to_dense(), sum(sparse(rank).to_dense() for rank in world.ranks))


def case_beyond_gloo_all_reduce_of_a_transposed_matrix_with_the_others_not(world: World) -> None:
    """What is reduced is the elements as they are indexed, whatever their order in each rank's memory."""
    parts = [contribution(rank, (30, 20)) for rank in world.ranks]
    found = parts[world.rank].clone() if world.rank else parts[0].t().contiguous().t()
    dist.all_reduce(found)
    same(found, reduced(ReduceOp.SUM, parts))


def case_bits_of_floats_are_refused(world: World) -> None:
    for operation in BITWISE:
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_reduce(torch.ones(3), operation)
    all_reduced(world, ReduceOp.SUM, (3,), torch.float32)


def case_beyond_gloo_what_cannot_be_combined_is_refused_and_the_group_goes_on(world: World) -> None:
    for size in (4, 300_000):
        for dtype, operation in ((torch.float8_e4m3fn, ReduceOp.SUM), (torch.bool, ReduceOp.AVG)):
            with pytest.raises(RuntimeError, match=rf"ReduceOp.{operation.name} cannot be done.*{dtype}"):
                dist.all_reduce(torch.ones(size).to(dtype), operation)
            with pytest.raises(RuntimeError, match=rf"ReduceOp.{operation.name} cannot be done.*{dtype}"):
                dist.reduce_scatter_tensor(
                    torch.ones(size).to(dtype), torch.ones(size * world.size).to(dtype), operation
                )
        with pytest.raises(RuntimeError, match="PREMUL_SUM"):
            dist.all_reduce(torch.ones(size), dist._make_nccl_premul_sum(2.0))
        all_reduced(world, ReduceOp.SUM, (size,), torch.float32)
    all_reduced(world, ReduceOp.SUM, (3,), torch.uint8)
    for dtype in (torch.uint16, torch.uint32):
        found = torch.tensor([2 + 2 * world.rank], dtype=dtype)
        dist.all_reduce(found, ReduceOp.AVG)
        assert found.item() == world.size + 1


def case_tensors_without_numbers_of_their_own(world: World) -> None:
    """Results that are waited for when they are used, fake tensors, tensors that are nowhere: as Gloo takes them."""
    under_way = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    dist.all_reduce(under_way)
    same(under_way * 1, torch.full((4,), float(world.size**2)))
    with FakeTensorMode():
        fake = torch.ones(4)
        dist.all_reduce(fake)
        dist.broadcast(fake, 0)
    nowhere = torch.ones(4, device="meta")
    dist.all_reduce(nowhere)
    dist.broadcast(nowhere, 0)
    all_reduced(world, ReduceOp.SUM, (4,), torch.float32)


def case_quantized_tensors_are_refused(world: World) -> None:
    """Their numbers mean nothing without their scale, which is not sent."""
    tensor = torch.quantize_per_tensor(torch.ones(4), 0.1 * (world.rank + 1), 0, torch.quint8)
    with pytest.raises(NotImplementedError):
        dist.broadcast(tensor, 0)
    with pytest.raises(NotImplementedError):
        dist.all_reduce(tensor)


def case_beyond_gloo_expanded_tensors_may_be_sent_but_not_written(world: World) -> None:
    expanded = torch.full((1,), float(world.rank + 1)).expand(300)
    with pytest.raises(RuntimeError, match="several of its elements share one place"):
        dist.all_reduce(expanded)
    tensor = expanded if world.rank == 0 else torch.empty(300)
    dist.broadcast(tensor, 0)
    same(tensor, torch.ones(300))
    tensor = expanded if world.rank else torch.ones(300)
    dist.reduce(tensor, 0)
    if world.rank == 0:
        same(tensor, torch.full((300,), world.size * (world.size + 1) / 2))


def case_beyond_gloo_views_that_count_as_negated(world: World) -> None:
    for size in (4, 300_000):
        memory = torch.ones(size)
        for _ in range(8):  # It is known now, and from every slot, as what it is.
            dist.all_reduce(memory)
        memory.fill_(1.0)
        tensor = torch.full((size,), -1.0) if world.rank else torch._neg_view(memory)
        dist.all_reduce(tensor)
        same(tensor.resolve_neg(), torch.full((size,), -float(world.size)))
        dist.broadcast(tensor, 0)
        same(tensor.resolve_neg(), torch.full((size,), -float(world.size)))


def case_beyond_gloo_views_that_count_as_conjugated(world: World) -> None:
    group: Any = dist.group.WORLD
    for size in (4, 300_000):
        memory = torch.full((size,), 1j)
        for _ in range(8):
            group.allreduce([memory]).wait()
        memory.fill_(1j)
        tensor = torch.full((size,), -1j) if world.rank else memory.conj()
        group.allreduce([tensor]).wait()
        same(tensor.resolve_conj(), torch.full((size,), -1j * world.size))


def case_memory_that_was_communicated_can_be_given_back(world: World) -> None:
    """As sharding libraries do with what they have gathered."""
    whole, part = torch.zeros(40 * world.size), torch.ones(40)
    dist.all_gather_into_tensor(whole, part)
    dist.broadcast(part, 0)
    dist.reduce_scatter_tensor(part, whole)
    dist.all_reduce(part)
    for tensor in (whole, part):
        tensor.untyped_storage().resize_(0)


def case_nothing_is_warned_of(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for operation in (*ARITHMETIC, ReduceOp.AVG):
            dist.all_reduce(torch.ones(3), operation)
            dist.all_reduce(torch.ones(3, dtype=torch.bfloat16), operation)


def case_the_same_sum_has_the_same_bits_each_time(world: World) -> None:
    for size in (100, 20_000, 400_000):
        found = [contribution(world.rank, (size,)) for _ in range(3)]
        for tensor in found:
            dist.all_reduce(tensor)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        world.shared(found[0])


def case_several_at_once_may_be_waited_for_in_any_order(world: World) -> None:
    sizes = [1, 300_000, 5, 70_000, 16, 17_000] * 3
    parts = [[contribution(rank, (size,), seed=seed) for rank in world.ranks] for seed, size in enumerate(sizes)]
    mine = [each[world.rank].clone() for each in parts]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in mine]
    for number in reversed(range(len(sizes))):
        works[number].wait()
        assert works[number].is_completed()
        same(mine[number], reduced(ReduceOp.SUM, parts[number]), number)


def case_calls_are_counted(world: World) -> None:
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3))
    assert group._get_sequence_number_for_group() > before


def case_broadcast_from_every_rank(world: World) -> None:
    for root in world.ranks:
        for size in (0, 1, 1000, 400_001):
            for dtype in (torch.float32, torch.bool, torch.int64, torch.complex64):
                found = contribution(world.rank, (size,), dtype)
                dist.broadcast(found, root)
                same(found, contribution(root, (size,), dtype), (root, size, dtype))
                world.shared(found)


def case_beyond_gloo_broadcast_into_what_is_not_in_one_piece(world: World) -> None:
    base = contribution(world.rank, (20, 30))
    dist.broadcast(base[:, 1::3], 1)
    expected = contribution(world.rank, (20, 30))
    expected[:, 1::3] = contribution(1, (20, 30))[:, 1::3]
    same(base, expected)


def case_reduce_to_every_rank(world: World) -> None:
    for root in world.ranks:
        for size in (1, 1000, 300_001):
            parts = [contribution(rank, (size,)) for rank in world.ranks]
            found = parts[world.rank].clone()
            dist.reduce(found, root, ReduceOp.MAX)
            if world.rank == root:
                same(found, reduced(ReduceOp.MAX, parts), (root, size))


def case_all_gather(world: World) -> None:
    for shape in ((), (0,), (3,), (50, 40), (300_001,)):
        for dtype in (torch.float32, torch.uint8, torch.bool, torch.bfloat16, torch.complex64):
            found = [torch.zeros(shape, dtype=dtype) for _ in world.ranks]
            dist.all_gather(found, contribution(world.rank, shape, dtype))
            for rank in world.ranks:
                same(found[rank], contribution(rank, shape, dtype), (shape, dtype, rank))
            world.shared(*found)


def case_all_gather_from_and_into_views(world: World) -> None:
    shelf = torch.zeros(world.size, 6, 4)
    dist.all_gather([shelf[rank].t() for rank in world.ranks], contribution(world.rank, (6, 4)).t())
    for rank in world.ranks:
        same(shelf[rank], contribution(rank, (6, 4)), rank)


def case_all_gather_into_one_tensor(world: World) -> None:
    for size in (1, 4, 20_000, 200_001):
        parts = [contribution(rank, (size, 2)) for rank in world.ranks]
        joined = torch.zeros(world.size * size, 2)
        dist.all_gather_into_tensor(joined, parts[world.rank])
        same(joined, torch.cat(parts), size)
        work = dist.all_gather_into_tensor(joined.zero_(), parts[world.rank], async_op=True)
        work.wait()
        same(joined, torch.cat(parts), size)
        world.shared(joined)


def case_beyond_gloo_all_gather_into_a_stack(world: World) -> None:
    parts = [contribution(rank, (3, 2)) for rank in world.ranks]
    stacked = torch.zeros(world.size, 3, 2)
    dist.all_gather_into_tensor(stacked, parts[world.rank])
    same(stacked, torch.stack(parts))


def case_gather_to_every_rank(world: World) -> None:
    for root in world.ranks:
        for size in (1, 100_001):
            found = [torch.zeros(size) for _ in world.ranks] if world.rank == root else None
            dist.gather(contribution(world.rank, (size,)), found, root)
            for rank, part in enumerate(found or []):
                same(part, contribution(rank, (size,)), (root, rank))


def case_scatter_from_every_rank(world: World) -> None:
    for root in world.ranks:
        for size in (1, 100_001):
            parts = [contribution(rank, (size,), seed=root) for rank in world.ranks] if world.rank == root else None
            found = torch.zeros(size)
            dist.scatter(found, parts, root)
            same(found, contribution(world.rank, (size,), seed=root), root)


def case_reduce_scatter_of_lists_also_uneven(world: World) -> None:
    for sizes in ([5] * world.size, [rank + 1 for rank in world.ranks], [40_000] * world.size):
        all_parts = [
            [contribution(rank, (size,), seed=place) for rank in world.ranks] for place, size in enumerate(sizes)
        ]
        found = torch.zeros(sizes[world.rank])
        dist.reduce_scatter(found, [parts[world.rank].clone() for parts in all_parts])
        same(found, reduced(ReduceOp.SUM, all_parts[world.rank]), sizes)


def case_reduce_scatter_of_one_tensor(world: World) -> None:
    for operation in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
        for size in (1, 33, 50_000, 300_001):
            parts = [contribution(rank, (world.size * size, 1)) for rank in world.ranks]
            expected = reduced(operation, parts).chunk(world.size)[world.rank]
            for found in (torch.zeros(size, 1), torch.zeros(1, size, 1)):
                source = parts[world.rank].clone().view(-1, *found.shape[1:])
                dist.reduce_scatter_tensor(found, source, operation)
                same(found.view(size, 1), expected, (operation, size))


def case_beyond_gloo_all_to_all_of_uneven_lists(world: World) -> None:
    """Rank a sends a + b + 1 elements to rank b."""
    sent = [contribution(world.rank, (world.rank + other + 1,), seed=other) for other in world.ranks]
    found = [torch.zeros(world.rank + other + 1) for other in world.ranks]
    dist.all_to_all(found, sent)
    for other in world.ranks:
        same(found[other], contribution(other, (world.rank + other + 1,), seed=world.rank), other)


def case_all_to_all_of_lists(world: World) -> None:
    for size in (1, 30_001):
        found = [torch.zeros(size) for _ in world.ranks]
        dist.all_to_all(found, [contribution(world.rank, (size,), seed=other) for other in world.ranks])
        for other in world.ranks:
            same(found[other], contribution(other, (size,), seed=world.rank), (size, other))


def case_all_to_all_of_one_tensor(world: World) -> None:
    for size in (1, 70_001):
        parts = [contribution(rank, (world.size * size,)) for rank in world.ranks]
        found = torch.zeros(world.size * size)
        dist.all_to_all_single(found, parts[world.rank])
        same(found, torch.cat([part.chunk(world.size)[world.rank] for part in parts]), size)


def case_all_to_all_with_splits_also_of_nothing(world: World) -> None:
    table = torch.randint(0, 4, (world.size, world.size), generator=torch.Generator().manual_seed(5)) * 7_000
    table[0] = 0
    sent, kept = table[world.rank].tolist(), table[:, world.rank].tolist()
    found = torch.zeros(sum(kept), 2)
    dist.all_to_all_single(found, contribution(world.rank, (sum(sent), 2)), kept, sent)
    expected = [
        contribution(rank, (int(table[rank].sum()), 2)).split(table[rank].tolist())[world.rank] for rank in world.ranks
    ]
    same(found, torch.cat(expected))


def case_objects(world: World) -> None:
    def thing(rank: int) -> dict[str, object]:
        return {"rank": rank, "text": "x" * 1000 * rank, "tensor": torch.arange(rank)}

    found: list[object] = [None] * world.size
    dist.all_gather_object(found, thing(world.rank))
    assert [len(each["text"]) for each in found] == [1000 * rank for rank in world.ranks]  # pyright: ignore
    told = [thing(3), "also"] if world.rank == world.size - 1 else [None, None]
    dist.broadcast_object_list(told, src=world.size - 1)
    assert (told[0]["rank"], told[1]) == (3, "also")  # pyright: ignore
    gathered = [None] * world.size if world.rank == 1 else None
    dist.gather_object(world.rank * 2, gathered, dst=1)
    assert gathered is None or gathered == [2 * rank for rank in world.ranks]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in world.ranks] if world.rank == 0 else None, src=0)
    assert mine == [f"for {world.rank}"]


def case_calls_of_different_kinds_in_turn(world: World) -> None:
    """Who is done with one call goes on to the next while others still read what it brought to the last one."""
    n, me = world.size, world.rank
    for seed in range(100):
        for size in (8, 1000 * n, 30_000 // n * n):
            parts = [contribution(rank, (n, -(-size // n)), seed=seed) for rank in world.ranks]
            total, mine = reduced(ReduceOp.SUM, parts), parts[me]
            summed, kept, told = mine.clone(), torch.zeros_like(mine[0]), mine * 3
            gathered, swapped = torch.zeros(n, *mine.shape), torch.zeros_like(mine)
            dist.all_reduce(summed)
            dist.all_gather(list(gathered), mine * 2)
            dist.broadcast(told, seed % n)
            dist.reduce_scatter_tensor(kept, (mine * 4).view(-1))
            dist.all_to_all_single(swapped, mine * 5)
            again = mine * 6
            dist.all_reduce(again)
            same(summed, total, (seed, size, "all_reduce"))
            same(gathered, torch.stack(parts) * 2, (seed, size, "all_gather"))
            same(told, parts[seed % n] * 3, (seed, size, "broadcast"))
            same(kept, total[me] * 4, (seed, size, "reduce_scatter"))
            same(swapped, torch.stack([part[me] for part in parts]) * 5, (seed, size, "all_to_all"))
            same(again, total * 6, (seed, size, "all_reduce again"))


def case_coalesced_calls(world: World) -> None:
    shapes = [(3,), (0,), (4, 5), (70_000,)]
    parts = [[contribution(rank, shape) for rank in world.ranks] for shape in shapes]
    expected = [reduced(ReduceOp.SUM, each) for each in parts]
    mine = [each[world.rank].clone() for each in parts]
    with dist._coalescing_manager():
        for tensor in mine:
            dist.all_reduce(tensor)
    again = [each[world.rank].clone() for each in parts]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in again:
            dist.all_reduce(tensor)
    manager.wait()
    once_more = [each[world.rank].clone() for each in parts]
    dist.all_reduce_coalesced(once_more)
    for found in (mine, again, once_more):
        for number, tensor in enumerate(found):
            same(tensor, expected[number], number)
    lists = [[torch.zeros(shape) for shape in shapes] for _ in world.ranks]
    dist.all_gather_coalesced(lists, [each[world.rank] for each in parts])
    for rank in world.ranks:
        for number in range(len(shapes)):
            same(lists[rank][number], parts[number][rank], (rank, number))


def case_coalesced_gathers_and_scatters_of_tensors(world: World) -> None:
    shapes = [(2, 3), (5,), (40_000,)]
    parts = [[contribution(rank, shape) for rank in world.ranks] for shape in shapes]
    found = [torch.zeros(world.size * shape[0], *shape[1:]) for shape in shapes]
    with dist._coalescing_manager():
        for number, tensor in enumerate(found):
            dist.all_gather_into_tensor(tensor, parts[number][world.rank])
    kept = [torch.zeros(shape) for shape in shapes]
    with dist._coalescing_manager():
        for number, tensor in enumerate(kept):
            dist.reduce_scatter_tensor(tensor, torch.cat(parts[number]))
    for number in range(len(shapes)):
        same(found[number], torch.cat(parts[number]), number)
        same(kept[number], parts[number][world.rank] * world.size, number)


def case_barriers_wait_for_all(world: World) -> None:
    """Nobody leaves the barrier before the last rank has written its mark."""
    key = f"marks-{world._meetings}"
    world.store.add(key, 1)
    dist.barrier()
    assert world.store.add(key, 0) == world.size
    dist.barrier(async_op=True).wait()


def case_a_barrier_finishes_what_was_started_before_it(world: World) -> None:
    tensors = [torch.full((100, 100), float(number)) for number in range(16)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    for number, tensor in enumerate(tensors):
        same(tensor, torch.full((100, 100), float(number * world.size)), number)


def case_wrong_calls_are_refused_where_they_are_made(world: World) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([torch.zeros(2)] * (world.size + 1), torch.zeros(2))
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([torch.zeros(2, dtype=torch.float64)] * world.size, torch.zeros(2))
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_to_all_single(torch.zeros(3 * world.size), torch.zeros(3 * world.size), [1] * world.size, None)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather_into_tensor(torch.zeros(world.size * 2 + 1), torch.zeros(2))
    seconds: Any = 5
    with pytest.raises(TypeError, match="Expected timeout argument to be of type"):
        dist.monitored_barrier(timeout=seconds)
    seconds = 20.0
    with pytest.warns(UserWarning, match="Please specify timeout arg as a timedelta"):
        dist.monitored_barrier(timeout=seconds)
    all_reduced(world, ReduceOp.SUM, (3,), torch.float32)
