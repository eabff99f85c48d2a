"""Workers step by themselves, and average their models every few steps.

What is averaged is how far each has moved since all last agreed, in one flat row: so differences can be compressed, and
an outer optimizer can take the averaged difference for a gradient.

Stich, "Local SGD Converges Fast and Communicates Little" (2019); Lin et al., "Don't Use Large Mini-Batches, Use Local
SGD" (2020), for `after` and for momentum; Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models" (2023), algorithm 1, for `outer`.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from offbeat.errors import RunError, StrategyError
from offbeat.protocols.compression import RowFormat, Shapes
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.schedule import View
from offbeat.simulate.predicted_step import Step
from offbeat.strategies._base import Axis, Setting, Strategy, Traits, require
from offbeat.strategies.worker.capabilities import CostedMeans, MeanMaker
from offbeat.strategies.worker.exchange import Exchange, Exchanging, Pace, Timing, closure_of, foreseen_by
from offbeat.strategies.worker.flat_rows import (
    Idle,
    Rows,
    averaged_parameters,
    parameters_of,
    state_tensors,
    still_fits,
)


@dataclass(frozen=True)
class Nesterov(Setting):
    """An outer optimizer with Nesterov's momentum, as DiLoCo has it."""

    rate: float = 0.7
    """The learning rate on averaged differences; 1 without momentum is plain averaging."""
    momentum: float = 0.9
    """How much of the last outer step is taken along."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        require(self.rate > 0, self, "rate", self.rate, "a step is longer than 0")
        require(0 < self.momentum < 1, self, "momentum", self.momentum, "it must lie between 0 and 1")

    def on(self, rows: Sequence[Parameter]) -> Optimizer:
        """The optimizer of these rows."""
        return SGD(rows, lr=self.rate, momentum=self.momentum, nesterov=True)


@dataclass(frozen=True)
class OuterSGD(Setting):
    """An outer optimizer without momentum: the averaged difference, times a rate."""

    name: ClassVar[str] = "sgd"
    rate: float
    """The learning rate on averaged differences; 1 is plain averaging."""

    def __post_init__(self) -> None:
        """Refuse a rate that makes no sense."""
        super().__post_init__()
        require(self.rate > 0, self, "rate", self.rate, "a step is longer than 0")

    def on(self, rows: Sequence[Parameter]) -> Optimizer:
        """The optimizer of these rows."""
        return SGD(rows, lr=self.rate)


@dataclass(frozen=True)
class Local(Timing):
    """Workers step by themselves with their own optimizers, and average their models every few steps.

    Between two averagings nobody waits for anybody. A worker's difference counts by the examples behind it, so that
    `local(1)` with plain SGD is what `allreduce` computes. Evaluations see the mean of all models, and that is the
    model which a run leaves.
    """

    period: int
    """Steps between two averagings."""
    after: int = 0
    """Steps at the beginning in which gradients are exchanged as without it (post-local SGD)."""
    outer: Nesterov | OuterSGD | None = None
    """An optimizer that takes the averaged difference for a gradient; None: the mean itself is taken."""
    momentum: Literal["kept", "averaged", "reset"] = "kept"
    """What becomes of the optimizer's state at an averaging: it stays each worker's own, is averaged, or forgotten."""

    promises = Traits(synchronous=True, deterministic=True)
    aliases: ClassVar = {"diloco": "local(500, outer=nesterov(0.7, 0.9))"}
    examples = ("local(8)", "local(8, after=1000)", "local(50, outer=nesterov)", "gossip + local(4)")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        require(self.period >= 1, self, "period", self.period, "averagings are at least 1 step apart")
        require(self.after >= 0, self, "after", self.after, "it counts steps from the beginning")

    def refuses(self, other: Strategy) -> str | None:
        """Exchanges whose replicas cannot part for some steps."""
        if other.axis is not Axis.EXCHANGE:
            return None
        if not getattr(other, "parting", False):
            return (
                f"{self.name} lets workers step by themselves and averages their models, which {other} cannot do. "
                f"Use allreduce or gossip; on servers, downpour(push={self.period}, fetch={self.period}) and elastic "
                f"do something alike"
            )
        if getattr(other, "mixes", False) and (self.outer is not None or self.momentum != "kept"):
            return (
                f"workers that mix with their neighbours never all agree, so there is no common point for an outer "
                f"optimizer or for an averaged or forgotten momentum. Write {self.name}({self.period}) alone"
            )
        return None

    def pace(self, exchange: Exchange) -> Pace:
        """The worker's side: gradients stay local, and models are averaged every n-th step."""
        return _Spacing(exchange, self) if exchange.mixes else _Averaging(exchange, self)

    def planned(self, exchange: Exchanging, view: View, nbytes: int, forms: Sequence[RowFormat] = ()) -> Step | str:
        """The mean of models, or what mixes them, in every n-th step."""
        return _every(exchange.planned(view, nbytes, forms, models=True), self)

    def batches_per_update(self) -> int:
        """All agree after so many."""
        return self.period


