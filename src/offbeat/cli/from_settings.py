"""Commands whose options are the fields of settings types, so that no option is spelled twice."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from offbeat.settings import Argument, Option


def command_from(
    *settings: type, leading: Sequence[str] = (), only: Sequence[str] | None = None
) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """A decorator: the function becomes a command that has these types' fields as options, and is given their values.

    `leading` names the options that come first in the help, `only` those of the last type that it has.
    """

    def decorate(act: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        *others, last = ([*_parameters(cls)] for cls in settings)
        parameters = [one for some in others for one in some]
        parameters += [one for one in last if only is None or one.name in only]
        places = {name: place for place, name in enumerate(leading)}
        parameters.sort(key=lambda parameter: places.get(parameter.name, len(places)))
        repeated = {name for cls in settings for name in _repeated(cls)}

        def command(**given: Any) -> None:
            act({name: tuple(value or ()) if name in repeated else value for name, value in given.items()})

        command.__name__, command.__doc__ = act.__name__, act.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(command)["__signature__"] = inspect.Signature(parameters)
        return command

    return decorate


def _parameters(settings: type) -> list[inspect.Parameter]:
    hints = get_type_hints(settings, include_extras=True)
    repeated = _repeated(settings)
    found: list[inspect.Parameter] = []
    for field in dataclasses.fields(settings):
        kind, *extras = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else [None]
        for extra in extras:
            if isinstance(extra, Option | Argument):
                default = None if field.name in repeated else field.default
                kind = list[str] | None if field.name in repeated else kind
                if default is dataclasses.MISSING:
                    default = inspect.Parameter.empty
                found.append(_parameter(field.name, kind, default, extra))
    return found


def _parameter(name: str, kind: Any, default: Any, extra: Option | Argument) -> inspect.Parameter:
    if isinstance(extra, Argument):
        info: Any = typer.Argument(help=extra.help, metavar=extra.metavar)
    else:
        long = f"--{(extra.name or name).replace('_', '-')}"
        # What is on unless it is switched off has a name for both.
        names = [f"{long}/--no-{long[2:]}" if default is True else long, *([extra.short] if extra.short else [])]
        metavar = "" if kind is bool else extra.metavar
        info = typer.Option(*names, help=extra.help, metavar=metavar, rich_help_panel=extra.panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _repeated(settings: type) -> set[str]:
    """The fields whose options may be given several times: tuples of texts."""
    hints = get_type_hints(settings)
    return {field.name for field in dataclasses.fields(settings) if hints[field.name] == tuple[str, ...]}
