"""Draw an iteration of Sandblaster as it was played on real sockets, for docs/sandblaster.md.

Coordinator, shards and workers are those of a run, each in a thread of this process instead of a process of its own, so
that they have one clock. Coordinator and shards note what they send and receive: one end of every message is theirs.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.draw import picture
from offbeat.monitor.diagram.svg import write
from offbeat.protocols.machine import Received, Send
from offbeat.protocols.sandblaster.lbfgs import Lbfgs
from offbeat.protocols.sandblaster.minimizer import Minimizer
from offbeat.protocols.sandblaster.replica import VectorShard
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.messages import Endpoint, drive
from offbeat.runtime.sandblaster.link import ShardLink
from offbeat.runtime.sandblaster.plan import CountingCodec, SandblasterPlan
from offbeat.runtime.sandblaster.registers import Registers
from offbeat.runtime.servers.plan import Lines, ServerPlan
from offbeat.simulate.schedules import Activity, Interval, Message
from offbeat.simulate.timeline import Timeline

HERE = Path(__file__).parent
WORKERS, SHARDS, PORTIONS, FEATURES, ITERATIONS, SHOWN = 3, 2, 8, 2_000, 4, 3
PORTION_SECONDS = 0.02
LANES = ("coordinator", "shard 0", "shard 1", "worker 0", "worker 1", "worker 2")
NAMES = {"server 2.0": 0, "server 0.0": 1, "server 1.0": 2, "worker 0": 3, "worker 1": 4, "worker 2": 5}


class Log:
    """What was sent and received, and when."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[tuple[float, str, int]]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[tuple[float, str, int]]] = defaultdict(list)
        self.computed: list[Interval] = []

    def after(self, name: str) -> Any:
        """Note an event and its effects."""

        def note(event: Any, effects: Any) -> None:
            now = time.monotonic()
            if isinstance(event, Received) and event.sender in NAMES:
                known = now, type(event.message).__name__.lower(), event.payload.nbytes
                self.received[NAMES[event.sender], NAMES[name]].append(known)
            for effect in effects:
                if isinstance(effect, Send) and effect.to in NAMES:
                    known = now, type(effect.message).__name__.lower(), effect.payload.nbytes
                    self.sent[NAMES[name], NAMES[effect.to]].append(known)

        return note

    def messages(self, start: float, end: float) -> list[Message]:
        """All between two moments. Where one end only was noted, the message is shown at that moment."""
        found: list[Message] = []
        for pair in self.sent.keys() | self.received.keys():
            left, came = self.sent.get(pair), self.received.get(pair)
            for (begin, label, nbytes), (arrival, *_) in zip(left or came or (), came or left or (), strict=False):
                if start <= begin <= end:
                    at, then = begin - start, arrival - start
                    found.append(Message(*pair, nbytes, at, at, then, then, then, label))
        return found


def serve(machine: Any, plan: SandblasterPlan, work: Any, log: Log, over: threading.Event) -> None:
    """A shard or the coordinator, until all is over."""
    servers = plan.servers
    with Endpoint(machine.name, CountingCodec(), bind=servers.address(machine.name)) as endpoint:
        if machine.name == "server 2.0":
            Lines(servers, endpoint).reach(["server 0.0", "server 1.0"])
        drive(machine, endpoint, work, until=over.is_set, after=log.after(machine.name))


def work(rank: int, plan: SandblasterPlan, log: Log, barrier: threading.Barrier, ends: list[float]) -> None:
    """A worker: least squares, with portions that take a while."""
    link = ShardLink(plan, rank, lambda: None)
    row, scale = np.ones(FEATURES), np.linspace(1, 9, FEATURES)

    def compute(portion: int, at: Any) -> tuple[float, Any]:
        begun = time.monotonic()
        time.sleep(PORTION_SECONDS)
        gradient = scale * at / PORTIONS
        log.computed.append(Interval(3 + rank, begun, time.monotonic(), Activity.COMPUTE, f"{portion}", f"{portion}"))
        return float(gradient @ at) / 2, gradient

    link.begin(row, 0)
    if rank == 0:
        link.load(row)
    barrier.wait()
    for _ in range(ITERATIONS):
        link.iterate(compute)
        link.read()
        barrier.wait()
        ends.append(time.monotonic())
    link.close()


def played() -> Timeline:
    """The iteration that is shown."""
    log, over, barrier, ends = Log(), threading.Event(), threading.Barrier(WORKERS), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        servers = ServerPlan(
            workers=WORKERS, shards=SHARDS + 1, replicas=0, rule=Rule(None), folder=folder, vectors=True
        )
        plan = SandblasterPlan(servers=servers, portions=PORTIONS, history=10, tolerance=0.0)
        minimizer = Minimizer(Lbfgs(10, 0.0, 0.0), PORTIONS, servers.view)
        threads = [threading.Thread(target=serve, args=(minimizer, plan, lambda *_: None, log, over))]
        for shard in range(SHARDS):
            machine = VectorShard(shard, servers.view)
            threads.append(threading.Thread(target=serve, args=(machine, plan, Registers().do, log, over)))
        runners = [threading.Thread(target=work, args=(k, plan, log, barrier, ends)) for k in range(WORKERS)]
        for thread in (*threads, *runners):
            thread.start()
        for thread in runners:
            thread.join()
        over.set()
        for thread in threads:
            thread.join()
    moments = sorted(ends)[WORKERS - 1 :: WORKERS]
    start, end = moments[SHOWN - 2], moments[SHOWN - 1]
    computed = [
        each._replace(begin=each.begin - start, end=each.end - start)
        for each in log.computed
        if start <= each.begin <= end
    ]
    title = f"sandblaster(shards={SHARDS}, portions={PORTIONS})"
    return Timeline(
        title, LANES, tuple(range(len(LANES))), tuple(computed), tuple(log.messages(start, end)), clock="time"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    timeline = played()
    words = f"iteration {SHOWN} of a run on real sockets, in real time: {len(timeline.messages)} messages"
    write(picture(timeline, words), HERE / "sandblaster-real.svg")
