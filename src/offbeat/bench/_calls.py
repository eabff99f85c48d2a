"""The calls that are measured: what each peer does for a call, and how its result is verified."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from offbeat.errors import RunError

FloatArray = NDArray[np.float32]
CALLS = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"),
    *("send", "exchange"),
)
"""What can be measured. A size is that of a rank's longest tensor: an all-gather's output, a reduce-scatter's input.
`send` is one message of a ping-pong between pairs of ranks; in `exchange`, both send and receive at once."""
BLOCKWISE = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Calls whose longest tensor has an equal block for each rank: their sizes are rounded down."""
FIRST = 2.0**-100
"""Values of an all-reduce start this small, because each call multiplies them by the number of ranks."""


@dataclass
class Exercise:
    """A peer's call on arrays of this rank, which can be repeated and verified."""

    call: Callable[[], object]
    """One call; all ranks make it."""
    outputs: list[tuple[FloatArray, NDArray[Any]]] = field(default_factory=list[tuple[FloatArray, NDArray[Any]]])
    """Arrays for results, and what must be in them."""
    start: list[tuple[FloatArray, NDArray[Any]]] = field(default_factory=list[tuple[FloatArray, NDArray[Any]]])
    """Arrays that are results and inputs in one, and what is in them at first."""
    growth: float = 1.0
    """Factor by which each further call multiplies the results."""
    scale: float = 1.0
    """Size of the numbers, to which errors are compared."""
    messages: int = 1
    """Messages in a row that a call consists of; its time is divided by them."""

    def reset(self) -> None:
        """Prepare for the first call."""
        for array, _ in self.outputs:
            array.fill(0.0)
        for array, values in self.start:
            np.copyto(array, values)

    def verify(self, calls: int, what: str, every: int = 1) -> None:
        """Refuse to time wrong results, after this many calls."""
        for array, expected in self.outputs:
            apart = np.abs(array[::every] - expected[::every] * self.growth ** (calls - 1))
            scale = self.scale * self.growth ** (calls - 1)
            # Written so that a NaN, which compares as false, is refused too.
            if not bool(np.all(apart <= 1e-4 * scale)):
                raise RunError(f"wrong result of {what}: off by up to {np.max(apart) / scale:.2g} of what was put in")


Peer = Callable[[int], Exercise]
"""Makes the exercise for tensors of the given number of elements."""


def peer(name: str, call: str, timeout: timedelta) -> Peer:
    """Open a peer by name, on every rank in the same order; `gloo again` is a second gloo, to show the noise."""
    backend = name.removesuffix(" again")
    if backend == "mpi":
        # The thread level was set before the first import, see `_ranks.main`.
        mpi: Any = importlib.import_module("mpi4py.MPI")
        return lambda count: _exercise(call, count, _Mpi(mpi))
    if backend == "copy":
        return _copy
    group: Any = dist.new_group(backend="offbeat" if backend == "zero copy" else backend, timeout=timeout)
    return lambda count: _exercise(call, count, _Torch(group, backend == "zero copy"))


def _copy(count: int) -> Exercise:
    data: FloatArray = torch.ones(count).numpy()
    elsewhere: FloatArray = torch.zeros(count).numpy()
    return Exercise(lambda: np.copyto(elsewhere, data), [(elsewhere, data)])


class _Torch:
    """The calls of a torch process group, as users make them, with all that torch does around a call."""

    def __init__(self, group: Any, shared: bool) -> None:
        self._group, self._shared = group, shared
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def array(self, values: Any) -> tuple[Any, FloatArray]:
        """A tensor with these values, and the same memory as an array."""
        count = len(values)
        tensor = self._group.shared_tensor(count, torch.float32) if self._shared else torch.empty(count)
        tensor.copy_(torch.from_numpy(np.asarray(values, dtype=np.float32)))
        return tensor, tensor.numpy()

    def calls(self, call: str, mine: Any, result: Any, whole: Any = None) -> Callable[[], object]:
        """A call on these tensors; `whole`: what the root gathers or scatters."""
        group, partner = self._group, self.rank ^ 1
        blocks = None if whole is None else list(whole.chunk(self.ranks))
        if call in ("send", "exchange") and partner >= self.ranks:
            return lambda: None
        if call == "send":
            return lambda: self._ping(mine, result, partner)
        if call == "exchange":
            kinds = ((dist.isend, mine), (dist.irecv, result))
            operations = [dist.P2POp(act, tensor, partner, group) for act, tensor in kinds]
            return lambda: (
                [work.wait() for work in dist.batch_isend_irecv(operations)] if partner < self.ranks else None
            )
        anyway: Any = dist
        table: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: anyway.all_reduce(mine, group=group),
            "broadcast": lambda: anyway.broadcast(mine, 0, group=group),
            "all_gather": lambda: anyway.all_gather_single(result, mine, group=group),
            "reduce_scatter": lambda: anyway.reduce_scatter_single(result, mine, group=group),
            "all_to_all": lambda: anyway.all_to_all_single(result, mine, group=group),
            "gather": lambda: anyway.gather(mine, blocks, 0, group=group),
            "scatter": lambda: anyway.scatter(result, blocks, 0, group=group),
            "barrier": lambda: anyway.barrier(group=group),
        }
        return table[call]

    def _ping(self, mine: Any, result: Any, partner: int) -> None:
        anyway: Any = dist
        if self.rank < partner:
            anyway.send(mine, partner, group=self._group)
            anyway.recv(result, partner, group=self._group)
        else:
            anyway.recv(result, partner, group=self._group)
            anyway.send(mine, partner, group=self._group)


