"""Local SGD: workers step independently, and average their models every few steps.

Averaging differences to the last common point lets them be compressed, or used as an outer optimizer's gradient.

Stich, "Local SGD Converges Fast and Communicates Little" (2019); Lin et al., "Don't Use Large Mini-Batches, Use Local
SGD" (2020), for `after` and for momentum; Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models" (2023), algorithm 1, for `outer`.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from offbeat.errors import RunError
from offbeat.protocols.compression import RowFormat, Shapes
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.schedule import View
from offbeat.simulate.predicted_step import Step
from offbeat.strategies._base import Axis, Setting, Strategy, Traits
from offbeat.strategies.language.fields import Ranges
from offbeat.strategies.worker.capabilities import CostedMeans, MeanMaker
from offbeat.strategies.worker.exchange import Exchange, Exchanging, Pace, Timing, predicted_by, refuse_closure
from offbeat.strategies.worker.flat_rows import Idle, Rows, averaged_parameters, parameters_of, still_fits

_RATE: Ranges = (("rate", lambda rate: rate > 0, "a step is longer than 0"),)


@dataclass(frozen=True)
class Nesterov(Setting):
    """An outer optimizer with Nesterov momentum, as in DiLoCo."""

    rate: float = 0.7
    """The learning rate on averaged differences; 1 without momentum is plain averaging."""
    momentum: float = 0.9
    """Share of the last outer step that is added to the next."""

    _ranges = (*_RATE, ("momentum", lambda momentum: 0 < momentum < 1, "it must lie between 0 and 1"))

    def on(self, rows: Sequence[Parameter]) -> Optimizer:
        """The optimizer of these rows."""
        return SGD(rows, lr=self.rate, momentum=self.momentum, nesterov=True)


@dataclass(frozen=True)
class OuterSGD(Setting):
    """An outer optimizer without momentum: the averaged difference, times a rate."""

    name: ClassVar[str] = "sgd"
    rate: float
    """The learning rate on averaged differences; 1 is plain averaging."""

    _ranges = _RATE

    def on(self, rows: Sequence[Parameter]) -> Optimizer:
        """The optimizer of these rows."""
        return SGD(rows, lr=self.rate)


@dataclass(frozen=True)
class Local(Timing):
    """Workers step independently with their own optimizers, and average their models every few steps.

    Between two averagings no worker waits. Differences are weighted by examples, so that `local(1)` with plain SGD
    computes what `allreduce` computes. Evaluations use the mean of all models, and a run saves that mean.
    """

    period: int
    """Steps between two averagings."""
    after: int = 0
    """Steps at the beginning in which gradients are exchanged instead (post-local SGD)."""
    outer: Nesterov | OuterSGD | None = None
    """An optimizer that uses the averaged difference as a gradient; None uses the mean itself."""
    momentum: Literal["kept", "averaged", "reset"] = "kept"
    """What happens to the optimizer's state at an averaging: each worker keeps its own, or it is averaged or reset."""

    promises = Traits(synchronous=True, deterministic=True)
    aliases: ClassVar = {"diloco": "local(500, outer=nesterov(0.7, 0.9))"}
    examples = ("local(8)", "local(8, after=1000)", "local(50, outer=nesterov)", "gossip + local(4)")
    _ranges = (
        ("period", lambda steps: steps >= 1, "averagings are at least 1 step apart"),
        ("after", lambda steps: steps >= 0, "it counts steps from the beginning"),
    )

    def refuses(self, other: Strategy) -> str | None:
        """Exchanges whose workers cannot step independently."""
        if other.axis is not Axis.EXCHANGE:
            return None
        if not getattr(other, "parting", False):
            return (
                f"{self.name} lets workers step independently and averages their models, which {other} cannot do. "
                f"Use allreduce or gossip; on servers, downpour(push={self.period}, fetch={self.period}) and elastic "
                f"are similar"
            )
        if getattr(other, "mixes", False) and (self.outer is not None or self.momentum != "kept"):
            return (
                f"workers that mix with their neighbours never all agree, so there is no common point for an outer "
                f"optimizer or for an averaged or reset momentum. Write {self.name}({self.period}) alone"
            )
        return None

    def pace(self, exchange: Exchange) -> Pace:
        """The worker's side: gradients stay local, and models are averaged every n-th step."""
        return LocalMixingWorker(exchange, self) if exchange.mixes else LocalAveragingWorker(exchange, self)

    def planned(self, exchange: Exchanging, view: View, nbytes: int, forms: Sequence[RowFormat] = ()) -> Step | str:
        """The mean of models, or their mixing, in every n-th step."""
        return _every(exchange.planned(view, nbytes, forms, models=True), self)

    def batches_per_update(self) -> int:
        """The steps between two averagings."""
        return self.period


