"""Terms of the language for servers: the lambda calculus with numbers, `let`, tuples and primitive operations.

Inside, bound variables are de Bruijn indices: how many binders lie between a variable and its own. So terms that differ
only in the names of bound variables are equal, and substitution cannot capture. Outside, they have names again:
binders keep the name they were written with as a hint for the printer. Terms are immutable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from offbeat.errors import ProgramError
from offbeat.protocols.programs.operations import OPERATIONS, RESERVED, Operation

Position = tuple[int, int]  # Line and column, both from 1.
LARGEST: Final = 20_000
"""Nodes of a term."""


class Term:
    """A term. Two terms are equal if they differ at most in the names of bound variables."""

    __slots__ = ("at", "children", "depth", "key", "loose", "redex", "reducible", "size", "weak")

    children: tuple[Term, ...]
    """The terms below it."""
    at: Position | None
    """Where it starts in the text it was parsed from."""
    size: int
    """Nodes in it."""
    depth: int
    """Nodes on the longest way down."""
    loose: int
    """How many binders it lacks: 0 if all of its indices are bound in it."""
    key: int
    """A hash of its structure."""
    redex: bool
    """Whether a rule applies to the term itself."""
    reducible: bool
    """Whether a rule applies somewhere in it."""
    weak: bool
    """Whether a rule applies somewhere in it outside of abstractions."""

    def __init__(self, children: tuple[Term, ...], label: object, at: Position | None) -> None:
        size = depth = loose = 0
        keys: list[object] = [label]
        reducible = weak = False
        for child in children:
            size += child.size
            depth = max(depth, child.depth)
            loose = max(loose, child.loose)
            reducible = reducible or child.reducible
            weak = weak or child.weak
            keys.append(child.key)
        self.children, self.at, self.key = children, at, hash(tuple(keys))
        self.size, self.depth, self.loose = size + 1, depth + 1, loose
        self.redex, self.reducible, self.weak = False, reducible, weak

    def binders(self, child: int) -> int:
        """How many variables this node binds in a child."""
        del child
        return 0

    def rebuilt(self, children: Sequence[Term]) -> Term:
        """The same node with other children."""
        del children
        return self

    def same_node(self, other: Term) -> bool:
        """Whether the other node is the same but for its children."""
        return type(self) is type(other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Term):
            return NotImplemented
        pairs: list[tuple[Term, Term]] = [(self, other)]
        seen: set[tuple[int, int]] = set()
        while pairs:
            a, b = pairs.pop()
            if a is b or (id(a), id(b)) in seen:
                continue
            if a.key != b.key or a.size != b.size or not a.same_node(b) or len(a.children) != len(b.children):
                return False
            seen.add((id(a), id(b)))
            pairs.extend(zip(a.children, b.children, strict=True))
        return True

    def __hash__(self) -> int:
        return self.key

    def __repr__(self) -> str:
        from offbeat.protocols.programs.printer import show

        return f"parse({show(self)!r})"


class Variable(Term):
    """A free variable, by name."""

    __slots__ = ("name",)

    def __init__(self, name: str, at: Position | None = None) -> None:
        if name in RESERVED:
            raise ProgramError(f"{name!r} cannot be the name of a variable: the language has it as a word.", at)
        super().__init__((), ("variable", name), at)
        self.name = name

    def same_node(self, other: Term) -> bool:
        """Whether it has the same name."""
        return isinstance(other, Variable) and other.name == self.name


class BoundVariable(Term):
    """A bound variable: 0 is that of the nearest binder around it."""

    __slots__ = ("index",)

    def __init__(self, index: int, at: Position | None = None) -> None:
        super().__init__((), ("bound", index), at)
        self.index = index
        self.loose = index + 1

    def same_node(self, other: Term) -> bool:
        """Whether it has the same index."""
        return isinstance(other, BoundVariable) and other.index == self.index


class Number(Term):
    """A number: finite, 64 bits."""

    __slots__ = ("value",)

    def __init__(self, value: float, at: Position | None = None) -> None:
        if not math.isfinite(value):
            raise ProgramError(f"{value} is not a number that a program can hold: it must be finite.", at)
        super().__init__((), ("number", repr(float(value))), at)
        self.value = float(value)

    def same_node(self, other: Term) -> bool:
        """Whether it has the same value; 0 and -0 differ, because their inverses do."""
        return isinstance(other, Number) and repr(other.value) == repr(self.value)


class Primitive(Term):
    """A primitive operation, as a function."""

    __slots__ = ("operation",)

    def __init__(self, name: str, at: Position | None = None) -> None:
        super().__init__((), ("primitive", name), at)
        self.operation = OPERATIONS[name]

    def same_node(self, other: Term) -> bool:
        """Whether it is the same operation."""
        return isinstance(other, Primitive) and other.operation is self.operation


class Abstraction(Term):
    r"""A function of one argument: `\name. body`."""

    __slots__ = ("name",)

    def __init__(self, name: str, body: Term, at: Position | None = None) -> None:
        super().__init__((body,), "abstraction", at)
        self.name = name
        self.loose = max(0, body.loose - 1)
        self.weak = False

    @property
    def body(self) -> Term:
        """What it returns; index 0 in it is the argument."""
        return self.children[0]

    def binders(self, child: int) -> int:
        """One, in the body."""
        del child
        return 1

    def rebuilt(self, children: Sequence[Term]) -> Term:
        """The same binder with another body."""
        return Abstraction(self.name, children[0], self.at)


class Application(Term):
    """A function applied to an argument: `function argument`."""

    __slots__ = ("missing", "numbers", "operation")

    operation: Operation | None
    """The primitive operation whose argument this is, if it is one's."""
    missing: int
    """How many more arguments that operation takes."""
    numbers: tuple[bool, ...]
    """Which of its arguments so far are numbers."""

    def __init__(self, function: Term, argument: Term, at: Position | None = None) -> None:
        # What `Term` does, without a loop: most of the nodes that a reduction makes are applications.
        self.children, self.at = (function, argument), at
        self.size = function.size + argument.size + 1
        self.depth = 1 + (function.depth if function.depth > argument.depth else argument.depth)
        self.loose = function.loose if function.loose > argument.loose else argument.loose
        self.key = hash((function.key, argument.key))
        self.reducible = function.reducible or argument.reducible
        self.weak = function.weak or argument.weak
        self.operation, self.missing, self.numbers = None, 0, ()
        if isinstance(function, Primitive):
            self.operation, self.missing = function.operation, function.operation.arguments - 1
            self.numbers = (isinstance(argument, Number),)
        elif isinstance(function, Application) and function.missing:
            self.operation, self.missing = function.operation, function.missing - 1
            self.numbers = (*function.numbers, isinstance(argument, Number))
        self.redex = isinstance(function, Abstraction) or self._computes()
        if self.redex:
            self.reducible = self.weak = True

    def _computes(self) -> bool:
        if self.operation is None or self.missing or self.operation.reduces:
            return False
        return all(self.numbers) or (self.operation.name == "where" and self.numbers[0])

    @property
    def function(self) -> Term:
        """What is applied."""
        return self.children[0]

    @property
    def argument(self) -> Term:
        """What it is applied to."""
        return self.children[1]

    def rebuilt(self, children: Sequence[Term]) -> Term:
        """Another application."""
        return Application(children[0], children[1], self.at)


