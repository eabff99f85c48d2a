"""What exchanges have in common whose workers step by themselves on models of their own, and mix them afterwards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.gossip.topology import Mixing
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies.worker.exchange import Exchange, averaged_buffers, closure_of
from offbeat.strategies.worker.flat_rows import Idle, averaged_parameters


class Parted(Exchange):
    """One worker's side: gradients stay local, and after a step the strategy has its turn."""

    replicated = False
    mixes = True
    acts_in_steps = True

    def __init__(self, group: Group, stopwatch: Stopwatch, strategy: str, mixing: Mixing) -> None:
        super().__init__(group, stopwatch)
        self.strategy, self.mixing = strategy, mixing
        self.held = False
        self.distance: float | None = None
        """Of the replicas to their mean, when it was last measured: the root of the mean square."""
        self._examples: int | None = None
        self._idle = Idle()
        self._optimizers = 0

    def install(self, model: nn.Module) -> None:
        """Gradients stay local, so nothing hooks them."""

    def weigh(self, examples: int, total: int | None) -> None:
        """A worker without examples does not step."""
        del total
        self._examples = examples

    def suspend(self, held: bool) -> None:
        """While held, models stay apart."""
        self.held = held

    def attend(self, optimizer: Optimizer) -> None:
        """Mix after its steps."""
        if self.group.size > 1:
            number, self._optimizers = self._optimizers, self._optimizers + 1
            self.handles.append(optimizer.register_step_pre_hook(self._before))
            self.handles.append(optimizer.register_step_post_hook(partial(self._after, number)))

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise StrategyError(f"{self.strategy} cannot be used with optimizer.step(closure). Use allreduce.")
        if self._examples == 0:
            self._idle.hide(optimizer)

    def _after(self, number: int, optimizer: Optimizer, *_: Any) -> None:
        self._idle.restore()
        if not self.held:
            self.stepped(number, optimizer)

    @abstractmethod
    def stepped(self, number: int, optimizer: Optimizer) -> None:
        """An optimizer has stepped, and its parameters are to be mixed."""

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, all workers hold the mean of the replicas, whose distance to it is measured on the way."""
        with averaged_buffers(models, self.group), averaged_parameters(models, self.group) as distances:
            if self.group.size > 1:
                self.distance = float(np.sqrt(np.mean(np.square(distances))))
            yield

    def figures(self) -> dict[str, Any]:
        """How far apart the replicas were at the last evaluation."""
        return {} if self.distance is None else {"distance": self.distance}

    def notes(self) -> dict[str, Any]:
        """What the graph promises."""
        predicted = {"spectral_gap": self.mixing.gap, "rate": self.mixing.rate, "usual_rate": self.mixing.usual_rate}
        return {"gossip": {**predicted, "distance": self.distance}}
