r"""The parser: from the text of a program to its term, with the line and column of what is wrong.

    term        = "\" name+ "." term | "let" name+ "=" term "in" term | comparison
    comparison  = sum [("<" | "<=" | ">" | ">=" | "==" | "!=") sum]
    sum         = product (("+" | "-") product)*
    product     = unary (("*" | "/") unary)*
    unary       = "-" unary | power
    power       = application ["**" unary]
    application = atom atom*
    atom        = number | name | "(" term ")" | "(" term ("," term)+ ")" | "(" operator ")"

A function or a `let` may also be the last operand, and reaches as far to the right as it can. A bracket with commas
is a tuple, except after what it is an argument of: `f (a, b)` means `f a b`. Capitals alone are one name each, so
that `S(KS)K` reads as in books. A comment starts with `#`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from offbeat.errors import ProgramError
from offbeat.protocols.programs.operations import COMPARISON, KEYWORDS, OPERATIONS, PRODUCT, UNARY
from offbeat.protocols.programs.recursion import Call, run
from offbeat.protocols.programs.term import (
    LARGEST,
    Abstraction,
    Application,
    BoundVariable,
    Let,
    Number,
    Position,
    Primitive,
    Term,
    TupleTerm,
    Variable,
    operate,
)

LONGEST: Final = 20_000
"""Characters of a program."""
DEEPEST: Final = 1_000
"""Brackets, functions and other terms inside each other."""

_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n\f]+|\#[^\n]*)
    | (?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    | (?P<name>[a-zA-Z_][a-zA-Z0-9_]*'*)
    | (?P<sign>\*\*|<=|>=|==|!=|[-+*/<>=().,\\λ])""",
    re.VERBOSE,
)
_CAPITALS: Final = re.compile(r"[A-Z]{2,}'*")
_INFIX: Final = {operation.name: operation.infix for operation in OPERATIONS.values() if operation.infix}


@dataclass(frozen=True, slots=True)
class Token:
    """A word of a program."""

    kind: str  # number, name, sign or end.
    text: str  # As written.
    at: Position  # Where it starts.


def parse(text: str) -> Term:
    """The term that a text describes; raises ProgramError with line and column if there is none."""
    if len(text) > LONGEST:
        raise ProgramError(f"A program of {len(text):,} characters is too long: {LONGEST:,} are allowed.")
    return run(_Parser(_tokens(text), text).whole())


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    place, line, start = 0, 1, 0
    while place < len(text):
        at = (line, place - start + 1)
        match = _TOKEN.match(text, place)
        if match is None:
            raise _pointed(text, at, f"{text[place]!r} is not a part of the language.")
        kind, word, place = match.lastgroup or "", match[0], match.end()
        if kind == "name" and _CAPITALS.fullmatch(word):
            tokens.extend(Token(kind, piece, (at[0], at[1] + n)) for n, piece in _split(word))
        elif kind != "space":
            tokens.append(Token(kind, word, at))
        if "\n" in word:
            line += word.count("\n")
            start = place - len(word) + word.rindex("\n") + 1
    tokens.append(Token("end", "", (line, len(text) - start + 1)))
    return tokens


def _split(capitals: str) -> list[tuple[int, str]]:
    return [(match.start(), match[0]) for match in re.finditer(r"[A-Z]'*", capitals)]


def _pointed(text: str, at: Position, message: str) -> ProgramError:
    """An error with the line it is about, and a caret below the place."""
    line = text.split("\n")[at[0] - 1]
    left = max(0, at[1] - 41)
    window = "".join(character if character.isprintable() else "?" for character in line[left : left + 80])
    return ProgramError(f"{message}\n    {window}\n    {' ' * (at[1] - 1 - left)}^", at)


Names = Mapping[str, int]  # BoundVariable names: the number of the binder from outside, from 0.


class _TokenReader:
    """Reads tokens from left to right, and says what is wrong where."""

    def __init__(self, tokens: list[Token], text: str) -> None:
        self.tokens, self.text, self.place = tokens, text, 0

    @property
    def next(self) -> Token:
        return self.tokens[self.place]

    def take(self) -> Token:
        token = self.next
        self.place += 1
        return token

    def wrong(self, expected: str) -> NoReturn:
        token = self.next
        seen = repr(token.text) if token.text else "the end"
        raise _pointed(self.text, token.at, f"{expected} was expected, not {seen}.")

    def expect(self, text: str, what: str) -> Token:
        if self.next.text != text:
            self.wrong(f"{text!r} {what}")
        return self.take()

    def checked(self, term: Term) -> Term:
        if term.size > LARGEST:
            raise _pointed(self.text, self.next.at, f"The program has more than {LARGEST:,} nodes, the limit.")
        if term.depth > DEEPEST:
            self.too_deep()
        return term

    def too_deep(self) -> NoReturn:
        raise _pointed(self.text, self.next.at, f"The program is nested more than {DEEPEST:,} deep, the limit.")


