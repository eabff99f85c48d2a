"""Updates of a shard: gradients are checked, decoded and summed, then a torch optimizer applies them to its slice."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import NonFiniteError, ProgramError, RunError
from offbeat.protocols.compression import AnyFormat
from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.messages import Settings
from offbeat.protocols.servers.replica.works import AccumulateGradient, ReduceGradients, Update
from offbeat.runtime.compression import Coder
from offbeat.runtime.gradients.optimizers import ELEMENT_WISE
from offbeat.runtime.servers.program_optimizer import ProgramOptimizer, accepted

Ranges = Sequence[tuple[int, int]]
ADD = "add"  # Instead of an optimizer: pushes are added to the values.
PROGRAM = "program"  # Instead of an optimizer: the recipe's program says what is done with a push.
_MOST_KEPT, _LEAST_KEPT = 1024, 64  # Most and fewest old versions kept for delay compensation of late gradients.
_MEASURED = 2**17  # Numbers that are added and measured at a time: they fit the cache.
_KEPT_BYTES = 256 * 1024**2  # Memory for old versions, beyond the fewest.


class GradientSum:
    """The sum of the pushes to a shard since its last update."""

    def __init__(self, total: NDArray[Any], coder: Coder | None = None) -> None:
        self.total = total
        self.covered: list[tuple[int, int]] | None = []  # Ranges with gradients in this step; None: all.
        self._empty = True  # Whether the sum counts as zero, whatever the buffer holds.
        self.magnitude: float | None = None  # What no number of the sum exceeds; None: unknown.
        self.measures = False  # Whether that is looked at while gradients are added.
        self._coder = coder  # How pushes are compressed; None: not at all.

    def decoded(self, payload: Payload) -> NDArray[Any]:
        """The pushed numbers."""
        if self._coder is None:
            return cast("NDArray[Any]", payload.handle).view(self.total.dtype)
        dense = torch.zeros(self.total.size, dtype=torch.from_numpy(self.total).dtype)
        # A copy: memory lent by another process is read-only, which torch tensors cannot be.
        self._coder.add(torch.from_numpy(np.array(payload.handle)), dense)
        return dense.numpy()

    def unfit(self, payload: Payload, start: int, stop: int, absent: Ranges) -> str:
        """Why a payload cannot be used for [start, stop) of the shard; empty if it can."""
        if payload.handle is None:
            return ""
        if misplaced := self._misplaced(payload, start, stop, absent):
            return misplaced
        try:
            numbers = self.decoded(payload)
        except RunError as error:
            return str(error)
        # The sum of squares is the fastest check. It may overflow: only then each number is checked.
        with np.errstate(over="ignore", invalid="ignore"):
            fit = math.isfinite(np.dot(numbers, numbers)) or np.isfinite(numbers).all()
        return "" if fit else f"{np.count_nonzero(~np.isfinite(numbers)):,} of {numbers.size:,} numbers are NaN or inf"

    def _misplaced(self, payload: Payload, start: int, stop: int, absent: Ranges) -> str:
        """Why a payload does not fit that range; on an empty shard only its length is checked."""
        size, itemsize = self.total.size, self.total.itemsize
        end = size if stop < 0 else stop
        if size and (not 0 <= start <= end <= size or any(not 0 <= low <= high <= size for low, high in absent)):
            return f"the range {start}:{end} of a shard of {size:,} numbers"
        if self._coder is not None:
            whole = not size or (start, end) == (0, size)
            return "" if whole else f"a compressed push for the range {start}:{end} of a shard: it must be for all"
        nbytes = (end - start) * itemsize
        if size and payload.nbytes != nbytes:
            return f"{payload.nbytes:,} bytes where {nbytes:,} were expected"
        return f"{payload.nbytes:,} bytes, which are not numbers of {itemsize}" if payload.nbytes % itemsize else ""

    def inspect(self, payload: Payload, compressed: bool) -> None:
        """Read it twice, as a push is: once to check it, once to add it."""
        if payload.handle is None or (not compressed and payload.nbytes % self.total.itemsize):
            return
        with np.errstate(over="ignore", invalid="ignore"), suppress(RunError):
            for _ in range(2):
                numbers = self.decoded(payload) if compressed else payload.handle.view(self.total.dtype)
                np.dot(numbers, numbers)

    def add(self, payload: Payload, weight: float, work: AccumulateGradient | Update) -> None:
        """Add `weight` times a gradient to its range."""
        start, stop = work.start, self.total.size if work.stop < 0 else work.stop
        if payload.handle is not None:
            part, numbers = self.total[start:stop], self.decoded(payload)
            fresh = self._empty and part.size == self.total.size
            if not fresh:
                self.clear()
            self.magnitude = self._add(part, numbers, part.dtype.type(weight), fresh)
            if part.size != self.total.size:
                self.magnitude = None
            self._empty = False
        if not work.absent and (start, stop) == (0, self.total.size):
            self.covered = None
        if self.covered is not None:
            for low, high in sorted(work.absent):
                self.covered.append((start, low))
                start = high
            self.covered.append((start, stop))

    def _add(self, part: NDArray[Any], numbers: NDArray[Any], weight: Any, fresh: bool) -> float | None:
        """Add to a part, or write it anew, chunk by chunk; returns what none of its numbers exceeds then, if measured.

        A chunk's sum of squares bounds its largest number. It is in the cache, so that this costs little.
        """
        squares: list[float] = []
        for start in range(0, part.size, _MEASURED):
            own, more = part[start : start + _MEASURED], numbers[start : start + _MEASURED]
            if fresh:
                np.multiply(more, weight, own)
            else:
                np.add(own, more if weight == 1.0 else more * weight, own)
            if self.measures:
                with np.errstate(over="ignore", invalid="ignore"):
                    squares.append(float(np.dot(own, own)))
        # Rounding loses less than a hundredth; and squares that are too small to be numbers, all together `least`.
        least = 2 * _MEASURED * float(np.finfo(part.dtype).tiny)
        return math.sqrt(1.01 * max(squares) + least) if all(map(math.isfinite, squares)) and squares else None

    def clear(self) -> None:
        """Zero the buffer if it still holds an old sum."""
        if self._empty:
            self.total.fill(0)

    def scale(self, factor: float) -> None:
        """Multiply the sum by a factor."""
        if factor == 1.0:
            return
        np.multiply(self.total, self.total.dtype.type(factor), self.total)
        if self.magnitude is not None:  # Rounding may add the smallest number.
            self.magnitude = 1.01 * self.magnitude * abs(factor) + float(np.finfo(self.total.dtype).tiny)

    def restart(self) -> None:
        """Start the next step."""
        self._empty, self.covered, self.magnitude = True, [], None


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a shard is updated; set once, by the worker that puts the first values there."""

    optimizer: str  # Name of a torch optimizer, `add`, or `program`.
    program: str = ""  # Text of a program in the language for servers, and the hash of its plan.
    program_hash: str = ""
    length: int = 0  # Trained numbers on all shards, for a program with sums over them; 0: this shard has all.
    kind: str = "float32"
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()  # Ranges of the shard in each parameter group.
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()  # The same, split at parameter boundaries; empty: unknown.
    settings: tuple[dict[str, Any], ...] = ()  # Of each parameter group: learning rate, momentum and so on.
    staleness_scaling: bool = False
    delay_compensation: float = 0.0
    coders: tuple[AnyFormat, ...] = ()  # Compression of pushes, each of the output of the one before; empty: none.
    seed: int = 0  # Seed of the workers' randomized compression.


