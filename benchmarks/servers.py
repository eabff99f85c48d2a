"""Push and pull of parameters: our servers against a Ray actor and against plain pyzmq, interleaved.

Claims, with one worker and one shard on one host: push and pull of 25 MiB together are at least 6x faster than over a
Ray actor and at least 2x faster than over plain pyzmq on loopback TCP; and a round trip of 4 KB takes at most 0.3 of
Ray's. All three do the same: the worker's numbers reach the server, which adds them to its own, and the result comes
back into the worker's own memory. Ours and the Ray actor have two verbs, push and pull, and are given tensors; what a
Ray actor can do at best, NumPy arrays in a single call, is measured too. Ray needs `pip install ray`; without it only
pyzmq is compared.

One block of each kind times some round trips; blocks of the kinds take turns. Ours is measured twice in each turn, and
the two against each other show the noise.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from offbeat.bench import environment, holds, ratio
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.notices import LoadRequest, PushRequest, whole_shards
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.launch import Control, Launcher, Role
from offbeat.runtime.messages import private_directory
from offbeat.runtime.servers.client import Client
from offbeat.runtime.servers.coordination import Coordination
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.runtime.servers.shard_state import first_state
from offbeat.runtime.servers.updater import ADD, Recipe

RESULTS = Path(__file__).parent / "results"
LARGE, SMALL = 25 << 20, 4 << 10
OURS, AGAIN, PLAIN, RAY, RAY_ONCE = "offbeat", "offbeat again", "pyzmq", "ray", "ray, NumPy in one call"
Trip = Callable[[], None]
Floats = NDArray[np.float32]


def ours(plan: ServerPlan, given: Floats, taken: Floats) -> tuple[Trip, Callable[[], None]]:
    """One push and pull through our client, and how to end it."""
    client = Client(plan, 0, 60.0)
    memory = Segment.create(given.nbytes)
    client.connection.lend(memory)
    slot = memory.tensor(0, given.size, torch.float32).numpy()
    client.takes = lambda _, values: np.copyto(taken, values.view(np.float32))
    state = first_state(Recipe(optimizer=ADD), torch.zeros(given.size))
    client.answer(LoadRequest(whole_shards([state]), [0], 0), "the load")
    clock = 0

    def trip() -> None:
        nonlocal clock
        np.copyto(slot, given)
        asked = client.ask(PushRequest(whole_shards([slot.view(np.uint8)]), clock, then_pull=True))
        client.wait(asked.pull, "the pull")
        client.wait(asked.token, "the push")
        clock += 1

    return trip, client.close


def serve_plainly(port: Any, count: int) -> None:
    """A server of plain pyzmq: adds what comes, and sends the result."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    values = np.zeros(count, np.float32)
    while True:
        sender, frame = socket.recv_multipart(copy=False)
        numbers = np.frombuffer(frame.buffer, np.float32)
        if not numbers.size:
            break
        np.add(values, numbers, values)
        socket.send_multipart([sender.bytes, cast("Any", values)], copy=False)
    context.destroy(linger=0)


