"""Groups of every backend are written down: Gloo's, ours, other people's, maps of several, and torch's fake one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cli_support import Offbeat, in_process, write
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it makes the backend known

from offbeat.monitor import EXIT_CODES
from offbeat.runtime.backend import register
from offbeat.runtime.events.calls import CallShape, Stamps
from offbeat.runtime.events.groups import stamp_groups
from offbeat.runtime.events.recorder import Mark, Reader, Recorder, events_file
from offbeat.runtime.launch import Launcher

Open = Callable[..., Any]


class Recorded:
    """What was written down by this process."""

    def __init__(self, path: Path) -> None:
        self.recorder = Recorder(path, 0)
        self._reader = Reader(path)

    def stamps(self) -> list[Any]:
        """The events since the last call that are about something."""
        return [stamp for stamp in self._reader.new() if stamp.about is not None]

    def events(self) -> list[tuple[str, str, str]]:
        """The events since the last call: what sort, of which group, which operation."""
        return [(stamp.mark.name, stamp.about.group, stamp.about.operation) for stamp in self.stamps()]

    def begun(self) -> list[str]:
        """Which operations were begun and have ended."""
        events = self.events()
        ended = [what for mark, _, what in events if mark == Mark.EXIT.name]
        begun = [what for mark, _, what in events if mark in (Mark.ENTER.name, Mark.START.name)]
        assert sorted(begun) == sorted(ended)
        return begun


class Outer(dist.ProcessGroup):
    """A group as people write them in Python: some of it by itself, the rest by a backend that it has registered."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.inner)
        self.asked: list[str] = []

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self.asked.append("allreduce")
        return self.inner.allreduce(tensors, opts)

    def alltoall_base(self, *args: Any) -> Any:
        self.asked.append("alltoall_base")
        return self.inner.alltoall_base(*args)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "outer"


def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend as extensions in C++ give it to torch."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def outer(told: Any, options: Any) -> Any:
    assert options is None
    return Outer(told.store, told.group_rank, told.group_size, told.timeout)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    register()
    monkeypatch.setattr(c10d, "ProcessGroup", c10d.ProcessGroup)
    monkeypatch.setattr(c10d, "_register_pg_in_world", c10d._register_pg_in_world)
    for name in ("_plugins", "backend_list", "default_device_backend_map", "backend_capability", "backend_type_map"):
        monkeypatch.setattr(dist.Backend, name, getattr(dist.Backend, name).copy())
    dist.Backend.register_backend("other", gloo, devices=["cpu"])  # Before groups are written down, and after it.
    found = Recorded(tmp_path / "a.events")
    stamp_groups(found.recorder)
    dist.Backend.register_backend("outer", outer, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("device", gloo, devices=["cuda"])
    return found


@pytest.fixture
def opened() -> Generator[Open]:
    def open_(backend: str | None, size: int = 1) -> Any:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=size)
        return dist.group.WORLD

    yield open_
    if dist.is_initialized():
        dist.destroy_process_group()


EVERY = ["gloo", "other", "outer", "offbeat", "cpu:gloo,cuda:device", "cpu:other", None]


@pytest.mark.parametrize("backend", EVERY)
def test_collectives_of_every_backend_are_written_down(backend: str | None, recorded: Recorded, opened: Open) -> None:
    world = opened(backend)
    recorded.events()
    t, rows = torch.ones(4), [torch.zeros(4)]
    dist.all_reduce(t)
    dist.broadcast(t, 0)
    dist.all_gather(rows, t)
    dist.all_to_all_single(torch.zeros(4), t)
    dist.all_reduce(t, async_op=True).wait()
    dist.barrier()
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    begun = recorded.begun()
    assert begun[:6] == ["all_reduce", "broadcast", "all_gather", "all_to_all_single", "all_reduce", "barrier"]
    ddp(torch.ones(1, 3)).sum().backward()
    recorded.recorder.look()
    assert "all_reduce" in recorded.begun()
    assert torch.equal(rows[0], torch.ones(4))
    assert isinstance(world, dist.ProcessGroup)
    assert isinstance(world, c10d.ProcessGroup)


