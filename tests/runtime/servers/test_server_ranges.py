"""Ranges of the vector that servers hold: pushed and pulled by a loop of one's own, across shards and deaths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import write
from torch import nn

from offbeat.errors import StrategyError
from offbeat.protocols.machine import Done, Payload, Received, Send, Start
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Pull, PullReply, Push
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.works import ReadShard
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.protocols.servers.worker.notices import Arrived, PulledRange, PushedRange, PushRequest, RangeRequest
from offbeat.run.drive import Result, drive
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal

STEPS = 12
LOOP = """\
import json, pathlib, sys
import torch, offbeat
from offbeat.errors import UsageError

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
with offbeat.init() as team:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    first = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    model, optimizer = team.prepare(model, optimizer)
    vector = team.vector
    told = {"size": len(vector), "shards": [list(held) for held in vector.shards]}
    told["ranges"] = [list(vector.range_of(p)) for p in model.parameters()]

    refused = []
    stranger = torch.nn.Parameter(torch.zeros(2))
    for wrong in (
        lambda: vector.pull(range(5, 5)),
        lambda: vector.pull(range(0, len(vector) + 1)),
        lambda: vector.pull(range(-2, 2)),
        lambda: vector.pull(range(0, 8, 2)),
        lambda: vector.push(range(0, 3), torch.zeros(2)),
        lambda: vector.push(range(0, 3), torch.zeros(3, dtype=torch.float64)),
        lambda: vector.range_of(stranger),
        lambda: vector.pull(range(0, 3), newer_than=vector.pull(range(0, 4))),
        lambda: vector.step(weight=0),
    ):
        try:
            wrong()
        except UsageError as error:
            refused.append(str(error))
    told["refused"] = refused

    whole = range(0, len(vector))
    middle = range(8, 30)  # Over two ends of shards.
    last = vector.pull(middle)
    told["first"] = bool(torch.equal(last.values, first[8:30]))
    told["again"] = vector.pull(middle, newer_than=last) is None
    for step in range(steps):
        vector.push(middle, -torch.ones(len(middle)))
        vector.push(range(0, 2), -2 * torch.ones(2))
        vector.step()
    told["now"] = (vector.pull(whole).values - first).tolist()
    newer = vector.pull(middle, newer_than=last)
    told["newer"] = newer is not None and bool((newer.values > last.values).all())
    told["step"] = team.step
    with team.averaged(model):
        told["model"] = (torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - first).tolist()
    (folder / f"told-{team.rank}").write_text(json.dumps(told))
"""

Told = tuple[Result, list[dict[str, Any]]]


def run(launcher: Launcher, folder: Path, strategy: str, **goal: Any) -> Told:
    script = write(folder / "loop.py", LOOP)
    words = (str(folder), str(STEPS))
    job = Job(Script(str(script), words), Goal(strategy=strategy, timeout=60.0, **goal), 2, 1, folder / "runs")
    result = drive(job, launcher=launcher)
    return result, [json.loads((folder / f"told-{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def lockstep(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run under bsp, in which the middle shard's server is killed."""
    folder = tmp_path_factory.mktemp("ranges")
    return run(launcher, folder, "server(shards=3, replicas=1)", disturb=("server 1: kill at step 5",))


def expected(of_middle: float) -> torch.Tensor:
    moved = torch.zeros(37)
    moved[8:30] = of_middle
    moved[0:2] = 2 * of_middle
    return moved


def test_a_range_crosses_shards_and_each_push_of_it_counts_once_though_a_server_dies(lockstep: Told) -> None:
    result, told = lockstep
    assert result.disturbances == {"asked": 1, "fired": 1}
    assert result.died == ["server 1.0"]
    for one in told:
        assert [(held[0], held[-1] + 1) for held in one["shards"]] == [(0, 12), (12, 24), (24, 37)]
        torch.testing.assert_close(torch.tensor(one["now"]), expected(STEPS), rtol=0, atol=1e-4)
        assert one["model"] == one["now"]
        assert one["step"] == STEPS
    # Each shard's parts, and the tick that ends the step.
    assert [account["pushes"]["applied"] for account in result.servers] == [n * 2 * STEPS for n in (3, 2, 2)]
    assert [account["version"] for account in result.servers] == [STEPS] * 3
    assert result.steps == STEPS


def test_ranges_of_parameters_lie_side_by_side(lockstep: Told) -> None:
    sizes = [p.numel() for p in nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).parameters()]
    for one in lockstep[1]:
        assert one["size"] == sum(sizes) == 37
        assert [len(place) for place in one["ranges"]] == sizes
        assert [n for place in one["ranges"] for n in place] == list(range(37))


def test_only_what_is_newer_is_pulled(lockstep: Told) -> None:
    for one in lockstep[1]:
        assert (one["first"], one["again"], one["newer"]) == (True, True, True)


