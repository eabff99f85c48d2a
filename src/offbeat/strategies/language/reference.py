"""Reference pages of strategies, generated from their classes."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.protocols.expressions import read
from offbeat.strategies._base import Axis, Strategy, Traits
from offbeat.strategies.language.fields import TextValue, fields_of, signature, spell_value
from offbeat.strategies.language.parser import find_class
from offbeat.strategies.language.registry import available, lookup


@dataclass(frozen=True)
class FieldDescription:
    """One argument of a strategy or setting."""

    name: str
    """Its keyword."""
    type: str
    """Its types, such as `int` or `ring | tree`."""
    default: str | None
    """Text of its default; None if it is required."""
    doc: str
    """The docstring under the field, on one line."""


@dataclass(frozen=True)
class Description:
    """The reference page of one strategy."""

    name: str
    """Its name in text."""
    axis: Axis
    """What it decides."""
    summary: str
    """One line."""
    docs: str
    """The rest of its docstring; often empty."""
    signature: str
    """Its name with all arguments and their types."""
    fields: tuple[FieldDescription, ...]
    """Its arguments, in order."""
    settings: Mapping[str, tuple[FieldDescription, ...]]
    """The arguments of the settings that it takes, by the setting's name."""
    traits: Traits
    """Its traits with default arguments."""
    aliases: Mapping[str, str]
    """Other names for it, and the text they stand for."""
    examples: tuple[str, ...]
    """Example texts."""


def describe(name: str) -> Description:
    """The reference page of a strategy, by its name, one of its aliases, or where it is defined (`mine.py:Push`)."""
    if ":" in name:
        source = read(name)
        reference = source.reference_at(source.body)
        if reference is not None:
            return _description(find_class(reference))
    known = available()
    # An alias may stand for a sum; its page is that of the strategy that declares it.
    owners = (cls for cls in known.values() if name in cls.aliases and name not in known)
    return _description(next(owners, None) or lookup(name))


def overview() -> list[Description]:
    """The reference pages of all strategies that can be named."""
    return [_description(cls) for cls in available().values()]


def _description(cls: type[Strategy]) -> Description:
    summary = cls.summary()
    text = inspect.cleandoc(cls.__doc__ or "")
    traits = inspect.getattr_static(cls, "traits")
    if traits is Strategy.traits:
        traits = cls.promises
    elif not isinstance(traits, Traits):  # A property that depends on arguments, not a value that hides it.
        traits = Traits() if any(field.required for field in fields_of(cls)) else cls().traits
    settings = [setting for field in fields_of(cls) for setting in field.settings.values()]
    return Description(
        name=cls.name,
        axis=cls.axis,
        summary=summary,
        docs=text.removeprefix(summary).strip() if summary else "",
        signature=signature(cls),
        fields=_fields(cls),
        settings={setting.name: _fields(setting) for setting in settings},
        traits=traits,
        aliases=dict(cls.aliases),
        examples=cls.examples,
    )


def _fields(cls: type[TextValue]) -> tuple[FieldDescription, ...]:
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _field_docs(base)
    return tuple(
        FieldDescription(f.name, f.type_text, None if f.required else spell_value(f.default), docs.get(f.name, ""))
        for f in fields_of(cls)
    )


def _field_docs(cls: type) -> dict[str, str]:
    """The string literals under a class's fields, which Python itself throws away."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}  # Built in, generated, or its file is gone.
    docs: dict[str, str] = {}
    for pair in itertools.pairwise(tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []):
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text))):
                docs[name] = " ".join(text.split())
            case _:
                pass
    return docs
