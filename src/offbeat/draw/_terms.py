"""Terms of the language for servers as trees: functions and applications above what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from offbeat.errors import ProgramError
from offbeat.monitor.diagram.shapes import Drawing, Drawn, Polyline, Rect, TextShape, dot, text_width
from offbeat.protocols.programs import Term, parse, show
from offbeat.protocols.programs.printer import Path, number_text
from offbeat.protocols.programs.term import (
    Abstraction,
    Application,
    BoundVariable,
    Let,
    Number,
    Primitive,
    TupleTerm,
    Variable,
)

MOST_NODES: Final = 400
"""Nodes of a tree that can still be read."""
_ACROSS, _DOWN, _MARGIN, _TOP = 34.0, 44.0, 30.0, 64.0


def term_picture(terms: Sequence[tuple[str, Term, Path | None]]) -> Drawing:
    """Trees side by side, each with a heading, and with the subterm at a path marked."""
    inside: list[Drawn] = []
    around: list[Drawn] = [TextShape(_MARGIN, 26, "Reduction", "title")]
    left, bottom = _MARGIN, _TOP
    for heading, term, path in terms:
        if term.size > MOST_NODES:
            raise ProgramError(
                f"A term of {term.size:,} nodes is too large to draw: {MOST_NODES} can still be read. Omit --draw."
            )
        # Printed and parsed again, variables have the names that the printed steps show.
        tree = _Tree(parse(show(term)), path, left)
        inside += [*tree.lines, *tree.shapes]
        around.append(TextShape(left, 48, heading, "words"))
        left = max(tree.right, left + text_width(heading, "words")) + _MARGIN
        bottom = max(bottom, tree.bottom)
    area = Rect(0, 0, left, bottom + _MARGIN, "paper")
    return Drawing(area.width, area.height, "Reduction", area, inside, around)


class _Tree:
    """One tree: leaves from left to right, every node above the middle of its children."""

    def __init__(self, term: Term, path: Path | None, left: float) -> None:
        self.lines: list[Drawn] = []
        self.shapes: list[Drawn] = []
        self.right, self.bottom = left, _TOP
        self.path = path
        centres: dict[Path, float] = {}
        for node, here, names in _children_first(term):
            y = _TOP + _DOWN * len(here) + 10
            below = [centres.pop((*here, number)) for number in range(len(node.children))]
            if below:
                x = (below[0] + below[-1]) / 2
            else:
                x = self.right + _ACROSS / 2
                self.right += max(_ACROSS, text_width(_label(node, names), "name") + 12)
            centres[here] = x
            self.lines += [Polyline(((x, y), (child, y + _DOWN)), "rail", closed=False) for child in below]
            self.node(node, here, names, x, y)

    def node(self, node: Term, here: Path, names: tuple[str, ...], x: float, y: float) -> None:
        marked = self.path is not None and here[: len(self.path)] == self.path
        if here == self.path:
            self.shapes.append(dot(x, y, 13, "mark", "the next step"))
        else:
            self.shapes.append(dot(x, y, 11, "later forward" if marked else "paper"))
        self.shapes.append(TextShape(x, y + 4, _label(node, names), "name", "middle"))
        self.bottom = max(self.bottom, y + 14)


def _children_first(term: Term) -> list[tuple[Term, Path, tuple[str, ...]]]:
    """All nodes, each after its children, with the path to it and the names of the binders around it."""
    order: list[tuple[Term, Path, tuple[str, ...]]] = []
    todo: list[tuple[Term, Path, tuple[str, ...]]] = [(term, (), ())]
    while todo:
        node, path, names = todo.pop()
        order.append((node, path, names))
        for number, child in enumerate(node.children):
            inner = (*names, node.name) if isinstance(node, Abstraction | Let) and node.binders(number) else names
            todo.append((child, (*path, number), inner))
    return order[::-1]


def _label(node: Term, names: tuple[str, ...]) -> str:
    match node:
        case Variable(name=name):
            return name
        case BoundVariable(index=index):
            return names[-1 - index]
        case Number(value=value):
            return number_text(value)
        case Primitive(operation=operation):
            return operation.name
        case Abstraction(name=name):
            return f"λ{name}"
        case Let(name=name):
            return f"let {name}"
        case TupleTerm():
            return "( , )"
        case Application():
            return "@"
        case _:
            return "?"
