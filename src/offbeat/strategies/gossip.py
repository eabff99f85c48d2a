"""No centre: every worker steps, then mixes its model with those of its neighbours on a sparse graph.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel
Stochastic Gradient Descent" (2017), algorithm 1, with the step before the mixing. Asynchronously: Lian et al.,
"Asynchronous Decentralized Parallel Stochastic Gradient Descent" (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.compression import RowFormat
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.gossip.mixing import mix
from offbeat.protocols.gossip.topology import GraphShape, Mixing, RandomRegular, mixing
from offbeat.protocols.partition import mixed
from offbeat.protocols.schedule import Layout, View
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.collectives.two_sided import programs
from offbeat.runtime.compression import together
from offbeat.runtime.groups.coordinated import CoordinatedGroup
from offbeat.runtime.groups.group import Group
from offbeat.runtime.groups.neighbours import Neighbours
from offbeat.runtime.hosts.link_probe import measured
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.simulate.predicted_step import Step, Timed
from offbeat.strategies._base import Axis, Setting, Strategy, Traits, require
from offbeat.strategies.worker.async_gossip import Pairing
from offbeat.strategies.worker.choco import Estimates
from offbeat.strategies.worker.compression import compressor
from offbeat.strategies.worker.exchange import Exchange, Exchanging
from offbeat.strategies.worker.flat_rows import Rows, parameters_of, still_fits
from offbeat.strategies.worker.model_mixing import Parted
from offbeat.strategies.worker.step_cost import CODED, as_matrix, formats, why_not


@dataclass(frozen=True)
class Random(Setting):
    """A connected random graph in which everybody has the same number of neighbours."""

    degree: int
    """Neighbours of each worker."""
    seed: int = 0
    """Which of these graphs."""

    def __post_init__(self) -> None:
        """Refuse a graph without edges."""
        super().__post_init__()
        require(self.degree >= 1, self, "degree", self.degree, "who has no neighbour never agrees with anybody")
        require(self.seed >= 0, self, "seed", self.seed, "seeds are counted from 0")


@dataclass(frozen=True)
class Gossip(Exchanging):
    """No centre: every worker steps by itself, then mixes its model with those of its neighbours on a graph.

    A worker takes the mean of its own and its neighbours' models by weights that are the same both ways (Metropolis),
    so that the mean of all models is kept. Evaluations see the mean of all, and that is the model which a run leaves.
    """

    topology: GraphShape | Random = GraphShape.RING
    """Who mixes with whom: ring, torus, exponential, complete, or random(d)."""
    asynchronous: bool = False
    """Whether a worker averages with one random neighbour at a time, when both can, instead of all after each step."""
    gamma: float = 0.2
    """With a compressor: how far a worker moves towards what it thinks of its neighbours; less for coarser ones."""

    @property
    def traits(self) -> Traits:
        """Where all mix after the same step, the same bits in every run; without a beat, going on without the dead."""
        return Traits(deterministic=not self.asynchronous, elastic=self.asynchronous)

    @property
    def parting(self) -> bool:
        """Workers may mix less often than they step."""
        return True

    mixes = True
    carries = True
    sends_letters = True
    aliases: ClassVar = {"dpsgd": "gossip"}
    examples = (
        "gossip",
        "gossip(exponential)",
        "gossip(random(3))",
        "gossip(torus) + local(4)",
        "gossip(asynchronous=True)",
        "gossip + quantize(4)",
    )

    def __post_init__(self) -> None:
        """Refuse a move that overshoots, or none."""
        super().__post_init__()
        require(0 < self.gamma <= 1, self, "gamma", self.gamma, "a worker moves by more than nothing, and not too far")

    def refuses(self, other: Strategy) -> str | None:
        """Compressors, where neighbours change: estimates are kept of the same ones."""
        if other.axis is not Axis.COMPRESSION:
            return None
        if self.asynchronous:
            return "pairs that meet by chance keep no estimates of each other, which letters need"
        if self.topology is GraphShape.EXPONENTIAL:
            return (
                "on the exponential graph neighbours change in every step, and letters need estimates of the same ones"
            )
        return None

    def check(self, workers: int) -> None:
        """Refuse a number of workers that the graph cannot have."""
        super().check(workers)
        self.mixing(workers)

    def mixing(self, workers: int) -> Mixing:
        """By which weights so many workers mix, in each step."""
        shape = self.topology
        kind = RandomRegular(shape.degree, shape.seed) if isinstance(shape, Random) else shape
        try:
            return mixing(kind, workers)
        except UsageError as error:
            raise StrategyError(f"{self}: {error}") from error

    def planned(self, view: View, nbytes: int, forms: Sequence[RowFormat] = (), models: bool = False) -> Step | str:
        """In each turn everybody's model, or the letter that is left of it, goes to its neighbours."""
        del models
        if self.asynchronous:
            return "who meets whom is decided as it happens"
        made = self.mixing(view.size)
        one = [Exchanged(what="mix", by="0", nbytes=nbytes, itemsize=4)]
        if forms:
            lengths = [] if forms[0].fixed else [8]
            letter = forms[0].letter(as_matrix(nbytes), 4, *forms[1:])
            one = [Exchanged(what="tell", by="0", nbytes=length) for length in (*lengths, letter)]
        return _turns(one, made, view)

    def servers(self, workers: int) -> tuple[int, int, Rule] | None:
        """Asynchronously: none, but somebody who counts who lives, so that the others go on without the dead."""
        return (0, 0, Rule(None)) if self.asynchronous and workers > 1 else None

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        if self.asynchronous and group.size > 1:
            plan = group.client.plan if isinstance(group, CoordinatedGroup) else None
            if plan is None and not group.one_host:
                raise StrategyError(
                    f"{self} finds its neighbours on several hosts only if `offbeat run --strategy ... --hosts FILE` "
                    f"has started them. Start them so, or leave out asynchronous=True."
                )
            return Pairing(group, stopwatch, str(self), self.mixing, plan)
        return _Mixing(group, stopwatch, str(self), self.mixing(group.size), self.gamma)


