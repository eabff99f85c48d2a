"""A run's page as one self-contained HTML file that opens from disk and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

import msgspec

from offbeat.monitor.page.run_view import RunView

STYLE: Final = "page.css"
SCRIPTS: Final = ("common.js", "charts.js", "lanes.js", "runs.js", "rounds.js", "page.js")
"""In the order in which they run."""
ASSETS: Final = (STYLE, *SCRIPTS, "icon.svg")  # Everything that the page loads.
MOST: Final = 400_000  # Maximum number of intervals in the file; beyond that, short ones are merged.
FINEST: Final = 8192  # Resolution of merged intervals, in pixels over the whole run.


def exported(run: RunView) -> str:
    """The page with its data inside."""
    lanes = run.lanes()
    table = lanes.intervals if len(lanes.intervals) <= MOST else lanes.window(lanes.start, lanes.now, FINEST)
    packed = base64.b64encode(lanes.packed(table, lanes.start, lanes.now)).decode()
    data = {"run": run.summary() | {"folder": ""}, "lanes": packed}
    style, script = asset(STYLE), "\n".join(map(asset, SCRIPTS))
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:"
    # In a script element, only `<` could end the data or open a comment.
    held = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    charset = '<meta charset="utf-8">'
    replacements = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<link rel="stylesheet" href="static/{STYLE}">': f"<style>{style}</style>",
        '<link rel="icon" href="static/icon.svg">': '<link rel="icon" href="data:,">',
        "\n".join(f'<script src="static/{name}"></script>' for name in SCRIPTS): (
            f'<script type="application/json" id="held">{held}</script>\n<script>{script}</script>'
        ),
    }
    page = asset("page.html")
    for old, new in replacements.items():
        page = page.replace(old, new, 1)
    return page


def asset(name: str) -> str:
    """The text of one of the page's files."""
    return (files("offbeat.monitor.page") / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
