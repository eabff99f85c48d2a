"""Ten thousand all-reduces of random sizes, kinds, operations and groups: every value right, every rank the same bits.

Claim: at 2, 3, 4 and 5 ranks the backend `offbeat` gives, in 10,000 all-reduces of random size (nothing to 4 MiB,
log-uniform), dtype, operation and group (the world and random subgroups, several calls at once), the values that a
reduction computed locally gives, with the same bits on all ranks of the group; also with two processes beside it that
never yield a core.

What everybody brings is known to all: slices of tables that each rank makes from seeds. So each rank checks each of
its results against a reduction in the order of the ranks, and the ranks compare digests of all results in the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat as offbeat  # Registers the backend.
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment

RESULTS = Path(__file__).parent / "results"
LARGEST = 4 << 20
"""Bytes of the largest tensor."""
TOGETHER = 6
"""How many calls at most are under way at once."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.float64: 1e-12}
STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Call:
    """One all-reduce, the same for all members of its group."""

    group: int
    dtype: torch.dtype
    operation: str
    count: int
    offset: int
    asynchronous: bool


def subgroups(size: int, seed: int) -> list[list[int]]:
    """The world, and random subgroups of at least two ranks."""
    chosen = np.random.default_rng(seed)
    amounts = [int(chosen.integers(2, max(2, size - 1), endpoint=True)) for _ in range(4)]
    return [list(range(size))] + [sorted(chosen.permutation(size)[:amount].tolist()) for amount in amounts]


def calls(amount: int, groups: int, seed: int) -> Iterator[Call]:
    """What is called, in order; every rank leaves out the groups that it is not in."""
    chosen = np.random.default_rng(seed + 1)
    kinds = FLOATS + INTEGERS
    for _ in range(amount):
        dtype = kinds[chosen.integers(len(kinds))]
        operations = ARITHMETIC + (("AVG",) if dtype in FLOATS else ("BAND", "BOR", "BXOR"))
        yield Call(
            group=0 if chosen.random() < 0.5 else int(chosen.integers(groups)),
            dtype=dtype,
            operation=operations[chosen.integers(len(operations))],
            count=int(2 ** chosen.uniform(0, np.log2(LARGEST + 1)) - 1) // dtype.itemsize,
            offset=int(chosen.integers(1000)),
            asynchronous=bool(chosen.random() < 0.5),
        )


def table(rank: int, dtype: torch.dtype) -> Tensor:
    """The numbers from which a rank's contributions are cut."""
    generator = torch.Generator().manual_seed(rank)
    count = LARGEST // dtype.itemsize + 1000
    if dtype in FLOATS:
        return (torch.rand(count, generator=generator) + 0.5).to(dtype)
    return torch.randint(1, 6, (count,), generator=generator).to(dtype)


class Checker:
    """Knows what every rank brings, and what must come out."""

    def __init__(self, size: int) -> None:
        self._tables = {dtype: [table(rank, dtype) for rank in range(size)] for dtype in FLOATS + INTEGERS}

    def brought(self, call: Call, rank: int) -> Tensor:
        """A rank's contribution to a call."""
        return self._tables[call.dtype][rank][call.offset : call.offset + call.count]

    def fault(self, call: Call, ranks: Sequence[int], found: Tensor) -> str:
        """What is wrong with a result; nothing if it is right."""
        total = self.brought(call, ranks[0]).clone()
        for rank in ranks[1:]:
            total = STEPS[call.operation](total, self.brought(call, rank))
        if call.operation == "AVG":
            total = total / len(ranks)
        tolerance = TOLERANCE.get(call.dtype, 0.0)
        if torch.equal(found, total) or torch.allclose(found, total, rtol=tolerance, atol=tolerance):
            return ""
        wrong = int((found != total).sum())
        return f"{call} among {ranks}: {wrong} of {call.count} elements are wrong"


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One rank: all calls of its groups, each checked, and a digest of the results of each group."""
    dist.init_process_group(config["backend"], timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    members = subgroups(size, config["seed"])
    groups: list[Any] = [None] + [dist.new_group(ranks) for ranks in members[1:]]
    checker = Checker(size)
    digests = [0] * len(groups)
    faults: list[str] = []
    done = moved = 0

    def finish(pending: list[tuple[Call, Tensor, Any]]) -> None:
        for call, found, work in pending:
            if work is not None:
                work.wait()
            fault = checker.fault(call, members[call.group], found)
            faults.extend([fault] if fault else [])
            digests[call.group] = zlib.crc32(found.view(torch.uint8).numpy().data, digests[call.group])
        pending.clear()

    pending: list[tuple[Call, Tensor, Any]] = []
    for call in calls(config["calls"], len(groups), config["seed"]):
        if rank not in members[call.group]:
            continue
        found = checker.brought(call, rank).clone()
        operation = getattr(dist.ReduceOp, call.operation)
        work = dist.all_reduce(found, operation, groups[call.group], async_op=call.asynchronous)
        pending.append((call, found, work))
        done, moved = done + 1, moved + found.nbytes
        if len(pending) >= TOGETHER:
            finish(pending)
    finish(pending)
    mine = {str(number): digest for number, digest in enumerate(digests) if rank in members[number]}
    control.send({"rank": rank, "calls": done, "bytes": moved, "digests": mine, "faults": faults[:5]})
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def hogs(amount: int) -> Generator[None]:
    """Processes that take whatever the cores give."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(amount)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run(launcher: Launcher, ranks: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """One team's verdict."""
    heard: dict[int, Mapping[str, Any]] = {}
    store = serve_store()
    roles = [
        Role("worker", rank, f"{Path(__file__).stem}:worker", dict(config), worker_environment(rank, ranks, store.port),
             Path("/dev/null"), threads=1)
        for rank in range(ranks)
    ]  # fmt: skip
    start = time.perf_counter()
    launcher.run(roles, on_message=lambda _, message: heard.__setitem__(message["rank"], message))
    digests: dict[str, set[int]] = {}
    for message in heard.values():
        for group, digest in message["digests"].items():
            digests.setdefault(group, set()).add(digest)
    faults = [fault for message in heard.values() for fault in message["faults"]]
    same = all(len(found) == 1 for found in digests.values())
    return {
        "all-reduces": config["calls"],
        "all-reduces that each rank took part in": [heard[rank]["calls"] for rank in range(ranks)],
        "bytes reduced by each rank": [heard[rank]["bytes"] for rank in range(ranks)],
        "seconds": round(time.perf_counter() - start, 1),
        "all ranks bitwise equal": same,
        "faults": faults,
        "holds": same and not faults and len(heard) == ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--hogs", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="offbeat")
    parser.add_argument("--out", type=Path, default=RESULTS / "stress.json")
    options = parser.parse_args()
    options.out.parent.mkdir(exist_ok=True)
    config = {"calls": options.calls, "seed": options.seed, "backend": options.backend}
    results: dict[str, Any] = {}
    with Launcher() as launcher:
        for beside in options.hogs:
            for ranks in options.ranks:
                name = f"{ranks} ranks" + (f", {beside} processes beside them that never wait" if beside else "")
                with hogs(beside):
                    found = results[name] = run(launcher, ranks, config)
                verdict = "holds" if found["holds"] else "MISSED"
                print(f"{name:60} {options.calls} all-reduces in {found['seconds']:.0f} s: {verdict}", flush=True)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    holds = all(entry["holds"] for entry in results.values())
    report = {"benchmark": "stress", "environment": machine, "results": results, "holds": holds}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    if not holds:
        sys.exit("an all-reduce went wrong")


if __name__ == "__main__":
    main()
