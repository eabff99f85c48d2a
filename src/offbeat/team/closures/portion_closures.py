"""Closures under `sandblaster`: `optimizer.step(closure)` of torch's LBFGS, called once for each portion of the data.

Inside a closure a prepared loader yields the batches of the portion at hand. So a closure that loops over its loader
and returns the summed loss, as full-batch closures do, computes a portion's share of loss and gradient. The optimizer
stays the user's: before it steps, a hook makes the iterations, and gives it a closure that has nothing left to do.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from offbeat.errors import DataError, NonFiniteError, OffbeatWarning, StrategyError
from offbeat.protocols.partition import share
from offbeat.protocols.sandblaster.messages import IterationEnd
from offbeat.strategies.sandblaster import Sandblaster, SandblasterWorker
from offbeat.strategies.worker.exchange import closure_of
from offbeat.team.closures.portion_loader import PortionLoader
from offbeat.team.context import Workplace

Row = NDArray[Any]
Closure = Callable[[], Any]


class PortionClosures:
    """Has the steps of a user's LBFGS made by shards, coordinator and all workers."""

    def __init__(
        self, place: Workplace, strategy: Sandblaster, worker: SandblasterWorker, resume: Callable[[], None]
    ) -> None:
        """Prepare to make steps; `resume` gives the model the parameters of a resumed run."""
        self._place, self._strategy, self._worker, self._resume = place, strategy, worker, resume
        self._loaders: list[PortionLoader] = []
        self._handles: list[RemovableHandle] = []
        self._parameters: list[Tensor] = []
        self._row: Row = np.empty(0)
        self._probes = 2  # The closure is tried before the first two iterations.

    def loader(self, original: Iterable[Any], split: bool) -> PortionLoader:
        """A loader for closures; refuses those whose batches cannot be dealt out."""
        usual = isinstance(original, DataLoader) and type(original).__iter__ is DataLoader.__iter__
        typed = cast("DataLoader[Any]", original)
        if not usual or isinstance(typed.dataset, IterableDataset) or typed.batch_sampler is None:
            raise DataError(
                f"{self._strategy} hands out the batches of a DataLoader over a map-style dataset, in every evaluation "
                f"the same; a {type(original).__name__} over a stream or with batches of its own has none to hand out."
            )
        if not split:
            raise StrategyError(
                f"{self._strategy} decides during the run which worker computes which batches, so it must divide the "
                f"loader itself. Omit split=False."
            )
        loader = PortionLoader(typed, self._place.seed, self._strategy)
        if 1 < self._place.group.size > len(loader):
            warnings.warn(
                f"the loader has {len(loader)} batches for {self._place.group.size} workers. Batches are what "
                f"{self._strategy} hands out, so some workers would have nothing to do: use a smaller batch_size.",
                OffbeatWarning,
                stacklevel=4,
            )
        self._loaders.append(loader)
        return loader

    def attend(self, optimizer: Optimizer) -> None:
        """Have this optimizer's steps made; refuses all but LBFGS with the same line search."""
        if not isinstance(optimizer, LBFGS):
            raise StrategyError(
                f"{self._strategy} is L-BFGS, and {type(optimizer).__name__} is not. In a loop of your own it makes "
                f"the steps of torch.optim.LBFGS(model.parameters(), line_search_fn='strong_wolfe'); for "
                f"{type(optimizer).__name__} use allreduce or server."
            )
        (group,) = optimizer.param_groups
        if group["line_search_fn"] != "strong_wolfe" or group["lr"] != 1:
            raise StrategyError(
                f"{self._strategy} begins its line search with a step of 1 and has strong_wolfe only, but this LBFGS "
                f"has lr={group['lr']:g} and line_search_fn={group['line_search_fn']!r}: it would take other "
                f"steps than alone. Use LBFGS(..., lr=1, line_search_fn='strong_wolfe')."
            )
        if self._handles:
            raise StrategyError(f"{self._strategy} has one vector of parameters on its shards: prepare one optimizer.")
        if group["history_size"] != self._strategy.history:
            self._place.watch.warn(
                f"history_size={group['history_size']} of LBFGS is not used: shards keep {self._strategy.history} "
                f"steps. Say --strategy 'sandblaster(history={group['history_size']})' for the same iterates as alone."
            )
        self._parameters = cast("list[Tensor]", group["params"])
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    def close(self) -> None:
        """Remove the hook."""
        for handle in self._handles:
            handle.remove()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the iterations of a step; the optimizer is left with a closure without gradients, and stays."""
        closure, (group,) = closure_of(args, kwargs), optimizer.param_groups
        if closure is None:
            raise StrategyError("torch.optim.LBFGS steps with a closure: call optimizer.step(closure).")
        if not self._row.size:
            self._start()
        # Torch computes the loss at the start of each step, and counts it; here the first iteration does.
        loss, evaluations = math.nan, int(self._worker.evaluations > 0)
        for _ in range(int(group["max_iter"])):
            if self._probes:
                self._probes -= 1
                self._probe(closure)
            before = self._worker.evaluations
            end = self._iterate(closure)
            loss, evaluations = end.loss, evaluations + self._worker.evaluations - before
            if end.stopped or evaluations >= int(group["max_eval"]):
                break
        return (optimizer, partial(self._finished, loss)), {}

    def _finished(self, loss: float) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        return torch.tensor(loss, dtype=self._parameters[0].dtype)

    def _start(self) -> None:
        """Shards get the parameters of the worker that leads."""
        place = self._place
        if not self._loaders:
            raise StrategyError(
                f"{self._strategy} hands out batches of the training data, so it needs the loader: give it to "
                f"team.prepare(...), and loop over it in the closure."
            )
        self._resume()
        place.watch.first_gradients.settled = True  # Trying the closure computes the same batches everywhere.
        self._row = parameters_to_vector(self._parameters).detach().cpu().numpy().copy()
        self._worker.start(self._row)

    def _iterate(self, closure: Closure) -> IterationEnd:
        place, link = self._place, self._worker.link
        with place.stopwatch.spent_on("communicate"):
            end = link.iterate(partial(self._compute, closure))
            self._row = link.read().copy()
            self._put(self._row)
            # No worker begins the next iteration while another still reads the parameters of this one.
            place.group.barrier("the parameters of an iteration")
        place.ledger.samples += self._worker.ended(end) * sum(loader.examples for loader in self._loaders)
        place.reports.last_loss = end.loss
        place.notes["sandblaster"] = figures_of(end)
        return end

    def _compute(self, closure: Closure, portion: int, row: Row) -> tuple[float, Row]:
        """A portion's share of loss and gradient."""
        with self._place.stopwatch.spent_on("compute"):
            spans = [share(len(loader), portion, self._strategy.portions) for loader in self._loaders]
            if all(start == stop for start, stop in spans):  # There are more portions than batches.
                return 0.0, np.zeros_like(row)
            self._put(row)
            return self._called(closure, [range(*span) for span in spans])

    def _called(self, closure: Closure, batches: Sequence[Sequence[int]], fresh: bool = False) -> tuple[float, Row]:
        """The loss and gradient that a closure computes of these batches of each loader."""
        for loader, chosen in zip(self._loaders, batches, strict=True):
            loader.choose(chosen, fresh)
        for parameter in self._parameters:
            parameter.grad = None
        try:
            with torch.enable_grad():
                loss = closure()
            self._check_passes()
        finally:
            for loader in self._loaders:
                loader.choose(None)
        value = math.nan if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the closure returned {'nothing' if loss is None else value} at step {self._place.step}: a line "
                f"search needs a loss that is a finite number. Return the summed loss of the batches."
            )
        parts = [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1)
            for parameter in self._parameters
        ]
        return value, np.ascontiguousarray(torch.cat(parts).detach().cpu().numpy())

    def _check_passes(self) -> None:
        passes = [(loader.begun, loader.ended) for loader in self._loaders if loader.begun]
        if not passes:
            raise StrategyError(
                f"the closure did not read a prepared loader. {self._strategy} calls it once for each portion of the "
                f"data, and the loader yields that portion: without it, every call would compute the same loss."
            )
        if any(each != (1, 1) for each in passes):
            raise StrategyError(
                f"the closure must pass over the prepared loader once, and to its end: it began {passes[0][0]} passes "
                f"and ended {passes[0][1]}. What it leaves out or repeats would be missing or counted twice in the sum."
            )

    def _probe(self, closure: Closure) -> None:
        """Refuse a closure whose loss is random, or is not a sum over batches: on two batches, at these parameters."""
        none = [range(0)] * (len(self._loaders) - 1)
        once, again = (self._called(closure, [range(1), *none], fresh=True) for _ in range(2))
        refuse_random(once, again, f"{self._strategy}: the closure")
        if len(self._loaders[0]) < 2:
            return
        other = self._called(closure, [range(1, 2), *none], fresh=True)
        both = self._called(closure, [range(2), *none], fresh=True)
        if _differ((once[0] + other[0], once[1] + other[1]), both):
            raise StrategyError(
                f"the closure's loss of two batches is {both[0]:g}, but {once[0]:g} and {other[0]:g} for each of them: "
                f"{self._strategy} adds the losses and gradients of portions, so they have to be sums. Divide each "
                f"batch's loss by the number of all batches (or the summed loss by the size of the dataset), not by "
                f"what the closure counts, and put penalties into the losses of batches."
            )

    def _put(self, row: Row) -> None:
        with torch.no_grad():
            vector = torch.from_numpy(row).to(self._place.device, copy=True)
            vector_to_parameters(vector, self._parameters)


