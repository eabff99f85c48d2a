"""What is learned: a model, its data, its loss, its optimizer, its score and the score to reach.

A learning problem is well posed by its experience (`data`), its task (`model`, `criterion`) and its performance
measure (`score`, `target`). Everything else, above all how the work is distributed, is the system's business.

Workers are other processes and nothing is pickled, so a task travels as a *reference*: where its class is
defined, and the plain arguments it was made with.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from offbeat.errors import OffbeatError, TaskError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What an argument of a task may be, so that it can be written into a run folder and sent to a worker."""


@dataclass(frozen=True)
class Data:
    """The three parts of a task's data; map-style or iterable datasets of examples."""

    train: Dataset[Any]
    """What is learned from; divided over the workers."""
    validation: Dataset[Any]
    """What the target is judged on while training."""
    test: Dataset[Any]
    """What is scored once, at the end."""


class _Referable(ABC):
    """Remembers the arguments an object was made with, so that a worker can make it again."""

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        # Wrong arguments are for __init__ to refuse, with Python's own message.
        try:
            arguments = _by_name(inspect.signature(cls).bind(*args, **kwargs))
        except TypeError:
            arguments = {}
        object.__setattr__(made, "_arguments", arguments)
        return made

    @abstractmethod
    def data(self) -> Data:
        """The train, validation and test parts; the same for every call."""