def test_further_groups_are_written_down_with_their_own_names_and_members(recorded: Recorded, opened: Open) -> None:
    opened("fake", size=4)
    t = torch.ones(2)
    some = dist.new_group([0, 2])
    assert isinstance(some, dist.ProcessGroup)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    recorded.events()
    dist.all_reduce(t, group=some)
    dist.all_reduce(t, group=mesh["inner"].get_group())
    functional = torch.distributed._functional_collectives
    functional.wait_tensor(functional.all_reduce(t, "sum", mesh["outer"].get_group()))
    sums = [stamp for stamp in recorded.stamps() if stamp.mark in (Mark.ENTER, Mark.START)]
    assert [stamp.about.members for stamp in sums] == [(0, 2), 2, (0, 2)]
    assert len({stamp.about.group for stamp in sums}) == 3


def test_each_backend_of_a_group_counts_its_own_calls(recorded: Recorded, opened: Open) -> None:
    world = opened("cpu:gloo,cuda:device")
    recorded.events()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    groups = [group for mark, group, _ in recorded.events() if mark == "ENTER"]
    assert groups == ["world on cpu", "world"]
    assert world.stamps.at(torch.device("cuda", 0)) is not world.stamps.at(torch.device("cpu"))


class Queued(dist.ProcessGroupGloo):
    """A backend that has what torch's Python reads of NCCL's."""

    supports_splitting = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[Any] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.told.append(("eager_connect_single_device", device))

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.told.append(("perform_nocolor_split", device))

    def comm_split_count(self) -> int:
        return 3


def test_torch_finds_the_backends_that_it_has_made(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    made: list[Any] = []

    def queued(*args: Any) -> Any:
        made.append(Queued(*args))
        return made[-1]

    dist.Backend.register_backend("queued", queued, devices=["cuda"])
    device = torch.device("cuda", 0)
    options = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "device_id": device}
    dist.init_process_group("cpu:gloo,cuda:queued", **options)
    try:
        world: Any = dist.group.WORLD
        assert world._get_backend(device) is made[0]
        assert type(world._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
        assert world.bound_device_id == device
        assert made[0].told == [("eager_connect_single_device", device)]
        assert c10d._get_split_source(world) is made[0]
        assert world._get_backend(device).comm_split_count() == 3
        further: Any = dist.new_group([0])
        assert further._get_backend(device) is made[1]
        assert type(world) is c10d.ProcessGroup  # Torch batches messages and waits for hooks only of such groups.
        assert not world._has_hooks()
        assert {kind.type for kind in world._device_types} == {"cpu", "cuda"}
        assert c10d._resolve_process_group(world.group_name) is world
    finally:
        dist.destroy_process_group()


def test_a_group_in_python_keeps_its_class_and_its_own_methods(recorded: Recorded, opened: Open) -> None:
    world = opened("outer")
    assert isinstance(world, Outer)
    dist.all_reduce(torch.ones(2))
    dist.all_to_all_single(torch.zeros(2), torch.ones(2))
    dist.broadcast(torch.ones(2), 0)
    assert world.asked == ["allreduce", "alltoall_base"]
    assert recorded.begun() == ["all_reduce", "all_to_all_single", "broadcast"]


def test_operations_that_are_gathered_end_together(recorded: Recorded, opened: Open) -> None:
    world = opened("fake", size=2)
    recorded.events()
    with c10d._coalescing_manager(world, torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.ones(2), 1)
        dist.irecv(torch.ones(2), 1)
        assert [mark for mark, _, _ in recorded.events()] == ["START", "START"]
    manager.wait()
    assert [mark for mark, _, _ in recorded.events()] == ["WAIT", "WAIT", "EXIT", "EXIT"]


def test_a_split_group_is_written_down(recorded: Recorded, opened: Open) -> None:
    world = opened("gloo")
    cpu, store = torch.device("cpu"), dist.HashStore()
    plain: Any = type(world.stock)(store, 0, 1)
    plain._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, world._get_backend(cpu))
    plain._set_group_name("part")
    plain._set_group_desc("a part")
    # Torch splits groups of NCCL and of others on devices only; Gloo's own way crashes without us, too.
    world.stock = SimpleNamespace(split_group=lambda *_, **__: plain)
    split = world.split_group([0], timeout=timedelta(seconds=10))
    assert (split.group_name, split.group_desc, type(split)) == ("part", "a part", c10d.ProcessGroup)
    assert split._get_backend(cpu) is world._get_backend(cpu)
    ways = {"backend_name": "gloo", "store": store, "group_name": "part", "backend_config": "", "rank_mapping": {3: 0}}
    c10d._register_pg_in_world(split, **ways)
    world.stock = plain
    recorded.events()
    split.allreduce([torch.ones(2)]).wait()
    stamps = recorded.stamps()
    assert [stamp.about.group for stamp in stamps] == ["part"] * len(stamps)
    assert stamps[0].about.members == (3,)


