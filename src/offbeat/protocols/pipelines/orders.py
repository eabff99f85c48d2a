"""The order in which each stage of a pipeline computes, for every kind of schedule.

A model is cut into parts, one after the other. With `chunks` parts on each of `stages` stages, part `chunk * stages +
stage` is on `stage`, so that what leaves the last stage enters the first one again. A batch is cut into microbatches,
each of which goes forward through all parts, and backward in the opposite direction.

- naive: one microbatch at a time.
- gpipe: all forward, then all backward (Huang et al. 2019).
- one_f_one_b: as many forward as it takes to reach the last stage, then one backward for each forward, so that few
  microbatches are in flight (PipeDream-Flush: Narayanan et al. 2021).
- interleaved: the same with several chunks on each stage, in groups of `stages` microbatches (Megatron-LM: Narayanan et
  al. 2021, section 2.2).
- zero_bubble: one_f_one_b with backward in two: the gradients of inputs, for which the stage before waits, and those of
  weights, for which nobody does and which fill gaps (ZB-H1: Qi et al. 2024, section 2.3). Stage i is i microbatches
  late with the gradients of weights, so that every stage has the same number in flight.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from offbeat.errors import UsageError


class Work(StrEnum):
    """What a stage computes for a microbatch."""

    FORWARD = "forward"
    BACKWARD = "backward"  # Both gradients at once.
    INPUT_GRADIENT = "input_gradient"  # Of the part's inputs: what the part before waits for.
    WEIGHT_GRADIENT = "weight_gradient"  # Of its weights: nobody waits for it.


class Action(NamedTuple):
    """One computation of a stage."""

    work: Work
    microbatch: int
    chunk: int = 0  # Which of the stage's parts.

    @property
    def brief(self) -> str:
        """In few words, for tables."""
        return f"{self.work.value.replace('_', ' ')} {self.microbatch}" + (
            f", chunk {self.chunk}" if self.chunk else ""
        )

    def __str__(self) -> str:
        """In words, for errors and pictures."""
        words = f"{self.work.value.replace('_', ' ')} of microbatch {self.microbatch}"
        return f"{words}, chunk {self.chunk}" if self.chunk else words


class PipelineKind(StrEnum):
    """Kinds of pipeline schedules."""

    NAIVE = "naive"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "one_f_one_b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"


Order = tuple[Action, ...]  # What one stage computes, one after the other.


def orders(kind: PipelineKind, stages: int, microbatches: int, chunks: int = 1) -> tuple[Order, ...]:
    """For each stage the order of its computations; refuses numbers that the kind of schedule cannot have."""
    check_numbers(kind, stages, microbatches, chunks)
    return tuple(_order(kind, stage, stages, microbatches, chunks) for stage in range(stages))


def check_numbers(kind: PipelineKind, stages: int, microbatches: int, chunks: int = 1) -> None:
    """Refuse numbers that the kind of schedule cannot have, with the nearest that it can."""
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise UsageError(f"a pipeline of {number} {what} computes nothing: give at least 1.")
    if kind is not PipelineKind.INTERLEAVED:
        if chunks > 1:
            raise UsageError(
                f"{kind.value} has one chunk on each stage, not {chunks}: several are interleaved. "
                f"Use the schedule interleaved, or omit chunks."
            )
        return
    if chunks == 1:
        raise UsageError(
            "interleaved with chunks=1 has nothing to interleave: give chunks=2 or more, or use one_f_one_b."
        )
    if microbatches % stages:
        below, above = microbatches // stages * stages, -(-microbatches // stages) * stages
        valid = f"{below} or {above}" if below else f"{above}"
        raise UsageError(
            f"interleaved takes microbatches in groups of as many as there are stages, and {microbatches} microbatches "
            f"cannot be divided into groups of {stages}: use {valid} microbatches, or one_f_one_b, which takes any "
            f"number."
        )


def _order(kind: PipelineKind, stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    if kind is PipelineKind.INTERLEAVED:
        return _interleaved(stage, stages, microbatches, chunks)
    if kind is PipelineKind.ZERO_BUBBLE:
        return _zero_bubble(stage, stages, microbatches)
    if kind is PipelineKind.NAIVE:
        return _one_chunk(microbatches, ahead=0)
    if kind is PipelineKind.GPIPE:
        return _one_chunk(microbatches, ahead=microbatches)
    return _one_chunk(microbatches, ahead=stages - 1 - stage)


def _one_chunk(microbatches: int, ahead: int) -> Order:
    forward = [Action(Work.FORWARD, number) for number in range(microbatches)]
    backward = [Action(Work.BACKWARD, number) for number in range(microbatches)]
    return _in_turn(forward, backward, ahead)


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Groups of `stages` microbatches go through chunk after chunk, backward through the chunks in opposite order."""
    group = stages * chunks
    forward: list[Action] = []
    backward: list[Action] = []
    for count in range(microbatches * chunks):
        microbatch, chunk = count // group * stages + count % stages, count % group // stages
        forward.append(Action(Work.FORWARD, microbatch, chunk))
        backward.append(Action(Work.BACKWARD, microbatch, chunks - 1 - chunk))
    return _in_turn(forward, backward, 2 * (stages - 1 - stage) + (chunks - 1) * stages)


def _zero_bubble(stage: int, stages: int, microbatches: int) -> Order:
    """One forward and one backward in turn; the gradients of weights follow `stage` microbatches later."""
    order: list[Action] = []
    for action in _one_chunk(microbatches, ahead=stages - 1 - stage):
        if action.work is Work.FORWARD:
            order.append(action)
            continue
        order.append(Action(Work.INPUT_GRADIENT, action.microbatch))
        if action.microbatch >= stage:
            order.append(Action(Work.WEIGHT_GRADIENT, action.microbatch - stage))
    late = range(max(0, microbatches - stage), microbatches)
    return (*order, *(Action(Work.WEIGHT_GRADIENT, number) for number in late))


def _in_turn(forward: list[Action], backward: list[Action], ahead: int) -> Order:
    """`ahead` actions forward, then one forward and one backward in turn, then what is left of backward."""
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for number, action in enumerate(backward):
        order += [*forward[ahead + number : ahead + number + 1], action]
    return tuple(order)