class _Counting(Pace):
    """Counts the steps of every optimizer, and lets a worker without examples make none."""

    replicated = False
    acts_in_steps = True

    def __init__(self, exchange: Exchange, settings: Local) -> None:
        super().__init__(exchange)
        self._settings = settings
        self._batch: tuple[int, int | None] | None = None
        self._steps: list[int] = []

    @property
    def meeting(self) -> bool:
        """Workers meet at the beginning of a period; while gradients are exchanged, always."""
        done = self._steps[0] if self._steps else 0
        return done < self._settings.after or done % self._settings.period == 0

    def watch(self, optimizer: Optimizer) -> None:
        """Hooks that count its steps."""
        number = len(self._steps)
        self._steps.append(0)
        self.handles.append(optimizer.register_step_pre_hook(partial(self._before, number)))
        self.handles.append(optimizer.register_step_post_hook(partial(self._after, number)))

    def _before(self, number: int, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None and self.exchange.group.size > 1:
            raise StrategyError("local cannot be used with optimizer.step(closure). Use an exchange alone.")
        self._stepping(number, optimizer)

    def _after(self, number: int, optimizer: Optimizer, *_: Any) -> None:
        self._steps[number] += 1
        self._stepped(number, optimizer)

    def _due(self, number: int) -> bool:
        """Whether the step that was just made is the last of a period."""
        done = self._steps[number]
        return done >= self._settings.after and done % self._settings.period == 0

    def _stepping(self, number: int, optimizer: Optimizer) -> None:
        """Before an optimizer's step."""

    def _stepped(self, number: int, optimizer: Optimizer) -> None:
        """After an optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """How far each optimizer is."""
        return {"steps": list(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._steps = [int(count) for count in state["steps"]]


class _Spacing(_Counting):
    """For exchanges that mix models after a step: lets them do so only after every n-th step."""

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Tell the exchange what the batch weighs."""
        del last
        self.exchange.weigh(examples, total)

    def foreseen(self) -> Step | str:
        """What the exchange says, in every n-th step."""
        return _every(foreseen_by(self.exchange), self._settings)

    def _stepping(self, number: int, optimizer: Optimizer) -> None:
        del optimizer
        done, settings = self._steps[number] + 1, self._settings
        self.exchange.suspend(done > settings.after and done % settings.period != 0)


class _Averaging(_Counting):
    """For exchanges of gradients: keeps them from it, and averages models itself."""

    def __init__(self, exchange: Exchange, settings: Local) -> None:
        super().__init__(exchange, settings)
        self._ways: list[_Way] = []
        self._idle = Idle()
        self._alone = settings.after == 0
        exchange.suspend(self._alone)

    def watch(self, optimizer: Optimizer) -> None:
        """Also lay out its rows, when it first steps."""
        super().watch(optimizer)
        self._ways.append(_Way(optimizer, self._settings))

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Count the examples; while gradients are exchanged, the exchange weighs them."""
        del last
        self._batch = examples, total
        self.exchange.suspend(self._alone)
        if not self._alone:
            self.exchange.weigh(examples, total)

    def _stepping(self, number: int, optimizer: Optimizer) -> None:
        if not self._alone:
            return
        self._ways[number].start()
        if self._batch is not None and not self._batch[0]:
            self._idle.hide(optimizer)

    def _stepped(self, number: int, optimizer: Optimizer) -> None:
        self._idle.restore()
        if self._alone:
            way = self._ways[number]
            way.examples += 1.0 if self._batch is None else self._batch[0]
            if self._due(number):
                still_fits(way.rows, optimizer, str(self._settings))
                self._average(way)
        elif number == 0 and self._steps[0] >= self._settings.after:
            self._alone = True
            self.exchange.suspend(True)

    def foreseen(self) -> Step | str:
        """What the last mean of models was made by, every n-th step."""
        exchange = self.exchange
        if not isinstance(exchange, CostedMeans):
            return exchange.unforeseen
        made = [each for way in self._ways for each in way.exchanges]
        return _every(exchange.foreseen_means(made), self._settings)

    def _average(self, way: _Way) -> None:
        group = self.exchange.group
        if group.size == 1 and self._settings.outer is None:
            way.examples = 0.0
            return
        with self.exchange.stopwatch.spent_on("communicate"):
            group.sent.record()
            counts = group.gather([way.examples], "the count of examples")
            total = float(counts.sum())
            weight = way.examples * group.size / total if total else 1.0
            way.average(weight, self.exchange)
            way.exchanges = group.sent.recorded()
        way.examples = 0.0

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, all workers hold the mean of the replicas, as an averaging now would make it."""
        examples = max((way.examples for way in self._ways), default=0.0)
        with self.exchange.averaged(models), averaged_parameters(models, self.exchange.group, examples):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Where all last agreed, and how far each has come since."""
        return {**super().state_dict(), "alone": self._alone, "ways": [way.state_dict() for way in self._ways]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._alone = bool(state["alone"])
        self.exchange.suspend(self._alone)
        for way, saved in zip(self._ways, state["ways"], strict=True):
            way.load_state_dict(saved)


class _Way:
    """One optimizer's parameters: where all last agreed on them, and the way that this worker has gone since."""

    def __init__(self, optimizer: Optimizer, settings: Local) -> None:
        self._optimizer, self._settings = optimizer, settings
        self._fresh = {p: {k: _copied(v) for k, v in state.items()} for p, state in optimizer.state.items()}
        self.rows = Rows(())
        self.examples = 0.0
        """Behind the steps since the last averaging."""
        self.exchanges: tuple[Exchanged, ...] = ()
        """What the last averaging exchanged."""
        self._common: list[Parameter] = []
        self._outer: Optimizer | None = None

    def start(self) -> None:
        """Before the first step alone: all still agree."""
        if not self._common:
            self._lay_out(None)

    def _lay_out(self, common: Sequence[Tensor] | None) -> None:
        self.rows = Rows(parameters_of(self._optimizer))
        self._common = [Parameter(row, requires_grad=False) for row in (common or self.rows.read())]
        if self._settings.outer is not None and self._common:
            self._outer = self._settings.outer.on(self._common)

    def average(self, weight: float, exchange: Exchange) -> None:
        """Let all agree again: the common point moves by the mean of all ways, and everybody goes there."""
        ways = self.rows.read()
        for row, common, shapes in zip(ways, self._common, self.rows.shapes, strict=True):
            row.sub_(common).mul_(weight)
            _mean(exchange, row, "the mean of models", shapes)
            if self._outer is None:
                common.add_(row)
            else:
                common.grad = row.neg_()
        if self._outer is not None:
            self._outer.step()
        self.rows.write(self._common)
        if self._settings.momentum == "averaged":
            self._average_state(weight, exchange)
        elif self._settings.momentum == "reset":
            self._forget()

    def _average_state(self, weight: float, exchange: Exchange) -> None:
        """Momentum and the like by the same weights; who has none yet for a parameter brings zeros, and takes none."""
        held = [state_tensors(self._optimizer, p) for p in self.rows.tensors if isinstance(p, Parameter)]
        counts = exchange.group.gather([float(len(one)) for one in held], "the count of optimizer states")
        most = counts.max(dim=0).values
        if bool(((counts != most) & (counts != 0)).any()):
            raise RunError(
                f"the workers' {type(self._optimizer).__name__}s remember different things of a parameter, so their "
                f"states cannot be averaged. Use local(..., momentum=kept)."
            )
        brought: list[Tensor] = []
        for parameter, one, count in zip(self.rows.tensors, held, most.tolist(), strict=True):
            brought += [tensor for _, tensor in one] or [torch.zeros_like(parameter) for _ in range(int(count))]
        states = Rows(brought)
        rows = states.read()
        for row, shapes in zip(rows, states.shapes, strict=True):
            row.mul_(weight)
            _mean(exchange, row, "the mean of optimizer states", shapes)
        states.write(rows)

    def _forget(self) -> None:
        for parameter in parameters_of(self._optimizer):
            self._optimizer.state.pop(parameter, None)
            if parameter in self._fresh:
                self._optimizer.state[parameter] = {k: _copied(v) for k, v in self._fresh[parameter].items()}

    def state_dict(self) -> dict[str, Any]:
        """The common point, the outer optimizer, and the examples since."""
        outer = {} if self._outer is None else self._outer.state_dict()["state"]
        return {
            "common": [row.detach().clone() for row in self._common],
            "outer": {str(number): dict(state) for number, state in outer.items()},
            "examples": self.examples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self.examples = float(state["examples"])
        if not state["common"]:
            return
        self._lay_out(state["common"])
        if self._outer is not None:
            saved = {int(number): entry for number, entry in state["outer"].items()}
            self._outer.load_state_dict({**self._outer.state_dict(), "state": saved})


def _mean(exchange: Exchange, row: Tensor, what: str, shapes: Shapes) -> None:
    """Replace a row by its mean over the workers, compressed if the exchange does so."""
    if isinstance(exchange, MeanMaker):
        exchange.mean(row, what, shapes)
    else:
        exchange.group.mean(row, what)


def _every(step: Step | str, settings: Local) -> Step | str:
    if isinstance(step, str):
        return step
    if settings.after:
        return "its first steps exchange something else than the later ones"
    return structs.replace(step, period=settings.period, beside=False)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
