"""Ten thousand calls of random kinds, sizes, dtypes, operations, tags and groups: every value right.

Claim: at 2, 3, 4 and 5 ranks the backend `offbeat` gives, in 10,000 calls of random kind (all-reduces, all other
collectives with even and uneven blocks, and messages with tags), size (nothing to 4 MiB, log-uniform), dtype, operation
and group (the world and random subgroups, several calls at once), the values that follow from what the ranks brought,
computed locally, and all-reduces with the same bits on all ranks of the group; also with two processes beside it that
never yield a core.

What everybody brings is known to all: slices of tables that each rank makes from seeds. So each rank checks each of
its results against a reduction in the order of the ranks, and the ranks compare digests of all sums in the end.
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


MOVES = ("broadcast", "all_gather", "all_gather_uneven", "gather", "scatter", "all_to_all", "all_to_all_uneven")
KINDS = (*MOVES, "all_reduce", "all_reduce", "all_reduce", "reduce_scatter", "reduce", "ring", "ring", "barrier")
"""Kinds of calls, some of which are more frequent; in a `ring`, everybody sends to the next rank."""


@dataclass(frozen=True)
class Call:
    """One call, the same for all members of its group."""

    kind: str
    group: int
    dtype: torch.dtype
    operation: str
    count: int
    offset: int
    asynchronous: bool
    root: int
    tag: int


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
            kind=KINDS[chosen.integers(len(KINDS))],
            group=0 if chosen.random() < 0.5 else int(chosen.integers(groups)),
            dtype=dtype,
            operation=operations[chosen.integers(len(operations))],
            count=int(2 ** chosen.uniform(0, np.log2(LARGEST + 1)) - 1) // dtype.itemsize,
            offset=int(chosen.integers(1000)),
            asynchronous=bool(chosen.random() < 0.5),
            root=int(chosen.integers(1000)),
            tag=int(chosen.integers(3)),
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

    def brought(self, call: Call, rank: int, block: int = 0, count: int | None = None) -> Tensor:
        """A rank's contribution to a call, or to a block of one."""
        start = call.offset + 7 * block
        return self._tables[call.dtype][rank][start : start + (call.count if count is None else count)]

    def sum_of(self, call: Call, ranks: Sequence[int], block: int = 0, count: int | None = None) -> Tensor:
        """The reduction of what ranks bring, in their order."""
        total = self.brought(call, ranks[0], block, count).clone()
        for rank in ranks[1:]:
            total = STEPS[call.operation](total, self.brought(call, rank, block, count))
        return total / len(ranks) if call.operation == "AVG" else total


