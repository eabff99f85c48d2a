"""What the schedules of pipelines promise: the share of time that stages idle, and how much they hold at once."""

from __future__ import annotations

from offbeat.protocols.pipelines.orders import PipelineKind, Work, check_numbers
from offbeat.protocols.pipelines.plan import PartSeconds


def bubble_share(
    kind: PipelineKind, stages: int, microbatches: int, chunks: int = 1, seconds: PartSeconds | None = None
) -> float:
    """Share of the time that a stage idles, if all stages take the same and messages take none.

    naive (p - 1) / p; gpipe and one_f_one_b (p - 1) / (m + p - 1); interleaved (p - 1) / (v m + p - 1). Under
    zero_bubble a stage idles (p - 1) (F + B - W) if m >= p and W is the shortest of the three (Qi et al. 2024, table 2;
    B is the gradient of inputs alone). In general each of min(m, p) - 1 gaps is filled as far as the shortest of the
    three fills it. Only then does it matter what `seconds` each computation of a stage takes.
    """
    check_numbers(kind, stages, microbatches, chunks)
    others = stages - 1
    match kind:
        case PipelineKind.NAIVE:
            return others / stages
        case PipelineKind.GPIPE | PipelineKind.ONE_F_ONE_B | PipelineKind.INTERLEAVED:
            return others / (chunks * microbatches + others)
        case PipelineKind.ZERO_BUBBLE:
            of = (seconds or PartSeconds()).of
            forward, inputs, weights = of(Work.FORWARD), of(Work.INPUT_GRADIENT), of(Work.WEIGHT_GRADIENT)
            filled = (min(microbatches, stages) - 1) * min(forward, inputs, weights)
            idle = others * (forward + inputs) - filled
            return idle / (microbatches * (forward + inputs + weights) + idle)


def most_in_flight(kind: PipelineKind, stage: int, stages: int, microbatches: int, chunks: int = 1) -> int:
    """For how many microbatches a stage holds activations at once, at most; of a chunk each, if there are several.

    naive 1; gpipe m; one_f_one_b min(p - i, m) on stage i; zero_bubble min(p, m) on every stage (Qi et al. 2024, table
    2: a part is held until its gradients of weights are there); interleaved 2 (p - i - 1) + (v - 1) p + 1, or all v m
    of them, which is the number of warm-up microbatches (Narayanan et al. 2021, section 2.2) and the one after them.
    """
    match kind:
        case PipelineKind.NAIVE:
            return 1
        case PipelineKind.GPIPE:
            return microbatches
        case PipelineKind.ONE_F_ONE_B:
            return min(stages - stage, microbatches)
        case PipelineKind.ZERO_BUBBLE:
            return min(stages, microbatches)
        case PipelineKind.INTERLEAVED:
            return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, microbatches * chunks)
