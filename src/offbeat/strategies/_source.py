"""A strategy's text as it was given: its syntax tree, the people's own classes in it, and how errors show it.

People's own strategies are written by where they are defined (`mine.py:Push(0.5)`), which Python cannot parse. So
each such reference is overwritten by underscores, as many as it has characters, before the text is parsed:
positions stay true, and a reference is known again by where it stands.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from offbeat.errors import StrategyError
from offbeat.strategies._written import shown

RULE: Final = "values are names, numbers and calls, never quoted"
"""What may stand in a strategy's text."""
LONGEST: Final = 10_000
"""Characters; far beyond any strategy, and little enough to parse at once."""
DEEPEST: Final = 20
"""Brackets inside brackets."""

_REFERENCE: Final = re.compile(
    r"""(?:^|[+(])\s*+                                        # where a part of a sum starts
        (?P<reference>
            (?P<source>[^:+(){},='"]+?\.py | [A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)   # a file, or a dotted module
            :(?P<cls>[A-Za-z_]\w*))""",
    re.VERBOSE | re.ASCII,
)
# Python itself would skip comments, join lines and fold letters into each other without a word.
_FOREIGN: Final = re.compile(r"[^ -~]|[#\\]")


@dataclass(frozen=True)
class Reference:
    """A class of people's own: where it is defined and what it is called."""

    source: str
    """A file, or a dotted module."""
    cls: str
    """The class's name."""


@dataclass(frozen=True)
class Source:
    """A strategy's text, parsed."""

    text: str
    """As it was given, on one line."""
    body: ast.expr
    """What Python's parser made of it."""
    references: Mapping[int, Reference]
    """People's own classes, by the column they start at."""

    def reference_at(self, node: ast.expr) -> Reference | None:
        """The class of people's own that stands here, if there is one."""
        return self.references.get(node.col_offset)

    def piece(self, node: ast.AST) -> str:
        """The text of a node."""
        start, stop = _span(node)
        return repr(shown(self.text[start:stop]))

    def error(self, node: ast.AST, message: str) -> StrategyError:
        """An error that shows where in the text it arose."""
        return pointed(self.text, *_span(node), message)

    def refused(self, node: ast.AST, hint: str = "") -> StrategyError:
        """The error for a node that may not stand in a strategy's text at all."""
        return self.error(node, f"{self.piece(node)} cannot stand in a strategy: {RULE}.{hint}")


def read(text: str) -> Source:
    """Parse a text; whatever cannot be parsed is a StrategyError."""
    if len(text) > LONGEST:
        raise StrategyError(f"A strategy of {len(text):,} characters is too long to be one; {LONGEST:,} are allowed.")
    text = re.sub(r"\s", " ", text).strip()
    if not text:
        raise StrategyError("The strategy is empty. Write one such as `allreduce` or `ddp + accumulate(4)`.")
    plain, references = _without_references(text)
    _check_characters(text, plain)
    return Source(text, _parsed(text, plain), references)


def pointed(text: str, start: int, stop: int, message: str) -> StrategyError:
    """An error with the text below it, and carets under the piece that is meant."""
    left = max(0, start - 40)
    # Control characters would move the carets, and some cannot be printed at all.
    window = "".join(c if c.isprintable() else "?" for c in text[left : left + 100])
    carets = max(1, min(stop, left + len(window)) - start)
    below = " " * (start - left) + "^" * carets
    return StrategyError(f"{message}\n  at character {start + 1} of the strategy:\n    {window}\n    {below}")


def _without_references(text: str) -> tuple[str, dict[int, Reference]]:
    plain = text
    references: dict[int, Reference] = {}
    for match in _REFERENCE.finditer(text):
        start, stop = match.span("reference")
        # `lambda:x` is no module, but an expression to be refused as such.
        if not keyword.iskeyword(match["source"]):
            references[start] = Reference(match["source"], match["cls"])
            plain = plain[:start] + "_" * (stop - start) + plain[stop:]
    return plain, references


def _check_characters(text: str, plain: str) -> None:
    depth = 0
    for position, character in enumerate(plain):
        # Where a file's path was, `plain` has underscores; a path may have any letters, but must be printable.
        if _FOREIGN.match(character) or not text[position].isprintable():
            raise pointed(text, position, position + 1, f"{text[position]!r} cannot stand in a strategy: {RULE}.")
        depth += (character in "({[") - (character in ")}]")
        if depth > DEEPEST:
            raise pointed(text, position, position + 1, f"More than {DEEPEST} brackets inside each other are refused.")


def _parsed(text: str, plain: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            # What Python only warns of (`1or 2`) is no strategy either.
            warnings.simplefilter("error")
            return ast.parse(plain, mode="eval").body
    except SyntaxError as error:
        start = min(max((error.offset or 1) - 1, 0), len(text) - 1)
        reason = error.msg.partition(". ")[0]
        raise pointed(text, start, start + 1, f"The strategy cannot be read: {reason}; {RULE}.") from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise StrategyError(f"The strategy is too deeply nested to be read ({type(error).__name__}); {RULE}.") from None


def _span(node: ast.AST) -> tuple[int, int]:
    # The text is ASCII on one line wherever a node can be, so Python's byte columns are positions.
    start = getattr(node, "col_offset", 0)
    return start, getattr(node, "end_col_offset", None) or start + 1