class LocalWorker(Pace):
    """Counts the steps of every optimizer."""

    replicated = False
    acts_in_steps = True

    def __init__(self, exchange: Exchange, settings: Local) -> None:
        super().__init__(exchange)
        self._settings = settings
        self._batch: tuple[int, int | None] | None = None
        self._steps: list[int] = []

    @property
    def meeting(self) -> bool:
        """Workers meet at the start of a period, and in all steps in which gradients are exchanged."""
        done = self._steps[0] if self._steps else 0
        return done < self._settings.after or done % self._settings.period == 0

    def watch(self, optimizer: Optimizer) -> None:
        """Count its steps."""
        number = len(self._steps)
        self._steps.append(0)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.exchange.group.size > 1:
                refuse_closure("local", args, kwargs, "an exchange alone")
            self._stepping(number, optimizer)

        def after(optimizer: Optimizer, *_: Any) -> None:
            self._steps[number] += 1
            self._stepped(number, optimizer)

        self._hook_steps(optimizer, before, after)

    def _due(self, number: int) -> bool:
        """Whether the step that was just made is the last of a period."""
        done = self._steps[number]
        return done >= self._settings.after and done % self._settings.period == 0

    def _stepping(self, number: int, optimizer: Optimizer) -> None:
        """Before an optimizer's step."""

    def _stepped(self, number: int, optimizer: Optimizer) -> None:
        """After an optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """Steps of each optimizer."""
        return {"steps": list(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting."""
        self._steps = [int(count) for count in state["steps"]]


class LocalMixingWorker(LocalWorker):
    """For exchanges that mix models after a step: lets them do so only after every n-th step."""

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Tell the exchange the batch's weight."""
        del last
        self.exchange.weigh(examples, total)

    def predicted(self) -> Step | str:
        """The exchange's step, in every n-th step."""
        return _every(predicted_by(self.exchange), self._settings)

    def _stepping(self, number: int, optimizer: Optimizer) -> None:
        del optimizer
        done, settings = self._steps[number] + 1, self._settings
        self.exchange.suspend(done > settings.after and done % settings.period != 0)