def test_wrong_ranges_are_refused_with_the_reason(lockstep: Told) -> None:
    words = (
        "range(5, 5) is not a range",
        "range(0, 38) is not a range",
        "within range(0, 37)",
        "range(0, 8, 2)",
        "takes 3 numbers of float32; the gradient has 2",
        "3 of float64",
        "not on the servers",
        "cannot be compared",
        "a weight above 0",
    )
    for one in lockstep[1]:
        assert len(one["refused"]) == len(words)
        for word, said in zip(words, one["refused"], strict=True):
            assert word in said


def test_reads_of_ranges_are_as_fresh_as_the_bound_says_and_counted(launcher: Launcher, tmp_path: Path) -> None:
    result, told = run(launcher, tmp_path, "server(shards=2, consistency=ssp(1))")
    reads = {int(steps): count for steps, count in result.staleness.items()}
    assert max(reads) <= 1
    # Of each worker: before the steps 4 pulls of ranges, one for each step, 2 after them; on one or two shards each.
    assert sum(reads.values()) >= 2 * 2 * STEPS
    for account in result.servers:
        assert account["version"] == account["pushes"]["applied"] - 2 * STEPS, "each part is an update, ticks are none"
    for one in told:
        torch.testing.assert_close(torch.tensor(one["model"]), expected(STEPS), rtol=0, atol=1e-4)


NONE = """\
import torch, offbeat

with offbeat.init() as team:
    model = torch.nn.Linear(1, 1)
    team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    team.vector
"""


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("allreduce", "on no servers"),
        ("server(consistency=drop_slowest(1))", "under bsp, ssp or asp"),
    ],
)
def test_where_ranges_cannot_be_had_the_reason_is_said(
    launcher: Launcher, tmp_path: Path, strategy: str, words: str
) -> None:
    script = write(tmp_path / "loop.py", NONE)
    with pytest.raises(StrategyError, match=words):
        drive(Job(Script(str(script)), Goal(strategy=strategy), 2, 1, tmp_path / "runs"), launcher=launcher)


# -- the machines ------------------------------------------------------------------------------------------------------


def test_a_client_asks_each_shard_for_its_part_and_keeps_it_apart_from_whole_values() -> None:
    client = ClientMachine(0, ClusterView.of(1, 2))
    client.known[0] = (9, 4)
    asked = client.ask(RangeRequest([PulledRange(0, 3, 5, 7), PulledRange(1, 0, 2)], 1), 0.0)
    sent = [effect for effect in asked.effects if isinstance(effect, Send)]
    assert [(one.to, one.message.start, one.message.stop, one.message.newer_than) for one in sent] == [
        ("server 0.0", 3, 5, 7),
        ("server 1.0", 0, 2, -1),
    ]
    reply = PullReply(number=sent[0].message.number, version=8, clock=3, epoch=0)
    effects = client.on(Received("server 0.0", reply, Payload(8, "numbers")), 0.1)
    (arrived,) = [effect.work for effect in effects if isinstance(getattr(effect, "work", None), Arrived)]
    assert arrived.reply == reply, "an older version than that of whole values is news for a range"
    assert client.known == {0: (9, 4)}


def test_a_server_reads_each_range_once_for_all_who_ask_for_it() -> None:
    view = ClusterView.of(3, 1)
    server = ServerMachine("server 0.0", 0, Rule(0), view)
    works: list[ReadShard] = []
    for worker, (start, stop) in enumerate([(0, 2), (0, 2), (1, 4)]):
        message = Pull(worker=worker, number=1, clock=1, start=start, stop=stop)
        assert not server.on(Received(f"worker {worker}", message), 0.0), "the step is not complete"
    for worker in range(3):
        part = Push(worker=worker, number=0, clock=0, start=1, stop=2)
        (look,) = server.on(Received(f"worker {worker}", part, Payload(1, worker)), 0.0)
        assert isinstance(look, Start)
        works += works_of(server.on(Done(look.token, ""), 0.0))
    assert works == [ReadShard(start=0, stop=2), ReadShard(start=1, stop=4)]


def works_of(effects: Any) -> list[ReadShard]:
    return [effect.work for effect in effects if isinstance(getattr(effect, "work", None), ReadShard)]


def test_parts_for_several_ranges_of_a_shard_end_with_a_tick_on_all() -> None:
    client = ClientMachine(0, ClusterView.of(1, 2))
    parts = [PushedRange(0, Payload(4, "a"), 0, 1), PushedRange(0, Payload(4, "b"), 3, 4)]
    early = client.ask(PushRequest(parts, 0, final=False), 0.0)
    end = client.ask(PushRequest([], 0), 0.0)
    sent = [effect.message for asked in (early, end) for effect in asked.effects if isinstance(effect, Send)]
    assert [(push.number, push.start, push.stop, push.last) for push in sent] == [
        (0, 0, 1, False),
        (1, 3, 4, False),
        (2, 0, 0, True),
        (0, 0, 0, True),
    ]
