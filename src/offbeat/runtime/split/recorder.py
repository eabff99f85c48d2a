"""Records what a model calls while it computes a real batch.

The model's own code runs, on real tensors; every function of torch that it calls, and every module that has no
modules of its own, becomes one `ModelCall`. Sizes are traced (`sizes.py`) rather than read off, so that what is
recorded holds for batches of other sizes; where the code branches on a size, the recorded calls check that later
batches take the same branch. Code that branches on the data cannot be recorded and is refused.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offbeat.errors import TaskError
from offbeat.runtime.split.graph import ModelCall, Ref, flat, leaves, mapped
from offbeat.runtime.split.sizes import WHOLE, SizeCheck, TracedFloat, TracedInt, plain
from offbeat.runtime.split.values import KnownValues, place

_OPENED = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""Modules of torch.nn that are looked into; all others of it are layers."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, TracedInt, Tensor)
_SIZE_ONLY = frozenset({f"{kind}_like" for kind in ("zeros", "ones", "full", "empty")}) | frozenset(
    {f"new_{kind}" for kind in ("zeros", "ones", "full", "empty")}
)
"""Functions that look at the size of a tensor, not at what is in it."""
_METADATA = frozenset(
    {"dim", "ndimension", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_tensor", "get_device"}
    | {"element_size", "__hash__", "is_inference", "is_pinned", "result_type", "can_cast", "is_same_size", "is_shared"}
    | {"is_conj", "is_neg", "data_ptr", "__dir__", "__repr__", "type", "__format__", "__get__", "has_names"}
)
"""Functions whose result is not a tensor, and does not depend on what is in one."""


class DataDependentError(TaskError):
    """A model's code takes decisions that depend on what is in a batch."""


