"""Pipelines: each replica of the model in consecutive stages, on a worker each, between which microbatches flow."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.pipelines.orders import PipelineKind, check_numbers
from offbeat.strategies._base import Axis, Combined, Splitting, Strategy, Traits
from offbeat.strategies.splitting.exchanges import objection, objection_to_sum

AUTO_PER_STAGE = 4
"""Microbatches for each stage where their number is chosen here: less than a fifth of the time is then bubbles."""


@dataclass(frozen=True)
class Pipeline(Splitting):
    """Each replica's model is cut into stages, one on each of several workers, and microbatches flow through them.

    Layers are measured on the first batch, and the model is cut where the slowest stage is fastest. A step computes
    what one process computes on the whole batch, up to rounding.
    """

    stages: int
    """Workers over which each replica is spread, one stage on each."""
    schedule: PipelineKind = PipelineKind.ONE_F_ONE_B
    """The order in which each stage computes its microbatches forward and backward."""
    microbatches: int | Literal["auto"] = "auto"
    """Microbatches into which each replica's batch is cut; auto is 4 for each stage, or one per example if fewer."""
    chunks: int = 1
    """Parts of the model on each stage; several with interleaved only, which needs at least 2."""

    # Layers are measured, so that two runs may cut, and therefore add, differently.
    promises = Traits(synchronous=True, exact=True, splits_model=True)
    examples = (
        *("pipeline(2)", "pipeline(4, schedule=gpipe, microbatches=8)", "pipeline(2, schedule=interleaved, chunks=2)"),
        *("allreduce + pipeline(2)", "allreduce + accumulate(2) + pipeline(2)", "local(8) + pipeline(2)"),
        *("gossip + pipeline(2)", "server(consistency=ssp(2)) + pipeline(2)", "allreduce + topk(0.05) + pipeline(2)"),
    )
    aliases = MappingProxyType({})
    _ranges = (
        (
            "stages",
            lambda stages: stages >= 2,
            "a pipeline has at least 2 stages; one worker holds a whole model anyway",
        ),
        ("microbatches", lambda count: count == "auto" or count >= 1, "a batch is cut into at least 1 microbatch"),
        ("chunks", lambda chunks: chunks >= 1, "every stage has at least 1 part of the model"),
    )

    def __post_init__(self) -> None:
        """Refuse numbers that the schedule cannot have."""
        super().__post_init__()
        try:
            check_numbers(self.schedule, self.stages, self.microbatches_of(None), self.chunks)
        except UsageError as error:
            raise StrategyError(f"{self.name}: {error}") from error

    @property
    def spread(self) -> int:
        """The stages."""
        return self.stages

    def microbatches_of(self, examples: int | None, least: int = 1) -> int:
        """Number of microbatches of a batch with so many examples (None: many), of at least so many each if chosen."""
        if self.microbatches != "auto":
            return self.microbatches
        return self.fewer_microbatches(AUTO_PER_STAGE * self.stages, examples, least)

    def fewer_microbatches(self, most: int, examples: int | None, least: int) -> int:
        """At most so many microbatches, fewer if they would have fewer than the least number of examples."""
        if examples is None or examples >= most * least:
            return most
        grouped = self.stages if self.schedule is PipelineKind.INTERLEAVED else 1
        return max(examples // least // grouped, 1) * grouped

    def refuses(self, other: Strategy) -> str | None:
        """What has not been made to work with a model of which each worker has a part."""
        return None if other.axis is Axis.SPLIT else objection(self, other)

    def refuses_sum(self, whole: Combined) -> str | None:
        """Compressed means of models."""
        return objection_to_sum(whole)
