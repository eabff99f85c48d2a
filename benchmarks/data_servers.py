"""How fast data servers feed a worker, against a DataLoader's processes, Ray Data, and the link between two hosts.

Claims, with examples that take a processor 1 ms to decode into a small image, and two processes that do so: data
servers bring at least 0.95 of the examples per second of `DataLoader(num_workers=2)` on the same cores, and at least
3 times those of Ray Data's `iter_torch_batches` with two tasks at a time; and between two hosts at 1 Gbit/s, with
examples that need no decoding, the payload takes at least 0.9 of the link.

What each one brings is verified first. Then one process reads some batches from each in turn, in an order that rotates;
two copies of the data servers show the noise floor. Ray prepares far ahead while others have their turn, so beside Ray
a block is a whole pass over as many examples, from asking for it to its last batch, and nothing is prepared between
passes; a second row has examples that need no decoding. Without Ray these rows are left out with the reason, and
without root that of the link.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import offbeat
from offbeat.bench import environment, holds, ratio
from offbeat.protocols.data_servers.messages import data_server_name
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loader_sources import Epoch, Share
from offbeat.runtime.data_servers.link import DataLink
from offbeat.runtime.data_servers.plan import DataServerPlan
from offbeat.runtime.data_servers.sources import SuppliedBatches
from offbeat.runtime.hosts import Host, Hosts, placed, why_not
from offbeat.runtime.launch import Control, Launcher, Role
from offbeat.runtime.messages import Keys, private_directory
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.state.random_state import Own, capture

RESULTS = Path(__file__).parent / "results"
BATCH, PROCESSES = 32, 2
LOADER, RAY, LINK = 0.95, 3.0, 0.9
RATE = 125e6
"""Bytes per second of a link of 1 Gbit/s."""
OURS, AGAIN, THEIRS, RAYS = "data servers", "data servers again", "DataLoader", "Ray Data"
PORT = 24_500


def decoded(index: int, milliseconds: float) -> Tensor:
    """A small image, after so much computing."""
    end = time.thread_time() + milliseconds / 1000
    while time.thread_time() < end:
        pass
    return torch.full((3, 32, 32), index % 251, dtype=torch.uint8)


class Images(Dataset[Any]):
    """Numbered images that take a processor some time to decode; or large blocks that take none."""

    def __init__(self, count: int, milliseconds: float, size: int) -> None:
        self._count, self._milliseconds = count, milliseconds
        self._block = torch.zeros(size, dtype=torch.uint8) if size else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = decoded(index, self._milliseconds) if self._block is None else self._block
        return image, index


@dataclass(eq=False)
class Decoding(offbeat.Task):
    """A task of which only the data matters."""

    examples: int = 1 << 20
    milliseconds: float = 1.0
    size: int = 0

    def __post_init__(self) -> None:
        self.global_batch = BATCH

    def data(self) -> offbeat.Data:
        images = Images(self.examples, self.milliseconds, self.size)
        return offbeat.Data(images, images, images)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def score(self, model: nn.Module, data: Any) -> float:
        del model, data
        return 0.0


def loader(task: Decoding, processes: int = 0) -> DataLoader[Any]:
    """The examples in order, so that what arrives is known."""
    more: dict[str, Any] = {"prefetch_factor": 2, "persistent_workers": True} if processes else {}
    return DataLoader(task.data().train, batch_size=BATCH, num_workers=processes, **more)


def from_servers(plan: DataServerPlan, task: Decoding) -> Iterator[Iterator[Any]]:
    """Passes over the batches that data servers prepare."""
    source = SuppliedBatches(loader(task), Share(0, 1, 0, 0), Parts(), DataLink(plan, 0, 120.0))
    for number in count(1):
        yield (batch.content for batch in source.batches(Epoch(number, 0, Own(capture()), 0)))


def from_ray(task: Decoding) -> Iterator[Iterator[Any]]:
    """Passes over batches of Ray Data, decoded by two tasks at a time."""
    import ray

    milliseconds = task.milliseconds

    def decode(rows: Any) -> Any:
        images = [decoded(int(index), milliseconds).numpy() for index in rows["id"]]
        return {"image": np.stack(images), "id": rows["id"]}

    ray.init(num_cpus=PROCESSES, include_dashboard=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    while True:
        rows = ray.data.range(task.examples).map_batches(decode, batch_size=BATCH, concurrency=PROCESSES)
        batches = rows.iter_torch_batches(batch_size=BATCH, prefetch_batches=2 * PROCESSES)
        yield ((batch["image"], batch["id"]) for batch in batches)


def read(config: Mapping[str, Any], control: Control) -> None:
    """The process that reads from each in turn, and reports examples per second of each block."""
    torch.set_num_threads(1)
    task = Decoding(**config["task"])
    plans = [DataServerPlan.from_plain(plan) for plan in config["plans"]]
    ways: dict[str, Callable[[], Iterator[Iterator[Any]]]] = {
        OURS: lambda: from_servers(plans[0], task),
        AGAIN: lambda: from_servers(plans[-1], task),
        THEIRS: lambda: repeat(iter(loader(task, PROCESSES))),
        RAYS: lambda: from_ray(task),
    }
    names: Sequence[str] = config["ways"]
    passes = {name: ways[name]() for name in names}
    streams = {name: next(passes[name]) for name in names}
    whole = config["whole"]
    for name, stream in streams.items():
        _verify(name, list(stream) if whole else [next(stream) for _ in range(3 * PROCESSES)], task)
    for block in range(-1, config["blocks"]):
        for turn in range(len(names)):
            name = names[(block + 1 + turn) % len(names)]
            if not whole:  # What was prepared while others had their turn does not count.
                _drain(streams[name], 4 * PROCESSES)
            start = time.perf_counter()
            stream = next(passes[name]) if whole else streams[name]
            nbytes = sum(batch[0].nbytes for batch in islice(stream, config["batches"]))
            if whole and next(stream, None) is not None:
                raise AssertionError(f"{name} has more examples than there are")
            seconds = time.perf_counter() - start
            if block >= 0:
                examples = config["batches"] * BATCH
                figures = {"examples": examples / seconds, "bytes": nbytes / seconds}
                control.send({"way": name, "block": block, "figures": figures})


def _drain(stream: Iterator[Any], count: int) -> None:
    for _ in islice(stream, count):
        pass


def _verify(name: str, batches: Sequence[Any], task: Decoding) -> None:
    numbers = torch.cat([torch.as_tensor(index) for _, index in batches])
    if numbers.tolist() != list(range(len(numbers))):
        raise AssertionError(f"{name} brings other examples, or in another order: {numbers[:40].tolist()}")
    if not task.size:
        images = torch.cat([torch.as_tensor(image) for image, _ in batches])
        expected = (numbers % 251).to(torch.uint8).view(-1, 1, 1, 1).expand_as(images)
        if not torch.equal(images, expected):
            raise AssertionError(f"{name} brings other images")


def servers(plan: DataServerPlan, task: Decoding, folder: Path, label: str, network: Path | None) -> list[Role]:
    """The processes of the data servers of a run, as `offbeat run` starts them."""
    reference = {"source": str(Path(__file__).resolve()), "name": "Decoding", "arguments": vars(task)["_arguments"]}
    config = {"plan": plan.plain(), "disturb": [], "goal": Goal(seed=0).plain(), "task": reference}
    return [
        Role(
            "data server", number, "offbeat.worker.data_server:hand_out", {**config, "number": number}, {},
            folder / f"{label}-{number}.log", 1, serves=True, network=network, name=f"{label} {number}",
        )
        for number in range(plan.count)
    ]  # fmt: skip


def timed(
    launcher: Launcher, task: Decoding, plans: Sequence[DataServerPlan], options: argparse.Namespace,
    ways: Sequence[str], networks: tuple[Path | None, Path | None] = (None, None),
) -> dict[str, list[dict[str, float]]]:  # fmt: skip
    """The figures of each block of each way."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ways}

    def hear(role: Role, message: Mapping[str, Any]) -> None:
        del role
        if "way" in message:
            figures[message["way"]].append(dict(message["figures"]))

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "task": vars(task)["_arguments"],
            "plans": [plan.plain() for plan in plans],
            "ways": list(ways),
            "blocks": options.blocks,
            "batches": options.batches,
            "whole": RAYS in ways,
        }
        reader = Role("worker", 0, "data_servers:read", config, {}, Path(folder) / "0.log", 1, network=networks[0])
        roles = [reader]
        for number, plan in enumerate(plans):
            roles += servers(plan, task, Path(folder), f"data servers {number},", networks[1])
        launcher.run(roles, on_message=hear)
    return figures


