"""Every worker sums its gradients with all others, each step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.collectives import Collective
from offbeat.protocols.compression import RowFormat, Shapes
from offbeat.protocols.exchanges import Exchanged, GradientShape, sums_in_memory
from offbeat.protocols.partition import mixed
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import GLOO
from offbeat.runtime.compression import CompressionAccount, Feedback, GroupLink, together
from offbeat.runtime.compression.account import COMPARING
from offbeat.runtime.compression.coder import finite
from offbeat.runtime.compression.sums import CompressedSums
from offbeat.runtime.gradients.algorithm_choice import Sums, stored_choices
from offbeat.runtime.gradients.buckets import GradientBuckets, hook
from offbeat.runtime.gradients.in_place import GradientSums
from offbeat.runtime.groups.group import DirectGroup, Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.simulate.predicted_step import Step, Timed
from offbeat.strategies._base import Axis, Strategy, Traits, require_bucket
from offbeat.strategies.worker.compression import compressor
from offbeat.strategies.worker.exchange import Exchange, Exchanging
from offbeat.strategies.worker.optimizer_sharding import OptimizerShards, ShardedSteps
from offbeat.strategies.worker.step_cost import (
    CODED,
    formats,
    planned_by,
    planned_letters,
    planned_slices,
    planned_sum,
    trials,
    why_not,
)

_MIB = 1 << 20


class SumAlgorithm(StrEnum):
    """How sums are made."""

    NATIVE = "native"
    """Through shared memory inside a host, by Gloo between hosts."""
    AUTO = "auto"
    """By whichever was fastest when tried, for each size."""
    GLOO = "gloo"
    """As torch does it."""
    NAIVE = "naive"
    STAR = "star"
    TREE = "tree"
    RING = "ring"
    HALVING_DOUBLING = "halving_doubling"
    RECURSIVE_DOUBLING = "recursive_doubling"
    HIERARCHICAL = "hierarchical"
    HIERARCHICAL_RING = "hierarchical_ring"
    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"


@dataclass(frozen=True)
class AllReduce(Exchanging):
    """Every worker averages its gradients with all others; the default exchange.

    Workers of one host sum gradients through shared memory; between hosts, they fill flat buckets, and each full bucket
    is summed while backward goes on. Gradients are weighted by examples, so uneven batches count rightly, and a
    parameter that nobody used is left alone. With `shard=optimizer` each worker keeps the optimizer's state for, and
    updates, only its slice of the parameters.
    """

    algorithm: SumAlgorithm = SumAlgorithm.NATIVE
    """How sums are made: by what the backend does itself, by a named algorithm, or by the fastest of all (auto)."""
    bucket: float = 25.0
    """MiB of gradients that are reduced at once, where they go through buckets."""
    shard: Literal["nothing", "optimizer"] = "nothing"
    """What is divided over the workers instead of being held by each: nothing, or the optimizer's state and work."""
    deterministic: bool = False
    """Whether `auto` takes what it chose in earlier runs, so that runs add in the same order; it measures only once."""

    @property
    def traits(self) -> Traits:
        """Exact; and the same bits in every run, unless the algorithm may be another one in the next."""
        settled = self.algorithm is not SumAlgorithm.AUTO or self.deterministic
        return Traits(synchronous=True, exact=True, deterministic=settled)

    @property
    def parting(self) -> bool:
        """Workers may step by themselves, if each has the whole optimizer."""
        return self.shard == "nothing"

    carries = True
    aliases = MappingProxyType({"zero1": "allreduce(shard=optimizer)"})
    examples = (
        "allreduce",
        "allreduce(ring)",
        "allreduce(auto)",
        "allreduce(shard=optimizer)",
        "allreduce + accumulate(4)",
    )

    def __post_init__(self) -> None:
        """Refuse a bucket that holds nothing."""
        super().__post_init__()
        require_bucket(self, self.bucket)
        if self.shard != "nothing" and self.algorithm is not SumAlgorithm.NATIVE:
            raise StrategyError(
                f"allreduce: shard={self.shard} reduces and gathers slices by itself, so algorithm={self.algorithm} "
                f"has nothing to do. Leave one of them out."
            )

    def check_hosts(self, hosts: int) -> None:
        """Refuse algorithms that read others' memory."""
        if hosts > 1 and self.algorithm in (SumAlgorithm.ONE_SHOT, SumAlgorithm.TWO_SHOT):
            raise StrategyError(
                f"{self} reads the other workers' memory, and {hosts} hosts share none. Leave the algorithm out, or "
                f"name one over messages, such as ring."
            )

    def refuses(self, other: Strategy) -> str | None:
        """Compressions, where sums are made in a way of their own."""
        if other.axis is not Axis.COMPRESSION:
            return None
        if self.shard != "nothing":
            return f"shard={self.shard} sums slices of gradients, and a compressor sees them whole"
        if self.algorithm is not SumAlgorithm.NATIVE:
            return f"a compressor decides how its letters are summed, so algorithm={self.algorithm} has nothing to do"
        return None

    def planned(self, view: View, nbytes: int, forms: Sequence[RowFormat] = (), models: bool = False) -> Step | str:
        """One sum of all gradients; of compressed ones, what is left of them."""
        if self.algorithm is SumAlgorithm.AUTO and not models:
            return "auto tries every algorithm when a run begins, and takes the fastest. Name one, such as ring"
        names = {SumAlgorithm.NATIVE: None, SumAlgorithm.GLOO: GLOO[Collective.ALL_REDUCE]}
        by = names.get(self.algorithm, self.algorithm.value)
        # Workers of one host sum gradients where they lie, when all are there; others bucket by bucket.
        in_memory = self.algorithm is SumAlgorithm.NATIVE and len(set(view.hosts.tolist())) == 1
        behind: list[Exchanged] = []
        if forms:
            exchanges = planned_letters(forms, nbytes, view)
        elif models:
            exchanges = [planned_sum(nbytes, view)]
        elif in_memory:
            gradients = [GradientShape("float32", nbytes // 4, 4)]
            exchanges = sums_in_memory(gradients, partial(planned_by, view), self.shard == "optimizer").exchanges
        else:
            exchanges = [planned_sum(nbytes, view, by)]
        if self.shard == "optimizer":
            behind = planned_slices(nbytes, view)
        overlapped = not (forms or models or in_memory)
        hosts = tuple(view.hosts.tolist())
        return Step(hosts=hosts, exchanges=(*exchanges, *behind), beside=overlapped, behind=len(behind))

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: sums on every model."""
        kind = _Sharding if self.shard == "optimizer" else _AllReducing
        return kind(group, stopwatch, self)


class _AllReducing(Exchange):
    def __init__(self, group: Group, stopwatch: Stopwatch, settings: AllReduce) -> None:
        super().__init__(group, stopwatch)
        self._settings = settings
        self._choices: list[Sums] = []
        self._known: set[int] = set()
        self._held = False
        self._sums: list[GradientBuckets | GradientSums] = []
        self._sparse: list[_SparseSums] = []
        self._means: dict[str, tuple[Feedback, CompressionAccount]] = {}
        self._states_of_means: dict[str, Any] = {}
        self._lane: Group = group
        self._trials: tuple[Timed, ...] = ()

    def install(self, model: nn.Module) -> None:
        """Sums of dense gradients; sparse ones are summed one by one after them, as sparse ones."""
        sparse = _sparse_parameters(model)
        # A parameter that two models share is exchanged once.
        new = [p for p in model.parameters() if id(p) not in self._known]
        self._known.update(map(id, new))
        # Models meet in one backward pass in an order that may differ between workers, and a worker that leaves out a
        # backward pass comes to something else instead: each model has a lane, so that nothing is mistaken for another.
        lane = self._lane = self.group.direct.lane()
        sums = self._summed([p for p in new if id(p) not in sparse], lane)
        sums.suspended = self._held
        self._sums.append(sums)
        if sparse:
            alike = [p for p in new if id(p) in sparse]
            self._sparse.append(_SparseSums(alike, lane, self.stopwatch, sums))

    def _summed(self, dense: Sequence[Parameter], lane: DirectGroup) -> GradientBuckets | GradientSums:
        settings = self._settings
        if self.compressions:
            return CompressedSums(dense, lane, self.stopwatch, partial(self._compressor, len(self._sums)))
        if settings.algorithm is not SumAlgorithm.NATIVE:
            self._choices.append(lane.sum_by(settings.algorithm, stored_choices() if settings.deterministic else None))
        elif lane.shares_memory:
            return GradientSums(dense, lane, self.stopwatch)
        return GradientBuckets(dense, lane, self.stopwatch, int(settings.bucket * _MIB))

    def _compressor(self, model: int, shapes: Shapes, number: int) -> Feedback:
        """For one row of a model's gradients, or (model -1) for one kind of mean."""
        return compressor(self.compressions, shapes, mixed(self.seed, model, number), self.group.rank)

    def mean(self, row: Tensor, what: str, shapes: Shapes = ()) -> None:
        """The mean of what each worker's letter says; what it leaves out is owed to the next mean of the same name."""
        if not self.compressions or self.group.size == 1:
            self.group.mean(row, what)
            return
        if bool(self.group.gather([float(not finite(row))], what).any()):
            self.group.mean(row, what)  # As uncompressed; what is owed would stay NaN for ever.
            return
        name = f"{what}, {row.numel()} numbers"
        if name not in self._means:
            feedback = self._compressor(-1, shapes or [(row.numel(),)], len(self._means))
            if name in self._states_of_means:
                feedback.load_state_dict(self._states_of_means.pop(name))
            self._means[name] = feedback, CompressionAccount()
        feedback, account = self._means[name]
        if account.due:
            account.probe(self.group, partial(self.group.sum, row.clone(), COMPARING))
        narrow = row.dtype not in (torch.float32, torch.float64)
        with account.compared(self.group):
            link, start = GroupLink(self.group.direct, what), time.perf_counter()
            held = row.float() if narrow else row
            feedback.sum(held.div_(self.group.size), link)
            took = time.perf_counter() - start
        account.note(row.nbytes, link.nbytes, took - link.seconds, link.seconds)
        if narrow:
            row.copy_(held)

    def begin(self) -> None:
        """Learn what the links cost, so that the result can tell what a step should take."""
        if self._sums and self._unforeseen() is None:
            most = sum(p.numel() * p.element_size() for sums in self._sums for p in sums.parameters)
            self._trials = trials(self._lane.direct, most, formats(self.compressions) or ())

    def _unforeseen(self) -> str | None:
        if self._settings.algorithm is SumAlgorithm.AUTO:
            return "auto has measured every algorithm by itself; see choices"
        if self._sparse:
            return "how long sparse gradients are is for the data to say"
        if formats(self.compressions) is None:
            return CODED
        return why_not(self._lane)

    def foreseen(self) -> Step | str:
        """What the last step's gradients were exchanged by."""
        exchanges = [each for sums in self._sums for each in sums.exchanges]
        return self._step(exchanges, beside=any(isinstance(sums, GradientBuckets) for sums in self._sums))

    def foreseen_means(self, exchanges: Sequence[Exchanged]) -> Step | str:
        """What models were averaged by."""
        if self._settings.algorithm is not SumAlgorithm.NATIVE:
            return f"models are averaged by the backend itself, and links were measured by {self._settings.algorithm}"
        return self._step(exchanges)

    def _step(self, exchanges: Sequence[Exchanged], beside: bool = False) -> Step | str:
        reason = self._unforeseen()
        if reason is not None:
            return reason
        if not exchanges:
            return "no gradients were exchanged"
        hosts = tuple(self.group.direct.view.hosts.tolist())
        return Step(hosts=hosts, exchanges=tuple(exchanges), beside=beside, trials=self._trials)

    def stepping(self, optimizer: Optimizer) -> None:
        """Gradients are the workers' mean when backward is over, not before."""
        if any(sums.running for sums in self._sums):
            raise UsageError(
                f"{type(optimizer).__name__} steps while backward still runs, as optimizers in hooks of parameters do. "
                f"Gradients are exchanged when backward ends, so each worker would step on its own. Step after "
                f"backward(), or use local or gossip, whose workers step on gradients of their own."
            )

    def weigh(self, examples: int, total: int | None) -> None:
        """Gradients count by the examples behind them."""
        for sums in self._sums:
            sums.weigh(examples, total)
        for sums in self._sparse:
            sums.examples = float(examples)

    def suspend(self, held: bool) -> None:
        """While held, hooks let gradients pass."""
        self._held = held
        for sums in self._sums:
            sums.suspended = held

    def state_dict(self) -> dict[str, Any]:
        """What fixes the order of additions, and so the last bits."""
        return {
            "orders": [sums.state() for sums in self._sums],
            "choices": [choice.choices for choice in self._choices],
            "means": {name: feedback.state_dict() for name, (feedback, _) in self._means.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same order as before."""
        for choice, chosen in zip(self._choices, state["choices"], strict=True):
            choice.choices = dict(chosen)
        for sums, order in zip(self._sums, state["orders"], strict=True):
            sums.load(order)
        self._means.clear()
        self._states_of_means = dict(state["means"])

    def notes(self) -> dict[str, Any]:
        """What was chosen, by size, against which others, with the slowest worker's seconds; what compression did."""
        if self.compressions:
            return {"compression": together(self._accounts(), self.group)} if self.group.size > 1 else {}
        if self._settings.algorithm is not SumAlgorithm.AUTO:
            return {}
        return {"choices": {"all_reduce": [choice.choices for choice in self._choices]}}

    def _accounts(self) -> list[CompressionAccount]:
        """Of all rows of gradients, and of all kinds of means."""
        compressed = [sums for sums in self._sums if isinstance(sums, CompressedSums)]
        return [account for sums in compressed for account in sums.accounts] + [one for _, one in self._means.values()]

    def close(self) -> None:
        """Take the hooks off."""
        for hooked in (*self._sums, *self._sparse):
            hooked.close()


class _Sharding(_AllReducing):
    """Each worker has the sum of its own slices only, and updates those."""

    replicated = False
    acts_in_steps = True

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: AllReduce) -> None:
        super().__init__(group, stopwatch, settings)
        self._steps = ShardedSteps()

    def foreseen(self) -> Step | str:
        """Sums of gradients, and then what brings everybody the slices that were updated."""
        step = super().foreseen()
        if isinstance(step, str):
            return step
        behind = [each for shards in self._steps.shards for each in shards.exchanges]
        return structs.replace(step, exchanges=(*step.exchanges, *behind), behind=len(behind))

    def _summed(self, dense: Sequence[Parameter], lane: DirectGroup) -> GradientBuckets | GradientSums:
        shards = OptimizerShards(dense, lane)
        self._steps.shards.append(shards)
        sums = (
            GradientSums(dense, lane, self.stopwatch, own_blocks=True)
            if lane.shares_memory
            else super()._summed(dense, lane)
        )
        sums.afterwards.append(shards.note_gradients)
        return sums

    def attend(self, optimizer: Optimizer) -> None:
        """Let the optimizer step on slices."""
        if self.group.size > 1:
            self._steps.attend(optimizer)

    def notes(self) -> dict[str, Any]:
        """How much optimizer state each worker holds."""
        held = self.group.gather([float(self._steps.state_bytes())], "the count of memory")
        return {"optimizer_bytes": [int(count) for count in held[:, 0]]}

    def close(self) -> None:
        """Take the hooks off, and give every worker its own parameters again."""
        self._steps.close()
        super().close()


class _SparseSums:
    """Sparse gradients of one model, summed when backward is over; who used one decides for all that it was used."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        group: Group,
        stopwatch: Stopwatch,
        dense: GradientBuckets | GradientSums,
    ) -> None:
        self.examples = 1.0
        self._parameters, self._group, self._stopwatch = parameters, group, stopwatch
        self._handles = [hook(p, dense.begin) for p in parameters]
        dense.afterwards.append(self._sum)

    def _sum(self) -> None:
        with self._stopwatch.spent_on("communicate"), torch.no_grad():
            used = [float(p.grad is not None) for p in self._parameters]
            counts = torch.tensor([self.examples, *used], dtype=torch.float64)
            total, *users = self._group.sum(counts, "the count of examples").tolist()
            for parameter, count in zip(self._parameters, users, strict=True):
                if count:
                    mine = _nothing_like(parameter) if parameter.grad is None else parameter.grad
                    weighted = mine * (self.examples / max(total, 1.0))
                    parameter.grad = self._group.sum_sparse(weighted, "the sum of a sparse gradient")

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _nothing_like(parameter: Tensor) -> Tensor:
    indices = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.detach()[:0], parameter.shape)


def _sparse_parameters(model: nn.Module) -> set[int]:
    """Weights whose gradients are sparse tensors: those of embeddings made with sparse=True."""
    found: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and isinstance(weight, Parameter):
            found.add(id(weight))
    return found
