"""Fields of strategies and settings: values written as `name(arguments)`, their types, and their text.

The checks of values made in Python, the parser, `str` and the reference pages all derive from the fields' types.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from offbeat.errors import StrategyError
from offbeat.limits import BYTES

LARGEST: Final = 2**63
"""Integers stay below it, as they do in the tensors and headers that carry them."""

Ranges = tuple[tuple[str, Callable[[Any], bool], str], ...]
"""Allowed values of arguments: the argument's name, a test, and why a value that fails it is refused."""
BUCKET: Final[Ranges] = (
    ("bucket", lambda mebibytes: mebibytes > 0, "a bucket holds more than 0 MiB"),
    ("bucket", lambda mebibytes: mebibytes <= BYTES / 2**20, "a bucket holds at most 1 PiB"),
)


@dataclass(frozen=True)
class TextValue:
    """A frozen dataclass that can be written as text: its name, and its arguments in brackets."""

    name: ClassVar[str]
    """Its name in text; by default the class's name in lower case."""
    first_alone: ClassVar[bool] = False
    """Whether its first argument is written without its keyword, as in `topk(0.1)`."""
    _ranges: ClassVar[Ranges] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or out of range; an override calls this first."""
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            converted = field.convert(value, self.name)
            if converted is not value:
                object.__setattr__(self, field.name, converted)
        for name, allowed, why in self._ranges:
            require(allowed(getattr(self, name)), self, name, getattr(self, name), why)

    def __str__(self) -> str:
        return spell_call(self.name, self)


@dataclass(frozen=True)
class Setting(TextValue):
    """A value with its own arguments, written as an argument of a strategy, such as `ssp(3)`."""


class Notation(ABC):
    """A value with a syntax of its own, instead of names, numbers and calls. It is written as `str` has it."""

    syntax: ClassVar[str]
    """How it is written, as shown to users."""

    @classmethod
    @abstractmethod
    def read(cls, text: str) -> Self:
        """The value that a text denotes; StrategyError if it denotes none."""

    @classmethod
    @abstractmethod
    def of(cls, value: object) -> Self | None:
        """A value made in Python as this one; None if it is nothing of the kind."""


@dataclass(frozen=True)
class Field:
    """One argument: its name, types and default."""

    name: str
    """The keyword it is written with."""
    kinds: tuple[Any, ...]
    """Its alternatives: int, float, bool, NoneType, a word, a StrEnum, a Setting or a Notation."""
    default: Any
    """Its default; `dataclasses.MISSING` if it is required."""
    keyword_only: bool
    """Whether it needs its keyword."""

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING

    @property
    def type_text(self) -> str:
        """Its types as shown to users."""
        return " | ".join(_spell_kind(kind) for kind in self.kinds)

    @property
    def settings(self) -> dict[str, type[Setting]]:
        """The settings among its types, by name."""
        return {kind.name: kind for kind in self.kinds if _is_class(kind, Setting)}

    @property
    def notation(self) -> type[Notation] | None:
        """The one among its types that has a syntax of its own."""
        return next((kind for kind in self.kinds if _is_class(kind, Notation)), None)

    def convert(self, value: object, owner: str) -> object:
        """The value as this field stores it (25 as 25.0 for a float); other types are refused with a StrategyError."""
        for kind in self.kinds:
            matched, converted = _match(kind, value)
            if matched:
                return converted
        raise StrategyError(f"{owner}: {self.name} takes {self.type_text}, not {shown(value)}.{_why_not(self, value)}")

    def __str__(self) -> str:
        default = "" if self.required else f" = {spell_value(self.default)}"
        return f"{self.name}: {self.type_text}{default}"


def require(condition: bool, strategy: TextValue, field: str, value: object, why: str) -> None:
    """Refuse a value out of range; `why` says what it must be."""
    if not condition:
        raise StrategyError(f"{strategy.name}: {field} is {shown(value)}, but {why}.")


@functools.cache
def fields_of(cls: type[TextValue]) -> tuple[Field, ...]:
    """The arguments of a strategy or setting, in order; refuses a class that cannot be written as text."""
    where = f"{cls.__module__}.{cls.__qualname__}"
    if "__dataclass_params__" not in cls.__dict__:
        raise StrategyError(f"{where} is not a dataclass, so it takes no arguments. Add @dataclass(frozen=True).")
    if not is_word(cls.name):
        raise StrategyError(f"{where} is named {cls.name!r}, which cannot be written: names are plain identifiers.")
    try:
        hints = get_type_hints(cls)
    except (NameError, TypeError) as error:
        raise StrategyError(
            f"The types of {where}'s fields cannot be resolved: {error}. Import what they name at the top level "
            f"of its file, not under TYPE_CHECKING."
        ) from error
    # Keyword-only ones come last, as in the constructor, wherever a base declares them.
    fields = sorted((field for field in dataclasses.fields(cls) if field.init), key=lambda field: bool(field.kw_only))
    for field in fields:
        if field.name in _reserved(cls):
            raise StrategyError(f"{where} has a field {field.name!r}, a name that its base class uses. Rename it.")
    return tuple(_field(field, hints[field.name], where) for field in fields)


def signature(cls: type[TextValue], head: str | None = None) -> str:
    """Its signature as shown to users: `accumulate(steps: int)`."""
    inside = ", ".join(str(field) for field in fields_of(cls))
    return f"{head or cls.name}({inside})" if inside else head or cls.name


def spell_call(head: str, value: TextValue) -> str:
    """The shortest text that parses to this value: arguments that differ from their defaults."""
    arguments: list[str] = []
    positional = True
    for index, field in enumerate(fields_of(type(value))):
        argument = getattr(value, field.name)
        if not field.required and argument == field.default:
            positional = False
            continue
        # `allreduce(ring)` and `local(8)` explain themselves; `server(2)` does not.
        clear = field.required or (index == 0 and (value.first_alone or isinstance(argument, (str, Setting))))
        positional = positional and clear and not field.keyword_only
        text = spell_value(argument)
        arguments.append(text if positional else f"{field.name}={text}")
    return f"{head}({', '.join(arguments)})" if arguments else head


def spell_value(value: object) -> str:
    """An argument as text: names unquoted, numbers as Python writes them."""
    return str(value) if isinstance(value, (str, TextValue, Notation)) else repr(value)


def shown(value: object) -> str:
    """A value as quoted in messages, shortened."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return "a whole number beyond 64 bits"
    text = spell_value(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_word(text: str) -> bool:
    """Whether it can be written unquoted: a plain identifier that is not a Python keyword."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _reserved(cls: type[TextValue]) -> set[str]:
    """The attribute names of its bases that have no arguments (Strategy, Setting)."""
    bases = [base for base in cls.__mro__ if issubclass(base, TextValue) and not dataclasses.fields(base)]
    return {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}


def _field(field: dataclasses.Field[Any], hint: object, where: str) -> Field:
    kinds = tuple(_kinds(hint))
    for kind in kinds:
        _check_kind(kind, f"{where}.{field.name}")
    words = [word for kind in kinds for word in _words(kind)]
    if len(words) != len(set(words)):
        raise StrategyError(f"{where}.{field.name}: two of its alternatives have the same text, among {words}.")
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Field(field.name, kinds, default, bool(field.kw_only))


def _kinds(hint: object) -> list[Any]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if origin is Callable or hint is Callable:
        return []  # What a value with a syntax of its own may be made of.
    if origin is Literal:
        return [NoneType if value is None else value for value in get_args(hint)]
    return [hint]


def _check_kind(kind: Any, where: str) -> None:
    if isinstance(kind, type):
        plain = kind in (int, float, bool, NoneType)
        plain = plain or issubclass(kind, (Setting, Notation))
        writable = plain or (issubclass(kind, StrEnum) and all(map(is_word, kind)))
    else:
        writable = (isinstance(kind, str) and is_word(kind)) or type(kind) in (int, bool)
    if not writable:
        raise StrategyError(
            f"{where} has a type that cannot be written in a strategy's text: {kind!r}. Use int, float, bool, "
            f"None, Literal or StrEnum of plain words, a Setting, or a union of these."
        )


def _words(kind: Any) -> list[str]:
    """The names by which a kind is written."""
    if isinstance(kind, str):
        return [kind]
    if _is_class(kind, StrEnum):
        return [member.value for member in cast("type[StrEnum]", kind)]
    return [kind.name] if _is_class(kind, Setting) else []


def _match(kind: Any, value: object) -> tuple[bool, object]:
    """Whether a value is of this kind, and the value to store."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return number and isinstance(value, int) and -LARGEST <= value < LARGEST, value
    if kind is float:
        fits = number and abs(cast("float", value)) <= LARGEST if isinstance(value, int) else number
        return (True, float(cast("float", value))) if fits and math.isfinite(cast("float", value)) else (False, value)
    if not isinstance(kind, type):
        return type(value) is type(kind) and value == kind, value
    if issubclass(kind, StrEnum):
        matches = isinstance(value, str) and value in _words(kind)
        return matches, kind(value) if matches else value
    if issubclass(kind, Notation):
        made = value if isinstance(value, kind) else kind.of(value)
        return made is not None, made
    # A setting's subclass is another setting, with a name that is not among this field's types.
    return type(value) is kind, value


def _spell_kind(kind: Any) -> str:
    if _is_class(kind, Setting):
        return signature(kind)
    if _is_class(kind, StrEnum):
        return " | ".join(_words(kind))
    if _is_class(kind, Notation):
        return kind.syntax
    if kind is NoneType:
        return "None"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _is_class(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _why_not(field: Field, value: object) -> str:
    """A hint for common mistakes."""
    if isinstance(value, bool) and int in field.kinds:
        return " True and False are not numbers."
    if isinstance(value, float) and float in field.kinds:
        return " It must be finite."
    return ""
