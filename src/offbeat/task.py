"""Tasks: a model, its data, loss, optimizer and score, and the score to reach.

Workers are other processes and nothing is pickled, so a task is sent as a *reference*: where its class is defined, and
its plain arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, cast

from offbeat.errors import OffbeatError, TaskError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class Data:
    """The three parts of a task's data; map-style or iterable datasets of examples."""

    train: Dataset[Any]
    """Training examples; divided over the workers."""
    validation: Dataset[Any]
    """Examples on which the target is judged during training."""
    test: Dataset[Any]
    """Examples that are scored once, at the end."""


class _Referable(ABC):
    """What tasks of both kinds have. Remembers an object's arguments, so that a worker can create it again."""

    target: float | None = None
    """The validation score at which training ends; None trains until the budget is spent."""
    collate: Callable[[list[Any]], Any] | None = None
    """Collates a list of examples into a batch; None is PyTorch's default."""
    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        task = super().__new__(cls)
        # Wrong arguments are for __init__ to refuse, with Python's own message.
        try:
            arguments = _by_name(inspect.signature(cls).bind(*args, **kwargs))
        except TypeError:
            arguments = {}
        object.__setattr__(task, "_arguments", arguments)
        return task

    @abstractmethod
    def data(self) -> Data:
        """The train, validation and test parts; the same for every call."""

    def client_of(self, example: Any) -> Any:
        """Whose a training example is, as a number or name: for `federated(data=task)`."""
        del example
        raise TaskError(
            f"{type(self).__name__} does not say which client has an example. Define client_of(example), or divide the "
            f"data otherwise, as by data=dirichlet(0.3)."
        )

    def client_data(self, folder: Path) -> Data:
        """The data of a client of a federated deployment, in a folder of its own (`offbeat federated join --data`).

        The train part is what it learns from; models are scored on its validation part, which may be empty.
        """
        raise TaskError(
            f"{type(self).__name__} does not say how a client reads its data from {str(folder)!r}. Define "
            f"client_data(folder), which returns offbeat.Data(train, validation, test)."
        )


