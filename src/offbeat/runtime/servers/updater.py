"""How a shard's values are updated: by an optimizer of torch's on a slice of the parameters, or by adding."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.protocols.compression import AnyFormat
from offbeat.protocols.servers.messages import Settings
from offbeat.protocols.servers.replica.works import Update
from offbeat.runtime.gradients.sliceable_optimizers import ELEMENT_WISE
from offbeat.runtime.servers.gradient_sum import GradientSum, Ranges

ADD = "add"
"""In place of an optimizer: what is pushed is added to the values."""
_MOST_KEPT, _LEAST_KEPT = 1024, 64
"""Versions whose values are kept, for gradients that come late: so many, if they are small, or at least so many."""
_KEPT_BYTES = 256 * 1024**2
"""From which on they are not small."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a shard is updated; said once, by the worker that puts the first values there."""

    optimizer: str
    """Name of one of torch's, or `add`."""
    kind: str = "float32"
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each parameter group, which ranges of the shard belong to it."""
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    """The same ranges cut where one parameter ends and the next begins; none: they are not known."""
    settings: tuple[dict[str, Any], ...] = ()
    """For each parameter group, what its optimizer is given: learning rate, momentum and the like."""
    staleness_scaling: bool = False
    delay_compensation: float = 0.0
    coders: tuple[AnyFormat, ...] = ()
    """How pushes are compressed, each on what the one before has kept; none: they are the numbers themselves."""
    seed: int = 0
    """What the workers' chance comes from, where a coder uses it."""