class Behind:
    """Work on a device: waiting for it is to queue behind it."""

    done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> bool:
        return True

    def how_long(self) -> float:
        return 0.5


ON_DEVICE = torch.empty(4, device="meta")


@pytest.fixture
def stamps(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Stamps:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    return Stamps(recorded.recorder, "world", lambda: (0, 1))


def test_work_on_a_device_has_ended_when_it_says_so_not_when_it_was_waited_for(
    recorded: Recorded, stamps: Stamps
) -> None:
    shape, options = CallShape("all_reduce"), AllreduceOptions()
    inner = Behind()
    work = stamps.collective(shape, lambda *_: inner, ([ON_DEVICE], options), {})
    assert work.wait()
    assert work.how_long() == 0.5
    recorded.recorder.look()
    assert [mark for mark, _, _ in recorded.events()] == ["START", "WAIT"]
    inner.done = True
    recorded.recorder.look()
    assert [mark for mark, _, _ in recorded.events()] == ["EXIT"]
    stamps.collective(shape, lambda *_: Behind(), ([torch.ones(2)], options), {}).wait()
    assert [mark for mark, _, _ in recorded.events()] == ["START", "WAIT", "EXIT"]


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(
    recorded: Recorded, stamps: Stamps, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = stamps.collective(CallShape("all_reduce"), lambda *_: Behind(), ([ON_DEVICE], AllreduceOptions()), {})
    monkeypatch.setattr("offbeat.runtime.events.calls.CAPTURES", True)
    monkeypatch.setattr("offbeat.runtime.events.calls.CAPTURES", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Behind, "is_completed", lambda _: pytest.fail("the capture is spoilt"))
    recorded.recorder.step()
    work = Behind()
    assert stamps.collective(CallShape("all_reduce"), lambda *_: work, ([ON_DEVICE], AllreduceOptions()), {}) is work
    assert [mark for mark, _, _ in recorded.events()] == ["START", "START", "EXIT"]
    earlier.wait()


OTHER = """\
import torch, torch.distributed as dist
from test_any_backend import gloo, outer
dist.Backend.register_backend("other", gloo, devices=["cpu"])
dist.Backend.register_backend("outer", outer, extended_api=True, devices=["cpu"])
dist.Backend.register_backend("device", gloo, devices=["cuda"])
dist.init_process_group("{backend}")
rank, t = dist.get_rank(), torch.ones(4)
"""
CYCLE = """\
dist.barrier()
dist.recv(t, 1 - rank)
"""
ORDER = """\
dist.all_reduce(t)
dist.all_reduce(t) if rank else dist.broadcast(t, 0)
"""
HEALTHY = """\
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(100, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(8, 100)).sum().backward()
    optimizer.step()
    dist.all_reduce(t)
half = dist.new_group([0, 1])
dist.barrier(half)
assert t[0] == 2**12
dist.destroy_process_group()
"""


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["other", "outer", "cpu:other,cuda:gloo"])
def test_sick_and_healthy_programs_get_the_same_verdicts_on_other_backends(
    backend: str, offbeat_: Offbeat, tmp_path: Path
) -> None:
    def run(name: str, body: str) -> Any:
        return offbeat_(
            "run", write(tmp_path / name, OTHER.format(backend=backend) + body), "--workers", "2", "--monitor"
        )

    said = run("cycle.py", CYCLE)
    assert said.code == EXIT_CODES["deadlock"] == 10, said.err
    assert "worker 0 waits for worker 1 in receive from worker 1 #1" in said.err
    assert "called at cycle.py:9" in said.err
    said = run("order.py", ORDER)
    assert said.code == EXIT_CODES["desync"] == 11, said.err
    assert "broadcast #2" in said.err
    assert run("healthy.py", HEALTHY).code == 0
    explained = offbeat_("explain", "runs/latest", "--format", "json")
    told = json.loads(explained.out)
    assert (explained.code, told["verdict"], told["waiting"]) == (0, None, [])
    operations = Counter(
        stamp.about.operation
        for stamp in Reader(events_file(tmp_path / "runs" / "latest", 1)).new()
        if stamp.about is not None and stamp.mark in (Mark.ENTER, Mark.START)
    )
    assert operations["all_reduce"] == 24
    assert operations["barrier"] == 1