def refuse_random(once: tuple[float, Row], again: tuple[float, Row], what: str) -> None:
    """Refuse a loss that was not the same twice, for the same data at the same parameters."""
    if _differ(once, again):
        raise StrategyError(
            f"{what} computed the loss {once[0]!r} and then {again[0]!r}, or other gradients, for the same data at the "
            f"same parameters. So the loss is random (dropout, noise, augmentation), and a line search, which compares "
            f"losses at several points, would follow that instead. Turn it off, give it a generator that is seeded "
            f"anew in each call, or use allreduce."
        )


def _differ(one: tuple[float, Row], other: tuple[float, Row]) -> bool:
    """Whether two losses, or two gradients, differ by more than rounding."""
    (loss, row), (other_loss, other_row) = one, other
    rounding = float(np.finfo(row.dtype).eps) ** 0.5
    size = max(float(np.abs(row).max(initial=0)), float(np.abs(other_row).max(initial=0)))
    apart = float(np.abs(row - other_row).max(initial=0))
    return abs(loss - other_loss) > rounding * max(abs(loss), abs(other_loss)) or apart > rounding * size


def figures_of(end: IterationEnd) -> dict[str, Any]:
    """The figures of a run after an iteration, for its result."""
    return {
        "iterations": end.iteration,
        "evaluations": end.evaluations,
        "gradient": end.gradient,
        "stopped": end.stopped,
        "portions": end.handed_out,
        "duplicated": end.duplicated,
        "reissued": end.reissued,
        "coordinator_bytes": {"sent": end.sent, "received": end.received},
    }
