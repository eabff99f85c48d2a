"""What servers do with a push, as the user says: a program in a strategy's text, a Python function, or a file."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from torch import Tensor, optim
from torch.optim import Optimizer

from offbeat.errors import NonFiniteError, ProgramError, StrategyError, did_you_mean
from offbeat.protocols.programs.library import RECIPES, recipe_program
from offbeat.protocols.programs.parser import LONGEST
from offbeat.protocols.programs.plan import Plan
from offbeat.protocols.programs.printer import number_text
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.python_text import python_text
from offbeat.protocols.programs.sources import program_from
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.programs.compile import compiled
from offbeat.runtime.servers.program_optimizer import accepted, looks_at_whole
from offbeat.runtime.servers.updater import PROGRAM, settings_of
from offbeat.strategies.language.fields import Notation
from offbeat.strategies.servers.optimizer import Groups

LIBRARY: Final = tuple(name for name in RECIPES if name != "elastic")
"""Programs that have a name; the centre of elastic averaging takes pushed parameters, not gradients."""
_FORMS: Final = "a lambda such as `lambda w, g: w - lr * g`, a file.lam, or a name"
_REPLACED: Final = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
"""Settings of SGD that a program does not know."""


@dataclass(frozen=True, repr=False)
class ServerUpdate(Notation):
    """A program that servers run on every push. Equal texts are equal updates."""

    text: str
    """As a strategy has it: a name with settings, or a Python lambda."""
    program: Program = field(compare=False)
    """What it means, checked."""
    plan: Plan = field(compare=False)
    """Its instructions, with their cost and hash."""

    syntax: ClassVar[str] = f"lambda w, g, …: … | FILE.lam | {' | '.join(LIBRARY)}"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"ServerUpdate.read({self.text!r})"

    @classmethod
    def read(cls, text: str) -> Self:
        """The update that a text denotes: a Python lambda, a file's name, a name of the library, or a term."""
        text = text.strip()
        try:
            if text.endswith(".lam"):
                return cls._of_program(program_from(_content(text)))
            if text.startswith(("lambda", "\\", "λ", "let ")):
                return cls._of_program(program_from(text))
            name, settings = _named(text)
            return cls._checked(_spelled(name, settings), recipe_program(name, **settings))
        except ProgramError as error:
            raise StrategyError(f"The update is refused: {error}") from error

    @classmethod
    def of(cls, value: object) -> Self | None:
        """An update from a function, which is traced and never sent; from a program, or from text."""
        if isinstance(value, str):
            return cls.read(value)
        if isinstance(value, Program):
            return cls._of_program(value)
        if not callable(value) or isinstance(value, type):
            return None
        try:
            return cls._of_program(program_from(value))
        except ProgramError as error:
            raise StrategyError(f"The update is refused: {error}") from error

    @classmethod
    def _of_program(cls, program: Program) -> Self:
        text = python_text(program.term)
        return cls._checked(text, program_from(text))

    @classmethod
    def _checked(cls, text: str, program: Program) -> Self:
        return cls(text, *accepted(program.text))

    @property
    def whole(self) -> bool:
        """Whether it looks at the whole vector, as norms and sums do, and not at each number by itself."""
        return looks_at_whole(self.plan)

    @property
    def reductions(self) -> tuple[tuple[str, ...], ...]:
        """What it sums over the whole vector, by level."""
        return tuple(tuple(self.plan.values[number].operation for number in level) for level in self.plan.reductions)

    def why_not_in_shards(self, rule: Rule) -> str:
        """Why servers cannot run it on parts of the vector under a rule; empty if they can."""
        if not self.reductions or (rule.aggregated and not rule.coded):
            return ""
        if rule.coded:
            return "the update looks at the whole vector (norm, sum, …), and a coded step is decoded shard by shard"
        if not self.plan.reduces_gradient_only:
            return (
                "the update sums more than the gradient over the whole vector (parameters, states, lr, step, …), and "
                f"under {rule} shards are at different steps, so there is no such sum: use bsp, or sum `g` alone"
            )
        return ""

    def totals(self, gradient: Sequence[Tensor], length: int) -> tuple[float, ...]:
        """Its reductions over a gradient in these parts, for shards that have only one of them each."""
        program, totals = compiled(self.plan), tuple[float, ...]()
        scalars = dict.fromkeys(self.plan.scalars, 1.0) | {"length": float(length)}
        for level in range(len(self.plan.reductions)):
            # No other vector is read in it.
            try:
                parts = [program.partials(level, [part] * len(self.plan.vectors), scalars, totals) for part in gradient]
            except NonFiniteError:
                return (math.nan,) * sum(map(len, self.plan.reductions))
            totals += program.joined(level, parts)
        return totals

    @property
    def announced(self) -> dict[str, str]:
        """The program as servers are told of it, as fields of a recipe."""
        return {"program": self.program.text, "program_hash": self.plan.hash}

    @property
    def account(self) -> dict[str, Any]:
        """The program for the result of a run."""
        return {"program": self.text, "hash": self.plan.hash, "operations_per_element": self.plan.cost.operations}

    def refuses_optimizer(self, optimizer: Optimizer) -> str:
        """Why it cannot stand in for this optimizer; empty if it can."""
        kind = type(optimizer)
        if kind is not optim.SGD:
            return f"{kind.__name__} has a rule of its own"
        changed = {name: group[name] for group in settings_of(optimizer) for name in _REPLACED if group.get(name)}
        return ", ".join(f"{name}={value}" for name, value in changed.items())

    def groups(self, optimizer: Optimizer) -> tuple[str, Groups]:
        """What servers run, and the learning rate of each group, which is all that they take from the optimizer."""
        return PROGRAM, tuple({"lr": group["lr"]} for group in settings_of(optimizer))


