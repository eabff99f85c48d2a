"""Options that were renamed: the old name works for one release, with a warning. Delete this module with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import typer

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "run": {"--watch": "--monitor"},
    "compare": {"--output": "--report"},
    "explain": {"--check": "--verify-checkpoint", "--draw": "--picture"},
    "batch-size": {"--check": "--per-example"},
    "draw": {"--out": "--picture"},
    "bench collectives": {"--hosts": "--host-count", "--out": "--report"},
    "bench server": {"--rule": "--consistency"},
}
_SHAPE: Final = re.compile(r"\s*(\d{1,5})\s*x\s*(\d{1,5})\s*")


def respelled(words: Sequence[str]) -> list[str]:
    """The words of a command line with the new names of options; old ones are warned of on stderr."""
    end = words.index("--") if "--" in words else len(words)
    own, rest = list(words[:end]), words[end:]
    renamed = RENAMED.get(" ".join(own[:2])) or RENAMED.get(own[0] if own else "", {})
    for place, word in enumerate(own):
        old, equals, value = word.partition("=")
        if old in renamed:
            _warn(old, renamed[old])
            own[place] = f"{renamed[old]}{equals}{value}"
    return [*(_shape(own) if own[:1] == ["draw"] else own), *rest]


def _shape(words: list[str]) -> list[str]:
    """`draw --hosts 2x4` is now `--workers 8 --per-host 4`."""
    for place, word in enumerate(words):
        old, equals, value = word.partition("=")
        length = 1 if equals else 2
        shape = _SHAPE.fullmatch(value or "".join(words[place + 1 : place + 2])) if old == "--hosts" else None
        if shape is not None:
            _warn("--hosts HxW", "--workers N --per-host W")
            count = ["--workers", str(int(shape[1]) * int(shape[2]))]
            others = [*words[:place], *words[place + length :]]
            given = any(other.partition("=")[0] in ("--workers", "-w") for other in others)
            return [*others, *([] if given else count), "--per-host", shape[2]]
    return words


def _warn(old: str, new: str) -> None:
    typer.echo(f"warning: {old} is now {new}; the old name goes away with the next release.", err=True)
