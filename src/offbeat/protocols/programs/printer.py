"""The printer: from a term to text that the parser makes the same term of."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.protocols.programs.operations import (
    APPLICATION,
    ATOM,
    COMPARISON,
    OPERATIONS,
    POWER,
    RESERVED,
    UNARY,
)
from offbeat.protocols.programs.recursion import Call, run
from offbeat.protocols.programs.term import (
    Abstraction,
    Application,
    BoundVariable,
    Let,
    Number,
    Primitive,
    Term,
    TupleTerm,
    Variable,
    arguments_of,
    free_variables,
)

Path = tuple[int, ...]  # From a term to one below it: the number of the child at each node.


def show(term: Term) -> str:
    """The text of a term."""
    return marked(term, None)[0]


def marked(term: Term, path: Path | None) -> tuple[str, int, int]:
    """The text of a term, and from which to which character the subterm at the path is."""
    printer = _Printer(term, path)
    run(printer.write(term, 0, (), ()))
    return "".join(printer.pieces), *printer.span


def number_text(value: float) -> str:
    """A number as short as it can be read back."""
    text = repr(value)
    return text[:-2] if text.endswith(".0") else text


class _Printer:
    """Writes pieces from left to right."""

    def __init__(self, term: Term, path: Path | None) -> None:
        self.pieces: list[str] = []
        self.length = 0
        self.path, self.span = path, (0, 0)
        self.free = free_variables(term)

    def put(self, text: str) -> None:
        self.pieces.append(text)
        self.length += len(text)

    def write(self, term: Term, precedence: int, names: Sequence[str], path: Path | None) -> Call[None]:
        """Write a term, in brackets if it binds less tightly than the precedence; names are those of binders around."""
        inner = _precedence(term)
        if inner < precedence:
            self.put("(")
        start = self.length
        # What lies off the way to the marked term need not know where it is.
        here = path if path is not None and self.path is not None and self.path[: len(path)] == path else None
        yield self.node(term, inner, tuple(names), here)
        if here is not None and here == self.path:
            self.span = (start, self.length)
        if inner < precedence:
            self.put(")")

    def node(self, term: Term, inner: int, names: tuple[str, ...], path: Path | None) -> Call[None]:
        def below(*steps: int) -> Path | None:
            return None if path is None else (*path, *steps)

        match term:
            case Variable(name=name):
                self.put(name)
            case BoundVariable(index=index):
                self.put(names[-1 - index] if index < len(names) else f"#{index - len(names)}")
            case Number(value=value):
                self.put(number_text(value))
            case Primitive(operation=operation):
                self.put(f"({operation.name})" if operation.infix else operation.name)
            case Abstraction():
                yield self.function(term, "\\", ". ", names, path)
            case Let():
                name = self.fresh(term.name, term.body, names)
                self.put(f"let {name} = ")
                yield self.write(term.value, 0, names, below(0))
                self.put(" in ")
                yield self.write(term.body, 0, (*names, name), below(1))
            case TupleTerm():
                self.put("(")
                for number, item in enumerate(term.children):
                    self.put(", " if number else "")
                    yield self.write(item, 0, names, below(number))
                self.put(")")
            case Application():
                yield self.application(term, inner, names, path)
            case _:
                raise TypeError(type(term).__name__)

    def function(self, term: Term, before: str, after: str, names: tuple[str, ...], path: Path | None) -> Call[None]:
        """Write functions of functions as one with several arguments, unless the mark is on one in between."""
        self.put(before)
        separator = ""
        while isinstance(term, Abstraction):
            name = self.fresh(term.name, term.body, names)
            self.put(separator + name)
            separator, names, term = " ", (*names, name), term.body
            path = None if path is None else (*path, 0)
            if path is not None and path == self.path:
                break
        self.put(after)
        yield self.write(term, 0, names, path)

    def application(self, term: Application, inner: int, names: tuple[str, ...], path: Path | None) -> Call[None]:
        def below(*steps: int) -> Path | None:
            return None if path is None else (*path, *steps)

        operation = term.operation
        if operation is not None and operation.infix and not term.missing:
            left, right = arguments_of(term)
            power = operation.name == "**"
            sides = (APPLICATION, UNARY) if power else (inner + (inner == COMPARISON), inner + 1)
            yield self.write(left, sides[0], names, below(0, 1))
            self.put(f" {operation.name} ")
            yield self.write(right, sides[1], names, below(1))
            return
        if inner == UNARY:
            self.put("-")
            yield self.write(term.argument, UNARY, names, below(1))
            return
        yield self.write(term.function, APPLICATION, names, below(0))
        self.put(" ")
        # A tuple needs a second bracket here: `f (a, b)` would be `f a b`.
        double = isinstance(term.argument, TupleTerm)
        self.put("(" if double else "")
        yield self.write(term.argument, ATOM, names, below(1))
        self.put(")" if double else "")

    def fresh(self, hint: str, body: Term, names: tuple[str, ...]) -> str:
        """The hint, or with primes, so that it hides no name that the body uses."""
        taken = set(names) | self.free | RESERVED
        if hint not in taken:
            return hint
        used = set(RESERVED) | free_variables(body) | _outer_names(body, names)
        while hint in used:
            hint += "'"
        return hint


def _outer_names(body: Term, names: tuple[str, ...]) -> set[str]:
    """The names of binders around a binder that its body refers to."""
    used: set[str] = set()
    todo, seen = [(body, 1)], set[tuple[int, int]]()
    while todo:
        node, around = todo.pop()
        if node.loose <= around or (id(node), around) in seen:
            continue
        seen.add((id(node), around))
        if isinstance(node, BoundVariable) and node.index - around < len(names):
            used.add(names[around - node.index - 1])
        todo.extend((child, around + node.binders(number)) for number, child in enumerate(node.children))
    return used


def _precedence(term: Term) -> int:
    match term:
        case Abstraction() | Let():
            return 0
        case Number(value=value):
            return UNARY if repr(value).startswith("-") else ATOM
        case Application(operation=operation, missing=0) if operation is not None and operation.infix:
            return POWER if operation is OPERATIONS["**"] else operation.infix
        case Application(function=Primitive(operation=operation), argument=argument) if operation.name == "neg":
            positive = isinstance(argument, Number) and not repr(argument.value).startswith("-")
            return APPLICATION if positive else UNARY  # `-2` is a number.
        case Application():
            return APPLICATION
        case _:
            return ATOM