class Task(_Referable):
    """A task for gradient descent. Subclass it, fill in the methods, and pass it to `offbeat.fit`."""

    global_batch: int = 64
    """Examples per step, split over the workers."""
    epochs: int = 20
    """The budget, in epochs, if the target is not reached before."""
    evaluate_every: int | None = None
    """Steps between two evaluations; None evaluates after every epoch."""
    evaluate_batch: int = 256
    """Examples per batch when scoring; affects the speed, not the score."""
    score_by_parts: bool = False
    """True if `score` is a mean over examples: then each worker scores a part and the parts are averaged."""

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

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str] | None:
        """How `tensor(ways)` splits the model's modules: `column`, `row`, `heads`, `vocabulary` or `whole`, by name.

        Modules that are not named stay whole. None finds out itself what can be split.
        """
        del model
        return None

    def stages(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Modules of the model that, run one after another, are the model: a pipeline cuts only between these.

        Each is called with what the one before it returned, a tuple as several arguments. None, unless overridden:
        then the model's layers are found by running it once on a batch.
        """
        del model
        return None

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """A learning-rate schedule, advanced once a step; None keeps the rate."""
        del optimizer
        return None


class IterativeTask(_Referable):
    """A task for iterations other than gradient descent: `params = update(params, sum of statistics)`.

    Expectation-maximization and coordinate descent are of this kind. One step is one pass over the training data:
    every worker sums `statistics` over its part, the sums are added over the workers, and `update` computes new
    parameters. So the result does not depend on the number of workers.
    """

    global_batch: int | None = None
    """Examples passed to `statistics` at once, over all workers; None passes each worker's whole part."""
    steps: int = 100
    """The budget, in updates, if the target is not reached before."""
    evaluate_every: int = 1
    """Steps between two evaluations."""

    @abstractmethod
    def initial(self) -> Mapping[str, Tensor]:
        """The parameters to start from; the same for every call."""

    @abstractmethod
    def statistics(self, params: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        """Statistics of a batch, as tensors of any shapes that can be summed over batches."""

    @abstractmethod
    def update(self, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The next parameters, from the statistics summed over all training examples."""

    @abstractmethod
    def score(self, params: Mapping[str, Tensor], data: Iterable[Any]) -> float:
        """How good the parameters are on these batches; higher is better."""


AnyTask = Task | IterativeTask


@dataclass(frozen=True)
class TaskReference:
    """Where a task is defined, and its arguments: all that a worker needs to create it."""

    source: str
    """A dotted module, or the path of a Python file."""
    name: str | None = None
    """The class; None means the only task of that module."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class: numbers, strings, lists and dictionaries of them."""

    def __str__(self) -> str:
        return f"{self.source}:{self.name}" if self.name else self.source

    def build(self) -> AnyTask:
        """The task itself."""
        cls = self.find()
        if inspect.isabstract(cls):
            raise TaskError(f"{cls.__name__} is not a complete task: {_lacks(cls)}.")
        spelled = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items()) or "no arguments"
        try:
            inspect.signature(cls).bind(**self.arguments)
        except TypeError as error:
            raise TaskError(
                f"{cls.__name__} cannot be made with {spelled}: {error}. Its arguments are {inspect.signature(cls)}; "
                f"on the command line they stand after `--`, as `-- --name value`."
            ) from error
        try:
            return cls(**self.arguments)
        except OffbeatError:
            raise
        except Exception as error:
            raise TaskError(_with_traceback(f"{cls.__name__} cannot be made with {spelled}", error)) from error

    def find(self) -> type[AnyTask]:
        """The task's class, imported."""
        module = load_module(self.source)
        own = {
            name: value
            for name, value in vars(module).items()
            if inspect.isclass(value)
            and issubclass(value, (Task, IterativeTask))
            and value.__module__ == module.__name__  # Imported ones do not count.
        }
        tasks = {name: cls for name, cls in own.items() if not inspect.isabstract(cls) and not name.startswith("_")}
        if self.name is None:
            if len(tasks) == 1:
                return next(iter(tasks.values()))
            raise TaskError(_not_one_task(self.source, tasks, [cls for cls in own.values() if inspect.isabstract(cls)]))
        chosen = getattr(module, self.name, None)
        if not (inspect.isclass(chosen) and issubclass(chosen, (Task, IterativeTask))):
            what = "is not a subclass of offbeat.Task" if chosen is not None else "does not exist"
            raise TaskError(f"{self.name!r} {what} in {self.source}.{did_you_mean(self.name, tasks)}")
        return chosen


def reference_to(task: AnyTask) -> TaskReference:
    """The reference by which another process can create this task."""
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
                f"{kind.__name__} takes {name!r} by position only, but its workers create it by keywords. "
                f"Give {kind.__name__}.__init__ plain named arguments."
            )
        if not _is_plain(value):
            raise TaskError(
                f"{kind.__name__}({name}={type(value).__name__}…): a task is sent to its workers as plain arguments "
                f"(numbers, strings, lists), never as a pickle. Pass what {name!r} is made from, and create it inside."
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
    "offbeat.tasks.digits."
)


def load_module(source: str) -> ModuleType:
    """Import a dotted module, or a Python file by its path (once per process)."""
    if source.endswith(".py"):
        return _load_file(Path(source))
    if not all(word.isidentifier() for word in source.split(".")):
        raise TaskError(f"{source!r} is not the name of a module. {_WHAT_THERE_IS}")
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
    """A message about a failure in the user's code, with the traceback from where that code begins."""
    frames = error.__traceback__
    ours = (__file__, importlib.__file__, "<frozen importlib")
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return f"{what}: {type(error).__name__}: {error}.\n{''.join(lines).rstrip()}"


def _lacks(cls: type) -> str:
    names = sorted(cast("Any", cls).__abstractmethods__)
    return f"it lacks {' and '.join(f'{name}()' for name in names)}"


def _not_one_task(source: str, tasks: Mapping[str, object], incomplete: Iterable[type]) -> str:
    if not tasks:
        why = "".join(f" {cls.__name__} is not a complete task: {_lacks(cls)}." for cls in incomplete)
        return (
            f"{source} defines no task, so there is nothing to train.{why} Define a class that derives from "
            f"offbeat.Task and has all of its methods; to run a script of your own, give its file alone (`file.py`)."
        )
    first = sorted(tasks)[0]
    return f"{source} defines {len(tasks)} tasks: {', '.join(sorted(tasks))}. Say which, e.g. `{source}:{first}`."


def _by_name(call: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call as keyword arguments, including those in `**options`."""
    keywords: dict[str, Any] = {}
    for name, value in call.arguments.items():
        kind = call.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            keywords |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            keywords[name] = _NAMELESS
        else:
            keywords[name] = value
    return keywords


_NAMELESS = object()
"""Stands for an argument that cannot be passed by keyword, so that a worker could not be created."""


def _is_plain(value: object) -> bool:
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in cast("Iterable[object]", value))
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return all(isinstance(k, str) and _is_plain(v) for k, v in items)
    return False


def accuracy(model: nn.Module, data: Iterable[Any]) -> float:
    """The share of correctly classified examples: a ready-made `score` for classifiers."""
    right = seen = 0
    for inputs, labels in data:
        right += int((model(inputs).argmax(dim=-1) == labels).sum())
        seen += labels.numel()
    return right / max(seen, 1)