class Task(_Referable):
    """Something to learn by gradient descent. Subclass it, fill in the methods, and give it to `offbeat.fit`."""

    target: float | None = None
    """The validation score at which training is done; None trains until the budget is spent."""
    global_batch: int = 64
    """Examples per step, split over the workers."""
    epochs: int = 20
    """The budget: passes over the training data, if the target is not reached before."""
    evaluate_every: int | None = None
    """Steps between two evaluations; None evaluates after every epoch."""
    evaluate_batch: int = 256
    """Examples per batch when scoring; it changes the speed, not the score."""
    score_by_parts: bool = False
    """True if `score` is a mean over examples: then each worker scores a part and the parts are averaged."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of examples; None is PyTorch's default."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A freshly initialized model."""

    @abstractmethod
    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """The optimizer of these parameters."""

    @abstractmethod
    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """How good the model is on these batches; higher is better. The model is in evaluation mode."""

    def criterion(self, output: Any, target: Any) -> Tensor:
        """The loss of the model's output on a batch `(input, target)`: a mean over its examples."""
        del output, target
        raise TaskError(
            f"{type(self).__name__} has neither criterion(output, target) nor loss(model, batch), so there is nothing "
            f"to minimize. Define criterion, e.g. `return torch.nn.functional.cross_entropy(output, target)`."
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss on a batch: a mean over its examples. Override it where `criterion` is not enough."""
        inputs, target = batch
        return self.criterion(model(inputs), target)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """A learning-rate schedule, advanced once a step; None keeps the rate."""
        del optimizer
        return None


class IterativeTask(_Referable):
    """Something to learn by iteration that is not gradient descent: `params = update(params, sum of statistics)`.

    Expectation-maximization and coordinate descent are of this kind. One step is one pass over the training data:
    every worker sums `statistics` over its part, the sums are added over the workers, and `update` moves the
    parameters. So the result does not depend on the number of workers.
    """

    target: float | None = None
    """The validation score at which learning is done; None iterates until the budget is spent."""
    global_batch: int | None = None
    """Examples handed to `statistics` at once, over all workers; None hands each worker its whole part."""
    steps: int = 100
    """The budget: updates, if the target is not reached before."""
    evaluate_every: int = 1
    """Steps between two evaluations."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of examples; None is PyTorch's default."""

    @abstractmethod
    def initial(self) -> Mapping[str, Tensor]:
        """The parameters to start from; the same for every call."""

    @abstractmethod
    def statistics(self, params: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        """What a batch says about the parameters, in tensors of any shapes that may be summed over batches."""

    @abstractmethod
    def update(self, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The next parameters, from the statistics summed over all training examples."""

    @abstractmethod
    def score(self, params: Mapping[str, Tensor], data: Iterable[Any]) -> float:
        """How good the parameters are on these batches; higher is better."""


AnyTask = Task | IterativeTask


@dataclass(frozen=True)
class TaskReference:
    """Where a task is defined and what it was made with: all that a worker needs to make it again."""

    source: str
    """A dotted module, or the path of a Python file."""
    name: str | None = None
    """The class; None means the only task of that module."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class: numbers, strings, lists and dictionaries of them."""

    bundled: ClassVar[str] = "offbeat.tasks"

    def __str__(self) -> str:
        return f"{self.source}:{self.name}" if self.name else self.source

    def build(self) -> AnyTask:
        """The task itself."""
        found = self.find()
        if inspect.isabstract(found):
            raise TaskError(f"{found.__name__} is not a complete task: {_lacks(found)}.")
        try:
            inspect.signature(found).bind(**self.arguments)
        except TypeError as error:
            raise TaskError(
                f"{found.__name__} cannot be made with {_spelled(self.arguments)}: {error}. Its arguments are "
                f"{inspect.signature(found)}; on the command line they stand after `--`, as `-- --name value`."
            ) from error
        try:
            return found(**self.arguments)
        except OffbeatError:
            raise
        except Exception as error:
            what = f"{found.__name__} cannot be made with {_spelled(self.arguments)}"
            raise TaskError(_with_traceback(what, error)) from error

    def find(self) -> type[AnyTask]:
        """The task's class, imported."""
        module = load_module(self.source)
        tasks = _tasks_of(module)
        if self.name is None:
            if len(tasks) == 1:
                return next(iter(tasks.values()))
            raise TaskError(_not_one_task(self.source, tasks, _incomplete(module)))
        chosen = getattr(module, self.name, None)
        if not (inspect.isclass(chosen) and issubclass(chosen, (Task, IterativeTask))):
            what = "is not a subclass of offbeat.Task" if chosen is not None else "does not exist"
            raise TaskError(f"{self.name!r} {what} in {self.source}.{did_you_mean(self.name, tasks)}")
        return chosen


def reference_to(task: AnyTask) -> TaskReference:
    """The reference that makes this task again in another process."""
    kind = type(task)
    module = sys.modules.get(kind.__module__)
    if "<locals>" in kind.__qualname__ or "." in kind.__qualname__:
        raise TaskError(
            f"{kind.__qualname__} is defined inside a function or class, where a worker process cannot find it. "
            f"Move it to the top level of its file."
        )
    arguments = task._arguments  # pyright: ignore[reportPrivateUsage]
    for name, value in arguments.items():
        if value is _NAMELESS:
            raise TaskError(
                f"{kind.__name__} takes {name!r} by position only, but its workers make it again by names. "
                f"Give {kind.__name__}.__init__ plain named arguments."
            )
        if not _is_plain(value):
            raise TaskError(
                f"{kind.__name__}({name}={type(value).__name__}…): a task travels to its workers as plain arguments "
                f"(numbers, strings, lists), never as a pickle. Pass what {name!r} is made from, and make it inside."
            )
    source = kind.__module__
    if source == "__main__" or (module is not None and source.startswith(FILE_MODULE)):
        path = getattr(module, "__file__", None)
        if path is None:
            raise TaskError(
                f"{kind.__name__} was defined interactively, so a worker process cannot import it. "
                f"Put the class into a file, import it from there, and pass it again."
            )
        source = str(Path(path).resolve())
    return TaskReference(source, kind.__name__, dict(arguments))


FILE_MODULE = "offbeat_file_"
_WHAT_THERE_IS = (
    "Give a script (`file.py`), a task in a file (`file.py:Class`) or a module that can be imported, such as "
    f"{TaskReference.bundled}.digits."
)


def load_module(source: str) -> ModuleType:
    """A dotted module, or a Python file by its path (which is imported once per process)."""
    if source.endswith(".py"):
        return _load_file(Path(source))
    if not all(word.isidentifier() for word in source.split(".")):
        raise TaskError(f"{source!r} is not a name of a module. {_WHAT_THERE_IS}")
    try:
        return importlib.import_module(source)
    except OffbeatError:
        raise
    except (Exception, SystemExit) as error:
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        if name is not None and (source == name or source.startswith(name + ".")):
            raise TaskError(f"There is no module {source!r} (looked for {name!r}). {_WHAT_THERE_IS}") from error
        raise TaskError(_with_traceback(f"{source} cannot be imported", error)) from error


def _load_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    if not resolved.is_file():
        raise TaskError(f"There is no file {str(path)!r} (looked at {resolved}). Check the path.")
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == resolved:
        return main
    name = FILE_MODULE + "".join(c if c.isalnum() else "_" for c in str(resolved.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise TaskError(f"{str(path)!r} is not a Python file that can be imported.")
    module = importlib.util.module_from_spec(spec)
    folder = str(resolved.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, OffbeatError) or not isinstance(error, Exception | SystemExit):
            raise
        raise TaskError(_with_traceback(f"{path} cannot be imported", error)) from error
    return module


def _with_traceback(what: str, error: BaseException) -> str:
    """What failed in people's own code, with the traceback from where that code begins."""
    frames = error.__traceback__
    ours = (__file__, importlib.__file__)
    while frames is not None and (frames.tb_frame.f_code.co_filename in ours or _is_import(frames.tb_frame.f_code)):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return f"{what}: {type(error).__name__}: {error}.\n{''.join(lines).rstrip()}"


def _is_import(code: CodeType) -> bool:
    return code.co_filename.startswith("<frozen importlib")


def _tasks_of(module: ModuleType) -> dict[str, type[AnyTask]]:
    """The tasks that a module defines itself, by name; what it merely imports does not count."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, (Task, IterativeTask))
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
        and not name.startswith("_")
    }


def _incomplete(module: ModuleType) -> list[str]:
    """What the module's classes lack that would be tasks if they had all methods."""
    own = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]
    return [
        f"{cls.__name__} is not a complete task: {_lacks(cls)}"
        for cls in own
        if issubclass(cls, (Task, IterativeTask)) and inspect.isabstract(cls)
    ]


def _lacks(cls: type) -> str:
    names = sorted(cast("Any", cls).__abstractmethods__)
    return f"it lacks {' and '.join(f'{name}()' for name in names)}"


def _not_one_task(source: str, tasks: Mapping[str, object], incomplete: list[str]) -> str:
    if not tasks:
        why = "".join(f" {reason}." for reason in incomplete)
        return (
            f"{source} defines no task, so there is nothing to learn.{why} Define a class that derives from "
            f"offbeat.Task and has all of its methods; to run a script of your own, give its file alone (`file.py`)."
        )
    first = sorted(tasks)[0]
    return f"{source} defines {len(tasks)} tasks: {', '.join(sorted(tasks))}. Say which, e.g. `{source}:{first}`."


def _by_name(call: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call as keyword arguments; what `**options` gathered is spread out again."""
    found: dict[str, Any] = {}
    for name, value in call.arguments.items():
        kind = call.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            found[name] = _NAMELESS
        else:
            found[name] = value
    return found


_NAMELESS = object()
"""Stands for an argument that cannot be given by name, so that a worker could not be told."""


def _is_plain(value: object) -> bool:
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in cast("Iterable[object]", value))
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return all(isinstance(k, str) and _is_plain(v) for k, v in items)
    return False


def _spelled(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in arguments.items()) or "no arguments"


def accuracy(model: nn.Module, data: Iterable[Any]) -> float:
    """The share of examples whose largest output is their label: a ready-made `score` for classifiers."""
    right = seen = 0
    for inputs, labels in data:
        right += int((model(inputs).argmax(dim=-1) == labels).sum())
        seen += labels.numel()
    return right / max(seen, 1)
