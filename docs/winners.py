"""Write docs/winners.md from real comparisons: four setups, and the first strategy in each. Needs root for hosts."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import offbeat
from offbeat.league import League
from offbeat.league.report import problems as problems_of
from offbeat.league.report._text import full_row
from offbeat.run.drive import WARM
from offbeat.runtime.launch import Launcher

HEAD = """# Where each strategy wins

Four setups, one comparison each, made by `python docs/winners.py`: {seeds} seeds, untuned learning rates
(`--tune none`), 2 workers on a machine with 2 cores. [compare.md](compare.md) explains the columns. A strategy that
comes first in none of them may still be useful, but nothing here shows it.
"""
SEEDS = 3
COLUMNS = ("strategy", "to target, s", "vs ddp", "reached", "steps", "sent, MB")


@dataclass(frozen=True)
class Setup:
    """A task, and the conditions it is trained under."""

    title: str
    words: str
    strategies: tuple[str, ...]
    task: str = "offbeat.tasks.digits"
    disturb: tuple[str, ...] = ()
    rate: str | None = None
    """Link rate between two hosts; None means one machine."""


WHOLE = ("allreduce", "zero1", "local(8)", "allreduce + accumulate(2)")
SERVERS = ("server", "server(consistency=ssp(3))", "server(consistency=asp)", "downpour", "elastic")
SMALL = tuple(f"allreduce + {name}" for name in ("half", "quantize(8)", "sign", "topk(0.05)", "lowrank(4)"))
SETUPS = (
    Setup(
        "One machine, no faults",
        "Exchanges go through shared memory and cost little.",
        (*WHOLE, *SERVERS, "hogwild", "gossip"),
    ),
    Setup("Slow links", "Two hosts, 20 Mbit/s each.", (*WHOLE, *SERVERS, "gossip", *SMALL), rate="20Mbit"),
    Setup(
        "A worker dies",
        "Worker 1 is killed at step 20.",
        ("allreduce", "local(8)", *SERVERS, "hogwild"),
        disturb=("worker 1: kill at step 20",),
    ),
    Setup(
        "Sparse logistic regression",
        "Each example touches only a few of many parameters.",
        ("allreduce", "local(8)", "server(consistency=asp)", "downpour", "hogwild"),
        task="offbeat.tasks.sparse",
    ),
)  # fmt: skip


def compared(setup: Setup, launcher: Launcher, out: Path) -> League:
    """Run the comparison of one setup."""
    hosts = None if setup.rate is None else offbeat.Hosts.alike(2, rate=setup.rate)
    return offbeat.compare(
        setup.task,
        setup.strategies,
        workers=None if hosts else 2,
        hosts=hosts,
        seeds=SEEDS,
        tune=None,
        disturb=setup.disturb,
        out=out,
        launcher=launcher,
    )


def section(setup: Setup, comparison: League) -> str:
    """A section of the page."""
    lines = [f"## {setup.title}", "", setup.words, "", *(f"{words}  " for words in comparison.outcome.words), ""]
    lines += [
        "| strategy | to target, s | vs ddp | reached | steps | sent, MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in comparison.rows:
        row_cells = full_row(comparison, row)
        lines.append(f"| {' | '.join(row_cells[name] for name in COLUMNS)} |")
    problems = dict.fromkeys(words.partition(" Its log")[0] for words in problems_of(comparison))
    lines += ["", *(f"- {words}" for words in problems)]
    return "\n".join(lines).rstrip() + "\n"


def sections_of(page: Path) -> dict[str, str]:
    """Sections of the current page, by title."""
    sections = page.read_text().split("\n## ")[1:] if page.exists() else []
    return {section.partition("\n")[0]: f"## {section.rstrip()}\n" for section in sections}


def main() -> None:
    """Run the setups named on the command line, or all of them; rewrite the page after each."""
    page = Path(__file__).with_suffix(".md")
    sections = sections_of(page)
    with tempfile.TemporaryDirectory() as folder, Launcher((*WARM, "offbeat.tasks.sparse")) as launcher:
        for setup in SETUPS:
            if sys.argv[1:] and setup.title not in sys.argv[1:]:
                continue
            comparison = compared(setup, launcher, Path(folder))
            print(setup.title, "->", *comparison.outcome.words, sep="\n  ", flush=True)
            sections[setup.title] = section(setup, comparison)
            written = [sections[known.title] for known in SETUPS if known.title in sections]
            page.write_text("\n".join([HEAD.format(seeds=SEEDS), *written]))


if __name__ == "__main__":
    sys.exit(main())
