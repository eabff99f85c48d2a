"""Records what a model calls while it computes a real batch.

The model's own code runs, on real tensors; every function of torch that it calls, and every module that has no
modules of its own, becomes one `Call`. Sizes are traced (`sizes.py`) rather than read off, so that what is recorded
holds for batches of other sizes; where the code branches on a size, the recorded calls check that later batches take
the same branch. Code that branches on the data cannot be recorded and is refused.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offbeat.errors import TaskError
from offbeat.runtime.split.graph import Call, Held, Ref, flat, leaves, mapped
from offbeat.runtime.split.sizes import SizeCheck, TracedFloat, TracedInt, plain

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
_HERE, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)


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


class Recorder(TorchFunctionMode):
    """Records the calls made while it is active."""

    def __init__(self, model: nn.Module, kept: frozenset[str]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.values: list[Any] = []
        """All values, by number; kept alive, so that no two of them have the same id."""
        self.inputs: list[int] = []
        self.mutations: list[tuple[int, int]] = []
        """Calls that changed a tensor in place, and the address of the storage that they changed."""
        self.pure: set[int] = set()
        """Calls whose result depends on sizes and constants only."""
        self._kept = kept
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._held = {id(tensor): path for path, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self._trained = {id(parameter) for parameter in model.parameters()}
        self._numbers: dict[int, int] = {}
        self._data: set[int] = set()
        self._sizes: dict[tuple[int, int], TracedInt] = {}
        self._checks: set[tuple[Any, ...]] = set()
        self._constants: list[Tensor] = []
        self._stack: list[str] = []
        self._paused = False
        self._autocast = _autocast()

    # -- values

    def add_input(self, leaf: Any) -> Any:
        """A leaf of the batch: a tensor becomes an input; anything else is a constant."""
        if isinstance(leaf, Tensor) and id(leaf) not in self._numbers:
            self.inputs.append(self._number(leaf))
            self._data.add(self.inputs[-1])
        return leaf

    def reference(self, leaf: Any) -> Any:
        """What stands for a value in recorded arguments."""
        if isinstance(leaf, (TracedInt, TracedFloat)):
            return Ref(leaf.number)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._numbers:
            return Ref(self._numbers[id(leaf)])
        if id(leaf) in self._held:
            return Held(self._held[id(leaf)])
        if leaf.grad_fn is not None or isinstance(leaf, nn.Parameter):
            raise TaskError(
                f"{_place()} uses a tensor of shape {tuple(leaf.shape)} that is neither computed from this batch nor a "
                f"parameter or buffer of the model, so no part can own it. Register it with the module that uses it "
                f"(nn.Parameter as an attribute, register_buffer), and keep no tensor from one batch to the next."
            )
        self._constants.append(leaf)
        return leaf

    def _number(self, value: Any) -> int:
        self.values.append(value)
        number = len(self.values) - 1
        if isinstance(value, Tensor):
            self._numbers[id(value)] = number
        return number

    def _from_data(self, arguments: Any) -> bool:
        """Whether the arguments depend on the contents of the batch or of parameters."""
        return any(
            self._numbers.get(id(leaf)) in self._data or id(leaf) in self._trained
            for leaf in leaves(arguments)
            if isinstance(leaf, Tensor)
        )

    # -- sizes

    def compute(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """The result of an operation on sizes, recorded."""
        result = operation(*map(plain, operands))
        kind = TracedInt if isinstance(result, int) else TracedFloat
        traced = kind(self, len(self.values), result)
        self._add(operation, operands, {}, (self._number(traced),), pure=True)
        return traced

    def decide(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """The same as a plain value, with a check that it is the same for every later batch."""
        result = operation(*map(plain, operands))
        self._check(operation, operands, {}, result)
        return result

    def _check(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        references = mapped(args, self.reference)
        key = (operation, *(leaf if isinstance(leaf, (Ref, Held, int, float)) else id(leaf) for leaf in references))
        if key not in self._checks:
            self._checks.add(key)
            self._add(SizeCheck(operation, result, _place()), args, kwargs, ())

    def _size(self, tensor: Tensor, dimension: int) -> Any:
        """One size of a tensor, traced unless the tensor belongs to the model."""
        number = self._numbers.get(id(tensor))
        if number is None:
            return tensor.size(dimension)
        dimension %= tensor.dim()
        if (number, dimension) not in self._sizes:
            size = TracedInt(self, len(self.values), tensor.size(dimension))
            self._add(Tensor.size, (tensor, dimension), {}, (self._number(size),), pure=number in self.inputs)
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
        from_data = self._from_data(arguments) and name not in _SIZE_ONLY
        random = None if from_data else torch.random.get_rng_state()
        result = self._run(func, args, kwargs)
        changed = tensors[:1] if name == "__set__" else watched.changed()
        results = flat(result)
        if not changed and not any(isinstance(leaf, Tensor) for leaf in results):
            if name not in _METADATA and any(isinstance(leaf, (Tensor, TracedInt, TracedFloat)) for leaf in arguments):
                self._leaves_torch(func, args, kwargs, result, from_data)
            return result
        if all(id(leaf) in self._held for leaf in results) and not changed:
            return result  # Such as `weight.to(dtype)` where nothing has to be done.
        random_now = random is None or not torch.equal(random, torch.random.get_rng_state())
        held = any(id(tensor) in self._held for tensor in tensors)
        numbers = self._results(results, from_data or random_now or held)
        pure = not (from_data or random_now or held or changed)
        starts = any(id(tensor) in self._trained for tensor in tensors)
        self._add(func, args, kwargs, numbers, pure=pure, starts=starts)
        self.mutations += [(len(self.calls) - 1, address(tensor)) for tensor in changed]
        return result

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = mapped((args, kwargs), plain)
        with self._pause():
            return func(*args, **kwargs)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        was, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = was

    def _results(self, results: Any, from_data: bool) -> tuple[int | None, ...]:
        """Numbers for the tensors of a result."""
        numbers = tuple(
            self._number(leaf) if isinstance(leaf, Tensor) and id(leaf) not in self._held else None for leaf in results
        )
        if from_data:
            self._data |= {number for number in numbers if number is not None}
        return numbers

    def _add(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: tuple[int | None, ...],
        *,
        name: str | None = None,
        pure: bool = False,
        starts: bool = False,
    ) -> None:
        # References are taken before results replace what had the same identity, as in-place functions return it.
        fresh = {number for number in results if number is not None}
        args, kwargs = mapped((args, kwargs), lambda leaf: self._older(leaf, fresh))
        autocast = _autocast()
        self.calls.append(
            Call(
                name if name is not None else (self._stack[-1] if self._stack else ""),
                target,
                args,
                kwargs,
                results,
                grad=torch.is_grad_enabled(),
                autocast=autocast if autocast != self._autocast else None,
                starts_layer=starts,
                place=_place(),
            )
        )
        if pure:
            self.pure.add(len(self.calls) - 1)

    def _older(self, leaf: Any, fresh: set[int]) -> Any:
        """The reference to an argument, not to the result that may be the same object."""
        reference = self.reference(leaf)
        if isinstance(reference, Ref) and reference.number in fresh:
            earlier = [n for n, value in enumerate(self.values) if value is leaf and n not in fresh]
            return Ref(earlier[-1])
        return reference

    def _leaves_torch(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, from_data: bool
    ) -> None:
        """Numbers read out of a tensor: refused if they depend on the data, else checked for later batches."""
        if result is None or isinstance(result, (torch.dtype, torch.device, torch.layout, torch.Size)):
            return
        name = getattr(func, "__name__", str(func))
        if from_data:
            _refuse_reading(name, self._stack[-1] if self._stack else "")
        if isinstance(result, (bool, int, float, complex, str, list)):
            self._check(func, args, kwargs, result)
        elif isinstance(result, (tuple,)):
            self._check(func, args, kwargs, result)
        else:
            _refuse_reading(name, self._stack[-1] if self._stack else "")

    # -- modules

    def call_module(self, run: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module: as one call if it is a layer, else looking at what it calls."""
        path = self._paths.get(id(module))
        if self._paused or path is None:
            return run(module, *args, **kwargs)
        if self._is_layer(module, path, (args, kwargs)):
            with self._pause():
                random = torch.random.get_rng_state()
                arguments = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                tensors = _Watched(arguments)
                result = self._run(module, args, kwargs)
                results = flat(result)
                if all(leaf is None or isinstance(leaf, Tensor) for leaf in results):
                    self._add(module, args, kwargs, self._results(results, True), name=path, starts=True)
                    self.mutations += [(len(self.calls) - 1, address(tensor)) for tensor in tensors.changed()]
                    return result
                torch.random.set_rng_state(random)
        self._stack.append(path)
        try:
            return run(module, *args, **kwargs)
        finally:
            self._stack.pop()

    def _is_layer(self, module: nn.Module, path: str, arguments: Any) -> bool:
        if path in self._kept:
            return True
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
        return self._record(function.apply, args, kwargs)


