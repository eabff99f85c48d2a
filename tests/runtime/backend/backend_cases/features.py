"""What is built on torch.distributed, unchanged: futures, profiler, DDP, fully_shard, pipelines, functional calls."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoints
from backend_cases.running import World, contribution, reduced, same
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def model(width: int = 24) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    return contribution(rank, (8, 6), seed=step), contribution(rank, (8, 2), seed=step + 100)


def trained_alone(world: World, steps: int) -> nn.Module:
    """One process on the joined batch: what data parallelism must equal."""
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = (torch.cat(parts) for parts in zip(*(batch(rank, step) for rank in world.ranks), strict=True))
        optimizer.zero_grad()
        mse_loss(alone(inputs), targets).backward()
        optimizer.step()
    return alone


def train(world: World, wrapped: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        inputs, targets = batch(world.rank, step)
        optimizer.zero_grad()
        mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()


def close_to(parameters: list[Tensor], expected: nn.Module) -> None:
    for mine, theirs in zip(parameters, expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def case_futures_tell_results_and_can_be_chained(world: World) -> None:
    for size in (10, 200_000):
        tensor = torch.full((size,), float(world.rank))
        work = dist.all_reduce(tensor, async_op=True)
        chained = work.get_future().then(lambda done: done.value()[0] * 2)
        expected = torch.full((size,), float(sum(world.ranks)))
        same(chained.wait(), expected * 2)
        work.wait()
        same(tensor, expected)
        same(work.result()[0], expected)


def case_a_callback_may_itself_call_and_wait(world: World) -> None:
    """As PowerSGD does: what is done when one all-reduce ends waits for the next."""

    def once_more(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        work = dist.all_reduce(done.value()[0], async_op=True)
        assert work is not None
        return work.get_future().wait()[0]

    for size in (4, 100_000):
        work = dist.all_reduce(torch.ones(size), async_op=True)
        assert work is not None
        same(work.get_future().then(once_more).wait(), torch.full((size,), float(world.size**2)))


def case_the_profiler_sees_each_call_with_its_shape_and_when_it_was_done(world: World) -> None:
    tensor = torch.ones(3, 4)
    with torch.autograd.profiler.profile(record_shapes=True) as seen:
        dist.all_reduce(tensor)
        work = dist.broadcast(tensor, 0, async_op=True)
        assert work is not None
        work.wait()
        with torch.profiler.record_function("afterwards"):
            tensor.add_(1)
    found = {event.name: event for event in seen.function_events or []}
    for name in ("all_reduce", "broadcast"):
        event = found[f"{world.backend}:{name}"]
        assert event.input_shapes == [[3, 4]], name
        assert event.is_async, name
        if world.backend != "gloo":  # Which lets go of who waits before its event has ended.
            assert event.time_range.end <= found["afterwards"].time_range.start, name


def case_data_parallel_equals_one_process(world: World) -> None:
    for views in (False, True):
        own = model()
        wrapped = DistributedDataParallel(own, gradient_as_bucket_view=views, bucket_cap_mb=0.001)  # pyright: ignore
        train(world, wrapped, torch.optim.SGD(own.parameters(), lr=0.1), 4)
        close_to([p.detach() for p in own.parameters()], trained_alone(world, 4))
        world.shared(*own.parameters())


def case_data_parallel_has_the_gradients_it_has_on_gloo(world: World) -> None:
    gloo = dist.new_group(backend="gloo")
    gradients: list[list[Tensor]] = []
    for group in (None, gloo):
        own = model(300)
        wrapped = DistributedDataParallel(own, process_group=group)
        inputs, targets = batch(world.rank)
        mse_loss(wrapped(inputs), targets).backward()
        gradients.append([p.grad.clone() for p in own.parameters() if p.grad is not None])
        del wrapped  # Before its group: a reducer that is the last to let go of Gloo can hang torch 2.13 on the GIL.
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    dist.destroy_process_group(gloo)


def case_data_parallel_with_unused_parameters_buffers_and_no_sync(world: World) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
            self.sometimes = nn.Linear(4, 4)

        def forward(self, inputs: Tensor, use: bool) -> Tensor:
            hidden = self.always(inputs)
            return self.sometimes(hidden) if use else hidden

    torch.manual_seed(2)
    wrapped = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    for step in range(3):
        with wrapped.no_sync():
            wrapped(batch(world.rank, step)[0], world.rank == 0).sum().backward()
        wrapped(batch(world.rank, step)[0], world.rank == 0).sum().backward()
    world.shared(*(p.grad for p in wrapped.parameters() if p.grad is not None))


def case_a_communication_hook_of_half_precision(world: World) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    own = model()
    wrapped = DistributedDataParallel(own)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    train(world, wrapped, torch.optim.SGD(own.parameters(), lr=0.1), 2)
    for mine, theirs in zip(own.parameters(), trained_alone(world, 2).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-3)
    world.shared(*own.parameters())


def case_the_built_in_hooks(world: World) -> None:
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        own = model()
        wrapped = DistributedDataParallel(own)
        wrapped._register_builtin_comm_hook(hook)
        train(world, wrapped, torch.optim.SGD(own.parameters(), lr=0.1), 2)
        for mine, theirs in zip(own.parameters(), trained_alone(world, 2).parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-3)
        with pytest.raises(RuntimeError, match="can only be called once"):
            wrapped.register_comm_hook(None, lambda state, bucket: (state, bucket))
        world.shared(*own.parameters())


def case_a_hook_that_calls_again_when_a_call_is_done(world: World) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    own = model(64)
    wrapped = DistributedDataParallel(own)
    wrapped.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook)
    train(world, wrapped, torch.optim.SGD(own.parameters(), lr=0.1), 4)
    world.shared(*own.parameters())


def case_fully_shard_equals_one_process(world: World) -> None:
    sharded = model()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(world, sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), 3)
    whole = [p.full_tensor().detach() for p in sharded.parameters() if isinstance(p, DTensor)]
    close_to(whole, trained_alone(world, 3))
    world.shared(*whole)


def case_an_optimizer_that_keeps_a_slice_of_its_state(world: World) -> None:
    own = model()
    wrapped = DistributedDataParallel(own)
    optimizer = ZeroRedundancyOptimizer(own.parameters(), torch.optim.SGD, lr=0.1)
    train(world, wrapped, optimizer, 3)
    close_to([p.detach() for p in own.parameters()], trained_alone(world, 3))


def case_checkpoints_are_saved_and_loaded(world: World) -> None:
    folder = tempfile.mkdtemp() if world.rank == 0 else None
    told = [folder]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    mesh = init_device_mesh("cpu", (world.size,))
    full = contribution(0, (4 * world.size, 3))
    state = {"sharded": distribute_tensor(full, mesh, [Shard(0)]), "whole": torch.arange(5), "step": 7}
    checkpoints.save(state, checkpoint_id=told[0])
    empty = {
        "sharded": distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)]),
        "whole": torch.zeros(5, dtype=torch.int64),
        "step": 0,
    }
    checkpoints.load(empty, checkpoint_id=told[0])
    found = empty["sharded"]
    assert isinstance(found, DTensor)
    same(found.full_tensor(), full)
    assert torch.equal(empty["whole"], torch.arange(5))  # pyright: ignore
    assert empty["step"] == 7
    dist.barrier()
    if folder is not None:
        for path in sorted(Path(folder).rglob("*"), reverse=True):
            path.unlink()
        Path(folder).rmdir()


def case_a_pipeline_of_as_many_stages_as_ranks(world: World) -> None:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in world.ranks]
    whole = nn.Sequential(*copy.deepcopy(layers))
    inputs, targets = contribution(0, (8, 6)), contribution(0, (8, 6), seed=1)
    stage = PipelineStage(layers[world.rank], world.rank, world.size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=mse_loss)
    if world.rank == 0:
        schedule.step(inputs)
    elif world.rank == world.size - 1:
        output = schedule.step(target=targets)
        same(output, whole(inputs))
    else:
        schedule.step()
    mse_loss(whole(inputs), targets).backward()
    for mine, theirs in zip(layers[world.rank].parameters(), whole[world.rank].parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def case_functional_collectives(world: World) -> None:
    group = dist.group.WORLD
    assert group is not None
    parts = [contribution(rank, (world.size, 4)) for rank in world.ranks]
    mine = parts[world.rank]
    total = reduced(ReduceOp.SUM, parts)
    same(functional.wait_tensor(functional.all_reduce(mine, "sum", group)), total)
    same(functional.wait_tensor(functional.all_gather_tensor(mine, 0, group)), torch.cat(parts))
    scattered = functional.reduce_scatter_tensor(mine, "sum", 0, group)
    same(functional.wait_tensor(scattered), total[world.rank : world.rank + 1])
    same(functional.wait_tensor(functional.broadcast(mine, 1, group)), parts[1])
    swapped = functional.all_to_all_single(mine, None, None, group)
    same(functional.wait_tensor(swapped), torch.stack([part[world.rank] for part in parts]))
    several = functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
    same(functional.wait_tensor(several[1]), reduced(ReduceOp.SUM, [part * 2 for part in parts]))
    gathered = functional.all_gather_into_tensor_coalesced([mine, mine * 2], group)
    same(functional.wait_tensor(gathered[0]), torch.cat(parts))
    same(mine, contribution(world.rank, (world.size, 4)), "what was given is left alone")


def case_functional_collectives_are_differentiable(world: World) -> None:
    group = dist.group.WORLD
    assert group is not None
    mine = contribution(world.rank, (world.size * 2,)).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(mine, 0, group)
    (gathered * (world.rank + 1)).sum().backward()
    assert mine.grad is not None
    same(mine.grad, torch.full((world.size * 2,), float(sum(rank + 1 for rank in world.ranks))))


def case_what_is_under_way_can_be_waited_for_by_its_tensor(world: World) -> None:
    total, before = float(sum(world.ranks)), _get_work_registry_size()
    for wait in (
        functional.wait_tensor,
        torch.compile(lambda given: functional.wait_tensor(given) + 0, backend="eager"),
    ):
        with functional.allow_inflight_collective_as_graph_input_ctx():
            sums = [torch.full((100_000,), float(world.rank)) for _ in range(3)]
            for tensor in sums:
                dist.all_reduce(tensor, async_op=True)
            gathered = [torch.empty(1) for _ in world.ranks]
            dist.all_gather(gathered, torch.tensor([float(world.rank)]), async_op=True)
            for tensor in sums:
                same(wait(tensor), torch.full((100_000,), total))
            same(torch.cat([wait(tensor) for tensor in gathered]), torch.arange(float(world.size)))
    assert _get_work_registry_size() == before


def case_what_was_waited_for_is_not_kept_for_its_tensors(world: World) -> None:
    before = _get_work_registry_size()
    with functional.allow_inflight_collective_as_graph_input_ctx():
        works = [
            dist.all_reduce(torch.ones(4), async_op=True),
            dist.all_gather([torch.empty(1) for _ in world.ranks], torch.ones(1), async_op=True),
            dist.barrier(async_op=True),
        ]
        received = torch.zeros(1)
        if world.rank == 0:
            works.append(dist.isend(torch.full((1,), 7.0), 1))
        elif world.rank == 1:
            dist.irecv(received, 0)
            same(functional.wait_tensor(received), torch.full((1,), 7.0))
        for work in works:
            assert work is not None
            work.wait()
    assert _get_work_registry_size() == before


def case_distributed_tensors_change_their_placement(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    full = contribution(0, (2 * world.size + 1, 3 * world.size))
    rows = distribute_tensor(full, mesh, [Shard(0)])
    same(rows.full_tensor(), full)
    columns = rows.redistribute(mesh, [Shard(1)])
    same(columns.to_local(), full.chunk(world.size, 1)[world.rank])
    product = torch.mm(columns, distribute_tensor(full.t().contiguous(), mesh, [Shard(0)]))
    same(product.redistribute(mesh, [Replicate()]).to_local(), full @ full.t())


def case_a_mesh_of_two_dimensions(world: World) -> None:
    if world.size != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    for name, partner in (("data", world.rank ^ 2), ("model", world.rank ^ 1)):
        found = contribution(world.rank, (10,))
        dist.all_reduce(found, group=mesh.get_group(name))
        same(found, contribution(world.rank, (10,)) + contribution(partner, (10,)), name)
