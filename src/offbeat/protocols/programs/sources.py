"""Programs from Python: the text of a lambda, read off Python's syntax tree and never evaluated; or a function, traced.

A traced function is called once with symbols for vectors and scalars, and the operations on them are recorded. Its
arguments have the meaning they have in a program; those with a number as default are constants.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Never, cast

from offbeat.errors import ProgramError
from offbeat.protocols.programs.operations import OPERATIONS, RESERVED
from offbeat.protocols.programs.parser import LONGEST, parse
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.recursion import Call, run
from offbeat.protocols.programs.term import (
    Abstraction,
    BoundVariable,
    Let,
    Number,
    Position,
    Primitive,
    Term,
    TupleTerm,
    Variable,
    apply,
    closed_over,
    function_of,
    nodes,
    operate,
)

TRACED: Final = 1_000
"""Operations that a traced function may record."""
_NAME: Final = re.compile(r"(?![A-Z]{2,}$)[A-Za-z_][A-Za-z0-9_]*")
_ALIASES: Final = {
    "minimum": "min", "maximum": "max", "clamp": "clip", "fabs": "abs", "absolute": "abs", "pow": "**", "power": "**",
    "add": "+", "subtract": "-", "sub": "-", "multiply": "*", "mul": "*", "divide": "/", "true_divide": "/", "div": "/",
    "negative": "neg", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=",
    "equal": "==", "not_equal": "!=", "vdot": "dot",
}  # fmt: skip
"""What numpy and torch call operations of the language."""
_MODULES: Final = ("torch", "numpy", "np", "math")
_OPERATORS: Final[dict[type[ast.AST], str]] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


def program_from(source: str | Callable[..., object]) -> Program:
    """A program from its text, in the language or as a Python lambda, or from a Python function."""
    if not isinstance(source, str):
        return Program.of(from_function(source))
    is_python = re.match(r"\s*lambda\b", source) is not None
    return Program.of(from_python_text(source) if is_python else parse(source))


def _operation(name: str) -> str | None:
    """The language's name of an operation, if it is one."""
    name = _ALIASES.get(name, name)
    return name if name in OPERATIONS else None


def _checked_name(name: str, at: Position | None = None) -> str:
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise ProgramError(
            f"{name!r} cannot name an argument of a program: names are of ASCII characters, not all capitals, and not "
            "words of the language.",
            at,
        )
    return name


def from_python_text(text: str) -> Term:
    """The term that the text of a Python expression describes, usually a lambda; nothing is evaluated."""
    if len(text) > LONGEST:
        raise ProgramError(f"A program of {len(text):,} characters is too long: {LONGEST:,} are allowed.")
    text = text.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            body = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ProgramError(
            f"The program cannot be read as Python: {error.msg}. Write one such as `lambda w, g: w - lr * g`.",
            (error.lineno or 1, error.offset or 1),
        ) from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise ProgramError(f"The program is too deeply nested to be read ({type(error).__name__}).") from None
    return run(_term(body, ()))


def _term(node: ast.expr, names: tuple[str, ...]) -> Call[Term]:
    at = (node.lineno, node.col_offset + 1)
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Number(_finite(value, at), at)
        case ast.Name(id=name):
            return _variable(name, names, at)
        case ast.Tuple(elts=items):
            terms: tuple[Term, ...] = ()
            for item in items:
                terms += ((yield _term(item, names)),)
            return terms[0] if len(terms) == 1 else TupleTerm(terms, at) if terms else _refuse(node, at)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            term = yield _term(operand, names)
            if isinstance(sign, ast.UAdd):
                return term
            return Number(-term.value, at) if isinstance(term, Number) else apply(Primitive("neg", at), term)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a = yield _term(left, names)
            b = yield _term(right, names)
            return apply(Primitive(_OPERATORS[type(sign)], at), a, b)
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATORS:
            a = yield _term(left, names)
            b = yield _term(right, names)
            return apply(Primitive(_OPERATORS[type(sign)], at), a, b)
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in _MODULES and module not in names:
            operation = _operation(name)
            return Primitive(operation, at) if operation is not None else _refuse(node, at)
        case ast.Call(func=function, args=[_, *_] as arguments, keywords=[]):
            term = yield _term(function, names)
            for argument in arguments:
                term = apply(term, (yield _term(argument, names)))
            return term
        case ast.Lambda():
            return (yield _lambda(node, names, at))
        case _:
            return _refuse(node, at)


