"""A comparison as one HTML file that loads nothing: verdict, table, charts, and what is needed to repeat it."""

from __future__ import annotations

import math
from html import escape

from offbeat.league._contestants import EntryReason
from offbeat.league._league import League
from offbeat.league.report._svg import COLORS, Dot, PlottedLine, bars, curves, dots
from offbeat.league.report._text import fine_print, full_row, problems, provenance
from offbeat.runtime.run.settings import Target

KIND_COLORS = {
    "compute": "#059669",
    "communicate": "#f59e0b",
    "wait": "#dc2626",
    "bubble": "#f472b6",
    "input": "#0891b2",
    "evaluate": "#2563eb",
    "other": "#94a3b8",
}
_STYLE = """
:root{color-scheme:light dark;--ink:#0f172a;--soft:#64748b;--line:#e2e8f0;--back:#fff;--win:#ecfdf5}
@media(prefers-color-scheme:dark){:root{--ink:#e2e8f0;--soft:#94a3b8;--line:#334155;--back:#0f172a;--win:#064e3b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1240px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.45rem;margin:0 0 .2rem}h2{font-size:1.05rem;margin:1.6rem 0 .3rem}
.verdict{border-left:4px solid #059669;padding:.3rem 1rem;margin:1rem 0}.verdict p{margin:.25rem 0}
.verdict p:first-child{font-size:1.1rem;font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.82rem}
th,td{padding:.3rem .4rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.won{background:var(--win);font-weight:600}tr.aside{color:var(--soft)}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1.2rem}
figure{margin:0}figcaption{font-weight:600}figcaption small,.tag{font-weight:400;color:var(--soft)}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}svg .name{fill:var(--ink)}
.grid{stroke:var(--line)}.target{stroke:#059669;stroke-dasharray:5 4}.edge{
fill:none;stroke:var(--soft);stroke-dasharray:3 3}
.legend{font-size:.84rem;margin:.4rem 0}.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.35em}
ul{padding-left:1.2rem}li{margin:.2rem 0}code{font-size:.85em;overflow-wrap:anywhere}
"""


def page(league: League) -> str:
    """The whole file."""
    colors = {row.name: COLORS[number % len(COLORS)] for number, row in enumerate(league.rows)}
    name = escape(league.subject)
    verdict = "".join(f"<p>{escape(words)}</p>" for words in league.outcome.words)
    notes = [*fine_print(league), *problems(league)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Comparison on {name}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Which strategy is fastest to the target: {name}</h1>"
        f'<div class="tag">{league.asked["workers"]} workers, target {escape(str(league.target))}, '
        f"{len(league.seeds)} seeds. Every figure is measured.</div>"
        f'<div class="verdict">{verdict}</div>{_table(league)}{_legend(colors)}'
        f'<div class="pictures">{_charts(league, colors)}</div>'
        f"<h2>How it was measured</h2><ul>{''.join(f'<li>{escape(words)}</li>' for words in notes)}</ul>"
        f"<h2>To repeat it</h2><ul>{''.join(f'<li>{_coded(words)}</li>' for words in provenance(league))}</ul>"
        "</body></html>\n"
    )


def _coded(words: str) -> str:
    pieces = escape(words).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


def _table(league: League) -> str:
    rows: list[str] = []
    for row in league.rows:
        style = "won" if row.name == league.winner else "" if row.part.eligible else "aside"
        filled = "".join(f"<td>{escape(value)}</td>" for value in full_row(league, row).values())
        rows.append(f'<tr class="{style}">{filled}</tr>')
    head = "".join(f"<th>{escape(heading)}</th>" for heading in full_row(league, league.rows[0]))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _legend(colors: dict[str, str]) -> str:
    names = "".join(f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in colors.items())
    return f'<div class="legend">{names}</div>'


def _figure(title: str, words: str, chart: str, legend: str = "") -> str:
    caption = f"{escape(title)} <small>(measured) {escape(words)}</small>"
    return f"<div><figure><figcaption>{caption}</figcaption>{chart}</figure>{legend}</div>"


def _charts(league: League, colors: dict[str, str]) -> str:
    level = None if league.target is None else Target.parse(league.target).value
    spent = [(row.name, row.seconds_by_kind) for row in league.rows if row.seconds_by_kind]
    times = curves(_curves(league, colors, 1.0, "seconds"), "training time, s", "score", level)
    sent = curves(_curves(league, colors, 1e6, "bytes_sent"), "sent, MB", "score", level)
    costs = dots(_dots(league, colors), "seconds to target", "core-seconds")
    kinds = bars(spent, KIND_COLORS, "seconds")
    near = "nearest to the corner is cheapest in both; joined: no other strategy is better in both"
    return (
        _figure("Score against time", "thick: the median seed, thin: the others", times)
        + _figure("Score against bytes", "payload of all workers", sent)
        + _figure("Where the time went", "a typical run of each", kinds, _legend(KIND_COLORS))
        + _figure("Time and cores", near, costs)
    )


def _curves(league: League, colors: dict[str, str], unit: float, of: str) -> list[PlottedLine]:
    lines: list[PlottedLine] = []
    for row in league.rows:
        if of == "bytes_sent" and row.part is EntryReason.single:
            continue
        own = [entry for entry in league.entries if not entry.tuning and entry.name == row.name and entry.curve]
        own = sorted((entry for entry in own if entry.seed in league.seeds), key=lambda entry: entry.arrival)
        for number, entry in enumerate(own):
            points = [(getattr(point, of) / unit, point.score) for point in entry.curve]
            name, faint = f"{row.name}, seed {entry.seed}", number != len(own) // 2
            lines.append(PlottedLine(name, points, colors[row.name], faint))
    return sorted(lines, key=lambda line: not line.faint)


def _dots(league: League, colors: dict[str, str]) -> list[Dot]:
    """One for each row; on the edge if no other row needs less time and less work."""
    known = {row.name: (row.time.median, row.core_seconds) for row in league.rows if math.isfinite(row.time.median)}
    costs = {name: (time, work) for name, (time, work) in known.items() if work is not None}
    return [
        Dot(name, x, y, colors[name], not any(a <= x and b <= y for other, (a, b) in costs.items() if other != name))
        for name, (x, y) in costs.items()
    ]
