"""What goes wrong: ranks that never come, that die, and that call something else. Each tells what it was told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from backend_cases.running import World
from torch.distributed import distributed_c10d

from offbeat.runtime.backend import open_group
from offbeat.runtime.launch import Control

SHORT = timedelta(seconds=2)
LONG = timedelta(seconds=120)


def told(control: Control, world: World, started: float, error: Exception | None, again: str = "") -> None:
    """What this rank heard, how long it took to hear it, and what it heard when it tried again."""
    seconds = time.monotonic() - started
    control.send({"rank": world.rank, "error": str(error or ""), "seconds": seconds, "again": again})


def heard_again(*sizes: int) -> str:
    """What is said to more all-reduces of a group that has failed."""
    heard: list[str] = []
    for size in sizes:
        try:
            dist.all_reduce(torch.ones(size))
            heard.append("nothing was said")
        except RuntimeError as caught:
            heard.append(str(caught))
    return "; ".join(heard)


def never_arrive(config: Mapping[str, Any], control: Control) -> None:
    """The last rank stays away from the third call; it is there for as long as the others wait.

    How long they do was told to torch when the group was there already.
    """
    world = World(config["backend"])
    world.open(LONG)
    distributed_c10d._set_pg_timeout(SHORT)
    size = config["elements"]
    for _ in range(2):
        dist.all_reduce(torch.ones(size, 3))
    error, started = None, time.monotonic()
    if world.rank != world.size - 1:
        try:
            work = dist.all_reduce(torch.ones(size, 3), async_op=config["asynchronous"])
            if work is not None:
                work.wait()
        except RuntimeError as caught:
            error = caught
    told(control, world, started, error, heard_of_a_new_group(world))
    world.meet()
    end(world)


def heard_of_a_new_group(world: World) -> str:
    """What is said to those who open a group to which the last rank never comes."""
    if world.rank == world.size - 1 or world.backend == "gloo":
        return ""
    try:
        open_group(dist.PrefixStore("late", world.store), world.rank, world.size, timedelta(seconds=1), "late")
    except RuntimeError as caught:
        return str(caught)
    return ""


def end(world: World) -> None:
    """After a failure the groups may refuse to close in order: leave them to the process's end."""
    try:
        world.close()
    except RuntimeError:
        os._exit(0)


def be_killed(config: Mapping[str, Any], control: Control) -> None:
    """The last rank dies between two calls; the others hold a deadline of two minutes, and must not need it.

    It dies in a process of its own, or the launcher would end the others before they are told.
    """
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if last and (process := os.fork()):
        os.waitpid(process, 0)
        control.send({"rank": int(os.environ["RANK"]), "error": "", "seconds": 0.0, "again": ""})
        return
    world = World(config["backend"])
    world.open(LONG)
    error, started = None, time.monotonic()
    try:
        for step in range(1000):
            if step == 20 and last:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 20:
                started = time.monotonic()
            dist.all_reduce(torch.ones(config["elements"]))
    except RuntimeError as caught:
        error = caught
    try:
        dist.recv(torch.ones(7), world.size - 1)
        again = ""
    except RuntimeError as caught:
        again = str(caught)
    told(control, world, started, error, again)
    end(world)


def all_be_killed(config: Mapping[str, Any], control: Control) -> None:
    """Everybody dies with groups open and calls under way."""
    world = World(config["backend"])
    world.open(LONG)
    group = dist.new_group()
    for elements in (10, 1_000_000):
        dist.all_reduce(torch.ones(elements))
        dist.all_reduce(torch.ones(elements), group=group)
    dist.all_reduce(torch.ones(1_000_000), async_op=True)
    world.meet()
    os.kill(os.getpid(), signal.SIGKILL)


def disagree(config: Mapping[str, Any], control: Control) -> None:
    """Rank 0 calls one thing and the others another, at the same place in the order of calls."""
    world = World(config["backend"])
    world.open(timedelta(seconds=5))
    dist.all_reduce(torch.ones(3))
    error, started = None, time.monotonic()
    size = config["elements"]
    mine = config["calls"][min(world.rank, 1)]
    try:
        if mine == "all_reduce":
            dist.all_reduce(torch.ones(size))
        elif mine == "all_reduce of another shape":
            dist.all_reduce(torch.ones(size + 1))
        elif mine == "all_reduce of another dtype":
            dist.all_reduce(torch.ones(size, dtype=torch.int32))
        elif mine == "all_reduce of the greatest":
            dist.all_reduce(torch.ones(size), dist.ReduceOp.MAX)
        elif mine == "broadcast":
            dist.broadcast(torch.ones(size), 0)
        elif mine == "broadcast from another":
            dist.broadcast(torch.ones(size), 1)
        elif mine == "barrier":
            dist.barrier()
    except (RuntimeError, ValueError) as caught:
        error = caught
    told(control, world, started, error, heard_again(3, size, 3))
    world.meet()
    end(world)


def miss_a_monitored_barrier(config: Mapping[str, Any], control: Control) -> None:
    """Only ranks 0 and 1 come to the second barrier."""
    world = World(config["backend"])
    world.open(timedelta(seconds=30))
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    error, started = None, time.monotonic()
    if world.rank < 2:
        try:
            dist.monitored_barrier(timeout=SHORT, wait_all_ranks=True)
        except RuntimeError as caught:
            error = caught
    told(control, world, started, error)
    world.meet()
    end(world)
