"""The algorithm of sums: a named one, or the fastest of all, found by measuring them in place.

Choices are kept: a resumed run need not measure again, and adds in the same order.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.protocols.collectives import ALGORITHMS, Collective, algorithm
from offbeat.protocols.schedule import Layout, Member, View
from offbeat.runtime.backend import OffbeatGroup
from offbeat.runtime.collectives.two_sided import programs, run
from offbeat.runtime.run.untrusted_files import read_object

NATIVE, STOCK = "native", "gloo"
"""The backend's own choice, and torch's Gloo."""
_TRIALS = 3
_MESSAGES = ("ring", "halving_doubling", "recursive_doubling", "tree", "hierarchical")
"""Algorithms over messages that are worth trying; naive and star always lose to these."""
_MEMORY = ("one_shot", "two_shot")


class Sums:
    """Sums tensors over one group; every rank calls it in the same order."""

    def __init__(self, group: OffbeatGroup, name: str, stored: Path | None = None) -> None:
        self._group, self._name = group, name
        self._view = View(tuple(Member(rank, host) for rank, host in enumerate(group.hosts.of)))
        self._compiled = programs()
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._stored = Stored(stored, group) if stored is not None else None
        self.choices: dict[str, dict[str, Any]] = {}
        """By size class (its largest number of bytes): the choice, and the seconds of each candidate."""
        if name not in ("auto", NATIVE, STOCK):
            chosen = algorithm(Collective.ALL_REDUCE, name)
            if chosen.one_sided and group.local is None:
                raise UsageError(
                    f"{name} reads the other workers' memory, but these workers share none: they are on "
                    f"{group.hosts.count} hosts. Use native, or an algorithm over messages such as ring."
                )

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor, on every rank, by its sum over the ranks."""
        self._sum_by(self._chosen(tensor) if self._name == "auto" else self._name, tensor)

    def algorithm(self, nbytes: int) -> str:
        """The algorithm for `nbytes`; a measured one is known after the first sum."""
        name = self._name if self._name != "auto" else str(self.choices[str(size_class(nbytes))]["chosen"])
        if name in (NATIVE, STOCK):
            return self._group.algorithm(Collective.ALL_REDUCE, nbytes, stock=name == STOCK)
        return name

    def _sum_by(self, name: str, tensor: Tensor) -> None:
        group = self._group
        if name in (NATIVE, STOCK):
            group.sum_now(tensor, stock=name == STOCK)
        elif algorithm(Collective.ALL_REDUCE, name).one_sided:
            group.sum_now(tensor, name=name)
        else:
            schedule = algorithm(Collective.ALL_REDUCE, name).schedule
            layout = Layout(tensor.numel(), tensor.element_size())
            program = self._compiled(schedule, self._view, layout, group.rank())
            scratch = self._scratch.get(tensor.dtype)
            if scratch is None or scratch.numel() < program.scratch:
                scratch = self._scratch[tensor.dtype] = torch.empty(program.scratch, dtype=tensor.dtype)
            run(program, tensor.view(-1), group.messages, scratch=scratch)

    def candidates(self) -> tuple[str, ...]:
        """Algorithms worth trying on this group."""
        several = self._group.hosts.count > 1
        messages = [name for name in _MESSAGES if several or name != "hierarchical"]
        return (NATIVE, STOCK, *(() if self._group.local is None else _MEMORY), *messages)

    def _chosen(self, tensor: Tensor) -> str:
        kind = str(size_class(tensor.numel() * tensor.element_size()))
        if kind not in self.choices:
            known = None if self._stored is None else self._stored.find(kind)
            self.choices[kind] = known or self._measured(tensor)
            if known is None and self._stored is not None:
                self._stored.keep(kind, self.choices[kind])
        return str(self.choices[kind]["chosen"])

    def _measured(self, tensor: Tensor) -> dict[str, Any]:
        names, trial, medians = self.candidates(), torch.zeros_like(tensor), list[float]()
        for name in names:
            times = [time.perf_counter()]
            for _ in range(1 + _TRIALS):  # The first warms up.
                self._sum_by(name, trial)
                times.append(time.perf_counter())
            medians.append(statistics.median(stop - start for start, stop in pairwise(times[1:])))
        slowest = torch.tensor(medians, dtype=torch.float64)
        self._group.sum_now(slowest, operation=torch.distributed.ReduceOp.MAX)
        seconds = dict(zip(names, slowest.tolist(), strict=True))
        return {"chosen": min(seconds, key=seconds.__getitem__), "seconds": seconds}


class Stored:
    """Choices of earlier runs, in a file of this user that rank 0 reads for all."""

    def __init__(self, path: Path, group: OffbeatGroup) -> None:
        self._path, self._group = path, group
        hosts = "+".join(str(group.hosts.of.count(host)) for host in range(group.hosts.count))
        self._prefix = f"{hosts} workers, {os.cpu_count()} cores, torch {torch.__version__}, "

    def find(self, kind: str) -> dict[str, Any] | None:
        """The stored choice for this size class; None if there is none."""
        names = (NATIVE, STOCK, *ALGORITHMS[Collective.ALL_REDUCE])
        entry = self._read().get(self._prefix + kind) if self._group.rank() == 0 else None
        name = cast("dict[str, Any]", entry).get("chosen") if isinstance(entry, dict) else None
        number = torch.tensor([names.index(name) + 1.0 if name in names else 0.0])
        self._group.sum_now(number)
        chosen = int(number.item())
        return {"chosen": names[chosen - 1], "seconds": {}, "stored": str(self._path)} if chosen else None

    def keep(self, kind: str, choice: Mapping[str, Any]) -> None:
        """Store a choice for later runs."""
        if self._group.rank() == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._read() | {self._prefix + kind: dict(choice)}, indent=1))
            temporary.replace(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            return read_object(self._path)
        except (OSError, ValueError):
            return {}


def size_class(count: int) -> int:
    """The number of bytes, rounded up to a power of two."""
    return 1 << max(0, (count - 1)).bit_length()


def stored_choices() -> Path:
    """The file of choices that outlive a run."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "offbeat" / "choices.json"