class LocalAveragingWorker(LocalWorker):
    """For exchanges of gradients: suspends them, and averages models itself."""

    def __init__(self, exchange: Exchange, settings: Local) -> None:
        super().__init__(exchange, settings)
        self._replicas: list[_Replica] = []
        self._idle = Idle()
        self._alone = settings.after == 0
        exchange.suspend(self._alone)

    def watch(self, optimizer: Optimizer) -> None:
        """Also keep its replica's common point."""
        super().watch(optimizer)
        self._replicas.append(_Replica(optimizer, self._settings))

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Note the batch's examples; while gradients are exchanged, the exchange weighs them."""
        del last
        self._batch = examples, total
        self.exchange.suspend(self._alone)
        if not self._alone:
            self.exchange.weigh(examples, total)

    def _stepping(self, number: int, optimizer: Optimizer) -> None:
        if not self._alone:
            return
        self._replicas[number].start()
        if self._batch is not None and not self._batch[0]:
            self._idle.hide(optimizer)

    def _stepped(self, number: int, optimizer: Optimizer) -> None:
        self._idle.restore()
        if self._alone:
            replica = self._replicas[number]
            replica.examples += 1.0 if self._batch is None else self._batch[0]
            if self._due(number):
                still_fits(replica.rows, optimizer, str(self._settings))
                self._average(replica)
        elif number == 0 and self._steps[0] >= self._settings.after:
            self._alone = True
            self.exchange.suspend(True)

    def predicted(self) -> Step | str:
        """The exchanges of the last mean of models, in every n-th step."""
        exchange = self.exchange
        if not isinstance(exchange, CostedMeans):
            return exchange.unpredicted
        sent = [each for replica in self._replicas for each in replica.exchanges]
        return _every(exchange.predicted_means(sent), self._settings)

    def _average(self, replica: _Replica) -> None:
        group = self.exchange.group
        if group.size == 1 and self._settings.outer is None:
            replica.examples = 0.0
            return
        with self.exchange.stopwatch.spent_on("communicate"):
            group.sent.record()
            counts = group.gather([replica.examples], "the count of examples")
            total = float(counts.sum())
            weight = replica.examples * group.size / total if total else 1.0
            replica.average(weight, self.exchange)
            replica.exchanges = group.sent.recorded()
        replica.examples = 0.0

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, all workers hold the mean of the replicas."""
        examples = max((replica.examples for replica in self._replicas), default=0.0)
        with self.exchange.averaged(models), averaged_parameters(models, self.exchange.group, examples):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The common points, and the examples since."""
        return {
            **super().state_dict(),
            "alone": self._alone,
            "ways": [replica.state_dict() for replica in self._replicas],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from them."""
        super().load_state_dict(state)
        self._alone = bool(state["alone"])
        self.exchange.suspend(self._alone)
        for replica, saved in zip(self._replicas, state["ways"], strict=True):
            replica.load_state_dict(saved)


class _Replica:
    """One optimizer's parameters, and the point at which all workers last agreed on them."""

    def __init__(self, optimizer: Optimizer, settings: Local) -> None:
        self._optimizer, self._settings = optimizer, settings
        self._fresh = {p: {k: _copied(v) for k, v in state.items()} for p, state in optimizer.state.items()}
        self.rows = Rows(())
        self.examples = 0.0
        """Examples of the steps since the last averaging."""
        self.exchanges: tuple[Exchanged, ...] = ()
        """The exchanges of the last averaging."""
        self._common: list[Parameter] = []
        self._outer: Optimizer | None = None
        self._saved: Mapping[str, Any] | None = None  # Of a resumed run, until the parameters are known that are here.

    def start(self) -> None:
        """Before the first independent step: all workers still agree."""
        if not self._common:
            self._lay_out()

    def _lay_out(self) -> None:
        saved, self._saved = self._saved, None
        self.rows = Rows(parameters_of(self._optimizer))
        common = self.rows.read() if saved is None else saved["common"]
        self._common = [Parameter(row, requires_grad=False) for row in common]
        if self._settings.outer is not None and self._common:
            self._outer = self._settings.outer.on(self._common)
            if saved is not None:
                state = {int(number): entry for number, entry in saved["outer"].items()}
                self._outer.load_state_dict({**self._outer.state_dict(), "state": state})

    def average(self, weight: float, exchange: Exchange) -> None:
        """Move the common point by the mean of all differences to it, and every worker to the common point."""
        for row, common, shapes in zip(self.rows.read(), self._common, self.rows.shapes, strict=True):
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
            for parameter in self.rows.tensors:
                self._optimizer.state.pop(parameter, None)
                if parameter in self._fresh:
                    self._optimizer.state[parameter] = {k: _copied(v) for k, v in self._fresh[parameter].items()}

    def _average_state(self, weight: float, exchange: Exchange) -> None:
        """Average momentum and the like with the same weights; a worker that has none contributes zeros."""
        states = [_state_tensors(self._optimizer, p) for p in self.rows.tensors if isinstance(p, Parameter)]
        counts = exchange.group.gather([float(len(tensors)) for tensors in states], "the count of optimizer states")
        most = counts.max(dim=0).values
        if bool(((counts != most) & (counts != 0)).any()):
            raise RunError(
                f"the workers' {type(self._optimizer).__name__}s remember different things of a parameter, so their "
                f"states cannot be averaged. Use local(..., momentum=kept)."
            )
        padded: list[Tensor] = []
        for parameter, tensors, count in zip(self.rows.tensors, states, most.tolist(), strict=True):
            padded += tensors or [torch.zeros_like(parameter) for _ in range(int(count))]
        flat = Rows(padded)
        rows = flat.read()
        for row, shapes in zip(rows, flat.shapes, strict=True):
            row.mul_(weight)
            _mean(exchange, row, "the mean of optimizer states", shapes)
        flat.write(rows)

    def state_dict(self) -> dict[str, Any]:
        if self._saved is not None:
            return {**self._saved, "examples": self.examples}
        outer = {} if self._outer is None else self._outer.state_dict()["state"]
        return {
            "common": [row.detach().clone() for row in self._common],
            "outer": {str(number): dict(state) for number, state in outer.items()},
            "examples": self.examples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.examples = float(state["examples"])
        self._common, self._saved = [], state if state["common"] else None


def _mean(exchange: Exchange, row: Tensor, what: str, shapes: Shapes) -> None:
    """Replace a row by its mean over the workers, compressed if the exchange does so."""
    if isinstance(exchange, MeanMaker):
        exchange.mean(row, what, shapes)
    else:
        exchange.group.mean(row, what)


def _state_tensors(optimizer: Optimizer, parameter: Parameter) -> list[Tensor]:
    """The elementwise state of a parameter, such as momentum and moments, in the order of its names."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    tensors = [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    return [v for v in tensors if v.shape == parameter.shape and (v.is_floating_point() or v.is_complex())]


def _every(step: Step | str, settings: Local) -> Step | str:
    if isinstance(step, str):
        return step
    if settings.after:
        return "its first steps exchange something else than later ones"
    return structs.replace(step, period=settings.period, beside=False)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