class _Mixing(Parted):
    """All mix after the same step, by the schedule of the graph."""

    def __init__(self, group: Group, stopwatch: Stopwatch, strategy: str, mixing: Mixing, gamma: float) -> None:
        super().__init__(group, stopwatch, strategy, mixing)
        self._gamma = gamma
        self._attended: list[Optimizer] = []
        self._estimates: list[list[Estimates]] = []
        self._schedules = [mix(matrix) for matrix in self.mixing.matrices]
        self._compiled = programs()
        self._scratch: dict[Any, Tensor] = {}
        self._rows: dict[int, Rows] = {}
        self._exchanges: dict[int, tuple[Exchanged, ...]] = {}
        self._mixed: dict[int, int] = {}
        self._measured: tuple[float, float] | None = None
        self._trials: tuple[Timed, ...] = ()

    def attend(self, optimizer: Optimizer) -> None:
        """Mix after its steps."""
        super().attend(optimizer)
        self._attended.append(optimizer)

    def begin(self) -> None:
        """All models are equal still: that is what workers know of each other."""
        if self.group.size == 1:
            return
        if why_not(self.group) is None:
            most = sum(p.numel() * p.element_size() for one in self._attended for p in parameters_of(one))
            self._trials = measured(self.group, most, self._trial)
        if self.compressions:
            self._estimates = [self._first_estimates(number, one) for number, one in enumerate(self._attended)]

    def _trial(self, size: int) -> Callable[[], object]:
        return partial(self._mix, torch.zeros(max(1, size // 4)), 0)

    def foreseen(self) -> Step | str:
        """What each optimizer's last step exchanged, with the neighbours of every turn."""
        reason = why_not(self.group)
        if formats(self.compressions) is None or reason is not None:
            return reason or CODED
        last = [each for exchanges in self._exchanges.values() for each in exchanges]
        return _turns(last, self.mixing, self.group.direct.view, self._trials)

    def _first_estimates(self, number: int, optimizer: Optimizer) -> list[Estimates]:
        rows, (matrix,) = Rows(parameters_of(optimizer)), self.mixing.matrices
        rank = self.group.rank
        neighbours = Neighbours(self.group.direct, matrix)
        weights = [float(matrix[rank, other]) for other in neighbours.ranks]
        made: list[Estimates] = []
        for place, (row, shapes) in enumerate(zip(rows.read(), rows.shapes, strict=True)):
            if row.dtype not in (torch.float32, torch.float64):
                raise StrategyError(
                    f"{self.strategy} with a compressor mixes rows of float32 or float64, and this model has "
                    f"{row.dtype}. Leave the compressor out."
                )
            coder = compressor(self.compressions, shapes, mixed(self.seed, number, place), rank).coder
            made.append(Estimates(row, neighbours, weights, coder, self._gamma))
        return made

    def stepped(self, number: int, optimizer: Optimizer) -> None:
        """Everybody's row goes to its neighbours, and each takes the weighted mean of what has come."""
        if number not in self._rows:
            self._rows[number] = Rows(parameters_of(optimizer))
        rows = self._rows[number]
        still_fits(rows, optimizer, self.strategy)
        turn = self._mixed.get(number, 0)
        with self.stopwatch.spent_on("communicate"):
            self.group.sent.record()
            flat = rows.read()
            for place, row in enumerate(flat):
                if self.compressions:
                    estimates = self._estimates[number][place]
                    if estimates.account.due:
                        estimates.account.probe(self.group, partial(self._mix, row.clone(), turn))
                    with estimates.account.compared(self.group):
                        estimates.mix(row)
                else:
                    self._mix(row, turn)
            rows.write(flat)
            self._exchanges[number] = self.group.sent.recorded()
        self._mixed[number] = turn + 1

    def _mix(self, row: Tensor, turn: int) -> None:
        real = torch.view_as_real(row).view(-1) if row.is_complex() else row
        schedule = self._schedules[turn % len(self._schedules)]
        layout = Layout(real.numel(), real.element_size())
        program = self._compiled(schedule, self.group.direct.view, layout, self.group.rank)
        kind = (real.dtype, real.device)
        held = self._scratch.get(kind)
        if held is None or held.numel() < program.scratch:
            held = self._scratch[kind] = real.new_empty(program.scratch)
        by = str(turn % len(self._schedules))
        exchanged = Exchanged(what="mix", by=by, nbytes=real.nbytes, itemsize=real.itemsize)
        self.group.direct.run(program, real, held, "mixing with neighbours", exchanged)

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Also mixes a copy once more, to see by how much that brings the replicas together."""
        rows = Rows(p for model in models for p in model.parameters())
        own = rows.read() if self.group.size > 1 else []
        with super().averaged(models):
            self._measure(own, rows)
            yield

    def _measure(self, own: list[Tensor], rows: Rows) -> None:
        if not own or not self.distance or self.compressions:
            return
        turn = self._mixed.get(0, 0)
        for row in own:
            self._mix(row, turn)
        apart = sum(float((a - b).abs().double().square().sum()) for a, b in zip(own, rows.read(), strict=True))
        left = self.group.gather([apart], "the distance of models")[:, 0].mean()
        self._measured = self.distance, float(left.sqrt())

    def notes(self) -> dict[str, Any]:
        """What the graph promises, and what was measured at the last evaluation."""
        found = None if self._measured is None else self._measured[1] / self._measured[0]
        told: dict[str, Any] = {"gossip": {**super().notes()["gossip"], "measured_rate": found}}
        if self._estimates:
            accounts = [estimates.account for rows in self._estimates for estimates in rows]
            told["compression"] = together(accounts, self.group)
        return told

    def state_dict(self) -> dict[str, Any]:
        """How often each optimizer's parameters were mixed, where in its turn the graph is, and what is known."""
        known = [[estimates.state_dict() for estimates in rows] for rows in self._estimates]
        return {"mixed": [self._mixed.get(number, 0) for number in range(self._optimizers)], "known": known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the turn."""
        self._mixed = {number: int(count) for number, count in enumerate(state["mixed"])}
        for rows, known in zip(self._estimates, state["known"], strict=True):
            for estimates, one in zip(rows, known, strict=True):
                estimates.load_state_dict(one)


def _turns(one: Sequence[Exchanged], mixing: Mixing, view: View, trials: tuple[Timed, ...] = ()) -> Step:
    """What is exchanged in one turn, with the neighbours of every turn."""
    exchanges = tuple(replace(each, by=str(turn)) for turn in range(len(mixing.matrices)) for each in one)
    matrices = tuple(tuple(map(tuple, matrix.tolist())) for matrix in mixing.matrices)
    return Step(hosts=tuple(view.hosts.tolist()), exchanges=exchanges, matrices=matrices, trials=trials)
