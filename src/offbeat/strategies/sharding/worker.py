"""The worker's side of `allreduce(shard=...)`: it keeps, and updates, slices only.

Models and optimizers stay the user's objects. While an optimizer steps, and while it saves or loads its state, it sees
this worker's slices in place of the parameters. That is right for optimizers that treat every number by itself, which
most do. After backward a gradient is a `SlicedGradient`, whose norms are those of the whole.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from msgspec import structs
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import NonFiniteError, StrategyError
from offbeat.runtime.gradients.buckets import GradientBuckets
from offbeat.runtime.gradients.in_place import GradientSums
from offbeat.runtime.gradients.optimizers import ELEMENT_WISE, why_not
from offbeat.runtime.gradients.sliced_sums import SlicedSums
from offbeat.runtime.gradients.slices import GradientSlices, Range, units_of
from offbeat.runtime.groups.group import DirectGroup, Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.simulate.predicted_step import Step
from offbeat.strategies.allreduce import AllReduce, AllReduceWorker
from offbeat.strategies.sharding.optimizer_state import gathered, sliced
from offbeat.strategies.sharding.parameter_shards import GatheredShards
from offbeat.strategies.sharding.shards import CopiedShards, Shards, SharedShards
from offbeat.strategies.worker.exchange import refuse_closure
from offbeat.strategies.worker.flat_rows import parameters_of

_MIB = 1 << 20


class ShardedAllReduceWorker(AllReduceWorker):
    """Has the sums of its own slices only, and updates those."""

    acts_in_steps = True

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: AllReduce) -> None:
        super().__init__(group, stopwatch, settings)
        self._shards: list[Shards] = []
        self._optimizers: list[Optimizer] = []

    def install(self, model: nn.Module) -> None:
        """Sum and slice gradients; divide the parameters, if they are sharded."""
        super().install(model)
        theirs = set(model.parameters())
        for shards in self._shards:
            if not theirs.isdisjoint(shards.parameters):
                shards.adopt(model)

    def _summed(self, dense: Sequence[Parameter], lane: DirectGroup) -> GradientBuckets | GradientSums | SlicedSums:
        # Complex parameters stay whole, on every worker: optimizers treat both halves of a number together.
        sliceable = [p for p in dense if p.is_floating_point()]
        if others := [p for p in dense if p.is_complex()]:
            self._sums.append(super()._summed(others, lane))
        units = units_of(sliceable, lane.size, int(self.settings.bucket * _MIB), lane.shares_memory)
        slices = GradientSlices(sliceable, units, lane)
        if lane.shares_memory and self.settings.shard == "optimizer":
            sums = GradientSums(sliceable, lane, self.stopwatch, own_blocks=True)
            sums.beforehand.append(slices.put_aside)
            sums.afterwards.append(slices.slice_whole)
        else:
            sums = SlicedSums(slices, units, lane, self.stopwatch)
        if lane.shares_memory:
            shards: Shards = SharedShards(slices, units, lane)
        elif self.settings.shard == "parameters":
            # Gathers need no order with sums.
            shards = GatheredShards(slices, units, lane.lane(), self.stopwatch)
            cast("SlicedSums", sums).order = lambda: shards.order
        else:
            shards = CopiedShards(slices, units, lane)
        self._shards.append(shards)
        return sums

    def predicted(self) -> Step | str:
        """Gathered parameters and sums of gradients, followed by the exchanges that distribute updated slices."""
        step = super().predicted()
        if isinstance(step, str):
            return step
        slices = [each for shards in self._shards for each in shards.exchanges]
        if any(isinstance(shards, GatheredShards) for shards in self._shards):
            return structs.replace(step, exchanges=(*slices, *step.exchanges))
        return structs.replace(step, exchanges=(*step.exchanges, *slices), behind=len(slices))

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, every worker has all parameters, which it may change. Collective where they are gathered."""
        with ExitStack() as stack:
            for shards in self._shards:
                stack.enter_context(shards.whole())
            yield

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, parameters are whole, and buffers averaged."""
        with self.whole(), super().averaged(models):
            yield

    # -- optimizers --------------------------------------------------------------------------------------------------

    def attend(self, optimizer: Optimizer) -> None:
        """Make this optimizer update, and keep state for, slices only."""
        if self.group.size == 1:
            return
        if why := why_not(type(optimizer)):
            raise StrategyError(
                f"shard={self.settings.shard} cannot divide {type(optimizer).__name__}: each worker updates slices "
                f"only, and {why}. It can divide those that treat every number by itself: {', '.join(ELEMENT_WISE)}. "
                f"Use allreduce without shard."
            )
        self._optimizers.append(optimizer)
        to_slices, to_parameters = partial(self._show, True), partial(self._show, False)
        self._hook_steps(optimizer, self._before_step, self._after_step)
        self.handles += [
            optimizer.register_state_dict_pre_hook(to_slices),
            optimizer.register_state_dict_post_hook(self._whole_state),
            optimizer.register_load_state_dict_pre_hook(self._sliced_state),
            optimizer.register_load_state_dict_post_hook(to_parameters),
        ]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_closure(f"shard={self.settings.shard}", args, kwargs, "allreduce alone")
        for shards in self._updated_by(optimizer):
            shards.hand_gradients()
        self._show(True, optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._show(False, optimizer)
        for shards in self._updated_by(optimizer):
            shards.publish()

    def _updated_by(self, optimizer: Optimizer) -> list[Shards]:
        theirs = set(parameters_of(optimizer))
        return [shards for shards in self._shards if not theirs.isdisjoint(shards.parameters)]

    def _show(self, slices: bool, optimizer: Optimizer, *_: Any) -> None:
        """Let an optimizer see slices in place of parameters, or parameters again."""
        places: dict[int, Tensor] = {}
        for shards in self._shards:
            for parameter, own, place in zip(shards.parameters, shards.slices, shards.gradients.ranges, strict=True):
                places |= {id(parameter): own} if slices else {id(own): parameter}
                if slices and parameter in optimizer.state:  # It was there before the optimizer was prepared.
                    known = sliced(optimizer.state.pop(parameter), parameter, place)
                    if own.numel():  # An empty slice makes no steps, and must not report how many there were.
                        optimizer.state[own] = known
        for group in optimizer.param_groups:
            group["params"] = [places.get(id(member), member) for member in group["params"]]

    def _owned(self, optimizer: Optimizer) -> tuple[list[Parameter], dict[int, list[Range]]]:
        """An optimizer's parameters, and by number every rank's range of those that are sliced."""
        parameters = parameters_of(optimizer)
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        owned: dict[int, list[Range]] = {}
        for shards in self._shards:
            for i, ranges in enumerate(shards.owned()):
                if (number := numbers.get(id(shards.parameters[i]))) is not None:
                    owned[number] = ranges
        return parameters, owned

    def _whole_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The state of whole parameters. Collective."""
        self._show(False, optimizer)
        return state | {"state": gathered(state["state"], *self._owned(optimizer), self.group.direct)}

    def _sliced_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        parameters, owned = self._owned(optimizer)
        rank, entries = self.group.rank, cast("Mapping[int, Mapping[str, Any]]", state["state"])
        self._show(True, optimizer)
        mine: dict[int, Any] = {}
        for number, entry in entries.items():
            if number not in owned:
                mine[number] = entry
            elif (place := owned[number][rank])[0] < place[1]:
                mine[number] = sliced(entry, parameters[number], place)
        return state | {"state": mine}

    def explained(self, error: BaseException | None) -> Exception | None:
        """What may have caused a loss that is not finite."""
        if not isinstance(error, NonFiniteError) or not any(isinstance(s, GatheredShards) for s in self._shards):
            return None
        return NonFiniteError(
            f"{error} If the loop reads parameters outside the model's forward, as a penalty on weights does: under "
            f"shard=parameters they are on other hosts then, and read as NaN. Compute it in a module's forward, or use "
            f"shard=gradients."
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def notes(self) -> dict[str, Any]:
        """Bytes of parameters, gradients and optimizer state on each worker: the most that it held at once."""
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        held = [
            sum(shards.parameter_bytes for shards in self._shards),
            sum(shards.gradients.most_bytes for shards in self._shards),
            sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor)),
        ]
        counts = self.team.gather([float(count) for count in held], "the count of memory")
        for shards in self._shards:
            shards.conclude()
        names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        return {name: [int(count) for count in counts[:, i]] for i, name in enumerate(names)}

    def close(self) -> None:
        """Remove the hooks, and give every worker a private copy of the parameters."""
        super().close()
        for shards in self._shards:
            shards.close()
