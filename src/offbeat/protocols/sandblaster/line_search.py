"""A line search for the strong Wolfe conditions, as a coroutine that asks for the loss and its slope at a step.

Nocedal and Wright, "Numerical Optimization" (2006), algorithms 3.5 and 3.6, with cubic interpolation (equation 3.59).
The safeguards and constants are those of `torch.optim.LBFGS`, so that both take the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

DECREASE = 1e-4
"""The share of the decrease that the slope promises which a step must reach (c1)."""
CURVATURE = 0.9
"""The share of the slope at the start that may be left at the end (c2)."""
MOST_TRIALS = 25
"""Trials after which the best step so far is taken."""


@dataclass(frozen=True)
class LineTrial:
    """The loss along the line at one step."""

    step: float
    loss: float
    slope: float
    gradient: str
    """The register of the gradient there."""


@dataclass(frozen=True)
class StepToTry:
    """A step to try, and the trials whose gradients may still be taken."""

    step: float
    kept: tuple[LineTrial, ...]


Search = Generator[StepToTry, LineTrial, LineTrial]
"""Yields steps to try, and returns the trial to take."""


def strong_wolfe(start: LineTrial, step: float, direction: float, tolerance: float) -> Search:
    """The search from `start` in a direction whose largest number is `direction`."""
    previous, trial, trials = start, (yield StepToTry(step, (start,))), 0
    while trials < MOST_TRIALS:
        if _is_flat(trial, start) and not _is_worse(trial, previous, start, trials):
            return trial
        if trial.slope >= 0 or _is_worse(trial, previous, start, trials):
            return (yield from _zoom(start, (previous, trial), trials, direction, tolerance))
        longer = trial.step + 0.01 * (trial.step - previous.step)
        following = cubic_minimum(previous, trial, longer, trial.step * 10)
        previous, trial = trial, (yield StepToTry(following, (start, trial)))
        trials += 1
    return min(start, trial, key=lambda end: end.loss)


def _is_worse(trial: LineTrial, previous: LineTrial, start: LineTrial, trials: int) -> bool:
    return _too_long(trial, start) or (trials > 1 and trial.loss >= previous.loss)


def _zoom(
    start: LineTrial, ends: tuple[LineTrial, LineTrial], trials: int, direction: float, tolerance: float
) -> Search:
    """Narrow an interval that has a step which satisfies both conditions; `ends` are its ends, in any order."""
    low, high = sorted(ends, key=lambda end: end.loss)
    cramped = False
    while trials < MOST_TRIALS and abs(high.step - low.step) * direction >= tolerance:
        step, cramped = _inside(low, high, cramped)
        trial = yield StepToTry(step, (start, low, high))
        trials += 1
        if _too_long(trial, start) or trial.loss >= low.loss:
            low, high = (low, trial) if low.loss <= trial.loss else (trial, low)
            continue
        if _is_flat(trial, start):
            return trial
        high, low = (low if trial.slope * (high.step - low.step) >= 0 else high), trial
    return low


def _inside(low: LineTrial, high: LineTrial, cramped: bool) -> tuple[float, bool]:
    """The next step in an interval, and whether it is close to one of the ends; twice in a row it may not be."""
    left, right = sorted((low, high), key=lambda end: end.step)
    step = cubic_minimum(left, right, left.step, right.step)
    margin = 0.1 * (right.step - left.step)
    if min(right.step - step, step - left.step) >= margin:
        return step, False
    if not cramped and left.step < step < right.step:
        return step, True
    return (right.step - margin if right.step - step < step - left.step else left.step + margin), False


def _too_long(trial: LineTrial, start: LineTrial) -> bool:
    return trial.loss > start.loss + DECREASE * trial.step * start.slope


def _is_flat(trial: LineTrial, start: LineTrial) -> bool:
    return abs(trial.slope) <= -CURVATURE * start.slope


def cubic_minimum(one: LineTrial, other: LineTrial, least: float, most: float) -> float:
    """The minimum, between two bounds, of the cubic with these losses and slopes; their middle if it has none."""
    left, right = (one, other) if one.step <= other.step else (other, one)
    width = right.step - left.step
    if width == 0:
        return (least + most) / 2
    bend = left.slope + right.slope - 3 * (left.loss - right.loss) / (left.step - right.step)
    square = bend * bend - left.slope * right.slope
    if not square >= 0:
        return (least + most) / 2
    root = math.sqrt(square)
    divisor = right.slope - left.slope + 2 * root
    if divisor == 0:
        return (least + most) / 2
    return min(max(right.step - width * ((right.slope + root - bend) / divisor), least), most)