class Updater:
    """Updates values in place by the sum of a step."""

    def __init__(self, recipe: Recipe, values: NDArray[Any], gradients: GradientSum) -> None:
        self.recipe = recipe
        self.kept: OrderedDict[int, NDArray[Any]] = OrderedDict()
        """Values as they were, by version, for gradients that come late."""
        self._values, self._sum = values, gradients
        self._optimizer: Optimizer | None = None
        self._members: list[tuple[Parameter, tuple[int, int]]] = []
        """What the optimizer updates, and which range of the shard each is."""
        if recipe.optimizer != ADD:
            self._make_optimizer()

    def _make_optimizer(self) -> None:
        groups: list[dict[str, Any]] = []
        values, total = torch.from_numpy(self._values), torch.from_numpy(self._sum.total)
        self._members = []
        for ranges, settings in zip(self.recipe.ranges, self.recipe.settings, strict=True):
            members: list[Parameter] = []
            for low, high in ranges:
                member = Parameter(values[low:high])
                member.grad = total[low:high]
                members.append(member)
                self._members.append((member, (low, high)))
            groups.append({"params": members, **settings})
        if self._members:
            self._optimizer = cast("Any", ELEMENT_WISE[self.recipe.optimizer])(groups)

    def update(self, work: Update, version: int) -> None:
        """One step, from the values of this version."""
        self._apply_settings(work.settings)
        if self.recipe.optimizer == ADD:
            self._add(work)
            return
        rate, covered = self._gathered(work, version), self._sum.covered
        optimizer = self._optimizer
        if optimizer is None:
            return  # A shard without a trained parameter.
        if covered is not None:
            optimizer = self._leave_out(covered)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * rate
        optimizer.step()
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own
        if covered is not None:
            for member, (low, high) in self._members:
                member.grad = torch.from_numpy(self._sum.total[low:high])

    def _add(self, work: Update) -> None:
        if work.payload is None:
            self._sum.clear()
            np.add(self._values, self._sum.total, self._values)
        elif work.payload.handle is not None:
            part = self._values[work.start : None if work.stop < 0 else work.stop]
            np.add(part, self._sum.decoded(work.payload), part)

    def _gathered(self, work: Update, version: int) -> float:
        """Put the gradient in its place; answers how much of its learning rate the step is to have."""
        total = self._sum.total
        if work.payload is None:
            self._sum.clear()
            if work.scale != 1.0:
                np.multiply(total, total.dtype.type(work.scale), total)
            return 1.0
        self._sum.add(work.payload, 1.0, work)
        self._sum.clear()
        if work.oldest is not None:
            self._keep(version, work.oldest)
        then = self.kept.get(work.version - 1 - work.missed)
        if self.recipe.delay_compensation and then is not None:
            # By how far the values have moved since it was computed (Zheng et al. 2017, DC-ASGD).
            total += self.recipe.delay_compensation * total * total * (self._values - then)
        return work.scale / (1.0 + work.missed * work.scale) if self.recipe.staleness_scaling else work.scale

    def _leave_out(self, covered: Ranges) -> Optimizer:
        """Let the optimizer pass over parameters without a gradient in this step, as torch does where it is None."""
        if self.recipe.pieces and self.recipe.pieces != self.recipe.ranges:
            self._cut_apart()
        for member, (low, high) in self._members:
            if not any(max(low, start) < min(high, stop) for start, stop in covered):
                member.grad = None
        return cast("Optimizer", self._optimizer)

    def _cut_apart(self) -> None:
        """Give each parameter a state of its own, in place of that which it had together with its neighbours."""
        state = cast("Optimizer", self._optimizer).state
        held = [(place, dict(state[member])) for member, place in self._members]
        self.recipe = msgspec.structs.replace(self.now(), ranges=self.recipe.pieces)
        self._make_optimizer()
        for member, (low, high) in self._members:
            (start, _), known = next(one for one in held if one[0][0] <= low and high <= one[0][1])
            for name, value in known.items():
                rows = isinstance(value, Tensor) and value.dim() > 0
                own = value[low - start : high - start].clone() if rows else deepcopy(value)
                cast("Optimizer", self._optimizer).state[member][name] = own

    def _keep(self, version: int, oldest: int) -> None:
        """Keep the values of this version; of those that were kept, let go of what nobody can come with any more."""
        self.kept[version] = self._values.copy()
        most = min(_MOST_KEPT, max(_LEAST_KEPT, _KEPT_BYTES // max(1, self._values.nbytes)))
        while len(self.kept) > most or next(iter(self.kept)) < oldest:
            self.kept.popitem(last=False)

    def _apply_settings(self, settings: Settings) -> None:
        if self._optimizer is not None:
            for group, changed in zip(self._optimizer.param_groups, settings, strict=False):
                group.update({name: value for name, value in changed.items() if name in group})

    # -- what it is --------------------------------------------------------------------------------------------------

    def now(self) -> Recipe:
        """The recipe, with what schedulers have changed: whoever goes on from it is told of later changes only."""
        if self._optimizer is None:
            return self.recipe
        return msgspec.structs.replace(self.recipe, settings=settings_of(self._optimizer))

    def settings(self) -> Settings:
        """What the optimizer's groups are set to now."""
        groups = () if self._optimizer is None else settings_of(self._optimizer)
        return tuple({name: value for name, value in group.items() if is_number(value)} for group in groups)

    def state(self) -> dict[str, Any]:
        """What the optimizer knows, by the number of each range."""
        known = {} if self._optimizer is None else self._optimizer.state_dict()["state"]
        return {str(number): value for number, value in known.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what an optimizer knew."""
        if self._optimizer is not None:
            known = {int(number): value for number, value in state.items()}
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": known})


def is_number(value: Any) -> bool:
    """Whether a scheduler may change this setting: a number, or a list of them."""
    if isinstance(value, list):
        return all(is_number(item) for item in cast("list[Any]", value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def settings_of(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    """What an optimizer's groups are set to, as plain data: everything but the parameters."""
    return tuple(
        {name: _plain_value(value) for name, value in group.items() if name not in ("params", "initial_lr")}
        for group in optimizer.param_groups
    )


def _plain_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, np.generic):
        return value.item()  # A schedule that is computed with numpy: else it would count for no number.
    return list(cast("Sequence[Any]", value)) if isinstance(value, tuple | list) else value