class Let(Term):
    r"""A named value: `let name = value in body`, which means `(\name. body) value`."""

    __slots__ = ("name",)

    def __init__(self, name: str, value: Term, body: Term, at: Position | None = None) -> None:
        super().__init__((value, body), "let", at)
        self.name = name
        self.loose = max(value.loose, body.loose - 1)
        self.redex = self.reducible = self.weak = True

    @property
    def value(self) -> Term:
        """What is named."""
        return self.children[0]

    @property
    def body(self) -> Term:
        """Where the name holds; index 0 in it is the value."""
        return self.children[1]

    def binders(self, child: int) -> int:
        """One, in the body."""
        return child

    def rebuilt(self, children: Sequence[Term]) -> Term:
        """The same name for another value in another body."""
        return Let(self.name, children[0], children[1], self.at)


class TupleTerm(Term):
    """Several results of a program: `(a, b)`. Nothing takes a tuple apart."""

    __slots__ = ()

    def __init__(self, items: tuple[Term, ...], at: Position | None = None) -> None:
        super().__init__(items, "tuple", at)

    def rebuilt(self, children: Sequence[Term]) -> Term:
        """Another tuple."""
        return TupleTerm(tuple(children), self.at)


def apply(function: Term, *arguments: Term) -> Term:
    """A function applied to arguments, one after the other."""
    for argument in arguments:
        function = Application(function, argument, function.at)
    return function