def _lambda(node: ast.Lambda, names: tuple[str, ...], at: Position) -> Call[Term]:
    found = node.args
    keyed = list(zip(found.kwonlyargs, found.kw_defaults, strict=True))
    arguments = [*found.posonlyargs, *found.args]
    plain = arguments[: len(arguments) - len(found.defaults)]
    if found.vararg is not None or found.kwarg is not None or not arguments:
        _refuse(node, at)
    constants = [*zip(arguments[len(plain) :], found.defaults, strict=True)]
    constants += [(argument, default) for argument, default in keyed if default is not None]
    plain += [argument for argument, default in keyed if default is None]
    named = tuple(_checked_name(argument.arg, at) for argument in plain)
    fixed = tuple(_checked_name(argument.arg, at) for argument, _ in constants)
    body = yield _term(node.body, (*names, *named, *fixed))
    for (argument, default), name in reversed([*zip(constants, fixed, strict=True)]):
        value = yield _term(default, ())
        if not isinstance(value, Number):
            raise ProgramError(f"The default of {argument.arg!r} must be a number.", at)
        body = Let(name, value, body, at)
    for name in reversed(named):
        body = Abstraction(name, body, at)
    return body


def _variable(name: str, names: tuple[str, ...], at: Position) -> Term:
    if name in names:
        return BoundVariable(names[::-1].index(name), at)
    operation = _operation(name)
    return Primitive(operation, at) if operation is not None else Variable(_checked_name(name, at), at)


def _finite(value: float, at: Position) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ProgramError("A number here is larger than any of 64 bits.", at) from None


def _refuse(node: ast.expr, at: Position) -> Never:
    hints: dict[type[ast.AST], str] = {
        ast.IfExp: "write `where(condition, yes, no)`",
        ast.BoolOp: "multiply comparisons for `and`; take their maximum for `or`",
        ast.Compare: "compare two values at a time",
        ast.Call: "pass arguments in order, without names or stars",
        ast.NamedExpr: "name values by `(lambda s: …)(value)`",
        ast.Lambda: "take arguments by name, at least one",
    }
    what = type(node).__name__
    hint = hints.get(type(node), "programs are of numbers, names, operators, calls and lambdas")
    raise ProgramError(f"A program cannot have this ({what}): {hint}.", at)


def _forward(name: str) -> Callable[..., Symbol]:
    def record(*arguments: object) -> Symbol:
        return _record(name, *arguments)

    return record


def _reflected(name: str) -> Callable[..., Symbol]:
    def record(a: object, b: object) -> Symbol:
        return _record(name, b, a)

    return record


def _refused(what: str) -> Callable[..., Any]:
    def refuse(self: object, *_: object) -> Never:
        del self
        raise ProgramError(
            f"A program is traced with symbols, which have no numbers: {what} cannot depend on one. Use `where` of "
            "offbeat.protocols.programs.sources, or torch's, for what depends on numbers."
        )

    return refuse


class Symbol:
    """A vector or scalar of a program that is traced: operations on it are recorded."""

    __slots__ = ("term",)

    def __init__(self, term: Term) -> None:
        self.term = term

    __add__, __radd__ = _forward("+"), _reflected("+")
    __sub__, __rsub__ = _forward("-"), _reflected("-")
    __mul__, __rmul__ = _forward("*"), _reflected("*")
    __truediv__, __rtruediv__ = _forward("/"), _reflected("/")
    __pow__, __rpow__ = _forward("**"), _reflected("**")
    __lt__, __le__, __gt__, __ge__ = _forward("<"), _forward("<="), _forward(">"), _forward(">=")
    __eq__, __ne__ = cast("Any", _forward("==")), cast("Any", _forward("!="))
    __neg__, __abs__ = _forward("neg"), _forward("abs")
    __hash__ = cast("Any", None)
    __bool__ = _refused("an `if`, `while`, `and`, `or`, `min` or `max` of Python")
    __float__ = __int__ = __index__ = _refused("a number of Python")
    __iter__ = __len__ = __getitem__ = _refused("a loop, a length or an index")

    def __pos__(self) -> Symbol:
        return self

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        operation = _operation(name)
        if operation is None or name.startswith("_"):
            raise ProgramError(f"Vectors of a program have no {name!r}: use operations of the language.")
        return lambda *arguments: _record(operation, self, *arguments)

    def __array_ufunc__(self, function: Any, method: str, *arguments: object, **options: object) -> Symbol:
        return _foreign(function, arguments, options if method == "__call__" else {"method": method})

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, arguments: Sequence[object] = (), options: Any = None
    ) -> Symbol:
        del types
        return _foreign(function, arguments, options or {})