def plain(given: Floats, taken: Floats) -> tuple[Trip, Callable[[], None]]:
    """One push and pull over plain pyzmq on loopback TCP."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve_plainly, args=(there, given.size), daemon=True)
    process.start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{here.recv()}")

    def trip() -> None:
        socket.send(cast("Any", given), copy=False)
        np.copyto(taken, np.frombuffer(socket.recv(copy=False).buffer, np.float32))

    def end() -> None:
        socket.send(b"")
        process.join(5)
        context.destroy(linger=0)

    return trip, end


def the_peer() -> Any:
    """Ray, which need not be installed."""
    return importlib.import_module("ray")


def by_ray(given: Floats, taken: Floats, at_once: bool) -> tuple[Trip, Callable[[], None]]:
    """A Ray actor: tensors by its two verbs, or NumPy arrays in one call, which is the fastest it can do."""
    ray = the_peer()

    class Server:
        def __init__(self, count: int) -> None:
            self.values = torch.zeros(count)

        def push(self, numbers: torch.Tensor) -> None:
            self.values += numbers

        def pull(self) -> torch.Tensor:
            return self.values

        def push_and_pull(self, numbers: Floats) -> Floats:
            own = self.values.numpy()
            np.add(own, numbers, own)
            return own

    server = ray.remote(Server).remote(given.size)
    tensor = torch.from_numpy(given)

    def twice() -> None:
        ray.get(server.push.remote(tensor))
        np.copyto(taken, ray.get(server.pull.remote()).numpy())

    def once() -> None:
        np.copyto(taken, ray.get(server.push_and_pull.remote(given)))

    return once if at_once else twice, partial(ray.kill, server)


def worker(config: Mapping[str, Any], control: Control) -> None:
    """The process that pushes and pulls, by all ways in turn."""
    plan, count = ServerPlan.from_plain(config["plan"]), config["nbytes"] // 4
    given = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    ways: dict[str, tuple[Trip, Callable[[], None]]] = {}
    taken = {name: np.empty_like(given) for name in (OURS, PLAIN, RAY, RAY_ONCE)}
    ways[OURS] = ours(plan, given, taken[OURS])
    ways[PLAIN] = plain(given, taken[PLAIN])
    if config["ray"]:
        the_peer().init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
        ways[RAY] = by_ray(given, taken[RAY], at_once=False)
        ways[RAY_ONCE] = by_ray(given, taken[RAY_ONCE], at_once=True)
    for name, (trip, _) in ways.items():
        for _ in range(3):
            trip()
        np.testing.assert_allclose(taken[name], given * 3, rtol=1e-5)
    order = [*ways, AGAIN]
    for block in range(-1, config["blocks"]):
        turn = block % len(order)
        for name in order[turn:] + order[:turn]:
            trip = ways[OURS if name == AGAIN else name][0]
            start = time.perf_counter()
            for _ in range(config["trips"]):
                trip()
            if block >= 0:
                control.send({"way": name, "seconds": (time.perf_counter() - start) / config["trips"]})
    for _, end in ways.values():
        end()


def measured(nbytes: int, trips: int, blocks: int, with_ray: bool, launcher: Launcher) -> dict[str, list[float]]:
    """Block times by way."""
    times: dict[str, list[float]] = {}

    def heard(_: Role, message: Mapping[str, Any]) -> None:
        if "way" in message:
            times.setdefault(message["way"], []).append(message["seconds"])

    with private_directory() as sockets, tempfile.TemporaryDirectory() as logs:
        plan = ServerPlan(workers=1, shards=1, replicas=0, rule=Rule(None), folder=str(sockets))
        config = {"plan": plan.plain(), "nbytes": nbytes, "trips": trips, "blocks": blocks, "ray": with_ray}
        serving = {"plan": plan.plain(), "shard": 0, "replica": 0, "disturb": [], "seed": 0}
        roles = [
            Role("worker", 0, f"{Path(__file__).stem}:worker", config, {}, Path(logs) / "worker.log", threads=1),
            Role("server", 0, "offbeat.runtime.servers.process:serve", serving, {}, Path(logs) / "server.log",
                 threads=1, serves=True),
        ]  # fmt: skip
        with Coordination(plan):
            launcher.run(roles, on_message=heard)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS / "servers.json")
    options = parser.parse_args()
    with_ray = importlib.util.find_spec("ray") is not None
    with Launcher() as launcher:
        large = measured(LARGE, 3, options.blocks, with_ray, launcher)
        small = measured(SMALL, 100, options.blocks, with_ray, launcher)
    bars: list[dict[str, Any]] = []

    def bar(name: str, a: list[float], b: list[float], **limit: float) -> None:
        found = ratio(a, b)
        bars.append(
            {"bar": name}
            | {key.replace("_", " "): value for key, value in limit.items()}
            | {"found": found.plain(), "holds": holds(found, **limit)}
        )

    bar("push and pull of 25 MiB, pyzmq / offbeat", large[PLAIN], large[OURS], at_least=2.0)
    if with_ray:
        bar("push and pull of 25 MiB, ray / offbeat", large[RAY], large[OURS], at_least=6.0)
        bar("round trip of 4 KB, offbeat / ray in one call", small[OURS], small[RAY_ONCE], at_most=0.3)
    stored = {
        "benchmark": "servers",
        "holds": with_ray and all(entry["holds"] for entry in bars),
        "environment": environment(),
        "bars": bars,
        "results": {
            size: {
                "milliseconds": {name: 1e3 * float(np.median(own)) for name, own in times.items()},
                "offbeat again / offbeat (noise)": ratio(times[AGAIN], times[OURS]).plain(),
            }
            for size, times in (("25 MiB", large), ("4 KB", small))
        },
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    print(json.dumps({"bars": bars, "results": stored["results"]}, indent=1))
    if not stored["holds"]:
        sys.exit("a bar was missed, or ray is not installed")


if __name__ == "__main__":
    main()
