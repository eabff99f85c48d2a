"""What is written as `name(arguments)`: the fields of a strategy or setting, their types, and its text.

The types of the dataclass fields are the only description of the arguments. From them come the checks when a
value is made in Python, the reading of text (`_grammar`), the spelling (`str`) and the reference pages
(`_describe`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import math
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

from offbeat.errors import StrategyError
from offbeat.limits import BYTES, SERVERS

LARGEST: Final = 2**63
"""Whole numbers stay below it, as they do in the tensors and headers that carry them."""


@dataclass(frozen=True)
class TextValue:
    """A frozen dataclass that can be written as text: its name, and its arguments in brackets."""

    name: ClassVar[str]
    """How it is called in text; the class's name in lower case if none is given."""
    first_alone: ClassVar[bool] = False
    """Whether its first argument explains itself without its keyword, as in `topk(0.1)`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __post_init__(self) -> None:
        """Refuse values of the wrong type; whoever overrides this to check ranges calls it first."""
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            converted = field.convert(value, self.name)
            if converted is not value:
                object.__setattr__(self, field.name, converted)

    def __str__(self) -> str:
        return spell_call(self.name, self)


@dataclass(frozen=True)
class Setting(TextValue):
    """A value with arguments of its own, written inside a strategy's brackets, such as `ssp(3)`."""


@dataclass(frozen=True)
class Field:
    """One argument: its name, what it may be, and its default."""

    name: str
    """The keyword it is written with."""
    kinds: tuple[Any, ...]
    """The alternatives: int, float, bool, NoneType, a word, a StrEnum or a Setting."""
    default: Any
    """What it is when left out; `dataclasses.MISSING` if it must be given."""
    keyword_only: bool
    """Whether it needs its keyword."""

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING

    @property
    def type_text(self) -> str:
        """What it may be, for people."""
        return " | ".join(_spell_kind(kind) for kind in self.kinds)

    @property
    def settings(self) -> dict[str, type[Setting]]:
        """The settings that it may be, by name."""
        return {kind.name: kind for kind in self.kinds if _is_class(kind, Setting)}

    def convert(self, value: object, owner: str) -> object:
        """The value as this field keeps it (25 as 25.0 for a float); others are refused with a StrategyError."""
        for kind in self.kinds:
            matched, converted = _match(kind, value)
            if matched:
                return converted
        raise StrategyError(f"{owner}: {self.name} takes {self.type_text}, not {shown(value)}.{_why_not(self, value)}")

    def __str__(self) -> str:
        default = "" if self.required else f" = {spell_value(self.default)}"
        return f"{self.name}: {self.type_text}{default}"


def require(condition: bool, strategy: TextValue, field: str, value: object, why: str) -> None:
    """Refuse a value out of range, uniformly: `why` says what it must be, and the reason."""
    if not condition:
        raise StrategyError(f"{strategy.name}: {field} is {shown(value)}, but {why}.")


def require_bucket(strategy: TextValue, mebibytes: float) -> None:
    """Refuse a bucket that holds nothing, or more than any machine has."""
    require(mebibytes > 0, strategy, "bucket", mebibytes, "a bucket holds more than 0 MiB")
    require(mebibytes <= BYTES / 2**20, strategy, "bucket", mebibytes, "a bucket holds at most 1 PiB")


def require_servers(strategy: TextValue, shards: int, replicas: int) -> None:
    """Refuse numbers of servers that make no sense, or that would take a machine down."""
    require(shards >= 1, strategy, "shards", shards, "there is at least one server")
    require(replicas >= 0, strategy, "replicas", replicas, "a shard has 0 or more further copies")
    field, value = ("shards", shards) if shards > replicas else ("replicas", replicas)
    why = f"each of {shards * (1 + replicas):,} servers would be a process of its own: at most {SERVERS} are started"
    require(shards * (1 + replicas) <= SERVERS, strategy, field, value, why)


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
    # Those that need their keyword come last, as in the constructor, wherever a base has declared them.
    fields = sorted((field for field in dataclasses.fields(cls) if field.init), key=lambda field: bool(field.kw_only))
    for field in fields:
        if field.name in _reserved(cls):
            raise StrategyError(f"{where} has a field {field.name!r}, a name that all of its kind use. Rename it.")
    return tuple(_field(field, hints[field.name], where) for field in fields)


