"""Reference pages of strategies, read off their classes, so that no page can say what the code does not."""

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
    """The keyword it is written with."""
    type: str
    """What it may be, such as `int` or `ring | tree`."""
    default: str | None
    """How its default is written; None if it must be given."""
    doc: str
    """What it means: the string under the field, on one line."""


@dataclass(frozen=True)
class Description:
    """All that there is to say about one strategy."""

    name: str
    """How it is called."""
    axis: Axis
    """What it decides."""
    summary: str
    """One line."""
    docs: str
    """The rest of its docstring; often empty."""
    signature: str
    """How it is written, with all arguments and their types."""
    fields: tuple[FieldDescription, ...]
    """Its arguments, in order."""
    settings: Mapping[str, tuple[FieldDescription, ...]]
    """The arguments of the settings that may stand in its brackets, by the setting's name."""
    traits: Traits
    """What it promises with the default arguments."""
    aliases: Mapping[str, str]
    """Other names for it, and what they stand for."""
    examples: tuple[str, ...]
    """Texts to start from."""


def describe(name: str) -> Description:
    """The reference page of a strategy, by its name, one of its aliases, or where it is defined (`mine.py:Push`)."""
    return _description(_find(name))


def overview() -> list[Description]:
    """The reference pages of all strategies that can be named."""
    return [_description(cls) for cls in available().values()]


def _find(name: str) -> type[Strategy]:
    if ":" in name:
        source = read(name)
        reference = source.reference_at(source.body)
        if reference is not None:
            return find_class(reference)
    known = available()
    # An alias may stand for a sum; its page is that of the strategy that declares it.
    owners = (cls for cls in known.values() if name in cls.aliases and name not in known)
    return next(owners, None) or lookup(name)


def _description(cls: type[Strategy]) -> Description:
    summary = cls.summary()
    text = inspect.cleandoc(cls.__doc__ or "")
    settings = [setting for field in fields_of(cls) for setting in field.settings.values()]
    return Description(
        name=cls.name,
        axis=cls.axis,
        summary=summary,
        docs=text.removeprefix(summary).strip() if summary else "",
        signature=signature(cls),
        fields=_fields(cls),
        settings={setting.name: _fields(setting) for setting in settings},
        traits=_traits(cls),
        aliases=dict(cls.aliases),
        examples=cls.examples,
    )


def _traits(cls: type[Strategy]) -> Traits:
    """What it promises by default; where that hangs on its arguments and one must be given, nothing is promised."""
    traits = inspect.getattr_static(cls, "traits")
    if isinstance(traits, Traits):  # Set on the class, which hides the property.
        return traits
    if traits is Strategy.traits:
        return cls.promises
    return Traits() if any(field.required for field in fields_of(cls)) else cls().traits


def _fields(cls: type[TextValue]) -> tuple[FieldDescription, ...]:
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _field_docs(base)
    return tuple(
        FieldDescription(
            field.name,
            field.type_text,
            None if field.required else spell_value(field.default),
            docs.get(field.name, ""),
        )
        for field in fields_of(cls)
    )


def _field_docs(cls: type) -> dict[str, str]:
    """The string literals under a class's fields, which Python itself throws away."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        # Built in, made by hand, or its file is gone: it works, and has no lines to show.
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for one, below in itertools.pairwise(body):
        match one, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found
