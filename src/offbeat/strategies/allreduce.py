"""All-reduce: every worker sums its gradients with all others in each step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
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
from offbeat.runtime.compression import CompressionAccount, Feedback, together
from offbeat.runtime.compression.coder import finite
from offbeat.runtime.compression.sums import CompressedSums
from offbeat.runtime.gradients.algorithm_choice import Sums, stored_choices
from offbeat.runtime.gradients.buckets import GradientBuckets, hook
from offbeat.runtime.gradients.in_place import GradientSums
from offbeat.runtime.gradients.sliced_sums import SlicedSums
from offbeat.runtime.groups.group import DirectGroup, Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.simulate.predicted_step import Step, Timed
from offbeat.strategies._base import BUCKET, Axis, Strategy, Traits
from offbeat.strategies.compressors import compressor
from offbeat.strategies.worker import step_cost
from offbeat.strategies.worker.exchange import Exchange, Exchanging

_MIB = 1 << 20
_Sums = GradientBuckets | GradientSums | SlicedSums


class SumAlgorithm(StrEnum):
    """Algorithms of a sum."""

    NATIVE = "native"
    """Through shared memory inside a host, by Gloo between hosts."""
    AUTO = "auto"
    """The fastest in a trial, for each size."""
    GLOO = "gloo"
    """Torch's own."""
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

    Workers of one host sum gradients through shared memory; between hosts they fill flat buckets, and each full bucket
    is summed while backward goes on. Gradients are weighted by examples, so uneven batches are weighted correctly, and
    a parameter that no worker used is not touched. With `shard=optimizer` each worker keeps the optimizer's state for,
    and updates, only its slice of the parameters; with `shard=gradients` it keeps only its slice of the summed
    gradients, too, and with `shard=parameters` only its slice of the parameters: others are gathered for their use.
    """

    algorithm: SumAlgorithm = SumAlgorithm.NATIVE
    """Algorithm of sums: the backend's own (native), a named one, or the fastest of all in a trial (auto)."""
    bucket: float = 25.0
    """MiB of gradients that are summed at once, where they go through buckets."""
    shard: Literal["nothing", "optimizer", "gradients", "parameters"] = "nothing"
    """What is sharded over the workers instead of replicated: nothing; or optimizer state; also gradients; and also
    parameters."""
    deterministic: bool = False
    """Whether `auto` reuses its choices of earlier runs, so that runs add in the same order; it measures only once."""

    @property
    def traits(self) -> Traits:
        """Exact; and the same bits in every run, unless the algorithm may differ between runs."""
        settled = self.algorithm is not SumAlgorithm.AUTO or self.deterministic
        return Traits(synchronous=True, exact=True, deterministic=settled)

    @property
    def parting(self) -> bool:
        """Workers may step independently if each has the whole optimizer."""
        return self.shard == "nothing"

    carries = True
    aliases = MappingProxyType(
        {
            "zero1": "allreduce(shard=optimizer)",
            "zero2": "allreduce(shard=gradients)",
            "zero3": "allreduce(shard=parameters)",
            "fsdp": "allreduce(shard=parameters)",
        }
    )
    examples = (
        *("allreduce", "allreduce(ring)", "allreduce(auto)", "allreduce(shard=optimizer)"),
        *("allreduce(shard=gradients)", "allreduce(shard=parameters)", "allreduce + accumulate(4)"),
    )
    _ranges = BUCKET

    def __post_init__(self) -> None:
        """Refuse an algorithm where slices are summed in their own way."""
        super().__post_init__()
        if self.shard != "nothing" and self.algorithm is not SumAlgorithm.NATIVE:
            raise StrategyError(
                f"allreduce: shard={self.shard} reduces and gathers slices by itself, so algorithm={self.algorithm} "
                f"has nothing to do. Omit one of them."
            )

    @property
    def lineage(self) -> str:
        """Checkpoints hold whole parameters and optimizer state, whatever is sharded."""
        return str(replace(self, shard="nothing"))

    def check_hosts(self, hosts: int) -> None:
        """Refuse algorithms that read other workers' memory."""
        if hosts > 1 and self.algorithm in (SumAlgorithm.ONE_SHOT, SumAlgorithm.TWO_SHOT):
            raise StrategyError(
                f"{self} reads the other workers' memory, and {hosts} hosts share none. Omit the algorithm, or "
                f"name one over messages, such as ring."
            )

    def refuses(self, other: Strategy) -> str | None:
        """Compressors, with sharding or a named algorithm."""
        if other.axis is not Axis.COMPRESSION:
            return None
        if self.shard != "nothing":
            return f"shard={self.shard} sums slices of gradients, and a compressor sees them whole"
        if self.algorithm is not SumAlgorithm.NATIVE:
            return f"a compressor decides how its messages are summed, so algorithm={self.algorithm} has nothing to do"
        return None

    def planned(self, view: View, nbytes: int, forms: Sequence[RowFormat] = (), models: bool = False) -> Step | str:
        """One sum of all gradients, compressed or not."""
        if self.algorithm is SumAlgorithm.AUTO and not models:
            return "auto tries every algorithm when a run begins, and uses the fastest. Name one, such as ring"
        names = {SumAlgorithm.NATIVE: None, SumAlgorithm.GLOO: GLOO[Collective.ALL_REDUCE]}
        by = names.get(self.algorithm, self.algorithm.value)
        # Workers of one host sum gradients in place, when all are there; others bucket by bucket.
        in_memory = self.algorithm is SumAlgorithm.NATIVE and len(set(view.hosts.tolist())) == 1
        if self.shard != "nothing" and not (forms or models or in_memory):
            return step_cost.planned_shards(nbytes, view, self.shard == "parameters")
        if forms:
            exchanges = step_cost.planned_messages(forms, nbytes, view)
        elif models:
            exchanges = [step_cost.planned_sum(nbytes, view)]
        elif in_memory:
            gradients = [GradientShape("float32", nbytes // 4, 4)]
            exchanges = sums_in_memory(
                gradients, partial(step_cost.planned_by, view), self.shard != "nothing"
            ).exchanges
        else:
            exchanges = [step_cost.planned_sum(nbytes, view, by)]
        # Updated slices are in the memory of all workers: a barrier says that they are there.
        behind = [step_cost.planned_sum(4, view)] if self.shard != "nothing" and in_memory and not models else []
        overlapped, hosts = not (forms or models or in_memory), tuple(view.hosts.tolist())
        return Step(hosts=hosts, exchanges=(*exchanges, *behind), beside=overlapped, behind=len(behind))

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: sums on every model."""
        from offbeat.strategies.sharding.worker import ShardedAllReduceWorker  # Late: it imports this module.

        worker = AllReduceWorker if self.shard == "nothing" else ShardedAllReduceWorker
        return worker(group, stopwatch, self)


class AllReduceWorker(Exchange):
    """Sums gradients in or after backward."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: AllReduce) -> None:
        super().__init__(group, stopwatch)
        self.settings = settings
        self._choices: list[Sums] = []
        self._known: set[int] = set()
        self._held = False
        self._weights: tuple[int, int | None] | None = None
        self._sums: list[_Sums] = []
        self._has_sparse = False
        self._means: dict[str, tuple[Feedback, CompressionAccount]] = {}
        self._saved_means: dict[str, Any] = {}
        self._lane: Group = group
        self._trials: tuple[Timed, ...] = ()

    def install(self, model: nn.Module) -> None:
        """Sum dense gradients; sparse ones are summed after them, one by one."""
        sparse = sparse_parameters(model)
        # A parameter that two models share is exchanged once.
        new = [p for p in model.parameters() if id(p) not in self._known]
        self._known.update(map(id, new))
        # The order of models within a backward pass may differ between workers, and a worker may skip a pass: each
        # model has its own lane, so that no exchange is mistaken for another.
        lane = self._lane = self.group.direct.lane()
        sums = self._summed([p for p in new if id(p) not in sparse], lane)
        sums.suspended = self._held
        if self._weights is not None:  # A model in stages is known only in its first step.
            sums.weigh(*self._weights)
        self._sums.append(sums)
        if sparse:
            self._has_sparse = True
            parameters = [p for p in new if id(p) in sparse]
            self.handles += [hook(p, sums.begin) for p in parameters]
            sums.afterwards.append(partial(self._sum_sparse, parameters, lane, sums))

    def _sum_sparse(self, parameters: Sequence[Parameter], lane: Group, dense: _Sums) -> None:
        """Backward is over, and dense gradients are summed: sum the sparse ones that any worker has used."""
        with self.stopwatch.spent_on("communicate"), torch.no_grad():
            used = [float(p.grad is not None) for p in parameters]
            counts = torch.tensor([dense.examples, *used], dtype=torch.float64)
            total, *users = lane.sum(counts, "the count of examples").tolist()
            for parameter in itertools.compress(parameters, users):
                gradient = parameter.grad
                if gradient is None:
                    nowhere = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
                    gradient = torch.sparse_coo_tensor(nowhere, parameter.detach()[:0], parameter.shape)
                weighted = gradient * (dense.examples / max(total, 1.0))
                parameter.grad = lane.sum_sparse(weighted, "the sum of a sparse gradient")

    def _summed(self, dense: Sequence[Parameter], lane: DirectGroup) -> _Sums:
        settings = self.settings
        if self.compressions:
            return CompressedSums(dense, lane, self.stopwatch, partial(self._compressor, len(self._sums)))
        if settings.algorithm is not SumAlgorithm.NATIVE:
            self._choices.append(lane.sum_by(settings.algorithm, stored_choices() if settings.deterministic else None))
        elif lane.shares_memory:
            return GradientSums(dense, lane, self.stopwatch)
        return GradientBuckets(dense, lane, self.stopwatch, int(settings.bucket * _MIB))

    def _compressor(self, model: int, shapes: Shapes, number: int) -> Feedback:
        """The compressor of one row of a model's gradients, or (model -1) of one kind of mean."""
        return compressor(self.compressions, shapes, mixed(self.seed, model, number), self.group.rank)

    def mean(self, row: Tensor, what: str, shapes: Shapes = ()) -> None:
        """The mean of compressed rows; error feedback goes to the next mean of the same name."""
        dense = not self.compressions or self.group.size == 1
        # A row that is not finite is sent uncompressed: it would make the error feedback NaN for ever.
        if dense or bool(self.group.gather([float(not finite(row))], what).any()):
            self.group.mean(row, what)
            return
        name = f"{what}, {row.numel()} numbers"
        if name not in self._means:
            feedback = self._compressor(-1, shapes or [(row.numel(),)], len(self._means))
            if name in self._saved_means:
                feedback.load_state_dict(self._saved_means.pop(name))
            self._means[name] = feedback, CompressionAccount()
        feedback, account = self._means[name]
        narrow = row.dtype not in (torch.float32, torch.float64)
        with account.counted(self.group.direct, row, what) as link:
            wide = row.float() if narrow else row
            feedback.sum(wide.div_(self.group.size), link)
        if narrow:
            row.copy_(wide)

    def begin(self) -> None:
        """Measure the links, so that the result can predict the time of a step."""
        if self._sums and self._why_unpredicted() is None:
            most = sum(p.numel() * p.element_size() for sums in self._sums for p in sums.parameters)
            self._trials = step_cost.trials(self._lane.direct, most, step_cost.formats(self.compressions))

    def _why_unpredicted(self) -> str | None:
        if self.settings.algorithm is SumAlgorithm.AUTO:
            return "auto has measured every algorithm by itself; see choices"
        if self._has_sparse:
            return "the size of sparse gradients depends on the data"
        return step_cost.why_not(self._lane, self.compressions)

    def predicted(self) -> Step | str:
        """The exchanges of the last step's gradients."""
        exchanges = [each for sums in self._sums for each in sums.exchanges]
        return self._step(exchanges, beside=any(not isinstance(sums, GradientSums) for sums in self._sums))

    def predicted_means(self, exchanges: Sequence[Exchanged]) -> Step | str:
        """The exchanges that averaged models."""
        if self.settings.algorithm is not SumAlgorithm.NATIVE:
            return f"models are averaged by the backend itself, and links were measured by {self.settings.algorithm}"
        return self._step(exchanges)

    def _step(self, exchanges: Sequence[Exchanged], beside: bool = False) -> Step | str:
        reason = self._why_unpredicted()
        if reason is not None or not exchanges:
            return reason or "no gradients were exchanged"
        hosts = tuple(self.group.direct.view.hosts.tolist())
        return Step(hosts=hosts, exchanges=tuple(exchanges), beside=beside, trials=self._trials)

    def stepping(self, optimizer: Optimizer) -> None:
        """Refuse steps within backward: gradients are the workers' mean only when backward is over."""
        if any(sums.running for sums in self._sums):
            raise UsageError(
                f"{type(optimizer).__name__} steps while backward still runs, as optimizers in hooks of parameters do. "
                f"Gradients are exchanged when backward ends, so each worker would step on its own. Step after "
                f"backward(), or use local or gossip, whose workers step on their own gradients."
            )

    def weigh(self, examples: int, total: int | None) -> None:
        """Weigh gradients by their examples."""
        self._weights = examples, total
        for sums in self._sums:
            sums.weigh(examples, total)

    def suspend(self, held: bool) -> None:
        """While held, hooks leave gradients alone."""
        self._held = held
        for sums in self._sums:
            sums.suspended = held

    def state_dict(self) -> dict[str, Any]:
        """What determines the order of additions, and so the last bits."""
        return {
            "orders": [sums.state() for sums in self._sums],
            "choices": [choice.choices for choice in self._choices],
            "means": {name: feedback.state_dict() for name, (feedback, _) in self._means.items()},
            "shard": self.settings.shard,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same order as before."""
        for choice, chosen in zip(self._choices, state["choices"], strict=True):
            choice.choices = dict(chosen)
        if state.get("shard", self.settings.shard) == self.settings.shard:
            for sums, order in zip(self._sums, state["orders"], strict=True):
                sums.load(order)
        self._means.clear()
        self._saved_means = dict(state["means"])

    def notes(self) -> dict[str, Any]:
        """The algorithms chosen for each size, with the slowest worker's seconds; costs and savings of compression."""
        if self.compressions and self.group.size > 1:
            accounts = [a for sums in self._sums if isinstance(sums, CompressedSums) for a in sums.accounts]
            return {"compression": together([*accounts, *(a for _, a in self._means.values())], self.team)}
        if self.compressions or self.settings.algorithm is not SumAlgorithm.AUTO:
            return {}
        return {"choices": {"all_reduce": [choice.choices for choice in self._choices]}}

    def close(self) -> None:
        """Remove the hooks."""
        super().close()
        for sums in self._sums:
            sums.close()


def sparse_parameters(model: nn.Module) -> set[int]:
    """Weights whose gradients are sparse tensors: those of embeddings with sparse=True."""
    weights = [
        getattr(module, "weight", None) for module in model.modules() if getattr(module, "sparse", False) is True
    ]
    return {id(weight) for weight in weights if isinstance(weight, Parameter)}
