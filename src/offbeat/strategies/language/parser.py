"""Strategies as text: `server(shards=2, consistency=ssp(3)) + topk(0.01)`.

Text is parsed by Python's own parser and read off the tree, never evaluated. One rule: values are names, numbers
and calls, never quoted. A call without arguments needs no brackets, `+` joins parts, and a set means a sweep.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import unquote

from offbeat.errors import StrategyError, TaskError, did_you_mean
from offbeat.limits import SWEEP
from offbeat.protocols.expressions import ClassReference, ParsedText, read
from offbeat.strategies._base import Strategy, add, verify
from offbeat.strategies.language.fields import Field, TextValue, fields_of, is_word, shown, signature
from offbeat.strategies.language.registry import BUILT_IN, resolve
from offbeat.task import load_module

Registry = Mapping[str, type[Strategy]]
"""Strategies by name, in the place of all that are known."""

_W = TypeVar("_W", bound=TextValue)


def parse(text: str, registry: Registry | None = None) -> Strategy:
    """The strategy that a text means; a set, which means several, is refused."""
    return _parse(text, registry, frozenset())


def parse_built_in(text: str) -> Strategy:
    """The strategy that a text means, where it names only ours; anything else is refused, and nothing is imported.

    For text from a file that somebody else may have written: `parse` would run the code of the module it names.
    """
    source = read(text)
    if source.references:
        own = next(iter(source.references.values()))
        raise StrategyError(f"{own.source}:{own.cls} is not a strategy of offbeat's own, and is not imported here.")
    return parse(text, {cls.name: cls for cls in BUILT_IN})


def expand(text: str, registry: Registry | None = None) -> list[Strategy]:
    """The strategies that a text means: one for each choice from its sets, the last set varying fastest."""
    source = read(text)
    sets = _sets(source)
    count = math.prod(len(node.elts) for node in sets)
    if count > SWEEP:
        raise StrategyError(
            f"This sweep means {count:,} strategies; {SWEEP:,} are allowed. Take values out of its sets."
        )
    found: dict[Strategy, None] = {}
    for chosen in itertools.product(*(node.elts for node in sets)):
        choices = {node.col_offset: value for node, value in zip(sets, chosen, strict=True)}
        found[_Reader(source, registry, choices=choices).sum()] = None
    return list(found)


def find_class(reference: ClassReference) -> type[Strategy]:
    """The class that `mine.py:Push` or `package.module:Push` means."""
    module = _load(reference.source)
    found = getattr(module, reference.cls, None)
    if inspect.isclass(found) and issubclass(found, Strategy) and found is not Strategy:
        verify(found)
        return found
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Strategy) and value.__module__ == module.__name__
    ]
    what = "is not an offbeat Strategy" if hasattr(module, reference.cls) else "does not exist"
    raise StrategyError(f"{reference.cls!r} {what} in {reference.source}.{did_you_mean(reference.cls, own)}")


def _parse(text: str, registry: Registry | None, inside: frozenset[str]) -> Strategy:
    source = read(text)
    sets = _sets(source)
    if sets:
        raise source.error(
            sets[0],
            f"{source.piece(sets[0])} is a set, and a set means a sweep. Sweeps belong to `compare`; give one value.",
        )
    return _Reader(source, registry, inside).sum()


def _load(source: str) -> ModuleType:
    try:
        return load_module(source)
    except TaskError as error:
        # `str` escapes what would end a path in a strategy's text; a file really called so comes first.
        plain = unquote(source, errors="surrogateescape")
        if plain != source:
            return _load(plain)
        raise StrategyError(str(error)) from error
    except Exception as error:  # whatever people's own module raises while it is imported
        raise StrategyError(f"{source} cannot be imported: {type(error).__name__}: {error}.") from error


def _sets(source: ParsedText) -> list[ast.Set]:
    """The sets of a text, from left to right; a set inside a set is refused."""
    found = [node for node in ast.walk(source.body) if isinstance(node, ast.Set)]
    for node in found:
        inner = [child for child in ast.walk(node) if isinstance(child, ast.Set) and child is not node]
        if inner:
            raise source.error(
                inner[0], f"{source.piece(inner[0])} is a set inside a set. Write one set of all values."
            )
    return sorted(found, key=lambda node: node.col_offset)


def _called(node: ast.expr) -> ast.expr:
    """What is called: `local` in `local(8)` and in `local`."""
    return node.func if isinstance(node, ast.Call) else node


@dataclass(frozen=True)
class _Reader:
    """Reads a parsed text off its tree."""

    source: ParsedText
    registry: Registry | None
    inside: frozenset[str] = frozenset()
    """The aliases that are being read, so that one that means itself is found out."""
    choices: Mapping[int, ast.expr] = field(default_factory=dict[int, ast.expr])
    """The value that stands for each set, by the set's column."""

    def sum(self) -> Strategy:
        """A sum of parts, or a single one."""
        parts = [self._part(term) for term in self.source.terms()]
        return parts[0] if len(parts) == 1 else add(parts)

    def _part(self, node: ast.expr) -> Strategy:
        named = _called(node)
        if not isinstance(named, ast.Name):
            raise self.source.refused(node)
        reference = self.source.reference_at(named)
        if reference is not None:
            try:
                own = find_class(reference)
            except StrategyError as error:
                raise self.source.error(named, str(error)) from error
            return self._build(own, node, f"{reference.source}:{reference.cls}")
        return self._named(named.id, node)

    def _named(self, name: str, node: ast.expr, through: frozenset[str] = frozenset()) -> Strategy:
        try:
            found = resolve(name, self.registry)
        except StrategyError as error:
            raise self.source.error(_called(node), str(error)) from error
        if not isinstance(found, str):
            return self._build(found, node, name)
        if name in self.inside | through:
            raise self.source.error(node, f"The alias {name!r} means itself, so it means nothing.")
        if is_word(found):
            return self._named(found, node, through | {name})
        if isinstance(node, ast.Call) and (node.args or node.keywords):
            raise self.source.error(
                node,
                f"{name!r} stands for `{found}` and takes no arguments. Write that out, and change it.",
            )
        return _parse(found, self.registry, self.inside | through | {name})

    def _build(self, cls: type[_W], node: ast.expr, head: str) -> _W:
        arguments = self._arguments(cls, node, head)
        try:
            return cls(**arguments)
        except StrategyError as error:
            raise self.source.error(node, str(error)) from error
        except Exception as error:  # whatever people's own class raises
            raise self.source.error(node, f"{head} refuses: {type(error).__name__}: {error}.") from error

    def _arguments(self, cls: type[TextValue], node: ast.expr, head: str) -> dict[str, Any]:
        fields = {f.name: f for f in fields_of(cls)}
        given: dict[str, Any] = {}
        positional = [f for f in fields.values() if not f.keyword_only]
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        for index, value in enumerate(call.args):
            if isinstance(value, ast.Starred):
                raise self.source.refused(value)
            if index >= len(positional):
                raise self.source.error(value, f"Too many arguments: {signature(cls, head)}.")
            given[positional[index].name] = self._value(value, positional[index], head)
        for argument in call.keywords:
            if argument.arg is None:
                raise self.source.refused(argument)
            if argument.arg not in fields:
                names = did_you_mean(argument.arg, fields)
                raise self.source.error(
                    argument, f"{head} has no argument {shown(argument.arg)!r}.{names} It is {signature(cls, head)}."
                )
            if argument.arg in given:
                raise self.source.error(argument, f"{argument.arg!r} is given twice: {signature(cls, head)}.")
            given[argument.arg] = self._value(argument.value, fields[argument.arg], head)
        missing = [f.name for f in fields.values() if f.required and f.name not in given]
        if missing:
            raise self.source.error(node, f"{head} needs {', '.join(missing)}: {signature(cls, head)}.")
        return given

    def _value(self, node: ast.expr, field: Field, head: str) -> object:
        if isinstance(node, ast.Set):
            node = self.choices[node.col_offset]
        named = _called(node)
        if isinstance(named, ast.Name) and self.source.reference_at(named) is None:
            if named.id in field.settings:
                return self._build(field.settings[named.id], node, named.id)
            if isinstance(node, ast.Call):
                raise self.source.error(node, self._wrong_call(named.id, field, head))
            value: object = named.id
        else:
            value = self.source.constant(node)
        try:
            return field.convert(value, head)
        except StrategyError as error:
            raise self.source.error(node, str(error)) from error

    def _wrong_call(self, name: str, field: Field, head: str) -> str:
        wrong = f"{head}: {field.name} takes {field.type_text}, not {shown(name)}(...)."
        try:
            resolve(name, self.registry)
        except StrategyError:
            return wrong + (did_you_mean(name, field.settings) if field.settings else "")
        return f"{wrong} Strategies do not stand inside each other; join them with `+`."