def signature(cls: type[TextValue], head: str | None = None) -> str:
    """How it is called, for people: `accumulate(steps: int)`."""
    inside = ", ".join(str(field) for field in fields_of(cls))
    return f"{head or cls.name}({inside})" if inside else head or cls.name


def spell_call(head: str, value: TextValue) -> str:
    """The shortest text that reads back as this value: arguments that differ from their defaults."""
    written: list[str] = []
    positional = True
    for index, field in enumerate(fields_of(type(value))):
        given = getattr(value, field.name)
        if not field.required and given == field.default:
            positional = False
            continue
        # `allreduce(ring)` and `local(8)` explain themselves; `server(2)` does not.
        clear = field.required or (index == 0 and (value.first_alone or isinstance(given, (str, Setting))))
        positional = positional and clear and not field.keyword_only
        text = spell_value(given)
        written.append(text if positional else f"{field.name}={text}")
    return f"{head}({', '.join(written)})" if written else head


def spell_value(value: object) -> str:
    """An argument as text: names unquoted, numbers as Python writes them."""
    return str(value) if isinstance(value, (str, TextValue)) else repr(value)


def shown(value: object) -> str:
    """A value as a message quotes it: never pages of it."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return "a whole number beyond 64 bits"
    text = spell_value(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_word(text: str) -> bool:
    """Whether it can stand for itself in text: a plain identifier that Python does not reserve."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _reserved(cls: type[TextValue]) -> set[str]:
    """The names that its bases without arguments (Strategy, Setting) use themselves."""
    bases = [base for base in cls.__mro__ if issubclass(base, TextValue) and not dataclasses.fields(base)]
    return {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}


def _field(field: dataclasses.Field[Any], hint: object, where: str) -> Field:
    kinds = tuple(_kinds(hint))
    for kind in kinds:
        _check_kind(kind, f"{where}.{field.name}")
    words = [word for kind in kinds for word in _words(kind)]
    if len(words) != len(set(words)):
        raise StrategyError(f"{where}.{field.name}: two of its alternatives are written alike, among {words}.")
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Field(field.name, kinds, default, bool(field.kw_only))


def _kinds(hint: object) -> list[Any]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if origin is Literal:
        return [NoneType if value is None else value for value in get_args(hint)]
    return [hint]


def _check_kind(kind: Any, where: str) -> None:
    if isinstance(kind, type):
        plain = kind in (int, float, bool, NoneType)
        writable = plain or issubclass(kind, Setting) or (issubclass(kind, StrEnum) and all(map(is_word, kind)))
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
    """Whether a value is of this kind, and how it is kept."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return number and isinstance(value, int) and -LARGEST <= value < LARGEST, value
    if kind is float:
        fits = number and abs(cast("float", value)) <= LARGEST if isinstance(value, int) else number
        return (True, float(cast("float", value))) if fits and math.isfinite(cast("float", value)) else (False, value)
    if not isinstance(kind, type):
        return type(value) is type(kind) and value == kind, value
    if issubclass(kind, StrEnum):
        found = isinstance(value, str) and value in _words(kind)
        return found, kind(value) if found else value
    # A setting's subclass is another setting, with a name that this field does not know.
    return type(value) is kind, value


def _spell_kind(kind: Any) -> str:
    if _is_class(kind, Setting):
        return signature(kind)
    if _is_class(kind, StrEnum):
        return " | ".join(_words(kind))
    if kind is NoneType:
        return "None"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _is_class(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _why_not(field: Field, value: object) -> str:
    """A further hint for the mistakes that are common."""
    if isinstance(value, bool) and int in field.kinds:
        return " True and False are not numbers."
    if isinstance(value, float) and float in field.kinds:
        return " It must be finite."
    return ""
