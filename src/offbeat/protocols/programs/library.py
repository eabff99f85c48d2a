r"""Programs that come with offbeat: what servers do with a push, in the language.

Each is a function that the values of its settings make a program of: `sgd 0.1` is one, `adam 0.001 0.9 0.999 1e-8`
another. Where torch has the same optimizer, the program gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from offbeat.errors import ProgramError, did_you_mean
from offbeat.protocols.programs.parser import parse
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.term import Abstraction, Number, Term, opened


@dataclass(frozen=True)
class ProgramRecipe:
    """A program with settings."""

    text: str
    """The program, after its settings."""
    settings: Mapping[str, float]
    """Settings that it takes before its vectors, in order, with their defaults."""
    note: str
    """What it is."""


RECIPES: Final[Mapping[str, ProgramRecipe]] = MappingProxyType(
    {
        "sgd": ProgramRecipe(r"\w g. w - lr * g", {}, "gradient descent"),
        "momentum": ProgramRecipe(
            r"\momentum. \w g m. let m = momentum * m + g in (w - lr * m, m)",
            {"momentum": 0.9},
            "gradient descent with momentum, as torch.optim.SGD",
        ),
        "adagrad": ProgramRecipe(
            r"\eps. \w g s. let s = s + g * g in (w - lr * g / (sqrt s + eps), s)",
            {"eps": 1e-10},
            "Adagrad (Duchi et al. 2011)",
        ),
        "rmsprop": ProgramRecipe(
            r"\alpha eps. \w g v. let v = alpha * v + (1 - alpha) * g * g in (w - lr * g / (sqrt v + eps), v)",
            {"alpha": 0.99, "eps": 1e-8},
            "RMSprop, as torch.optim.RMSprop",
        ),
        "adam": ProgramRecipe(
            r"""\beta1 beta2 eps. \w g m v.
            let m = m + (1 - beta1) * (g - m) in
            let v = beta2 * v + (1 - beta2) * g * g in
            let size = lr / (1 - beta1 ** step) in
            (w - size * m / (sqrt v / sqrt (1 - beta2 ** step) + eps), m, v)""",
            {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
            "Adam (Kingma and Ba 2015)",
        ),
        "adamw": ProgramRecipe(
            r"""\beta1 beta2 eps decay. \w g m v.
            let m = m + (1 - beta1) * (g - m) in
            let v = beta2 * v + (1 - beta2) * g * g in
            let size = lr / (1 - beta1 ** step) in
            let shrunk = (1 - lr * decay) * w in
            (shrunk - size * m / (sqrt v / sqrt (1 - beta2 ** step) + eps), m, v)""",
            {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.01},
            "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
        ),
        "delay_compensated": ProgramRecipe(
            r"\strength. \w g. w - lr * (g + strength * g * g * (w - read))",
            {"strength": 0.04},
            "delay-compensated ASGD (Zheng et al. 2017, equation 10)",
        ),
        "elastic": ProgramRecipe(
            r"\pull. \centre worker. centre + pull * (worker - centre)",
            {"pull": 0.05},
            "the centre of elastic averaging (Zhang et al. 2015): workers push parameters instead of gradients",
        ),
        "clipped_sgd": ProgramRecipe(
            r"\most. \w g. w - lr * min 1 (most / (norm g + 1e-6)) * g",
            {"most": 1.0},
            "gradient descent, with the gradient clipped by its norm as torch.nn.utils.clip_grad_norm_ does",
        ),
    }
)
"""The library by name."""


def recipe_program(name: str, **settings: float) -> Program:
    """A program of the library with these settings instead of the defaults."""
    if name not in RECIPES:
        raise ProgramError(f"{name!r} is not a program of the library.{did_you_mean(name, RECIPES)}")
    recipe = RECIPES[name]
    wrong = next((key for key in settings if key not in recipe.settings), None)
    if wrong is not None:
        raise ProgramError(f"The program {name!r} has no setting {wrong!r}.{did_you_mean(wrong, recipe.settings)}")
    function = parse(recipe.text)
    # The settings are numbers, so that the program's text is all there is to it.
    for value in (dict(recipe.settings) | settings).values():
        function = applied_once(function, value)
    return Program.of(function)


def applied_once(function: Term, value: float) -> Term:
    """A function's body with a number in place of its argument."""
    if not isinstance(function, Abstraction):
        raise TypeError("a recipe's settings are its first arguments")
    return opened(function.body, Number(value))
