"""User-defined schedules and machines, by where they are defined: `mine.py:my_ring`, `mine.py:MyContract`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple, cast

from offbeat.errors import UsageError, did_you_mean
from offbeat.protocols.collectives import Algorithm, Collective
from offbeat.protocols.schedule import Schedule
from offbeat.simulate.machine_contract import MachineContract
from offbeat.strategies import Strategy
from offbeat.task import load_module

_REFERENCE: Final = re.compile(r"(?P<source>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
_CONTRACT: Final = ("machines", "invariant", "done")
"""Methods that make a class a contract, even if it is not a `MachineContract`."""
WHAT: Final = (
    "A schedule is a function `my_ring(view, layout)` that yields rounds; a contract of machines is a class with "
    "machines(size, seed), invariant(machines) and done(machines). See docs/strategies.md."
)


class OwnSchedule(NamedTuple):
    """A user-defined schedule, its source and its collective."""

    schedule: Schedule
    collective: Collective
    source: str
    """File or module, from which other processes load it, too."""
    name: str

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


def find_own(text: str, collective: str | None = None) -> OwnSchedule | MachineContract | None:
    """The schedule or contract that a text names; None if it names a strategy.

    A function is an all-reduce unless `collective` names another; an `Algorithm` has its own.
    """
    match = _REFERENCE.fullmatch(text.strip())
    if match is None:
        return None
    source, name = match["source"], match["name"]
    module = load_module(source)
    value = getattr(module, name, None)
    if value is None:
        raise UsageError(f"There is no {name!r} in {source}.{did_you_mean(name, _offered(module))}")
    if inspect.isclass(value) and issubclass(value, Strategy):
        return None
    if isinstance(value, Algorithm):
        return OwnSchedule(value.schedule, value.collective, source, name)
    contract = _contract(value)
    if contract is not None:
        return contract
    if _is_schedule(value):
        return OwnSchedule(cast("Schedule", value), collective_named(collective), source, name)
    raise UsageError(f"{text} is neither a strategy nor a schedule nor a contract of machines: {_form(value)} {WHAT}")


def collective_named(name: str | None) -> Collective:
    """A collective by its name; None is an all-reduce."""
    valid = [member.value for member in Collective]
    if name is not None and name not in valid:
        raise UsageError(f"--collective {name!r} is not known.{did_you_mean(name, valid)}")
    return Collective.ALL_REDUCE if name is None else Collective(name)


def _contract(value: Any) -> MachineContract | None:
    if isinstance(value, MachineContract):
        return value
    if inspect.isclass(value) and issubclass(value, MachineContract):
        return value()
    if inspect.isclass(value) and all(callable(getattr(value, part, None)) for part in _CONTRACT):
        # A machine that carries its own contract, as static methods.
        methods = {part: staticmethod(getattr(value, part)) for part in _CONTRACT}
        settings = {key: getattr(value, key) for key in MachineContract.__annotations__ if hasattr(value, key)}
        return type(value.__name__, (MachineContract,), {**methods, **settings})()
    return None


def _is_schedule(value: Any) -> bool:
    if not callable(value) or inspect.isclass(value):
        return False
    try:
        parameters = inspect.signature(cast("Callable[..., Any]", value)).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return len(required) <= 2 <= len(parameters)


def _form(value: Any) -> str:
    if inspect.isclass(value):
        missing = [part for part in _CONTRACT if not callable(getattr(value, part, None))]
        return f"the class has no {', '.join(missing)}."
    return f"it is {type(value).__name__}."


def _offered(module: ModuleType) -> list[str]:
    """Names in a module that may be meant: those that it defines itself."""
    public: Mapping[str, Any] = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [
        name
        for name, value in public.items()
        if isinstance(value, Algorithm | MachineContract)
        or (getattr(value, "__module__", None) == module.__name__ and (inspect.isclass(value) or _is_schedule(value)))
    ]
