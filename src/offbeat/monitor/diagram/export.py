"""A run for other tools: a ShiViz log, a Chrome trace, lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from offbeat.errors import OutputError, UsageError, did_you_mean
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.chrome_trace import chrome_trace
from offbeat.protocols.causality.histories import json_lines
from offbeat.protocols.causality.shiviz import write

ENDINGS: Final[Mapping[str, str]] = {
    ".shiviz": "shiviz",
    ".log": "shiviz",
    ".jsonl": "jsonl",
    ".perfetto": "perfetto",
    ".pftrace": "perfetto",
    ".json": "trace",
}
"""Which kind a name's ending stands for."""
KINDS: Final = ("shiviz", "perfetto", "trace", "jsonl")
"""`perfetto` and `trace` are both a Chrome trace in JSON, which Perfetto and chrome://tracing open."""
_EVERYTHING: Final = 10**9


def kind_of(path: Path, kind: str | None = None) -> str:
    """What to export as: the kind that is asked for, or what the name ends with."""
    if kind is not None and kind not in KINDS:
        raise UsageError(f"nothing is exported as {kind!r}.{did_you_mean(kind, KINDS)}")
    found = kind or ENDINGS.get(path.suffix.lower())
    if found is None:
        raise UsageError(
            f"{path} does not say as what to export: let it end in {', '.join(ENDINGS)}, or add --as {'|'.join(KINDS)}."
        )
    return found


def export(scene: Scene, path: Path, kind: str | None = None) -> str:
    """Write a run for another tool; answers as which kind."""
    found = kind_of(path, kind)
    try:
        path.write_bytes(exported(scene, found))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}. Give another place.") from error
    return found


def exported(scene: Scene, kind: str) -> bytes:
    """What an export holds."""
    if kind == "shiviz":
        text = write(scene.run)
    elif kind == "jsonl":
        text = "".join(f"{line}\n" for line in json_lines(scene.run))
    else:
        text = json.dumps(chrome_trace(scene.diagram(shapes=_EVERYTHING))) + "\n"
    return text.encode()
