"""Parses strategies from text: `server(shards=2, consistency=ssp(3)) + topk(0.01)`.

Text is parsed by Python's `ast` and never evaluated. One rule: values are names, numbers and calls, never quoted. A
call without arguments needs no brackets, `+` joins parts, and a set means a sweep.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
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
"""Strategies by name, in place of all known ones."""

_W = TypeVar("_W", bound=TextValue)


def parse(text: str, registry: Registry | None = None) -> Strategy:
    """The strategy that a text denotes; sets, which denote several, are refused."""
    return _parse(text, registry, frozenset())


def parse_built_in(text: str) -> Strategy:
    """The strategy that a text denotes, if it names only built-in ones; others are refused, and nothing is imported.

    For text from untrusted files: `parse` would run the code of the module that it names.
    """
    source = read(text)
    if source.references:
        reference = next(iter(source.references.values()))
        raise StrategyError(f"{reference.source}:{reference.cls} is not built into offbeat, and is not imported here.")
    if source.files:
        raise StrategyError(f"{source.files[0]} is a file of yours, and is not read here.")
    return parse(text, {cls.name: cls for cls in BUILT_IN})


def expand(text: str, registry: Registry | None = None) -> list[Strategy]:
    """The strategies that a text denotes: one for each choice from its sets, the last set varying fastest."""
    source = read(text)
    sets = _sets(source)
    count = math.prod(len(node.elts) for node in sets)
    if count > SWEEP:
        raise StrategyError(
            f"This sweep means {count:,} strategies; {SWEEP:,} are allowed. Take values out of its sets."
        )
    strategies: dict[Strategy, None] = {}
    for values in itertools.product(*(node.elts for node in sets)):
        choices = {node.col_offset: value for node, value in zip(sets, values, strict=True)}
        strategies[_Reader(source, registry, choices=choices).sum()] = None
    return list(strategies)


def find_class(reference: ClassReference) -> type[Strategy]:
    """The class that `mine.py:Push` or `package.module:Push` refers to."""
    module = _load(reference.source)
    classes = {name: cls for name, cls in vars(module).items() if inspect.isclass(cls) and issubclass(cls, Strategy)}
    cls = classes.get(reference.cls, Strategy)
    if cls is not Strategy:
        verify(cls)
        return cls
    own = [name for name, cls in classes.items() if cls.__module__ == module.__name__]
    what = "is not an offbeat Strategy" if hasattr(module, reference.cls) else "does not exist"
    raise StrategyError(f"{reference.cls!r} {what} in {reference.source}.{did_you_mean(reference.cls, own)}")


def _parse(text: str, registry: Registry | None, inside: frozenset[str]) -> Strategy:
    source = read(text)
    sets = _sets(source)
    if sets:
        wrong = (
            f"{source.piece(sets[0])} is a set, and a set means a sweep. Sweeps belong to `compare`; give one value."
        )
        raise source.error(sets[0], wrong)
    return _Reader(source, registry, inside).sum()


def _load(source: str) -> ModuleType:
    try:
        return load_module(source)
    except TaskError as error:
        # `str` escapes characters that would end a path; a file whose name really contains `%` comes first.
        plain = unquote(source, errors="surrogateescape")
        if plain != source:
            return _load(plain)
        raise StrategyError(str(error)) from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise StrategyError(f"{source} cannot be imported: {type(error).__name__}: {error}.") from error


def _sets(source: ParsedText) -> list[ast.Set]:
    """The sets of a text, from left to right; a set inside a set is refused."""
    sets = [node for node in ast.walk(source.body) if isinstance(node, ast.Set)]
    for inner in (
        child for node in sets for child in ast.walk(node) if isinstance(child, ast.Set) and child is not node
    ):
        raise source.error(inner, f"{source.piece(inner)} is a set inside a set. Write one set of all values.")
    return sorted(sets, key=lambda node: node.col_offset)


def _called(node: ast.expr) -> ast.expr:
    """What is called: `local` in `local(8)` and in `local`."""
    return node.func if isinstance(node, ast.Call) else node


@dataclass(frozen=True)
class _Reader:
    """Builds strategies from a syntax tree."""

    source: ParsedText
    registry: Registry | None
    inside: frozenset[str] = frozenset()
    """The aliases that are being expanded, to detect one that refers to itself."""
    choices: Mapping[int, ast.expr] = field(default_factory=dict[int, ast.expr])
    """The value chosen from each set, by the set's column."""

    def sum(self) -> Strategy:
        """A sum of parts, or a single one."""
        parts = [self._part(term) for term in self.source.terms()]
        return parts[0] if len(parts) == 1 else add(parts)

    @contextmanager
    def _at(self, node: ast.expr) -> Generator[None]:
        """Inside, a refusal points to this node."""
        try:
            yield
        except StrategyError as error:
            raise self.source.error(node, str(error)) from error

    def _part(self, node: ast.expr) -> Strategy:
        named = _called(node)
        if not isinstance(named, ast.Name):
            raise self.source.refused(node)
        reference = self.source.reference_at(named)
        if reference is not None:
            with self._at(named):
                cls = find_class(reference)
            return self._build(cls, node, f"{reference.source}:{reference.cls}")
        return self._named(named.id, node)

    def _named(self, name: str, node: ast.expr, through: frozenset[str] = frozenset()) -> Strategy:
        with self._at(_called(node)):
            meaning = resolve(name, self.registry)
        if not isinstance(meaning, str):
            return self._build(meaning, node, name)
        if name in self.inside | through:
            raise self.source.error(node, f"The alias {name!r} means itself, so it means nothing.")
        if is_word(meaning):
            return self._named(meaning, node, through | {name})
        if isinstance(node, ast.Call) and (node.args or node.keywords):
            wrong = f"{name!r} stands for `{meaning}` and takes no arguments. Write that out, and change it."
            raise self.source.error(node, wrong)
        return _parse(meaning, self.registry, self.inside | through | {name})

    def _build(self, cls: type[_W], node: ast.expr, head: str) -> _W:
        arguments = self._arguments(cls, node, head)
        try:
            return cls(**arguments)
        except StrategyError as error:
            raise self.source.error(node, str(error)) from error
        except Exception as error:  # whatever a user-defined class raises
            raise self.source.error(node, f"{head} refuses: {type(error).__name__}: {error}.") from error

    def _arguments(self, cls: type[TextValue], node: ast.expr, head: str) -> dict[str, Any]:
        fields = {f.name: f for f in fields_of(cls)}
        arguments: dict[str, Any] = {}
        positional = [f for f in fields.values() if not f.keyword_only]
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        for index, value in enumerate(call.args):
            if isinstance(value, ast.Starred):
                raise self.source.refused(value)
            if index >= len(positional):
                raise self.source.error(value, f"Too many arguments: {signature(cls, head)}.")
            arguments[positional[index].name] = self._value(value, positional[index], head)
        for keyword in call.keywords:
            name = keyword.arg
            if name is None:
                raise self.source.refused(keyword)
            if name not in fields:
                near = did_you_mean(name, fields)
                wrong = f"{head} has no argument {shown(name)!r}.{near} It is {signature(cls, head)}."
                raise self.source.error(keyword, wrong)
            if name in arguments:
                raise self.source.error(keyword, f"{name!r} is given twice: {signature(cls, head)}.")
            arguments[name] = self._value(keyword.value, fields[name], head)
        missing = [f.name for f in fields.values() if f.required and f.name not in arguments]
        if missing:
            raise self.source.error(node, f"{head} needs {', '.join(missing)}: {signature(cls, head)}.")
        return arguments

    def _value(self, node: ast.expr, field: Field, head: str) -> object:
        if isinstance(node, ast.Set):
            node = self.choices[node.col_offset]
        if field.notation is not None and not isinstance(node, ast.Constant):
            with self._at(node):
                return field.notation.read(self.source.written(node))
        named = _called(node)
        if isinstance(named, ast.Name) and self.source.reference_at(named) is None:
            if named.id in field.settings:
                return self._build(field.settings[named.id], node, named.id)
            if isinstance(node, ast.Call):
                raise self.source.error(node, self._wrong_call(named.id, field, head))
            value: object = named.id
        else:
            value = self.source.constant(node)
        with self._at(node):
            return field.convert(value, head)

    def _wrong_call(self, name: str, field: Field, head: str) -> str:
        wrong = f"{head}: {field.name} takes {field.type_text}, not {shown(name)}(...)."
        try:
            resolve(name, self.registry)
        except StrategyError:
            return wrong + (did_you_mean(name, field.settings) if field.settings else "")
        return f"{wrong} Strategies do not stand inside each other; join them with `+`."
