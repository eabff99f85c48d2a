"""Parameters of which each worker holds slices, and gathers the rest when they are used (ZeRO, stage 3; FSDP).

No module is wrapped, and nothing is assumed about which module uses which parameter. In forward, a mode of torch sees
every operation that takes a parameter, and gathers it first. What backward needs of a parameter is not kept: it is
gathered when backward asks for it. What is not used is released (`unit_rows`).

All workers gather the same units in the same order. A checksum of that order goes with the gradients, so that workers
that took different ways through the model are noticed before anything is updated.
"""

from __future__ import annotations

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

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.gradients.slices import GradientSlices, Unit
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies.sharding.shards import Shards
from offbeat.strategies.sharding.unit_rows import UnitRows

_VALUES = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])
"""Attributes of a parameter that have its values; others do not need them."""
_METADATA = frozenset(
    ["size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "register_hook"]
)


class _Kept(NamedTuple):
    """What is kept for backward in place of a view of a unit's row."""

    unit: int
    steps: int  # Made when it was kept.
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GatheredShards(Shards):
    """Parameters that are gathered when they are used."""

    def __init__(
        self, gradients: GradientSlices, units: Sequence[Unit], group: DirectGroup, stopwatch: Stopwatch
    ) -> None:
        super().__init__(gradients, units, group)
        self._rows = UnitRows(gradients, units, group, stopwatch)
        self.slices = self._rows.slices
        self._home = {id(self.parameters[i]): n for n, unit in enumerate(units) for i in unit.members}
        self._handles: list[RemovableHandle] = []
        self._depth, self._steps = 0, 0
        self._context = ExitStack()
        group.sent.record()

    @property
    def order(self) -> int:
        """A checksum of the units gathered so far, in their order: the same on all workers."""
        return self._rows.order

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, all parameters are whole; changes to them are kept. Collective."""
        self._rows.gather_all()
        try:
            yield
        finally:
            self._rows.leave_whole()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def adopt(self, model: nn.Module) -> None:
        """Gather what the model uses, whichever of its modules is called, and all of it when its state is read."""
        for name, module in model.named_modules():
            compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
            if compiled or isinstance(module, torch.jit.ScriptModule):
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
            model.register_load_state_dict_pre_hook(partial(self._before_state)),
            model.register_load_state_dict_post_hook(partial(self._after_load)),
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
        rows = self._rows
        n = rows.by_storage.get(tensor.untyped_storage().data_ptr())
        if n is None or rows.whole_depth or tensor.dtype != rows.own[n].dtype:
            return tensor
        return _Kept(n, self._steps, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _get(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.steps != self._steps:
            raise UsageError(
                "backward needs parameters as they were in forward, but an optimizer has stepped since. Call backward "
                "before the step, or run the model again."
            )
        self._rows.use([kept.unit], backward=True)
        return self._rows.rows[kept.unit].as_strided(kept.size, kept.stride, kept.offset)

    def use_of(self, arguments: Iterable[Any]) -> None:
        """An operation uses the parameters among these arguments, or in lists among them."""
        units: list[int] = []
        for argument in arguments:
            for each in argument if isinstance(argument, list | tuple) else (argument,):
                n = self._home.get(id(each)) if isinstance(each, Parameter) else None
                if n is not None and n not in units:
                    units.append(n)
        if units:
            self._rows.use(units, backward=False)

    def _before_state(self, *_: Any) -> None:
        self._rows.gather_all()

    def _after_state(self, _module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        if self._rows.whole_depth == 1:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._rows.by_storage:
                    state[name] = value.detach().clone()
        self._rows.leave_whole()

    def _after_load(self, *_: Any) -> None:
        self._rows.leave_whole()

    # -- steps -------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """The slices are updated: what was gathered is old."""
        for own in self.slices:
            own.grad = None
        self._steps += 1
        self._rows.release_all()
        self.exchanges = self._group.sent.recorded()
        self._group.sent.record()

    def _distribute(self) -> None:
        """They are gathered when they are used."""

    @property
    def parameter_bytes(self) -> int:
        """Its slices, and the most that was gathered at once during steps."""
        return sum(own.nbytes for own in self._rows.own) + self._rows.most_bytes

    def conclude(self) -> None:
        """Leave the parameters whole. Collective."""
        self._rows.gather_all()

    def close(self) -> None:
        """Remove the hooks."""
        super().close()
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


def _reads_no_values(func: Callable[..., Any]) -> bool:
    name = func.__name__
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
    return name in _METADATA