class _Watched:
    """Tensors, and whether they have been changed in place since."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors]  # pyright: ignore[reportPrivateUsage]

    def changed(self) -> list[Tensor]:
        return [
            tensor
            for tensor, version in zip(self._tensors, self._versions, strict=True)
            if tensor._version != version  # pyright: ignore[reportPrivateUsage]
        ]


class CallRecorder(TorchFunctionMode):
    """Records the calls made while it is active."""

    def __init__(self, model: nn.Module, kept: frozenset[str]) -> None:
        super().__init__()
        self.calls: list[ModelCall] = []
        self.known = KnownValues(model)
        """The values that calls use and produce."""
        self.mutations: list[tuple[int, int]] = []
        """Calls that changed a tensor in place, and the address of the storage that they changed."""
        self.pure: set[int] = set()
        """Calls whose result depends on sizes and constants only."""
        self._kept = kept
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._sizes: dict[tuple[int, int], TracedInt] = {}
        self._checks: set[tuple[Any, ...]] = set()
        self._stack: list[str] = []
        self._paused = False
        self.autocasts = 0
        """How many `torch.autocast` blocks of the model's own the code is in."""

    def give(self, leaf: Tensor) -> Ref:
        """A parameter, buffer or constant that the model returns, as a value."""
        reference = self.known.reference(leaf)
        number = self.known.add(leaf)
        self._add(_itself, (reference,), {}, (number,))
        return Ref(number)

    def forget(self) -> None:
        """Let go of all values: sizes know their recorder, so that both would live on, and the autograd graph too."""
        self.known.values.clear()
        self._sizes.clear()

    # -- sizes

    def compute(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """The result of an operation on sizes, recorded."""
        result = operation(*map(plain, operands))
        kind = TracedInt if isinstance(result, int) else TracedFloat
        traced = kind(self, len(self.known.values), result)
        self._add(operation, mapped(operands, self.known.reference), {}, (self.known.add(traced),), pure=True)
        return traced

    def decide(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """The same as a plain value, with a check that it is the same for every later batch."""
        result = operation(*map(plain, operands))
        self._check(operation, operands, {}, result)
        return result

    def _check(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        args, kwargs = mapped((args, kwargs), self.known.reference)
        key = (operation, *args)
        if all(isinstance(leaf, (Ref, int, float)) for leaf in args):
            if key in self._checks:
                return
            self._checks.add(key)
        self._add(SizeCheck(operation, result, place()), args, kwargs, ())

    def _size(self, tensor: Tensor, dimension: int) -> Any:
        """One size of a tensor, traced unless the tensor belongs to the model."""
        number = self.known.number(tensor)
        if number is None:
            return tensor.size(dimension)
        dimension %= tensor.dim()
        if (number, dimension) not in self._sizes:
            size = TracedInt(self, len(self.known.values), tensor.size(dimension))
            self._add(
                Tensor.size, (Ref(number), dimension), {}, (self.known.add(size),), pure=number in self.known.inputs
            )
            self._sizes[number, dimension] = size
        return self._sizes[number, dimension]

    def _sizes_of(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: Tensor = args[0]
        if name in ("numel", "nelement"):
            total: Any = 1
            for dimension in range(tensor.dim()):
                total = total * self._size(tensor, dimension)
            return total
        dimension = args[1] if len(args) > 1 else kwargs.get("dim")
        if dimension is not None:
            return self._size(tensor, int(dimension))
        return torch.Size([self._size(tensor, dimension) for dimension in range(tensor.dim())])

    # -- calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch and record it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._paused:
            return func(*args, **kwargs)
        if name in ("size", "numel", "nelement") or func == _SHAPE:
            return self._sizes_of(name, args, kwargs)
        if name == "__len__":
            return operator.index(self._size(args[0], 0))
        if name == "__iter__":
            operator.index(self._size(args[0], 0))
            return iter(self._record(Tensor.unbind, args, {}))
        return self._record(func, args, kwargs)

    def _record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function and record it, unless it only asks what is the same for every batch."""
        arguments = list(leaves((args, kwargs)))
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        watched = _Watched(tensors)
        # Taken now: a function that works in place returns its argument, which then stands for its result.
        references = mapped((args, kwargs), self.known.reference)
        from_data = self.known.from_data(arguments) and name not in _SIZE_ONLY
        random = None if from_data else torch.random.get_rng_state()
        result = self._run(func, args, kwargs)
        changed = tensors[:1] if name == "__set__" else watched.changed()
        results = flat(result)
        if not changed and not any(isinstance(leaf, Tensor) for leaf in results):
            if name not in _METADATA and any(isinstance(leaf, (Tensor, TracedInt, TracedFloat)) for leaf in arguments):
                self._leaves_torch(func, args, kwargs, result, from_data)
            return result
        if all(self.known.is_own(leaf) for leaf in results) and not changed:
            return result  # Such as `weight.to(dtype)` where nothing has to be done.
        random_now = random is None or not torch.equal(random, torch.random.get_rng_state())
        own = any(self.known.is_own(tensor) for tensor in tensors)
        numbers = self._results(results, from_data or random_now or own)
        pure = not (from_data or random_now or own or changed)
        starts = any(self.known.is_parameter(tensor) for tensor in tensors)
        direct = isinstance(result, Tensor)
        self._add(func, references[0], references[1], numbers, direct=direct, pure=pure, starts=starts)
        self.mutations += [(len(self.calls) - 1, address(tensor)) for tensor in changed]
        return result

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = mapped((args, kwargs), plain)
        with self._pause():
            return func(*args, **kwargs)

    @contextmanager
    def _pause(self) -> Generator[None]:
        was, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = was

    def _results(self, results: Any, from_data: bool) -> tuple[int | None, ...]:
        """Numbers for the tensors of a result."""
        numbers = tuple(
            self.known.add(leaf) if isinstance(leaf, Tensor) and not self.known.is_own(leaf) else None
            for leaf in results
        )
        if from_data:
            self.known.data |= {number for number in numbers if number is not None}
        return numbers

    def _add(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: tuple[int | None, ...],
        *,
        direct: bool = True,
        name: str | None = None,
        pure: bool = False,
        starts: bool = False,
    ) -> None:
        """Record a call whose arguments are references already."""
        self.calls.append(
            ModelCall(
                name if name is not None else (self._stack[-1] if self._stack else ""),
                target,
                args,
                kwargs,
                results,
                direct=direct,
                grad=torch.is_grad_enabled(),
                autocast=_autocast() if self.autocasts else None,
                starts_layer=starts,
                place=place(),
            )
        )
        if pure:
            self.pure.add(len(self.calls) - 1)

    def _leaves_torch(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, from_data: bool
    ) -> None:
        """Numbers read out of a tensor: refused if they depend on the data, else checked for later batches."""
        if result is None or isinstance(result, (torch.dtype, torch.device, torch.layout, torch.Size)):
            return
        name = getattr(func, "__name__", str(func))
        if from_data:
            _refuse_reading(name, self._stack[-1] if self._stack else "")
        if not isinstance(result, (bool, int, float, complex, str, list, tuple)):
            _refuse_reading(name, self._stack[-1] if self._stack else "")
        self._check(func, args, kwargs, result)

    # -- modules

    def call_module(self, run: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module: as one call if it is a layer, else looking at what it calls."""
        path = self._paths.get(id(module))
        if self._paused or path is None:
            return run(module, *args, **kwargs)
        if path in self._kept or self._is_layer(module, path, (args, kwargs)):
            with self._pause():
                random = torch.random.get_rng_state()
                arguments = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                tensors = _Watched(arguments)
                references = mapped((args, kwargs), self.known.reference)
                result = self._run(module, args, kwargs)
                results = flat(result)
                if all(leaf is None or isinstance(leaf, Tensor) for leaf in results):
                    numbers = self._results(results, True)
                    direct = isinstance(result, Tensor)
                    self._add(module, references[0], references[1], numbers, direct=direct, name=path, starts=True)
                    self.mutations += [(len(self.calls) - 1, address(tensor)) for tensor in tensors.changed()]
                    return result
                if path in self._kept:
                    raise TaskError(_not_tensors(path, results))
                torch.random.set_rng_state(random)
        self._stack.append(path)
        try:
            return run(module, *args, **kwargs)
        finally:
            self._stack.pop()

    def _is_layer(self, module: nn.Module, path: str, arguments: Any) -> bool:
        if not path or not all(isinstance(leaf, _PLAIN) for leaf in leaves(arguments)):
            return False
        if next(module.children(), None) is None:
            return True
        kind = type(module)
        return kind.__module__.startswith(("torch.nn.", "torch.jit", "torch._dynamo")) and kind not in _OPENED

    def call_autograd(self, run: Callable[..., Any], function: type[Any], args: Any, kwargs: Any) -> Any:
        """Run a custom autograd function as one call, so that its own backward is kept."""
        if self._paused:
            return run(*args, **kwargs)
        if function.__name__ == "CheckpointFunction":
            return args[0](*args[2:])
        with self._pause():
            return self._record(run, args, kwargs)


_SHAPE = cast("Any", Tensor).shape.__get__


@contextmanager
def recording(recorder: CallRecorder) -> Generator[None]:
    """While it lasts, modules and functions that this thread calls are recorded."""
    thread = threading.get_ident()
    module_type, function_type = cast("Any", nn.Module), cast("Any", torch.autograd.Function)
    autocast_type = cast("Any", torch.autocast)
    call, apply = module_type.__call__, function_type.__dict__["apply"]
    enter, leave = autocast_type.__enter__, autocast_type.__exit__

    def traced_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        return recorder.call_module(call, module, args, kwargs)

    def traced_apply(function: type[Any], *args: Any, **kwargs: Any) -> Any:
        run = apply.__get__(None, function)
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        return recorder.call_autograd(run, function, args, kwargs)

    def traced_enter(autocast: Any) -> Any:
        recorder.autocasts += threading.get_ident() == thread
        return enter(autocast)

    def traced_leave(autocast: Any, *error: Any) -> Any:
        recorder.autocasts -= threading.get_ident() == thread
        return leave(autocast, *error)

    module_type.__call__ = traced_call
    function_type.apply = classmethod(traced_apply)
    autocast_type.__enter__, autocast_type.__exit__ = traced_enter, traced_leave
    try:
        with recorder:
            yield
    finally:
        module_type.__call__ = call
        function_type.apply = apply
        autocast_type.__enter__, autocast_type.__exit__ = enter, leave


def address(tensor: Tensor) -> int:
    """What tensors that share memory have in common; 0 for one that has no memory."""
    return tensor.untyped_storage().data_ptr()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _refuse_reading(name: str, path: str) -> NoReturn:
    what = {"__bool__": "branches on", "item": "reads a number out of", "tolist": "reads numbers out of"}
    raise DataDependentError(
        f"{place()}{f' (in {path})' if path else ''} {what.get(name, f'takes out of torch (by {name})')} a tensor "
        f"that depends on the data, so another batch may need other calls, and the model cannot be captured. Compute "
        f"it with tensors only (torch.where in place of `if`), or put that code into {WHOLE}."
    )


def _not_tensors(path: str, results: Sequence[Any]) -> str:
    kinds = sorted({type(leaf).__name__ for leaf in results if leaf is not None and not isinstance(leaf, Tensor)})
    return (
        f"Module {path} is to be run as a whole, and returns {' and '.join(kinds)}, which cannot cross a cut: only "
        f"tensors can. Let it return tensors, alone or in tuples, lists and dictionaries."
    )