def local_rows(launcher: Launcher, options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Against DataLoader, and the noise floor."""
    task = Decoding(milliseconds=options.milliseconds)
    plans: list[DataServerPlan] = []
    for name in ("ours", "again"):
        (directory / name).mkdir(mode=0o700)
        plans.append(DataServerPlan(count=PROCESSES, folder=str(directory / name)))
    figures = timed(launcher, task, plans, options, [OURS, AGAIN, THEIRS])
    rates = {name: [each["examples"] for each in blocks] for name, blocks in figures.items()}
    against, noise = ratio(rates[OURS], rates[THEIRS]), ratio(rates[OURS], rates[AGAIN])
    name = f"examples per second, {OURS} / {THEIRS}"
    print(f"  {name}: {against}; the same twice: {noise}; medians {_medians(rates)}", flush=True)
    return [
        {
            "bar": name,
            "at least": LOADER,
            "found": against.plain(),
            "noise": noise.plain(),
            "examples per second": _medians(rates),
            "holds": holds(against, at_least=LOADER),
        }
    ]


def ray_rows(launcher: Launcher, options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Against Ray Data, where it is installed."""
    name = f"examples per second, {OURS} / {RAYS}"
    if missing := [module for module in ("ray", "pandas", "pyarrow") if importlib.util.find_spec(module) is None]:
        reason = f"{missing[0]} is not installed: pip install 'ray[data]'"
        print(f"  {name}: left out, {reason}", flush=True)
        return [{"bar": name, "left out": reason, "holds": True}]
    rows: list[dict[str, Any]] = []
    for milliseconds in (options.milliseconds, 0.0):
        (directory / f"ray-{milliseconds:g}").mkdir(mode=0o700)
        plan = DataServerPlan(count=PROCESSES, folder=str(directory / f"ray-{milliseconds:g}"))
        task = Decoding(examples=options.batches * BATCH, milliseconds=milliseconds)
        figures = timed(launcher, task, [plan], options, [OURS, RAYS])
        rates = {way: [each["examples"] for each in blocks] for way, blocks in figures.items()}
        against, medians = ratio(rates[OURS], rates[RAYS]), _medians(rates)
        row = {"bar": name, "found": against.plain(), "examples per second": medians}
        if milliseconds:
            row |= {"at least": RAY, "holds": holds(against, at_least=RAY)}
        else:
            row |= {"bar": f"{name}, nothing to decode", "holds": True}
        print(f"  {row['bar']}: {against}; medians {medians}", flush=True)
        rows.append(row)
    return rows


def link_rows(launcher: Launcher, options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Over a link of 1 Gbit/s, where hosts can be made."""
    name = "share of a link of 1 Gbit/s"
    if (reason := why_not()) is not None:
        print(f"  {name}: left out, {reason}", flush=True)
        return [{"bar": name, "left out": reason, "holds": True}]
    del directory
    hosts = Hosts((Host("a", workers=1, rate="1Gbit"), Host("b", workers=0, servers=1, rate="1Gbit")))
    with placed(hosts) as there, private_directory() as sockets:
        keys = Keys.generate()
        addresses = {data_server_name(n): f"tcp://{there.hosts[1].address}:{PORT + n}" for n in range(PROCESSES)}
        pair = keys.public, keys.secret
        plan = DataServerPlan(count=PROCESSES, folder=str(sockets), addresses=addresses, pair=pair)
        networks = there.hosts[0].network, there.hosts[1].network
        task = Decoding(examples=1 << 18, milliseconds=0.0, size=64 << 10)
        figures = timed(launcher, task, [plan], options, [OURS], networks)
    shares = [each["bytes"] / RATE for each in figures[OURS]]
    against = ratio([each["bytes"] for each in figures[OURS]], [RATE] * len(shares))
    print(f"  {name}: {against}", flush=True)
    return [{"bar": name, "at least": LINK, "found": against.plain(), "holds": holds(against, at_least=LINK)}]


def _medians(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(float(np.median(blocks)), 1) for name, blocks in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--batches", type=int, default=200, help="batches of a block")
    parser.add_argument("--milliseconds", type=float, default=1.0, help="processor time of decoding an example")
    parser.add_argument("--out", type=Path, default=RESULTS / "data_servers.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with Launcher() as launcher, private_directory() as directory:
        for part in (local_rows, ray_rows, link_rows):
            rows += part(launcher, options, directory)
    for row in rows:
        if "found" in row:
            print(f"{'holds ' if row['holds'] else 'MISSED'} {row['bar']}: {row['found']}", flush=True)
    stored = {
        "benchmark": "data servers",
        "holds": all(row["holds"] for row in rows),
        "environment": environment(),
        "bars": rows,
        "results": {"blocks": options.blocks, "batches": options.batches, "batch": BATCH, "processes": PROCESSES},
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not stored["holds"]:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()