def operate(name: str, *arguments: Term) -> Term:
    """A primitive operation applied to arguments."""
    return apply(Primitive(name), *arguments)


def arguments_of(term: Application) -> list[Term]:
    """All arguments of the leftmost function in a chain of applications, in order."""
    arguments: list[Term] = []
    node: Term = term
    while isinstance(node, Application):
        arguments.append(node.argument)
        node = node.function
    return arguments[::-1]


def nodes(term: Term) -> Iterator[Term]:
    """Every node of a term from left to right, each shared part once."""
    todo, seen = [term], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        todo.extend(reversed(node.children))


def free_variables(term: Term) -> frozenset[str]:
    """The names of the free variables of a term."""
    return frozenset(node.name for node in nodes(term) if isinstance(node, Variable))


def bound_variables(term: Term) -> frozenset[str]:
    """The names of the variables that a term binds, as they were written."""
    return frozenset(node.name for node in nodes(term) if isinstance(node, Abstraction | Let))


def rewrite(
    term: Term,
    leaf: Callable[[Term, int], Term],
    untouched: Callable[[Term, int], bool] | None = None,
    largest: int = LARGEST,
) -> Term:
    """A term with its leaves replaced, given each leaf and how many binders of the term are around it."""
    results: list[Term] = []
    todo: list[tuple[Term, int, bool]] = [(term, 0, False)]
    while todo:
        node, around, ready = todo.pop()
        if ready:
            count = len(node.children)
            children = results[-count:]
            del results[-count:]
            results.append(_bounded(node.rebuilt(children), largest))
        elif untouched is not None and untouched(node, around):
            results.append(node)
        elif not node.children:
            results.append(leaf(node, around))
        else:
            todo.append((node, around, True))
            todo.extend(
                (node.children[number], around + node.binders(number), False)
                for number in range(len(node.children) - 1, -1, -1)
            )
    return results[0]


def _bounded(term: Term, largest: int) -> Term:
    if term.size > largest:
        raise ProgramError(
            f"The term grows beyond {largest:,} nodes, the limit of its size, so its reduction was stopped. "
            "Use an argument that is large fewer times, or name it with `let`."
        )
    return term


def raised(term: Term, by: int) -> Term:
    """A term as it reads under so many more binders: its loose indices grow."""
    if by == 0 or term.loose == 0:
        return term

    def leaf(node: Term, around: int) -> Term:
        return (
            BoundVariable(node.index + by, node.at)
            if isinstance(node, BoundVariable) and node.index >= around
            else node
        )

    return rewrite(term, leaf, lambda node, around: node.loose <= around, largest=term.size)


def opened(body: Term, value: Term, largest: int = LARGEST) -> Term:
    r"""The body of a binder with a value in place of its variable, which is what `(\x. body) value` becomes."""

    def leaf(node: Term, around: int) -> Term:
        if not isinstance(node, BoundVariable) or node.index < around:
            return node
        return raised(value, around) if node.index == around else BoundVariable(node.index - 1, node.at)

    return _bounded(rewrite(body, leaf, lambda node, around: node.loose <= around, largest), largest)


def closed_over(name: str, body: Term) -> Term:
    """A body whose free variable of this name is index 0, as it stands under a binder of the name."""

    def leaf(node: Term, around: int) -> Term:
        if isinstance(node, Variable) and node.name == name:
            return BoundVariable(around, node.at)
        return (
            BoundVariable(node.index + 1, node.at) if isinstance(node, BoundVariable) and node.index >= around else node
        )

    return rewrite(body, leaf)


def function_of(names: Sequence[str], body: Term, at: Position | None = None) -> Term:
    r"""The function `\names. body` of variables that are free in the body."""
    for name in reversed(names):
        body = Abstraction(name, closed_over(name, body), at)
    return body


def substitute(term: Term, name: str, value: Term) -> Term:
    """A term with a value in place of a free variable; no binder of the term captures a free variable of the value."""

    def leaf(node: Term, around: int) -> Term:
        return raised(value, around) if isinstance(node, Variable) and node.name == name else node

    return _bounded(rewrite(term, leaf), LARGEST)