_SHAPE = cast("Any", Tensor).shape.__get__


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While it lasts, modules and functions that this thread calls are recorded."""
    thread = threading.get_ident()
    module_type, function_type = cast("Any", nn.Module), cast("Any", torch.autograd.Function)
    call, apply = module_type.__call__, function_type.__dict__["apply"]

    def traced_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        return recorder.call_module(call, module, args, kwargs)

    def traced_apply(function: type[Any], *args: Any, **kwargs: Any) -> Any:
        run = apply.__get__(None, function)
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        return recorder.call_autograd(run, function, args, kwargs)

    module_type.__call__ = traced_call
    function_type.apply = classmethod(traced_apply)
    try:
        with recorder:
            yield
    finally:
        module_type.__call__ = call
        function_type.apply = apply


def address(tensor: Tensor) -> int:
    """What tensors that share memory have in common; 0 for one that has no memory."""
    return tensor.untyped_storage().data_ptr()


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _refuse_reading(name: str, path: str) -> NoReturn:
    what = {"__bool__": "branches on", "item": "reads a number out of", "tolist": "reads numbers out of"}
    raise TaskError(
        f"{_place()}{f' (in {path})' if path else ''} {what.get(name, f'takes out of torch (by {name})')} a tensor "
        f"that depends on the data, so another batch may need other calls, and the model cannot be captured. Compute "
        f"it with tensors only (torch.where in place of `if`), or put that code into a module that is kept whole: a "
        f"module without modules of its own, or one named in `kept`."
    )


def _place() -> str:
    """File and line of the innermost code that is neither torch's nor this folder's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's own code"