def length(call: Call, source: int, target: int, ranks: int) -> int:
    """Elements of the block from one rank of a group to another; uneven ones differ, and some are empty."""
    each = max(0, call.count // ranks - 40)
    return each if not call.kind.endswith("uneven") else each * ((source + 2 * target + call.tag) % 3) // 2


class Attempt:
    """One rank's part of a call: begun, and later checked."""

    def __init__(self, call: Call, checker: Checker, ranks: Sequence[int], group: Any) -> None:
        self.call, self.checker, self.ranks = call, checker, ranks
        self.me, self.size, self.root = ranks.index(dist.get_rank()), len(ranks), call.root % len(ranks)
        self.found: list[Tensor] = []
        self.expected: list[Tensor] = []
        options: dict[str, Any] = {"group": group, "async_op": call.asynchronous}
        work = getattr(self, f"_{call.kind.removesuffix('_uneven')}")(options)
        self.works: list[Any] = work if isinstance(work, list) else [work]

    def _block(self, source: int, target: int, from_all: bool = False) -> Tensor:
        """What one rank sends to another; `from_all`: the same to everybody."""
        count = length(self.call, source, 0 if from_all else target, self.size)
        return self.checker.brought(self.call, self.ranks[source], 0 if from_all else target, count)

    def _results(self, expected: Sequence[Tensor]) -> list[Tensor]:
        self.expected = list(expected)
        self.found = [torch.zeros_like(tensor) for tensor in expected]
        return self.found

    def _all_reduce(self, options: Any) -> Any:
        self.found = [self.checker.brought(self.call, self.ranks[self.me]).clone()]
        self.expected = [self.checker.sum_of(self.call, self.ranks)]
        return dist.all_reduce(self.found[0], getattr(dist.ReduceOp, self.call.operation), **options)

    def _reduce(self, options: Any) -> Any:
        tensor = self.checker.brought(self.call, self.ranks[self.me]).clone()
        if self.me == self.root:
            self.found, self.expected = [tensor], [self.checker.sum_of(self.call, self.ranks)]
        return dist.reduce(tensor, self.ranks[self.root], getattr(dist.ReduceOp, self.call.operation), **options)

    def _reduce_scatter(self, options: Any) -> Any:
        count = self.call.count // self.size
        inputs = [self.checker.brought(self.call, self.ranks[self.me], block, count) for block in range(self.size)]
        output = self._results([self.checker.sum_of(self.call, self.ranks, self.me, count)])[0]
        return dist.reduce_scatter(output, inputs, getattr(dist.ReduceOp, self.call.operation), **options)

    def _broadcast(self, options: Any) -> Any:
        self.found = [self.checker.brought(self.call, self.ranks[self.me]).clone()]
        self.expected = [self.checker.brought(self.call, self.ranks[self.root])]
        return dist.broadcast(self.found[0], self.ranks[self.root], **options)

    def _all_gather(self, options: Any) -> Any:
        outputs = self._results([self._block(rank, 0, from_all=True) for rank in range(self.size)])
        return dist.all_gather(outputs, self._block(self.me, 0, from_all=True).clone(), **options)

    def _gather(self, options: Any) -> Any:
        root, mine = self.me == self.root, self._block(self.me, 0, from_all=True).clone()
        outputs = self._results([self._block(rank, 0, from_all=True) for rank in range(self.size)]) if root else None
        return dist.gather(mine, outputs, self.ranks[self.root], **options)

    def _scatter(self, options: Any) -> Any:
        inputs = [self._block(self.root, rank) for rank in range(self.size)] if self.me == self.root else None
        output = self._results([self._block(self.root, self.me)])[0]
        return dist.scatter(output, inputs, self.ranks[self.root], **options)

    def _all_to_all(self, options: Any) -> Any:
        outputs = self._results([self._block(rank, self.me) for rank in range(self.size)])
        return dist.all_to_all(outputs, [self._block(self.me, rank).clone() for rank in range(self.size)], **options)

    def _ring(self, options: Any) -> Any:
        before, after = self.ranks[self.me - 1], self.ranks[(self.me + 1) % self.size]
        output = self._results([self.checker.brought(self.call, before)])[0]
        mine = self.checker.brought(self.call, self.ranks[self.me]).clone()
        places: dict[str, Any] = {"group": options["group"], "tag": self.call.tag}
        works = [dist.irecv(output, before, **places)]
        if self.call.asynchronous:
            return [*works, dist.isend(mine, after, **places)]
        dist.send(mine, after, **places)
        return works

    def _barrier(self, options: Any) -> Any:
        return dist.barrier(**options)

    def fault(self) -> str:
        """Wait for it; what is wrong with the results, or nothing."""
        for work in self.works:
            if work is not None:
                work.wait()
        tolerance = TOLERANCE.get(self.call.dtype, 0.0)
        for found, expected in zip(self.found, self.expected, strict=True):
            if not torch.equal(found, expected) and not torch.allclose(found, expected, tolerance, tolerance):
                wrong = int((found != expected).sum())
                return f"{self.call} among {self.ranks}: {wrong} of {found.numel()} elements are wrong"
        return ""


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

    def finish(pending: list[Attempt]) -> None:
        for attempt in pending:
            fault = attempt.fault()
            faults.extend([fault] if fault else [])
            if attempt.call.kind == "all_reduce":
                raw = attempt.found[0].view(torch.uint8).numpy().data
                digests[attempt.call.group] = zlib.crc32(raw, digests[attempt.call.group])
        pending.clear()

    pending: list[Attempt] = []
    for call in calls(config["calls"], len(groups), config["seed"]):
        if rank not in members[call.group]:
            continue
        pending.append(Attempt(call, checker, members[call.group], groups[call.group]))
        done, moved = done + 1, moved + sum(tensor.nbytes for tensor in pending[-1].found)
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
        "calls": config["calls"],
        "calls that each rank took part in": [heard[rank]["calls"] for rank in range(ranks)],
        "bytes of results on each rank": [heard[rank]["bytes"] for rank in range(ranks)],
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
                print(f"{name:60} {options.calls} calls in {found['seconds']:.0f} s: {verdict}", flush=True)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    holds = all(entry["holds"] for entry in results.values())
    report = {"benchmark": "stress", "environment": machine, "results": results, "holds": holds}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    if not holds:
        sys.exit("a call went wrong")


if __name__ == "__main__":
    main()
