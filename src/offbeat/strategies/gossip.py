"""Gossip: every worker steps, then mixes its model with those of its neighbours on a sparse graph.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel
Stochastic Gradient Descent" (2017), algorithm 1, with the step before the mixing. Asynchronously: Lian et al.,
"Asynchronous Decentralized Parallel Stochastic Gradient Descent" (2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.compression import RowFormat
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.gossip.topology import GraphShape, Mixing, RandomRegular, mixing
from offbeat.protocols.schedule import View
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.groups.coordinated_group import CoordinatedGroup
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.simulate.predicted_step import Step
from offbeat.strategies._base import Axis, Setting, Strategy, Traits
from offbeat.strategies.worker.exchange import Exchange, Exchanging
from offbeat.strategies.worker.mixing import AsyncGossipWorker, GossipWorker, every_turn
from offbeat.strategies.worker.step_cost import as_matrix


@dataclass(frozen=True)
class Random(Setting):
    """A connected random graph in which every worker has the same number of neighbours."""

    degree: int
    """Neighbours of each worker."""
    seed: int = 0
    """Seed of the graph."""

    _ranges = (
        ("degree", lambda degree: degree >= 1, "a worker without neighbours never agrees with the others"),
        ("seed", lambda seed: seed >= 0, "seeds are counted from 0"),
    )


@dataclass(frozen=True)
class Gossip(Exchanging):
    """Decentralized: every worker steps independently, then mixes its model with those of its neighbours on a graph.

    A worker takes the mean of its own and its neighbours' models with symmetric weights (Metropolis), so that the mean
    of all models is kept. Evaluations use the mean of all models, and a run saves that mean.
    """

    topology: GraphShape | Random = GraphShape.RING
    """The graph of neighbours: ring, torus, exponential, complete, or random(d)."""
    asynchronous: bool = False
    """Whether a worker averages with one random neighbour at a time, when both can, instead of all after each step."""
    gamma: float = 0.2
    """With a compressor: how far a worker moves towards its estimates of its neighbours; less for coarser ones."""

    @property
    def traits(self) -> Traits:
        """Deterministic in lockstep; asynchronously it continues without dead workers."""
        return Traits(deterministic=not self.asynchronous, elastic=self.asynchronous)

    @property
    def parting(self) -> bool:
        """Workers may mix less often than they step."""
        return True

    mixes = True
    carries = True
    point_to_point = True
    aliases: ClassVar = {"dpsgd": "gossip"}
    examples = (
        *("gossip", "gossip(exponential)", "gossip(random(3))", "gossip(torus) + local(4)"),
        *("gossip(asynchronous=True)", "gossip + quantize(4)"),
    )
    _ranges = (("gamma", lambda gamma: 0 < gamma <= 1, "a worker moves by a share above 0 and at most 1"),)

    def refuses(self, other: Strategy) -> str | None:
        """Compressors, where neighbours change: estimates need fixed neighbours."""
        if other.axis is not Axis.COMPRESSION:
            return None
        if self.asynchronous:
            return "random pairs keep no estimates of each other, which compressed messages need"
        if self.topology is GraphShape.EXPONENTIAL:
            return "on the exponential graph neighbours change in every step, and compressed messages need fixed ones"
        return None

    def check(self, workers: int) -> None:
        """Refuse numbers of workers for which the graph does not exist."""
        super().check(workers)
        self.mixing(workers)

    def mixing(self, workers: int) -> Mixing:
        """The mixing weights of this number of workers, in each step."""
        shape = self.topology
        kind = RandomRegular(shape.degree, shape.seed) if isinstance(shape, Random) else shape
        try:
            return mixing(kind, workers)
        except UsageError as error:
            raise StrategyError(f"{self}: {error}") from error

    def planned(self, view: View, nbytes: int, forms: Sequence[RowFormat] = (), models: bool = False) -> Step | str:
        """In each turn every model, compressed or not, goes to the worker's neighbours."""
        del models
        if self.asynchronous:
            return "which workers meet is decided during the run"
        one_host = len(set(view.hosts.tolist())) == 1
        sent = [Exchanged(what="mix_in_memory" if one_host else "mix", by="0", nbytes=nbytes, itemsize=4)]
        if forms:
            lengths = [] if forms[0].fixed else [8]
            message = forms[0].message_bytes(as_matrix(nbytes), 4, *forms[1:])
            sent = [Exchanged(what="tell", by="0", nbytes=length) for length in (*lengths, message)]
        return every_turn(sent, self.mixing(view.size), view)

    def servers(self, workers: int) -> tuple[int, int, Rule] | None:
        """No shards; asynchronously a coordinator, so that live workers continue without the dead."""
        return (0, 0, Rule(None)) if self.asynchronous and workers > 1 else None

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        if self.asynchronous and group.size > 1:
            plan = group.client.plan if isinstance(group, CoordinatedGroup) else None
            if plan is None and not group.one_host:
                raise StrategyError(
                    f"{self} finds its neighbours on several hosts only if `offbeat run --strategy ... --hosts FILE` "
                    f"has started them. Start them that way, or omit asynchronous=True."
                )
            return AsyncGossipWorker(group, stopwatch, str(self), self.mixing, plan)
        return GossipWorker(group, stopwatch, str(self), self.mixing(group.size), self.gamma)