def _content(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(f"The program {path} cannot be read: {error}.") from error


def _named(text: str) -> tuple[str, dict[str, float]]:
    """A name of the library, and the settings it is called with."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = None
    head, positional, keywords = node, [], []
    if isinstance(node, ast.Call):
        head, positional, keywords = node.func, node.args, node.keywords
    if not isinstance(head, ast.Name):
        raise StrategyError(f"{_short(text)} is not an update: write {_FORMS} ({', '.join(LIBRARY)}).")
    if head.id not in LIBRARY:
        raise StrategyError(
            f"{head.id!r} is not the name of an update: write {_FORMS}.{did_you_mean(head.id, LIBRARY)}"
        )
    names = tuple(RECIPES[head.id].settings)
    if len(positional) > len(names):
        raise StrategyError(f"{head.id} takes {', '.join(names) or 'no settings'}, not {len(positional)} values.")
    settings: dict[str, float] = {}
    for name, value in [*zip(names, positional, strict=False), *((word.arg or "**", word.value) for word in keywords)]:
        if name in settings:
            raise StrategyError(f"{head.id} is given {name} twice.")
        settings[name] = _number(head.id, name, value)
    return head.id, settings


def _number(owner: str, name: str, node: ast.expr) -> float:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if isinstance(node, ast.UnaryOp) and negative else node
    value = inner.value if isinstance(inner, ast.Constant) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e300:
        raise StrategyError(f"{owner}: {name} takes a number, not {_short(ast.unparse(node))}.")
    return -float(value) if negative else float(value)


def _spelled(name: str, settings: dict[str, float]) -> str:
    """The shortest text for it: settings that differ from their defaults."""
    defaults = RECIPES[name].settings
    changed = {key: value for key, value in settings.items() if value != defaults.get(key)}
    if not changed:
        return name
    if len(defaults) == 1:
        return f"{name}({number_text(*changed.values())})"
    ordered = [f"{key}={number_text(changed[key])}" for key in defaults if key in changed]
    unknown = [f"{key}={number_text(changed[key])}" for key in changed if key not in defaults]
    return f"{name}({', '.join(ordered + unknown)})"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
