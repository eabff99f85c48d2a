"""Text such as `server(shards=2) + topk(0.01)`: sums of calls, read off Python's own syntax tree, never evaluated.

Strategies, stragglers, consistency rules and ways to divide data are written so. User-defined classes are written by
where they are defined (`mine.py:Push(0.5)`), which Python cannot parse. So each such reference is overwritten by as
many underscores before the text is parsed: positions stay true, and a reference is recognized by its position. Files
of programs (`server(update=mine.lam)`) are overwritten likewise.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from offbeat.errors import StrategyError, UsageError

RULE: Final = "values are names, numbers and calls, never quoted"  # What may stand in a strategy's text.
LONGEST: Final = 10_000  # Characters; far beyond any strategy, and little enough to parse at once.
DEEPEST: Final = 20  # Brackets inside brackets.

_REFERENCE: Final = re.compile(
    r"""(?:^|[+(])\s*+                                        # where a part of a sum starts
        (?P<reference>
            (?P<source>[^:+(){},='"]+?\.py | [A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)   # a file, or a dotted module
            :(?P<cls>[A-Za-z_]\w*))""",
    re.VERBOSE | re.ASCII,
)
_FILE: Final = re.compile(r"""[=(,{]\s*+(?P<file>[^:+(){},='"\s][^:+(){},='"]*?\.lam)(?=\s*[,)}])""", re.ASCII)
# Python itself would skip comments, join lines and fold letters into each other without a word.
_FOREIGN: Final = re.compile(r"[^ -~]|[#\\]")


class ClassReference(Struct, frozen=True):
    """A user-defined class: where it is defined, and its name."""

    source: str  # A file, or a dotted module.
    cls: str  # The class's name.


class ParsedText(Struct, frozen=True):
    """A text, parsed."""

    text: str  # As written, on one line.
    body: ast.expr  # What Python's parser made of it.
    references: Mapping[int, ClassReference]  # User-defined classes, by the column they start at.
    noun: str  # What the text describes.
    failure: type[UsageError]  # The error to raise where it is wrong.
    files: tuple[str, ...] = ()  # Files of programs that it names.

    def reference_at(self, node: ast.expr) -> ClassReference | None:
        """The user-defined class at this node, if any."""
        return self.references.get(node.col_offset)

    def terms(self) -> list[ast.expr]:
        """The terms of the sum, from left to right."""
        terms: list[ast.expr] = []
        node = self.body
        # A long sum is a deep tree, so it is not walked by recursion.
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            terms.append(node.right)
            node = node.left
        return [node, *reversed(terms)]

    def constant(self, node: ast.expr) -> bool | float | None:
        """A number, True, False or None."""
        match node:
            case ast.Constant(value=bool() | int() | float() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                # Python counts True as a number; `-True` is nonsense all the same.
                if not isinstance(value, bool):
                    return -value
            case ast.Constant(value=str() as value):
                raise self.refused(node, f" Write {_short(value)} without quotes.")
            case _:
                pass
        raise self.refused(node)

    def written(self, node: ast.AST) -> str:
        """The text of a node, in full."""
        start, stop = _span(node)
        return self.text[start:stop]

    def piece(self, node: ast.AST) -> str:
        """The text of a node."""
        return repr(_short(self.written(node)))

    def error(self, node: ast.AST, message: str) -> UsageError:
        """An error that shows where in the text it arose."""
        return self.failure(_pointed(self.text, *_span(node), self.noun, message))

    def refused(self, node: ast.AST, hint: str = "") -> UsageError:
        """The error for a node that is not allowed in such a text."""
        return self.error(node, f"{self.piece(node)} cannot stand in a {self.noun}: {RULE}.{hint}")


def read(
    text: str,
    noun: str = "strategy",
    failure: type[UsageError] = StrategyError,
    example: str = "`allreduce` or `ddp + accumulate(4)`",
) -> ParsedText:
    """Parse a text; raises `failure` if that is impossible."""
    if len(text) > LONGEST:
        raise failure(f"A {noun} of {len(text):,} characters is too long to be one; {LONGEST:,} are allowed.")
    text = re.sub(r"\s", " ", text).strip()
    if not text:
        raise failure(f"The {noun} is empty, so it cannot be read. Write one such as {example}.")
    plain, references = _without_references(text)
    files = tuple(match["file"] for match in _FILE.finditer(plain))
    plain = _FILE.sub(lambda match: match[0].replace(match["file"], "_" * len(match["file"])), plain)

    def wrong(start: int, stop: int, message: str) -> UsageError:
        return failure(_pointed(text, start, stop, noun, message))

    _check_characters(text, plain, noun, wrong)
    return ParsedText(text, _parsed(plain, noun, wrong), references, noun, failure, files)


Value = int | float | str  # An argument of a plain call: a number, or a name.


def calls(text: str, noun: str, example: str) -> list[tuple[str, tuple[Value, ...]]]:
    """The calls that a text such as `a(1, 0.5) + b` is a sum of, with their values: numbers and names, in order."""
    source = read(text, noun, UsageError, example)
    found: list[tuple[str, tuple[Value, ...]]] = []
    for term in source.terms():
        match term:
            case ast.Name(id=name):
                found.append((name, ()))
            case ast.Call(func=ast.Name(id=name), args=values, keywords=[]):
                found.append((name, tuple(_value(source, value) for value in values)))
            case _:
                raise source.error(
                    term, f"The {noun} cannot be read: write names and calls with values in order, such as {example}."
                )
    return found


def _value(source: ParsedText, node: ast.expr) -> Value:
    value = node.id if isinstance(node, ast.Name) else getattr(node, "value", None)
    if isinstance(value, str | int | float) and not isinstance(value, bool) and value != math.inf:
        return value
    raise source.error(
        node, f"{source.piece(node)} in {source.text!r} is not a value: give a number of 0 or more, or a name."
    )


Wrong = Callable[[int, int, str], UsageError]  # Makes the error about a range of the text.


def _pointed(text: str, start: int, stop: int, noun: str, message: str) -> str:
    """A message with the text below it, and carets under the offending piece."""
    left = max(0, start - 40)
    # Control characters would move the carets, and some cannot be printed at all.
    window = "".join(c if c.isprintable() else "?" for c in text[left : left + 100])
    carets = max(1, min(stop, left + len(window)) - start)
    below = " " * (start - left) + "^" * carets
    return f"{message}\n  at character {start + 1} of the {noun}:\n    {window}\n    {below}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _without_references(text: str) -> tuple[str, dict[int, ClassReference]]:
    plain = text
    references: dict[int, ClassReference] = {}
    for match in _REFERENCE.finditer(text):
        start, stop = match.span("reference")
        # `lambda:x` is not a module, but an expression to be refused as such.
        if not keyword.iskeyword(match["source"]):
            references[start] = ClassReference(match["source"], match["cls"])
            plain = plain[:start] + "_" * (stop - start) + plain[stop:]
    return plain, references


def _check_characters(text: str, plain: str, noun: str, wrong: Wrong) -> None:
    depth = 0
    for position, character in enumerate(plain):
        # Where a file's path was, `plain` has underscores; a path may have any letters, but must be printable.
        if _FOREIGN.match(character) or not text[position].isprintable():
            raise wrong(position, position + 1, f"{text[position]!r} cannot stand in a {noun}: {RULE}.")
        depth += (character in "({[") - (character in ")}]")
        if depth > DEEPEST:
            raise wrong(position, position + 1, f"More than {DEEPEST} brackets inside each other are refused.")


def _parsed(plain: str, noun: str, wrong: Wrong) -> ast.expr:
    try:
        with warnings.catch_warnings():
            # What Python only warns of (`1or 2`) is not a strategy either.
            warnings.simplefilter("error")
            return ast.parse(plain, mode="eval").body
    except SyntaxError as error:
        start = min(max((error.offset or 1) - 1, 0), len(plain) - 1)
        reason = error.msg.partition(". ")[0]
        raise wrong(start, start + 1, f"The {noun} cannot be read: {reason}; {RULE}.") from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        what = f"The {noun} is too deeply nested to be read ({type(error).__name__}); {RULE}."
        raise wrong(0, 1, what) from None


def _span(node: ast.AST) -> tuple[int, int]:
    # The text is ASCII on one line wherever a node can be, so Python's byte columns are positions.
    start = getattr(node, "col_offset", 0)
    return start, getattr(node, "end_col_offset", None) or start + 1
