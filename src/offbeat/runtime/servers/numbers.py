"""The numbers of one shard: its values, the sum of the step under way, and the optimizer that updates them.

Everything that is to be done to them is said by the shard's machine (`protocols.servers.shard`); here it is done. The
values lie in memory that is lent to readers of the same host. So a read costs the server nothing; under `ssp` and
`asp`, where updates go on meanwhile, it may hold parts of newer updates, but never of older ones.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import RunError
from offbeat.protocols.compression import AnyFormat
from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.messages import Settings
from offbeat.protocols.servers.works import Accumulate, Discard, Inspect, Look, Read, Release, Restore, Update
from offbeat.runtime.compression import Coder, build
from offbeat.runtime.optimizers import ELEMENT_WISE
from offbeat.runtime.shared.segment import Segment
from offbeat.runtime.trees import put_together, take_apart

ADD = "add"
"""In place of an optimizer: what is pushed is added to the values."""
KINDS: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
"""Kinds of numbers that servers hold."""
_MOST_KEPT, _LEAST_KEPT = 1024, 64
"""Versions whose values are kept, for gradients that come late: so many, if they are small, or at least so many."""
_KEPT_BYTES = 256 * 1024**2
"""From which on they are not small."""
_KEPT = "kept at version "
Ranges = Sequence[tuple[int, int]]
_Lending = Callable[[Segment], None]


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


class Numbers:
    """What a server holds. `do` is what its machine's `Start` effects are given to."""

    def __init__(self, lend: _Lending, reclaim: _Lending | None = None) -> None:
        self._lend, self._reclaim = lend, reclaim
        self.version = 0
        self.recipe: Recipe | None = None
        self._values = np.empty(0, np.float32)
        self._sum = np.empty(0, np.float32)
        self._empty = True
        """Whether the sum is to be taken for zero, whatever lies there."""
        self._covered: list[tuple[int, int]] | None = []
        """Ranges that this step has gradients for; None: all of the shard."""
        self._optimizer: Optimizer | None = None
        self._gradients: list[tuple[Parameter, tuple[int, int]]] = []
        """What the optimizer updates, and which range of the shard each is."""
        self._coder: Coder | None = None
        self._kept: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._segment: Segment | None = None
        self._handed: Segment | None = None
        """A state that is being handed over."""

    def do(self, work: Any, _token: Any = None) -> Any:
        """Do what the machine says; answers what it asks for."""
        match work:
            case Inspect(payload, _, start, stop, absent):
                return self._misplaced(payload, start, stop, absent) or self._unfit(payload)
            case Look(payload, letter):
                self._look(payload, letter)
            case Read(state, start, stop, kept):
                if kept:
                    return self._handed_over()
                return self._whole() if state else self._read(start, stop)
            case Release():
                self._let_go()
            case Accumulate(payload, weight, start, stop, absent):
                self._accumulate(payload, weight, start, stop)
                self._cover(start, stop, absent)
            case Update():
                self._update(work)
            case Restore(payload, version):
                self._restore(payload.handle, version)
            case Discard():
                pass
            case _:
                raise RunError(f"a server was told to do {work!r}, which it cannot")
        return None

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _view(self, payload: Payload) -> NDArray[Any]:
        if self._coder is None:
            return cast("NDArray[Any]", payload.handle).view(self._values.dtype)
        said = torch.zeros(self._values.size, dtype=torch.from_numpy(self._values).dtype)
        # A copy, because what another process has lent cannot be written, and torch has no such rows.
        self._coder.add(torch.from_numpy(np.array(payload.handle)), said)
        return said.numpy()

    def _misplaced(self, payload: Payload, start: int, stop: int, absent: Ranges) -> str:
        """Why a payload cannot be for [start, stop) of the shard; empty if it can."""
        size = self._values.size
        end = size if stop < 0 else stop
        if payload.handle is None or not self._values.size:
            return ""
        if not 0 <= start <= end <= size or any(not 0 <= low <= high <= size for low, high in absent):
            return f"the range {start}:{end} of a shard of {size:,} numbers"
        if self._coder is not None:
            whole = (start, end) == (0, size)
            return "" if whole else f"a compressed push for the range {start}:{end} of a shard: it must be for all"
        nbytes = (end - start) * self._values.itemsize
        return "" if payload.nbytes == nbytes else f"{payload.nbytes:,} bytes where {nbytes:,} were to come"

    def _unfit(self, payload: Payload) -> str:
        if payload.handle is None:
            return ""
        if self._coder is None and payload.nbytes % self._values.itemsize:
            return f"{payload.nbytes:,} bytes, which are no numbers of {self._values.itemsize}"
        try:
            numbers = self._view(payload)
        except RunError as error:
            return str(error)
        # The sum of their squares is the quickest look at all of them. It may overflow: only then each is looked at.
        with np.errstate(over="ignore", invalid="ignore"):
            fit = math.isfinite(np.dot(numbers, numbers)) or np.isfinite(numbers).all()
        return "" if fit else f"{np.count_nonzero(~np.isfinite(numbers)):,} of {numbers.size:,} numbers are NaN or inf"

    def _look(self, payload: Payload, letter: bool) -> None:
        """Go over it twice, as over a push: once to see whether it is fit, once to add it."""
        if payload.handle is None or (not letter and payload.nbytes % self._values.itemsize):
            return
        with np.errstate(over="ignore", invalid="ignore"), suppress(RunError):
            for _ in range(2):
                numbers = self._view(payload) if letter else payload.handle.view(self._values.dtype)
                np.dot(numbers, numbers)

    def _accumulate(self, payload: Payload, weight: float, start: int, stop: int) -> None:
        if payload.handle is None:
            return
        part, numbers = self._sum[start : None if stop < 0 else stop], self._view(payload)
        if self._empty and part.size == self._sum.size:
            np.multiply(numbers, part.dtype.type(weight), part)
        else:
            self._clear()
            np.add(part, numbers if weight == 1.0 else numbers * part.dtype.type(weight), part)
        self._empty = False

    def _cover(self, start: int, stop: int, absent: Ranges) -> None:
        """The step has a gradient for this range, apart from what is absent."""
        end = self._values.size if stop < 0 else stop
        if not absent and start == 0 and end == self._values.size:
            self._covered = None
        if self._covered is not None:
            for low, high in sorted(absent):
                self._covered.append((start, low))
                start = high
            self._covered.append((start, end))

    def _clear(self) -> None:
        """Make the sum zero, if it still holds what is to be forgotten."""
        if self._empty:
            self._sum.fill(0)

    def _update(self, work: Update) -> None:
        self._apply_settings(work.settings)
        recipe = cast("Recipe", self.recipe)
        if recipe.optimizer == ADD:
            self._add(work)
        else:
            self._step(self._gathered(work, recipe))
        self._empty, self._covered = True, []
        self.version = work.version

    def _add(self, work: Update) -> None:
        if work.payload is None:
            self._clear()
            np.add(self._values, self._sum, self._values)
        elif work.payload.handle is not None:
            part = self._values[work.start : None if work.stop < 0 else work.stop]
            np.add(part, self._view(work.payload), part)

    def _gathered(self, work: Update, recipe: Recipe) -> float:
        """Put the gradient in its place; answers how much of its learning rate the step is to have."""
        if work.payload is None:
            self._clear()
            if work.scale != 1.0:
                np.multiply(self._sum, self._sum.dtype.type(work.scale), self._sum)
            return 1.0
        self._accumulate(work.payload, 1.0, work.start, work.stop)
        self._cover(work.start, work.stop, work.absent)
        self._clear()
        if work.oldest is not None:
            self._keep(work.oldest)
        if recipe.delay_compensation:
            self._compensate(work.version - 1 - work.missed, recipe.delay_compensation)
        return work.scale / (1.0 + work.missed * work.scale) if recipe.staleness_scaling else work.scale

    def _step(self, rate: float) -> None:
        """One step of the optimizer, with this much of its learning rate."""
        if self._optimizer is not None and self._covered is not None:
            self._leave_out(self._covered)
        optimizer = self._optimizer
        if optimizer is None:
            return  # A shard without a trained parameter.
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * rate
        optimizer.step()
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own
        if self._covered is not None:
            for member, (low, high) in self._gradients:
                member.grad = torch.from_numpy(self._sum[low:high])

    def _leave_out(self, covered: Ranges) -> None:
        """Let the optimizer pass over parameters without a gradient in this step, as torch does where it is None."""
        recipe = cast("Recipe", self.recipe)
        if recipe.pieces and recipe.pieces != recipe.ranges:
            self._cut_apart(recipe)
        for member, (low, high) in self._gradients:
            if not any(max(low, start) < min(high, stop) for start, stop in covered):
                member.grad = None

    def _cut_apart(self, recipe: Recipe) -> None:
        """Give each parameter a state of its own, in place of that which it had together with its neighbours."""
        optimizer = cast("Optimizer", self._optimizer)
        held = [(place, dict(optimizer.state[member])) for member, place in self._gradients]
        values = torch.from_numpy(self._values)
        self.recipe = msgspec.structs.replace(recipe, ranges=recipe.pieces, settings=settings_of(optimizer))
        self._optimize(self.recipe, values, torch.from_numpy(self._sum))
        for member, (low, high) in self._gradients:
            (start, _), state = next(one for one in held if one[0][0] <= low and high <= one[0][1])
            for name, value in state.items():
                rows = isinstance(value, Tensor) and value.dim() > 0
                own = value[low - start : high - start].clone() if rows else deepcopy(value)
                cast("Optimizer", self._optimizer).state[member][name] = own

    def _keep(self, oldest: int) -> None:
        """Keep the values of this version; of those that were kept, let go of what nobody can come with any more."""
        self._kept[self.version] = self._values.copy()
        most = min(_MOST_KEPT, max(_LEAST_KEPT, _KEPT_BYTES // max(1, self._values.nbytes)))
        while len(self._kept) > most or next(iter(self._kept)) < oldest:
            self._kept.popitem(last=False)

    def _compensate(self, version: int, strength: float) -> None:
        """Correct a gradient by how far the values have moved since it was computed (Zheng et al. 2017, DC-ASGD)."""
        then = self._kept.get(version)
        if then is not None:
            self._sum += strength * self._sum * self._sum * (self._values - then)

    def _apply_settings(self, settings: Settings) -> None:
        if self._optimizer is None:
            return
        for group, changed in zip(self._optimizer.param_groups, settings, strict=False):
            group.update({name: value for name, value in changed.items() if name in group})

    def settings(self) -> Settings:
        """What the optimizer's groups are set to now."""
        if self._optimizer is None:
            return ()
        return tuple(
            {name: value for name, value in group.items() if is_number(value)} for group in settings_of(self._optimizer)
        )

    def whole(self) -> bytes:
        """The state, as a file has it."""
        return self._whole(kept=True).handle.tobytes()

    # -- values ------------------------------------------------------------------------------------------------------

    def _read(self, start: int, stop: int) -> Payload:
        values = self._values[max(0, start) : None if stop < 0 else stop]
        return Payload(values.nbytes, values)

    def _whole(self, kept: bool = False) -> Payload:
        tensors: dict[str, Tensor] = {"values": torch.from_numpy(self._values)}
        if kept:
            tensors |= {f"{_KEPT}{version}": torch.from_numpy(then) for version, then in self._kept.items()}
        state = {} if self._optimizer is None else self._optimizer.state_dict()["state"]
        recipe = self.recipe
        if recipe is not None and self._optimizer is not None:
            # What schedulers have changed: whoever goes on from this is told of later changes only.
            recipe = msgspec.structs.replace(recipe, settings=settings_of(self._optimizer))
        said = {
            "recipe": msgspec.to_builtins(recipe),
            "state": take_apart({str(k): v for k, v in state.items()}, "state", tensors),
        }
        written = np.frombuffer(save_tensors(tensors, {"said": json.dumps(said)}), dtype=np.uint8)
        return Payload(written.nbytes, written)

    def _handed_over(self) -> Payload:
        """All that another copy needs, in memory that it reads if it is on this host."""
        self._let_go()
        written = self._whole(kept=True).handle
        self._handed = Segment.create(written.nbytes)
        self._lend(self._handed)
        lent = self._handed.bytes[: written.nbytes]
        lent[:] = written
        return Payload(lent.nbytes, lent)

    def _let_go(self) -> None:
        if self._handed is not None:
            if self._reclaim is not None:
                self._reclaim(self._handed)
            self._handed.give_back()
            self._handed = None

    def _restore(self, written: NDArray[np.uint8], version: int) -> None:
        raw = written.tobytes()
        tensors, said = load_tensors(raw), json.loads(_metadata(raw)["said"])
        del raw  # It may be gigabytes.
        if said["recipe"] is None:
            return  # Of a shard on which nothing was put yet.
        recipe = msgspec.convert(said["recipe"], Recipe)
        self._make(recipe, tensors.pop("values"))
        if self._optimizer is not None and said["state"] is not None:
            state: Mapping[str, Any] = put_together(said["state"], tensors)
            plain = self._optimizer.state_dict()
            plain["state"] = {int(key): value for key, value in state.items()}
            self._optimizer.load_state_dict(plain)
        self.version = version
        kept = {int(name.removeprefix(_KEPT)): then for name, then in tensors.items() if name.startswith(_KEPT)}
        self._kept = OrderedDict((then, kept[then].numpy()) for then in sorted(kept))

    def _make(self, recipe: Recipe, values: Tensor) -> None:
        self.recipe = recipe
        kind = KINDS[recipe.kind]
        self._segment = Segment.create(max(1, values.numel() * kind.itemsize))
        self._lend(self._segment)
        shared = self._segment.tensor(0, values.numel(), kind)
        shared.copy_(values)
        total = torch.zeros_like(shared)
        self._values, self._sum = shared.numpy(), total.numpy()
        self._optimizer, self._empty, self._coder = None, True, None
        self._covered, self._gradients = [], []
        for form in reversed(recipe.coders):
            self._coder = build(form, seed=recipe.seed, inner=self._coder)
        if recipe.optimizer != ADD:
            self._optimize(recipe, shared, total)

    def _optimize(self, recipe: Recipe, shared: Tensor, total: Tensor) -> None:
        """Have the recipe's optimizer update the values by the sum."""
        groups: list[dict[str, Any]] = []
        self._gradients = []
        for ranges, settings in zip(recipe.ranges, recipe.settings, strict=True):
            members: list[Parameter] = []
            for low, high in ranges:
                member = Parameter(shared[low:high])
                member.grad = total[low:high]
                members.append(member)
                self._gradients.append((member, (low, high)))
            groups.append({"params": members, **settings})
        if any(group["params"] for group in groups):
            self._optimizer = cast("Any", ELEMENT_WISE[recipe.optimizer])(groups)


def first_state(
    recipe: Recipe, values: Tensor, held: Mapping[int, Mapping[str, Any]] | None = None
) -> NDArray[np.uint8]:
    """What a worker puts on a shard in the beginning, in the form in which states are fetched and put back.

    `held` is what the optimizer knows already, for each of the ranges of the recipe that it knows anything of.
    """
    tensors = {"values": values.detach().contiguous()}
    state = None if not held else take_apart({str(k): dict(v) for k, v in held.items()}, "state", tensors)
    said = {"recipe": msgspec.to_builtins(recipe), "state": state}
    written = save_tensors(tensors, {"said": json.dumps(said)})
    return np.frombuffer(written, dtype=np.uint8)


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


def _metadata(raw: bytes) -> dict[str, str]:
    """What stands in the header of a safetensors file beside the tensors."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length])["__metadata__"]