class Updater:
    """Updates values in place by the gradient sum of a step."""

    def __init__(self, recipe: Recipe, values: NDArray[Any], gradients: GradientSum, owns: bool = True) -> None:
        self.recipe, self._owns = recipe, owns  # Whether nobody else writes the values.
        self.kept: OrderedDict[int, NDArray[Any]] = OrderedDict()  # Old values by version, for late gradients.
        self._values, self._sum = values, gradients
        self._optimizer: Optimizer | None = None
        self._members: list[tuple[Parameter, tuple[int, int]]] = []  # The optimizer's, and where in the shard.
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
        if self._members and self.recipe.optimizer == PROGRAM:
            program = accepted(self.recipe.program, self.recipe.program_hash)[0]
            self._optimizer, self._sum.measures = (
                ProgramOptimizer(groups, program, self._owns, self.recipe.length),
                True,
            )
        elif self._members:
            self._optimizer = cast("Any", ELEMENT_WISE[self.recipe.optimizer])(groups)

    def update(self, work: Update, version: int) -> str:
        """Take one step from the values of this version; the result is why nothing has changed, or empty."""
        self._adopt(work.settings)
        if work.refused:
            return work.refused
        if self.recipe.optimizer == ADD:
            self._add(work)
            return ""
        rate, covered = self._prepare_gradient(work, version), self._sum.covered
        optimizer = self._optimizer
        if optimizer is None:
            return ""  # No trained parameter in this shard.
        if covered is not None and not (isinstance(optimizer, ProgramOptimizer) and optimizer.whole):
            optimizer = self._skip_missing(covered)  # Otherwise missing gradients are zeros.
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * rate
        reason = ""
        if isinstance(optimizer, ProgramOptimizer):
            reason = self._run_program(optimizer, work)
        else:
            optimizer.step()
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own
        if covered is not None:
            for member, (low, high) in self._members:
                member.grad = torch.from_numpy(self._sum.total[low:high])
        return reason

    def _adopt(self, settings: Settings) -> None:
        """Changed settings of the optimizer's groups."""
        if self._optimizer is not None:
            for group, changed in zip(self._optimizer.param_groups, settings, strict=False):
                group.update({name: value for name, value in changed.items() if name in group})

    def reduce(self, work: ReduceGradients) -> tuple[float, ...] | None:
        """The reductions of a program of one level over this shard's mean gradient, which level 0 makes of the sum."""
        self._adopt(work.settings)
        if work.level == 0:
            self._sum.clear()
            self._sum.scale(work.scale)
        optimizer = self._optimizer
        if not isinstance(optimizer, ProgramOptimizer):
            return None  # No trained parameter in this shard.
        optimizer.staleness, optimizer.workers, optimizer.read = 0, work.workers, Tensor.detach
        return optimizer.partials(work.level, work.totals)

    def _run_program(self, optimizer: ProgramOptimizer, work: Update) -> str:
        optimizer.staleness, optimizer.workers = work.missed, work.workers
        optimizer.magnitude, optimizer.totals = self._sum.magnitude, work.totals
        then = None if work.payload is None else self.kept.get(work.version - 1 - work.missed)
        places = {id(member): place for member, place in self._members}

        def read(parameter: Tensor) -> Tensor:
            low, high = places[id(parameter)]
            return parameter.detach() if then is None else torch.from_numpy(then[low:high])

        optimizer.read = read
        try:
            optimizer.step()
        except (NonFiniteError, ProgramError) as error:
            return str(error)
        return ""

    def _add(self, work: Update) -> None:
        if work.payload is None:
            self._sum.clear()
            np.add(self._values, self._sum.total, self._values)
        elif work.payload.handle is not None:
            part = self._values[work.start : None if work.stop < 0 else work.stop]
            np.add(part, self._sum.decoded(work.payload), part)

    def _prepare_gradient(self, work: Update, version: int) -> float:
        """Put the gradient in place; returns the factor for the learning rate of this step."""
        total = self._sum.total
        if work.payload is None:
            self._sum.clear()
            self._sum.scale(work.scale)
            return 1.0
        self._sum.add(work.payload, 1.0, work)
        self._sum.clear()
        if work.oldest is not None:
            self._keep(version, work.oldest)
        then = self.kept.get(work.version - 1 - work.missed)
        if self.recipe.delay_compensation and then is not None:
            # For how far the values have moved since the gradient was computed (Zheng et al. 2017, DC-ASGD).
            total += self.recipe.delay_compensation * total * total * (self._values - then)
        return work.scale / (1.0 + work.missed * work.scale) if self.recipe.staleness_scaling else work.scale

    def _skip_missing(self, covered: Ranges) -> Optimizer:
        """Make the optimizer skip parameters without a gradient in this step, as torch does for None."""
        if self.recipe.pieces and self.recipe.pieces != self.recipe.ranges:
            self._split_states()
        for member, (low, high) in self._members:
            if not any(max(low, start) < min(high, stop) for start, stop in covered):
                member.grad = None
        return cast("Optimizer", self._optimizer)

    def _split_states(self) -> None:
        """Give each parameter its own optimizer state, split off from the state it shared with its neighbours."""
        state = cast("Optimizer", self._optimizer).state
        held = [(place, dict(state[member])) for member, place in self._members]
        self.recipe = msgspec.structs.replace(self.now(), ranges=self.recipe.pieces)
        self._make_optimizer()
        for member, (low, high) in self._members:
            (start, _), known = next(entry for entry in held if entry[0][0] <= low and high <= entry[0][1])
            for name, value in known.items():
                rows = isinstance(value, Tensor) and value.dim() > 0
                own = value[low - start : high - start].clone() if rows else deepcopy(value)
                cast("Optimizer", self._optimizer).state[member][name] = own

    def _keep(self, version: int, oldest: int) -> None:
        """Keep the values of this version, and drop versions that no push can refer to any more."""
        self.kept[version] = self._values.copy()
        most = min(_MOST_KEPT, max(_LEAST_KEPT, _KEPT_BYTES // max(1, self._values.nbytes)))
        while len(self.kept) > most or next(iter(self.kept)) < oldest:
            self.kept.popitem(last=False)

    def now(self) -> Recipe:
        """The recipe with the current settings: a replica that starts from it hears only of later changes."""
        if self._optimizer is None:
            return self.recipe
        return msgspec.structs.replace(self.recipe, settings=settings_of(self._optimizer))

    def settings(self) -> Settings:
        """The current numeric settings of the optimizer's groups."""
        groups = () if self._optimizer is None else settings_of(self._optimizer)
        return tuple({name: value for name, value in group.items() if is_number(value)} for group in groups)

    def state(self) -> dict[str, Any]:
        """The optimizer's state, by the number of each range."""
        known = {} if self._optimizer is None else self._optimizer.state_dict()["state"]
        return {str(number): value for number, value in known.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state."""
        if self._optimizer is not None:
            known = {int(number): value for number, value in state.items()}
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": known})


def is_number(value: Any) -> bool:
    """Whether a scheduler can change this setting: a number or a list of numbers."""
    if isinstance(value, list):
        return all(is_number(item) for item in cast("list[Any]", value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def settings_of(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    """The settings of an optimizer's groups as plain data: everything except the parameters."""
    return tuple(
        {name: _plain_value(value) for name, value in group.items() if name not in ("params", "initial_lr")}
        for group in optimizer.param_groups
    )


def _plain_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, np.generic):
        return value.item()  # From a schedule computed with numpy; is_number would reject it.
    return list(cast("Sequence[Any]", value)) if isinstance(value, tuple | list) else value
