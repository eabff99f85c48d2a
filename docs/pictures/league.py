"""Take league.png: the page of a comparison on two hosts with 20 Mbit/s links, in Chromium. Needs root."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

import offbeat
from offbeat.league.report import page, table

STRATEGIES = ("local({4,16})", "allreduce + quantize(8)", "hogwild")


def main() -> None:
    """Run the comparison, print its table, and take a picture of its page."""
    with tempfile.TemporaryDirectory() as folder:
        comparison = offbeat.compare(
            "offbeat.tasks.digits", STRATEGIES, hosts=offbeat.Hosts.alike(2, rate="20Mbit"), seeds=5, out=Path(folder)
        )
        Console(width=100).print(table(comparison))
        print(*comparison.outcome.words, sep="\n")
        shown = Path(folder) / "league.html"
        shown.write_text(page(comparison))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1280, "height": 1400})
            tab.goto(shown.as_uri())
            tab.screenshot(path=str(Path(__file__).with_suffix(".png")))
            browser.close()


if __name__ == "__main__":
    sys.exit(main())
