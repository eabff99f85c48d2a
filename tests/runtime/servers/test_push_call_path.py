"""How far one push walks through the code, from `optimizer.step()` to the server's numbers.

The measure: a *hop* is a function of offbeat, with a name, that is on the call stack at one of the moments at which the
push changes hands. On the worker that is when the gradient is put where servers can read it, when the message is
written and when its frames are put into the socket; on the server when they are taken from it, when the push is let
in, when its payload is looked at, when the entry goes to the log, when the shard answers it, and when the optimizer of
the shard steps. Functions are counted once, however often the push passes them; what only looks something
up on the way and returns is not a hop. The files are those in which the hops are written.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from call_path import Walk

import offbeat
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.run.settings import ASSIGNED, Assignment, Goal
from offbeat.runtime.servers.coordination import Coordination
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.runtime.servers.process import serve

WORKER = {"gradient", "enlist", "Sockets.put"}
SERVER = {"_accept", "admit", "unfit", "EntryLog.append", "settle", "SGD.step"}


def follow(worker: Walk, server: Walk, step: Callable[[], object]) -> None:
    """One step of the worker's optimizer, and what the server makes of it."""
    worker.begun = server.begun = True
    sys.setprofile(worker)
    step()
    sys.setprofile(None)
    until = time.monotonic() + 30
    while server.passed != server.moments and time.monotonic() < until:
        time.sleep(0.01)


class Nobody:
    """A launcher that is told nothing."""

    def send(self, _: Any) -> None: ...


@contextmanager
def served(plan: ServerPlan, walk: Walk) -> Generator[None]:
    """A coordinator and a server, in threads; the server's calls are followed."""
    config = {"plan": plan.plain(), "shard": 0, "replica": 0, "disturb": [], "seed": 0}
    with Coordination(plan) as coordination:
        threading.setprofile(walk)
        server = threading.Thread(target=serve, args=(config, Nobody()), daemon=True)
        server.start()
        threading.setprofile(None)
        try:
            yield
        finally:
            coordination.ended("server 0.0")  # It is told that it is out at its next sign of life.
            server.join(timeout=30)


@pytest.fixture
def walks(tmp_path: Path) -> tuple[Walk, Walk]:
    worker, server = Walk(WORKER), Walk(SERVER)
    plan = ServerPlan(workers=1, shards=1, replicas=0, rule=Rule(3), folder=str(tmp_path))
    goal = Goal(strategy="server(consistency=ssp(3))")
    token = ASSIGNED.set(Assignment(goal=goal, servers=plan))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with served(plan, server), offbeat.init() as team:
            model, optimizer = team.prepare(model, optimizer)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).sum().backward()
                if step == 2:
                    follow(worker, server, optimizer.step)
                else:
                    optimizer.step()
    finally:
        ASSIGNED.reset(token)
    return worker, server


def test_a_push_passes_few_functions_on_its_way_from_the_optimizer_to_the_servers_numbers(
    walks: tuple[Walk, Walk], record_property: pytest.RecordProperty
) -> None:
    worker, server = walks
    assert (worker.passed, server.passed) == (WORKER, SERVER), "the push was followed to its end"
    hops = worker.names() + server.names()
    record_property("hops", len(hops))
    record_property("files", len({hop.split(":")[0] for hop in hops}))
    assert len(hops) <= 28, "\n".join(hops)
