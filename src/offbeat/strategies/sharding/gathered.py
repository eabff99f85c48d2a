"""Parameters of which each worker holds slices, and gathers the rest when they are used (ZeRO, stage 3; FSDP).

No module is wrapped, and nothing is assumed about which module uses which parameter. In forward, a mode of torch sees
every operation that takes a parameter, and gathers it first. What backward needs of a parameter is not kept: it is
gathered when backward asks for it. While a unit is in use, the one that followed it last time is gathered; all others
are released. A released parameter has its shape, but reads as NaN.

All workers gather the same units in the same order. A checksum of that order goes with the gradients, so that workers
that took different ways through the model are noticed before anything is updated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError
from offbeat.runtime.gradients.slices import GradientSlices, Unit
from offbeat.runtime.groups.blocks import Blocks
from offbeat.runtime.groups.connection import ExchangeWait
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies.sharding.shards import Shards, row_of, show

_WHAT = "the gathering of parameters for their use (every worker must run the model, or save it, equally often)"
_VALUES = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])
"""Attributes of a parameter that have its values; others do not need them."""
_METADATA = frozenset(
    ["size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "register_hook"]
)


class _Use(NamedTuple):
    """A place of a step: the unit in use, and whether in backward."""

    unit: int
    backward: bool


class _Kept(NamedTuple):
    """What is kept for backward in place of a view of a unit's row."""

    unit: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GatheredShards(Shards):
    """Parameters that are gathered when they are used."""

    def __init__(
        self, gradients: GradientSlices, units: Sequence[Unit], group: DirectGroup, stopwatch: Stopwatch
    ) -> None:
        super().__init__(gradients, units, group)
        self._stopwatch, self._blocks = stopwatch, Blocks(group)
        self._home = {id(self.parameters[i]): n for n, unit in enumerate(units) for i in unit.members}
        self._handles: list[RemovableHandle] = []
        self._own: list[Tensor] = []
        self.slices = [torch.empty(0)] * len(self.parameters)
        for unit in units:
            own = self._blocks.own(row_of(self.parameters, unit, group.size)).clone()
            self._own.append(own)
            at = 0
            for i in unit.members:
                low, high = gradients.ranges[i]
                self.slices[i] = own[at : at + high - low]
                at += high - low
        self._released = [_without_memory(p) for p in self.parameters]
        self._rows: dict[int, Tensor] = {}
        self._pending: dict[int, tuple[Tensor, ExchangeWait]] = {}
        self._by_storage: dict[int, int] = {}
        self._next_of: dict[_Use, int] = {}
        self._used: _Use | None = None
        self._depth, self._whole = 0, 0
        self._context = ExitStack()
        self._most = 0
        self.order = 0
        """A checksum of the units gathered so far, in their order: the same on all workers."""
        group.sent.record()
        for n in range(len(units)):
            self._release(n)

    # -- gathering ---------------------------------------------------------------------------------------------------

    def use(self, units: Iterable[int], backward: bool) -> None:
        """These units are needed now: gather them, start to gather the next one, and release all others."""
        if self._whole:
            return
        wanted = set(units)
        last = self._used
        for n in wanted:
            if self._used is not None and self._used.unit != n:
                self._next_of[self._used] = n
            self._used = _Use(n, backward)
        if last == self._used and all(n in self._rows for n in wanted):
            return
        # Tensors made in inference mode could not become parameters again.
        with torch.inference_mode(False), torch.no_grad():
            following = self._next_of.get(self._used) if self._used is not None else None
            for n in [n for n in (*self._rows, *self._pending) if n not in wanted and n != following]:
                if n in self._pending:
                    self._land(n)
                self._release(n)
            for n in wanted:
                self._land(n)
            if following is not None and following not in self._rows:
                self._start(following)

    def _start(self, n: int) -> None:
        if n in self._pending:
            return
        own = self._own[n]
        row = torch.empty(own.numel() * self._group.size, dtype=own.dtype, device=own.device)
        self._blocks.own(row).copy_(own)
        self.order = zlib.crc32(n.to_bytes(4, "little"), self.order)
        self._pending[n] = row, self._blocks.start_gather(row, _WHAT)
        if not self._whole:
            held = [*self._rows.values(), *(waiting for waiting, _ in self._pending.values())]
            self._most = max(self._most, sum(row.nbytes for row in held))

    def _land(self, n: int) -> None:
        if n in self._rows:
            return
        self._start(n)
        row, pending = self._pending.pop(n)
        with self._stopwatch.spent_on("communicate"):
            pending.wait()
        self._rows[n] = row
        self._by_storage[row.untyped_storage().data_ptr()] = n
        show(self.parameters, self._units[n], row)

    def _release(self, n: int) -> None:
        row = self._rows.pop(n, None)
        if row is not None:
            del self._by_storage[row.untyped_storage().data_ptr()]
        for i in self._units[n].members:
            self.parameters[i].data = self._released[i]

    def _release_all(self) -> None:
        with torch.inference_mode(False):
            for n in [*self._rows, *self._pending]:
                self._land(n)
                self._release(n)
        self._used = None

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, all parameters are whole; changes to them are kept. Collective."""
        self._gather_all()
        try:
            yield
        finally:
            self._leave_whole()

    def _gather_all(self) -> None:
        self._whole += 1
        with torch.inference_mode(False), torch.no_grad():
            for n in range(len(self._units)) if self._whole == 1 else ():
                self._land(n)

    def _leave_whole(self) -> None:
        self._whole -= 1
        if not self._whole:
            with torch.no_grad():
                for n, row in self._rows.items():
                    self._own[n].copy_(self._blocks.own(row))
            self._release_all()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def adopt(self, model: nn.Module) -> None:
        """Gather what the model uses, whichever of its modules is called, and all of it when its state is read."""
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
                raise StrategyError(
                    f"shard=parameters gathers parameters between hosts as Python code uses them, and {name or 'this'} "
                    f"({type(module).__name__}) is compiled. Prepare the model that is not compiled, or use "
                    f"shard=gradients."
                )
            self._handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
                module.register_state_dict_pre_hook(partial(self._before_state)),
                module.register_state_dict_post_hook(partial(self._after_state)),
            ]
        self._handles += [
            model.register_load_state_dict_pre_hook(self._before_load),
            model.register_load_state_dict_post_hook(self._after_load),
        ]

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._context.enter_context(_Uses(self))
            # While backward recomputes a checkpointed part, torch's own hooks see what is saved.
            if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
                self._context.enter_context(saved_tensors_hooks(self._keep, self._get))

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._context.close()

    def _keep(self, tensor: Tensor) -> Tensor | _Kept:
        """What to keep for backward: of a parameter, where to find it."""
        n = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if n is None or self._whole or tensor.dtype != self._own[n].dtype:
            return tensor
        return _Kept(n, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _get(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self.use([kept.unit], backward=True)
        return self._rows[kept.unit].as_strided(kept.size, kept.stride, kept.offset)

    def use_of(self, arguments: Iterable[Any]) -> None:
        """An operation uses the parameters among these arguments, or in lists among them."""
        units: list[int] = []
        for argument in arguments:
            for each in argument if isinstance(argument, list | tuple) else (argument,):
                n = self._home.get(id(each)) if isinstance(each, Parameter) else None
                if n is not None and n not in units:
                    units.append(n)
        if units:
            self.use(units, backward=False)

    def _before_state(self, *_: Any) -> None:
        self._gather_all()

    def _after_state(self, _module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        if self._whole == 1:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._by_storage:
                    state[name] = value.detach().clone()
        self._leave_whole()

    def _before_load(self, *_: Any) -> None:
        self._gather_all()

    def _after_load(self, *_: Any) -> None:
        self._leave_whole()

    # -- steps -------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """The slices are updated: what was gathered is old."""
        for own in self.slices:
            own.grad = None
        self._release_all()
        self.exchanges = self._group.sent.recorded()
        self._group.sent.record()

    def _distribute(self) -> None:
        """They are gathered when they are used."""

    @property
    def parameter_bytes(self) -> int:
        """Its slices, and the most that was gathered at once during steps."""
        return sum(own.nbytes for own in self._own) + self._most

    def close(self, whole: bool) -> None:
        """Leave the parameters whole, if all workers close together."""
        super().close(whole)
        if whole:
            self._gather_all()
        for handle in self._handles:
            handle.remove()


class _Uses(TorchFunctionMode):
    """Sees the parameters that operations take."""

    def __init__(self, shards: GatheredShards) -> None:
        super().__init__()
        self._shards = shards

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Gather what an operation needs, and run it."""
        del types
        keywords = kwargs or {}
        if not _reads_no_values(func):
            self._shards.use_of((*args, *keywords.values()))
        return func(*args, **keywords)


def _without_memory(parameter: Parameter) -> Tensor:
    """A tensor of the parameter's shape in which every element is the same NaN."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _reads_no_values(func: Callable[..., Any]) -> bool:
    name = func.__name__
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
    return name in _METADATA