class _Parser(_TokenReader):
    """Makes terms of tokens."""

    def __init__(self, tokens: list[Token], text: str) -> None:
        super().__init__(tokens, text)
        self.depth = 0  # Terms inside each other.
        self.count = 0  # Binders around the place.

    def whole(self) -> Call[Term]:
        term = yield self.term({})
        if self.next.kind != "end":
            self.wrong("an operator, an argument or the end")
        return term

    def term(self, names: Names) -> Call[Term]:
        self.depth += 1
        if self.depth > DEEPEST:
            self.too_deep()
        if self.next.text in ("\\", "λ"):
            term = yield self.abstraction(names)
        elif self.next.text == "let":
            term = yield self.let(names)
        else:
            term = yield self.operators(names, COMPARISON)
        self.depth -= 1
        return self.checked(term)

    def binder_names(self, what: str) -> list[Token]:
        if self.next.kind != "name" or self.next.text in KEYWORDS:
            self.wrong(what)
        tokens = [self.take()]
        while self.next.kind == "name" and self.next.text not in KEYWORDS:
            tokens.append(self.take())
        return tokens

    def bound(self, names: Names, tokens: list[Token]) -> Names:
        inner = dict(names)
        for token in tokens:
            inner[token.text] = self.count
            self.count += 1
        return inner

    def abstraction(self, names: Names) -> Call[Term]:
        start = self.take()
        tokens = self.binder_names("the name of an argument")
        self.expect(".", "after the arguments of a function, or another argument")
        body = yield self.function(names, tokens, start.at)
        return body

    def function(self, names: Names, tokens: list[Token], at: Position) -> Call[Term]:
        """The body of a function, under its arguments."""
        body = yield self.term(self.bound(names, tokens))
        self.count -= len(tokens)
        for token in reversed(tokens):
            body = Abstraction(token.text, body, at)
        return self.checked(body)

    def let(self, names: Names) -> Call[Term]:
        start = self.take()
        name, *arguments = self.binder_names("a name")
        self.expect("=", "after the name")
        value = yield self.function(names, arguments, name.at)
        self.expect("in", "after the value of a name")
        body = yield self.term(self.bound(names, [name]))
        self.count -= 1
        return Let(name.text, value, body, start.at)

    def operators(self, names: Names, precedence: int) -> Call[Term]:
        """Operators that bind at least as tightly as the precedence, and their operands."""
        left = yield self.unary(names)
        while precedence <= _INFIX.get(self.next.text, 0) <= PRODUCT:
            sign = self.take()
            right = yield self.operators(names, _INFIX[sign.text] + 1)
            left = self.checked(Application(Application(Primitive(sign.text, sign.at), left, sign.at), right, sign.at))
            if _INFIX[sign.text] == COMPARISON == _INFIX.get(self.next.text):
                self.wrong("a bracket around one of two comparisons")
        return left

    def unary(self, names: Names) -> Call[Term]:
        signs: list[Token] = []
        while self.next.text == "-":
            signs.append(self.take())
        if self.next.text in ("\\", "λ", "let"):
            term = yield self.term(names)
        else:
            term = yield self.power(names)
        for sign in reversed(signs):
            literal = isinstance(term, Number) and not repr(term.value).startswith("-")
            term = Number(-term.value, sign.at) if isinstance(term, Number) and literal else operate("neg", term)
            term.at = sign.at
        return self.checked(term)

    def power(self, names: Names) -> Call[Term]:
        base = yield self.application(names)
        if self.next.text != "**":
            return base
        sign = self.take()
        exponent = yield self.operators(names, UNARY)
        return Application(Application(Primitive("**", sign.at), base, sign.at), exponent, sign.at)

    def application(self, names: Names) -> Call[Term]:
        start = self.next
        (function,) = yield self.atom(names, spread=False)
        while self.starts_atom() or self.next.text in ("\\", "λ"):
            if self.starts_atom():
                arguments = yield self.atom(names, spread=True)
            else:
                arguments = ((yield self.term(names)),)
            for argument in arguments:
                function = self.checked(Application(function, argument, start.at))
        return function

    def starts_atom(self) -> bool:
        token = self.next
        return token.text not in KEYWORDS if token.kind in ("number", "name") else token.text == "("

    def atom(self, names: Names, spread: bool) -> Call[tuple[Term, ...]]:
        """An atom; or, where a bracket with commas stands for several arguments, all of them."""
        if not self.starts_atom():
            self.wrong("a number, a name, a function or an opening bracket")
        token = self.take()
        if token.kind == "number":
            return (self.number(token),)
        if token.kind == "name":
            return (self.variable(token, names),)
        if self.next.text in _INFIX and self.tokens[self.place + 1].text == ")":
            sign = self.take()
            self.take()
            return (Primitive(sign.text, sign.at),)
        items = [(yield self.term(names))]
        while self.next.text == ",":
            self.take()
            items.append((yield self.term(names)))
        self.expect(")", f"for the bracket of line {token.at[0]}, column {token.at[1]}, or an operator or argument")
        return tuple(items) if spread or len(items) == 1 else (TupleTerm(tuple(items), token.at),)

    def number(self, token: Token) -> Term:
        value = float(token.text)
        if value in (float("inf"), float("-inf")):
            raise _pointed(self.text, token.at, f"{token.text} is larger than any number of 64 bits.")
        return Number(value, token.at)

    def variable(self, token: Token, names: Names) -> Term:
        if token.text in names:
            return BoundVariable(self.count - 1 - names[token.text], token.at)
        if token.text in OPERATIONS:
            return Primitive(token.text, token.at)
        return Variable(token.text, token.at)
