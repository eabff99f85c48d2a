"""Writes docs/leagues.md from real leagues: four set-ups, and who was first in each. Needs root for hosts."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import offbeat
from offbeat.league import League
from offbeat.league.report import _cells as cells
from offbeat.run.drive import WARM
from offbeat.runtime.launch import Launcher

HEAD = """# Where each strategy wins

Four set-ups, one league each, made by `python docs/leagues.py`: {seeds} seeds, learning rates as they are
(`--tune none`), 2 workers on a machine of 2 cores. [compare.md](compare.md) says what the columns mean. A strategy that
is first in none of them may have its use, but nothing here shows it.
"""
SEEDS = 3
COLUMNS = ("strategy", "to target, s", "vs ddp", "reached", "steps", "sent, MB")


@dataclass(frozen=True)
class Setup:
    """What is learned, and under which circumstances."""

    title: str
    words: str
    strategies: tuple[str, ...]
    task: str = "offbeat.tasks.digits"
    disturb: tuple[str, ...] = ()
    rate: str | None = None
    """Of the links between two hosts; None: one machine."""


WHOLE = ("allreduce", "zero1", "local(8)", "allreduce + accumulate(2)")
SERVERS = ("server", "server(consistency=ssp(3))", "server(consistency=asp)", "downpour", "elastic")
SMALL = tuple(f"allreduce + {name}" for name in ("half", "quantize(8)", "sign", "topk(0.05)", "lowrank(4)"))
SETUPS = (
    Setup(
        "One machine, nothing disturbed",
        "Exchanges through shared memory cost little.",
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
        "Every example touches few of many parameters.",
        ("allreduce", "local(8)", "server(consistency=asp)", "downpour", "hogwild"),
        task="offbeat.tasks.sparse",
    ),
)  # fmt: skip


def run(setup: Setup, launcher: Launcher, out: Path) -> League:
    """One league."""
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


def told(setup: Setup, league: League) -> str:
    """A section of the page."""
    lines = [f"## {setup.title}", "", setup.words, "", *(f"{words}  " for words in league.outcome.words), ""]
    lines += [
        "| strategy | seconds to the target | times ddp's | reached | steps | sent, MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in league.rows:
        found = cells.full_row(league, row)
        lines.append(f"| {' | '.join(found[name] for name in COLUMNS)} |")
    problems = dict.fromkeys(words.partition(" Its log")[0] for words in cells.problems(league))
    lines += ["", *(f"- {words}" for words in problems)]
    return "\n".join(lines).rstrip() + "\n"


def kept(page: Path) -> dict[str, str]:
    """The sections of the page as it is, by their titles."""
    sections = page.read_text().split("\n## ")[1:] if page.exists() else []
    return {section.partition("\n")[0]: f"## {section.rstrip()}\n" for section in sections}


def main() -> None:
    """Run those whose titles are given, or all; the page is written anew after each."""
    page = Path(__file__).with_suffix(".md")
    sections = kept(page)
    with tempfile.TemporaryDirectory() as folder, Launcher((*WARM, "offbeat.tasks.sparse")) as launcher:
        for setup in SETUPS:
            if sys.argv[1:] and setup.title not in sys.argv[1:]:
                continue
            league = run(setup, launcher, Path(folder))
            print(setup.title, "->", *league.outcome.words, sep="\n  ", flush=True)
            sections[setup.title] = told(setup, league)
            told_so_far = [sections[one.title] for one in SETUPS if one.title in sections]
            page.write_text("\n".join([HEAD.format(seeds=SEEDS), *told_so_far]))


if __name__ == "__main__":
    sys.exit(main())