def _foreign(function: Any, arguments: Sequence[object], options: dict[str, object]) -> Symbol:
    """Record a function of numpy or torch by its name."""
    name = getattr(function, "__name__", "")
    operation = _operation(name)
    if operation is None or options:
        asked = f"{name}({', '.join(options)}=…)" if options else name
        raise ProgramError(f"A program cannot have {asked!r}: {', '.join(sorted(OPERATIONS))} are operations.")
    return _record(operation, *arguments)


def _record(name: str, *arguments: object) -> Symbol:
    operation = OPERATIONS[name]
    if len(arguments) != operation.arguments:
        raise ProgramError(f"{name!r} takes {operation.arguments} arguments, not {len(arguments)}.")
    return Symbol(operate(name, *map(_recorded, arguments)))


def _recorded(value: object) -> Term:
    if isinstance(value, Symbol):
        return value.term
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return Number(value)
    raise ProgramError(f"A program cannot have {value!r}: only finite numbers and its own vectors and scalars.")


def _traced(name: str) -> Callable[..., Symbol]:
    record = _forward(name)
    record.__doc__ = f"`{name}` of the language, in functions that are traced."
    return record


sqrt, exp, log, sign, where, clip, dot, norm, mean, largest, length = map(
    _traced, ("sqrt", "exp", "log", "sign", "where", "clip", "dot", "norm", "mean", "largest", "length")
)
minimum, maximum, total = map(_traced, ("min", "max", "sum"))


def from_function(function: Callable[..., object]) -> Term:
    """The term that a Python function computes, traced by calling it once with symbols."""
    names = [_checked_name(parameter.name) for parameter in _parameters(function)]
    symbols = {name: Symbol(Variable(name)) for name in names}
    positional = [
        symbols[parameter.name]
        for parameter in _parameters(function)
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    keyed = {
        parameter.name: symbols[parameter.name]
        for parameter in _parameters(function)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    try:
        result = function(*positional, **keyed)
    except (NameError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ProgramError(
            f"The function cannot be traced: {error}. It may use its arguments, numbers, and operations of the "
            "language; scalars of the server, such as `lr`, are arguments too."
        ) from error
    items = cast("Sequence[object]", result) if isinstance(result, tuple | list) else (result,)
    terms = tuple(map(_recorded, items))
    if not terms:
        raise ProgramError("The function returns nothing; a program returns the new parameters.")
    return function_of(names, _named_once(terms[0] if len(terms) == 1 else TupleTerm(terms), set(names)))


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function that are not constants."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ProgramError(f"{function!r} is not a function whose arguments are known.") from None
    for parameter in found:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ProgramError(f"A program takes its arguments by name, not as {str(parameter)!r}.")
    return [parameter for parameter in found if parameter.default is inspect.Parameter.empty]


def _named_once(term: Term, taken: set[str]) -> Term:
    """A term in which what was computed once and used several times has a name."""
    every = list(nodes(term))
    if len(every) > TRACED * 3:
        raise ProgramError(f"The function records more than {TRACED:,} operations, the limit.")
    uses = Counter(id(child) for node in every for child in node.children)
    rebuilt: dict[int, Term] = {}
    shared: list[tuple[str, Term]] = []
    for node in _children_first(term):
        new = node.rebuilt([rebuilt[id(child)] for child in node.children]) if node.children else node
        if uses[id(node)] > 1 and node.children:
            name = next(name for n in range(len(taken) + 1) if (name := f"x{n + 1}") not in taken)
            taken.add(name)
            shared.append((name, new))
            new = Variable(name)
        rebuilt[id(node)] = new
    result = rebuilt[id(term)]
    for name, value in reversed(shared):
        result = Let(name, value, closed_over(name, result))
    return result


def _children_first(term: Term) -> list[Term]:
    order: list[Term] = []
    todo: list[tuple[Term, bool]] = [(term, False)]
    seen: set[int] = set()
    while todo:
        node, ready = todo.pop()
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            todo.append((node, True))
            todo.extend((child, False) for child in reversed(node.children))
    return order