class _Mpi:
    """The calls of MPI through mpi4py, on arrays."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self.rank, self.ranks = self._world.rank, self._world.size

    def array(self, values: Any) -> tuple[Any, FloatArray]:
        """An array with these values, twice."""
        data: FloatArray = torch.empty(len(values)).numpy()  # Not numpy's own memory, which may be of huge pages.
        np.copyto(data, values)
        return data, data

    def calls(self, call: str, mine: Any, result: Any, whole: Any = None) -> Callable[[], object]:
        """A call on these arrays; `whole`: what the root gathers or scatters."""
        mpi, world, partner = self._mpi, self._world, self.rank ^ 1
        if call in ("send", "exchange") and partner >= self.ranks:
            return lambda: None
        table: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, mine),
            "broadcast": lambda: world.Bcast(mine, 0),
            "all_gather": lambda: world.Allgather(mine, result),
            "reduce_scatter": lambda: world.Reduce_scatter_block(mine, result),
            "all_to_all": lambda: world.Alltoall(mine, result),
            "gather": lambda: world.Gather(mine, whole, 0),
            "scatter": lambda: world.Scatter(whole, result, 0),
            "barrier": lambda: world.Barrier(),
            "exchange": lambda: world.Sendrecv(mine, partner, 0, result, partner, 0),
            "send": lambda: (
                (world.Send(mine, partner), world.Recv(result, partner))
                if self.rank < partner
                else (world.Recv(result, partner), world.Send(mine, partner))
            ),
        }
        return table[call]


def _exercise(call: str, count: int, peer: _Torch | _Mpi) -> Exercise:
    """The exercise of a call: inputs of random numbers, and results that follow from all ranks' inputs."""
    rank, ranks = peer.rank, peer.ranks
    each = count // ranks
    data = [np.random.default_rng(other).standard_normal(count, dtype=np.float32) for other in range(ranks)]
    block = slice(rank * each, (rank + 1) * each)
    if call == "all_reduce":
        tensor, array = peer.array(data[rank] * np.float32(FIRST))
        total = np.sum([values * np.float64(FIRST) for values in data], axis=0)
        own = data[rank] * np.float32(FIRST)
        done = peer.calls(call, tensor, tensor)
        return Exercise(done, [(array, total)], [(array, own)], float(ranks), ranks * FIRST)
    if call == "broadcast":
        tensor, array = peer.array(data[rank])
        return Exercise(peer.calls(call, tensor, tensor), [(array, data[0])], [(array, data[rank])])
    if call == "barrier":
        return Exercise(peer.calls(call, None, None))
    inputs = {"all_gather": data[rank][:each], "gather": data[rank][:each]}.get(call, data[rank][: each * ranks])
    expected: dict[str, Any] = {
        "all_gather": lambda: np.concatenate([values[:each] for values in data]),
        "reduce_scatter": lambda: np.sum([values[block].astype(np.float64) for values in data], axis=0),
        "all_to_all": lambda: np.concatenate([values[block] for values in data]),
        "scatter": lambda: data[0][block],
        "gather": lambda: np.zeros(0),
    }
    if call in ("send", "exchange"):
        partner = rank ^ 1
        mine, _ = peer.array(data[rank])
        result, received = peer.array(np.zeros(count))
        outputs = [(received, data[partner])] if partner < ranks else []
        return Exercise(peer.calls(call, mine, result), outputs, messages=2 if call == "send" else 1)
    mine, _ = peer.array(inputs)
    wanted = expected[call]()
    result, received = peer.array(np.zeros(len(wanted)))
    outputs: list[tuple[FloatArray, NDArray[Any]]] = [(received, wanted)]
    whole = None
    if call in ("gather", "scatter") and rank == 0:
        whole, array = peer.array(np.zeros(each * ranks) if call == "gather" else data[0][: each * ranks])
        if call == "gather":
            outputs = [(array, np.concatenate([values[:each] for values in data]))]
    scale = float(ranks) if call == "reduce_scatter" else 1.0
    return Exercise(peer.calls(call, mine, result, whole), outputs, scale=scale)
