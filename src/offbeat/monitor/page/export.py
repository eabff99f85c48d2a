"""A run's page as one file of HTML that holds everything: it opens from disk, and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any, Final

import msgspec

from offbeat.monitor.page.run_view import RunView

STYLE: Final = "page.css"
SCRIPTS: Final = ("common.js", "charts.js", "lanes.js", "runs.js", "page.js")
"""In the order in which they are run."""
ASSETS: Final = (STYLE, *SCRIPTS, "icon.svg")
"""All that the page loads."""
MOST: Final = 400_000
"""Intervals that are put into the file; beyond that, short ones are put together."""
FINEST: Final = 8192
"""How finely, in pixels over the whole run."""


def exported(run: RunView) -> str:
    """The page with its data inside."""
    lanes = run.lanes()
    some = lanes.intervals if len(lanes.intervals) <= MOST else lanes.window(lanes.start, lanes.now, FINEST)
    data: dict[str, Any] = {
        "run": run.told() | {"folder": ""},
        "lanes": base64.b64encode(lanes.packed(some, lanes.start, lanes.now)).decode(),
    }
    style = _text(STYLE)
    script = "\n".join(map(_text, SCRIPTS))
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:"
    # In a script element, only `<` could end the data or open a comment.
    held = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
    ]
    page = _text("page.html")
    page = page.replace('<meta charset="utf-8">', "\n".join(head), 1)
    page = page.replace(f'<link rel="stylesheet" href="static/{STYLE}">', f"<style>{style}</style>", 1)
    page = page.replace('<link rel="icon" href="static/icon.svg">', '<link rel="icon" href="data:,">', 1)
    tags = "\n".join(f'<script src="static/{name}"></script>' for name in SCRIPTS)
    inside = f'<script type="application/json" id="held">{held}</script>\n<script>{script}</script>'
    return page.replace(tags, inside, 1)


def _text(name: str) -> str:
    return (files("offbeat.monitor.page") / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
